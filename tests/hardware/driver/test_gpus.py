"""GPUs and the CUDA stack, read from composed answers, from rubbish, and from what hangs."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.hardware.local_gpu import process_bytes
from trainfit.hardware.machine import cuda_stack, nvml
from trainfit.hardware.machine.cuda_stack import read_cuda_stack
from trainfit.hardware.machine.gpus import read_gpus
from trainfit.hardware.machine.nvml import place
from trainfit.hardware.machine.recorded import RecordedSystem, RecordingSystem, replayed
from trainfit.hardware.machine.system import System
from trainfit.results.machine import CudaStack, Fact, Gpu, known

MIB = 1 << 20
NOT_SUPPORTED = {"error": "NVML_ERROR_NOT_SUPPORTED"}
BLIND = {"error": "NVML_ERROR_UNKNOWN", "code": 999, "where": "nvmlInit"}

#: A GeForce RTX 4090 busy on a desktop: one process computes, one draws.
RTX_4090: dict[str, Any] = {
    "index": 0,
    "name": "NVIDIA GeForce RTX 4090",
    "uuid": "GPU-4090",
    "capability": [8, 9],
    "memory_total": 24564 * MIB,
    "memory_used": 9000 * MIB,
    "memory_reserved": 357 * MIB,
    "utilisation_gpu": 98,
    "utilisation_memory": 40,
    "pci_address": "00000000:01:00.0",
    "pcie_generation": 4,
    "pcie_generation_max": 4,
    "pcie_width": 8,
    "pcie_width_max": 16,
    "numa_node": 0,
    "sm_mhz": 2520,
    "sm_max_mhz": 3105,
    "memory_mhz": 10251,
    "memory_max_mhz": 10501,
    "application_sm_mhz": {"error": "NVML_ERROR_DEPRECATED"},
    "performance_state": 2,
    "clock_reasons": 0x24,
    "temperature_c": 71,
    "slowdown_c": 96,
    "power_mw": 431250,
    "power_limit_mw": 450000,
    "power_limit_default_mw": 450000,
    "persistence": 0,
    "compute_mode": 0,
    "ecc": 0,
    "ecc_errors": NOT_SUPPORTED,
    "mig": NOT_SUPPORTED,
    "mig_instances": NOT_SUPPORTED,
    "processes": [
        {"pid": 4242, "used": 8000 * MIB, "graphics": False},
        {"pid": 1234, "used": 300 * MIB, "graphics": True},
        {"pid": 4242, "used": 8000 * MIB, "graphics": True},
    ],
}


def gpu_files(
    address: str = "0000:01:00.0", node: int = -1, kind: str = "0x030000"
) -> dict[str, Any]:
    folder = f"/sys/bus/pci/devices/{address}"
    return {
        f"{folder}/vendor": "0x10de\n",
        f"{folder}/class": f"{kind}\n",
        f"{folder}/device": "0x2684\n",
        f"{folder}/driver": {"link": "../../../../bus/pci/drivers/nvidia"},
        f"{folder}/numa_node": f"{node}\n",
        f"{folder}/current_link_speed": "2.5 GT/s PCIe\n",
        f"{folder}/max_link_speed": "16.0 GT/s PCIe\n",
        f"{folder}/current_link_width": "8\n",
        f"{folder}/max_link_width": "16\n",
    }


def machine(**document: Any) -> RecordedSystem:
    return RecordedSystem(document)


def by_nvml(*gpus: Any, **document: Any) -> tuple[Gpu, ...]:
    answer = {"driver": "550.54.14", "cuda": 12040, "gpus": list(gpus)}
    found = read_gpus(machine(**{"probes": {"nvml_gpus": answer}, **document}))
    assert found.value is not None, found
    return found.value


def values(gpu: Gpu) -> dict[str, Any]:
    """The fields that are known."""
    facts = {field.name: getattr(gpu, field.name) for field in dataclasses.fields(Gpu)}
    del facts["index"]
    return {name: fact.value for name, fact in facts.items() if fact.is_known}


def facts_of(result: Any) -> list[Fact[Any]]:
    """Every fact in a result."""
    if isinstance(result, Fact):
        return [result, *facts_of(result.value)]
    if isinstance(result, tuple):
        return [fact for each in result for fact in facts_of(each)]
    if dataclasses.is_dataclass(result):
        parts = (getattr(result, field.name) for field in dataclasses.fields(result))
        return [fact for part in parts for fact in facts_of(part)]
    return []


# --- GPUs by NVML ---------------------------------------------------------------------------------


def test_a_gaming_card_at_work() -> None:
    processes = {"4242": "python", "1234": "Xorg"}
    calls = {"processes": processes, "own_pids": [4242]}
    (gpu,) = by_nvml(RTX_4090, calls=calls, files=gpu_files())
    found = values(gpu)
    shown = found.pop("processes")
    assert found == {
        "name": "NVIDIA GeForce RTX 4090",
        "uuid": "GPU-4090",
        "capability": (8, 9),
        "memory_bytes": 24564 * MIB,
        "used_bytes": 9000 * MIB,
        "reserved_bytes": 357 * MIB,
        "utilisation": 0.98,
        "memory_utilisation": 0.4,
        "pci_address": "00000000:01:00.0",
        "pcie_generation": 4,
        "pcie_generation_max": 4,
        "pcie_width": 8,
        "pcie_width_max": 16,
        "sm_hz": 2520e6,
        "sm_max_hz": 3105e6,
        "memory_hz": 10251e6,
        "memory_max_hz": 10501e6,
        "performance_state": 2,
        "clock_reasons": ("sw_power_cap", "sw_thermal_slowdown"),
        "temperature_c": 71.0,
        "slowdown_c": 96.0,
        "power_w": 431.25,
        "power_limit_w": 450.0,
        "power_limit_default_w": 450.0,
        "persistence": False,
        "compute_mode": "default",
        "ecc": False,
    }
    assert [(p.pid, p.name, p.used_bytes, p.graphics, p.own) for p in shown] == [
        (4242, "python", 8000 * MIB, False, True),
        (1234, "Xorg", 300 * MIB, True, False),
    ]
    assert gpu.power_w.source == "NVML nvmlDeviceGetPowerUsage"
    # The kernel's word for "the firmware does not say" is no node.
    assert gpu.numa_node.is_absent
    assert gpu.mig.is_absent
    assert gpu.ecc_errors.reason == "this GPU does not report it"
    assert gpu.application_sm_hz.state == "cannot_tell"
    assert "NVML_ERROR_DEPRECATED" in gpu.application_sm_hz.reason


def test_the_bus_knows_the_numa_node() -> None:
    (gpu,) = by_nvml(RTX_4090, files=gpu_files(node=1))
    assert gpu.numa_node == known(1, "/sys/bus/pci/devices/0000:01:00.0/numa_node")
    (gpu,) = by_nvml(RTX_4090)
    assert gpu.numa_node == known(0, "NVML nvmlDeviceGetMemoryAffinity")


def test_a_tesla_t4_in_a_container() -> None:
    entry = {
        "index": 0,
        "name": "Tesla T4",
        "memory_total": 15109 * MIB,
        "memory_used": 450 * MIB,
        "memory_reserved": {"error": "NVML_ERROR_FUNCTION_NOT_FOUND"},
        "clock_reasons": 0,
        "ecc": 1,
        "ecc_errors": 0,
        "processes": [{"pid": 31337, "used": None, "graphics": False}],
    }
    (gpu,) = by_nvml(entry)
    assert gpu.reserved_bytes.state == "cannot_tell"
    assert "this driver is too old for this call" in gpu.reserved_bytes.reason
    assert gpu.clock_reasons.value == ()
    assert (gpu.ecc.value, gpu.ecc_errors.value) == (True, 0)
    assert gpu.processes.value is not None
    (process,) = gpu.processes.value
    assert (process.name, process.used_bytes, process.own) == ("", None, False)
    assert gpu.sm_hz.state == "cannot_tell"  # the probe did not say


def test_an_a100_with_mig() -> None:
    entry = {
        "name": "NVIDIA A100-SXM4-40GB",
        "mig": 1,
        "mig_instances": ["MIG-a", "MIG-b"],
        "utilisation_gpu": NOT_SUPPORTED,
    }
    empty = {**entry, "mig_instances": []}
    first, second = by_nvml(entry, empty)
    assert first.mig.value is True
    assert first.mig_instances.value == ("MIG-a", "MIG-b")
    assert first.utilisation.is_absent
    assert second.index == 1
    assert second.mig_instances.value == ()


def test_a_jetson_has_no_memory_of_its_own() -> None:
    entry = {"name": "Orin (nvgpu)", "capability": [8, 7], "pci_address": NOT_SUPPORTED}
    memory = {f"memory_{name}": NOT_SUPPORTED for name in ("total", "used", "reserved")}
    (gpu,) = by_nvml(entry | memory)
    assert gpu.name.value == "Orin (nvgpu)"
    assert gpu.memory_bytes.is_absent
    assert gpu.used_bytes.is_absent
    assert gpu.pci_address.is_absent


def test_a_lost_gpu_is_named_by_the_drivers_files() -> None:
    lost = {"index": 1, "error": "NVML_ERROR_GPU_IS_LOST"}
    information = "Model: \t\t NVIDIA RTX A6000\nGPU UUID: \t GPU-????????\n"
    files = gpu_files() | gpu_files("0000:41:00.0", node=1)
    files["/proc/driver/nvidia/gpus/0000:41:00.0/information"] = information
    good, bad = by_nvml(RTX_4090, lost, files=files)
    assert good.name.value == "NVIDIA GeForce RTX 4090"
    assert bad.index == 1
    assert bad.pci_address.value == "0000:41:00.0"
    assert bad.name.value == "NVIDIA RTX A6000"
    assert bad.uuid.state == "cannot_tell"
    assert "GPU_IS_LOST" in bad.used_bytes.reason
    assert bad.numa_node.value == 1


def test_which_of_two_lost_gpus_cannot_be_told() -> None:
    lost = {"index": 1, "error": "NVML_ERROR_GPU_IS_LOST"}
    files = gpu_files() | gpu_files("0000:41:00.0") | gpu_files("0000:81:00.0")
    _, bad = by_nvml(RTX_4090, lost, files=files)
    assert bad.pci_address.state == "cannot_tell"
    assert "GPU_IS_LOST" in bad.name.reason


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (0x1, ("gpu_idle",)),
        (0x48, ("hw_slowdown", "hw_thermal_slowdown")),
        (0x80, ("hw_power_brake_slowdown",)),
        (0x12, ("applications_clocks_setting", "sync_boost")),
        (0x8100, ("display_clock_setting", "bit_15")),
    ],
)
def test_clock_reasons(mask: int, names: tuple[str, ...]) -> None:
    (gpu,) = by_nvml({"clock_reasons": mask})
    assert gpu.clock_reasons.value == names


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("utilisation_gpu", "utilisation", 101),
        ("pcie_width", "pcie_width", 0),
        ("pcie_generation", "pcie_generation", 0xFFFFFFFF),
        ("performance_state", "performance_state", 32),
        ("memory_total", "memory_bytes", 0),
        ("memory_total", "memory_bytes", True),
        ("power_mw", "power_w", float("nan")),
        ("power_mw", "power_w", 10**400),
        ("capability", "capability", [8]),
        ("name", "name", ""),
        ("compute_mode", "compute_mode", 7),
    ],
)
def test_values_that_cannot_be(key: str, field: str, value: Any) -> None:
    (gpu,) = by_nvml({key: value})
    fact = getattr(gpu, field)
    assert fact.state == "cannot_tell"
    assert "an invalid value" in fact.reason


# --- GPUs where NVML is blind ---------------------------------------------------------------------


def test_files_name_gpus_where_nvml_is_blind() -> None:
    files = gpu_files() | gpu_files("0000:41:00.0", node=1)
    files["/proc/driver/nvidia/gpus/0000:01:00.0/information"] = (
        "Model: \t\t NVIDIA GeForce RTX 4090\nIRQ: 150\nGPU UUID: \t GPU-4090\n"
    )
    found = read_gpus(machine(files=files, probes={"nvml_gpus": BLIND}))
    assert found.value is not None
    first, second = found.value
    assert (first.index, second.index) == (0, 1)
    assert (first.name.value, first.uuid.value) == ("NVIDIA GeForce RTX 4090", "GPU-4090")
    assert first.pci_address.value == "0000:01:00.0"
    assert (first.pcie_generation.value, first.pcie_generation_max.value) == (1, 4)
    assert (first.pcie_width.value, first.pcie_width_max.value) == (8, 16)
    assert first.used_bytes.reason == "NVML_ERROR_UNKNOWN: Unknown Error"
    assert second.name.state == "cannot_tell"
    assert second.numa_node.value == 1


def test_no_gpu_at_all() -> None:
    missing = {"error": "NVML_ERROR_LIBRARY_NOT_FOUND", "code": 12, "where": "nvmlInit"}
    files = {
        "/sys/bus/pci/devices/0000:00:02.0/vendor": "0x8086",
        "/sys/bus/pci/devices/0000:00:02.0/class": "0x030000",
    }
    found = read_gpus(machine(files=files, probes={"nvml_gpus": missing}))
    assert found.is_absent
    empty = {"driver": "550.54.14", "cuda": 12040, "gpus": []}
    found = read_gpus(machine(files=files, probes={"nvml_gpus": empty}))
    assert found.is_absent


@pytest.mark.parametrize("node", ["/dev/dxg", "/dev/nvidia0", "/dev/nvmap"])
def test_a_device_file_is_a_trace_of_a_gpu(node: str) -> None:
    found = read_gpus(machine(files={node: ""}, probes={"nvml_gpus": {"hangs": True}}))
    assert found.state == "cannot_tell"
    assert found.source == node
    assert "no answer within 6 s" in found.reason


def test_a_bus_that_cannot_be_read_is_no_sign_that_there_is_no_gpu() -> None:
    files = {"/sys/bus/pci/devices": {"error": "EACCES"}}
    found = read_gpus(machine(files=files, probes={"nvml_gpus": BLIND}))
    assert found.state == "cannot_tell"
    assert "Permission denied" in found.reason


# --- The stack ------------------------------------------------------------------------------------

TORCH = "/site-packages/torch"
CUDA_TORCH = (
    "from typing import Optional\n__version__ = '2.6.0+cu124'\ndebug = False\n"
    "cuda: Optional[str] = '12.4'\nhip: Optional[str] = None\n"
)
CPU_TORCH = CUDA_TORCH.replace("+cu124", "+cpu").replace("'12.4'", "None")
TORCHVISION = (
    "__version__ = '0.21.0+cu118'\n"
    "from torchvision.extension import _check_cuda_version\n"
    "if _check_cuda_version() > 0:\n    cuda = _check_cuda_version()\n"
)
LIBRARIES = "/usr/lib/x86_64-linux-gnu"


def workstation(**changes: Any) -> dict[str, Any]:
    """A machine on which everything works."""
    files = {
        **gpu_files(),
        # The same card's sound, and another maker's graphics.
        "/sys/bus/pci/devices/0000:01:00.1/vendor": "0x10de",
        "/sys/bus/pci/devices/0000:01:00.1/class": "0x040300",
        "/sys/bus/pci/devices/0000:00:02.0/vendor": "0x8086",
        "/sys/bus/pci/devices/0000:00:02.0/class": "0x030000",
        "/proc/driver/nvidia/version": (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build"
            "  (dvs-builder@U16-I1-N08-05-1)  Thu Feb 22 01:44:30 UTC 2024\n"
            "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
        ),
        "/proc/modules": (
            "nvidia_uvm 4923392 0 - Live 0x0\nnvidia 54304768 84 nvidia_uvm, Live 0x0\n"
            "i2c_nvidia_gpu 12288 0 - Live 0x0\next4 1 1 - Live 0x0\n"
        ),
        "/dev/nvidia0": "",
        "/dev/nvidiactl": "",
        "/dev/nvidia-uvm": "",
        "/dev/nvidia-caps/nvidia-cap1": "",
        "/dev/null": "",
        f"{LIBRARIES}/libcuda.so.550.54.14": "",
        f"{LIBRARIES}/libcuda.so.1": {"link": "libcuda.so.550.54.14"},
        f"{LIBRARIES}/libnvidia-ml.so.550.54.14": "",
        f"{LIBRARIES}/libnvidia-ml.so.1": {"link": "libnvidia-ml.so.550.54.14"},
        f"{TORCH}/version.py": CUDA_TORCH,
        f"{TORCH}vision/version.py": TORCHVISION,
    }
    probes = {
        "nvml_gpus": {"driver": "550.54.14", "cuda": 12040, "gpus": [RTX_4090]},
        "cuda_driver": {
            "library": "libcuda.so.1",
            "path": f"{LIBRARIES}/libcuda.so.550.54.14",
            "code": 0,
            "error": "",
            "version": 12040,
            "devices": 1,
        },
        "torch_devices": {
            "version": "2.6.0+cu124",
            "cuda": "12.4",
            "hip": None,
            "available": True,
            "devices": 1,
            "error": "",
            "architectures": ["sm_50", "compute_90"],
            "capabilities": [[8, 9]],
            "kernel_error": "",
            "warnings": [],
        },
    }
    document = {
        "files": files,
        "environment": {"CUDA_VISIBLE_DEVICES": ""},
        "inaccessible": ["/dev/nvidia-caps/nvidia-cap1"],
        "calls": {"packages": {"torch": TORCH, "torchvision": f"{TORCH}vision"}},
        "commands": {"nvidia-smi -L": {"stdout": "GPU 0: NVIDIA GeForce RTX 4090\n"}},
        "probes": probes,
    }
    for part, change in changes.items():
        merged = {**document[part], **change}  # type: ignore[dict-item]
        document[part] = {key: value for key, value in merged.items() if value is not None}
    return document


def stack(**changes: Any) -> CudaStack:
    return read_cuda_stack(machine(**workstation(**changes)))


def test_a_stack_that_works() -> None:
    found = stack()
    assert found.pci_devices.value is not None
    (gpu,) = found.pci_devices.value
    assert (gpu.address, gpu.device_id, gpu.device_class) == ("0000:01:00.0", "0x2684", "0x030000")
    assert (gpu.kernel_driver, gpu.numa_node) == ("nvidia", None)
    assert (gpu.link_generation, gpu.link_generation_max) == (1, 4)
    assert (gpu.link_width, gpu.link_width_max) == (8, 16)
    assert found.kernel_driver.value == "550.54.14"
    assert found.kernel_modules.value == ("nvidia", "nvidia_uvm")
    assert found.device_nodes.value is not None
    assert [(node.path, node.accessible) for node in found.device_nodes.value] == [
        ("/dev/nvidia-uvm", True),
        ("/dev/nvidia0", True),
        ("/dev/nvidiactl", True),
        ("/dev/nvidia-caps/nvidia-cap1", False),
    ]
    assert found.library_versions == {"libcuda": "550.54.14", "libnvidia-ml": "550.54.14"}
    assert found.library_places["libcuda"] == f"{LIBRARIES}/libcuda.so.550.54.14"
    assert found.nvml == known("550.54.14", "NVML nvmlSystemGetDriverVersion")
    assert found.nvml_cuda.value == (12, 4)
    assert found.nvidia_smi.value == "GPU 0: NVIDIA GeForce RTX 4090"
    assert found.cuda.value is not None
    assert (found.cuda.value.code, found.cuda.value.version) == (0, (12, 4))
    assert found.cuda.value.devices == 1
    assert found.fabric_manager.is_absent
    assert found.visible_devices.value == ""
    assert found.torch.value is not None
    assert (found.torch.value.version, found.torch.value.cuda) == ("2.6.0+cu124", (12, 4))
    assert (found.torch.value.hip, found.torch.value.location) == (None, TORCH)
    assert found.torchvision.value is not None
    assert found.torchvision.value.cuda == (11, 8)
    assert found.torch_probe.value is not None
    assert found.torch_probe.value.capabilities == ((8, 9),)
    assert found.torch_probe.value.kernel_error == ""
    assert found.bad_fork.is_absent


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  390.157  Wed Oct 12", "390.157"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.2.0  Release", "540.2.0"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07", "580.82.07"),
    ],
)
def test_spellings_of_the_kernel_drivers_version(line: str, version: str) -> None:
    found = stack(files={"/proc/driver/nvidia/version": line})
    assert found.kernel_driver.value == version


def test_the_modules_own_file_says_the_version_too() -> None:
    files = {"/proc/driver/nvidia/version": None, "/sys/module/nvidia/version": "535.1.2\n"}
    assert stack(files=files).kernel_driver.value == "535.1.2"


def test_without_cuda_in_pytorch_it_is_imported_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    ask = RecordedSystem.probe

    def record(self: RecordedSystem, name: str, seconds: float) -> Any:
        asked.append(name)
        return ask(self, name, seconds)

    monkeypatch.setattr(RecordedSystem, "probe", record)
    found = stack(files={f"{TORCH}/version.py": CPU_TORCH})
    assert "torch_devices" in asked  # does it load, and run at all?
    assert found.torch.value is not None
    assert found.torch.value.cuda is None
    assert found.torch_probe.is_absent
    assert "built without CUDA" in found.torch_probe.reason


def test_pytorch_starts_after_nvml_has_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its contexts would be among the processes and the memory that NVML reports."""
    events: list[str] = []
    ask = RecordedSystem.probe

    def slow(self: RecordedSystem, name: str, seconds: float) -> Any:
        if name == "nvml_gpus":
            time.sleep(0.1)
        events.append(name)
        return ask(self, name, seconds)

    monkeypatch.setattr(RecordedSystem, "probe", slow)
    assert stack().torch_probe.is_known
    assert events.index("nvml_gpus") < events.index("torch_devices")


