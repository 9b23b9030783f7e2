"""Packages that are missing or do not match: what pip calls them, what builds them.

pip finds a package by its name alone, and other people's packages have the names of some modules:
those that are known are named by their own, and of others is said where their name stands.

Packages that were compiled for another PyTorch, CUDA or NumPy; a GPU or a terminal that is
not there.

Of the last, why it is so is a matter of the machine, at which `trainfit doctor` looks.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trainfit.findings.environment.requirements import (
    Asked,
    asked_for,
    asked_like,
    is_installed,
    plain_name,
    wanted_by,
)
from trainfit.findings.facts import FailureContext
from trainfit.findings.tracebacks import NO_MODULE, ParsedException
from trainfit.results.findings import Finding, failure_finding

#: Modules that are installed under another name.
_DISTRIBUTIONS: Final = {
    "absl": "absl-py",
    "attr": "attrs",
    "Bio": "biopython",
    "bs4": "beautifulsoup4",
    "Crypto": "pycryptodome",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "ffmpeg": "ffmpeg-python",
    "fitz": "PyMuPDF",
    "git": "GitPython",
    "haiku": "dm-haiku",
    "hydra": "hydra-core",
    "ignite": "pytorch-ignite",
    "magic": "python-magic",
    "mpl_toolkits": "matplotlib",
    "OpenGL": "PyOpenGL",
    "open_clip": "open_clip_torch",
    "openslide": "openslide-python",
    "parselmouth": "praat-parselmouth",
    "patoolib": "patool",
    "PIL": "pillow",
    "pkg_resources": "'setuptools<81'",
    "pl_bolts": "lightning-bolts",
    "pytorch_grad_cam": "grad-cam",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "skvideo": "sk-video",
    "tree": "dm-tree",
    "umap": "umap-learn",
    "warp": "warp-lang",
    "yaml": "PyYAML",
    "zmq": "pyzmq",
}
#: Of repositories that pip installs by their address: on PyPI, if at all, is something else.
_ADDRESSES: Final = {
    "clip": "https://github.com/openai/CLIP.git",
    "d4rl": "https://github.com/Farama-Foundation/D4RL.git",
    "detectron2": "https://github.com/facebookresearch/detectron2.git",
    "panopticapi": "https://github.com/cocodataset/panopticapi.git",
    "pytorch3d": "https://github.com/facebookresearch/pytorch3d.git",
    "r3m": "https://github.com/facebookresearch/r3m.git",
    "segment_anything": "https://github.com/facebookresearch/segment-anything.git",
    "tinycudann": "https://github.com/NVlabs/tiny-cuda-nn.git#subdirectory=bindings/torch",
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
    "gdal": (
        "is no module of its own in today's GDAL",
        "from osgeo import gdal in its place (conda install -c conda-forge gdal; pip builds it for "
        "the system's libgdal)",
    ),
    "gym": (
        "is made no longer (0.26 was the last)",
        "gymnasium in its place: reset() gives two values, step() five; or the gym that the "
        "requirements name, in an environment of its own",
    ),
    "torchtext": (
        "is made no longer (0.18 was the last, for PyTorch 2.3)",
        "a plain Dataset and a collate_fn that pads; or the versions that the script names, in an "
        "environment of their own",
    ),
}
#: Parts of names that several packages share: another of them is installed.
_PARTS: Final = {
    "azure.storage.blob": "azure-storage-blob",
    "google.auth": "google-auth",
    "google.cloud.bigquery": "google-cloud-bigquery",
    "google.cloud.storage": "google-cloud-storage",
    "google.genai": "google-genai",
    "google.protobuf": "protobuf",
    "optimum": "optimum",
    "optimum.quanto": "optimum-quanto",
    "ruamel.yaml": "ruamel.yaml",
}
#: What a library says that imports a class by its name (Hydra's get_class and instantiate).
_TOLD: Final = re.compile(
    r"ModuleNotFoundError\(\"No module named|ModuleNotFoundError: No module named"
)
#: A folder without an __init__.py, as an empty one.
_EMPTY: Final = re.compile(r"cannot import name '[^']+' from '([\w.]+)' \(unknown location\)")


def missing(raised: ParsedException, _: FailureContext) -> Finding | None:
    """A module that Python does not find, and that is of no installed package."""
    match = NO_MODULE.search(raised.message) or _EMPTY.search(raised.message)
    told = _TOLD.search(raised.message) is not None
    if match is None or not (told or raised.type in ("ModuleNotFoundError", "ImportError")):
        return None
    module = match[1]
    name = module.partition(".")[0]
    if (submodule := _submodule(name, raised)) is not None:
        path, fix = submodule
        return _finding(f"{path} is a git submodule that was not checked out", fix)
    if raised.type != "ModuleNotFoundError" and not told:
        return None
    if (setup := _built_by(module, raised)) is not None:
        return _finding(
            f"{module} is made when its package is installed, by {setup}",
            f"pip install --no-build-isolation -e {os.path.dirname(setup) or '.'}",
        )
    if module != name:
        return _compiled(module, raised) or _of_shared_name(module, raised)
    if name == "mpi4py" and any(frame.package == "deepspeed" for frame in raised.frames):
        return _finding(
            "DeepSpeed asks MPI for the ranks, as no launcher has told them",
            "start the script by torchrun --nproc-per-node=1, or by deepspeed --num_gpus=1, in "
            "place of python",
        )
    package = _DISTRIBUTIONS.get(name, name)
    asked = asked_for(name, raised.folder)
    if asked is None and (asked := _asked_by_importer(name, raised)) is not None:
        package = asked.package
    if name in _NOT_BROUGHT:
        why, instead = _NOT_BROUGHT[name]
        return _finding(f"{name} is not installed, and {why}", instead)
    if (folder := _folder_with(name, raised)) is not None:
        return _in_folder(folder, f"{name} lies in {{}}, where Python does not look")
    title = f"{name} is not installed for the Python that runs the script"
    if name in _ADDRESSES:
        return _finding(title, f"pip install git+{_ADDRESSES[name]}")
    if asked is None and package != name:
        asked = asked_for(package, raised.folder)
    elif asked is None and (asked := asked_like(name, raised.folder)) is not None:
        package = asked.package
    if asked is not None and asked.version:
        text = f"pip install '{package}{asked.version}' ({asked.file} names it; "
        return _finding(title, f"{text}with an older Python where pip finds no such version)")
    if asked is not None or package != name:
        named = f" ({asked.file} names it)" if asked is not None else ""
        return _finding(title, f"pip install {package}{named}")
    return _finding(
        title,
        f"pip install {name}, if that is the package that the script's README means: no list of "
        "requirements here names it; or the option that does without it",
    )


#: What a library says of a package that it wants, with the command that brings it.
_PIP: Final = re.compile(
    r"pip3? install\s+(?P<options>(?:-U |--upgrade )?)"
    r"(?P<quote>['\"]?)(?P<package>[A-Za-z](?:[\w.-]*\w)?(?:\[[\w,-]+\])?)"
    r"(?P<version>(?:[<>=!~]=?[\w.*,<>=!~]*\w)?)(?P=quote)(?P<after>(?: -U\b)?)"
)
#: The same without a command (transformers/quantizers), where the package has another name than
#: the one that is said.
_UNNAMED: Final = re.compile(
    r"A valid (?P<valid>[\w.-]+) version \((?P<least>[<>=\d.]+)\) is not available"
    r"|^Requires (?P<bare>[A-Za-z][\w.-]*) (?P<from>[<>=]+ ?[\d.]+)"
    r"|requires (?:the )?[`']?(?P<library>[A-Za-z][\w.-]*)[`']? (?:librar|package)"
)
_PACKAGES: Final = {"quark": "amd-quark"}
#: importlib.metadata, asked for a version.
_NO_METADATA: Final = re.compile(r"No package metadata was found for ([\w.-]+)$")
_WANTED: Final = re.compile(
    r"requires?\b|required|not (?:available|installed|found)|missing|needs?\b|[Ii]nstall it"
    r"|(?:must|have to|should|[Pp]lease) (?:be )?(?:install|update|upgrade)"
)


def told(raised: ParsedException, _: FailureContext) -> Finding | None:
    """A package that a library asks for in words of its own: it is absent, or too old for it."""
    if absent := _NO_METADATA.match(raised.message):
        title = f"{absent[1]} is not installed for the Python that runs the script"
        return _finding(title, f"pip install {absent[1]}")
    match = _PIP.search(raised.message)
    if match is None and raised.type == "ImportError" and (it := _UNNAMED.search(raised.message)):
        name = (it["valid"] or it["bare"] or it["library"]).lower()
        version = (it["least"] or it["from"] or "").replace(" ", "")
        return _asked(_PACKAGES.get(name, name), version, "")
    if match is None or (raised.type != "ImportError" and not _WANTED.search(raised.message)):
        return None
    newer = "-U " if match["options"] or match["after"] else ""
    return _asked(match["package"], match["version"], newer)


def _asked(package: str, version: str, newer: str) -> Finding:
    """A package that a library asks for, of a version (">=0.2"; empty: of any)."""
    # To a shell > and [ mean something else.
    what = f"'{package}{version}'" if version or "[" in package else package
    return _finding(
        f"A library asks for {package}, which is not installed here or too old for it",
        f"pip install {newer}{what}, for the Python that runs the script",
    )


def hidden(raised: ParsedException, _: FailureContext) -> Finding | None:
    """A module of the repository that Python does not find, for another package has the name of
    the repository's, such as an older version of it that is installed."""
    match = NO_MODULE.search(raised.message)
    if raised.type != "ModuleNotFoundError" or match is None:
        return None
    name, *inner = match[1].split(".")
    folder = _folder_with(name, raised) if inner else None
    if folder is None:
        return None
    path = folder.joinpath(name, *inner)
    if not path.with_suffix(".py").is_file() and not any(path.glob("*.py")):
        return None
    title = f"{match[1]} lies in {{}}, and Python finds another {name} before it"
    return _in_folder(folder, title)


