"""GPUs: what the PCI bus and NVML say of each."""

from __future__ import annotations

import dataclasses
from typing import Any

from parts import FOLDER, MIB, Files, Part, link, made_up_uuid

NOT_SUPPORTED = {"error": "NVML_ERROR_NOT_SUPPORTED"}
NOT_FOUND = {"error": "NVML_ERROR_FUNCTION_NOT_FOUND"}

GPU_IDLE = 0x1  # nvmlClocksEventReasonGpuIdle
SPEEDS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0"}
NVIDIA = "../../../../bus/pci/drivers/"


@dataclasses.dataclass(frozen=True)
class Model:
    """A GPU as it idles. ``audio`` is the PCI id of a display card's second function."""

    name: str
    device: str
    capability: tuple[int, int]
    total_mib: int
    reserved_mib: int
    generation: int
    sm_max: int
    memory_max: int
    power_w: int
    slowdown: int
    bios: str
    application: int | None = None
    ecc: int | None = None
    mig: int | None = None
    audio: str = ""
    idle_generation: int | None = None
    idle: tuple[int, int, int, float, int] = (210, 405, 8, 14.2, 35)
    """SM and memory MHz, P-state, W, °C while idle."""

    @property
    def pci_class(self) -> str:
        return "0x030000" if self.audio else "0x030200"


