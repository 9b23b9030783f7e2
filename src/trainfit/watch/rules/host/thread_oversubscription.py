"""Libraries start more threads than there are cores, in the training or in each worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.results.watch.run import RunHeader
from trainfit.watch.figures import checks, gpu_time, thresholds
from trainfit.watch.figures.view import RankView, RunView, median
from trainfit.watch.rules.rule import Rule

KIND: Final = "thread_oversubscription"

#: Environment variables of a library's threads, by its name in the header. PyTorch uses OpenMP's.
_VARIABLES: Final = {
    "torch": "OMP_NUM_THREADS",
    "openmp": "OMP_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "openblas": "OPENBLAS_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
    "numexpr": "NUMEXPR_NUM_THREADS",
    "numba": "NUMBA_NUM_THREADS",
}
#: Those that only a call in the worker can hold.
_CALLS: Final = {
    "opencv": "cv2.setNumThreads(0)",
    "arrow": "pyarrow.set_cpu_count(1)",
}


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    if few:
        return
    header, usable = rank.header, checks.usable_cores(rank.header)
    crowded = checks.is_crowded(rank)
    if crowded is None or usable is None:
        yield checks.too_few_samples(KIND, "the run queue")
        return
    if not crowded or gpu_time.is_kept_busy(rank) or not checks.is_of_run(rank, usable):
        return
    switches = checks.switches_per_s(rank)
    if switches is not None and switches < thresholds.SWITCHES_PER_CORE * usable:
        return
    if not header.threads and not header.worker_threads:
        yield Unknown(KIND, "the libraries' threads were not recorded", "their numbers of threads")
        return
    ranks, workers = max(1, checks.local_ranks(rank)), _workers(header)
    of_main = max(header.threads.values(), default=1)
    of_worker = checks.threads_of_worker(rank)
    of_workers = float(ranks * workers * of_worker)
    if (measured := checks.threads_of_workers(rank)) is not None:
        of_workers = min(of_workers, measured)
    if ranks * of_main + of_workers <= thresholds.CROWDED * usable:
        return
    in_workers = workers > 0 and of_worker > 1 and checks.are_workers_the_crowd(rank)
    if not in_workers and (of_main <= 1 or not _main_has_threads(rank)):
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
    settings, line = _settings(many, value), _line(many, value, in_workers)
    yield Finding(
        KIND,
        "warning",
        "More threads want to run than there are cores",
        tuple(evidence),
        f"{', '.join(sorted(many))} start{'s' if len(many) == 1 else ''} "
        f"{max(many.values())} threads in each {'worker' if in_workers else 'process'}; on "
        f"{usable:g} cores they take turns and wait for each other",
        _action(settings, line),
        "certain" if switches is not None else "likely",
        settings=settings,
        line=line,
    )


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


def _settings(many: Mapping[str, int], value: int) -> dict[str, str]:
    names = sorted({_VARIABLES[name] for name in many if name in _VARIABLES})
    return dict.fromkeys(names, str(value))


def _line(many: Mapping[str, int], value: int, in_workers: bool) -> str:
    calls = [_CALLS[name] for name in sorted(many) if name in _CALLS]
    if "torch" in many and not in_workers:
        calls.append(f"torch.set_num_threads({value})")
    return "; ".join(calls)


def _action(settings: Mapping[str, str], line: str) -> str:
    parts = []
    if settings:
        words = " ".join(f"{name}={value}" for name, value in settings.items())
        parts.append(f"set {words} in the environment")
    if line:
        parts.append(f"call {line}")
    return " and ".join(parts) or "limit the library to one thread in each worker"


RULE: Final = Rule((KIND,), _look, each_rank=True)
