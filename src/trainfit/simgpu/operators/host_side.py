"""Operators between host and device, and questions of the host that have a healthy answer."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from trainfit.simgpu import constructors
from trainfit.simgpu.device.conditions import ROUNDS, condition, number, slice_end
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.geometry import meta_keywords
from trainfit.simgpu.device.host_fills import is_packing, pin, unwritten
from trainfit.simgpu.device.registry import MIXED_DEVICE, handles
from trainfit.simgpu.device.sparse_tensor import make_sparse
from trainfit.simgpu.device.tensor import CPU, META, SimulatedTensor
from trainfit.simgpu.device.values import MAX_INTEGERS, worth_keeping
from trainfit.simgpu.operators.flops import by_name
from trainfit.torch_private import operators as private
from trainfit.torch_private.operators import NoTorchFunction, as_subclass, no_dispatch

aten = torch.ops.aten

#: What checkpoints and offloaded caches consist of, and bytes from which on such a tensor, or one
#: that is saved for the backward pass, has no values on the host.
_HELD_KINDS: Final = ("parameter", "optimizer_state", "kv_cache")
_LARGE: Final = 1 << 20


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
    if not private.schema(overload).is_mutable
}
MIXED_DEVICE |= _MODELS_ONLY


@handles(*_MODELS_ONLY)
def like(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """A new tensor after the model of another, which may be on the other side."""
    device = kwargs.get("device")
    # C++ says "meta" of the GPU, unless the script has.
    here = device is None or device.type == ("cuda" if engine.explicit_meta else "meta")
    if type(args[0]) is not SimulatedTensor or here or device.type == "cuda":
        return engine.generic(engine.info(func), args, kwargs)
    with no_dispatch():
        return func(args[0]._meta, *args[1:], **kwargs)


@handles(private.to_copy.default)
def to_copy(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    target = kwargs.get("device")
    on_device = type(source) is SimulatedTensor
    if on_device and target is not None and target.type == "cpu":
        return _to_host(engine, source, kwargs)
    if on_device and engine.source_gpu is not None:
        return _from_another(engine, func, args, kwargs)
    if on_device:
        return engine.generic(engine.info(func), args, kwargs)
    if source.layout is torch.sparse_coo:
        given = {name: value for name, value in kwargs.items() if name != "layout"}
        with no_dispatch():
            parts = private.indices.default(source), private.values.default(source)
        indices, values = (
            _to_device(engine, func, part, given | {"dtype": dtype})
            for part, dtype in zip(parts, (torch.int64, given.get("dtype")), strict=True)
        )
        return make_sparse(tuple(source.shape), indices, values, source.is_coalesced())
    return _to_device(engine, func, source, kwargs)


def _from_another(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Copy from one GPU to another."""
    source = args[0]
    engine.record(engine.info(func))
    with no_dispatch():
        meta = func(source._meta, **meta_keywords(kwargs))
    result = engine.adopt(meta)
    content = engine.values.read(source)
    if content is not None and worth_keeping(source._meta):
        engine.values.write(result, content)
    result._life.fill = source._life.fill
    return result


def _to_host(engine: Engine, source: SimulatedTensor, kwargs: Any) -> torch.Tensor:
    if not kwargs.get("non_blocking"):
        engine.wait_for_device("value" if source.numel() == 1 else "copy")
    content = engine.values.read(source)
    dtype = kwargs.get("dtype") or source.dtype
    is_new = content is None
    if content is None:
        engine.assumed_number |= not source.dtype.is_floating_point
        is_held = is_packing() or engine.recorder.is_for(source._life.number, _HELD_KINDS)
        is_large = source._spec.nbytes >= _LARGE
        content = unwritten(source._meta) if is_held and is_large else _plausible(engine, source)
    with no_dispatch():
        copied = content.to(dtype, copy=not is_new)
        if kwargs.get("non_blocking"):
            pin(copied)
        return copied


