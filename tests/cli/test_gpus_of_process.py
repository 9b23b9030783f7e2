"""``trainfit plan`` and ``simulate`` of one process that uses several GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers_cli import SCRIPTS, error_line, json_of, trainfit
from helpers_plan import brief_plans

SCRIPT = str(SCRIPTS / "one_process.py")
#: Of its two layers, in float32.
PARAMETERS = 2 * 512 * 4096 + 4096 + 512
OWN = ("--gpu", "2x RTX 4090", "--no-remedies", "--no-loader")


def planned(use: str, *options: str) -> dict[str, Any]:
    command = ("python", SCRIPT, f"--use={use}", "--batch-size={batch_size:256}")
    with brief_plans():
        done = trainfit("plan", *OWN, *options, "--json", "--", *command, cwd=SCRIPTS)
    assert done.returncode == 0, done.stderr
    return json_of(done)


@pytest.fixture(scope="module")
def copies() -> dict[str, Any]:
    return planned("copies")


@pytest.mark.slow
def test_data_parallel_is_told_with_figures(copies: dict[str, Any]) -> None:
    gpus = copies["gpus"]
    assert gpus["replicated"]
    assert [each["gpu"] for each in gpus["shares"]] == [0, 1]
    first, second = gpus["shares"]
    assert first["allocated_bytes"] == copies["now"]["memory"]["allocated_bytes"]
    assert 0 < second["busy_share"] <= first["busy_share"] < 1
    passed = {each["kind"]: each["nbytes"] for each in gpus["transfers"]}
    assert passed["broadcast"] == passed["reduce"] == 4 * PARAMETERS
    assert passed["peer_copy"] >= 128 * 512 * 4
    (finding,) = [each for each in copies["findings"] if each["kind"] == "data_parallel"]
    assert "GPU 0 holds" in finding["title"]
    assert "a step with DistributedDataParallel needs" in finding["cause"]
    assert "torchrun" in finding["fixes"][0]["action"]
    assert gpus["ddp_s"] < copies["now"]["step_s"]
    assert finding["fixes"][0]["gain"] == pytest.approx(copies["now"]["step_s"] / gpus["ddp_s"])


def test_other_batch_sizes_follow_from_a_rule(copies: dict[str, Any]) -> None:
    assert copies["basis"] == "two traces"
    assert copies["now"]["largest_batch"] > 256


def test_the_gpus_of_a_split_model_take_turns() -> None:
    result = planned("split")
    gpus = result["gpus"]
    assert not gpus["replicated"]
    assert gpus["ddp_s"] is None
    assert sum(each["busy_share"] for each in gpus["shares"]) < 1.25
    (copied,) = gpus["transfers"]
    # Activations there, their gradients back.
    assert copied == {**copied, "kind": "peer_copy", "calls": 2, "nbytes": 2 * 256 * 4096 * 4}
    # The second, of no weight, is of the inputs that the script makes on the host.
    assert [each["kind"] for each in result["findings"]] == ["gpus_take_turns", "host_copies"]


def test_one_line_says_how_a_script_for_torchrun_is_started() -> None:
    result = planned("first")
    assert result["gpus"] is None
    (note,) = [each for each in result["notes"] if "the script uses 1" in each]
    assert "of the 2 GPUs" in note
    assert "`torchrun --nproc_per_node=2`" in note


def test_simulate_runs_on_both() -> None:
    done = trainfit(
        "simulate", "--gpu", "2x RTX 4090", "--", "python", SCRIPT, "--use=split", cwd=SCRIPTS
    )
    assert done.returncode == 0, done.stderr
    assert "GiB" in done.stdout or "MiB" in done.stdout


def test_it_is_not_compared_on_single_gpus(tmp_path: Path) -> None:
    command = ("python", SCRIPT, "--use=split")
    done = trainfit("simulate", *OWN[:2], "--output", "job.trainfit", "--", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = trainfit("gpus", "--for", "job.trainfit", cwd=tmp_path)
    assert done.returncode == 2
    assert "a process that uses 2 GPUs" in error_line(done)


def test_one_gpu_is_too_few() -> None:
    done = trainfit(
        "simulate", "--gpu", "RTX 4090", "--", "python", SCRIPT, "--use=split", cwd=SCRIPTS
    )
    assert done.returncode == 2
    assert '--gpu "2x RTX 4090"' in error_line(done)
