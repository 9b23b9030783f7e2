"""The truth campaign run for real, on a simulated GPU in place of one: end to end.

Its files are complete, and the simulation compared with itself agrees to the byte: traces
replay exactly, a job simulated again has the same peaks, and the largest batch from two
simulated ones runs where the next one up does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))

from _device_trace import replay_trace  # noqa: E402
from _truth_files import LimitTruth, Truth, read_truth  # noqa: E402

GPU = "H100 SXM"
CASES = (
    "resnet18-fp32-sgd-b16",
    "resnet50-fp32-split64-b32",
    "resnet50-fp32-roundup-b32",
    "gpt2-bf16-expandable-b4",
    "bert-base-fp16-clip-b8",
    "mlp-fp32-adamw-fused-b256",
    "mlp-fp32-momentum-loop-b256",
)
LIMIT = "cap3-resnet18-fp32-expandable"
PATTERNS = [f"--only={name}" for name in (*CASES, LIMIT)]

#: Makes the machine look as if it had a GPU, to whoever measures on it.
PRETENCE = f"""
import sys
if any(word.endswith("measure.py") or word == "-c" for word in sys.orig_argv):
    import trainfit
    trainfit.simulate({GPU!r}).__enter__()
"""


def run(script: str, *words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTORCH_", "CUDA_"))}
    env = {**env, "PYTHONPATH": str(ROOT / "src"), **more}
    command = [sys.executable, str(BENCH / script), *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of truth files of a rehearsal."""
    out = tmp_path_factory.mktemp("truth")
    words = ["--simulate", GPU, "--out", out, "--bundle", out / "all.tar", *PATTERNS]
    done = run("gpu/campaign.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def truths(folder: Path) -> dict[str, Any]:
    return {path.name.partition(".")[0]: read_truth(path) for path in folder.glob("*.json.gz")}


def test_every_file_is_there_and_complete(recorded: Path) -> None:
    found = truths(recorded)
    limit = found[LIMIT]
    assert isinstance(limit, LimitTruth)
    best = limit.capped.largest_ran
    runs = {f"{LIMIT}-b{best}", f"{LIMIT}-b{best + 1}"}
    assert set(found) == {*CASES, LIMIT, *runs}
    for name in {*CASES, *runs}:
        truth = found[name]
        assert isinstance(truth, Truth)
        assert truth.simulated and truth.machine.gpu == "NVIDIA H100 80GB HBM3"
        assert truth.trace.whole and truth.trace.marks and truth.trace.segments
        assert truth.status == "ran" or name == f"{LIMIT}-b{best + 1}"
        assert truth.profile_error is None
        stages = [stage.stage for stage in truth.device_memory]
        assert stages[:3] == ["before", "context", "moved"] and stages[-1] == "end"
        assert (recorded / f"{name}.json.gz").stat().st_size < 300_000


def test_marks_are_those_of_a_training_step(recorded: Path) -> None:
    truth = truths(recorded)[CASES[0]]
    names = [mark.name for mark in truth.trace.marks]
    assert names == ["moved", *["forward", "backward", "optimizer", "step"] * 3]
    assert truth.trace.marks[-1].peak_allocated_bytes == truth.memory.max_allocated_bytes
    assert len(truth.step_seconds) == truth.case.steps


def test_every_trace_replays_exactly(recorded: Path) -> None:
    for name, truth in truths(recorded).items():
        if not isinstance(truth, Truth):
            continue
        replay = replay_trace(truth.trace, truth.machine.memory_bytes, truth.reports)
        assert replay.difference is None, name
        assert replay.peak_allocated_bytes == truth.memory.max_allocated_bytes
        assert replay.peak_reserved_bytes == truth.memory.max_reserved_bytes


def test_the_predicted_batch_runs_and_the_next_one_does_not(recorded: Path) -> None:
    limit = truths(recorded)[LIMIT].capped
    assert limit.predicted == limit.largest_ran == limit.smallest_full - 1
    assert [status for _, status in limit.tries] == ["ran", "out_of_memory"]


def test_simulated_again_all_is_the_same_to_the_byte(recorded: Path) -> None:
    done = run("memory_truth.py", "--truth", recorded, "--rehearsal", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    rows = document["details"]["cases"]
    assert len(rows) == len(CASES) + 2
    for row in rows:
        assert row["problem"] is None and row["replay"] is None and row["same_end"], row["name"]
        assert row["measured"] == row["simulated"], row["name"]
    (limit,) = document["details"]["limits"]
    assert limit["measured"] == limit["predicted"]
    assert {figure["name"].partition("_")[0] for figure in document["figures"]} == {"rehearsal"}


def test_a_rehearsal_is_no_truth(recorded: Path) -> None:
    done = run("memory_truth.py", "--truth", recorded)
    assert done.returncode == 3
    assert "none was recorded yet" in done.stdout and "holds" not in done.stdout


def test_what_is_there_is_not_measured_again(recorded: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in recorded.glob("*.json.gz")}
    bundle = recorded / "all.tar"
    done = run(
        "gpu/campaign.py", "--simulate", GPU, "--out", recorded, "--bundle", bundle, *PATTERNS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name: path.stat().st_mtime_ns for path in recorded.glob("*.json.gz")} == before
    with tarfile.open(bundle) as archive:
        names = archive.getnames()
    assert len(names) == len(set(names))
    assert set(names) == {*before, "campaign.json"}


def test_a_stopped_campaign_keeps_what_it_has_and_goes_on(tmp_path: Path) -> None:
    words = ["--simulate", GPU, "--out", tmp_path, "--only=mlp-fp32-sgd-*"]
    done = run("gpu/campaign.py", *words, "--time-limit=1")
    assert done.returncode == 1
    assert "out of time" in done.stdout
    done = run("gpu/campaign.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("mlp-*.json.gz"))) == 3


def test_without_an_option_it_measures_the_gpu_that_is_there(tmp_path: Path) -> None:
    """The way it goes on a real machine, which only looks like one here."""
    (tmp_path / "sitecustomize.py").write_text(PRETENCE)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    out = tmp_path / "truth"
    name = "resnet18-fp32-sgd-b16"
    done = run(
        "gpu/campaign.py", "--out", out, f"--only={name}", f"--only={LIMIT}", PYTHONPATH=path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("NVIDIA H100 80GB HBM3: 1 results and 1 limits to measure")
    found = truths(out)
    assert not found[name].simulated
    assert found[LIMIT].capped.predicted == found[LIMIT].capped.largest_ran > 100
    done = run("memory_truth.py", "--truth", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "truth_allocated_median_error: 0% (goal at most 0.5%) holds" in done.stdout
    assert "truth_replay_exact: 100% (goal at least 100%) holds" in done.stdout
    assert "truth_limits_right: 100% (goal at least 100%) holds" in done.stdout
