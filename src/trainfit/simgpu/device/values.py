"""Real values of simulated tensors, where they are known.

Control flow depends on small integer tensors (attention masks, lengths, labels) and on a
few scalars (the gradient scaler's), so their content follows them through the operators.
Everything else has no content. A value belongs to a storage, so views share it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, Final

import torch

from trainfit.simgpu import constructors
from trainfit.simgpu.device.device_memory import StorageRecord
from trainfit.simgpu.device.registry import OperatorInfo
from trainfit.simgpu.device.tensor import CPU, SimulatedTensor
from trainfit.torch_private import operators as private
from trainfit.torch_private.operators import no_dispatch, schema

#: Storages up to this many elements keep integer or boolean content …
MAX_INTEGERS = 1 << 18
#: … and floating-point content up to this many, unless it is made of constants, as a mask is.
MAX_FLOATS = 64

#: Indices that say of each element whether it is chosen.
MASKS = (torch.bool, torch.uint8)

aten = torch.ops.aten

# Leave the values of what they write as they are: a healthy run has finite gradients.
_HARMLESS = {
    private.amp_foreach_non_finite_check_and_unscale_.default,
    private.amp_update_scale_.default,
}
_KEEPS_ASSUMPTION = {
    aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim,
    aten.all.dims, aten.clone.default, aten.view.default, aten.max.default,
    aten.min.default, private.to_copy.default,
}  # fmt: skip


#: Operators that one operand can decide, whatever the others are, by what it then is everywhere:
#: a generation that has reached its length is over, whichever tokens were drawn.
DECIDED = {
    aten.bitwise_or.Tensor: True, aten.logical_or.default: True,
    aten.bitwise_and.Tensor: False, aten.logical_and.default: False, aten.mul.Tensor: False,
}  # fmt: skip

#: Of whose result no more elements are set than of all operands together, or than of each.
_SET_IN_ALL = {aten.bitwise_or.Tensor, aten.logical_or.default, aten.cat.default}
_SET_IN_EACH = {aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor}
#: As many as of their operand, if compared then with zero.
_SET_BEFORE = {private.to_copy.default, aten.clone.default}
_SET_IF_NOT_ZERO = {aten.ne.Scalar, aten.gt.Scalar}

#: Of one number everywhere, whatever the operand holds: that number, or which argument it is.
_FILLED = {
    aten.zeros_like.default: 0, aten.new_zeros.default: 0,
    aten.ones_like.default: 1, aten.new_ones.default: 1,
}  # fmt: skip
_FILLED_WITH = {aten.full_like.default: 1, aten.new_full.default: 2}

#: Of a number that nobody knows, but that is finite: is it below an operand that is infinite? The
#: best loss so far begins there.
_IS_BELOW = {
    aten.lt.Scalar: True, aten.le.Scalar: True, aten.gt.Scalar: False, aten.ge.Scalar: False,
    aten.lt.Tensor: True, aten.le.Tensor: True, aten.gt.Tensor: False, aten.ge.Tensor: False,
}  # fmt: skip

#: What gives places along a dimension (of all elements without one), as the only result or as the
#: second; by which argument the dimension is.
_PLACES = {
    aten.argmax.default: 1, aten.argmin.default: 1, aten.max.dim: 1, aten.min.dim: 1,
}  # fmt: skip
#: Of whose elements each is one of an operand's.
_ELEMENTS_OF = {private.to_copy.default, aten.clone.default, aten.cat.default}
#: How many values there are of a type.
_VALUES_OF: Final = {torch.bool: 2, torch.uint8: 256, torch.int8: 256}

#: What is looked at though not every operand is known.
PARTLY_KNOWN = frozenset(
    {
        *DECIDED,
        *_PLACES,
        *_ELEMENTS_OF,
        *_IS_BELOW,
        *_SET_IN_ALL,
        *_SET_BEFORE,
        *_SET_IF_NOT_ZERO,
        *_FILLED,
        *_FILLED_WITH,
    }
)

#: Of what floats that are masks are made, and what labels are matched by: constants, arithmetic and
#: selection. With these as many floats are followed as whole numbers, if all that they are made of
#: is known.
_OF_CONSTANTS = frozenset({
    aten.zeros.default, aten.ones.default, aten.full.default, aten.eye.default, aten.eye.m,
    *_FILLED, *_FILLED_WITH, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor,
    aten.clone.default, private.to_copy.default, aten.repeat.default, aten.cat.default,
    aten.stack.default, aten.constant_pad_nd.default, aten.flip.default, aten.roll.default,
    aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.tril.default, aten.triu.default,
    aten.index.Tensor, aten.index_select.default, aten.gather.default,
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.rsub.Tensor, aten.mul.Tensor,
    aten.div.Tensor, aten.neg.default, aten.maximum.default, aten.minimum.default,
    aten.clamp.default, aten.max.other, aten.min.other, aten.max.dim, aten.min.dim,
    aten.amax.default, aten.amin.default, aten.abs.default, aten.log.default,
    aten.reciprocal.default, aten.floor.default, aten.ceil.default, aten.round.default,
    aten.trunc.default, aten.remainder.Scalar, aten.remainder.Tensor, aten.fmod.Scalar,
    aten.sum.default, aten.sum.dim_IntList, aten.sqrt.default, aten.rsqrt.default,
    aten.pow.Tensor_Scalar, aten.scatter_add.default, aten.index_add.default,
})  # fmt: skip

#: Write at places that this argument has an index each for.
_WRITES_AT = {aten.scatter_.value: 2, aten.scatter_.src: 2}
_WRITES_BY_INDEX = {aten.index_put_.default, private.index_put_impl_.default}
#: … and in one dimension: ``x[i] = 1``, since PyTorch 2.15.
_FILLS_AT = {aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor}


def worth_keeping(tensor: torch.Tensor, func: Any = None) -> bool:
    """Is the content of a tensor of this geometry followed, as the result of ``func``?"""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        most = MAX_INTEGERS if func in _OF_CONSTANTS else MAX_FLOATS
        return tensor.numel() <= most
    return tensor.numel() <= MAX_INTEGERS or (bool(_OBJECTS) and tensor.dtype in _BYTES)


#: One entry for each call in which objects are on their way, as pickled bytes and their number.
_OBJECTS: list[None] = []
_BYTES: Final = (torch.uint8, torch.int64)


def as_objects(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that sends objects as bytes, which are followed however many they are: what a part
    of a pickle is cannot be told."""

    @functools.wraps(function)
    def sends(*args: Any, **kwargs: Any) -> Any:
        _OBJECTS.append(None)
        try:
            return function(*args, **kwargs)
        finally:
            _OBJECTS.pop()

    return sends


