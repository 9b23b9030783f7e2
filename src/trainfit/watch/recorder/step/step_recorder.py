"""Steps of a training, put together from what the hooks tell.

A step ends with the step of the main optimizer: the one with the most parameters. Without any
optimizer that PyTorch knows, it ends where the next iteration begins.

What is an evaluation? A forward pass without gradients of a module in ``eval()`` mode that has
parameters to train; the batches of a DataLoader that no backward pass follows; and what lies
between two of these. The time since the segment began (the call of the DataLoader's ``next``, or
the optimizer's step) is then moved from the other phases to the evaluation.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from trainfit.results.watch import tables
from trainfit.watch.recorder.step import phases as ph
from trainfit.watch.recorder.step.called_models import CalledModels
from trainfit.watch.recorder.step.cuda_events import NO_MEMORY, Device, Memory
from trainfit.watch.recorder.step.gpu_step import GpuStep
from trainfit.watch.recorder.step.loader_record import LoaderRecord
from trainfit.watch.recorder.step.main_optimizer import MainOptimizer
from trainfit.watch.recorder.step.phases import PhaseClock
from trainfit.watch.recorder.step.rows import Row, Sink, StepRows, new_row
from trainfit.watch.recorder.step.segments import Counts, Segment

#: Backward passes without an optimizer's step after which iterations count as steps.
_NO_OPTIMIZER: Final = 8
#: Seconds between two looks at PyTorch's memory statistics, which cost tens of microseconds.
_MEMORY_S: Final = 0.1


class StepRecorder:
    """Called by the hooks, at the beginning and the end of each phase, in the training's thread.

    Args:
        sink: gets rows and events.
        clock: seconds, monotonic; ``origin`` is the time of it that the run counts from.
        cpu_clock: seconds of CPU time of the calling thread.
    """

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
        self.optimizers = MainOptimizer()
        self.device: Device | None = None
        self.count = 0
        """Rows so far."""
        self._thread = threading.main_thread().ident
        self.trains = False
        """Was there a backward pass or an optimizer's step?"""
        self.optimizer_steps = 0
        self._started: float | None = None
        self._cpu = 0.0
        self.models = CalledModels()
        self._stepping: list[tuple[Any, int]] = []
        self._stepped_main = False
        self._loader: LoaderRecord | None = None
        self._backwards_without_step = 0
        self._memory_at = -math.inf
        self._gpu: GpuStep | None = None
        self._span: tuple[int, int] | None = None
        self.compiled = False
        """Was something compiled since the last step?"""
        self._counts = Counts()
        self._loss: float | None = None
        self._begin()
        self._open_segment()

    # -- what the hooks ask first --------------------------------------------------------------

    @property
    def mine(self) -> bool:
        """Is this the thread that trains?"""
        return threading.get_ident() == self._thread

    @property
    def now(self) -> float:
        """Seconds of the run."""
        return self.phases.clock() - self._origin

    def use(self, device: Device) -> None:
        """The training computes on this GPU from now on."""
        self.device = device
        self._gpu = GpuStep(device, None)

    # -- phases --------------------------------------------------------------------------------

    def enter(self, phase: int) -> int:
        """Begin a phase; what is returned ends it. Negative: it belongs to the one around it."""
        if self._started is None:
            self._started, self._cpu = self.phases.update(), self._cpu_clock()
            self.phases.reset()
            self._open_segment()
        token = self.phases.enter(phase)
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

    # -- the DataLoader ------------------------------------------------------------------------

    def enter_input(self, queued: Callable[[], int] | None = None) -> int:
        """The DataLoader's ``next`` (or ``iter``) is called."""
        if self._stepping:  # an optimizer's step that was left by an exception
            self.leave(self._stepping[0][1])
            self._stepping.clear()
        if not self.phases.depth:
            # Batches that are fetched ahead, and ``iter``, belong to the call that uses them.
            segment = self._segment
            if segment.trains or segment.evaluates or segment.calls:
                self._close_segment()
                if segment.trains:
                    self._end_iteration()
                self._open_segment()
            if self._gpu is not None:
                self.rows.poll(self.now)
        if queued is not None and not self._counts.batches:
            self._counts.queued = queued()
        return self.enter(ph.INPUT)

    def leave_input(
        self,
        token: int,
        loader: LoaderRecord,
        batch: Any,
        first_s: float | None,
        was_ready: Callable[[], bool] | None = None,
    ) -> None:
        """It gave a batch; ``first_s`` is what the first of an epoch took, all in all;
        ``was_ready`` says whether it was among those that were ready."""
        self.leave(token)
        self._loader = loader
        if loader.role == "evaluation":
            return
        counts = self._counts
        if was_ready is not None and not counts.batches and counts.queued > 0 and not was_ready():
            counts.queued = 0
        counts.batches += 1
        samples = loader.samples(batch)
        counts.samples = -1 if samples < 0 or counts.samples < 0 else counts.samples + samples
        if first_s is not None:
            counts.epoch_s = first_s

    def end_input(self, token: int, loader: LoaderRecord) -> None:
        """It has no more batches."""
        self.leave(token)
        if not self.phases.depth:
            if loader.role == "evaluation":
                self._fold()
            self._open_segment()

    # -- forward and backward passes -----------------------------------------------------------

    def enter_root(self, module: torch.nn.Module, given: tuple[Any, ...]) -> tuple[int, int] | None:
        """A module is called that no other module calls; ``None``: it belongs to what it is
        called in (transforms of a batch, what checkpointing calls again, a checkpoint)."""
        current = self.phases.current
        if current in (ph.INPUT, ph.BACKWARD, ph.CHECKPOINT, ph.EVALUATION):
            return None
        trained = self.models.elements(module)
        if not torch.is_grad_enabled():
            if trained and not module.training:
                if self._segment.trains:
                    self.phases.update()
                    self._open_segment()
                return ph.EVALUATION, self.enter(ph.EVALUATION)
            self._segment.calls = True
        elif trained and module.training:
            if not self._segment.trains and self._loader is None:
                self._end_iteration()
            self._segment.trains = True
        else:
            self._segment.calls = True
        if torch.is_grad_enabled() and self.models.note(module, given, self._loader is None):
            self._sink.root_called(module)
        return ph.FORWARD, self.enter(ph.FORWARD)

    def leave_root(self, entered: tuple[int, int]) -> None:
        """… and is done."""
        phase, token = entered
        self.leave(token)
        if phase == ph.EVALUATION and not self.phases.depth:
            self._fold()
            self._open_segment()
            self._segment.evaluates = True

    def enter_backward(self, roots: Any) -> int:
        """A backward pass begins, from ``roots`` (a tensor or several)."""
        if self.phases.current == ph.BACKWARD:  # of a checkpointed part
            return ph.NOT_ENTERED
        self._segment.trains = True
        self._note_training()
        self._backwards += 1
        self._backwards_without_step += 1
        self._note_loss(roots)
        return self.enter(ph.BACKWARD)

    def _note_training(self) -> None:
        if not self.trains:
            self.trains = True
            self._thread = threading.get_ident()
            self._sink.training()
        if self._loader is not None and self._loader.role != "training":
            self._loader.role = "training"
            self._sink.loaders_changed()

    def _note_loss(self, roots: Any) -> None:
        root = roots if isinstance(roots, torch.Tensor) else next(iter(roots), None)
        if root is None or root.numel() != 1 or root.is_complex():
            return
        value = self.number("loss", root)
        if value is not None and (self._loss is None or math.isfinite(self._loss)):
            self._loss = value

    def number(self, name: str, tensor: torch.Tensor) -> float | None:
        """The value of a tensor of one element: now, or with the step's row if it is on a GPU."""
        if not tensor.is_cuda:
            return float(tensor.detach()) if tensor.device.type == "cpu" else None
        if self.device is not None and self._gpu is not None:
            before = self._gpu.numbers.pop(name, None)
            kept = self.device.keep(tensor)
            if kept is not None:
                self._gpu.numbers[name] = kept
            if before is not None:
                self.device.value(before)  # frees its room; its copy is over before the new one
        return None

    # -- the optimizer -------------------------------------------------------------------------

    def enter_optimizer(self, optimizer: Any) -> None:
        """An optimizer's ``step`` begins."""
        for at, (known, token) in enumerate(self._stepping):
            if known is optimizer:  # was left by an exception
                self.leave(token)
                del self._stepping[at:]
                break
        self._note_training()
        found = getattr(optimizer, "found_inf", None)  # GradScaler's, for fused optimizers
        if isinstance(found, torch.Tensor) and self.number("found_inf", found):
            self._skipped = True
        self._stepping.append((optimizer, self.enter(ph.OPTIMIZER)))

    def leave_optimizer(self, optimizer: Any) -> None:
        """… and is over."""
        if not self._stepping or self._stepping[-1][0] is not optimizer:
            return
        _, token = self._stepping.pop()
        self.optimizer_steps += 1
        if self.optimizer_steps == 1:
            self._sink.stepped()
        self.leave(token)
        self._backwards_without_step = 0
        self._stepped_main |= self._is_main(optimizer)
        if not self._stepping and self._stepped_main:  # else another one wraps it
            self._stepped_main = False
            self.commit()

    def skip(self, optimizer: Any) -> None:
        """``GradScaler`` left the optimizer's step out."""
        self._note_training()
        self._backwards_without_step = 0
        self._skipped = True
        if self._is_main(optimizer):
            self.commit()

    def _is_main(self, optimizer: Any) -> bool:
        is_main, again = self.optimizers.is_main(optimizer)
        if again and self.count:
            self._restarted = True
            self._sink.event("restart", text=type(optimizer).__name__)
        return is_main

    def _end_iteration(self) -> None:
        if self._backwards and self._backwards_without_step >= _NO_OPTIMIZER:
            self.commit()

    # -- rows ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._counts = Counts()
        self._loss = None
        self.scale = self.norm = math.nan
        self.loss_is_scaled = self._skipped = self._restarted = False
        self._backwards = 0
        self.models.begin()

    def commit(self) -> None:
        """The step is over."""
        now = self.phases.update()
        row = self._row(now)
        gpu = self._gpu
        if gpu is not None:
            self._gpu = gpu.close()
        self._tell(row)
        self.rows.add(row, gpu, self.loss_is_scaled)
        self.rows.poll(now - self._origin)
        self.count += 1
        self.compiled = False
        self._begin()
        self.phases.reset()
        self._started = now
        self._open_segment()

    def _row(self, now: float) -> Row:
        counts, cpu = self._counts, self._cpu_clock()
        began = now if self._started is None else self._started
        cpu_s, self._cpu = cpu - self._cpu, cpu
        return new_row(
            step=self.count,
            end_s=now - self._origin,
            step_s=math.nan if self._restarted else now - began,
            phases=self.phases.seconds,
            counts=counts,
            on_gpu=self.device is not None,
            cpu_s=cpu_s,
            samples=(counts.samples if counts.batches else self.models.samples) or -1,
            batches=counts.batches or self._backwards,
            memory=self._look_at_memory(now),
            numbers=(self._loss, self.scale, self.norm),
            flags=(tables.COMPILED if self.compiled else 0)
            | (tables.STEP_SKIPPED if self._skipped else 0),
        )

    def _tell(self, row: Row) -> None:
        if self.phases.seconds[ph.EVALUATION] > 0:
            self._sink.event("evaluation", seconds=self.phases.seconds[ph.EVALUATION])
        if self._counts.epoch_s is not None:
            self._sink.event("epoch", seconds=self._counts.epoch_s)
        if self._skipped:
            self._sink.event("skipped_step")

    def finish(self) -> None:
        """The training is over: pass on the rows that wait, and what no step followed."""
        self.rows.drain()
        if self.phases.seconds[ph.EVALUATION] > 0:
            self._sink.event("evaluation", seconds=self.phases.seconds[ph.EVALUATION])

    def _skipped_on_gpu(self, row: Row) -> None:
        self._sink.event("skipped_step")

    def _look_at_memory(self, now: float) -> Memory:
        if self.device is None or now - self._memory_at < _MEMORY_S:
            return NO_MEMORY
        self._memory_at = now
        return self.device.memory()

    # -- the GPU -------------------------------------------------------------------------------

    def note_copy(self, nbytes: int, unpinned: bool) -> None:
        """Bytes that are copied to the GPU."""
        if self.phases.current < ph.CHECKPOINT:
            self._counts.copied += nbytes
            self._counts.unpinned += nbytes if unpinned else 0

    def note_sync(self) -> None:
        """A call that waited for the GPU."""
        if self.phases.current < ph.CHECKPOINT:
            self._counts.syncs += 1
