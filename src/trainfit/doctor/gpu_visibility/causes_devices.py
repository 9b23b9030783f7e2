"""Rows of the decision table whose cause lies in the GPU's device files and MIG instances."""

from __future__ import annotations

from typing import Final

from trainfit.doctor.findings import bad, evidence
from trainfit.doctor.formatting import on_host
from trainfit.doctor.gpu_visibility.causes_torch import ask_slurm
from trainfit.doctor.gpu_visibility.driver_stack import DriverStack
from trainfit.results.machine.doctor import Check, Evidence, Fix

NAME: Final = "gpu"

# CUresult: docs.nvidia.com/cuda/cuda-driver-api, "Data types used by CUDA driver".
_UNKNOWN = 999


def device_node(stack: DriverStack) -> Check | None:
    """A device file that CUDA needs is missing, or may not be opened."""
    if stack.kernel_driver is None or stack.in_wsl or stack.is_jetson or stack.sees_gpu:
        return None
    needed = (("/dev/nvidia0", stack.gpu_nodes), ("/dev/nvidia-uvm", stack.has_uvm))
    missing = [path for path, is_there in needed if not is_there]
    closed = [node.path for node in stack.closed_nodes]
    if not closed and not missing:
        return None
    if missing:
        summary = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        remedies = _make_nodes(stack)
    else:
        summary = f"{', '.join(closed)} cannot be opened by this user"
        remedies = _open_nodes(stack, closed)
    return bad(
        NAME,
        "device_node",
        summary,
        "CUDA opens the GPU's device file, nvidiactl and nvidia-uvm; NVML does not need "
        "nvidia-uvm, so nvidia-smi may still work.",
        [stack.node_evidence(), *_all(stack)],
        remedies,
    )


def _make_nodes(stack: DriverStack) -> list[Fix]:
    make = Fix(
        "sudo nvidia-modprobe -c=0 -u   # loads nvidia-uvm and creates the files",
        "sudo rmmod nvidia_uvm",
        on_host(stack.machine, "none; nvidia-persistenced does it at every boot"),
    )
    if not stack.in_container:
        return [make]
    again = Fix(
        "then recreate the container: it gets the files that exist when it starts",
        "none needed",
        "terminates what runs in the container",
    )
    return [make, again]


def _open_nodes(stack: DriverStack, closed: list[str]) -> list[Fix]:
    if stack.in_slurm:
        return [ask_slurm()]
    if stack.in_container:
        return [
            Fix(
                "start the container with the GPU: docker run --gpus all …, or "
                "podman run --device nvidia.com/gpu=all --security-opt=label=disable "
                "--group-add keep-groups …",
                "start it with the previous options",
                "recreates the container; SELinux does not confine it (label=disable)",
            )
        ]
    return [
        Fix(
            f'sudo usermod -aG "$(stat -c %G {closed[0]})" "$USER"   # then log in again',
            f'sudo gpasswd -d "$USER" "$(stat -c %G {closed[0]})"',
            "if that group is root, use the next fix instead",
        ),
        Fix(
            f"ls -l {' '.join(closed)} && sudo chmod a+rw {' '.join(closed)}",
            f"sudo chmod 660 {' '.join(closed)}   # or the mode that ls showed",
            "every user may use the GPU, until the driver is reloaded (its parameter "
            "NVreg_DeviceFileMode sets the mode permanently)",
        ),
    ]


def mig_without_instances(stack: DriverStack) -> Check | None:
    """MIG is switched on, and no instance was made."""
    empty = [gpu for gpu in stack.gpus if gpu.mig.value and not gpu.mig_instances.value]
    if not empty or stack.sees_gpu or any(not gpu.mig.value for gpu in stack.gpus):
        return None
    index = empty[0].index
    return bad(
        NAME,
        "mig_without_instances",
        f"MIG is on without instances on GPU {', '.join(str(gpu.index) for gpu in empty)}",
        "A GPU in MIG mode exposes only its instances to CUDA, and there are none.",
        [
            evidence(f"MIG of GPU {index}", empty[0].mig),
            evidence(
                f"instances of GPU {index}",
                empty[0].mig_instances,
                lambda each: ", ".join(each) or "none",
            ),
            *_all(stack),
        ],
        [
            Fix(
                f"sudo nvidia-smi mig -i {index} -cgi 0 -C   # one instance of the whole GPU",
                f"sudo nvidia-smi mig -i {index} -dci && sudo nvidia-smi mig -i {index} -dgi",
                "none; `nvidia-smi mig -lgip` lists the other sizes",
            ),
            Fix(
                f"sudo nvidia-smi -i {index} -mig 0",
                f"sudo nvidia-smi -i {index} -mig 1",
                "no process may use the GPU meanwhile",
            ),
        ],
    )


def unknown_error(stack: DriverStack) -> Check | None:
    """CUDA's part of the driver is stuck, while the rest answers: as after a suspend."""
    if stack.cuda_code != _UNKNOWN or not stack.cuda.nvml.is_known or stack.in_wsl:
        return None
    return bad(
        NAME,
        "cuda_unknown_error",
        "CUDA fails with 'unknown error' (999), although the driver works",
        "NVML works and cuInit fails: nvidia_uvm, the kernel module that only CUDA uses, "
        "is in a bad state, usually after the machine was suspended.",
        [stack.node_evidence(), *_all(stack)],
        [
            Fix(
                "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm",
                "none needed: the same module is reloaded",
                on_host(stack.machine, "no process may use CUDA meanwhile; otherwise: sudo reboot"),
            )
        ],
    )


def _all(stack: DriverStack) -> list[Evidence]:
    return [*stack.driver_evidence(), *stack.torch_evidence()]
