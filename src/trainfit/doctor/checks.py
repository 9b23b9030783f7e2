"""All checks of the machine besides whether PyTorch sees the GPU, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trainfit.doctor import gpu_health, gpu_modes, gpu_sharing
from trainfit.doctor.cores import check_cores
from trainfit.doctor.frequency import check_frequency
from trainfit.doctor.idle import check_idle
from trainfit.doctor.limits import check_files, check_processes
from trainfit.doctor.memory import check_memory, check_shm
from trainfit.doctor.numa import check_numa
from trainfit.doctor.packages import check_cuda_compat, check_torchvision
from trainfit.doctor.pcie import check_pcie
from trainfit.doctor.storage import check_disk
from trainfit.doctor.surroundings import check_container, check_scheduler
from trainfit.doctor.threads import check_threads
from trainfit.results.doctor import Check
from trainfit.results.machine import Machine

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
