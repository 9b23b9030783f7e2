"""What bounds a loop, and what would help beyond the settings: with a gain where measured costs
give it, else with the measured share of the time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from helpers_cases import some_of
from helpers_costs import lognormal_costs
from helpers_probe import GIB, MIB, machine, probe
from trainfit.loader.bottleneck import limit
from trainfit.loader.measure.events import Cores
from trainfit.loader.measure.model import BatchCost, Load, Pauses, Transfer
from trainfit.loader.other_changes import beyond
from trainfit.results.dataloader import CostPart, LoaderSettings, StorageCost
from trainfit.results.findings import Finding, failure_finding
from trainfit.results.loader import RATE_WITH_IT
from trainfit.results.runs.measurement import Consumer

SIXTEEN = Cores((1.0,) * 16)
FOUR = LoaderSettings(4)
DECODED = (
    CostPart("read", 0.1, ("builtins.open",)),
    CostPart("decode", 0.6, ("PIL.Image.load",)),
    CostPart("transform", 0.25, ("torchvision.transforms.v2.Resize",)),
    CostPart("collate", 0.05),
)


def load(work_s: float = 0.08, wait_s: float = 0.0, **changes: Any) -> Load:
    values: dict[str, Any] = {"cores": SIXTEEN, "transfer": Transfer(0.001, 0.004, 0.0002)}
    return Load((BatchCost(wait_s, work_s),), **values | changes)


def advised(
    load_: Load,
    settings: LoaderSettings = FOUR,
    step_s: float = 0.0,
    epoch: int | None = None,
    bounds: dict[str, Any] | None = None,
    **seen: Any,
) -> dict[str, Finding]:
    found = beyond(load_, probe(**seen), settings, Consumer(step_s), machine(**bounds or {}), epoch)
    assert all(each.fix.action and each.cause for each in found)
    assert all((each.fix.gain is None) == (each.value_of(RATE_WITH_IT) is None) for each in found)
    gains = [each.fix.gain for each in found if each.fix.gain is not None]
    shares = [each.share or 0.0 for each in found if each.fix.gain is None]
    assert all(gain >= 1.03 for gain in gains) and all(share >= 0.1 for share in shares)
    assert gains == sorted(gains, reverse=True) and shares == sorted(shares, reverse=True)
    assert [each.fix.gain for each in found[: len(gains)]] == gains
    return {each.kind: each for each in found}


def gain_of(advice: Finding) -> float:
    assert advice.fix.gain is not None
    return advice.fix.gain


# --- What bounds ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("load_", "settings", "seen", "expected"),
    [
        (load(consumer=Consumer(0.1)), LoaderSettings(4), {}, "gpu"),
        (load(consumer=Consumer(0.1)), LoaderSettings(0), {}, "gpu"),
        (load(consumer=Consumer(0.01)), LoaderSettings(2), {}, "workers"),
        (load(), LoaderSettings(0), {}, "workers"),
        (load(wait_s=0.5), LoaderSettings(4), {}, "workers"),
        (load(cores=Cores((1.0, 1.0))), LoaderSettings(4), {}, "cores"),
        (load(cores=Cores((1.0,) * 4, quota=1.5)), LoaderSettings(2), {}, "cores"),
        (load(transfer=Transfer(0.05)), LoaderSettings(8), {}, "transfer"),
        (load(transfer=Transfer(0.01, 0.04)), LoaderSettings(8, pin_memory=True), {}, "transfer"),
        (load(transfer=Transfer(0.001, 0, 0.05)), LoaderSettings(8), {"sampler_s": 0.049},
         "sampler"),
        (load(transfer=Transfer(0.001, 0, 0.05)), LoaderSettings(8), {"sampler_s": None},
         "transfer"),
        (load(locked_share=0.6), LoaderSettings(4), {}, "lock"),
        (load(cores=Cores((1.0,) * 4, contention=1.0)), LoaderSettings(4), {"scaling": 1.0},
         "cores"),
    ],
)  # fmt: skip
def test_what_the_rate_follows_is_the_limit(
    load_: Load, settings: LoaderSettings, seen: dict[str, Any], expected: str
) -> None:
    assert limit(load_, settings, probe(**seen)) == expected


def test_a_data_set_for_the_main_process_only() -> None:
    fault = failure_finding("main_process_only", "", "", "")
    assert limit(load(), LoaderSettings(0), probe(faults=(fault,))) == "main_process"


def test_nothing_that_takes_time_has_no_limit() -> None:
    nothing = Load((BatchCost(0.0, 0.0),))
    assert limit(nothing, LoaderSettings(2), probe()) == "unknown"
    assert beyond(nothing, probe(), LoaderSettings(2), Consumer(0.0), machine()) == ()


# --- What would help --------------------------------------------------------------------------
def test_nothing_is_advised_where_the_gpu_is_the_limit() -> None:
    seen = {"parts": DECODED, "variation": 1.0, "samples": 1000}
    assert advised(load(), LoaderSettings(8), step_s=0.1, **seen) == {}
    assert advised(load(), LoaderSettings(4), step_s=0.01, **seen) != {}


def test_parts_that_could_leave_the_cpu_are_named_with_their_measured_share() -> None:
    """What the GPU needs for them, or smaller images, was not measured: no gain is promised."""
    found = advised(load(), parts=DECODED)
    assert found["gpu_transforms"].share == pytest.approx(0.25)
    assert found["gpu_decoding"].share == pytest.approx(0.6)
    assert found["resize"].share == pytest.approx(0.7)
    assert all(
        found[kind].fix.gain is None for kind in ("gpu_transforms", "gpu_decoding", "resize")
    )
    assert found["gpu_transforms"].cause.startswith("transforms are 25% of a batch's time")
    assert found["gpu_decoding"].cause.startswith("decoding is 60% of a batch's time")
    assert "cache" not in found  # 320,000 samples of 576 KiB do not fit
    assert "frame_alignment" not in found
    small = (CostPart("transform", 0.05, ("torchvision.transforms.v2.Resize",)),)
    assert advised(load(), parts=small) == {}


def test_the_making_of_batches_is_left_alone_where_the_transfer_is_the_limit() -> None:
    slow = load(transfer=Transfer(0.05))
    assert "gpu_decoding" not in advised(slow, LoaderSettings(8), parts=DECODED)


def test_reading_is_what_batches_wait_for() -> None:
    """A cache takes the waits away, and the decoding."""
    parts = (
        CostPart("read", 0.5),
        CostPart("transform", 0.5, ("torchvision.transforms.v2.Resize",)),
    )
    waiting = load(work_s=0.04, wait_s=0.04, transfer=Transfer())
    found = advised(waiting, parts=parts, samples=1000)
    assert gain_of(found["cache"]) == pytest.approx(2.0, rel=0.03)


def test_a_cache_has_to_fit() -> None:
    # 40,000 samples of 18 MiB / 32: 22 GiB.
    found = advised(load(), parts=DECODED, samples=40_000)
    assert gain_of(found["cache"]) == pytest.approx(1 / 0.3, rel=0.03)
    assert "21.97 GiB of 56.00 GiB" in found["cache"].title
    less = advised(load(), parts=DECODED, samples=40_000, bounds={"available_bytes": 20 * GIB})
    assert "cache" not in less


def test_video() -> None:
    parts = (CostPart("decode", 0.9, ("av.container.input.decode",)),)
    found = advised(load(), parts=parts)
    assert found["frame_alignment"].share == found["gpu_decoding"].share == pytest.approx(0.9)
    assert "resize" not in found
    # 16 cores for 4 workers.
    assert "4 threads" in found["decoder_threads"].title
    assert "4 cores per worker" in found["decoder_threads"].cause
    assert "decoder_threads" not in advised(load(), parts=parts, threads=3.0)
    assert "decoder_threads" not in advised(load(), LoaderSettings(12), parts=parts)


def test_fewer_bytes() -> None:
    slow, pinned = load(transfer=Transfer(0.004, 0.040)), LoaderSettings(8, pin_memory=True)
    found = advised(slow, pinned, parts=DECODED)["uint8"]
    assert found.fix.gain is None and found.share == pytest.approx(0.040 / 0.044, rel=0.05)
    assert "needs 40 ms" in found.cause and "may be float32" in found.cause
    measured = advised(slow, pinned, parts=DECODED, float_bytes=18 * MIB)["uint8"]
    assert "are float32" in measured.cause
    assert "uint8" not in advised(slow, pinned)  # no images
    assert "uint8" not in advised(slow, pinned, parts=DECODED, float_bytes=0)
    # Unpinned, nobody copies while the consumer takes no time.
    assert "uint8" not in advised(slow, LoaderSettings(8), parts=DECODED)


def test_fewer_tensors() -> None:
    """rf-detr#1399: 114 tensors at batch size 16."""
    slow = load(transfer=Transfer(receive_s=114 * 0.281e-3, pin_s=0.041))
    pinned = LoaderSettings(16, pin_memory=True)
    found = advised(slow, pinned, batch_tensors=114, batch_size=16)["fewer_tensors"]
    assert "pack the 114 tensors" in found.title
    assert found.fix.gain is None and found.share == pytest.approx(32.0 / 73.0, rel=0.05)
    assert "32 ms, 281 µs for each tensor" in found.cause
    assert "fewer_tensors" not in advised(slow, pinned, batch_tensors=2)


