"""What a machine is (read through `system`), and GPUs by name; needs neither a GPU nor torch."""

from trainfit.hardware.constants import device_constants
from trainfit.hardware.gpu import GpuNameError, GpuSpec, catalogue, find_gpu
from trainfit.hardware.local_gpu import local_gpu

__all__ = ["GpuNameError", "GpuSpec", "catalogue", "device_constants", "find_gpu", "local_gpu"]
