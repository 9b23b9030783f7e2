"""The simulated GPU's clock, by the model of a step's time."""

from __future__ import annotations

import dataclasses

import numpy as np

from trainfit.hardware import GpuSpec
from trainfit.simgpu.recording.recorder import Recorder
from trainfit.speed.model.efficiency import FITTED
from trainfit.speed.model.step import Machine, TimedWork
from trainfit.speed.model.timeline import Timeline
from trainfit.speed.model.work import Work


class StepClock:
    """When everything that was submitted so far is done, as :func:`speed.step.step_time` has it:
    kernels in order, each when the CPU has launched it (see :class:`simgpu.clock.Clock`)."""

    def __init__(self, recorder: Recorder, gpu: GpuSpec) -> None:
        self._recorder, self._machine = recorder, Machine(gpu, FITTED)
        self._timeline = Timeline()
        self._ops = self._kernels = 0

    def now(self, stream: int | None = None) -> float:
        """See :class:`simgpu.clock.Clock`; what was launched since the last call is costed now."""
        self._cost()
        return self._timeline.end_s if stream is None else self._timeline.end_of(stream)

    def host(self) -> float:
        """See :class:`simgpu.clock.Clock`."""
        self._cost()
        return self._timeline.cpu_s

    def pause(self, seconds: float) -> None:
        """See :class:`simgpu.clock.Clock`."""
        self._cost()
        self._timeline.pause(seconds)

    def _cost(self) -> None:
        first = self._ops
        table, stream, op, phase = self._recorder.launched(first, self._kernels)
        self._ops += len(phase)
        self._kernels += len(table)
        if not len(phase) and not len(table):
            return
        # A wait that follows no operator belongs to one that has been counted: to the first of
        # these, or (without any) to one that takes nothing.
        own = np.maximum(op - first, 0)
        if not len(phase):
            work, machine = Work(table, stream, own, np.zeros(1, np.int64)), self._idle()
        else:
            work, machine = Work(table, stream, own, phase), self._machine
        TimedWork(work, machine).launch(self._timeline)

    def _idle(self) -> Machine:
        """The same with operators that take no time."""
        host = self._machine.host
        free = dataclasses.replace(host, forward_s=0.0, backward_s=0.0, optimizer_s=0.0)
        return dataclasses.replace(self._machine, host=free)
