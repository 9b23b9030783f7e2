"""The files that a data set reads, and the kernel's page cache for them (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import mmap
import os
import re
import stat
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

# ---
# The kernel's page cache for a process's files (Linux).
#
# Nothing here writes: leaving the cache never changes a file, it only makes the next reading of
# it slower.


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
        if (match := _MAP_HEAD.match(line)) is not None:
            head, resident = match, 0
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


#: Seconds between two looks at the open descriptors, for files that C code opens and closes.
_LOOK_S: Final = 1e-3
#: Objects of a data set that are searched for the names of its open files.
_MOST_OBJECTS: Final = 200_000

#: C functions that open a file by name and close it again: module and name.
_OPENERS: Final = (
    ("cv2", "imread"),
    ("cv2", "imreadmulti"),
    ("av", "open"),
    ("soundfile", "read"),
    ("torchaudio", "load"),
    ("torchvision.io", "read_file"),
    ("torchvision.io.image", "read_file"),
    ("torchvision.io.image", "read_image"),
    ("safetensors.torch", "load_file"),
    ("pyarrow.parquet", "read_table"),
    ("pyarrow", "memory_map"),
)
#: Files of the system and of Python, which no data set is made of.
_SYSTEM: Final = ("/proc/", "/sys/", "/etc/", "/lib", "/usr/lib", "/usr/share/locale")
_PYTHON: Final = tuple(
    {f"{sysconfig.get_paths()[each]}/" for each in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_PROGRAM: Final = (".py", ".pyc", ".so", ".pyi")


class FileWatch:
    """Notes the files that are read from when it is made on. In a forked process only.

    Args:
        dataset: whose open files are its own, of those that the process already has.
    """

    def __init__(self, dataset: Any) -> None:
        self.first_batch: dict[str, int] = {}
        """Of each file (its real path), the batch that it was first seen with."""
        self._batch = 0
        self._heard: list[Any] = []
        self._listening = True
        self._pause = threading.Event()
        self._own = _own_files(dataset)
        self._inherited = dict(open_files())
        self._mapped = _resident()
        sys.addaudithook(self._hear)
        _listen_to_openers(self._heard.append)
        self._thread = threading.Thread(target=self._look, name="trainfit files", daemon=True)
        self._thread.start()

    def batch_made(self) -> None:
        """The next files belong to the next batch."""
        self._settle()
        self._batch += 1

    def end(self) -> None:
        """No more files are noted; those of the whole time are, mapped ones included."""
        self._listening = False
        self._pause.set()
        self._thread.join()
        self._batch = max(0, self._batch - 1)
        self._settle()
        before = self._mapped
        for path, nbytes in _resident().items():
            # A fork begins with an empty page table for mapped files: what is there was used.
            if nbytes > before.get(path, 0):
                self._note(path, 0)

    def _hear(self, event: str, words: tuple[Any, ...]) -> None:
        if event != "open" or not self._listening:
            return
        path, _, flags = words
        reading = isinstance(flags, int) and not flags & (os.O_ACCMODE | os.O_DIRECTORY)
        if reading and not isinstance(path, int):
            self._heard.append(path)

    def _settle(self) -> None:
        self._see_descriptors()
        heard, self._heard[:] = list(self._heard), []
        for each in heard:
            with contextlib.suppress(TypeError, ValueError):
                self._note(os.fsdecode(each), self._batch)

    def _look(self) -> None:
        while not self._pause.wait(_LOOK_S):
            self._see_descriptors()

    def _see_descriptors(self) -> None:
        for number, (path, position) in open_files():
            before = self._inherited.get(number)
            inherited = before is not None and before[0] == path
            moved = inherited and before is not None and before[1] != position
            if not inherited or moved or path in self._own:
                self._note(path, self._batch)

    def _note(self, path: str, batch: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            real = os.path.realpath(path)
            if real not in self.first_batch and is_data(real):
                self.first_batch[real] = batch


def is_data(path: str) -> bool:
    """Is it a regular file that may be data: no program's, and none of the system's?"""
    if path.startswith((*_SYSTEM, *_PYTHON)) or path.endswith(_PROGRAM):
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def open_files() -> Iterator[tuple[int, tuple[str, int]]]:
    """The regular files that this process has open for reading only, with their positions.

    Standard input and output are not among them.
    """
    try:
        numbers = [int(each) for each in os.listdir("/proc/self/fd")]
    except OSError:
        return
    for number in numbers:
        if number <= 2:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if not path.startswith("/") or not is_data(path):
                continue
            descriptor = os.open(f"/proc/self/fdinfo/{number}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                text = os.read(descriptor, 4096).decode()
            finally:
                os.close(descriptor)
            info = dict(line.split(":\t") for line in text.splitlines() if ":\t" in line)
            if not int(info["flags"], 8) & os.O_ACCMODE:
                yield number, (path, int(info["pos"]))


def _resident() -> dict[str, int]:
    found: dict[str, int] = {}
    for each in mappings():
        if each.permissions.startswith("r--"):
            found[each.path] = found.get(each.path, 0) + each.resident_bytes
    return found


def _own_files(dataset: Any) -> frozenset[str]:
    """Files that are open already and that some object of the data set holds or names."""
    candidates = {path for _, (path, _) in open_files()}
    if not candidates:
        return frozenset()
    names = {os.path.basename(path) for path in candidates}
    found: set[str] = set()
    for each in _objects(dataset):
        with contextlib.suppress(Exception):  # objects of any library
            if isinstance(each, io.FileIO):
                found.add(os.readlink(f"/proc/self/fd/{each.fileno()}"))
            elif isinstance(each, str | PurePath) and os.path.basename(each) in names:
                found.add(os.path.realpath(each))
            elif type(each).__module__.startswith("h5py") and hasattr(each, "file"):
                found.add(os.path.realpath(each.file.filename))
    return frozenset(found & candidates)


def _objects(root: Any) -> Iterator[Any]:
    """What an object is made of, without the classes and functions that the program is."""
    program = (type, types.ModuleType, types.FunctionType, types.CodeType, types.FrameType)
    visited, queue, count = {id(root)}, [root], 0
    while queue and count < _MOST_OBJECTS:
        each = queue.pop()
        count += 1
        yield each
        if isinstance(each, str | bytes | int | float):
            continue
        for inner in gc.get_referents(each):
            if id(inner) not in visited and not isinstance(inner, program):
                visited.add(id(inner))
                queue.append(inner)


def _listen_to_openers(heard: Callable[[Any], None]) -> None:
    """Wrap the functions of the table wherever a module has them."""
    wrapped: dict[int, Any] = {}
    for module, name in _OPENERS:
        original = vars(sys.modules[module]).get(name) if module in sys.modules else None
        if callable(original) and not isinstance(original, type) and id(original) not in wrapped:
            wrapped[id(original)] = original, _listening(original, heard)
    if not wrapped:
        return
    for module_object in list(sys.modules.values()):
        space = getattr(module_object, "__dict__", {})
        for name, value in list(space.items()):
            if id(value) in wrapped and wrapped[id(value)][0] is value:
                space[name] = wrapped[id(value)][1]


def _listening(original: Any, heard: Callable[[Any], None]) -> Any:
    def opener(*words: Any, **named: Any) -> Any:
        for each in (*words[:1], *(named.get(key) for key in ("file", "filename", "uri", "path"))):
            if isinstance(each, str | bytes | os.PathLike):
                heard(each)
        return original(*words, **named)

    return opener
