"""The simulated CUDA device and the simulated NVML under `trainfit watch`: it says what was set."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path

import pytest

from helpers_cli import ROOT, trainfit
from helpers_nvml import BUSY, SimulatedGpu, several, starved, throttled
from helpers_watch import finding, kinds, unknown_kinds
from trainfit.results.runs.watched import load_run
from trainfit.results.watch import WatchResult

SCRIPT = Path(__file__).with_name("simulated_gpu.py")
STAND_IN = ROOT / "tests" / "stand_ins" / "nvml"
MIB, GIB = 1 << 20, 1 << 30
T4 = {"name": "Tesla T4", "memory_bytes": 16 * GIB, "max_sm_hz": 1.59e9, "power_limit_w": 70.0}
COOL = dataclasses.replace(BUSY, sm_hz=1.59e9, power_w=60.0, used_bytes=2 * GIB)


def watched(folder: Path, gpu: SimulatedGpu, options: str) -> WatchResult:
    several([dataclasses.replace(gpu, **T4)], time.monotonic()).save(folder / "nvml.json")
    path = os.pathsep.join([str(STAND_IN), str(ROOT / "src")])
    done = trainfit(
        "watch", "--quiet", "--folder", folder / "run", "--output", folder / "r.json", "--",
        sys.executable, SCRIPT, *options.split(), cwd=folder,
        SIMULATED_NVML=str(folder / "nvml.json"), PYTHONPATH=path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # On a busy machine samples are rarer, which an event says as well.
    assert not [event for event in load_run(folder / "run").sampler_events
                if event.kind == "not_sampled" and "period_s" not in event.values]  # fmt: skip
    return WatchResult.load(folder / "r.json")


def number(result: WatchResult, kind: str, what: str) -> float:
    (found,) = [each.value for each in finding(result, kind).evidence if each.what == what]
    return found


@pytest.mark.slow
def test_a_gpu_that_is_kept_busy(tmp_path: Path) -> None:
    """Copies are made in a stream of their own."""
    result = watched(tmp_path, SimulatedGpu((COOL,)), "--gpu=0.04 --ahead=0.08 --side-stream")
    assert result.header.gpus[0].name == "Tesla T4"
    assert result.limit == "gpu"
    assert result.gpu_busy is not None and result.gpu_busy > 0.9
    assert result.gpu_utilization == 1.0
    phases = {each.name: each.gpu_s for each in result.phases}
    assert phases["forward"] == pytest.approx(0.04 / 3, rel=0.05)
    assert phases["backward"] == pytest.approx(0.08 / 3, rel=0.05)
    quiet = {"input_bound", "no_workers", "memory_growth", "thermal_throttling", "clocks_set"}
    assert not quiet & set(kinds(result))
    assert "thermal_throttling" not in unknown_kinds(result)


# sampler/test_sampling.py has the same GPU with a clock of its own, rules/ what is made of samples.
@pytest.mark.slow  # with a load of 25 on two cores samples are too rare, 2 times of 12
def test_heat_that_lowers_the_clock(tmp_path: Path) -> None:
    """A verdict needs 20 samples in training, which a busy machine takes long to bring; those of
    the first steps are left out."""
    full = dataclasses.replace(COOL, used_bytes=int(15.8 * GIB))
    result = watched(tmp_path, throttled(0.0, full), "--gpu=0.03 --samples=30")
    found = finding(result, "thermal_throttling")
    assert found.share == pytest.approx(1 - 1.2 / 1.59, abs=0.01)
    assert number(result, "thermal_throttling", "clock while slowed") == 1200
    assert number(result, "thermal_throttling", "temperature, 95th percentile") == 88
    assert number(result, "memory_near_limit", "used at the peak") == pytest.approx(15.8)


@pytest.mark.slow
def test_a_gpu_that_waits_for_batches(tmp_path: Path) -> None:
    """Its clock falls meanwhile, which is no throttling."""
    result = watched(tmp_path, starved(0.02, 0.06, COOL), "--gpu=0.02 --sleep=0.06 --steps=60")
    (found,) = [each for each in result.findings if each.kind in ("no_workers", "input_bound")]
    # 20 ms of 80; on a busy machine the script's own part of a step is longer.
    assert 0.4 < found.share < 0.85
    assert result.limit == "input"
    assert result.gpu_busy is not None and 0.1 < result.gpu_busy < 0.35
    assert result.gpu_utilization == pytest.approx(0.25, abs=0.1)
    assert not {"thermal_throttling", "power_throttling", "clocks_set"} & set(kinds(result))


@pytest.mark.slow
def test_memory_that_grows_until_it_is_full(tmp_path: Path) -> None:
    result = watched(tmp_path, SimulatedGpu((COOL,)), "--gpu=0.02 --leak=4 --steps=120")
    found = finding(result, "memory_growth")
    assert number(result, "memory_growth", "growth") == pytest.approx(4.0, rel=0.01)
    assert found.severity == "critical"
    books = result.ledger
    assert books is not None and books.total_bytes is not None
    assert books.peak_allocated_bytes is not None
    left = books.total_bytes - books.peak_allocated_bytes
    assert books.out_of_memory_step == pytest.approx(120 + left / (4 * MIB), rel=0.1)
    for point in books.points:
        parts = (point.allocated, point.cached)
        assert None not in parts and sum(each or 0 for each in parts) <= books.total_bytes