RTX_4090 = Model(
    "NVIDIA GeForce RTX 4090", "0x2684", (8, 9), 24564, 351, 4, 3105, 10501, 450, 90,
    "95.02.3c.40.b4", ecc=0, audio="0x22ba", idle_generation=1,
)  # fmt: skip
RTX_5090 = Model(
    "NVIDIA GeForce RTX 5090", "0x2b85", (12, 0), 32607, 468, 5, 3090, 14001, 575, 90,
    "98.02.2e.40.f1", audio="0x22e8", idle_generation=1, idle=(180, 405, 8, 15.9, 33),
)  # fmt: skip
RTX_3090 = Model(
    "NVIDIA GeForce RTX 3090", "0x2204", (8, 6), 24576, 310, 4, 2100, 9751, 350, 95,
    "94.02.26.40.81", audio="0x1aef", idle_generation=1, idle=(0, 405, 8, 22.4, 38),
)  # fmt: skip
RTX_3060 = Model(
    "NVIDIA GeForce RTX 3060", "0x2504", (8, 6), 12288, 245, 4, 2100, 7501, 170, 95,
    "94.06.14.00.67", audio="0x228e", idle_generation=1, idle=(210, 405, 8, 12.1, 36),
)  # fmt: skip
RTX_4070_LAPTOP = Model(
    "NVIDIA GeForce RTX 4070 Laptop GPU", "0x2820", (8, 9), 8188, 225, 4, 3105, 8001, 140, 105,
    "95.06.25.00.5c", audio="0x22bd", idle_generation=4, idle=(210, 405, 8, 3.8, 44),
)  # fmt: skip
GTX_1080 = Model(
    "NVIDIA GeForce GTX 1080", "0x1b80", (6, 1), 8192, 80, 3, 1911, 5005, 180, 96,
    "86.04.3b.40.15", audio="0x10f0", idle_generation=1, idle=(139, 405, 8, 7.4, 34),
)  # fmt: skip
T4 = Model(
    "Tesla T4", "0x1eb8", (7, 5), 15360, 448, 3, 1590, 5001, 70, 93,
    "90.04.A7.00.01", application=585, ecc=1, idle_generation=1, idle=(300, 405, 8, 9.4, 41),
)  # fmt: skip
A10 = Model(
    "NVIDIA A10", "0x2236", (8, 6), 23028, 515, 4, 1695, 6251, 150, 95,
    "94.02.75.00.01", application=1695, ecc=1, idle_generation=1, idle=(210, 405, 8, 15.8, 32),
)  # fmt: skip
A100 = Model(
    "NVIDIA A100-SXM4-40GB", "0x20b0", (8, 0), 40960, 557, 4, 1410, 1215, 400, 92,
    "92.00.45.00.03", application=1095, ecc=1, mig=0, idle=(210, 1215, 0, 52.8, 31),
)  # fmt: skip
H100 = Model(
    "NVIDIA H100 80GB HBM3", "0x2330", (9, 0), 81559, 551, 5, 1980, 2619, 700, 87,
    "96.00.99.00.01", application=1980, ecc=1, mig=0, idle=(345, 2619, 0, 69.7, 30),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU in a machine; ``changes`` are NVML values that differ from its idle state."""

    model: Model
    address: str
    node: int = -1
    width: int = 16
    width_now: int = 0
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    serial: str = ""

    @property
    def uuid(self) -> str:
        return f"GPU-{made_up_uuid(f'{self.model.name} {self.address} {self.serial}')}"

    def nvml(self, index: int) -> dict[str, Any]:
        """One GPU of the probe "nvml_gpus"."""
        model = self.model
        sm, memory, state, watts, celsius = model.idle
        optional = (model.application, model.ecc, model.mig)
        application, ecc, mig = (NOT_SUPPORTED if each is None else each for each in optional)
        values = {
            "index": index, "name": model.name, "uuid": self.uuid,
            "capability": list(model.capability), "memory_total": model.total_mib * MIB,
            "memory_used": 3 * MIB, "memory_reserved": model.reserved_mib * MIB,
            "utilisation_gpu": 0, "utilisation_memory": 0,
            "pci_address": f"0000{self.address}".upper(),
            "pcie_generation": model.idle_generation or model.generation,
            "pcie_generation_max": model.generation, "pcie_width": self.width_now or self.width,
            "pcie_width_max": self.width, "numa_node": NOT_SUPPORTED, "sm_mhz": sm,
            "sm_max_mhz": model.sm_max, "memory_mhz": memory, "memory_max_mhz": model.memory_max,
            "application_sm_mhz": application, "performance_state": state,
            "clock_reasons": GPU_IDLE, "temperature_c": celsius, "slowdown_c": model.slowdown,
            "power_mw": round(watts * 1000), "power_limit_mw": model.power_w * 1000,
            "power_limit_default_mw": model.power_w * 1000, "persistence": 1, "compute_mode": 0,
            "ecc": ecc, "ecc_errors": 0 if model.ecc and model.application else NOT_SUPPORTED,
            "mig": mig, "mig_instances": [], "processes": [],
        }  # fmt: skip
        return {**values, **self.changes}


def on_bus(card: Card, driver: str | None, numa: bool = True) -> Files:
    """A GPU (with its sound device) in /sys/bus/pci."""
    model = card.model
    now = model.idle_generation or model.generation
    generation = {
        "current_link_speed": f"{SPEEDS[now]} GT/s PCIe",
        "max_link_speed": f"{SPEEDS[model.generation]} GT/s PCIe",
        "current_link_width": str(card.width_now or card.width),
        "max_link_width": str(card.width),
    }
    place = f"/sys/bus/pci/devices/{card.address}"
    files = pci(card.address, "0x10de", model.device, model.pci_class, driver, card.node)
    files |= {f"{place}/{name}": value for name, value in generation.items()}
    if model.audio:
        sound = card.address[:-1] + "1"
        files |= pci(sound, "0x10de", model.audio, "0x040300", "snd_hda_intel", card.node)
    return files


def pci(
    address: str, vendor: str, device: str, device_class: str, driver: str | None, node: int = -1
) -> Files:
    """A device on the PCI bus."""
    place = f"/sys/bus/pci/devices/{address}"
    number = f"{vendor[2:]}:{device[2:]}".upper()
    uevent = f"PCI_CLASS={device_class[2:].lstrip('0').upper()}\nPCI_ID={number}\n"
    files: Files = {
        f"{place}/vendor": vendor,
        f"{place}/device": device,
        f"{place}/class": device_class,
        f"{place}/numa_node": str(node),
        f"{place}/enable": "1",
        f"{place}/uevent": f"DRIVER={driver}\n{uevent}" if driver else uevent,
    }
    if driver:
        files |= {
            f"{place}/driver": link(f"{NVIDIA}{driver}"),
            f"/sys/bus/pci/drivers/{driver}": FOLDER,
        }
    return files


def other_devices(amd: bool = False) -> Part:
    """What else sits on a desktop's bus: host bridge, network, NVMe."""
    host = ("0x1022", "0x14a4") if amd else ("0x8086", "0x4660")
    return {
        "files": {
            **pci("0000:00:00.0", *host, "0x060000", None),
            **pci("0000:02:00.0", "0x144d", "0xa80c", "0x010802", "nvme"),
            **pci("0000:04:00.0", "0x8086", "0x15f3", "0x020000", "igc"),
        }
    }


def intel_graphics(device: str = "0x46a6") -> Part:
    """The graphics unit inside an Intel processor."""
    files = pci("0000:00:02.0", "0x8086", device, "0x030000", "i915")
    return {"files": files | {"/dev/dri/card0": "", "/dev/dri/renderD128": ""}}


def virtio_devices() -> Part:
    """The bus of a virtual machine of Google's."""
    return {
        "files": {
            **pci("0000:00:00.0", "0x8086", "0x1237", "0x060000", None),
            **pci("0000:00:03.0", "0x1af4", "0x1004", "0x000000", "virtio-pci"),
            **pci("0000:00:05.0", "0x1af4", "0x1000", "0x020000", "virtio-pci"),
        }
    }