def _plausible(engine: Engine, source: SimulatedTensor) -> torch.Tensor:
    """CPU data for a tensor without content: what it tells the host, else ones, or zeros for
    integers (valid indices)."""
    meta, fill = source._meta, source._life.fill
    if (tensor := engine.values.told(source)) is not None:
        return tensor
    with no_dispatch():
        host = torch.empty_like(meta, device="cpu")
        if fill is not None:
            return host.fill_(fill)
        return host.fill_(1 if meta.dtype.is_floating_point or meta.dtype.is_complex else 0)


#: Types of attention masks, the elements of the largest that is looked at, and of its beginning.
_OF_MASKS: Final = (torch.bool, torch.int32, torch.int64)
_LARGEST_MASK: Final = 1 << 24
_BEGINNING: Final = 64
#: Numbers of a row of labels: a box has 4, with its class, its picture and its angle 7.
_OF_ROW: Final = 16


def _to_device(engine: Engine, func: Any, source: torch.Tensor, kwargs: Any) -> Any:
    """Host to device: the host casts, then the bytes are copied."""
    source = _without_class(source)
    if source.layout is not torch.strided:
        return engine.adopt(source)  # which says that there is none of this layout
    if not (kwargs.get("non_blocking") and source.is_pinned()):
        engine.on_upload(source)
        engine.wait_for_device("upload")
    with engine.copying_input():
        engine.record(engine.info(func))
        with no_dispatch():
            plain = torch.empty_strided(
                source.shape, source.stride(), dtype=source.dtype, device=META
            )
            meta = func(plain, **meta_keywords(kwargs))
        result = engine.adopt(meta)
    if source.device.type == "cpu":
        if worth_keeping(source) or _are_rows(source) or _is_float_mask(source):
            engine.values.write(result, source)
        else:
            result._life.fill = _one_number(source)
    return result


def _are_rows(source: torch.Tensor) -> bool:
    """Are these rows of a few numbers each, as boxes with the number of their picture are? What a
    loss chooses of them decides how large it is: YOLOv7 matches each picture's boxes by itself."""
    if source.dim() not in (2, 3) or source.numel() > MAX_INTEGERS:
        return False
    return source.is_floating_point() and source.shape[-1] <= _OF_ROW


def _is_float_mask(source: torch.Tensor) -> bool:
    """Is it a square of zeros and ones, or of minus infinities, as masks of attention and of pairs
    of samples are, that the host made? PyTorch's layers ask whether it is causal."""
    if not source.is_floating_point() or source.dim() < 2 or source.numel() > MAX_INTEGERS:
        return False
    if source.shape[-1] != source.shape[-2] or source.shape[-1] < 2:
        return False
    with no_dispatch():
        # Pictures are told apart by their beginning.
        parts = source.reshape(-1)[:_BEGINNING], source
        return all(bool(((part == 0) | (part == 1) | part.isneginf()).all()) for part in parts)


def _one_number(source: torch.Tensor) -> int | None:
    """What each element of a large mask is, if that is one number: nothing of the batch is left
    out by it. Others are told apart by their beginning already."""
    if source.dtype not in _OF_MASKS or source.numel() > _LARGEST_MASK:
        return None
    with no_dispatch():
        first = source.flatten()[:1]
        beginning = source.flatten()[:_BEGINNING]
        is_one = bool((beginning == first).all()) and bool((source == first).all())
        return int(first) if is_one else None


