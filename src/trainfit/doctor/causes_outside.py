"""Rows of the decision table whose cause lies outside: container, WSL, other processes."""

from __future__ import annotations

import shlex
from typing import Final

from trainfit.doctor.driver_stack import DriverStack
from trainfit.doctor.findings import bad, evidence
from trainfit.hardware.local_gpu import gpus_of_job
from trainfit.results.doctor import Check
from trainfit.results.findings import Fix
from trainfit.results.machine import Gpu
from trainfit.results.text import size

NAME: Final = "gpu"
_WSL: Final = "/usr/lib/wsl/"
_WSL_LIBRARY: Final = f"{_WSL}lib"


def wsl_driver(stack: DriverStack) -> Check | None:
    """WSL2: the Windows driver's libcuda is missing, shadowed, or does not start."""
    if not stack.in_wsl:
        return None
    if stack.in_container and not stack.has_dxg:
        return _without(stack, ["/dev/dxg"] + ([] if stack.has_libcuda else ["libcuda"]))
    place = stack.cuda.library_places.get("libcuda", "")
    loaded = stack.cuda_driver.library if stack.cuda_driver is not None else place
    # Windows' own has no version in its name (libcuda.so.1.1), wherever a container puts it.
    shadows = "libcuda" in stack.cuda.library_versions and stack.cuda_code != 0
    found = [
        stack.node_evidence(),
        evidence("WSL", stack.machine.surroundings.wsl),
        *stack.driver_evidence(),
        *stack.torch_evidence(),
    ]
    if loaded and shadows and not loaded.startswith(_WSL):
        remedy = Fix(
            "dpkg -l | grep nvidia; sudo apt purge 'libnvidia-compute-*' 'nvidia-driver-*'",
            "sudo apt install PACKAGES   # those that dpkg listed",
            "none: inside WSL they never drive a GPU",
        )
        why = (
            f"WSL uses the Windows driver through {_WSL_LIBRARY}/libcuda.so.1; a Linux "
            f"driver installed inside shadows it ({loaded}) and finds no device."
        )
        return bad(
            NAME, "wsl_driver", "a Linux driver inside WSL hides Windows' own", why, found, [remedy]
        )
    if not stack.sees_gpu and stack.cuda_code != 0:
        why = (
            f"WSL uses the Windows driver through {_WSL_LIBRARY}; that driver "
            "is missing there, too old for WSL, or the virtual machine lost it."
        )
        return bad(
            NAME,
            "wsl_driver",
            "the Windows NVIDIA driver is not available in WSL",
            why,
            found,
            [
                Fix(
                    "wsl.exe --shutdown   # from Windows, then start again",
                    "none needed",
                    "terminates everything that runs in WSL",
                ),
                Fix(
                    "wsl.exe --update, and install NVIDIA's current driver in Windows",
                    "reinstall the previous driver",
                    "restarts Windows; install no driver inside WSL",
                ),
            ],
        )
    return None


def without_gpu(stack: DriverStack) -> Check | None:
    """The host drives a GPU, and the container was started without it."""
    if stack.kernel_driver is None or stack.in_wsl or stack.is_jetson:
        return None
    gone = not stack.gpu_nodes, not stack.has_libcuda
    if not (all(gone) or (stack.in_container and any(gone))):
        return None
    missing = [
        name for name, is_gone in zip(("/dev/nvidia*", "libcuda"), gone, strict=True) if is_gone
    ]
    return _without(stack, missing)


def _without(stack: DriverStack, missing: list[str]) -> Check:
    container = stack.machine.surroundings.container
    summary = "the host has an NVIDIA driver, but this container was started without its GPU"
    if stack.in_wsl:
        summary = "this container under WSL was started without the GPU"
    elif missing == ["libcuda"]:
        summary = "this container has the GPU's device files, but not the driver's libcuda"
    return bad(
        NAME,
        "container_without_gpu",
        summary,
        f"Missing inside: {' and '.join(missing)}. The NVIDIA Container Toolkit mounts both "
        "when the container is started with a GPU.",
        [
            evidence("container", container),
            evidence("kernel driver", stack.cuda.kernel_driver),
            stack.node_evidence(),
            evidence("cuInit", stack.cuda.cuda, lambda answer: f"{answer.code} {answer.error}"),
            *stack.torch_evidence(),
        ],
        [_start_again(container.value, missing)],
    )


