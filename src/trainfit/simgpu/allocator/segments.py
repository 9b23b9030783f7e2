"""Device memory under the caching allocator: segments allocated, searched and freed.

The cold half of the model of ``c10/cuda/CUDACachingAllocator.cpp``; docstrings name the
C++ functions. All sizes and addresses are in bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

from trainfit.simgpu.allocator.blocks import (
    FREE,
    UNMAPPED,
    Block,
    Counter,
    Counters,
    ExpandableSegment,
    Pool,
    mapped_runs,
    pool_of,
    segment_info,
)
from trainfit.simgpu.allocator.settings import (
    MIN_BLOCK,
    SMALL_BUFFER,
    SMALL_SIZE,
    AllocatorSettings,
)

#: Below here the device's addresses are given out; any multiple of 2 MiB would do.
_TOP_ADDRESS = 0x7F00_0000_0000

#: Told of every event that PyTorch's memory history records (``TraceEntry``): its action,
#: address, bytes and stream. The address of "oom" is the device's free memory.
Tracer = Callable[[str, int, int, int], None]


class DeviceSegments(Counters):
    """The segments that an allocator holds of one device, and their free blocks by pool."""

    def __init__(
        self,
        capacity_bytes: int,
        context_bytes: int,
        settings: AllocatorSettings,
        memory_fraction: float,
    ) -> None:
        super().__init__()
        #: The number of its GPU.
        self.gpu = 0
        self.capacity_bytes = capacity_bytes
        self.context_bytes = context_bytes
        #: What other processes hold of the device.
        self.other_processes_bytes = 0
        self.settings = settings
        self.num_device_alloc = 0
        self.num_device_free = 0
        self.tracer: Tracer | None = None
        #: The limit that a memory fraction sets, ``None`` without one.
        self.allowed_bytes: int | None = None
        self._limit(memory_fraction)
        #: Is there a block of an expandable segment, or was there one?
        self._was_expandable = False
        #: Does the garbage collection run, or did it?
        self._keeps_age = False
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self._small_counters = Counters()
        self._large_counters = Counters()
        self._oversize_segments = Counter()
        #: Private pools that no graph uses any longer (graph_pools_freeable).
        self._freeable: set[int] = set()
        #: First block of each segment by its address.
        self._heads: dict[int, Block] = {}
        self._lowest_address = _TOP_ADDRESS
        #: get_free_blocks_call_count of the large and the small blocks, for the collection.
        self._searches = [0, 0]

    def _limit(self, fraction: float, total_bytes: int | None = None) -> None:
        total = self.capacity_bytes if total_bytes is None else total_bytes
        self.allowed_bytes = int(fraction * total) if fraction < 1 else None

    def _exceeds_fraction(self, segment: int) -> bool:
        return self.allowed_bytes is not None and self.reserved_bytes + segment > self.allowed_bytes

    def _follow_settings(self) -> None:
        limit = self.settings.max_split_bytes
        self._max_split = float("inf") if limit is None else limit
        self._collects = (
            self.allowed_bytes is not None and self.settings.garbage_collection_threshold > 0
        )
        self._keeps_age = self._keeps_age or self._collects
        for pools in (self._small, self._large):
            for pool in pools.values():
                self._set_split_rule(pool)

    def free_device_bytes(self) -> int:
        """The free memory that cudaMemGetInfo reports."""
        taken = self.context_bytes + self.other_processes_bytes + self.reserved_bytes
        # A library that is loaded when the device is full leaves nothing, not less.
        return max(0, self.capacity_bytes - taken)

    def _new_pool(self, stream: int, is_small: bool) -> Pool:
        pools = self._small if is_small else self._large
        pool = Pool(stream, is_small, self._small_counters if is_small else self._large_counters)
        self._set_split_rule(pool)
        pools[stream] = pool
        return pool

    def _set_split_rule(self, pool: Pool) -> None:
        """``should_split``."""
        if pool.is_small or self.settings.expandable_segments:
            pool.split_remainder = MIN_BLOCK
            pool.split_below = float("inf")
        else:
            pool.split_remainder = SMALL_SIZE + 1
            pool.split_below = self._max_split

    def _get_free_block(self, pool: Pool, rounded: int) -> Block | None:
        """``get_free_block``: best fit, with the rules of the settings."""
        if self._collects:
            self._searches[pool.is_small] += 1
        free = pool.free
        index = bisect_left(free, (rounded,))
        if index == len(free):
            return None
        if free[index][2].expandable is not None:
            index = self._among_expandable(free, index)
            if index == len(free):
                return None
        size = free[index][0]
        if rounded < self._max_split <= size:
            return None
        if self._max_split <= rounded <= size - self.settings.max_non_split_rounding_bytes:
            return None
        return free.pop(index)[2]

    def _among_expandable(self, free: list[tuple[int, int, Block]], index: int) -> int:
        """Best fit where the smallest block that fits is part of an expandable segment."""
        if not self.settings.expandable_segments:
            # Expandable segments were switched off meanwhile: their blocks are passed over.
            while index < len(free) and free[index][2].expandable is not None:
                index += 1
            return index
        # A block at the edge of the mapped range counts as large as it could become.
        while (
            free[index][2].expandable is not None
            and index + 1 < len(free)
            and _expandable_size(free[index + 1][2]) < _expandable_size(free[index][2])
        ):
            index += 1
        return index

    # -- taking memory from the device --------------------------------------------------------

    def _alloc_block(self, pool: Pool, rounded: int, segment: int) -> Block | None:
        """``alloc_block``: new memory from the device, or ``None``."""
        if self._exceeds_fraction(segment):
            return None
        if self.settings.expandable_segments:
            return self._try_allocate_expandable(pool, rounded)
        if segment > self.free_device_bytes():
            return None
        block = Block(self._reserve_addresses(segment), segment, pool)
        self._heads[block.address] = block
        self._reserve(pool.counters, segment)
        for counters in (self, pool.counters):
            counters.segments += 1
            counters.peak_segments = max(counters.peak_segments, counters.segments)
        pool.counters.total_segments += 1
        if segment >= self._max_split:
            self._oversize_segments.increase()
        if self.tracer is not None:
            self.tracer("segment_alloc", block.address, segment, pool.stream)
        return block

    def _reserve(self, counters: Counters, nbytes: int) -> None:
        self.num_device_alloc += 1
        counters.total_reserved_bytes += nbytes
        for each in (self, counters):
            each.reserved_bytes += nbytes
            each.peak_reserved_bytes = max(each.peak_reserved_bytes, each.reserved_bytes)

    def _reserve_addresses(self, nbytes: int) -> int:
        """Below all others, as the driver mostly does (seen on an H200, driver 580).

        Of blocks of one size the lowest address is taken, so that the order decides which are
        used again. Addresses are never used twice, which keeps every run of a program the same.
        """
        self._lowest_address -= -(-nbytes // SMALL_BUFFER) * SMALL_BUFFER
        return self._lowest_address

    # -- giving memory back ------------------------------------------------------------------

    def _release_cached_segments(self) -> None:
        """The part of ``release_cached_blocks`` behind the events."""
        for pools in (self._large, self._small):
            for number in sorted(pools):
                if not pool_of(number) or pool_of(number) in self._freeable:
                    self._release_blocks(pools[number])

    def release_pool(self, pool: int) -> None:
        """``releasePool``: no graph uses a private pool; its segments may be given back."""
        self._freeable.add(pool)

    def _release_blocks(self, pool: Pool) -> None:
        """``release_blocks``: a cudaMalloc'ed segment whole, an expandable one by pages."""
        for _, _, block in list(pool.free):
            if block.expandable is not None:
                self._unmap_block(block, block.expandable)
            elif _is_segment(block):
                self._release_block(block)

    def _release_block(self, block: Block) -> None:
        """``release_block``: cudaFree of a segment."""
        pool = block.pool
        if self.tracer is not None:
            self.tracer("segment_free", block.address, block.size, block.stream)
        pool.remove(block)
        del self._heads[block.address]
        self.num_device_free += 1
        for counters in (self, pool.counters):
            counters.segments -= 1
            counters.reserved_bytes -= block.size
        if block.size >= self._max_split:
            self._oversize_segments.decrease()

    def _release_available(self, pool: Pool, rounded: int) -> bool:
        """``release_available_cached_blocks``: cudaFree oversize blocks for a request.

        Only with a split limit. Whether enough was released for the request.
        """
        limit = self.settings.max_split_bytes
        if limit is None:
            return False
        target = max(rounded, limit)
        index = bisect_left(pool.free, (target,))
        if index < len(pool.free) and _is_segment(pool.free[index][2]):
            self._release_block(pool.free[index][2])
            return True
        # No single block is large enough: several, from the largest down.
        released = 0
        for size, _, block in reversed(pool.free[:index]):
            if released >= target or size < limit:
                break
            if _is_segment(block):
                released += size
                self._release_block(block)
        return released >= target

    def _collect_garbage(self) -> None:
        """``garbage_collect_cached_blocks``: cudaFree the blocks that wait the longest.

        Only with a memory fraction and a threshold. Age is in searches since the free.
        """
        assert self.allowed_bytes is not None
        target = self.reserved_bytes - int(
            self.settings.garbage_collection_threshold * self.allowed_bytes
        )
        whole = [
            entry[2]
            for number, pool in self._large.items()
            if not pool_of(number)
            for entry in pool.free
            if _is_segment(entry[2])
        ]
        now = self._searches[False]
        while target > 0 and whole:
            oldest = sum(now - block.born for block in whole) / len(whole)
            for block in [block for block in whole if now - block.born >= oldest]:
                whole.remove(block)
                target -= block.size
                self._release_block(block)

    # -- expandable segments -----------------------------------------------------------------

    def _find_expandable_block(self, pool: Pool, size: int) -> Block:
        """``find_expandable_block``: the lowest free or unmapped addresses that fit."""
        for _, block in pool.unmapped:
            start = block.prev if block.prev is not None and block.prev.state == FREE else block
            room = 0
            part: Block | None = start
            while part is not None and part.state in (FREE, UNMAPPED) and room < size:
                room += part.size
                part = part.next
            if room >= size:
                return start
        page = SMALL_BUFFER if pool.is_small else self.settings.large_segment_bytes
        self._was_expandable = True
        segment = ExpandableSegment(page, self.capacity_bytes)
        segment.address = self._reserve_addresses(segment.size)
        block = Block(segment.address, segment.size, pool, segment, UNMAPPED)
        self._heads[block.address] = block
        pool.add(block)
        return block

    def _try_allocate_expandable(self, pool: Pool, size: int) -> Block | None:
        """``try_allocate_expandable_block``: map pages until ``size`` bytes are in one block.

        Pages mapped before the device ran out stay mapped, as free blocks.
        """
        block = self._find_expandable_block(pool, size)
        while block.state == UNMAPPED or block.size < size:
            if block.state == UNMAPPED:
                target, missing = block, size
            else:
                assert block.next is not None
                target, missing = block.next, size - block.size
            mapped = self._map_block(target, min(missing, target.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _map_block(self, block: Block, size: int) -> Block | None:
        """``map_block``: back the first ``size`` bytes with whole pages, merge, add to pool."""
        segment = block.expandable
        assert segment is not None and block.state == UNMAPPED
        nbytes = -(-size // segment.page) * segment.page
        if nbytes > self.free_device_bytes():
            return None
        pool = block.pool
        pool.remove(block)
        if nbytes < block.size:
            pool.add(block.split(nbytes, UNMAPPED))
        block.state = FREE
        address = block.address
        block = block.merge_neighbours()
        block.born = self._searches[pool.is_small]
        pool.add(block)
        self._reserve(pool.counters, nbytes)
        if self.tracer is not None:
            self.tracer("segment_map", address, nbytes, pool.stream)
        return block

    def _unmap_block(self, block: Block, segment: ExpandableSegment) -> None:
        """``unmap_block``: give back the whole pages inside a free block.

        A segment of which nothing stays mapped is dropped (``release_expandable_segment``).
        """
        page, base = segment.page, segment.address
        begin = base + -(-(block.address - base) // page) * page
        end = base + (block.address + block.size - base) // page * page
        if begin >= end:
            return
        pool = block.pool
        pool.remove(block)
        if begin > block.address:
            middle = block.split(begin - block.address, UNMAPPED)
            pool.add(block)
            block = middle
        if end < block.address + block.size:
            pool.add(block.split(end - block.address, FREE))
        block.state = UNMAPPED
        block = block.merge_neighbours()
        pool.add(block)
        self.num_device_free += 1
        for counters in (self, pool.counters):
            counters.reserved_bytes -= end - begin
        if self.tracer is not None:
            self.tracer("segment_unmap", begin, end - begin, pool.stream)
        if block.prev is None and block.next is None:
            pool.remove(block)
            del self._heads[block.address]

    # -- what users see ----------------------------------------------------------------------

    def largest_free_block_bytes(self) -> int:
        """``cacheInfo``: the largest cached block of any stream, 0 without one."""
        pools = (*self._large.values(), *self._small.values())
        return max((pool.free[-1][0] for pool in pools if pool.free), default=0)

    def blocks(self) -> Iterator[list[Block]]:
        """The blocks of each contiguous range of reserved memory, by ascending address."""
        return mapped_runs(self._heads.values())

    def snapshot(self) -> list[dict[str, Any]]:
        """``torch._C._cuda_memorySnapshot()["segments"]``."""
        return [segment_info(run) for run in self.blocks()]


def _is_segment(block: Block) -> bool:
    """Is the block all of what one cudaMalloc returned?

    Oversize blocks always are, unless the split limit was lowered in a running program.
    """
    return block.prev is None and block.next is None and block.expandable is None


def _expandable_size(block: Block) -> int:
    after = block.next
    unmapped = after.size if after is not None and after.state == UNMAPPED else 0
    return block.size + unmapped


# ---
# The error of an allocator without memory for a request.


class OutOfDeviceMemory(Exception):
    """No memory for a request, with the figures of PyTorch's message, all in bytes.

    ``requested_bytes`` is what the message says after "Tried to allocate": the size of the
    segment that was asked of the device, which is the request after rounding.
    ``allowed_bytes`` is the limit that a memory fraction sets, ``None`` without one.
    ``non_pytorch_bytes`` is the process's memory outside the allocator (the context), ``gpu`` the
    number of the GPU.
    """

    def __init__(self, allocator: DeviceSegments, requested_bytes: int) -> None:
        self.gpu = allocator.gpu
        self.requested_bytes = requested_bytes
        self.capacity_bytes = allocator.capacity_bytes
        self.free_bytes = allocator.free_device_bytes()
        self.allocated_bytes = allocator.allocated_bytes
        self.reserved_bytes = allocator.reserved_bytes
        self.non_pytorch_bytes = allocator.context_bytes
        self.allowed_bytes = allocator.allowed_bytes
        super().__init__(
            f"tried to allocate {requested_bytes} bytes: {self.free_bytes} of "
            f"{self.capacity_bytes} are free, {self.allocated_bytes} allocated, "
            f"{self.reserved_bytes} reserved, {self.non_pytorch_bytes} outside the allocator"
        )
