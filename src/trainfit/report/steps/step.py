"""The composition of an optimizer step as text."""

from __future__ import annotations

from itertools import groupby

from trainfit.results.runs.steps import StepMakeup
from trainfit.results.text import printable


def step_lines(makeup: StepMakeup | None) -> list[str]:
    """One line each, not wrapped: micro-batch × accumulation, and how far the steps differed.

    None where a step is one batch, or where no operation was counted.
    """
    if makeup is None:
        return []
    if makeup.effective_batch is None:
        return [f"samples of an optimizer step: not known; {printable(makeup.why)}"]
    if makeup.accumulation == 1:
        return []
    lines = [
        f"micro-batch {makeup.micro_batch} × accumulation {makeup.accumulation} "
        f"= effective batch {makeup.effective_batch}"
    ]
    if len(set(makeup.per_step)) > 1:
        lines.append(f"micro-batches of the simulated steps: {_runs(makeup.per_step)}")
    return lines


def _runs(values: tuple[int, ...]) -> str:
    """4, 4, 4, 2 as "3 × 4, 2"."""
    lengths = [(value, len(list(same))) for value, same in groupby(values)]
    return ", ".join(f"{times} × {value}" if times > 1 else str(value) for value, times in lengths)