@pytest.mark.parametrize(
    ("content", "cuda", "hip"),
    [
        ("__version__ = '0.21.0+cu124'\n", (12, 4), None),
        ("__version__ = '0.28.0+cu130'\n", (13, 0), None),
        ("__version__ = '0.28.0+cpu'\n", None, None),
        ("__version__ = '0.28.0+rocm6.2'\n", None, "6.2"),
        ("__version__ = '2.6.0a0+ecf3bae40a.nv25.01'\ncuda = '12.8'\nhip = None", (12, 8), None),
        ('__version__ = "2.6"\ncuda: str | None = None\nhip: str | None = "6.2.4"', None, "6.2.4"),
    ],
)
def test_builds(content: str, cuda: Any, hip: Any) -> None:
    found = stack(files={f"{TORCH}vision/version.py": content}).torchvision
    assert found.value is not None, found
    assert (found.value.cuda, found.value.hip) == (cuda, hip)


def test_a_build_that_says_nothing_of_cuda() -> None:
    files = {f"{TORCH}vision/version.py": "__version__ = '0.17.0'\n"}
    found = stack(files=files).torchvision
    assert found.state == "cannot_tell"
    assert "0.17.0" in found.reason


def test_pytorch_is_not_installed() -> None:
    found = stack(calls={"packages": {}})
    assert found.torch.is_absent
    assert found.torch_probe.is_absent
    assert found.torchvision.is_absent


