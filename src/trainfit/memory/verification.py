"""Runs a user's script on the real GPU for a few steps and measures memory and step time.

Runs in a process of its own (``main``). The script is not disturbed: a hook after each
optimizer step notes PyTorch's own counters and records a CUDA event, which does not wait for
the device. Nothing is measured by a wait before the last step is over, and an error of ours
never reaches the script.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import torch

from trainfit.hardware.local_gpu import process_bytes
from trainfit.memory.calibration import outside_bytes
from trainfit.results.real_runs import RealRunOutcome
from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.trace import ScriptOutcome
from trainfit.scripts.measuring import describe, device
from trainfit.scripts.real_run import ScriptRun


class RealRun(ScriptRun):
    """One run of a script on the real GPU."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self._events: list[Any] = []
        self._allocated = self._reserved = 0

    def run(self) -> None:
        """Run the script to its stop or its end and write the outcome."""
        with device(self.spec.gpu, self.spec.constants):
            super().run()

    def enough(self) -> bool:
        return self.steps >= self.spec.steps

    def note(self) -> None:
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

    def keep(self, end: ScriptOutcome) -> None:
        outcome = RealRunOutcome(**vars(end))
        # A device that hangs would hang who waits for it.
        if end.status != "timeout":
            with contextlib.suppress(Exception):  # the device may be in no state to answer
                outcome = self._measured(outcome)
        outcome.save(self.spec.outcome)

    def _measured(self, outcome: RealRunOutcome) -> RealRunOutcome:
        """The outcome with what the device says, now that waiting for it disturbs nobody."""
        if not torch.cuda.is_initialized():
            return outcome
        self._note_peaks()
        outside = outside_bytes()
        shown = process_bytes(self.process) if self.spec.gpu is None else None
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
    RealRun(RunSpec.load(Path(sys.argv[1]))).run()
