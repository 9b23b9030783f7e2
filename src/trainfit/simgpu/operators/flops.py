"""FLOPs of matmuls, convolutions, attention and recurrent networks, two a multiply-add.

Own formulas where those of ``torch.utils.flop_counter`` (2.13) say too much: it counts the
backward pass of a grouped convolution as if it had no groups (64 times too much for 64 depthwise
channels), causal attention like the whole square, and recurrent networks not at all. For any
other operator its formula holds. Counted is what the mathematics asks for: kernels that compute
whole blocks across a causal mask's edge, or multiply less (Winograd), differ from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from trainfit.torch_private.operators import packet, schema

aten = torch.ops.aten

#: From an operator's arguments by their names in its schema, and its result, to FLOPs.
Formula = Callable[[Mapping[str, Any], Any], int]

_FORMULAS: Final[dict[Any, Formula]] = {}


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """FLOPs of one operator; 0 for those that neither we nor PyTorch have a formula for."""
    operator = packet(func)
    own = _FORMULAS.get(operator)
    if own is not None:
        return own(by_name(func, args, kwargs), result)
    formula = flop_registry.get(operator)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def by_name(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's arguments by their names in its schema, with the defaults of the others."""
    declared = schema(func).arguments
    named = {
        argument.name: argument.default_value
        for argument in declared
        if argument.has_default_value()
    }
    named |= {argument.name: value for argument, value in zip(declared, args, strict=False)}
    return {**named, **kwargs}


def _register(*names: str) -> Callable[[Formula], Formula]:
    """Register a formula for the operators of these names that this PyTorch has."""

    def register(formula: Formula) -> Formula:
        for name in names:
            packet = getattr(aten, name, None)
            if packet is not None:
                _FORMULAS[packet] = formula
        return formula

    return register


# --- Matmuls --------------------------------------------------------------------------


@_register("mm", "addmm", "bmm", "baddbmm")
def _product(call: Mapping[str, Any], result: Any) -> int:
    """(…, m, k) times (…, k, n); PyTorch's own formulas do not know ``out_dtype``."""
    left = next(call[name] for name in ("mat1", "batch1", "self") if name in call)
    right = next(call[name] for name in ("mat2", "batch2") if name in call)
    return 2 * _numel(left) * _shape(right)[-1]


class GroupSizes(NamedTuple):
    """Sizes of a grouped matmul, a group's on average."""

    groups: int
    rows: int
    columns: int
    depth: int


