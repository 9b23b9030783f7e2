"""A job that is compared on several GPUs: read from result files, with its memory on each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainfit.memory.affine import AffineStream
from trainfit.memory.capacity import LARGEST, bounds_of, largest_by_line
from trainfit.memory.explanation import recorded_settings
from trainfit.memory.growth import step_pattern
from trainfit.memory.replay import Stream, replay
from trainfit.plan.parallel_strategies import strategies_of, why_not, with_ranks
from trainfit.plan.sizing.costing import Pair, memory_law, samples_per_batch, work_law
from trainfit.plan.sizing.memory_model import Growth, MemoryModel
from trainfit.results.configuration import EpochEnd
from trainfit.results.files.errors import ResultFileError, TrainfitError
from trainfit.results.gpus import total
from trainfit.results.plan import PlanResult
from trainfit.results.runs.recording import NotAffineError, Recording
from trainfit.results.runs.steps import StepPattern
from trainfit.results.speed import GpuEstimate, Strategy
from trainfit.simgpu.allocator.settings import AllocatorSettings
from trainfit.speed.work import Work, WorkLaw

# ---
# Memory of a job on several GPUs, with shared replays.


@dataclasses.dataclass(frozen=True)
class AfterSteps:
    """What comes after the steps of an epoch and needs more memory than they do.

    ``reserved_bytes`` is its peak at ``batch``, without the context; ``second`` another batch size
    with its peak (``None``: none is known). ``title`` names it. ``has_own_batch``: its batches do
    not follow those of the training.
    """

    title: str
    batch: int
    reserved_bytes: int
    second: tuple[int, int] | None = None
    has_own_batch: bool = False

    def largest(self, free_bytes: int) -> int | None:
        """The largest batch size with which it fits; ``None``: not known.

        From one batch size, larger ones are taken to need memory in proportion, which is no less
        than they do; of smaller ones nothing follows: an evaluation may have a batch size of its
        own.
        """
        if self.second is not None:
            found = largest_by_line(((self.batch, self.reserved_bytes), self.second), free_bytes)
            return LARGEST if found is None else found
        if self.reserved_bytes > free_bytes:
            return None
        if self.has_own_batch:
            return LARGEST
        return self.batch * free_bytes // self.reserved_bytes

    def with_less(self, saved_bytes: int) -> AfterSteps:
        """The same memory with so much less throughout."""
        second = self.second and (self.second[0], self.second[1] - saved_bytes)
        left = self.reserved_bytes - saved_bytes
        return dataclasses.replace(self, reserved_bytes=left, second=second)


class CapacitySearch:
    """A recorded job; ``law`` gives it at other batch sizes (``None``: they are not known), and
    ``after`` what comes after its steps (``None``: that needs no more)."""

    def __init__(
        self,
        recording: Recording,
        law: AffineStream | None,
        settings: AllocatorSettings,
        after: AfterSteps | None = None,
    ) -> None:
        self._stream, self._law, self._settings = Stream.of(recording), law, settings
        self._outcome = replay(self._stream, settings=settings)
        self._now = self._outcome.peak_reserved
        self._reserved: dict[int, int] = {}
        self._largest: dict[tuple[int, int], int] = {}
        self._after = after
        self._reserved_after = after.reserved_bytes if after is not None else 0

    def now(self, memory_model: MemoryModel) -> tuple[int, bool]:
        """Device memory of the job as it is, and whether that fits."""
        whole = max(self._now, self._reserved_after) + memory_model.context_bytes
        if whole <= memory_model.capacity_bytes:
            return whole, True
        # The allocator may release what it keeps, and do with less.
        shown, fits = memory_model.shown(self._stream)
        reserved = max(shown.peak_reserved, self._reserved_after)
        needed = reserved + memory_model.context_bytes
        return needed, fits and needed <= memory_model.capacity_bytes

    def most(self, memory_model: MemoryModel) -> int:
        """The upper bound of that memory (90% prediction interval), if memory had no end."""
        return max(self._most_reserved, self._reserved_after) + total(memory_model.context)[2]

    @functools.cached_property
    def _most_reserved(self) -> int:
        return bounds_of(self._outcome)[1].high

    def largest(self, memory_model: MemoryModel) -> int | None:
        """The largest batch size that runs (0: none)."""
        if self._law is None:
            return None
        room = memory_model.capacity_bytes, memory_model.context_bytes
        if room not in self._largest:
            self._largest[room] = memory_model.largest(self._law)
        return self._within(self._largest[room], memory_model)

    def about(self, memory_model: MemoryModel) -> int | None:
        """About the largest, without a replay of its own: between batch sizes that are common to
        all GPUs, powers of two and the middles between them, by a line."""
        if self._law is None:
            return None
        return self._within(self._about(memory_model), memory_model)

    def _within(self, trained: int, memory_model: MemoryModel) -> int | None:
        """The largest batch size up to ``trained`` that what comes after training allows, too."""
        if self._after is None:
            return trained
        allowed = self._after.largest(memory_model.capacity_bytes - memory_model.context_bytes)
        return None if allowed is None else min(trained, allowed)

    def _about(self, memory_model: MemoryModel) -> int:
        free = memory_model.capacity_bytes - memory_model.context_bytes
        if self._at(1) > free:
            return 0
        low = 1
        while low < LARGEST and self._at(2 * low) <= free:
            low *= 2
        if low >= LARGEST:
            return LARGEST
        high = 2 * low
        middle = low + low // 2
        if low < middle:
            low, high = (middle, high) if self._at(middle) <= free else (low, middle)
        one, other = self._at(low), self._at(high)
        return low + (free - one) * (high - low) // max(1, other - one)

    def _at(self, batch: int) -> int:
        """Bytes reserved at a batch size, if memory had no end."""
        assert self._law is not None
        if batch not in self._reserved:
            stream = self._law.at(batch)
            self._reserved[batch] = replay(stream, settings=self._settings).peak_reserved
        return self._reserved[batch]


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """What is known of a job: its recording, and those at two batch sizes where there are any.

    ``samples`` are what the whole run sees, or one epoch (``is_one_epoch``: how many it has is not
    known; ``None``: neither is). ``freed_every`` are the steps of an epoch whose end frees what
    its steps leave behind (``None``: it does not). ``after`` is what comes after its steps, where
    that needs more memory (``None``: it does not, or ``unseen`` says why that is not known).
    """

    name: str
    batch: int | None
    recording: Recording
    pair: Pair = ()
    samples: int | None = None
    freed_every: int | None = None
    is_one_epoch: bool = False
    after: AfterSteps | None = None
    unseen: str = ""
    _works: dict[int, Work] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def work(self) -> Work:
        """The kernels of a step as it is."""
        return Work.of_steady_step(self.recording)

    @functools.cached_property
    def memory(self) -> AffineStream | None:
        """Allocations at every batch size, where that is known."""
        if len(self.pair) != 2:
            return None
        try:
            law = memory_law(self.pair)
        except NotAffineError:
            return None
        return law if law.depends_on_batch else None

    @functools.cached_property
    def kernels(self) -> WorkLaw | None:
        """Kernels at every batch size, where that is known."""
        if self.memory is None:
            return None
        if len({samples_per_batch(recording, batch) for batch, recording in self.pair}) > 1:
            return None
        try:
            return work_law(self.pair)
        except NotAffineError:
            return None

    @functools.cached_property
    def capacity(self) -> CapacitySearch:
        """The capacity search of the job, for GPUs of any capacity."""
        return CapacitySearch(self.recording, self.memory, self.settings, self.after)

    @functools.cached_property
    def settings(self) -> AllocatorSettings:
        """The allocator's during the recorded run."""
        return recorded_settings(self.recording)

    @functools.cached_property
    def pattern(self) -> StepPattern:
        """How memory goes on from step to step."""
        found = step_pattern(self.recording, reserved_bytes=0)
        return dataclasses.replace(found, freed_every=self.freed_every)

    def growth_on(self, estimate: GpuEstimate) -> Growth:
        """What stays behind with each step, if that fills the GPU."""
        return Growth.on(self.pattern, estimate.memory_bytes - estimate.device_bytes)

    def on_each_of(self, ranks: int, strategy: Strategy) -> Job:
        """What each process of the job on so many GPUs has, estimated."""

        def changed(recording: Recording) -> Recording:
            return with_ranks(recording, strategy, ranks)

        pair = tuple((batch, changed(each)) for batch, each in self.pair)
        one, after = changed(self.recording), self.after
        if after is not None:
            # What a process no longer keeps (of optimizer state, of parameters), it does not have
            # in an evaluation either.
            left = replay(Stream.of(one)).peak_allocated
            after = after.with_less(self._peak_allocated - left)
        return dataclasses.replace(self, recording=one, pair=pair, after=after, _works={})

    @functools.cached_property
    def _peak_allocated(self) -> int:
        return replay(Stream.of(self.recording)).peak_allocated

    def work_at(self, batch: int | None) -> Work | None:
        """The kernels of a step at this batch size; ``None`` where they are not known."""
        if batch is None or batch == self.batch:
            return self.work
        if batch not in self._works and self.kernels is not None:
            self._works[batch] = self.kernels.at(batch)
        return self._works.get(batch)


