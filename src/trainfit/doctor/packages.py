"""Checks that installed packages match each other and the driver; pip commands for PyTorch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Final, NamedTuple

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import bad, brief, evidence, good, unsure, version_text
from trainfit.results.doctor import Check
from trainfit.results.findings import Evidence, Fix
from trainfit.results.machine import Machine, TorchBuild

INDEX: Final = "https://download.pytorch.org/whl"
#: CUresult of a forward-compatibility libcuda on a GPU that is not entitled to it (cuda.h).
_COMPAT_NOT_SUPPORTED = 804


def expected_torchvision(version: str) -> tuple[int, int] | None:
    """torchvision's (major, minor) that goes with a torch version; ``None``: not known."""
    numbers = _minor(version)
    if numbers is None:
        return None
    major, minor = numbers
    if major not in policy.TORCHVISION_OFFSET or minor < policy.TORCHVISION_FIRST[major]:
        return None
    return 0, minor + policy.TORCHVISION_OFFSET[major]


def _minor(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version."""
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])", version)
    return (int(match[1]), int(match[2])) if match else None


def check_torchvision(machine: Machine) -> tuple[Check, ...]:
    """torch and torchvision: version by version, and built for the same CUDA."""
    name = "torchvision"
    torch, vision = machine.cuda.torch, machine.cuda.torchvision
    if torch.is_absent or vision.is_absent:
        return ()
    found = [evidence("torch", torch, _words), evidence("torchvision", vision, _words)]
    if torch.value is None or vision.value is None:
        needed = "the version files of both packages"
        return (
            unsure(
                name, "whether torchvision matches torch could not be determined", needed, found
            ),
        )
    check = _wrong_version(torch.value, vision.value, found)
    check = check or _wrong_build(torch.value, vision.value, found)
    if check is not None:
        return (check,)
    pair = (
        f"torchvision {brief(vision.value.version, 20)} with torch {brief(torch.value.version, 20)}"
    )
    expected = expected_torchvision(torch.value.version)
    if expected is None or _minor(vision.value.version) is None:
        needed = "a torch release with a known matching torchvision (1.4 to 2.x)"
        return (unsure(name, f"{pair}: compatibility unknown", needed, found),)
    return (good(name, f"{pair}: compatible", found),)


def _words(build: TorchBuild) -> str:
    return f"{build.version} built for {_target(build)}"


def _target(build: TorchBuild) -> str:
    if build.cuda is not None:
        return f"CUDA {build.cuda[0]}.{build.cuda[1]}"
    return f"ROCm {brief(build.hip, 12)}" if build.hip else "the CPU"


def _wrong_version(torch: TorchBuild, vision: TorchBuild, evidence: list[Evidence]) -> Check | None:
    expected = expected_torchvision(torch.version)
    present = _minor(vision.version)
    if expected is None or present is None or present == expected:
        return None
    text = f"{expected[0]}.{expected[1]}"
    return bad(
        "torchvision",
        "torchvision_version",
        f"torchvision {brief(vision.version, 20)} with torch {brief(torch.version, 20)}: "
        f"needs {text}",
        "torchvision's operators are compiled against one torch version: with another they do "
        "not load ('operator torchvision::nms does not exist'), or crash.",
        evidence,
        [_reinstall(torch, vision, f"{text}.*")],
    )


def _wrong_build(torch: TorchBuild, vision: TorchBuild, evidence: list[Evidence]) -> Check | None:
    if _kind(torch) == _kind(vision):
        return None
    wanted = expected_torchvision(torch.version)
    version = f"{wanted[0]}.{wanted[1]}.*" if wanted else vision.version.partition("+")[0]
    return bad(
        "torchvision",
        "torchvision_build",
        f"torch is built for {_target(torch)}, torchvision for {_target(vision)}",
        "torchvision's compiled operators (nms, roi_align, image decoding) do not load or have "
        "no kernel for the GPU; with another major CUDA version the import fails.",
        evidence,
        [_reinstall(torch, vision, version)],
    )


def _kind(build: TorchBuild) -> str:
    """What torchvision itself compares: the platform, and CUDA's major version."""
    if build.cuda is not None:
        return f"cuda{build.cuda[0]}"
    return "rocm" if build.hip else "cpu"


def _reinstall(torch: TorchBuild, vision: TorchBuild, version: str) -> Fix:
    install = "pip install --force-reinstall --no-deps"
    return Fix(
        f"{install} {shlex.quote(f'torchvision=={version}')} --index-url {INDEX}/{_index(torch)}",
        f"{install} {shlex.quote(f'torchvision=={vision.version}')}"
        + (f" --index-url {INDEX}/{_index(vision)}" if "+" in vision.version else ""),
        "a download of a few MB; replaces this environment's torchvision",
    )


def _index(build: TorchBuild) -> str:
    if build.cuda is not None:
        return f"cu{build.cuda[0]}{build.cuda[1]}"
    rocm = re.match(r"[0-9]+\.[0-9]+", build.hip or "")
    return f"rocm{rocm[0]}" if rocm else "cpu"


def check_cuda_compat(machine: Machine) -> tuple[Check, ...]:
    """Compatibility libraries of CUDA, and a driver that is older than PyTorch's CUDA."""
    name = "cuda-compat"
    cuda, torch = machine.cuda.cuda, machine.cuda.torch
    found = [
        evidence("CUDA of the driver", machine.cuda.nvml_cuda, version_text),
        evidence("PyTorch", torch, _words),
        evidence("libcuda answers", cuda, lambda c: f"{c.code} {c.error}".strip()),
        *(
            Evidence(f"{library} in use", place, source="loader")
            for library, place in sorted(machine.cuda.library_places.items())
        ),
    ]
    if cuda.value is not None and cuda.value.code == _COMPAT_NOT_SUPPORTED:
        return (_unsupported(name, found),)
    driver, built = machine.cuda.nvml_cuda.value, torch.value.cuda if torch.value else None
    if driver is None or built is None or driver[0] != built[0] or driver >= built:
        return ()  # newer: nothing to say; another major version: check "gpu"
    pair = f"PyTorch for CUDA {version_text(built)} on a driver for CUDA {version_text(driver)}"
    why = (
        "within one major CUDA version an older driver runs compiled kernels, but "
        f"cannot compile the newer toolkit's PTX ('unsupported toolchain'): that needs a "
        f"driver for CUDA {version_text(built)} or newer"
    )
    return (good(name, f"{pair}: compatible", found, why),)


def _unsupported(name: str, evidence: list[Evidence]) -> Check:
    return bad(
        name,
        "forward_compat_unsupported",
        "CUDA's forward-compatibility libcuda is used on a GPU that does not support it (error "
        "804)",
        "the compat package supports data-center GPUs only. It is found before the driver's "
        "own libcuda, usually through an image's LD_LIBRARY_PATH.",
        evidence,
        [
            Fix(
                'OLD="$LD_LIBRARY_PATH"; export LD_LIBRARY_PATH="$(echo "$OLD" | tr : \'\\n\' | '
                'grep -v compat | paste -sd:)"',
                'export LD_LIBRARY_PATH="$OLD"',
                "none, if the driver is new enough for PyTorch's CUDA; otherwise update it",
            )
        ],
    )


# ---
# pip commands for PyTorch: the index with a build that matches driver and GPU.


_INSTALL: Final = "pip install --force-reinstall"

_Pair = tuple[int, int]
_FIRST, _LAST = (0, 0), (1 << 30, 0)


class _Wheel(NamedTuple):
    tag: str
    least_driver: int
    versions: tuple[_Pair, _Pair]
    capabilities: tuple[_Pair, _Pair]


#: Indices of PyTorch's releases, the first choice first: pytorch.org/get-started/previous-versions
#: and the CUDA support matrix of pytorch's RELEASE.md (pytorch#164471, #175253, #182849): 12.8 is
#: gone from 2.12 on, 12.6 from 2.15 on, and serves no Blackwell; 13.0 nothing before Turing.
_WHEELS: Final = (
    _Wheel("cu130", 580, ((2, 9), _LAST), ((7, 5), _LAST)),
    _Wheel("cu126", 525, ((2, 6), (2, 14)), ((5, 0), (9, 0))),
    _Wheel("cu128", 525, ((2, 7), (2, 11)), ((7, 5), _LAST)),
    _Wheel("cu124", 525, ((2, 4), (2, 6)), ((5, 0), (9, 0))),
    _Wheel("cu121", 525, ((2, 1), (2, 5)), ((5, 0), (9, 0))),
    _Wheel("cu118", 450, ((2, 0), (2, 7)), ((3, 7), (9, 0))),
)
#: Of a machine whose driver is not known: one that CUDA 12 is served by.
_LIKELY_DRIVER: Final = 525


def index_for(
    driver: int | None, capabilities: Iterable[_Pair], version: str | None = None
) -> str | None:
    """The index with the newest CUDA that serves all these GPUs under this driver.

    Args:
        driver: its branch (550); ``None`` if it is not known.
        capabilities: of the GPUs, as far as they are known.
        version: of PyTorch; ``None`` for whichever the index has.
    """
    pairs, branch = tuple(capabilities), _LIKELY_DRIVER if driver is None else driver
    number = re.match(r"(\d{1,3})\.(\d{1,3})", version or "", re.ASCII)
    pair = (int(number[1]), int(number[2])) if number else None
    for wheel in _WHEELS:
        (oldest, newest), (least, most) = wheel.versions, wheel.capabilities
        if (
            branch >= wheel.least_driver
            and (pair is None or oldest <= pair <= newest)
            and all(least <= capability <= most for capability in pairs)
        ):
            return f"{INDEX}/{wheel.tag}"
    return None


def install(index: str, version: str | None = None) -> str:
    """The command that puts a release of this index in the place of what is installed."""
    package = "torch" if version is None else f"torch=={version}"
    return f"{_INSTALL} {shlex.quote(package)} --index-url {index}"


def again(build: TorchBuild | None) -> str:
    """The command that installs this very build: the undo of one that replaces it.

    A local version ("+cu124") is on PyTorch's own index alone, and builds of others (NVIDIA's
    containers, own ones) are on none.
    """
    if build is None:
        return f"{_INSTALL} torch"
    plain, _, local = build.version.partition("+")
    package = shlex.quote(f"torch=={build.version}")
    if re.fullmatch(r"cu\d{2,3}|cpu|xpu|rocm[\d.]+", local, re.ASCII):
        if ".dev" in plain:
            return f"{_INSTALL} --pre {package} --index-url {INDEX}/nightly/{local}"
        return f"{_INSTALL} {package} --index-url {INDEX}/{local}"
    if not local and re.fullmatch(r"\d+(\.\d+)+(\.post\d+)?", plain, re.ASCII):
        return f"{_INSTALL} {package}  # conda's: conda install pytorch={plain}"
    return f"reinstall {build.version} from its original source (in a container: recreate it)"
