"""The allocator model against a second implementation, under every setting.

:mod:`helpers_allocator` states the rules of c10/cuda/CUDACachingAllocator.cpp once more,
without indexes or shortcuts. Random programs run on both; after each call every block, every
counter and every refusal must be the same, and the invariants of any allocator must hold.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from helpers_allocator import FREE as FREE_PART
from helpers_allocator import (
    LIVE,
    MIB,
    UNMAPPED,
    WAITING,
    Part,
    ReferenceAllocator,
    ReferenceOutOfMemory,
    Rules,
)
from helpers_cases import some_of
from trainfit.simgpu.allocator.blocks import ACTIVE, FREE, PENDING, Block
from trainfit.simgpu.allocator.blocks import UNMAPPED as UNMAPPED_BLOCK
from trainfit.simgpu.allocator.caching import CachingAllocator
from trainfit.simgpu.allocator.segments import OutOfDeviceMemory
from trainfit.simgpu.allocator.settings import AllocatorSettings

CONTEXT = 30 * MIB
STREAMS = 3
STATES = {ACTIVE: LIVE, FREE: FREE_PART, PENDING: WAITING, UNMAPPED_BLOCK: UNMAPPED}

#: Sizes around every threshold of the rules, and anything between.
THRESHOLDS = [
    0, 1, 511, 512, 513, MIB - 512, MIB, MIB + 1, 2 * MIB - 512, 2 * MIB, 2 * MIB + 1,
    10 * MIB - 512, 10 * MIB, 10 * MIB + 1, 19 * MIB, 19 * MIB - 512, 20 * MIB, 20 * MIB + 1,
    32 * MIB, 39 * MIB, 40 * MIB, 64 * MIB, 84 * MIB,
]  # fmt: skip
SIZES = strategies.one_of(
    strategies.sampled_from(THRESHOLDS),
    strategies.integers(1, 64 << 10),
    strategies.integers(1, 3 * MIB),
    strategies.integers(1, 90 * MIB),
)
DIVISIONS = [(0,) * 16, (4,) * 16, (2, 8, 1, 4, 16) + (2,) * 11, (0, 0, 0, 32) + (0,) * 12]
ALL_RULES = strategies.builds(
    Rules,
    max_split=strategies.sampled_from([None, None, 20 * MIB, 32 * MIB, 64 * MIB]),
    max_rounding=strategies.sampled_from([20 * MIB, 20 * MIB, 40 * MIB]),
    large_segment=strategies.sampled_from([20 * MIB, 20 * MIB, 12 * MIB]),
    divisions=strategies.sampled_from(DIVISIONS),
    gc_threshold=strategies.sampled_from([0.0, 0.0, 0.2, 0.6]),
    fraction=strategies.sampled_from([1.0, 1.0, 0.7, 0.4]),
    expandable=strategies.booleans(),
    rejects_early=strategies.sampled_from([False, False, True]),
)


def settings_of(rules: Rules) -> AllocatorSettings:
    return AllocatorSettings(
        max_split_bytes=rules.max_split,
        max_non_split_rounding_bytes=rules.max_rounding,
        large_segment_bytes=rules.large_segment,
        roundup_power2_divisions=rules.divisions,
        garbage_collection_threshold=rules.gc_threshold,
        per_process_memory_fraction=rules.fraction,
        expandable_segments=rules.expandable,
        rejects_early=rules.rejects_early,
    )


def blocks_of(a: CachingAllocator) -> list[Block]:
    """Every block, by address, those without memory too."""
    found = []
    for head in a._heads.values():
        block: Block | None = head
        while block is not None:
            found.append(block)
            block = block.next
    return sorted(found, key=lambda block: block.address)


class Pair:
    """The model and the reference, fed with the same calls."""

    def __init__(self, capacity: int, rules: Rules, *, defers: bool) -> None:
        self.tested = CachingAllocator(capacity, context_bytes=CONTEXT, settings=settings_of(rules))
        self.tested.defers_events = defers
        self.base = self.tested._lowest_address
        self.reference = ReferenceAllocator(capacity, CONTEXT, rules)
        self.live: list[tuple[Block, Part]] = []
        self.waiting: list[tuple[Block, Part]] = []

    def malloc(self, size: int, stream: int) -> None:
        if size == 0:
            assert self.tested.malloc(0, stream).address == 0
            return
        try:
            part = self.reference.malloc(size, stream)
        except ReferenceOutOfMemory:
            with pytest.raises(OutOfDeviceMemory):
                self.tested.malloc(size, stream)
            self.forget_completed()
            return
        block = self.tested.malloc(size, stream)
        assert (block.address - self.base, block.size) == (part.start, part.size)
        assert block.stream == stream and block.requested == size <= block.size
        self.live.append((block, part))
        self.forget_completed()

    def free(self, index: int) -> None:
        block, part = self.live.pop(index % len(self.live))
        if part.users and self.tested.defers_events:
            self.waiting.append((block, part))
        self.tested.free(block)
        self.reference.free(part, waits=self.tested.defers_events)

    def record_stream(self, index: int, stream: int) -> None:
        block, part = self.live[index % len(self.live)]
        self.tested.record_stream(block, stream)
        self.reference.use(part, stream)

    def complete(self, index: int) -> None:
        block, part = self.waiting.pop(index % len(self.waiting))
        self.tested.complete(block)
        self.reference.ready.append(part)

    def empty_cache(self) -> None:
        self.tested.empty_cache()
        self.reference.empty_cache()
        self.forget_completed()

    def change(self, rules: Rules) -> None:
        before = self.reference.rules.fraction
        # A new fraction of 1.0 leaves the old limit, as long as no one takes it back.
        self.tested.apply(settings_of(rules))
        self.reference.rules = rules
        if rules.fraction >= 1:
            rules.fraction = before

    def limit(self, fraction: float) -> None:
        self.tested.set_memory_fraction(fraction)
        self.reference.rules.fraction = fraction

    def forget_completed(self) -> None:
        """Where memory ran out, both have waited for all events."""
        self.waiting = [each for each in self.waiting if each[1].state == WAITING]
        if not self.tested.waits:
            self.waiting = []

    # -- what must hold ------------------------------------------------------------------

    def check(self) -> None:
        self.check_same()
        self.check_invariants()

    def check_same(self) -> None:
        tested, reference = self.tested, self.reference
        blocks = [
            (b.address - self.base, b.size, STATES[b.state], b.stream, b.pool.is_small)
            for b in blocks_of(tested)
        ]
        parts = [(p.start, p.size, p.state, p.stream, p.small) for p in reference.parts]
        assert blocks == parts
        stats = tested.memory_stats()
        assert tested.allocated_bytes == reference.allocated
        assert tested.reserved_bytes == reference.reserved
        assert tested.peak_allocated_bytes == reference.peak_allocated
        assert tested.peak_reserved_bytes == reference.peak_reserved
        assert tested.requested_bytes == reference.requested
        assert stats["active_bytes"]["all"]["current"] == reference.active
        assert stats["active_bytes"]["all"]["peak"] == reference.peak_active
        split = reference.inactive_split
        assert stats["inactive_split"]["all"]["current"] == len(split)
        assert stats["inactive_split_bytes"]["all"]["current"] == sum(split)
        assert stats["num_alloc_retries"] == reference.retries
        assert stats["num_ooms"] == reference.ooms
        assert stats["num_oom_rejections"] == reference.rejections
        assert stats["num_device_alloc"] == reference.mallocs
        assert stats["num_device_free"] == reference.frees

    def check_invariants(self) -> None:
        tested = self.tested
        blocks = blocks_of(tested)
        for one, two in itertools.pairwise(blocks):
            assert one.address + one.size <= two.address, "blocks overlap"
        for run in tested.blocks():
            for one, two in itertools.pairwise(run):
                assert one.address + one.size == two.address, "a hole in a segment"
                assert not one.state == two.state == FREE, "free neighbours that are two blocks"
                assert one.stream == two.stream
        assert tested.reserved_bytes == sum(
            block.size for block in blocks if block.state != UNMAPPED_BLOCK
        )
        assert tested.allocated_bytes == sum(block.size for block, _ in self.live)
        assert tested.free_device_bytes() >= 0
        assert tested.peak_allocated_bytes >= tested.allocated_bytes
        assert tested.peak_reserved_bytes >= tested.reserved_bytes >= tested.allocated_bytes
        free = sorted(
            (b.stream, b.pool.is_small, b.size, b.address) for b in blocks if b.state == FREE
        )
        pools = (*tested._small.values(), *tested._large.values())
        assert free == sorted(
            (pool.stream, pool.is_small, size, address)
            for pool in pools
            for size, address, _ in pool.free
        ), "the pools hold what is free, and nothing else"


class Machine(RuleBasedStateMachine):
    """Programs of three streams on a small device."""

    @initialize(
        rules=ALL_RULES,
        capacity=strategies.sampled_from([100 * MIB, 256 * MIB, 2048 * MIB]),
        defers=strategies.booleans(),
    )
    def start(self, rules: Rules, capacity: int, defers: bool) -> None:
        self.pair = Pair(capacity, rules, defers=defers)

    @rule(size=SIZES, stream=strategies.integers(0, STREAMS - 1))
    def malloc(self, size: int, stream: int) -> None:
        self.pair.malloc(size, stream)

    @rule(sizes=strategies.lists(SIZES, min_size=2, max_size=6))
    def malloc_several(self, sizes: list[int]) -> None:
        for size in sizes:
            self.pair.malloc(size, 0)

    @precondition(lambda self: self.pair.live)
    @rule(index=strategies.integers(0, 99))
    def free(self, index: int) -> None:
        self.pair.free(index)

    @precondition(lambda self: len(self.pair.live) > 2)
    @rule(count=strategies.integers(2, 9), step=strategies.integers(1, 3))
    def free_several(self, count: int, step: int) -> None:
        for place in range(count):
            if self.pair.live:
                self.pair.free(place * step)

    @precondition(lambda self: self.pair.live)
    @rule(index=strategies.integers(0, 99), stream=strategies.integers(0, STREAMS - 1))
    def record_stream(self, index: int, stream: int) -> None:
        self.pair.record_stream(index, stream)

    @precondition(lambda self: self.pair.waiting)
    @rule(index=strategies.integers(0, 99))
    def complete(self, index: int) -> None:
        self.pair.complete(index)

    @rule()
    def empty_cache(self) -> None:
        self.pair.empty_cache()

    @rule(rules=ALL_RULES)
    def change_settings(self, rules: Rules) -> None:
        # A lower split limit would make PyTorch release parts of segments.
        rules.max_split = self.pair.reference.rules.max_split
        self.pair.change(rules)

    @rule(fraction=strategies.sampled_from([1.0, 0.8, 0.5]))
    def set_memory_fraction(self, fraction: float) -> None:
        self.pair.limit(fraction)

    @invariant()
    def same_and_sound(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()


def _run(examples: int, steps: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if examples < 1000 else [])],
            database=None,
        ),
    )


def test_random_programs_agree_with_the_reference() -> None:
    _run(25, 40)


@pytest.mark.slow
def test_many_random_programs_agree_with_the_reference() -> None:
    _run(1500, 60)


#: Settings as users combine them, for programs that look like training.
TRAINING = {
    "default": Rules(),
    "expandable": Rules(expandable=True),
    "max_split": Rules(max_split=64 * MIB),
    "least_max_split": Rules(max_split=20 * MIB),
    "max_split_expandable": Rules(max_split=32 * MIB, expandable=True),
    "roundup": Rules(divisions=(4,) * 16),
    "gc": Rules(gc_threshold=0.6, fraction=0.8),
    "gc_max_split": Rules(gc_threshold=0.5, fraction=0.9, max_split=20 * MIB),
    "fraction_expandable": Rules(fraction=0.5, expandable=True),
}


def train(pair: Pair, rng: random.Random, steps: int) -> None:
    """Layers' activations up, gradients down, batches of changing size on a side stream."""
    weights = [int(2 ** rng.uniform(8, 22)) for _ in range(12)]
    for size in weights:
        pair.malloc(size, 0)
    for _ in range(steps):
        batch = rng.choice((1, 1, 1, 2, 3))
        pair.malloc(batch * 3 * MIB + rng.randrange(4096), 1)
        held = len(pair.live)
        if held:
            pair.record_stream(held - 1, 0)
        for size in weights:
            pair.malloc(batch * size * 2 + 1, 0)
            pair.malloc(batch * size + 513, 0)
            if rng.random() < 0.7:
                pair.free(len(pair.live) - 1)
        pair.check()
        while len(pair.live) > len(weights):
            pair.free(len(pair.live) - 1 - rng.randrange(min(3, len(pair.live) - len(weights))))
            if rng.random() < 0.2:
                pair.malloc(rng.choice(weights) * batch, 0)
                pair.free(len(pair.live) - 1)
        while pair.waiting and rng.random() < 0.8:
            pair.complete(0)
        if rng.random() < 0.1:
            pair.empty_cache()
        pair.check()


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("capacity", [96 * MIB, 400 * MIB])
@pytest.mark.parametrize("seeds", some_of([range(2), range(2, 6)], 1))
def test_programs_like_training_agree_with_the_reference(
    name: str, capacity: int, seeds: range
) -> None:
    rules = TRAINING[name]
    for seed in seeds:
        pair = Pair(capacity, Rules(**vars(rules)), defers=seed % 2 == 0)
        train(pair, random.Random(seed), 20)
        # Some of these run out of memory: then the retries and refusals were compared, too.
        assert pair.tested.peak_reserved_bytes > 0