def test_a_pytorch_that_cannot_be_imported() -> None:
    probes = {"torch_devices": {"failed": "import torch: OSError: libcudart.so.12"}}
    found = stack(probes=probes).torch_probe
    assert (found.state, found.reason) == ("cannot_tell", "import torch: OSError: libcudart.so.12")


def test_versions_of_driver_and_library_differ() -> None:
    mismatch = {"error": "NVML_ERROR_LIB_RM_VERSION_MISMATCH", "code": 18, "where": "nvmlInit"}
    files = {
        f"{LIBRARIES}/libcuda.so.1": {"link": "libcuda.so.550.90.07"},
        f"{LIBRARIES}/libnvidia-ml.so.1": {"link": "/etc/alternatives/nvml"},
        "/etc/alternatives/nvml": {"link": f"{LIBRARIES}/libnvidia-ml.so.550.90.07"},
    }
    smi = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550\n"
    found = stack(
        files=files,
        probes={"nvml_gpus": mismatch, "cuda_driver": {"code": 803, "library": "libcuda.so.1"}},
        commands={"nvidia-smi -L": {"code": 18, "stdout": smi}},
    )
    assert found.kernel_driver.value == "550.54.14"
    assert found.library_versions == {"libcuda": "550.90.07", "libnvidia-ml": "550.90.07"}
    assert found.nvml.state == "cannot_tell"
    assert found.nvml.source == "NVML nvmlInit"
    assert found.nvml.reason.startswith("NVML_ERROR_LIB_RM_VERSION_MISMATCH")
    assert found.nvidia_smi.reason == f"exit code 18: {smi.splitlines()[0]}"
    assert found.cuda.value is not None
    assert (found.cuda.value.code, found.cuda.value.error) == (803, "CUresult 803")


