"""The simulated caching allocator against the rules of CUDACachingAllocator.cpp.

Example tests state one rule each with exact byte counts. Property tests drive random
sequences under several settings and compare the default settings with a naive model.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pickle
import random
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

import trainfit
from trainfit.simgpu.allocator.blocks import FREE, Block
from trainfit.simgpu.allocator.caching import CachingAllocator
from trainfit.simgpu.allocator.segments import OutOfDeviceMemory
from trainfit.simgpu.allocator.settings import AllocatorSettings, knows, unread_variables
from trainfit.torch_private.needed import release

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


HERE = str(torch.__version__)


def conf(text: str, version: str = "") -> AllocatorSettings:
    return AllocatorSettings.from_conf(text, version)


def allocator(text: str = "", capacity: int = 10 * GIB, **options: Any) -> CachingAllocator:
    return CachingAllocator(capacity, settings=conf(text), **options)


def segments(a: CachingAllocator) -> list[int]:
    return [segment["total_size"] for segment in a.snapshot()]


# -- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "rounded"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (1024, 1024), (MIB + 1, MIB + 512)],
)
def test_sizes_are_rounded_to_multiples_of_512_bytes(size: int, rounded: int) -> None:
    a = allocator()
    block = a.malloc(size)
    assert block.size == a.allocated_bytes == rounded
    assert block.requested == a.requested_bytes == size


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_segments_are_2_mib_or_20_mib_or_multiples_of_2_mib(size: int, segment: int) -> None:
    a = allocator()
    a.malloc(size)
    assert a.reserved_bytes == a.peak_reserved_bytes == segment
    assert segments(a) == [segment]


def test_a_request_of_0_bytes_is_a_null_block() -> None:
    a = allocator()
    block = a.malloc(0)
    assert block.address == 0
    a.record_stream(block, 1)
    a.free(block)
    a.free(block)
    assert a.reserved_bytes == 0
    assert a.memory_stats()["allocation"]["all"]["allocated"] == 0


def test_divisions_round_to_fractions_of_powers_of_2() -> None:
    four = conf("roundup_power2_divisions:4")
    assert [four.round_size(n) for n in (1200, 2048, 2049, 2500, 5 * MIB + 1)] == [
        1536,  # not above 512 * 4: multiples of 512
        2048,
        2560,
        2560,
        6 * MIB,
    ]
    assert four.round_size(8 * MIB) == 8 * MIB
    assert conf("roundup_power2_divisions:1").round_size(5 * MIB + 1) == 5 * MIB + 512


def test_divisions_by_size_class() -> None:
    by_class = conf("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    assert by_class.roundup_power2_divisions == (1,) * 9 + (2, 4) + (8,) * 5
    assert by_class.round_size(300 * MIB + 1) == 300 * MIB + 512
    assert by_class.round_size(513 * MIB) == 768 * MIB
    assert by_class.round_size(1025 * MIB) == 1280 * MIB
    assert by_class.round_size(2049 * MIB) == 2304 * MIB


# -- best fit, split, merge ----------------------------------------------------------------------


def test_small_blocks_split_at_512_bytes() -> None:
    a = allocator()
    first = a.malloc(MIB)
    second = a.malloc(MIB - 512)
    assert second.size == MIB - 512
    third = a.malloc(1)
    assert (third.address, third.size) == (second.address + MIB - 512, 512)
    assert first.address + 2 * MIB == third.address + 512
    assert a.reserved_bytes == 2 * MIB


def test_large_blocks_split_only_if_more_than_1_mib_remains() -> None:
    a = allocator()
    a.free(a.malloc(20 * MIB))
    whole = a.malloc(19 * MIB)
    assert whole.size == a.allocated_bytes == 20 * MIB  # exactly 1 MiB too much: kept
    a.free(whole)
    split = a.malloc(19 * MIB - 512)
    assert split.size == a.allocated_bytes == 19 * MIB - 512
    assert a.largest_free_block_bytes() == MIB + 512


def test_best_fit_takes_the_smallest_block_and_then_the_lowest_address() -> None:
    a = allocator()
    blocks = [a.malloc(size * MIB) for size in (30, 14, 22, 14)]
    addresses = [block.address for block in blocks]
    for block in reversed(blocks):
        a.free(block)
    assert a.malloc(13 * MIB).address == addresses[3]
    assert a.malloc(14 * MIB).address == addresses[1]
    assert a.malloc(14 * MIB).address == addresses[2]
    assert a.reserved_bytes == 80 * MIB


def test_pools_and_streams_do_not_share_blocks() -> None:
    a = allocator()
    a.free(a.malloc(20 * MIB))
    a.malloc(MIB)  # small pool: not from the cached large block
    assert a.reserved_bytes == 22 * MIB
    a.malloc(20 * MIB, stream=7)
    assert a.reserved_bytes == 42 * MIB
    assert a.malloc(5 * MIB).size == 5 * MIB
    assert a.reserved_bytes == 42 * MIB


def test_free_merges_with_both_neighbours_and_keeps_the_segment() -> None:
    a = allocator()
    blocks = [a.malloc(4 * MIB) for _ in range(5)]
    a.free(blocks[1])
    a.free(blocks[3])
    assert a.largest_free_block_bytes() == 4 * MIB
    a.free(blocks[2])
    assert a.largest_free_block_bytes() == 12 * MIB
    a.free(blocks[0])
    a.free(blocks[4])
    assert a.largest_free_block_bytes() == a.reserved_bytes == 20 * MIB


def test_double_free_is_an_error() -> None:
    a = allocator()
    block = a.malloc(1)
    a.free(block)
    with pytest.raises(AssertionError, match="not allocated"):
        a.free(block)


# -- running out of memory -----------------------------------------------------------------------


def test_a_failed_cuda_malloc_releases_all_wholly_free_segments_first() -> None:
    a = allocator(capacity=100 * MIB)
    a.free(a.malloc(60 * MIB))
    kept = a.malloc(6 * MIB)  # splits the 60 MiB segment
    a.free(a.malloc(30 * MIB))
    assert a.reserved_bytes == 60 * MIB
    a.free(kept)
    block = a.malloc(70 * MIB)
    assert a.num_alloc_retries == 1
    assert a.reserved_bytes == block.size == 70 * MIB
    assert a.peak_reserved_bytes == 70 * MIB
    assert a.num_ooms == 0


def test_out_of_memory_carries_the_figures_of_the_message() -> None:
    a = allocator(capacity=1000 * MIB, context_bytes=300 * MIB)
    held = a.malloc(600 * MIB)
    small = a.malloc(512)
    with pytest.raises(OutOfDeviceMemory) as caught:
        a.malloc(199 * MIB + 1)
    error = caught.value
    assert error.requested_bytes == 200 * MIB  # the segment, as PyTorch words it
    assert error.capacity_bytes == 1000 * MIB
    assert error.free_bytes == a.free_device_bytes() == 98 * MIB
    assert error.allocated_bytes == 600 * MIB + 512
    assert error.reserved_bytes == 602 * MIB
    assert error.non_pytorch_bytes == 300 * MIB
    assert error.allowed_bytes is None
    assert (a.num_ooms, a.num_alloc_retries) == (1, 1)
    a.free(small)
    a.free(held)
    assert a.malloc(700 * MIB).size == 700 * MIB


def test_small_requests_that_fail_ask_for_2_mib() -> None:
    a = allocator(capacity=MIB)
    with pytest.raises(OutOfDeviceMemory) as caught:
        a.malloc(4)
    assert caught.value.requested_bytes == 2 * MIB


def test_a_memory_fraction_fails_before_cuda_malloc() -> None:
    a = allocator(capacity=100 * MIB, memory_fraction=0.5)
    a.malloc(40 * MIB)
    with pytest.raises(OutOfDeviceMemory) as caught:
        a.malloc(12 * MIB)
    assert caught.value.allowed_bytes == 50 * MIB
    assert caught.value.free_bytes == 60 * MIB
    assert a.malloc(10 * MIB).size == 10 * MIB


def test_a_memory_fraction_comes_from_the_settings_unless_given() -> None:
    text = "per_process_memory_fraction:0.25"
    assert allocator(text, capacity=GIB).allowed_bytes == 256 * MIB
    assert allocator(text, capacity=GIB, memory_fraction=1.0).allowed_bytes is None


def test_empty_cache_keeps_segments_that_are_in_use() -> None:
    a = allocator()
    a.malloc(2 * MIB)
    a.free(a.malloc(2 * MIB))
    a.free(a.malloc(64 * MIB))
    assert a.reserved_bytes == 84 * MIB
    a.empty_cache()
    assert a.reserved_bytes == 20 * MIB
    assert a.peak_reserved_bytes == 84 * MIB


# -- settings that limit splitting ---------------------------------------------------------------


def test_requests_below_the_split_limit_do_not_get_oversize_blocks() -> None:
    a = allocator("max_split_size_mb:64")
    a.free(a.malloc(64 * MIB))
    a.malloc(30 * MIB)
    assert a.reserved_bytes == 94 * MIB
    assert a.memory_stats()["oversize_segments"]["current"] == 1


def test_oversize_requests_take_blocks_up_to_20_mib_larger_and_do_not_split() -> None:
    a = allocator("max_split_size_mb:64")
    a.free(a.malloc(100 * MIB))
    fits = a.malloc(80 * MIB + 512)
    assert fits.size == 100 * MIB
    a.free(fits)
    a.malloc(80 * MIB)  # 20 MiB or more too large: refused
    assert a.reserved_bytes == 180 * MIB
    assert allocator("max_split_size_mb:64,max_non_split_rounding_mb:200").settings == (
        AllocatorSettings(max_split_bytes=64 * MIB, max_non_split_rounding_bytes=200 * MIB)
    )


def test_a_split_limit_releases_oversize_blocks_one_by_one() -> None:
    a = allocator("max_split_size_mb:20", capacity=200 * MIB)
    for block in [a.malloc(size * MIB) for size in (30, 40, 50, 60)]:
        a.free(block)
    a.free(a.malloc(2 * MIB))
    a.malloc(35 * MIB)  # served by the 40 MiB block
    assert a.reserved_bytes == 200 * MIB
    a.malloc(84 * MIB)  # releases 60 MiB, then 50 MiB: enough
    assert a.reserved_bytes == (30 + 40 + 20 + 84) * MIB
    assert a.num_alloc_retries == 0


def test_a_split_limit_releases_the_one_block_that_is_large_enough() -> None:
    a = allocator("max_split_size_mb:20", capacity=200 * MIB)
    for block in [a.malloc(size * MIB) for size in (60, 120)]:
        a.free(block)
    a.malloc(90 * MIB)  # 30 MiB smaller than the block: it is released, not used
    assert segments(a) == [90 * MIB, 60 * MIB]
    assert a.num_alloc_retries == 0


def test_large_segment_size() -> None:
    a = allocator("large_segment_size_mb:32")
    a.malloc(2 * MIB)
    assert a.reserved_bytes == 32 * MIB


# -- garbage collection --------------------------------------------------------------------------


def test_garbage_collection_frees_the_oldest_blocks_above_the_threshold() -> None:
    a = allocator("garbage_collection_threshold:0.5", capacity=400 * MIB, memory_fraction=0.9)
    old, young, busy = (a.malloc(size * MIB) for size in (60, 50, 72))
    a.free(old)
    for _ in range(5):  # age counts searches of the large blocks
        a.free(busy)
        busy = a.malloc(72 * MIB)
    a.free(young)
    a.malloc(150 * MIB)  # 182 MiB exceed 0.5 * 360 MiB: what is older than the mean goes
    assert segments(a) == [150 * MIB, 72 * MIB, 50 * MIB]
    assert a.num_alloc_retries == 0


def test_garbage_collection_needs_a_memory_fraction() -> None:
    a = allocator("garbage_collection_threshold:0.1", capacity=400 * MIB)
    a.free(a.malloc(100 * MIB))
    a.malloc(150 * MIB)
    assert segments(a) == [150 * MIB, 100 * MIB]


# -- expandable segments -------------------------------------------------------------------------


def test_expandable_segments_map_2_mib_and_20_mib_pages() -> None:
    a = allocator("expandable_segments:True")
    a.malloc(512)
    assert a.reserved_bytes == 2 * MIB
    a.malloc(30 * MIB)
    assert a.reserved_bytes == 42 * MIB
    a.malloc(10 * MIB)
    assert a.reserved_bytes == 42 * MIB
    a.malloc(5 * MIB)
    assert a.reserved_bytes == 62 * MIB
    assert segments(a) == [60 * MIB, 2 * MIB]
    stats = a.memory_stats()
    assert stats["segment"]["all"]["current"] == 0  # map_block does not count segments
    assert stats["num_device_alloc"] == 3


def test_expandable_segments_grow_a_free_block_at_their_end() -> None:
    a = allocator("expandable_segments:True")
    first = a.malloc(20 * MIB)
    address = first.address
    a.free(first)
    grown = a.malloc(50 * MIB)
    assert (grown.address, a.reserved_bytes) == (address, 60 * MIB)
    assert a.largest_free_block_bytes() == 10 * MIB


def test_expandable_blocks_split_at_512_bytes() -> None:
    a = allocator("expandable_segments:True")
    block = a.malloc(20 * MIB - 512)
    assert block.size == 20 * MIB - 512
    assert a.largest_free_block_bytes() == 512


def test_empty_cache_unmaps_free_pages_and_maps_the_lowest_ones_again() -> None:
    a = allocator("expandable_segments:True")
    blocks = [a.malloc(size * MIB) for size in (20, 50, 30)]
    middle = blocks[1].address
    assert a.reserved_bytes == 100 * MIB
    a.free(blocks[1])
    a.empty_cache()  # of 20..70 MiB, the pages at 20 and 40 MiB are whole
    assert a.reserved_bytes == 60 * MIB
    assert segments(a) == [20 * MIB, 40 * MIB]
    refilled = a.malloc(45 * MIB)
    assert (refilled.address, a.reserved_bytes) == (middle, 100 * MIB)
    for block in (blocks[0], refilled, blocks[2]):
        a.free(block)
    a.empty_cache()
    assert a.reserved_bytes == 0
    assert segments(a) == []


def test_expandable_segments_return_pages_when_the_device_is_full() -> None:
    a = allocator("expandable_segments:True", capacity=100 * MIB)
    first, second = a.malloc(40 * MIB), a.malloc(40 * MIB)
    a.free(first)
    other = a.malloc(50 * MIB, stream=1)
    assert a.num_alloc_retries == 1
    assert other.size == 50 * MIB
    assert a.reserved_bytes == 100 * MIB
    with pytest.raises(OutOfDeviceMemory) as caught:
        a.malloc(11 * MIB, stream=2)
    assert caught.value.requested_bytes == 12 * MIB
    a.free(second)


def test_expandable_best_fit_prefers_the_block_that_cannot_grow() -> None:
    a = allocator("expandable_segments:True")
    hole, wall, tail = (a.malloc(size * MIB) for size in (22, 6, 12))
    hole_address = hole.address
    a.free(tail)  # 12 MiB at the edge: counts as large as the address space
    a.free(hole)  # 22 MiB between
    assert a.malloc(12 * MIB).address == hole_address
    assert wall.size == 6 * MIB


# -- streams -------------------------------------------------------------------------------------


def test_blocks_used_on_other_streams_return_at_the_next_malloc() -> None:
    a = allocator()
    block = a.malloc(20 * MIB)
    address = block.address
    a.record_stream(block, 3)
    a.free(block)
    stats = a.memory_stats()
    assert stats["allocated_bytes"]["all"]["current"] == 0
    assert stats["active_bytes"]["all"]["current"] == 20 * MIB
    assert stats["requested_bytes"]["all"]["current"] == 20 * MIB
    assert a.snapshot()[0]["blocks"][0]["state"] == "active_pending_free"
    assert a.malloc(20 * MIB).address == address
    with pytest.raises(AssertionError):
        a.free(Block(0, 512, block.pool))


def test_use_on_its_own_stream_defers_nothing() -> None:
    a = allocator()
    block = a.malloc(20 * MIB, stream=2)
    a.record_stream(block, 2)
    a.free(block)
    assert a.memory_stats()["active_bytes"]["all"]["current"] == 0


def test_empty_cache_waits_for_other_streams() -> None:
    a = allocator()
    block = a.malloc(20 * MIB)
    a.record_stream(block, 3)
    a.free(block)
    a.empty_cache()
    assert a.reserved_bytes == 0
    assert a.num_sync_all_streams == 1


# -- statistics ----------------------------------------------------------------------------------


def flattened(stats: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> OrderedDict[str, Any]:
    """Through torch.cuda.memory_stats's own flattening."""
    memory = sys.modules["torch.cuda.memory"]
    monkeypatch.setattr(memory, "memory_stats_as_nested_dict", lambda device=None: stats)
    return torch.cuda.memory_stats()


