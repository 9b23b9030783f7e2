"""Checks of other processes on a GPU, and of memory without a visible owner."""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import bad, brief, evidence, good, on_host, unsure
from trainfit.doctor.gpu_health import each_gpu
from trainfit.hardware.local_gpu import gpus_of_job
from trainfit.results.doctor import Check
from trainfit.results.findings import Evidence, Fix
from trainfit.results.machine import Fact, Gpu, GpuProcess, Machine
from trainfit.results.text import percent, size


def _listed(processes: Sequence[GpuProcess]) -> str:
    return "; ".join(_shown(process) for process in processes) or "none"


def _shown(process: GpuProcess) -> str:
    name = process.name or "a process outside this container"
    used = "memory unknown" if process.used_bytes is None else size(process.used_bytes)
    kind = " (graphics)" if process.graphics else ""
    own = " (this one)" if process.own else ""
    return f"{process.pid} {name}{kind}{own}, {used}"


@each_gpu
def check_processes(machine: Machine, gpu: Gpu) -> Check | None:
    """Other processes on each GPU; those of a desktop are said as such."""
    name = "gpu-processes"
    processes, total = gpu.processes, gpu.memory_bytes.value
    found = [
        evidence("processes", processes, _listed),
        evidence("memory", gpu.memory_bytes, size),
        evidence("memory in use", gpu.used_bytes, size),
    ]
    if processes.value is None:
        needed = "NVML's list of processes; WSL and some containers do not give it"
        return unsure(name, "processes could not be listed", needed, found)
    others = [p for p in processes.value if not p.own and not p.graphics]
    display = [p for p in processes.value if p.graphics and not p.own]
    held = sum(p.used_bytes or 0 for p in others)
    if not others:
        if not display and _may_be_hidden(machine, gpu):
            needed = "the process list outside: nvidia-smi on the host, Task Manager on Windows"
            return unsure(name, "in use by a process that is not visible", needed, found)
        if not display:
            return good(name, "no other process uses it", found)
        taken = sum(p.used_bytes or 0 for p in display)
        why = (
            "the job cannot use that memory, and drawing uses some GPU time; "
            "connecting the display to a second or integrated GPU frees both"
        )
        return good(name, f"runs a desktop ({size(taken)})", found, why)
    unknown = any(p.used_bytes is None for p in others)
    if total and not unknown and held < policy.OTHERS_SHARE * total:
        summary = f"other processes hold little ({size(held)})"
        return good(name, summary, found, "their kernels and the job's share the GPU's time")
    return _shared(machine, gpu, name, others, held, unknown, found)


def _may_be_hidden(machine: Machine, gpu: Gpu) -> bool:
    """Is there use that containers and WSL do not show from inside?"""
    inside = machine.surroundings.container.is_known or machine.surroundings.wsl.is_known
    used, total = gpu.used_bytes.value, gpu.memory_bytes.value
    held = sum(p.used_bytes or 0 for p in gpu.processes.value or ())
    return inside and (used is None or not total or used - held > _tolerated(total))


def _shared(
    machine: Machine,
    gpu: Gpu,
    name: str,
    others: Sequence[GpuProcess],
    held: int,
    unknown: bool,
    evidence: list[Evidence],
) -> Check:
    largest = max(others, key=lambda p: p.used_bytes or 0)
    who = f"process {largest.pid}" + (f" ({brief(largest.name, 15)})" if largest.name else "")
    if len(others) > 1:
        who += f" and {len(others) - 1} more"
    amount = f"hold {size(held)}" if held else "use it, memory unknown"
    if len(others) == 1:
        amount = f"holds {size(held)}" if held else "uses it, memory unknown"
    remedies = []
    free = _freest(machine, gpu)
    if free is not None:
        remedies.append(_other_gpu(machine, free))
    pids = " ".join(str(p.pid) for p in others)
    remedies.append(
        Fix(
            f"kill {pids}",
            "restart the programs",
            on_host(machine, "their unsaved work is lost; ask their owners first"),
        )
    )
    return bad(
        name,
        "gpu_shared",
        f"{who} {amount}",
        "the memory they hold is not available to the job, and their kernels and "
        "the job's share the GPU's time: steps are slower and their times vary.",
        evidence,
        remedies,
    )


