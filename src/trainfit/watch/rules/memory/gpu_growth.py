"""Allocated memory that grows from step to step: a leak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import thresholds
from trainfit.watch.figures.ledger import growth_per_step, ledger
from trainfit.watch.figures.view import RunView, known
from trainfit.watch.rules.rule import Rule

_MIB: Final = 2**20


def look(run: RunView) -> Iterator[Finding | Unknown]:
    """Of each rank: surely upwards (the whole interval), and by an amount that matters."""
    for view in run.ranks:
        held = known(view.steps["allocated_bytes"])
        if view.header.gpu is None or not len(view.steps):
            continue
        growth, steps = growth_per_step(view), view.steps["step"]
        span = int(steps[-1] - steps[0])
        if growth is None or span < thresholds.GROWTH_STEPS:
            needs = f"{thresholds.GROWTH_STEPS} steps after the warm-up with memory readings"
            yield Unknown("memory_growth", "too few readings of allocated memory", needs)
            continue
        per_step, low, _ = growth
        grown = per_step * span
        least = max(thresholds.GROWTH_BYTES, thresholds.GROWTH_SHARE * float(held.min()))
        if low <= 0 or grown < least:
            continue
        books = ledger(view)
        full = books.out_of_memory_step if books is not None else None
        evidence = [
            Evidence("growth", per_step / _MIB, "MiB/step"),
            Evidence("grown so far", grown / _MIB, "MiB"),
        ]
        evidence += [] if full is None else [Evidence("out of memory at step", full)]
        yield Finding(
            "memory_growth",
            "critical" if full is not None else "warning",
            "Memory of tensors grows with every step",
            tuple(evidence),
            "something keeps tensors of past steps: a loss that is summed up with its graph, "
            "a list of outputs, hooks or caches",
            "keep numbers, not tensors: total += loss.item() or loss.detach(); `trainfit memory` "
            "names the line that allocates what is kept",
            "certain" if grown > 4 * least else "likely",
            rank=view.rank,
        )


RULE: Final = Rule(("memory_growth",), look)
