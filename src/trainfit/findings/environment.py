"""Exceptions of an environment: packages that are missing, that do not match PyTorch, or that are
newer than the script; a GPU that PyTorch does not see.

Of the last, why it is so is a matter of the machine, at which `trainfit doctor` looks. Repositories
of papers name the versions that they were written for, and run with newer ones.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Final

from trainfit.findings.facts import FailureContext
from trainfit.findings.tracebacks import ParsedException
from trainfit.findings.training_errors import KnownError, first_met
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


def _mismatch(title: str, fix: str) -> Finding:
    return failure_finding("package_mismatch", title, "", fix)


def _package(raised: ParsedException) -> str:
    """The package whose library the message names, or whose module was imported last."""
    named = [found[1] for found in _LIBRARY.finditer(raised.message)]
    imported = [each.package for each in reversed(raised.frames)]
    names = [name for name in (*named, *imported) if name not in ("", "torch", "numpy")]
    return names[0] if names else "a package"


# ---
# A script that was written for older libraries, and packages that are missing. Each name is one
# that the library had and has no longer, with what took its place.


_MISSING: Final = re.compile(r"No module named '([\w.]+)'")
#: Modules that an installed package no longer has: what took their place.
_MOVED: Final = {
    "torchvision.models.utils": "torch.hub.load_state_dict_from_url",
    "torch.utils.serialization": "t7 files: torch.save of a newer Torch, or the package torchfile",
    "torchtext.legacy": "a plain Dataset and collate_fn; torchtext 0.11 was the last with it",
    "pytorch_lightning.metrics": "the package torchmetrics",
    "sklearn.externals": "import joblib",
    "tensorflow.contrib": "what stands in tensorflow.keras, or tensorflow 1",
    "keras.utils.np_utils": "keras.utils.to_categorical",
    "distutils": "pip install setuptools, which has it still",
    "imp": "importlib",
}
#: Modules that are installed under another name.
_DISTRIBUTIONS: Final = {
    "cv2": "opencv-python-headless",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
#: Packages that pip does not bring: why, and what stands in their place.
_NOT_BROUGHT: Final = {
    "warpctc_pytorch": (
        "is built from source",
        "torch.nn.CTCLoss is PyTorch's own; it wants log_softmax(…) of the outputs, and blank=0",
    ),
    "apex": (
        "is built from source",
        "torch.autocast and torch.amp.GradScaler are PyTorch's own, AdamW(fused=True), and "
        "nn.parallel.DistributedDataParallel",
    ),
    "torchtext": (
        "is made no longer (0.18 was the last, for PyTorch 2.3)",
        "a plain Dataset and a collate_fn that pads; or the versions that the script names, in an "
        "environment of their own",
    ),
}

_KNOWN: Final = (
    # torch 2.0
    KnownError(
        "outdated",
        re.compile(r"No module named 'torch\._six'"),
        "PyTorch 2 and newer have no copy of six any longer",
        "str, int and math.inf for string_classes, int_classes and inf; collections.abc for "
        "container_abcs",
    ),
    # torch/utils/data/dataloader.py: _BaseDataLoaderIter has __next__ alone
    KnownError(
        "outdated",
        re.compile(r"object has no attribute 'next'"),
        "An iterator's next() is gone since Python 3 and PyTorch 1.13",
        "next(iterator) instead of iterator.next()",
    ),
    # numpy/__init__.py: __former_attrs__, __expired_attributes__
    KnownError(
        "outdated",
        re.compile(
            r"module 'numpy' has no attribute '(?:int|float|bool|object|complex|str|long|unicode)'"
        ),
        "NumPy 1.24 and newer have no aliases of Python's types",
        "int, float, bool, object instead of np.int, np.float, np.bool, np.object; or pip install "
        "'numpy<1.24' (on a Python that it is built for)",
    ),
    KnownError(
        "outdated",
        re.compile(r"was removed in the NumPy 2\.0 release|np\.\w+ is removed in NumPy 2"),
        "NumPy 2 has this name no longer",
        "the name that the message gives, or pip install 'numpy<2'",
    ),
    # numpy/_core/src/multiarray/common.c, of NumPy 2.4
    KnownError(
        "outdated",
        re.compile(r"only 0-dimensional arrays can be converted to Python scalars"),
        "NumPy 2.4 and newer make no number of an array of one element",
        "int(a[0]) or a.item() instead of int(a), or pip install 'numpy<2.4'",
    ),
    # torch/csrc/autograd/python_function.cpp
    KnownError(
        "outdated",
        re.compile(r"Legacy autograd function with non-static forward method is deprecated"),
        "A torch.autograd.Function with state of its own is no longer called",
        "@staticmethod forward(ctx, …) and backward(ctx, …), called as Name.apply(…)",
    ),
    # PIL/Image.py of Pillow 10
    KnownError(
        "outdated",
        re.compile(r"module 'PIL\.Image' has no attribute '(?:ANTIALIAS|LINEAR|CUBIC)'"),
        "Pillow 10 and newer have other names of their filters",
        "Image.LANCZOS, Image.BILINEAR, Image.BICUBIC instead of ANTIALIAS, LINEAR, CUBIC",
    ),
    KnownError(
        "outdated",
        re.compile(r"'(?:FreeTypeFont|ImageDraw)' object has no attribute '(?:getsize|textsize)'"),
        "Pillow 10 and newer measure texts otherwise",
        "font.getbbox(text)[2:] instead of getsize, draw.textbbox((0, 0), text) for textsize",
    ),
    # collections/__init__.py of Python 3.10
    KnownError(
        "outdated",
        re.compile(
            r"module 'collections' has no attribute '(?:Iterable|Mapping|Sequence|Callable)'"
            r"|cannot import name '(?:Iterable|Mapping|Sequence|Callable)' from 'collections'"
        ),
        "Python 3.10 and newer have it in collections.abc",
        "from collections.abc import …",
    ),
    # transformers/optimization.py up to 4.5x
    KnownError(
        "outdated",
        re.compile(r"cannot import name 'AdamW' from 'transformers"),
        "transformers has no AdamW of its own any longer",
        "from torch.optim import AdamW",
    ),
    # torch/optim/lr_scheduler.py
    KnownError(
        "outdated",
        re.compile(
            r"(?:LR|LROnPlateau)\.__init__\(\) got an unexpected keyword argument 'verbose'"
        ),
        "PyTorch's schedules have no verbose any longer",
        "leave verbose out, and print scheduler.get_last_lr()",
    ),
    # scipy.misc, up to 1.2
    KnownError(
        "outdated",
        re.compile(r"'scipy\.misc'|module 'scipy' has no attribute 'misc'"),
        "SciPy reads and resizes no images any longer",
        "imageio.imread and PIL's Image.resize instead of scipy.misc",
    ),
)


def outdated(raised: ParsedException, _: FailureContext) -> Finding | None:
    """What an import that fails, or a name that a library had once, means."""
    if met := first_met(_KNOWN, raised.message):
        return failure_finding("outdated", met[0].title, "", met[0].fix)
    if raised.type == "AssertionError" and (asked := _asked_version(raised)):
        return failure_finding(
            "outdated",
            f"The script insists on another version of {asked} than is installed",
            "",
            "the version that the line names, in an environment of its own; or remove the line, "
            "and change what has another name in the installed one",
        )
    lacks = _NAME_GONE.search(raised.message)
    if lacks is not None and "circular import" not in raised.message:
        return _other_version(lacks[2].partition(".")[0], f"{lacks[2]}.{lacks[1]}")
    missing = _MISSING.search(raised.message)
    if raised.type != "ModuleNotFoundError" or missing is None:
        return None
    module = missing[1]
    for moved, instead in _MOVED.items():
        if module == moved or module.startswith(f"{moved}."):
            title = f"The installed version has no module {moved} any longer"
            return failure_finding("outdated", title, "", f"instead: {instead}")
    name = module.partition(".")[0]
    if name in _NOT_BROUGHT:
        why, instead = _NOT_BROUGHT[name]
        return failure_finding(
            "package_missing", f"{name} is not installed, and {why}", "", instead
        )
    if module != name:  # of a package that is there
        return _other_version(name, module) if _is_installed(name) else None
    if (folder := _folder_with(name, raised)) is not None:
        where = str(folder)
        title = (
            f"{name} lies in {'this folder' if where == '.' else where}, where Python does not look"
        )
        built = any((folder / each).is_file() for each in _BUILDS)
        install = f"pip install -e {where}, or " if built else ""
        fix = f"{install}PYTHONPATH={where} before the command"
        return failure_finding("package_missing", title, "", fix)
    return failure_finding(
        "package_missing",
        f"{name} is not installed for the Python that runs the script",
        "",
        f"pip install {_DISTRIBUTIONS.get(name, name)}, if its requirements name no other; "
        "or the option that does without it",
    )


#: Of an installed package: Python says in which file it looked.
_NAME_GONE: Final = re.compile(
    r"cannot import name '(\w+)' from '([\w.]+)' \([^()\n]*(?:site|dist)-packages"
)


def _other_version(package: str, gone: str) -> Finding:
    """Of a package that is installed, without a name or a module that the script imports."""
    return failure_finding(
        "outdated",
        f"The installed version of {package} has no {gone}",
        "",
        f"the version of {package} that the script was written for (its README or requirements "
        "name it), in an environment of its own; or the name's place in the installed one",
    )


def _is_installed(package: str) -> bool:
    """Is it an installed package's, and not a folder of the user's code?"""
    try:
        found = importlib.util.find_spec(package)
    except ValueError:  # a module that was made without a spec, as __main__ may be
        return False
    return found is not None and "-packages" in (found.origin or "")


_VERSION_ASKED: Final = re.compile(r"^assert\b.*?\b([A-Za-z_]\w*)\.__version__")


def _asked_version(raised: ParsedException) -> str:
    """The package of whose version the line that raised makes sure; empty: of none."""
    line = raised.culprit.code.strip() if raised.culprit is not None else ""
    found = _VERSION_ASKED.search(line)
    return found[1] if found is not None else ""


#: What pip installs a folder by.
_BUILDS: Final = ("setup.py", "pyproject.toml")


def _folder_with(name: str, raised: ParsedException) -> Path | None:
    """The folder of the user's code that has this module, as seen from here: this one, one that a
    file of the traceback lies in, or one below this one that is to be installed; else ``None``."""
    here = Path.cwd()
    files = [here / frame.path for frame in reversed(raised.frames) if frame.is_user]
    above = [each for file in files for each in file.parents if each.is_relative_to(here)]
    below = sorted(build.parent for each in _BUILDS for build in here.glob(f"*/{each}"))
    for folder in (here, *above, *below, here / "src"):
        if (folder / f"{name}.py").is_file() or any((folder / name).glob("*.py")):
            return folder.relative_to(here)
    return None
