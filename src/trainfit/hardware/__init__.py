"""Facts of a machine (read through `system`), and GPUs by name; needs neither a GPU nor torch."""

from trainfit.hardware.context_memory import device_constants
from trainfit.hardware.gpu_figures import GpuNameError
from trainfit.hardware.gpu_lookup import catalogue, find_gpu
from trainfit.hardware.local_gpu import local_gpu
from trainfit.results.gpus import GpuSpec

__all__ = ["GpuNameError", "GpuSpec", "catalogue", "device_constants", "find_gpu", "local_gpu"]
