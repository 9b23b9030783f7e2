"""Facts of a machine (read through `system`), and GPUs by name; needs neither a GPU nor torch."""

from trainfit.hardware.gpu.context_memory import device_constants
from trainfit.hardware.gpu.local_gpu import local_gpu
from trainfit.hardware.gpu.lookup import GpuNameError, GpuSpec, catalogue, find_gpu

__all__ = ["GpuNameError", "GpuSpec", "catalogue", "device_constants", "find_gpu", "local_gpu"]
