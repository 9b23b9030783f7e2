"""Rows of the decision table where the GPU works but other processes use it up."""

from __future__ import annotations

from typing import Final

from trainfit.doctor.findings import bad, evidence
from trainfit.doctor.formatting import all_gpus, quoted
from trainfit.doctor.gpu_visibility.driver_stack import DriverStack
from trainfit.results.format import size
from trainfit.results.machine.doctor import Check, Fix
from trainfit.results.machine.machine import Gpu

NAME: Final = "gpu"

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


def full(stack: DriverStack) -> Check | None:
    """Others hold so much of a GPU's memory that not even a context fits."""
    if stack.cuda_code != _OUT_OF_MEMORY and "out of memory" not in stack.torch_words:
        return None
    gpus = all_gpus(stack.machine)
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
            undo = f"export CUDA_VISIBLE_DEVICES={quoted(former)}"
        remedies.insert(
            0,
            Fix(
                f"export CUDA_VISIBLE_DEVICES={quoted(','.join(free))}",
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