def test_statistics_pass_through_torch_cuda_memory_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    a = allocator()
    kept = a.malloc(3 * MIB)
    a.free(a.malloc(700))
    stats = flattened(a.memory_stats(), monkeypatch)
    assert stats["allocated_bytes.all.current"] == 3 * MIB
    assert stats["allocated_bytes.all.peak"] == 3 * MIB + 1024
    assert stats["allocated_bytes.small_pool.freed"] == 1024
    assert stats["allocation.all.allocated"] == 2
    assert stats["active.large_pool.current"] == 1
    assert stats["segment.all.current"] == 2
    assert stats["reserved_bytes.all.peak"] == 22 * MIB
    assert stats["requested_bytes.all.allocated"] == 3 * MIB + 700
    assert stats["inactive_split_bytes.large_pool.current"] == 17 * MIB
    assert stats["inactive_split.all.current"] == 1
    assert stats["inactive_split_bytes.small_pool.peak"] == 2 * MIB - 1024
    assert stats["num_device_alloc"] == 2
    assert stats["max_split_size"] == -1
    assert stats["oversize_allocations.current"] == 0
    a.free(kept)


def test_resets() -> None:
    a = allocator()
    block = a.malloc(30 * MIB)
    a.free(a.malloc(50 * MIB))
    a.reset_peaks()
    assert a.peak_allocated_bytes == a.allocated_bytes == 30 * MIB
    assert a.peak_reserved_bytes == 80 * MIB
    a.reset_accumulated()
    stats = a.memory_stats()["allocated_bytes"]["all"]
    assert stats == {"current": 30 * MIB, "peak": 30 * MIB, "allocated": 0, "freed": 0}
    a.free(block)
    stats = a.memory_stats()["allocated_bytes"]["large_pool"]
    assert stats == {"current": 0, "peak": 30 * MIB, "allocated": 0, "freed": 30 * MIB}
    assert a.num_device_alloc == 0


