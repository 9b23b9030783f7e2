"""What DDP, ZeRO-1 and FSDP change of a recorded run: estimated from the run on one GPU.

As PyTorch 2.13 has them, at their defaults: ``DistributedDataParallel`` (buckets of 25 MiB, as
large as the gradients together), ``ZeroRedundancyOptimizer`` in addition to it, and ``fully_shard``
of each element of the model's longest list of modules and of the root, from the model's creation
on. Every process has the recorded batch size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np

from trainfit.hardware.context_memory import nccl_memory
from trainfit.memory.capacity import context_parts
from trainfit.plan.parallel_recording import (
    Rewriting,
    Sharded,
    Use,
    gradients_of,
    micro_batches,
    parameters_of,
    units_of,
    uses_of,
)
from trainfit.results.gpus import COMMUNICATION
from trainfit.results.runs.recording import KINDS, PHASES, IntArray, Recording, RecordingHeader
from trainfit.results.runs.steps import COLLECTIVES
from trainfit.results.runs.steps import KINDS as KERNEL_KINDS
from trainfit.results.speed import Strategy
from trainfit.results.text import MIB

# ---
# A job that was simulated with DDP: among another number of processes, and of one alone.


_CODES: Final = {name: code for code, name in enumerate(KERNEL_KINDS)}
#: What passes where each process has but a part of the model (FSDP, tensor parallelism, pipelines).
_OF_PARTS: Final = ("reduce_scatter", "all_to_all", "send_receive")
_GRADIENT: Final = KINDS.index("gradient")


def header_of(recording: Recording, ranks: int) -> dict[str, Any]:
    """What the header of a recording says among so many processes."""
    parts = [part for part in context_parts(recording) if part.name != COMMUNICATION]
    if ranks > 1:
        parts.append(nccl_memory(ranks))
    return {"ranks": ranks, "context_parts": [dataclasses.asdict(part) for part in parts]}


def is_sharded(recording: Recording) -> bool:
    """Has each process of a job but a part of the parameters, or of the optimizer's state?"""
    kinds, op = recording.kernel_kind, np.maximum(recording.kernel_op, 0)
    phases = recording.op_phase[op]
    # ZeroRedundancyOptimizer sends what it has updated; tensor parallelism adds up activations.
    updates = (kinds == _CODES["broadcast"]) & (phases == _OPTIMIZER)
    sums = (kinds == _CODES["all_reduce"]) & (phases == _FORWARD) & (recording.op_module[op] >= 0)
    parts = np.isin(kinds, [_CODES[name] for name in _OF_PARTS])
    return bool((updates | sums | parts).any())


