"""The adapters in the loops of the real packages."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers_cases import slow_but
from helpers_cli import environment
from trainfit.results.runs.watched import load_run

SCRIPT = Path(__file__).with_name("loops.py")
#: What imports little; `make test-slow` has the others, test_watched_training.py what they share.
LOOPS = slow_but(
    ["lightning.pytorch", "accelerate", "pytorch_lightning", "transformers"], "accelerate"
)


def trained(
    loop: str, folder: Path, *more: str, launcher: Sequence[str] = (), **variables: str
) -> tuple[list[dict[str, Any]], str]:
    """What each training of the loop told, and what it wrote to stderr."""
    if importlib.util.find_spec(loop.partition(".")[0]) is None:
        pytest.skip(f"{loop} is not installed")
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), loop, str(folder / "out"), *more],
        env=environment(XDG_STATE_HOME=str(folder / "state"), **variables),
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("told: ")]
    return [json.loads(line.removeprefix("told: ")) for line in lines], done.stderr


@pytest.mark.parametrize("loop", LOOPS)
def test_a_training_is_watched_and_its_numbers_are_logged(loop: str, tmp_path: Path) -> None:
    told, stderr = trained(loop, tmp_path)
    assert len({each["folder"] for each in told}) == len(told) == (1 if loop == "accelerate" else 2)
    for each in told:
        assert each["steps"] > 20 and each["metrics"]["trainfit/step_ms"] > 0
    ((step, logged),) = told[0]["logged"]
    assert {key: value for key, value in logged.items() if "trainfit/" in key} == told[0]["metrics"]
    assert step == (None if loop == "accelerate" else 60)
    assert "Traceback" not in stderr and "not watched" not in stderr and "not judged" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["lightning.pytorch", "transformers"])
def test_an_error_of_the_user_stays_his_and_the_next_training_is_watched(
    loop: str, tmp_path: Path
) -> None:
    (failed, after), _ = trained(loop, tmp_path, "--raise")
    assert failed["caught"] == "the user's own error" and not failed["logged"]
    assert after["steps"] > 20 and after["folder"] != failed["folder"]
    # Transformers' Trainer does not tell of the error.
    assert (failed["steps"] or 0) < 25


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["lightning.pytorch", "transformers"])
def test_the_ranks_of_a_training_are_one_run(loop: str, tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    told, stderr = trained(loop, tmp_path, launcher=torchrun)
    results = [each for each in told if each["folder"] is not None]
    assert len(told) == 4 and len(results) == 2, stderr
    for each in results:
        assert each["metrics"]["trainfit/step_ms"] > 0
        assert [rank.header.rank for rank in load_run(Path(each["folder"])).ranks] == [0, 1]
        assert stderr.count(f"recorded in {each['folder']};") == 1
    assert results[0]["folder"] != results[1]["folder"]
    assert stderr.count("trainfit watch: ") == 4  # of each training the folder and the answer
    assert [len(each["logged"]) for each in told if each["logged"]] == [1]


# Of the recorder itself the tests of watch say both, and those of the adapters that none raises.
@pytest.mark.slow
def test_nothing_is_recorded_where_the_recorder_is_switched_off(tmp_path: Path) -> None:
    (told,), stderr = trained("accelerate", tmp_path, TRAINFIT_WATCH="0")
    assert told["metrics"] == {} and told["logged"] == []
    assert "trainfit watch" not in stderr and not (tmp_path / "state").exists()


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_disturbs_no_training(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder would be")
    (told,), stderr = trained("accelerate", tmp_path)
    assert told["logged"] == []
    assert "Traceback" not in stderr