def _start_again(container: str | None, missing: list[str]) -> Fix:
    if missing == ["libcuda"] and container not in ("apptainer", "singularity", "lxc"):
        return Fix(
            "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility …",
            "start it with the previous options",
            "recreates the container; without 'compute' the toolkit omits libcuda, "
            "and --device alone mounts no library",
        )
    commands = {
        "podman": "podman run --device nvidia.com/gpu=all …",
        "kubernetes": 'resources: {limits: {"nvidia.com/gpu": 1}}   # in the pod\'s container',
        "apptainer": "apptainer exec --nv …",
        "singularity": "singularity exec --nv …",
        "lxc": "lxc config device add CONTAINER gpu gpu",
    }
    return Fix(
        commands.get(
            container or "", "docker run --gpus all …   # or: deploy.resources in compose"
        ),
        "start it with the previous options",
        "recreates the container; the host needs nvidia-container-toolkit",
    )


def lost_gpu(stack: DriverStack) -> Check | None:
    """The container had its GPU and lost the permission (NVML: Unknown Error)."""
    unknown = any(
        word in f"{stack.nvml_error} {stack.cuda.nvidia_smi.reason}"
        for word in ("NVML_ERROR_UNKNOWN", "Unknown Error")
    )
    if not unknown or not stack.in_container:
        return None
    return bad(
        NAME,
        "container_lost_gpu",
        "this container has lost its GPU: NVML answers 'Unknown Error'",
        "A systemd reload on the host revokes the container's access to the device "
        "files (nvidia-container-toolkit#48); the host itself still sees the GPU.",
        [
            stack.node_evidence(),
            evidence("container", stack.machine.surroundings.container),
            *stack.driver_evidence(),
            *stack.torch_evidence(),
        ],
        [
            Fix(
                "docker rm -f CONTAINER && docker run --gpus all …   # on the host: recreate it",
                "none needed",
                "terminates what runs in the container",
            ),
            Fix(
                "docker run --gpus all --device /dev/nvidia0 --device /dev/nvidiactl "
                "--device /dev/nvidia-uvm …",
                "remove the --device options",
                "none; devices passed this way survive a reload (or use the cgroupfs driver)",
            ),
        ],
    )


# ---
# Rows of the decision table where the GPU works but other processes use it up.


# CUresult: docs.nvidia.com/cuda/cuda-driver-api, "Data types used by CUDA driver".
_OUT_OF_MEMORY = 2
_DEVICES_UNAVAILABLE = 46

#: Least free share of a GPU's memory for it to be offered in place of a full one.
_FREE_SHARE = 0.5


def occupied(stack: DriverStack) -> Check | None:
    """The driver lets no further process in."""
    if stack.cuda_code != _DEVICES_UNAVAILABLE and "busy or unavailable" not in stack.torch_words:
        return None
    modes = [gpu.compute_mode.value for gpu in stack.gpus if gpu.compute_mode.value]
    closed = [mode for mode in modes if mode != "default"]
    found = [evidence("compute mode", gpu.compute_mode) for gpu in stack.gpus]
    found += [*stack.driver_evidence(), *stack.torch_evidence()]
    if modes and not closed:
        return bad(
            NAME,
            "gpu_busy",
            "the GPU is busy or unavailable, although its compute mode is default",
            "The driver refuses a context: the GPU is in an error state, or "
            "the MPS daemon died or belongs to another user.",
            found,
            [
                Fix(
                    "sudo dmesg | grep -iE 'nvrm|xid' | tail -20; pgrep -a nvidia-cuda-mps",
                    "changes nothing",
                    "none; an Xid identifies the error, a process nvidia-cuda-mps the MPS daemon",
                )
            ],
        )
    return bad(
        NAME,
        "gpu_busy",
        "the GPU's compute mode refuses another process",
        "Its compute mode is exclusive or prohibited, and another process holds it.",
        found,
        [
            Fix(
                "sudo nvidia-smi -c DEFAULT",
                f"sudo nvidia-smi -c {next(iter(closed), 'EXCLUSIVE_PROCESS').upper()}",
                "other processes may use the GPU",
            )
        ],
    )


