"""A measurement's progress on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

from trainfit.cli.common import progress
from trainfit.plan.loading import Listener, Stage
from trainfit.report.sizes import printable

_BAR = 10
#: Share done before which the whole time is not estimated.
_LEAST_SHARE = 0.03


class ProgressBar(Listener):
    """``[=====>    ] 12 s of about 35 s: 2 workers``, redrawn in place; a context manager."""

    def __init__(self, stream: TextIO | None = None, width: int | None = None) -> None:
        self._stream = stream or sys.stderr
        self._width = width
        self._started: float | None = None
        self._about: float | None = None
        self._shown = ""

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._draw("")

    def stage(self, stage: Stage) -> None:
        """The share that is done gives the time of everything."""
        if stage.share is None:
            return
        if self._started is None:
            self._started = stage.elapsed_s
        measured = stage.elapsed_s - self._started
        if stage.share >= _LEAST_SHARE and measured > 0:
            self._about = self._started + measured / min(stage.share, 1.0)

    def tick(self, stage: Stage) -> None:
        """Draw it, if it looks different now."""
        self._draw(self._line(stage))

    def _line(self, stage: Stage) -> str:
        text = printable(stage.text)
        if self._about is None:
            return f"[{'':{_BAR}}] {stage.elapsed_s:.0f} s: {text}"
        about = max(self._about, stage.elapsed_s)
        done = min(_BAR - 1, int(_BAR * stage.elapsed_s / about))
        bar = ("=" * done + ">").ljust(_BAR)
        return f"[{bar}] {stage.elapsed_s:.0f} s of about {about:.0f} s: {text}"

    def _draw(self, line: str) -> None:
        width = self._width or shutil.get_terminal_size().columns
        line = line[: max(1, width - 1)]
        if line != self._shown:
            self._stream.write("\r" + line.ljust(len(self._shown)) + ("" if line else "\r"))
            self._stream.flush()
            self._shown = line


class ProgressLines(Listener):
    """A line for each thing begun, once in a row; a context manager."""

    def __init__(self) -> None:
        self._last = ""

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stage(self, stage: Stage) -> None:
        if stage.text != self._last:
            progress(printable(stage.text))
        self._last = stage.text


def loading_progress() -> ProgressBar | ProgressLines:
    """What suits standard error."""
    return ProgressBar() if sys.stderr.isatty() else ProgressLines()
