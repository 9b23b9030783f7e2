"""Threads of the libraries in workers, and the CPUs to run on: advice from evidence.

DataLoader workers call ``torch.set_num_threads(1)`` (`torch/utils/data/_utils/worker.py`), and
so does the pinning thread. OpenCV's, OpenBLAS's, FFmpeg's, numba's and Arrow's own threads are
not covered by that, nor is anything without workers.

CPU affinity of a job: performance cores first, the NUMA node of its GPU.

Only where it matters: on processors with two kinds of core, and with more than one NUMA node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from trainfit.findings.threads import LIBRARIES, ThreadedLibrary
from trainfit.hardware.local_gpu import gpus_of_job
from trainfit.hardware.machine.cuda_stack import torchrun_binds
from trainfit.hardware.machine.parsing import cpu_list_text
from trainfit.results.dataloader import LoaderMachine, LoaderSettings, Probe
from trainfit.results.loader import CoreAdvice, VariableAdvice
from trainfit.results.machine import CoreKind, Cpu, Gpu, Machine, NumaNode
from trainfit.results.text import core_count, count, ghz
from trainfit.scripts.library_threads import FFMPEG, HELD

#: CPU seconds per second of work from which a batch is made by more than one thread: below,
#: it is the noise of two clocks and of Python's own helper threads.
SEVERAL: Final = 1.15

_BY_NAME: Final = {library.name: library for library in LIBRARIES}

#: What sets the libraries that can be held down (variables, and calls in a worker), with the pools
#: of each.
GOVERNS: Final = {
    library.name: library.pools for library in LIBRARIES if not HELD.isdisjoint(library.pools)
}


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
    advices = []
    if settings.worker_threads * settings.num_workers > machine.usable_cores + 1e-9:
        advices += _set_by_script(machine, settings)
    if settings.library_threads is not None or _outnumber(probe, machine, settings):
        seen = _evidence(probe, machine, settings)
        for library, what in _named(probe, machine, settings):
            if was_held and settings.library_threads is None and _is_held(library):
                continue  # it was tried, and is not faster
            reason = (
                f"{what}: each worker has its own threads there, which compete "
                "for the cores; workers already keep them busy"
            )
            advices.append(
                VariableAdvice(
                    library.name, library.value, library.where, library.line, reason, seen
                )
            )
    return advices


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
    maximum = max([probe.threads, *probe.thread_pools.values()])
    return settings.num_workers * maximum > machine.usable_cores + 1e-9


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
    target = max(1, math.ceil(machine.usable_cores - 1e-9) - workers)
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
    text = f"{whose}; usable: {core_count(machine.usable_cores)}"
    if workers:
        text += f", which {count(workers, 'worker')} share"
    return [
        VariableAdvice(name, str(target), "environment", f"export {name}={target}", reason, text)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        if name == "OMP_NUM_THREADS" or environment.get(name)
    ]


def _number(text: str) -> int | None:
    """A number of threads, of the first level ("4,2"); ``None`` for what OpenMP ignores."""
    word = text.split(",")[0].strip()
    return int(word) or None if word.isascii() and word.isdigit() and len(word) < 9 else None


def cores(machine: Machine, settings: LoaderSettings, ranks: int = 1) -> CoreAdvice | None:
    """The CPUs for one job, or how ``torchrun`` finds them for each of several ranks.

    Workers, the main process and the pinning thread get a core each; where the better cores
    are too few for that, nothing is advised: a core that is left out costs more than a slow
    one or a far one.
    """
    affinity = machine.cpu.affinity.value
    if not affinity:
        return None
    if ranks > 1:
        return _each_rank(machine, ranks)
    target = settings.num_workers + 1 + (settings.pin_memory and settings.num_workers > 0)
    return _near(machine, affinity, target) or _fast(machine.cpu, affinity, target)


def why_none(machine: Machine, settings: LoaderSettings, ranks: int = 1) -> str:
    """Why :func:`cores` chooses none, in a line."""
    cpu, affinity = machine.cpu, machine.cpu.affinity.value
    if not affinity:
        return f"the CPUs that a job may use are unknown ({cpu.affinity.reason})"
    here = set(affinity)
    nodes = [node for node in cpu.numa_nodes.value or () if here & set(node.cpus)]
    kinds = [kind for kind in cpu.core_kinds.value or () if here & set(kind.logical_cpus)]
    number = count(_cores_among(cpu, affinity), "usable core")
    if len(affinity) == 1:
        return f"only CPU {affinity[0]} may be used"
    for what, fact in (("kinds of core", cpu.core_kinds), ("NUMA nodes", cpu.numa_nodes)):
        if fact.value is None and not fact.is_absent:
            return f"the {what} are unknown ({fact.reason})"
    if len(nodes) < 2 and len(kinds) < 2:
        return f"all {number} are of one kind and on one NUMA node"
    target = settings.num_workers + 1 + (settings.pin_memory and settings.num_workers > 0)
    busy = count(target, "busy thread")
    if len(nodes) > 1 and _node_of_first(machine)[0] is None:
        return f"the GPU's NUMA node is unknown ({len(nodes)} nodes)"
    if len(nodes) > 1 and ranks > 1:
        return "this PyTorch's torchrun cannot bind ranks to NUMA nodes (2.9 can)"
    if len(nodes) > 1:
        return f"the GPU's node has too few cores for {busy}; excluding the others would cost more"
    return (
        f"the performance cores alone are too few for {busy}; excluding the others would cost more"
    )


# --- NUMA -------------------------------------------------------------------------------------
def _near(machine: Machine, affinity: Sequence[int], wanted: int) -> CoreAdvice | None:
    """The CPUs of the GPU's node, if the job may run on others, too."""
    gpu, node = _node_of_first(machine)
    if gpu is None or node is None:
        return None
    here = tuple(sorted(set(node.cpus) & set(affinity)))
    if len(here) == len(affinity) or _cores_among(machine.cpu, here) < wanted:
        return None
    listed = cpu_list_text(here)
    nodes = machine.cpu.numa_nodes.value or ()
    return CoreAdvice(
        f"taskset -c {listed}",
        here,
        "batches are in the memory of the node whose core wrote them first; from another node "
        "than the GPU's they are copied over the inter-socket link. With numactl installed, "
        f"`numactl --cpunodebind={node.node} --membind={node.node}` binds memory, too",
        f"GPU {gpu.index} is attached to NUMA node {node.node} of {len(nodes)} (CPUs "
        f"{cpu_list_text(node.cpus)}); this job may run on CPUs {cpu_list_text(affinity)}; "
        f"{count(_cores_among(machine.cpu, here), 'core')} there for {wanted} busy threads",
    )