def test_active_peak_counts_blocks_that_wait() -> None:
    a = allocator()
    block = a.malloc(30 * MIB)
    a.record_stream(block, 1)
    a.free(block)
    a.reset_peaks()
    stats = a.memory_stats()
    assert stats["allocated_bytes"]["all"]["peak"] == 0
    assert stats["active_bytes"]["all"]["peak"] == 30 * MIB


def test_snapshot_is_readable_by_pytorchs_visualizer() -> None:
    from torch.cuda import _memory_viz

    a = allocator()
    kept = [a.malloc(3 * MIB), a.malloc(700)]
    a.free(kept.pop())
    snapshot = {"segments": a.snapshot(), "device_traces": []}
    text = _memory_viz.segsum(pickle.loads(pickle.dumps(snapshot)))
    assert "total_reserved: 22.0MiB" in text.replace(" MiB", "MiB") or "22.0MiB" in text
    large = a.snapshot()[1]
    assert large["segment_type"] == "large"
    assert [block["state"] for block in large["blocks"]] == ["active_allocated", "inactive"]
    assert [block["size"] for block in large["blocks"]] == [3 * MIB, 17 * MIB]


# -- settings ------------------------------------------------------------------------------------

ACCEPTED = [
    "",
    "max_split_size_mb:64",
    " max_split_size_mb : 64 , ",
    "max_split_size_mb:64MB",
    "large_segment_size_mb:32,max_split_size_mb:40",
    "max_split_size_mb:40,large_segment_size_mb:32",
    "garbage_collection_threshold:0.8",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[>:4]",
    "roundup_power2_divisions:[1:0,4:2],expandable_segments:True",
    "expandable_segments:False",
    "pinned_use_background_threads:True,backend:native",
    "max_split_size_mb:20",
]
REFUSED = [
    "max_split_size_mb:10",
    "max_split_size_mb:abc",
    "max_split_size_mb",
    "large_segment_size_mb:10",
    "max_non_split_rounding_mb:5",
    "large_segment_size_mb:64,max_split_size_mb:40",
    "garbage_collection_threshold:1.5",
    "garbage_collection_threshold:0.0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[100:4]",
    "roundup_power2_divisions:[256:4,>:x]",
    "expandable_segments:true",
]


