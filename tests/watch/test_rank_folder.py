"""The ranks of a job agree on a folder, by what their launcher says, and without a word."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers_cli import environment
from trainfit.results.files.errors import ResultFileError
from trainfit.results.runs.watched import load_run
from trainfit.watch import in_script, rank_folder
from trainfit.watch.judge import judge
from trainfit.watch.rank_folder import RankFolder, join, lowest_rank, unused_folder
from trainfit.watch.recorder.rank_variables import local_rank, world

STARTED = 1000.0, 10.0
TORCHRUN = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def of_no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if "RANK" in name or name.startswith(
            ("SLURM_", "PMI", "MASTER_", "WORLD_", "TORCHELASTIC")
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    # Imported by other tests: a script that trainfit runs itself is not recorded.
    monkeypatch.delitem(sys.modules, in_script._OWN_RUNS, raising=False)
    yield monkeypatch


def joined(job: pytest.MonkeyPatch, rank: int, folder: Path | None = None) -> RankFolder:
    job.setenv("RANK", str(rank))
    found = join(folder, "train.py", STARTED if rank == 0 else (2000.0, 20.0))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, None)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8, 1)),
        # mpirun in a job of Slurm: a task a machine, which starts the ranks.
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "6",
                "OMPI_COMM_WORLD_LOCAL_RANK": "2",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "1",
            },
            (5, 6, 2),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, None)),
        ({"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1"}, (9, 16, 1)),
        ({"RANK": "one", "WORLD_SIZE": "2"}, (0, 1, None)),
    ],
)
def test_the_rank_is_what_the_launcher_says(
    variables: dict[str, str],
    expected: tuple[int, int, int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (*world(), local_rank()) == expected


def test_ranks_share_a_folder_and_the_beginning_of_their_times(job: pytest.MonkeyPatch) -> None:
    first, second = joined(job, 0), joined(job, 1)
    assert first.path == second.path and first.path.is_dir()
    name = first.path.name
    assert name.startswith("train-") and f"-{socket.gethostname()}-" in name
    assert first.started == second.started == STARTED
    assert (first.is_first, second.is_first) == (True, False)
    assert lowest_rank(first.path) == 0


def test_each_training_of_a_process_has_a_folder_of_its_own(job: pytest.MonkeyPatch) -> None:
    before = joined(job, 0), joined(job, 1)
    before[0].end()
    first = joined(job, 0)  # while rank 1 still ends
    before[1].end()
    second = joined(job, 1)
    assert first.path == second.path != before[0].path


def test_a_rank_that_trained_alone_before_finds_the_others(job: pytest.MonkeyPatch) -> None:
    alone = joined(job, 0)
    alone.end()
    first, second = joined(job, 0), joined(job, 1)
    assert first.path == second.path != alone.path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER_PORT", "29501"),
        ("WORLD_SIZE", "3"),
        ("TORCHELASTIC_RESTART_COUNT", "1"),
        ("SLURM_STEP_ID", "1"),
    ],
)
def test_another_job_has_another_folder(job: pytest.MonkeyPatch, name: str, value: str) -> None:
    first = joined(job, 0)
    job.setenv(name, value)
    assert joined(job, 1).path != first.path


def test_another_machine_has_another_folder(job: pytest.MonkeyPatch) -> None:
    first = joined(job, 0)
    job.setattr(rank_folder, "_machine", lambda: "another")
    assert joined(job, 1).path != first.path


def test_a_folder_whose_processes_are_gone_is_not_taken(job: pytest.MonkeyPatch) -> None:
    """A later run from the same shell, with the same port."""
    code = (
        "from trainfit.watch.rank_folder import join; "
        "print(join(None, 'train.py', (1.0, 1.0)).path)"
    )
    job.setenv("RANK", "0")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_dir()
    assert joined(job, 1).path != Path(done.stdout.strip())


def test_a_folder_that_is_named(job: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = tmp_path / "run"
    before = joined(job, 0, wanted), joined(job, 1, wanted)
    assert {each.path for each in before} == {wanted}
    for each in before:
        each.end()
    assert {joined(job, rank, wanted).path for rank in (1, 0)} == {tmp_path / "run-2"}
    assert unused_folder(wanted) == tmp_path / "run-3"


def test_a_process_that_is_alone_has_no_ranks() -> None:
    assert join(None, "train.py", STARTED) is None


def test_who_still_records_is_waited_for_and_said(job: pytest.MonkeyPatch) -> None:
    first, second = joined(job, 0), joined(job, 1)
    assert first.wait(0.05) == [1]
    second.end()
    assert first.wait(60.0) == []


def test_a_result_says_which_rank_still_records(
    job: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = joined(job, 0), joined(job, 1)
    job.setattr(in_script, "_OTHERS_S", 0.05)
    watching = in_script.Watching(first.path, lambda: None, first)
    for stopped in (False, True):
        with pytest.raises(ResultFileError):  # none has trained
            watching.result()
        assert ("rank 1 still records" in capsys.readouterr().err) is stopped
        watching.stop()


def test_a_launcher_that_is_not_known_needs_a_port(job: pytest.MonkeyPatch) -> None:
    job.setattr(rank_folder, "_launcher", lambda: None)
    assert joined(job, 0).path == joined(job, 1).path
    job.delenv("MASTER_PORT")
    assert joined(job, 0).path != joined(job, 1).path


def test_a_damaged_file_is_as_none(job: pytest.MonkeyPatch) -> None:
    first = joined(job, 0)
    (first.path / "ranks.jsonl").write_text('{"job": 3}\nnonsense\n')
    assert joined(job, 1).path != first.path


def test_ranks_that_cannot_agree_record_each_by_itself(
    job: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.setenv("RANK", "1")
    job.setattr(rank_folder, "_LOCK_S", 0.05)
    job.setattr(in_script.process, "from_environment", lambda: None)
    job.setattr(in_script, "_sampler", lambda *_: None)
    folder = tmp_path / "run"
    with rank_folder._locked(folder / "ranks.jsonl"), in_script.watch(folder) as run:
        assert run.folder == folder
    said = capsys.readouterr().err
    assert "each rank records into a folder of its own: Resource" in said and "recorded in" in said


def test_a_folder_that_cannot_be_written_to_is_said_once(
    job: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").write_text("a file where the folder would be")
    for rank in ("0", "1"):
        job.setenv("RANK", rank)
        job.setenv("LOCAL_RANK", rank)
        assert in_script.watch().folder is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trainfit watch: not recorded: ")


TRAINS = """
import os, sys, time, torch, trainfit
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for training in range(2):
    with trainfit.watch() as run:
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
        samples = run.folder / "processes.bin"
        until = time.monotonic() + 300 * (training == 0)
        while time.monotonic() < until and not (samples.exists() and samples.stat().st_size):
            time.sleep(0.02)
    if dist.get_rank() == 0:
        ranks = [(each.rank, each.steps) for each in run.result().ranks]
        sys.stdout.write(f"{run.folder} {ranks}\\n")
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    torchrun = ("torch.distributed.run", "--nproc_per_node=2", "--standalone")
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, str(script)],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    stderr = done.stderr
    said = [line for line in stderr.splitlines() if line.startswith("trainfit watch: ")]
    folders = sorted((tmp_path / "state" / "trainfit" / "watch").glob("train-*"))
    assert len(folders) == 2 and stderr.count("recorded in") == len(said) == 2
    for folder, line in zip(folders, done.stdout.splitlines(), strict=True):
        assert line == f"{folder} [(0, 8), (1, 8)]" and str(folder) in stderr
        run = load_run(folder)
        assert [each.header.ending for each in run.ranks] == ["finished"] * 2
        assert len({each.header.started_monotonic for each in run.ranks}) == 1
        assert not any("ranks were recorded" in note for note in judge(run).notes)
    # The sampler has seen both, though only one of them has started it.
    run = load_run(folders[0])
    assert {each.header.pid for each in run.ranks} <= set(run.processes["pid"].tolist())
