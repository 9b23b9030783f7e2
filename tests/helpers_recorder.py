"""Recording what happens in this process, and reading it back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit.results.runs.watched import RankRecord, load_run
from trainfit.watch.recorder import process
from trainfit.watch.recorder.recorder import Recorder, RecordingPlace


@dataclass
class Recording:
    """``rank`` is there once the block is left."""

    recorder: Recorder
    folder: Path
    rank: RankRecord | None = None

    @property
    def record(self) -> RankRecord:
        assert self.rank is not None
        return self.rank

    def events(self, kind: str) -> list[Any]:
        return [each for each in self.record.events if each.kind == kind]


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[Recording]:
    """Record what the block does."""
    place = RecordingPlace(folder, time.time(), time.monotonic(), "test")
    found = Recording(process.begin(place), folder)
    try:
        yield found
    finally:
        process.end()
    found.rank = load_run(folder).ranks[0]
