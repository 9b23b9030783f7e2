"""Threads of the libraries in workers, and the CPUs to run on: advice from evidence.

DataLoader workers call ``torch.set_num_threads(1)`` (`torch/utils/data/_utils/worker.py`), and
so does the pinning thread. OpenCV's, OpenBLAS's, FFmpeg's, numba's and Arrow's own threads are
not covered by that, nor is anything without workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from trainfit.findings.threads import LIBRARIES, ThreadedLibrary
from trainfit.results.dataloader import LoaderMachine, LoaderSettings, Probe
from trainfit.results.loader import VariableAdvice
from trainfit.results.text import core_count, count
from trainfit.scripts.library_threads import FFMPEG, HELD

#: CPU seconds per second of work from which a batch is made by more than one thread: below,
#: it is the noise of two clocks and of Python's own helper threads.
SEVERAL: Final = 1.15

_BY_NAME: Final = {each.name: each for each in LIBRARIES}

#: What sets the libraries that can be held down (variables, and calls in a worker), with the pools
#: of each.
GOVERNS: Final = {each.name: each.pools for each in LIBRARIES if not HELD.isdisjoint(each.pools)}


def may_be_held(probe: Probe) -> bool:
    """Do libraries start threads in workers, of which some can be held down from outside?

    A decoder's threads end with it: that batches are made in one is enough.
    """
    if any(starts_threads(probe, name) for name, each in _BY_NAME.items() if each.is_shared):
        return True
    at_work = (probe.started_threads or 0) > 0 or (probe.threads or 0.0) >= SEVERAL
    return at_work and not HELD.difference({FFMPEG}).isdisjoint(probe.thread_pools)


def variables(
    probe: Probe,
    machine: LoaderMachine,
    settings: LoaderSettings,
    environment: Mapping[str, str],
    *,
    was_held: bool = False,
) -> tuple[VariableAdvice, ...]:
    """What to set so that threads do not outnumber cores; only what there is evidence for.

    ``environment`` is the one that the job runs in: what it sets already is not repeated.
    ``was_held``: whether holding libraries down is faster was measured, and ``settings`` are
    what came out of that.
    """
    advice = _main_process(machine, settings, environment)
    if settings.num_workers > 0:
        of_workers = _workers(probe, machine, settings, was_held)
        # Of two values for a variable, the one that was measured to be faster.
        is_measured = settings.library_threads is not None
        advice = [*of_workers, *advice] if is_measured else [*advice, *of_workers]
    known: dict[str, VariableAdvice] = {}
    for each in advice:
        if environment.get(each.name) != each.value:
            known.setdefault(each.name, each)
    return tuple(known.values())


def verdict(probe: Probe, machine: LoaderMachine, settings: LoaderSettings) -> str:
    """Whether threads outnumber cores, in a sentence with the evidence."""
    seen = _evidence(probe, machine, settings)
    if probe.threads is None:
        return f"whether threads outnumber cores was not measured: {seen}"
    if not _outnumber(probe, machine, settings):
        if settings.library_threads is not None:
            return f"workers are faster with one thread per library: {seen}"
        return f"no oversubscription found: {seen}"
    if _named(probe, machine, settings):
        return f"threads outnumber cores: {seen}"
    return f"threads outnumber cores, library unknown: {seen}"


# --- Workers ----------------------------------------------------------------------------------
def _workers(
    probe: Probe, machine: LoaderMachine, settings: LoaderSettings, was_held: bool
) -> list[VariableAdvice]:
    found = []
    if settings.worker_threads * settings.num_workers > machine.usable_cores + 1e-9:
        found += _set_by_script(machine, settings)
    if settings.library_threads is not None or _outnumber(probe, machine, settings):
        seen = _evidence(probe, machine, settings)
        for library, what in _named(probe, machine, settings):
            if was_held and settings.library_threads is None and _is_held(library):
                continue  # it was tried, and is not faster
            reason = (
                f"{what}: each worker has its own threads there, which compete "
                "for the cores; workers already keep them busy"
            )
            found.append(
                VariableAdvice(
                    library.name, library.value, library.where, library.line, reason, seen
                )
            )
    return found


def _set_by_script(machine: LoaderMachine, settings: LoaderSettings) -> list[VariableAdvice]:
    if settings.worker_threads == 1:
        return []
    workers, threads = settings.num_workers, settings.worker_threads
    return [
        VariableAdvice(
            "torch.set_num_threads",
            "1",
            "worker_init_fn",
            "torch.set_num_threads(1)",
            "the script raises the thread count that PyTorch sets to 1 in each worker",
            f"{count(workers, 'worker')} with {threads} threads of PyTorch each on "
            f"{core_count(machine.usable_cores)}",
        )
    ]


def _outnumber(probe: Probe, machine: LoaderMachine, settings: LoaderSettings) -> bool:
    """Were several threads busy, and would they outnumber the cores?

    Pools alone are no evidence: most are never used.
    """
    if probe.threads is None or probe.threads < SEVERAL:
        return False
    most = max([probe.threads, *probe.thread_pools.values()])
    return settings.num_workers * most > machine.usable_cores + 1e-9


def _is_held(library: ThreadedLibrary) -> bool:
    return not HELD.isdisjoint(library.pools)


def _named(
    probe: Probe, machine: LoaderMachine, settings: LoaderSettings
) -> list[tuple[ThreadedLibrary, str]]:
    """The libraries whose threads it may be: by their pools, and by what the batch spent its
    time in (FFmpeg's threads are in no pool)."""
    held = settings.library_threads is not None
    found = []
    for library in LIBRARIES:
        threads = _threads_of(probe, library)
        if starts_threads(probe, library.name) is False:
            continue
        if threads > 1 and (held or threads * settings.num_workers > machine.usable_cores):
            found.append((library, f"{library.title} has {threads} threads"))
        elif _makes_batches(probe, library):
            found.append((library, f"batches are prepared in {library.title}"))
    return found


def starts_threads(probe: Probe, name: str) -> bool | None:
    """Do batches start threads of the library that this variable or call sets? ``None``: it has
    some, and whether they are used was not measured."""
    library = _BY_NAME[name]
    if library.is_shared:  # a decoder's threads end with it
        return _makes_batches(probe, library) and (_threads_of(probe, library) > 1 or None)
    if probe.used_pools is None or HELD.isdisjoint(library.pools):
        return None
    return not set(library.pools).isdisjoint(probe.used_pools)


def _threads_of(probe: Probe, library: ThreadedLibrary) -> int:
    return max((probe.thread_pools.get(name, 1) for name in library.pools), default=1)


def _makes_batches(probe: Probe, library: ThreadedLibrary) -> bool:
    return any(_is_of(name, library.modules) for name in _functions(probe))


def _functions(probe: Probe) -> list[str]:
    """The functions that a batch's time went to."""
    return [name for part in probe.parts for name in part.what]


def _is_of(function: str, modules: tuple[str, ...]) -> bool:
    """Is "av.container.decode" of ("av",)? A path's folders count, too."""
    words = function.replace("/", ".").replace(":", ".").replace(" ", ".").split(".")
    return any(module in words for module in modules)


def _evidence(probe: Probe, machine: LoaderMachine, settings: LoaderSettings) -> str:
    workers = count(settings.num_workers, "worker") if settings.num_workers else "no workers"
    parts = [f"{workers} on {core_count(machine.usable_cores)}"]
    if probe.threads is not None:
        parts.insert(0, f"a batch kept {probe.threads:.1f} threads busy")
    if probe.started_threads:
        started = count(probe.started_threads, "thread")
        parts.append(f"libraries start {started} in a worker in addition to its own")
    if probe.thread_pools:
        pools = ", ".join(f"{name} {n}" for name, n in sorted(probe.thread_pools.items()))
        parts.append(f"pools in a worker, its own thread included: {pools}")
    return "; ".join(parts)


# --- The main process -------------------------------------------------------------------------
def _main_process(
    machine: LoaderMachine, settings: LoaderSettings, environment: Mapping[str, str]
) -> list[VariableAdvice]:
    """PyTorch's threads in the main process, where they are more than a job's cores.

    OpenMP and MKL count the physical cores of the affinity; of quotas they do not know. MKL follows
    OMP_NUM_THREADS where its own variable is not set.
    """
    set_to = _number(environment.get("OMP_NUM_THREADS", ""))
    physical = machine.physical_cores or len(machine.affinity)
    threads = set_to or physical
    workers = settings.num_workers
    # A core is left to them only where workers leave one.
    wanted = max(1, math.ceil(machine.usable_cores - 1e-9) - workers)
    if threads <= math.ceil(machine.usable_cores - 1e-9):
        return []
    whose = (
        f"OMP_NUM_THREADS={set_to}"
        if set_to
        else f"PyTorch uses one thread for each of {count(physical, 'core')}"
    )
    reason = (
        "a CPU operator ends when its last thread does, and threads beyond the job's "
        "cores wait for each other (a quota throttles all of them until its next period)"
    )
    seen = f"{whose}; usable: {core_count(machine.usable_cores)}"
    if workers:
        seen += f", which {count(workers, 'worker')} share"
    return [
        VariableAdvice(name, str(wanted), "environment", f"export {name}={wanted}", reason, seen)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        if name == "OMP_NUM_THREADS" or environment.get(name)
    ]


def _number(text: str) -> int | None:
    """A number of threads, of the first level ("4,2"); ``None`` for what OpenMP ignores."""
    word = text.split(",")[0].strip()
    return int(word) or None if word.isascii() and word.isdigit() and len(word) < 9 else None