class Values:
    """Keeps the content of storages in step with the operators."""

    @staticmethod
    def known(args: Any) -> bool:
        """May the result be known, that is, has every operand a value or an assumption?"""
        for value in args:
            kind = type(value)
            if (kind is list or kind is tuple) and value:
                value = value[0]
                kind = type(value)
            if kind is SimulatedTensor:
                life = value._life
                if life.value is None and life.fill is None:
                    return False
        return True

    def read(self, tensor: Any) -> torch.Tensor | None:
        """The content of a tensor as a CPU tensor, or ``None`` if unknown."""
        if type(tensor) is not SimulatedTensor:
            return tensor if isinstance(tensor, torch.Tensor) and not tensor.is_meta else None
        return tensor._content()

    def write(self, tensor: SimulatedTensor, content: torch.Tensor) -> None:
        """Give a tensor that owns its storage this content."""
        tensor._life.value = _laid_out(tensor._spec, tensor._life.nbytes, content)

    def tell(self, tensor: SimulatedTensor, make: Callable[[], torch.Tensor]) -> None:
        """If nobody knows the content of a tensor that owns its storage, the host is told this."""
        spec, nbytes = tensor._spec, tensor._life.nbytes
        tensor._life.placeholder = lambda: _laid_out(spec, nbytes, make())

    def told(self, tensor: SimulatedTensor) -> torch.Tensor | None:
        """What the host is told of an unknown content; ``None``: zeros or ones do."""
        make, spec = tensor._life.placeholder, tensor._spec
        flat = make() if make is not None else None
        if flat is None or flat.dtype != spec.dtype:
            return None
        with no_dispatch():
            content: torch.Tensor = flat.as_strided(spec.size, spec.stride, spec.offset)
        return content

    def forget(self, life: StorageRecord) -> None:
        life.value = None
        life.fill = None
        life.nonzeros = None
        life.below = None
        life.placeholder = None

    def different(self, tensor: SimulatedTensor) -> int:
        """How many different values there are in a tensor that nobody knows, at most."""
        counts = (tensor.numel(), tensor._life.below, _VALUES_OF.get(tensor._spec.dtype))
        return min(count for count in counts if count is not None)

    def nonzeros(self, tensor: Any) -> int | None:
        """How many of a tensor's elements are not zero, at most; ``None``: nobody knows."""
        content = self.read(tensor)
        if content is not None:
            with no_dispatch():
                return int(content.count_nonzero())
        count = tensor._life.nonzeros
        # Elements of an expanded tensor are several times in it.
        return None if count is None or 0 in tensor._spec.stride else min(count, tensor.numel())

    def compute(self, info: OperatorInfo, args: Any, kwargs: Any, out: Any) -> None:
        """Follow a functional operator whose operands may all be known."""
        func = info.func
        if self._assume(info, args, out):
            return
        if info.random or not _all_worth_keeping(out, func):
            return
        operands = self._operands(args)
        if operands is None:
            return
        keywords = {n: v for n, v in kwargs.items() if n not in ("device", "pin_memory", "layout")}
        if "device" in {a.name for a in schema(func).arguments}:
            keywords["device"] = CPU
        try:
            with no_dispatch():
                content = func(*operands, **keywords)
                if func in _UNWRITTEN:  # whatever was there: the same in each run
                    content.zero_()
        except (NotImplementedError, RuntimeError, TypeError):
            return
        for tensor, real in _pairs(out, content):
            if tensor._spec.size == real.shape and tensor._spec.dtype is real.dtype:
                self.write(tensor, real)

    def decide(self, func: Any, args: Any, out: Any) -> None:
        """Follow one of ``PARTLY_KNOWN`` of which not every operand is known."""
        if func in _PLACES:
            places = out if type(out) is SimulatedTensor else out[1]
            dimension = args[1] if len(args) > _PLACES[func] else None
            size = args[0].numel() if dimension is None else 1
            if dimension is not None and args[0].dim():
                size = args[0].shape[dimension]
            places._life.below = size
            return
        if type(out) is not SimulatedTensor:
            return
        if func in _FILLED or func in _FILLED_WITH:
            self._fill(func, args, out)
            return
        if func in DECIDED and worth_keeping(out._meta):
            self._decide(func, args, out)
        if func in _IS_BELOW and out.numel() == 1:
            self._compare_with_infinity(func, args, out)
        if func in _ELEMENTS_OF:
            given = args[0] if func is aten.cat.default else args[:1]
            bounds = [
                argument._life.below for argument in given if type(argument) is SimulatedTensor
            ]
            if len(bounds) == len(given) and None not in bounds:
                out._life.below = max(bounds, default=None)
        if out._life.value is None and not out._spec.dtype.is_floating_point:
            out._life.nonzeros = self._set_after(func, args, out.numel())

    def _set_after(self, func: Any, args: Any, numel: int) -> int | None:
        """How many of ``numel`` elements are not zero after one of ``PARTLY_KNOWN``, at most."""
        if func in _SET_IF_NOT_ZERO and args[1] != 0:
            return None
        if func in _IS_BELOW and func not in _SET_IF_NOT_ZERO:
            return None
        joined = func is aten.cat.default
        counts = []
        for operand in args[0] if joined else args[:2]:
            if isinstance(operand, torch.Tensor):
                count = self.nonzeros(operand)
                if count is not None and not joined:  # broadcast, its elements are repeated
                    count *= numel // max(operand.numel(), 1)
                counts.append(count)
        known = [count for count in counts if count is not None]
        if func in _SET_IN_EACH:
            return min(known, default=None)
        return sum(known) if len(known) == len(counts) else None

    def _fill(self, func: Any, args: Any, out: SimulatedTensor) -> None:
        """A mask like a batch that nobody knows."""
        number = _FILLED[func] if func in _FILLED else args[_FILLED_WITH[func]]
        if worth_keeping(out._meta, func):
            with no_dispatch():
                self.write(out, constructors.full(out._spec.size, number, dtype=out._spec.dtype))
        elif not out._spec.dtype.is_floating_point and not out._spec.dtype.is_complex:
            out._life.fill = number

    def _decide(self, func: Any, args: Any, out: SimulatedTensor) -> None:
        wanted = DECIDED[func]
        for operand in args:
            dtype = getattr(operand, "dtype", None)
            # Of numbers, only nought decides, and not of floats: infinity times nought is none.
            if dtype is None or dtype.is_floating_point or (wanted and dtype is not torch.bool):
                continue
            content = self._content(operand) if type(operand) is SimulatedTensor else operand
            with no_dispatch():
                if content is not None and bool((content == wanted).all()):
                    made = constructors.full(out._spec.size, wanted, dtype=out._spec.dtype)
                    self.write(out, made)
                    return

    def _compare_with_infinity(self, func: Any, args: Any, out: SimulatedTensor) -> None:
        """Compare one number with infinity; of several some may be masked."""
        contents = [
            self._content(argument) if type(argument) is SimulatedTensor else argument
            for argument in args[:2]
        ]
        with no_dispatch():
            numbers = [None if content is None else float(content) for content in contents]
            for number, is_first in zip(numbers, (True, False), strict=True):
                if number is not None and math.isinf(number):
                    answer = _IS_BELOW[func] is ((number > 0) is not is_first)
                    spec = out._spec
                    self.write(out, constructors.full(spec.size, answer, dtype=spec.dtype))

    def mutate(self, info: OperatorInfo, args: Any, kwargs: Any) -> None:
        """Follow an operator that writes into its arguments."""
        written = [
            args[place] if isinstance(place, int) else kwargs[place]
            for place in info.written
            if (place < len(args) if isinstance(place, int) else place in kwargs)
        ]
        if info.func in _HARMLESS:
            return
        lives = {id(t._life): t._life for t in tensors_in(written)}
        if not any(life.value is not None or life.fill is not None for life in lives.values()):
            target: Any = written[0] if written else None
            whole = type(target) is SimulatedTensor and target._spec.nbytes == target._life.nbytes
            if info.func in _OVERWRITES and whole and worth_keeping(target._meta, info.func):
                self.write(target, constructors.zeros((), dtype=target._spec.dtype))
            elif all(life.nonzeros is None and life.below is None for life in lives.values()):
                return
        operands = None if info.random or kwargs else self._operands(args)
        if operands is None:
            count = self._set_by_writing(info.func, args)
            for life in lives.values():
                self.forget(life)
            if count is not None:
                args[0]._life.nonzeros = count
            return
        try:
            with no_dispatch():
                info.func(*operands)
        except (NotImplementedError, RuntimeError, TypeError):
            for life in lives.values():
                self.forget(life)
            return
        if type(args[0]) is SimulatedTensor and args[0]._life.value is None:
            self._fill_again(args[0], operands[0])

    def _fill_again(self, target: SimulatedTensor, content: torch.Tensor) -> None:
        """What was assumed to be one number everywhere: is it that after ``content`` was written to
        the part that ``target`` is of it?"""
        life = target._life
        with no_dispatch():
            first = content.flatten()[:1]
            is_one = bool(first.numel()) and bool((content == first).all())
            number = first.item() if is_one else None
        if number != life.fill and content.numel():
            self.forget(life)
            if target._spec.nbytes == life.nbytes:
                life.fill = number

    def _set_by_writing(self, func: Any, args: Any) -> int | None:
        """How many elements of ``args[0]`` are not zero after a write at unknown places."""
        if func in _WRITES_AT:
            places = args[_WRITES_AT[func]].numel()
        elif func in _WRITES_BY_INDEX:
            indices = args[1]
            if any(index is not None and index.dtype in MASKS for index in indices):
                return None
            shapes = [index.shape for index in indices if index is not None]
            rows = [n for n, each in zip_longest(args[0].shape, indices) if each is None]
            places = math.prod((*torch.broadcast_shapes(*shapes), *rows))
        elif func in _FILLS_AT:
            target, dimension, indices = args[:3]
            places = indices.numel() * (target.numel() // (target.shape or (1,))[dimension] or 1)
        else:
            return None
        target = args[0]
        if type(target) is not SimulatedTensor or target._spec.nbytes != target._life.nbytes:
            return None
        before = self.nonzeros(target)
        return None if before is None else before + places

    def _operands(self, args: Any) -> tuple[Any, ...] | None:
        """Arguments with content in place of simulated tensors; ``None`` if one has none."""
        operands = []
        for value in args:
            if type(value) is SimulatedTensor:
                value = self._content(value)
                if value is None:
                    return None
            elif isinstance(value, (list, tuple)):
                inner = self._operands(value)
                if inner is None:
                    return None
                value = type(value)(inner)
            elif isinstance(value, torch.Tensor) and value.is_meta:
                return None
            operands.append(value)
        return tuple(operands)

    def _content(self, tensor: SimulatedTensor) -> torch.Tensor | None:
        """What a tensor holds, or is assumed to hold everywhere; ``None`` if unknown."""
        known, fill = self.read(tensor), tensor._life.fill
        if known is not None or fill is None or not worth_keeping(tensor._meta):
            return known
        with no_dispatch():
            return constructors.full(tensor._spec.size, fill, dtype=tensor._spec.dtype)

    def _assume(self, info: OperatorInfo, args: Any, out: Any) -> bool:
        """Follow assumed values; false if every operand has a real one."""
        operands = tensors_in(args)
        if all(tensor._life.value is not None for tensor in operands):
            return False
        if type(out) is not SimulatedTensor:
            return True
        func = info.func
        if func in _KEEPS_ASSUMPTION:
            out._life.fill = operands[0]._life.fill
        elif func is aten.sum.default or func is aten.sum.dim_IntList:
            fill, count = operands[0]._life.fill, operands[0].numel() // max(out.numel(), 1)
            out._life.fill = None if fill is None else fill * count
        elif torch.Tag.pointwise in func.tags:
            out._life.fill = self._pointwise(func, args)
        return True

    def _pointwise(self, func: Any, args: Any) -> bool | float | None:
        """The value of every element of an elementwise operator's result."""
        uniform = []
        for value in args:
            if type(value) is SimulatedTensor:
                fill = value._life.fill
                if fill is None:
                    content = self.read(value)
                    if content is None or content.numel() != 1:
                        return None
                    fill = content.item()
                value = constructors.tensor(fill, dtype=value.dtype, device=CPU)
            uniform.append(value)
        try:
            with no_dispatch():
                return func(*uniform).item()  # type: ignore[no-any-return]
        except (NotImplementedError, RuntimeError, TypeError):
            return None


def _laid_out(spec: Any, nbytes: int, content: torch.Tensor) -> torch.Tensor:
    """A storage's elements in a row, with this content where ``spec`` has its own."""
    with no_dispatch():
        flat = constructors.zeros(nbytes // spec.dtype.itemsize, dtype=spec.dtype)
        flat.as_strided(spec.size, spec.stride, spec.offset).copy_(content.detach())
    return flat


_UNWRITTEN = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten.new_empty.default, aten.new_empty_strided.default,
}  # fmt: skip
_OVERWRITES = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}


def tensors_in(value: Any) -> list[SimulatedTensor]:
    """The simulated tensors in arguments or results, lists among them included."""
    if type(value) is SimulatedTensor:
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []


def _all_worth_keeping(out: Any, func: Any) -> bool:
    tensors = tensors_in(out)
    return bool(tensors) and all(worth_keeping(t._meta, func) for t in tensors)


def _pairs(out: Any, content: Any) -> list[tuple[SimulatedTensor, torch.Tensor]]:
    if type(out) is SimulatedTensor:
        return [(out, content)]
    if isinstance(out, (list, tuple)):
        return [p for o, c in zip(out, content, strict=True) for p in _pairs(o, c)]
    return []
