"""Modes that an administrator sets on a GPU (persistence, MIG, compute mode), and its PCIe link."""

from __future__ import annotations

import re

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import bad, brief, evidence, good, on_host, unsure
from trainfit.doctor.gpu_health import answers, each_gpu, of_gpus
from trainfit.hardware.local_gpu import gpus_of_job
from trainfit.results.doctor import Check
from trainfit.results.findings import Evidence, Fix
from trainfit.results.machine import Gpu, Machine, PciDevice
from trainfit.results.text import count, size


def _switch(on: bool) -> str:
    return "on" if on else "off"


def check_persistence(machine: Machine) -> tuple[Check, ...]:
    """Whether the driver keeps each GPU initialised between processes; not asked under WSL."""
    if machine.surroundings.wsl.is_known:
        return ()  # Windows' driver stays loaded
    return each_gpu(_persistence)(machine)


def _persistence(machine: Machine, gpu: Gpu) -> Check | None:
    name = "persistence"
    mode, processes = gpu.persistence, gpu.processes
    found = [
        evidence("persistence mode", mode, _switch),
        evidence("processes", processes, lambda all_: f"{len(all_)} on it"),
    ]
    if mode.is_absent:
        return None
    if mode.value is None:
        needed = "NVML's persistence mode"
        return unsure(name, "persistence mode could not be read", needed, found)
    if mode.value:
        return good(name, "persistence mode is on", found)
    if any(process.graphics for process in processes.value or ()):
        why = "the display server uses the GPU, so the driver keeps it initialized anyway"
        return good(
            name,
            "persistence mode off, but a display server uses the GPU",
            found,
            why,
        )
    if processes.value is None:
        needed = "whether a display server uses the GPU: then it does not matter"
        return unsure(
            name,
            "persistence mode off; its processes are not visible",
            needed,
            found,
        )
    if gpu.ecc.value is not True and len(gpus_of_job(machine)) < policy.SERVER_GPUS:
        why = (
            "the default on workstations: a process that starts while no other uses the GPU waits "
            f"about one second longer; sudo nvidia-smi -i {gpu.index} -pm 1 (undo: -pm 0) avoids "
            "that"
        )
        return good(name, "persistence mode off, the default on workstations", found, why)
    return bad(
        name,
        "persistence_off",
        "persistence mode is off on a server GPU",
        "the driver shuts the GPU down when its last process exits: the next start "
        "initializes it again (about a second, several on servers with many GPUs), and clock and "
        "power settings are lost.",
        found,
        [
            Fix(
                "sudo systemctl enable --now nvidia-persistenced",
                "sudo systemctl disable --now nvidia-persistenced",
                on_host(machine, "a few watts while idle"),
            ),
            Fix(
                f"sudo nvidia-smi -i {gpu.index} -pm 1",
                f"sudo nvidia-smi -i {gpu.index} -pm 0",
                on_host(machine, "the same, until the next reboot"),
            ),
        ],
    )


@each_gpu
def check_mig(machine: Machine, gpu: Gpu) -> Check | None:
    """What share of a GPU in MIG mode a job gets; nothing where MIG is off or not there."""
    name = "mig"
    if gpu.mig.value is not True:
        return None
    instances = gpu.mig_instances
    found = [
        evidence("MIG mode", gpu.mig, _switch),
        evidence("MIG devices", instances, lambda all_: ", ".join(all_) or "none"),
        evidence("memory of the whole GPU", gpu.memory_bytes, size),
    ]
    if instances.value is None and not instances.is_absent:
        needed = "NVML's list of MIG devices: nvidia-smi -L"
        return unsure(name, "MIG is on, instances unknown", needed, found)
    if not instances.value:
        return bad(
            name,
            "mig_empty",
            "MIG mode is on, but there is no instance to run on",
            "in MIG mode CUDA runs on instances only: this GPU cannot be used until one is "
            "created.",
            found,
            [
                Fix(
                    f"sudo nvidia-smi -i {gpu.index} -mig 0",
                    f"sudo nvidia-smi -i {gpu.index} -mig 1",
                    on_host(machine, "one job has the whole GPU; no process may be using it"),
                ),
                Fix(
                    f"sudo nvidia-smi mig -i {gpu.index} -cgi 0 -C",
                    f"sudo nvidia-smi mig -i {gpu.index} -dci && "
                    f"sudo nvidia-smi mig -i {gpu.index} -dgi",
                    on_host(machine, "none; profile 0 is one instance with the whole GPU"),
                ),
            ],
        )
    number = len(instances.value)
    why = (
        "a process sees one instance only, with its share of memory and SMs; figures of "
        "the whole GPU (memory, clocks, utilization) do not apply to it, and NCCL does not "
        f"work across instances. Choose one: CUDA_VISIBLE_DEVICES={brief(instances.value[0], 60)}"
    )
    summary = f"split by MIG; a job can use one of {count(number, 'instance')}"
    return good(name, summary, found, why)


