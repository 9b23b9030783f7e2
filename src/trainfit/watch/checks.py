"""What many rules ask: enough data, a lasting effect, the GPU's idle time, how cores are used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainfit.results.dataloader import LoaderSettings, StartMethod
from trainfit.results.findings import Place, Unknown
from trainfit.results.runs.tables import CHECKPOINT, EPOCH_START, EVALUATION, Table
from trainfit.results.runs.watched import RunHeader, WatchedLoader
from trainfit.results.watch import are_enough
from trainfit.watch import thresholds
from trainfit.watch.view import RankView, known, median

WATCH_LONGER = f"watch at least {thresholds.LEAST_STEPS} steps after the first 10"


def too_few_steps(rank: RankView, *kinds: str) -> Iterator[Unknown]:
    """One for each kind where the steady steps are too few to judge."""
    if are_few(rank):
        for kind in kinds:
            yield Unknown(kind, f"only {len(rank.steps)} steps after the warm-up", WATCH_LONGER)


def are_few(rank: RankView) -> bool:
    """Are the steady steps too few to judge?"""
    return not are_enough(len(rank.steps), rank.seconds)


def too_few_samples(kind: str, what: str) -> Unknown:
    """The answer that there are too few samples of ``what``, or that it is not known how many cores
    are usable."""
    reason = f"fewer than {thresholds.LEAST_SAMPLES} samples of {what}"
    return Unknown(kind, reason, "the sampler, and a run of a few seconds")


def are_enough_samples(rows: Table) -> bool:
    """Are these rows of the machine enough, of what the kernel adds up from one sample to the
    next?"""
    covered = float(np.nansum(rows["interval_s"], dtype=np.float64))
    return len(rows) >= thresholds.LEAST_SAMPLES or covered >= thresholds.LEAST_COVERED_S


def share_of(rank: RankView, lost: NDArray[np.float64]) -> float:
    """The share of the steady steps' time that is lost, 0 to 1."""
    return min(1.0, float(np.nansum(lost)) / rank.seconds) if rank.seconds else 0.0


def lasts(rank: RankView, lost: NDArray[np.float64], least: float = thresholds.NOTICEABLE) -> bool:
    """Is a share of ``least`` lost in at least a third of the run, in blocks of steps?"""
    if not len(lost):
        return False
    starts = np.arange(0, len(lost), thresholds.BLOCK_STEPS)
    spent = np.add.reduceat(np.nan_to_num(lost), starts)
    total = np.add.reduceat(np.asarray(rank.steps["step_s"], dtype=np.float64), starts)
    return float(np.mean(spent >= least * total)) >= thresholds.LASTING


def training_loader(header: RunHeader) -> WatchedLoader | None:
    """The DataLoader that training takes its batches from; ``None``: not known."""
    loaders = [loader for loader in header.loaders if loader.role == "training"]
    if not loaders and len(header.loaders) == 1 and header.loaders[0].role == "unknown":
        loaders = list(header.loaders)
    return loaders[-1] if loaders else None


def loader_place(header: RunHeader) -> Place | None:
    """The place where the script makes the DataLoader that it trains from; ``None``: not known."""
    loader = training_loader(header)
    return None if loader is None else Place.parse(loader.place)


def event_place(rank: RankView, kind: str) -> Place | None:
    """The line that most events of a kind were at; ``None``: none tells it."""
    counts = Counter(
        event.text for event in rank.record.events if event.kind == kind and event.text
    )
    return Place.parse(counts.most_common(1)[0][0]) if counts else None


def thread_place(rank: RankView) -> Place | None:
    """The line that set PyTorch's threads last: of several, that one counts."""
    texts = [event.text for event in rank.record.events if event.kind == "threads" and event.text]
    return Place.parse(texts[-1]) if texts else None


@dataclass(frozen=True)
class BusyCores:
    """Cores that the run may use, and how many of them are busy (medians)."""

    usable: float
    busy: float

    @property
    def idle(self) -> float:
        return max(0.0, self.usable - self.busy)

    @property
    def saturated(self) -> bool:
        return self.busy >= thresholds.SATURATED * self.usable


