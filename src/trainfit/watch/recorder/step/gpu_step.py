"""The CUDA events of one step, and what they say once the GPU has reached the last."""

from __future__ import annotations

import math
from typing import Any, Final

from trainfit.watch.recorder.step.cuda_events import Device, Kept, Mark
from trainfit.watch.recorder.step.phases import BACKWARD, COPY, FORWARD, OPTIMIZER

#: Phases that have events, and their columns.
PHASE_COLUMNS: Final = {
    COPY: "gpu_copy_s",
    FORWARD: "gpu_forward_s",
    BACKWARD: "gpu_backward_s",
    OPTIMIZER: "gpu_optimizer_s",
}
#: Spans of a step at most: one of thousands of micro-batches is not followed to its end.
_MOST_SPANS: Final = 512


class GpuStep:
    """Spans of the phases on the current stream, from the ``before`` that ended the last step.

    ``numbers`` are the loss and the like, by name, on their way to the host.
    """

    def __init__(self, device: Device, before: Mark | None) -> None:
        self._device = device
        self._before = before
        self._spans: list[tuple[int, Mark, Mark]] = []
        self._open: tuple[int, Mark] | None = None
        self._overflow = False
        self._is_last = False
        self.first: Mark | None = None
        self.end: Mark | None = None
        self.numbers: dict[str, Kept] = {}

    def begin(self, phase: int) -> None:
        """A phase begins; two copies with nothing between are one."""
        if phase not in PHASE_COLUMNS or self._open is not None:
            return
        if len(self._spans) >= _MOST_SPANS:
            self._overflow = True
            return
        if phase == COPY and self._spans and self._spans[-1][0] == COPY:
            self._open = COPY, self._spans[-1][1]
            return
        mark = self._device.mark()
        if mark is not None:
            self.first = self.first or mark
            self._open = phase, mark

    def finish(self, phase: int) -> None:
        """A phase ends."""
        if self._open is None or self._open[0] != phase:
            return
        _, first = self._open
        self._open = None
        if phase == COPY and self._spans and self._spans[-1][1] is first:
            self._device.mark_again(self._spans[-1][2])
        elif (last := self._device.mark()) is not None:
            self._spans.append((phase, first, last))

    @property
    def spans(self) -> int:
        """Spans that are complete."""
        return len(self._spans)

    def forget(self, spans: int) -> None:
        """All spans but the first ``spans`` were an evaluation's."""
        for _, first, last in self._spans[spans:]:
            if first is not self._before:
                self._device.release(first)
            self._device.release(last)
        del self._spans[spans:]
        if not spans and self._open is None:
            self.first = None

    def close(self) -> GpuStep:
        """The step is over: a last event, which the next step (returned) begins with; a phase
        that is open goes on in that."""
        self.end = self._device.mark()
        following = GpuStep(self._device, self.end)
        if self._open is not None and self.end is not None:
            phase, first = self._open
            self._spans.append((phase, first, self.end))
            following._open = phase, self.end
            following.first = self.end
        self._open = None
        return following

    def close_alone(self) -> None:
        """The same, where no phase is open and the next step has no events."""
        self.end = self._device.mark()
        self._is_last = True

    @property
    def reached(self) -> bool:
        """Is the GPU done with the step? Also where there is nothing to wait for."""
        return self.end is None or self._device.reached(self.end)

    def seconds(self) -> dict[str, float]:
        """Columns of the step's row by name; NaN where the events do not tell."""
        names = ("gpu_s", "gpu_gap_s", *PHASE_COLUMNS.values())
        unknown = dict.fromkeys(names, math.nan)
        if self.first is None or self.end is None:
            return unknown
        try:
            found = dict.fromkeys(PHASE_COLUMNS.values(), math.nan if self._overflow else 0.0)
            for phase, first, last in self._spans:
                found[PHASE_COLUMNS[phase]] += self._device.seconds(first, last)
            found["gpu_s"] = self._device.seconds(self.first, self.end)
            gap = math.nan
            if self._before is not None:
                gap = max(0.0, self._device.seconds(self._before, self.first))
            return {**found, "gpu_gap_s": gap}
        except RuntimeError:  # events of two GPUs, or of a stream that is not done
            return unknown

    def values(self) -> dict[str, float]:
        """The numbers; only once the step was :attr:`reached`."""
        return {name: self._device.value(kept) for name, kept in self.numbers.items()}

    def release(self) -> None:
        """Let the events be used again; the last one is the next step's to release, if it has
        any."""
        marks: dict[int, Any] = {id(self._before): self._before, id(self.first): self.first}
        for _, first, last in self._spans:
            marks[id(first)], marks[id(last)] = first, last
        marks.pop(id(self.end), None)
        if self._is_last:
            marks[id(self.end)] = self.end
        for mark in marks.values():
            if mark is not None:
                self._device.release(mark)
