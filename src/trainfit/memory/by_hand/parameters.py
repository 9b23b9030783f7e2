"""A hand formula's parameter memory: 4 bytes each for the weight, its gradient and each state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from trainfit.memory.stream.replay import Stream, live_at
from trainfit.results.runs.recording import KINDS, STEP_END, Recording
from trainfit.results.runs.recording_header import Parameter

#: Bytes of a number in the formula's parameters, gradients and states.
BYTES: Final = 4
#: Numbers that an optimizer keeps of each parameter, by its class.
_STATES: Final = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax"), 2),
    **dict.fromkeys(("RMSprop", "Adagrad"), 1),
}
#: SGD has a momentum if its states have at least this share of one.
_MOMENTUM: Final = 0.5


def numbers(parameters: Iterable[Parameter]) -> int:
    """How many numbers they have together."""
    return sum(int(np.prod(each.shape, dtype=np.int64)) for each in parameters)


def narrower(parameters: Iterable[Parameter]) -> int:
    """Bytes that they have more (negative: less) than 4 a number."""
    total = 0
    for each in parameters:
        itemsize = {"float16": 2, "bfloat16": 2, "float64": 8}.get(each.dtype, 4)
        itemsize = 1 if "8" in each.dtype else itemsize
        total += (itemsize - BYTES) * numbers([each])
    return total


def state_bytes(recording: Recording, parameters: Sequence[Parameter]) -> int | None:
    """Bytes of the recorded optimizer's states for a parameter, by the formula; ``None`` where it
    has none. The recording must have an optimizer step."""
    name = str(recording.header.get("optimizer") or "")
    if name == "SGD":
        one = BYTES * numbers(each for each in parameters if each.trained)
        return BYTES if _kept_states(recording) >= _MOMENTUM * one else 0
    states = _STATES.get(name)
    return None if states is None else BYTES * states


def _kept_states(recording: Recording) -> int:
    """Bytes of the optimizer's states after the last step."""
    end = int(np.flatnonzero(recording.events % 4 == STEP_END)[-1])
    live = live_at(Stream.of(recording), end)
    states = live[recording.alloc_kind[live] == KINDS.index("optimizer_state")]
    return int(recording.alloc_bytes[states].sum())
