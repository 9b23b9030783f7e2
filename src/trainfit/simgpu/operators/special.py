"""Operators whose behavior on the device does not follow from schema and meta kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from trainfit.simgpu.dispatch.engine import MIXED_DEVICE, Engine, _plain_kwargs, handles
from trainfit.simgpu.dispatch.error_messages import indexed_on_host
from trainfit.simgpu.dispatch.tensor import CPU, CUDA, META, SimulatedTensor, spec_of, wrap
from trainfit.simgpu.dispatch.values import worth_keeping

aten = torch.ops.aten

MIXED_DEVICE |= {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._pack_padded_sequence.default,
    aten._foreach_copy_.default,
    aten._fused_adam_.default,
    aten._fused_adamw_.default,
}


@handles(torch.ops.prim.device.default)
def device(engine: Engine, func: Any, args: Any, kwargs: Any) -> torch.device:
    """C++ asks for the device: see :mod:`trainfit.simgpu.dispatch.tensor` why this is meta."""
    return META


# -- between host and device ---------------------------------------------------------------


_MODELS_ONLY = {
    overload
    for packet in (
        aten.empty_like,
        aten.full_like,
        aten.new_empty,
        aten.new_empty_strided,
        aten.new_full,
        aten.new_ones,
        aten.new_zeros,
        aten.ones_like,
        aten.rand_like,
        aten.randint_like,
        aten.randn_like,
        aten.zeros_like,
    )
    for overload in (getattr(packet, name) for name in packet.overloads())
    if not overload._schema.is_mutable
}
MIXED_DEVICE |= _MODELS_ONLY


@handles(*_MODELS_ONLY)
def like(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """A new tensor after the model of another, which may be on the other side."""
    device = kwargs.get("device")
    if type(args[0]) is not SimulatedTensor or device is None or device.type == "meta":
        return engine.generic(engine.info(func), args, kwargs)
    if device.type == "cuda":
        return engine.generic(engine.info(func), args, kwargs)
    with no_dispatch():
        return func(args[0]._meta, *args[1:], **kwargs)


@handles(aten._to_copy.default)
def to_copy(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    target = kwargs.get("device")
    on_device = type(source) is SimulatedTensor
    if on_device and target is not None and target.type == "cpu":
        return _to_host(engine, source, kwargs)
    if on_device:
        return engine.generic(engine.info(func), args, kwargs)
    return _to_device(engine, func, source, kwargs)


def _to_host(engine: Engine, source: SimulatedTensor, kwargs: Any) -> torch.Tensor:
    if not kwargs.get("non_blocking"):
        engine.wait_for_device()
    content = engine.values.read(source)
    dtype = kwargs.get("dtype") or source.dtype
    is_new = content is None
    if content is None:
        content = _plausible(source._meta, source._life.fill)
    with no_dispatch():
        return content.to(dtype, copy=not is_new)


def _plausible(meta: torch.Tensor, fill: bool | None) -> torch.Tensor:
    """CPU data for a tensor without content: ones, or zeros for integers (valid indices)."""
    with no_dispatch():
        host = torch.empty_like(meta, device="cpu")
        if fill is not None:
            return host.fill_(fill)
        return host.fill_(1 if meta.dtype.is_floating_point or meta.dtype.is_complex else 0)


def _to_device(engine: Engine, func: Any, source: torch.Tensor, kwargs: Any) -> Any:
    """Host to device: the host casts, then the bytes are copied."""
    if not (kwargs.get("non_blocking") and source.is_pinned()):
        engine.wait_for_device()
    with engine.copying_input():
        engine.record(engine.info(func))
        with no_dispatch():
            plain = torch.empty_strided(
                source.shape, source.stride(), dtype=source.dtype, device=META
            )
            meta = func(plain, **_plain_kwargs(kwargs))
        result = engine.adopt(meta)
    if source.device.type == "cpu" and worth_keeping(source):
        engine.values.write(result, source)
    return result


@handles(aten.copy_.default)
def copy_(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[0], args[1]
    if type(target) is not type(source) and not (len(args) > 2 and args[2]):
        engine.wait_for_device()
    if type(target) is not SimulatedTensor:
        content = engine.values.read(source)
        if content is None:
            content = _plausible(source._meta, source._life.fill)
        with no_dispatch():
            target.copy_(content)
        return target
    if type(source) is SimulatedTensor:
        return engine.generic(engine.info(func), args, kwargs)
    with engine.copying_input():
        engine.record(engine.info(func))
    known = target._life.value is not None or target._life.nbytes == target._spec.nbytes
    if known and source.device.type == "cpu" and worth_keeping(target._meta):
        with no_dispatch():
            content = source.to(target.dtype).expand(target.shape)
        if target._life.value is None:
            engine.values.write(target, content)
        else:
            with no_dispatch():
                engine.values.read(target).copy_(content)  # type: ignore[union-attr]
    else:
        engine.values.forget(target._life)
    return target


@handles(aten._local_scalar_dense.default)
def item(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """``.item()``: the known content, or a plausible healthy value."""
    tensor = args[0]
    engine.wait_for_device()
    content = engine.values.read(tensor)
    if content is not None:
        with no_dispatch():
            return content.item()
    if tensor._life.fill is not None:
        return torch.tensor(tensor._life.fill, dtype=tensor.dtype, device=CPU).item()
    if tensor.dtype is torch.bool:
        engine.assume("a condition on GPU data was assumed to be False")
        return False
    if tensor.dtype.is_floating_point:
        return 1.0
    if tensor.dtype.is_complex:
        return 1 + 0j
    engine.assume("an integer read from GPU data was assumed to be 1")
    return 1


@handles(aten.equal.default)
def equal(engine: Engine, func: Any, args: Any, kwargs: Any) -> bool:
    contents = [engine.values.read(each) for each in args]
    if all(content is not None for content in contents):
        with no_dispatch():
            return torch.equal(*contents)  # type: ignore[arg-type]
    if engine.trusts_data:
        return False  # a check that looks for a bad value
    engine.assume("two GPU tensors were assumed to be equal")
    return True


@handles(aten.allclose.default)
def allclose(engine: Engine, func: Any, args: Any, kwargs: Any) -> bool:
    close = engine.generic(engine.info(aten.isclose.default), args, kwargs)
    if engine.values.read(close) is not None:
        return bool(engine.run(aten.all.default, (close,), {}).item())
    engine.assume("two GPU tensors were assumed to be close")
    return True


# -- numbers of a healthy run --------------------------------------------------------------


def _with_fill(engine: Engine, func: Any, args: Any, kwargs: Any, fill: bool) -> Any:
    out = engine.generic(engine.info(func), args, kwargs)
    if engine.values.read(out) is None:
        out._life.fill = fill
    return out


@handles(aten.isnan.default, aten.isinf.default, aten._is_any_true.default)
def assumed_false(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return _with_fill(engine, func, args, kwargs, False)


@handles(aten._is_all_true.default)
def assumed_true(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """What ``torch.distributions`` asks of its arguments."""
    return _with_fill(engine, func, args, kwargs, True)


@handles(aten.eq.Tensor, aten.ne.Tensor)
def compare(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor equals itself where it has no NaN; ``isfinite`` asks that."""
    if args[0] is args[1]:
        return _with_fill(engine, func, args, kwargs, func is aten.eq.Tensor)
    return engine.generic(engine.info(func), args, kwargs)