def _node_of_first(machine: Machine) -> tuple[Gpu | None, NumaNode | None]:
    """The first GPU of the job whose node is known, and that node, if there are several."""
    nodes = {node.node: node for node in machine.cpu.numa_nodes.value or ()}
    if len([node for node in nodes.values() if node.cpus]) < 2:
        return None, None
    for gpu in gpus_of_job(machine):
        if gpu.numa_node.value in nodes:
            return gpu, nodes[gpu.numa_node.value]
    return None, None


def _each_rank(machine: Machine, ranks: int) -> CoreAdvice | None:
    """`torchrun --numa-binding`, since PyTorch 2.9; "node" is what its documentation advises
    in doubt (`torch/numa/binding.py`, ``AffinityMode``)."""
    gpu, node = _node_of_first(machine)
    torch, affinity = machine.cuda.torch.value, machine.cpu.affinity.value or ()
    if gpu is None or node is None or torch is None or not torchrun_binds(torch.version):
        return None
    if set(affinity) <= set(node.cpus):
        return None
    places: Mapping[int, list[int]] = {}
    for each in gpus_of_job(machine):
        if each.numa_node.value is not None:
            places = {
                **places,
                each.numa_node.value: [*places.get(each.numa_node.value, []), each.index],
            }
    where = "; ".join(
        f"node {number}: GPU {', '.join(map(str, indices))}"
        for number, indices in sorted(places.items())
    )
    return CoreAdvice(
        f"torchrun --numa-binding=node --nproc-per-node={ranks}",
        tuple(affinity),
        "in place of `python`: each rank and its workers run on the cores of "
        "its GPU's NUMA node (requires numactl)",
        f"{where}; PyTorch {torch.version}; without it, ranks may run on CPUs "
        f"{cpu_list_text(affinity)}",
    )


# --- Kinds of core ----------------------------------------------------------------------------
def _fast(cpu: Cpu, affinity: Sequence[int], wanted: int) -> CoreAdvice | None:
    """The performance cores, as many as there are, and of the others only what is needed."""
    kinds = {kind.kind: kind for kind in cpu.core_kinds.value or ()}
    fast, slow = kinds.get("performance"), kinds.get("efficiency")
    if fast is None or slow is None:
        return None
    first = [each for each in fast.logical_cpus if each in set(affinity)]
    others = [each for each in slow.logical_cpus if each in set(affinity)]
    have = _cores_among(cpu, first)
    needed = others[: max(0, wanted - have)]
    if not first or not others or len(needed) == len(others):
        return None
    chosen = tuple(sorted([*first, *needed]))
    more = f" and {len(needed)} efficiency cores" if needed else ""
    return CoreAdvice(
        f"taskset -c {cpu_list_text(chosen)}",
        chosen,
        "batches are returned in order, so a worker on a slow core delays the others; "
        "and the main process launches kernels only as fast as its core runs",
        f"{_clocked(fast)}, {_clocked(slow)}; {wanted} busy threads fit on "
        f"{count(have, 'performance core')}{more}",
    )


def _clocked(kind: CoreKind) -> str:
    clock = f" at up to {ghz(kind.max_hz)}" if kind.max_hz else ""
    return f"{kind.kind} cores: CPUs {cpu_list_text(kind.logical_cpus)}{clock}"


def _cores_among(cpu: Cpu, cpus: Iterable[int]) -> int:
    """Physical cores that these CPUs are on (each of its own, where that is not known)."""
    numbers = set(cpus)
    if cpu.siblings.value is None:
        return len(numbers)
    return sum(1 for core in cpu.siblings.value if numbers & set(core))
