"""``trainfit batch explain`` as a user calls it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from helpers_cli import trainfit
from helpers_noise import train

ASK = ("batch", "explain", "--batch-size", "64", "--to", "16")


def test_a_measured_noise_scale_is_explained_and_shown(tmp_path: Path) -> None:
    train(200, noise_scale=64.0).save(tmp_path / "noise.json")
    done = trainfit(
        "batch", "explain", "noise.json", "--to", "64", "--optimizer", "sgd", "--lr", "0.1",
        "--output", "trade.json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("16 → 64 samples a step: ")
    assert "noise.json: 199 measured steps at batch 16" in " ".join(done.stdout.split())
    assert len(done.stdout.splitlines()) <= 25
    shown = trainfit("show", "trade.json", cwd=tmp_path)
    assert shown.returncode == 0 and shown.stdout == done.stdout
    noise = trainfit("show", "noise.json", cwd=tmp_path)
    assert noise.returncode == 0 and noise.stdout.startswith("Noise scale ")


def test_the_measured_runs_ranks_and_accumulation_are_those_of_a_step(tmp_path: Path) -> None:
    result = train(20).result()
    dataclasses.replace(result, ranks=4).save(tmp_path / "noise.json")
    words = ("batch", "explain", "noise.json", "--json", "--batch-norm", "yes", "--samples", "1000")
    found = json.loads(trainfit(*words, "--to", "32", cwd=tmp_path).stdout)
    assert found["before"] == 4 * 4 * 4
    assert [claim for claim in found["claims"] if claim["topic"] == "batch norm"] == []
    assert [each["steps"] for each in found["epochs"]] == [15, 31]


def test_json_and_a_table_of_step_times(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("micro_batch,seconds\n16,0.05\n64,0.15\n")
    done = trainfit(*ASK, "--noise-scale", "200:150:280", "--data", "t.csv", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["format"] == "trainfit-batch" and found["version"] == 1
    assert found["noise"] == {"value": 200.0, "low": 150.0, "high": 280.0}
    assert found["critical_batch"] == {"value": 200.0, "low": 50.0, "high": 840.0}
    assert found["trade"]["time"]["value"] == pytest.approx(13.5 / 4.125 / 3)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("batch", "explain", "--to", "16"), "give --batch-size"),
        (("batch", "explain", "--batch-size", "8"), "--to"),
        (("batch", "shrink", "--to", "8"), "shrink"),
        ((*ASK[:4], "--to", "64"), "give another"),
        ((*ASK, "--gpus", "32"), "at least one sample for each GPU"),
        ((*ASK, "--gpus", "2", "--accumulation", "5"), "not 5 equal micro-batches on 2 GPUs"),
        ((*ASK, "--noise-scale", "-3"), "expected a noise scale"),
        ((*ASK, "--noise-scale", "200:300:400"), "expected a noise scale"),
        ((*ASK, "--noise-scale", "nan"), "expected a noise scale"),
        ((*ASK, "--noise-scale", "missing.json"), "no such file"),
        ((*ASK, "missing.json"), "no such file"),
        ((*ASK, "few.json"), "measured steps"),
        ((*ASK, "few.json", "--noise-scale", "9"), "not both"),
        ((*ASK, "--lr", "0"), "positive number"),
        ((*ASK, "--beta2", "1"), "between 0 and 1"),
        ((*ASK, "--optimizer", "muon"), "muon"),
        ((*ASK, "--data", "missing.csv"), "no such file"),
        ((*ASK, "--output", "no/where.json"), "create it first"),
        ((*ASK, "--to", "0"), "positive integer"),
    ],
)
def test_bad_input_gets_one_line(words: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    train(3).save(tmp_path / "few.json")
    done = trainfit(*words, cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert reason in done.stderr.splitlines()[-1]
