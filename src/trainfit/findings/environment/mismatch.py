"""Packages that were compiled for another PyTorch, CUDA or NumPy; a GPU or a terminal that is
not there.

Of the last, why it is so is a matter of the machine, at which `trainfit doctor` looks.
"""

from __future__ import annotations

import re
from typing import Final

from trainfit.findings.facts import FailureContext
from trainfit.findings.tracebacks import ParsedException
from trainfit.results.findings import Finding, failure_finding

#: torch/_library (torchvision's extension was not loaded), torchvision/extension.py.
_TORCHVISION: Final = re.compile(
    r"operator torchvision::\w+ does not exist|Couldn't load custom C\+\+ ops"
    r"|PyTorch and torchvision were compiled with different CUDA"
)
#: The loader of shared libraries (ld.so), of a symbol of C++ in one of PyTorch's namespaces.
_SYMBOL: Final = re.compile(r"undefined symbol: \S*(?:c10|2at|5torch|torch3|THP|aoti_torch)\S*")
#: The same, of one of CUDA's libraries with its version.
_CUDA_LIBRARY: Final = re.compile(
    r"lib(?:cudart|cublas(?:Lt)?|cudnn\w*|cufft|curand|cusolver|cusparse(?:Lt)?|nccl|nvrtc|nvJitLink)"
    r"\.so\.(\d+)[^:\n]*: cannot open shared object file"
)
#: The same, of PyTorch's own libraries, of which a build for the CPU lacks those for CUDA.
_OF_PYTORCH: Final = re.compile(r"lib(?:c10|torch)(_cuda)?\w*\.so: cannot open shared object file")
#: torch/_ops.py, which says why in the exception before it.
_NOT_LOADED: Final = re.compile(r"Could not load this library: (\S+)")
_LIBRARY: Final = re.compile(r"(?:site|dist)-packages/([A-Za-z_][A-Za-z0-9_]*)/")
#: NumPy's C API (numpy/__init__.cython-30.pxd, numpy/_core/multiarray).
_NUMPY: Final = re.compile(
    r"numpy\.(?:dtype|ndarray|ufunc) size changed|compiled using NumPy 1\.x cannot be run"
    r"|numpy\.core\.multiarray failed to import|_ARRAY_API not found"
)
#: torch/cuda/__init__.py and c10/cuda/CUDAFunctions.cpp, the driver's own words, and
#: torch/serialization.py.
_NO_GPU: Final = re.compile(
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|NVIDIA driver on your system is "
    r"too old|[Nn]o CUDA GPUs are available|no kernel image is available|no CUDA-capable device"
    r"|CUDA driver version is insufficient|forward compatibility was attempted"
    r"|system not yet initialized|CUDA unknown error|CUDA initialization: "
    r"|device(?:\(s\)|s)? (?:is|are)(?:/are)? busy or unavailable"
)
_OF_A_GPU: Final = "Attempting to deserialize object on a CUDA device"


_BUILD: Final = (
    "install the build of {} for this PyTorch "
    "(`python -c 'import torch; print(torch.__version__)'`: +cpu is without CUDA)"
)


def mismatch(raised: ParsedException, _: FailureContext) -> Finding | None:
    """A package that was compiled for another PyTorch, CUDA or NumPy than is installed."""
    said = raised.message
    if _TORCHVISION.search(said):
        return _mismatch(
            "torchvision does not match the installed PyTorch: its operators do not load",
            "`trainfit doctor --only torchvision` gives the command that installs the one that "
            "matches, and its undo",
        )
    package = _package(raised)
    if _SYMBOL.search(said):
        return _mismatch(
            f"{package} was compiled for another version of PyTorch than the installed one",
            f"install the build of {package} for this PyTorch, or build it here: pip install "
            "--force-reinstall --no-deps --no-cache-dir --no-build-isolation with its name",
        )
    if found := _CUDA_LIBRARY.search(said):
        return _mismatch(
            f"{package} was compiled for CUDA {found[1]}, whose libraries are not installed here",
            f"install the build of {package} for the CUDA of this PyTorch "
            "(`python -c 'import torch; print(torch.version.cuda)'`)",
        )
    if found := _OF_PYTORCH.search(said):
        other = "a PyTorch with CUDA, and the" if found[1] else "another PyTorch than the"
        own = "installed one is a build without it" if found[1] else "installed one"
        return _mismatch(f"{package} was compiled for {other} {own}", _BUILD.format(package))
    if found := _NOT_LOADED.search(said):
        return _mismatch(
            f"A library of {package} cannot be loaded",
            f"{_BUILD.format(package)}; what it lacks: ldd {found[1]}",
        )
    if _NUMPY.search(said):
        return _mismatch(
            f"{package} was compiled for another major version of NumPy than the installed one",
            f"install a newer {package}; or, where there is none, pip install 'numpy<2'",
        )
    return None


