"""Where in the user's own code are we?"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def user_frame() -> str | None:
    """``file:line`` of the innermost frame outside of PyTorch, libraries and trainfit.

    ``None`` where every frame belongs to a library.
    """
    return frame_of_user(sys._getframe(1))


def frame_of_user(frame: FrameType | None, outwards: bool = True) -> str | None:
    """Likewise from ``frame`` on; only that frame itself if not ``outwards``."""
    while frame is not None:
        if not _is_library(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back if outwards else None
    return None


def _is_library(filename: str) -> bool:
    return (
        filename.startswith((_PACKAGE, "<"))
        or filename.startswith(_LIBRARIES)
        or "site-packages" in filename
    )