def address_space(stack: DriverStack) -> Check | None:
    """A limit of this process's address space is below what CUDA reserves as it starts.

    Under unified addressing the driver reserves addresses for the RAM and all GPUs' memory, used
    or not; where the limit is lower, it says "out of memory" with every GPU empty.
    """
    limit = stack.machine.limits.address_space_bytes
    ram = stack.machine.memory.total_bytes
    gpus = [gpu.memory_bytes for gpu in gpus_of_job(stack.machine)]
    reserved = sum(part.value or 0 for part in (ram, *gpus))
    if not _is_out_of_memory(stack) or limit.value is None or limit.value >= reserved:
        return None
    return bad(
        NAME,
        "address_space_limited",
        f"CUDA may not reserve its addresses: ulimit -v allows {size(limit.value)}",
        "As it starts, CUDA reserves addresses (no memory) for the RAM and for every GPU's memory; "
        'with less it ends with "out of memory", however empty the GPUs are. Shells, and batch '
        "systems that bound a job's virtual memory (SGE's h_vmem, PBS's vmem), set this limit.",
        [
            evidence("address space of this process", limit, size),
            evidence("RAM", ram, size),
            *(evidence(f"memory of GPU {i}", part, size) for i, part in enumerate(gpus)),
            *stack.torch_evidence(),
        ],
        [
            Fix(
                "ulimit -v unlimited   # if the hard limit allows it; in a batch job: ask for no "
                "limit of virtual memory",
                f"ulimit -v {limit.value // 1024}",
                "none for this job: RAM is bounded by the job's memory limit",
            )
        ],
    )


def _is_out_of_memory(stack: DriverStack) -> bool:
    return stack.cuda_code == _OUT_OF_MEMORY or "out of memory" in stack.torch_words


def full(stack: DriverStack) -> Check | None:
    """Others hold so much of a GPU's memory that not even a context fits."""
    if not _is_out_of_memory(stack):
        return None
    gpus = gpus_of_job(stack.machine)
    free = [uuid for gpu in gpus if (uuid := gpu.uuid.value) and _is_free(gpu)]
    remedies = [
        Fix(
            "nvidia-smi   # lists who holds it: wait for them, or ask them to end",
            "changes nothing",
            "none; in a container only its own processes are listed",
        )
    ]
    if free:
        former = stack.cuda.visible_devices.value
        undo = "unset CUDA_VISIBLE_DEVICES"
        if former is not None:
            undo = f"export CUDA_VISIBLE_DEVICES={shlex.quote(former)}"
        remedies.insert(
            0,
            Fix(
                f"export CUDA_VISIBLE_DEVICES={shlex.quote(','.join(free))}",
                undo,
                "the full GPUs are not used",
            ),
        )
    return bad(
        NAME,
        "gpu_full",
        "a GPU that PyTorch sees has no free memory",
        "A context and one small kernel need a few hundred MiB, and less than that is free: "
        "most likely other processes use the memory.",
        [
            *(evidence(f"memory in use on GPU {g.index}", g.used_bytes, size) for g in gpus),
            *(evidence(f"memory of GPU {g.index}", g.memory_bytes, size) for g in gpus),
            *stack.torch_evidence(),
        ],
        remedies,
    )


def _is_free(gpu: Gpu) -> bool:
    used, total = gpu.used_bytes.value, gpu.memory_bytes.value
    return used is not None and total is not None and total - used >= _FREE_SHARE * total
