"""Programs before a command: one process as it was, or the true reason why not."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from helpers_commands import parse
from trainfit.plan.command.tunables import CommandError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "before",
    [
        "srun",
        "srun -n1 --gres=gpu:1 -c 8 --mem 32G",
        "srun --ntasks=1 --nodes 1 --exclusive -p gpu -t 1:00:00",
        "srun -N 1 --ntasks-per-node=1 --cpu-bind=none",
        "nice -n 10",
        "ionice -c2 -n 0",
        "ionice -c 3",
        "chrt -b 0",
        "chrt --fifo 50",
        "systemd-run --user --scope -p MemoryMax=20G",
        "systemd-run --scope --slice=train.slice -u fit",
        "xvfb-run -a -s '-screen 0 640x480x24'",
        "xvfb-run --auto-servernum",
        "stdbuf -o L -eL",
        "stdbuf --output=L",
        "numactl -N0 -m 0",
        "timeout --signal=INT 3600",
        "time -p nohup",
        "chrt -b 0 nice -n5 srun --ntasks 1 env A=b",
    ],
)
def test_one_process_is_planned_as_it_is(before: str) -> None:
    command = parse(f"{before} python train.py --lr 1")
    assert (command.name, command.target().args) == ("train.py", ("--lr", "1"))
    assert shlex.split(command.line()) == shlex.split(f"{before} python train.py --lr 1")
    assert command.words[command.program_at] == "python"
    joined = [word for each in command.wrappers() for word in each]
    assert joined == [word for word in shlex.split(before) if word != "A=b"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("srun -N2 python train.py", "launcher 'srun' starts 2 processes"),
        ("srun --nodes=2-3 --ntasks-per-node=2 python train.py", "'srun' starts 6 processes"),
        ("srun --ntasks=many python train.py", "--ntasks=many does not say how many tasks"),
        ("srun --multi-prog x", "--multi-prog starts different programs"),
        ("srun -D /tmp python train.py", "srun --chdir /tmp changes the working directory"),
        ("env -C /tmp python train.py", "env --chdir /tmp changes the working directory"),
        ("env -S 'python train.py'", "-S splits a word into a command"),
        ("systemd-run --user python train.py", "without --scope the command is started by"),
        ("taskset -p 1 python train.py", "-p is for a process that runs already"),
        ("horovodrun -np 2 python train.py", "starts the training in its own processes"),
        ("docker run img python train.py", "a container, whose Python and files are not visible"),
        ("sudo -E python train.py", "as another user, with that user's environment"),
        ("ssh host python train.py", "on another machine; run trainfit there"),
        ("sbatch job.sh", "hands the command to a job queue, and runs nothing here"),
        ("bash run.sh", "a shell's script, whose commands are not read"),
        ("sh -c 'python train.py'", "give the training command that it runs"),
        ("pipx run fit", "into an environment for this call only"),
        ("nice -n 5", "no program is named"),
    ],
)
def test_the_reason_of_a_refusal_is_true(line: str, says: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse(line)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_tasks_of_the_allocation_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "8")
    with pytest.raises(CommandError, match="starts 8 processes"):
        parse("srun python train.py")
    assert parse("srun --ntasks=1 python train.py").name == "train.py"
