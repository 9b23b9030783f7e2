"""What ``trainfit plan`` recommends, called as a user calls it, from several starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers_cli import SCRIPTS, error_line, json_of, trainfit
from trainfit.hardware import find_gpu
from trainfit.plan import confirmation, planner
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.first_run import Settings
from trainfit.plan.sizing.curve import batch_sizes

pytestmark = pytest.mark.usefixtures("warm")

STARTS = (1, 7, 100)


def plan(script: str, *words: str, cwd: Path, gpu: str = "RTX 4060") -> dict[str, Any]:
    command = ("python", str(SCRIPTS / script), *words)
    done = trainfit("plan", "--gpu", gpu, "--no-loader", "--json", "--", *command, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json_of(done)


def shorter(script: str, old: str, new: str, folder: Path) -> str:
    """A copy of the script with less to do: a run looks for an evaluation until it ends."""
    text = (SCRIPTS / script).read_text()
    assert old in text
    (folder / script).write_text(text.replace(old, new))
    return str(folder / script)


def place(batch: int) -> int:
    """On the grid of what is recommended: 1, 2, 3, 4, then multiples of 8."""
    return sum(size < batch for size in batch_sizes(1 << 20) if size <= 4 or size % 8 == 0)


@pytest.mark.parametrize("start", [3, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("brief")
def test_a_tiny_data_set_bounds_the_batch_and_memory_has_its_own_limit(
    start: int, tmp_path: Path
) -> None:
    """64 samples: "recommended 229376" it was."""
    result = plan("tiny.py", f"--batch_size={{batch_size:{start}}}", cwd=tmp_path)
    now = result["now"]
    assert now["limits"]["data_set"] == 64
    # An epoch of two steps: what one step an epoch takes cannot be told from a run. One of few
    # steps as it is gets no fewer.
    best = 32 if start > 64 else start
    assert now["recommended_batch"] == best and f"--batch_size={best}" in result["launch"]
    assert now["limits"]["epoch_steps"] == (2 if start > 64 else None)
    assert now["largest_batch"] > 64 and not now["limits"]["at_least"]
    asked = [note for note in result["notes"] if "batches of 100 were requested" in str(note)]
    assert len(asked) == (start == 100)


RAYS = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--N_rand", type=int, default=10)
args = parser.parse_args()
model = torch.nn.Linear(3, 4).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(4):
    points = torch.randn(args.N_rand, 64, 3, device="cuda").reshape(-1, 3)
    raw = torch.cat([model(chunk) for chunk in points.split(256)])
    loss = raw.reshape(args.N_rand, 64, 4).mean(1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_rays_whose_points_the_model_is_given_in_chunks(tmp_path: Path) -> None:
    """A NeRF's: 256 samples in each step, and no batch size, it was."""
    (tmp_path / "train.py").write_text(RAYS)
    words = ("plan", "--gpu", "RTX 4060", "--no-loader", "--json", "--", "python", "train.py")
    done = trainfit(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json_of(done)
    assert (result["now"]["batch_size"], result["step"]["effective_batch"]) == (10, 10)
    step = result["speed"]["now"]
    assert step["samples_per_s"] == pytest.approx(10 / step["seconds"], rel=1e-3)
    assert result["now"]["largest_batch"] >= 20


def test_a_batch_above_the_data_set_with_drop_last_is_told(tmp_path: Path) -> None:
    command = ("python", str(SCRIPTS / "tiny.py"), "--batch_size={batch_size:100}", "--drop_last")
    done = trainfit("plan", "--gpu", "RTX 4060", "--no-loader", "--", *command, cwd=tmp_path)
    assert done.returncode == 2
    line = error_line(done)
    assert "the data set has 64 samples, fewer than one batch of 100 with drop_last" in line
    assert "write {batch_size:64} (or less) into the command" in line


@pytest.mark.slow
def test_the_recommended_batch_makes_a_step_with_drop_last(tmp_path: Path) -> None:
    result = plan("tiny.py", "--batch_size={batch_size:8}", "--drop_last", cwd=tmp_path)
    assert result["now"]["recommended_batch"] <= 64
    done = trainfit("simulate", "--gpu", "RTX 4060", "--", *result["launch"].split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("train.py", ["--batch_size={batch_size:START}", "--samples=20000"]),
        ("train.py", ["--batch_size={batch_size:START}", "--samples=20000", "--amp={amp:true}"]),
        ("contrastive.py", ["--batch_size={batch_size:START}"]),
        ("padded.py", ["--batch_size={batch_size:START}"]),
    ],
    ids=["train", "amp", "contrastive", "padded"],
)
def test_the_recommendation_does_not_depend_on_the_start(
    script: str, words: list[str], tmp_path: Path
) -> None:
    """Of data sets whose epochs keep their steps at any batch size that a GPU would like."""
    found = {}
    for start in STARTS:
        own = [word.replace("START", str(start)) for word in words]
        result = plan(script, *own, cwd=tmp_path)
        choice = result["amp_choice"] or {}
        chosen = choice.get("configuration") or result["now"]
        found[start] = chosen["recommended_batch"], choice.get("value")
    places = [place(batch) for batch, _ in found.values()]
    assert max(places) - min(places) <= 1, found
    assert len({value for _, value in found.values()}) == 1, found


