"""Transitions that a replay buffer keeps: a state that is the same object as the one after it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from trainfit.results.runs.learning import LearningFacts, Misuse

#: Transitions of one container that are looked at, and how many there must be.
_MOST: Final = 64
_LEAST: Final = 16
#: Parts of a transition: a state, what was done, the next state.
_PARTS: Final = 3
#: Of them, the share whose states are one object, and that of another transition, too: no state of
#: an environment stays as it is that often. Samples whose labels are their input have one each.
_SHARE: Final = 0.9


def with_transitions(facts: LearningFacts) -> LearningFacts:
    """The facts of a run that is over, with what its replay buffers hold."""
    return dataclasses.replace(facts, misuses=(*facts.misuses, *_aliased()))


def _aliased() -> Iterator[Misuse]:
    """The misuse of the first container whose transitions have one array as two of their parts."""
    for each in gc.get_objects():
        if type(each) not in (list, deque) or len(each) < _LEAST:
            continue
        with contextlib.suppress(RuntimeError):  # changed by another thread
            looked = list(itertools.islice(each, _MOST))
            if not all(map(_is_transition, looked)):
                continue
            twice = [_twice(transition) for transition in looked]
            often = Counter(number for numbers in twice for number in numbers)
            shared = sum(any(often[number] > 1 for number in numbers) for numbers in twice)
            if shared >= _SHARE * len(looked):
                yield Misuse.of("states_aliased", len(each))
                return


def _is_transition(value: Any) -> bool:
    return isinstance(value, tuple | Mapping) and len(value) >= _PARTS


def _twice(transition: Any) -> set[int]:
    """The arrays that are two of its parts."""
    parts = transition.values() if isinstance(transition, Mapping) else transition
    arrays = [
        id(each)
        for each in parts
        if (isinstance(each, np.ndarray) and each.size > 1)
        or (isinstance(each, torch.Tensor) and each.numel() > 1)
    ]
    return {array for array, number in Counter(arrays).items() if number > 1}
