"""Frames of the recorder in a user's traceback, which is shown without them.

It imports next to nothing: every Python process of a watched command does.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Final

from trainfit.simgpu import patching

#: Files whose frames are not shown in the user's tracebacks.
_OURS: Final = (
    str(Path(__file__).resolve().parent) + os.sep,
    *(
        str(Path(patching.__file__).resolve().parents[1] / name) + os.sep
        for name in ("hooks", "torch_private")
    ),
    patching.__file__,
)


def without_ours(error: BaseException) -> TracebackType | None:
    """The traceback that the exception would have without the recorder's hooks."""
    seen: BaseException | None = error
    for _ in range(100):  # causes may go in a circle
        if seen is None:
            break
        kept = _kept(_links(seen.__traceback__))
        # An error that is only named as a cause has no traceback.
        for link, following in zip(kept, [*kept[1:], None], strict=False):
            link.tb_next = following
        seen.__traceback__ = kept[0] if kept else None
        seen = seen.__cause__ or seen.__context__
    return error.__traceback__


def _links(trace: TracebackType | None) -> list[TracebackType]:
    traces = []
    while trace is not None:
        traces.append(trace)
        trace = trace.tb_next
    return traces


def _kept(links: list[TracebackType]) -> list[TracebackType]:
    """The links of the user. Python hides the import system's frames unless ours follow them."""
    kept: list[TracebackType] = []
    for link in links:
        if not _is_ours(link):
            kept.append(link)
            continue
        while kept and kept[-1].tb_frame.f_code.co_filename.startswith("<frozen importlib"):
            kept.pop()
    return kept


def _is_ours(link: TracebackType) -> bool:
    return link.tb_frame.f_code.co_filename.startswith(_OURS)
