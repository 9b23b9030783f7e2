"""Facts of a machine's driver stack that the decision table uses."""

from __future__ import annotations

import dataclasses
import re
from functools import cached_property
from typing import Any

from trainfit.doctor.findings import evidence, version_text
from trainfit.results.findings import Evidence
from trainfit.results.machine import (
    CudaDriver,
    CudaStack,
    DeviceNode,
    Fact,
    Gpu,
    Machine,
    PciDevice,
    TorchBuild,
    TorchProbe,
)
from trainfit.results.text import count

#: Least driver branch by CUDA's major version, under minor-version compatibility: NVIDIA, CUDA
#: Compatibility, docs.nvidia.com/deploy/cuda-compatibility (Linux).
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}

#: What a probe says that did not answer in time (`hardware.system`).
_HANGS = "no answer within"
_TOO_OLD = "driver on your system is too old"
_NO_IMAGE = "no kernel image"


@dataclasses.dataclass(frozen=True)
class DriverStack:
    """The driver stack of one machine, as the decision table reads it."""

    machine: Machine

    @property
    def cuda(self) -> CudaStack:
        return self.machine.cuda

    # --- PyTorch ------------------------------------------------------------------------------
    @property
    def torch(self) -> TorchBuild | None:
        return self.cuda.torch.value

    @property
    def probe(self) -> TorchProbe | None:
        return self.cuda.torch_probe.value

    @cached_property
    def torch_words(self) -> str:
        """Everything that PyTorch and CUDA complained about, in one text."""
        words = [self.driver_error]
        if self.probe is not None:
            words += [self.probe.error, self.probe.kernel_error or "", *self.probe.warnings]
        return "\n".join(words)

    @property
    def sees_gpu(self) -> bool:
        return self.probe is not None and self.probe.available and self.probe.devices > 0

    @property
    def runs_kernels(self) -> bool:
        # kernel_error is None where CUDA did not start, and no kernel was tried.
        return self.sees_gpu and self.probe is not None and self.probe.kernel_error == ""

    @property
    def has_no_image(self) -> bool:
        return self.probe is not None and _NO_IMAGE in (self.probe.kernel_error or "")

    # --- GPUs ---------------------------------------------------------------------------------
    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.machine.gpus.value or ()

    @property
    def pci(self) -> tuple[PciDevice, ...] | None:
        """``None`` where the bus cannot be seen."""
        return self.cuda.pci_devices.value

    @property
    def gpu_count(self) -> int:
        """The number of GPUs, by NVML where it answers: a container's bus shows the host's other
        GPUs, too."""
        if self.cuda.nvml.is_known and self.gpus:
            return len(self.gpus)
        return max(len(self.gpus), len(self.pci or ()))

    @property
    def capabilities(self) -> set[tuple[int, int]]:
        """Compute capabilities of the GPUs, as far as they are known."""
        return {gpu.capability.value for gpu in self.gpus if gpu.capability.value is not None}

    @property
    def is_jetson(self) -> bool:
        """Its GPU is no PCI device, and its driver no module called nvidia."""
        return any(re.search(r"/nvhost|/nvmap", node.path) for node in self.nodes)

    # --- Driver -------------------------------------------------------------------------------
    @property
    def kernel_driver(self) -> str | None:
        return self.cuda.kernel_driver.value

    @property
    def drives_gpu(self) -> bool:
        """Does an NVIDIA driver run?"""
        return self.kernel_driver is not None or self.cuda.nvml.is_known

    @property
    def driver_branch(self) -> int | None:
        """550 of driver 550.54.14."""
        text = self.kernel_driver or self.cuda.nvml.value or ""
        branch = text.partition(".")[0]
        return int(branch) if branch.isascii() and branch.isdigit() else None

    @property
    def cuda_driver(self) -> CudaDriver | None:
        return self.cuda.cuda.value

    @property
    def cuda_code(self) -> int | None:
        return self.cuda_driver.code if self.cuda_driver is not None else None

    @property
    def driver_error(self) -> str:
        return self.cuda_driver.error if self.cuda_driver is not None else ""

    @property
    def has_libcuda(self) -> bool:
        return self.cuda_driver is not None or "libcuda" in self.cuda.library_versions

    @property
    def nvml_error(self) -> str:
        return "" if self.cuda.nvml.is_known else self.cuda.nvml.reason

    @property
    def nodes(self) -> tuple[DeviceNode, ...]:
        return self.cuda.device_nodes.value or ()

    @property
    def gpu_nodes(self) -> tuple[DeviceNode, ...]:
        """Device files of the GPUs themselves: /dev/nvidia0 and so on."""
        return tuple(node for node in self.nodes if re.fullmatch(r"/dev/nvidia\d+", node.path))

    @property
    def closed_nodes(self) -> tuple[DeviceNode, ...]:
        """Device files that CUDA needs and that this user may not open.

        Of the GPUs' own files one that opens is enough: schedulers and containers close those
        of others' GPUs.
        """
        text = r"/dev/nvidia(ctl|-uvm)"
        if not any(node.accessible for node in self.gpu_nodes):
            text = r"/dev/nvidia(\d+|ctl|-uvm)"
        return tuple(n for n in self.nodes if not n.accessible and re.fullmatch(text, n.path))

    @property
    def has_uvm(self) -> bool:
        return any(node.path == "/dev/nvidia-uvm" for node in self.nodes)

    @property
    def too_old(self) -> bool:
        """Is the driver older than PyTorch's CUDA needs?"""
        if _TOO_OLD in self.torch_words:
            return True
        build = self.torch
        if build is None or build.cuda is None or self.driver_branch is None or self.is_jetson:
            return False  # a Jetson's driver counts otherwise (35.4.1 of JetPack 5)
        return self.driver_branch < LEAST_DRIVER.get(build.cuda[0], 0)

    @property
    def hanging(self) -> tuple[str, ...]:
        """What did not answer in time."""
        asked: dict[str, Fact[Any]] = {
            "NVML": self.cuda.nvml,
            "nvidia-smi": self.cuda.nvidia_smi,
            "libcuda": self.cuda.cuda,
            "PyTorch": self.cuda.torch_probe,
        }
        return tuple(name for name, fact in asked.items() if fact.reason.startswith(_HANGS))

    # --- Surroundings -------------------------------------------------------------------------
    @property
    def in_container(self) -> bool:
        return self.machine.surroundings.container.is_known

    @property
    def in_wsl(self) -> bool:
        return self.has_dxg or self.machine.surroundings.wsl.value == 2

    @property
    def has_dxg(self) -> bool:
        return any(node.path == "/dev/dxg" for node in self.nodes)

    @property
    def in_slurm(self) -> bool:
        return self.machine.surroundings.scheduler.value == "slurm"

    # --- Evidence -----------------------------------------------------------------------------
    def torch_evidence(self) -> list[Evidence]:
        """The build, and what a fresh Python with it answered."""
        return [
            evidence("PyTorch", self.cuda.torch, _build_words),
            evidence("PyTorch in a fresh process", self.cuda.torch_probe, _probe_words),
        ]

    def driver_evidence(self) -> list[Evidence]:
        """What each layer shows, from the bus upwards to libcuda."""
        return [
            evidence("NVIDIA GPUs on the PCI bus", self.cuda.pci_devices, _pci_words),
            evidence("kernel driver", self.cuda.kernel_driver),
            evidence("NVML's driver", self.cuda.nvml),
            evidence("cuInit", self.cuda.cuda, _cuda_words),
        ]

    def node_evidence(self) -> Evidence:
        return evidence("device files", self.cuda.device_nodes, _node_words)


