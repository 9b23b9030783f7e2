"""Driver stacks: kernel module, device nodes, libraries, and what NVML and libcuda answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from parts import FOLDER, Files, Part, link, made_up_uuid
from parts.gpus import Card, on_bus, pci

DEBIAN = "/usr/lib/x86_64-linux-gnu"
RED_HAT = "/usr/lib64"
WSL = "/usr/lib/wsl/lib"
GCC = "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04) \n"

CUDA_ERRORS = {
    0: "", 100: "CUDA_ERROR_NO_DEVICE", 304: "CUDA_ERROR_OPERATING_SYSTEM",
    500: "CUDA_ERROR_NOT_FOUND", 802: "CUDA_ERROR_SYSTEM_NOT_READY",
    803: "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", 999: "CUDA_ERROR_UNKNOWN",
}  # fmt: skip
NVML_ERRORS = {
    4: ("NVML_ERROR_NO_PERMISSION", "Insufficient Permissions"),
    9: ("NVML_ERROR_DRIVER_NOT_LOADED", "Driver Not Loaded"),
    12: ("NVML_ERROR_LIBRARY_NOT_FOUND", "NVML Shared Library Not Found"),
    18: ("NVML_ERROR_LIB_RM_VERSION_MISMATCH", "Driver/library version mismatch"),
    999: ("NVML_ERROR_UNKNOWN", "Unknown Error"),
}
NO_DRIVER_TEXT = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that"
    " the latest NVIDIA driver is installed and running.\n\n"
)


@dataclasses.dataclass(frozen=True)
class Driver:
    """A release: version, the CUDA version that it supports, its line in /proc."""

    version: str
    cuda: int
    built: str
    opened: bool = False

    @property
    def line(self) -> str:
        if self.opened:
            return (
                f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {self.version}"
                f"  Release Build  (dvs-builder@U22-I3-B17-02-5)  {self.built}\n"
            )
        return f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {self.version}  {self.built}\n"


D470 = Driver("470.86", 11040, "Tue Oct 26 21:55:45 UTC 2021")
D535 = Driver("535.247.01", 12020, "Wed Mar 26 06:11:10 UTC 2025")
D550_54 = Driver("550.54.14", 12040, "Thu Feb 22 01:44:30 UTC 2024")
D550_90 = Driver("550.90.07", 12040, "Fri May 31 09:35:42 UTC 2024")
D580 = Driver("580.95.05", 13000, "Tue Sep 23 09:55:41 UTC 2025")
D580_OPEN = dataclasses.replace(D580, opened=True)


# --- Kernel and files -------------------------------------------------------------------------


def kernel_module(driver: Driver, cards: Sequence[Card], uvm: bool = True) -> Part:
    """The loaded module: /proc/driver/nvidia, /proc/modules, /sys/module, PCI."""
    taint = "(OE)" if driver.opened else "(POE)"
    modules = ""
    if uvm:
        modules += f"nvidia_uvm 4931584 0 - Live 0x0000000000000000 {taint}\n"
    modules += (
        f"nvidia_drm 122880 2 - Live 0x0000000000000000 {taint}\n"
        f"nvidia_modeset 1355776 1 nvidia_drm, Live 0x0000000000000000 {taint}\n"
        f"nvidia 54374400 {len(cards) * 18} {'nvidia_uvm,' if uvm else ''}nvidia_modeset,"
        f" Live 0x0000000000000000 {taint}\n"
        "video 77824 1 nvidia_modeset, Live 0x0000000000000000\n"
    )
    files: Files = {
        "/proc/driver/nvidia/version": driver.line + GCC,
        "/proc/driver/nvidia/params": "ModifyDeviceFiles: 1\nDeviceFileUID: 0\n"
        "DeviceFileGID: 0\nDeviceFileMode: 438\nEnableGpuFirmware: 18\n",
        "/proc/modules": modules,
        "/proc/devices": "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n"
        + ("507 nvidia-uvm\n" if uvm else "")
        + "508 nvidia-caps\n\nBlock devices:\n259 blkext\n",
        "/sys/module/nvidia/version": driver.version,
        "/sys/module/nvidia/initstate": "live",
        "/sys/module/nvidia/refcnt": str(len(cards) * 18),
        "/sys/module/nvidia_drm/version": driver.version,
    }
    if uvm:
        files["/sys/module/nvidia_uvm/initstate"] = "live"
    for minor, card in enumerate(cards):
        files |= on_bus(card, "nvidia")
        files[f"/proc/driver/nvidia/gpus/{card.address}/information"] = (
            f"Model: \t\t {card.model.name}\nIRQ:   \t\t {150 + minor}\n"
            f"GPU UUID: \t {card.uuid}\nVideo BIOS: \t {card.model.bios}\n"
            "Bus Type: \t PCIe\nDMA Size: \t 47 bits\nDMA Mask: \t 0x7fffffffffff\n"
            f"Bus Location: \t {card.address}\nDevice Minor: \t {minor}\n"
            f"GPU Firmware: \t {driver.version if driver.opened else 'N/A'}\nGPU Excluded:\t No\n"
        )
    return {"files": files}


def device_nodes(count: int, uvm: bool = True, modeset: bool = True) -> Part:
    """/dev/nvidia*."""
    names = [*(f"nvidia{number}" for number in range(count)), "nvidiactl"]
    names += ["nvidia-uvm", "nvidia-uvm-tools"] if uvm else []
    names += ["nvidia-modeset"] if modeset else []
    files: Files = {f"/dev/{name}": "" for name in names}
    return {"files": files | {"/dev/nvidia-caps": FOLDER}}


def denied(*names: str) -> Part:
    """Device nodes that this user may not open."""
    return {"inaccessible": [f"/dev/{name}" for name in names]}


def libraries(version: str, folder: str = DEBIAN) -> Part:
    """libcuda and libnvidia-ml with their links, as packages install them."""
    files: Files = {}
    for name in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"):
        files[f"{folder}/{name}.so.{version}"] = ""
        files[f"{folder}/{name}.so.1"] = link(f"{name}.so.{version}")
        files[f"{folder}/{name}.so"] = link(f"{name}.so.1")
    files["/usr/bin/nvidia-smi"] = ""
    return {"files": files}


def no_module() -> Part:
    """Some modules, none of NVIDIA's."""
    modules = (
        "snd_hda_intel 61440 2 - Live 0x0000000000000000\nigc 188416 0 - Live 0x0000000000000000\n"
    )
    return {"files": {"/proc/modules": modules, "/proc/devices": "Character devices:\n  1 mem\n"}}


