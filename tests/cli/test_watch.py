"""`trainfit watch` on the command line: placeholders, what is typed next, results shown."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers_cli import ROOT, error_line, json_of, trainfit
from helpers_watch import run, run_on_cpu
from tests.watch.test_compare import noise, save
from tests.watch.test_compare import run as run_of
from trainfit.results.batch import NoiseResult
from trainfit.results.runs.watched import load_run
from trainfit.watch.judge import judge


def test_placeholders_run_with_their_present_values(tmp_path: Path) -> None:
    """The command that is kept has them: it is what can be changed."""
    code = "import sys; print(sys.argv[1:])"
    words = ["--n={num_workers:4}", "{pin_memory:True}", "{{amp:x}}", "{other}"]
    done = trainfit(
        "watch", "--quiet", "--folder", tmp_path / "run", "--output", tmp_path / "r.json",
        "--", sys.executable, "-c", code, *words, cwd=tmp_path, PYTHONUNBUFFERED="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--n=4', 'True', '{amp:x}', '{other}']\n"
    assert "{num_workers:4}" in load_run(tmp_path / "run").header.command


def test_a_placeholder_that_cannot_be_filled_is_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    done = trainfit("watch", "--", "touch", "x", "{num_workers}", cwd=tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "has no current value; write {num_workers:VALUE}" in error_line(done)


@pytest.mark.parametrize(
    ("command", "following"),
    [
        ("python train.py '--workers={num_workers:4}'", "watch --verify"),
        ("python train.py '{{num_workers:4}}'", "loader"),
        ("python train.py '{batch_size:8}'", "loader"),
        ("python train.py", "loader"),
    ],
)
def test_a_change_that_the_command_can_be_given_is_tried_next(command: str, following: str) -> None:
    slow: dict[str, Any] = {"input_s": 0.1, "fetches": {"fetch_s": 0.8, "cpu_s": 0.7}, "queued": 0}
    result = judge(run(header={"command": command}, **slow))
    assert "num_workers" in result.findings[0].fix.settings
    assert result.next_command == f"trainfit {following} -- {command}"


def test_a_result_is_shown_as_the_run_is_when_it_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", run_on_cpu(input_s=0.1))
    for option in ([], ["--explain"], ["--json"]):
        read = trainfit("watch", "--read", folder, *option, "--output", "r.json", cwd=tmp_path)
        shown = trainfit("show", *option, "r.json", cwd=tmp_path)
        assert shown.returncode == 0 == read.returncode, shown.stderr
        assert shown.stdout == read.stdout and shown.stdout.strip()


def test_results_are_compared_by_the_runs_that_they_are_of(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    for name, factor in (("a", 1.0), ("b", 1.3)):
        save(tmp_path / name, run_of(factor * noise(random, 100), pid=ord(name)))
        trainfit("watch", "--read", name, "--output", f"{name}.json", cwd=tmp_path)
    done = trainfit("compare", "--json", "a.json", "b", cwd=tmp_path)
    assert json_of(done) == json_of(trainfit("compare", "--json", "a", "b.json", cwd=tmp_path))
    assert json_of(done)["verdict"] == "slower"
    # From another folder, too: the run lies next to its result.
    (tmp_path / "elsewhere").mkdir()
    there = trainfit("compare", "../a.json", "../b.json", cwd=tmp_path / "elsewhere")
    assert there.returncode == 1, there.stderr

    (tmp_path / "b").rename(tmp_path / "moved")
    save(tmp_path / "b", run_of(noise(random, 100), pid=7))  # another run in its place
    gone = trainfit("compare", "a.json", "b.json", cwd=tmp_path)
    assert gone.returncode == 2
    assert "'b.json' has medians, and a comparison needs every step" in error_line(gone)
    text = json.dumps(json_of(done))
    (tmp_path / "c.json").write_text(text)
    other = trainfit("compare", "a.json", "c.json", cwd=tmp_path)
    assert "give a file that `trainfit watch --output` wrote" in error_line(other)
    shown = trainfit("show", "c.json", cwd=tmp_path)
    assert shown.stdout == trainfit("compare", "a", "moved", cwd=tmp_path).stdout.replace(
        "moved", "b"
    )


_TRAIN = """
import atexit, gc, torch
atexit.register(gc.freeze)  # PyTorch is not taken apart, which takes longer than the training
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(60):
    for _ in range(2):
        x = torch.randn(4, 8)
        loss = torch.nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()) / 2
        loss.backward()
        print(loss.item().hex())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_noise_scale_is_measured_and_changes_no_loss(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    alone = io.StringIO()
    with contextlib.redirect_stdout(alone):
        exec(_TRAIN, {})
    options = ["watch", "--quiet", "--noise-scale", "--folder", "run"]
    words = [*options, "--", sys.executable, "train.py"]
    done = trainfit(*words, cwd=tmp_path, PYTHONUNBUFFERED="1")
    assert done.returncode == 0 and done.stdout == alone.getvalue() and len(done.stdout) > 100
    assert "noise scale" in done.stderr and "measured on micro-batches" in done.stderr
    result = NoiseResult.load(tmp_path / "run" / "noise-rank0.json")
    assert result.batch_size == 8 and result.steps_seen > 50 and result.steps_used > 2


def test_a_runs_noise_scale_is_shown_with_what_explains_it(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", run_on_cpu())
    words = ("watch", "--read", folder)
    assert "noise scale" not in trainfit(*words, cwd=tmp_path).stdout
    file = ROOT / "tests" / "fixtures" / "results" / "noise-scale-v1.json"
    shutil.copy(file, folder / "noise-rank0.json")
    shown = trainfit(*words, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert f"trainfit batch explain {folder}/noise-rank0.json --to BATCH" in shown.stdout
    assert len(json_of(trainfit(*words, "--json", cwd=tmp_path))) > 3


@pytest.mark.parametrize("words", [("--read", "run"), ("--verify", "--", "python", "x.py")])
def test_the_noise_scale_needs_a_whole_run(words: tuple[str, ...], tmp_path: Path) -> None:
    done = trainfit("watch", "--noise-scale", *words, cwd=tmp_path)
    assert done.returncode == 2 and "measures a whole run" in error_line(done)


def test_one_run_of_several_machines_is_read_from_all_their_folders(tmp_path: Path) -> None:
    def saved(name: str, rank: int, world_size: int = 2, **columns: Any) -> Path:
        header = {"rank": rank, "world_size": world_size, "host": name}
        return save(tmp_path / name, run_on_cpu(header=header, **columns))

    first, second = saved("a", 0), saved("b", 1, input_s=0.1)
    done = trainfit("watch", "--json", "--read", second, "--read", first, cwd=tmp_path)
    document = json_of(done)
    assert [(each["rank"], each["host"]) for each in document["ranks"]] == [(0, "a"), (1, "b")]
    assert ("straggler", 1) in {(each["kind"], each["rank"]) for each in document["findings"]}
    for other, says in (
        (saved("c", 0), "rank 0 is also in"),
        (saved("d", 2, 3), "its run has 3 and not 2 ranks"),
        (tmp_path / "e", "there is no such folder"),
    ):
        refused = trainfit("watch", "--read", first, "--read", other, cwd=tmp_path)
        assert refused.returncode == 2 and says in error_line(refused)
