"""Containers that keep tensors up to a number of them: a replay buffer in a deque or a list."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from trainfit.hooks.limits import room_left
from trainfit.simgpu.allocator.settings import MIN_BLOCK

#: Elements that are looked at, how deep, and attributes of one object.
_ELEMENTS: Final = 4096
_DEEPEST: Final = 3
_ATTRIBUTES: Final = 32
#: Lists without a bound of their own whose code is read.
_LISTS: Final = 4
_NO_ELEMENTS: Final = (str, bytes, int, float, type, torch.nn.Module, torch.optim.Optimizer)


class Buffer(NamedTuple):
    """A container on the GPU: its bytes, its elements, and how many it has room for yet."""

    nbytes: int
    elements: int
    left: int


def largest_buffer() -> Buffer | None:
    """The container with a bound that holds most of the GPU's memory and is not full: a deque with
    a ``maxlen``, or a list that the script's code keeps short."""
    bounded, others = [], []
    for each in gc.get_objects():
        if type(each) is deque and each.maxlen:
            if 0 < len(each) < each.maxlen and (nbytes := _device_bytes(each)):
                left = each.maxlen - len(each)
                bounded.append(Buffer(nbytes, min(len(each), _ELEMENTS), left))
        elif type(each) in (list, deque) and len(each) > 1 and _holds_tensors(each):
            others.append((_device_bytes(each), each))
    others.sort(key=lambda pair: -pair[0])
    for nbytes, each in others[:_LISTS]:
        if max(bounded, default=(0,))[0] >= nbytes:
            break
        if room := room_left(each):
            elements = sum(one is not None for one in itertools.islice(each, _ELEMENTS))
            bounded.append(Buffer(nbytes, elements, room))
    return max(bounded, default=None)


def _holds_tensors(elements: list[Any] | deque[Any]) -> bool:
    """Is the first or the last element on the GPU, as far as a quick look goes? Lists of parameters
    are an optimizer's, and large ones would leave no room for others among the few that are
    read."""
    with contextlib.suppress(Exception):  # elements of the script may be of any kind
        ends = (elements[0], elements[-1])
        return any(
            one.is_cuda and not isinstance(one, torch.nn.Parameter)
            for end in ends
            for one in _tensors(end, _DEEPEST - 1)
        )
    return False


def _device_bytes(elements: Iterable[Any]) -> int:
    tensors: dict[int, torch.Tensor] = {}
    with contextlib.suppress(Exception):
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
    elif isinstance(value, _NO_ELEMENTS) or not depth:
        return
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each, depth - 1)
    elif hasattr(value, "__dict__") and len(vars(value)) <= _ATTRIBUTES:
        yield from _tensors(vars(value), depth - 1)
