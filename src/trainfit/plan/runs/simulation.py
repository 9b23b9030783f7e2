"""One simulated run of a command, kept as a recording."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from trainfit.findings.habits import of_evaluation
from trainfit.findings.habits import of_steps as of_habits
from trainfit.findings.out_of_memory import of_request
from trainfit.findings.training.learning import of_later_learning, of_learning
from trainfit.hardware import GpuSpec
from trainfit.lint.modes import may_stay_in_evaluation
from trainfit.memory.explanation import summarize
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import CommandError
from trainfit.plan.runs.failures import (
    ScriptError,
    absent_kernels,
    cause_of,
    ends_early,
    is_inference,
    mistakes_of,
    require_step,
    script_output,
    settings_of,
    shortfall,
    updates_by_itself,
)
from trainfit.plan.runs.progress import Progress, as_progress
from trainfit.plan.runs.side_by_side import pipeline_of
from trainfit.plan.runs.tracing import Trace, Tracer, allocator_settings
from trainfit.results.files.decoding import as_json
from trainfit.results.findings import Finding, Place
from trainfit.results.gpus import DeviceConstants
from trainfit.results.memory import RecordingSummary
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import AS_WRITTEN, RunSpec
from trainfit.results.runs.trace import LoaderCut, LoaderOverride, TraceOutcome
from trainfit.results.text import line_of
from trainfit.speed.efficiency import FITTED
from trainfit.speed.slow_lines import float64_on_gpu, loops_on_gpu, sampling_before_step
from trainfit.speed.step import HostedGpu

#: Optimizer steps of an epoch that is cut short, and seconds for a run of three of them.
_EPOCH_STEPS: Final = 2
_EPOCHS_LIMIT_S: Final = 30.0


def simulate_command(
    command: Command,
    gpu: GpuSpec,
    *,
    steps: int | None,
    time_limit_s: float,
    output: Path,
    progress: Callable[[str], None],
    batch_size: int | None = None,
    constants: DeviceConstants | None = None,
) -> tuple[RecordingSummary, Recording, ScriptError | KeyboardInterrupt | None]:
    """Simulate ``command`` at the GPU's capacity and save the recording to ``output``.

    ``batch_size`` goes into its placeholder, else into the DataLoader that feeds the first
    step, which a first run of one step finds out.

    Returns its figures, the recording and, where the script failed after a step, how, or the user's
    interrupt. The recording is saved whatever becomes of the script; raises :class:`ScriptError`
    where it made no optimizer step on the GPU for another reason than memory.
    """
    settings = allocator_settings(command)
    spec = AS_WRITTEN
    if batch_size is not None and "batch_size" in command.present:
        spec = RunSpec(values={"batch_size": str(batch_size)})
    elif batch_size is not None:
        progress(f"looking for the DataLoader of {command.name}")
        first = Tracer(command, gpu, steps=1, time_limit_s=time_limit_s, constants=constants)
        with first as tracer:
            spec = RunSpec(loader=_feeding(tracer.trace(), command, batch_size))
    shown = as_progress(progress)
    shown.expect(1)
    shown.begin(1, f"simulating {command.name} on {gpu.key}")
    with Tracer(
        command,
        gpu,
        steps=steps,
        limited=True,
        time_limit_s=time_limit_s,
        constants=constants,
        keeps_interrupted=True,
    ) as tracer:
        trace = tracer.trace(spec, heard=functools.partial(shown.status, 1))
        if (ranks := pipeline_of(trace.outcome)) and trace.interrupt is None:
            shown.begin(1, f"simulating the {len(ranks)} ranks of its pipeline side by side")
            tracer.company = ranks
            trace = tracer.trace(spec, heard=functools.partial(shown.status, 1))
        if is_inference(trace) and trace.interrupt is None:
            shown.begin(1, f"simulating the calls of {command.name}, which does not train")
            spec = dataclasses.replace(spec, count="calls")
            trace = tracer.trace(spec, heard=functools.partial(shown.status, 1))
        elif not trace.outcome.steps and updates_by_itself(trace) and trace.interrupt is None:
            shown.begin(1, f"simulating {command.name}, whose optimizer is none of PyTorch's")
            spec = dataclasses.replace(spec, count="backwards")
            trace = tracer.trace(spec, heard=functools.partial(shown.status, 1))
        later = _of_next_epoch(tracer, spec, trace, command, shown)
    shown.end(1)
    outcome = trace.outcome
    place = f"{outcome.location}: " if outcome.location else ""
    full = f"{place}{outcome.message}" if outcome.status == "out_of_memory" else None
    recording = trace.recording
    if recording is not None and not len(recording.op_name):
        recording = None  # nothing to keep
    if recording is not None:
        recording = _described(recording, trace, command, spec.values, full, gpu, later)
        if spec.loader is not None:
            # The command alone does not run what was recorded.
            recording = dataclasses.replace(recording, header={**recording.header, "command": ""})
        recording.save(output)
    if full is None or recording is None:
        try:
            require_step(trace, command)
        except ScriptError as error:
            if trace.interrupt is not None:
                raise trace.interrupt from None
            if recording is not None:
                error.add_note(f"the recording so far is in {str(output)!r}")
            raise
    assert recording is not None
    summary = summarize(recording, str(output), settings=settings, out_of_memory=full)
    if trace.interrupt is not None:
        return summary, recording, trace.interrupt
    failure = None if full else shortfall(trace, command)
    if failure is None:
        return summary, recording, None
    cause = cause_of(outcome, trace.output)
    return summary, recording, ScriptError(failure, script_output(trace), outcome.own_fault, cause)


def _feeding(trace: Trace, command: Command, batch_size: int) -> LoaderOverride:
    """The DataLoader that accepts another batch size; raises where there is none."""
    require_step(trace, command)
    loader = trace.outcome.loader
    if loader is None or loader.index is None or loader.batch_size is None:
        raise CommandError(
            f"--batch-size {batch_size}: no DataLoader with a batch size fed the first step of "
            f"{command.name}; write {{batch_size:N}} into the command"
        )
    return LoaderOverride(loader.index, batch_size)


def _of_next_epoch(
    tracer: Tracer, spec: RunSpec, trace: Trace, command: Command, shown: Progress
) -> tuple[Finding, ...]:
    """What a model does wrong from the second epoch on that its source switches to evaluation and
    not back: of a run of short epochs. Of other scripts, and where that run fails, nothing."""
    outcome, loader = trace.outcome, trace.outcome.loader
    coverage = outcome.coverage
    is_over = outcome.status == "finished" and trace.interrupt is None and spec.count == "steps"
    if not is_over or loader is None or loader.index is None or command.kind != "script":
        return ()
    if coverage is None or coverage.evaluated or pipeline_of(outcome):
        return ()
    if not may_stay_in_evaluation(Path(command.name), outcome.files):
        return ()
    shown.begin(1, f"simulating the first epochs of {command.name}, cut short")
    makeup = None if trace.recording is None else trace.recording.makeup
    batches = (makeup.loader_batches if makeup is not None else None) or 1
    cut = LoaderCut(loader.index, _EPOCH_STEPS * batches, 1, goes_on=True)
    short = dataclasses.replace(spec, cut=cut, steps=3 * _EPOCH_STEPS, time_limit_s=_EPOCHS_LIMIT_S)
    known = {finding.kind for finding in of_learning(outcome.learning)}
    findings = of_later_learning(tracer.trace(short).outcome.learning)
    return tuple(finding for finding in findings if finding.kind not in known)


def _of_full_gpu(outcome: TraceOutcome) -> Iterator[Finding]:
    if outcome.request is not None:
        yield from of_request(outcome.request, Place.parse(outcome.location))


def _described(
    recording: Recording,
    trace: Trace,
    command: Command,
    values: Mapping[str, str],
    out_of_memory: str | None,
    gpu: GpuSpec,
    later: Sequence[Finding],
) -> Recording:
    """The recording with what is known of its command: batch size, script, words, end, and what is
    wrong with it."""
    header = recording.header.copy()
    if out_of_memory is not None:
        header["out_of_memory"] = out_of_memory
    protection, coverage = trace.outcome.protection, trace.outcome.coverage
    if protection is not None:
        header["protection"] = json.loads(as_json(protection))
    if coverage is not None:
        header["coverage"] = json.loads(as_json(coverage))
    findings = (
        *ends_early(trace, command),
        *mistakes_of(command, trace.outcome),
        *settings_of(command, trace.outcome, recording, is_full=out_of_memory is not None),
        *of_learning(trace.outcome.learning),
        *later,
        *of_evaluation(coverage),
        *of_habits(recording.makeup),
        *loops_on_gpu(recording),
        *float64_on_gpu(recording, HostedGpu(gpu, FITTED)),
        *sampling_before_step(recording, HostedGpu(gpu, FITTED)),
        *_of_full_gpu(trace.outcome),
    )
    header["findings"] = [json.loads(as_json(finding)) for finding in findings]
    said = trace.outcome.context.warning(), absent_kernels(trace.outcome)
    if any(said):
        header["notes"] = [*filter(None, said), *(header.get("notes") or ())]
    header["script"], header["template"] = command.name, line_of(command.words)
    text = {**command.present, **values}.get("batch_size")
    loader = trace.outcome.loader
    if text is not None:
        header["batch_size"] = int(text)
    elif loader is not None and loader.batch_size is not None:
        header["batch_size"] = loader.batch_size
    return dataclasses.replace(recording, header=header)