#: The installed PyTorch's own: since 2.10 of all accelerators, before in builds with CUDA alone.
set_settings = getattr(
    torch._C,
    "_accelerator_setAllocatorSettings"
    if release(HERE) >= (2, 10)
    else "_cuda_cudaCachingAllocator_set_allocator_settings",
    None,
)
needs_pytorchs_settings = pytest.mark.skipif(
    set_settings is None, reason="this build of PyTorch has no settings of the allocator"
)


@contextlib.contextmanager
def pytorchs_settings(text: str) -> Iterator[None]:
    """PyTorch's allocator has these settings."""
    assert set_settings is not None
    try:
        set_settings(text)
        yield
    finally:
        segment = ",large_segment_size_mb:20" if knows("large_segment_size_mb", HERE) else ""
        set_settings(f"expandable_segments:False{segment}")


def pytorch_parses(text: str) -> bool:
    try:
        with pytorchs_settings(text):
            return True
    except (ValueError, RuntimeError):
        return False


def parses(text: str, version: str) -> bool:
    try:
        conf(text, version)
    except ValueError as error:
        assert re.search(r"[a-z_]+", str(error))
        return False
    return True


@pytest.mark.parametrize("text", [*ACCEPTED, *REFUSED])
def test_settings_that_the_newest_pytorch_accepts(text: str) -> None:
    assert parses(text, "") == (text in ACCEPTED)


