"""Machines made of facts, healthy unless a test changes something.

    machine(cpu={"quota_cores": 2.0}, gpus=[gpu(temperature_c=95.0)])

In a change, a plain value is a known fact, ``None`` an absent one; a :class:`Fact` is taken as
it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from trainfit.results.machine import (
    CoreKind,
    Cpu,
    CudaDriver,
    CudaStack,
    DeviceNode,
    Fact,
    FrequencyPolicy,
    Gpu,
    IdleState,
    Limits,
    Machine,
    Memory,
    NumaNode,
    PciDevice,
    Storage,
    Surroundings,
    ThreadSettings,
    TorchBuild,
    TorchProbe,
    absent,
    cannot_tell,
    known,
)

GIB = 1 << 30
SOURCE = "composed"
ADDRESS = "00000000:01:00.0"


def fact(value: Any) -> Any:
    """A fact of a plain value; ``None`` is absent."""
    if isinstance(value, Fact):
        return value
    return absent(SOURCE, "the test has none") if value is None else known(value, SOURCE)


def unknown() -> Any:
    """A fact that is unknown."""
    return cannot_tell(SOURCE, "the test does not tell")


def changed(thing: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of a group of facts with some of them changed."""
    plain = {f.name for f in dataclasses.fields(thing) if "Fact[" not in str(f.type)}
    made = {key: value if key in plain else fact(value) for key, value in changes.items()}
    return dataclasses.replace(thing, **made)


