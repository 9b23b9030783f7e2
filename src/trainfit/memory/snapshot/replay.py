"""Replays a snapshot's history through the model of the allocator, under other settings.

What is known of a history are requests and frees; the replay of them is believed only if it
reserves as much as the GPU did.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from trainfit.memory.fragmentation import compare_settings
from trainfit.memory.replay import UNLIMITED, Stream, replay
from trainfit.memory.snapshot.file import SnapshotEvent
from trainfit.memory.snapshot.history import DeviceHistory, HistoryMoment, newly_reserved
from trainfit.results.memory import SettingOutcome
from trainfit.results.runs.recording import EMPTY_CACHE, FREE, MALLOC, OTHER
from trainfit.simgpu.allocator.settings import AllocatorSettings

#: The replay is believed if what it reserves is this near to what was reserved.
_NEAR: Final = 0.02
#: Entries of a history that are replayed within some ten seconds.
_MOST_EVENTS: Final = 400_000


@dataclasses.dataclass(frozen=True)
class HistoryReplay:
    """Settings compared on a history, or the reason why not (then there are no ``settings``)."""

    settings: tuple[SettingOutcome, ...]
    reason: str = ""


def compare_on(
    history: DeviceHistory, moment: HistoryMoment, conf: str | None, *, private: bool
) -> HistoryReplay:
    """Replay the history up to ``moment`` under the settings of the run, and under others.

    ``private``: the GPU has pools of CUDA graphs, whose memory is not in the common one.
    """
    if moment.why == "snapshot":
        return HistoryReplay((), "the snapshot has no history of allocations")
    if private:
        return HistoryReplay((), "memory pools of CUDA graphs are not in the history as such")
    if moment.event > _MOST_EVENTS:
        return HistoryReplay((), f"the history has {moment.event} entries up to there")
    try:
        settings = AllocatorSettings.from_conf(conf or "")
    except ValueError as error:
        return HistoryReplay((), str(error))
    failed = moment.why == "out_of_memory"
    stream = _stream(history, moment)
    present = replay(stream, capacity_bytes=UNLIMITED, settings=settings)
    capacity = UNLIMITED
    expected = _most_reserved(history, moment)
    if failed:
        if moment.reserved_bytes is None or moment.device_free_bytes is None:
            return HistoryReplay((), "the snapshot does not say how much of the GPU was free")
        capacity = moment.reserved_bytes + moment.device_free_bytes
        limited = replay(stream, capacity_bytes=capacity, settings=settings)
        if limited.failed is None:
            return HistoryReplay((), "the replayed history does not run out of memory")
    elif abs(present.peak_reserved - expected) > _NEAR * expected:
        return HistoryReplay((), "the replayed history reserves another amount than the run did")
    return HistoryReplay(compare_settings(stream, capacity, 0, settings))


def _most_reserved(history: DeviceHistory, moment: HistoryMoment) -> int:
    """The most that was reserved up to the moment."""
    reserved = moment.reserved_bytes or 0
    most = reserved
    for event in reversed(history.events[: moment.event]):
        reserved -= newly_reserved(event)
        most = max(most, reserved)
    return most


def _stream(history: DeviceHistory, moment: HistoryMoment) -> Stream:
    """What was there before, then the history up to the moment, with the request that failed."""
    sizes: list[int] = []
    streams: list[int] = []
    events: list[int] = []
    numbers: dict[int, int] = {}
    known: dict[int, int] = {}

    def ask(address: int, nbytes: int, stream: int) -> None:
        numbers[address] = len(sizes)
        events.append(len(sizes) << 2 | MALLOC)
        sizes.append(nbytes)
        streams.append(known.setdefault(stream, len(known)))

    for block in sorted(history.before.values(), key=lambda block: block.address):
        ask(block.address, block.nbytes, 0)
    entries = history.events[: moment.event]
    for place, event in enumerate(entries):
        if event.action == "alloc":
            ask(event.address, event.nbytes, event.stream)
        elif event.action == history.free_action:
            if (number := numbers.pop(event.address, None)) is not None:
                events.append(number << 2 | FREE)
        elif event.action == "segment_free" and _ends_emptying(entries, place):
            events.append(EMPTY_CACHE << 2 | OTHER)
    if moment.why == "out_of_memory":
        ask(-1, moment.requested_bytes, history.events[moment.event].stream)
    return Stream(
        np.array(events, dtype=np.int64),
        np.array(sizes, dtype=np.int64),
        np.array(streams, dtype=np.int64),
        np.zeros(len(sizes), dtype=bool),
    )


def _ends_emptying(entries: tuple[SnapshotEvent, ...], place: int) -> bool:
    """Whether the script emptied the cache: before a retry a segment or a failure follows."""
    if place + 1 >= len(entries):
        return False
    return entries[place + 1].action in ("alloc", "free_requested", "free_completed", "snapshot")
