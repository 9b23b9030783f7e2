"""CPU affinity of a job: performance cores first, the NUMA node of its GPU.

Only where it matters: on processors with two kinds of core, and with more than one NUMA node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trainfit.hardware.gpu.local_gpu import gpus_of_job
from trainfit.hardware.machine.cuda_stack import torchrun_binds
from trainfit.hardware.machine.parsing import cpu_list_text
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.loader import CoreAdvice
from trainfit.results.machine import CoreKind, Cpu, Gpu, Machine, NumaNode
from trainfit.results.text import count, ghz


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
    wanted = settings.num_workers + 1 + (settings.pin_memory and settings.num_workers > 0)
    return _near(machine, affinity, wanted) or _fast(machine.cpu, affinity, wanted)


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
    wanted = settings.num_workers + 1 + (settings.pin_memory and settings.num_workers > 0)
    busy = count(wanted, "busy thread")
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
    wanted = set(cpus)
    if cpu.siblings.value is None:
        return len(wanted)
    return sum(1 for core in cpu.siblings.value if wanted & set(core))
