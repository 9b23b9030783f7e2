"""Recorded allocator traces replay through the model to the byte; what differs is found.

Traces of a real GPU are those under bench/gpu/truth, if any were recorded. Others are made
here by a second allocator of the same rules, whose segments lie elsewhere.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_cases import slow_but
from trainfit.results.files.decoding import decode
from trainfit.simgpu.allocator.blocks import Block
from trainfit.simgpu.allocator.caching import CachingAllocator
from trainfit.simgpu.allocator.segments import OutOfDeviceMemory
from trainfit.simgpu.allocator.settings import AllocatorSettings

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

from _device_trace import replay_trace  # noqa: E402
from _truth_files import AllocatorTrace, Reports, Truth, read_truth  # noqa: E402
from gpu import events  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30
TRUTH = sorted((ROOT / "bench" / "gpu" / "truth").glob("*.json*"))

#: Many of their events are tried both ways.
_SEARCHED = ("resnet50-bf16-benchmark", "resnet50-fp32-benchmark")

SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:40",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.6",
    "expandable_segments:True,roundup_power2_divisions:8",
    "max_split_size_mb:30,garbage_collection_threshold:0.5",
)


class Elsewhere(CachingAllocator):
    """The allocator with segments at shuffled addresses, as a driver gives them."""

    def __init__(self, seed: int, conf: str, capacity: int, fraction: float) -> None:
        super().__init__(
            capacity, settings=AllocatorSettings.from_conf(conf), memory_fraction=fraction
        )
        places = list(range(1, 4000))
        random.Random(seed).shuffle(places)
        self._places = iter(places)

    def _reserve_addresses(self, nbytes: int) -> int:
        # The next one counts up in the parent, but is nobody's address.
        return 0x7A00_0000_0000 + next(self._places) * 64 * (1 << 30)


class Job:
    """A job on an allocator, and its history as a GPU would tell it."""

    def __init__(
        self, seed: int, conf: str = "", capacity: int = 1 << 30, fraction: float = 1.0
    ) -> None:
        self.allocator = Elsewhere(seed, conf, capacity, fraction)
        self.allocator.tracer = self._record
        self._conf = conf
        self._entries: list[dict[str, Any]] = []
        self._marks: list[dict[str, Any]] = []
        self.block_bytes: list[int] = []
        self.alive: list[Block] = []

    def _record(self, action: str, address: int, nbytes: int, stream: int) -> None:
        place = "device_free" if action == "oom" else "addr"
        self._entries.append({"action": action, place: address, "size": nbytes, "stream": stream})

    def malloc(self, nbytes: int, stream: int = 0) -> Block | None:
        try:
            block = self.allocator.malloc(nbytes, stream)
        except OutOfDeviceMemory:
            return None
        self.block_bytes.append(block.size)
        self.alive.append(block)
        return block

    def free(self, block: Block) -> None:
        self.alive.remove(block)
        self.block_bytes.append(-block.size)
        self.allocator.free(block)

    def mark(self, name: str) -> None:
        allocations = sum(size > 0 for size in self.block_bytes)
        figures = ("allocated", "reserved", "active", "peak_allocated", "peak_reserved")
        self._marks.append(
            {
                "name": name,
                "allocations": allocations,
                "frees": len(self.block_bytes) - allocations,
                **{f"{each}_bytes": getattr(self.allocator, f"{each}_bytes") for each in figures},
            }
        )

    def trace(self) -> AllocatorTrace:
        """As bench/gpu writes it, and as it is read."""
        snapshot = {"segments": self.allocator.snapshot()}
        document = {
            "settings": self._conf,
            "allowed_bytes": self.allocator.allowed_bytes,
            **events.compact(self._entries),
            "whole": True,
            "marks": self._marks,
            "segments": events.segments(snapshot),
        }
        trace = decode(AllocatorTrace, lists(document))
        trace.check()
        return trace

    def reports(self) -> Reports:
        return Reports(0, tuple(self.block_bytes), True, (0, len(self.block_bytes)))


def lists(value: Any) -> Any:
    """What JSON would make of tuples."""
    if isinstance(value, dict):
        return {key: lists(each) for key, each in value.items()}
    return [lists(each) for each in value] if isinstance(value, (list, tuple)) else value


def random_job(seed: int, conf: str, *, capacity: int, fraction: float, steps: int = 150) -> Job:
    choose = random.Random(seed)
    job = Job(seed, conf, capacity, fraction)
    sizes = (1, 700, 5000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 31 * MIB, 70 * MIB)
    for step in range(steps):
        kind = choose.random()
        if kind < 0.55 or not job.alive:
            job.malloc(choose.choice(sizes) + choose.randrange(3), choose.choice((0, 0, 0, 5)))
        elif kind < 0.93:
            block = choose.choice(job.alive)
            if choose.random() < 0.15:
                job.allocator.record_stream(block, 9)
            job.free(block)
        elif kind < 0.97:
            job.mark(f"step {step}")
        else:
            job.allocator.empty_cache()
    return job


@given(
    seed=st.integers(0, 1 << 30),
    conf=st.sampled_from(SETTINGS),
    capacity=st.sampled_from((200 * MIB, 400 * MIB, 4000 * MIB)),
    fraction=st.sampled_from((1.0, 0.5)),
)
def test_what_the_model_did_elsewhere_replays_exactly(
    seed: int, conf: str, capacity: int, fraction: float
) -> None:
    job = random_job(seed, conf, capacity=capacity, fraction=fraction)
    trace = job.trace()
    replay = replay_trace(trace, capacity, job.reports())
    assert replay.difference is None
    assert replay.events == len(trace.kinds)
    assert replay.peak_allocated_bytes == job.allocator.peak_allocated_bytes
    assert replay.peak_reserved_bytes == job.allocator.peak_reserved_bytes


def test_out_of_memory_and_retries_are_part_of_it() -> None:
    job = Job(1, capacity=100 * MIB)
    job.free(job.malloc(60 * MIB))  # type: ignore[arg-type]
    job.malloc(80 * MIB)  # after the cache was given back
    assert job.malloc(30 * MIB) is None
    trace = job.trace()
    assert trace.kinds == "SafsSao"
    assert replay_trace(trace, GIB).exact


def small_job() -> Job:
    job = Job(3)
    first = job.malloc(3 * MIB)
    second = job.malloc(5 * MIB)
    job.mark("two")
    assert first is not None and second is not None
    job.free(first)
    job.malloc(2 * MIB)
    job.malloc(700, 4)
    job.mark("end")
    return job


def test_a_trace_in_columns() -> None:
    trace = small_job().trace()
    assert trace.kinds == "SaafaSa"
    assert trace.sizes == (20 * MIB, 3 * MIB, 5 * MIB, 2 * MIB, 2 * MIB, 700)
    assert trace.streams == ((5, 4),)
    assert replay_trace(trace, GIB).exact


def changed(trace: AllocatorTrace, column: str, place: int, value: Any) -> AllocatorTrace:
    values = list(getattr(trace, column))
    values[place] = value
    return dataclasses.replace(trace, **{column: tuple(values)})


@pytest.mark.parametrize(
    ("column", "place", "value", "found"),
    [
        ("addresses", 2, 1, "the GPU has alloc of 5242880 bytes"),
        ("sizes", 0, 22 * MIB, "the GPU has segment_alloc of 23068672 bytes"),
        ("sizes", 4, 20 * MIB, "the GPU has segment_alloc of 20971520 bytes"),
    ],
)
def test_a_difference_is_named_with_its_event(
    column: str, place: int, value: int, found: str
) -> None:
    replay = replay_trace(changed(small_job().trace(), column, place, value), GIB)
    assert replay.difference is not None and found in replay.difference
    assert not replay.exact


def test_a_missing_segment_is_a_difference() -> None:
    job = Job(3)
    job.malloc(3 * MIB)
    job.malloc(30 * MIB)
    trace = job.trace()
    assert trace.kinds == "SaSa"
    cut = dataclasses.replace(
        trace,
        kinds="Saa",
        addresses=trace.addresses[:2] + trace.addresses[3:],
        sizes=trace.sizes[:2] + trace.sizes[3:],
    )
    difference = replay_trace(cut, GIB).difference
    assert difference is not None and difference.startswith("event 2: the GPU has alloc")


def test_figures_at_marks_and_blocks_at_the_end_are_compared() -> None:
    trace = small_job().trace()
    mark = dataclasses.replace(trace.marks[0], allocated_bytes=8 * MIB + 512)
    replay = replay_trace(changed(trace, "marks", 0, mark), GIB)
    assert replay.difference == (
        "event 3 (two): allocated 8389120 bytes on the GPU, 8388608 in the model"
    )
    segment = trace.segments[0]
    address, size, asked, state = segment.blocks[0]
    other = dataclasses.replace(segment, blocks=((address, size, asked + 1, state),))
    replay = replay_trace(changed(trace, "segments", 0, other), GIB)
    assert replay.difference is not None and "at the end, address" in replay.difference


def test_block_sizes_of_the_profiler_are_compared() -> None:
    job = small_job()
    reports = job.reports()
    assert replay_trace(job.trace(), GIB, reports).exact
    wrong = (*reports.block_bytes[:3], 4 * MIB, *reports.block_bytes[4:])
    replay = replay_trace(job.trace(), GIB, dataclasses.replace(reports, block_bytes=wrong))
    assert replay.difference == ("event 5: the GPU's block has 4194304 bytes, the model's 3145728")
    # Where the profiler did not see everything, its sizes say nothing.
    missed = dataclasses.replace(reports, block_bytes=wrong, events=(0, 4))
    assert replay_trace(job.trace(), GIB, missed).exact


def test_other_rules_give_another_trace() -> None:
    job = random_job(5, "", capacity=4000 * MIB, fraction=1.0)
    trace = dataclasses.replace(job.trace(), settings="roundup_power2_divisions:4")
    assert not replay_trace(trace, GIB).exact


def test_a_trace_cut_short_replays_as_far_as_it_goes() -> None:
    entries = small_job()._entries
    kept = events.beginning(entries, 7)
    assert [entry["action"] for entry in kept[-1:]] == ["alloc"]
    columns = events.compact(kept)
    trace = dataclasses.replace(
        small_job().trace(),
        **{key: value for key, value in columns.items() if isinstance(value, (str, int))},
        addresses=tuple(columns["addresses"]),
        sizes=tuple(columns["sizes"]),
        streams=(),
        whole=False,
        segments=(),
    )
    replay = replay_trace(trace, GIB)
    assert replay.exact and replay.events == 5


def _is_short(path: Path) -> bool:
    """No longer than others of the same kind of job?"""
    return path.stat().st_size <= 31_000 and not path.name.startswith(_SEARCHED)


@pytest.mark.parametrize(
    "path",
    slow_but(TRUTH, *[each for each in TRUTH if _is_short(each)][::5]),
    ids=lambda path: path.name,
)
def test_recorded_traces_replay_exactly(path: Path) -> None:
    if path.name.startswith("campaign."):
        pytest.skip("no trace in it")
    truth = read_truth(path)
    if not isinstance(truth, Truth):
        pytest.skip("no trace in it")
    assert not truth.simulated
    replay = replay_trace(truth.trace, truth.machine.memory_bytes, truth.reports)
    assert replay.difference is None
    assert replay.events == len(truth.trace.kinds)
    if truth.trace.whole:
        assert replay.peak_allocated_bytes == truth.memory.max_allocated_bytes
        assert replay.peak_reserved_bytes == truth.memory.max_reserved_bytes
