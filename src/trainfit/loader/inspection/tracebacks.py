"""Parser of tracebacks: an exception's type and message, and the line of the user's code.

A DataLoader re-raises a worker's exception in the main process, with the worker's traceback
as its message (`torch/_utils.py`, ``ExceptionWrapper``); exceptions whose constructor does not
take a message become a ``RuntimeError``.
"""

from __future__ import annotations

import builtins
import functools
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainfit.results.runs.trace import OwnFault

_CAUGHT: Final = re.compile(
    r"Caught (?P<type>\S+) (?P<where>in [^\n]*?)\.\n(?:Original )?(?P<text>.*)", re.DOTALL
)
_HEADING: Final = "Traceback (most recent call last):\n"
_OF_THE_MACHINE: Final = (OSError, MemoryError, ModuleNotFoundError)
_WORKER: Final = re.compile(r"worker process (\d+)")
_FRAME: Final = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
#: Python's own library, of whatever installation.
_LIBRARY: Final = re.compile(r"/lib(?:64)?/python3\.\d+/")
#: Between the exceptions of a chain (`traceback.py`).
_CHAINED: Final = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):\n\n"
)


@dataclass(frozen=True)
class Frame:
    """A line of a traceback or of a stack; ``code`` is its text where that was given."""

    path: str
    line: int
    function: str
    code: str = ""

    @property
    def package(self) -> str:
        """The installed package that the file is part of, or empty."""
        for folder in ("site-packages", "dist-packages"):
            _, found, inside = self.path.replace(os.sep, "/").rpartition(f"/{folder}/")
            if found:
                return inside.split("/")[0].removesuffix(".py")
        return ""

    @property
    def is_ours(self) -> bool:
        return self.path.startswith(_own_folder())

    @property
    def is_user(self) -> bool:
        """Is it neither PyTorch's, nor Python's, nor an installed package's, nor ours?"""
        return not (
            self.package
            or self.is_ours
            or self.path.startswith("<")
            or self.path.startswith(_python_folders())
            or _LIBRARY.search(self.path) is not None
        )

    def __str__(self) -> str:
        return f"{self.path}:{self.line} in {self.function}"


@dataclass(frozen=True)
class ParsedException:
    """An exception: ``where`` it was caught ("in DataLoader worker process 0") or empty."""

    type: str
    message: str
    where: str
    frames: tuple[Frame, ...]

    @property
    def worker(self) -> int | None:
        found = _WORKER.search(self.where)
        return int(found[1]) if found else None

    @property
    def culprit(self) -> Frame | None:
        """The user's line: the innermost that is not of PyTorch or another package.

        Where no line is the user's, the innermost of a package that is not PyTorch.
        """
        users = [frame for frame in self.frames if frame.is_user]
        packages = [frame for frame in self.frames if frame.package not in ("", "torch")]
        return next(reversed(users or packages), None)


def parse(error_type: str, message: str, text: str) -> ParsedException:
    """What was raised, from an exception's type, message and traceback.

    A worker's exception is looked for in the message, then in the traceback, which shows it
    where the message was lost.
    """
    found = _CAUGHT.search(message) or _CAUGHT.search(text)
    if found is None:
        return ParsedException(error_type, message, "", frames(text))
    name, inner = found["type"], found["text"]
    return ParsedException(name, _message(name, inner), found["where"], frames(inner))


def own_fault_in(text: str) -> OwnFault | None:
    """That what a process of trainfit's printed ends with a traceback of trainfit's own code;
    ``None`` where it does not. Missing files, packages and memory are no faults of the code."""
    begin = text.rfind(_HEADING)
    if begin < 0:
        return None
    found = _frames_of(text[begin:])
    ours = [frame for frame in found if frame.is_ours]
    rest = text[begin:].split("\n")[1:]
    said = next((line for line in rest if line and not line.startswith(" ")), "")
    kind = getattr(builtins, said.partition(":")[0], Exception)
    if not ours or not said or any(frame.is_user for frame in found):
        return None
    if not isinstance(kind, type) or issubclass(kind, _OF_THE_MACHINE):
        return None
    place = os.path.relpath(ours[-1].path, Path(_own_folder()).parent)
    return OwnFault(said, f"{place}:{ours[-1].line}", text.strip())


def frames(text: str) -> tuple[Frame, ...]:
    """All frames, of the last exception of a chain if there are any, outermost first."""
    blocks = [_frames_of(block) for block in _CHAINED.split(text)]
    with_user = [block for block in blocks if any(frame.is_user for frame in block)]
    last = blocks[-1]
    if with_user and not any(frame.is_user for frame in last):
        return with_user[-1]
    return last


def _frames_of(text: str) -> tuple[Frame, ...]:
    found: list[Frame] = []
    lines = text.split("\n")
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if match := _FRAME.match(line):
            code = following.strip() if following.startswith("    ") else ""
            found.append(Frame(match["path"], int(match["line"]), match["function"] or "", code))
    return tuple(found)


def _message(name: str, text: str) -> str:
    """What follows the exception's type after the last frame of the last exception."""
    last = _CHAINED.split(text)[-1].rstrip("\n")
    starts = re.compile(rf"^(?:[\w.<>]+\.)?{re.escape(name)}(?:: |$)", re.MULTILINE)
    found = starts.search(last)
    return last[found.end() :] if found else short_tail(last.split("\n"))


def short_tail(lines: Sequence[str]) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


@functools.cache
def _own_folder() -> str:
    return str(Path(__file__).resolve().parents[2]) + os.sep


@functools.cache
def _python_folders() -> tuple[str, ...]:
    """Folders of Python's own library (packages installed in them are distinguished before)."""
    names = ("stdlib", "platstdlib")
    return tuple({os.path.join(sysconfig.get_path(name), "") for name in names})
