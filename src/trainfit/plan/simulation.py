"""One simulated run of a command, kept as a recording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainfit.hardware import GpuSpec
from trainfit.memory.summary import summarize
from trainfit.plan.command import Command
from trainfit.plan.failures import ScriptError, require_step, script_output, shortfall
from trainfit.plan.tracing import Tracer, allocator_settings
from trainfit.results.constants import DeviceConstants
from trainfit.results.summary import RecordingSummary


def simulate_command(
    command: Command,
    gpu: GpuSpec,
    gpu_name: str,
    *,
    steps: int,
    time_limit_s: float,
    output: Path,
    progress: Callable[[str], None],
    constants: DeviceConstants | None = None,
) -> tuple[RecordingSummary, ScriptError | None]:
    """Simulate ``command`` at the GPU's capacity and save the recording to ``output``.

    Returns its figures and, where the script failed after a step, how. The recording is
    saved whatever becomes of the script; raises :class:`ScriptError` where it made no
    optimizer step on the GPU for another reason than memory.
    """
    settings = allocator_settings(command)
    progress(f"simulating {command.name} on {gpu.key}")
    with Tracer(
        command,
        gpu_name,
        gpu_memory_bytes=gpu.memory_bytes,
        steps=steps,
        limited=True,
        time_limit_s=time_limit_s,
        constants=constants,
    ) as tracer:
        trace = tracer.trace()
    recording = trace.recording
    if recording is not None and not len(recording.op_name):
        recording = None  # nothing to keep
    if recording is not None:
        recording.save(output)
    outcome = trace.outcome
    place = f"{outcome.location}: " if outcome.location else ""
    full = f"{place}{outcome.message}" if outcome.status == "out_of_memory" else None
    if full is None or recording is None:
        try:
            require_step(trace, command)
        except ScriptError as error:
            if recording is not None:
                error.add_note(f"what was recorded until then is in {str(output)!r}")
            raise
    assert recording is not None
    summary = summarize(recording, str(output), settings=settings, out_of_memory=full)
    failure = None if full else shortfall(trace, command)
    if failure is None:
        return summary, None
    return summary, ScriptError(failure, script_output(trace))
