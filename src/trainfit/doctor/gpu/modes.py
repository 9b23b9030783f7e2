"""Modes that an administrator sets on a GPU: persistence, MIG, compute mode."""

from __future__ import annotations

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import bad, evidence, good, unsure
from trainfit.doctor.formatting import all_gpus, brief, on_host, which
from trainfit.doctor.gpu.health import each
from trainfit.results.format import count, size
from trainfit.results.machine.doctor import Check, Fix
from trainfit.results.machine.machine import Gpu, Machine


def _switch(on: bool) -> str:
    return "on" if on else "off"


def check_persistence(machine: Machine) -> tuple[Check, ...]:
    """Whether the driver keeps each GPU initialised between processes; not asked under WSL."""
    if machine.surroundings.wsl.is_known:
        return ()  # Windows' driver stays loaded
    return each(machine, _persistence)


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
        return unsure(name, f"{which(gpu)}: persistence mode could not be read", needed, found)
    if mode.value:
        return good(name, f"{which(gpu)}: persistence mode is on", found)
    if any(process.graphics for process in processes.value or ()):
        why = "the display server uses the GPU, so the driver keeps it initialized anyway"
        return good(
            name,
            f"{which(gpu)}: persistence mode off, but a display server uses the GPU",
            found,
            why,
        )
    if processes.value is None:
        needed = "whether a display server uses the GPU: then it does not matter"
        return unsure(
            name,
            f"{which(gpu)}: persistence mode off; its processes are not visible",
            needed,
            found,
        )
    if gpu.ecc.value is not True and len(all_gpus(machine)) < policy.SERVER_GPUS:
        why = (
            "the default on workstations: a process that starts while no other uses the GPU waits "
            f"about one second longer; sudo nvidia-smi -i {gpu.index} -pm 1 (undo: -pm 0) avoids "
            "that"
        )
        return good(
            name, f"{which(gpu)}: persistence mode off, the default on workstations", found, why
        )
    return bad(
        name,
        "persistence_off",
        f"{which(gpu)}: persistence mode is off on a server GPU",
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


def check_mig(machine: Machine) -> tuple[Check, ...]:
    """What share of a GPU in MIG mode a job gets; nothing where MIG is off or not there."""
    return each(machine, _mig)


def _mig(machine: Machine, gpu: Gpu) -> Check | None:
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
        return unsure(name, f"{which(gpu)}: MIG is on, instances unknown", needed, found)
    if not instances.value:
        return bad(
            name,
            "mig_empty",
            f"{which(gpu)}: MIG mode is on, but there is no instance to run on",
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
    summary = f"{which(gpu)}: split by MIG; a job can use one of {count(number, 'instance')}"
    return good(name, summary, found, why)


def check_compute_mode(machine: Machine) -> tuple[Check, ...]:
    """Whether processes may use each GPU, and how many at a time."""
    return each(machine, _compute_mode)


def _compute_mode(machine: Machine, gpu: Gpu) -> Check | None:
    name = "compute-mode"
    mode = gpu.compute_mode
    found = [evidence("compute mode", mode)]
    if mode.is_absent:
        return None
    if mode.value is None:
        return unsure(name, f"{which(gpu)}: compute mode could not be read", "NVML", found)
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
            f"{which(gpu)}: compute mode PROHIBITED blocks all processes",
            "CUDA lists the GPU but refuses every context (all CUDA-capable devices are busy or "
            "unavailable).",
            found,
            [remedy],
        )
    if "exclusive" not in word:
        return good(name, f"{which(gpu)}: compute mode {brief(mode.value)}", found)
    others = [p for p in gpu.processes.value or () if not p.graphics and not p.own]
    if others:
        pids = ", ".join(str(p.pid) for p in others[:3])
        return bad(
            name,
            "compute_exclusive_taken",
            f"{which(gpu)}: exclusive compute mode, in use by process {pids}",
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
    return good(name, f"{which(gpu)}: compute mode {brief(mode.value)}", found, why)
