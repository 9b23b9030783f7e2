"""Blocks, pools and counters of the simulated caching allocator.

Models ``Block``, ``BlockPool``, ``ExpandableSegment`` and ``DeviceStats`` of
``c10/cuda/CUDACachingAllocator.cpp``. All sizes and addresses are in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

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
