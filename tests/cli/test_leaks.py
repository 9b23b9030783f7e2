"""A leak never comes with a batch size: not on the screen, in the files, or for other GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import SCRIPTS
from helpers_cli import trainfit as run_trainfit
from helpers_plan import brief_plans
from trainfit.cli.main import main

COMMAND = (
    *("python", str(SCRIPTS / "leaks.py"), "--habit=outputs", "--width=512", "--head=4096"),
    "--batch_size={batch_size:32}",
)
PRICES = 'currency = "USD"\n[per_hour]\n"RTX 4090" = 0.44\n'


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan's file: 16 MiB stay behind with each step, on a GPU of 1 GiB."""
    folder = tmp_path_factory.mktemp("leak")
    words = ("plan", "--gpu", "custom:1GiB", "--no-loader", "--output", "plan.json", "--")
    with brief_plans(both_precisions=True):
        done = run_trainfit(*words, *COMMAND, cwd=folder)
    assert done.returncode == 1, f"the GPU will be full: {done.stderr}"
    (folder / "screen.txt").write_text(done.stdout)
    return folder / "plan.json"


def plan_of(file: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def output(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """What the command prints, in one line."""
    assert main([str(word) for word in words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_result_has_no_batch_size(file: Path) -> None:
    result = plan_of(file)
    pattern = result["pattern"]
    assert (pattern["course"], pattern["growth_bytes_per_step"]) == ("growing", 16 << 20)
    assert 30 < pattern["steps_until_full"] < 60
    for configuration in (result["now"], result["other_amp"]):
        limits = configuration["limits"]
        assert configuration["recommended_batch"] is None
        assert (limits["knee"], limits["trains"]) == (None, None)
        assert "while memory grows (16 MiB with each step)" in limits["reason"]
    assert result["recommended"] is None
    assert "batch_size=32" in result["launch"], "the launch line keeps the current one"


def test_the_screen_says_so_first(file: Path) -> None:
    steps = plan_of(file)["pattern"]["steps_until_full"]
    text = " ".join((file.parent / "screen.txt").read_text().split())
    assert text.startswith("Fits at first: ")
    first = f"memory grows: full after about {steps} optimizer steps. No batch size is recommended."
    assert first in text
    assert "recommended 3" not in text and "Recommended batch" not in text
    assert "--batch_size=32" in text


@pytest.mark.parametrize("options", [(), ("--explain",)])
def test_show_says_the_same(
    file: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, "show", *options, file)
    assert "while memory grows (16 MiB with each step)" in text
    assert "as in the command below" not in text
    assert "--batch_size=32" in text


def test_other_gpus_get_no_batch_size_and_no_price_either(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    words = ("gpus", "RTX 4090", "T4", "--for", file, "--price", prices)
    text = output(capsys, *words)
    assert "no batch size is recommended while memory grows (16 MiB with each step)" in text
    assert "cheapest" not in text
    assert "the largest batch is for the" in output(capsys, *words, "--explain")
    assert main([*map(str, words), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for estimate in found["gpus"]:
        assert estimate["at_saturation"] is estimate["run_s"] is estimate["cost"] is None
        assert estimate["run_batch"] == 32
        assert estimate["samples_per_unit"] is None
    assert any("full after about" in note for note in found["notes"])
    assert found["cheapest"] is None