def _build_words(build: TorchBuild) -> str:
    if build.hip is not None:
        return f"{build.version}, built for ROCm {build.hip}"
    cuda = version_text(build.cuda) if build.cuda is not None else None
    return f"{build.version}, built for CUDA {cuda}" if cuda else f"{build.version}, CPU only"


def _probe_words(probe: TorchProbe) -> str:
    words = f"device_count() = {probe.devices}"
    error = probe.error or probe.kernel_error or next(iter(probe.warnings), "")
    return f"{words}; {error.strip().splitlines()[0][:400]}" if error.strip() else words


def _pci_words(devices: tuple[PciDevice, ...]) -> str:
    if not devices:
        return "none"
    return ", ".join(f"{d.address} (driver {d.kernel_driver or 'none'})" for d in devices)


def _cuda_words(answer: CudaDriver) -> str:
    if answer.code:
        return f"{answer.code} {answer.error} ({answer.library})"
    cuda = f", CUDA up to {version_text(answer.version)}" if answer.version else ""
    devices = count(answer.devices, "device") if answer.devices is not None else "devices unknown"
    return f"success, {devices}{cuda}"


def _node_words(nodes: tuple[DeviceNode, ...]) -> str:
    if not nodes:
        return "none"
    return ", ".join(n.path + ("" if n.accessible else " (not accessible)") for n in nodes)