def cores_of(cpus: Sequence[int], kind: Any = "uniform", hz: float = 5e9) -> CoreKind:
    return CoreKind(kind, tuple(cpus), len(cpus) // 2, hz)


def frequency(**changes: Any) -> FrequencyPolicy:
    """The clock policy of a desktop that is set to performance."""
    settings: dict[str, Any] = {
        "cpus": tuple(range(16)),
        "driver": "intel_pstate",
        "governor": "performance",
        "available_governors": ("performance", "powersave"),
        "energy_preference": "performance",
        "current_hz": 4.6e9,
        "limit_hz": 5e9,
        "hardware_hz": 5e9,
    }
    return FrequencyPolicy(**settings | changes)


def gpu(index: int = 0, **changes: Any) -> Gpu:
    """A GPU of 24 GiB busy, alone, at full clocks, on a full link."""
    facts: dict[str, Any] = {
        "name": "NVIDIA L4",
        "uuid": f"GPU-{index:08d}-1111-2222-3333-444444444444",
        "capability": (8, 9),
        "memory_bytes": 24 * GIB,
        "used_bytes": 300 << 20,
        "reserved_bytes": 300 << 20,
        "utilisation": 0.9,
        "memory_utilisation": 0.4,
        "pci_address": f"00000000:{index + 1:02x}:00.0",
        "pcie_generation": 4,
        "pcie_generation_max": 4,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "numa_node": 0,
        "sm_hz": 2.0e9,
        "sm_max_hz": 2.04e9,
        "memory_hz": 6.25e9,
        "memory_max_hz": 6.25e9,
        "application_sm_hz": 2.04e9,
        "performance_state": 0,
        "clock_reasons": (),
        "temperature_c": 60.0,
        "slowdown_c": 92.0,
        "power_w": 65.0,
        "power_limit_w": 72.0,
        "power_limit_default_w": 72.0,
        "persistence": True,
        "compute_mode": "default",
        "ecc": True,
        "ecc_errors": 0,
        "mig": None,
        "mig_instances": None,
        "processes": (),
    }
    made = {key: fact(value) for key, value in (facts | changes).items()}
    made["pcie_width_max"] = dataclasses.replace(made["pcie_width_max"], source="NVML")
    return Gpu(index=index, **made)


def healthy_cpu() -> Cpu:
    cpus = tuple(range(16))
    return Cpu(
        model=fact("a processor with 8 cores"),
        sockets=fact(1),
        physical_cores=fact(8),
        logical_cpus=fact(16),
        core_kinds=fact((cores_of(cpus),)),
        affinity=fact(cpus),
        quota_cores=fact(None),
        usable_cores=fact(16.0),
        numa_nodes=fact((NumaNode(0, cpus, 64 * GIB),)),
        policies=fact((frequency(),)),
        scaling_mode=fact("active"),
        turbo=known(True, "/sys/devices/system/cpu/intel_pstate/no_turbo"),
        current_hz=fact((4.6e9,) * 16),
        idle_states=fact((IdleState("POLL", 0.0, False), IdleState("C1E", 4e-6, False))),
    )


def healthy_memory() -> Memory:
    return Memory(
        total_bytes=fact(64 * GIB),
        available_bytes=fact(56 * GIB),
        swap_total_bytes=fact(2 * GIB),
        swap_used_bytes=fact(0),
        limit_bytes=fact(None),
        limit_used_bytes=fact(None),
        shm_total_bytes=fact(32 * GIB),
        shm_free_bytes=fact(32 * GIB),
    )


def healthy_cuda() -> CudaStack:
    libraries = {"libcuda": "550.54.14", "libnvidia-ml": "550.54.14"}
    torch = TorchBuild("2.8.0+cu126", (12, 6), None, "/site/torch")
    vision = TorchBuild("0.23.0+cu126", (12, 6), None, "/site/torchvision")
    device = PciDevice("0000:01:00.0", "0x27b8", "0x030200", "nvidia", 0, 4, 4, 16, 16)
    return CudaStack(
        pci_devices=fact((device,)),
        kernel_driver=fact("550.54.14"),
        kernel_modules=fact(("nvidia", "nvidia_uvm")),
        device_nodes=fact((DeviceNode("/dev/nvidia0", True), DeviceNode("/dev/nvidia-uvm", True))),
        library_versions=libraries,
        library_places={name: f"/usr/lib/{name}.so.550.54.14" for name in libraries},
        nvml=fact("550.54.14"),
        nvml_cuda=fact((12, 6)),
        nvidia_smi=fact("GPU 0: NVIDIA L4"),
        cuda=fact(CudaDriver("libcuda.so.1", 0, "", (12, 6), 1)),
        fabric_manager=fact(None),
        visible_devices=fact(None),
        torch=fact(torch),
        torch_probe=fact(TorchProbe(True, 1, "", ("sm_80", "sm_89"), ((8, 9),), "")),
        torchvision=fact(vision),
        bad_fork=fact(None),
    )


def machine(**changes: Any) -> Machine:
    """A healthy workstation with ``changes``: a dict of facts of each part.

    ``gpus`` is a list of GPUs, a fact, or ``None`` for a machine without; ``threads`` the
    variables that are set, or a :class:`ThreadSettings`.
    """
    gpus, threads = changes.pop("gpus", [gpu()]), changes.pop("threads", {})
    parts: dict[str, Any] = {
        "cpu": healthy_cpu(),
        "memory": healthy_memory(),
        "storage": Storage(
            "/data",
            *map(fact, ("ext4", "/data", "/dev/nvme0n1p1", "nvme", 2000 * GIB, 800 * GIB)),
            *map(fact, (2.5e9, 9e9)),
        ),
        "limits": Limits(*map(fact, (65536, 1 << 20, None, 250_000))),
        "surroundings": Surroundings(
            *map(fact, ("Ubuntu 24.04", "6.8.0", None, None, None, None)), scheduler_grant={}
        ),
        "cuda": healthy_cuda(),
    }
    for key, change in changes.items():
        parts[key] = changed(parts[key], change)
    if not isinstance(threads, ThreadSettings):
        threads = ThreadSettings(threads, fact(16), fact(8))
    listed = gpus if isinstance(gpus, Fact) else fact(None if gpus is None else tuple(gpus))
    return Machine(threads=threads, gpus=listed, python="3.11.9", **parts)
