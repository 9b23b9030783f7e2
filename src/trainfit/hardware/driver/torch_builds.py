"""Build targets of the installed PyTorch and torchvision, read from their files."""

from __future__ import annotations

import re

from trainfit.hardware.host import answers
from trainfit.hardware.host.system import System
from trainfit.results.files.facts import Fact, absent, cannot_tell, known
from trainfit.results.machine.machine import TorchBuild

# `cuda: Optional[str] = '12.4'` of torch/version.py, at the beginning of a line: torchvision's
# own `cuda` is computed when it is imported.
_ASSIGNMENT = re.compile(
    r"""^(__version__|cuda|hip|rocm)\s*(?::[^=\n]*)?=\s*(?:None|'([^'\n]*)'|"([^"\n]*)")\s*$""",
    re.MULTILINE,
)
_PLAIN_BUILDS = ("cpu", "xpu")
#: `torchrun --numa-binding` came with this version (pytorch#149334).
_NUMA_BINDING = (2, 9)


def read_build(system: System, name: str) -> Fact[TorchBuild]:
    """The build of ``name`` ("torch", "torchvision") by its version.py, which is not run."""
    folder = answers.path(system.packages().get(name))
    if folder is None:
        return absent(name, f"{name} is not installed")
    file = f"{folder}/version.py"
    content = system.text(file)
    if content.value is None:
        return cannot_tell(file, content.reason)
    assigned = {found[1]: found[2] or found[3] for found in _ASSIGNMENT.finditer(content.value)}
    version = assigned.get("__version__")
    if not version:
        return cannot_tell(file, "it has no version")
    if assigned.get("cuda") or assigned.get("hip") or assigned.get("rocm"):
        cuda, hip = _cuda(assigned.get("cuda")), assigned.get("hip") or assigned.get("rocm")
        told = hip is not None or cuda is not None
    elif "cuda" in assigned:
        cuda, hip, told = None, None, True
    else:
        cuda, hip, told = _by_tag(version)
    if not told:
        return cannot_tell(file, f"{version} does not state its CUDA version")
    return known(TorchBuild(version, cuda, hip, folder), file)


def torchrun_binds(version: str) -> bool:
    """Does `torchrun` of this PyTorch ("2.13.0+cpu") know `--numa-binding`?"""
    words = version.split(".")[:2]
    if len(words) < 2 or not all(word.isascii() and word.isdigit() for word in words):
        return False
    return tuple(int(word) for word in words) >= _NUMA_BINDING


def _cuda(written: str | None) -> tuple[int, int] | None:
    found = re.match(r"(\d{1,3})\.(\d{1,3})(?!\d)", written or "", re.ASCII)
    return (int(found[1]), int(found[2])) if found else None


def _by_tag(version: str) -> tuple[tuple[int, int] | None, str | None, bool]:
    """CUDA, HIP, and whether the tag tells: of 0.21.0+cu124, +rocm6.2, +cpu."""
    tag = version.partition("+")[2]
    if found := re.match(r"cu(\d{1,2})(\d)(?!\d)", tag, re.ASCII):
        return (int(found[1]), int(found[2])), None, True
    if found := re.match(r"rocm(\d[\d.]*)", tag, re.ASCII):
        return None, found[1], True
    return None, None, tag.startswith(_PLAIN_BUILDS)
