"""Counts batches, model calls and backward passes between two optimizer steps."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as optim

from trainfit.results.runs.steps import Framework, StepMakeup
from trainfit.results.runs.trace import StepFeed
from trainfit.scripts.training_loops import loop_of
from trainfit.scripts.watch.batch_sizes import samples_in
from trainfit.scripts.watch.dataloader import GivenBatch, LoaderTracker
from trainfit.scripts.watch.step_makeup import makeup_of
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.recording.user_location import frame_of_user
from trainfit.simgpu.session import Simulation
from trainfit.torch_private.autograd import ENGINE_RUN_BACKWARD


@dataclasses.dataclass
class _Calls:
    """Calls of one outermost module since the last optimizer step.

    ``pending`` are those that no backward pass followed so far; ``sizes`` the first dimensions
    of what the calls were given.
    """

    counted: int = 0
    pending: int = 0
    sizes: Counter[int] = dataclasses.field(default_factory=Counter)


class StepWatch:
    """Notes what each optimizer step of a run is given (:class:`StepFeed`).

    A model's call counts if gradients were enabled and a backward pass followed; of several
    outermost modules, those of the one with the most trained parameters. What checkpointing
    calls again within a backward pass does not count.
    """

    def __init__(self, simulation: Simulation, loaders: LoaderTracker) -> None:
        self._simulation = simulation
        loaders.on_batch = self._give
        self._handles: list[Any] = []
        self._sizes: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._depth = self._in_backward = self._stepping = 0
        self._needs_size: _Calls | None = None
        #: The outermost call that goes on, as long as its size may be that of the time.
        self._sized: tuple[_Calls, int] | None = None
        self.after_backward: Callable[[], None] = lambda: None
        """Called after each outermost backward pass that makes gradients of parameters."""
        self.feeds: list[StepFeed] = []
        self.loop: Framework = ""
        self.where: str | None = None
        self._begin()

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored and :meth:`remove` is called."""
        backward = ENGINE_RUN_BACKWARD.now

        def watched(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("accumulate_grad") and not self._in_backward:
                self._commit()
            self._in_backward += 1
            try:
                found = backward(*args, **kwargs)
            finally:
                self._in_backward -= 1
            if kwargs.get("accumulate_grad") and not self._in_backward:
                self.after_backward()
            return found

        patches.set(*ENGINE_RUN_BACKWARD, watched)
        self._handles = [
            nn_module.register_module_forward_pre_hook(self._enter),
            nn_module.register_module_forward_hook(self._leave, always_call=True),
            optim.register_optimizer_step_pre_hook(self._before_step),
            optim.register_optimizer_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Take the hooks away; the patches are their owner's to restore."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def note_step(self) -> None:
        """The main optimizer's step is over."""
        if not self.feeds:
            self._look_around()
        calls = max(
            ((self._trained(module), each) for module, each in self._calls.items()),
            key=lambda pair: pair[0],
            default=(0, _Calls()),
        )[1]
        if self._simulation.replaying and not calls.counted and self.feeds:
            # What was called when the graph was captured.
            self._again(self.feeds[-1])
            return
        common = calls.sizes.most_common(1)
        self.feeds.append(
            StepFeed(
                batches=self._fed(),
                calls=calls.counted,
                call_samples=common[0][0] if common else None,
                backwards=self._backwards,
                others=self._others,
            )
        )
        self._begin()

    def _again(self, feed: StepFeed) -> None:
        self.feeds.append(dataclasses.replace(feed, batches=self._fed()))
        self._begin()

    def makeup(self, batch_size: int | None = None) -> StepMakeup | None:
        """What the steps so far consist of; ``batch_size`` is what the command says."""
        found = makeup_of(self.feeds, batch_size)
        if found is None:
            return None
        return dataclasses.replace(found, loop=self.loop, where=self.where)

    def _begin(self) -> None:
        self._batches: list[GivenBatch] = []
        self._calls: weakref.WeakKeyDictionary[torch.nn.Module, _Calls]
        self._calls = weakref.WeakKeyDictionary()
        self._backwards = 0
        self._within = self._others = False

    # -- batches -------------------------------------------------------------------------

    def _give(self, batch: GivenBatch) -> None:
        self._batches.append(batch)

    def _fed(self) -> tuple[int | None, ...]:
        """Sizes of the batches of the loader that gave the latest; not those of an evaluation."""
        given = [each for each in self._batches if each.with_grad] or self._batches
        return tuple(each.samples for each in given if each.loader == given[-1].loader)

    # -- calls and backward passes ---------------------------------------------------------

    def _enter(self, module: torch.nn.Module, given: Any) -> None:
        self._depth += 1
        if self._in_backward:
            return
        if self._depth == 1:
            self._needs_size = self._sized = None
            if torch.is_grad_enabled() and self._trained(module):
                self._needs_size = self._calls.setdefault(module, _Calls())
                self._needs_size.pending += 1
        if self._needs_size is not None and given:
            # A model that is called with keywords only: its first module that is not.
            size = next(filter(None, map(samples_in, given)), None)
            if size is not None:
                self._needs_size.sizes[size] += 1
                # Where a DataLoader tells the batch size, often ``batch_first`` was forgotten.
                if all(each.samples in (None, 1) for each in self._batches):
                    self._sized = self._needs_size, size
                self._needs_size = None
        if self._sized is not None and getattr(module, "batch_first", True) is False:
            self._turn(*self._sized, tuple(getattr(given[0], "shape", ())) if given else ())

    def _turn(self, calls: _Calls, size: int, shape: tuple[int, ...]) -> None:
        """A recurrent network or an attention is called whose dimensions are time, batch and
        features: where the model was given them in this order, the second is its samples."""
        if len(shape) != 3:
            return
        self._sized = None
        if shape[0] == size:
            calls.sizes[size] -= 1
            calls.sizes[shape[1]] += 1

    def _leave(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)

    def _commit(self) -> None:
        """A backward pass begins: the calls before it were of training.

        An optimizer that evaluates the model again and again within its step (L-BFGS) does so
        with the same samples.
        """
        repeats = self._within and bool(self._stepping)
        self._within = bool(self._stepping)
        self._backwards += not repeats
        for each in self._calls.values():
            each.counted += 0 if repeats else each.pending
            each.pending = 0

    def _trained(self, module: torch.nn.Module) -> int:
        """Elements of its parameters that are trained."""
        known = self._sizes.get(module)
        if known is None:
            known = sum(p.numel() for p in module.parameters() if p.requires_grad)
            self._sizes[module] = known
        return known

    # -- steps -----------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._stepping += 1
        if not self._simulation.counts_steps_of(optimizer):
            self._others = self._others or bool(self._calls)

    def _after_step(self, *_: Any) -> None:
        self._stepping = max(0, self._stepping - 1)

    def _look_around(self) -> None:
        """Whose loop makes the step, and where is it called?"""
        frame = sys._getframe(1)
        self.where = frame_of_user(frame)
        self.loop = loop_of(frame)
