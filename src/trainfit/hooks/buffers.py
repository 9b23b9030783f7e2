"""Containers that keep tensors up to a number of them: a replay buffer in a deque."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from trainfit.simgpu.allocator.settings import MIN_BLOCK

#: Elements that are looked at, and how deep.
_ELEMENTS: Final = 4096
_DEEPEST: Final = 3


class Buffer(NamedTuple):
    """A container on the GPU: its bytes, its elements, and how many it has room for yet."""

    nbytes: int
    elements: int
    left: int


def largest_buffer() -> Buffer | None:
    """The deque with a ``maxlen`` that holds most of the GPU's memory and is not full."""
    found = [
        Buffer(_device_bytes(each), min(len(each), _ELEMENTS), each.maxlen - len(each))
        for each in gc.get_objects()
        if type(each) is deque and each.maxlen and 0 < len(each) < each.maxlen
    ]
    return max((each for each in found if each.nbytes), default=None)


def _device_bytes(elements: Iterable[Any]) -> int:
    tensors: dict[int, torch.Tensor] = {}
    with contextlib.suppress(Exception):  # elements of the script may be of any kind
        tensors = {
            id(each): each
            for element in itertools.islice(elements, _ELEMENTS)
            for each in _tensors(element, _DEEPEST)
            if each.is_cuda
        }
    return sum(-(-each.nbytes // MIN_BLOCK) * MIN_BLOCK for each in tensors.values())


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _tensors(vars(value), depth - 1)
