"""Makes torchvision usable with a PyTorch that its C++ extension was not built for.

torchvision's import registers fake kernels, gradients and autocast rules for the operators that
its extension defines. Where the extension cannot load (a CUDA wheel next to a CPU build of
PyTorch), the import fails with "operator torchvision::nms does not exist", although no kernel of
the extension is needed on the simulated device. So the schemas are defined here first, and loading
the extension counts as done: they stay for the life of the process, as torchvision does. On CPU
tensors they have no kernel, which PyTorch says when they are called.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_POOL = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_INPUT = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_DEFORMED = (
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, "
    "SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask"
)

#: As torchvision's csrc/ops define them.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align(Tensor input, Tensor rois, {_POOL}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_POOL}, {_INPUT}, int sampling_ratio, "
    "bool aligned) -> Tensor",
    "qroi_align(Tensor input, Tensor rois, float input_scale, int input_zero_point, "
    f"float rois_scale, int rois_zero_point, {_POOL}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool(Tensor input, Tensor rois, {_POOL}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_POOL}, {_INPUT}) -> Tensor",
    f"ps_roi_align(Tensor input, Tensor rois, {_POOL}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOL}, "
    f"int sampling_ratio, {_INPUT}) -> Tensor",
    f"ps_roi_pool(Tensor input, Tensor rois, {_POOL}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOL}, {_INPUT})"
    " -> Tensor",
    f"deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
    f"{_DEFORMED}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask,"
    f" Tensor bias, {_DEFORMED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "box_iou_rotated(Tensor boxes1, Tensor boxes2) -> Tensor",
    "_cuda_version() -> int",
)
_libraries: list[torch.library.Library] = []


def define_torchvision_operators() -> None:
    """Define what torchvision's import needs, if its extension cannot; else do nothing."""
    if "torchvision" in sys.modules or _libraries:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    package = Path(spec.origin).parent
    if _extension_loads(package):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    library.impl("_cuda_version", lambda: -1, "CompositeExplicitAutograd")
    _libraries.append(library)
    # Older versions register gradients in the extension itself: theirs stay unavailable.
    if (package / "_autograd_registrations.py").exists():
        torch.ops.load_library = _skipping(torch.ops.load_library, package)  # type: ignore[method-assign]


def _skipping(load: Callable[[Any], None], package: Path) -> Callable[[Any], None]:
    """``torch.ops.load_library`` to which the extension whose operators are defined is loaded."""

    def load_library(path: Any) -> None:
        if Path(path).parent != package or not Path(path).name.startswith("_C"):
            load(path)

    return load_library


def _extension_loads(package: Path) -> bool:
    """Try torchvision's extension as torchvision itself would."""
    for extension in package.glob("_C*.so"):
        try:
            torch.ops.load_library(extension)
        except OSError:
            continue
        return True
    return False