def _in_folder(folder: Path, title: str) -> Finding:
    """What lies in a folder of the repository that Python does not look into, or not first."""
    where = str(folder)
    built = any((folder / build).is_file() for build in _BUILDS)
    install = f"pip install -e {where}, or " if built else ""
    text = title.format("this folder" if where == "." else where)
    return _finding(text, f"{install}PYTHONPATH={where} before the command")


def _asked_by_importer(name: str, raised: ParsedException) -> Asked | None:
    """What the installed package that imports the module asks for of it: under the module's name,
    or else the one package that it asks for and that is not installed (mcli is mosaicml-cli's); of
    several the one whose name has the module's in it (graphql is graphql-core's)."""
    importers = [frame.package for frame in raised.frames if frame.package]
    asked = list(wanted_by(importers[-1])) if importers else []
    wanted = {plain_name(_DISTRIBUTIONS.get(name, name)), plain_name(name)}
    named = next((each for each in asked if plain_name(each.package) in wanted), None)
    absent = [each for each in asked if not is_installed(each.package)]
    parts = set(plain_name(name).split("-"))
    alike = [each for each in absent if parts <= set(plain_name(each.package).split("-"))]
    found = alike if len(absent) > 1 else absent
    return found[0] if named is None and len(found) == 1 else named


