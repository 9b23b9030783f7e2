"""Several GPUs of one job: a pipeline's stages, and the GPUs of one process.

Of a pipeline: what each stage needs, what to change, and how long a step is: its stages' kernels,
and what one waits for that another sends.

Each rank's kernels run in the order of their launches, on one GPU each; a receive is over when what
it brings was sent and has come over the link. Ranks only meet there: what several pipelines do
together is no part of it.

The GPUs of a job of one process: what each holds and does, and what it costs to use them so.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from trainfit.findings.habits import DATA_PARALLEL, TAKES_TURNS
from trainfit.hardware.gpu_topology import link_of
from trainfit.memory.capacity import context_parts
from trainfit.memory.replay import Stream, of_each_gpu
from trainfit.plan.runs.tracing import Trace
from trainfit.plan.sizing.costing import has_rates
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.plan.sizing.speed import transfers
from trainfit.plan.sizing.speed import transfers as transfers_of
from trainfit.results.findings import Evidence, Finding, Fix, Place, fails_later
from trainfit.results.runs.recording import Recording, gpu_of
from trainfit.results.runs.steps import MARKS, TRANSFERS
from trainfit.results.speed import (
    CollectiveTime,
    GpuShare,
    GpusOfProcess,
    PipelineStage,
    Ranks,
    Speed,
    StepSpeed,
)
from trainfit.results.text import count, duration, percent, size
from trainfit.speed.collectives import one_collective
from trainfit.speed.step import HostedGpu, TimedWork, step_time
from trainfit.speed.timeline import WAITS
from trainfit.speed.work import CODES, Work

_SEND_RECEIVE, _EVENT = CODES["send_receive"], CODES["event"]
_EVENT_WAIT: Final = CODES["event_wait"]
_MARKS: Final = frozenset(CODES[name] for name in MARKS)
_WAITS: Final = frozenset(CODES[name] for name in WAITS)
_TRANSFERS: Final = frozenset(CODES[name] for name in TRANSFERS)


@dataclasses.dataclass(frozen=True)
class PipelineStep:
    """``seconds`` of a step, and of each rank those in which its GPU computes."""

    seconds: float
    computing_s: Mapping[int, float]


def pipeline_step(works: Mapping[int, Work], machine: HostedGpu) -> PipelineStep | None:
    """The step of a pipeline from those of all stages, by rank; ``None`` where what is sent and
    what is received in them do not belong together."""
    stages = {rank: _Stage(rank, work, machine) for rank, work in works.items()}
    first = _run(stages)
    second = None if first is None else _run(stages)
    if first is None or second is None:
        return None
    return PipelineStep(second - first, {rank: stage.computes_s for rank, stage in stages.items()})


def _run(stages: Mapping[int, _Stage]) -> float | None:
    """One step of all; when the last of them is done."""
    sent: dict[tuple[int, int], list[float]] = defaultdict(list)
    going = {rank: stage.step(sent) for rank, stage in stages.items()}
    while going:
        went_on = False
        for rank, stage in list(going.items()):
            before = stages[rank].at
            if next(stage, False):
                went_on |= stages[rank].at != before
            else:
                del going[rank]
                went_on = True
        if not went_on:
            return None
    return max(stage.end_s for stage in stages.values())


class _Stage:
    """One rank: its rows in order, and when what it has launched is done."""

    def __init__(self, rank: int, work: Work, machine: HostedGpu) -> None:
        timed = TimedWork(work, machine)
        issued, self._host_s = timed.issued()
        self._rank = rank
        self._rows = list(
            zip(
                *(work.column(name).tolist() for name in ("kind", "rows", "depth", "written")),
                work.stream.tolist(),
                (timed.seconds + timed.copies + timed.links).tolist(),
                issued.tolist(),
                strict=True,
            )
        )
        self.computes_s = float(timed.seconds.sum()) / work.steps
        self._began = self._late = self._computed = 0.0
        self._free: dict[object, float] = {}
        #: When an event came, or the receive that it comes after: from whom, and which.
        self._events: dict[int, float | tuple[int, int, float]] = {}
        self.at = 0

    @property
    def end_s(self) -> float:
        return max(self._began + self._late, self._computed, *self._free.values(), 0.0)

    def step(self, sent: dict[tuple[int, int], list[float]]) -> Iterator[bool]:
        """Goes on as far as it can; each value is a wait for what others have yet to send."""
        received: dict[int, int] = defaultdict(int)
        last: dict[int, float | tuple[int, int, float]] = {}
        self.at = 0
        for kind, number, depth, written, stream, seconds, issued in self._rows:
            self.at += 1
            launched = issued + self._began + self._late
            if kind == _EVENT_WAIT:
                event = self._events.get(number, 0.0)
                while isinstance(event, tuple):
                    source, which, least = event
                    come = sent[source, self._rank]
                    if which < len(come):
                        event = self._events[number] = max(least, come[which])
                    else:
                        yield True
                self._free[stream] = max(self._free.get(stream, 0.0), event)
            elif kind == _EVENT:
                self._events[number] = last.pop(stream, self._free.get(stream, launched))
            elif kind == _SEND_RECEIVE and depth:
                # Each direction of a pair of ranks has a connection of its own.
                peer, begins = depth - 1, max(launched, self._free.get(stream, 0.0))
                if written:
                    last[stream] = (peer, received[peer], begins)
                    received[peer] += 1
                else:
                    way = (stream, peer)
                    end = self._free[way] = max(begins, self._free.get(way, 0.0)) + seconds
                    sent[self._rank, peer].append(end)
                    last[stream] = end
            elif kind in _MARKS and kind not in _WAITS:
                continue
            else:
                computes = kind not in _TRANSFERS and kind not in _WAITS
                begins = max(launched, self._free.get(stream, 0.0))
                if computes:
                    begins = max(begins, self._computed)
                end = self._free[stream] = begins + seconds
                if computes:
                    self._computed = end
                elif kind in _WAITS:  # the host goes on when the GPU has come so far
                    self._late += end - launched
        self._began += self._host_s


#: Bubbles of a larger share of a step are worth a word.
_WORTH_A_WORD: Final = 0.2
#: Stages that differ by no more are balanced.
_BALANCED: Final = 1.2

_STAGES: Final = (
    "each stage of the pipeline was simulated, and what they send each other goes from one to the "
    "next; memory and batch sizes are those of the stage that needs the most"
)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The ranks of a pipeline with one step of each, and that step's seconds (``None``: not known)
    of all of them together."""

    stages: tuple[PipelineStage, ...] = ()
    seconds: float | None = None
    micro_batches: int = 0
    #: Of a step, with ranks that are not of the pipeline.
    collectives: tuple[CollectiveTime, ...] = ()

    def ranks(self, ranks: Ranks | None) -> Ranks | None:
        """The same ranks with what is known of the stages."""
        if ranks is None or not self.stages:
            return ranks
        return dataclasses.replace(
            ranks, stages=self.stages, bubble_share=self.bubble_share, equal=_STAGES
        )

    @property
    def bubble_share(self) -> float | None:
        computing = [stage.computing_s for stage in self.stages]
        known = [computing_s for computing_s in computing if computing_s is not None]
        if not self.seconds or len(known) < len(computing):
            return None
        return max(0.0, 1 - sum(known) / len(known) / self.seconds)

    def speed(self, found: Speed | None) -> Speed | None:
        """Steps as long as the pipeline's: at other batch sizes as much longer than one stage's
        alone as at this one."""
        if found is None or not self.seconds or not self.stages:
            return found
        longer = max(1.0, self.seconds / (found.now.seconds - found.now.slowest_s))
        epoch_s = None if found.epoch_s is None else found.epoch_s * longer
        now, *curve = (_longer(each, longer) for each in (found.now, *found.curve))
        return dataclasses.replace(found, now=now, curve=tuple(curve), epoch_s=epoch_s)

    def findings(self) -> tuple[Finding, ...]:
        """Bubbles, and stages that differ."""
        return (*self._bubble(), *self._uneven())

    def _bubble(self) -> tuple[Finding, ...]:
        share, stages, parts = self.bubble_share, len(self.stages), self.micro_batches
        if share is None or share <= _WORTH_A_WORD or self.seconds is None:
            return ()
        least = (stages - 1) / (parts + stages - 1)
        more = (stages - 1) / (4 * parts + stages - 1)
        kinds = ", ".join(f"{_name(collective.kind)}s" for collective in self.collectives)
        reduced = f", and {kinds} with the other pipelines" if kinds else ""
        return (
            Finding(
                "pipeline_bubble",
                "warning",
                f"the GPUs of the stages compute nothing in {percent(share)} of a step",
                (
                    Evidence("a step", duration(self.seconds)),
                    Evidence("micro-batches", str(parts)),
                    *(
                        Evidence(
                            f"all {_name(collective.kind)}s of a step", duration(collective.seconds)
                        )
                        for collective in self.collectives
                    ),
                    *(
                        Evidence(f"rank {stage.rank} computes", duration(stage.computing_s))
                        for stage in self.stages
                        if stage.computing_s is not None
                    ),
                ),
                f"a pipeline of {stages} stages fills and empties with each step: with {parts} "
                f"micro-batches of equal stages that is {percent(least)} of it, and the rest are "
                f"stages that differ, launches and transfers{reduced}",
                (
                    Fix(
                        f"more micro-batches: with {4 * parts}, filling and emptying is "
                        f"{percent(more)} of a step; an interleaved schedule divides it by its "
                        "stages a rank",
                        cost="smaller micro-batches use the GPU less well",
                    ),
                ),
                share=share,
            ),
        )

    def _uneven(self) -> tuple[Finding, ...]:
        known = [stage for stage in self.stages if stage.computing_s]
        if len(known) < 2 or len(known) < len(self.stages):
            return ()
        slow = max(known, key=lambda each: each.computing_s or 0.0)
        fast = min(known, key=lambda each: each.computing_s or 0.0)
        mean = sum(stage.computing_s or 0.0 for stage in known) / len(known)
        assert slow.computing_s is not None and fast.computing_s is not None
        if slow.computing_s <= _BALANCED * mean:
            return ()
        return (
            Finding(
                "stages_uneven",
                "warning",
                f"the stage of rank {slow.rank} computes {duration(slow.computing_s)} of a step, "
                f"that of rank {fast.rank} {duration(fast.computing_s)}",
                tuple(Evidence(f"rank {e.rank} holds", size(e.device_bytes)) for e in known),
                "a pipeline is as fast as its slowest stage: the others wait for it",
                (Fix(f"move layers from rank {slow.rank}'s stage to rank {fast.rank}'s"),),
                share=1 - mean / slow.computing_s,
            ),
        )


