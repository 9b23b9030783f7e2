"""What was allocated at a moment of a snapshot's history: where memory ran out, or was at its most.

PyTorch keeps the last entries of the history only. So the walk goes back from the end, whose blocks
the snapshot has: an allocation takes its block away, a free brings it back.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Literal, NamedTuple

from trainfit.memory.snapshot.file import DeviceSnapshot, SnapshotBlock, SnapshotEvent, Stack

#: The allocator's smallest unit (kMinBlockSize of c10/core/CachingDeviceAllocator.h).
_UNIT: Final = 512

#: Born before the history begins.
BEFORE: Final = -1


class LiveBlock(NamedTuple):
    """Memory that a tensor holds at the moment.

    ``nbytes`` is the whole block; of blocks that are gone in the end what was asked for, rounded up
    to 512. ``born`` is the place of its allocation in the history, or :data:`BEFORE`; then its
    ``stack`` is known only if the block is there in the end.
    """

    address: int
    nbytes: int
    born: int
    stack: Stack


@dataclasses.dataclass(frozen=True)
class HistoryMoment:
    """The state of one GPU at one moment.

    Attributes
    ----------
    why: "out_of_memory": the history's last failed request; "peak": the most that was allocated
        within the history; "snapshot": there is no history, so the moment when it was written.
    event: Place of the moment in the history; 0 without one.
    live: All memory of tensors then.
    pending_bytes: Freed, but not yet given back by another stream, when the snapshot was written.
    requested_bytes: What the failed request asked for; 0 if none failed.
    device_free_bytes: Free on the GPU at that request; ``None`` if not recorded.
    reserved_bytes: Reserved then; ``None`` where it cannot be told.
    failures: Requests that failed in the whole history, by their places.
    at_end: Whether the snapshot's blocks show just this moment.
    """

    why: Literal["out_of_memory", "peak", "snapshot"]
    event: int
    live: tuple[LiveBlock, ...]
    pending_bytes: int
    requested_bytes: int
    device_free_bytes: int | None
    reserved_bytes: int | None
    failures: tuple[int, ...]
    at_end: bool

    @property
    def allocated_bytes(self) -> int:
        """Of all live blocks."""
        return sum(block.nbytes for block in self.live)


class DeviceHistory:
    """The history of one GPU, with what was there before it begins.

    Attributes
    ----------
    events: Allocations, frees, segments and failures, oldest first.
    before: Blocks that the first entry finds, by address.
    free_action: The entry that ends a tensor: its free is requested, or (where such entries were
        skipped) completed.
    """

    def __init__(self, device: DeviceSnapshot) -> None:
        self._device = device
        self.events = device.events
        self.free_action = _free_action(device.events)
        at_end = {block.address: block for block in device.blocks() if block.state == "allocated"}
        self._at_end = at_end
        self.before = self._walk_back(at_end)
        self._born_to_stay = self._stays()

    def _walk_back(self, at_end: dict[int, SnapshotBlock]) -> dict[int, LiveBlock]:
        live = {
            address: LiveBlock(address, block.nbytes, BEFORE, block.stack)
            for address, block in at_end.items()
        }
        for event in reversed(self.events):
            if event.action == "alloc":
                live.pop(event.address, None)
            elif event.action == self.free_action:
                live[event.address] = LiveBlock(event.address, _charged(event), BEFORE, ())
        return live

    def _stays(self) -> dict[int, SnapshotBlock]:
        """Places of the allocations whose blocks are there in the end."""
        latest: dict[int, int] = {}
        for place, event in enumerate(self.events):
            if event.action == "alloc":
                latest[event.address] = place
            elif event.action == self.free_action:
                latest.pop(event.address, None)
        return {
            place: self._at_end[address]
            for address, place in latest.items()
            if address in self._at_end
        }

    def moment(self) -> HistoryMoment:
        """The last request that failed, else the peak, else the end."""
        failures = tuple(place for place, event in enumerate(self.events) if event.action == "oom")
        if failures:
            return self.at(failures[-1], "out_of_memory", failures)
        if not any(event.action == "alloc" for event in self.events):
            return self.at(len(self.events), "snapshot", ())
        return self.at(self._peak(), "peak", ())

    def _peak(self) -> int:
        """The place after the allocation with which most was allocated."""
        sizes = {address: block.nbytes for address, block in self.before.items()}
        total = most = sum(sizes.values())
        peak = 0
        for place, event in enumerate(self.events):
            if event.action == "alloc":
                block = self._born_to_stay.get(place)
                nbytes = block.nbytes if block is not None else _charged(event)
                total += nbytes - sizes.get(event.address, 0)
                sizes[event.address] = nbytes
                if total > most:
                    most, peak = total, place + 1
            elif event.action == self.free_action:
                total -= sizes.pop(event.address, 0)
        return peak

    def at(
        self,
        place: int,
        why: Literal["out_of_memory", "peak", "snapshot"],
        failures: tuple[int, ...],
    ) -> HistoryMoment:
        """The state before entry ``place``."""
        live = self.live_at(place)
        failed = self.events[place] if why == "out_of_memory" else None
        after = self.events[place + 1 if failed is not None else place :]
        quiet = all(event.action in ("snapshot", "oom") for event in after)
        return HistoryMoment(
            why=why,
            event=place,
            live=tuple(live.values()),
            pending_bytes=sum(b.nbytes for b in self._device.blocks() if b.state == "pending"),
            requested_bytes=failed.nbytes if failed is not None else 0,
            device_free_bytes=failed.device_free if failed is not None else None,
            reserved_bytes=self._reserved(after),
            failures=failures,
            at_end=quiet,
        )

    def live_at(self, place: int) -> dict[int, LiveBlock]:
        """What tensors hold before entry ``place``, by address."""
        live = dict(self.before)
        for number, event in enumerate(self.events[:place]):
            if event.action == "alloc":
                stays = self._born_to_stay.get(number)
                nbytes = stays.nbytes if stays is not None else _charged(event)
                live[event.address] = LiveBlock(event.address, nbytes, number, event.stack)
            elif event.action == self.free_action:
                live.pop(event.address, None)
        return live

    def _reserved(self, after: tuple[SnapshotEvent, ...]) -> int:
        """Reserved before the entries ``after``: those of the end, less what they added."""
        reserved = sum(segment.nbytes for segment in self._device.segments)
        return reserved - sum(map(newly_reserved, after))


def newly_reserved(event: SnapshotEvent) -> int:
    """Bytes that an entry adds to what is reserved; negative: gives back."""
    if event.action in ("segment_alloc", "segment_map"):
        return event.nbytes
    return -event.nbytes if event.action in ("segment_free", "segment_unmap") else 0


def _free_action(events: tuple[SnapshotEvent, ...]) -> str:
    """Memory is a tensor's until its free is requested; a history can have completed ones only."""
    actions = {event.action for event in events}
    return "free_requested" if "free_requested" in actions else "free_completed"


def _charged(event: SnapshotEvent) -> int:
    return -(-event.nbytes // _UNIT) * _UNIT
