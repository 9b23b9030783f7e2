"""Why PyTorch sees no GPU: the decision table, first match wins.

The rows and their order are those of NVIDIA's and PyTorch's known failures; each is one small
function in `causes_*`. What matches none is not guessed: it is ``unexplained``, with everything
that was asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trainfit.doctor.findings import bad, good, unsure
from trainfit.doctor.gpu import causes_driver, causes_files, causes_outside, causes_torch
from trainfit.doctor.gpu.driver_stack import DriverStack
from trainfit.results.doctor import Check
from trainfit.results.findings import Fix
from trainfit.results.machine import Machine

NAME: Final = "gpu"

Row = Callable[[DriverStack], Check | None]

#: Asked where PyTorch sees no GPU, or runs nothing on it. In this order, since a later cause
#: would often match too: a masked GPU leaves ``device_count()`` at 0 like a missing driver does.
ROWS: Final[tuple[Row, ...]] = (
    causes_torch.no_torch,
    causes_torch.import_fails,
    causes_torch.cpu_only,
    causes_torch.masked,
    causes_driver.hangs,
    causes_files.not_loaded,
    causes_outside.wsl_driver,
    causes_driver.no_gpu,
    causes_driver.no_driver,
    causes_outside.without_gpu,
    causes_outside.lost_gpu,
    causes_driver.lost_gpu,
    causes_files.no_libraries,
    causes_files.version_mismatch,
    causes_driver.compat_unsupported,
    causes_driver.too_old,
    causes_driver.fabric_manager,
    causes_torch.no_kernel_image,
    causes_files.device_node,
    causes_files.mig_without_instances,
    causes_outside.occupied,
    causes_outside.full,
    causes_torch.crashes,
    causes_files.unknown_error,
)

#: Asked where PyTorch sees GPUs and runs nothing on one of them: driver, libraries, device files
#: and masks are well then, and whatever of them looks odd is not the cause.
KERNEL_ROWS: Final[tuple[Row, ...]] = (
    causes_torch.cpu_only,
    causes_driver.lost_gpu,
    causes_torch.no_kernel_image,
    causes_outside.occupied,
    causes_outside.full,
)


def check_visibility(machine: Machine) -> tuple[Check, ...]:
    """Does PyTorch see a GPU, and if not, why?"""
    stack = DriverStack(machine)
    # Of this process alone: a fresh one would see the GPU.
    if (forked := causes_torch.forked(stack)) is not None:
        return (forked,)
    if stack.runs_kernels:
        return (_seen(stack),)
    for row in KERNEL_ROWS if stack.sees_gpu else ROWS:
        if (check := row(stack)) is not None:
            return (check,)
    return (_unexplained(stack),)


def _seen(stack: DriverStack) -> Check:
    probe = stack.probe
    assert probe is not None
    count = f"{probe.devices} GPU" + ("s" if probe.devices != 1 else "")
    hidden = stack.gpu_count - probe.devices
    why = ""
    masked = stack.cuda.visible_devices
    if hidden > 0 and masked.value is not None:
        why = f"CUDA_VISIBLE_DEVICES={masked.value} exposes {probe.devices} of {stack.gpu_count}"
    names = sorted({gpu.name.value for gpu in stack.gpus if gpu.name.value is not None})
    of = f": {', '.join(names)}" if names else ""
    return good(
        NAME,
        f"PyTorch sees {count} and runs a kernel on each{of}",
        [*stack.torch_evidence(), *stack.driver_evidence()],
        why,
    )


def _unexplained(stack: DriverStack) -> Check:
    found = [*stack.torch_evidence(), *stack.driver_evidence(), stack.node_evidence()]
    if stack.probe is None:
        return unsure(
            NAME,
            "whether PyTorch sees a GPU could not be determined",
            f"PyTorch could not be queried: {stack.cuda.torch_probe.reason}",
            found,
        )
    said = stack.probe.kernel_error or stack.probe.error or stack.driver_error
    if stack.sees_gpu and not said:
        return unsure(
            NAME,
            f"PyTorch sees {stack.probe.devices} GPUs; whether a kernel runs on them is unknown",
            "the result of a kernel: the probe's answer is incomplete",
            found,
        )
    said = said or "no error was reported"
    return bad(
        NAME,
        "kernel_fails" if stack.sees_gpu else "unexplained",
        "PyTorch sees the GPU but fails to run a kernel on it, and no known cause matches"
        if stack.sees_gpu
        else "PyTorch sees no GPU, and no known cause matches",
        f"Its message: {said.strip().splitlines()[0][:300]}. All known causes were checked.",
        found,
        [
            Fix(
                "sudo dmesg | grep -iE 'nvrm|xid|nvidia' | tail -20",
                "changes nothing",
                "none; the kernel log often names the error",
            )
        ],
    )
