"""Check of NUMA binding: the GPU's node, and whether the process runs there."""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.doctor.findings import all_gpus, bad, evidence, good, unsure, which
from trainfit.hardware.machine.cuda_stack import torchrun_binds
from trainfit.hardware.machine.parsing import cpu_list_text
from trainfit.results.doctor import Check
from trainfit.results.findings import Evidence, Fix
from trainfit.results.machine import Gpu, Machine, NumaNode

NAME = "numa"
_COST = "the job can use the cores and memory of one node only"
_WHY = (
    "host memory on another node than the GPU's is copied over the inter-socket link: "
    "less bandwidth for pinned batches (330 against 115 GB/s on a GB200, torchtitan#3519) and "
    "higher latency for every kernel launch"
)


def check_numa(machine: Machine) -> tuple[Check, ...]:
    """Nodes, the GPUs' nodes, and the nodes that this process may run on."""
    nodes = machine.cpu.numa_nodes
    gpus = all_gpus(machine)
    found = [
        evidence("NUMA nodes", nodes, _listed),
        *(evidence(f"node of GPU {gpu.index}", gpu.numa_node) for gpu in gpus),
        evidence("CPUs that this process may run on", machine.cpu.affinity, cpu_list_text),
    ]
    if nodes.value is None:
        needed = "/sys/devices/system/node"
        if nodes.is_absent:
            return (good(NAME, "no NUMA nodes are listed: uniform memory", found),)
        return (unsure(NAME, "the NUMA nodes could not be determined", needed, found),)
    if len(nodes.value) < 2:
        return (good(NAME, "one NUMA node for all cores and GPUs", found),)
    if not gpus:
        summary = f"{len(nodes.value)} NUMA nodes, no GPU"
        return (good(NAME, summary, found),)
    return _several(machine, nodes.value, gpus, found)


def _listed(nodes: Sequence[NumaNode]) -> str:
    return "; ".join(f"{node.node}: CPUs {cpu_list_text(node.cpus) or 'none'}" for node in nodes)


def _several(
    machine: Machine, nodes: Sequence[NumaNode], gpus: Sequence[Gpu], found: list[Evidence]
) -> tuple[Check, ...]:
    reached = _reached(machine, nodes)
    known = [gpu for gpu in gpus if gpu.numa_node.value is not None]
    known = [gpu for gpu in known if gpu.numa_node.value in {node.node for node in nodes}]
    far = [gpu for gpu in known if reached and gpu.numa_node.value not in reached]
    if far and len(far) == len(known):
        return tuple(_far(machine, gpu, reached, found) for gpu in far)
    if not known:
        needed = (
            "the firmware's NUMA node of each GPU (numa_node is -1): `nvidia-smi topo -m` shows "
            "what the driver knows; in the BIOS, NUMA per socket must be on"
        )
        return (unsure(NAME, f"the GPU's NUMA node, of {len(nodes)}", needed, found),)
    if len(reached) == 1:
        node = next(iter(reached))
        near = ", ".join(str(gpu.index) for gpu in known if gpu.numa_node.value == node)
        return (
            good(NAME, f"this process is bound to node {node}, that of GPU {near}"[:99], found),
        )
    return (_unbound(machine, nodes, known, found),)


def _reached(machine: Machine, nodes: Sequence[NumaNode]) -> set[int]:
    affinity = set(machine.cpu.affinity.value or ())
    return {node.node for node in nodes if affinity & set(node.cpus)}


def _far(machine: Machine, gpu: Gpu, reached: set[int], found: list[Evidence]) -> Check:
    node = gpu.numa_node.value
    here = ", ".join(str(each) for each in sorted(reached))
    former = cpu_list_text(machine.cpu.affinity.value or ())
    return bad(
        NAME,
        "numa_far_from_gpu",
        f"{which(gpu)} is attached to NUMA node {node}, but this process is bound to node {here}"[
            :99
        ],
        f"{_WHY}.",
        found,
        [
            Fix(
                f"numactl --cpunodebind={node} --membind={node} python train.py",
                f"taskset -c {former} python train.py",
                f"{_COST}; a scheduler's or container's cpuset must allow node {node}",
            )
        ],
    )


def _unbound(
    machine: Machine, nodes: Sequence[NumaNode], gpus: Sequence[Gpu], found: list[Evidence]
) -> Check:
    first = gpus[0].numa_node.value
    remedies = [
        Fix(
            f"numactl --cpunodebind={first} --membind={first} python train.py  # for GPU "
            f"{', '.join(str(gpu.index) for gpu in gpus if gpu.numa_node.value == first)}",
            "python train.py",
            _COST,
        )
    ]
    torch = machine.cuda.torch.value
    if len(gpus) > 1 and torch is not None and torchrun_binds(torch.version):
        remedies.insert(
            0,
            Fix(
                f"torchrun --numa-binding=node --nproc-per-node={len(gpus)} train.py",
                f"torchrun --nproc-per-node={len(gpus)} train.py",
                "each process uses the cores of one node; requires numactl",
            ),
        )
    spread = len({gpu.numa_node.value for gpu in gpus})
    where = (
        f"the GPUs are attached to {spread} of them"
        if spread > 1
        else f"the GPU is attached to node {first}"
    )
    return unsure(
        NAME,
        f"{len(nodes)} NUMA nodes, {where}; jobs are not bound unless started so",
        f"{_WHY}. This process is not bound, nor is a job started the same "
        "way. To see the cost, time the job with and without the fix.",
        found,
        remedies,
    )
