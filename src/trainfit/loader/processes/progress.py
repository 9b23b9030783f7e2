"""Progress of a measurement: the current activity and the partial result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trainfit.results.files.exchange import write_whole


class Progress(Protocol):
    """Where a measurement tells of itself."""

    def __call__(self, text: str, share: float | None = None) -> None:
        """``text`` begins now ("2 workers"); ``share`` of everything is done (0 to 1)."""

    def keep(self, result: Any) -> None:
        """Keep a result (with ``to_json``) in case that what comes next ends the process."""


class NullProgress:
    """A progress that is reported to nobody."""

    def __call__(self, text: str, share: float | None = None) -> None:
        pass

    def keep(self, result: Any) -> None:
        pass


class PartialProgress:
    """A part of a larger measurement: its shares from 0 to 1 are some of the whole's."""

    def __init__(self, whole: Progress, begin: float, end: float) -> None:
        self._whole, self._begin, self._end = whole, begin, end

    def __call__(self, text: str, share: float | None = None) -> None:
        part = None if share is None else self._begin + (self._end - self._begin) * share
        self._whole(text, part)

    def keep(self, result: Any) -> None:
        self._whole.keep(result)


class Reporter:
    """Tells the parent process, through files of a folder that it reads."""

    def __init__(self, folder: Path, alive: Callable[[], None] = lambda: None) -> None:
        self._folder, self._alive = folder, alive

    def __call__(self, text: str, share: float | None = None) -> None:
        self._alive()
        line = json.dumps({"text": text, "share": share})
        with (self._folder / "progress").open("a") as stream:
            stream.write(line + "\n")

    def keep(self, result: Any) -> None:
        write_whole(self._folder / "partial.json", result.to_json())


_current: Progress = NullProgress()


def current() -> Progress:
    """The progress of this process: the parent's where there is one (:mod:`.child`)."""
    return _current


def tell_to(progress: Progress) -> None:
    """Make ``progress`` this process's."""
    global _current
    _current = progress
