"""Was that an evaluation? Told afterwards, of the time since a segment began.

A segment begins where the DataLoader's ``next`` is called, and with each optimizer's step.
"""

from __future__ import annotations

from trainfit.watch.recorder.step import phases as ph
from trainfit.watch.recorder.step.batches import Counts
from trainfit.watch.recorder.step.gpu_step import GpuStep
from trainfit.watch.recorder.step.phases import PhaseClock


class Segment:
    """What there was when a segment began, and what has happened in it since.

    ``trains``: a backward pass, or a call of a model in training mode with gradients;
    ``evaluates``: it goes on from a call without gradients in evaluation mode; ``calls``: a model
    was called otherwise.
    """

    __slots__ = ("_counts", "_seconds", "_since", "_spans", "calls", "evaluates", "trains")

    def __init__(self, phases: PhaseClock, counts: Counts, gpu: GpuStep | None) -> None:
        self._seconds = list(phases.seconds)
        self._since = phases.since
        self._counts = counts.copy()
        self._spans = 0 if gpu is None else gpu.spans
        self.trains = self.evaluates = self.calls = False

    def fold(self, phases: PhaseClock, gpu: GpuStep | None) -> Counts:
        """All since it began was evaluation, but for checkpoints; returns the counts as they were.
        To be called between phases, after ``phases.update()``."""
        before, after = self._seconds, phases.seconds
        saved = after[ph.CHECKPOINT] - before[ph.CHECKPOINT]
        phases.seconds = list(before)
        phases.seconds[ph.CHECKPOINT] += saved
        phases.seconds[ph.EVALUATION] += phases.since - self._since - saved
        if gpu is not None:
            gpu.forget(self._spans)
        return self._counts.copy()
