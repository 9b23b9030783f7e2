"""The training step that goes on: its phases, its counts, and its row when it is over."""

from __future__ import annotations

import collections
import math
import statistics
import threading
from collections.abc import Callable
from typing import Any, Final

from trainfit.results.runs import tables
from trainfit.watch.recorder import phases as ph
from trainfit.watch.recorder.gpu_step import (
    NO_MEMORY,
    AllocatorMemory,
    Device,
    GpuStep,
    StepNumbers,
)
from trainfit.watch.recorder.job import CalledModels, InputSizes, LoaderRecord
from trainfit.watch.recorder.phases import (
    CollectiveSeconds,
    Counts,
    PhaseClock,
    UsedBatches,
    total,
)
from trainfit.watch.recorder.rows import Row, Segment, Sink, StepRows, new_row

# ---
# Which steps are recorded in detail: all, unless they are so short that recording would slow them.
#
# A step in detail costs the training some 50 to 200 µs, which nobody notices in one of 100 ms. Of
# shorter steps only some are recorded so, the others *lightly*: their length, their samples, their
# loss and how long they waited for a batch. The recorder measures what its own calls cost, and
# after a step in detail lets so much time pass that all of them together stay within a share of the
# time.


#: Share of the training's time that steps in detail may cost.
SHARE: Final = 0.0005
#: The first steps are all recorded in detail: what a script does shows in them.
FIRST: Final = 50
#: Costs whose median is taken: a thread that lost its core in a hook looks expensive.
_REMEMBERED: Final = 15
#: … and more than so many times the median is what others did meanwhile.
_LOST_CORE: Final = 3.0


class Budget:
    """Asked at the end of each step about the next one.

    ``spent_s`` is what recording has cost so far, ``light`` how many steps were light.
    """

    def __init__(self) -> None:
        self._costs: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)
        self._seen = 0
        self._usual = 0.0
        self.due = 0.0
        """When a step is recorded in detail next."""
        self._draw = 1
        self.spent_s = 0.0
        self.light = 0

    def is_light(self, now: float) -> bool:
        """Shall the step that begins at ``now`` be recorded lightly?"""
        return now < self.due

    def looked(self, began: float, cost_s: float) -> None:
        """A step in detail ended that had begun at ``began``, and recording it took so long."""
        self._seen += 1
        self._costs.append(cost_s)
        self._usual = statistics.median(self._costs)
        self.spent_s += min(cost_s, _LOST_CORE * self._usual)
        if self._seen >= FIRST:
            self.due = began + self._usual / SHARE * self._random()

    def looked_lightly(self, cost_s: float) -> None:
        """A light step ended."""
        self.light += 1
        self.spent_s += cost_s if cost_s < self._usual else self._usual

    def share(self, seconds: float) -> float | None:
        """The share of the training's ``seconds`` that recording has cost; ``None``: there was
        none."""
        return self.spent_s / seconds if seconds > 0 else None

    def _random(self) -> float:
        """A random factor from 0.5 to 1.5, so that what a script does every tenth step is not
        always, or never, seen. Python's own generator is the script's."""
        self._draw = self._draw * 1103515245 + 12345 & 0x7FFFFFFF
        return 0.5 + self._draw / 0x7FFFFFFF


#: Seconds between two looks at PyTorch's memory statistics, which cost tens of microseconds.
_MEMORY_S: Final = 0.1
#: … and between two looks at the loss in light steps: on a GPU, whose stream copies it, and on the
#: CPU, where it costs some 3 µs, and what a step computed with is soon gone.
_LOSS_S: Final = 0.1
_LOSS_ON_CPU_S: Final = 0.002


