"""The allocator's event history: ``torch.cuda.memory._record_memory_history``.

Entries and snapshots have the structure that ``THCPModule_memorySnapshot`` in
``torch/csrc/cuda/Module.cpp`` gives them, which is documented at
``torch.cuda.memory._snapshot``; pytorch.org/memory_viz and ``torch/cuda/_memory_viz.py``
read them unchanged. Addresses and sizes are in bytes, times in microseconds.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from trainfit.simgpu.allocator.blocks import pool_of, stream_of
from trainfit.simgpu.allocator.caching import CachingAllocator
from trainfit.simgpu.allocator.settings import AllocatorSettings
from trainfit.simgpu.device.tensor import current_engine

_HERE = str(Path(__file__).parents[1])
_NOT_RECORDED = "pinned host memory is not in the memory history"

#: The events whose entries carry a stack, by the argument ``context``.
_WITH_STACK = {
    "alloc": ("alloc", "segment_alloc", "segment_map", "oom"),
    "all": ("alloc", "segment_alloc", "segment_map", "oom", "free_requested", "free_completed",
            "segment_free", "segment_unmap"),
}  # fmt: skip


class History:
    """What one simulated device remembers of its allocator; off at first."""

    def __init__(self, allocator: CachingAllocator, now: Callable[[], float]) -> None:
        """``now`` gives the device's time in seconds."""
        self._allocator = allocator
        self._now = now
        self._events: deque[dict[str, Any]] = deque()
        self._keeps_events = False
        self._context: str | None = None
        self._skipped: frozenset[str] = frozenset()
        #: Stacks of the blocks in use, by address.
        self._stacks: dict[int, list[dict[str, Any]]] = {}

    def configure(
        self,
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Iterable[str] = (),
        record_pinned_host_memory: bool = False,
        record_cuda: bool = True,
    ) -> None:
        """``_cuda_record_memory_history``; stacks are of Python only, memory is the device's only.

        The last two arguments came with PyTorch 2.14.

        Raises ``RuntimeError`` for words that PyTorch refuses.
        """
        _require("enabled", enabled, (None, "state", "all"))
        _require("context", context, (None, "state", "alloc", "all"))
        _require("stacks", stacks, ("python", "all"))
        if enabled and record_pinned_host_memory:
            current_engine().assume(_NOT_RECORDED)
        if not record_cuda:
            return
        kept = () if enabled is None or clear_history else self._events
        # deque takes no longer length than a C ssize_t.
        self._events = deque(kept, maxlen=min(max_entries, sys.maxsize) if max_entries else 1)
        self._keeps_events = enabled == "all"
        self._context = context if enabled else None
        self._skipped = frozenset(skip_actions)
        if enabled is None:
            self._stacks.clear()
        self._allocator.tracer = self.record if enabled else None

    def configure_legacy(
        self,
        enabled: bool,
        record_context: bool = True,
        trace_alloc_max_entries: int = 1,
        trace_alloc_record_context: bool = False,
        record_context_cpp: bool = False,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Iterable[str] = (),
        record_pinned_host_memory: bool = False,
        record_cuda: bool = True,
    ) -> None:
        """The call with a boolean first, which PyTorch still accepts."""
        context = "alloc" if trace_alloc_record_context else "state" if record_context else None
        self.configure(
            "all" if enabled else None,
            context,
            max_entries=trace_alloc_max_entries,
            clear_history=clear_history,
            skip_actions=skip_actions,
            record_pinned_host_memory=record_pinned_host_memory,
            record_cuda=record_cuda,
        )

    def record(self, action: str, address: int, nbytes: int, stream: int) -> None:
        """The allocator did something (:data:`allocator_segments.Tracer`)."""
        stack = None if self._context is None else self._stack(action, address)
        if not self._keeps_events or action in self._skipped:
            return
        place = "device_free" if action == "oom" else "addr"
        entry: dict[str, Any] = {} if stack is None else {"frames": stack}
        entry |= {
            "action": action,
            place: address,
            "size": nbytes,
            "stream": stream_of(stream),
            "time_us": int(self._now() * 1e6),
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": (0, pool_of(stream)),
        }
        self._events.append(entry)

    def snapshot(self, *_: Any) -> dict[str, Any]:
        """``_cuda_memorySnapshot``: the segments now, and the events until now."""
        with _no_garbage_collected():
            return self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        segments = self._allocator.snapshot()
        for segment in segments:
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    block["frames"] = self._stacks.get(block["address"], [])
        if self._keeps_events:
            self.record("snapshot", 0, sum(each["active_size"] for each in segments), 0)
        return {
            "segments": segments,
            "device_traces": [[dict(entry) for entry in self._events]],
            "allocator_settings": _settings(self._allocator.settings),
            "external_annotations": [],
            "host_segments": [],
            "host_traces": [],
        }

    def _stack(self, action: str, address: int) -> list[dict[str, Any]] | None:
        """The stack that this event's entry carries; also kept while its block is in use."""
        stack = None
        if action == "alloc":
            stack = self._stacks[address] = _python_stack()
        elif action == "free_requested":
            stack = self._stacks.get(address)
        elif action == "free_completed":
            stack = self._stacks.pop(address, None)
        elif action != "snapshot":
            stack = _python_stack()
        return stack if action in _WITH_STACK.get(self._context or "", ()) else None


def _require(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise RuntimeError(f"expected {name} to be one of {known}, got {value!r}")


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """A collection frees tensors, so that the allocator changes while it is read.

    After an out-of-memory error there are such tensors: its traceback's frames hold them.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _python_stack() -> list[dict[str, Any]]:
    """The calling Python frames, innermost first, without the simulation's own."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_HERE):
            frames.append(
                {"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name}
            )
        frame = frame.f_back
    return frames


def _settings(settings: AllocatorSettings) -> dict[str, Any]:
    limit = settings.max_split_bytes
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        # SIZE_MAX in a signed integer.
        "max_split_size": -1 if limit is None else limit,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {
            str(1 << index): divisions
            for index, divisions in enumerate(settings.roundup_power2_divisions)
        },
    }
