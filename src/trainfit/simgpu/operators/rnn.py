"""Recurrent networks as cuDNN runs them.

Source: ATen/native/cudnn/RNN.cpp (which tensors a call makes, and when), AutocastRNN.cpp and
ATen/native/RNN.cpp (when cuDNN is taken); the sizes that only cuDNN knows are in
:mod:`trainfit.simgpu.allocator.cudnn_convolutions`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion

from trainfit.simgpu import constructors
from trainfit.simgpu.allocator.cudnn_convolutions import GRU, LSTM, RELU, TANH, reserve_bytes
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.registry import handles
from trainfit.simgpu.device.tensor import (
    META,
    DeviceTensor,
    SimulatedTensor,
    current_engine,
    spec_of,
    wrap,
)
from trainfit.torch_private import operators as private
from trainfit.torch_private.operators import AUTOCAST_CUDA, COMPOSITE, WithoutKeys, no_dispatch

aten = torch.ops.aten

_FLOATS = (torch.float64, torch.float32, torch.float16)
#: Since this version cudnn_is_acceptable does not ask for the dtype.
_ANY_DTYPE = (2, 9)
_NOT_FLAT = (
    "RNN module weights are not part of single contiguous chunk of memory. This means they "
    "need to be compacted at every call, possibly greatly increasing memory usage. To compact "
    "weights again call flatten_parameters()."
)


# -- which path --------------------------------------------------------------------------


def _acceptable(tensor: torch.Tensor) -> bool:
    """cudnn_is_acceptable"""
    any_dtype = TorchVersion(torch.__version__) >= _ANY_DTYPE  # type: ignore[operator]
    return (
        isinstance(tensor, DeviceTensor)
        and torch.backends.cudnn.enabled
        and (tensor.dtype in _FLOATS or bool(any_dtype))
        and tensor.numel() > 0
    )


def composites() -> list[tuple[Any, Callable[..., Any]]]:
    """``torch.lstm`` and its like, for operands that cuDNN accepts."""
    found: list[tuple[Any, Callable[..., Any]]] = []
    for name, mode in (("lstm", LSTM), ("gru", GRU), ("rnn_tanh", TANH), ("rnn_relu", RELU)):
        packet = getattr(aten, name)
        found.append((packet.input, _padded(packet.input, mode)))
        found.append((packet.data, _packed(packet.data, mode)))
    return found


def _padded(op: Any, mode: int) -> Callable[..., Any]:
    def kernel(
        source: torch.Tensor, hx: Any, params: Any, biases: bool, layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        if not _acceptable(source):
            _check_devices(source, hx if mode == LSTM else (hx,), params)
            return private.call_for(op)(
                COMPOSITE, source, hx, params, biases, layers, dropout, train, bidirectional,
                batch_first,
            )  # fmt: skip
        options: Any = (layers, batch_first, dropout, train, bidirectional, [])
        return _cudnn(source, hx, params, biases, mode, options)

    return kernel


def _packed(op: Any, mode: int) -> Callable[..., Any]:
    def kernel(
        data: torch.Tensor, batch_sizes: torch.Tensor, hx: Any, params: Any, biases: bool,
        layers: int, dropout: float, train: bool, bidirectional: bool,
    ) -> Any:  # fmt: skip
        if not _acceptable(data):
            _check_devices(data, hx if mode == LSTM else (hx,), params)
            return private.call_for(op)(
                COMPOSITE, data, batch_sizes, hx, params, biases, layers, dropout, train,
                bidirectional,
            )  # fmt: skip
        options = (layers, False, dropout, train, bidirectional, batch_sizes.tolist())
        return _cudnn(data, hx, params, biases, mode, options)

    return kernel


def _cudnn(
    source: torch.Tensor, hx: Any, params: Any, biases: bool, mode: int, options: Any
) -> Any:
    """``_cudnn_impl``"""
    layers, batch_first, dropout, train, bidirectional, batch_sizes = options
    _check_devices(source, hx if mode == LSTM else (hx,), params)
    hidden, cell = hx if mode == LSTM else (hx, None)
    hidden_size, projection = hidden.shape[2], 0
    if cell is not None and cell.shape[2] != hidden_size:
        hidden_size, projection = cell.shape[2], hidden_size
    stride = (4 if biases else 2) + (projection != 0)
    state = current_engine()
    if train and dropout > 0:
        state.library_workspace("cudnn_dropout_state", (state.gpu.sm_count,))
    out = private.cudnn_rnn(
        source, params, stride, _flat_buffer(params, mode), hidden, cell, mode, hidden_size,
        projection, layers, batch_first, dropout, train, bidirectional, batch_sizes, None,
    )  # fmt: skip
    return out[:3] if mode == LSTM else out[:2]


def _check_devices(source: torch.Tensor, states: Any, params: Any) -> None:
    """check_attributes of RNN.cpp"""
    for name, tensors in (("hidden", states), ("parameter", params)):
        for tensor in tensors:
            if tensor.device != source.device:
                raise RuntimeError(
                    f"Input and {name} tensors are not at the same device, found input tensor at "
                    f"{source.device} and {name} tensor at {tensor.device}"
                )


def _flat_buffer(params: Any, mode: int) -> torch.Tensor | None:
    """``try_get_weight_buf``: the one storage that holds all weights in order, or ``None``."""
    first = params[0]
    if type(first) is not SimulatedTensor:
        return None
    offset = first._spec.offset
    for parameter in params:
        spec = parameter._spec
        if parameter._life is not first._life or spec.offset != offset or spec.dtype != first.dtype:
            return None
        offset += spec.numel
    with no_dispatch():
        flat = constructors.empty(0, dtype=first.dtype, device=META)
        flat.set_(first._meta.untyped_storage(), first._spec.offset, (offset,), (1,))
    return wrap(flat, spec_of(flat), first._life)


# -- autocast ------------------------------------------------------------------------------


def autocast_kernel(cast: Callable[[Any, torch.dtype], Any]) -> Callable[..., Any]:
    """``_cudnn_rnn_cast_reflatten``: every call copies the weights into a buffer of halves.

    Always float16, whatever autocast's dtype is, and past autocast's weight cache.
    """

    def kernel(
        source: Any, weights: Any, stride: int, flat: Any, hx: Any, cx: Any, *rest: Any
    ) -> Any:
        with WithoutKeys(AUTOCAST_CUDA):
            if weights[0].dtype is torch.float32:
                flat, weights = _halves(weights)
            half = torch.float16
            return private.cudnn_rnn(
                cast(source, half), weights, stride, flat, cast(hx, half), cast(cx, half), *rest
            )

    return kernel


def _halves(weights: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One float16 buffer, and its parts as tensors of their own that autograd copied into."""
    total = sum(weight.numel() for weight in weights)
    flat: Any = constructors.zeros(total, dtype=torch.float16, device=weights[0].device)
    parts, at = [], 0
    for weight in weights:
        with no_dispatch():
            meta = constructors.empty(0, dtype=torch.float16, device=META)
            meta.set_(flat._meta.untyped_storage(), at, weight.shape, _strides(weight.shape))
        part: Any = wrap(meta, spec_of(meta), flat._life)
        parts.append(part.copy_(weight))
        at += weight.numel()
    return flat, parts


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


