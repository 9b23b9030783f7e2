"""Operators whose results' shapes depend on data: by what is known of it, else by assumption."""

from __future__ import annotations

import math
from typing import Any

import torch

from trainfit.simgpu.dispatch.engine import Engine
from trainfit.simgpu.dispatch.registry import handles
from trainfit.simgpu.dispatch.values import worth_keeping
from trainfit.simgpu.tensors.device import META
from trainfit.simgpu.tensors.error_messages import indexed_on_host
from trainfit.simgpu.tensors.tensor import SimulatedTensor
from trainfit.torch_private import operators as private
from trainfit.torch_private.dispatching import no_dispatch

aten = torch.ops.aten


def contents_of(engine: Engine, *tensors: Any) -> list[torch.Tensor] | None:
    """What all of them hold; ``None`` where that of one is not known."""
    found = [engine.values.read(tensor) for tensor in tensors]
    return None if any(each is None for each in found) else found  # type: ignore[return-value]


def new_result(engine: Engine, func: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """A new tensor of this shape, as the result of ``func``, which is recorded."""
    engine.record(engine.info(func))
    with no_dispatch():
        meta = torch.empty(shape, dtype=dtype, device=META)
    return engine.adopt(meta)


def _known_result(engine: Engine, func: Any, content: torch.Tensor) -> Any:
    result = new_result(engine, func, tuple(content.shape), content.dtype)
    if worth_keeping(content):
        engine.values.write(result, content)
    return result


@handles(aten.nonzero.default)
def nonzero(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """CUDA's nonzero; without content every element is assumed to be nonzero."""
    engine.wait_for_device()
    contents = contents_of(engine, args[0])
    if contents is not None:
        with no_dispatch():
            return _known_result(engine, func, contents[0].nonzero())
    count = args[0].numel()
    engine.assume(f"nonzero() of unknown data was assumed to select all {count} elements")
    return new_result(engine, func, (count, args[0].dim()), torch.int64)


@handles(aten.masked_select.default)
def masked_select(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, mask = args
    engine.wait_for_device()
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    contents = contents_of(engine, mask)
    if contents is not None:
        with no_dispatch():
            count = int(contents[0].expand(shape).sum())
    else:
        count = math.prod(shape)
        engine.assume(
            f"masked_select() by an unknown mask was assumed to keep all {count} elements"
        )
    result = new_result(engine, func, (count,), tensor.dtype)
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


@handles(aten.index_put_.default, private.index_put_impl_.default)
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
    return index is not None and index.dtype in _MASKS and contents_of(engine, index) is None


def _mask_to_indices(engine: Engine, mask: Any) -> list[Any]:
    contents = contents_of(engine, mask)
    if contents is not None:
        with no_dispatch():
            found = contents[0].nonzero()
        columns = [_known_result(engine, aten.nonzero.default, c) for c in found.unbind(1)]
        return columns
    count = mask.numel()
    engine.assume(f"indexing by an unknown mask was assumed to select all {count} elements")
    return [
        new_result(engine, aten.nonzero.default, (count,), torch.int64) for _ in range(mask.dim())
    ]


@handles(private.unique2.default, aten.unique_dim.default, aten.unique_consecutive.default)
def unique(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Unique values; without content all are assumed to differ."""
    contents = contents_of(engine, args[0])
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
        new_result(engine, func, shape, tensor.dtype),
        new_result(engine, func, inverse, torch.int64),
        new_result(engine, func, (count,), torch.int64),
    )


@handles(aten.repeat_interleave.Tensor)
def repeat_interleave(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    size = kwargs.get("output_size")
    contents = contents_of(engine, args[0])
    if contents is not None:
        with no_dispatch():
            return _known_result(engine, func, func(contents[0], **kwargs))
    if size is None:
        size = args[0].numel()
        engine.assume("repeat_interleave() by unknown counts was assumed to repeat each once")
    return new_result(engine, func, (size,), torch.int64)


@handles(aten.bincount.default)
def bincount(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    contents = contents_of(engine, args[0])
    if contents is not None:
        with no_dispatch():
            real = torch.bincount(contents[0], minlength=kwargs.get("minlength", 0))
        return _known_result(engine, func, real)
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    engine.assume(f"bincount() of unknown data was assumed to have max({least}, 1) bins")
    return new_result(engine, func, (max(least, 1),), torch.int64)