@handles(aten.eq.Scalar, aten.ne.Scalar)
def compare_scalar(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[1], float) and math.isinf(args[1]):
        return _with_fill(engine, func, args, kwargs, func is aten.ne.Scalar)
    return engine.generic(engine.info(func), args, kwargs)


@handles(aten.randperm.default, aten.randperm.generator)
def randperm(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Some permutation: an order is as good as another."""
    result = engine.generic(engine.info(func), args, kwargs)
    if worth_keeping(result._meta):
        engine.values.write(result, torch.arange(args[0], dtype=result.dtype, device=CPU))
    return result


@handles(aten.record_stream.default)
def record_stream(engine: Engine, func: Any, args: Any, kwargs: Any) -> None:
    engine.memory.record_stream(args[0]._life, args[1].stream_id)


@handles(aten._pin_memory.default, aten.pin_memory.default)
def pin_memory(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(f"cannot pin '{args[0].type()}' only dense CPU tensors can be pinned")


@handles(aten.is_pinned.default)
def is_pinned(engine: Engine, func: Any, args: Any, kwargs: Any) -> bool:
    return False


# -- shapes that depend on data ------------------------------------------------------------


def _contents(engine: Engine, *tensors: Any) -> list[torch.Tensor] | None:
    found = [engine.values.read(tensor) for tensor in tensors]
    return None if any(each is None for each in found) else found  # type: ignore[return-value]


def _result(engine: Engine, func: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    engine.record(engine.info(func))
    with no_dispatch():
        meta = torch.empty(shape, dtype=dtype, device=META)
    return engine.adopt(meta)


def _known_result(engine: Engine, func: Any, content: torch.Tensor) -> Any:
    result = _result(engine, func, tuple(content.shape), content.dtype)
    if worth_keeping(content):
        engine.values.write(result, content)
    return result


@handles(aten.nonzero.default)
def nonzero(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """CUDA's nonzero; without content every element is assumed to be nonzero."""
    engine.wait_for_device()
    contents = _contents(engine, args[0])
    if contents is not None:
        with no_dispatch():
            return _known_result(engine, func, contents[0].nonzero())
    count = args[0].numel()
    engine.assume(f"nonzero() of unknown data was assumed to select all {count} elements")
    return _result(engine, func, (count, args[0].dim()), torch.int64)


@handles(aten.masked_select.default)
def masked_select(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, mask = args
    engine.wait_for_device()
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    contents = _contents(engine, mask)
    if contents is not None:
        with no_dispatch():
            count = int(contents[0].expand(shape).sum())
    else:
        count = math.prod(shape)
        engine.assume(
            f"masked_select() by an unknown mask was assumed to keep all {count} elements"
        )
    result = _result(engine, func, (count,), tensor.dtype)
    engine.workspace(("index_tensors", (count * len(shape),)))
    return result


@handles(aten.index.Tensor)
def index(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Indexing; boolean masks become the index tensors that CUDA's kernel makes of them."""
    tensor, indices = args
    info = engine.info(func)
    if type(tensor) is not SimulatedTensor:
        raise indexed_on_host(indices)
    if not any(each is not None and each.dtype in _MASKS for each in indices):
        return engine.generic(info, args, kwargs)
    expanded: list[Any] = []
    for each in indices:
        if each is None or each.dtype not in _MASKS:
            expanded.append(each)
        else:
            expanded.extend(_mask_to_indices(engine, each))
    return engine.generic(info, (tensor, expanded), kwargs)


@handles(aten.index_put_.default, aten._index_put_impl_.default)
def index_put(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Writing by index; what is known of the target outlives a mask that nothing is known of,
    as a condition on such data is taken as False."""
    target, indices = args[0], args[1]
    known = target._life.value if type(target) is SimulatedTensor else None
    result = engine.generic(engine.info(func), args, kwargs)
    if known is not None and any(_is_unknown_mask(engine, each) for each in indices):
        target._life.value = known
        engine.assume("writing by an unknown mask was assumed to change nothing")
    return result


_MASKS = (torch.bool, torch.uint8)


def _is_unknown_mask(engine: Engine, index: Any) -> bool:
    return index is not None and index.dtype in _MASKS and _contents(engine, index) is None


def _mask_to_indices(engine: Engine, mask: Any) -> list[Any]:
    contents = _contents(engine, mask)
    if contents is not None:
        with no_dispatch():
            found = contents[0].nonzero()
        columns = [_known_result(engine, aten.nonzero.default, c) for c in found.unbind(1)]
        return columns
    count = mask.numel()
    engine.assume(f"indexing by an unknown mask was assumed to select all {count} elements")
    return [_result(engine, aten.nonzero.default, (count,), torch.int64) for _ in range(mask.dim())]


@handles(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default)
def unique(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Unique values; without content all are assumed to differ."""
    contents = _contents(engine, args[0])
    if contents is not None:
        with no_dispatch():
            real = func(contents[0], *args[1:], **kwargs)
        return tuple(_known_result(engine, func, each) for each in real)
    tensor = args[0]
    along = args[1] if func is aten.unique_dim.default else None
    count = tensor.numel() if along is None else tensor.shape[along]
    inverts = any(flag is True for flag in args[1:])
    engine.workspace(("unique", (tensor.numel(), tensor.dtype.itemsize, int(inverts))))
    engine.assume(f"unique() of unknown data was assumed to keep all {count} values")
    shape = (count,) if along is None else tuple(tensor.shape)
    inverse = tuple(tensor.shape) if along is None else (count,)
    return (
        _result(engine, func, shape, tensor.dtype),
        _result(engine, func, inverse, torch.int64),
        _result(engine, func, (count,), torch.int64),
    )


@handles(aten.repeat_interleave.Tensor)
def repeat_interleave(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    size = kwargs.get("output_size")
    contents = _contents(engine, args[0])
    if contents is not None:
        with no_dispatch():
            return _known_result(engine, func, func(contents[0], **kwargs))
    if size is None:
        size = args[0].numel()
        engine.assume("repeat_interleave() by unknown counts was assumed to repeat each once")
    return _result(engine, func, (size,), torch.int64)


@handles(aten.bincount.default)
def bincount(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    contents = _contents(engine, args[0])
    if contents is not None:
        with no_dispatch():
            real = torch.bincount(contents[0], minlength=kwargs.get("minlength", 0))
        return _known_result(engine, func, real)
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    engine.assume(f"bincount() of unknown data was assumed to have max({least}, 1) bins")
    return _result(engine, func, (max(least, 1),), torch.int64)


@handles(aten._pack_padded_sequence.default)
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
    return _result(engine, func, shape, source.dtype), sizes


def _long_name(tensor: torch.Tensor) -> str:
    return tensor.type().rpartition(".")[2].removesuffix("Tensor")


@handles(aten._nested_tensor_from_mask_left_aligned.default)
def left_aligned(engine: Engine, func: Any, args: Any, kwargs: Any) -> bool:
    engine.assume("nested tensors of a padded batch in evaluation were skipped")
    return False


@handles(aten._ctc_loss.default, aten._ctc_loss.Tensor)
def ctc_loss(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """PyTorch's own kernel; log_alpha has a row for each blank and label."""
    log_probs, targets, _, lengths = args[:4]
    longest = targets.shape[-1]
    if isinstance(lengths, torch.Tensor):
        contents = _contents(engine, lengths)
        longest = int(contents[0].max()) if contents is not None else longest
    elif lengths:
        longest = max(lengths)
    steps = log_probs.shape[0]
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    loss = _result(engine, func, (batch,), log_probs.dtype)
    with no_dispatch():
        alpha = torch.empty((batch, steps, 2 * longest + 1), dtype=loss.dtype, device=META)
    return loss, engine.adopt(alpha)


@handles(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
def ctc_loss_backward(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return _result(engine, func, tuple(args[1].shape), args[1].dtype)


@handles(aten.geqrf.default)
def geqrf(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    *batch, rows, columns = args[0].shape
    factors = _result(engine, func, (*batch, columns, rows), args[0].dtype).mT
    with no_dispatch():
        tau = torch.empty((*batch, min(rows, columns)), dtype=factors.dtype, device=META)
    return factors, engine.adopt(tau)


@handles(aten._sample_dirichlet.default)
def like_first(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return _result(engine, func, tuple(args[0].shape), args[0].dtype)


@handles(
    aten.multi_margin_loss_backward.default,
    aten.multilabel_margin_loss_backward.default,
    aten._dirichlet_grad.default,
)
def like_second(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return _result(engine, func, tuple(args[1].shape), args[1].dtype)


@handles(aten._cudnn_rnn_flatten_weight.default)
def flatten_weights(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """An RNN's weights move into one buffer, of which they become views."""
    weights = args[0]
    buffer = _result(engine, func, (sum(w.numel() for w in weights),), weights[0].dtype)
    start = 0
    for weight in weights:
        part = buffer[start : start + weight.numel()].view(weight.shape)
        engine.set_data(weight, part)
        start += weight.numel()
    return buffer


# -- views that the schema does not call views ---------------------------------------------


@handles(aten._unsafe_view.default)
def unsafe_view(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    engine.record(engine.info(func))
    with no_dispatch():
        meta = source._meta.view(args[1])
    return wrap(meta, spec_of(meta), source._life)


# -- fake kernels that older versions lack -----------------------------------------------


@handles(aten._weight_norm_interface_backward.default)
def weight_norm_backward(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Gradients of direction and magnitude (2.8 has no meta kernel for it)."""
    engine.record(engine.info(func))
    with no_dispatch():
        gradients = [torch.empty_like(saved._meta) for saved in args[1:3]]
    return tuple(engine.adopt(gradient) for gradient in gradients)


__all__ = ["CUDA"]
