"""Checks of the threads of libraries and of DataLoader workers against the usable cores."""

from __future__ import annotations

from typing import Final

from trainfit.doctor import thresholds as policy
from trainfit.doctor.cores import threads_set
from trainfit.doctor.findings import bad, brief, evidence, good, restore, unsure, whole
from trainfit.findings.threads import LIBRARIES
from trainfit.hardware.local_gpu import gpus_of_job
from trainfit.hardware.machine.limits import JUDGED, misread
from trainfit.results.doctor import Check, PoolLibrary, PoolUse, WorkerPools
from trainfit.results.findings import Evidence, Fix
from trainfit.results.machine import Fact, Machine, known
from trainfit.results.text import core_count, cores

# ---
# Check of the threads of all DataLoader workers of a script against the usable cores.


NAME: Final = "threads"
#: The most threads of the OpenBLAS in NumPy's wheels (built with NUM_THREADS=64).
_OPENBLAS_MOST: Final = 64
_LIBRARY: Final = {library.title: library for library in LIBRARIES}
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
        Evidence(
            "num_workers", "not in the script" if workers is None else str(workers), source="script"
        ),
        Evidence(_what(use), use.call, source=f"{use.file}:{use.line}"),
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


def _unsure(machine: Machine, summary: str, use: PoolUse, evidence: list[Evidence]) -> Check:
    why = _why(use)
    if use.in_worker:
        why += f" From {policy.THREADS_PER_CORE:g} threads per core on, a slowdown was measured."
    else:
        why += " Whether workers call what starts its threads cannot be read from the script."
    return unsure(NAME, summary, f"{why} {_limits(use)}", evidence, _remedies(machine, use))


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
    library = _LIBRARY[use.library]
    variable = library.variable or library.name
    made = [
        Fix(
            f"export {variable}=1",
            restore(machine, variable),
            f"{use.library} uses one thread in the main process, too",
        )
    ]
    if library.where == "worker_init_fn":
        made.append(
            Fix(
                f"{library.line}  # in worker_init_fn",
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


#: Variables that hold a number of threads. KMP_* and GOMP_* hold other things.
COUNTS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)


def check_threads(machine: Machine, pools: WorkerPools | None = None) -> tuple[Check, ...]:
    """OMP, MKL, OpenBLAS and OpenCV, against the usable cores and what workers add; ``pools`` is
    what a script's workers run (``None``: no script was read)."""
    found = _found(machine)
    invalid = _invalid(machine, found)
    if invalid is not None:
        return (invalid,)
    usable = machine.cpu.usable_cores.value
    if usable is None:
        needed = "the number of usable cores, see check cores"
        return (
            unsure(
                NAME,
                "the number of usable cores is unknown, so threads cannot be checked",
                needed,
                found,
            ),
        )
    check = _too_many(machine, usable, found) or _default_over_quota(machine, usable, found)
    added = check_workers(machine, usable, pools) if pools is not None else ()
    if check is None and not added:
        return (_fine(machine, usable, found, is_read=pools is not None),)
    return (check, *added) if check is not None else added


def _found(machine: Machine) -> list[Evidence]:
    threads = machine.threads
    found = [
        Evidence(name, value or "(empty)", source="environment")
        for name, value in sorted(threads.variables.items())
    ]
    if "OMP_NUM_THREADS" not in threads.variables:
        found.insert(0, Evidence("OMP_NUM_THREADS", "not set", source="environment"))
    return [
        *found,
        evidence("PyTorch's threads", threads.torch_default),
        evidence("OpenCV's threads, if it is used", threads.opencv_default),
        evidence("usable cores", machine.cpu.usable_cores, cores),
    ]


def _number(text: str) -> int | None:
    """A thread count; OMP_NUM_THREADS may hold one a level ("4,2")."""
    words = [word.strip() for word in text.split(",")]
    if all(word.isascii() and word.isdigit() and len(word) < 9 for word in words):
        return int(words[0])
    return None


def _invalid(machine: Machine, evidence: list[Evidence]) -> Check | None:
    variables = machine.threads.variables
    told = misread(variables)
    for name in COUNTS:
        text = variables.get(name)
        if not text:
            continue
        if name in JUDGED:
            if name not in told:
                continue
            why = f"it {told[name]}."
        elif _number(text) or (name == "OPENCV_FOR_THREADS_NUM" and _number(text) == 0):
            continue  # OpenCV's 0 is its default: as many as there are CPUs
        else:
            why = "the library ignores it and uses its default, one thread per visible CPU."
        return bad(
            NAME,
            "thread_setting_invalid",
            f"{name}={brief(text)}: expected a positive number of threads",
            why,
            evidence,
            [
                Fix(
                    f"export {name}={_wanted(machine)}",
                    restore(machine, name),
                    "none: the value has no effect",
                )
            ],
        )
    return None


def _wanted(machine: Machine) -> int:
    usable = machine.cpu.usable_cores.value
    return whole(usable / max(1, len(gpus_of_job(machine)))) if usable else 1


def _too_many(machine: Machine, usable: float, evidence: list[Evidence]) -> Check | None:
    maximum = whole(usable)
    over = {
        name: number
        for name in COUNTS
        if (number := _number(machine.threads.variables.get(name, ""))) and number > maximum
    }
    if not over:
        return None
    name = max(over, key=lambda key: over[key])
    return bad(
        NAME,
        "threads_exceed_cores",
        f"{name}={over[name]}, but only {core_count(usable)} can be used",
        "threads beyond the cores are time-sliced: an OpenMP region ends when its last thread "
        "does, so each CPU operator waits for a thread that is not running.",
        evidence,
        [
            Fix(f"export {key}={maximum}", restore(machine, key), "none on these cores")
            for key in over
        ],
    )


def _default_over_quota(machine: Machine, usable: float, evidence: list[Evidence]) -> Check | None:
    """OpenMP takes its default from the affinity; it does not know of cgroup quotas."""
    quota, default = machine.cpu.quota_cores.value, machine.threads.torch_default.value
    if quota is None or default is None or threads_set(machine) is not None:
        return None
    maximum = whole(usable)
    if default <= maximum:
        return None
    return bad(
        NAME,
        "threads_exceed_quota",
        f"PyTorch starts {default} threads, but the CPU quota allows {core_count(quota)}",
        "OpenMP counts visible CPUs, not the cgroup's quota. The threads use up the "
        "quota early in each period of 100 ms, then all of them are throttled until the next.",
        evidence,
        [
            Fix(
                f"export OMP_NUM_THREADS={maximum} MKL_NUM_THREADS={maximum}",
                "unset OMP_NUM_THREADS; " + restore(machine, "MKL_NUM_THREADS"),
                "none within this quota",
            )
        ],
    )


def _in_workers(machine: Machine, usable: float) -> str:
    """What workers add: whether it hurts depends on their number and on what they call."""
    note = (
        "PyTorch sets its own threads to 1 in each DataLoader worker, but not those of OpenCV, "
        "NumPy's BLAS or FFmpeg"
    )
    workers = whole(usable / 2)
    added = _opencv_in(machine, usable, workers)
    if not added:
        return note
    return (
        f"{note}: {workers} workers that use OpenCV would run {added} threads on "
        f"{core_count(usable)}. Call {_LIBRARY['OpenCV'].line} in worker_init_fn, or export "
        "OPENCV_FOR_THREADS_NUM=1 OMP_NUM_THREADS=1; `trainfit doctor --script FILE` "
        "checks whether a script's workers do"
    )


def _opencv_in(machine: Machine, usable: float, workers: int) -> int:
    """Threads of so many workers, if they used OpenCV; 0 where that is not known or not many."""
    threads = machine.threads.opencv_default.value
    if threads is None or workers * threads <= policy.THREADS_PER_CORE * usable:
        return 0
    return workers * threads


def _fine(machine: Machine, usable: float, evidence: list[Evidence], *, is_read: bool) -> Check:
    threads = threads_set(machine)
    if threads is None:
        default = machine.threads.torch_default.value
        number = f"{default} threads" if default else "the previous thread count"
        workers = whole(usable / 2)
        said = f"OMP_NUM_THREADS is not set: PyTorch uses {number} on {core_count(usable)}"
        if not is_read and (added := _opencv_in(machine, usable, workers)):
            said = brief(
                f"PyTorch uses {number} on {core_count(usable)}; OpenCV in {workers} "
                f"workers would use {added}: check with --script",
                99,
            )
        return good(
            NAME,
            said,
            evidence,
            f"{_in_workers(machine, usable)}; torchrun sets OMP_NUM_THREADS=1 for several ranks",
        )
    why = _in_workers(machine, usable)
    if threads == 1 and usable >= policy.SINGLE_THREAD_CORES:
        why = (
            "one thread is right where many workers share the cores; CPU operators in "
            "the main process (a loss, a metric, an optimizer on the CPU) then use one of "
            f"{cores(usable)}: call torch.set_num_threads(n) in the script for those"
        )
    return good(NAME, f"OMP_NUM_THREADS={threads} on {cores(usable)} usable cores", evidence, why)
