"""The simulated device's memory history: PyTorch's structure, PyTorch's own readers."""

from __future__ import annotations

import gc
import inspect
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

import trainfit
from trainfit.simgpu.allocator.caching import CachingAllocator
from trainfit.simgpu.allocator.segments import OutOfDeviceMemory
from trainfit.simgpu.allocator.settings import AllocatorSettings

MIB = 1 << 20


@pytest.fixture
def device() -> Iterator[None]:
    with trainfit.simulate("RTX 3060 12GB"):
        yield


def trace() -> list[dict[str, Any]]:
    traces = torch.cuda.memory._snapshot()["device_traces"]
    return [entry for entry in traces[0] if entry["action"] != "snapshot"]


def actions() -> list[str]:
    return [entry["action"] for entry in trace()]


def test_events_come_in_the_order_of_the_real_allocator(device: None) -> None:
    torch.cuda.memory._record_memory_history(context=None)
    tensor = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    address = tensor.data_ptr()
    del tensor
    torch.cuda.empty_cache()
    found = [(e["action"], e["addr"], e["size"], e["stream"]) for e in trace()]
    assert found == [
        ("segment_alloc", address, 20 * MIB, 0),
        ("alloc", address, 3 * MIB, 0),
        ("free_requested", address, 3 * MIB, 0),
        ("free_completed", address, 3 * MIB, 0),
        ("segment_free", address, 20 * MIB, 0),
    ]


def test_nothing_is_kept_before_or_after(device: None) -> None:
    torch.zeros(3, device="cuda")
    assert torch.cuda.memory._snapshot()["device_traces"] == [[]]
    torch.cuda.memory._record_memory_history()
    torch.zeros(3, device="cuda")
    torch.cuda.memory._record_memory_history(None)
    torch.zeros(3, device="cuda")
    assert torch.cuda.memory._snapshot()["device_traces"] == [[]]


def test_history_is_cleared_where_asked_for(device: None) -> None:
    torch.cuda.memory._record_memory_history()
    torch.zeros(3, device="cuda")
    torch.cuda.memory._record_memory_history()
    assert actions()
    torch.cuda.memory._record_memory_history(clear_history=True)
    assert not actions()


def test_only_the_latest_entries_are_kept(device: None) -> None:
    torch.cuda.memory._record_memory_history(max_entries=2, context=None)
    for _ in range(5):
        torch.zeros(3, device="cuda")
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    assert [entry["action"] for entry in entries] == ["free_completed", "snapshot"]


@pytest.mark.skipif(
    "skip_actions" not in inspect.signature(torch.cuda.memory._record_memory_history).parameters,
    reason="this PyTorch records all actions",
)
def test_actions_can_be_skipped(device: None) -> None:
    torch.cuda.memory._record_memory_history(skip_actions=["free_requested", "segment_alloc"])
    torch.zeros(3, device="cuda")
    assert actions() == ["alloc", "free_completed"]


@pytest.mark.skipif(
    "record_cuda" not in inspect.signature(torch.cuda.memory._record_memory_history).parameters,
    reason="came with PyTorch 2.14",
)
def test_pinned_memory_is_said_not_to_be_recorded() -> None:
    with trainfit.simulate("RTX 3060 12GB") as simulation:
        torch.cuda.memory._record_memory_history(record_pinned_host_memory=True, record_cuda=False)
        torch.zeros(3, device="cuda")
        snapshot = torch.cuda.memory._snapshot()
        assert snapshot["device_traces"] == [[]] and snapshot["host_traces"] == []
        torch.cuda.memory._record_memory_history()
        torch.zeros(3, device="cuda")
        assert actions()
        (said,) = (text for text in simulation.engine.assumptions if "pinned" in text)
    assert said.startswith("pinned host memory is not in the memory history")


def test_state_alone_keeps_no_events_but_stacks_of_what_is_in_use(device: None) -> None:
    torch.cuda.memory._record_memory_history("state", context="state")
    tensor = torch.zeros(3, device="cuda")
    snapshot = torch.cuda.memory._snapshot()
    assert snapshot["device_traces"] == [[]]
    (block,) = (b for s in snapshot["segments"] for b in s["blocks"] if b["state"] != "inactive")
    assert (
        block["frames"][0]["name"]
        == "test_state_alone_keeps_no_events_but_stacks_of_what_is_in_use"
    )
    assert block["requested_size"] == tensor.nbytes


@pytest.mark.parametrize(
    ("context", "with_stack"),
    [
        (None, set()),
        ("state", set()),
        ("alloc", {"alloc", "segment_alloc"}),
        ("all", {"alloc", "segment_alloc", "free_requested", "free_completed"}),
    ],
)
def test_which_entries_carry_a_stack(
    device: None, context: str | None, with_stack: set[str]
) -> None:
    torch.cuda.memory._record_memory_history(context=context)
    torch.zeros(3, device="cuda")
    assert {entry["action"] for entry in trace() if "frames" in entry} == with_stack
    for entry in trace():
        names = [frame["name"] for frame in entry.get("frames", ())]
        assert not names or names[0] == "test_which_entries_carry_a_stack"