# --- Answers ----------------------------------------------------------------------------------


def nvml(driver: Driver, cards: Sequence[Card]) -> Part:
    """NVML and `nvidia-smi -L` work."""
    gpus = [card.nvml(index) for index, card in enumerate(cards)]
    lines = [
        f"GPU {index}: {card.model.name} (UUID: {card.uuid})" for index, card in enumerate(cards)
    ]
    return {
        "probes": {"nvml_gpus": {"driver": driver.version, "cuda": driver.cuda, "gpus": gpus}},
        "commands": {"nvidia-smi -L": {"code": 0, "stdout": "\n".join(lines) + "\n", "stderr": ""}},
    }


def nvml_fails(code: int, library: str = "") -> Part:
    """``nvmlInit`` fails, and `nvidia-smi` with it; code 12: neither is installed."""
    name, words = NVML_ERRORS[code]
    text = f"Failed to initialize NVML: {words}\n"
    if code == 18:
        text += f"NVML library version: {library}\n"
    elif code == 9:
        text = NO_DRIVER_TEXT
    command: Any = {"code": 255 if code == 999 else code, "stdout": text, "stderr": ""}
    return {
        "probes": {"nvml_gpus": {"error": name, "code": code, "where": "nvmlInit"}},
        "commands": {"nvidia-smi -L": None if code == 12 else command},
    }


def cuda(driver: Driver, devices: int, folder: str = DEBIAN) -> Part:
    """``cuInit`` succeeds."""
    return _cuda(f"{folder}/libcuda.so.{driver.version}", 0, driver.cuda, devices)


def cuda_fails(code: int, path: str) -> Part:
    """``cuInit`` fails; nothing more can be asked then."""
    return _cuda(path, code, None, None)


def _cuda(path: str, code: int, version: int | None, devices: int | None) -> Part:
    answer = {
        "library": "libcuda.so.1", "path": path, "code": code, "error": CUDA_ERRORS[code],
        "version": version, "devices": devices,
    }  # fmt: skip
    return {"probes": {"cuda_driver": answer}}


def cuda_missing() -> Part:
    """There is no libcuda."""
    why = "libcuda.so.1: cannot open shared object file: No such file or directory"
    return {"probes": {"cuda_driver": {"library": "libcuda.so.1", "missing": why}}}


# --- Whole stacks -----------------------------------------------------------------------------


