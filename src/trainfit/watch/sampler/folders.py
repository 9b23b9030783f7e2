"""/dev/shm and the folder of temporary files: how full they are, and of which new files."""

from __future__ import annotations

import collections
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from trainfit.hardware.machine.memory import SHM
from trainfit.results.runs.tables import FOLDERS, SHARED_MEMORY, TEMPORARY, Table, empty_rows

#: Seconds between two looks.
EVERY_S: Final = 1.0
#: Bytes more than at the start from which files are counted, and how many times more than when
#: they were counted last: few runs ever need it.
_NOTICED: Final = 32 << 20
_MORE: Final = 1.3
#: Entries of a folder that are looked at, with those of folders in it.
_MOST_ENTRIES: Final = 5000
#: How much more of its files' bytes there must be before their names are told again.
_AGAIN: Final = 1.5
#: What changes from file to file in a name: numbers, and what tempfile and PyTorch make up.
_CHANGES: Final = re.compile(r"\d+|(?<=tmp)[a-z0-9_]{8}|[0-9a-f]{8,}")
#: What tempfile makes up stands between any prefix and suffix: before a dot, or at the end.
_MADE_UP: Final = re.compile(r"[a-z0-9_]{8}(?=\.|/|$)")
#: Files whose names differ in nothing else, from which that is what it is.
_LEAST_ALIKE: Final = 4

Tell = Callable[[str, str, Mapping[str, float]], None]


class Folders:
    """Rows of :data:`trainfit.results.runs.tables.FOLDERS`; nothing is opened, only looked at.

    Args:
        temporary: the run's folder of temporary files.
        tell: takes an event's kind, text and values.
        owner: the user whose files count.
        written: bytes that the run's processes have written (``None``: not known); other programs'
            files are not told of.
    """

    def __init__(
        self,
        temporary: str,
        tell: Tell,
        shared: str = SHM,
        owner: int | None = None,
        written: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._tell, self._began, self._written = tell, time.time(), written
        self._owner = os.getuid() if owner is None else owner
        self._paths = {SHARED_MEMORY: shared, TEMPORARY: temporary}
        self._first: dict[int, int] = {}
        self._told: dict[int, float] = {}
        self._counted: dict[int, float] = {}

    def sample(self, now: float) -> Table:
        """A row for each that can be read, at ``now`` (``time.monotonic()``)."""
        rows = []
        for folder, path in self._paths.items():
            try:
                found = os.statvfs(path)
            except OSError:
                continue
            row = empty_rows(FOLDERS)
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            row["time_s"], row["folder"] = now, folder
            row["used_bytes"], row["free_bytes"] = used, found.f_bavail * found.f_frsize
            more = used - self._first.setdefault(folder, used)
            if more >= max(_NOTICED, _MORE * self._counted.get(folder, 0.0)):
                self._counted[folder] = more
                row["new_bytes"], row["new_files"] = self._count(folder, path)
            rows.append(row)
        return _joined(rows)

    def _count(self, folder: int, path: str) -> tuple[int, int]:
        sizes: collections.Counter[str] = collections.Counter()
        files: collections.Counter[str] = collections.Counter()
        for name, size in _by_pattern(dict(self._new_files(path))):
            sizes[name] += size
            files[name] += 1
        if sizes:
            name, size = sizes.most_common(1)[0]
            is_news = size >= _NOTICED and size >= _AGAIN * self._told.get(folder, 0.0)
            if is_news and (folder != TEMPORARY or self._is_ours(size)):
                self._told[folder] = size
                values = {"folder": folder, "bytes": size, "files": files[name]}
                self._tell("new_files", f"{path}/{name}", values)
        return sum(sizes.values()), sum(files.values())

    def _is_ours(self, nbytes: int) -> bool:
        written = self._written()
        return written is None or written >= nbytes / 2

    def _new_files(self, path: str) -> Iterator[tuple[str, int]]:
        """Names and bytes of the user's files that were written to since the run began."""
        left, waiting = _MOST_ENTRIES, [("", path)]
        while waiting and left > 0:
            prefix, folder = waiting.pop()
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        left -= 1
                        if left <= 0:
                            return
                        found = entry.stat(follow_symlinks=False)
                        if found.st_uid != self._owner or found.st_mtime < self._began:
                            continue
                        if stat.S_ISREG(found.st_mode):
                            yield prefix + entry.name, found.st_blocks * 512
                        elif stat.S_ISDIR(found.st_mode):
                            waiting.append((f"{prefix}{entry.name}/", entry.path))
            except OSError:  # it is gone, or another user's
                continue


def _by_pattern(sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """What each file's name has in common with others, and its bytes."""
    patterns = {name: _CHANGES.sub("*", name) for name in sizes}
    alike = collections.Counter(patterns.values())
    # Names that no other file has may differ in what tempfile made up.
    without = {name: _MADE_UP.sub("*", name) for name in sizes if alike[patterns[name]] == 1}
    without = {name: _CHANGES.sub("*", pattern) for name, pattern in without.items()}
    made_up = collections.Counter(without.values())
    for name, size in sizes.items():
        pattern = without.get(name, "")
        yield pattern if made_up[pattern] >= _LEAST_ALIKE else patterns[name], size


def _joined(rows: list[Table]) -> Table:
    joined = empty_rows(FOLDERS, len(rows))
    for place, row in enumerate(rows):
        joined[place] = row[0]
    return joined


def temporary_folder(environment: Mapping[str, str]) -> str:
    """Where a process of this environment makes temporary files (tempfile.gettempdir())."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        path = environment.get(name, "")
        if os.path.isabs(path) and Path(path).is_dir():
            return path
    return "/tmp"
