"""The process that measures a script's DataLoader, against the step that the speed model predicts
for what the script did on the simulated GPU: ``main()`` with a request file as argument."""

from __future__ import annotations

import sys
from pathlib import Path

from trainfit.hardware import GpuSpec
from trainfit.loader.child import Child
from trainfit.plan.steps.costing import machine_of
from trainfit.plan.steps.speed import batches_per_step, fast_end, speed
from trainfit.plan.steps.step_bound import step_bound
from trainfit.results.runs.loading import AS_FAST, Consumer, LoadingRequest
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.trace import TraceOutcome


def step_from(trace: TraceOutcome, gpu: GpuSpec, recording: Recording | None = None) -> Consumer:
    """The fast end of what is predicted for the simulated step on the GPU; else the least time
    that its work takes; none where that cannot be told either."""
    if trace.compute is None:
        return Consumer(0.0, source=f"{AS_FAST} (no simulated step bounds it)")
    if recording is not None and not trace.compute.compiled:  # what is fused is not known
        predicted = speed(recording, None, machine_of(gpu))
        if predicted is not None:
            return fast_end(predicted.now, gpu.key, recording.makeup)
    bound = step_bound(trace.compute, gpu, trace.autocast)
    batches = batches_per_step(recording.makeup if recording is not None else None)
    several = f"; of {batches} batches (gradient accumulation)" if batches > 1 else ""
    return Consumer(bound.seconds / batches, source=bound.why + several)


def main() -> None:
    """The child process's entry point."""
    request = LoadingRequest.from_json(Path(sys.argv[1]).read_text())
    if request.target is None:
        sys.argv = [sys.argv[0]]
    Child(request, lambda trace, found: step_from(trace, request.gpu, found)).run()
    sys.stdout.flush()
    sys.stderr.flush()
