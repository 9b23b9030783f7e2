"""The allocator's statistics and snapshot in the shapes that ``torch._C`` returns.

Follows ``THCPModule_memoryStats`` and ``THCPModule_memorySnapshot`` in
``torch/csrc/cuda/Module.cpp``, so that ``torch.cuda.memory_stats`` and
``torch/cuda/_memory_viz.py`` work on the results unchanged. All sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from trainfit.simgpu.allocator.blocks import (
    ACTIVE,
    FREE,
    UNMAPPED,
    Block,
    Counters,
    pool_of,
    stream_of,
)

#: Statistic -> names of its current value, peak and total in Counters. A block becomes
#: active exactly when it is allocated, so the two share the total, and the peak too unless
#: blocks waited for other streams then (``peak_active_``).
_STATISTICS = {
    "allocation": ("allocations", "peak_allocations", "total_allocations"),
    "segment": ("segments", "peak_segments", "total_segments"),
    "active": ("active_blocks", "peak_allocations", "total_allocations"),
    "inactive_split": ("inactive_splits", "peak_inactive_splits", "total_inactive_splits"),
    "allocated_bytes": ("allocated_bytes", "peak_allocated_bytes", "total_allocated_bytes"),
    "reserved_bytes": ("reserved_bytes", "peak_reserved_bytes", "total_reserved_bytes"),
    "active_bytes": ("active_bytes", "peak_allocated_bytes", "total_allocated_bytes"),
    "inactive_split_bytes": (
        "inactive_split_bytes",
        "peak_inactive_split_bytes",
        "total_inactive_split_bytes",
    ),
    "requested_bytes": ("requested_bytes", "peak_requested_bytes", "total_requested_bytes"),
}

#: Peaks beyond those of the allocated blocks.
_WHILE_WAITING = {"active": "peak_active_blocks", "active_bytes": "peak_active_bytes"}

_STATES = {ACTIVE: "active_allocated", FREE: "inactive"}

Stat = dict[str, int]


class Statistics:
    """Turns the counters of all pools, the small and the large ones into dictionaries.

    Remembers what the counters cannot hold: the current values at the last resets, of
    which ``freed`` and the active peaks follow.
    """

    def __init__(self, every: Counters, small: Counters, large: Counters) -> None:
        self._kinds = {"all": every, "small_pool": small, "large_pool": large}
        self._base = {(kind, name): 0 for kind in self._kinds for name in _STATISTICS}
        self._floor = dict(self._base)

    def arrays(self) -> dict[str, dict[str, Stat]]:
        """``{statistic: {all, small_pool, large_pool: {current, peak, allocated, freed}}}``."""
        return {
            name: {kind: self._stat(kind, name) for kind in self._kinds} for name in _STATISTICS
        }

    def _stat(self, kind: str, name: str) -> Stat:
        current_name, peak_name, total_name = _STATISTICS[name]
        current = getattr(self._kinds[kind], current_name)
        parts = ("small_pool", "large_pool") if kind == "all" else (kind,)
        total = sum(getattr(self._kinds[part], total_name) for part in parts)
        peak = max(getattr(self._kinds[kind], peak_name), self._floor[kind, name])
        if name in _WHILE_WAITING:
            peak = max(peak, getattr(self._kinds[kind], _WHILE_WAITING[name]))
        freed = total - current + self._base[kind, name]
        return {"current": current, "peak": peak, "allocated": total, "freed": freed}

    def reset_peaks(self) -> None:
        """``resetPeakStats``: every peak becomes the current value."""
        for kind, counters in self._kinds.items():
            for name, (current_name, peak_name, _) in _STATISTICS.items():
                current = getattr(counters, current_name)
                self._floor[kind, name] = current
                setattr(counters, _WHILE_WAITING.get(name, peak_name), current)

    def reset_accumulated(self) -> None:
        """``resetAccumulatedStats``: ``allocated`` and ``freed`` start again from 0."""
        for kind, counters in self._kinds.items():
            for name, (current_name, _, total_name) in _STATISTICS.items():
                self._base[kind, name] = getattr(counters, current_name)
                setattr(counters, total_name, 0)


class Counter:
    """A rarely changed statistic (``Stat``): of the oversize blocks and segments."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def increase(self) -> None:
        self.current += 1
        self.allocated += 1
        self.peak = max(self.peak, self.current)

    def decrease(self) -> None:
        self.current -= 1
        self.freed += 1

    def as_dict(self) -> Stat:
        return {name: getattr(self, name) for name in ("current", "peak", "allocated", "freed")}


def mapped_runs(heads: Iterable[Block]) -> Iterator[list[Block]]:
    """The blocks of each contiguous range of device memory, by ascending address.

    A cudaMalloc'ed segment is one run; an expandable one has a run per mapped range.
    """
    for head in sorted(heads, key=lambda block: block.address):
        run: list[Block] = []
        block: Block | None = head
        while block is not None:
            if block.state != UNMAPPED:
                run.append(block)
            elif run:
                yield run
                run = []
            block = block.next
        if run:
            yield run


def segment_info(run: list[Block]) -> dict[str, Any]:
    """One entry of ``torch._C._cuda_memorySnapshot()["segments"]`` for device 0."""
    head = run[0]
    active = [block for block in run if block.state != FREE]
    return {
        "device": 0,
        "address": head.address,
        "total_size": sum(block.size for block in run),
        "allocated_size": sum(block.size for block in active if block.state == ACTIVE),
        "active_size": sum(block.size for block in active),
        "requested_size": sum(block.requested for block in active),
        "stream": stream_of(head.stream),
        "segment_type": "small" if head.pool.is_small else "large",
        "segment_pool_id": (0, pool_of(head.stream)),
        "is_expandable": head.expandable is not None,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": _STATES.get(block.state, "active_pending_free"),
                "frames": [],
            }
            for block in run
        ],
    }