def grouped_sizes(call: Mapping[str, Any]) -> GroupSizes:
    """The sizes of ``_grouped_mm``: (…, m, k) times (…, k, n), where an operand without a dimension
    for the groups has them one after the other: in m, in n, or in k where both have none."""
    left, right = (_shape(call[name]) for name in ("self", "mat2"))
    count = right[0] if len(right) == 3 else left[0] if len(left) == 3 else _numel(call["offs"])
    rows, depth, columns = left[-2], left[-1], right[-1]
    if len(left) == len(right) == 2:
        depth = -(-depth // max(1, count))
    elif len(left) == 2:
        rows = -(-rows // max(1, count))
    elif len(right) == 2:
        columns = -(-columns // max(1, count))
    return GroupSizes(count, rows, columns, depth)


@_register("_grouped_mm")
def _grouped(call: Mapping[str, Any], result: Any) -> int:
    left, right = _shape(call["self"]), _shape(call["mat2"])
    shared = left[0] if len(left) > len(right) else 1
    return 2 * _numel(call["self"]) * right[-1] // max(1, shared)


# --- Convolutions -----------------------------------------------------------------------------


@_register("convolution", "_convolution")
def _convolution(call: Mapping[str, Any], result: Any) -> int:
    return _one_pass(call["input"], call["weight"], result, call["transposed"])


@_register("convolution_backward")
def _convolution_backward(call: Mapping[str, Any], result: Any) -> int:
    """The gradients of input and weight each need the FLOPs of the forward pass."""
    passes = sum(map(bool, call["output_mask"][:2]))
    each = _one_pass(call["input"], call["weight"], call["grad_output"], call["transposed"])
    return passes * each


def _one_pass(source: Any, weight: Any, result: Any, transposed: bool) -> int:
    """Each element of the result (transposed: of the input) meets one filter's weights, which
    are those of its group alone: ``weight`` has the shape (channels, channels of a group, …)."""
    meets = source if transposed else result
    return 2 * _numel(meets) * math.prod(_shape(weight)[1:])


# --- Attention --------------------------------------------------------------------------------


def _attention(by_query: int, by_value: int) -> Formula:
    """A formula of so many matmuls by a query's (a key's) size for each pair of a query and a key
    that meet, and so many by a value's.

    Shapes are (batch, heads, length, size); keys may have fewer heads, which are shared.
    """

    def formula(call: Mapping[str, Any], result: Any) -> int:
        batch, heads, queries, size = _shape(call["query"])
        keys, of_value = _shape(call["key"])[2], _shape(call["value"])[3]
        meeting = causal_pairs(queries, keys) if call["is_causal"] else queries * keys
        return 2 * batch * heads * meeting * (by_query * size + by_value * of_value)

    return formula


for _kind in ("flash", "efficient", "cudnn"):
    _name = f"_scaled_dot_product_{_kind}_attention"
    _register(_name)(_attention(1, 1))
    # The scores again, and the gradients of queries and of keys; those of the probabilities and
    # of values.
    _register(f"{_name}_backward")(_attention(3, 2))


class Packed(NamedTuple):
    """Sizes of an attention over sequences that lie one after the other, or side by side."""

    batch: int
    heads: int
    queries: int
    keys: int
    size: int


def packed_sizes(call: Mapping[str, Any]) -> Packed:
    """The sizes of ``_flash_attention_forward`` and ``_backward``: (batch, length, heads, size), or
    with ``cum_seq_q`` (total, heads, size), whose sequences are taken to be of one length."""
    query, key = _shape(call["query"]), _shape(call["key"])
    if len(query) == 4:
        return Packed(query[0], query[2], query[1], key[1], query[3])
    batch = max(1, _numel(call["cum_seq_q"]) - 1)
    return Packed(batch, query[1], -(-query[0] // batch), -(-key[0] // batch), query[2])


def _flash(products: int) -> Formula:
    """A formula of so many matmuls by a head's size for each pair of a query and a key that
    meet."""

    def formula(call: Mapping[str, Any], result: Any) -> int:
        sizes = packed_sizes(call)
        pairs = window_pairs(
            sizes.queries,
            sizes.keys,
            call["is_causal"],
            call.get("window_size_left"),
            call.get("window_size_right"),
        )
        return 2 * sizes.batch * sizes.heads * pairs * products * sizes.size

    return formula


_register("_flash_attention_forward")(_flash(2))
_register("_flash_attention_backward")(_flash(5))


def window_pairs(queries: int, keys: int, causal: bool, left: int | None, right: int | None) -> int:
    """Pairs of a query and a key that meet: the last query is at the last key, and sees ``left``
    keys before it and ``right`` after it (``None`` or below 0: all), none after it if ``causal``.
    """
    before = keys if left is None or left < 0 else left
    after = 0 if causal else keys if right is None or right < 0 else right
    if before >= keys and after >= keys:
        return queries * keys
    shift = keys - queries
    return sum(
        max(0, min(keys, row + shift + after + 1) - max(0, row + shift - before))
        for row in range(queries)
    )


def causal_pairs(queries: int, keys: int) -> int:
    """Query i sees the keys 0 to i (PyTorch's ``is_causal``: ``torch.ones(L, S).tril()``)."""
    growing = min(queries, keys)
    return growing * (growing + 1) // 2 + (queries - growing) * keys


# --- Recurrent networks -----------------------------------------------------------------------


@_register("_cudnn_rnn")
def _rnn(call: Mapping[str, Any], result: Any) -> int:
    """Every matrix of weights (of input, hidden state, projection) meets every row once."""
    return 2 * _rows(call["input"]) * sum(map(_numel, _matrices(call["weight"])))


@_register("_cudnn_rnn_backward")
def _rnn_backward(call: Mapping[str, Any], result: Any) -> int:
    """Gradients of what each matrix was applied to, without the input's where nobody asks for
    it, and of the weights."""
    matrices = _matrices(call["weight"])
    weights, mask = sum(map(_numel, matrices)), call["output_mask"]
    of_input = sum(_numel(matrix) for matrix in _of_input(call, matrices))
    total = weights - (0 if mask[0] else of_input) + (weights if mask[3] else 0)
    return 2 * _rows(call["input"]) * total


def _matrices(weights: Sequence[Any]) -> list[Any]:
    return [weight for weight in weights if len(_shape(weight)) > 1]


def _of_input(call: Mapping[str, Any], matrices: Sequence[Any]) -> list[Any]:
    """The first layer's matrices that meet the input, one for each direction."""
    directions = 2 if call["bidirectional"] else 1
    each = len(matrices) // (call["num_layers"] * directions)
    return [matrices[direction * each] for direction in range(directions)]


def _rows(source: Any) -> int:
    """Time steps of all sequences: (time, batch, size), or packed (rows, size)."""
    return math.prod(_shape(source)[:-1])


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _numel(tensor: Any) -> int:
    return math.prod(_shape(tensor))
