"""The kernel's page cache for a process's files (Linux).

Nothing here writes: leaving the cache never changes a file, it only makes the next reading of
it slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

_IO: Final = "/proc/self/io"
_MAPS: Final = "/proc/self/smaps"
#: Of a file, bytes whose place is asked for at most, and files.
_LOOKED_BYTES: Final = 256 << 20
_LOOKED_FILES: Final = 64
_MAP_HEAD: Final = re.compile(
    r"([0-9a-f]+)-([0-9a-f]+) ([rwxsp-]{4}) [0-9a-f]+ \S+ ([0-9]+) *(/.*)?"
)


@dataclass(frozen=True)
class ReadCounts:
    """Bytes that this process read so far (proc(5)).

    ``passed`` through read(2) and its kin, from wherever; ``stored`` those that a storage
    device was asked for, also for mapped pages (network and FUSE file systems may not count).
    """

    passed: int
    stored: int


def read_counts() -> ReadCounts | None:
    """The counts, or ``None`` where the system keeps none."""
    try:
        with open(_IO, encoding="ascii") as file:
            found = dict(line.split(": ") for line in file.read().splitlines())
        return ReadCounts(int(found["rchar"]), int(found["read_bytes"]))
    except (OSError, ValueError, KeyError):
        return None


@dataclass(frozen=True)
class Mapping:
    """A file mapped into this process: where, how, and how many bytes are in its page table."""

    path: str
    begin: int
    end: int
    permissions: str
    resident_bytes: int
    private_bytes: int
    """Of those, copies that this process wrote to."""


def mappings() -> tuple[Mapping, ...]:
    """The files that are mapped into this process and not executed (libraries are)."""
    try:
        with open(_MAPS, encoding="utf-8", errors="surrogateescape") as file:
            found = tuple(_parsed(file))
    except OSError:
        return ()
    executed = {each.path for each in found if "x" in each.permissions}
    return tuple(each for each in found if each.path not in executed)


def _parsed(lines: Iterable[str]) -> Iterator[Mapping]:
    head: Any = None
    resident = 0
    for line in lines:
        if (found := _MAP_HEAD.match(line)) is not None:
            head, resident = found, 0
        elif line.startswith("Rss:"):
            resident = int(line.split()[1]) << 10
        elif line.startswith("Anonymous:") and head is not None and head[5] and head[4] != "0":
            begin, end = int(head[1], 16), int(head[2], 16)
            private = int(line.split()[1]) << 10
            yield Mapping(head[5], begin, end, head[3], resident, private)


def evict(paths: Iterable[str]) -> int:
    """Ask the kernel to drop these files from the page cache; how many it was asked for.

    Only regular files, opened for reading. Pages that some process has mapped, and pages that
    are not yet written, stay; this process' own mappings of the files are emptied first (they
    fill again as they are used).
    """
    wanted = set(paths)
    _let_go(wanted)
    asked = 0
    for path in wanted:
        with contextlib.suppress(OSError), _opened(path) as file:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            asked += 1
    return asked


def _let_go(paths: set[str]) -> None:
    """Empty the page table of mappings that can only be read, of which nothing is lost."""
    libc = ctypes.CDLL(None, use_errno=True)
    for each in mappings():
        readable = each.permissions.startswith("r--") and not each.private_bytes
        if each.path in paths and readable:
            begin, length = ctypes.c_void_p(each.begin), ctypes.c_size_t(each.end - each.begin)
            libc.madvise(begin, length, mmap.MADV_DONTNEED)


def resident_share(paths: Iterable[str]) -> float | None:
    """How much of these files is in the page cache, by size; ``None`` if unknown.

    The kernel tells only who may write to a file or owns it; to others all of it seems there
    (mincore(2)). Of many or long files only the first are looked at.
    """
    pages = there = 0
    libc = ctypes.CDLL(None, use_errno=True)
    for path in list(paths)[:_LOOKED_FILES]:
        with contextlib.suppress(OSError, ValueError), _opened(path) as file:
            size = min(os.fstat(file).st_size, _LOOKED_BYTES)
            if not size:
                continue
            count = -(-size // mmap.PAGESIZE)
            found = _in_core(libc, file, size, count)
            if found is not None:
                pages, there = pages + count, there + found
    return there / pages if pages else None


def _in_core(libc: Any, file: int, size: int, count: int) -> int | None:
    libc.mmap.restype = ctypes.c_void_p
    kinds = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int)
    libc.mmap.argtypes = (*kinds, ctypes.c_long)
    # Not through Python's mmap, which gives no address of memory that may not be written.
    place = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
    if place in (None, ctypes.c_void_p(-1).value):
        return None
    answer = (ctypes.c_ubyte * count)()
    try:
        if libc.mincore(ctypes.c_void_p(place), ctypes.c_size_t(size), answer) != 0:
            return None
    finally:
        libc.munmap(ctypes.c_void_p(place), ctypes.c_size_t(size))
    return sum(each & 1 for each in bytes(answer))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    # O_NONBLOCK: should the path have become a pipe meanwhile, opening it must not wait.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path} is not a regular file")
        yield file
    finally:
        os.close(file)