class CurrentStep:
    """What :class:`.step_recorder.StepRecorder` keeps of a step. Arguments as there."""

    def __init__(
        self,
        sink: Sink,
        clock: Callable[[], float],
        origin: float,
        cpu_clock: Callable[[], float],
    ) -> None:
        self._sink, self._origin, self._cpu_clock = sink, origin, cpu_clock
        self.phases = PhaseClock(clock)
        self.rows = StepRows(sink.append, self._skipped_on_gpu)
        self.device: Device | None = None
        self.count = 0
        """Rows so far."""
        self.thread = threading.main_thread().ident
        """The thread that trains."""
        self.trains = False
        """Was there a backward pass or an optimizer's step?"""
        self._started: float | None = None
        self._first: float | None = None
        self._cpu = 0.0
        self.models = CalledModels()
        self.inputs = InputSizes()
        self._loader: LoaderRecord | None = None
        self._memory_at = -math.inf
        self._gpu: GpuStep | None = None
        self._span: tuple[int, int] | None = None
        self.compiled = False
        """Was something compiled since the last step?"""
        self.light = False
        """Is this step recorded lightly?"""
        self.budget = Budget()
        self.cost_s = 0.0
        """What recording this step has cost so far."""
        self._waited = 0.0
        self._used = UsedBatches()
        self.collectives = CollectiveSeconds()
        self._backwards = 0
        self._skipped = self._restarted = False
        self._counts = Counts()
        self.numbers = StepNumbers()
        self._loss_due = 0.0
        self._light_gpu: GpuStep | None = None
        self._evaluated_at: str | None = None
        self._begin([])
        self._open_segment()

    # -- what the hooks ask first --------------------------------------------------------------

    @property
    def mine(self) -> bool:
        """Is this the thread that trains?"""
        return threading.get_ident() == self.thread

    @property
    def now(self) -> float:
        """Seconds of the run."""
        return self.phases.clock() - self._origin

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of the first step to the end of the last."""
        return 0.0 if self._first is None or self._started is None else self._started - self._first

    def use(self, device: Device) -> None:
        """The training computes on this GPU from now on."""
        self.device = device
        self._gpu = GpuStep(device, None)

    # -- phases --------------------------------------------------------------------------------

    def enter(self, phase: int) -> int:
        """Begin a phase; what is returned ends it. Negative: it belongs to the one around it, or
        the step is recorded lightly."""
        if self.light:
            if phase != ph.CHECKPOINT:
                return ph.NOT_ENTERED
            self.look()
        if phase == ph.COLLECTIVE and self._started is None:
            return ph.NOT_ENTERED  # before the training: ranks meet
        if self._started is None:
            self._started, self._cpu = self.phases.update(), self._cpu_clock()
            self._first = self._started
            self.phases.reset()
            self._open_segment()
        token = self.phases.enter(phase)
        if phase == ph.COLLECTIVE and token >= 0:
            self.collectives.calls += 1
        if token == 0 and self._gpu is not None:
            self._gpu.begin(phase)
            self._span = phase, token
        return token

    def leave(self, token: int) -> None:
        """End a phase."""
        if token == 0 and self._span is not None and self._gpu is not None:
            self._gpu.finish(self._span[0])
            self._span = None
        self.phases.leave(token)

    # -- light steps -----------------------------------------------------------------------------

    def look(self) -> None:
        """A light step is more than usual: from now on in detail. What has passed of it is waiting
        for batches, or no phase's."""
        if not self.light:
            return
        self.light = False
        self._cpu = math.nan
        counts, self._counts = self._counts, Counts()
        self.phases.current = ph.OTHER
        self._open_segment()
        self._counts = counts
        self.phases.carve(ph.INPUT, self._waited)
        if self.device is not None:
            self._gpu, self._light_gpu = self._light_gpu or GpuStep(self.device, None), None

    def late_input(self, seconds: float) -> int:
        """A DataLoader came to its end after so long, in a light step; returns the token of the
        phase as if it had been entered."""
        self._waited += seconds
        self.look()
        return self.enter(ph.INPUT)

    def light_batch(self, seconds: float, loader: LoaderRecord, batch: Any) -> None:
        """A DataLoader gave a batch after so long, in a light step."""
        self._waited += seconds
        self._loader = loader
        self._counts.add(loader.samples(batch))

    def _note_loss_lightly(self, roots: Any) -> None:
        """Note the loss of a backward pass in a light step, now and then: a loss that is not finite
        mostly stays so. On a GPU it comes with the step's row, once the stream is behind its copy.
        """
        now = self.phases.clock()
        if now < self._loss_due:
            return
        self._loss_due = now + (_LOSS_ON_CPU_S if self.device is None else _LOSS_S)
        if self.device is not None and self._light_gpu is None:
            self._light_gpu = GpuStep(self.device, None)
        self.numbers.note_loss(roots, self.device, self._light_gpu)
        if self.numbers.loss is not None and not math.isfinite(self.numbers.loss):
            self._loss_due = 0.0  # each of them is counted

    def _commit_lightly(self) -> None:
        now = self.phases.clock()
        counts, backwards = self._counts, self._backwards
        given = counts.given
        if len(given) == 1 and backwards == 1:
            # Mostly a step is one batch, and this runs in each.
            batches, samples, ahead = 1, given[0], None
        else:
            used, ahead = self._used.split(given, backwards)
            batches = len(used) or backwards
            samples = (total(used) if used else self.models.samples) or -1
        memory = NO_MEMORY if self.device is None else self._look_at_memory(now)
        length = math.nan if self._restarted else now - self.phases.since
        numbers, gpu = self.numbers, self._light_gpu
        loss, flags = numbers.loss, tables.LIGHT
        if self.compiled:
            flags |= tables.COMPILED
        if loss is not None and numbers.loss_is_scaled:  # by how much was not looked at
            flags |= tables.loss_flag(loss)
            loss = None
        times = self.count, now - self._origin, length, self._waited
        row = (*times, samples, batches, *memory, loss, flags)
        if gpu is not None:
            self._light_gpu = None
            gpu.close_alone()
        self.rows.add_light(row, gpu, numbers.loss_is_scaled)
        if self.device is not None:
            self.rows.poll(now - self._origin)
        self.count += 1
        self.compiled = self._restarted = False
        self.phases.since = self._started = now
        cost_s = self.cost_s
        counts.begin(ahead or [])
        if numbers.loss is not None or numbers.loss_is_scaled or numbers.scale == numbers.scale:
            numbers.begin()
        self.models.begin()
        self._backwards = 0
        self._waited = self.cost_s = 0.0
        if now >= self.budget.due:  # the next one is recorded in detail
            self.light = False
            self._cpu = self._cpu_clock()
            if self.device is not None:
                self._gpu = GpuStep(self.device, self.device.mark())
            self._open_segment()
        self.budget.looked_lightly(cost_s + self.phases.clock() - now)

    # -- segments: was it an evaluation? -------------------------------------------------------

    def _open_segment(self) -> None:
        self._segment = Segment(self.phases, self._counts, self._gpu)

    def _close_segment(self) -> None:
        """The next batch is asked for."""
        self.phases.update()
        segment = self._segment
        given = segment.calls and self._loader is not None
        if not segment.trains and (segment.evaluates or given):
            self._fold()

    def _fold(self) -> None:
        self._counts = self._segment.fold(self.phases, self._gpu)
        if self._loader is not None and self._loader.role == "unknown":
            self._loader.role = "evaluation"
            self._sink.loaders_changed()

    # -- rows ----------------------------------------------------------------------------------

    def _begin(self, ahead: list[int]) -> None:
        """``ahead`` are the samples of batches that were fetched, and not used yet."""
        self._counts = Counts(ahead)
        self.numbers.begin()
        self._skipped = self._restarted = False
        self._backwards = 0
        self._waited = self.cost_s = 0.0
        self.models.begin()

    def commit(self, *, may_be_light: bool = False) -> None:
        """The step is over; the next one ``may_be_light`` where an optimizer ended this one."""
        now = self.phases.update()
        if extra := self.models.extra(self._backwards):
            seconds = extra * self.phases.seconds[ph.FORWARD]
            self.phases.seconds[ph.FORWARD] -= seconds
            self.phases.seconds[ph.EVALUATION] += seconds
            self._evaluated_at = self._evaluated_at or self.models.extra_at
        used, ahead = self._used.split(self._counts.given, self._backwards)
        row = self._row(now, used)
        gpu, phases = self._gpu, self.phases
        self._tell(row)
        if not self.count & self.inputs.passed_over:
            self.inputs.end(self.count)
        began = now if self._started is None else self._started
        decided = phases.clock()
        # What the hooks have measured of themselves, and this.
        self.budget.looked(began, self.cost_s + decided - now)
        light = may_be_light and not phases.depth and self.budget.is_light(now)
        if gpu is not None:
            self._gpu = None if light else gpu.close()
            if light:
                gpu.close_alone()
        self.rows.add(row, gpu, self.numbers.loss_is_scaled)
        self.rows.poll(now - self._origin)
        self.count += 1
        self.compiled = False
        self._begin(ahead)
        self.light = light
        phases.reset()
        self._started = now
        if not light:
            self._open_segment()
        self.cost_s = phases.clock() - decided

    def _row(self, now: float, used: list[int]) -> Row:
        counts, cpu = self._counts, self._cpu_clock()
        began = now if self._started is None else self._started
        cpu_s, self._cpu = cpu - self._cpu, cpu
        self.collectives.add(self.count, self.phases.seconds[ph.COLLECTIVE])
        numbers = self.numbers
        return new_row(
            step=self.count,
            end_s=now - self._origin,
            step_s=math.nan if self._restarted else now - began,
            phases=self.phases.seconds,
            counts=counts,
            on_gpu=self.device is not None,
            cpu_s=cpu_s,
            samples=(total(used) if used else self.models.samples) or -1,
            batches=len(used) or self._backwards,
            memory=self._look_at_memory(now),
            numbers=(numbers.loss, numbers.scale, numbers.norm),
            flags=(tables.COMPILED if self.compiled else 0)
            | (tables.STEP_SKIPPED if self._skipped else 0),
        )

    def _tell(self, row: Row) -> None:
        if (seconds := self.phases.seconds[ph.EVALUATION]) > 0:
            self._sink.event("evaluation", seconds=seconds, text=self._evaluated_at or "")
        if self._counts.epoch_s is not None:
            self._sink.event("epoch", seconds=self._counts.epoch_s)
        if self._skipped:
            self._sink.event("skipped_step")

    def _skipped_on_gpu(self, row: Row) -> None:
        self._sink.event("skipped_step")

    def _look_at_memory(self, now: float) -> AllocatorMemory:
        if self.device is None or now - self._memory_at < _MEMORY_S:
            return NO_MEMORY
        self._memory_at = now
        return self.device.memory()