def usable_cores(header: RunHeader) -> float | None:
    """The cores that are usable by affinity and quota; ``None``: not known."""
    limits = [each for each in (header.usable_cores, header.quota_cores) if each and each > 0]
    return min(limits) if limits else None


def cores(rank: RankView) -> BusyCores | None:
    """``None``: not known, or too few samples."""
    usable = usable_cores(rank.header)
    every, ours = median(rank.machine["cores_busy"]), median(rank.machine["cores_ours"])
    rows = rank.machine[np.isfinite(rank.machine["cores_busy"])]
    if usable is None or not are_enough_samples(rows):
        return None
    quota, affinity = rank.header.quota_cores, rank.header.usable_cores
    is_quota = quota is not None and (affinity is None or quota < affinity)
    # With a quota, or where more cores are busy than the run may use, others have other cores.
    if every is None or ((is_quota or every > 1.05 * usable) and ours is not None):
        every = ours
    return None if every is None else BusyCores(usable, every)


def is_crowded(rank: RankView) -> bool | None:
    """Do more threads want to run than there are cores, most of the time? ``None``: not known."""
    usable = usable_cores(rank.header)
    runnable = known(rank.machine["runnable"])
    if usable is None or len(runnable) < thresholds.LEAST_SAMPLES:
        return None
    return bool(np.mean(runnable > thresholds.CROWDED * usable) >= thresholds.LASTING)


def turns(rank: RankView) -> float | None:
    """Threads that take turns on a core; ``None``: not measured."""
    usable, runnable = usable_cores(rank.header), median(rank.machine["runnable"])
    return None if runnable is None or not usable else max(1.0, runnable / usable)


def threads_of_workers(rank: RankView) -> float | None:
    """Threads of all workers of the rank's machine that run or wait for a core, on average: the
    cores that they get, times the threads that take turns on a core. ``None``: not measured."""
    taking_turns = turns(rank)
    if taking_turns is None or not len(known(rank.workers["cpu_cores"])):
        return None
    got = median(by_time(rank.workers, "cpu_cores")) or 0.0
    return max(1, local_ranks(rank)) * got * taking_turns


def are_workers_the_crowd(rank: RankView) -> bool:
    """Are workers alone more than the cores can run, or half of what is too many? Unless measured
    otherwise."""
    usable, runnable = usable_cores(rank.header), median(rank.machine["runnable"])
    threads = threads_of_workers(rank)
    if threads is None or usable is None or runnable is None:
        return True
    surplus = max(runnable, thresholds.CROWDED * usable) - usable
    return threads > thresholds.CROWDED * usable or threads >= 0.5 * surplus


def threads_of_worker(rank: RankView) -> int:
    """Threads of a worker by its libraries; 1 where it was measured that only one is busy: a pool
    that nothing uses takes no turns."""
    rows = rank.workers[rank.workers["hottest_thread"] >= thresholds.AT_ALL_BUSY]
    ratio = median(rows["cpu_cores"] / rows["hottest_thread"])
    if ratio is not None and ratio < thresholds.SECOND_THREAD:
        return 1
    return max(rank.header.worker_threads.values(), default=1)


def threads_at_work(processes: Table) -> float:
    """Threads of a process that compute at the same time, at least: its CPU time over that of its
    busiest thread. It says the same whatever else runs on the machine; 0: it is one, or not
    measured."""
    rows = processes[processes["hottest_thread"] > 0]
    rows = rows[rows["cpu_cores"] >= thresholds.AT_ALL_BUSY]
    several = median(rows["cpu_cores"] / rows["hottest_thread"]) or 0.0
    return several if several >= thresholds.SECOND_THREAD else 0.0


def several_compute(rank: RankView) -> bool:
    """Do several threads of the training process compute, without a GPU? Where cores are free, they
    would have one at least: what sleeps has helpers, too, that need next to nothing."""
    cores = median(rank.main_process["cpu_cores"])
    sleeps = cores is not None and cores < thresholds.HALF_A_CORE and is_crowded(rank) is False
    if has_gpu(rank) or sleeps:
        return False
    return threads_at_work(rank.main_process) >= thresholds.SECOND_THREAD


