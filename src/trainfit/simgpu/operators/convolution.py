"""cuDNN's convolutions and batch normalization: workspaces, algorithm trials, memory formats."""

from __future__ import annotations

from typing import Any, Final

import torch

from trainfit.simgpu.allocator import cudnn_convolutions
from trainfit.simgpu.allocator.cudnn_convolutions import Precision, Request
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.geometry import CHANNELS_LAST, convolution_format, dense_copy
from trainfit.simgpu.device.registry import allocates, makes
from trainfit.simgpu.device.tensor import SimulatedTensor
from trainfit.simgpu.operators.reductions import summed
from trainfit.torch_private.operators import suggest_memory_format

aten = torch.ops.aten

_HALVES: Final = (torch.float16, torch.bfloat16)

#: Tensor-core kernels read input channels four at a time; the three of an image are left to
#: kernels that need no other layout.
_VECTOR: Final = 4


@allocates(aten.convolution.default)
def convolution(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """Forward convolution; args as aten::convolution, ``out`` the result."""
    source, weight = args[0], args[1]
    geometry = Geometry(source, weight, out, *args[3:9])
    if not geometry.native_depthwise:
        _run(engine, geometry, "forward", geometry.copies((source, weight)))


@makes(aten.convolution_backward.default)
def convolution_backward(engine: Engine, result: Any, args: tuple[Any, ...]) -> Any:
    """Gradients of a convolution: the data's, the weight's and the bias's, one after another.

    cuDNN's workspace for one is gone before the next is made (cudnn_convolution_backward in
    ATen/native/cudnn/ConvShared.cpp, and convolution_backward in Convolution.cpp).
    """
    made = []
    for place, spec in enumerate(result.items):
        made.append(engine.materialize(spec))
        if spec is not None:
            engine.accounting.attempt(
                aten.convolution_backward.default, _gradient, engine, args, place
            )
    return result.kind(made)


def _gradient(engine: Engine, args: tuple[Any, ...], place: int) -> None:
    """What the computation of the gradient at this place takes."""
    grad, source, weight = args[0], args[1], args[2]
    if place == 2:
        spec = grad._spec
        summed(engine, spec, [dim for dim in range(len(spec.size)) if dim != 1])
        return
    geometry = Geometry(source, weight, grad, *args[4:10])
    if not geometry.native_depthwise:
        way = ("data gradient", "weight gradient")[place]
        _run(engine, geometry, way, geometry.copies((grad, source, weight)))


def native_depthwise(source: Any, weight: Any, *places: Any) -> bool:
    """Does PyTorch's own depthwise kernel run? ``places`` are stride to groups."""
    return Geometry(source, weight, source, *places).native_depthwise


class Geometry:
    """One convolution's operands; ``result`` may stand for the gradient with its shape."""

    def __init__(
        self,
        source: Any,
        weight: Any,
        result: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        transposed: bool,
        output_padding: Any,
        groups: int,
    ) -> None:
        """Keep the geometry of simulated tensors and aten::convolution's arguments from stride to
        groups."""
        self.source, self.weight, self.result = source._spec, weight._spec, result._spec
        self.stride, self.padding, self.dilation = map(tuple, (stride, padding, dilation))
        self.transposed, self.groups = transposed, groups
        self.format = convolution_format(source._meta, weight._meta)

    @property
    def channels_last(self) -> bool:
        return self.format in CHANNELS_LAST

    @property
    def native_depthwise(self) -> bool:
        """Does PyTorch's own depthwise kernel run, which takes no workspace?

        ConvParams::is_depthwise and use_cudnn_depthwise in ATen/native/Convolution.cpp:
        channels-last always goes to cuDNN.
        """
        channels = self.source.size[1]
        return (
            not self.transposed
            and self.groups == channels
            and self.groups > 1
            and self.weight.size[0] % channels == 0
            and not self.channels_last
        )

    @property
    def for_winograd(self) -> bool:
        """May cuDNN compute it by Winograd's algorithm, if it does so in float32?"""
        return (
            tuple(self.weight.size[2:]) == (3, 3)
            and all(each == 1 for each in (*self.stride, *self.dilation, self.groups))
            and not self.channels_last
        )

    @property
    def pointwise(self) -> bool:
        """Is it a matmul over the channels?"""
        return (
            all(each == 1 for each in (*self.weight.size[2:], *self.stride))
            and not any(self.padding)
            and not self.transposed
        )

    @property
    def winograd(self) -> bool:
        return (
            tuple(self.weight.size[2:]) == (3, 3)
            and self.stride == (1, 1)
            and self.dilation == (1, 1)
            and not self.transposed
            and self.groups == 1
        )

    def key(self, way: str) -> tuple[Any, ...]:
        """What PyTorch caches the found algorithm under (CacheKey in Conv_v8.cpp)."""
        return (
            *(way, self.source.size, self.weight.size, self.result.size, self.source.dtype),
            *(self.stride, self.padding, self.dilation, self.transposed, self.groups),
            *(self.format, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic),
        )

    def copies(self, tensors: tuple[Any, ...]) -> list[Request]:
        """Operands that cuDNN's caller makes contiguous in the result's memory format."""
        return [
            dense_copy(tensor, self._format_of(tensor.dim()))
            for tensor in tensors
            if type(tensor) is SimulatedTensor
            and tensor.dim() in (4, 5)
            and not tensor._meta.is_contiguous(memory_format=self._format_of(tensor.dim()))
        ]

    def _format_of(self, dim: int) -> torch.memory_format:
        if not self.channels_last:
            return torch.contiguous_format
        return torch.channels_last if dim == 4 else torch.channels_last_3d


def _run(engine: Engine, geometry: Geometry, way: str, copies: list[Request]) -> None:
    if torch.backends.cudnn.benchmark:
        _try_algorithms(engine, geometry, way)
    engine.workspace(*copies, *_workspace(engine, geometry, way))


def _try_algorithms(engine: Engine, geometry: Geometry, way: str) -> None:
    """``cudnn.benchmark``: at a new shape all algorithms are timed, then the cache is emptied.

    get_plans_from_find in ATen/native/cudnn/Conv_v8.cpp. The workspace of the trials is the
    largest of any algorithm that fits, and gone before the next allocation.
    """
    tried, key = engine.library_memory, geometry.key(way)
    if ("cudnn.benchmark", key) in tried:
        return
    tried.add(("cudnn.benchmark", key))
    layer = (way, geometry.weight.size, geometry.stride, geometry.dilation, geometry.transposed)
    engine.steps_with_trials[layer].add(engine.recorder.step)
    engine.memory.empty_cache()
    engine.assume(
        "torch.backends.cudnn.benchmark times algorithms at each new shape; the temporary "
        "memory of these trials (at most what is free) is not counted"
    )


def _workspace(engine: Engine, geometry: Geometry, way: str) -> list[Request]:
    """Workspace of the algorithm that cuDNN chooses for this pass.

    What was measured, on one H200 with cuDNN 9.19, is taken for Hopper and what came after it.
    Which of it holds before Hopper is not known: for those, what fits their published figures
    (docs/decisions/0004-convolution-workspaces.md).
    """
    if engine.gpu.capability[0] >= 9:
        precision = _precision(geometry.source.dtype)
        if precision is None:
            return []
        return cudnn_convolutions.workspace(geometry, way, precision, engine.gpu.sm_count)
    source, result = geometry.source, geometry.result
    if geometry.pointwise or source.size[1] < _VECTOR:
        return []
    tensors = (source.nbytes, result.nbytes)
    if _uses_tensor_cores(engine, source.dtype):
        copies = _copies(geometry, way)
        return [("cudnn_tensor_core", (copies, *tensors))] if copies else []
    if source.dtype is torch.float32 and geometry.winograd and not geometry.channels_last:
        return [cudnn_convolutions.winograd(geometry)]
    return []


def _precision(dtype: torch.dtype) -> Precision | None:
    if dtype is torch.float32:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "float32"
    halves: dict[torch.dtype, Precision] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
    return halves.get(dtype)


def _copies(geometry: Geometry, way: str) -> int:
    """How many copies of both tensors the pass keeps: in NHWC, and rounded to TF32."""
    summed = way == "weight gradient"
    if geometry.groups > 1:
        return int(summed)
    rounded = int(summed and geometry.source.dtype is torch.float32)
    return rounded if geometry.channels_last else 1 + rounded


def _uses_tensor_cores(engine: Engine, dtype: torch.dtype) -> bool:
    """Are there tensor-core convolutions (which want NHWC) for this precision?"""
    if dtype in _HALVES:
        return engine.gpu.capability[0] >= 7
    ampere = engine.gpu.capability[0] >= 8
    return dtype is torch.float32 and ampere and torch.backends.cudnn.allow_tf32


# ---
# Batch normalization by cuDNN, which requires tensors that are dense in their memory format.


_INDEXED: Final = (1 << 31) - 1
#: Images that cuDNN takes at once, in training and in evaluation.
_MOST_TRAINED, _MOST_EVALUATED = 880801, 65535


def by_cudnn(source: torch.Tensor, weight: torch.Tensor | None, training: bool) -> bool:
    """Is this batch normalization cuDNN's? Otherwise PyTorch's kernels take any strides.

    _select_batch_norm_backend in ATen/native/Normalization.cpp, of layers that have a bias where
    they have a weight.
    """
    if weight is None or not torch.backends.cudnn.enabled or source.dim() < 3:
        return False
    if torch.bfloat16 in (source.dtype, weight.dtype):
        return False
    if source.dtype is torch.float16 and weight.dtype is not torch.float32:
        return False
    most = _MOST_TRAINED if training else _MOST_EVALUATED
    return source.shape[0] <= most and source.numel() < _INDEXED


def in_its_format(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that is dense."""
    return tensor.contiguous(memory_format=suggest_memory_format(tensor))


@allocates(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    """args as aten::native_batch_norm_backward, which a build without cuDNN has in its place."""
    gradient, source, weight, training = args[0], args[1], args[2], args[7]
    if training and by_cudnn(source, weight, training):
        _copied(engine, gradient, source)


@allocates(aten.cudnn_batch_norm_backward.default)
def cudnn_batch_norm_backward(engine: Engine, args: tuple[Any, ...], out: Any) -> None:
    _copied(engine, args[1], args[0])


def _copied(engine: Engine, gradient: Any, source: Any) -> None:
    """The gradient is made dense in the input's format (ATen/native/cudnn/BatchNorm.cpp)."""
    if type(gradient) is not SimulatedTensor:
        return
    wanted = suggest_memory_format(source)
    if not gradient._meta.is_contiguous(memory_format=wanted):
        engine.workspace(dense_copy(gradient, wanted))
