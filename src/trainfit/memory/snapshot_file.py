"""Reads a memory snapshot of PyTorch (`torch.cuda.memory._dump_snapshot`), of any version.

Such a file comes from others, and unpickling runs what a pickle names: so it is read by an
unpickler that makes dictionaries, lists, tuples, strings and numbers only. Formats, by
torch/cuda/_memory_viz.py and torch/csrc/cuda/memory_snapshot.cpp of PyTorch 1.9 to 2.14:

- a list of segments (``torch.cuda.memory_snapshot()``), or a dictionary with ``segments``,
  ``device_traces`` and, from 2.1 on, ``allocator_settings``;
- a block has ``frames`` and ``requested_size`` (from 2.1 on) or a ``history``, newest first;
- a trace entry of ``oom`` has ``device_free`` in place of an address.
"""

from __future__ import annotations

import dataclasses
import gzip
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeVar, cast

from trainfit.results.files.errors import ResultFileError

_PICKLE: Final = b"\x80"
_GZIP: Final = b"\x1f\x8b"
_REMEDY: Final = (
    "write one with torch.cuda.memory._record_memory_history() before the training and "
    "torch.cuda.memory._dump_snapshot(FILE) after it or where it fails"
)
#: What a damaged or foreign pickle can raise while it is read.
_DAMAGE: Final = (
    pickle.UnpicklingError,
    *(EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError),
    *(OverflowError, RecursionError, MemoryError, OSError),
)

_T = TypeVar("_T")


class SnapshotFrame(NamedTuple):
    """A line of a stack; ``line`` is 0 and ``file`` without ``.py`` for C++."""

    name: str
    file: str
    line: int

    @property
    def is_python(self) -> bool:
        """Whether it is a line of Python code."""
        return self.line > 0 and self.file.endswith((".py", ">"))


#: Innermost frame first; empty where no stack was recorded.
Stack = tuple[SnapshotFrame, ...]


class SnapshotBlock(NamedTuple):
    """A block of a segment: ``state`` is "allocated", "pending" (freed, but in use by another
    stream) or "free". Sizes are bytes; ``requested`` is what the tensor needs of ``nbytes``."""

    address: int
    nbytes: int
    requested: int
    state: str
    stack: Stack


@dataclasses.dataclass(frozen=True)
class SnapshotSegment:
    """Memory that came from one cudaMalloc, or mapped pages of an expandable segment.

    Attributes
    ----------
    private: Of a CUDA graph's pool, or a user's MemPool.
    """

    address: int
    nbytes: int
    stream: int
    private: bool
    blocks: tuple[SnapshotBlock, ...]


class SnapshotEvent(NamedTuple):
    """An entry of the history. ``nbytes`` is what was asked for; ``device_free`` is known of "oom"
    only."""

    action: str
    address: int
    nbytes: int
    stream: int
    stack: Stack
    device_free: int | None


@dataclasses.dataclass(frozen=True)
class DeviceSnapshot:
    """One GPU of a snapshot.

    Attributes
    ----------
    index: Of the GPU in the process.
    events: Its history, oldest first; empty where none was recorded.
    """

    index: int
    segments: tuple[SnapshotSegment, ...]
    events: tuple[SnapshotEvent, ...]

    def blocks(self) -> Iterable[SnapshotBlock]:
        """The blocks of all segments."""
        for segment in self.segments:
            yield from segment.blocks

    @property
    def allocated_bytes(self) -> int:
        """Bytes of tensors when the snapshot was written."""
        return sum(block.nbytes for block in self.blocks() if block.state == "allocated")


@dataclasses.dataclass(frozen=True)
class MemorySnapshot:
    """A whole snapshot.

    Attributes
    ----------
    devices: Those with memory or a history, by index.
    conf: PYTORCH_CUDA_ALLOC_CONF of the run; ``None`` where the file does not say.
    """

    devices: tuple[DeviceSnapshot, ...]
    conf: str | None


def is_snapshot(path: Path) -> bool:
    """Whether the file begins as a pickle does, or a compressed one."""
    try:
        with path.open("rb") as file:
            head = file.read(2)
    except OSError:
        return False
    return head[:1] == _PICKLE or head == _GZIP


def read_snapshot(path: Path) -> MemorySnapshot:
    """Read the file; raises ``ResultFileError`` for anything but a snapshot."""
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == _GZIP
        with cast("IO[bytes]", gzip.open(path) if compressed else path.open("rb")) as stream:
            document = _Containers(stream).load()
    except _Refused as error:
        raise ResultFileError(path, str(error), _REMEDY) from None
    except _DAMAGE as error:
        reason = f"damaged, or not a memory snapshot of PyTorch ({type(error).__name__})"
        raise ResultFileError(path, reason, _REMEDY) from None
    try:
        return _SnapshotReader().snapshot(document)
    except _Malformed as error:
        reason = f"not a memory snapshot of PyTorch: {error}"
        raise ResultFileError(path, reason, _REMEDY) from None


class _Refused(Exception):
    """The pickle asks for more than containers."""


