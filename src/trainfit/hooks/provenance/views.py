"""Views that seem to swap dimensions, and put numbers under other indices instead: by their shapes,
and by the numbers of images."""

from __future__ import annotations

import itertools
import linecache
import math
import re
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from trainfit.torch_private.operators import no_dispatch

#: Numbers of images that are compared with their neighbours, for a few batches of a run.
_NUMBERS: Final = 1 << 13
#: Of the difference between neighbours, that between every third number at most, where these are
#: one colour of neighbouring pixels. Of noise it is 1 within 0.04 (measured: 300 batches).
_ALIKE: Final = 0.8
#: Lines above a call in which the view of what is given there is looked for.
_ABOVE: Final = 30
_VIEWS: Final = re.compile(r"(?:\.|\b)(?:view|reshape|resize_?|unflatten)\s*\(")


def seems_swapped(source: Sequence[int], result: Sequence[int]) -> bool:
    """Are the sizes of a view those of what it is of, in another order?

    ``view`` and ``reshape`` keep the order of numbers in memory: of 64×50×4×32 one as 64×4×50×32
    has numbers of several positions in each row. Sizes of 1 move nothing, and the last two may be
    one (the height and the width of an image, for its pixels). Where one of the sizes that moved is
    a multiple of another, heads or chunks may have been split off that happen to be as many.
    """
    if _mixes_heads(source, result) or _mixes_heads(result, source):
        return True
    one, other = _without_ones(source), _without_ones(result)
    pairs = [(one, other), (_merged(one), other), (one, _merged(other))]
    if any(first == second for first, second in pairs):
        return False
    return any(
        sorted(first) == sorted(second) and not _may_be_split(first, second)
        for first, second in pairs
    )


def _mixes_heads(whole: Sequence[int], split: Sequence[int]) -> bool:
    """Is this (batch, length, width) next to (batch, heads, length, width of a head)? The heads are
    parts of the width, next to each other in memory: they come after the length in a view, and
    only transpose(1, 2) brings them before it."""
    if len(whole) != 3 or len(split) != 4 or whole[0] != split[0]:
        return False
    heads, length, width = split[1:]
    return (
        (length, heads * width) == (whole[1], whole[2])
        and length != heads
        and (min(heads, length, width) > 1)
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
    """The sizes with the last two as one, of three or more."""
    return (*sizes[:-2], sizes[-2] * sizes[-1]) if len(sizes) > 2 else sizes


@np.errstate(all="ignore")  # numbers that are not finite would be warned of, in the script's name
def lies_by_pixels(images: torch.Tensor) -> tuple[float, float] | None:
    """The differences of neighbouring numbers and of every third ones, on average, in a batch of
    images (N, 3, H, W) on the CPU whose memory has the three colours of a pixel next to each other;
    else ``None``.

    ``view`` and ``reshape`` make such of (N, H, W, 3). In images that are as their shape says, a
    number is as like the next one (and that of the next row) as the third; in those of noise or
    classes none is like another.
    """
    height, width = images.shape[2:]
    each = math.prod(images.shape[1:])
    with no_dispatch():
        some = images.detach()[: max(1, _NUMBERS // each)]
        some = some.float() if some.dtype == torch.bfloat16 else some
    # NumPy's operators cost a tenth of PyTorch's here. No more is copied than is looked at.
    part = some.numpy()[:, : -(-_NUMBERS // (height * width))]
    if part.shape[1] == 1:
        part = part[:, :, : -(-_NUMBERS // width)]
    numbers = part.reshape(len(part), -1)[:, :_NUMBERS].astype(np.float32)
    next_to, third, below = (
        float(np.abs(numbers[:, lag:] - numbers[:, :-lag]).mean()) for lag in (1, 3, width)
    )
    return (next_to, third) if 0 < third <= _ALIKE * min(next_to, below) else None


def line_of_view(place: str) -> str:
    """The line of a view above the one "file:line" in which its result is used, or that itself."""
    file, _, line = place.rpartition(":")
    text = linecache.getlines(file) if line.isdecimal() else []
    for number in range(int(line) if text else 0, max(0, int(line or 0) - _ABOVE), -1):
        if number <= len(text) and _VIEWS.search(text[number - 1]):
            return f"{file}:{number}"
    return place