def _finding(title: str, fix: str) -> Finding:
    return failure_finding("package_missing", title, "", fix)


#: CUDAExtension("name", …) of setup.py, and a file that it writes ("package/version.py").
_MADE: Final = re.compile(
    r"Extension\(\s*(?:name\s*=\s*)?[\"'](?P<extension>[\w.]+)[\"']|[\"'](?P<file>[\w/]+)\.py[\"']"
)


def _built_by(module: str, raised: ParsedException) -> str | None:
    """The setup.py of this repository that makes a module; ``None`` where none does."""
    here = Path.cwd()
    above = [each for each in raised.folder.parents if each.is_relative_to(here)]
    for folder in dict.fromkeys((here, raised.folder, *above)):
        for pattern in ("setup.py", "*/setup.py", "*/*/setup.py"):
            for setup in sorted(folder.glob(pattern)):
                if module in _made_by(setup):
                    return os.path.relpath(setup)
    return None


def _made_by(setup: Path) -> Iterator[str]:
    try:
        text = setup.read_text(errors="replace")
    except OSError:
        return
    for match in _MADE.finditer(text):
        if match["extension"]:
            yield from (match["extension"], match["extension"].rpartition(".")[2])
        elif not (setup.parent / f"{match['file']}.py").is_file():
            yield match["file"].replace("/", ".")


#: What repositories compile their operators by, next to what imports them.
_SCRIPTS: Final = ("make.sh", "build.sh", "compile.sh", "install.sh", "setup.py", "build.py")


def _compiled(module: str, raised: ParsedException) -> Finding | None:
    """A module of the user's own package that a script next to the importing file compiles."""
    folder = raised.folder
    parent, _, last = module.rpartition(".")
    if parent.rpartition(".")[2] != folder.name or any(folder.glob(f"{last}*")):
        return None
    for script in _SCRIPTS:
        if (folder / script).is_file():
            where = os.path.relpath(folder)
            run = "python" if script.endswith(".py") else "sh"
            tail = " build_ext --inplace" if script == "setup.py" else ""
            return _finding(
                f"{module} is compiled by {os.path.join(where, script)}, which has not been run",
                f"cd {where} && {run} {script}{tail}; where it does not compile with the "
                "installed PyTorch, a newer version of that folder, or the PyTorch that the "
                "README names, in an environment of its own",
            )
    return None


