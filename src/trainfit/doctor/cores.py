"""Check of the cores that a job can use, and whether libraries can see their number.

The groups of CPUs of the same kind, governor and largest clock are made here, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import (
    bad,
    evidence,
    good,
    on_host,
    raise_limit,
    restore,
    unsure,
    which,
    whole,
)
from trainfit.hardware.local_gpu import gpus_of_job
from trainfit.hardware.machine.cuda_stack import torchrun_binds
from trainfit.hardware.machine.parsing import cpu_list_text
from trainfit.results.doctor import Check
from trainfit.results.findings import Evidence, Fix
from trainfit.results.machine import Cpu, FrequencyPolicy, Gpu, Machine, NumaNode
from trainfit.results.text import core_count, cores, count

NAME = "cores"


def check_cores(machine: Machine) -> tuple[Check, ...]:
    """Affinity, cgroup quota and kinds of core against what the machine has."""
    cpu = machine.cpu
    found = _found(cpu)
    usable = cpu.usable_cores.value
    if usable is None:
        needed = "the number of usable cores needs sched_getaffinity and /sys/fs/cgroup"
        return (unsure(NAME, "the number of usable cores could not be determined", needed, found),)
    check = (
        _one_cpu(machine, found)
        or _only_efficiency_cores(cpu, found)
        or _hidden_quota(machine, found)
        or _few_for_gpus(machine, usable, found)
    )
    return (check or good(NAME, _summary(cpu, usable), found, _why(cpu)),)


def threads_set(machine: Machine) -> int | None:
    """OMP_NUM_THREADS as a number (of its first level); ``None`` if unset or no number."""
    text = machine.threads.variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def _found(cpu: Cpu) -> list[Evidence]:
    return [
        evidence("logical CPUs", cpu.logical_cpus),
        evidence("physical cores", cpu.physical_cores),
        evidence("CPUs that this process may run on", cpu.affinity, cpu_list_text),
        evidence("CPU quota in cores", cpu.quota_cores, cores),
        evidence("kinds of core", cpu.core_kinds, _kinds),
    ]


def _kinds(kinds: object) -> str:
    assert isinstance(kinds, tuple)
    return ", ".join(
        f"{k.physical_cores} {k.kind} (CPUs {cpu_list_text(k.logical_cpus)})" for k in kinds
    )


def _summary(cpu: Cpu, usable: float) -> str:
    logical = cpu.logical_cpus.value
    of = f" of {logical} logical CPUs" if logical else " CPUs"
    return f"usable: {cores(usable)}{of}" + _kind_counts(cpu)


def _kind_counts(cpu: Cpu) -> str:
    kinds = cpu.core_kinds.value or ()
    if len(kinds) < 2:
        physical = cpu.physical_cores.value
        return f" ({count(physical, 'physical core')})" if physical else ""
    listed = " + ".join(f"{kind.physical_cores} {kind.kind}" for kind in kinds)
    return f" ({listed} cores)"


def _why(cpu: Cpu) -> str:
    parts = []
    affinity, logical = cpu.affinity.value, cpu.logical_cpus.value
    if affinity and logical and len(affinity) < logical:
        parts.append(
            f"this process and its children are bound to CPUs {cpu_list_text(affinity)}; "
            "PyTorch's thread count respects that, os.cpu_count() does not"
        )
    kinds = cpu.core_kinds.value or ()
    fast = [kind for kind in kinds if kind.kind == "performance"]
    if fast and len(kinds) > 1:
        parts.append(
            "a process that launches many small kernels is fastest on the performance cores: "
            f"taskset -c {cpu_list_text(fast[0].logical_cpus)} for paced inference"
        )
    nodes = cpu.numa_nodes.value or ()
    if len(nodes) > 1:
        parts.append(f"they span {len(nodes)} NUMA nodes, see check numa")
    return "; ".join(parts)


def _one_cpu(machine: Machine, evidence: list[Evidence]) -> Check | None:
    """Some imports bind the process to one CPU; so does Slurm without --cpus-per-task."""
    affinity, logical = machine.cpu.affinity.value, machine.cpu.logical_cpus.value
    if not affinity or not logical or len(affinity) > 1 or logical == 1:
        return None
    if machine.surroundings.scheduler.is_known:
        return None  # the scheduler's grant: check "scheduler"
    return bad(
        NAME,
        "bound_to_one_cpu",
        f"this process may run on CPU {affinity[0]} only, of {logical}",
        "all threads and all DataLoader workers share one CPU: loading, decoding and kernel "
        "launches compete for it. An environment or an import that sets an affinity "
        "(GOMP_CPU_AFFINITY, KMP_AFFINITY, taskset, a container's cpuset) is the usual reason.",
        evidence,
        [
            Fix(
                f"taskset -c 0-{logical - 1} python train.py",
                f"taskset -c {affinity[0]} python train.py",
                on_host(machine, "none, unless the other CPUs are reserved for somebody else"),
            )
        ],
    )


def _only_efficiency_cores(cpu: Cpu, evidence: list[Evidence]) -> Check | None:
    kinds = {kind.kind: kind for kind in cpu.core_kinds.value or ()}
    slow, fast, affinity = kinds.get("efficiency"), kinds.get("performance"), cpu.affinity.value
    if slow is None or fast is None or not affinity or not set(affinity) <= set(slow.logical_cpus):
        return None
    return bad(
        NAME,
        "efficiency_cores_only",
        f"this process may run on efficiency cores only (CPUs {cpu_list_text(affinity)})"[:99],
        "kernel launches and decoding run at the lower clock and fewer instructions per clock "
        "of the efficiency cores, while the performance cores are idle.",
        evidence,
        [
            Fix(
                f"taskset -c {cpu_list_text(fast.logical_cpus)} python train.py",
                f"taskset -c {cpu_list_text(affinity)} python train.py",
                "more power and heat",
            )
        ],
    )


def _hidden_quota(machine: Machine, evidence: list[Evidence]) -> Check | None:
    """A quota that neither os.cpu_count() nor the affinity shows, and nobody sized for."""
    quota, affinity = machine.cpu.quota_cores.value, machine.cpu.affinity.value
    if quota is None or not affinity or quota >= policy.QUOTA_SHARE * len(affinity):
        return None
    threads = threads_set(machine)
    if threads is not None and threads <= whole(quota):
        return None  # whoever set it knows of the quota
    number = whole(quota)
    return bad(
        NAME,
        "cpu_quota_hidden",
        f"{len(affinity)} CPUs are visible, but the CPU quota is {core_count(quota)}",
        "os.cpu_count(), nproc and top show the CPUs, not the quota. A job that sizes its threads "
        "or DataLoader workers by them uses up the quota early in each period of 100 ms and "
        "is throttled until the next: step times vary and the GPU waits.",
        evidence,
        [
            Fix(
                f"export OMP_NUM_THREADS={number}  # and num_workers={number} at most",
                restore(machine, "OMP_NUM_THREADS"),
                "none: threads beyond the quota only wait",
            ),
            raise_limit(
                machine,
                (f"--cpus={len(affinity)}", f"--cpus={cores(quota)}"),
                (f"cpu: {len(affinity)}", f"cpu: {cores(quota)}"),
                (f"CPUQuota={100 * len(affinity)}%", f"CPUQuota={100 * quota:.0f}%"),
                "CPU time that other users of the machine have now",
            ),
        ],
    )


def _few_for_gpus(machine: Machine, usable: float, evidence: list[Evidence]) -> Check | None:
    gpus = len(gpus_of_job(machine))
    if not gpus or usable >= policy.LEAST_CPUS_PER_GPU * gpus:
        return None
    least = policy.LEAST_CPUS_PER_GPU * gpus
    return bad(
        NAME,
        "few_cores_per_gpu",
        f"{cores(usable)} usable CPUs for {count(gpus, 'GPU')}: fewer than {least}",
        "the main process, its pin-memory thread and the workers share them: "
        "the GPU waits for data, however fast it is.",
        evidence,
        [
            Fix(
                "decode once and store the tensors, or augment on the GPU (torchvision "
                "transforms.v2 on cuda tensors)",
                "decode in the DataLoader again",
                "disk space for decoded data, or GPU time and memory for augmentation",
            ),
            Fix(
                f"rent a machine type with {4 * gpus} vCPUs or more",
                "return to the previous machine type",
                "its price",
            ),
        ],
    )


# ---
# Groups of CPUs with the same kind, governor and largest clock.


#: Rows at most; where each core has a largest clock of its own (amd-pstate's preferred cores),
#: those that differ in nothing else share one.
MOST: Final = 4

Span = tuple[float, float]
"""The least and the most of some clocks, in Hz."""


@dataclasses.dataclass(frozen=True)
class CoreGroup:
    """CPUs of which the same is said; ``None`` is what sysfs does not say.

    ``now_hz`` are current clocks, ``limit_hz`` the most that cpufreq allows,
    ``hardware_hz`` the most that the cores can do.
    """

    cpus: tuple[int, ...]
    kind: str | None
    governor: str | None
    energy_preference: str | None
    now_hz: Span | None
    limit_hz: Span | None
    hardware_hz: Span | None


@dataclasses.dataclass(frozen=True)
class _Core:
    """What is known of one CPU."""

    cpu: int
    kind: str | None
    policy: FrequencyPolicy
    now_hz: float | None

    def settings(self) -> tuple[object, ...]:
        return self.kind, self.policy.governor, self.policy.energy_preference

    def all_alike(self) -> tuple[object, ...]:
        return *self.settings(), self.policy.limit_hz, self.policy.hardware_hz


def core_groups(cpu: Cpu) -> tuple[CoreGroup, ...]:
    """All CPUs that are online, :data:`MOST` groups of them at most; none where not even their
    numbers are known."""
    cores = _cores(cpu)
    for key in (_Core.all_alike, _Core.settings, lambda core: core.kind):
        groups = _grouped(cores, key)
        if len(groups) <= MOST:
            break
    return tuple(_group(members) for members in groups)


def _cores(cpu: Cpu) -> list[_Core]:
    kinds = {
        number: kind.kind for kind in cpu.core_kinds.value or () for number in kind.logical_cpus
    }
    policies = {number: each for each in cpu.policies.value or () for number in each.cpus}
    numbers = sorted({*kinds, *policies}) or list(range(cpu.logical_cpus.value or 0))
    listed = cpu.current_hz.value or ()
    # /proc/cpuinfo lists the CPUs that are online, in the order of their numbers.
    now = dict(zip(numbers, listed, strict=True)) if len(listed) == len(numbers) else {}
    found = []
    for number in numbers:
        policy = policies.get(number, FrequencyPolicy((number,)))
        found.append(_Core(number, kinds.get(number), policy, policy.current_hz or now.get(number)))
    return found


def _grouped(cores: Iterable[_Core], key: Callable[[_Core], object]) -> list[list[_Core]]:
    groups: dict[object, list[_Core]] = {}
    for core in cores:
        groups.setdefault(key(core), []).append(core)
    return list(groups.values())


def _group(members: list[_Core]) -> CoreGroup:
    return CoreGroup(
        tuple(core.cpu for core in members),
        members[0].kind,
        _common(core.policy.governor for core in members),
        _common(core.policy.energy_preference for core in members),
        _span(core.now_hz for core in members),
        _span(core.policy.limit_hz for core in members),
        _span(core.policy.hardware_hz for core in members),
    )


def _common(words: Iterable[str | None]) -> str | None:
    """The word of all of them, or all their words."""
    found = list(dict.fromkeys(word for word in words if word is not None))
    return "/".join(found) or None


def _span(clocks: Iterable[float | None]) -> Span | None:
    known = [clock for clock in clocks if clock is not None]
    return (min(known), max(known)) if known else None


# ---
# Check of NUMA binding: the GPU's node, and whether the process runs there.


NUMA = "numa"
_COST = "the job can use the cores and memory of one node only"
_WHY = (
    "host memory on another node than the GPU's is copied over the inter-socket link: "
    "less bandwidth for pinned batches (330 against 115 GB/s on a GB200, torchtitan#3519) and "
    "higher latency for every kernel launch"
)


def check_numa(machine: Machine) -> tuple[Check, ...]:
    """Nodes, the GPUs' nodes, and the nodes that this process may run on."""
    nodes = machine.cpu.numa_nodes
    gpus = gpus_of_job(machine)
    found = [
        evidence("NUMA nodes", nodes, _listed),
        *(evidence(f"node of GPU {gpu.index}", gpu.numa_node) for gpu in gpus),
        evidence("CPUs that this process may run on", machine.cpu.affinity, cpu_list_text),
    ]
    if nodes.value is None:
        needed = "/sys/devices/system/node"
        if nodes.is_absent:
            return (good(NUMA, "no NUMA nodes are listed: uniform memory", found),)
        return (unsure(NUMA, "the NUMA nodes could not be determined", needed, found),)
    if len(nodes.value) < 2:
        return (good(NUMA, "one NUMA node for all cores and GPUs", found),)
    if not gpus:
        summary = f"{len(nodes.value)} NUMA nodes, no GPU"
        return (good(NUMA, summary, found),)
    return _several(machine, nodes.value, gpus, found)