def _longer(step: StepSpeed, longer: float) -> StepSpeed:
    low, high = step.range_s
    rate = step.samples_per_s
    return dataclasses.replace(
        step,
        seconds=step.seconds * longer,
        range_s=(low * longer, high * longer),
        samples_per_s=None if rate is None else rate / longer,
        exposed_s=max(0.0, step.exposed_s + step.seconds * (longer - 1)),
    )


def pipeline(
    traces: Mapping[int, Trace], machine: HostedGpu, memory_model: MemoryModel
) -> Pipeline:
    """The pipeline of the ranks that were simulated side by side; empty where there are none."""
    recordings = {
        rank: trace.recording
        for rank, trace in traces.items()
        if trace.recording is not None and trace.recording.steps
    }
    if len(recordings) < 2 or len(recordings) < len(traces):
        return Pipeline()
    works = {rank: Work.of_steady_step(recording) for rank, recording in recordings.items()}
    sends = [int(_sends(work).sum()) // work.steps for work in works.values()]
    if not any(sends):  # they sent to each other before the steps alone
        return Pipeline()
    step = pipeline_step(works, machine) if has_rates(machine.gpu) else None
    computing = {} if step is None else step.computing_s
    stages = tuple(
        _stage(rank, recording, memory_model, computing.get(rank), works[rank])
        for rank, recording in recordings.items()
    )
    seconds = None if step is None else step.seconds
    times = transfers(works[min(works)], machine)
    others = tuple(time for time in times if time.kind != "send_receive")
    return Pipeline(stages, seconds, max(1, min(sends)), others)


def _name(kind: str) -> str:
    return kind.replace("_", "-")


def _stage(
    rank: int, recording: Recording, model: MemoryModel, computing_s: float | None, work: Work
) -> PipelineStage:
    shown, _ = model.shown(Stream.of(recording))
    figures = model.figures(shown, context_parts(recording))
    sent = int(work.column("read")[_sends(work)].sum()) // work.steps
    return PipelineStage(rank, shown.peak_allocated, figures.device_bytes, computing_s, sent)


def _sends(work: Work) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """A mask of the rows that are sends: they write nothing here."""
    sends: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
        work.is_kind("send_receive") & (work.column("depth") > 0) & (work.column("written") == 0)
    )
    return sends


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
    replicated = any(transfer.kind == "broadcast" for transfer in transfers)
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
    known = [share.busy_share for share in gpus.shares if share.busy_share is not None]
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
    passing, cause = sum(transfer.seconds for transfer in gpus.transfers), DATA_PARALLEL.cause
    if passing and step_s is not None:
        nbytes = sum(transfer.nbytes for transfer in gpus.transfers)
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
    maximum = max(share.device_bytes for share in rest)
    words = f"DataParallel: GPU 0 holds {size(first.device_bytes)}, the others {size(maximum)}"
    busy = [share.busy_share for share in shares]
    known = [share for share in busy if share is not None]
    if len(known) < len(busy) or known[0] - max(known[1:]) < _ALIKE * known[0]:
        return words
    return f"{words}; it computes {percent(known[0])} of the time, they {percent(max(known[1:]))}"


def _evidence(shares: Sequence[GpuShare], step_s: float | None) -> tuple[Evidence, ...]:
    busy = [
        Evidence(f"GPU {share.gpu} computes", percent(share.busy_share))
        for share in shares
        if share.busy_share is not None
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
        replay.gpu: replay
        for replay in of_each_gpu(Stream.of(other), settings=memory_model.settings)
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
