"""The processor, and the share of it that a job can use."""

from __future__ import annotations

import re

from trainfit.hardware.cpu import frequency, topology
from trainfit.hardware.cpu.topology import CPUINFO, CpuInfo, read_cpuinfo
from trainfit.hardware.host.cgroup import cpu_quota, cpuset
from trainfit.hardware.host.parsing import asked, cpu_list, word_at
from trainfit.hardware.host.system import System
from trainfit.results.files.facts import Fact, cannot_tell, known
from trainfit.results.machine.machine import Cpu

_STATUS = "/proc/self/status"


def read_cpu(system: System) -> Cpu:
    """Every fact of the processor; none of them raises."""
    cpuinfo = read_cpuinfo(system)
    online = topology.online_cpus(system, cpuinfo)
    numbers = online.value or ()
    physical = topology.cores(system, numbers, cpuinfo)
    policies = frequency.policies(system, numbers, cpuinfo)
    affinity = read_affinity(system)
    quota = cpu_quota(system)
    return Cpu(
        model=_model(system, cpuinfo),
        sockets=topology.sockets(system, numbers, cpuinfo),
        physical_cores=physical.map(len, "cores"),
        logical_cpus=online.map(len, "CPUs"),
        core_kinds=topology.core_kinds(system, numbers, physical, cpuinfo),
        affinity=affinity,
        quota_cores=quota,
        usable_cores=_usable(affinity, quota),
        numa_nodes=topology.numa_nodes(system),
        policies=policies,
        scaling_mode=frequency.scaling_mode(system),
        turbo=frequency.turbo(system, policies),
        current_hz=frequency.current_hz(cpuinfo, policies),
        idle_states=frequency.idle_states(system, cpuinfo),
        siblings=physical,
    )


def read_affinity(system: System) -> Fact[tuple[int, ...]]:
    """The CPUs that this process may run on; the cgroup's cpuset is already in it."""
    call = asked("sched_getaffinity", system.affinity)
    if call.value:
        return call
    listed = system.text(_STATUS).map(_allowed, "a line Cpus_allowed_list")
    if listed.value:
        return listed
    granted = cpuset(system)
    return granted if granted.value else cannot_tell(call.source, call.reason or "no CPU")


def _allowed(text: str) -> tuple[int, ...] | None:
    found = re.search(r"(?m)^Cpus_allowed_list:[ \t]*([0-9,\-]+)[ \t]*$", text)
    return None if found is None else cpu_list(found[1])


def _usable(affinity: Fact[tuple[int, ...]], quota: Fact[float]) -> Fact[float]:
    if affinity.value is None:
        return cannot_tell(affinity.source, affinity.reason)
    allowed = float(len(affinity.value))
    if quota.value is not None:
        return known(min(allowed, quota.value), f"{affinity.source}, {quota.source}")
    if quota.is_absent:
        return known(allowed, affinity.source)
    return cannot_tell(
        quota.source, f"at most {allowed:g} by the affinity, the quota is not known: {quota.reason}"
    )


def _model(system: System, cpuinfo: Fact[CpuInfo]) -> Fact[str]:
    if cpuinfo.value is None:
        return cannot_tell(CPUINFO, cpuinfo.reason)
    first = cpuinfo.value.first
    name = first.get("model name", "")
    # 64-bit Arm has no names: NVIDIA's kernels write "ARMv8 Processor rev 1 (v8l)" there.
    if name and not name.startswith("ARMv"):
        return known(name, CPUINFO)
    board = word_at(system, "/proc/device-tree/model")
    if board:
        return known(board, "/proc/device-tree/model")
    implementer, part = first.get("CPU implementer"), first.get("CPU part")
    if implementer and part:
        return known(f"Arm implementer {implementer}, part {part}", CPUINFO)
    for key in ("cpu", "cpu model", "uarch"):  # POWER, MIPS, RISC-V
        if first.get(key):
            return known(first[key], CPUINFO)
    return known(name, CPUINFO) if name else cannot_tell(CPUINFO, "it lists no model")
