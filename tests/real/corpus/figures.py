"""The corpus in figures, from stored outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any


def ratios(outcomes: Iterable[Mapping[str, Any]], what: str, unit: str) -> list[float]:
    """``what`` ("first" or the whole "") of the first plan against the bare script's own start,
    in "wall" or "cpu" seconds; families whose bare run failed have none."""
    found = []
    for each in outcomes:
        own = each["bare"][f"{unit}_s"]
        key = f"{what}_{unit}_s" if what else f"{unit}_s"
        took = each["plans"][0].get(key)
        if each["bare"]["found"] and own and took and each["plans"][0]["figures"]:
            found.append(took / own)
    return found


def middle(values: list[float]) -> float:
    """Their median; not a number where there is none."""
    return median(values) if values else float("nan")


def share(flags: Iterable[bool]) -> float:
    """Percent that are true; not a number where there is none."""
    known = list(flags)
    return 100 * sum(known) / len(known) if known else float("nan")


def memory_error(outcome: Mapping[str, Any]) -> float | None:
    """Largest departure of weights, gradients and states from the hand sum, in percent."""
    names = ("weight bytes", "gradient bytes", "state bytes")
    found = [
        abs(_number(check["found"]) / _number(check["wanted"]) - 1) * 100
        for check in outcome["checks"]
        if check["name"].partition(" @")[0] in names
        and check["found"] != "cannot tell"
        and _number(check["wanted"])
    ]
    return max(found, default=None)


def _number(text: str) -> float:
    return float(text.replace(",", ""))
