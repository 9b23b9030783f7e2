"""Workspaces of cuDNN's recurrent networks, in addition to their results.

cuDNN tells these sizes at run time (cudnnGetRNNTempSpaceSizes) and publishes no formula.
The models follow from what the backward pass cannot do without; each docstring says how far
off the truth can be.
"""

from __future__ import annotations

from trainfit.simgpu.workspaces.models import model

#: cudnnRNNMode_t
RELU, TANH, LSTM, GRU = range(4)
#: Gates of a cell, and vectors that a backward step needs in addition: the LSTM's cell state and
#: its tanh; the GRU's recurrent part of the new gate. (The hidden state is the output.)
_GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
_MORE = {RELU: 0, TANH: 0, LSTM: 2, GRU: 1}


def reserve_bytes(
    mode: int, rows: int, hidden: int, layers: int, directions: int, itemsize: int, dropout: bool
) -> int:
    """The reserve space that forward leaves for backward; ``rows`` is the sum of all lengths.

    Gates and states of every step; outputs of all but the last layer, which are inputs of
    the next; with dropout between layers those once more. An estimate: 0.6 to 1.5 times.
    """
    states = layers * directions * (_GATES[mode] + _MORE[mode]) * hidden
    between = (layers - 1) * directions * hidden * (1 + dropout)
    return rows * (states + between) * itemsize


@model
def cudnn_rnn_workspace(
    mode: int, rows: int, hidden: int, directions: int, itemsize: int, weights: int
) -> int:
    """Scratch memory of a pass: one layer's matmuls of input and weights, and the weights.

    The input matmuls of all steps of a layer run at once, both directions together,
    and the weights are transposed for the recurrence. An estimate: 0.3 to 2 times.
    """
    return rows * directions * _GATES[mode] * hidden * itemsize + weights


@model
def cudnn_dropout_state(processors: int) -> int:
    """Random state for every thread of the device (cudnnDropoutGetStatesSize).

    "Slightly over 2 MB" on the 24 multiprocessors of a Titan X, says PyTorch's RNN.cpp:
    2,048 threads on each, 48 bytes a thread (curandStateXORWOW).
    """
    return processors * 2048 * 48
