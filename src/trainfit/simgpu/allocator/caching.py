"""A model of PyTorch's CUDA caching allocator (the native one).

Reproduces which blocks ``DeviceCachingAllocator`` in ``c10/cuda/CUDACachingAllocator.cpp``
hands out, splits, merges, reserves and releases, as read from the sources of mid-2024 to
mid-2026 and the headers of torch 2.13.0; docstrings name the C++ functions. All sizes are
in bytes. What the versions 2.8 to 2.13 decide differently is settings that only the later
ones know (:mod:`trainfit.simgpu.allocator.settings`).

A private pool (of CUDA graphs) is a number next to the streams'
(:func:`trainfit.simgpu.allocator.blocks.private_pool`): its blocks go to nobody else.

Outside the model: ``torch.cuda.MemPool``, free-memory callbacks, sharing between processes, and
the driver's own fragmentation: a cudaMalloc succeeds exactly if the device has that much memory
left.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

from trainfit.simgpu.allocator.blocks import (
    ACTIVE,
    FREE,
    MERGED,
    NULL,
    PENDING,
    Block,
    Counter,
    Counters,
    Pool,
    Statistics,
    stream_of,
)
from trainfit.simgpu.allocator.segments import DeviceSegments, OutOfDeviceMemory
from trainfit.simgpu.allocator.settings import MIN_BLOCK, SMALL_SIZE, AllocatorSettings


class CachingAllocator(DeviceSegments):
    """The caching allocator of one device.

    Current values and peaks of all pools together are attributes (see :class:`Counters`):
    ``allocated_bytes``, ``reserved_bytes``, ``peak_allocated_bytes`` and so on.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        context_bytes: int = 0,
        settings: AllocatorSettings | None = None,
        memory_fraction: float | None = None,
    ) -> None:
        """Nothing is reserved yet.

        ``capacity_bytes`` is the total that cudaMemGetInfo reports, ``context_bytes`` what
        the CUDA context and its libraries take of it. ``memory_fraction`` is that of
        ``torch.cuda.set_per_process_memory_fraction`` and outranks the settings' one.
        """
        settings = settings or AllocatorSettings()
        if memory_fraction is None:
            memory_fraction = settings.per_process_memory_fraction
        super().__init__(capacity_bytes, context_bytes, settings, memory_fraction)
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_oom_rejections = 0
        self.num_sync_all_streams = 0
        #: Do freed blocks that other streams used wait until :meth:`complete` says that the
        #: events are? Otherwise every event is complete when it is asked for.
        self.defers_events = False
        self._statistics = Statistics(self, self._small_counters, self._large_counters)
        self._oversize_allocations = Counter()
        #: Freed blocks that wait for other streams' events, in the order of their frees, and
        #: those of them whose events are complete.
        self._waiting: dict[int, Block] = {}
        self._pending: list[Block] = []
        self._null = Block(0, 0, Pool(0, True, Counters()), None, NULL)
        self._follow_settings()

    # -- settings that change while a program runs -------------------------------------------

    def apply(self, settings: AllocatorSettings) -> None:
        """``torch._C._accelerator_setAllocatorSettings``: for what is allocated from now on.

        A memory fraction below 1 in ``settings`` replaces the current one.
        """
        self.settings = settings
        if settings.per_process_memory_fraction < 1:
            self._limit(settings.per_process_memory_fraction)
        self._follow_settings()

    def set_memory_fraction(self, fraction: float, total_bytes: int | None = None) -> None:
        """``setMemoryFraction``: a share of the device's memory (``total_bytes``, where it is
        not the capacity); 1.0 sets no limit."""
        self._limit(fraction, total_bytes)
        self._follow_settings()

    def _follow_settings(self) -> None:
        """Work out what the hot path asks of the settings."""
        settings = self.settings
        super()._follow_settings()
        #: Default settings: best fit needs no other rule than the size.
        self._plain = not (
            settings.expandable_segments
            or self._collects
            or settings.max_split_bytes is not None
            or self._was_expandable
        )
        self._pow2 = settings.rounds_to_divisions

    # -- malloc and free: the hot path, hence inlined and unrolled --------------------------

    def malloc(self, size: int, stream: int = 0) -> Block:
        """``DeviceCachingAllocator::malloc``: a block of at least ``size`` bytes.

        0 bytes give a null block (address 0) that counts nowhere.

        Raises:
            OutOfDeviceMemory: releasing all cached segments did not make room either.
        """
        if self._pending and size:
            self.process_events()
        if size < MIN_BLOCK:
            if size <= 0:
                assert size == 0, f"malloc of {size} bytes"
                return self._null
            rounded = MIN_BLOCK
        elif self._pow2:
            rounded = self.settings.round_size(size)
        else:
            rounded = (size + 511) & -512
        pools = self._small if rounded <= SMALL_SIZE else self._large
        pool = pools[stream] if stream in pools else self._new_pool(stream, rounded <= SMALL_SIZE)
        block: Block | None
        if self._plain:
            free = pool.free
            index = bisect_left(free, (rounded,))
            block = free.pop(index)[2] if index < len(free) else self._allocate(pool, rounded)
        else:
            block = self._get_free_block(pool, rounded) or self._allocate(pool, rounded)
        return self._alloc_found_block(block, pool, rounded, size)

    def _alloc_found_block(self, block: Block, pool: Pool, rounded: int, requested: int) -> Block:
        """``alloc_found_block``: split ``block`` if worthwhile, and count it as allocated."""
        counters = pool.counters
        size = block.size
        remainder = size - rounded
        was_split = block.next is not None or block.prev is not None
        # should_split
        if remainder >= pool.split_remainder and rounded < pool.split_below:
            rest = Block(block.address + rounded, remainder, pool, block.expandable)
            rest.prev = block
            rest.next = after = block.next
            if after is not None:
                after.prev = rest
            block.next = rest
            block.size = size = rounded
            if self._keeps_age:
                rest.born = self._searches[pool.is_small]
            insort(pool.free, (remainder, rest.address, rest))
            if block.expandable is None:
                if was_split:
                    counters.inactive_split_bytes -= rounded
                    self.inactive_split_bytes -= rounded
                else:
                    self._change_inactive(counters, 1, remainder)
        elif was_split and block.expandable is None:
            counters.inactive_split_bytes -= size
            self.inactive_split_bytes -= size
            counters.inactive_splits -= 1
            self.inactive_splits -= 1
        block.state = ACTIVE
        block.requested = requested

        counters.total_allocations += 1
        counters.total_allocated_bytes += size
        counters.total_requested_bytes += requested
        counters.allocations = value = counters.allocations + 1
        if value > counters.peak_allocations:
            counters.peak_allocations = value
        self.allocations = value = self.allocations + 1
        if value > self.peak_allocations:
            self.peak_allocations = value
        counters.allocated_bytes = value = counters.allocated_bytes + size
        if value > counters.peak_allocated_bytes:
            counters.peak_allocated_bytes = value
        self.allocated_bytes = value = self.allocated_bytes + size
        if value > self.peak_allocated_bytes:
            self.peak_allocated_bytes = value
        counters.requested_bytes = value = counters.requested_bytes + requested
        if value > counters.peak_requested_bytes:
            counters.peak_requested_bytes = value
        self.requested_bytes = value = self.requested_bytes + requested
        if value > self.peak_requested_bytes:
            self.peak_requested_bytes = value
        if self.pending_blocks:
            self._raise_active_peaks(counters)
        if size >= self._max_split:
            self._oversize_allocations.increase()
        if self.tracer is not None:
            self.tracer("alloc", block.address, requested, block.stream)
        return block

    def _raise_active_peaks(self, counters: Counters) -> None:
        """Blocks that wait for other streams are active beyond the allocated ones."""
        for each in (self, counters):
            each.peak_active_bytes = max(each.peak_active_bytes, each.active_bytes)
            each.peak_active_blocks = max(each.peak_active_blocks, each.active_blocks)

    def free(self, block: Block) -> None:
        """``DeviceCachingAllocator::free``: the block returns to its pool, not the device.

        A block that other streams use returns when their events are complete, at the next
        ``malloc`` or ``empty_cache``.
        """
        if block.state != ACTIVE:
            assert block.state == NULL, f"free of a block that is not allocated: {block}"
            return
        size = block.size
        counters = block.pool.counters
        counters.allocations -= 1
        counters.allocated_bytes -= size
        self.allocations -= 1
        self.allocated_bytes -= size
        if self.tracer is not None:
            self.tracer("free_requested", block.address, block.requested, block.stream)
        if size >= self._max_split:
            self._oversize_allocations.decrease()
        if block.stream_uses is not None:
            block.state = PENDING
            block.stream_uses = None
            self._waiting[block.address] = block
            if not self.defers_events:
                self.complete(block)
            for each in (self, counters):
                each.pending_bytes += size
                each.pending_blocks += 1
        else:
            self._free_block(block)

    def _free_block(self, block: Block) -> None:
        """``free_block``: merge with free neighbours and insert into the pool.

        The merges of :meth:`Block.merge_neighbours`, unrolled.
        """
        pool = block.pool
        counters = pool.counters
        if self.tracer is not None:
            self.tracer("free_completed", block.address, block.requested, block.stream)
        counters.requested_bytes -= block.requested
        self.requested_bytes -= block.requested
        size = block.size
        merged = subsumed = 0
        block.state = FREE
        block.requested = 0
        free = pool.free
        after = block.next
        if after is not None and after.state == FREE:
            del free[bisect_left(free, (after.size, after.address))]
            merged = 1
            subsumed = after.size
            block.size += subsumed
            block.next = beyond = after.next
            if beyond is not None:
                beyond.prev = block
            after.state = MERGED
        before = block.prev
        if before is not None and before.state == FREE:
            del free[bisect_left(free, (before.size, before.address))]
            merged += 1
            subsumed += before.size
            before.size += block.size
            before.next = after = block.next
            if after is not None:
                after.prev = before
            block.state = MERGED
            block = before
        if self._keeps_age:
            block.born = self._searches[pool.is_small]
        insort(free, (block.size, block.address, block))
        if block.expandable is None:
            if block.next is not None or block.prev is not None:
                self._change_inactive(counters, 1 - merged, size)
            elif merged:
                self._change_inactive(counters, -merged, -subsumed)

    def _change_inactive(self, counters: Counters, blocks: int, nbytes: int) -> None:
        """Count free blocks, and their bytes, of segments that are partly in use."""
        counters.inactive_split_bytes = value = counters.inactive_split_bytes + nbytes
        self.inactive_split_bytes = both = self.inactive_split_bytes + nbytes
        if nbytes > 0:
            counters.total_inactive_split_bytes += nbytes
            if value > counters.peak_inactive_split_bytes:
                counters.peak_inactive_split_bytes = value
            if both > self.peak_inactive_split_bytes:
                self.peak_inactive_split_bytes = both
        if blocks:
            counters.inactive_splits = value = counters.inactive_splits + blocks
            self.inactive_splits = both = self.inactive_splits + blocks
            if blocks > 0:
                counters.total_inactive_splits += blocks
                if value > counters.peak_inactive_splits:
                    counters.peak_inactive_splits = value
                if both > self.peak_inactive_splits:
                    self.peak_inactive_splits = both

    # -- when no cached block fits -------------------------------------------------------------

    def _allocate(self, pool: Pool, rounded: int) -> Block:
        """The rest of ``malloc``: what happens when no cached block fits."""
        if self._collects:
            self._collect_garbage()
        segment = self.settings.segment_size(rounded)
        if self.settings.rejects_early and self._exceeds_fraction(segment):
            self.num_oom_rejections += 1
            raise OutOfDeviceMemory(self, segment)
        block = self._alloc_block(pool, rounded, segment)
        if block is None and self._release_available(pool, rounded):
            block = self._alloc_block(pool, rounded, segment)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._alloc_block(pool, rounded, segment)
        if block is None:
            self.num_ooms += 1
            if self.tracer is not None:
                self.tracer("oom", self.free_device_bytes(), rounded, pool.stream)
            raise OutOfDeviceMemory(self, segment)
        return block

    def empty_cache(self) -> None:
        """``release_cached_blocks``: all wholly free segments go back to the device."""
        self.num_sync_all_streams += 1
        for block in list(self._waiting.values()):
            self.complete(block)
        self.process_events()
        self._release_cached_segments()

    # -- streams -----------------------------------------------------------------------------

    def record_stream(self, block: Block, stream: int) -> None:
        """``recordStream``: ``stream`` uses the block too, so its free is deferred."""
        if block.state != NULL and stream != stream_of(block.stream):
            if block.stream_uses is None:
                block.stream_uses = set()
            block.stream_uses.add(stream)

    @property
    def waits(self) -> bool:
        """Are there freed blocks whose events are not complete?"""
        return bool(self._waiting)

    def complete(self, block: Block) -> None:
        """The events of a freed block are complete; it returns at the next ``malloc``."""
        if self._waiting.pop(block.address, None) is not None:
            self._pending.append(block)

    def process_events(self) -> None:
        """``process_events``: blocks whose events are complete return to their pools."""
        pending, self._pending = self._pending, []
        for block in pending:
            for counters in (self, block.pool.counters):
                counters.pending_bytes -= block.size
                counters.pending_blocks -= 1
            self._free_block(block)

    # -- what users see ----------------------------------------------------------------------

    def reset_peaks(self) -> None:
        """``resetPeakStats``."""
        self._statistics.reset_peaks()
        for counter in (self._oversize_allocations, self._oversize_segments):
            counter.peak = counter.current

    def reset_accumulated(self) -> None:
        """``resetAccumulatedStats``."""
        self._statistics.reset_accumulated()
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_oom_rejections = 0
        self.num_device_alloc = self.num_device_free = 0
        for counter in (self._oversize_allocations, self._oversize_segments):
            counter.allocated = counter.freed = 0

    def memory_stats(self) -> dict[str, Any]:
        """The nested dictionary that ``torch._C._cuda_memoryStats`` returns."""
        limit = self.settings.max_split_bytes
        return {
            "num_alloc_retries": self.num_alloc_retries,
            "num_ooms": self.num_ooms,
            # SIZE_MAX in a signed integer.
            "max_split_size": -1 if limit is None else limit,
            "num_sync_all_streams": self.num_sync_all_streams,
            "num_device_alloc": self.num_device_alloc,
            "num_device_free": self.num_device_free,
            "num_oom_rejections": self.num_oom_rejections,
            **self._statistics.arrays(),
            "reserved_bytes_by_private_pools": {},
            "oversize_allocations": self._oversize_allocations.as_dict(),
            "oversize_segments": self._oversize_segments.as_dict(),
        }
