"""State of this process's own sandbox; empty in a process without one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

from trainfit.results.runs.sandbox import ProtectionKind


@dataclasses.dataclass
class State:
    """``entered`` is the protection's own (:mod:`overlay`, :mod:`redirection`)."""

    kind: ProtectionKind
    folder: Path
    entered: Any


_state: State | None = None


def current() -> State | None:
    return _state


def become(state: State) -> None:
    global _state
    _state = state


def stopped() -> str:
    """Why the script has to end, if its keeper says so (it wrote too much)."""
    if _state is None:
        return ""
    try:
        return (_state.folder / "stop").read_text()
    except OSError:
        return ""


def note(line: str) -> None:
    """Something that the reader of the result should know; the same line counts once."""
    if _state is None:
        return
    with contextlib.suppress(OSError):
        data = " ".join(line.split()).encode() + b"\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(_state.folder / "notes.txt", flags, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)
