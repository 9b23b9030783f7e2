"""Workspaces of cuDNN's convolutions and recurrent networks, in addition to their results.

cuDNN tells these sizes at run time and publishes no formula. What is called measured here was
measured on an NVIDIA H200 with cuDNN 9.19 (torch 2.11, bench/gpu/truth); each docstring says how
far off the truth can be. The models are pure functions of integers, every one of which is affine
in the batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

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
    """The same from Hopper on: what of a pass is copied into NHWC, and partial sums.

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
