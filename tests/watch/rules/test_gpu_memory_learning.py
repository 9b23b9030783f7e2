"""Rules on a GPU's clocks, precision, use and memory, and on what training computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trainfit.results.findings import Finding, Unknown
from trainfit.results.runs import tables
from trainfit.results.runs.learning import LearningFacts, Misuse
from trainfit.results.runs.watched import RankRecord, RunHeader, RunRecord, WatchedGpu
from trainfit.watch.measures import ledger, robust_slope
from trainfit.watch.rules import gpu, growth, memory, ranks, training
from trainfit.watch.rules.memory import HOST_MEMORY
from trainfit.watch.view import RunView

GIB = 2**30
RULES = (
    *(*gpu.RULES, *ranks.RULES, *gpu.RULES, *memory.RULES, HOST_MEMORY, *growth.RULES),
    *training.RULES,
)
CARD = WatchedGpu("NVIDIA A100", "", 40 * GIB, (8, 0), 312e12)
HEADER = RunHeader(
    "python train.py", 0, 1, 1, "host", 0.0, 0.0, "0.1.0", "3.11",
    gpu=0, gpus=(CARD,), precision="bfloat16", flops_per_sample=1e12, ram_bytes=64 * GIB,
    usable_cores=16.0,
)  # fmt: skip


def steps(count: int = 400, **columns: Any) -> tables.Table:
    """Steps of 0.1 s of a GPU that always has work, with a finite loss."""
    rows = tables.empty_rows(tables.STEPS, count)
    rows["step"] = np.arange(count)
    rows["step_s"] = 0.1
    rows["end_s"] = 0.1 * np.arange(1, count + 1)
    usual = {
        "gpu_s": 0.095, "gpu_gap_s": 0.001, "samples": 16, "forward_s": 0.03,
        "backward_s": 0.05, "optimizer_s": 0.01, "input_s": 0.001, "allocated_bytes": 20 * GIB,
        "peak_allocated_bytes": 28 * GIB, "reserved_bytes": 30 * GIB, "alloc_retries": 0,
        "loss": 1.0, "flags": tables.LOSS_FINITE,
    }  # fmt: skip
    for name, value in (usual | columns).items():
        rows[name] = value
    return rows


def samples(seconds: float = 40.0, **columns: Any) -> tables.Table:
    """Of an A100 at its full clock."""
    count = int(10 * seconds)
    rows = tables.empty_rows(tables.GPUS, count)
    rows["time_s"] = np.arange(1, count + 1) / 10
    usual = {
        "gpu": 0, "utilization": 0.99, "used_bytes": 32 * GIB, "ours_bytes": 32 * GIB,
        "others_bytes": 0, "sm_hz": 1.41e9, "max_sm_hz": 1.41e9, "clock_reasons": 0,
        "temperature_c": 60.0, "power_w": 300.0, "power_limit_w": 400.0,
    }  # fmt: skip
    for name, value in (usual | columns).items():
        rows[name] = value
    return rows


def run_of(
    *step_tables: tables.Table,
    cards: tables.Table | None = None,
    machine: tables.Table | None = None,
    processes: tables.Table | None = None,
    **header: Any,
) -> RunView:
    world = max(1, len(step_tables))
    given_tables: Sequence[tables.Table] = step_tables or (steps(),)
    recorded = tuple(
        RankRecord(
            dataclasses.replace(HEADER, **({"rank": at, "world_size": world} | header)),
            table,
            np.zeros(0, tables.FETCHES),
        )
        for at, table in enumerate(given_tables)
    )
    none = {name: np.zeros(0, kind) for name, kind in tables.BY_NAME.items()}
    return RunView(
        RunRecord(
            recorded,
            none["machine"] if machine is None else machine,
            samples() if cards is None else cards,
            none["processes"] if processes is None else processes,
        )
    )


def found(run: RunView) -> dict[str, Finding]:
    every = [each for rule in RULES for each in rule.look(run)]
    return {each.kind: each for each in every if isinstance(each, Finding)}


def unknown(run: RunView) -> set[str]:
    every = [each for rule in RULES for each in rule.look(run)]
    return {each.kind for each in every if isinstance(each, Unknown)}


def test_a_healthy_run_is_silent() -> None:
    assert found(run_of()) == {} and unknown(run_of()) == set()


# --- Clocks -----------------------------------------------------------------------------------
def test_heat_lowers_the_clock() -> None:
    reasons = np.where(np.arange(400) < 300, 0x20, 0)
    hz = np.where(np.arange(400) < 300, 1.0e9, 1.4e9)
    (one,) = found(run_of(cards=samples(clock_reasons=reasons, sm_hz=hz))).values()
    assert one.kind == "thermal_throttling" and one.share == pytest.approx(
        0.75 * 0.4 / 1.4, rel=0.02
    )
    assert one.severity == "warning"


def test_one_flash_of_a_reason_is_none() -> None:
    reasons = np.where(np.arange(400) < 10, 0x8, 0)
    assert found(run_of(cards=samples(clock_reasons=reasons, sm_hz=1.2e9))) == {}


def test_a_starved_gpu_lowers_its_clock_by_itself() -> None:
    starved = run_of(
        steps(gpu_s=0.02, gpu_gap_s=0.08, input_s=0.08), cards=samples(utilization=0.1, sm_hz=0.6e9)
    )
    assert "thermal_throttling" not in found(starved)
    assert "thermal_throttling" in unknown(starved)


def test_the_power_limit_and_clocks_that_were_set() -> None:
    power = found(run_of(cards=samples(clock_reasons=0x4, sm_hz=1.1e9)))
    assert set(power) == {"power_throttling"}
    assert set(found(run_of(cards=samples(clock_reasons=0x2, sm_hz=1.1e9)))) == {"clocks_set"}
    # At the limit with hardly any loss: that is how a GPU is meant to run.
    assert found(run_of(cards=samples(clock_reasons=0x4, sm_hz=1.38e9))) == {}


# --- Precision and use --------------------------------------------------------------------------
def test_amp_is_advised_where_the_gpu_is_the_limit() -> None:
    assert "amp_off" in found(run_of(precision="float32"))
    assert "amp_off" not in found(run_of(precision="float32", autocast="bfloat16"))
    waits = run_of(steps(gpu_s=0.03, gpu_gap_s=0.07, input_s=0.06), precision="float32")
    assert "amp_off" not in found(waits)
    old = dataclasses.replace(CARD, capability=(6, 1))
    assert "amp_off" not in found(run_of(precision="float32", gpus=(old,)))
    volta = dataclasses.replace(CARD, capability=(7, 5))
    assert "float16" in found(run_of(precision="float32", gpus=(volta,)))["amp_off"].fix.line


def test_small_kernels_with_memory_left_are_a_small_batch() -> None:
    small = steps(reserved_bytes=4 * GIB, peak_allocated_bytes=3 * GIB, allocated_bytes=GIB)
    assert set(found(run_of(small, flops_per_sample=1e10))) == {"small_batch"}
    assert set(found(run_of(flops_per_sample=1e10))) == {"low_mfu"}
    assert "low_mfu" in unknown(run_of(flops_per_sample=None))
    full = samples(sm_active=0.9)
    assert found(run_of(flops_per_sample=None, cards=full)) == {}


def test_others_on_the_gpu() -> None:
    assert set(found(run_of(cards=samples(others_bytes=5 * GIB)))) == {"gpu_shared"}
    assert found(run_of(cards=samples(others_bytes=-1))) == {}


# --- Ranks --------------------------------------------------------------------------------------
def test_the_rank_that_the_others_wait_for_is_named() -> None:
    slow = steps(input_s=0.05, backward_s=0.01)
    (one,) = found(run_of(steps(), slow, steps())).values()
    assert (one.kind, one.rank) == ("straggler", 1) and "DataLoader" in one.cause
    python = steps(step_s=0.14, end_s=0.14 * np.arange(1, 401))
    waiting = steps(step_s=0.14, end_s=0.14 * np.arange(1, 401), backward_s=0.09)
    (one,) = found(run_of(waiting, python)).values()
    assert one.rank == 1 and "Python code" in one.cause
    assert found(run_of(steps(), steps())) == {}
    assert "straggler" in unknown(run_of(steps(), world_size=2))


# --- Memory -------------------------------------------------------------------------------------
def test_a_leak_and_its_end() -> None:
    noise = np.random.default_rng(0).integers(0, 4 * 2**20, 400)
    held = 10 * GIB + 40 * 2**20 * np.arange(400) + noise
    leaking = run_of(steps(allocated_bytes=held, peak_allocated_bytes=held + GIB))
    one = found(leaking)["memory_growth"]
    full = {each.what: each.value for each in one.evidence}["out of memory at step"]
    # 40 GiB less 2 GiB outside PyTorch, from 26.6 GiB at step 399, by 40 MiB a step.
    assert full == pytest.approx(399 + (38 - 26.6) * 1024 / 40, rel=0.02)
    assert one.severity == "critical"


def test_an_evaluation_that_holds_more_is_no_leak() -> None:
    held = np.where(np.arange(400) % 100 > 90, 25 * GIB, 20 * GIB)
    assert found(run_of(steps(allocated_bytes=held))) == {}


def test_memory_near_the_limit() -> None:
    assert found(run_of(cards=samples(used_bytes=38 * GIB)))["memory_near_limit"].severity == (
        "warning"
    )
    tries = steps(alloc_retries=np.arange(400) // 100)
    assert found(run_of(tries))["memory_near_limit"].severity == "critical"


def test_reserved_far_above_allocated() -> None:
    some = run_of(steps(peak_allocated_bytes=10 * GIB, allocated_bytes=5 * GIB))
    assert found(some)["reserved_above_allocated"].fix.settings
    little = steps(peak_allocated_bytes=GIB, allocated_bytes=GIB // 2, reserved_bytes=3 * GIB)
    assert "reserved_above_allocated" not in found(run_of(little))


def test_the_ledger_adds_up() -> None:
    books = ledger(run_of().judged)
    assert books is not None
    for point in books.points:
        parts = (point.allocated, point.cached, point.beyond, point.others, point.free)
        assert None not in parts and sum(each or 0 for each in parts) == 40 * GIB
    assert books.fragmentation == pytest.approx(2 / 30)
    assert ledger(run_of(gpu=None).judged) is None


def host(seconds: int = 40, **columns: Any) -> tables.Table:
    rows = tables.empty_rows(tables.MACHINE, 10 * seconds)
    rows["time_s"] = np.arange(1, 10 * seconds + 1) / 10
    for name, value in columns.items():
        rows[name] = value
    return rows


def test_ram_and_shared_memory() -> None:
    assert "ram_near_limit" in found(run_of(machine=host(ram_available_bytes=GIB)))
    short = host(ram_available_bytes=GIB)
    for private, words, severity in (
        (GIB, "other programs hold most of it, the run 1.00 GiB", "warning"),
        (200 * GIB, "RAM is nearly used up", "critical"),
    ):
        rows = tables.empty_rows(tables.MEMORY, 40)
        rows["time_s"], rows["rank"], rows["role"] = np.arange(40), 0, 0
        rows["anonymous_bytes"] = private
        record = run_of(machine=short, ram_bytes=256 * GIB)
        record = dataclasses.replace(record, run=dataclasses.replace(record.run, memory=rows))
        told = found(record)["ram_near_limit"]
        assert told.title.endswith(words) and told.severity == severity
    tight = host(shm_free_bytes=2**20, shm_used_bytes=63 * 2**20)
    assert set(found(run_of(machine=tight))) == {"shm_near_limit"}
    rows = tables.empty_rows(tables.PROCESSES, 400)
    rows["time_s"] = np.arange(1, 401) / 10
    rows["rank"], rows["role"] = 0, 1
    rows["rss_bytes"] = GIB + np.arange(400) * 4 * 2**20
    assert set(found(run_of(processes=rows))) == {"ram_growth"}
    early = run_of(processes=rows[:150])  # 15 s
    assert found(early) == {} and "ram_growth" in unknown(early)
    rows["rss_bytes"] = GIB + np.minimum(np.arange(400), 200) * 4 * 2**20  # a cache that is full
    assert found(run_of(processes=rows)) == {}


# --- Learning ---------------------------------------------------------------------------------
def test_a_loss_that_is_nan() -> None:
    flags = np.where(np.arange(400) < 300, tables.LOSS_FINITE, tables.LOSS_NOT_FINITE)
    one = found(run_of(steps(flags=flags)))["loss_not_finite"]
    assert (one.first_step, one.last_step) == (300, 399) and "from step 300 on" in one.title
    assert "loss_not_finite" in unknown(run_of(steps(flags=0)))
    for why, title, fix in (
        (Misuse("slope_infinite", ("sqrt",), "train.py:8"), "slope of sqrt", "1e-12"),
        (Misuse("data_not_finite", ("x", "4321", "1")), "dataset.x, row 4321", "nan_to_num"),
    ):
        run = run_of(steps(flags=flags), learning=LearningFacts(not_finite=why))
        told = found(run)["loss_not_finite"]
        assert title in told.title and fix in told.fix.action
        assert why.place is None or str(told.place) == why.place


def test_skipped_steps() -> None:
    flags = tables.LOSS_FINITE | np.where(np.arange(400) % 10 == 0, tables.STEP_SKIPPED, 0)
    assert set(found(run_of(steps(flags=flags, loss_scale=1024.0)))) == {"skipped_steps"}
    # GradScaler finds its level: the first steps only.
    start = tables.LOSS_FINITE | np.where(np.arange(400) < 15, tables.STEP_SKIPPED, 0)
    assert found(run_of(steps(flags=start, loss_scale=1024.0))) == {}


# --- Anything ---------------------------------------------------------------------------------
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_rule_raises_on_any_tables(data: st.DataObject) -> None:
    """Whatever a damaged file holds."""
    drawn = {
        name: data.draw(hnp.arrays(np.uint8, data.draw(st.integers(0, 12)) * kind.itemsize))
        for name, kind in tables.BY_NAME.items()
    }
    made = {name: np.frombuffer(raw.tobytes(), tables.BY_NAME[name]) for name, raw in drawn.items()}
    with np.errstate(all="ignore"):
        run = run_of(
            made["steps"], cards=made["gpus"], machine=made["machine"], processes=made["processes"]
        )
        every = dataclasses.replace(run.run, memory=made["memory"], folders=made["folders"])
        found(RunView(every))


@given(st.floats(-1e6, 1e6), st.integers(8, 400))
def test_the_slope_is_that_of_a_line(slope: float, count: int) -> None:
    at = np.arange(count)
    line = 1e9 + slope * at
    if line.min() < 0:
        return
    told = robust_slope(at, line)
    assert told is not None and told[0] == pytest.approx(slope, rel=1e-3, abs=1e-3)
    assert told[1] <= told[0] <= told[2]
