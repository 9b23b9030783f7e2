"""The files of one rank, the thread that writes them, and rows on their way to them."""

from __future__ import annotations

import _thread
import collections
import contextlib
import faulthandler
import functools
import math
import os
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainfit.results.files.decoding import as_json
from trainfit.results.runs import tables
from trainfit.results.runs.tables import RowFile
from trainfit.results.runs.watched import Event, RunHeader, died_path
from trainfit.simgpu.patching import PatchSet

# ---
# Rows of steps that were recorded lightly: short ones until they are written.


_NAMES: Final = tables.STEPS.names or ()
#: What a short row has: the first columns of a whole one, samples and batches, memory, the loss,
#: and last the flags.
_FIRST: Final = _NAMES.index("input_s") + 1
_SAMPLES, _QUEUED = _NAMES.index("samples"), _NAMES.index("queued")
_MEMORY, _LOSS = _NAMES.index("allocated_bytes"), _NAMES.index("loss")
_COUNTED: Final = _FIRST + _QUEUED - _SAMPLES
_SHORT: Final = _COUNTED + _LOSS - _MEMORY + 2
#: Between them, and what stands for a number that was not looked at.
_NO_PHASES: Final = (math.nan,) * (_SAMPLES - _FIRST)
_NO_COUNTS: Final = (-1,) * (_MEMORY - _QUEUED)