def _without_class(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a class of its own as a plain one: a lazy module's refuses to tell its shape."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    with NoTorchFunction(), no_dispatch():
        return as_subclass(tensor, torch.Tensor)


@handles(aten.copy_.default)
def copy_(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[0], args[1]
    if type(target) is not type(source) and not (len(args) > 2 and args[2]):
        if type(target) is SimulatedTensor:
            engine.on_upload(source)
        engine.wait_for_device("upload" if type(target) is SimulatedTensor else "copy")
    if type(target) is not SimulatedTensor:
        content = engine.values.read(source)
        if content is None and is_packing() and source._spec.nbytes >= _LARGE:
            return target
        if content is None:
            content = _plausible(engine, source)
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


@handles(private.local_scalar_dense.default)
def item(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """``.item()``: the known content, or a plausible healthy value."""
    tensor = args[0]
    engine.wait_for_device()
    content = engine.values.read(tensor)
    if content is not None:
        with no_dispatch():
            return content.item()
    if tensor._life.fill is not None:
        return constructors.tensor(tensor._life.fill, dtype=tensor.dtype, device=CPU).item()
    if tensor.dtype is torch.bool:
        return _truth(engine, False, "a condition on GPU data was assumed to be False")
    if tensor.dtype.is_complex:
        return 1 + 0j
    if not tensor.dtype.is_floating_point:
        if (end := slice_end()) is not None:
            engine.assume("a slice to an integer of GPU data was assumed to be whole")
            if tensor._life.nbytes == tensor.dtype.itemsize >= 4:  # it is that from now on
                engine.values.write(
                    tensor, constructors.full((), end, dtype=tensor.dtype, device=CPU)
                )
            return end
        told = engine.values.told(tensor)
        usual = 1 if told is None else int(told)
        value = _number(engine, usual)
        engine.assume(f"an integer read from GPU data was assumed to be {value}")
        return value
    return _number(engine, 1.0)


_NOTES = {
    "check": "a check of GPU data was assumed to pass",
    "stop": "a stopping condition on GPU data was assumed not to hold yet",
    "guard": "a branch on GPU data that leaves early was assumed not to be taken",
}
_ENDED = f"a loop that GPU data ends was assumed to end after {ROUNDS} rounds"


def _truth(engine: Engine, usual: bool, text: str) -> bool:
    """An unknown truth value: what the statement that asks goes on with, else the usual one."""
    found = condition()
    if found is None:
        engine.assume(text)
        return usual
    if found.endless and engine.rounds.over(found, engine.recorder.step):
        engine.assume(_ENDED)
        return not found.wanted
    engine.assume(_NOTES[found.kind])
    return found.wanted


def _number(engine: Engine, usual: float) -> float:
    """An unknown number: one with which the statement that asks goes on, else the usual one."""
    engine.assumed_number = True
    found = condition(of_number=True)
    if found is None:
        return usual
    ends = found.endless and engine.rounds.over(found, engine.recorder.step)
    value = number(found, usual, found.holds is not ends)
    if ends or value != usual:
        engine.assume(_ENDED if ends else _NOTES[found.kind])
    return value


@handles(aten.split_with_sizes.default)
def split(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Split into parts whose lengths may be of GPU data (images of each text): then into even
    ones."""
    call = by_name(func, args, kwargs)
    length, parts = call["self"].shape[call["dim"]], len(call["split_sizes"])
    if engine.assumed_number and parts and sum(call["split_sizes"]) != length:
        engine.assume("lengths of a tensor's parts, of GPU data, were assumed to be even")
        rest = length - (parts - 1) * (length // parts)
        sizes = [length // parts] * (parts - 1) + [rest]
        args, kwargs = (call["self"], sizes, call["dim"]), {}
    return engine.generic(engine.info(func), args, kwargs)


@handles(aten.equal.default)
def equal(engine: Engine, func: Any, args: Any, kwargs: Any) -> bool:
    contents = [engine.values.read(argument) for argument in args]
    if all(content is not None for content in contents):
        with no_dispatch():
            return torch.equal(*contents)  # type: ignore[arg-type]
    if engine.trusts_data:
        return False  # a check that looks for a bad value
    return _truth(engine, True, "two GPU tensors were assumed to be equal")


@handles(aten.allclose.default)
def allclose(engine: Engine, func: Any, args: Any, kwargs: Any) -> bool:
    close = engine.generic(engine.info(aten.isclose.default), args, kwargs)
    if engine.values.read(close) is not None:
        return bool(engine.run(aten.all.default, (close,), {}).item())
    return _truth(engine, True, "two GPU tensors were assumed to be close")


# -- numbers of a healthy run --------------------------------------------------------------


def _with_fill(engine: Engine, func: Any, args: Any, kwargs: Any, fill: bool) -> Any:
    out = engine.generic(engine.info(func), args, kwargs)
    if engine.values.read(out) is None:
        out._life.fill = fill
    return out


@handles(aten.isnan.default, aten.isinf.default, private.is_any_true.default)
def assumed_false(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    return _with_fill(engine, func, args, kwargs, False)


@handles(private.is_all_true.default)
def assumed_true(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """What a check asks: ``torch.distributions`` of its arguments, Transformers whether there are
    as many features as tokens for them; how many there are may have been assumed."""
    out = _with_fill(engine, func, args, kwargs, True)
    if engine.assumed_size and engine.values.read(out) is not None:
        engine.values.write(out, constructors.ones((), dtype=torch.bool, device=CPU))
    return out


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
        engine.values.write(result, constructors.arange(args[0], dtype=result.dtype, device=CPU))
    return result


@handles(aten.topk.default, aten.sort.default, aten.sort.stable)
def places(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """Places of elements are different ones, which a script may divide by (the periods of TimesNet
    are a length by the places of the strongest frequencies): nobody knows which, so they are taken
    as evenly spread, and of all as their order. What the GPU does with them is of unknown ones."""
    result = engine.generic(engine.info(func), args, kwargs)
    call, chosen = by_name(func, args, kwargs), result[1]
    size, dim = tuple(chosen.shape), call.get("dim", -1)
    if size and engine.values.read(chosen) is None:
        count, of = size[dim], call["self"].shape[dim]
        row = constructors.arange(count, device=CPU)
        if count < of:
            row = (row + 1) * of // (count + 1)
        shape = [1] * len(size)
        shape[dim] = count
        engine.values.tell(chosen, lambda: row.view(shape).expand(size))
    return result


@handles(
    aten.linalg_cholesky_ex.default,
    aten.linalg_inv_ex.default,
    aten.linalg_ldl_factor_ex.default,
    aten.linalg_lu_factor_ex.default,
)
def factored(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """What failed, for each matrix: nothing, as of healthy ones. Host code that asks would add to
    the diagonal, and give up in the end (gpytorch)."""
    result = engine.generic(engine.info(func), args, kwargs)
    failed = result[-1]
    if type(failed) is SimulatedTensor and worth_keeping(failed._meta):
        with no_dispatch():
            engine.values.write(
                failed, constructors.zeros(failed.shape, dtype=failed.dtype, device=CPU)
            )
    return result


@handles(*(getattr(aten.randint, name) for name in aten.randint.overloads() if "out" not in name))
def random_integers(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    """The largest that may come: sizes that are drawn on the GPU need the most memory so. A single
    number is that for whatever is computed of it, too: both ends of ``x[at : at + size]`` are asked
    for, and have to go together."""
    result = engine.generic(engine.info(func), args, kwargs)
    if type(result) is SimulatedTensor:
        # What is kept with a tensor does not hold it: it goes when the script lets it go.
        maximum, dtype = by_name(func, args, kwargs)["high"] - 1, result.dtype
        if result.numel() == 1 and not dtype.is_floating_point:
            engine.values.write(
                result, constructors.full(result.shape, int(maximum), dtype=dtype, device=CPU)
            )
        else:
            engine.values.tell(
                result, lambda: constructors.full((), maximum, dtype=dtype, device=CPU)
            )
    return result


@handles(aten.record_stream.default)
def record_stream(engine: Engine, func: Any, args: Any, kwargs: Any) -> None:
    engine.memory.record_stream(args[0]._life, args[1].stream_id)


@handles(private.pin_memory.default, aten.pin_memory.default)
def pin_memory(engine: Engine, func: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(f"cannot pin '{args[0].type()}' only dense CPU tensors can be pinned")


@handles(aten.is_pinned.default)
def is_pinned(engine: Engine, func: Any, args: Any, kwargs: Any) -> bool:
    return False