def _listed(nodes: Sequence[NumaNode]) -> str:
    return "; ".join(f"{node.node}: CPUs {cpu_list_text(node.cpus) or 'none'}" for node in nodes)


def _several(
    machine: Machine, nodes: Sequence[NumaNode], gpus: Sequence[Gpu], evidence: list[Evidence]
) -> tuple[Check, ...]:
    reached = _reached(machine, nodes)
    known = [gpu for gpu in gpus if gpu.numa_node.value is not None]
    known = [gpu for gpu in known if gpu.numa_node.value in {node.node for node in nodes}]
    far = [gpu for gpu in known if reached and gpu.numa_node.value not in reached]
    if far and len(far) == len(known):
        return tuple(_far(machine, gpu, reached, evidence) for gpu in far)
    if not known:
        needed = (
            "the firmware's NUMA node of each GPU (numa_node is -1): `nvidia-smi topo -m` shows "
            "what the driver knows; in the BIOS, NUMA per socket must be on"
        )
        return (unsure(NUMA, f"the GPU's NUMA node, of {len(nodes)}", needed, evidence),)
    if len(reached) == 1:
        node = next(iter(reached))
        near = ", ".join(str(gpu.index) for gpu in known if gpu.numa_node.value == node)
        return (
            good(NUMA, f"this process is bound to node {node}, that of GPU {near}"[:99], evidence),
        )
    return (_unbound(machine, nodes, known, evidence),)


