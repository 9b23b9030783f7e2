"""Scaling laws of memory and kernels with the batch size, from two recordings."""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.memory.stream.affine import AffineStream
from trainfit.results.runs.recording import Recording
from trainfit.speed.model.scaling import WorkLaw
from trainfit.speed.model.work import Work

#: A recording at each of two batch sizes.
Pair = Sequence[tuple[int, Recording]]


def memory_law(pair: Pair) -> AffineStream:
    """Allocations, from as many steps as both runs made; raises ``affine.NotAffineError``."""
    (one, first), (other, second) = _of_equal_length(pair)
    return AffineStream.between(first, one, second, other)


def work_law(pair: Pair) -> WorkLaw:
    """Kernels of the typical step of both runs; raises ``scaling.NotAffineError``."""
    (one, first), (other, second) = _of_equal_length(pair)
    return WorkLaw.between(steady_work(first), one, steady_work(second), other)


def steady_work(recording: Recording) -> Work:
    """What the step launches that stands for all others: the typical one after the first."""
    return Work.of_steady_step(recording)


def _of_equal_length(pair: Pair) -> list[tuple[int, Recording]]:
    steps = min(recording.steps for _, recording in pair)
    return [(batch, recording.first_steps(steps)) for batch, recording in pair]
