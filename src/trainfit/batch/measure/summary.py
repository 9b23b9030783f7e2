"""What was measured, from records and how they were made, as a result."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Final

import numpy as np

from trainfit.batch.measure.estimate import LEAST_STEPS, Estimate, Floats, Weights, estimate
from trainfit.results.batch.noise import Interval, Method, ModuleNoise, Moment, NoiseResult

#: Measured steps of one moment of the history.
_MOMENT: Final = 64
_INFINITE: Final = "a gradient had NaN or infinity (AMP skips such steps, too)"


@dataclasses.dataclass
class Log:
    """How the records were made: ``weights`` and ``steps`` by their place in the ring.

    ``accumulation`` is that of the last step, 0 before the first; ``accumulations`` are those of
    the records.
    """

    groups: tuple[str, ...]
    group_sizes: tuple[int, ...]
    batch_size: int
    ranks: int
    window: int
    accumulation: int = 0
    steps_seen: int = 0
    committed: int = 0
    method: Method = "none"
    fault: str = ""
    weights: dict[int, Weights] = dataclasses.field(default_factory=dict)
    accumulations: dict[int, int] = dataclasses.field(default_factory=dict)
    steps: dict[int, int] = dataclasses.field(default_factory=dict)
    steps_left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def usual_accumulation(self) -> int:
        """That of most records: the last step of an epoch may have fewer micro-batches."""
        if not self.accumulations:
            return max(1, self.accumulation)
        return statistics.mode(self.accumulations.values())

    @property
    def slot(self) -> int:
        """Where the next record goes."""
        return self.committed % self.window

    def commit(self, method: Method, weights: Weights) -> None:
        """The record at :attr:`slot` counts."""
        if method != self.method:  # the loop has changed: what was before is another measurement
            self.weights.clear()
            self.accumulations.clear()
            self.steps.clear()
        self.method = method
        self.weights[self.slot] = weights
        self.accumulations[self.slot] = max(1, self.accumulation)
        self.steps[self.slot] = self.steps_seen
        self.committed += 1

    def leave_out(self, reason: str) -> None:
        """A measured step does not count."""
        self.steps_left_out[reason] = self.steps_left_out.get(reason, 0) + 1

    def say(self, note: str) -> None:
        """Add a note, once."""
        if note and note not in self.notes:
            self.notes.append(note)


def summarize(log: Log, records: Floats | None, cost_share: float | None) -> NoiseResult:
    """``records`` has the shape (window, 2, groups); ``None``: nothing was measured."""
    squares, traces, steps, infinite = _solved(log, _ordered(log), records)
    whole = estimate(squares.sum(axis=1), traces.sum(axis=1))
    left_out = dict(log.steps_left_out)
    if infinite:
        left_out[_INFINITE] = infinite
    return NoiseResult(
        method=log.method,
        micro_batch=log.batch_size,
        accumulation=log.usual_accumulation,
        ranks=log.ranks,
        steps_seen=log.steps_seen,
        steps_used=len(steps),
        noise=whole.noise if whole is not None else None,
        gradient_square=whole.square if whole is not None else None,
        trace=whole.trace if whole is not None else None,
        modules=_modules(log, squares, traces) if whole is not None else (),
        history=_history(steps, squares.sum(axis=1), traces.sum(axis=1)),
        steps_left_out=left_out,
        left_out=tuple(f"{name}: {reason}" for name, reason in log.left_out.items()),
        cost_share=cost_share,
        cannot_tell=_cannot_tell(log, whole, len(steps)),
        notes=(
            *log.notes,
            *([f"measured only until this: {log.fault}"] if log.fault and steps else ()),
        ),
    )


def of_steps(log: Log, records: Floats | None) -> tuple[Floats, Floats]:
    """|G|² and tr Σ of each step that counts, in order."""
    squares, traces, _, _ = _solved(log, _ordered(log), records)
    return squares.sum(axis=1), traces.sum(axis=1)


def _ordered(log: Log) -> list[int]:
    """Places in the ring, the oldest step first."""
    return sorted(log.weights, key=lambda slot: (log.steps[slot], slot))


def _solved(
    log: Log, order: Sequence[int], records: Floats | None
) -> tuple[Floats, Floats, list[int], int]:
    """|G|² and tr Σ by step and group, the steps, and how many were not finite."""
    squares, traces, steps, infinite = [], [], list[int](), 0
    for slot in order if records is not None else ():
        assert records is not None
        if not np.isfinite(records[slot]).all():
            infinite += 1
            continue
        square, trace = log.weights[slot].solve(records[slot, 0], records[slot, 1])
        squares.append(square)
        traces.append(trace)
        steps.append(log.steps[slot])
    shape = (len(steps), len(log.groups))
    return np.reshape(squares, shape), np.reshape(traces, shape), steps, infinite


def _modules(log: Log, squares: Floats, traces: Floats) -> tuple[ModuleNoise, ...]:
    total = float(traces.sum())
    found = []
    for number, (name, size) in enumerate(zip(log.groups, log.group_sizes, strict=True)):
        part = float(traces[:, number].sum())
        if part == 0 and not squares[:, number].any():
            continue  # no gradient, or none that is measured
        one = estimate(squares[:, number], traces[:, number])
        share = part / total if total > 0 else None
        found.append(ModuleNoise(name, size, one.noise if one is not None else None, share))
    return tuple(found)


def _history(steps: Sequence[int], squares: Floats, traces: Floats) -> tuple[Moment, ...]:
    found = []
    for begin in range(0, len(steps) - _MOMENT + 1, _MOMENT):
        part = slice(begin, begin + _MOMENT)
        one = estimate(squares[part], traces[part])
        assert one is not None
        found.append(Moment(steps[begin + _MOMENT // 2], one.noise))
    return tuple(found)


def _cannot_tell(log: Log, found: Estimate | None, used: int) -> str:
    if log.fault and not used:
        return log.fault
    if found is not None:
        return _unbounded(found.noise)
    if log.steps_seen == 0 and not used:
        return "no step of a torch.optim optimizer of this model was seen"
    if log.accumulation * log.ranks <= 1 and log.method == "none":
        return (
            "a step has one micro-batch on one device, thus one batch size; accumulate, call "
            "NoiseScale.measure in the loop, or give per_example=True"
        )
    return f"{used} measured steps, {LEAST_STEPS} are needed; train on"


def _unbounded(noise: Interval) -> str:
    if noise.high is not None:
        return ""
    return (
        "the noise hides the gradient, so the noise scale has no upper bound; "
        "measure more steps, or with a larger effective batch"
    )