# -- the operators ---------------------------------------------------------------------------


class _RnnSizes:
    """One call's sizes; ``rows`` is the number of steps of all sequences together."""

    def __init__(self, source: Any, batch_first: bool, batch_sizes: Any) -> None:
        spec = source._spec
        self.packed = len(batch_sizes) > 0
        self.transposed = batch_first and not self.packed
        if self.packed:
            self.rows, self.batch = spec.size[0], batch_sizes[0]
        else:
            self.rows = spec.size[0] * spec.size[1]
            self.batch = spec.size[0 if batch_first else 1]

    def outputs(self, width: int) -> tuple[int, ...]:
        return (self.rows, width) if self.packed else (self.rows // self.batch, self.batch, width)


def _swapped(tensor: Any) -> Any:
    with no_dispatch():
        meta = tensor._meta.transpose(0, 1)
    return wrap(meta, spec_of(meta), tensor._life)


@handles(private.cudnn_rnn.default)
def cudnn_rnn(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    source, weights, _, flat, hx, cx, mode, hidden, projection, layers = args[:10]
    batch_first, dropout, train, bidirectional, batch_sizes = args[10:15]
    engine.record(engine.info(func))
    engine.assume("the sizes of cuDNN's buffers for a recurrent network were estimated")
    call = _RnnSizes(source, batch_first, batch_sizes)
    directions = 1 + bidirectional
    dtype, itemsize = source.dtype, source.dtype.itemsize
    copied = not _contiguous_steps(source, call)
    if flat is None:
        warnings.warn(_NOT_FLAT, UserWarning, stacklevel=2)
        flat = engine.empty((sum(weight.numel() for weight in weights),), dtype)
    else:
        flat = wrap(flat._meta, flat._spec, flat._life)
    reserve = 0
    if train:
        between = dropout > 0 and layers > 1
        reserve = reserve_bytes(mode, call.rows, hidden, layers, directions, itemsize, between)
    shape = (layers * directions, call.batch)
    with engine.holding(("contiguous_copy", (copied * source._spec.nbytes,))):
        out = engine.empty(call.outputs((projection or hidden) * directions), dtype)
        hy = engine.empty((*shape, projection or hidden), hx.dtype)
        cy = engine.empty((*shape, hidden) if cx is not None else (0,), hx.dtype)
        with engine.holding(_workspace(call, mode, hidden, directions, flat)):
            saved = engine.empty((reserve,), torch.uint8)
    return (_swapped(out) if call.transposed else out), hy, cy, saved, flat


def _contiguous_steps(source: Any, call: _RnnSizes) -> bool:
    with no_dispatch():
        steps = source._meta.transpose(0, 1) if call.transposed else source._meta
        return bool(steps.is_contiguous())


def _workspace(
    call: _RnnSizes, mode: int, hidden: int, directions: int, flat: Any
) -> tuple[str, tuple[int, ...]]:
    weights, itemsize = flat._spec.nbytes, flat.dtype.itemsize
    return "cudnn_rnn_workspace", (mode, call.rows, hidden, directions, itemsize, weights)


@handles(private.cudnn_rnn_backward.default)
def cudnn_rnn_backward(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    source, weights, _, flat, hx, cx = args[:6]
    grads, mode, hidden = args[7:10], args[10], args[11]
    batch_first, bidirectional, batch_sizes, argument = args[14], args[17], args[18], args[21]
    engine.record(engine.info(func))
    if all(grad is None for grad in grads):
        return None, None, None, [None] * len(weights)
    if not args[16]:  # _cudnn_rnn_backward_input
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    call = _RnnSizes(source, batch_first, batch_sizes)
    # Gradients that were not given are zeros; others are made contiguous for the call.
    given = zip(grads, (args[6], hx, cx), strict=True)
    filled = [like._spec.nbytes for grad, like in given if grad is None and like is not None]
    copies = [] if _contiguous_steps(source, call) else [source._spec.nbytes]
    if grads[0] is not None and not _contiguous_steps(grads[0], call):
        copies.append(grads[0]._spec.nbytes)
    workspace = _workspace(call, mode, hidden, 1 + bidirectional, flat)
    with engine.holding(*(("contiguous_copy", (nbytes,)) for nbytes in (*filled, *copies))):
        dx = engine.empty(_step_major(source, call), source.dtype)
        dhx = engine.empty(tuple(hx.shape), hx.dtype)
        dcx = engine.empty(tuple(cx.shape), cx.dtype) if cx is not None else None
        engine.workspace(workspace)
    dw: list[Any] = []
    if argument[3]:
        with engine.holding(*(("contiguous_copy", (nbytes,)) for nbytes in copies[:1])):
            dw = _weight_gradients(engine, weights, flat)
            engine.workspace(workspace)
    return (_swapped(dx) if call.transposed else dx), dhx, dcx, dw


def _step_major(source: Any, call: _RnnSizes) -> tuple[int, ...]:
    shape = tuple(source.shape)
    return (shape[1], shape[0], *shape[2:]) if call.transposed else shape


def _weight_gradients(engine: Engine, weights: Any, flat: Any) -> list[Any]:
    """One buffer like the weights', of which the gradients are parts."""
    buffer = engine.empty(tuple(flat.shape), flat.dtype)
    gradients, at = [], 0
    for weight in weights:
        with no_dispatch():
            meta = constructors.empty(0, dtype=flat.dtype, device=META)
            meta.set_(buffer._meta.untyped_storage(), at, weight.shape, _strides(weight.shape))
        gradients.append(wrap(meta, spec_of(meta), buffer._life))
        at += math.prod(weight.shape)
    return gradients