@needs_pytorchs_settings
@pytest.mark.parametrize(
    "text", [*ACCEPTED, *REFUSED, "max_non_split_rounding_mb:20", "\tmax_split_size_mb:64"]
)
def test_settings_that_the_installed_pytorch_accepts(text: str) -> None:
    assert parses(text, HERE) == pytorch_parses(text)


@pytest.mark.parametrize(
    ("key", "since"),
    [
        ("graph_capture_record_stream_reuse:True", "2.9.1"),
        ("per_process_memory_fraction:0.5", "2.10.0"),
        ("pinned_reserve_segment_size_mb:64", "2.10.0"),
        ("large_segment_size_mb:64", "2.11.0"),
        ("throw_on_cudamalloc_oom:True", "2.12.0"),
        ("pinned_free_catch_all:True", "2.12.0"),
        ("pinned_max_cached_size_mb:64", "2.13.0"),
        ("expandable_segments_reserve:0.5", "2.15.0"),
        ("expandable_segments_reserve_by_class:[loader:40G,other:0.25]", "2.15.0"),
        ("pinned_max_round_threshold_mb:64", "2.13.0"),
        ("release_lock_on_cudamalloc:True", "2.8.0"),
    ],
)
def test_keys_that_came_later(key: str, since: str) -> None:
    """As the names in libc10.so and libc10_cuda.so of PyTorch's builds with CUDA 12 and 13 are."""
    versions = [
        "2.8.0+cu128",
        "2.9.1",
        "2.10.0",
        "2.11.0",
        "2.12.0",
        "2.13.0",
        "2.14.1",
        "2.15.0+cu132",
    ]
    has = [parses(key, version) for version in versions]
    assert has == [release(version) >= release(since) for version in versions]
    for version in versions[: has.index(True)]:
        name = key.partition(":")[0]
        with pytest.raises(ValueError, match=rf"{name}.*came with PyTorch 2\.\d+; this is"):
            conf(key, version)


