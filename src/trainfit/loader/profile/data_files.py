"""The files that a data set reads while it produces batches.

Python's own opening of files is heard by an audit hook, which cannot be removed again: all of
this belongs into a forked process. C libraries are seen by the functions that they open files
with (those of the table), by descriptors that are open between and during batches, and by
mapped files whose pages are used.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import stat
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any, Final

from trainfit.loader.profile.page_cache import mappings

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
    seen, queue, count = {id(root)}, [root], 0
    while queue and count < _MOST_OBJECTS:
        each = queue.pop()
        count += 1
        yield each
        if isinstance(each, str | bytes | int | float):
            continue
        for inner in gc.get_referents(each):
            if id(inner) not in seen and not isinstance(inner, program):
                seen.add(id(inner))
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
