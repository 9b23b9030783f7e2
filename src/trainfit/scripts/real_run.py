"""Runs a user's script for real, with something noted after each of its steps: those of its
optimizer, or calls of its model.

In a process of its own. The script is not disturbed: errors of ours never reach it, and it is
stopped from within the step that is the last one wanted (:mod:`trainfit.scripts.execute`).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import faulthandler
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import grad_scaler
from torch.optim import optimizer as optim

from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.step_cycle import StepCycle
from trainfit.results.runs.trace import ScriptOutcome
from trainfit.scripts.execute import Stopper, run_script, watch
from trainfit.simgpu.device.ownership import has_parameters
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.autograd import ENGINE_RUN_BACKWARD
from trainfit.torch_private.compiled import traces_original
from trainfit.torch_private.data_loading import LoaderIterator


class ScriptRun(abc.ABC):
    """One run; what is noted, when it is enough, and what is kept say the subclasses.

    ``steps`` is how many there were so far: of the training, or calls of outermost modules with
    parameters, as ``spec.count`` says.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self._cycle = StepCycle()
        self._made = self._in_pass = 0
        self._calls = PatchSet()
        self._stopper = Stopper()
        self._depth = 0
        self.steps = 0
        self._started = time.monotonic()
        self.process = os.getpid()
        self._done = threading.Event()
        self._finishing = threading.Lock()

    @abc.abstractmethod
    def note(self) -> None:
        """A step is over; what this raises is dropped."""

    @abc.abstractmethod
    def enough(self) -> bool:
        """Was this step the last one wanted?"""

    @abc.abstractmethod
    def keep(self, end: ScriptOutcome) -> None:
        """Write what came of the run."""

    def run(self) -> None:
        """Run the script to its stop or its end and keep what came of it."""
        watch(self._started, self.spec.time_limit_s, self._done, self._late, self._stopped)
        patches = PatchSet()
        self._hook(patches)
        try:
            assert self.spec.target is not None
            end = run_script(self.spec.target)
        finally:
            self._calls.restore()
            patches.restore()
        if end.status == "ended" and not self.steps and self._cycle.is_unfinished:
            self.steps = 1
            with contextlib.suppress(Exception):
                self.note()
        self._finish(end)

    def _hook(self, patches: PatchSet) -> None:
        if self.spec.count == "calls":
            patches.see_calls(self._enter, self._leave)
            return
        patches.hook(optim.Optimizer, "__init__", self._making)
        patches.hook(grad_scaler.GradScaler, "step", self._scaling)
        patches.hook(LoaderIterator, "__next__", self._fetching)
        patches.set(*ENGINE_RUN_BACKWARD, self._passing(ENGINE_RUN_BACKWARD.now))
        patches.see_steps(self._before_step, self._after_step)

    def _making(self, construct: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(construct)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            with contextlib.suppress(Exception):
                if self._cycle.has_optimizer:  # of one alone there is nothing to find out
                    self._see_calls()
                self._cycle.made(optimizer)
            construct(optimizer, *args, **kwargs)
            with contextlib.suppress(Exception):
                self._cycle.constructed(optimizer)

        return __init__

    def _see_calls(self) -> None:
        """See calls of models, as long as it is not known which optimizers are used."""
        if not self._calls.replaced:
            self._calls.hook(torch.nn.Module, "__call__", self._calling)

    def _calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def __call__(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._depth or self._in_pass:
                return call(module, *args, **kwargs)
            trains = False
            with contextlib.suppress(Exception):
                if self._cycle.awaits:
                    self._cycle.called(module.parameters())
                trains = module.training and torch.is_grad_enabled() and has_parameters(module)
            if trains:
                self._tell(self._cycle.next_call)
            self._depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._depth -= 1

        traces_original(__call__, call)
        return __call__

    def _fetching(self, fetch: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fetch)
        def __next__(batches: Any) -> Any:
            self._tell(self._cycle.next_batch)
            return fetch(batches)

        return __next__

    def _passing(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._in_pass and self._cycle.is_engine_pass(args, kwargs):
                self._tell(self._cycle.next_pass)
                if not self._cycle.has_optimizer:
                    self._see_calls()
            self._in_pass += 1
            try:
                return backward(*args, **kwargs)
            finally:
                self._in_pass -= 1

        return watched

    def _tell(self, happens: Callable[[], bool]) -> None:
        """Tell the end of a step where no optimizer tells it: the loop does."""
        if not self._cycle.has_optimizer and happens():
            self._step_over()

    def _scaling(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def scaled_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._made
            result = step(scaler, optimizer, *args, **kwargs)
            if self._made == before:
                self._stepped(optimizer)  # it was left out
            return result

        return scaled_step

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and has_parameters(module):
            self._step_over()

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        with contextlib.suppress(Exception):
            self._cycle.enter(optimizer, sys._getframe(1))

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._made += 1
        outermost = False
        with contextlib.suppress(Exception):
            outermost = self._cycle.leave(optimizer)
        if outermost:
            self._stepped(optimizer)

    def _stepped(self, optimizer: Any) -> None:
        over = False
        with contextlib.suppress(Exception):
            over = self._cycle.stepped(optimizer)
        if over:
            if not self._cycle.awaits:
                self._calls.restore()
            self._step_over()

    def _step_over(self) -> None:
        if os.getpid() != self.process:
            return
        self.steps += 1
        with contextlib.suppress(Exception):
            self.note()
        if self.enough():
            with contextlib.suppress(Exception):
                self._finish(ScriptOutcome("finished"))
            self._stopper.stop()

    def _late(self, place: str | None) -> bool:
        return self._finish(ScriptOutcome("timeout", location=place))

    def _stopped(self, reason: str, place: str | None) -> bool:
        return self._finish(ScriptOutcome("failed", message=reason, location=place))

    def _finish(self, end: ScriptOutcome) -> bool:
        """Keep what there is, once; what the script does later does not count.

        Returns whether this call was the one that did.
        """
        with self._finishing:
            if self._done.is_set() or os.getpid() != self.process:
                return False
            self._done.set()
        faulthandler.cancel_dump_traceback_later()
        seconds = time.monotonic() - self._started
        self.keep(dataclasses.replace(end, steps=self.steps, seconds=seconds))
        return True
