"""Rules about the host: its quota, its other users, its swap, its threads; and the list of all."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from trainfit.findings import fixes
from trainfit.findings.threads import call_of, set_at, variable_of
from trainfit.results.findings import Evidence, Finding, Fix, Place, Unknown
from trainfit.results.runs.watched import RunHeader
from trainfit.results.watch import OTHERS_CORES, USABLE_CORES
from trainfit.watch import checks, thresholds
from trainfit.watch.rules import main_thread, training
from trainfit.watch.rules.code_lines import costliest, has_own_threads
from trainfit.watch.rules.core_waits import CoreWaits
from trainfit.watch.rules.fetching import Fetching
from trainfit.watch.rules.rule import Rule, severity
from trainfit.watch.view import RankView, RunView, known, median

# ---
# The container's CPU quota runs out, and the kernel stops all of its threads.


_CGROUP_THROTTLING_KIND: Final = "cgroup_throttling"


def _find_cgroup_throttling(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, _CGROUP_THROTTLING_KIND)))
    if few:
        return
    machine, quota = rank.machine, rank.header.quota_cores
    rows = machine[(machine["cgroup_periods"] >= 0) & (machine["cgroup_throttled"] >= 0)]
    periods = float(np.sum(rows["cgroup_periods"], dtype=np.float64))
    if not periods or not checks.are_enough_samples(rows):
        if quota is not None:
            yield Unknown(
                _CGROUP_THROTTLING_KIND,
                f"fewer than {thresholds.LEAST_SAMPLES} samples of the quota",
                "the cgroup's cpu.stat",
            )
        return
    throttled = np.minimum(rows["cgroup_throttled"], rows["cgroup_periods"])
    share = float(np.sum(throttled, dtype=np.float64)) / periods
    often = np.mean(throttled > thresholds.NOTICEABLE * rows["cgroup_periods"])
    if share < thresholds.THROTTLED or often < thresholds.LASTING or checks.is_kept_busy(rank):
        return
    lost, cores = _lost(rows, share), checks.usable_cores(rank.header)
    evidence = [Evidence("throttled periods", share, "of all")]
    if quota is not None:
        evidence.append(Evidence("CPU quota", quota, "cores"))
    evidence += [Evidence("stopped for", lost, "of the time")]
    threads = f"{max(1, int(cores))}" if cores else "the quota"
    yield Finding(
        _CGROUP_THROTTLING_KIND,
        severity(lost),
        f"The CPU quota runs out in {checks.in_percent(share)} of its periods",
        tuple(evidence),
        "The container's threads use the quota up before a period ends and are stopped until the "
        "next one begins",
        (
            Fix(
                "raise the container's CPU limit, or run no more workers and threads than "
                f"{threads}"
            ),
        ),
        "certain",
        lost,
    )


def _lost(rows: np.ndarray, share: float) -> float:
    """The share of the time that throttling costs: at most that in which any thread was stopped, as
    the counter of seconds adds up CPUs, and a period counts though it was throttled at its end
    only."""
    both = rows[np.isfinite(rows["cgroup_throttled_s"]) & (rows["interval_s"] > 0)]
    if not len(both):
        return share
    stopped = np.sum(both["cgroup_throttled_s"], dtype=np.float64)
    return min(share, float(stopped / np.sum(both["interval_s"], dtype=np.float64)))


CGROUP_THROTTLING: Final = Rule((_CGROUP_THROTTLING_KIND,), _find_cgroup_throttling, each_rank=True)


# ---
# Processes that are not the run's keep the cores busy that it would use.


_CPU_CONTENTION_KIND: Final = "cpu_contention"


def _find_cpu_contention(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, _CPU_CONTENTION_KIND)))
    if few:
        return
    machine, usable = rank.machine, checks.usable_cores(rank.header)
    rows = machine[np.isfinite(machine["cores_busy"]) & np.isfinite(machine["cores_ours"])]
    if usable is None or not checks.are_enough_samples(rows):
        yield Unknown(
            _CPU_CONTENTION_KIND,
            f"fewer than {thresholds.LEAST_SAMPLES} samples of the cores",
            "the sampler, and a few seconds",
        )
        return
    others = np.maximum(0.0, rows["cores_busy"] - rows["cores_ours"])
    full = rows["cores_busy"] >= thresholds.SATURATED * usable
    # Busy by others, and none is left: also where some of their cores are not the run's to use,
    # its threads then wait for their own.
    pressed = (others >= max(1.0, thresholds.OTHERS_CORES * usable)) & full
    waiting = known(rows["runnable"]) > thresholds.CROWDED * usable
    if np.mean(pressed) < thresholds.LASTING or checks.is_kept_busy(rank):
        return
    runnable, ours = median(rows["runnable"]), float(np.median(rows["cores_ours"]))
    held_up = CoreWaits(rank).held_up_by_others
    # Where it was not counted: a thread that always wants to run gets its part of the cores, and a
    # run with far less sleeps.
    sleeps = runnable and ours < thresholds.WANTS_CORES * usable / max(runnable, usable)
    free = len(waiting) and np.mean(waiting) < thresholds.LASTING
    if (free or sleeps) if held_up is None else held_up < thresholds.NOTICEABLE:
        return
    evidence = [
        Evidence(OTHERS_CORES, float(np.median(others)), "cores"),
        Evidence("cores that the run keeps busy", ours, "cores"),
        Evidence(USABLE_CORES, usable, "cores"),
    ]
    evidence += _added_by_others(rank)
    if runnable is not None:
        evidence.append(Evidence("threads that want to run", runnable))
    title = f"Other programs use the cores: {np.median(others):.1f} of {usable:g}"
    if held_up is not None:
        title += f", and the training waits {checks.in_percent(held_up)} of the time for one"
    yield Finding(
        _CPU_CONTENTION_KIND,
        "warning",
        title,
        tuple(evidence),
        "Threads of the run wait for cores that other programs use",
        (_without_others(rank, usable - float(np.median(others))),),
        "certain" if held_up is not None else "likely" if len(waiting) else "possible",
    )


def _without_others(rank: RankView, left: float) -> Fix:
    """What to do about other programs that leave so many cores."""
    action = (
        "stop the other programs, or give the run cores of its own (taskset, cpuset); "
        "`trainfit doctor` lists what runs on the machine"
    )
    threads = rank.header.threads.get("torch", 1)
    value = max(1, int(left / max(1, checks.local_ranks(rank))))
    if value >= threads or not checks.several_compute(rank):
        return Fix(action)
    # An operator is done when the last of its threads is: each waits for its turn on a core.
    fewer = _fix(
        {"torch": threads}, value, in_workers=False, at=str(checks.thread_place(rank) or "")
    )
    return dataclasses.replace(
        fewer,
        action=f"{action}; as long as they run, {fewer.action}: each operator waits until all "
        f"{threads} threads of the training have had a core",
    )


def _added_by_others(rank: RankView) -> Iterator[Evidence]:
    """What other programs add to the waits for batches, where that is known."""
    fetching = Fetching(rank)
    added = checks.share_of(rank, fetching.waited) - checks.share_of(rank, fetching.lost)
    if added >= thresholds.NOTICEABLE:
        yield Evidence("waits for batches that this adds", added, "of the time")


CPU_CONTENTION: Final = Rule((_CPU_CONTENTION_KIND,), _find_cpu_contention, each_rank=True)


# ---
# Programs that the script itself has started keep the cores busy that it would use.


_OWN_PROGRAMS_KIND: Final = "own_programs"
#: Cores of them, from which they are in its way.
_LEAST_CORES: Final = 0.1


def _find_own_programs(view: RunView) -> Iterator[Finding]:
    rank = view.judged
    usable, waits = checks.usable_cores(rank.header), CoreWaits(rank)
    share, busy = waits.lost_to_programs, known(rank.machine["cores_busy"])
    if checks.are_few(rank) or checks.is_kept_busy(rank) or usable is None or share is None:
        return
    is_full = np.mean(busy >= thresholds.SATURATED * usable) >= thresholds.LASTING
    if waits.of_programs < _LEAST_CORES or share < thresholds.NOTICEABLE or not is_full:
        return
    yield Finding(
        _OWN_PROGRAMS_KIND,
        severity(share),
        f"Programs that the script starts use {waits.of_programs:.1f} of {usable:g} cores while it "
        f"trains: the training waits {checks.in_percent(share)} of the time for one",
        (
            Evidence("cores of these programs", waits.of_programs, "cores"),
            Evidence(USABLE_CORES, usable, "cores"),
            Evidence("ready, without a core", waits.main_thread or 0.0, "of the time"),
        ),
        "They run next to the training and take turns with its threads; started more often than "
        "they end, they become more and more",
        (
            Fix(
                "start them with nice -n 19 before the command, so that the training has the cores "
                "first, and one at a time (wait() for the last one); less often, or after the "
                "training"
            ),
        ),
        "likely",
        share,
        _started(rank),
    )


def _started(rank: RankView) -> Place | None:
    """The line that started what keeps the cores busy most; ``None``: it was not told."""
    told = {e.values["pid"]: e.text for e in rank.record.events if e.kind == "program"}
    rows = rank.run.processes
    cores: dict[str, float] = defaultdict(float)
    for pid, place in told.items():
        cores[place] += float(np.nansum(rows["cpu_cores"][rows["pid"] == pid]))
    return Place.parse(max(cores, key=lambda each: cores[each], default=None))


OWN_PROGRAMS: Final = Rule((_OWN_PROGRAMS_KIND,), _find_own_programs, each_rank=True)


# ---
# The machine reads memory back from swap while it trains.


_SWAPPING_KIND: Final = "swapping"


def _find_swapping(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, _SWAPPING_KIND)))
    if few:
        return
    machine = rank.machine
    rows = machine[(machine["swap_in_bytes"] >= 0) & (machine["interval_s"] > 0)]
    if len(rows) < thresholds.LEAST_SLOW_SAMPLES:
        yield Unknown(
            _SWAPPING_KIND,
            f"fewer than {thresholds.LEAST_SLOW_SAMPLES} samples of swap",
            "the sampler, and a few seconds",
        )
        return
    # Swap is not read in each sample; what is read is of all the time since it was read last.
    seconds = float(np.nansum(machine["interval_s"], dtype=np.float64))
    rate = float(np.sum(rows["swap_in_bytes"], dtype=np.float64)) / seconds
    often = np.mean(rows["swap_in_bytes"] > 0)
    if rate < thresholds.SWAP_BYTES_PER_S or often < thresholds.SWAP_SAMPLES:
        return
    pressure = known(rows["memory_pressure"])
    share = min(1.0, float(np.mean(pressure))) if len(pressure) else None
    written = rows["swap_out_bytes"][rows["swap_out_bytes"] >= 0]
    evidence = [
        Evidence("read from swap", rate, "bytes/s"),
        Evidence("written to swap", float(np.sum(written, dtype=np.float64)) / seconds, "bytes/s"),
    ]
    available = median(rows["ram_available_bytes"])
    if available is not None:
        evidence.append(Evidence("RAM that is available", available, "bytes"))
    if share is not None:
        evidence.append(Evidence("threads that wait for memory", share, "of the time"))
    yield Finding(
        _SWAPPING_KIND,
        "warning" if share is None or share < thresholds.CRITICAL_SHARE else "critical",
        "The machine swaps: RAM does not hold all that runs on it",
        tuple(evidence),
        "Memory that is needed was written to disk and is read back, which stops the threads that "
        "need it",
        (Fix(f"no other programs, {fixes.memory(checks.loader_settings(rank.header))}"),),
        "likely",
        share,
    )


SWAPPING: Final = Rule((_SWAPPING_KIND,), _find_swapping, each_rank=True)


# ---
# Libraries start more threads than there are cores, in the training or in each worker.


_THREAD_OVERSUBSCRIPTION_KIND: Final = "thread_oversubscription"


def _find_thread_oversubscription(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, _THREAD_OVERSUBSCRIPTION_KIND)))
    if few:
        return
    header, usable = rank.header, checks.usable_cores(rank.header)
    crowded = checks.is_crowded(rank)
    if crowded is None or usable is None:
        yield checks.too_few_samples(_THREAD_OVERSUBSCRIPTION_KIND, "the run queue")
        return
    ranks, workers = max(1, checks.local_ranks(rank)), _workers(header)
    # Threads of one process that are more than the cores take turns whatever else runs.
    at_work = (
        ranks * checks.threads_at_work(rank.main_process),
        ranks * workers * checks.threads_at_work(rank.workers),
    )
    main_alone = at_work[0] > thresholds.CROWDED * usable
    alone = max(at_work) > thresholds.CROWDED * usable and checks.is_of_run(
        rank, usable, thresholds.AT_ALL_BUSY
    )
    if not crowded or checks.is_kept_busy(rank) or not (alone or checks.is_of_run(rank, usable)):
        return
    switches = checks.switches_per_s(rank)
    if switches is not None and switches < thresholds.SWITCHES_PER_CORE * usable:
        return
    if not header.threads and not header.worker_threads:
        yield Unknown(
            _THREAD_OVERSUBSCRIPTION_KIND,
            "the libraries' threads were not recorded",
            "their numbers of threads",
        )
        return
    of_main = max(header.threads.values(), default=1)
    of_worker = checks.threads_of_worker(rank)
    of_workers = float(ranks * workers * of_worker)
    if (measured := checks.threads_of_workers(rank)) is not None:
        of_workers = min(of_workers, measured)
    if ranks * of_main + of_workers <= thresholds.CROWDED * usable:
        return
    in_workers = workers > 0 and of_worker > 1 and checks.are_workers_the_crowd(rank)
    in_workers = in_workers and not (main_alone and at_work[0] > at_work[1])
    own = _OF_A_WORKER * ranks * workers if in_workers else 0.0
    if in_workers and (0 < at_work[1] <= own or has_own_threads(rank.header.fetch_code)):
        return  # they are no library's: `input_bound` names the line
    if not in_workers and (of_main <= 1 or not (main_alone or _main_has_threads(rank))):
        return  # too many processes, which too_many_workers says
    threads = header.worker_threads if in_workers else header.threads
    value = _value(rank, usable / ranks, workers, in_workers)
    if value >= (of_worker if in_workers else of_main):
        return
    many = {name: count for name, count in threads.items() if count > value}
    evidence = [
        Evidence("usable cores", usable, "cores"),
        Evidence(
            "threads of a worker" if in_workers else "threads of the main process",
            float(max(many.values())),
        ),
        Evidence("processes", float(ranks * (workers if in_workers else 1))),
        Evidence("threads that want to run", median(rank.machine["runnable"]) or 0.0),
    ]
    if switches is not None:
        evidence.append(Evidence("involuntary context switches", switches, "1/s"))
    worker_threads = (
        header.worker_threads_at if in_workers else str(checks.thread_place(rank) or "")
    )
    if (
        in_workers or worker_threads
    ) and "torch" in many:  # pools smaller than that of a call do not matter
        many = {name: count for name, count in many.items() if count >= many["torch"]}
    raised = in_workers and many.get("torch", 0) == max(many.values())
    fix = _fix(many, value, in_workers, worker_threads)
    if raised:
        action = _raised(many["torch"], worker_threads)
        if fix.settings:
            action += f"; {fix.action}"
        fix = dataclasses.replace(fix, action=action)
    # What is lost is theirs only where they were seen at work.
    share = _lost_to_threads(rank, in_workers) if at_work[in_workers] > own else None
    where = "each worker" if in_workers else "the main process"
    yield Finding(
        _THREAD_OVERSUBSCRIPTION_KIND,
        "warning" if share is None or share < thresholds.CRITICAL_SHARE else "critical",
        f"{max(many.values())} threads in {where} want to run on {usable:g} cores",
        tuple(evidence),
        f"{', '.join(sorted(many))} start{'s' if len(many) == 1 else ''} "
        f"{max(many.values())} threads in each {'worker' if in_workers else 'process'}; on "
        f"{usable:g} cores they take turns and wait for each other",
        (fix,),
        "certain" if switches is not None else "likely",
        share,
        _where_threads_compute(header, worker_threads if raised else "")
        if in_workers
        else Place.parse(worker_threads)
        if "torch" in many
        else None,
    )


def _where_threads_compute(header: RunHeader, set_at: str) -> Place | None:
    """The line of a worker that raised the number, or else the one that workers were found at most,
    or else the loader."""
    if set_at:
        return Place.parse(set_at)
    line = costliest(header.fetch_code)
    enough = line is not None and line.count >= thresholds.LOOKS_AT_LINE
    return line.place if line is not None and enough else checks.loader_place(header)


def _raised(threads: int, at: str) -> str:
    """PyTorch sets its threads to 1 in each worker (`torch/utils/data/_utils/worker.py`), whatever
    the environment says."""
    where = f" (line {at.rpartition(':')[2]})" if at else " in worker_init_fn or the data set"
    return (
        f"PyTorch begins each worker with 1 thread: leave out torch.set_num_threads({threads})"
        f"{where}"
    )


#: Threads of a worker without those of libraries, by CPU time over that of its busiest one: one
#: makes batches, one sends them.
_OF_A_WORKER: Final = 2.0


def _lost_to_threads(rank: RankView, in_workers: bool) -> float | None:
    """Share of the time in which the training waits for what these threads compute; ``None``:
    hardly any, or not known."""
    if in_workers:
        fetching = Fetching(rank)
        share = checks.share_of(rank, fetching.lost - fetching.lost_in_turns)
    elif checks.has_gpu(rank):
        share = main_thread.MainThread(rank).unexplained_idle or 0.0
    else:
        share = main_thread.MainThread(rank).launches or 0.0
    return share if share >= thresholds.WARNING_SHARE else None


def _main_has_threads(rank: RankView) -> bool:
    """Are several threads of the main process at work? Unless measured otherwise."""
    cores = median(rank.main_process["cpu_cores"])
    return cores is None or cores >= thresholds.SEVERAL_THREADS


def _workers(header: RunHeader) -> int:
    loader = checks.training_loader(header)
    return 0 if loader is None else loader.num_workers


def _value(rank: RankView, cores: float, workers: int, in_workers: bool) -> int:
    """Threads a process, of the cores of one rank: workers share what the main thread leaves; the
    main process has what workers leave."""
    if in_workers:
        return max(1, int((cores - 1) / workers))
    used = median(checks.by_time(rank.workers, "cpu_cores")) or 0.0
    return max(1, int(cores - used))


def _settings(many: Mapping[str, int], value: int, in_workers: bool = False) -> dict[str, str]:
    libraries = [name for name in many if not (in_workers and name == "torch")]
    names = sorted({variable for name in libraries if (variable := variable_of(name))})
    return dict.fromkeys(names, str(value))


def _line(many: Mapping[str, int], value: int, in_workers: bool) -> str:
    calls = [call for name in sorted(many) if name != "torch" and (call := call_of(name))]
    if "torch" in many:
        calls.append(f"torch.set_num_threads({value})")
    return "; ".join(calls)


def _fix(many: Mapping[str, int], value: int, in_workers: bool, at: str) -> Fix:
    """Fewer threads of these libraries; ``at``: the line of the training process that sets those of
    PyTorch, and of whatever has as many (one pool of OpenMP)."""
    if not at or in_workers or "torch" not in many:
        settings, line = _settings(many, value, in_workers), _line(many, value, in_workers)
        return Fix(_action(settings, line), settings=settings, line=line)
    others = {name: count for name, count in many.items() if count != many["torch"]}
    settings, line = _settings(others, value), _line(others, value, in_workers)
    rest = f"; {_action(settings, line)}" if settings else ""
    call = set_at(value)
    return dataclasses.replace(call, action=call.action + rest, settings=settings)


def _action(settings: Mapping[str, str], line: str) -> str:
    parts = []
    if settings:
        words = " ".join(f"{name}={value}" for name, value in settings.items())
        parts.append(f"set {words} in the environment")
    if line:
        parts.append(f"call {line}")
    return " and ".join(parts) or "limit the library to one thread in each worker"


THREAD_OVERSUBSCRIPTION: Final = Rule(
    (_THREAD_OVERSUBSCRIPTION_KIND,), _find_thread_oversubscription, each_rank=True
)


RULES: Final[tuple[Rule, ...]] = (
    THREAD_OVERSUBSCRIPTION,
    main_thread.HOST_BOUND_LAUNCHES,
    main_thread.HIDDEN_SYNCS,
    main_thread.COPIES,
    training.CHECKPOINT_STALLS,
    training.RECOMPILES,
    training.EVALUATION_SHARE,
    CGROUP_THROTTLING,
    SWAPPING,
    CPU_CONTENTION,
    OWN_PROGRAMS,
    main_thread.ONE_HOT_THREAD,
    main_thread.SCRIPT_WAITS,
)
