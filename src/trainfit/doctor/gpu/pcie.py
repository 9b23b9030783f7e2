"""The link between GPU and machine: lanes and generation, now and at most."""

from __future__ import annotations

import re

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import bad, evidence, good, unsure
from trainfit.doctor.formatting import all_gpus, which
from trainfit.doctor.gpu.health import answers
from trainfit.results.machine.doctor import Check, Evidence, Fix
from trainfit.results.machine.machine import Gpu, Machine, PciDevice

NAME = "pcie"
_WHY = (
    "batches, and gradients between GPUs without NVLink, are copied "
    "over this link; half the lanes mean half the bandwidth"
)
_POWER_OFF = "the machine is powered off meanwhile"


def check_pcie(machine: Machine) -> tuple[Check, ...]:
    """Each GPU's link. A lower generation is normal while the GPU is idle; fewer lanes are not."""
    return tuple(check for gpu in all_gpus(machine) if (check := _one(machine, gpu)) is not None)


def _one(machine: Machine, gpu: Gpu) -> Check | None:
    width, width_max = gpu.pcie_width, gpu.pcie_width_max
    generation, generation_max = gpu.pcie_generation, gpu.pcie_generation_max
    device = _on_bus(machine, gpu)
    found = [
        evidence("lanes now", width),
        evidence("maximum lanes (GPU and slot)", width_max),
        evidence("generation now", generation),
        evidence("maximum generation", generation_max),
        evidence("P-state", gpu.performance_state, lambda state: f"P{state}"),
        evidence("PCI address", gpu.pci_address),
    ]
    if device is not None and device.link_width_max:
        source = f"PCI device {device.address}"
        found.append(Evidence("lanes of the GPU itself", str(device.link_width_max), source))
    if width.is_absent and generation.is_absent:
        return None  # no link of its own: an integrated GPU, or WSL
    if width.value is None or width_max.value is None:
        needed = "NVML's current and maximum link width; a virtual machine may hide them"
        return unsure(NAME, f"{which(gpu)}: PCIe link could not be read", needed, found)
    # NVML's maximum is that of GPU and slot together, the bus's files have the GPU's own.
    if width.value < width_max.value and width_max.source.startswith("NVML"):
        return _narrow(gpu, width.value, width_max.value, found)
    lanes = (device.link_width_max if device else None) or width_max.value
    if width.value < policy.LANES_SHARE * lanes:
        return _narrow_slot(gpu, width.value, lanes, found)
    return _generation(gpu, width.value, found)


def _on_bus(machine: Machine, gpu: Gpu) -> PciDevice | None:
    address = _address(gpu.pci_address.value or "")
    devices = machine.cuda.pci_devices.value or ()
    return next((d for d in devices if address and _address(d.address) == address), None)


def _address(text: str) -> str:
    """NVML writes the domain with eight digits, the kernel with four."""
    match = re.fullmatch(r"0*([0-9a-f]{4}):([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", text.strip().lower())
    return f"{match[1]}:{match[2]}" if match else ""


def _narrow(gpu: Gpu, width: int, most: int, found: list[Evidence]) -> Check:
    return bad(
        NAME,
        "pcie_width_reduced",
        f"{which(gpu)}: the link runs at x{width}, GPU and slot support x{most}",
        f"{_WHY}. Power saving does not reduce lanes. Usual causes: bad "
        "seating, a riser, dirty contacts, or BIOS bifurcation of the slot.",
        found,
        [
            Fix(
                "power off, reseat the card and its riser; in the BIOS set "
                f"the slot to x{most} (no bifurcation)",
                "none needed for reseating; restore the BIOS setting",
                _POWER_OFF,
            ),
            Fix(
                f"sudo lspci -vv -s {_bus(gpu)} | grep -E 'LnkCap|LnkSta'  # before and after",
                "none: read-only",
                "none",
            ),
        ],
    )


def _narrow_slot(gpu: Gpu, width: int, lanes: int, found: list[Evidence]) -> Check:
    return bad(
        NAME,
        "pcie_slot_narrow",
        f"{which(gpu)}: x{lanes} GPU in an x{width} slot",
        f"{_WHY}. The slot is wired for fewer lanes, or shares them with another slot or an M.2 "
        "disk.",
        found,
        [
            Fix(
                f"move the card to a slot with x{lanes}; the board's manual says which slots "
                "share lanes",
                "move it back",
                _POWER_OFF,
            )
        ],
    )


def _generation(gpu: Gpu, width: int, found: list[Evidence]) -> Check | None:
    now, most = gpu.pcie_generation.value, gpu.pcie_generation_max.value
    if now is None or most is None:
        summary = f"{which(gpu)}: x{width}, its maximum; PCIe generation not visible"
        return unsure(NAME, summary, "NVML's current and maximum link generation", found)
    if now >= most:
        return good(NAME, f"{which(gpu)}: PCIe {now}.0 x{width}, the link's maximum", found)
    if not answers(gpu):
        return None  # no job can use it now: the link under load cannot be observed
    state = gpu.performance_state.value
    if state is None or state > policy.ACTIVE_STATE:
        word = "idle" if state is not None else "in an unknown P-state"
        return unsure(
            NAME,
            f"{which(gpu)}: x{width}, generation {now} of {most} while {word}",
            "the link lowers its generation while the GPU is idle: re-run while a job uses the GPU",
            found,
        )
    return bad(
        NAME,
        "pcie_generation_reduced",
        f"{which(gpu)}: PCIe {now}.0 under load (P{state}), the link supports {most}.0",
        f"{_WHY}; each generation lower halves the bandwidth. Usual causes: a "
        "riser for an older generation, link errors, or a BIOS setting.",
        found,
        [
            Fix(
                f"in the BIOS set the slot's link speed to Auto or Gen {most}; replace a riser "
                "of an older generation",
                "restore the BIOS setting",
                _POWER_OFF,
            )
        ],
    )


def _bus(gpu: Gpu) -> str:
    return _address(gpu.pci_address.value or "") or "ADDRESS"