class _Containers(pickle.Unpickler):
    """Makes built-in containers and values; whatever else a pickle names is refused."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        raise _Refused(
            f"it asks for {module}.{name}, which would run code; a snapshot has only "
            "dictionaries, lists and numbers"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise _Refused("it refers to objects outside of the file; a snapshot has none")


class _Malformed(Exception):
    """A part of the document is missing or of another type; its text names it."""


_STATES: Final = {
    "active_allocated": "allocated",
    "active_pending_free": "pending",
    "active_awaiting_free": "pending",
    "inactive": "free",
}


class _SnapshotReader:
    """Makes the typed snapshot; equal stacks are one object, since there are few of them."""

    def __init__(self) -> None:
        self._frames: dict[int, SnapshotFrame] = {}
        self._stacks: dict[Stack, Stack] = {}

    def snapshot(self, document: Any) -> MemorySnapshot:
        """The whole document."""
        if isinstance(document, list):
            document = {"segments": document}
        if not isinstance(document, dict):
            raise _Malformed(f"it holds a {type(document).__name__}")
        if "segments" not in document:
            raise _Malformed("it has no segments")
        segments: dict[int, list[SnapshotSegment]] = {}
        for number, segment in enumerate(_list(document, "segments", "the snapshot")):
            where = f"segment {number}"
            index = _whole(segment, "device", where, 0)
            segments.setdefault(index, []).append(self._segment(segment, where))
        traces = _list(document, "device_traces", "the snapshot", [])
        events = {
            index: tuple(
                self._event(event, f"entry {number} of GPU {index}'s history")
                for number, event in enumerate(_as_list(trace, f"GPU {index}'s history"))
            )
            for index, trace in enumerate(traces)
        }
        known = sorted({*segments, *(index for index, trace in events.items() if trace)})
        devices = tuple(
            DeviceSnapshot(index, tuple(segments.get(index, ())), events.get(index, ()))
            for index in known
        )
        return MemorySnapshot(devices, _conf(document.get("allocator_settings")))

    def _segment(self, segment: Any, where: str) -> SnapshotSegment:
        address = _whole(segment, "address", where)
        pool = segment.get("segment_pool_id", (0, 0))
        blocks, at = [], address
        for number, block in enumerate(_list(segment, "blocks", where)):
            made = self._block(block, at, f"block {number} of {where}")
            blocks.append(made)
            at = made.address + made.nbytes
        return SnapshotSegment(
            address,
            _whole(segment, "total_size", where),
            _whole(segment, "stream", where, 0),
            tuple(pool) != (0, 0) if isinstance(pool, tuple | list) else False,
            tuple(blocks),
        )

    def _block(self, block: Any, address: int, where: str) -> SnapshotBlock:
        nbytes = _whole(block, "size", where)
        state = _STATES.get(_text(block, "state", where), "")
        if not state:
            raise _Malformed(f"{where} is in state {block['state']!r}")
        history = _list(block, "history", where, [])
        newest = history[0] if history and isinstance(history[0], dict) else {}
        requested = _whole(newest, "real_size", where, nbytes)
        frames = block["frames"] if "frames" in block else newest.get("frames", [])
        return SnapshotBlock(
            _whole(block, "address", where, address),
            nbytes,
            _whole(block, "requested_size", where, requested),
            state,
            self._stack(frames, where),
        )

    def _event(self, event: Any, where: str) -> SnapshotEvent:
        action = _text(event, "action", where)
        free = event.get("device_free")
        return SnapshotEvent(
            action,
            _whole(event, "addr", where, 0),
            _whole(event, "size", where, 0),
            _whole(event, "stream", where, 0),
            self._stack(event.get("frames", []), where),
            free if isinstance(free, int) else None,
        )

    def _stack(self, frames: Any, where: str) -> Stack:
        """Frames are one object for all stacks that have them, as PyTorch pickles them."""
        known = self._frames
        stack = []
        for frame in _as_list(frames, f"the stack of {where}"):
            made = known.get(id(frame))
            if made is None:
                name = _text(frame, "name", where)
                line = _whole(frame, "line", where, 0)
                made = known[id(frame)] = SnapshotFrame(name, _text(frame, "filename", where), line)
            stack.append(made)
        whole = tuple(stack)
        return self._stacks.setdefault(whole, whole)


def _conf(settings: Any) -> str | None:
    if not isinstance(settings, dict):
        return None
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if isinstance(settings.get(name), str):
            return str(settings[name])
    return None


def _field(document: Any, name: str, where: str, kind: type[_T], default: _T | None) -> _T:
    if not isinstance(document, Mapping):
        raise _Malformed(f"{where} is a {type(document).__name__}")
    value = document.get(name, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _Malformed(f"{where} has no {name}" if value is None else f"{name} of {where}")
    return value


def _whole(document: Any, name: str, where: str, default: int | None = None) -> int:
    value = _field(document, name, where, int, default)
    if value < 0:
        raise _Malformed(f"{name} of {where} is {value}")
    return value


def _text(document: Any, name: str, where: str) -> str:
    return _field(document, name, where, str, None)


def _list(document: Any, name: str, where: str, default: list[Any] | None = None) -> list[Any]:
    return _as_list(_field(document, name, where, object, default), f"{name} of {where}")


def _as_list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _Malformed(f"no list as {what}" if value is None else f"{what} is no list")
    return list(value)
