"""Masks of attention: which positions they are True for, and whether that is what they hide.

``nn.MultiheadAttention`` hides what a mask of truth values has as True, and adds one of numbers to
the scores; ``scaled_dot_product_attention`` hides what is False. No value of a GPU is read: a mask
is known by the functions that made it, one of the CPU by its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from trainfit.hooks.provenance.cuts import Marks, name_of
from trainfit.results.runs.learning import Misuse
from trainfit.torch_private.operators import no_dispatch

#: Where a mask is True, or not 0: everywhere; in a square of queries by keys, where the key is not
#: after the query, not before it, before it, after it; where there are tokens, and where not.
ALL: Final = "all"
_NOT_AFTER, _NOT_BEFORE, _BEFORE, _AFTER = "not_after", "not_before", "before", "after"
_TOKENS, _PADDING = "tokens", "padding"
_OPPOSITE: Final = {
    _NOT_AFTER: _AFTER,
    _AFTER: _NOT_AFTER,
    _NOT_BEFORE: _BEFORE,
    _BEFORE: _NOT_BEFORE,
    _TOKENS: _PADDING,
    _PADDING: _TOKENS,
}
#: Those with which a position does not see itself: the first or the last one sees nothing.
_WITH_ITSELF: Final = (_NOT_AFTER, _NOT_BEFORE)
#: Functions of one tensor that leave truth values as they are, and those that turn them around.
_SAME: Final = {
    *("bool", "to", "type", "float", "long", "int", "byte", "half", "bfloat16", "unsqueeze"),
    *("squeeze", "view", "reshape", "expand", "repeat", "contiguous", "clone", "detach", "cuda"),
    *("getitem", "expand_as", "type_as", "requires_grad", "view_as"),
}
_TURNED: Final = {"invert", "logical_not", "bitwise_not", "rsub"}
_ONES: Final = {"ones", "ones_like", "new_ones"}
#: From so low a number on, what is added to a score hides it.
_HIDES: Final = -1e3
#: Positions of a mask of the CPU that is read.
_MOST: Final = 4096
#: Tokens of a batch that are read.
_READ: Final = 1 << 18


class Mask(NamedTuple):
    """A mask: where it is True, or what it adds hides; the line that made it."""

    where: str
    adds: bool
    place: str | None
    is_whole_row: bool = False
    """Has a sample of the batch nothing else?"""


class Misused(NamedTuple):
    """A mask that hides something else than it is meant to: how ("turned", "added", "tokens"), and
    the line that made it."""

    how: str
    where: str
    place: str | None


class Masks:
    """Follows masks from the functions that make them to the attention that gets them."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        self._place = place
        self._known: Marks[Mask] = Marks()
        #: Tensors that have the numbers of positions.
        self._positions: Marks[bool] = Marks()
        #: Truth values of which some rows are all True, or all False; the least of lengths.
        self._whole: Marks[frozenset[bool]] = Marks()
        self._least: Marks[int] = Marks()
        #: Scores of which a mask makes whole rows -inf: which ("rows", "sample"), and the line.
        self._rows: Marks[tuple[str, str]] = Marks()
        #: The same of scores whose softmax was computed.
        self._of_softmax: tuple[str, str] | None = None
        #: Scores of which some are -inf, probabilities of which some are 0, and their logarithms.
        self._some: Marks[str] = Marks()
        #: The line that multiplies a 0 by its logarithm.
        self._zeros_at: str | None = None
        self._tokens: list[torch.Tensor] = []

    def found(self) -> Iterator[Misuse]:
        """Rows of scores that a mask leaves nothing of."""
        if self._of_softmax is not None:
            how, place = self._of_softmax
            yield Misuse.of("mask_misused", how, "", "softmax", place=place)
        if self._zeros_at is not None:
            yield Misuse.of("zero_times_log", place=self._zeros_at)

    def given(self, tensors: Sequence[torch.Tensor]) -> None:
        """A DataLoader gave the tensors of a batch."""
        self._tokens = [tensor for tensor in tensors if _may_be_tokens(tensor)]

    def gave(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """A function of PyTorch gave a tensor."""
        name = name_of(func).strip("_")
        if name == "masked_fill" and (found := self._fills_rows(args, kwargs)) is not None:
            self._rows.put(result, found)
        elif name == "softmax" and self._of_softmax is None and args and _is_of_last(args, kwargs):
            self._of_softmax = self._rows.of(args[0])
        if self._zeros_at is None:
            self._follow_zeros(name, args, kwargs, result)
        self._follow_rows(name, args, result)
        mask = self._made(name, args, kwargs, result)
        if mask is not None:
            self._known.put(result, mask)

    def _made(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: torch.Tensor
    ) -> Mask | None:
        if name in _ONES:
            return Mask(ALL, False, None)
        if name == "full":
            fill = args[1] if len(args) > 1 else kwargs.get("fill_value")
            return _filled(fill)
        if name == "arange":
            self._positions.put(result, True)
            return None
        given = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if given is None:
            return None
        if self._positions.of(given) and name in _SAME:
            self._positions.put(result, True)
            return None
        known = self._known.of(given)
        if name in ("tril", "triu"):
            diagonal = args[1] if len(args) > 1 else kwargs.get("diagonal", 0)
            return self._triangle(name, diagonal, known, result)
        if name in ("eq", "ne", "lt", "ge", "gt", "le"):
            return self._compared(name, given, args[1] if len(args) > 1 else None, known)
        if name == "masked_fill":
            return self._masked(args, kwargs, known)
        if name == "mul" and known is not None and not known.adds:
            factor = args[1] if len(args) > 1 else None
            hides = isinstance(factor, int | float) and factor <= _HIDES
            return known._replace(adds=True) if hides else None
        if known is None and name in ("to", "cuda") and given.device.type == "cpu":
            return _read(given, self._place)
        if known is None or known.where == ALL or name in _SAME:
            return known if name in _SAME else None
        if name in _TURNED and known.where in _OPPOSITE and not known.adds:
            return known._replace(where=_OPPOSITE[known.where])
        return None

    def _fills_rows(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, str] | None:
        """Which and the line, if -inf is put into scores by a mask that is one number for each row,
        or that is True for all keys of a sample."""
        scores, by, value = _filling(args, kwargs)
        if not isinstance(by, torch.Tensor) or value != -math.inf:
            return None
        is_over_keys = by.shape[-1:] == scores.shape[-1:] and scores.requires_grad
        if is_over_keys and True in (self._whole.of(by) or ()):
            return "sample", self._place() or ""
        if scores.dim() < 3:
            return None
        is_by_row = by.dim() >= scores.dim() and by.shape[-1] == 1 < scores.shape[-1]
        if is_by_row and by.shape[-2] > 1:
            return "rows", self._place() or ""
        known = self._known.of(by)
        is_of_sample = known is not None and known.is_whole_row and known.where == _PADDING
        return ("sample", self._place() or "") if is_of_sample and is_over_keys else None

    def _follow_rows(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Follow masks of the CPU that are True, or False, for all positions of a sample, and those
        of lengths of which one is 0."""
        given = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if given is None:
            return
        if name in ("to", "cuda") and given.device.type == "cpu" and 0 < given.numel() <= _READ:
            if given.dtype == torch.bool and given.dim() == 2 and given.shape[1] > 1:
                self._whole.put(result, _whole_rows(given))
            elif given.dtype in (torch.int64, torch.int32) and given.dim() == 1:
                with no_dispatch():
                    self._least.put(result, int(given.min()))
            return
        rows, least = self._whole.of(given), self._least.of(given)
        other = args[1] if len(args) > 1 else None
        if rows is not None and (name in _SAME or name in _TURNED):
            turned = frozenset(not row for row in rows)
            self._whole.put(result, rows if name in _SAME else turned)
        elif least is not None and name in _SAME:
            self._least.put(result, least)
        elif isinstance(other, torch.Tensor) and name in ("lt", "ge", "gt", "le"):
            # Positions from 0 on against lengths, or lengths against positions.
            if self._positions.of(given) and self._least.of(other) == 0 and name in ("lt", "ge"):
                self._whole.put(result, frozenset((name == "ge",)))
            elif least == 0 and self._positions.of(other) and name in ("gt", "le"):
                self._whole.put(result, frozenset((name == "le",)))

    def _follow_zeros(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: torch.Tensor
    ) -> None:
        """Follow scores of -inf to 0 · log 0, which is NaN."""
        if name == "masked_fill":
            scores, _, value = _filling(args, kwargs)
            if value == -math.inf and scores.requires_grad:
                self._some.put(result, "scores")
            return
        marks = [self._some.of(argument) for argument in args if isinstance(argument, torch.Tensor)]
        if name == "softmax" and marks[:1] == ["scores"]:
            self._some.put(result, "zeros")
        elif (name == "log" and marks[:1] == ["zeros"]) or (
            name == "log_softmax" and marks[:1] == ["scores"]
        ):
            self._some.put(result, "logarithms")
        elif name == "mul" and sorted(filter(None, marks)) == ["logarithms", "zeros"]:
            self._zeros_at = self._place() or ""

    def _triangle(
        self, name: str, diagonal: Any, known: Mask | None, result: torch.Tensor
    ) -> Mask | None:
        if known is None or known.where != ALL or not _is_square(result):
            return None
        where = {
            ("tril", 0): _NOT_AFTER,
            ("tril", -1): _BEFORE,
            ("triu", 0): _NOT_BEFORE,
            ("triu", 1): _AFTER,
        }.get((name, diagonal))
        return None if where is None else Mask(where, known.adds, self._place())

    def _compared(
        self, name: str, given: torch.Tensor, other: Any, known: Mask | None
    ) -> Mask | None:
        if known is not None:
            is_number = isinstance(other, int | float) and other in (0, 1)
            if known.adds or known.where == ALL or not is_number or name not in ("eq", "ne"):
                return None
            is_same = (name == "eq") == bool(other)
            return known if is_same else known._replace(where=_OPPOSITE[known.where])
        if self._positions.of(given) and isinstance(other, torch.Tensor):
            where = {"lt": _TOKENS, "ge": _PADDING}.get(name)
            return None if where is None else Mask(where, False, self._place())
        is_whole = given.dtype in (torch.int64, torch.int32) and given.dim() == 2
        if is_whole and type(other) is int and name in ("eq", "ne"):
            where = _TOKENS if name == "ne" else _PADDING
            return Mask(where, False, self._place(), self._is_whole_row(given.shape, other))
        return None

    def _is_whole_row(self, shape: torch.Size, value: int) -> bool:
        """Has a sample of the batch with this shape this value only?"""
        own = next((token for token in self._tokens if token.shape == shape), None)
        if own is None:
            return False
        with no_dispatch():
            return bool((own == value).all(1).any())

    def _masked(
        self, args: Sequence[Any], kwargs: dict[str, Any], known: Mask | None
    ) -> Mask | None:
        by = args[1] if len(args) > 1 else kwargs.get("mask")
        value = args[2] if len(args) > 2 else kwargs.get("value")
        mask = self._known.of(by) if isinstance(by, torch.Tensor) else None
        if isinstance(value, int | float) and value <= _HIDES and not args[0].requires_grad:
            return None if mask is None else mask._replace(adds=True)
        return known

    def attention(self, attn_mask: Any, key_padding_mask: Any) -> Misused | None:
        """``nn.MultiheadAttention`` gets these masks."""
        for mask in (attn_mask, key_padding_mask):
            known = self._known.of(mask) if isinstance(mask, torch.Tensor) else None
            if known is None or known.where == ALL:
                continue
            if mask.dtype != torch.bool and not known.adds:
                return Misused("added", known.where, known.place)
            if known.where in _WITH_ITSELF:
                return Misused("turned", known.where, known.place)
            if known.where == _TOKENS and mask is key_padding_mask:
                return Misused("tokens", known.where, known.place)
        return None

    def attends(self, attn_mask: Any) -> Misused | None:
        """``scaled_dot_product_attention`` gets this mask."""
        known = self._known.of(attn_mask) if isinstance(attn_mask, torch.Tensor) else None
        if known is None or known.where not in (_AFTER, _BEFORE):
            return None
        if attn_mask.dtype != torch.bool:
            return None if known.adds else Misused("added", known.where, known.place)
        return Misused("attended", known.where, known.place)


def _whole_rows(mask: torch.Tensor) -> frozenset[bool]:
    """Which truth values some row has alone."""
    with no_dispatch():
        all_true, any_true = mask.all(1).any(), mask.any(1).all()
        return frozenset(
            [value for value, is_there in ((True, all_true), (False, ~any_true)) if bool(is_there)]
        )


def _may_be_tokens(tensor: torch.Tensor) -> bool:
    """Is it small, of whole numbers, and on the CPU?"""
    is_whole = tensor.dtype in (torch.int64, torch.int32) and tensor.dim() == 2
    return is_whole and tensor.device.type == "cpu" and 0 < tensor.numel() <= _READ


def _filling(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The tensor, the mask and the value of ``masked_fill``."""
    scores, by, value = (*args, *(kwargs.get(each) for each in ("mask", "value")))[:3]
    return scores, by, value


def _is_of_last(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return isinstance(args[0], torch.Tensor) and dim in (-1, args[0].dim() - 1)


def _filled(value: Any) -> Mask | None:
    if not isinstance(value, int | float) or (value != 1 and value > _HIDES):
        return None
    return Mask(ALL, value != 1, None)


def _is_square(mask: torch.Tensor) -> bool:
    return mask.dim() >= 2 and mask.shape[-1] == mask.shape[-2] > 1


def _read(mask: torch.Tensor, place: Callable[[], str | None]) -> Mask | None:
    """A mask of the CPU, by its numbers."""
    if mask.dim() != 2 or not _is_square(mask) or mask.requires_grad:
        return None
    if not 1 < mask.shape[0] <= _MOST:
        return None
    if mask.dtype not in (torch.bool, torch.uint8, torch.float32):
        return None
    with no_dispatch():
        if bool(mask[0, -1] == mask[-1, 0]):
            return None  # of no triangle, as most squares are: told without a look at all of it
        adds = mask.dtype == torch.float32 and bool((mask <= _HIDES).any())
        if mask.dtype == torch.float32 and not adds and bool(((mask != 0) & (mask != 1)).any()):
            return None
        is_true = mask <= _HIDES if adds else mask != 0
        everywhere = torch.ones_like(is_true)
        triangles = {
            _NOT_AFTER: everywhere.tril(),
            _BEFORE: everywhere.tril(-1),
            _NOT_BEFORE: everywhere.triu(),
            _AFTER: everywhere.triu(1),
        }
        matches = [where for where, triangle in triangles.items() if torch.equal(triangle, is_true)]
    return Mask(matches[0], adds, place()) if matches else None
