"""PyTorch builds: the files of the wheels, and what a fresh interpreter with them answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from parts import Part

#: Architectures of the official Linux wheels (see README.md, "Sources").
CU121 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"
CU124 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"
CU128 = "sm_70 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
CU130 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"

NO_GPUS = "No CUDA GPUs are available"
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed"
    " a driver from http://www.nvidia.com/Download/index.aspx"
)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version {}). Please update your GPU driver"
    " by downloading and installing a new version from the URL:"
    " http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to"
    " install a PyTorch version that has been compiled with your version of the CUDA driver."
)
UNKNOWN = (
    "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env"
    " variable CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
)
UNEXPECTED = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling"
    " NumCudaDevices() that might have already set an error? Error {}"
)
NO_KERNEL = (
    "CUDA error: no kernel image is available for execution on the device\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace"
    " below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
ERRORS = {
    304: UNEXPECTED.format("304: OS call failed or operation not supported on this OS"),
    500: UNEXPECTED.format("500: named symbol not found"),
    802: UNEXPECTED.format("802: system not yet initialized"),
    803: UNEXPECTED.format("803: system has unsupported display driver / cuda driver combination"),
    999: UNKNOWN,
}


@dataclasses.dataclass(frozen=True)
class Build:
    """A wheel; ``cuda`` is ``None`` for one without."""

    version: str
    cuda: str | None
    vision: str
    architectures: str = ""
    places: str = "/home/user/venv/lib/python3.11/site-packages"

    @property
    def lists_always(self) -> bool:
        """Does ``get_arch_list`` answer without a device? PyTorch 2.6 does not."""
        return int(self.version.split(".")[1]) >= 9


T26 = Build("2.6.0+cu124", "12.4", "0.21.0+cu124", CU124)
T24 = Build("2.4.0+cu121", "12.1", "0.19.0+cu121", CU121)
T29_CU128 = Build("2.9.0+cu128", "12.8", "0.24.0+cu128", CU128)
T29_CU130 = Build("2.9.0+cu130", "13.0", "0.24.0+cu130", CU130)
CPU_ONLY = Build("2.13.0+cpu", None, "0.28.0+cpu")
JETSON = Build(
    "2.8.0", "12.6", "0.23.0", "sm_87", "/home/user/venv/lib/python3.10/site-packages"
)  # fmt: skip


def files(build: Build) -> Part:
    """torch/version.py and torchvision/version.py."""
    cuda = None if build.cuda is None else repr(build.cuda)
    torch = (
        "from typing import Optional\n\n"
        "__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'xpu']\n"
        f"__version__ = '{build.version}'\ndebug = False\ncuda: Optional[str] = {cuda}\n"
        "git_version = 'Unknown'\nhip: Optional[str] = None\nxpu: Optional[str] = None\n"
    )
    vision = (
        f"__version__ = '{build.vision}'\ngit_version = 'Unknown'\n"
        "from torchvision.extension import _check_cuda_version\n"
        "if _check_cuda_version() > 0:\n    cuda = _check_cuda_version()\n"
    )
    folders = {name: f"{build.places}/{name}" for name in ("torch", "torchvision")}
    return {
        "files": {
            f"{folders['torch']}/version.py": torch,
            f"{folders['torch']}/__init__.py": "",
            f"{folders['torchvision']}/version.py": vision,
            f"{folders['torchvision']}/__init__.py": "",
        },
        "calls": {"packages": folders},
    }


def sees(build: Build, capabilities: Sequence[tuple[int, int]], **changes: Any) -> Part:
    """PyTorch sees the GPUs, and a kernel runs (unless ``changes`` say otherwise)."""
    answer = {
        "version": build.version, "cuda": build.cuda, "hip": None, "available": True,
        "devices": len(capabilities), "error": "", "architectures": build.architectures.split(),
        "capabilities": [list(each) for each in capabilities], "kernel_error": "", "warnings": [],
    }  # fmt: skip
    return {**files(build), "probes": {"torch_devices": {**answer, **changes}}}


def blind(build: Build, error: str = NO_GPUS, warns: bool = True) -> Part:
    """PyTorch sees no GPU; ``error`` is what ``torch.cuda.init()`` raises.

    ``is_available()`` warns with the same words, except where there is no device or no driver
    at all: then it is silent.
    """
    quiet = error in (NO_GPUS, NO_DRIVER) or not warns
    place = " (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:109.)"
    warnings = [] if quiet else [f"CUDA initialization: {error}{place}"]
    listed = build.architectures.split() if build.lists_always else []
    return sees(
        build, [], available=False, error=error, kernel_error=None, warnings=warnings,
        architectures=listed,
    )  # fmt: skip


def without_cuda(build: Build) -> Part:
    """A CPU-only wheel."""
    return blind(build, "Torch not compiled with CUDA enabled", warns=False)


def incompatible(build: Build, name: str, capability: tuple[int, int]) -> Part:
    """PyTorch sees the GPU but has no kernel for it."""
    supported = " ".join(each for each in build.architectures.split() if each.startswith("sm_"))
    warning = (
        f"\n{name} with CUDA capability sm_{capability[0]}{capability[1]} is not compatible with"
        " the current PyTorch installation.\nThe current PyTorch install supports CUDA"
        f" capabilities {supported}.\nIf you want to use the {name} GPU with PyTorch, please check"
        " the instructions at https://pytorch.org/get-started/locally/\n"
    )
    return sees(build, [capability], kernel_error=NO_KERNEL, warnings=[warning])