def test_forward_compatibility_is_told_apart() -> None:
    compat = "/usr/local/cuda/compat"
    files = {
        f"{compat}/libcuda.so.1": {"link": "libcuda.so.575.51.03"},
        f"{compat}/libcuda.so.575.51.03": "",
    }
    found = stack(files=files)
    assert found.library_versions["libcuda"] == "550.54.14"
    assert found.library_versions[f"libcuda ({compat})"] == "575.51.03"
    named = {"LD_LIBRARY_PATH": f"relative::{compat}/"}
    found = stack(files=files, environment=named, probes={"cuda_driver": None})
    assert found.library_versions["libcuda"] == "575.51.03"
    assert found.library_places["libcuda"] == f"{compat}/libcuda.so.575.51.03"
    assert found.library_versions[f"libcuda ({LIBRARIES})"] == "550.54.14"
    loaded = {"code": 804, "path": f"{compat}/libcuda.so.575.51.03"}
    found = stack(files=files, probes={"cuda_driver": loaded})
    assert found.library_places["libcuda"] == f"{compat}/libcuda.so.575.51.03"


def test_compatibility_alone_is_not_what_the_loader_takes() -> None:
    compat = "/usr/local/cuda/compat"
    files = {
        f"{LIBRARIES}/libcuda.so.1": None,
        f"{LIBRARIES}/libcuda.so.550.54.14": None,
        f"{compat}/libcuda.so.1": {"link": "libcuda.so.575.51.03"},
    }
    missing = {"library": "libcuda.so.1", "missing": "libcuda.so.1: cannot open shared object"}
    found = stack(files=files, probes={"cuda_driver": missing})
    assert "libcuda" not in found.library_places
    assert found.library_versions[f"libcuda ({compat})"] == "575.51.03"
    assert found.cuda.is_absent