#: What blocks are cached, in MiB, when memory is short.
CACHED = [
    (20, 20, 20), (20, 40), (32, 32, 20), (64, 64, 20), (84,), (40, 40), (12, 20, 32), (2, 64),
]  # fmt: skip


@pytest.mark.parametrize("name", some_of(TRAINING, 3))
def test_every_threshold_after_every_other(name: str) -> None:
    """A request of each size meets one cached block of each other size, and caches when full."""
    for cached, wanted in itertools.product(THRESHOLDS, THRESHOLDS):
        pair = Pair(256 * MIB, Rules(**vars(TRAINING[name])), defers=False)
        pair.malloc(cached, 0)
        if pair.live:
            pair.free(0)
        pair.malloc(wanted, 0)
        pair.check()
    for sizes, wanted in itertools.product(CACHED, THRESHOLDS):
        pair = Pair(CONTEXT + (sum(sizes) + 2) * MIB, Rules(**vars(TRAINING[name])), defers=False)
        for size in sizes:
            pair.malloc(size * MIB, 0)
        while pair.live:
            pair.free(0)
        pair.malloc(wanted, 0)
        pair.check()


def test_the_programs_reach_the_rare_branches() -> None:
    """A comparison is worth what it exercises: retries, refusals and collections happen."""
    seen: dict[str, Any] = {"retries": 0, "ooms": 0, "frees": 0, "waits": 0}
    for rules in TRAINING.values():
        pair = Pair(96 * MIB, Rules(**vars(rules)), defers=True)
        train(pair, random.Random(5), 12)
        seen["retries"] += pair.reference.retries
        seen["ooms"] += pair.reference.ooms
        seen["frees"] += pair.reference.frees
        seen["waits"] += pair.reference.peak_active > pair.reference.peak_allocated
    assert all(seen.values()), seen


