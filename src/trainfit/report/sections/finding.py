"""Findings of any verb: a title, why, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trainfit.report.blocks import WHOLE, Item, Items, Tone, items, rows
from trainfit.results.findings import Finding, Severity

_TONES: Final[dict[Severity, Tone]] = {"critical": "bad", "warning": "warn", "info": "plain"}
#: How much more dispensable the others are.
_LESS: Final[dict[Severity, int]] = {"critical": 0, "warning": 4, "info": 34}


def finding_items(findings: Sequence[Finding], *, detail: int) -> Items | None:
    """The findings as they come; a screen has up to two fixes of those it has room for, ``detail``
    of the critical ones."""
    return items([_item(each, detail + _LESS[each.severity]) for each in findings], "finding")


def _item(finding: Finding, detail: int) -> Item:
    fixes = [
        ("fix" if not number else "or", _fix(fix.action, fix.cost), WHOLE * (number > 1))
        for number, fix in enumerate(finding.fixes)
    ]
    place = ("at", str(finding.place) if finding.place is not None else "", detail)
    return Item(
        finding.title,
        tone=_TONES[finding.severity],
        rows=rows(("cause", finding.cause, detail), place, *fixes),
        detail=detail,
    )


def _fix(action: str, cost: str) -> str:
    return f"{action} ({cost})" if cost else action
