"""All checks of a machine, by name, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from trainfit.doctor import threads
from trainfit.doctor.cores import check_cores
from trainfit.doctor.frequency import check_frequency, check_idle
from trainfit.doctor.gpu import health as gpu_health
from trainfit.doctor.gpu import modes as gpu_modes
from trainfit.doctor.gpu import sharing as gpu_sharing
from trainfit.doctor.gpu.modes import check_pcie
from trainfit.doctor.gpu.visibility import check_visibility
from trainfit.doctor.limits import check_container, check_files, check_processes, check_scheduler
from trainfit.doctor.memory import check_disk, check_memory, check_shm
from trainfit.doctor.numa import check_numa
from trainfit.doctor.packages import check_cuda_compat, check_torchvision
from trainfit.doctor.threads import check_threads
from trainfit.results.doctor import Check, WorkerPools
from trainfit.results.files.errors import TrainfitError
from trainfit.results.machine import Machine

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