@pytest.mark.slow
def test_the_start_in_the_script_does_not_matter(tmp_path: Path) -> None:
    """plain.py has its batch size written in: it stays, and a larger one is an option, by the
    steps that an epoch keeps."""
    text = (SCRIPTS / "plain.py").read_text()
    found = []
    for start in (1, 3):
        (tmp_path / "plain.py").write_text(text.replace("batch_size=16", f"batch_size={start}"))
        command = ("python", "plain.py")
        done = trainfit(
            "plan", "--gpu", "RTX 4060", "--no-loader", "--json", "--", *command, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        result = json_of(done)
        assert result["now"]["recommended_batch"] == start
        (part,) = [part for part in result["launch_parts"] if part["status"] == "option"]
        found.append(int(part["value"]))
    assert found == [8, 8]  # 512 samples in 50 steps are batches of 10 at most


@pytest.mark.slow
def test_padded_batches_are_sized_for_the_longest(tmp_path: Path) -> None:
    result = plan("padded.py", "--batch_size={batch_size:16}", "--texts=500", cwd=tmp_path)
    shapes, now = result["shapes"], result["now"]
    assert (shapes["looked_at"], shapes["samples"]) == (500, 500)
    assert shapes["median_elements"] < shapes["longest_elements"] <= 256
    # Most batches of 16 are padded to about the longest; lengths that are no multiple of 8 need
    # slightly more in places.
    assert shapes["longest"]["allocated_bytes"] > 0.98 * now["memory"]["allocated_bytes"]
    assert result["basis"] == "two traces"
    assert now["largest_batch"] > 16


def leaking(what: str, folder: Path) -> dict[str, Any]:
    """The plan of a script that keeps ``what`` of each step."""
    text = (SCRIPTS / "tiny.py").read_text()
    text = text.replace("optimizer.zero_grad()", f"optimizer.zero_grad(); kept.append({what})")
    text = text.replace("optimizer = ", "kept = []\noptimizer = ")
    (folder / "leak.py").write_text(text)
    command = ("python", "leak.py", "--batch_size={batch_size:8}")
    done = trainfit(
        "plan", "--gpu", "RTX 4060", "--no-loader", "--json", "--", *command, cwd=folder
    )
    result = json_of(done)
    assert result["pattern"]["course"] == "growing"
    assert done.returncode == (0 if result["recommended"] else 1), done.stderr
    return result


@pytest.mark.slow
def test_the_losses_that_are_kept_do_not_matter(tmp_path: Path) -> None:
    """512 bytes a step: half a gigabyte in a million of them, less than the headroom."""
    result = leaking("batch.mean().cuda()", tmp_path)
    assert result["pattern"]["growth_bytes_per_step"] == 512
    assert result["now"]["recommended_batch"] == 8  # an epoch of 64 samples has few steps


@pytest.mark.usefixtures("brief")
def test_none_is_recommended_while_memory_grows(tmp_path: Path) -> None:
    result = leaking("batch.cuda()", tmp_path)
    assert result["now"]["recommended_batch"] is None
    assert "no batch size is recommended while memory grows" in result["now"]["limits"]["reason"]
    assert result["launch"].endswith("--batch_size=8")


@pytest.mark.slow
def test_an_emulated_bfloat16_is_not_asked_for(tmp_path: Path) -> None:
    words = ("--batch_size={batch_size:8}", "--amp={amp:false}", "--width=1024")
    choice = plan("train.py", *words, cwd=tmp_path, gpu="T4")["amp_choice"]
    assert (choice["value"], choice["configuration"]) == ("false", None)
    assert "float16 with a GradScaler would give" in choice["by_hand"]
    assert "train.py:70" in choice["place"] and "train.py:55" in choice["line"]  # and the scaler


@pytest.mark.slow
def test_a_rule_that_does_not_hold_at_the_recommended_batch_is_found_out(tmp_path: Path) -> None:
    """From a batch of 64 on the network does more: a rule from 8 and 16 knows nothing of it."""
    found = {}
    for start in (8, 96):
        result = plan("branching.py", f"--batch_size={{batch_size:{start}}}", cwd=tmp_path)
        found[start] = result["now"]["recommended_batch"]
        check = result["batch_check"]
        assert (check["batch_size"], check["reason"]) == (found[start], "")
        assert abs(check["peak_share"]) <= 0.01 and abs(check["step_share"]) <= 0.03
        told = [note for note in result["notes"] if "does not hold at" in note]
        assert len(told) == (start == 8), result["notes"]
    assert abs(place(found[8]) - place(found[96])) <= 1
    assert min(found.values()) >= 64


@pytest.mark.slow
def test_a_recommended_batch_that_takes_long_to_load_is_said_not_to_be_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirmation, "_LOADING_S", 0.0)
    monkeypatch.chdir(tmp_path)
    words = ("python", str(SCRIPTS / "branching.py"), "--batch_size={batch_size:8}")
    gpu = find_gpu("RTX 4060")
    result = planner.simulated(parse_command(words), gpu, Settings()).result
    check = result.batch_check
    assert check is not None and check.batch_size == result.now.recommended_batch
    assert check.reason.endswith("s to load here") and check.peak_share is None
    assert any(f"{check.batch_size} was not simulated" in note for note in result.notes)


