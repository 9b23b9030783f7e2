"""PyTorch's caching allocator a second time: slow, plain, and written from the rules.

Shares no code with ``trainfit.simgpu.allocator.caching``. Memory is one list of parts; every
question
is answered by looking at all of them. Addresses count from 0, new segments take the next free
multiple of 2 MiB, as in the fast model, so the two can be compared part by part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20
FREE, LIVE, WAITING, UNMAPPED = "free", "live", "waiting", "unmapped"


class ReferenceOutOfMemory(Exception):
    """No memory for a request."""


@dataclass
class Rules:
    """The settings, in bytes; ``None`` where there is no limit."""

    max_split: int | None = None
    max_rounding: int = 20 * MIB
    large_segment: int = 20 * MIB
    divisions: tuple[int, ...] = (0,) * 16
    gc_threshold: float = 0.0
    fraction: float = 1.0
    expandable: bool = False
    rejects_early: bool = False


@dataclass(eq=False)
class Part:
    """Some bytes of a segment that are in one state."""

    segment: int
    start: int
    size: int
    stream: int
    small: bool
    state: str
    #: Bytes mapped at a time; 0 for a segment that came from cudaMalloc.
    page: int = 0
    requested: int = 0
    #: Searches of the pool when the part was put into it.
    since: int = 0
    users: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.start + self.size


class ReferenceAllocator:
    """The rules of one device; ``parts`` are sorted by address."""

    def __init__(self, capacity: int, context: int, rules: Rules) -> None:
        self.capacity, self.context, self.rules = capacity, context, rules
        self.parts: list[Part] = []
        self.next_start = 0
        self.segment = 0
        self.searches = {True: 0, False: 0}
        self.ready: list[Part] = []
        self.retries = self.ooms = self.mallocs = self.frees = self.rejections = 0
        self.peak_allocated = self.peak_reserved = self.peak_active = 0

    # -- what it holds -------------------------------------------------------------------

    @property
    def reserved(self) -> int:
        return sum(part.size for part in self.parts if part.state != UNMAPPED)

    @property
    def allocated(self) -> int:
        return sum(part.size for part in self.parts if part.state == LIVE)

    @property
    def active(self) -> int:
        return sum(part.size for part in self.parts if part.state in (LIVE, WAITING))

    @property
    def requested(self) -> int:
        return sum(part.requested for part in self.parts if part.state in (LIVE, WAITING))

    @property
    def inactive_split(self) -> list[int]:
        """Free parts of cudaMalloc'ed segments that are not wholly free."""
        return [
            part.size
            for part in self.parts
            if part.state == FREE and not part.page and len(self.of(part.segment)) > 1
        ]

    def of(self, segment: int) -> list[Part]:
        return [part for part in self.parts if part.segment == segment]

    @property
    def limit(self) -> int | None:
        rules = self.rules
        return None if rules.fraction >= 1 else int(rules.fraction * self.capacity)

    # -- malloc and free -----------------------------------------------------------------

    def malloc(self, size: int, stream: int) -> Part:
        self.events()
        need = self.rounded(size)
        small = need <= MIB
        if self.collects():
            self.searches[small] += 1
        part = self.best_fit(need, small, stream) or self.fresh(need, small, stream)
        rest = part.size - need
        if small or self.rules.expandable:
            splits = rest >= 512
        else:
            splits = rest > MIB and (self.rules.max_split is None or need < self.rules.max_split)
        if splits:
            self.cut(part, need)
        part.state, part.requested = LIVE, size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_active = max(self.peak_active, self.active)
        return part

    def free(self, part: Part, *, waits: bool) -> None:
        """``waits``: do other streams' events come to an end later?"""
        if part.users:
            part.state = WAITING
            if not waits:
                self.ready.append(part)
        else:
            self.cache(part)

    def use(self, part: Part, stream: int) -> None:
        if stream != part.stream:
            part.users.add(stream)

    def events(self) -> None:
        for part in self.ready:
            self.cache(part)
        self.ready = []

    def cache(self, part: Part) -> None:
        part.state, part.requested, part.users = FREE, 0, set()
        part.since = self.searches[part.small]
        self.join(part)

    # -- sizes -----------------------------------------------------------------------------

    def rounded(self, size: int) -> int:
        if size < 512:
            return 512
        of_class = self.rules.divisions[min(max(size // MIB, 1).bit_length() - 1, 15)]
        if of_class > 1 and size > 512 * of_class:
            power = 512
            while power * 2 <= size:
                power *= 2
            return (
                size
                if power == size
                else next(
                    power + step * power // of_class
                    for step in range(of_class + 1)
                    if power + step * power // of_class >= size
                )
            )
        return size + -size % 512

    def segment_size(self, need: int) -> int:
        if need <= MIB:
            return 2 * MIB
        return self.rules.large_segment if need < 10 * MIB else need + -need % (2 * MIB)

    # -- searching ---------------------------------------------------------------------------

    def best_fit(self, need: int, small: bool, stream: int) -> Part | None:
        fits = [
            part
            for part in self.parts
            if part.state == FREE
            and part.small == small
            and part.stream == stream
            and part.size >= need
        ]
        fits.sort(key=lambda part: (part.size, part.start))
        if fits and fits[0].page:
            fits = self.prefer(fits)
        if not fits:
            return None
        found, limit = fits[0], self.rules.max_split
        if limit is not None:
            if need < limit <= found.size:
                return None
            if need >= limit and found.size >= need + self.rules.max_rounding:
                return None
        return found

    def prefer(self, fits: list[Part]) -> list[Part]:
        """With expandable segments: a part counts as large as it could become."""
        if not self.rules.expandable:
            while fits and fits[0].page:
                fits = fits[1:]
            return fits
        while fits[0].page and len(fits) > 1 and self.could_be(fits[1]) < self.could_be(fits[0]):
            fits = fits[1:]
        return fits

    def could_be(self, part: Part) -> int:
        after = self.neighbour(part, 1)
        return part.size + (after.size if after is not None and after.state == UNMAPPED else 0)

    def neighbour(self, part: Part, step: int) -> Part | None:
        own = self.of(part.segment)
        place = own.index(part) + step
        return own[place] if 0 <= place < len(own) else None

    # -- new memory --------------------------------------------------------------------------

    def fresh(self, need: int, small: bool, stream: int) -> Part:
        if self.collects():
            self.collect()
        size = self.segment_size(need)
        if (
            self.rules.rejects_early
            and self.limit is not None
            and (self.reserved + size > self.limit)
        ):
            self.rejections += 1
            raise ReferenceOutOfMemory
        found = self.take(need, size, small, stream)
        if found is None and self.release_oversize(need, small, stream):
            found = self.take(need, size, small, stream)
        if found is None:
            self.empty_cache()
            self.retries += 1
            found = self.take(need, size, small, stream)
        if found is None:
            self.ooms += 1
            raise ReferenceOutOfMemory
        return found

    def take(self, need: int, size: int, small: bool, stream: int) -> Part | None:
        if self.limit is not None and self.reserved + size > self.limit:
            return None
        if self.rules.expandable:
            return self.expand(need, small, stream)
        if self.reserved + self.context + size > self.capacity:
            return None
        part = self.add_segment(size, small, stream, FREE, 0)
        self.mallocs += 1
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return part

    def add_segment(self, size: int, small: bool, stream: int, state: str, page: int) -> Part:
        self.next_start -= size + -size % (2 * MIB)
        part = Part(self.segment, self.next_start, size, stream, small, state, page)
        part.since = self.searches[small]
        self.segment += 1
        self.parts.insert(0, part)
        return part

    # -- expandable segments -----------------------------------------------------------------

    def expand(self, need: int, small: bool, stream: int) -> Part | None:
        part = self.room(need, small, stream)
        while part.state == UNMAPPED or part.size < need:
            if part.state == UNMAPPED:
                gap, wanted = part, min(need, part.size)
            else:
                after = self.neighbour(part, 1)
                assert after is not None and after.state == UNMAPPED
                gap, wanted = after, min(need - part.size, after.size)
            wanted += -wanted % gap.page
            if self.reserved + self.context + wanted > self.capacity:
                return None
            self.cut(gap, wanted)
            gap.state, gap.since = FREE, self.searches[small]
            self.mallocs += 1
            self.peak_reserved = max(self.peak_reserved, self.reserved)
            part = self.join(gap)
        return part

    def room(self, need: int, small: bool, stream: int) -> Part:
        """The lowest run of free and unmapped parts, begun at or right before a gap."""
        for part in self.parts:
            if part.state == UNMAPPED and (part.small, part.stream) == (small, stream):
                before = self.neighbour(part, -1)
                start = before if before is not None and before.state == FREE else part
                length, at = 0, start
                while at is not None and at.state in (FREE, UNMAPPED):
                    length += at.size
                    at = self.neighbour(at, 1)  # type: ignore[assignment]
                if length >= need:
                    return start
        page = 2 * MIB if small else self.rules.large_segment
        size = self.capacity + self.capacity // 8
        return self.add_segment(size + -size % page, small, stream, UNMAPPED, page)

    def unmap(self, part: Part) -> None:
        origin = self.of(part.segment)[0].start
        first = part.start + -(part.start - origin) % part.page
        last = part.end - (part.end - origin) % part.page
        if first >= last:
            return
        if first > part.start:
            part = self.cut(part, first - part.start)
        if last < part.end:
            self.cut(part, last - part.start)
        part.state = UNMAPPED
        self.frees += 1
        part = self.join(part)
        if len(self.of(part.segment)) == 1:
            self.parts.remove(part)

    # -- giving back ---------------------------------------------------------------------------

    def release(self, part: Part) -> None:
        self.parts.remove(part)
        self.frees += 1

    def whole(self, part: Part) -> bool:
        return part.state == FREE and not part.page and len(self.of(part.segment)) == 1

    # Where settings change in a running program, a block as large as the split limit may be a
    # part of a segment. PyTorch would call cudaFree in its middle; here it stays.
    def release_oversize(self, need: int, small: bool, stream: int) -> bool:
        limit = self.rules.max_split
        if limit is None:
            return False
        wanted = max(need, limit)
        pool = [
            part
            for part in self.parts
            if part.state == FREE and part.small == small and part.stream == stream
        ]
        pool.sort(key=lambda part: (part.size, part.start))
        large = [part for part in pool if part.size >= wanted]
        if large and self.whole(large[0]):
            self.release(large[0])
            return True
        released = 0
        for part in reversed([part for part in pool if part.size < wanted]):
            if released >= wanted or part.size < limit:
                break
            if self.whole(part):
                released += part.size
                self.release(part)
        return released >= wanted

    def empty_cache(self) -> None:
        for part in self.parts:
            if part.state == WAITING and part not in self.ready:
                self.ready.append(part)
        self.events()
        for part in [part for part in self.parts if part.state == FREE]:
            if part.page:
                self.unmap(part)
            elif self.whole(part):
                self.release(part)

    def collects(self) -> bool:
        return self.limit is not None and self.rules.gc_threshold > 0

    def collect(self) -> None:
        assert self.limit is not None
        excess = self.reserved - int(self.rules.gc_threshold * self.limit)
        freed = 0
        while freed < excess:
            whole = [part for part in self.parts if self.whole(part) and not part.small]
            if not whole:
                return
            ages = {id(part): self.searches[False] - part.since for part in whole}
            mean = sum(ages.values()) / len(whole)
            for part in whole:
                if ages[id(part)] >= mean:
                    freed += part.size
                    self.release(part)

    # -- parts -----------------------------------------------------------------------------------

    def cut(self, part: Part, size: int) -> Part:
        """Cut ``part`` to ``size``; the rest, in the same state, is returned (or ``part``)."""
        if size == part.size:
            return part
        rest = Part(
            part.segment, part.start + size, part.size - size, part.stream, part.small, part.state
        )
        rest.page, rest.since = part.page, self.searches[part.small]
        part.size = size
        self.parts.insert(self.parts.index(part) + 1, rest)
        return rest

    def join(self, part: Part) -> Part:
        """Unite with neighbours in the same state; the united part counts as new."""
        for step in (-1, 1):
            other = self.neighbour(part, step)
            if other is not None and other.state == part.state:
                part.start = min(part.start, other.start)
                part.size += other.size
                self.parts.remove(other)
        return part