def test_a_library_without_its_link() -> None:
    files = {
        f"{LIBRARIES}/libcuda.so.1": None,
        f"{LIBRARIES}/libcuda.so.99.1": "",
        f"{LIBRARIES}/libcuda.so.535.1.2": "",
    }
    found = stack(files=files, probes={"cuda_driver": None})
    assert found.library_versions["libcuda"] == "550.54.14"  # the newest


def test_wsl_has_libraries_without_a_version() -> None:
    place = "/usr/lib/wsl/lib/libcuda.so.1"
    document = {
        "files": {place: "", "/usr/lib/wsl/lib/libcuda.so.1.1": "", "/dev/dxg": ""},
        "probes": {"cuda_driver": {"code": 0, "path": place, "version": 12080, "devices": 1}},
    }
    found = read_cuda_stack(machine(**document))
    assert found.library_places["libcuda"] == place
    assert "libcuda" not in found.library_versions
    assert found.device_nodes.value is not None
    assert [node.path for node in found.device_nodes.value] == ["/dev/dxg"]
    assert found.kernel_driver.is_absent


SWITCH = gpu_files("0000:c4:00.0", kind="0x068000")
IS_ACTIVE = "systemctl is-active nvidia-fabricmanager"


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ({"stdout": "active\n"}, "running"),
        ({"code": 3, "stdout": "inactive\n"}, "stopped"),
        ({"code": 3, "stdout": "failed\n"}, "failed"),
        ({"code": 4, "stdout": "inactive\n"}, "not installed"),
        ({"code": 1, "stderr": "System has not been booted with systemd"}, None),
        (None, None),
    ],
)
def test_the_fabric_manager_is_asked_where_there_are_switches(
    answer: Any, value: str | None
) -> None:
    found = stack(files=SWITCH, commands={IS_ACTIVE: answer})
    assert found.fabric_manager.value == value
    assert found.fabric_manager.state == ("known" if value else "cannot_tell")
    assert found.pci_devices.value is not None
    assert len(found.pci_devices.value) == 1  # a switch is no GPU


