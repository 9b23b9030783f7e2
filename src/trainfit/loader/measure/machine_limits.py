"""A machine's limits for a DataLoader, and the cores that the model simulates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from trainfit.hardware.machine.processor import SIBLING_GAIN
from trainfit.loader.measure.events import Cores
from trainfit.results.dataloader import LoaderMachine
from trainfit.results.machine import Cpu, Machine, Memory

#: Instructions per clock of Intel's efficiency cores, of its performance cores': Gracemont does
#: as much a clock as Skylake, Golden Cove 1.19 times Cypress Cove, that 1.19 times Skylake
#: (Intel Architecture Day 2021; Rocket Lake's announcement). Other makers' kinds are distinguished
#: by their clocks alone (AMD's compact cores have the same design as its others).
_EFFICIENCY_PER_CLOCK: Final = 1 / (1.19 * 1.19)


def loader_machine(machine: Machine, ranks: int = 1) -> LoaderMachine:
    """What one of ``ranks`` processes, each with a DataLoader of its own, gets of a machine.

    Cores, RAM and shared memory are divided among the ranks; open files are limited for each
    process. ``affinity``, ``physical_cores`` and ``quota_cores`` are those of all ranks.
    A second thread of a core counts in ``core_speeds`` with what it adds to the first, so that
    the n fastest entries add up to what n busy workers get; Linux fills the cores before it
    doubles up. ``open_files`` is ``None`` where they are not limited, too.

    Raises ``ValueError`` for less than one rank, or if no CPU can be counted.
    """
    if ranks < 1:
        raise ValueError(f"expected one rank or more, got {ranks}")
    cpus = _cpus(machine.cpu)
    quota = machine.cpu.quota_cores.value
    usable = min(float(len(cpus)), quota) if quota is not None else float(len(cpus))
    memory, shm = available_bytes(machine.memory), machine.memory.shm_free_bytes.value
    siblings = _cores_of(machine.cpu, cpus)
    return LoaderMachine(
        usable_cores=usable / ranks,
        affinity=cpus,
        physical_cores=None if siblings is None else len(siblings),
        quota_cores=quota,
        core_speeds=_speeds(machine.cpu, cpus, siblings)[::ranks],
        available_bytes=None if memory is None else memory // ranks,
        shm_free_bytes=None if shm is None else shm // ranks,
        open_files=machine.limits.open_files.value,
    )


def model_cores(machine: LoaderMachine, contention: float) -> Cores:
    """The cores that the model simulates, slowed by ``contention`` (see :class:`Cores`)."""
    whole = len(machine.core_speeds)
    quota = machine.usable_cores if machine.usable_cores < whole else None
    return Cores(machine.core_speeds, quota, contention)


def unknowns(machine: Machine) -> tuple[str, ...]:
    """Figures of :func:`loader_machine` that are unknown, and what is assumed instead."""
    cpu, memory = machine.cpu, machine.memory
    taken: Mapping[str, tuple[bool, str]] = {
        "the CPU quota": (
            not cpu.quota_cores.is_known and not cpu.quota_cores.is_absent,
            f"assumed unlimited ({cpu.quota_cores.reason})",
        ),
        "the CPUs that a job may use": (
            not cpu.affinity.is_known,
            f"assumed: all of the machine's ({cpu.affinity.reason})",
        ),
        "which CPUs share a core": (
            not cpu.siblings.is_known,
            f"assumed: each is a core of its own ({cpu.siblings.reason})",
        ),
        "the free part of the cgroup's memory limit": (
            memory.limit_bytes.is_known and not memory.limit_used_bytes.is_known,
            f"assumed: all of it is free ({memory.limit_used_bytes.reason})",
        ),
        "the available RAM": (
            available_bytes(memory) is None,
            f"not checked ({memory.available_bytes.reason})",
        ),
        "the free space of /dev/shm": (
            not memory.shm_free_bytes.is_known,
            f"not checked ({memory.shm_free_bytes.reason})",
        ),
    }
    return tuple(f"{what} unknown: {so}" for what, (missing, so) in taken.items() if missing)


def available_bytes(memory: Memory) -> int | None:
    """RAM that new processes may take: MemAvailable, or less by the cgroup's limit."""
    bounds = [memory.available_bytes.value]
    if memory.limit_bytes.value is not None:
        # What is used may be unknown where the limit is of a cgroup that is not visible.
        bounds.append(max(0, memory.limit_bytes.value - (memory.limit_used_bytes.value or 0)))
    return min((bound for bound in bounds if bound is not None), default=None)


def _cpus(cpu: Cpu) -> tuple[int, ...]:
    if cpu.affinity.value:
        return cpu.affinity.value
    if cpu.logical_cpus.value:
        return tuple(range(cpu.logical_cpus.value))
    raise ValueError(
        "the number of usable CPUs is unknown: neither the affinity "
        f"({cpu.affinity.reason}) nor the machine's CPUs ({cpu.logical_cpus.reason})"
    )


def _cores_of(cpu: Cpu, cpus: Sequence[int]) -> list[list[int]] | None:
    """The physical cores among ``cpus``, each as its logical ones."""
    if cpu.siblings.value is None:
        return None
    numbers = set(cpus)
    found = [[each for each in core if each in numbers] for core in cpu.siblings.value]
    cores = [core for core in found if core]
    return cores if sorted(each for core in cores for each in core) == sorted(numbers) else None


def _speeds(
    cpu: Cpu, cpus: Sequence[int], siblings: Sequence[Sequence[int]] | None
) -> tuple[float, ...]:
    alone = _speeds_alone(cpu, cpus)
    groups = siblings if siblings is not None else [[number] for number in cpus]
    fastest = max(alone.values())
    speeds = []
    for group in groups:
        first, *others = (alone[each] / fastest for each in group)
        speeds += [first, *(speed * SIBLING_GAIN for speed in others)]
    return tuple(sorted(speeds, reverse=True))


def _speeds_alone(cpu: Cpu, cpus: Sequence[int]) -> dict[int, float]:
    """Clock times instructions per clock of each CPU, in any unit; 1 where none is known."""
    kinds = cpu.core_kinds.value or ()
    of_kind = {each: kind.max_hz for kind in kinds for each in kind.logical_cpus}
    measured = {
        number: policy.hardware_hz for policy in cpu.policies.value or () for number in policy.cpus
    }
    clocks = {number: measured.get(number) or of_kind.get(number) for number in cpus}
    is_hybrid = len(kinds) > 1 and "Intel" in (cpu.model.value or "")
    efficient = {each for kind in kinds if kind.kind == "efficiency" for each in kind.logical_cpus}
    known = [hz for hz in clocks.values() if hz]
    if len(known) < len(cpus):  # a clock of some says nothing about the others
        clocks = dict.fromkeys(cpus, 1.0)
    return {
        number: (clocks[number] or 1.0)
        * (_EFFICIENCY_PER_CLOCK if is_hybrid and number in efficient else 1.0)
        for number in cpus
    }