# -- rules that no comparison states ---------------------------------------------------------


def test_a_block_that_another_stream_uses_waits_for_it() -> None:
    a = CachingAllocator(1 << 30)
    a.defers_events = True
    block = a.malloc(20 * MIB, 1)
    address = block.address
    a.record_stream(block, 0)
    a.free(block)
    assert a.malloc(20 * MIB, 1).address != address, "still in use"
    a.complete(block)
    assert a.malloc(20 * MIB, 1).address == address
    stats = a.memory_stats()["active_bytes"]["all"]
    assert (stats["current"], stats["peak"]) == (40 * MIB, 40 * MIB)
    assert a.reserved_bytes == 40 * MIB


def test_running_out_of_memory_waits_for_other_streams() -> None:
    a = CachingAllocator(50 * MIB)
    a.defers_events = True
    block = a.malloc(40 * MIB)
    a.record_stream(block, 1)
    a.free(block)
    assert a.malloc(44 * MIB).size == 44 * MIB
    assert a.num_alloc_retries == 1
    assert not a.waits


def test_a_fitting_block_that_comes_back_in_the_retry_is_not_searched_again() -> None:
    """PyTorch issue 189504: the retry asks cudaMalloc only, and an identical request succeeds."""
    a = CachingAllocator(50 * MIB)
    a.defers_events = True
    kept, block = a.malloc(2 * MIB), a.malloc(12 * MIB)
    assert kept.address + kept.size == block.address
    a.malloc(24 * MIB)
    a.record_stream(block, 1)
    a.free(block)
    with pytest.raises(OutOfDeviceMemory):
        a.malloc(12 * MIB)
    assert a.malloc(12 * MIB).address == block.address