def gpu_not_seen(raised: ParsedException, _: FailureContext) -> Finding | None:
    """PyTorch cannot use a GPU that the script asks for."""
    if _OF_A_GPU in raised.message:
        return failure_finding(
            "gpu_not_seen",
            "A checkpoint with tensors of a GPU is loaded where PyTorch sees no GPU",
            "",
            "torch.load(…, map_location=device) with the device that is used here; if there "
            "should be a GPU, `trainfit doctor --only gpu` says why PyTorch does not see it",
        )
    found = _NO_GPU.search(raised.message)
    if found is None:
        return None
    return failure_finding(
        "gpu_not_seen",
        f"PyTorch cannot use the GPU: {found[0].removesuffix(': ')}",
        "",
        "`trainfit doctor --only gpu` says why, and the command that fixes it",
    )


#: `stty size` of a script that has no terminal prints nothing; posix.get_terminal_size: ENOTTY.
_ASKS_TERMINAL: Final = re.compile(r"\bstty\b|\bget_terminal_size\b|\btcgetattr\b|TIOCGWINSZ")
_WITHOUT_TERMINAL: Final = re.compile(
    r"not enough values to unpack \(expected 2, got 0\)|Inappropriate ioctl for device"
)


def no_terminal(raised: ParsedException, _: FailureContext) -> Finding | None:
    """The size of a terminal is asked for by a command that was started without one."""
    if not _ASKS_TERMINAL.search(raised.code) or not _WITHOUT_TERMINAL.search(raised.message):
        return None
    return failure_finding(
        "no_terminal",
        "The script asks for the size of its terminal, and this command was started without one",
        "",
        "start it in a terminal (in a job: script -qc 'the command' /dev/null); or in the script "
        "shutil.get_terminal_size(), which is 80 by 24 without one",
    )


#: Lib/subprocess.py; and what is said of output that is empty, as a shell's is that finds no
#: command.
_NO_NVIDIA_SMI: Final = re.compile(r"No such file or directory: 'nvidia-smi'")
_OF_EMPTY: Final = re.compile(
    r"not enough values to unpack \(expected \d+, got [01]\)|list index out of range"
    r"|invalid literal for int\(\) with base 10: ''|could not convert string to float: ''"
)
_ASKS_NVIDIA_SMI: Final = re.compile(r"[\"']nvidia-smi\b")
_FUNCTION: Final = re.compile(r"\s*(?:async )?def ")


def no_nvidia_smi(raised: ParsedException, _: FailureContext) -> Finding | None:
    """nvidia-smi is started where there is none, or what a shell prints in its place is read."""
    if not _NO_NVIDIA_SMI.search(raised.message):
        if not _OF_EMPTY.search(raised.message):
            return None
        of_function: list[str] = []
        for line in reversed(raised.lines or [raised.code]):
            of_function.append(line)
            if _FUNCTION.match(line):
                break
        if not any(_ASKS_NVIDIA_SMI.search(line) for line in of_function):
            return None
    return failure_finding(
        "no_nvidia_smi",
        "The script starts nvidia-smi, which comes with a GPU's driver: this machine has none, and "
        "a simulated GPU neither",
        "",
        "torch.cuda.mem_get_info() and torch.cuda.get_device_properties() tell the same, of a "
        "simulated GPU, too; or leave out the option that asks for it",
    )


def _mismatch(title: str, fix: str) -> Finding:
    return failure_finding("package_mismatch", title, "", fix)


def _package(raised: ParsedException) -> str:
    """The package whose library the message names, or whose module was imported last."""
    named = [found[1] for found in _LIBRARY.finditer(raised.message)]
    imported = [each.package for each in reversed(raised.frames)]
    names = [name for name in (*named, *imported) if name not in ("", "torch", "numpy")]
    return names[0] if names else "a package"
