"""Measurements on simulated machines, and files of a machine whose settings can be changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from helpers_paced_machine import (
    MachineTraits,
    SimulatedCallee,
    SimulatedFixer,
    SimulatedMachine,
    SimulatedWork,
)
from trainfit.pace.measuring import PaceOptions, measure
from trainfit.results.pace import Fix, PaceResult

#: Machines with one cause each.
HEALTHY = MachineTraits()
#: The seed's processor: clocks of 1.7 to 4.0 GHz were seen.
FREQUENCY = MachineTraits(headroom=1.53, least_clock=1.7 / 4.0)
C_STATES = MachineTraits(exit_s=680e-6)
GPU_CLOCKS = MachineTraits(gpu_least=0.35)
LAUNCHES = MachineTraits(cold_launches=0.6)
CACHES = MachineTraits(cold_work=0.5)

#: Calls of which each cause makes something: ACT's, one that waits often, one that the GPU
#: bounds, one without a GPU.
ACT = SimulatedWork(prepare_s=4e-3, launches=2100, launch_s=4.95e-6, gpu_s=5e-3, waits=1)
WAITING = SimulatedWork(prepare_s=3e-3, launches=300, launch_s=6e-6, gpu_s=8e-3, waits=12)
HEAVY = SimulatedWork(prepare_s=1e-3, launches=200, launch_s=6e-6, gpu_s=12e-3, waits=2)
#: One that CPU and GPU work at for as long, and whose thread waits for the GPU at work.
BOTH = SimulatedWork(prepare_s=5e-3, launches=200, launch_s=6e-6, gpu_s=8e-3, spins=True)
ON_CPU = SimulatedWork(prepare_s=12e-3, uses_gpu=False, waits=0)
#: One that works, launches much, waits often; and one whose many launches and the GPU go on at
#: the same time.
MIXED = SimulatedWork(prepare_s=6e-3, launches=700, launch_s=6e-6, gpu_s=3e-3, waits=8)
ABREAST = SimulatedWork(prepare_s=4e-3, launches=1200, launch_s=6e-6, gpu_s=8e-3, waits=1)


#: Name, machine, call, and what is to be found, and nothing else.
Case = tuple[str, MachineTraits, SimulatedWork, frozenset[str]]
SINGLE: tuple[Case, ...] = (
    ("CPU frequency", FREQUENCY, ACT, frozenset({"cpu_frequency"})),
    ("C-states", C_STATES, WAITING, frozenset({"c_states"})),
    ("GPU clocks", GPU_CLOCKS, HEAVY, frozenset({"gpu_clocks"})),
    ("launch overhead", LAUNCHES, ACT, frozenset({"launch_overhead"})),
    ("cold caches", CACHES, ON_CPU, frozenset({"cold_caches"})),
)
SOUND: tuple[Case, ...] = (
    ("healthy, ACT", HEALTHY, ACT, frozenset()),
    ("healthy, many waits", HEALTHY, WAITING, frozenset()),
    ("healthy, heavy on the GPU", HEALTHY, HEAVY, frozenset()),
    ("healthy, without a GPU", HEALTHY, ON_CPU, frozenset()),
)
#: All ten pairs, each of which makes a good part of the excess.
PAIRS: tuple[Case, ...] = tuple(
    (name, traits, work, frozenset(pair))
    for name, traits, work, *pair in (
        (
            "frequency and GPU clocks",
            MachineTraits(headroom=1.5, gpu_least=0.35),
            BOTH,
            "cpu_frequency",
            "gpu_clocks",
        ),
        (
            "frequency and C-states",
            MachineTraits(headroom=1.6, exit_s=900e-6),
            WAITING,
            "cpu_frequency",
            "c_states",
        ),
        (
            "frequency and launches",
            MachineTraits(headroom=1.53, cold_launches=0.3),
            ACT,
            "cpu_frequency",
            "launch_overhead",
        ),
        (
            "frequency and caches",
            MachineTraits(headroom=1.53, cold_work=0.4),
            ON_CPU,
            "cpu_frequency",
            "cold_caches",
        ),
        (
            "C-states and GPU clocks",
            MachineTraits(exit_s=680e-6, gpu_least=0.5),
            WAITING,
            "c_states",
            "gpu_clocks",
        ),
        (
            "C-states and launches",
            MachineTraits(exit_s=500e-6, cold_launches=0.6),
            MIXED,
            "c_states",
            "launch_overhead",
        ),
        (
            "C-states and caches",
            MachineTraits(exit_s=500e-6, cold_work=0.5),
            MIXED,
            "c_states",
            "cold_caches",
        ),
        (
            "GPU clocks and launches",
            MachineTraits(gpu_least=0.35, cold_launches=0.6),
            ABREAST,
            "gpu_clocks",
            "launch_overhead",
        ),
        (
            "GPU clocks and caches",
            MachineTraits(gpu_least=0.5, cold_work=0.8),
            BOTH,
            "gpu_clocks",
            "cold_caches",
        ),
        (
            "launches and caches",
            MachineTraits(cold_launches=0.5, cold_work=0.5),
            MIXED,
            "launch_overhead",
            "cold_caches",
        ),
    )
)


def measured(
    traits: MachineTraits,
    work: SimulatedWork,
    seed: int = 0,
    *,
    hz: tuple[float, ...] = (30.0,),
    seconds: float = 6.0,
    fix: Fix | None = None,
) -> PaceResult:
    """The whole of it on a simulated machine."""
    machine = SimulatedMachine(traits, work, seed)
    options = PaceOptions(hz, seconds, fix=fix)
    fixer = SimulatedFixer(machine)
    return measure(SimulatedCallee(machine), machine, options, target="simulated", fixer=fixer)


def without(traits: MachineTraits, **changes: bool) -> MachineTraits:
    """The same machine without the right to something."""
    return dataclasses.replace(traits, **changes)


def cpufreq_tree(root: Path, cpus: int = 2, governor: str = "powersave") -> Path:
    """A machine with intel_pstate, active: governors and preferences below ``root``."""
    for cpu in range(cpus):
        folder = root / f"sys/devices/system/cpu/cpufreq/policy{cpu}"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(governor + "\n")
        (folder / "energy_performance_preference").write_text("balance_performance\n")
    boot = root / "proc/sys/kernel/random"
    boot.mkdir(parents=True)
    (boot / "boot_id").write_text("11111111-2222\n")
    return root