def test_a_fraction_that_is_set_later_starts_the_garbage_collection() -> None:
    a = CachingAllocator(
        400 * MIB, settings=AllocatorSettings.from_conf("garbage_collection_threshold:0.2")
    )
    a.free(a.malloc(100 * MIB))
    a.malloc(101 * MIB)
    assert a.reserved_bytes == 202 * MIB, "no limit, no collection"
    a.set_memory_fraction(0.9)
    a.malloc(103 * MIB)
    assert a.reserved_bytes == (102 + 104) * MIB


def test_expandable_segments_can_be_switched_on_and_off() -> None:
    a = CachingAllocator(1 << 30)
    a.free(a.malloc(30 * MIB))
    a.apply(a.settings.changed_by("expandable_segments:True"))
    assert a.malloc(20 * MIB).expandable is None, "the cached block fits"
    a.free(a.malloc(50 * MIB))
    assert a.reserved_bytes == (30 + 60) * MIB
    a.apply(a.settings.changed_by("expandable_segments:False"))
    assert a.malloc(50 * MIB).expandable is None, "expandable blocks are passed over"
    assert a.reserved_bytes == (30 + 60 + 50) * MIB


def test_early_rejection_keeps_the_caches() -> None:
    text = "per_process_memory_fraction:0.5"
    for extra, cached in ((",throw_on_cudamalloc_oom:True", 40 * MIB), ("", 0)):
        a = CachingAllocator(100 * MIB, settings=AllocatorSettings.from_conf(text + extra))
        a.free(a.malloc(40 * MIB))
        with pytest.raises(OutOfDeviceMemory):
            a.malloc(60 * MIB)
        assert a.reserved_bytes == cached
        assert a.memory_stats()["num_oom_rejections"] == (1 if cached else 0)


def test_settings_changed_in_a_running_program() -> None:
    first = AllocatorSettings.from_conf(
        "expandable_segments:True,max_split_size_mb:64,garbage_collection_threshold:0.5"
    )
    second = first.changed_by("roundup_power2_divisions:4")
    assert second.expandable_segments
    assert second.max_split_bytes is None
    assert second.garbage_collection_threshold == 0
    assert second.roundup_power2_divisions == (4,) * 16
