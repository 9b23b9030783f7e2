"""What cuDNN 9's convolutions ask for as workspace on Hopper: copies in NHWC, and partial sums.

All of it was measured on one NVIDIA H200 (132 multiprocessors) with cuDNN 9.19 and torch 2.11:
some 1,500 convolutions of the training jobs in bench/gpu/truth. cuDNN chooses among algorithms by
rules that it does not publish; where several were seen for like shapes, the larger is taken.

Sizes: N samples, C input and K output channels, H and W height and width, R and S the kernel's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

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
    """The workspace of one pass ("forward", "data gradient", "weight gradient") on so many
    multiprocessors.

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
    """The workspace of a pass without TF32: Winograd's algorithm for 3x3 at stride 1, but not in
    the forward pass."""
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


# ---
# Workspaces of cuDNN's convolutions and recurrent networks, in addition to their results.
#
# cuDNN tells these sizes at run time and publishes no formula. What is called measured here was
# measured on an NVIDIA H200 with cuDNN 9.19 (torch 2.11, bench/gpu/truth); each docstring says how
# far off the truth can be. The models are pure functions of integers, every one of which is affine
# in the batch size.


# ---
# Convolutions.


def cudnn_tensor_core(copies: int, input_bytes: int, output_bytes: int) -> int:
    """cuDNN's tensor-core convolution: copies of the tensors of a pass in its workspace.

    One in the NHWC layout that the kernels want (``nchwToNhwcKernel`` and
    ``nhwcToNchwKernel`` in profiles), one more where they are rounded to TF32. Before Hopper:
    docs/decisions/0004-convolution-workspaces.md says where that comes from.
    """
    return copies * (input_bytes + output_bytes)


#: Places of the result for each partial sum of an image's weight gradient in TF32.
_PLACES = 1228


def cudnn_nhwc(
    input_bytes: int,
    output_bytes: int,
    weight_bytes: int,
    partial_bytes: int,
    bytes_by_places: int = 0,
) -> int:
    """Bytes of cuDNN's workspace from Hopper on: what of a pass is copied into NHWC, and partial
    sums.

    Input and output once each, and the weight where its kernel is larger than 1x1; 0 bytes for
    what is not copied. Measured: exact for nine of ten forward passes and data gradients of
    halves; TF32 writes some results without a copy, which is not modelled. The partial sums of
    a weight gradient are within some MB; those of an image are as many as its result has places
    (``bytes_by_places`` is the gradient's size by that number).
    """
    copied = input_bytes + output_bytes + weight_bytes + partial_bytes
    copied += bytes_by_places // _PLACES
    return copied + 16 if copied else 0


def cudnn_winograd(
    samples: int, inputs: int, outputs: int, height: int, width: int, itemsize: int
) -> int:
    """cuDNN's non-fused Winograd convolution, F(4x4, 3x3), for float32 3x3 at stride 1.

    Each 4x4 tile of the result (``height`` x ``width``) becomes 6x6 numbers for every input
    and every output channel, and each 3x3 filter 6x6; all three are held at once
    (Lavin and Gray, arXiv 1509.09308, section 4; CUDNN_CONVOLUTION_*_ALGO_WINOGRAD_NONFUSED).
    Measured: exact for the weight gradient without TF32 at 13 of 13 shapes; the data gradient
    had 0 to 5 times that (other algorithms), the forward pass mostly nothing.
    """
    tiles = -(-height // 4) * -(-width // 4)
    return 36 * itemsize * (samples * tiles * (inputs + outputs) + inputs * outputs)


# ---
# Recurrent networks.


#: cudnnRNNMode_t
RELU, TANH, LSTM, GRU = range(4)
#: Gates of a cell.
_GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
#: Vectors that a backward step needs in addition: measured for LSTM and GRU.
_MORE = {RELU: 0, TANH: 0, LSTM: 1, GRU: 3}


def reserve_bytes(
    mode: int, rows: int, hidden: int, layers: int, directions: int, itemsize: int, dropout: bool
) -> int:
    """The reserve space that forward leaves for backward; ``rows`` is the sum of all lengths.

    Gates and states of every step; outputs of all but the last layer, which are inputs of
    the next; with dropout between layers two bits for each of those. Measured: exact for LSTM and
    GRU of two layers in both directions with dropout; an estimate for others.
    """
    states = layers * directions * (_GATES[mode] + _MORE[mode]) * hidden
    between = (layers - 1) * directions * hidden
    return rows * ((states + between) * itemsize + (between // 4 if dropout else 0)) + 256


def cudnn_rnn_workspace(
    mode: int, rows: int, hidden: int, directions: int, itemsize: int, weights: int
) -> int:
    """Scratch memory of a pass: a layer's gates and states of all steps, and the weights twice.

    Seven halves of a vector in addition to the gates: within 5% of what was measured for LSTM
    (float32 at two batch sizes, float16) and GRU, both of two layers in both directions.
    """
    return rows * directions * (2 * _GATES[mode] + 7) * hidden * itemsize // 2 + 2 * weights


def cudnn_dropout_state(processors: int) -> int:
    """Random state for every thread of the device (cudnnDropoutGetStatesSize).

    Measured: 24 bytes for each of 2,048 threads on a multiprocessor. (PyTorch's RNN.cpp says
    "slightly over 2 MB" on the 24 of a Titan X, twice as much; that was another cuDNN.)
    """
    return processors * 2048 * 24


ALL: Final[tuple[Callable[..., int], ...]] = (
    cudnn_tensor_core,
    cudnn_nhwc,
    cudnn_winograd,
    cudnn_rnn_workspace,
    cudnn_dropout_state,
)