def test_the_last_class_of_divisions_starts_later_since_2_10() -> None:
    """``CUDAAllocatorConfig::roundup_power2_divisions`` of 2.8.0 and 2.9.1, and
    ``AcceleratorAllocatorConfig``'s of 2.10.0 to 2.12.0, called with this variable."""
    text = "roundup_power2_divisions:[256:1,512:2,>:8]"
    for version, at_512 in (("2.8.0", 8), ("2.9.1", 8), ("2.10.0", 2), ("2.12.0", 2)):
        divisions = conf(text, version).roundup_power2_divisions
        assert divisions == (*[1] * 9, at_512, *[8] * 6)


@needs_pytorchs_settings
@pytest.mark.parametrize("text", [t for t in ACCEPTED if "roundup" in t])
def test_divisions_agree_with_pytorchs_own_table(text: str) -> None:
    library, kind = (
        ("libc10.so", "16CachingAllocator26AcceleratorAllocatorConfig")
        if release(HERE) >= (2, 10)
        else ("libc10_cuda.so", "4cuda20CUDACachingAllocator19CUDAAllocatorConfig")
    )
    path = Path(torch.__file__).parent / "lib" / library
    name = f"_ZN3c10{kind}24roundup_power2_divisionsEm"
    if not path.exists() or not hasattr(c10 := ctypes.CDLL(str(path)), name):
        pytest.skip("this build of PyTorch does not export the function")
    divisions = getattr(c10, name)
    divisions.restype, divisions.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    with pytorchs_settings(text):
        expected = tuple(divisions(MIB << index) for index in range(16))
    assert conf(text, HERE).roundup_power2_divisions == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_spilt_size_mb:64", "max_spilt_size_mb.*64"),
        ("max_split_size_mb:12", "max_split_size_mb.*12"),
        ("backend:cudaMallocAsync", "native.*cudaMallocAsync"),
        ("per_process_memory_fraction:2", "per_process_memory_fraction.*2"),
        ("max_split_size_mb=64", "max_split_size_mb=64"),
    ],
)
def test_errors_name_the_key_and_the_value(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conf(text)


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="this PyTorch does not tell its settings",
)
def test_environment_has_pytorchs_precedence() -> None:
    """The two variables, as the installed PyTorch looks them up."""
    values = {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:60",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:50",
    }
    script = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | values,
        capture_output=True,
        text=True,
        check=True,
    )
    assert AllocatorSettings.from_environment(values, HERE) == conf(run.stdout)


def test_variables_that_pytorch_does_not_read() -> None:
    """libc10.so and libc10_cuda.so of 2.8.0 have no PYTORCH_ALLOC_CONF; of 2.9.1 the first has,
    and CUDA's settings are the second's."""
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": ""}
    for version in ("2.8.0+cu128", "2.9.1"):
        assert unread_variables(both, version) == ("PYTORCH_ALLOC_CONF",)
        del both["PYTORCH_CUDA_ALLOC_CONF"]
        assert not AllocatorSettings.from_environment(both, version).expandable_segments
        both["PYTORCH_CUDA_ALLOC_CONF"] = ""
    assert unread_variables(both, "2.10.0") == ()


def test_a_device_has_the_settings_that_its_pytorch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with trainfit.simulate("T4") as simulation:
        torch.ones(3, device="cuda")
        reads = simulation.allocator.settings.expandable_segments
    notes = " ".join(simulation.recording.header["notes"])
    assert reads == ("PYTORCH_ALLOC_CONF" not in notes) == (release(HERE) >= (2, 10))


def test_environment() -> None:
    text = "expandable_segments:True"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert AllocatorSettings.from_environment({name: text}).expandable_segments
        with pytest.raises(ValueError, match=f"{name}: unknown .*'x'"):
            AllocatorSettings.from_environment({name: "x:1"})
    assert AllocatorSettings.from_environment({}) == AllocatorSettings()