@pytest.mark.usefixtures("brief")
def test_a_batch_size_that_is_a_constant_of_the_script(tmp_path: Path) -> None:
    """Other batch sizes were not known."""
    result = plan(shorter("own_batches.py", "steps = 1000", "steps = 60", tmp_path), cwd=tmp_path)
    now = result["now"]
    assert now["batch_size"] == 24 and now["largest_batch"] > 24
    assert now["recommended_batch"] == 24
    (part,) = [part for part in result["launch_parts"] if part["status"] == "option"]
    assert part["place"].endswith("own_batches.py:6") and int(part["value"]) > 24
    assert part["line"] == f"batch_size = {part['value']}"


@pytest.mark.usefixtures("brief")
def test_parameters_that_are_updated_by_hand_and_a_batch_behind_the_time(tmp_path: Path) -> None:
    """Its end was waited for, and that it makes no optimizer step was an error; the batch size was
    taken for the 35 time steps."""
    result = plan(shorter("by_hand.py", "while True", "for _ in range(2)", tmp_path), cwd=tmp_path)
    now = result["now"]
    assert now["batch_size"] == 20 and result["steps"] >= 3
    (part,) = [part for part in result["launch_parts"] if part["status"] == "option"]
    assert now["recommended_batch"] == 20 and int(part["value"]) > 20 and not part["place"]
    said = [note for note in result["notes"] if "a backward pass counts as a step" in str(note)]
    assert len(said) == 1
