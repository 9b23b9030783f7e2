"""Ranks of a job that are simulated side by side: who carries what one sends to another.

Each rank writes into its own run's folder, and reads what came to it there
(:mod:`trainfit.simgpu.communication.peers`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from trainfit.results.runs.trace import CAME_FOLDER, SENT_FOLDER, WAITS_FILE, TraceOutcome

#: More processes than that are not run side by side.
MOST_RANKS: Final = 8


def pipeline_of(outcome: TraceOutcome) -> tuple[int, ...]:
    """The ranks of the groups in which it sends to one rank, or receives from one; none: it does
    neither, or there are more than :data:`MOST_RANKS`."""
    ranks = {
        rank
        for meeting in outcome.meetings
        if meeting.kind in ("send", "receive")
        for rank in meeting.group
    }
    return tuple(sorted(ranks)) if len(ranks) <= MOST_RANKS else ()


class Post:
    """Carries what ranks send; ``folders`` are those of their runs. May be called by any thread."""

    def __init__(self, folders: Mapping[int, Path]) -> None:
        self._folders, self._lock = folders, threading.Lock()
        self._carried: Counter[tuple[int, int]] = Counter()
        self._ended: set[int] = set()
        for folder in folders.values():
            (folder / CAME_FOLDER).mkdir()

    def carry(self) -> None:
        """Bring what was sent; where each rank waits for what nobody has sent, all are told."""
        with self._lock:
            waits = {rank: self._waits(rank) for rank in self._running}
            for rank in self._folders:
                self._carry_of(rank)
            if waits and all(waits[rank] and not self._has(rank, waits[rank]) for rank in waits):
                for rank in waits:
                    self._gone(rank)

    def ended(self, rank: int) -> None:
        """A rank sends no more."""
        with self._lock:
            self._carry_of(rank)
            self._ended.add(rank)
            self._gone(rank)

    @property
    def _running(self) -> Sequence[int]:
        return [rank for rank in self._folders if rank not in self._ended]

    def _waits(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return (self._folders[rank] / WAITS_FILE).read_text()
        return ""

    def _has(self, rank: int, name: str) -> bool:
        return (self._folders[rank] / CAME_FOLDER / name).exists()

    def _carry_of(self, rank: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._folders[rank] / SENT_FOLDER)):
                _, _, to = name.partition("-")
                if not to.isdigit():
                    continue  # not whole yet
                self._carried[rank, int(to)] += 1
                came = f"{rank}-{self._carried[rank, int(to)]}"
                source = self._folders[rank] / SENT_FOLDER / name
                os.replace(source, self._folders[int(to)] / CAME_FOLDER / came)

    def _gone(self, rank: int) -> None:
        for other in self._folders.values():
            (other / CAME_FOLDER / f"{rank}-gone").touch()
