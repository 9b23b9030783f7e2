"""All checks of the machine except whether PyTorch sees the GPU, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trainfit.doctor.cpu.cores import check_cores
from trainfit.doctor.cpu.frequency import check_frequency
from trainfit.doctor.cpu.idle_states import check_idle
from trainfit.doctor.cpu.numa import check_numa
from trainfit.doctor.cpu.threads import check_threads
from trainfit.doctor.gpu import health as gpu_health
from trainfit.doctor.gpu import modes as gpu_modes
from trainfit.doctor.gpu import sharing as gpu_sharing
from trainfit.doctor.gpu.pcie import check_pcie
from trainfit.doctor.host.limits import check_files, check_processes
from trainfit.doctor.host.memory import check_memory, check_shm
from trainfit.doctor.host.packages import check_cuda_compat, check_torchvision
from trainfit.doctor.host.storage import check_disk
from trainfit.doctor.host.surroundings import check_container, check_scheduler
from trainfit.results.machine.doctor import Check
from trainfit.results.machine.machine import Machine

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
