"""A view that seems to swap dimensions, and puts numbers under other indices instead."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def seems_swapped(source: Sequence[int], result: Sequence[int]) -> bool:
    """Are the sizes of a view those of what it is of, in another order?

    ``view`` and ``reshape`` keep the order of numbers in memory: of 64×50×4×32 one as 64×4×50×32
    has numbers of several positions in each row. Sizes of 1 move nothing, and the last two may be
    one (the height and the width of an image, for its pixels). Where one of the sizes that moved is
    a multiple of another, heads or chunks may have been split off that happen to be as many.
    """
    one, other = _without_ones(source), _without_ones(result)
    pairs = [(one, other), (_merged(one), other), (one, _merged(other))]
    if any(first == second for first, second in pairs):
        return False
    return any(
        sorted(first) == sorted(second) and not _may_be_split(first, second)
        for first, second in pairs
    )


def _may_be_split(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    places = [
        place for place, sizes in enumerate(zip(first, second, strict=True)) if len({*sizes}) > 1
    ]
    moved = sorted({*first[places[0] : places[-1] + 1]})
    return any(larger % smaller == 0 for smaller, larger in itertools.combinations(moved, 2))


def _without_ones(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in sizes if size != 1)


def _merged(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """With the last two as one, of three or more."""
    return (*sizes[:-2], sizes[-2] * sizes[-1]) if len(sizes) > 2 else sizes
