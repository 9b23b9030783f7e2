"""What the recordings in a result say: memory over the step and by batch size, operators, time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from trainfit.hardware import GpuNameError, GpuSpec, find_gpu
from trainfit.memory.affine import AffineStream
from trainfit.memory.capacity import context_parts
from trainfit.memory.explanation import recorded_settings, replayed, summarize
from trainfit.memory.peak import held_by_kind, step_memory
from trainfit.memory.replay import Replay, Stream, replay
from trainfit.plan.sizing.costing import has_rates, machine_of, memory_law
from trainfit.plan.sizing.generation import generation
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.results.gpus import total
from trainfit.results.memory import BatchMemory, RecordingSummary
from trainfit.results.plan import HostCpu, JobDetail, PlanResult
from trainfit.results.runs.recording import (
    FREE,
    KINDS,
    MALLOC,
    PHASES,
    NotAffineError,
    Recording,
    step_ends,
)
from trainfit.results.runs.steps import DTYPES, MARKS
from trainfit.results.runs.steps import KINDS as KERNEL_KINDS
from trainfit.results.speed import KernelSpan, MemoryPoint, OperatorSpan, StepTimeline, StepWork
from trainfit.speed.step import HostedGpu, LaunchedWork, TimedWork, step_work
from trainfit.speed.timeline import Timeline
from trainfit.speed.work import Floats, Work, steady

# ---
# The steady step of a recording over time: what the CPU dispatches, the GPU runs, memory holds.


_MARKS: Final = frozenset(KERNEL_KINDS.index(name) for name in MARKS)


def step_timeline(recording: Recording, machine: HostedGpu) -> StepTimeline | None:
    """``None`` where the recording has no whole step or no kernels, or the GPU no known rates."""
    if not has_rates(machine.gpu) or not recording.steps:
        return None
    step = steady(recording)
    work = Work.of_step(recording, step)
    if not len(work.table):
        return None
    timeline, costed = Timeline(), TimedWork(work, machine)
    launched = costed.launch(timeline)
    ends = _operator_ends(work, launched)
    first = int(np.flatnonzero(recording.op_step == step)[0])
    return StepTimeline(
        machine.gpu.name,
        step,
        timeline.end_s,
        _operators(recording, first, ends),
        _kernels(work, launched, costed.seconds + costed.copies),
        _memory(recording, step, first, ends),
    )


def _operator_ends(work: Work, launched: LaunchedWork) -> Floats:
    """When the CPU is done with each operator: all later ones wait for what a launch waited for."""
    waited = np.zeros(len(launched.operator_s))
    np.maximum.at(waited, work.op, launched.launched_s - launched.issued_s)
    ends: Floats = launched.operator_s + np.maximum.accumulate(waited)
    return ends


def _operators(recording: Recording, first: int, ends: Floats) -> tuple[OperatorSpan, ...]:
    strings, begins = recording.strings, np.concatenate(([0.0], ends[:-1]))
    spans = []
    for place, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        index = first + place
        module = int(recording.op_module[index])
        spans.append(
            OperatorSpan(
                strings[int(recording.op_name[index])],
                PHASES[int(recording.op_phase[index])],
                strings[module] if module >= 0 else "",
                begin,
                end,
            )
        )
    return tuple(spans)


def _kernels(work: Work, launched: LaunchedWork, took: Floats) -> tuple[KernelSpan, ...]:
    names = ("kind", "dtype", "flops", "read", "written")
    kinds, dtypes, flops, read, written = (work.column(name).tolist() for name in names)
    ends, seconds = launched.ended_s.tolist(), took.tolist()
    return tuple(
        KernelSpan(
            KERNEL_KINDS[kinds[index]],
            DTYPES[dtypes[index]],
            int(work.stream[index]),
            int(work.op[index]),
            ends[index] - seconds[index],
            ends[index],
            flops[index],
            read[index] + written[index],
        )
        for index in range(len(kinds))
        if kinds[index] not in _MARKS
    )


def _memory(recording: Recording, step: int, first: int, ends: Floats) -> tuple[MemoryPoint, ...]:
    """A point for each operator that changes it; a free is put at the operator of the allocation
    before it, as the recording has no other time of it."""
    stream = Stream.of(recording)
    at_ends = step_ends(recording.events)
    begin, end = (int(at_ends[step - 1]) + 1 if step else 0), int(at_ends[step])
    held = held_by_kind(recording, stream, replay(stream).granted, begin, end)
    codes, numbers = recording.events[begin:end] & 3, recording.events[begin:end] >> 2
    changes = np.flatnonzero((codes == MALLOC) | (codes == FREE))
    places = np.clip(recording.alloc_op[numbers[changes]] - first, 0, len(ends) - 1)
    times = np.maximum.accumulate(np.where(codes[changes] == MALLOC, ends[places], 0.0))
    rows = held[[0, *(1 + changes)]].tolist()
    return tuple(
        MemoryPoint(time_s, dict(zip(KINDS, row, strict=True)))
        for time_s, row in zip((0.0, *times.tolist()), rows, strict=True)
    )


#: GPUs of common sizes, for a comparison of capacities.
_COMMON: Final = ("T4", "RTX 4090", "A100 40GB", "L40S", "H100 SXM", "H200")
#: Batch sizes at most, and events of the allocator that all of them may have together (a second).
_SIZES: Final = 12
_EVENTS: Final = 300_000
#: How far batch sizes go, as a multiple of the largest that fits, or of the recorded one.
_BEYOND: Final = 1.5


def explained(result: object, name: str) -> tuple[object, JobDetail | None]:
    """What a report shows of a result from the file ``name``, and what its recordings say.

    ``None``: it has none. Raises :class:`ResultFileError` for a damaged recording.
    """
    if isinstance(result, PlanResult):
        return result, detail_of_plan(result, Path(name))
    if isinstance(result, Recording):
        outcome = replayed(result)
        summary = with_generation(summarize(result, name, outcome=outcome), result)
        return summary, _of_recording(result, outcome)
    return result, None


def with_generation(summary: RecordingSummary, recording: Recording) -> RecordingSummary:
    """The same summary with what is known of the text that the script generates, and whether all of
    it fits."""
    gpu = _found(summary.gpu)
    if gpu is None:
        return summary
    settings, others = recorded_settings(recording), summary.other_processes_bytes
    model = MemoryModel(gpu, settings, 0.0, context_parts(recording), others)
    found = generation(recording, machine_of(gpu), model, recording.header.get("batch_size"))
    if found is None:
        return summary
    full = summary.out_of_memory
    if full is None and summary.memory.device_bytes > model.capacity_bytes:
        full = f"the GPU is full before the {found.new_tokens:,} new tokens are made"
    return dataclasses.replace(summary, generation=found, out_of_memory=full)


def detail_of_plan(result: PlanResult, path: Path) -> JobDetail:
    """The detail of the job as it is; empty where the result holds no recordings (its printed form,
    an early version). Raises :class:`ResultFileError` for ``path`` where one is damaged."""
    if not result.recordings:
        return JobDetail()
    kept = [(each.batch_size, each.recording(path)) for each in result.recordings]
    pair = [(batch, recording) for batch, recording in kept[-2:] if batch is not None]
    largest = result.chosen.largest_batch
    batch, recording = kept[0]
    outcome = replay(Stream.of(recording), settings=recorded_settings(recording))
    return JobDetail(
        memory=step_memory(recording, outcome, batch),
        work=_work(recording, result.gpu, result.cpu),
        batches=_batches(recording, pair, largest),
        gpu_bytes=_gpus(result.gpu, recording.header["gpu_memory_bytes"]),
    )


def timeline_of(result: PlanResult | Recording, name: str) -> StepTimeline | None:
    """The step of the job as it is, over time; ``None`` where the result does not tell.

    Raises :class:`ResultFileError` for a damaged recording in the file ``name``.
    """
    if isinstance(result, Recording):
        return _timeline(result, result.header["gpu"])
    if not result.recordings:
        return None
    return _timeline(result.recordings[0].recording(Path(name)), result.gpu, result.cpu)


def _timeline(recording: Recording, name: str, cpu: HostCpu | None = None) -> StepTimeline | None:
    gpu = _found(name)
    return step_timeline(recording, machine_of(gpu, cpu)) if gpu is not None else None


def _of_recording(recording: Recording, outcome: Replay) -> JobDetail:
    """The detail of one recorded run, which was replayed."""
    header = recording.header
    batch, gpu = header.get("batch_size"), header["gpu"]
    return JobDetail(
        memory=step_memory(recording, outcome, batch if isinstance(batch, int) else None),
        work=_work(recording, gpu),
    )


def _work(recording: Recording, name: str, cpu: HostCpu | None = None) -> StepWork | None:
    gpu = _found(name) if len(recording.kernel_op) else None
    if gpu is None or not has_rates(gpu):
        return None
    return step_work(recording, machine_of(gpu, cpu))


def _batches(
    recording: Recording, pair: Sequence[tuple[int, Recording]], largest: int | None
) -> tuple[BatchMemory, ...]:
    """Evenly spaced batch sizes, fewer of a job with many allocations."""
    law = _law(pair)
    if law is None:
        return ()
    settings, context = recorded_settings(recording), total(context_parts(recording))[0]
    many = min(_SIZES, _EVENTS // len(law.template.events))
    top = max(round(_BEYOND * (largest or 0)), *law.batches)
    sizes = {1, *law.batches, *(max(1, round(top * n / many)) for n in range(1, many + 1))}
    memory = []
    for size in sorted(sizes) if many > 2 else ():
        outcome = replay(law.at(size), settings=settings)
        reserved = outcome.peak_reserved
        memory.append(BatchMemory(size, outcome.peak_allocated, reserved, reserved + context))
    return tuple(memory)


def _law(pair: Sequence[tuple[int, Recording]]) -> AffineStream | None:
    if len(pair) != 2 or pair[0][0] == pair[1][0]:
        return None
    try:
        law = memory_law(pair)
    except NotAffineError:
        return None
    return law if law.depends_on_batch else None


def _gpus(planned: str, capacity: int) -> dict[str, int]:
    """The planned GPU, and common ones of other sizes."""
    known = {planned: capacity}
    for name in _COMMON:
        gpu = _found(name)
        if gpu is not None and all(
            abs(gpu.memory_bytes / each - 1) > 0.1 for each in known.values()
        ):
            known[gpu.key] = gpu.memory_bytes
    return known


def _found(name: str) -> GpuSpec | None:
    try:
        return find_gpu(name)
    except GpuNameError:
        return None
