"""One simulated run of a command, kept as a recording."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from trainfit.hardware import GpuSpec
from trainfit.memory.summary import summarize
from trainfit.plan.command import Command
from trainfit.plan.failures import require_step
from trainfit.plan.tracing import Tracer
from trainfit.results.summary import RecordingSummary
from trainfit.simgpu.allocator import AllocatorSettings


def simulate_command(
    command: Command,
    gpu: GpuSpec,
    gpu_name: str,
    *,
    steps: int,
    time_limit_s: float,
    output: Path,
    progress: Callable[[str], None],
) -> RecordingSummary:
    """Simulate ``command`` at the GPU's capacity and save the recording to ``output``.

    The recording is saved whatever becomes of the script; raises
    :class:`~trainfit.plan.failures.ScriptError` where it made no optimizer step for
    another reason than memory.
    """
    progress(f"simulating {command.name} on {gpu.key}")
    with Tracer(
        command,
        gpu_name,
        gpu_memory_bytes=gpu.memory_bytes,
        steps=steps,
        limited=True,
        time_limit_s=time_limit_s,
    ) as tracer:
        trace = tracer.trace()
    if trace.recording is not None:
        trace.recording.save(output)
    outcome = trace.outcome
    full = outcome.message if outcome.status == "out_of_memory" else None
    if full is None or trace.recording is None:
        require_step(trace, command)
    assert trace.recording is not None
    settings = AllocatorSettings.from_environment(os.environ)
    return summarize(trace.recording, str(output), settings=settings, out_of_memory=full)
