"""Whose training loop makes an optimizer step: a framework's, by the frames that call it."""

from __future__ import annotations

from types import FrameType
from typing import Final

from trainfit.results.runs.steps import Framework

#: Modules in whose frames an optimizer step is made, and whose loop that is.
_LOOPS: Final[tuple[tuple[str, Framework], ...]] = (
    ("lightning.", "Lightning"),
    ("pytorch_lightning.", "Lightning"),
    ("transformers.trainer", "Transformers"),
    ("accelerate.optimizer", "Accelerate"),
)


def loop_of(frame: FrameType | None) -> Framework:
    """The loop in ``frame`` and its callers; empty: the script's own."""
    names = []
    while frame is not None:
        names.append(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    for start, loop in _LOOPS:
        if any(name.startswith(start) for name in names):
            return loop
    return ""
