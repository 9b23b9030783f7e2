"""Operators whose behavior on the device does not follow from schema and meta kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch.torch_version import TorchVersion

from trainfit.simgpu.dispatch.engine import Engine
from trainfit.simgpu.dispatch.registry import MIXED_DEVICE, handles
from trainfit.simgpu.operators.data_dependent import contents_of, new_result
from trainfit.simgpu.tensors.device import CPU, META
from trainfit.simgpu.tensors.tensor import SimulatedTensor, spec_of, wrap
from trainfit.torch_private import operators as private
from trainfit.torch_private.dispatching import no_dispatch

aten = torch.ops.aten

MIXED_DEVICE |= {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    private.index_put_impl_.default,
    private.pack_padded_sequence.default,
    private.foreach_copy_.default,
    private.fused_adam_.default,
    private.fused_adamw_.default,
}


@handles(torch.ops.prim.device.default)
def device(engine: Engine, func: Any, args: Any, kwargs: Any) -> torch.device:
    """C++ asks for the device: see :mod:`trainfit.simgpu.tensors.tensor` why this is meta."""
    return META


@handles(private.pack_padded_sequence.default)
def pack_padded_sequence(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Lengths are on the host, and so are the batch sizes that result."""
    source, lengths, batch_first = args
    if type(lengths) is SimulatedTensor:
        raise RuntimeError(
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{lengths.dim()}D cuda:0 {_long_name(lengths)} tensor"
        )
    with no_dispatch():
        like = torch.zeros((*source.shape[:2], 1), device=CPU)
        packed, sizes = func(like, lengths, batch_first)
    shape = (packed.shape[0], *source.shape[2:])
    return new_result(engine, func, shape, source.dtype), sizes


def _long_name(tensor: torch.Tensor) -> str:
    return tensor.type().rpartition(".")[2].removesuffix("Tensor")


@handles(private.nested_tensor_from_mask_left_aligned.default)
def left_aligned(engine: Engine, func: Any, args: Any, kwargs: Any) -> bool:
    engine.assume("nested tensors of a padded batch in evaluation were skipped")
    return False


@handles(private.ctc_loss.default, private.ctc_loss.Tensor)
def ctc_loss(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """PyTorch's own kernel; log_alpha has a row for each blank and label."""
    log_probs, targets, _, lengths = args[:4]
    longest = targets.shape[-1]
    if isinstance(lengths, torch.Tensor):
        contents = contents_of(engine, lengths)
        longest = int(contents[0].max()) if contents is not None else longest
    elif lengths:
        longest = max(lengths)
    steps = log_probs.shape[0]
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    loss = new_result(engine, func, (batch,), log_probs.dtype)
    with no_dispatch():
        alpha = torch.empty((batch, steps, 2 * longest + 1), dtype=loss.dtype, device=META)
    return loss, engine.adopt(alpha)


@handles(private.ctc_loss_backward.default, private.ctc_loss_backward.Tensor)
def ctc_loss_backward(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return new_result(engine, func, tuple(args[1].shape), args[1].dtype)


@handles(aten.geqrf.default)
def geqrf(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    *batch, rows, columns = args[0].shape
    factors = new_result(engine, func, (*batch, columns, rows), args[0].dtype).mT
    with no_dispatch():
        tau = torch.empty((*batch, min(rows, columns)), dtype=factors.dtype, device=META)
    return factors, engine.adopt(tau)


@handles(private.sample_dirichlet.default)
def like_first(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return new_result(engine, func, tuple(args[0].shape), args[0].dtype)


@handles(
    aten.multi_margin_loss_backward.default,
    aten.multilabel_margin_loss_backward.default,
    private.dirichlet_grad.default,
)
def like_second(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return new_result(engine, func, tuple(args[1].shape), args[1].dtype)


@handles(private.cudnn_rnn_flatten_weight.default)
def flatten_weights(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """An RNN's weights move into one buffer, of which they become views."""
    weights = args[0]
    buffer = new_result(engine, func, (sum(w.numel() for w in weights),), weights[0].dtype)
    start = 0
    for weight in weights:
        part = buffer[start : start + weight.numel()].view(weight.shape)
        engine.set_data(weight, part)
        start += weight.numel()
    return buffer


# -- views that the schema does not call views ---------------------------------------------


@handles(private.unsafe_view.default)
def unsafe_view(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    engine.record(engine.info(func))
    with no_dispatch():
        meta = source._meta.view(args[1])
    return wrap(meta, spec_of(meta), source._life)


# -- fake kernels that older versions lack -----------------------------------------------


@handles(private.weight_norm_interface_backward.default)
def weight_norm_backward(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Gradients of direction and magnitude (2.8 has no meta kernel for it)."""
    engine.record(engine.info(func))
    with no_dispatch():
        gradients = [torch.empty_like(saved._meta) for saved in args[1:3]]
    return tuple(engine.adopt(gradient) for gradient in gradients)


def product(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """A product that is told its result's dtype (2.8's meta kernel does not take it)."""
    info = engine.info(func)
    engine.record(info)
    left, right, dtype = args[-3:]
    with no_dispatch():
        meta = torch.empty((left.shape[0], right.shape[1]), dtype=dtype, device=META)
    out = engine.adopt(meta)
    if info.kernel is not None:
        engine.accounting.attempt(func, info.kernel, engine, args, out)
    return out


if TorchVersion(torch.__version__) < "2.9":
    for _operator in (aten.mm.dtype, aten.addmm.dtype):
        handles(_operator)(product)
