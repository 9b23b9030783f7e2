"""Runs a user's script on the real GPU for a few steps and measures memory and step time.

Runs in a process of its own (``main``). The script is not disturbed: a hook after each
optimizer step notes PyTorch's own counters and records a CUDA event, which does not wait for
the device. Nothing is measured by a wait before the last step is over, and an error of ours
never reaches the script.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim import optimizer as optim

from trainfit.hardware.local_gpu import process_bytes
from trainfit.memory.calibration import outside_bytes
from trainfit.results.trace import Status
from trainfit.results.verification import RealRunOutcome, RealRunRequest
from trainfit.simgpu.measuring import describe, device
from trainfit.simgpu.script import MainOptimizer, Stopper, run_script, watch


class RealRun:
    """One run of a script on the real GPU."""

    def __init__(self, request: RealRunRequest) -> None:
        self._request = request
        self._optimizer = MainOptimizer()
        self._stopper = Stopper()
        self._steps = 0
        self._events: list[Any] = []
        self._allocated = self._reserved = 0
        self._started = time.monotonic()
        self._process = os.getpid()
        self._done = threading.Event()
        self._finishing = threading.Lock()

    def run(self) -> None:
        """Run the script to its stop or its end and write the outcome."""
        watch(self._started, self._request.time_limit_s, self._done, self._late)
        with device(self._request.stand_in):
            hooks = [
                optim.register_optimizer_step_pre_hook(self._before_step),
                optim.register_optimizer_step_post_hook(self._after_step),
            ]
            try:
                status, details = run_script(self._request.target)
            finally:
                for hook in hooks:
                    hook.remove()
            self._finish(status, details)

    # -- in the script ---------------------------------------------------------------------

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        with contextlib.suppress(Exception):
            self._optimizer.before_step(optimizer)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if os.getpid() != self._process or not self._optimizer.made(optimizer):
            return
        self._steps += 1
        with contextlib.suppress(Exception):
            self._note()
        if self._steps >= self._request.steps:
            with contextlib.suppress(Exception):
                self._finish("finished", {})
            self._stopper.stop()

    def _note(self) -> None:
        """PyTorch's counters and the time on the device, without waiting for it."""
        if not torch.cuda.is_initialized():
            return
        self._note_peaks()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def _note_peaks(self) -> None:
        """The script may reset PyTorch's peaks; the largest that was seen counts."""
        self._allocated = max(self._allocated, torch.cuda.max_memory_allocated(0))
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(0))

    # -- the end ---------------------------------------------------------------------------

    def _late(self, place: str | None) -> bool:
        return self._finish("timeout", {"location": place})

    def _finish(self, status: Status, details: dict[str, Any]) -> bool:
        """Write the outcome, once; what the script does later does not count.

        Returns whether this call was the one that did.
        """
        with self._finishing:
            if self._done.is_set() or os.getpid() != self._process:
                return False
            self._done.set()
        faulthandler.cancel_dump_traceback_later()
        outcome = RealRunOutcome(status, self._steps, time.monotonic() - self._started, **details)
        # A device that hangs would hang who waits for it.
        if status != "timeout":
            with contextlib.suppress(Exception):  # the device may be in no state to answer
                outcome = self._measured(outcome)
        outcome.save(Path(self._request.outcome))
        return True

    def _measured(self, outcome: RealRunOutcome) -> RealRunOutcome:
        """With what the device says, now that waiting for it disturbs nobody."""
        if not torch.cuda.is_initialized():
            return outcome
        self._note_peaks()
        outside = outside_bytes()
        shown = process_bytes(self._process) if self._request.stand_in is None else None
        return dataclasses.replace(
            outcome,
            device=describe(),
            allocated_bytes=self._allocated,
            reserved_bytes=self._reserved,
            outside_bytes=outside,
            process_bytes=None if shown is None else shown - torch.cuda.memory_reserved(0),
            step_seconds=tuple(
                float(one.elapsed_time(two)) / 1e3 for one, two in itertools.pairwise(self._events)
            ),
        )


def main() -> None:
    """The child process's entry point."""
    request = RealRunRequest.from_json(Path(sys.argv[1]).read_text())
    RealRun(request).run()
