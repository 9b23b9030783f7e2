"""Where in the user's own code are we?"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType, TracebackType

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep

_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_claimed: list[str] = []
#: What :func:`is_library` said: a look-up costs less than a call.
_known: dict[str, bool] = {}


def claim(folder: str | Path) -> None:
    """Count ``folder`` as the user's own, also where it lies among the installed libraries."""
    if is_library(os.path.join(folder, "module.py")):
        _claimed.append(str(folder) + os.sep)
        is_library.cache_clear()
        _known.clear()


def user_frame() -> str | None:
    """``file:line`` of the innermost frame outside of PyTorch, libraries and trainfit.

    ``None`` where every frame belongs to a library.
    """
    return frame_of_user(sys._getframe(1))


def place_of_user() -> tuple[str, int] | None:
    """Likewise, as file and line; for callers that ask at every allocation, hence unrolled."""
    frame: FrameType | None = sys._getframe(2)
    known = _known
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename not in known:
            known[filename] = is_library(filename)
        if not known[filename]:
            return filename, frame.f_lineno
        frame = frame.f_back
    return None


def frame_of_user(frame: FrameType | None) -> str | None:
    """Likewise, from ``frame`` outwards."""
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def line_of_user(trace: TracebackType | None) -> str | None:
    """Likewise, of the frames an exception passed through."""
    found = None
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if not is_library(filename):
            found = f"{filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


@functools.cache
def is_library(filename: str) -> bool:
    """Does a source file belong to Python, an installed package, or trainfit?"""
    if filename.startswith(tuple(_claimed)):
        return False
    return (
        filename.startswith((_PACKAGE, "<", *_LIBRARIES))
        or f"{os.sep}site-packages{os.sep}" in filename
    )
