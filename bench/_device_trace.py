"""Replays the events of a real GPU's caching allocator through our model of it.

A trace says which requests came (allocations and frees, in order, with their streams) and
what the allocator made of them (addresses, segments). The model is given the requests and
has to come to the same, to the byte. What is not the allocator's to decide is taken from the
trace: where the driver put a segment, whether it had memory left, and when another stream was
done with a block.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from _truth_files import SIZED, AllocatorTrace, Mark, Reports

from trainfit.simgpu.allocator.blocks import Block, Pool
from trainfit.simgpu.allocator.caching import CachingAllocator
from trainfit.simgpu.allocator.segments import OutOfDeviceMemory
from trainfit.simgpu.allocator.settings import SMALL_BUFFER, AllocatorSettings

#: Stands for a device that has enough memory.
_PLENTY = 1 << 60

#: The model's events by the letters of a trace.
_LETTER = {
    "alloc": "a", "free_requested": "r", "free_completed": "c", "segment_alloc": "S",
    "segment_free": "s", "segment_map": "M", "segment_unmap": "U", "oom": "o",
}  # fmt: skip

#: What happens within an allocation, before its own event.
_WITHIN = frozenset("SsMUc")

#: The events up to the next request, and those of them that a mark may come before or after.
_NEXT_REQUEST = re.compile("[SsMUc]*[afro]?")
_MAY_PRECEDE = frozenset("csUo")


@dataclasses.dataclass(frozen=True)
class TraceReplay:
    """Outcome of a replay: ``difference`` says where and how the model parts from the trace.

    ``events`` are those that agreed; ``peak_allocated_bytes`` and ``peak_reserved_bytes`` the
    model's peaks until then.
    """

    events: int
    difference: str | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int

    @property
    def exact(self) -> bool:
        return self.difference is None


def replay_trace(
    trace: AllocatorTrace, memory_bytes: int, reports: Reports | None = None
) -> TraceReplay:
    """Compare the model with a trace: every event, every mark, and the state at the end.

    ``memory_bytes`` is the GPU's total, from which the address ranges of expandable segments
    follow; ``reports`` adds the size of every block of the last step. Stops at the first
    difference. Raises ``ValueError`` for settings that the model does not know.
    """
    second: frozenset[_Choice] = frozenset()
    difference: str | None = None
    while True:
        run = _TraceReplay(trace, reports, memory_bytes, second)
        try:
            run.play()
        except _Difference as error:
            other = _otherwise(run.open, second)
            if other is not None:
                second = other
                continue
            difference = str(error)
        break
    model = run.model
    return TraceReplay(
        events=run.cursor,
        difference=difference,
        peak_allocated_bytes=model.peak_allocated_bytes,
        peak_reserved_bytes=model.peak_reserved_bytes,
    )


#: A trace does not say why blocks of other streams were completed or segments freed: for the
#: request that follows, or because the cache was emptied. Both are tried. (kind, event).
_Choice = tuple[str, int]


def _otherwise(made: list[_Choice], second: frozenset[_Choice]) -> frozenset[_Choice] | None:
    """The next way to choose: of the choices just made, the last that was not tried both ways."""
    for index in reversed(range(len(made))):
        if made[index] not in second:
            return second - set(made[index:]) | {made[index]}
    return None


class _Difference(Exception):
    """The model did something else than the trace."""


@dataclasses.dataclass(frozen=True, slots=True)
class _TraceEvent:
    """One event of a trace; ``size`` is 0 where the trace has none."""

    letter: str
    address: int
    size: int
    stream: int


def _events(trace: AllocatorTrace) -> Iterator[_TraceEvent]:
    addresses, sizes, free = iter(trace.addresses), iter(trace.sizes), iter(trace.free_bytes)
    changes = dict(trace.streams)
    stream = 0
    for index, letter in enumerate(trace.kinds):
        stream = changes.get(index, stream)
        if letter == "o":
            address = next(free)
        else:
            address = trace.base_address + next(addresses) * trace.unit_bytes
        yield _TraceEvent(letter, address, next(sizes) if letter in SIZED else 0, stream)


class _Model(CachingAllocator):
    """The allocator, with the driver's part read from the trace."""

    def __init__(self, run: _TraceReplay, trace: AllocatorTrace, memory_bytes: int) -> None:
        super().__init__(memory_bytes, settings=AllocatorSettings.from_conf(trace.settings))
        self._run = run
        self.defers_events = True
        self._searching = Pool(0, False, self)
        self._nowhere = 1 << 62
        if trace.allowed_bytes is not None:
            self.set_memory_fraction(0.5, 2 * trace.allowed_bytes)

    def free_device_bytes(self) -> int:
        """Enough where the next thing that happened is that the driver gave memory."""
        return _PLENTY if self._run.upcoming() in ("S", "M") else 0

    def _find_expandable_block(self, pool: Pool, size: int) -> Block:
        self._searching = pool
        return super()._find_expandable_block(pool, size)

    def _reserve_addresses(self, nbytes: int) -> int:
        if not self.settings.expandable_segments:
            return self._run.upcoming_address()
        ranges = [
            range(head.address, head.address + head.expandable.size)
            for head in self._heads.values()
            if head.expandable is not None
        ]
        found = self._run.first_mapping(self._searching, ranges)
        # Nothing was ever mapped there: any place that is nobody else's will do.
        self._nowhere += nbytes
        return self._nowhere - nbytes if found is None else found

    def process_events(self) -> None:
        """When blocks of other streams are done is in the trace, not for the model to say."""

    def empty_cache(self) -> None:
        self._run.complete_all()
        super().empty_cache()

    def give_back(self, block: Block) -> None:
        """Other streams are done with a freed block."""
        del self._waiting[block.address]
        for counters in (self, block.pool.counters):
            counters.pending_bytes -= block.size
            counters.pending_blocks -= 1
        self._free_block(block)


