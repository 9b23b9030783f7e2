"""Blocks, pools and counters of the simulated caching allocator.

Models ``Block``, ``BlockPool``, ``ExpandableSegment`` and ``DeviceStats`` of
``c10/cuda/CUDACachingAllocator.cpp``. All sizes and addresses are in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import Any, Final

#: States of a block. FREE: cached, unused. ACTIVE: handed out. PENDING: freed, but used on
#: other streams (``event_count > 0``). UNMAPPED: address space without memory. MERGED: no
#: block any more, swallowed by a neighbour. NULL: the result of a request for 0 bytes.
FREE, ACTIVE, PENDING, UNMAPPED, MERGED, NULL = range(6)


class Counters:
    """The counters of one pool kind; :class:`CachingAllocator` holds those of all pools.

    Of each statistic there is the current value, its ``peak_`` and the ``total_`` of its
    increases. Decreases are not counted: ``freed`` follows from the other values.
    ``total_`` is kept per pool kind only.
    """

    __slots__ = (
        "allocated_bytes", "allocations", "inactive_split_bytes", "inactive_splits",
        "peak_active_blocks", "peak_active_bytes", "peak_allocated_bytes", "peak_allocations",
        "peak_inactive_split_bytes", "peak_inactive_splits", "peak_requested_bytes",
        "peak_reserved_bytes", "peak_segments", "pending_blocks", "pending_bytes",
        "requested_bytes",
        "reserved_bytes", "segments", "total_allocated_bytes", "total_allocations",
        "total_inactive_split_bytes", "total_inactive_splits", "total_requested_bytes",
        "total_reserved_bytes", "total_segments",
    )  # fmt: skip

    def __init__(self) -> None:
        #: Bytes and number of the blocks that are handed out.
        self.allocated_bytes = self.peak_allocated_bytes = self.total_allocated_bytes = 0
        self.allocations = self.peak_allocations = self.total_allocations = 0
        #: Bytes held from the device, and number of cudaMalloc'ed segments.
        self.reserved_bytes = self.peak_reserved_bytes = self.total_reserved_bytes = 0
        self.segments = self.peak_segments = self.total_segments = 0
        #: Bytes asked for by the active blocks' owners, before rounding.
        self.requested_bytes = self.peak_requested_bytes = self.total_requested_bytes = 0
        #: Free blocks of segments that are in use elsewhere.
        self.inactive_split_bytes = self.peak_inactive_split_bytes = 0
        self.total_inactive_split_bytes = 0
        self.inactive_splits = self.peak_inactive_splits = self.total_inactive_splits = 0
        #: Freed blocks that still wait for other streams (active but not allocated).
        self.pending_bytes = self.pending_blocks = 0
        #: Peaks of the active values that were reached while blocks waited.
        self.peak_active_bytes = self.peak_active_blocks = 0

    @property
    def active_bytes(self) -> int:
        """Bytes of blocks that are handed out or still wait for other streams."""
        return self.allocated_bytes + self.pending_bytes

    @property
    def active_blocks(self) -> int:
        return self.allocations + self.pending_blocks


#: Streams are numbered below this (a real one by its address); a private pool's number counts in
#: multiples of it.
_STREAMS: Final = 1 << 48


def private_pool(stream: int, pool: int) -> int:
    """The number under which a stream's blocks of a private pool (from 1) are kept."""
    return pool * _STREAMS + stream


def stream_of(number: int) -> int:
    """The stream of such a number, or of a stream's own."""
    return number % _STREAMS


def pool_of(number: int) -> int:
    """The private pool of such a number, 0 for a stream's own."""
    return number // _STREAMS