# -- properties ----------------------------------------------------------------------------------

SETTINGS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:20",
    "max_split_size_mb:20,expandable_segments:True",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.8",
]
SIZES = strategies.one_of(
    strategies.integers(0, 4 * KIB),
    strategies.integers(0, 3 * MIB),
    strategies.integers(0, 70 * MIB),
    strategies.sampled_from([MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 40 * MIB]),
)
CAPACITY = 256 * MIB
CONTEXT = 30 * MIB


def check_consistency(a: CachingAllocator, live: list[Block]) -> None:
    """Everything that must hold between any two calls."""
    runs = list(a.blocks())
    for run in runs:
        end = run[0].address
        for block in run:
            assert block.address == end and block.size > 0, "blocks tile their segment"
            end += block.size
        states = [block.state for block in run]
        assert (FREE, FREE) not in itertools.pairwise(states), "unmerged neighbours"
    ends = [run[-1].address + run[-1].size for run in runs]
    assert all(end <= run[0].address for end, run in zip(ends[:-1], runs[1:], strict=True))
    every = [block for run in runs for block in run]
    assert sum(block.size for block in every) == a.reserved_bytes
    assert a.reserved_bytes + a.context_bytes <= a.capacity_bytes
    assert a.allowed_bytes is None or a.reserved_bytes <= a.allowed_bytes + 20 * MIB
    held = [block for block in live if block.size]
    assert a.allocated_bytes == sum(block.size for block in held)
    assert {id(block) for block in held} <= {id(block) for block in every}
    free = sorted((b.stream, b.size, b.address) for b in every if b.state == FREE)
    pools = (*a._small.values(), *a._large.values())
    assert free == sorted((p.stream, size, address) for p in pools for size, address, _ in p.free)
    assert a.largest_free_block_bytes() == max((size for _, size, _ in free), default=0)
    check_statistics(a, every)


def check_statistics(a: CachingAllocator, every: list[Block]) -> None:
    stats = a.memory_stats()
    for name in ("allocated_bytes", "reserved_bytes", "requested_bytes", "inactive_split_bytes"):
        for values in stats[name].values():
            assert values["current"] <= values["peak"]
            assert values["allocated"] - values["freed"] == values["current"]
            assert min(values.values()) >= 0
        assert stats[name]["all"]["current"] == sum(
            stats[name][kind]["current"] for kind in ("small_pool", "large_pool")
        )
    active = [block for block in every if block.state != FREE]
    assert stats["active_bytes"]["all"]["current"] == sum(block.size for block in active)
    assert stats["requested_bytes"]["all"]["current"] == sum(b.requested for b in active)
    split = [b for b in every if b.state == FREE and b.expandable is None and (b.prev or b.next)]
    assert stats["inactive_split"]["all"]["current"] == len(split)
    assert stats["inactive_split_bytes"]["all"]["current"] == sum(b.size for b in split)


