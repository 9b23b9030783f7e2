"""Step times of the truth campaign, recorded on a simulated GPU and predicted again."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import trainfit

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import speed_truth  # noqa: E402
from _bench import ABSENT  # noqa: E402
from _truth_files import TimedSteps, read_truth  # noqa: E402
from gpu import measure, timing  # noqa: E402
from gpu.cases import case  # noqa: E402
from gpu.training import TrainingJob  # noqa: E402

BATCHES = (4096, 16384)
FEW = timing.TimingRepeats(most=8)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """What a process of the campaign writes of a small job."""
    with trainfit.simulate("H100 SXM"):
        job = TrainingJob(case("mlp", BATCHES[0]))
        found = timing.StepTimer(job, BATCHES, FEW).measure(simulated=True)
    return {"format": measure.FORMAT, "version": measure.VERSION, **found}


@pytest.fixture
def folder(result: dict[str, Any], tmp_path: Path) -> Path:
    measure.write(tmp_path / "steps-mlp-fp32.json.gz", result)
    return tmp_path


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["details"]["steps"]
    return found


@pytest.mark.slow
def test_a_file_of_step_times_is_read(folder: Path) -> None:
    truth = read_truth(folder / "steps-mlp-fp32.json.gz")
    assert isinstance(truth, TimedSteps)
    assert truth.simulated and truth.machine.gpu == "NVIDIA H100 80GB HBM3"
    assert truth.operator_s is None  # of this machine under the simulation: no truth either
    assert [(each.batch, each.status) for each in truth.timed] == [(n, "ran") for n in BATCHES]
    assert all(len(each.seconds) == FEW.most for each in truth.timed)


@pytest.mark.slow
def test_steps_as_timed_in_the_simulation_are_those_predicted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From Python's clock in the job to the recording's work, by two ways."""
    words = ["--truth", str(folder), "--rehearsal", "--json", "--jobs", "1"]
    assert speed_truth.main(words) == 0
    first, last = rows(capsys)
    assert (first["batch"], last["batch"]) == BATCHES
    for row in (first, last):
        assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=0.1)
        assert row["by_profile_s"] is None
    assert last["predicted_s"] > 2 * first["predicted_s"]


def test_a_core_that_was_measured_counts(folder: Path, result: dict[str, Any]) -> None:
    truth = read_truth(folder / "steps-mlp-fp32.json.gz")
    assert isinstance(truth, TimedSteps)
    slow = dataclasses.replace(truth, operator_s=1.0)
    found = speed_truth.compare(speed_truth._Work(slow, 4, 1.0, None, ""))
    assert found.predicted_s > 10


@pytest.mark.slow
def test_running_out_of_memory_ends_a_job_and_is_no_failure() -> None:
    with trainfit.simulate("custom:1.5GiB"):
        job = TrainingJob(case("mlp", 8))
        found = timing.StepTimer(job, (8, 1 << 16, 16), FEW).measure(simulated=True)
    assert [row["status"] for row in found["timed"]] == ["ran", "out_of_memory"]


def test_without_truth_it_says_how_to_record(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rehearsal is none."""
    assert speed_truth.main(["--truth", str(folder)]) == ABSENT
    said = capsys.readouterr().out
    assert "python bench/gpu/campaign.py --only steps-" in said and "holds" not in said


def test_bad_input_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        speed_truth.main(["--profile", str(folder / "none.json")])
    assert "none.json" in capsys.readouterr().err
    (folder / "steps-other.json.gz").write_bytes(b"\x1f\x8b cut short")
    with pytest.raises(SystemExit, match="2"):
        speed_truth.main(["--truth", str(folder), "--rehearsal"])
    assert "damaged" in capsys.readouterr().err


@pytest.mark.slow
def test_a_gpu_of_unknown_rates_is_not_judged(
    result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = {**result["machine"], "gpu": "NVIDIA GeForce RTX 9999"}
    measure.write(tmp_path / "steps-x.json", {**result, "machine": machine})
    words = ["--truth", str(tmp_path), "--rehearsal", "--jobs", "1"]
    with pytest.raises(SystemExit, match="2"):
        speed_truth.main(words)
    assert "NVIDIA GeForce RTX 9999: not in the catalogue" in capsys.readouterr().err
