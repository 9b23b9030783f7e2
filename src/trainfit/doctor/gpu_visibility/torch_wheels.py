"""pip commands for PyTorch: the index with a build that matches driver and GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from trainfit.doctor.formatting import quoted
from trainfit.results.machine.machine import TorchBuild

INDEX: Final = "https://download.pytorch.org/whl"
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
    wanted, branch = tuple(capabilities), _LIKELY_DRIVER if driver is None else driver
    number = re.match(r"(\d{1,3})\.(\d{1,3})", version or "", re.ASCII)
    pair = (int(number[1]), int(number[2])) if number else None
    for wheel in _WHEELS:
        (oldest, newest), (least, most) = wheel.versions, wheel.capabilities
        if (
            branch >= wheel.least_driver
            and (pair is None or oldest <= pair <= newest)
            and all(least <= each <= most for each in wanted)
        ):
            return f"{INDEX}/{wheel.tag}"
    return None


def install(index: str, version: str | None = None) -> str:
    """The command that puts a release of this index in the place of what is installed."""
    package = "torch" if version is None else f"torch=={version}"
    return f"{_INSTALL} {quoted(package)} --index-url {index}"


def again(build: TorchBuild | None) -> str:
    """The command that installs this very build: the undo of one that replaces it.

    A local version ("+cu124") is on PyTorch's own index alone, and builds of others (NVIDIA's
    containers, own ones) are on none.
    """
    if build is None:
        return f"{_INSTALL} torch"
    plain, _, local = build.version.partition("+")
    package = quoted(f"torch=={build.version}")
    if re.fullmatch(r"cu\d{2,3}|cpu|xpu|rocm[\d.]+", local, re.ASCII):
        if ".dev" in plain:
            return f"{_INSTALL} --pre {package} --index-url {INDEX}/nightly/{local}"
        return f"{_INSTALL} {package} --index-url {INDEX}/{local}"
    if not local and re.fullmatch(r"\d+(\.\d+)+(\.post\d+)?", plain, re.ASCII):
        return f"{_INSTALL} {package}  # conda's: conda install pytorch={plain}"
    return f"reinstall {build.version} from its original source (in a container: recreate it)"