def _reached(machine: Machine, nodes: Sequence[NumaNode]) -> set[int]:
    affinity = set(machine.cpu.affinity.value or ())
    return {node.node for node in nodes if affinity & set(node.cpus)}


def _far(machine: Machine, gpu: Gpu, reached: set[int], evidence: list[Evidence]) -> Check:
    node = gpu.numa_node.value
    here = ", ".join(str(number) for number in sorted(reached))
    former = cpu_list_text(machine.cpu.affinity.value or ())
    return bad(
        NUMA,
        "numa_far_from_gpu",
        f"{which(gpu)} is attached to NUMA node {node}, but this process is bound to node {here}"[
            :99
        ],
        f"{_WHY}.",
        evidence,
        [
            Fix(
                f"numactl --cpunodebind={node} --membind={node} python train.py",
                f"taskset -c {former} python train.py",
                f"{_COST}; a scheduler's or container's cpuset must allow node {node}",
            )
        ],
    )


def _unbound(
    machine: Machine, nodes: Sequence[NumaNode], gpus: Sequence[Gpu], evidence: list[Evidence]
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
        NUMA,
        f"{len(nodes)} NUMA nodes, {where}; jobs are not bound unless started so",
        f"{_WHY}. This process is not bound, nor is a job started the same "
        "way. To see the cost, time the job with and without the fix.",
        evidence,
        remedies,
    )
