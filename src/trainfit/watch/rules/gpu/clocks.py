"""A GPU that runs below its clock while it is at work: heat, the power limit, clocks that were set.

A GPU that waits for input lowers its clocks by itself: only samples in which it is at work count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.watch.result import Confidence, Evidence, Finding, Unknown
from trainfit.results.watch.tables import Table
from trainfit.watch.figures import thresholds
from trainfit.watch.figures.view import RankView, RunView, known, percentile
from trainfit.watch.rules.rule import Rule, severity

#: Samples of a busy GPU that a verdict needs: two seconds.
_LEAST: Final = 20
_KINDS: Final = ("thermal_throttling", "power_throttling", "clocks_set")


def look(run: RunView) -> Iterator[Finding | Unknown]:
    """Of each rank's GPU."""
    for view in run.ranks:
        if view.header.gpu is None:
            continue
        busy = _at_work(view)
        if len(busy) < _LEAST:
            if len(view.steps):
                reason, needs = _missing(view)
                yield from (Unknown(kind, reason, needs) for kind in _KINDS)
            continue
        yield from _judged(view, busy)


def _missing(view: RankView) -> tuple[str, str]:
    if not len(known(view.gpu["utilization"])):
        return "NVML was not readable", "the NVIDIA driver's NVML in the container"
    return "the GPU was idle in most samples", "a run that keeps the GPU busy"


def _at_work(view: RankView) -> Table:
    table: Table = view.gpu[view.gpu["utilization"] >= thresholds.BUSY_SAMPLE]
    rows: Table = table[table["clock_reasons"] >= 0]
    return rows


def _judged(view: RankView, busy: Table) -> Iterator[Finding]:
    reasons = busy["clock_reasons"]
    found = (
        ("thermal_throttling", thresholds.THERMAL),
        ("power_throttling", thresholds.POWER_CAP),
        ("clocks_set", thresholds.SET_CLOCKS),
    )
    for kind, bits in found:
        slowed = busy[(reasons & bits) != 0]
        if len(slowed) < thresholds.REASON_SHARE * len(busy):
            continue
        loss = _loss(busy, slowed)
        if loss is not None and loss >= thresholds.CLOCK_LOSS:
            yield _finding(kind, view, busy, slowed, loss)
            return  # heat first: a hot GPU meets its power limit, too


def _loss(busy: Table, slowed: Table) -> float | None:
    """Of the clock, in the samples that show the reason: against those that do not, or the
    GPU's largest clock where all do; weighted by how many they are."""
    ours = known(slowed["sm_hz"])
    free = known(busy[~np.isin(busy["time_s"], slowed["time_s"])]["sm_hz"])
    full = known(busy["max_sm_hz"])
    best = float(np.median(free)) if len(free) >= _LEAST else None
    if best is None:
        best = float(full.max()) if len(full) else None
    if best is None or not len(ours) or best <= 0:
        return None
    return max(0.0, 1 - float(ours.mean()) / best) * len(slowed) / len(busy)


def _finding(kind: str, view: RankView, busy: Table, slowed: Table, loss: float) -> Finding:
    evidence = [
        Evidence("clock while slowed", float(known(slowed["sm_hz"]).mean()) / 1e6, "MHz"),
        Evidence("share of busy samples with the reason", len(slowed) / len(busy)),
    ]
    heat = percentile(slowed["temperature_c"], 95)
    if heat is not None:
        evidence.append(Evidence("temperature, 95th percentile", heat, "°C"))
    power = percentile(slowed["power_w"], 50)
    if power is not None:
        evidence.append(Evidence("power, median", power, "W"))
    words = {
        "thermal_throttling": (
            "The GPU lowers its clock because it is hot",
            "cooling does not remove enough heat",
            "improve the airflow, clean the fans, or lower the power limit (nvidia-smi -pl WATTS)",
        ),
        "power_throttling": (
            "The power limit lowers the GPU's clock",
            "the GPU draws as much power as its limit allows",
            "raise the limit where the board allows it (nvidia-smi -q -d POWER shows the range)",
        ),
        "clocks_set": (
            "Clocks were set below what the GPU can do",
            "application clocks or a clock lock (nvidia-smi -ac, -lgc)",
            "reset them: nvidia-smi -rac; nvidia-smi -rgc",
        ),
    }
    title, cause, action = words[kind]
    sure: Confidence = "certain" if len(slowed) > 0.5 * len(busy) else "likely"
    return Finding(
        kind, severity(loss), title, tuple(evidence), cause, action, sure, loss,
        rank=view.rank,
    )  # fmt: skip


RULE: Final = Rule(_KINDS, look)