def test_uneven_batches() -> None:
    uneven = Load(lognormal_costs(0.8, 1.0, 997, work=True), cores=SIXTEEN)
    found = advised(uneven, LoaderSettings(8), step_s=0.1, variation=1.0)
    assert gain_of(found["in_order"]) > 1.3
    assert "100% of their mean" in found["in_order"].cause
    assert "in_order" not in advised(
        uneven, LoaderSettings(8, in_order=False), step_s=0.1, variation=1.0
    )


def test_a_slow_sampler() -> None:
    slow = load(transfer=Transfer(0.001, 0.0, 0.05))
    found = advised(slow, LoaderSettings(8), sampler_s=0.049)
    assert gain_of(found["sampler"]) == pytest.approx(51 / 10, rel=0.05)


def test_storage_that_is_cold() -> None:
    storage = StorageCost(0.08, 0.4, 1 << 20, 32, 1 << 30, 0.1)
    found = advised(load(wait_s=0.32), storage=storage)
    assert gain_of(found["storage"]) == pytest.approx(5.0, rel=0.03)
    warm = dataclasses.replace(storage, cold_s=None)
    assert "storage" not in advised(load(wait_s=0.32), storage=warm)


def test_tiny_samples_in_memory() -> None:
    parts = (CostPart("collate", 0.6), CostPart("unknown", 0.4))
    found = advised(
        load(work_s=0.01, transfer=Transfer()), LoaderSettings(0), parts=parts,
        batch_bytes=32 * 1024, samples=60_000,
    )  # fmt: skip
    assert found["batched_indexing"].share == pytest.approx(1.0)  # pytorch#154318
    assert found["batched_indexing"].fix.gain is None
    assert "__getitems__" in found["batched_indexing"].fix.action
    assert "batched_indexing" not in advised(load(), parts=DECODED, samples=1000)


