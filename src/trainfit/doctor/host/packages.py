"""Checks that the installed packages match each other and the driver."""

from __future__ import annotations

import re

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import bad, evidence, good, unsure
from trainfit.doctor.formatting import brief, quoted
from trainfit.results.machine.doctor import Check, Evidence, Fix
from trainfit.results.machine.machine import Machine, TorchBuild

_INDEX = "https://download.pytorch.org/whl"
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


def _wrong_version(torch: TorchBuild, vision: TorchBuild, found: list[Evidence]) -> Check | None:
    expected = expected_torchvision(torch.version)
    present = _minor(vision.version)
    if expected is None or present is None or present == expected:
        return None
    wanted = f"{expected[0]}.{expected[1]}"
    return bad(
        "torchvision",
        "torchvision_version",
        f"torchvision {brief(vision.version, 20)} with torch {brief(torch.version, 20)}: "
        f"needs {wanted}",
        "torchvision's operators are compiled against one torch version: with another they do "
        "not load ('operator torchvision::nms does not exist'), or crash.",
        found,
        [_reinstall(torch, vision, f"{wanted}.*")],
    )


def _wrong_build(torch: TorchBuild, vision: TorchBuild, found: list[Evidence]) -> Check | None:
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
        found,
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
        f"{install} {quoted(f'torchvision=={version}')} --index-url {_INDEX}/{_index(torch)}",
        f"{install} {quoted(f'torchvision=={vision.version}')}"
        + (f" --index-url {_INDEX}/{_index(vision)}" if "+" in vision.version else ""),
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
        evidence("CUDA of the driver", machine.cuda.nvml_cuda, _version),
        evidence("PyTorch", torch, _words),
        evidence("libcuda answers", cuda, lambda c: f"{c.code} {c.error}".strip()),
        *(
            Evidence(f"{library} in use", place, "loader")
            for library, place in sorted(machine.cuda.library_places.items())
        ),
    ]
    if cuda.value is not None and cuda.value.code == _COMPAT_NOT_SUPPORTED:
        return (_unsupported(name, found),)
    driver, built = machine.cuda.nvml_cuda.value, torch.value.cuda if torch.value else None
    if driver is None or built is None or driver[0] != built[0] or driver >= built:
        return ()  # newer: nothing to say; another major version: check "gpu"
    summary = (
        f"PyTorch for CUDA {_version(built)} on a driver for CUDA {_version(driver)}: compatible"
    )
    why = (
        "within one major CUDA version an older driver runs compiled kernels, but "
        f"cannot compile the newer toolkit's PTX ('unsupported toolchain'): that needs a "
        f"driver for CUDA {_version(built)} or newer"
    )
    return (good(name, summary, found, why),)


def _version(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def _unsupported(name: str, found: list[Evidence]) -> Check:
    return bad(
        name,
        "forward_compat_unsupported",
        "CUDA's forward-compatibility libcuda is used on a GPU that does not support it (error "
        "804)",
        "the compat package supports data-center GPUs only. It is found before the driver's "
        "own libcuda, usually through an image's LD_LIBRARY_PATH.",
        found,
        [
            Fix(
                'OLD="$LD_LIBRARY_PATH"; export LD_LIBRARY_PATH="$(echo "$OLD" | tr : \'\\n\' | '
                'grep -v compat | paste -sd:)"',
                'export LD_LIBRARY_PATH="$OLD"',
                "none, if the driver is new enough for PyTorch's CUDA; otherwise update it",
            )
        ],
    )
