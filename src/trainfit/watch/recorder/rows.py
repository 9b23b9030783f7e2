"""Rows of steps: kept until the GPU has reached the step's end, then passed on, in order."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from trainfit.results.runs import tables
from trainfit.results.runs.watched import NO_VALUES
from trainfit.watch.recorder import phases as ph
from trainfit.watch.recorder.gpu_step import AllocatorMemory, GpuStep
from trainfit.watch.recorder.phases import Counts, PhaseClock

#: Steps that may wait for the GPU.
_MOST_WAITING: Final = 256
#: A step waits for the GPU this long, or this many times its own length: a run that is killed
#: shall leave its rows, and a GPU that is further behind is not waited for.
_PATIENCE_S: Final = 1.0
_PATIENCE_STEPS: Final = 3.0

_COLUMNS: Final = {name: index for index, name in enumerate(tables.STEPS.names or ())}
_END, _STEP_S, _FLAGS = _COLUMNS["end_s"], _COLUMNS["step_s"], _COLUMNS["flags"]
_LOSS, _SCALE, _NORM = (_COLUMNS[name] for name in ("loss", "loss_scale", "gradient_norm"))

_NO_GPU_TIMES: Final = (math.nan,) * 6

Row = list[Any]


def new_row(
    *,
    step: int,
    end_s: float,
    step_s: float,
    phases: Sequence[float],
    counts: Counts,
    on_gpu: bool,
    cpu_s: float,
    samples: int,
    batches: int,
    memory: AllocatorMemory,
    numbers: tuple[float | None, float, float],
    flags: int,
) -> Row:
    """A step's row, still without what the GPU's events say.

    ``phases`` are seconds by phase, ``numbers`` the loss, its scale and the gradient's norm.
    Copies and waits are not measured without a GPU: there are none.
    """
    if counts.epoch_s is not None:
        flags |= tables.EPOCH_START
    if phases[ph.EVALUATION] > 0:
        flags |= tables.EVALUATION
    if phases[ph.CHECKPOINT] > 0:
        flags |= tables.CHECKPOINT
    loss, scale, norm = numbers
    return [
        step,
        end_s,
        step_s,
        phases[ph.INPUT],
        phases[ph.COPY] if on_gpu else math.nan,
        *phases[ph.FORWARD : ph.SYNC],
        phases[ph.SYNC] if on_gpu else math.nan,
        *phases[ph.CHECKPOINT : ph.COLLECTIVE],
        *_NO_GPU_TIMES,
        cpu_s,
        min(samples, tables.MOST_32),
        min(batches, tables.MOST_16),
        min(counts.queued, tables.MOST_16),
        min(counts.syncs, tables.MOST_32) if on_gpu else -1,
        counts.copied if on_gpu else -1,
        counts.unpinned if on_gpu else -1,
        *memory,
        loss,
        scale,
        norm,
        flags,
    ]


class Sink(Protocol):
    """Who keeps what is found out."""

    def append(self, row: tuple[Any, ...]) -> None: ...
    def event(
        self,
        kind: str,
        *,
        seconds: float | None = None,
        text: str = "",
        values: Mapping[str, float] = NO_VALUES,
    ) -> None: ...
    def training(self) -> None:
        """The first backward pass or optimizer's step."""

    def stepped(self) -> None:
        """The first optimizer's step."""

    def loaders_changed(self) -> None: ...
    def called(self, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        """A module is called to train with what is ``given``, in a step that is recorded in
        detail."""

    def root_called(self, module: torch.nn.Module) -> None:
        """A module is called to train, the first time in a step."""


class StepRows:
    """Rows as lists in the order of :data:`trainfit.results.runs.tables.STEPS`.

    Args:
        append: takes a row that is complete.
        skipped: called with a row whose step turns out, on the GPU, to have been skipped.
    """

    def __init__(
        self, append: Callable[[tuple[Any, ...]], None], skipped: Callable[[Row], None]
    ) -> None:
        self._append, self._skipped = append, skipped
        self._waiting: collections.deque[tuple[Row, GpuStep | None, bool]] = collections.deque()
        self.without_gpu_times = 0
        """Rows that were not waited for."""

    def add(self, row: Row, gpu: GpuStep | None, loss_is_scaled: bool) -> None:
        """The row of a step that is over. The loss of a GPU is multiplied by the loss scale where
        ``loss_is_scaled``, and divided by it again."""
        if gpu is None:
            self._pass_on(row, loss_is_scaled)
            return
        self._waiting.append((row, gpu, loss_is_scaled))
        if len(self._waiting) > _MOST_WAITING:
            self._give_up()

    def add_light(
        self, row: tuple[Any, ...], gpu: GpuStep | None = None, loss_is_scaled: bool = False
    ) -> None:
        """A short row (:mod:`trainfit.watch.recorder.rank_files`), behind those that wait; of
        ``gpu`` it waits for the loss."""
        if self._waiting or gpu is not None:
            self._waiting.append((list(row), gpu, loss_is_scaled))
        else:
            self._append(row)

    def poll(self, now: float) -> None:
        """Pass on what the GPU is done with; ``now`` is in seconds of the run."""
        while self._waiting:
            row, gpu, scaled = self._waiting[0]
            if gpu is None:
                self._waiting.popleft()
                self._append(tuple(row))
                continue
            if not gpu.reached:
                patience = max(_PATIENCE_S, _PATIENCE_STEPS * row[_STEP_S])
                if not now - row[_END] > patience:
                    return
                self._give_up()
                continue
            self._waiting.popleft()
            if row[-1] & tables.LIGHT:
                self._complete_light(row, gpu, scaled)
                continue
            self._complete(row, gpu)
            self._pass_on(row, scaled)

    def drain(self) -> None:
        """Pass on everything, whatever the GPU is at: the process ends."""
        self.poll(-math.inf)
        while self._waiting:
            self._give_up()

    def _give_up(self) -> None:
        row, gpu, _ = self._waiting.popleft()
        if gpu is not None:
            gpu.values()  # frees their room
            gpu.release()
            self.without_gpu_times += 1
        self._append(tuple(row))

    def _complete_light(self, row: Row, gpu: GpuStep, scaled: bool) -> None:
        loss = gpu.values().get("loss")
        gpu.release()
        if loss is not None:
            # The scale of this one was not looked at: only whether it is finite is known.
            row[-1] |= tables.loss_flag(loss)
            row[-2] = None if scaled else loss
        self._append(tuple(row))

    def _complete(self, row: Row, gpu: GpuStep) -> None:
        for name, seconds in gpu.seconds().items():
            row[_COLUMNS[name]] = seconds
        if row[_FLAGS] & (tables.EVALUATION | tables.CHECKPOINT):
            # The stream was not empty before the step: it evaluated.
            row[_COLUMNS["gpu_gap_s"]] = math.nan
        values = gpu.values()
        gpu.release()
        row[_LOSS] = values.get("loss", row[_LOSS])
        row[_SCALE] = values.get("scale", row[_SCALE])
        row[_NORM] = values.get("norm", row[_NORM])
        if values.get("found_inf") and not row[_FLAGS] & tables.STEP_SKIPPED:
            row[_FLAGS] |= tables.STEP_SKIPPED
            self._skipped(row)

    def _pass_on(self, row: Row, scaled: bool) -> None:
        loss = row[_LOSS]
        if loss is not None:
            row[_FLAGS] |= tables.loss_flag(loss)
            if scaled and row[_SCALE] > 0:
                loss /= row[_SCALE]
        row[_LOSS] = math.nan if loss is None else tables.float32(loss)
        row[_NORM] = tables.float32(row[_NORM])
        row[_SCALE] = tables.float32(row[_SCALE])
        self._append(tuple(row))


# ---
# Was that an evaluation? Told afterwards, of the time since a segment began.
#
# A segment begins where the DataLoader's ``next`` is called, and with each optimizer's step.


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