def is_of_run(rank: RankView, usable: float, least: float = 0.5) -> bool:
    """Is it the run that fills the cores, or ``least`` of them? Unless measured otherwise."""
    ours = median(rank.machine["cores_ours"])
    return ours is None or ours >= least * usable


def switches_per_s(rank: RankView) -> float | None:
    """Median of the involuntary context switches a second of the run's processes together."""
    rows = rank.run.processes
    first, last = rank.window
    rows = rows[(rows["time_s"] >= first) & (rows["time_s"] <= last)]
    rows = rows[np.isfinite(rows["involuntary_switches"])]
    return median(by_time(rows, "involuntary_switches"))


def by_time(rows: Table, column: str) -> NDArray[np.float64]:
    """Sums of a column over the processes of each sample; what is not measured counts nothing."""
    times, places = np.unique(rows["time_s"], return_inverse=True)
    values = np.asarray(rows[column], dtype=np.float64)
    values = np.where(np.isfinite(values) & (values >= 0), values, 0.0)
    return np.asarray(np.bincount(places, values, len(times)), dtype=np.float64)


def local_ranks(rank: RankView) -> int:
    """Ranks of the run on this rank's machine, as far as they were recorded."""
    return sum(each.header.host == rank.header.host for each in rank.run.ranks)


def in_percent(share: float) -> str:
    """ "12%", and of less than 10% "4.1%"."""
    return f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"


# ---
# How much of a step the GPU had nothing to do, and how much of it the input is to blame for.
#
# CUDA events are the evidence. What they cannot see is a stream that runs empty between two kernels
# of one phase: there NVML's utilization (the share of time with at least one kernel) helps, and
# only where it is far below the events'.


Seconds = NDArray[np.float64]


def has_gpu(rank: RankView) -> bool:
    """Does the rank compute on a GPU, as far as is known?"""
    return rank.header.gpu is not None or bool(np.isfinite(rank.steps["gpu_s"]).any())


def has_events(rank: RankView) -> bool:
    """Did CUDA events measure most of the steady steps?"""
    steps = rank.steps
    return len(steps) > 0 and float(np.mean(np.isfinite(steps["gpu_s"]))) >= 0.5


def column(rank: RankView, name: str) -> Seconds:
    """A column of the steady steps in double precision; NaN where it is not measured."""
    return np.asarray(rank.steps[name], dtype=np.float64)


def input_lost(rank: RankView) -> Seconds:
    """Seconds of each steady step that are lost by waiting for batches; NaN: not measured.

    On a GPU only the part in which its stream was empty: waiting while it works costs nothing. The
    batches of an accumulation after the first wait within ``gpu_s``, where only the phases' own
    events tell. A step whose gap is not known (an evaluation before it) counts in full.
    """
    waited = column(rank, "input_s")
    if not has_events(rank):
        return waited
    idle = gap(rank) + _between_phases(rank)
    return np.where(np.isfinite(idle), np.minimum(waited, idle), waited)


def gap(rank: RankView) -> Seconds:
    """Seconds of each steady step in which the stream was empty before it; NaN: not measured.

    Where no event ended the step before, what its host time is above the GPU's.
    """
    measured = column(rank, "gpu_gap_s")
    rest = np.maximum(0.0, column(rank, "step_s") - column(rank, "gpu_s"))
    other_work = (rank.steps["flags"] & (EVALUATION | CHECKPOINT)) != 0
    return np.where(np.isfinite(measured) | other_work, measured, rest)


def _between_phases(rank: RankView) -> Seconds:
    """Seconds in ``gpu_s`` outside its phases, in steps with several batches; else 0."""
    names = ("gpu_copy_s", "gpu_forward_s", "gpu_backward_s", "gpu_optimizer_s")
    phases = np.sum([np.nan_to_num(column(rank, name)) for name in names], axis=0)
    rest = np.maximum(0.0, column(rank, "gpu_s") - phases)
    return np.where(rank.steps["batches"] > 1, rest, 0.0)


