"""What cuDNN 9's convolutions ask for as workspace on Hopper: copies in NHWC, and partial sums.

All of it was measured on one NVIDIA H200 (132 multiprocessors) with cuDNN 9.19 and torch 2.11:
some 1,500 convolutions of the training jobs in bench/gpu/truth. cuDNN chooses among algorithms by
rules that it does not publish; where several were seen for like shapes, the larger is taken.

Sizes: N samples, C input and K output channels, H and W height and width, R and S the kernel's.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

#: What a convolution computes in: halves, or float32 with or without TF32.
Precision = Literal["float16", "bfloat16", "tf32", "float32"]
Request = tuple[str, tuple[int, ...]]

#: Half-precision kernels read so many channels at a time: the three of an image are padded.
_VECTORS = {"float16": 4, "bfloat16": 8}
#: Fewer channels than this are an image's.
_IMAGE = 4
#: Kernels of images with so many places (7x7) are the tensor cores' in every pass.
_LARGE_KERNEL = 49
#: Places of a map that a matmul of it as it lies wants a multiple of.
_ALIGNED = 4
#: Rows of a block of the weight gradient, and columns of one of it as a matrix.
_BLOCK, _COLUMNS = 128, 256
#: Up to so many channels some passes leave an operand as it lies.
_NARROW = 64
#: Maps of at most so many places (14x14) are copied for a 1x1 weight gradient without TF32.
_SMALL_MAP = 196
#: A channels-last depthwise weight gradient: splits in halves; widest one by TF32 kernels.
_DEPTHWISE_SPLITS, _DEPTHWISE_WIDEST = 256, 256


class ConvolutionOperand(Protocol):
    """A tensor's geometry."""

    size: tuple[int, ...]
    dtype: Any
    nbytes: int


class ConvolutionGeometry(Protocol):
    """What is asked of a convolution's geometry."""

    source: ConvolutionOperand
    weight: ConvolutionOperand
    result: ConvolutionOperand
    stride: tuple[int, ...]
    transposed: bool
    groups: int

    @property
    def channels_last(self) -> bool: ...

    @property
    def pointwise(self) -> bool: ...

    @property
    def winograd(self) -> bool: ...


def workspace(
    convolution: ConvolutionGeometry, way: str, precision: Precision, processors: int
) -> list[Request]:
    """Of one pass ("forward", "data gradient", "weight gradient") on so many multiprocessors.

    From 64 channels to more, a strided 1x1 reads its operands as they lie (halves: forward
    only), and TF32 writes forward's result without a copy.
    """
    half, summed = precision in _VECTORS, way == "weight gradient"
    if precision == "float32":
        return _in_float32(convolution, way)
    if convolution.groups > 1:
        return _grouped(convolution, half, processors) if summed else []
    if convolution.source.size[1] < _IMAGE:
        return _image(convolution, precision, summed, processors)
    if convolution.pointwise:
        return _matmul(convolution, half, summed, processors)
    partial = _partial_sums(convolution, processors) if summed else 0
    if convolution.channels_last:
        return _request(0, 0, 0, partial)
    outputs, channels = convolution.weight.size[:2]
    if channels <= _NARROW < outputs and not summed:
        # A transposed convolution's data gradient is a forward pass of its result.
        forward = way == ("data gradient" if convolution.transposed else "forward")
        read = convolution.result if convolution.transposed else convolution.source
        if _places(convolution) == 1 and (forward or not half):
            return []
        if forward and not half:
            return _request(read.nbytes, 0, convolution.weight.nbytes, 0)
    return _copied(convolution, partial)


def winograd(convolution: ConvolutionGeometry) -> Request:
    """Float32 3x3 at stride 1 without tensor cores."""
    samples, outputs, height, width = convolution.result.size
    channels, itemsize = convolution.source.size[1], convolution.source.dtype.itemsize
    return "cudnn_winograd", (samples, channels, outputs, height, width, itemsize)


def _request(
    source: int, result: int, weight: int, partial: int, by_places: int = 0
) -> list[Request]:
    sizes = (source, result, weight, partial, by_places)
    return [("cudnn_nhwc", sizes)] if any(sizes) else []


def _copied(
    convolution: ConvolutionGeometry, partial: int = 0, by_places: int = 0
) -> list[Request]:
    """All operands in NHWC; the weight of a 1x1 kernel is the same there."""
    weight = convolution.weight.nbytes if _places(convolution) > 1 else 0
    copied = convolution.source.nbytes, convolution.result.nbytes
    return _request(*copied, weight, partial, by_places)


def _places(convolution: ConvolutionGeometry) -> int:
    return math.prod(convolution.weight.size[2:])


def _float32_bytes(spec: ConvolutionOperand) -> int:
    return math.prod(spec.size) * 4


