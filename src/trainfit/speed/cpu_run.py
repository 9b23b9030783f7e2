"""Runs a user's script on the CPU for a few steps and measures how long each takes.

Runs in a process of its own (``main``), whose environment shows PyTorch no GPU. Steps end with
the optimizer's step, or with a call of the model; how long the script waits for its DataLoader is
measured separately.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trainfit.results.real_runs import CpuRunOutcome
from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.trace import ScriptOutcome
from trainfit.scripts.real_run import ScriptRun
from trainfit.simgpu.patching import PatchSet
from trainfit.speed.cpu_redirection import cpu_for_cuda
from trainfit.torch_private.data_loading import LoaderIterator


class CpuRun(ScriptRun):
    """One run of a script on the CPU."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self._ended: list[float] = []
        self._waited: list[float] = []
        self._waits_s = 0.0

    def run(self) -> None:
        """Run the script to its stop or its end and write the outcome."""
        patches = PatchSet()
        self._watch_loaders(patches)
        try:
            with cpu_for_cuda() if self.spec.cpu_stands_in else contextlib.nullcontext():
                super().run()
        finally:
            patches.restore()

    def note(self) -> None:
        self._ended.append(time.perf_counter())
        self._waited.append(self._waits_s)

    def enough(self) -> bool:
        spec = self.spec
        if self.steps >= spec.steps or spec.enough_s is None:
            return self.steps >= spec.steps
        passed = time.perf_counter() - self._ended[0] if self._ended else 0.0
        return self.steps >= spec.least_steps and passed >= spec.enough_s

    def keep(self, end: ScriptOutcome) -> None:
        CpuRunOutcome(
            **vars(end),
            step_seconds=tuple(two - one for one, two in itertools.pairwise(self._ended)),
            waited_s=tuple(two - one for one, two in itertools.pairwise(self._waited)),
            threads=torch.get_num_threads(),
        ).save(self.spec.outcome)

    def _watch_loaders(self, patches: PatchSet) -> None:
        kind = LoaderIterator
        original = kind.__next__

        def __next__(iterator: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(iterator)
            finally:
                with contextlib.suppress(Exception):
                    self._waits_s += time.perf_counter() - began

        patches.set(kind, "__next__", __next__)


def main() -> None:
    """The child process's entry point."""
    CpuRun(RunSpec.load(Path(sys.argv[1]))).run()
