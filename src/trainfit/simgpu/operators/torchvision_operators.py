"""torchvision's own operators on the simulated device, after its csrc/ops/cuda.

Result shapes come from torchvision's fake kernels. What its CUDA functions allocate in addition is
taken here as they do: dense copies of operands, the columns of a deformable convolution, the
overlaps that suppression downloads to the host.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from trainfit.results.gpus import Kernel
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.geometry import dense_copy
from trainfit.simgpu.device.registry import HANDLERS
from trainfit.simgpu.device.tensor import (
    SimulatedTensor,
    SimulationEndedError,
    current_engine,
    spec_of,
    wrap,
)
from trainfit.simgpu.device.values import tensors_in
from trainfit.simgpu.operators.autocast import Autocast
from trainfit.simgpu.operators.flops import by_name
from trainfit.simgpu.operators.kernel_rules import (
    Arguments,
    bytes_of,
    dtype_of,
    launched_by,
)
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.operators import has_kernel, no_dispatch, short_name

aten = torch.ops.aten

#: Boxes that one 64-bit word of the overlaps is for (csrc/ops/cuda/nms_kernel.cu).
_BOXES_OF_A_WORD = 64
#: Multiply-adds and comparisons for one pair of boxes (devIoU).
_FLOPS_OF_A_PAIR = 16
#: Images whose columns are made at once (kMaxParallelImgs in deform_conv2d_kernel.cu).
_IMAGES_AT_ONCE = 32
#: Corners that bilinear interpolation reads for a point.
_CORNERS = 4


def install() -> None:
    """Register them with the engine, as far as the operators are defined."""
    for name, handler in _HANDLERS.items():
        packet = getattr(torch.ops.torchvision, name, None)
        if packet is not None:
            HANDLERS[packet.default] = handler


def autocast_rules(autocast: Autocast) -> torch.library.Library | None:
    """Rules that torchvision's extension has for autocast (csrc/ops/autocast), for simulated
    tensors; ``None`` where there are none, or torchvision has them in Python (later versions)."""
    names = [name for name in ("nms", *_POOLING, "deform_conv2d") if _has_cpp_rule(name)]
    if not names:
        return None
    library = torch.library.Library("torchvision", "IMPL")
    for name in names:
        operator = getattr(torch.ops.torchvision, name).default
        kernel = autocast.in_float32(operator, cast_back=name != "nms")
        library.impl(name, kernel, "AutocastCUDA")
    return library


def _has_cpp_rule(name: str) -> bool:
    if "torchvision._autograd_registrations" in sys.modules:
        return False
    is_defined = hasattr(torch.ops.torchvision, name)  # not without torchvision
    return is_defined and has_kernel(f"torchvision::{name}", "AutocastCUDA")


# --- Suppression of overlapping boxes ---------------------------------------------------------


def _nms(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Every box is assumed to survive: which do is the data's."""
    boxes, scores = args[:2]
    _check_boxes(boxes, scores)
    count = boxes.shape[0]
    if not count:
        return engine.empty((0,), torch.int64)
    engine.assume(f"nms() was assumed to keep all {count} boxes")
    order = engine.run(aten.sort.default, (scores, 0, True), {})[1]
    ordered = engine.run(aten.index_select.default, (boxes, 0, order), {})
    words = -(-count // _BOXES_OF_A_WORD)
    overlaps = engine.empty((count * words,), torch.int64)
    engine.record(engine.info(func))
    engine.wait_for_device("size")
    kept = engine.empty((count,), torch.int64)
    result = engine.run(aten.index.Tensor, (order, [kept]), {})
    del ordered, overlaps
    return result


def _check_boxes(boxes: Any, scores: Any) -> None:
    """Check boxes, in nms_kernel.cu's words."""
    if boxes.dim() != 2:
        raise RuntimeError(f"boxes should be a 2d tensor, got {boxes.dim()}D")
    if boxes.shape[1] != 4:
        raise RuntimeError(f"boxes should have 4 elements in dimension 1, got {boxes.shape[1]}")
    if scores.dim() != 1:
        raise RuntimeError(f"scores should be a 1d tensor, got {scores.dim()}D")
    if len(boxes) != len(scores):
        raise RuntimeError(
            "boxes and scores should have same number of elements in dimension 0, "
            f"got {len(boxes)} and {len(scores)}"
        )


def _nms_kernels(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    boxes = call["dets"]
    count = boxes.shape[0]
    words = 8 * count * -(-count // _BOXES_OF_A_WORD)
    if not count:
        return []
    return [
        Kernel(
            "pointwise",
            dtype_of(boxes),
            _FLOPS_OF_A_PAIR * count * (count - 1) // 2,
            bytes_of([boxes]),
            words,
        ),
        Kernel("download", "integer", 0, words, words),
        Kernel("upload", "integer", 0, 8 * count, 8 * count),
    ]


# --- Boxes that a detector learns from --------------------------------------------------------

_ROI_HEADS: Final = "torchvision.models.detection.roi_heads"


def count_positives(patches: PatchSet) -> None:
    """Say of the labels of sampled boxes how many are positive, at most: until ``patches`` is
    restored.

    The mask and keypoint branches compute these boxes alone, a quarter of those sampled; which
    boxes they are is the data's (BalancedPositiveNegativeSampler).
    """

    def patch(module: ModuleType) -> None:
        heads = module.RoIHeads
        patches.set(
            heads, "select_training_samples", _with_positives(heads.select_training_samples)
        )

    patches.when_imported(_ROI_HEADS, patch)


def _with_positives(select: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(select)
    def select_training_samples(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = select(self, *args, **kwargs)
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # another sampler
            sampler = self.fg_bg_sampler
            maximum = int(sampler.batch_size_per_image * sampler.positive_fraction)
            for labels in result[2]:
                if type(labels) is SimulatedTensor and labels._life.value is None:
                    labels._life.nonzeros = min(maximum, labels.numel())
        return result

    return select_training_samples


# --- Pooling of regions -----------------------------------------------------------------------


def _pooled(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Results are zeroed first; operands that are not dense are copied then."""
    result = engine.generic(engine.info(func), args, kwargs)
    call = by_name(func, args, kwargs)
    # The gradient of roi_align is read by its strides; the operators of the others are copied.
    names = ["input", "rois", "argmax", "channel_mapping"]
    if short_name(func) != "_roi_align_backward":
        names.append("grad")
    loose = [call[name] for name in names if name in call and not call[name]._spec.contiguous]
    if loose:
        engine.workspace(*map(dense_copy, loose))
    return result


def _pooling_kernels(call: Arguments, result: Any, flops: int) -> list[Kernel]:
    results = result if isinstance(result, tuple) else (result,)
    written = bytes_of(results)
    source = call["input"] if "input" in call else call["grad"]
    samples = max(1, call.get("sampling_ratio", 1)) ** 2 * _CORNERS
    others = [call[name] for name in ("rois", "argmax", "channel_mapping") if name in call]
    fills = [Kernel("fill", dtype_of(each), 0, 0, bytes_of([each])) for each in results]
    if "grad" in call:
        # Each gradient is added, atomically, to the corners of its points.
        touched = min(samples * bytes_of([source]), written)
        moved = (bytes_of([source, *others]) + touched, touched)
    else:
        read = min(samples * bytes_of(results[:1]), bytes_of([source]))
        moved = (read + bytes_of(others), written)
    return [*fills, Kernel("indexing", dtype_of(source), 0, *moved)]


# --- Deformable convolution -------------------------------------------------------------------


def _at_once(batch: int) -> int:
    """get_greatest_divisor_below_bound"""
    return next((n for n in range(min(batch, _IMAGES_AT_ONCE), 1, -1) if batch % n == 0), 1)


class _Geometry:
    """Sizes of a deformable convolution: its matmuls are (rows, depth) times (depth, columns),
    ``turns`` times for each group."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        source, weight, offset = call["input"], call["weight"], call["offset"]
        self.batch, self.channels = source.shape[:2]
        self.images = _at_once(self.batch)
        self.turns = self.batch // self.images
        self.groups = call["groups"]
        self.rows = weight.shape[0] // self.groups
        self.depth = math.prod(weight.shape[1:])
        self.columns = self.images * math.prod(offset.shape[2:])
        self.dtype = source.dtype

    def columns_of(self, engine: Engine) -> SimulatedTensor:
        return engine.empty((self.depth * self.groups, self.columns), self.dtype)

    def multiply(
        self, engine: Engine, into: Any, rows: int, depth: int, columns: int, *operands: Any
    ) -> None:
        """``addmm_`` of every group and turn, on parts of these tensors' storages."""
        shapes = ((rows, columns), (rows, depth), (depth, columns))
        parts = [
            _part(operand, *shape) for operand, shape in zip((into, *operands), shapes, strict=True)
        ]
        for _ in range(self.turns * self.groups):
            engine.run(aten.addmm_.default, tuple(parts), {})


def _part(tensor: SimulatedTensor, rows: int, columns: int) -> SimulatedTensor:
    with no_dispatch():
        meta = tensor._meta.as_strided((rows, columns), (columns, 1), 0)
    return wrap(meta, spec_of(meta), tensor._life)


def _dense(engine: Engine, tensor: SimulatedTensor) -> SimulatedTensor:
    if tensor._spec.contiguous:
        return tensor
    options = {"memory_format": torch.contiguous_format}
    return engine.run(aten.clone.default, (tensor,), options)  # type: ignore[no-any-return]


def _deformed(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """deform_conv2d_forward_kernel"""
    call = by_name(func, args, kwargs)
    held = {name: _dense(engine, call[name]) for name in _TENSORS if name in call}
    geometry = _Geometry(call)
    shape = (geometry.batch, geometry.rows * geometry.groups, *call["offset"].shape[2:])
    engine.record(engine.info(func))
    out = engine.empty(shape, geometry.dtype)
    if not geometry.batch:
        return out
    buffer = engine.empty(shape, geometry.dtype)
    columns = geometry.columns_of(engine)
    geometry.multiply(
        engine, buffer, geometry.rows, geometry.depth, geometry.columns, held["weight"], columns
    )
    bias = engine.run(aten.view.default, (held["bias"], [1, -1, 1, 1]), {})
    result = engine.run(aten.add.Tensor, (out, bias), {})
    del buffer, columns
    return result


def _deformed_backward(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """deform_conv2d_backward_kernel: gradients of the inputs first, then of the weight."""
    call = by_name(func, args, kwargs)
    held = {name: _dense(engine, call[name]) for name in ("grad", *_TENSORS)}
    geometry = _Geometry(call)
    engine.record(engine.info(func))
    grads = {
        name: engine.empty(tuple(call[name].shape), geometry.dtype)
        for name in ("input", "offset", "mask")
    }
    columns = geometry.columns_of(engine)
    geometry.multiply(
        engine,
        columns,
        geometry.depth,
        geometry.rows,
        geometry.columns,
        held["weight"],
        held["grad"],
    )
    del columns
    weight = engine.empty(tuple(call["weight"].shape), geometry.dtype)
    # Of several images at once the gradient is copied into another order.
    together = geometry.images > 1 or geometry.groups > 1
    order = engine.empty(tuple(call["grad"].shape), geometry.dtype) if together else held["grad"]
    columns = geometry.columns_of(engine)
    geometry.multiply(
        engine, weight, geometry.rows, geometry.columns, geometry.depth, order, columns
    )
    del columns, order
    value = engine.run(aten.sum.dim_IntList, (held["grad"], [0, 2, 3]), {})
    ones = engine.run(aten.ones_like.default, (held["bias"],), {})
    bias = engine.run(aten.mul.Tensor, (ones, value), {})
    return grads["input"], weight, grads["offset"], grads["mask"], bias


_TENSORS = ("input", "weight", "offset", "mask", "bias")


def _column_kernels(passes: int) -> Callable[[Arguments, Any, int], list[Kernel]]:
    """The kernels in addition to the matmuls: columns are made from the image, or added to it, once
    a turn."""

    def rule(call: Arguments, result: Any, flops: int) -> list[Kernel]:
        geometry = _Geometry(call)
        if not geometry.batch:
            return []
        size = geometry.dtype.itemsize
        columns = geometry.depth * geometry.groups * geometry.columns * geometry.turns * size
        read = bytes_of([call["input"], call["offset"], call["mask"]])
        dtype = dtype_of(call["input"])
        made = Kernel("resampling", dtype, 0, read, columns, launches=geometry.turns)
        added = Kernel("resampling", dtype, 0, read + columns, read, launches=2 * geometry.turns)
        filled = Kernel("fill", dtype, 0, 0, columns + 2 * bytes_of(tensors_in(result)), launches=3)
        return [filled, made, *([added] if passes > 1 else [])]

    return rule


# --- Boxes that are turned --------------------------------------------------------------------


def _rotated(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    engine.record(engine.info(func))
    return engine.empty((args[0].shape[0], args[1].shape[0]), torch.float32)


_POOLING = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool")
_POOLED = (*_POOLING, *(f"_{name}_backward" for name in _POOLING))
_HANDLERS = {
    "nms": _nms,
    "deform_conv2d": _deformed,
    "_deform_conv2d_backward": _deformed_backward,
    "box_iou_rotated": _rotated,
    **dict.fromkeys(_POOLED, _pooled),
}

launched_by("nms")(_nms_kernels)
launched_by("deform_conv2d")(_column_kernels(1))
launched_by("_deform_conv2d_backward")(_column_kernels(2))
launched_by(*_POOLED)(_pooling_kernels)


# ---
# Makes torchvision usable with a PyTorch that its C++ extension was not built for.
#
# torchvision's import registers fake kernels, gradients and autocast rules for the operators that
# its extension defines. Where the extension cannot load (a CUDA wheel next to a CPU build of
# PyTorch), the import fails with "operator torchvision::nms does not exist", although no kernel of
# the extension is needed on the simulated device. So the schemas are defined here first, and
# loading the extension counts as done: they stay for the life of the process, as torchvision does.
# On CPU tensors they have no kernel, which PyTorch says when they are called.


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


_STANDS_IN: Final = (
    "torchvision's operators, which do not load here, were simulated: a real run in this "
    "environment fails at the import (see trainfit doctor --only torchvision)"
)


def _skipping(load: Callable[[Any], None], package: Path) -> Callable[[Any], None]:
    """``torch.ops.load_library`` to which the extension whose operators are defined is loaded."""

    def load_library(path: Any) -> None:
        if Path(path).parent != package or not Path(path).name.startswith("_C"):
            load(path)
        else:
            with contextlib.suppress(SimulationEndedError):
                current_engine().assume(_STANDS_IN)

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
