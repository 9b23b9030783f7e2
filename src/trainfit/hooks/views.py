"""A view that seems to swap dimensions, and puts numbers under other indices instead."""

from __future__ import annotations

from collections.abc import Sequence


def seems_swapped(source: Sequence[int], result: Sequence[int]) -> bool:
    """Are the sizes of a view those of what it is of, in another order?

    ``view`` and ``reshape`` keep the order of numbers in memory: of 64×50×4×32 one as 64×4×50×32
    has numbers of several positions in each row. Sizes of 1 move nothing, and the last two may be
    one (the height and the width of an image, for its pixels).
    """
    one, other = _without_ones(source), _without_ones(result)
    pairs = [(one, other), (_merged(one), other), (one, _merged(other))]
    if any(first == second for first, second in pairs):
        return False
    return any(sorted(first) == sorted(second) for first, second in pairs)


def _without_ones(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in sizes if size != 1)


def _merged(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """With the last two as one, of three or more."""
    return (*sizes[:-2], sizes[-2] * sizes[-1]) if len(sizes) > 2 else sizes
