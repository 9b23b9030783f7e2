"""Views and copies of tensors that a script makes by hand, and that are not what is meant.

Views that seem to swap dimensions, and put numbers under other indices instead: by their shapes,
and by the numbers of images.

Activations that a script casts to float32 by hand within autocast, which casts them back.

Copies of the GPU's tensors in the host's memory that outlive the step which made them.
"""

from __future__ import annotations

import gc
import itertools
import linecache
import math
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from trainfit.results.runs.learning import Misuse
from trainfit.simgpu.device.user_location import called_by_user
from trainfit.torch_private.autograd import behind
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


#: Functions that cast, and those that autocast computes in 16 bits (torch/amp, "ops that can
#: autocast to float16").
_CASTS: Final = {"float", "double", "to", "type"}
_IN_16_BITS: Final = {
    *("linear", "matmul", "bmm", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"),
}
#: What is between both: views, and what changes each number by itself.
_BETWEEN: Final = (
    *("View", "UnsafeView", "Reshape", "Split", "Slice", "Select", "Transpose", "Permute"),
    *("Expand", "Unsqueeze", "Squeeze", "Unbind", "Clone", "Alias", "T0", "Gelu", "Relu", "Silu"),
    *("Sigmoid", "Tanh", "LeakyRelu", "Hardswish", "Mish", "Elu", "NativeDropout", "FusedDropout"),
)
_MARK: Final = "trainfit_cast"
#: Bytes of a step's casts that are worth a word, and lines that are told.
_LARGE_CASTS: Final = 64 << 20
_LINES_TOLD: Final = 3


class UndoneCasts:
    """Follows what a script casts to float32 to the layer that autocast runs in 16 bits."""

    def __init__(self, place: Callable[[], str | None], steps: Callable[[], int]) -> None:
        self._place, self._steps = place, steps
        self._step = -1
        self._bytes: dict[str, int] = {}
        self._most: dict[str, int] = {}

    def found(self) -> Iterator[Misuse]:
        """Bytes of a step's casts, how many lines make them, and the first of these."""
        most = max(self._bytes, self._most, key=lambda each: sum(each.values()))
        if sum(most.values()) >= _LARGE_CASTS:
            lines = sorted(most, key=lambda line: -most[line])
            told = ", ".join(line.rpartition("/")[2] for line in lines[:_LINES_TOLD])
            yield Misuse.of("casts_undone", sum(most.values()), len(lines), told, place=lines[0])

    def gave(self, name: str, args: Sequence[Any], result: torch.Tensor) -> None:
        """A function of PyTorch gave a tensor."""
        if name not in _CASTS and name not in _IN_16_BITS:
            return
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not torch.is_autocast_enabled("cuda"):
            return
        if name in _CASTS:
            node: Any = result.grad_fn
            if node is not None and result.itemsize > first.itemsize == 2 and called_by_user():
                node.metadata[_MARK] = self._place() or "", result.nbytes
            return
        for argument in args[:3]:
            if isinstance(argument, torch.Tensor) and argument.dtype == torch.float32:
                node = behind(argument.grad_fn, _BETWEEN)
                cast = None if node is None else node.metadata.pop(_MARK, None)
                if cast is not None:
                    self._note(*cast)

    def _note(self, place: str, nbytes: int) -> None:
        if self._steps() != self._step:
            self._step = self._steps()
            self._most = max(self._bytes, self._most, key=lambda each: sum(each.values()))
            self._bytes = {}
        self._bytes[place] = self._bytes.get(place, 0) + nbytes


#: Bytes that a step adds, from which 1,000 steps are worth a word: 4 GiB.
_LARGE: Final = 4 << 20
#: Earlier steps whose copies live.
_STEPS: Final = 2
#: Copies of a line that are remembered, and lines.
_MOST: Final = 256
_LINES: Final = 16


class HostCopies:
    """Follows what ``.cpu()`` gives; ``place`` gives the line that is running, ``steps`` how many
    the first of the optimizers has begun."""

    def __init__(self, place: Callable[[], str | None], steps: Callable[[], int]) -> None:
        self._place, self._steps = place, steps
        self._known: dict[str, list[tuple[int, int, weakref.ref[Any]]]] = {}
        self._is_copying = False
        self._found: Misuse | None = None

    def found(self) -> Iterator[Misuse]:
        """Bytes that each step adds, and the line that copies them."""
        if self._found is not None:
            yield self._found

    def copying(self, source: torch.Tensor) -> None:
        """``source.cpu()`` is called."""
        is_asked = self._found is None and bool(self._steps())
        self._is_copying = is_asked and source.is_cuda and called_by_user()

    def copied(self, copy: Any) -> None:
        """``source.cpu()`` gave a copy."""
        is_copied, self._is_copying = self._is_copying, False
        if not is_copied or not isinstance(copy, torch.Tensor):
            return
        place = self._place() or ""
        if place and (place in self._known or len(self._known) < _LINES):
            mine = self._known.setdefault(place, [])
            mine.append((self._steps(), copy.nbytes, weakref.ref(copy)))
            del mine[:-_MOST]

    def looked(self) -> None:
        """A step that is looked at is about to use its gradients."""
        now = self._steps()
        for place, mine in self._known.items() if self._found is None else ():
            alive = [(step, size, it) for step, size, copy in mine if (it := copy()) is not None]
            steps = {step for step, _, _ in alive if step < now}
            per_step = sum(size for step, size, _ in alive if step < now) // max(1, len(steps))
            if len(steps) >= _STEPS and per_step >= _LARGE and not _is_bounded(alive[0][2], mine):
                self._found = Misuse.of("host_copies_kept", per_step, place=place)


def _is_bounded(tensor: Any, known: Any) -> bool:
    """Is it in a container that keeps so many and no more?"""
    level = [tensor]
    for _ in range(3):
        holders = [
            referrer
            for referrer in gc.get_referrers(*level)
            if isinstance(referrer, list | tuple | dict | deque) and referrer is not known
        ]
        if any(isinstance(holder, deque) and holder.maxlen is not None for holder in holders):
            return True
        level = [holder for holder in holders if isinstance(holder, tuple | dict)][:8]
        if not level:
            return False
    return False
