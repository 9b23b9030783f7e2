"""Check of the threads of all DataLoader workers of a script against the usable cores."""

from __future__ import annotations

from typing import Final

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import bad, evidence
from trainfit.doctor.formatting import restore
from trainfit.results.files.facts import Fact, known
from trainfit.results.format import core_count, cores
from trainfit.results.machine.doctor import (
    Check,
    Evidence,
    Fix,
    PoolLibrary,
    PoolUse,
    WorkerPools,
)
from trainfit.results.machine.machine import Machine

NAME: Final = "threads"
#: The most threads of the OpenBLAS in NumPy's wheels (built with NUM_THREADS=64).
_OPENBLAS_MOST: Final = 64
_VARIABLE: Final[dict[PoolLibrary, str]] = {
    "OpenCV": "OPENCV_FOR_THREADS_NUM",
    "OpenBLAS": "OPENBLAS_NUM_THREADS",
}
_NOT_KNOWN: Final[dict[PoolLibrary, str]] = {
    "OpenCV": "OpenCV builds with OpenMP or TBB, or older than 4.5.2, which choose thread counts "
    "differently; calls too small to be split",
    "OpenBLAS": "NumPy with MKL (conda), whose threads MKL_NUM_THREADS sets; small "
    "matrices, for which OpenBLAS uses one thread",
}


def check_workers(machine: Machine, usable: float, pools: WorkerPools) -> tuple[Check, ...]:
    """One for each pool whose threads in all workers are more than the job's cores."""
    if not pools.has_workers:
        return ()
    made = (_of(machine, usable, pools.workers, use) for use in pools.uses)
    return tuple(each for each in made if each is not None)


def _of(machine: Machine, usable: float, workers: int | None, use: PoolUse) -> Check | None:
    threads = pool_threads(machine, use.library)
    if threads.value is None or threads.value < 2:
        return None
    if (workers or 2) * threads.value <= usable:
        return None
    found = [
        Evidence("num_workers", "not in the script" if workers is None else str(workers), "script"),
        Evidence(_what(use), use.call, f"{use.file}:{use.line}"),
        evidence(f"{use.library}'s threads in each process", threads),
        evidence("usable cores", machine.cpu.usable_cores, cores),
    ]
    if workers is None:
        summary = (
            f"each worker's {use.library} starts {threads.value} threads on {core_count(usable)}; "
            "num_workers is not known"
        )
        return _unsure(machine, summary, use, found)
    number = workers * threads.value
    summary = (
        f"{workers} workers x {threads.value} threads of {use.library} = {number} threads on "
        f"{core_count(usable)}"
    )
    if not use.in_worker or number <= policy.THREADS_PER_CORE * usable:
        return _unsure(machine, summary, use, found)
    why = f"{_why(use)} They compete for the cores and lose time to context switches."
    cause = "worker_threads_exceed_cores"
    return bad(NAME, cause, summary, f"{why} {_limits(use)}", found, _remedies(machine, use))


def _unsure(machine: Machine, summary: str, use: PoolUse, found: list[Evidence]) -> Check:
    why = _why(use)
    if use.in_worker:
        why += f" From {policy.THREADS_PER_CORE:g} threads per core on, a slowdown was measured."
    else:
        why += " Whether workers call what starts its threads cannot be read from the script."
    remedies = tuple(_remedies(machine, use))
    why = f"{why} {_limits(use)}"
    return Check(NAME, "cannot_tell", "", summary, why, tuple(found), remedies)


def _what(use: PoolUse) -> str:
    return "called in the workers" if use.in_worker else "imported"


def _why(use: PoolUse) -> str:
    place = f"{use.file}:{use.line}"
    doing = f"runs {use.call} in each worker" if use.in_worker else f"imports {use.call}"
    return (
        f"PyTorch sets its own threads to 1 in each worker, but not those of {use.library}; "
        f"{place} {doing}."
    )


def _limits(use: PoolUse) -> str:
    return f"Not checked for: {_NOT_KNOWN[use.library]}."


def _remedies(machine: Machine, use: PoolUse) -> list[Fix]:
    variable = _VARIABLE[use.library]
    made = [
        Fix(
            f"export {variable}=1",
            restore(machine, variable),
            f"{use.library} uses one thread in the main process, too",
        )
    ]
    if use.library == "OpenCV":
        made.append(
            Fix(
                "cv2.setNumThreads(0)  # in worker_init_fn",
                "remove that line",
                "none: the workers already run in parallel",
            )
        )
    return made


def pool_threads(machine: Machine, library: PoolLibrary) -> Fact[int]:
    """Threads that a library starts in a process of this job."""
    if library == "OpenCV":
        return machine.threads.opencv_default
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        text = machine.threads.variables.get(name, "").split(",")[0].strip()
        if text.isascii() and text.isdigit() and 0 < len(text) < 9 and int(text):
            return known(int(text), name)
    affinity = machine.cpu.affinity
    return affinity.map(lambda cpus: min(len(cpus), _OPENBLAS_MOST) or None, "CPUs")