def test_the_older_call_still_works(device: None) -> None:
    torch.cuda.memory._record_memory_history(True, trace_alloc_max_entries=100)
    torch.zeros(3, device="cuda")
    assert Counter(actions())["alloc"] == 1
    torch.cuda.memory._record_memory_history(False)
    assert not actions()


def test_words_that_pytorch_refuses_are_refused(device: None) -> None:
    with pytest.raises(RuntimeError, match="expected enabled to be one of"):
        torch.cuda.memory._record_memory_history("some")
    with pytest.raises(RuntimeError, match="expected stacks to be one of"):
        torch.cuda.memory._record_memory_history(stacks="c++")


def test_pytorchs_own_readers_take_a_training_step(device: None, tmp_path: Path) -> None:
    torch.cuda.memory._record_memory_history()
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    file = tmp_path / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(file))
    snapshot = pickle.loads(file.read_bytes())
    text = _memory_viz.trace(snapshot)
    assert text.count("cudaMalloc") == actions().count("segment_alloc")
    assert _memory_viz.segsum(snapshot)
    assert "<html" in _memory_viz.trace_plot(snapshot).lower() or "<!doctype" in (
        _memory_viz.trace_plot(snapshot).lower()
    )
    times = [entry["time_us"] for entry in snapshot["device_traces"][0]]
    assert times == sorted(times)


def test_out_of_memory_is_an_event_of_the_rounded_size(device: None) -> None:
    torch.cuda.set_per_process_memory_fraction(0.01)
    torch.cuda.memory._record_memory_history(context=None)
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"in use\. 120\.\d+ MiB allowed; Of"):
        torch.empty(200 * MIB + 1, dtype=torch.uint8, device="cuda")
    (entry,) = trace()
    assert (entry["action"], entry["size"]) == ("oom", 200 * MIB + 512)
    assert entry["device_free"] == torch.cuda.mem_get_info()[0]


def traced(conf: str, capacity: int = 1 << 30) -> tuple[CachingAllocator, list[Any]]:
    events: list[Any] = []
    allocator = CachingAllocator(capacity, settings=AllocatorSettings.from_conf(conf))
    allocator.tracer = lambda action, address, size, stream: events.append((action, size))
    return allocator, events


def test_expandable_segments_are_mapped_and_unmapped() -> None:
    allocator, events = traced("expandable_segments:True")
    block = allocator.malloc(25 * MIB)
    allocator.free(block)
    allocator.empty_cache()
    assert events == [
        ("segment_map", 40 * MIB),
        ("alloc", 25 * MIB),
        ("free_requested", 25 * MIB),
        ("free_completed", 25 * MIB),
        ("segment_unmap", 40 * MIB),
    ]


def test_a_block_of_another_stream_completes_later() -> None:
    allocator, events = traced("")
    block = allocator.malloc(MIB)
    allocator.record_stream(block, 7)
    allocator.free(block)
    assert events[-1] == ("free_requested", MIB)
    allocator.malloc(2 * MIB)
    assert events[-3:] == [("free_completed", MIB), ("segment_alloc", 20 * MIB), ("alloc", 2 * MIB)]


def test_a_failing_request_frees_the_cache_first() -> None:
    allocator, events = traced("", capacity=64 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    with pytest.raises(OutOfDeviceMemory):
        allocator.malloc(65 * MIB)
    assert events[-2:] == [("segment_free", 30 * MIB), ("oom", 65 * MIB)]


def test_a_memory_fraction_set_later_turns_the_collection_on() -> None:
    """garbage_collect_cached_blocks runs only where a fraction was set, whenever that was."""
    allocator, events = traced("garbage_collection_threshold:0.5")
    allocator.set_memory_fraction(0.2, 1000 * MIB)
    old = allocator.malloc(80 * MIB)
    allocator.malloc(30 * MIB)
    allocator.free(old)
    allocator.malloc(82 * MIB)
    # 110 of 200 MiB are above the threshold of 100: the free block goes before cudaMalloc,
    # although there would be room for both.
    assert events[-3:] == [
        ("segment_free", 80 * MIB), ("segment_alloc", 82 * MIB), ("alloc", 82 * MIB),
    ]  # fmt: skip


@pytest.mark.parametrize("later", range(100, 1000, 100))
def test_garbage_that_is_collected_while_the_history_is_read(device: None, later: int) -> None:
    torch.cuda.memory._record_memory_history()
    before = gc.get_threshold()
    gc.disable()
    for _ in range(200):
        held: list[Any] = [torch.empty(MIB, device="cuda")]
        held.append(held)  # freed by a collection only
    gc.set_threshold(gc.get_count()[0] + later)  # somewhere in what follows
    gc.enable()
    try:
        assert len(trace()) >= 200
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled()