def _of_shared_name(module: str, raised: ParsedException) -> Finding | None:
    """A module of a package that is not there, though others with a part of its name are."""
    parts = sorted((part for part in _PARTS if f"{module}.".startswith(f"{part}.")), key=len)
    if not parts or _folder_with(parts[-1].partition(".")[0], raised) is not None:
        return None
    package = _PARTS[parts[-1]]
    return _finding(
        f"{package}, which has {module}, is not installed for the Python that runs the script",
        f"pip install {package}",
    )


def _submodule(name: str, raised: ParsedException) -> tuple[str, str] | None:
    """The submodule of this repository that should have a module and is empty, and what brings it;
    ``None`` where there is none."""
    here = Path.cwd()
    for folder in dict.fromkeys((here, raised.folder, *list(raised.folder.parents)[:_OUTER])):
        modules = configparser.ConfigParser(interpolation=None, strict=False)
        try:
            modules.read(folder / ".gitmodules", encoding="utf-8")
        except (OSError, ValueError, configparser.Error):
            continue
        for section in map(modules.__getitem__, modules.sections()):
            path = folder / section.get("path", "")
            is_it = path.name.replace("-", "_").lower() == name.lower() and path != folder
            if is_it and not (path.is_dir() and any(path.iterdir())):
                where = os.path.relpath(path)
                if (folder / ".git").exists():
                    return where, f"git submodule update --init --recursive {where}"
                return where, f"git clone --recursive {section.get('url', 'URL')} {where}"
    return None


#: What pip installs a folder by.
_BUILDS: Final = ("setup.py", "pyproject.toml")
#: Folders above a script's that may be the repository's own.
_OUTER: Final = 3


def _folder_with(name: str, raised: ParsedException) -> Path | None:
    """The folder of the user's code that has this module, as seen from here: this one, one that a
    file of the traceback lies in, or one near them that is to be installed; else ``None``."""
    here = Path.cwd()
    files = [here / frame.path for frame in reversed(raised.frames) if frame.is_user]
    above = [each for file in files for each in file.parents if each.is_relative_to(here)]
    below = sorted(build.parent for each in _BUILDS for build in here.glob(f"*/{each}"))
    outer = [each for inner in (here, raised.folder) for each in list(inner.parents)[:_OUTER]]
    built = [each for each in outer if any((each / build).is_file() for build in _BUILDS)]
    for folder in (here, *above, *below, here / "src", *built):
        if (folder / f"{name}.py").is_file() or any((folder / name).glob("*.py")):
            return Path(os.path.relpath(folder))
    return None


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
    message = raised.message
    if _TORCHVISION.search(message):
        return _mismatch(
            "torchvision does not match the installed PyTorch: its operators do not load",
            "`trainfit doctor --only torchvision` gives the command that installs the one that "
            "matches, and its undo",
        )
    package = _package(raised)
    if _SYMBOL.search(message):
        return _mismatch(
            f"{package} was compiled for another version of PyTorch than the installed one",
            f"install the build of {package} for this PyTorch, or build it here: pip install "
            "--force-reinstall --no-deps --no-cache-dir --no-build-isolation with its name",
        )
    if match := _CUDA_LIBRARY.search(message):
        return _mismatch(
            f"{package} was compiled for CUDA {match[1]}, whose libraries are not installed here",
            f"install the build of {package} for the CUDA of this PyTorch "
            "(`python -c 'import torch; print(torch.version.cuda)'`)",
        )
    if match := _OF_PYTORCH.search(message):
        other = "a PyTorch with CUDA, and the" if match[1] else "another PyTorch than the"
        own = "installed one is a build without it" if match[1] else "installed one"
        return _mismatch(f"{package} was compiled for {other} {own}", _BUILD.format(package))
    if match := _NOT_LOADED.search(message):
        return _mismatch(
            f"A library of {package} cannot be loaded",
            f"{_BUILD.format(package)}; what it lacks: ldd {match[1]}",
        )
    if _NUMPY.search(message):
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
    match = _NO_GPU.search(raised.message)
    if match is None:
        return None
    return failure_finding(
        "gpu_not_seen",
        f"PyTorch cannot use the GPU: {match[0].removesuffix(': ')}",
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
    named = [match[1] for match in _LIBRARY.finditer(raised.message)]
    imported = [frame.package for frame in reversed(raised.frames)]
    names = [name for name in (*named, *imported) if name not in ("", "torch", "numpy")]
    return names[0] if names else "a package"
