"""The GPUs of a job of one process: what each holds and does, and what it costs to use them so."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from trainfit.findings.habits import DATA_PARALLEL, TAKES_TURNS
from trainfit.hardware.gpu.topology import link_of
from trainfit.memory.replay import Stream, of_each_gpu
from trainfit.plan.sizing.costing import has_rates
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.plan.sizing.speed import transfers as transfers_of
from trainfit.results.findings import Evidence, Finding, Fix, Place, fails_later
from trainfit.results.runs.recording import Recording, gpu_of
from trainfit.results.runs.steps import MARKS, TRANSFERS
from trainfit.results.speed import CollectiveTime, GpuShare, GpusOfProcess
from trainfit.results.text import count, duration, percent, size
from trainfit.speed.collectives import one_collective
from trainfit.speed.step import HostedGpu, TimedWork, step_time
from trainfit.speed.work import Work

#: Together they do little more than one GPU would.
_TAKE_TURNS: Final = 1.25
#: Copies of a model are as loaded as each other, nearly.
_ALIKE: Final = 0.1


def gpus_of_process(
    recording: Recording, machine: HostedGpu, memory_model: MemoryModel
) -> GpusOfProcess | None:
    """The GPUs of a job of one process that uses several; ``None`` for another."""
    stream = Stream.of(recording)
    if len(stream.gpus) < 2:
        return None
    busy: dict[int, float] = {}
    transfers: tuple[CollectiveTime, ...] = ()
    ddp_s = None
    if recording.steps:
        work = Work.of_steady_step(recording)
        transfers = transfers_of(work, machine)
        if has_rates(machine.gpu) and len(work.table):
            busy = _busy(work, machine)
            ddp_s = _by_ddp(work, machine, len(stream.gpus))
    shares = []
    for outcome in of_each_gpu(stream, settings=memory_model.settings):
        figures = memory_model.figures(outcome)
        shares.append(
            GpuShare(
                outcome.gpu,
                outcome.peak_allocated,
                figures.device_bytes,
                busy.get(outcome.gpu, 0.0) if busy else None,
            )
        )
    replicated = any(each.kind == "broadcast" for each in transfers)
    words = link_of(machine.gpu).words
    return GpusOfProcess(words, tuple(shares), transfers, replicated, ddp_s if replicated else None)


def _busy(work: Work, machine: HostedGpu) -> dict[int, float]:
    """The share of a step in which each GPU computes."""
    timed, took = TimedWork(work, machine), step_time(work, machine).seconds
    totals = np.bincount(gpu_of(work.stream), weights=timed.seconds) / work.steps
    return {gpu: float(total) / took for gpu, total in enumerate(totals.tolist())}


def _by_ddp(work: Work, machine: HostedGpu, gpus: int) -> float | None:
    """Seconds of a step with a process for each GPU: what the first GPU does here, without what
    passes between them, and an all-reduce of the gradients after it.

    The first GPU also computes the loss of all samples here: it is no less than DDP takes.
    """
    summed = work.is_kind("reduce")
    nbytes = int(work.column("read")[summed].sum()) // work.steps
    if not nbytes:
        return None
    mine = (gpu_of(work.stream) == 0) & ~work.is_kind(*TRANSFERS)
    # An operator without kernels belongs to where the last one with some ran.
    of_first = np.zeros(len(work.op_phase), dtype=np.int64)
    kernels = ~work.is_kind(*MARKS)
    of_first[work.op[kernels & mine]] = 1
    of_first[work.op[kernels & ~mine]] = -1
    known = np.maximum.accumulate(np.where(of_first != 0, np.arange(len(of_first)), 0))
    others = of_first[known] < 0
    alone = work.without(others)
    still = (gpu_of(alone.stream) == 0) & ~alone.is_kind(*TRANSFERS, *MARKS)
    alone = dataclasses.replace(
        alone, table=alone.table[still], stream=alone.stream[still], op=alone.op[still]
    )
    reduced = one_collective("all_reduce", nbytes, gpus, link_of(machine.gpu))
    return step_time(alone, machine).seconds + reduced


# -- what is to be said ----------------------------------------------------------------------------


def of_gpus(
    gpus: GpusOfProcess | None, step_s: float | None, machine: int, batch: int | None
) -> tuple[Finding, ...]:
    """What is wrong with how a process uses its GPUs; ``step_s`` is what a step of a ``batch``
    takes, ``machine`` how many GPUs there are."""
    if gpus is None:
        return ()
    if gpus.replicated:
        return (_data_parallel(gpus, step_s, machine, batch),)
    known = [each.busy_share for each in gpus.shares if each.busy_share is not None]
    if len(known) < len(gpus.shares) or sum(known) > _TAKE_TURNS:
        return ()
    return (
        Finding(
            "gpus_take_turns",
            "warning",
            f"the {len(known)} GPUs take turns: together they compute {percent(sum(known))} of the "
            "time of one",
            _evidence(gpus.shares, step_s),
            TAKES_TURNS.cause,
            (Fix(TAKES_TURNS.action),),
            share=max(0.0, 1 - sum(known) / len(known)),
        ),
    )


def _data_parallel(
    gpus: GpusOfProcess, step_s: float | None, machine: int, batch: int | None
) -> Finding:
    evidence, gain, cost = list(_evidence(gpus.shares, step_s)), None, ""
    passing, cause = sum(each.seconds for each in gpus.transfers), DATA_PARALLEL.cause
    if passing and step_s is not None:
        nbytes = sum(each.nbytes for each in gpus.transfers)
        words = f"{size(nbytes)} in {duration(passing)}"
        evidence.append(Evidence("between the GPUs in each step", words))
        cause += f". In a step of {duration(step_s)}, {words} pass between them"
    if gpus.ddp_s is not None and step_s is not None and gpus.ddp_s < step_s:
        gain, words = step_s / gpus.ddp_s, duration(gpus.ddp_s)
        evidence.append(Evidence("a step with DistributedDataParallel, at most", words))
        cause += f"; a step with DistributedDataParallel needs {words} at most"
        cost = "each process reads its own part of the batch: divide --batch-size by the GPUs"
    title, used = _title(gpus.shares), len(gpus.shares)
    each = math.ceil((batch or 0) / machine)  # torch.chunk's parts, but for the last
    if used < machine and batch and math.ceil(batch / each) == used:
        title += f"; {count(machine - used, 'GPU')} of {machine} without work"
        cause += f". {batch} samples make {used} parts of {each}: a multiple of {machine} fills all"
    return Finding(
        "data_parallel",
        "warning",
        title,
        tuple(evidence),
        cause,
        (Fix(DATA_PARALLEL.action, gain=gain, cost=cost),),
        share=None if gain is None else 1 - 1 / gain,
    )


def _title(shares: Sequence[GpuShare]) -> str:
    first, rest = shares[0], shares[1:]
    most = max(each.device_bytes for each in rest)
    words = f"DataParallel: GPU 0 holds {size(first.device_bytes)}, the others {size(most)}"
    busy = [each.busy_share for each in shares]
    known = [each for each in busy if each is not None]
    if len(known) < len(busy) or known[0] - max(known[1:]) < _ALIKE * known[0]:
        return words
    return f"{words}; it computes {percent(known[0])} of the time, they {percent(max(known[1:]))}"


def _evidence(shares: Sequence[GpuShare], step_s: float | None) -> tuple[Evidence, ...]:
    busy = [
        Evidence(f"GPU {each.gpu} computes", percent(each.busy_share))
        for each in shares
        if each.busy_share is not None
    ]
    return (*busy, *([] if step_s is None else [Evidence("a step", duration(step_s))]))


# ---
# What ranks put on a GPU of another rank.


def strays(
    other: Recording | None, rank: int, first: Recording, memory_model: MemoryModel, now: int
) -> tuple[Finding, ...]:
    """The finding that rank ``rank`` has tensors on the GPU of rank 0, which needs ``now`` bytes by
    itself.

    Each process that uses a GPU has a context there. The ranks between are taken to do the same.
    """
    others = max(1, first.ranks // memory_model.gpu.machines) - 1
    # A recording has the rank's own GPU as the first, and that in its place (Recording.seen_from).
    own = rank % memory_model.gpu.count
    if other is None or not own:
        return ()
    held_on = {
        each.gpu: each for each in of_each_gpu(Stream.of(other), settings=memory_model.settings)
    }
    stray, mine = held_on.get(own), held_on.get(0)
    if stray is None or mine is None or not stray.peak_allocated or not mine.peak_allocated:
        return ()
    held = stray.peak_reserved
    need = others * (held + memory_model.gpu.context_bytes)
    place = _largest_on(other, own)
    full = now + need > memory_model.capacity_bytes
    finding = Finding(
        "gpu_of_another_rank",
        "critical" if full else "warning",
        f"Rank {rank} puts {size(stray.peak_allocated)} on GPU 0, which is rank 0's: the other "
        f"{count(others, 'rank')} may need {size(need)} there",
        (
            Evidence(f"of rank {rank} on GPU 0", size(held)),
            Evidence(f"of rank {rank} on GPU {own}", size(mine.peak_reserved)),
            Evidence("all ranks on GPU 0", size(now + need)),
        ),
        "tensors are made on, or loaded to, GPU 0 in every rank, and each process has a CUDA "
        "context there, too",
        (
            Fix(
                'torch.load(…, map_location="cpu"), and torch.cuda.set_device(local_rank) before '
                "the first tensor"
            ),
        ),
        place=place,
    )
    if not full:
        return (finding,)
    there = f"on GPU 0: with what the other ranks put there it needs {size(now + need)}"
    return (finding, fails_later(f"out of memory {there}", there))


def _largest_on(recording: Recording, gpu: int) -> Place | None:
    """The user's line of the largest allocation on a GPU."""
    there = np.flatnonzero((gpu_of(recording.alloc_stream) == gpu) & (recording.alloc_line >= 0))
    if not len(there):
        return None
    line = recording.alloc_line[there[np.argmax(recording.alloc_bytes[there])]]
    return Place.parse(recording.strings[line])