@pytest.mark.parametrize(
    ("what", "told"), [(("collate",), False), (("pad_rows", "torch.stack"), True), ((), True)]
)
def test_a_collate_function_of_the_users_own_is_no_indexing(
    what: tuple[str, ...], told: bool
) -> None:
    found = advised(
        load(work_s=0.01, transfer=Transfer()), LoaderSettings(0),
        parts=(CostPart("collate", 1.0, what),), batch_bytes=32 * 1024, samples=60_000,
    )  # fmt: skip
    assert ("batched_indexing" in found) == told


# --- Epochs -----------------------------------------------------------------------------------
def test_workers_that_are_started_anew() -> None:
    short = load(start_s=0.5)  # 4 workers take 2 s; 100 batches take 2 s
    found = advised(short, epoch=100)
    assert gain_of(found["persistent_workers"]) == pytest.approx(2.0, rel=0.1)
    assert "persistent_workers" not in advised(short, epoch=100_000)
    assert "persistent_workers" not in advised(short)
    kept = LoaderSettings(4, persistent_workers=True)
    assert "persistent_workers" not in advised(short, kept, epoch=100)
    # Also where the GPU is the limit between the starts.
    assert "persistent_workers" in advised(short, step_s=0.03, epoch=100)


def test_spawned_workers() -> None:
    spawned = LoaderSettings(4, start_method="spawn")
    found = advised(load(start_s=2.0), spawned, epoch=1000)
    assert gain_of(found["start_method"]) > 1.3
    assert "20 ms" in found["start_method"].cause
    unmeasured = advised(load(start_s=2.0), spawned, epoch=1000, start_s={"spawn": 2.0})
    assert "start_method" not in unmeasured


@pytest.mark.parametrize("step_s", [pytest.param(0.0, marks=pytest.mark.slow), 0.015, 0.05])
@pytest.mark.parametrize("workers", some_of([0, 1, 4, 16], 2))
def test_no_promise_beyond_the_gpu(step_s: float, workers: int) -> None:
    found = advised(
        load(wait_s=0.05), LoaderSettings(workers), step_s, parts=DECODED, samples=1000,
        variation=1.0, storage=StorageCost(0.08, 0.13, 1, 1, 1, 1.0),
    )  # fmt: skip
    for advice in found.values():
        assert step_s * (advice.value_of(RATE_WITH_IT) or 0.0) <= 1.001


def test_garbage_collection_that_takes_its_share() -> None:
    littering = load(0.06, pauses=Pauses((0.0, 0.08), 2))
    found = advised(littering, collecting=0.4)["gc_freeze"]
    assert gain_of(found) == pytest.approx(1 / 0.6, rel=0.05)
    alone = advised(load(alone=(BatchCost(0.0, 0.1),)), LoaderSettings(0), collecting=0.4)[
        "gc_freeze"
    ]
    assert gain_of(alone) == pytest.approx(1 / 0.6, rel=0.05)
    assert "40% of a worker's time" in found.cause and "gc.freeze()" in found.fix.action
    assert "gc_freeze" not in advised(littering, collecting=0.04)
    assert "gc_freeze" not in advised(littering, collecting=None)