def test_the_drivers_empty_folder_is_no_switch() -> None:
    folder = "/proc/driver/nvidia-nvswitch"
    found = stack(files={f"{folder}/devices": {"folder": True}})
    assert found.fabric_manager.is_absent
    found = stack(files={f"{folder}/devices/0000:c4:00.0": ""})
    assert found.fabric_manager.state == "cannot_tell"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            {"code": 9, "stdout": "NVIDIA-SMI has failed\nmore"},
            "exit code 9: NVIDIA-SMI has failed",
        ),
        ({"code": 0, "stdout": "No devices found.\n"}, "No devices found."),
        ({"code": 0}, "it printed nothing"),
        ({"code": 127, "stderr": "cannot execute"}, "exit code 127: cannot execute"),
        ({"hangs": True}, "no answer within 6 s"),
    ],
)
def test_failures_of_nvidia_smi(output: Any, reason: str) -> None:
    found = stack(commands={"nvidia-smi -L": output}).nvidia_smi
    assert (found.state, found.reason) == ("cannot_tell", reason)


def test_a_bus_without_gpus_is_known_to_be_empty() -> None:
    found = read_cuda_stack(machine(files={"/sys/bus/pci/devices": {"folder": True}}))
    assert found.pci_devices == known((), "/sys/bus/pci/devices")
    hidden = {"/sys/bus/pci/devices/0000:01:00.0/vendor": {"error": "EACCES"}}
    found = read_cuda_stack(machine(files=hidden))
    assert found.pci_devices.state == "cannot_tell"