def among(recording: Recording, ranks: int) -> Recording:
    """The same DDP among so many processes of one machine."""
    if ranks < 2:
        return alone(recording)
    chosen = _collectives(recording)
    before, gathers = (
        recording.ranks,
        recording.kernel_kind == _CODES["all_gather"],
    )
    read = np.where(gathers, recording.kernel_read * ranks // before, recording.kernel_read)
    return dataclasses.replace(
        recording,
        header=_header(recording, ranks),
        kernel_rows=np.where(chosen, ranks, recording.kernel_rows),
        kernel_columns=np.where(chosen, 0, recording.kernel_columns),
        kernel_read=read,
    )


def alone(recording: Recording) -> Recording:
    """The recording without the buckets and collectives of DDP; the copies into the buckets
    stay."""
    op = recording.alloc_op
    in_backward = (op >= 0) & (recording.op_phase[np.maximum(op, 0)] == _BACKWARD)
    buckets = (recording.alloc_kind == _GRADIENT) & ~in_backward
    collectives = _collectives(recording)
    streams = np.setdiff1d(recording.kernel_stream[collectives], [0])
    waits = recording.kernel_kind == _CODES["event_wait"]
    gone = (
        collectives
        | np.isin(recording.kernel_stream, streams)
        | (waits & np.isin(recording.kernel_columns, streams))
    )
    fields: dict[str, IntArray] = {
        field.name: getattr(recording, field.name)[~gone]
        for field in dataclasses.fields(recording)
        if field.name.startswith("kernel_")
    }
    return dataclasses.replace(
        recording,
        header=_header(recording, 1),
        alloc_bytes=np.where(buckets, 0, recording.alloc_bytes),
        **cast("dict[str, Any]", fields),
    )


def _collectives(recording: Recording) -> Any:
    return np.isin(recording.kernel_kind, [_CODES[name] for name in COLLECTIVES])


def _header(recording: Recording, ranks: int) -> RecordingHeader:
    return cast(RecordingHeader, {**recording.header, **header_of(recording, ranks)})


# ---
# The strategies.


_NONE: Final[Mapping[str, IntArray]] = {}
#: DDP's first bucket, and the others (``bucket_cap_mb``).
_BUCKETS: Final = (MIB, 25 * MIB)
_FORWARD, _BACKWARD = PHASES.index("forward"), PHASES.index("backward")
_OPTIMIZER: Final = PHASES.index("optimizer")
_STATE, _BUFFER = KINDS.index("optimizer_state"), KINDS.index("buffer")
_TEMPORARY: Final = KINDS.index("temporary")
#: Operators that the CPU dispatches in addition, of PyTorch 2.13: DDP's for each bucket, besides a
#: copy of each gradient into it, and for each gradient's way back; ZeroRedundancyOptimizer's for
#: each parameter that is sent; FSDP's for each gather, besides one for each parameter, and for each
#: reduce-scatter, besides one for each gradient.
_OF_BUCKET, _BACK, _OF_SENT, _OF_GATHER, _OF_SCATTER = 1, 2, 2, 6, 4
#: Of parameters that FSDP shards as they are.
_FLOATS: Final = frozenset(("float32", "float16", "bfloat16", "float64"))
#: Optimizer state that is no more is of no parameter's size: a count of steps.
_SCALAR: Final = 512


def why_not(recording: Recording) -> str:
    """Why no strategy can be told from a recording, with what would be needed; "": one can."""
    ranks = recording.ranks
    if recording.parameters() is None:
        return "it does not say which memory the parameters have; re-record it"
    if ranks > 1 and is_sharded(recording):
        return (
            f"it is of {ranks} processes that share parameters or optimizer state, whose whole is "
            "not in it; give the plan of one process, or plan the job at each number of GPUs"
        )
    if len(gradients_of(recording)):
        return ""
    if ranks > 1:
        return (
            "its gradients are in DDP's buckets (gradient_as_bucket_view); give the plan of one "
            "process"
        )
    return "no gradients were computed in it; without training each GPU runs the job by itself"


def strategies_of(recording: Recording) -> tuple[tuple[Strategy, ...], tuple[str, ...]]:
    """The strategies that make a difference to a training, and why others are left out."""
    quantized = {parameter.dtype for parameter in recording.parameters() or ()} - _FLOATS
    strategies: list[Strategy] = ["DDP"]
    notes = []
    if (recording.alloc_kind == _STATE).any():
        strategies.append("ZeRO-1")
    else:
        notes.append("ZeRO-1 is left out: the optimizer has no state on the GPU")
    if quantized:
        notes.append(
            f"FSDP is not estimated: the model has {', '.join(sorted(quantized))} parameters "
            "(quantized); plan the script with FSDP itself"
        )
    else:
        strategies.append("FSDP")
    return tuple(strategies), tuple(notes)


def with_ranks(recording: Recording, strategy: Strategy, ranks: int) -> Recording:
    """The recorded run as rank 0 of so many processes would have it; one that is DDP's already
    keeps its own buckets with DDP."""
    if recording.ranks > 1:
        if strategy == "DDP":
            return among(recording, ranks)
        recording = alone(recording)
    return _REWRITTEN[strategy](recording, ranks) if ranks > 1 else recording


class _Job:
    """A recording with what the strategies need of it."""

    def __init__(self, recording: Recording, ranks: int) -> None:
        self.recording, self.ranks = recording, ranks
        self.rewriting = Rewriting(recording)
        self.parameters = parameters_of(recording, ranks)
        self.batches = micro_batches(recording)
        self.backward = recording.op_phase == _BACKWARD
        self.gradients = gradients_of(recording)
        #: The first operator of a training.
        self.first = int(np.argmax(self.batches >= 0)) if len(self.batches) else 0

    def collective(
        self, at: int, op: int, kind: str, nbytes: int, stream: int, after: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Launch a collective on ``stream``, when the event ``after`` has come; returns what to
        wait for."""
        if after is not None:
            self.rewriting.wait(at, op, after, stream)
        self.rewriting.launch(at, op, kind, stream, read=nbytes, rows=self.ranks)
        return self.rewriting.mark(at, op, stream)

    def copies(self, at: int, op: int, *sizes: int, stream: int = 0) -> None:
        """A copy of each of so many bytes; stream 0 is that of the computing kernels."""
        for nbytes in sizes:
            self.rewriting.launch(at, op, "pointwise", stream, read=nbytes, written=nbytes)

    def passes(self) -> list[IntArray]:
        """The operators of each forward and backward pass."""
        return [
            np.flatnonzero(self.batches == batch) for batch in np.unique(self.batches) if batch >= 0
        ]

    def split_optimizer(self, kept: Mapping[tuple[int, int], int]) -> dict[str, IntArray]:
        """The optimizer's memory and kernels for a part of the parameters: ``kept`` has what is
        left of a parameter's bytes by its module and bytes. Columns that change by it."""
        recording, sizes = self.recording, self.rewriting.alloc_bytes
        whole = sum(parameter.nbytes for parameter in self.parameters if parameter.trained)
        left = [
            kept[parameter.module, parameter.nbytes]
            for parameter in self.parameters
            if parameter.trained
        ]
        share = sum(left) / whole if whole else 1.0
        tensors = sum(map(bool, left)) / max(1, len(left))
        op = recording.alloc_op
        stepping = (op >= 0) & (recording.op_phase[np.maximum(op, 0)] == _OPTIMIZER)
        mine = (recording.alloc_kind == _STATE) | (
            stepping & (recording.alloc_kind == _TEMPORARY) & (sizes > _SCALAR)
        )
        for alloc in np.flatnonzero(mine).tolist():
            nbytes = int(sizes[alloc])
            key = int(recording.alloc_module[alloc]), nbytes
            if key in kept:
                sizes[alloc] = kept[key]
            elif nbytes > _SCALAR:
                sizes[alloc] = round(nbytes * share)
        stepped = recording.op_phase[np.maximum(recording.kernel_op, 0)] == _OPTIMIZER
        # A launch takes a number of tensors, and of blocks of so many numbers each: there are
        # fewer, but one.
        return {
            f"kernel_{name}": np.where(
                stepped,
                np.maximum(np.rint(column * part).astype(np.int64), np.minimum(column, least)),
                column,
            )
            for name, least, part in (
                *(("flops", 0, share), ("read", 0, share), ("written", 0, share)),
                *(("launches", 1, share), ("batches", 1, tensors)),
            )
            for column in (getattr(recording, f"kernel_{name}"),)
        }

    def done(self, columns: Mapping[str, IntArray] = _NONE) -> Recording:
        return self.rewriting.done(header_of(self.recording, self.ranks), columns)


# -- DistributedDataParallel, ZeroRedundancyOptimizer ----------------------------------------------


def _ddp(recording: Recording, ranks: int) -> Recording:
    job = _Job(recording, ranks)
    _reduce_gradients(job)
    return job.done()


def _zero(recording: Recording, ranks: int) -> Recording:
    """Each parameter's state is on one rank, the largest first, where there is least; each
    updates its own, and sends them to the others."""
    job = _Job(recording, ranks)
    _reduce_gradients(job)
    trained = [each for each in job.parameters if each.trained]
    totals, owner = [0] * ranks, dict[int, int]()
    for parameter in sorted(trained, key=lambda each: -each.nbytes):
        owner[parameter.alloc] = totals.index(min(totals))
        totals[owner[parameter.alloc]] += parameter.nbytes
    kept = {
        (each.module, each.nbytes): each.nbytes if owner[each.alloc] == 0 else 0 for each in trained
    }
    columns = job.split_optimizer(kept)
    stream, steps = job.rewriting.stream(), recording.op_step
    stepping = recording.op_phase == _OPTIMIZER
    for step in np.unique(steps[stepping]).tolist():
        last = int(np.flatnonzero(stepping & (steps == step))[-1])
        at = job.rewriting.launched_after(last)
        event = job.rewriting.mark(at, last)
        for parameter in trained:
            done = job.collective(at, last, "broadcast", parameter.nbytes, stream, event)
            job.rewriting.dispatch(last, _OF_SENT)
            event = done
        job.rewriting.wait(at, last, event)
    return job.done(columns)


def _reduce_gradients(job: _Job) -> None:
    """DDP's buckets, and their all-reduces while the backward pass goes on."""
    rewriting, recording = job.rewriting, job.recording
    stream, start = rewriting.stream(), rewriting.before(job.first)
    buffers = int(recording.alloc_bytes[recording.alloc_kind == _BUFFER].sum())
    order: Sequence[Sharded] = ()
    last_of_step = {int(recording.op_step[ops[-1]]): ops for ops in job.passes()}
    for ops in job.passes():
        if buffers:
            at = rewriting.launched_before(int(ops[0]))
            event = rewriting.mark(at, int(ops[0]))
            done = job.collective(at, int(ops[0]), "broadcast", buffers, stream, event)
            rewriting.wait(at, int(ops[0]), done)
    for number, ops in enumerate(last_of_step.values()):
        backward = ops[job.backward[ops]]
        if not len(backward):
            continue
        ready = _ready(job, backward)
        if not number:  # the buckets are rebuilt in this order after the first
            order = sorted((parameter for parameter in job.parameters if parameter.trained),
                           key=lambda each: ready[each.alloc])  # fmt: skip
            for bucket in _buckets(order):
                nbytes = sum(each.nbytes for each in bucket)
                rewriting.allocate(nbytes, "gradient", (job.first, -1), start, None)
        events = []
        for bucket in _buckets(order):
            op = max(ready[each.alloc] for each in bucket)
            at, nbytes = rewriting.launched_after(op), sum(each.nbytes for each in bucket)
            job.copies(at, op, *(each.nbytes for each in bucket))
            rewriting.dispatch(op, _OF_BUCKET + len(bucket))
            event = rewriting.mark(at, op)
            events.append(job.collective(at, op, "all_reduce", nbytes, stream, event))
        end = int(backward[-1])
        at = rewriting.launched_after(end)
        for bucket, event in zip(_buckets(order), events, strict=True):
            rewriting.wait(at, end, event)
            job.copies(at, end, *(each.nbytes for each in bucket))
            rewriting.dispatch(end, _BACK * len(bucket))


def _ready(job: _Job, backward: IntArray) -> dict[int, int]:
    """The operator of a backward pass after which each parameter's gradient is there: the last of
    its module."""
    modules = job.recording.op_module[backward]
    last = dict(zip(modules.tolist(), backward.tolist(), strict=True))
    return {
        parameter.alloc: last.get(parameter.module, int(backward[-1]))
        for parameter in job.parameters
    }


def _buckets(order: Sequence[Sharded]) -> list[list[Sharded]]:
    """The buckets as ``_compute_bucket_assignment_by_size`` fills them."""
    currents, current, nbytes = list[list[Sharded]](), list[Sharded](), 0
    for each in order:
        current.append(each)
        nbytes += each.nbytes
        if nbytes >= _BUCKETS[min(len(currents), 1)]:
            currents.append(current)
            current, nbytes = [], 0
    return [*currents, current] if current else currents


# -- fully_shard -----------------------------------------------------------------------------------


def _fsdp(recording: Recording, ranks: int) -> Recording:
    job = _Job(recording, ranks)
    for parameter in job.parameters:
        job.rewriting.alloc_bytes[parameter.alloc] = parameter.shard_bytes
    kept = {(each.module, each.nbytes): each.shard_bytes for each in job.parameters}
    columns = job.split_optimizer(kept)
    _Sharding(job).run()
    return job.done(columns)


class _Sharding:
    """The gathers of parameters and the reduce-scatters of gradients of a run."""

    def __init__(self, job: _Job) -> None:
        self._job, self._rewriting = job, job.rewriting
        self._units = units_of(job.recording, job.parameters)
        self._gathers, self._reduces = job.rewriting.stream(), job.rewriting.stream()
        #: What the stream of the gathers has to wait for, before the one after the next.
        self._copied: list[tuple[int, int]] = []
        self._reduced: tuple[int, int] | None = None

    def run(self) -> None:
        uses = uses_of(self._job.recording, self._job.parameters)
        for number, ops in enumerate(self._job.passes()):
            self._pass(ops, [use for use in uses if use.micro_batch == number])

    def _pass(self, ops: IntArray, uses: list[Use]) -> None:
        first, last = int(ops[0]), int(ops[-1])
        backward = ops[self._job.backward[ops]]
        self._copied = []
        at = self._rewriting.launched_before(first)
        if self._units[0]:  # the root's are kept from its forward pass to the end of the backward
            event = self._rewriting.mark(at, first)
            self._unshard(Use(0, False, first, last, 0), first, last, first, event)
        elif uses:
            self._rewriting.wait(at, first, self._rewriting.mark(at, first), self._gathers)
        for place, use in enumerate(uses):
            before = uses[place - 1] if place else None
            # A backward pass gathers one unit ahead, a forward pass when the CPU is there.
            ahead = before.first if use.backward and before and before.backward else use.first
            following = uses[place + 1].first if place + 1 < len(uses) else last
            self._unshard(use, ahead, use.last, use.first if use.backward else following)
            if use.backward:
                behind = uses[place + 1].last if place + 1 < len(uses) else last
                self._reduce(use.unit, (use.first, use.last), use.last, behind)
        if len(backward):
            self._reduce(0, (int(backward[0]), last), last, last)
            at = self._rewriting.launched_after(last)
            if self._reduced is not None:
                self._rewriting.wait(at, last, self._reduced)
        self._reduced = None

    def _unshard(
        self,
        use: Use,
        ahead: int,
        until: int,
        flat_until: int,
        after: tuple[int, int] | None = None,
    ) -> None:
        """The parameters of a unit are whole from the use's begin until behind operator ``until``;
        they come through a buffer, from operator ``ahead`` until ``flat_until``."""
        rewriting, ranks = self._rewriting, self._job.ranks
        unit = self._units[use.unit]
        begins, ends = rewriting.before(use.first), rewriting.after(until)
        whole = sum(each.shard_bytes for each in unit) * ranks
        module = unit[0].module
        flat_ends, rank = rewriting.before(flat_until), 2
        if flat_ends <= begins:
            flat_ends, rank = begins, 4
        start = min(rewriting.before(ahead), begins)
        rewriting.allocate(whole, "temporary", (ahead, module), start, flat_ends,
                           self._gathers, (1, rank))  # fmt: skip
        for each in unit:
            nbytes = each.shard_bytes * ranks
            rewriting.allocate(nbytes, "parameter", (use.first, module), begins, max(ends, begins))
        at = rewriting.launched_before(ahead)
        if after is None and len(self._copied) > 1:
            after = self._copied[-2]
        if after is not None:
            rewriting.wait(at, ahead, after, self._gathers)
        self._job.copies(at, ahead, whole // ranks, stream=self._gathers)
        rewriting.dispatch(ahead, _OF_GATHER + len(unit), before=True)
        event = self._job.collective(at, ahead, "all_gather", whole, self._gathers, None)
        at = rewriting.launched_before(use.first)
        rewriting.wait(at, use.first, event)
        self._job.copies(at, use.first, whole)
        self._copied.append(rewriting.mark(at, use.first))

    def _reduce(self, unit: int, made: tuple[int, int], op: int, behind: int) -> None:
        """The gradients that operators ``made`` gave become shards behind operator ``op``; the
        buffer that they are sent from is there until behind operator ``behind``."""
        rewriting, job = self._rewriting, self._job
        trained = [each for each in self._units[unit] if each.trained]
        if not trained:
            return
        shards, module = sum(each.shard_bytes for each in trained), trained[0].module
        place = rewriting.after(op)
        own = self._gradients(unit, made)
        ends = [rewriting.freed(alloc) for alloc in own]
        known = [number for number in ends if number is not None]
        until = max(known) if known and len(known) == len(ends) else None
        if not own:
            until = rewriting.after(behind)  # added to what is there already
        for alloc in own:
            rewriting.free(alloc, place)
        buffer_ends = rewriting.after(behind)
        like, ends_at = (op, module), max(buffer_ends, place)
        rank = 4 if behind == op else 0
        rewriting.allocate(shards * job.ranks, "temporary", like, place, ends_at, ranks=(1, rank))
        kept = None if until is None else max(until, place)
        rewriting.allocate(shards, "gradient", like, place, kept, self._reduces)
        at = rewriting.launched_after(op)
        if self._reduced is not None:
            rewriting.wait(at, op, self._reduced)
        job.copies(at, op, shards * job.ranks)
        rewriting.dispatch(op, _OF_SCATTER + len(trained))
        event = rewriting.mark(at, op)
        self._reduced = job.collective(
            at, op, "reduce_scatter", shards * job.ranks, self._reduces, event
        )

    def _gradients(self, unit: int, made: tuple[int, int]) -> list[int]:
        recording, first, last = self._job.recording, *made
        modules = {each.module for each in self._units[unit]}
        return [
            alloc
            for alloc in self._job.gradients.tolist()
            if first <= recording.alloc_op[alloc] <= last
            and int(recording.alloc_module[alloc]) in modules
        ]


_REWRITTEN: Final[Mapping[Strategy, Callable[[Recording, int], Recording]]] = {
    "DDP": _ddp,
    "ZeRO-1": _zero,
    "FSDP": _fsdp,
}
