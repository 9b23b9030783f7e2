"""Runs a user's script for real, with something noted after each of its steps: those of its
optimizer, or calls of its model.

In a process of its own. The script is not disturbed: errors of ours never reach it, and it is
stopped from within the step that is the last one wanted (:mod:`trainfit.scripts.execute`).
"""

from __future__ import annotations

import abc
import contextlib
import faulthandler
import os
import threading
import time
from typing import Any, Literal

import torch
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as optim

from trainfit.results.runs.trace import Status, Target
from trainfit.scripts.execute import Stopper, run_script, watch
from trainfit.simgpu.device.ownership import has_parameters
from trainfit.simgpu.device.settling import MainOptimizer


class ScriptRun(abc.ABC):
    """One run; what is noted, when it is enough, and what is kept say the subclasses.

    ``steps`` is how many there were so far: of the optimizer, or calls of outermost modules with
    parameters, as ``counts`` says.
    """

    def __init__(
        self, target: Target, time_limit_s: float, counts: Literal["steps", "calls"] = "steps"
    ) -> None:
        self._target = target
        self._time_limit_s = time_limit_s
        self._optimizer = MainOptimizer()
        self._stopper = Stopper()
        self._counts = counts
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
    def keep(self, status: Status, seconds: float, details: dict[str, Any]) -> None:
        """Write what came of the run: ``details`` are those of :func:`run_script`."""

    def run(self) -> None:
        """Run the script to its stop or its end and keep what came of it."""
        watch(self._started, self._time_limit_s, self._done, self._late, self._stopped)
        hooks = self._hooks()
        try:
            status, details = run_script(self._target)
        finally:
            for hook in hooks:
                hook.remove()
        self._finish(status, details)

    def _hooks(self) -> list[Any]:
        if self._counts == "calls":
            return [
                nn_module.register_module_forward_pre_hook(self._enter),
                nn_module.register_module_forward_hook(self._leave, always_call=True),
            ]
        return [
            optim.register_optimizer_step_pre_hook(self._before_step),
            optim.register_optimizer_step_post_hook(self._after_step),
        ]

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and has_parameters(module):
            self._step_over()

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        with contextlib.suppress(Exception):
            self._optimizer.before_step(optimizer)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._optimizer.made(optimizer):
            self._step_over()

    def _step_over(self) -> None:
        if os.getpid() != self.process:
            return
        self.steps += 1
        with contextlib.suppress(Exception):
            self.note()
        if self.enough():
            with contextlib.suppress(Exception):
                self._finish("finished", {})
            self._stopper.stop()

    def _late(self, place: str | None) -> bool:
        return self._finish("timeout", {"location": place})

    def _stopped(self, reason: str, place: str | None) -> bool:
        return self._finish("failed", {"message": reason, "location": place})

    def _finish(self, status: Status, details: dict[str, Any]) -> bool:
        """Keep what there is, once; what the script does later does not count.

        Returns whether this call was the one that did.
        """
        with self._finishing:
            if self._done.is_set() or os.getpid() != self.process:
                return False
            self._done.set()
        faulthandler.cancel_dump_traceback_later()
        self.keep(status, time.monotonic() - self._started, details)
        return True