def test_what_hangs_says_so_in_the_systems_words() -> None:
    hangs = {"hangs": True}
    probes = {"nvml_gpus": hangs, "cuda_driver": hangs, "torch_devices": hangs}
    found = stack(probes=probes)
    for fact, seconds in ((found.nvml, 6), (found.cuda, 8), (found.torch_probe, 14)):
        assert fact.state == "cannot_tell"
        assert fact.reason == f"no answer within {seconds} s"


def test_places_on_the_bus() -> None:
    assert place("00000000:01:00.0") == "0000:01:00.0"
    assert place("00010000:E1:00.0") == "10000:e1:00.0"
    assert place("0000:01:00.0") == "0000:01:00.0"
    assert place("1:2") is None


def test_a_process_asks_itself_whether_it_was_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.cuda", raising=False)
    assert System().bad_fork().is_absent
    fake = SimpleNamespace(_is_in_bad_fork=lambda: True)
    monkeypatch.setitem(sys.modules, "torch.cuda", fake)
    assert System().bad_fork().value is True
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace())
    assert System().bad_fork().state == "cannot_tell"


def test_a_recorded_process_may_have_been_forked() -> None:
    system = RecordedSystem({"calls": {"bad_fork": True}})
    assert read_cuda_stack(system).bad_fork.value is True


def test_processes_of_an_old_driver_are_not_known() -> None:
    class NVMLLibraryMismatchError(Exception):
        pass

    def refuse(device: int) -> Any:
        raise NVMLLibraryMismatchError

    fake = SimpleNamespace(
        NVMLError=type("NVMLError", (Exception,), {}),
        NVMLLibraryMismatchError=NVMLLibraryMismatchError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=refuse,
    )
    assert process_bytes(1, fake) is None


# --- Rubbish --------------------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**30, -1, 2**64, 2**63])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["\ud800", "\0", "0x10de", "550.54.14", "None"])
)
RUBBISH = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
KEYS = sorted(RTX_4090)
ENTRIES = st.dictionaries(
    st.sampled_from(KEYS) | st.just("error"), RUBBISH | st.sampled_from([*RTX_4090.values()])
)
NVML_ANSWERS = st.fixed_dictionaries(
    {}, optional={"driver": RUBBISH, "cuda": RUBBISH, "gpus": RUBBISH | st.lists(ENTRIES | RUBBISH)}
) | st.dictionaries(st.sampled_from(["error", "code", "where", "gpus"]), RUBBISH)