@dataclasses.dataclass(frozen=True)
class JobOnSeveral:
    """A job on several numbers of GPUs: ``one`` of its processes alone, and for each number and
    strategy what a process has. ``notes`` say what was left out."""

    one: Job
    jobs: tuple[tuple[int, Strategy, Job], ...]
    notes: tuple[str, ...]


def job_on_several(job: Job, counts: Sequence[int]) -> JobOnSeveral:
    """The job on so many GPUs of a machine, with each strategy that makes a difference to it."""
    strategies, notes = strategies_of(job.recording)
    one = job.on_each_of(1, "")
    jobs: list[tuple[int, Strategy, Job]] = []
    for count in counts:
        if count == 1:
            jobs.append((1, "", one))
        else:
            jobs += [(count, strategy, job.on_each_of(count, strategy)) for strategy in strategies]
    return JobOnSeveral(one, tuple(jobs), notes)


class JobError(TrainfitError):
    """Recordings that are of no one job; the message says why, and what would do."""


def job_of_plan(result: PlanResult, path: Path, *, on_several: bool) -> Job:
    """What a plan was made from; raises :class:`ResultFileError` for ``path``.

    ``on_several``: it is to be compared on several GPUs; see :func:`_require_step`.
    """
    if not result.recordings:
        raise ResultFileError(
            path, "it contains no recordings", "re-create it with `trainfit plan --output FILE`"
        )
    kept = [(each.batch_size, each.recording(path)) for each in result.recordings]
    batch, recording = kept[0]
    _require_step(recording, path, on_several=on_several)
    pair = [(at, other) for at, other in kept[-2:] if at is not None]
    freed = None if result.pattern is None else result.pattern.freed_every
    epochs = result.coverage.all_epochs if result.coverage is not None else None
    return Job(
        result.command,
        batch,
        recording,
        _pair(pair),
        result.all_samples,
        freed,
        is_one_epoch=epochs is None,
        after=_after(result),
        unseen=_unseen(result.epoch_end),
    )