def _freest(machine: Machine, busy: Gpu) -> Gpu | None:
    """Another GPU on which no other process computes, with the most free memory."""
    candidates = []
    for gpu in gpus_of_job(machine):
        processes = gpu.processes.value
        if gpu.index == busy.index or processes is None:
            continue
        if any(not p.own and not p.graphics for p in processes) or gpu.mig.value:
            continue
        free = (gpu.memory_bytes.value or 0) - (gpu.used_bytes.value or 0)
        candidates.append((free, -gpu.index, gpu))
    return max(candidates)[2] if candidates else None


def _other_gpu(machine: Machine, gpu: Gpu) -> Fix:
    # By UUID: CUDA counts the fastest GPU first, NVML by PCI address.
    uuid = gpu.uuid.value
    choice = f"CUDA_VISIBLE_DEVICES={uuid}"
    if not uuid or not uuid.replace("-", "").isalnum():
        choice = f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={gpu.index}"
    former = machine.cuda.visible_devices.value
    undo = "unset CUDA_VISIBLE_DEVICES"
    if "CUDA_DEVICE_ORDER" in choice:
        undo += " CUDA_DEVICE_ORDER"
    if former is not None and former.replace(",", "").replace("-", "").isalnum():
        undo = f"export CUDA_VISIBLE_DEVICES={former}"
    return Fix(f"export {choice}  # GPU {gpu.index}", undo, "none")


@each_gpu
def check_memory(machine: Machine, gpu: Gpu) -> Check | None:
    """Memory in use that the visible processes do not account for."""
    name = "gpu-memory"
    used, total, processes = gpu.used_bytes, gpu.memory_bytes, gpu.processes
    found = [
        evidence("memory", total, size),
        evidence("memory in use", used, size),
        evidence("the driver's reserve", gpu.reserved_bytes, size),
        evidence("processes", processes, _listed),
    ]
    if used.value is None or not total.value:
        if used.is_absent or total.is_absent:
            return None  # GPUs that share the machine's RAM
        needed = "NVML's memory figures"
        return unsure(name, "memory could not be read", needed, found)
    summary = f"{size(used.value)} of {size(total.value)} in use"
    unseen = _unseen(gpu, used.value, processes)
    if unseen is None:
        if used.value <= _tolerated(total.value):
            return good(name, summary, found)
        needed = "the memory of each process (NVML does not report it here): nvidia-smi on the host"
        return unsure(name, f"{summary}; the processes are not visible", needed, found)
    if unseen <= _tolerated(total.value):
        return good(name, summary, found)
    if machine.surroundings.wsl.is_known:
        needed = (
            "the memory of Windows' desktop and programs, which WSL does not show: Task Manager, "
            "column Dedicated GPU memory"
        )
        return unsure(name, f"{summary}; the processes are not visible", needed, found)
    return _hidden(machine, gpu, name, unseen, total.value, found)


def _tolerated(total: int) -> float:
    """What the driver itself may hold: at least as much as others may without being bad."""
    return max(policy.UNSEEN_BYTES, policy.OTHERS_SHARE * total)


def _unseen(gpu: Gpu, used: int, processes: Fact[tuple[GpuProcess, ...]]) -> int | None:
    """Bytes in use less those of processes; ``None`` where a process's are not known."""
    if processes.value is None and not processes.is_absent:
        return None
    held = [p.used_bytes for p in processes.value or ()]
    known = [each_ for each_ in held if each_ is not None]
    if len(known) < len(held):
        return None
    return used - sum(known)


def _hidden(
    machine: Machine, gpu: Gpu, name: str, unseen: int, total: int, evidence: list[Evidence]
) -> Check:
    container = machine.surroundings.container.is_known
    who = (
        "most likely processes outside this container, which are not visible from inside"
        if container
        else "most likely workers left behind by a killed job, or a container"
    )
    return bad(
        name,
        "gpu_memory_unseen",
        f"{size(unseen)} ({percent(unseen / total)}) held by no visible process",
        f"that memory is not available to the job. {who[0].upper()}{who[1:]}.",
        evidence,
        [
            Fix(
                f"sudo fuser -v /dev/nvidia{gpu.index}  # then: kill PID",
                "restart the programs",
                on_host(machine, "their unsaved work is lost; ask their owners first"),
            ),
            Fix(
                f"sudo nvidia-smi -i {gpu.index} --gpu-reset",
                "none: a reset cannot be undone",
                on_host(machine, "all jobs on this GPU must be stopped first"),
            ),
        ],
    )