def changed(kept: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """``kept`` with some values replaced by rubbish, and some keys gone."""
    return st.fixed_dictionaries(
        {}, optional={key: st.just(value) | RUBBISH for key, value in kept.items()}
    )


@given(answer=NVML_ANSWERS, address=st.sampled_from(["0000:01:00.0", "0000:41:00.0"]))
def test_no_answer_of_nvml_is_too_strange(answer: Any, address: str) -> None:
    document = {"files": gpu_files(address), "probes": {"nvml_gpus": answer}}
    system = machine(**document)
    found = read_gpus(system)
    assert found.is_known  # the bus has a GPU
    for fact in facts_of(found):
        assert fact.is_known or fact.reason
    assert found.value is not None
    for gpu in found.value:
        f"{values(gpu)}".encode()  # nothing that cannot be shown


@given(data=st.data())
def test_no_answer_to_the_stack_is_too_strange(data: st.DataObject) -> None:
    document = workstation()
    probes = {name: data.draw(changed(kept)) for name, kept in document["probes"].items()}
    files = dict(document["files"])
    for path in data.draw(st.lists(st.sampled_from(sorted(files)), max_size=6)):
        files[path] = data.draw(
            st.text(st.characters(exclude_categories=["Cs"])).map(str)
            | st.binary(max_size=20).map(lambda raw: {"base64": _base64(raw)})
            | st.sampled_from([{"error": "EACCES"}, {"folder": True}])
        )
    smi = {"code": data.draw(SCALARS), "stdout": data.draw(st.text() | st.none())}
    environment = {
        name: data.draw(st.text(max_size=20))
        for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
    }
    document |= {"probes": probes, "files": files, "environment": environment}
    document["commands"] = {"nvidia-smi -L": smi, IS_ACTIVE: smi}
    system = machine(**document)
    for fact in facts_of(read_cuda_stack(system)) + facts_of(read_gpus(system)):
        assert fact.is_known or fact.reason


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


# --- What hangs on a real system ------------------------------------------------------------------


def test_a_hanging_nvidia_smi_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its children too are ended: a shell that is killed leaves its sleep behind otherwise."""
    mark = tmp_path / "pid"
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {mark}\nwait\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(cuda_stack, "_SMI_SECONDS", 0.5)
    found = read_cuda_stack(System())
    assert found.nvidia_smi.reason == "no answer within 500 ms"
    assert _is_gone(int(mark.read_text()))


def _is_gone(pid: int) -> bool:
    """Ended, or ended and not yet collected; given a moment for it."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_hanging_nvml_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynvml.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(nvml, "SECONDS", 0.5)
    system = System(environment={**os.environ, "PYTHONPATH": str(tmp_path)})
    found = read_cuda_stack(system)
    assert found.nvml.reason == "no answer within 500 ms"
    # The GPUs' reader takes the same answer: it does not ask, and wait, once more.
    monkeypatch.delattr(System, "_probe")
    assert not any(gpu.used_bytes.is_known for gpu in read_gpus(system).value or ())


@pytest.mark.slow
def test_this_machine_replays_as_it_was_read(tmp_path: Path) -> None:
    recorder = RecordingSystem()
    read = read_cuda_stack(recorder), read_gpus(recorder)
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(recorder.document()))
    system = replayed(file)
    assert (read_cuda_stack(system), read_gpus(system)) == read


def test_impossible_process_numbers_are_left_out() -> None:
    listed = [{"pid": pid} for pid in (0, -1, 2**22 + 1, 2**40, 2**70, True, None, "7", 7)]
    (gpu,) = by_nvml({"processes": listed})
    assert gpu.processes.value is not None
    assert [process.pid for process in gpu.processes.value] == [7]


_HANGS_ALL_THE_WAY = """
import threading
from pathlib import Path
from trainfit.hardware.machine.survey import survey
from trainfit.hardware.machine.system import System

class Stuck(System):
    def command(self, words, seconds):
        threading.Event().wait()

    def probe(self, name, seconds):
        threading.Event().wait()

found = survey(Stuck(Path(%r)), seconds=0.3)
print(found.cuda.nvml.reason, "|", found.gpus.reason)
"""


def test_no_reader_keeps_the_program_from_ending(tmp_path: Path) -> None:
    """Even the start of a command can hang: its program is on a mount that is dead."""
    # The limit is for a failure alone: a thread that is joined at exit would never end.
    ran = subprocess.run(
        [sys.executable, "-c", _HANGS_ALL_THE_WAY % str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert ran.stdout.strip() == "no answer within 300 ms | no answer within 300 ms"