def _partial_sums(convolution: ConvolutionGeometry, processors: int) -> int:
    """Samples are split where blocks of the weight gradient would leave multiprocessors idle.

    Each split has a gradient of its own in float32. 13 or 14 of them up to 128 channels, 3 at
    256, none or one at 512 (3x3): a block is 128 x 128 channels at one place of the kernel.
    """
    outputs, inputs = convolution.weight.size[:2]
    blocks = _places(convolution) * -(-outputs // _BLOCK) * -(-inputs // _BLOCK)
    splits = min(processors // blocks, 16)
    return splits * _float32_bytes(convolution.weight) if splits > 1 else 0


def _matmul(
    convolution: ConvolutionGeometry, half: bool, summed: bool, processors: int
) -> list[Request]:
    """1x1 at stride 1 is a matmul over the channels, of the operands as they lie.

    In NCHW that asks for maps of a multiple of four places: 7x7 is copied, 14x14 is not. The
    weight gradient is made for each sample and summed after, unless copies take less.
    """
    gradient = _float32_bytes(convolution.weight)
    if convolution.channels_last:
        if not summed:
            return []
        blocks = -(-math.prod(convolution.weight.size) // (_BLOCK * _COLUMNS))
        blocks *= 4 if half else 1
        splits = processors // blocks
        return _request(0, 0, 0, splits * gradient if splits > 1 else 0)
    if summed:
        copies = convolution.source.nbytes + convolution.result.nbytes
        each = convolution.source.size[0] * gradient
        return _request(0, 0, 0, each) if 10 * each <= 11 * copies else _copied(convolution)
    aligned = math.prod(convolution.source.size[2:]) % _ALIGNED == 0
    return [] if aligned else _copied(convolution)


def _image(
    convolution: ConvolutionGeometry, precision: Precision, summed: bool, processors: int
) -> list[Request]:
    """The first layer of a network, of one to three channels.

    Halves: padded to eight channels (bfloat16) or four (float16), always for the weight gradient;
    the forward pass of small kernels reads NCHW as it is. TF32: without padding, and large
    kernels only.
    """
    samples, _, *source = convolution.source.size
    outputs, _, *kernel = convolution.weight.size
    large = math.prod(kernel) >= _LARGE_KERNEL
    result = convolution.result.nbytes
    if precision in _VECTORS:
        if not (large or summed or convolution.channels_last):
            return []
        vector = _VECTORS[precision]
        place = convolution.source.dtype.itemsize * vector
        weight = outputs * math.prod(kernel) * place
        blocks = -(-outputs // _BLOCK) * -(-math.prod(kernel) * vector // _COLUMNS)
        partial = processors // blocks * 2 * weight if summed else 0
        copied = 0 if convolution.channels_last else result
        return _request(samples * math.prod(source) * place, copied, weight, partial)
    overlapping = any(size > step for size, step in zip(kernel, convolution.stride, strict=True))
    if not large or not (overlapping or summed):
        return []
    if convolution.channels_last and not summed:
        return _request(convolution.source.nbytes, 0, convolution.weight.nbytes, 0)
    places = samples * math.prod(convolution.result.size[2:])
    return _copied(convolution, 0, convolution.weight.nbytes * places if summed else 0)


def _grouped(convolution: ConvolutionGeometry, half: bool, processors: int) -> list[Request]:
    """The weight gradient of groups; depthwise ones that come here are channels-last.

    Measured: depthwise alone. Halves keep 256 partial sums; TF32 pads each channel to four up to
    192 channels and takes nothing from 384 on.
    """
    channels = convolution.source.size[1]
    gradient = _float32_bytes(convolution.weight)
    if convolution.groups != channels:
        return _copied(convolution)
    if half:
        return _request(0, 0, 0, _DEPTHWISE_SPLITS * gradient)
    if channels > _DEPTHWISE_WIDEST:
        return []
    source, result = convolution.source.nbytes, convolution.result.nbytes
    splits = max(processors * 96 // channels, 1)
    return _request(4 * source, 4 * result, 0, 4 * splits * gradient)


def _in_float32(convolution: ConvolutionGeometry, way: str) -> list[Request]:
    """Without TF32: Winograd's algorithm for 3x3 at stride 1, but not in the forward pass."""
    if way == "forward" or convolution.groups > 1 or convolution.channels_last:
        return []
    if convolution.source.size[1] < _IMAGE:
        return []
    if convolution.winograd and len(convolution.stride) == 2:
        return [winograd(convolution)]
    if way == "data gradient":
        return []
    small = math.prod(convolution.source.size[2:]) <= _SMALL_MAP
    return [] if convolution.pointwise and not small else _copied(convolution)