@each_gpu
def check_compute_mode(machine: Machine, gpu: Gpu) -> Check | None:
    """Whether processes may use each GPU, and how many at a time."""
    name = "compute-mode"
    mode = gpu.compute_mode
    found = [evidence("compute mode", mode)]
    if mode.is_absent:
        return None
    if mode.value is None:
        return unsure(name, "compute mode could not be read", "NVML", found)
    word = mode.value.lower()
    former = "PROHIBITED" if "prohibited" in word else "EXCLUSIVE_PROCESS"
    remedy = Fix(
        f"sudo nvidia-smi -i {gpu.index} -c DEFAULT",
        f"sudo nvidia-smi -i {gpu.index} -c {former}",
        on_host(machine, "several jobs may share the GPU and its memory"),
    )
    if "prohibited" in word:
        return bad(
            name,
            "compute_prohibited",
            "compute mode PROHIBITED blocks all processes",
            "CUDA lists the GPU but refuses every context (all CUDA-capable devices are busy or "
            "unavailable).",
            found,
            [remedy],
        )
    if "exclusive" not in word:
        return good(name, f"compute mode {brief(mode.value)}", found)
    others = [p for p in gpu.processes.value or () if not p.graphics and not p.own]
    if others:
        pids = ", ".join(str(p.pid) for p in others[:3])
        return bad(
            name,
            "compute_exclusive_taken",
            f"exclusive compute mode, in use by process {pids}",
            "a second process gets 'all CUDA-capable devices are busy or unavailable'.",
            found,
            [
                remedy,
                Fix(
                    f"kill {others[0].pid}  # or wait until it ends",
                    "start it again",
                    "that process's unsaved work",
                ),
            ],
        )
    why = (
        "one process at a time: a second one, such as a worker that touches CUDA or a notebook "
        "left open, gets 'all CUDA-capable devices are busy or unavailable'"
    )
    return good(name, f"compute mode {brief(mode.value)}", found, why)


# ---
# The link between GPU and machine: lanes and generation, now and at most.


PCIE = "pcie"
_WHY = (
    "batches, and gradients between GPUs without NVLink, are copied "
    "over this link; half the lanes mean half the bandwidth"
)
_POWER_OFF = "the machine is powered off meanwhile"


def check_pcie(machine: Machine) -> tuple[Check, ...]:
    """Each GPU's link. A lower generation is normal while the GPU is idle; fewer lanes are not."""
    return of_gpus(machine, gpus_of_job(machine), _one)


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
        found.append(Evidence("lanes of the GPU itself", str(device.link_width_max), source=source))
    if width.is_absent and generation.is_absent:
        return None  # no link of its own: an integrated GPU, or WSL
    if width.value is None or width_max.value is None:
        needed = "NVML's current and maximum link width; a virtual machine may hide them"
        return unsure(PCIE, "PCIe link could not be read", needed, found)
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


def _narrow(gpu: Gpu, width: int, limit: int, evidence: list[Evidence]) -> Check:
    return bad(
        PCIE,
        "pcie_width_reduced",
        f"the link runs at x{width}, GPU and slot support x{limit}",
        f"{_WHY}. Power saving does not reduce lanes. Usual causes: bad "
        "seating, a riser, dirty contacts, or BIOS bifurcation of the slot.",
        evidence,
        [
            Fix(
                "power off, reseat the card and its riser; in the BIOS set "
                f"the slot to x{limit} (no bifurcation)",
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


def _narrow_slot(gpu: Gpu, width: int, lanes: int, evidence: list[Evidence]) -> Check:
    return bad(
        PCIE,
        "pcie_slot_narrow",
        f"x{lanes} GPU in an x{width} slot",
        f"{_WHY}. The slot is wired for fewer lanes, or shares them with another slot or an M.2 "
        "disk.",
        evidence,
        [
            Fix(
                f"move the card to a slot with x{lanes}; the board's manual says which slots "
                "share lanes",
                "move it back",
                _POWER_OFF,
            )
        ],
    )


def _generation(gpu: Gpu, width: int, evidence: list[Evidence]) -> Check | None:
    now, maximum = gpu.pcie_generation.value, gpu.pcie_generation_max.value
    if now is None or maximum is None:
        summary = f"x{width}, its maximum; PCIe generation not visible"
        return unsure(PCIE, summary, "NVML's current and maximum link generation", evidence)
    if now >= maximum:
        return good(PCIE, f"PCIe {now}.0 x{width}, the link's maximum", evidence)
    if not answers(gpu):
        return None  # no job can use it now: the link under load cannot be observed
    state = gpu.performance_state.value
    if state is None or state > policy.ACTIVE_STATE:
        word = "idle" if state is not None else "in an unknown P-state"
        return unsure(
            PCIE,
            f"x{width}, generation {now} of {maximum} while {word}",
            "the link lowers its generation while the GPU is idle: re-run while a job uses the GPU",
            evidence,
        )
    return bad(
        PCIE,
        "pcie_generation_reduced",
        f"PCIe {now}.0 under load (P{state}), the link supports {maximum}.0",
        f"{_WHY}; each generation lower halves the bandwidth. Usual causes: a "
        "riser for an older generation, link errors, or a BIOS setting.",
        evidence,
        [
            Fix(
                f"in the BIOS set the slot's link speed to Auto or Gen {maximum}; replace a riser "
                "of an older generation",
                "restore the BIOS setting",
                _POWER_OFF,
            )
        ],
    )


def _bus(gpu: Gpu) -> str:
    return _address(gpu.pci_address.value or "") or "ADDRESS"