class ExpandableSegment:
    """An address range of one (stream, pool) that is mapped page by page."""

    __slots__ = ("address", "page", "size")

    def __init__(self, page: int, capacity: int) -> None:
        """``page`` bytes are mapped at a time; the address is set once it is known.

        The range covers 1 1/8 of the device's memory, so that pages which are unmapped in
        its middle can be remapped at its end.
        """
        self.address = 0
        self.page = page
        self.size = -(-(capacity + capacity // 8) // page) * page


class Pool:
    """The free blocks of one stream and one kind (``BlockPool``, one stream's part of it).

    ``free`` holds ``(size, address, block)`` and ``unmapped`` ``(address, block)``, both
    sorted: the orders of ``BlockComparatorSize`` and ``BlockComparatorAddress``.
    """

    __slots__ = (
        "counters", "free", "is_small", "split_below", "split_remainder", "stream", "unmapped",
    )  # fmt: skip

    def __init__(self, stream: int, is_small: bool, counters: Counters) -> None:
        self.stream = stream
        self.is_small = is_small
        self.counters = counters
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []
        #: should_split: the least remainder that is split off, in bytes, for requests
        #: smaller than ``split_below``.
        self.split_remainder = 0
        self.split_below: float = 0

    def add(self, block: Block) -> None:
        if block.state == UNMAPPED:
            insort(self.unmapped, (block.address, block))
        else:
            insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        if block.state == UNMAPPED:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]
        else:
            del self.free[bisect_left(self.free, (block.size, block.address))]


class Block:
    """A part of a segment; what ``malloc`` returns while ``state`` is ACTIVE."""

    __slots__ = (
        "address", "born", "expandable", "next", "pool", "prev", "requested", "size", "state",
        "stream", "stream_uses",
    )  # fmt: skip

    def __init__(
        self,
        address: int,
        size: int,
        pool: Pool,
        expandable: ExpandableSegment | None = None,
        state: int = FREE,
    ) -> None:
        self.address = address
        self.size = size
        #: Bytes that the last owner asked for.
        self.requested = 0
        self.stream = pool.stream
        self.pool = pool
        self.expandable = expandable
        self.state = state
        self.prev: Block | None = None
        self.next: Block | None = None
        #: Other streams that use the block (``record_stream``).
        self.stream_uses: set[int] | None = None
        #: The pool kind's search count when the block was last freed (``gc_count_base``).
        self.born = 0

    @property
    def waits(self) -> bool:
        """Was the block freed while other streams used it?"""
        return self.state == PENDING

    def __repr__(self) -> str:
        return f"Block({self.address:#x}, size={self.size}, state={self.state})"

    def insert_after(self, new: Block) -> None:
        """Link ``new`` behind this block (``Block::splice``)."""
        new.prev, new.next = self, self.next
        if self.next is not None:
            self.next.prev = new
        self.next = new

    def split(self, size: int, state: int) -> Block:
        """Cut the block to ``size`` bytes; returns the rest, linked but in no pool."""
        rest = Block(self.address + size, self.size - size, self.pool, self.expandable, state)
        self.size = size
        self.insert_after(rest)
        return rest

    def merge_neighbours(self) -> Block:
        """``try_merge_blocks`` on both sides with blocks of the same state.

        Unlike in C++ the left block survives a merge, so that the first block of a segment
        stays the same object. The caller puts the returned block into its pool.
        """
        after = self.next
        if after is not None and after.state == self.state:
            after.pool.remove(after)
            self._absorb(after)
        before = self.prev
        if before is not None and before.state == self.state:
            before.pool.remove(before)
            before._absorb(self)
            return before
        return self

    def _absorb(self, after: Block) -> None:
        self.size += after.size
        self.next = after.next
        if after.next is not None:
            after.next.prev = self
        after.state = MERGED


# ---
# The allocator's statistics and snapshot in the shapes that ``torch._C`` returns.
#
# Follows ``THCPModule_memoryStats`` and ``THCPModule_memorySnapshot`` in
# ``torch/csrc/cuda/Module.cpp``, so that ``torch.cuda.memory_stats`` and
# ``torch/cuda/_memory_viz.py`` work on the results unchanged. All sizes are in bytes.


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