def installed(driver: Driver, cards: Sequence[Card], folder: str = DEBIAN) -> Part:
    """Module, nodes and libraries of one version; NVML works. ``cuda`` is another part."""
    return _joined(
        kernel_module(driver, cards),
        device_nodes(len(cards)),
        libraries(driver.version, folder),
        nvml(driver, cards),
    )


def works(driver: Driver, cards: Sequence[Card], folder: str = DEBIAN) -> Part:
    """A stack without faults."""
    return _joined(installed(driver, cards, folder), cuda(driver, len(cards), folder))


def without_driver() -> Part:
    """Nothing of NVIDIA's is installed."""
    return _joined(no_module(), nvml_fails(12), cuda_missing())


def nvswitches(running: bool) -> Part:
    """Four NVSwitches, and their fabric manager."""
    files: Files = {"/dev/nvidia-nvswitchctl": ""}
    for number, address in enumerate(
        ("0000:05:00.0", "0000:06:00.0", "0000:07:00.0", "0000:08:00.0")
    ):
        files |= pci(address, "0x10de", "0x22a3", "0x068000", "nvidia-nvswitch", 0)
        files |= {
            f"/dev/nvidia-nvswitch{number}": "",
            f"/proc/driver/nvidia-nvswitch/devices/{address}/information": "NVSwitch\n",
        }
    files["/usr/bin/nv-fabricmanager"] = ""
    if running:
        files["/run/nvidia-fabricmanager/nv-fabricmanager.pid"] = "2207\n"
    state = {"code": 0 if running else 3, "stdout": "active\n" if running else "failed\n"}
    return {
        "files": files,
        "commands": {"systemctl is-active nvidia-fabricmanager": {**state, "stderr": ""}},
    }


def mig(driver: Driver, card: Card, instances: Sequence[str]) -> Part:
    """One GPU with MIG on; ``instances`` are profiles, each with one compute instance."""
    uuids = [f"MIG-{made_up_uuid(f'{card.uuid} {n}')}" for n in range(len(instances))]
    gpu = card.nvml(0) | {
        "mig": 1, "mig_instances": uuids, "utilisation_gpu": {"error": "NVML_ERROR_NOT_SUPPORTED"},
        "utilisation_memory": {"error": "NVML_ERROR_NOT_SUPPORTED"},
    }  # fmt: skip
    lines = [f"GPU 0: {card.model.name} (UUID: {card.uuid})"]
    files: Files = {
        "/proc/driver/nvidia/capabilities/mig/config": _cap(1),
        "/proc/driver/nvidia/capabilities/mig/monitor": _cap(2),
        "/dev/nvidia-caps/nvidia-cap1": "",
        "/dev/nvidia-caps/nvidia-cap2": "",
    }
    for number, (profile, uuid) in enumerate(zip(instances, uuids, strict=True)):
        lines.append(f"  MIG {profile:<15} Device {number:>2}: (UUID: {uuid})")
        place = f"/proc/driver/nvidia/capabilities/gpu0/mig/gi{number + 1}"
        minors = 12 + 9 * number, 13 + 9 * number
        files |= {f"{place}/access": _cap(minors[0]), f"{place}/ci0/access": _cap(minors[1])}
        files |= {f"/dev/nvidia-caps/nvidia-cap{minor}": "" for minor in minors}
    return {
        "files": {**files, "/dev/nvidia-caps": None},
        "probes": {"nvml_gpus": {"driver": driver.version, "cuda": driver.cuda, "gpus": [gpu]}},
        "commands": {"nvidia-smi -L": {"code": 0, "stdout": "\n".join(lines) + "\n", "stderr": ""}},
        "environment": {"CUDA_VISIBLE_DEVICES": uuids[0]} if uuids else {},
    }


def _cap(minor: int) -> str:
    return f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"


def wsl_libraries(names: Sequence[str]) -> Part:
    """What the Windows driver puts into /usr/lib/wsl/lib (plain files, no links)."""
    files: Files = {f"{WSL}/{name}": "" for name in ("libd3d12.so", "libdxcore.so", *names)}
    return {"files": {**files, "/etc/ld.so.conf.d/ld.wsl.conf": f"{WSL}\n"}}


WSL_CUDA = ("libcuda.so", "libcuda.so.1", "libcuda.so.1.1", "libnvidia-ml.so.1", "nvidia-smi")


def _joined(*parts: Part) -> Part:
    whole: Part = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, dict):
                whole[key] = {**whole.get(key, {}), **value}
            else:
                whole[key] = [*whole.get(key, []), *value]
    return whole
