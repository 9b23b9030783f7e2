"""Runs a user's script on the simulated GPU: ``main()`` with a request file as argument.

This is the child process. The script is stopped with the optimizer step that completes the
wanted number of them, or with which memory has settled. What happened goes to the outcome
file; it and the recording are written before the script is unwound (see
:mod:`trainfit.simgpu.script`).
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from trainfit.hardware import find_gpu
from trainfit.results.recording import Recording
from trainfit.results.trace import Status, TraceOutcome, TraceRequest
from trainfit.simgpu.accelerate_watch import AccelerateWatch
from trainfit.simgpu.inference import InferenceWatch
from trainfit.simgpu.interventions import Interventions
from trainfit.simgpu.loaders import LoaderTracker
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.precision import AutocastSwitch
from trainfit.simgpu.script import Stopper, run_script, watch
from trainfit.simgpu.session import Simulation
from trainfit.simgpu.settling import LEAST_STEPS, judge

#: Attempts at a snapshot of a run that goes on meanwhile.
_SNAPSHOTS = 5


class Runner:
    """One run of a script on the simulated GPU."""

    def __init__(self, request: TraceRequest) -> None:
        gpu = find_gpu(request.gpu)
        if request.gpu_memory_bytes is not None:
            gpu = dataclasses.replace(gpu, memory_bytes=request.gpu_memory_bytes)
        self._request = request
        self._simulation = Simulation(
            gpu, limited=request.limited, constants=request.constants, command=request.command
        )
        self._loaders = LoaderTracker(request.loader)
        self._autocast = AutocastSwitch(
            request.amp, torch.bfloat16 if gpu.supports_bf16 else torch.float16
        )
        self._accelerate = AccelerateWatch()
        self._interventions = Interventions(self._simulation, request.interventions, request.survey)
        self._patches = PatchSet()
        self._started = time.monotonic()
        self._process = os.getpid()
        self._stopper = Stopper()
        self._inference = InferenceWatch(self._simulation, self._interventions)
        self._done = threading.Event()
        self._finishing = threading.Lock()

    def run(self) -> None:
        """Run the script to its stop or its end and write recording and outcome."""
        watch(self._started, self._request.time_limit_s, self._done, self._late)
        with self._simulation:
            self._loaders.install(self._patches)
            self._autocast.install(self._patches)
            self._accelerate.install(self._patches)
            self._interventions.install(self._patches)
            self._simulation.on_step(self._after_step)
            self._interventions.after_call(self._after_call)
            try:
                status, details = run_script(self._request.target)
            finally:
                self._interventions.remove()
                self._accelerate.remove()
                self._autocast.remove()
                self._patches.restore()
        self._finish(status, details)

    def _after_step(self, steps: int) -> None:
        self._loaders.note_step()
        if not self._seen_enough(steps):
            return
        self._finish("finished", {})
        self._stopper.stop()

    def _after_call(self) -> None:
        """A model was called: a step where calls are counted, else maybe the last of an
        inference that would go on and on."""
        if self._request.count == "calls":
            self._simulation.end_step()
        elif self._inference.only_infers():
            self._finish("ended", {})
            self._stopper.stop()

    def _late(self, place: str | None) -> bool:
        return self._finish("timeout", {"location": place})

    def _seen_enough(self, steps: int) -> bool:
        """Are there as many steps as were asked for, or has memory settled before?

        Steps beyond the least number are worth half of the time limit, not all of it.
        """
        request = self._request
        if steps >= request.steps or not request.until_settled:
            return steps >= request.steps
        if steps < LEAST_STEPS:
            return False
        late = time.monotonic() - self._started > request.time_limit_s / 2
        return late or judge(self._simulation.step_uses()).course in ("settled", "growing")

    def _finish(self, status: Status, details: dict[str, Any]) -> bool:
        """Write recording and outcome, once; what the script does later does not count.

        Returns whether this call was the one that did.
        """
        with self._finishing:
            if self._done.is_set() or os.getpid() != self._process:
                return False
            self._done.set()
        faulthandler.cancel_dump_traceback_later()
        recording = self._snapshot()
        if recording is not None:
            recording.save(Path(self._request.recording))
        TraceOutcome(
            status=status,
            steps=self._simulation.steps,
            seconds=time.monotonic() - self._started,
            loader=self._loaders.feeding(),
            loaders=self._loaders.count,
            autocast=self._autocast.used,
            gpu_operators=len(recording.op_name) if recording is not None else 0,
            module_calls=int(recording.header["module_calls"]) if recording is not None else 0,
            optimizers=self._interventions.optimizers,
            forward=self._interventions.forward_calls(),
            compute=self._interventions.compute(),
            findings=self._interventions.findings(),
            changed=self._interventions.changed(),
            accelerate=self._accelerate.from_environment,
            **details,
        ).save(Path(self._request.outcome))
        return True

    def _snapshot(self) -> Recording | None:
        """The recording so far. At the time limit the script goes on in another thread and
        may tear it: then once more, and ``None`` if that does not help."""
        for _ in range(_SNAPSHOTS):
            try:
                recording = self._simulation.recording
                recording.check()
            except (IndexError, ValueError, RuntimeError):
                continue
            return recording
        return None


def main() -> None:
    """The child process's entry point."""
    request = TraceRequest.from_json(Path(sys.argv[1]).read_text())
    Runner(request).run()
