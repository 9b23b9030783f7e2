"""Facts of a machine (read through `system`), and GPUs by name; needs neither a GPU nor torch."""

from trainfit.hardware.gpu.context_memory import device_constants
from trainfit.hardware.gpu.figures import GpuNameError
from trainfit.hardware.gpu.local_gpu import local_gpu
from trainfit.hardware.gpu.lookup import catalogue, find_gpu
from trainfit.results.gpus import GpuSpec

__all__ = ["GpuNameError", "GpuSpec", "catalogue", "device_constants", "find_gpu", "local_gpu"]