class _TraceReplay:
    """The requests of a trace, given to the model in order; ``cursor`` is what agreed."""

    def __init__(
        self,
        trace: AllocatorTrace,
        reports: Reports | None,
        memory_bytes: int,
        second: frozenset[_Choice],
    ) -> None:
        """``second`` are the choices that are made the second way."""
        self._second = second
        #: The choices that the present request depends on.
        self.open: list[_Choice] = []
        self._trace = trace
        self._events = list(_events(trace))
        self.cursor = 0
        self._blocks: dict[int, Block] = {}
        self._waiting: dict[int, Block] = {}
        self._allocations = self._frees = 0
        #: Bytes of the last request if it was a free: that it was completed is an event of
        #: its own, before which a mark may lie.
        self._just_freed = 0
        self._marks: dict[tuple[int, int], list[Mark]] = {}
        for mark in trace.marks:
            self._marks.setdefault((mark.allocations, mark.frees), []).append(mark)
        self._block_bytes = _block_bytes(reports)
        self.model = _Model(self, trace, memory_bytes)
        self.model.tracer = self._expect

    # -- what the model asks ---------------------------------------------------------------

    def upcoming(self) -> str:
        """The letter of the next event; empty at the end."""
        return self._trace.kinds[self.cursor : self.cursor + 1]

    def upcoming_address(self) -> int:
        return self._events[self.cursor].address if self.cursor < len(self._events) else 0

    def first_mapping(self, pool: Pool, known: list[range]) -> int | None:
        """Where a new address range of ``pool`` begins: at its first mapping from here on."""
        for event in self._events[self.cursor :]:
            # Pages are of 2 MiB for small blocks, of 20 MiB (or as set) for large ones.
            small = event.size == SMALL_BUFFER
            if (
                event.letter == "M"
                and event.stream == pool.stream
                and small is pool.is_small
                and not any(event.address in each for each in known)
            ):
                return event.address
        return None

    def complete_all(self) -> None:
        """The cache is emptied: whatever waited for another stream is waited for."""
        while self.upcoming() == "c":
            self._complete(self._events[self.cursor])

    def _expect(self, action: str, address: int, size: int, stream: int) -> None:
        """The model did something: it has to be what the trace has next."""
        letter = _LETTER[action]
        event = _TraceEvent(letter, address, size, stream)
        if self.cursor == len(self._events):
            raise _Difference(f"after the end of the trace the model has {_words(event)}")
        wanted = self._events[self.cursor]
        if wanted.letter == "f" and letter == "r":
            wanted = dataclasses.replace(wanted, letter="r")
        if wanted.letter == "f" and letter == "c":
            self.cursor += 1
            return
        # A free has no size of its own; free memory of the device is the driver's.
        size = event.size if wanted.letter in SIZED else 0
        address = wanted.address if letter == "o" else event.address
        if _TraceEvent(letter, address, size, stream) != wanted:
            raise _Difference(
                f"event {self.cursor}: the GPU has {_words(wanted)}, the model {_words(event)}"
            )
        if self._events[self.cursor].letter != "f":
            self.cursor += 1

    # -- the course of the trace -----------------------------------------------------------

    def play(self) -> None:
        kinds = self._trace.kinds
        self._check_marks()
        while self.cursor < len(kinds):
            letter = kinds[self.cursor]
            if letter in "fr":
                self._free(self._events[self.cursor])
            elif letter == "c" and not (self._emptying() and self._choose("c")):
                self._complete(self._events[self.cursor])
            else:
                self._allocate_or_empty()
                self.open.clear()
            self._check_marks()
        if self._trace.whole:
            self._check_end()

    def _choose(self, kind: str) -> bool:
        """Go the second way? Remembered, so that the other one can be tried."""
        choice = (kind, self.cursor)
        self.open.append(choice)
        return choice in self._second

    def _emptying(self) -> bool:
        """May the completions here be those of a cache being emptied?"""
        end = self.cursor
        while end < len(self._events) and self._events[end].letter == "c":
            end += 1
        return end < len(self._events) and self._events[end].letter in "sU"

    def _free(self, event: _TraceEvent) -> None:
        block = self._blocks.pop(event.address, None)
        if block is None:
            raise _Difference(f"event {self.cursor}: {_words(event)} was never allocated")
        if event.letter == "r":
            block.stream_uses = {-1}
            self._waiting[event.address] = block
        self._frees += 1
        self._just_freed = block.size
        self._check_report(-block.size)
        self.model.free(block)

    def _complete(self, event: _TraceEvent) -> None:
        block = self._waiting.pop(event.address, None)
        if block is None:
            raise _Difference(f"event {self.cursor}: {_words(event)} was not waited for")
        self.model.give_back(block)

    def _allocate_or_empty(self) -> None:
        """The events up to the next allocation are its own, or those of ``empty_cache``."""
        start, end = self.cursor, self.cursor
        while end < len(self._events) and self._events[end].letter in _WITHIN:
            end += 1
        request = self._events[end] if end < len(self._events) else None
        within = self._trace.kinds[start:end]
        asks = request is not None and request.letter in "ao"
        took = "S" in within or "M" in within
        gives = "s" in within or "U" in within
        emptied = not asks or (request.letter == "a" and gives and not took)  # type: ignore[union-attr]
        if emptied or (gives and self._choose("s")):
            self.model.empty_cache()
            if self.cursor == start:
                raise _Difference(f"event {start}: the model has nothing to free")
            return
        assert request is not None
        self._allocate(request)

    def _allocate(self, request: _TraceEvent) -> None:
        before = self.cursor
        try:
            block = self.model.malloc(request.size, request.stream)
        except OutOfDeviceMemory:
            return
        if request.letter == "o":
            raise _Difference(f"event {before}: the GPU has {_words(request)}, the model does not")
        self._blocks[block.address] = block
        self._allocations += 1
        self._just_freed = 0
        self._check_report(block.size)

    # -- figures ---------------------------------------------------------------------------

    def _check_report(self, nbytes: int) -> None:
        """The size of the block, where the profiler was told."""
        known = self._block_bytes.get(self._allocations + self._frees)
        if known is not None and known != nbytes:
            raise _Difference(
                f"event {self.cursor}: the GPU's block has {known} bytes, the model's {nbytes}"
            )

    def _check_marks(self) -> None:
        """The allocator's statistics wherever the job asked for them.

        A mark says how many requests were met before it. Between two of those blocks of other
        streams and cached segments may have been given back, or a request failed: then it may
        be of before or after that, and must fit one of the two.
        """
        place = (self._allocations, self._frees)
        marks = self._marks.get(place)
        if not marks:
            return
        until = _NEXT_REQUEST.match(self._trace.kinds, self.cursor)
        last = until is None or not _MAY_PRECEDE & set(until.group())
        self._marks[place] = [mark for mark in marks if not self._fits(mark, strictly=last)]

    def _fits(self, mark: Mark, strictly: bool) -> bool:
        model = self.model
        for name, found in (
            ("allocated", model.allocated_bytes),
            ("reserved", model.reserved_bytes),
            ("active", model.active_bytes),
            ("peak_allocated", model.peak_allocated_bytes),
            ("peak_reserved", model.peak_reserved_bytes),
        ):
            wanted = getattr(mark, f"{name}_bytes")
            if name == "active" and wanted == found + self._just_freed:
                continue
            if wanted != found and strictly:
                raise _Difference(
                    f"event {self.cursor} ({mark.name}): {name} {wanted} bytes on the GPU, "
                    f"{found} in the model"
                )
            if wanted != found:
                return False
        return True

    def _check_end(self) -> None:
        """Every block of every segment at the end."""
        states = {"active_allocated": "a", "active_pending_free": "p", "inactive": "i"}
        found = {
            block["address"]: (block["size"], block["requested_size"], states[block["state"]])
            for segment in self.model.snapshot()
            for block in segment["blocks"]
        }
        wanted = {}
        for segment in self._trace.segments:
            for address, size, requested, state in segment.blocks:
                # What a free block was last asked for is of no account.
                asked = 0 if state == "i" else requested
                wanted[address] = (size, asked, state)
        if found != wanted:
            place = min(a for a in found.keys() | wanted.keys() if found.get(a) != wanted.get(a))
            raise _Difference(
                f"at the end, address {place:#x}: the GPU has {wanted.get(place)}, "
                f"the model {found.get(place)}"
            )


def _block_bytes(reports: Reports | None) -> dict[int, int]:
    """Signed block sizes by the number of the allocation or free, counted from 1.

    None where the profiler missed or added events: then it is not known which is which.
    """
    if reports is None or not reports.sums_agree:
        return {}
    before, end = reports.events
    if end - before != len(reports.block_bytes):
        return {}
    return dict(enumerate(reports.block_bytes, before + 1))


def _words(event: _TraceEvent) -> str:
    names = {letter: action for action, letter in _LETTER.items()} | {"f": "free"}
    size = f" of {event.size} bytes" if event.size else ""
    return f"{names[event.letter]}{size} at {event.address:#x} on stream {event.stream:#x}"
