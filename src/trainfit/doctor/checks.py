"""All checks of a machine, by name, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from trainfit.doctor import (
    causes_driver,
    causes_files,
    causes_outside,
    causes_torch,
    gpu_health,
    gpu_modes,
    gpu_sharing,
    threads,
)
from trainfit.doctor.cores import check_cores, check_numa
from trainfit.doctor.driver_stack import DriverStack
from trainfit.doctor.findings import bad, good, unsure
from trainfit.doctor.frequency import check_frequency, check_idle
from trainfit.doctor.gpu_modes import check_pcie
from trainfit.doctor.limits import check_container, check_files, check_processes, check_scheduler
from trainfit.doctor.memory import check_disk, check_memory, check_shm
from trainfit.doctor.packages import check_cuda_compat, check_torchvision
from trainfit.doctor.threads import check_threads
from trainfit.results.doctor import Check, WorkerPools
from trainfit.results.files.errors import TrainfitError
from trainfit.results.findings import Fix
from trainfit.results.machine import Machine

# ---
# Why PyTorch sees no GPU: the decision table, first match wins.
#
# The rows and their order are those of NVIDIA's and PyTorch's known failures; each is one small
# function in `causes_*`. What matches none is not guessed: it is ``unexplained``, with everything
# that was asked.


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
    causes_driver.unbound,
    causes_files.device_node,
    causes_files.mig_without_instances,
    causes_outside.occupied,
    causes_outside.address_space,
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
    causes_torch.cudnn_mismatch,
    causes_outside.occupied,
    causes_outside.address_space,
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
    error = stack.probe.kernel_error or stack.probe.error or stack.driver_error
    if stack.sees_gpu and not error:
        return unsure(
            NAME,
            f"PyTorch sees {stack.probe.devices} GPUs; whether a kernel runs on them is unknown",
            "the result of a kernel: the probe's answer is incomplete",
            found,
        )
    said = error or "no error was reported"
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


# ---
# All checks of the machine except whether PyTorch sees the GPU, in the order of the report.


#: Name (of ``--only`` and ``--skip``) and function: packages, GPUs, processor, memory, limits.
#: A check that does not apply gives nothing; one that is made of each GPU gives one a GPU.
MACHINE_CHECKS: Final[tuple[tuple[str, Callable[[Machine], tuple[Check, ...]]], ...]] = (
    ("torchvision", check_torchvision),
    ("cuda-compat", check_cuda_compat),
    ("gpu-state", gpu_health.check_state),
    ("mig", gpu_modes.check_mig),
    ("compute-mode", gpu_modes.check_compute_mode),
    ("gpu-processes", gpu_sharing.check_processes),
    ("gpu-memory", gpu_sharing.check_memory),
    ("gpu-clocks", gpu_health.check_clocks),
    ("gpu-temperature", gpu_health.check_temperature),
    ("gpu-power", gpu_health.check_power),
    ("ecc", gpu_health.check_ecc),
    ("persistence", gpu_modes.check_persistence),
    ("pcie", check_pcie),
    ("numa", check_numa),
    ("cores", check_cores),
    ("threads", check_threads),
    ("frequency", check_frequency),
    ("idle", check_idle),
    ("memory", check_memory),
    ("shm", check_shm),
    ("disk", check_disk),
    ("files", check_files),
    ("processes", check_processes),
    ("container", check_container),
    ("scheduler", check_scheduler),
)


#: In the order of the report: whether there is a GPU to train on comes first.
CHECKS: Final[tuple[tuple[str, Callable[[Machine], tuple[Check, ...]]], ...]] = (
    ("gpu", check_visibility),
    *MACHINE_CHECKS,
)
NAMES: Final = tuple(name for name, _ in CHECKS)


class CheckNameError(TrainfitError):
    """A name after --only or --skip that no check has."""


def diagnose(
    machine: Machine, names: Collection[str] = NAMES, pools: WorkerPools | None = None
) -> tuple[Check, ...]:
    """The checks of these names; one that does not apply to the machine gives none. ``pools`` is
    what the workers of a script run."""
    found: list[Check] = []
    for name, make in CHECKS:
        if name in names:
            found += check_threads(machine, pools) if name == threads.NAME else make(machine)
    return tuple(found)


def chosen(only: Sequence[str] | None, skip: Sequence[str]) -> tuple[str, ...]:
    """The names to check; raises :class:`CheckNameError` for one that is not known."""
    for name in (*(only or ()), *skip):
        if name not in NAMES:
            raise CheckNameError(f"unknown check {name!r}; available: {', '.join(NAMES)}")
    left = tuple(name for name in NAMES if (only is None or name in only) and name not in skip)
    if not left:
        raise CheckNameError("--only and --skip leave no check to run; list fewer in --skip")
    return left
