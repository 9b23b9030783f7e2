"""The files of one rank, and the thread that writes them."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from trainfit.results.files.exchange import as_json
from trainfit.results.watch import tables
from trainfit.results.watch.run import Event, RunHeader
from trainfit.watch.recorder.files.light_rows import whole_row
from trainfit.watch.recorder.files.spill import Ring, Writer

#: File systems give files room in pieces of this size, or of several.
_BLOCK: Final = 4096


class RankFiles:
    """Created with the first header, and written until :meth:`close`.

    Args:
        folder: of the run. A process that finds its rank taken gets a folder within.
        header: makes the header from the threads of workers; called by the writing thread.
        failed: is told of errors that are no full disk.

    Raises ``OSError`` where nothing can be written.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        header: Callable[[Mapping[str, int]], RunHeader],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._header, self._failed = header, failed
        folder.mkdir(parents=True, exist_ok=True)
        text = header({}).to_json()
        if not _create(folder / f"rank{rank}.json", text):
            folder = folder / f"also-{os.getpid()}"
            folder.mkdir(exist_ok=True)
            _create(folder / f"rank{rank}.json", text)
        self.stem = folder / f"rank{rank}"
        """Path of the files without their endings."""
        self._writer = Writer(self.write)
        hurry = self._writer.hurry
        self.steps = Ring(self._file("steps.bin"), tables.STEPS, hurry=hurry, whole=whole_row)
        self.fetches = Ring(self._file(f"fetches.{os.getpid()}.bin"), tables.FETCHES, hurry=hurry)
        self.events: collections.deque[Event] = collections.deque()
        self.is_stale = False
        """Has the header to be written again?"""
        self._writer.start()

    @property
    def lost(self) -> int:
        """Rows that could not be written."""
        return self.steps.lost + self.fetches.lost

    @property
    def refused(self) -> int:
        """Of them, those that the disk refused."""
        return self.steps.refused + self.fetches.refused

    @property
    def first_lost_step(self) -> int | None:
        """From which on rows of steps are missing; ``None``: none is."""
        return self.steps.first_lost

    def close(self) -> None:
        """Write what is left."""
        self._writer.stop()
        self.is_stale = True
        self.write()
        if self.is_stale:  # no room for a new file next to it
            with contextlib.suppress(OSError):
                self._rewrite_header()
        for ring in (self.steps, self.fetches):
            ring.close()

    def write(self) -> None:
        """Rows, events and the header, as far as there is something new."""
        try:
            for ring in (self.steps, self.fetches):
                ring.write()
            self._write_events()
            if self.is_stale:
                self.is_stale = False
                self._write_header()
        except OSError:
            self.is_stale = True  # a full disk: the next time
        except Exception as error:
            self._failed("writing", error)

    def _file(self, ending: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{ending}")

    def _write_events(self) -> None:
        lines = []
        while self.events:
            lines.append(as_json(self.events.popleft()) + "\n")
        if lines:
            with self._file("events.jsonl").open("a", encoding="utf-8") as file:
                file.write("".join(lines))

    def _write_header(self) -> None:
        path, temporary = self._file("json"), self._file(f"json.{os.getpid()}")
        try:
            temporary.write_text(self._header(self._worker_threads()).to_json(), encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _rewrite_header(self) -> None:
        """On a full disk: where the old header is, if it has that much room, so that what is
        missing is told."""
        path, text = self._file("json"), self._header(self._worker_threads()).to_json().encode()
        room = -(-path.stat().st_size // _BLOCK) * _BLOCK
        if len(text) <= room:
            with path.open("r+b", buffering=0) as file:
                file.write(text)
                file.truncate(len(text))

    def _worker_threads(self) -> Mapping[str, int]:
        """The most of each library that a worker has told of."""
        found: dict[str, int] = {}
        for path in self.stem.parent.glob(f"{self.stem.name}.worker-threads.*"):
            for line in path.read_text(encoding="utf-8").splitlines():
                name, _, number = line.rpartition(" ")
                found[name] = max(found.get(name, 0), int(number))
        return found


def _create(path: Path, text: str) -> bool:
    """Create a whole file, or tell that there is one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True
