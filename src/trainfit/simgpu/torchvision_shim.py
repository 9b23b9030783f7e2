"""Let torchvision be imported beside a PyTorch that its C++ extension was not built for.

torchvision's import registers shape functions for two operators that its extension
defines. Where the extension cannot load (a CUDA wheel beside a CPU build of PyTorch), that
import fails with "operator torchvision::nms does not exist", although nothing of the
extension is needed. Defining the two schemas first is enough. They stay defined for the
life of the process: torchvision keeps referring to them once it is imported.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_libraries: list[torch.library.Library] = []


def define_torchvision_operators() -> None:
    """Define what torchvision's import needs, if its extension cannot; else do nothing."""
    if "torchvision" in sys.modules or _libraries:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _extension_loads(Path(spec.origin).parent):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS.values():
        library.define(schema)
    _libraries.append(library)


def _extension_loads(package: Path) -> bool:
    """Try torchvision's extension as torchvision itself would."""
    for extension in package.glob("_C*.so"):
        try:
            torch.ops.load_library(extension)
        except OSError:
            continue
        return True
    return False
