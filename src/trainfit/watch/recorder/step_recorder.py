"""Steps of a training, put together from what the hooks tell.

Where a step ends says :mod:`trainfit.results.runs.step_cycle`.

What is an evaluation? A forward pass without gradients of a module in ``eval()`` mode that has
parameters to train; the batches of a DataLoader that no backward pass follows; and what lies
between two of these. The time since the segment began (the call of the DataLoader's ``next``, or
the optimizer's step) is then moved from the other phases to the evaluation.

Of short steps most are recorded lightly (:mod:`.budget`): no phase is entered in one, until it
shows that it is more than a batch, a forward and a backward pass and the optimizer's step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch

from trainfit.results.runs.step_cycle import StepCycle
from trainfit.watch.recorder import phases as ph
from trainfit.watch.recorder.current_step import CurrentStep
from trainfit.watch.recorder.gpu_step import number
from trainfit.watch.recorder.job import LoaderRecord, script_place
from trainfit.watch.recorder.rows import Sink

#: What a call of a model, or a backward pass, is given in a light step, and gives back.
_LIGHTLY: Final = (ph.FORWARD, ph.NOT_ENTERED)
LIGHT_BACKWARD: Final = -2


class StepRecorder(CurrentStep):
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
        super().__init__(sink, clock, origin, cpu_clock)
        self.cycle = StepCycle()
        self.optimizer_steps = 0
        """Calls of an optimizer's ``step`` so far."""
        #: Tokens of the steps of optimizers that go on.
        self._stepping: list[int] = []

    # -- the DataLoader ------------------------------------------------------------------------

    def enter_input(self, queued: Callable[[], int] | None = None) -> int:
        """The DataLoader's ``next`` (or ``iter``) is called."""
        if self._stepping:  # an optimizer's step that was left by an exception
            self._leave_steps(0)
        self.look()
        if not self.phases.depth:
            # Batches that are fetched ahead, and ``iter``, belong to the call that uses them.
            segment = self._segment
            if segment.trains or segment.evaluates or segment.calls:
                self._close_segment()
                if segment.trains and self.cycle.next_batch():
                    self.commit()
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
        was_ready: Callable[[], bool] | None,
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
        counts.add(loader.samples(batch))
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
        if self.cycle.awaits:
            self.cycle.called(module.parameters())
        trains = torch.is_grad_enabled()
        counts = trains and self.phases.current != ph.BACKWARD
        many = counts and self.models.counted()
        if self.light:
            if not many and (trains or module.training or not self.models.elements(module)):
                if counts and self._loader is None:
                    self.models.note(module, given, True)
                return _LIGHTLY
            self.look()
        current = self.phases.current
        if current in (ph.INPUT, ph.BACKWARD, ph.CHECKPOINT, ph.EVALUATION):
            return None
        trained = self.models.elements(module)
        if not trains:
            if trained and not module.training:
                if self._segment.trains:
                    self.phases.update()
                    self._open_segment()
                if self._evaluated_at is None:
                    self._evaluated_at = script_place()
                return ph.EVALUATION, self.enter(ph.EVALUATION)
            self._segment.calls = True
        elif trained and module.training:
            if self._loader is None and self.cycle.next_call():
                self.commit()
            self._segment.trains = True
            self._sink.called(module, given)
        else:
            self._segment.calls = True
        if trains and not self.count & self.inputs.passed_over:
            self.inputs.note(given)
        if trains and self.models.note(module, given, self._loader is None):
            self._sink.root_called(module)
        return ph.FORWARD, self.enter(ph.FORWARD)

    def leave_root(self, entered: tuple[int, int]) -> None:
        """The call of an outermost module is done."""
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
        if self.cycle.next_pass() and self._loader is None:
            self.commit()
        self._backwards += 1
        if self.light:
            self.phases.current = ph.BACKWARD  # of the clock nothing else is used
            self._note_loss_lightly(roots)
            return LIGHT_BACKWARD
        self._segment.trains = True
        self._note_training()
        self.numbers.note_loss(roots, self.device, self._gpu)
        return self.enter(ph.BACKWARD)

    def leave_backward(self, token: int) -> None:
        """The backward pass is over."""
        if token == LIGHT_BACKWARD:
            self.phases.current = ph.OTHER
        else:
            self.leave(token)

    def _note_training(self) -> None:
        if not self.trains:
            self.trains = True
            self.thread = threading.get_ident()
            self._sink.training()
        if self._loader is not None and self._loader.role != "training":
            self._loader.role = "training"
            self._sink.loaders_changed()

    def number(self, name: str, tensor: torch.Tensor) -> float | None:
        """The value of a tensor of one element: now, or with the step's row if it is on a GPU."""
        return number(name, tensor, self.device, self._gpu)

    # -- the optimizer -------------------------------------------------------------------------

    def enter_optimizer(self, optimizer: Any, frame: FrameType) -> None:
        """An optimizer's ``step`` begins, in ``frame``."""
        self.cycle.enter(optimizer, frame)
        if self._stepping:
            self._leave_steps(self.cycle.depth - 1)  # that were left by an exception
        if self.light and not self._stepping and getattr(optimizer, "found_inf", None) is None:
            self._stepping.append(ph.NOT_ENTERED)
            return
        self._note_training()
        inf = getattr(optimizer, "found_inf", None)  # GradScaler's, for fused optimizers
        if isinstance(inf, torch.Tensor):
            self.look()  # the GPU tells later, by a step in detail
            self._skipped |= bool(self.number("found_inf", inf))
        self._stepping.append(self.enter(ph.OPTIMIZER))

    def leave_optimizer(self, optimizer: Any) -> None:
        """The optimizer's ``step`` is over."""
        outermost = self.cycle.leave(optimizer)
        self.optimizer_steps += 1
        if self.optimizer_steps == 1:
            self._sink.stepped()
        if self.light and outermost:
            self._stepping.clear()  # no phase was entered
        else:
            self._leave_steps(self.cycle.depth)
        if outermost and self._ends_step(optimizer):
            if self.light:
                self._commit_lightly()
            else:
                self.commit(may_be_light=True)

    def _leave_steps(self, depth: int) -> None:
        while len(self._stepping) > depth:
            self.leave(self._stepping.pop())

    def skip(self, optimizer: Any) -> None:
        """``GradScaler`` left the optimizer's step out."""
        self.look()
        self._note_training()
        self._skipped = True
        if self._ends_step(optimizer):
            self.commit()

    def _ends_step(self, optimizer: Any) -> bool:
        ends = self.cycle.stepped(optimizer)
        if self.cycle.restarted and self.count:
            self._restarted = True
            self._sink.event("restart", text=type(optimizer).__name__)
        return ends

    def finish(self) -> None:
        """The training is over: pass on the rows that wait, and what no step followed."""
        if not self.count and self.cycle.is_unfinished:
            self.commit()
        self.rows.drain()
        if self.phases.seconds[ph.EVALUATION] > 0:
            self._sink.event("evaluation", seconds=self.phases.seconds[ph.EVALUATION])

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