def _after(result: PlanResult) -> AfterSteps | None:
    """What a plan knows of what comes after the steps, where that needs more than they do."""
    end, now = result.epoch_end, result.now
    if end is None or end.device_bytes is None or not end.batch_size:
        return None
    if not end.needs_more_than(now.memory.device_bytes):
        return None
    context = now.memory.context_bytes
    other, second = result.recommended_epoch_end, None
    if result.chosen is not now:
        other = None  # with another AMP, which is another evaluation
    if other is not None and other.device_bytes is not None and other.batch_size:
        second = other.batch_size, other.device_bytes - context
    elif now.limits is not None and now.limits.evaluation:
        second = now.limits.evaluation, result.gpu_memory_bytes - context
    if second is not None and second[0] == end.batch_size:
        second = None
    return AfterSteps(
        end.title,
        end.batch_size,
        end.device_bytes - context,
        second,
        has_own_batch=_is_own(end.evaluation_batch_size, end.batch_size),
    )


#: As many times the training's, an evaluation's batch may follow it: it keeps no graph.
_FOLLOWS: Final = (1, 2, 4, 8)


def _is_own(evaluated: int | None, trained: int) -> bool:
    """Has an evaluation a batch size of its own, whatever that of the training is?"""
    return evaluated is not None and evaluated not in {trained * follow for follow in _FOLLOWS}