def whole_row(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row of :data:`trainfit.results.runs.tables.STEPS` of a short one: step, end, length, wait
    for batches, samples, batches, the four columns of memory, loss (``None``: not looked at) and
    flags. Others are returned as they are."""
    if len(row) != _SHORT:
        return row
    samples, batches = row[_FIRST:_COUNTED]
    memory, loss, flags = row[_COUNTED:-2], row[-2], row[-1]
    if loss is None:
        loss = math.nan
    else:
        flags |= tables.loss_flag(loss)
        loss = tables.float32(loss)
    return (
        *(*row[:_FIRST], *_NO_PHASES, min(samples, tables.MOST_32), min(batches, tables.MOST_16)),
        *(*_NO_COUNTS, *memory, loss, math.nan, math.nan, flags),
    )


# ---
# Rows on their way to a file: a ring of fixed size, emptied by a thread of its own.
#
# The training thread only hands over a row. A thread packs and writes them once a second, so that
# a slow disk or a step of minutes holds up neither the training nor the file: what a killed process
# leaves behind is a second old, or little more. A ring that is full (the disk hangs) drops rows and
# counts them; so does a disk that is full, whose file keeps whole rows only.


#: Rows that a ring holds; it is written at once when it is half full.
_ROWS: Final = 4096
#: Rows that are packed and written at once.
_AT_ONCE: Final = 256

Row = tuple[Any, ...]
#: Seconds between writes.
INTERVAL_S: Final = 1.0
#: ``struct``'s letters of the columns' types.
_LETTERS: Final = {"i8": "q", "i4": "i", "i2": "h", "u2": "H", "f8": "d", "f4": "f"}


def packer(kind: np.dtype[Any]) -> struct.Struct:
    """Packs a tuple as a row of ``kind``, several times faster than an assignment to an array."""
    names = kind.names or ()
    return struct.Struct("=" + "".join(_LETTERS[kind[name].str[1:]] for name in names))


class Ring:
    """The rows of one table that are not written yet, at most ``rows``. One thread appends, one
    writes; a deque needs no lock of ours (a fork could leave it locked). Rows are packed by the
    thread that writes, many at once: in the training, between two steps, each would find its code
    and data out of the caches.

    ``hurry`` is called when the ring is half full; ``whole`` completes a row before it is packed.
    """

    def __init__(
        self,
        path: Path,
        kind: np.dtype[Any],
        rows: int = _ROWS,
        hurry: Callable[[], None] = lambda: None,
        whole: Callable[[Row], Row] | None = None,
    ) -> None:
        self._hurry, self._half, self._whole = hurry, rows // 2, whole
        self._packer = packer(kind)
        self._rows: Final = rows
        self._waiting: collections.deque[Row] = collections.deque()
        self._file = RowFile(path, kind.itemsize)
        self._dropped = 0
        self.refused = 0
        """Rows for which the disk had no room."""
        self.first_lost: int | None = None
        """The number in the first column of the first lost row."""

    @property
    def lost(self) -> int:
        """Rows that found no room, or no disk."""
        return self._dropped + self.refused

    @property
    def waiting(self) -> int:
        """Rows that are not written yet."""
        return len(self._waiting)

    def append(self, row: Row) -> None:
        """Keep a row, its values in the columns' order."""
        waiting = len(self._waiting)
        if waiting >= self._rows:
            self._drop(row)
            return
        self._waiting.append(row)
        if waiting + 1 == self._half:
            self._hurry()

    def write(self) -> None:
        """Write what waits. Raises ``struct.error`` after it, where a row had a value that its
        column cannot hold."""
        error = None
        for _ in range(0, len(self._waiting), _AT_ONCE):
            rows: list[Row] = []
            packed = bytearray()
            for _ in range(min(_AT_ONCE, len(self._waiting))):
                row = self._waiting.popleft()
                try:
                    packed += self._packer.pack(*(self._whole(row) if self._whole else row))
                    rows.append(row)
                except struct.error as mine:
                    error = mine
                    self._drop(row)
            lost = self._file.append(memoryview(packed))
            if lost and self.first_lost is None:
                self.first_lost = int(rows[-lost][0])
            self.refused += lost
        if error is not None:
            raise error

    def close(self) -> None:
        with contextlib.suppress(struct.error):  # was told by ``write``
            self.write()
        self._file.close()

    def _drop(self, row: Row) -> None:
        self._dropped += 1
        if self.first_lost is None:
            self.first_lost = int(row[0])


class UnlistedThread:
    """A daemon thread that :mod:`threading` does not list: scripts count threads, and wait until
    none but their own are left."""

    def __init__(self, target: Callable[[], None]) -> None:
        self._target = target
        self._over = threading.Event()
        self._process = self._ident = -1

    def start(self) -> None:
        self._process = os.getpid()
        self._ident = _thread.start_new_thread(self._run, ())

    def join(self, timeout: float) -> None:
        """Wait for its end, at most so many seconds; not from within, nor in a forked child, which
        does not have it."""
        if self._process == os.getpid() and self._ident != threading.get_ident():
            self._over.wait(timeout)

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._over.set()


class Writer:
    """Calls ``write`` every :data:`INTERVAL_S` in a thread of its own, until it is stopped."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._stopped = False
        self._wake = threading.Event()
        self._thread = UnlistedThread(self._run)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Write now."""
        self._wake.set()

    def stop(self) -> None:
        """Wait for the thread to end; it may be in a write."""
        self._stopped = True
        self._wake.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._stopped:
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            self._write()


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
        """The lost rows that the disk refused."""
        return self.steps.refused + self.fetches.refused

    @property
    def first_lost_step(self) -> int | None:
        """The step from which on rows of steps are missing; ``None``: none is."""
        return self.steps.first_lost

    def close(self) -> None:
        """Write what is left."""
        self._writer.stop()
        # First, so that events and header have a file descriptor where the script has all others.
        for ring in (self.steps, self.fetches):
            ring.close()
        self.is_stale = True
        self.write()
        if self.is_stale:  # no room for a new file next to it
            with contextlib.suppress(OSError):
                self._rewrite_header()

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
        if not self.events:
            return
        # Where no file can be opened they stay for the next time.
        with self._file("events.jsonl").open("a", encoding="utf-8") as file:
            lines = []
            while self.events:
                lines.append(as_json(self.events.popleft()) + "\n")
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
        """Write the header on a full disk: where the old one is, if it has that much room, so that
        what is missing is told."""
        path, text = self._file("json"), self._header(self._worker_threads()).to_json().encode()
        room = -(-path.stat().st_size // _BLOCK) * _BLOCK
        if len(text) <= room:
            with path.open("r+b", buffering=0) as file:
                file.write(text)
                file.truncate(len(text))

    def _worker_threads(self) -> Mapping[str, int]:
        """The most of each library that a worker has told of."""
        threads: dict[str, int] = {}
        for path in self.stem.parent.glob(f"{self.stem.name}.worker-threads.*"):
            for line in path.read_text(encoding="utf-8").splitlines():
                name, _, number = line.rpartition(" ")
                threads[name] = max(threads.get(name, 0), int(number))
        return threads


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


# ---
# Where the training process crashes in native code.


class CrashStack:
    """Leaves the stack that a process crashes in, of the thread that does: a signal ends it without
    a traceback. Nothing runs before that.

    It is Python's own :mod:`faulthandler`, as long as the script does not want it for itself: to
    the script it is off, and what the script enables or disables is done.
    """

    def __init__(self, stem: Path, patches: PatchSet) -> None:
        self._path, self._file, self._mine = died_path(stem, os.getpid()), None, False
        if faulthandler.is_enabled():
            return
        self._file = self._path.open("wb", buffering=0)
        faulthandler.enable(self._file, all_threads=False)
        self._mine = True
        patches.hook(faulthandler, "is_enabled", self._asked)
        patches.hook(faulthandler, "enable", self._taken)
        patches.hook(faulthandler, "disable", self._taken)

    def _asked(self, original: Callable[[], bool]) -> Callable[[], bool]:
        @functools.wraps(original)
        def is_enabled() -> bool:
            return not self._mine and original()

        return is_enabled

    def _taken(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def taken(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self._mine = False

        return taken

    def in_child(self) -> None:
        """The process was forked: what ends the child is not what ends this process."""
        if self._mine:
            faulthandler.disable()

    def close(self) -> None:
        """The process is recorded no more, or ends as it should."""
        self.in_child()
        if self._file is not None:
            self._file.close()
            with contextlib.suppress(OSError):
                if not self._path.stat().st_size:
                    self._path.unlink()