class AllocatorMachine(RuleBasedStateMachine):
    """Random programs of two streams on a small device."""

    handles = Bundle("handles")

    @initialize(text=strategies.sampled_from(SETTINGS))
    def start(self, text: str) -> None:
        self.allocator = allocator(text, CAPACITY, context_bytes=CONTEXT)
        self.twin = allocator(text, CAPACITY, context_bytes=CONTEXT)
        self.live: list[Block] = []
        self.pairs: dict[int, Block] = {}

    @rule(target=handles, size=SIZES, stream=strategies.integers(0, 1))
    def malloc(self, size: int, stream: int) -> Any:
        ooms = self.allocator.num_ooms
        try:
            block = self.allocator.malloc(size, stream)
        except OutOfDeviceMemory:
            assert self.allocator.num_ooms == ooms + 1
            with pytest.raises(OutOfDeviceMemory):
                self.twin.malloc(size, stream)
            return multiple()
        assert block.size >= size and block.requested == size
        twin = self.twin.malloc(size, stream)
        assert (twin.address, twin.size) == (block.address, block.size)
        if size:
            self.live.append(block)
            self.pairs[id(block)] = twin
        return block

    @rule(block=consumes(handles))
    def free(self, block: Block) -> None:
        self.allocator.free(block)
        if block in self.live:
            self.live.remove(block)
            self.twin.free(self.pairs.pop(id(block)))

    @rule(block=handles, stream=strategies.integers(0, 2))
    def record_stream(self, block: Block, stream: int) -> None:
        self.allocator.record_stream(block, stream)
        if block in self.live:
            self.twin.record_stream(self.pairs[id(block)], stream)

    @rule()
    def empty_cache(self) -> None:
        self.allocator.empty_cache()
        self.twin.empty_cache()
        for run in self.allocator.blocks():
            if run[0].expandable is None:
                assert any(block.state != FREE for block in run), "a wholly free segment"

    @rule()
    def reset(self) -> None:
        self.allocator.reset_peaks()
        self.twin.reset_peaks()
        assert self.allocator.peak_reserved_bytes == self.allocator.reserved_bytes

    @invariant()
    def consistent(self) -> None:
        check_consistency(self.allocator, self.live)
        assert self.allocator.snapshot() == self.twin.snapshot()


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class NaiveAllocator:
    """The default settings' rules once more: lists of [start, size, owner], no indexes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.segments: list[tuple[int, bool, list[list[int]]]] = []
        self.next_start = 0
        self.allocated = self.peak_reserved = 0

    def reserved(self) -> int:
        return sum(part[1] for _, _, parts in self.segments for part in parts)

    def malloc(self, size: int, stream: int, owner: int) -> tuple[int, int] | None:
        need = max(512, (size + 511) // 512 * 512)
        small = need <= MIB
        while True:
            fits = [
                (part[1], part[0], parts, index)
                for key, kind, parts in self.segments
                if key == stream and kind == small
                for index, part in enumerate(parts)
                if part[2] < 0 and part[1] >= need
            ]
            if fits:
                return self._take(*min(fits)[2:], need, small, owner)
            if not self._grow(need, small, stream):
                return None

    def _take(
        self, parts: list[list[int]], index: int, need: int, small: bool, owner: int
    ) -> tuple[int, int]:
        start, size, _ = parts[index]
        rest = size - need
        if rest >= 512 if small else rest > MIB:
            parts[index : index + 1] = [[start, need, owner], [start + need, rest, -1]]
        else:
            parts[index][2] = owner
        self.allocated += parts[index][1]
        return start, parts[index][1]

    def _grow(self, need: int, small: bool, stream: int) -> bool:
        size = 2 * MIB if small else 20 * MIB
        if need >= 10 * MIB:
            size = (need + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
        if self.reserved() + size > self.capacity:
            self.release()
        if self.reserved() + size > self.capacity:
            return False
        self.next_start -= size
        self.segments.append((stream, small, [[self.next_start, size, -1]]))
        self.peak_reserved = max(self.peak_reserved, self.reserved())
        return True

    def release(self) -> None:
        self.segments = [
            segment for segment in self.segments if [part[2] < 0 for part in segment[2]] != [True]
        ]

    def free(self, owner: int) -> None:
        for _, _, parts in self.segments:
            for part in parts:
                if part[2] == owner:
                    part[2] = -1
                    self.allocated -= part[1]
            for index in range(len(parts) - 1, 0, -1):
                if parts[index][2] < 0 and parts[index - 1][2] < 0:
                    parts[index - 1][1] += parts.pop(index)[1]


@settings(max_examples=60)
@given(
    seed=strategies.integers(0, 1 << 32),
    live_target=strategies.integers(2, 40),
    capacity=strategies.sampled_from([64 * MIB, 150 * MIB, 2 * GIB]),
)
def test_random_programs_agree_with_the_naive_allocator(
    seed: int, live_target: int, capacity: int
) -> None:
    rng = random.Random(seed)
    tested, naive = CachingAllocator(capacity), NaiveAllocator(capacity)
    base = tested._lowest_address
    live: dict[int, Block] = {}
    for owner in range(150):
        size = int(2 ** rng.uniform(0, 25.5))
        stream = rng.choice((0, 0, 0, 1))
        expected = naive.malloc(size, stream, owner)
        if expected is None:
            with pytest.raises(OutOfDeviceMemory):
                tested.malloc(size, stream)
        else:
            block = live[owner] = tested.malloc(size, stream)
            assert (block.address - base, block.size) == expected
        while len(live) > live_target or (live and rng.random() < 0.3):
            victim = rng.choice(list(live))
            tested.free(live.pop(victim))
            naive.free(victim)
        if rng.random() < 0.02:
            tested.empty_cache()
            naive.release()
        assert tested.allocated_bytes == naive.allocated
        assert tested.reserved_bytes == naive.reserved()
        assert tested.peak_reserved_bytes == naive.peak_reserved
    check_consistency(tested, list(live.values()))


@given(sizes=strategies.lists(SIZES, min_size=1, max_size=30))
def test_freeing_everything_leaves_whole_segments(sizes: list[int]) -> None:
    a = allocator(capacity=100 * GIB)
    for block in [a.malloc(size) for size in sizes]:
        a.free(block)
    assume(any(sizes))
    assert a.allocated_bytes == 0
    assert a.reserved_bytes == sum(run[0].size for run in a.blocks())
    a.empty_cache()
    assert a.reserved_bytes == 0