def _unseen(end: EpochEnd | None) -> str:
    """Why it is not known what an evaluation needs; empty: it is, or there is none."""
    if end is None:
        return ""
    if end.evaluation == "not simulated":
        return f"its evaluation was not simulated ({end.reason})" if end.reason else ""
    return end.unseen


def job_of_recordings(
    recordings: Sequence[tuple[Path, Recording]], *, on_several: bool = False
) -> Job:
    """The job of one recording, or of two of the same command at different batch sizes."""
    for path, recording in recordings:
        _require_step(recording, path, on_several=on_several)
    if len(recordings) > 2:
        raise JobError("--for expects one or two recordings: two batch sizes give all others")
    path, recording = recordings[0]
    batches = [_batch_size(each) for _, each in recordings]
    job = Job(
        _command(recording) or path.name,
        batches[0],
        recording,
        unseen="an evaluation or a checkpoint is looked at by `trainfit plan` only",
    )
    if len(recordings) == 1:
        return job
    other_path, other = recordings[1]
    if None in batches or batches[0] == batches[1]:
        raise JobError(
            f"{str(path)!r} and {str(other_path)!r} are of batch sizes {batches[0]} and "
            f"{batches[1]}: record one with another --batch-size"
        )
    if _command(recording) != _command(other):
        raise JobError(f"{str(path)!r} and {str(other_path)!r} are of different commands")
    pair = [
        (batch, each)
        for batch, (_, each) in zip(batches, recordings, strict=True)
        if batch is not None
    ]
    return dataclasses.replace(job, pair=_pair(pair))


def _pair(recordings: Sequence[tuple[int, Recording]]) -> tuple[tuple[int, Recording], ...]:
    return tuple(recordings) if len(recordings) == 2 else ()


def _batch_size(recording: Recording) -> int | None:
    size = recording.header.get("batch_size")
    return size if isinstance(size, int) else None


def _command(recording: Recording) -> str:
    return str(recording.header.get("template") or recording.header.get("script") or "")


def _require_step(recording: Recording, path: Path, *, on_several: bool) -> None:
    """Raise unless the recording can be compared, ``on_several`` GPUs if so."""
    ranks = recording.ranks
    if ranks > 1 and not on_several:
        raise JobError(
            f"{str(path)!r} is of a job of {ranks} processes: add --count {ranks} (or 1,2,4,8) to "
            'compare it on several, or plan it there, as in `trainfit plan --gpu "8x A100 SXM"`'
        )
    used = len(Stream.of(recording).gpus)
    if used > 1:
        raise JobError(
            f"{str(path)!r} is of a process that uses {used} GPUs, which is not compared on others "
            f'yet; plan it there, as in `trainfit plan --gpu "{used}x A100 SXM"`'
        )
    if not recording.steps:
        raise ResultFileError(path, "no complete step was recorded", "re-record it, with --steps 3")
    if on_several and (reason := why_not(recording)):
        raise JobError(f"{str(path)!r}: the job on several GPUs cannot be told from it: {reason}")