def lost_to_copies(rank: RankView) -> Seconds | None:
    """Seconds of each steady step; ``None``: not measured.

    The GPU's stream computes nothing while it copies, and nothing while it is empty and the host
    copies. Host time alone is no loss: it may be a wait for the work before.
    """
    host, gpu = (column(rank, name) for name in ("copy_s", "gpu_copy_s"))
    if not np.isfinite(gpu).any():
        return host if np.isfinite(host).any() else None
    idle = np.maximum(0.0, gap(rank) - np.nan_to_num(column(rank, "input_s")))
    empty = np.nan_to_num(np.minimum(host, idle))
    spent: Seconds = np.fmax(gpu, empty)
    return spent


def busy_by_events(rank: RankView) -> float | None:
    """Share of the time in which the stream had work; ``None``: not measured."""
    if not has_events(rank):
        return None
    step_s = column(rank, "step_s")
    between = np.minimum(_between_phases(rank), np.nan_to_num(column(rank, "input_s")))
    idle = np.minimum(gap(rank) + between, step_s)
    measured = np.isfinite(idle)
    if not measured.any():
        return None
    return float(1 - np.sum(idle[measured]) / np.sum(step_s[measured]))


def utilization(rank: RankView) -> float | None:
    """NVML's mean over the steady steps; ``None``: too few samples."""
    values = known(rank.gpu["utilization"])
    if len(values) < thresholds.LEAST_SAMPLES:
        return None
    return min(1.0, float(np.mean(values)))


def idle_share(rank: RankView) -> float | None:
    """Share of the time in which the GPU had nothing to do; ``None``: not measured.

    By events; by NVML where that says far more, which is a stream that runs empty between kernels.
    """
    busy = busy_by_events(rank)
    if busy is None:
        return None
    by_nvml = 1 - (utilization(rank) or 1.0)
    return max(1 - busy, by_nvml if by_nvml >= thresholds.NVML_IDLE else 0.0)


def busy(rank: RankView) -> float | None:
    """The rest of :func:`idle_share`."""
    idle = idle_share(rank)
    return None if idle is None else 1 - idle


def is_kept_busy(rank: RankView) -> bool:
    """Is it certain that the host's delays cost this run nothing, as its GPU always has work?"""
    idle = idle_share(rank)
    return idle is not None and idle < thresholds.NOTICEABLE


def step_without_input(rank: RankView) -> float | None:
    """Median seconds of a step less what it lost by waiting for batches."""
    rest = known(column(rank, "step_s") - np.nan_to_num(input_lost(rank)))
    return float(np.median(rest)) if len(rest) else None


def epoch_start_lost(rank: RankView) -> Seconds:
    """Seconds by which an epoch's first batch costs more than another one (:func:`input_lost`), by
    step; else 0."""
    lost = np.nan_to_num(input_lost(rank))
    starts = (rank.steps["flags"] & EPOCH_START) != 0
    usual = float(np.median(lost[~starts])) if (~starts).any() else 0.0
    return np.where(starts, np.maximum(0.0, lost - usual), 0.0)


def loader_settings(header: RunHeader) -> LoaderSettings | None:
    """The settings of the DataLoader that trains, or of the only one with workers."""
    loaders = sorted(header.loaders, key=lambda each: each.role != "training")
    loader = next((each for each in loaders if each.num_workers), None)
    if loader is None:
        return None
    return LoaderSettings(
        loader.num_workers,
        max(1, loader.prefetch_factor or 2),
        loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        start_method=_start_method(loader.start_method, header.python),
    )


def _start_method(text: str, python: str) -> StartMethod:
    """How workers were started; Linux' default changed in Python 3.14."""
    for method in ("fork", "spawn", "forkserver"):
        if text == method:
            return method
    version = tuple(int(part) for part in re.findall(r"\d+", python)[:2])
    return "forkserver" if version >= (3, 14) else "fork"
