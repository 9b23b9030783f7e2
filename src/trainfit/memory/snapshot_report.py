"""Builds what ``trainfit memory`` says of a snapshot: one GPU's memory at one moment, and why."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from trainfit.findings.out_of_memory import FullMemory, HeldMemory, is_left_behind, of_full_memory
from trainfit.memory.fragmentation import best_setting, compare_settings
from trainfit.memory.replay import UNLIMITED, Stream, replay
from trainfit.memory.snapshot_file import DeviceSnapshot, SnapshotEvent, Stack, read_snapshot
from trainfit.memory.snapshot_history import (
    BACKWARD,
    BEFORE,
    NO_STACK,
    AllocationOrigin,
    DeviceHistory,
    HistoryMoment,
    LiveBlock,
    is_copy,
    is_logits,
    is_recomputed,
    newly_reserved,
    origin,
    outside_modules,
)
from trainfit.results.files.errors import ResultFileError
from trainfit.results.findings import Place
from trainfit.results.memory import SettingOutcome, SnapshotOwner, SnapshotReport
from trainfit.results.runs.recording import EMPTY_CACHE, FREE, MALLOC, OTHER
from trainfit.simgpu.allocator.settings import AllocatorSettings

#: Owners that the result has.
_OWNERS: Final = 40
_RECORD: Final = (
    "record it with torch.cuda.memory._record_memory_history(stacks='all') before the model is made"
)


def explain_snapshot(path: Path) -> SnapshotReport:
    """Explain the GPU that ran out of memory, else the one with the most of it.

    Raises ``ResultFileError`` for anything but a snapshot with memory in it.
    """
    snapshot = read_snapshot(path)
    if not any(device.segments or device.events for device in snapshot.devices):
        raise ResultFileError(path, "a snapshot in which no GPU has memory", _RECORD)
    device = max(snapshot.devices, key=_telling)
    history = DeviceHistory(device)
    moment = history.moment()
    private = any(segment.private for segment in device.segments)
    replayed = compare_on(history, moment, snapshot.conf, private=private)
    groups = _groups(history, moment)
    best = best_setting(replayed.settings) if replayed.settings else None
    failed = moment.why == "out_of_memory"
    reserved = moment.reserved_bytes or 0
    free = [block.nbytes for block in device.blocks() if block.state == "free"]
    memory = FullMemory(
        held=[group.held for group in groups],
        allocated_bytes=moment.allocated_bytes,
        reserved_bytes=reserved,
        requested_bytes=moment.requested_bytes if failed else None,
        largest_free_bytes=max(free, default=0) if moment.at_end else None,
        failures=len(moment.failures),
        helpful_settings=_helpful(replayed.settings, best),
    )
    return SnapshotReport(
        file=str(path),
        why=moment.why,
        gpu_index=device.index,
        other_gpus_bytes={
            f"GPU {other.index}": other.allocated_bytes
            for other in snapshot.devices
            if other.index != device.index
        },
        event=moment.event,
        events=len(history.events),
        begins_before_bytes=sum(block.nbytes for block in history.before.values()),
        allocated_bytes=moment.allocated_bytes,
        pending_bytes=moment.pending_bytes,
        reserved_bytes=reserved,
        requested_bytes=memory.requested_bytes,
        device_free_bytes=moment.device_free_bytes,
        largest_free_bytes=memory.largest_free_bytes,
        failures=len(moment.failures),
        conf=snapshot.conf,
        by_kind_bytes=_sums((group.origin.kind, group.nbytes) for group in groups),
        files_bytes=_by_file(groups),
        owners=tuple(group.owner for group in groups[:_OWNERS]),
        replayed=bool(replayed.settings),
        settings=replayed.settings,
        best_setting=best,
        findings=of_full_memory(memory),
        notes=tuple(_notes(history, moment, groups, replayed)),
    )


def _helpful(settings: Sequence[SettingOutcome], best: SettingOutcome | None) -> dict[str, int]:
    """The best setting, and expandable segments where they do as well: those suit any sizes."""
    if best is None:
        return {}
    general = [setting for setting in settings if setting.setting.startswith("expandable_segments")]
    able = [setting for setting in general if setting.fits and not settings[0].fits]
    return {setting.environment: setting.reserved_bytes for setting in (*able, best)}


def _telling(device: DeviceSnapshot) -> tuple[bool, int]:
    return any(event.action == "oom" for event in device.events), device.allocated_bytes


@dataclasses.dataclass
class _Group:
    """Blocks with the same origin."""

    origin: AllocationOrigin
    stack: Stack
    blocks: list[LiveBlock] = dataclasses.field(default_factory=list)
    kept: int = 0
    survived: bool = False

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def owner(self) -> SnapshotOwner:
        return SnapshotOwner(
            kind=self.origin.kind,
            operator=self.origin.operator,
            line=self.origin.line,
            user_line=self.origin.user_line,
            in_module=bool(self.stack) and not outside_modules(self.stack),
            nbytes=self.nbytes,
            blocks=len(self.blocks),
            largest_bytes=max(block.nbytes for block in self.blocks),
        )

    @property
    def held(self) -> HeldMemory:
        found = self.origin
        return HeldMemory(
            kind=found.kind,
            operator=found.operator,
            place=Place.parse(found.line or found.user_line),
            nbytes=self.nbytes,
            kept=self.kept,
            loss=is_logits(self.stack),
            recomputed=is_recomputed(self.stack),
            survived=self.survived,
        )


def _groups(history: DeviceHistory, moment: HistoryMoment) -> list[_Group]:
    """Blocks by origin, most memory first; what is kept and what outlived a failure are marked."""
    groups: dict[tuple[AllocationOrigin, bool], _Group] = {}
    earlier = _alive_at_first_failure(history, moment)
    for block in moment.live:
        found = origin(block.stack, block.born != BEFORE)
        key = found, block.born in earlier
        group = groups.setdefault(key, _Group(found, block.stack, survived=key[1]))
        group.blocks.append(block)
    _mark_kept(history, moment, groups.values())
    return sorted(groups.values(), key=lambda group: -group.nbytes)


def _alive_at_first_failure(history: DeviceHistory, moment: HistoryMoment) -> set[int]:
    if len(moment.failures) < 2:
        return set()
    live = history.live_at(moment.failures[0])
    return {block.born for block in live.values() if block.born != BEFORE}


def _mark_kept(history: DeviceHistory, moment: HistoryMoment, groups: Iterable[_Group]) -> None:
    """Count the blocks of a line that pass after pass of the script's loop leaves behind.

    Of layers of one forward pass and of what a step makes and frees, that is not so.
    """
    entries = history.events[: moment.event]
    steps, loop = _passes(entries, history.free_action)
    alive = {block.born for block in moment.live}
    made: dict[Stack, list[int]] = defaultdict(list)
    for place, event in enumerate(entries):
        if event.action == "alloc":
            made[event.stack].append(place)
    for group in groups:
        if group.origin.kind not in ("activation", "other", "input", "temporary"):
            continue
        for stack in {block.stack for block in group.blocks if block.born != BEFORE}:
            passes = steps if outside_modules(stack) else loop
            left = [place for place in made[stack] if place in alive]
            if is_left_behind(passes, made[stack], left):
                group.kept += len(left)


def _passes(entries: Sequence[SnapshotEvent], free: str) -> tuple[list[int], list[int]]:
    """Places at which a pass of the script's loop begins: those that are sure, and with them those
    at which the loop itself, outside of any module, makes memory that it frees again.

    Sure are a backward pass, and a copy to the GPU outside of modules. The others do not tell a
    loop over batches from one over layers, unless the layers are parts of a module.
    """
    sure, loop = [], []
    waiting: dict[int, int] = {}
    backward = False
    for place, event in enumerate(entries):
        if event.action == free and event.address in waiting:
            loop.append(waiting.pop(event.address))
        if event.action != "alloc":
            continue
        before, backward = backward, _is_backward(event.stack)
        if backward and not before:
            sure.append(place)
        elif event.stack and outside_modules(event.stack):
            if is_copy(event.stack):
                sure.append(place)
            waiting[event.address] = place
    return sure, sorted([*sure, *loop])


def _is_backward(stack: Stack) -> bool:
    return origin(stack, True).kind in (BACKWARD, "gradient")


def _sums(rows: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for name, nbytes in rows:
        sums[name] += nbytes
    return dict(sums.most_common())


def _by_file(groups: Iterable[_Group]) -> dict[str, int]:
    """Memory that modules made, by the file of the line; the place of a model's parts."""
    return _sums(
        ((group.origin.line or "").rpartition(":")[0], group.nbytes)
        for group in groups
        if group.origin.line is not None and not outside_modules(group.stack)
    )


def _notes(
    history: DeviceHistory,
    moment: HistoryMoment,
    groups: Sequence[_Group],
    replayed: HistoryReplay,
) -> Iterable[str]:
    if moment.why == "snapshot":
        yield f"it has no history: this is the moment at which it was written; {_RECORD}"
    elif history.before:
        yield f"memory from before the history begins has no stack; {_RECORD}"
    without = sum(group.nbytes for group in groups if group.origin.kind == NO_STACK)
    if without:
        yield (
            "without a stack: the backward pass runs in a thread without Python's frames; "
            "stacks='all' (the default) records those of C++"
        )
    if replayed.reason and moment.why != "snapshot":
        yield f"allocator settings are not compared: {replayed.reason}"


# ---
# Replays a snapshot's history through the model of the allocator, under other settings.
#
# What is known of a history are requests and frees; the replay of them is believed only if it
# reserves as much as the GPU did.


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
    maximum = reserved
    for event in reversed(history.events[: moment.event]):
        reserved -= newly_reserved(event)
        maximum = max(maximum, reserved)
    return maximum


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
