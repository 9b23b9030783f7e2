"""Commands that a launcher starts: unwrapped to its first process."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers_commands import parse
from helpers_warm import launchers_here
from trainfit.plan.command import wrappers
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.command.tunables import CommandError
from trainfit.results.runs.script import Launched

#: What torchrun sets and scripts read.
RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # no configuration of Accelerate's
    return tmp_path


@pytest.fixture
def asked() -> Iterator[list[list[str]]]:
    """What launchers are asked, in this process."""
    wrappers._ask.cache_clear()
    with launchers_here() as seen:
        yield seen


@pytest.mark.parametrize(
    "line",
    [
        "torchrun train.py --lr 1",
        "torchrun --standalone --nproc-per-node=1 train.py --lr 1",
        "torchrun --nproc_per_node gpu --nnodes 1 train.py --lr 1",
        "OMP_NUM_THREADS=4 nice torchrun --nproc_per_node auto train.py --lr 1",
        "python -m torch.distributed.run --max-restarts 3 train.py --lr 1",
        "torchrun --rdzv-backend c10d --rdzv-endpoint=localhost:0 train.py --lr 1",
    ],
)
def test_torchrun_starts_one_process(asked: list[Any], line: str) -> None:
    command = parse(line)
    assert (command.kind, command.name) == ("script", "train.py")
    assert command.target().args == ("--lr", "1")
    assert command.line() == line
    assert RANKS.items() <= command.environment().items()
    assert command.python == sys.executable
    assert "TORCHELASTIC_USE_AGENT_STORE" not in command.environment()


def test_its_variables_outrank_the_commands(asked: list[Any]) -> None:
    environment = parse("RANK=5 A=1 torchrun train.py").environment()
    assert (environment["RANK"], environment["A"]) == ("0", "1")


def test_torchrun_runs_modules_and_programs(asked: list[Any], folder: Path) -> None:
    command = parse("torchrun -m package.module --x")
    assert (command.kind, command.name, command.target().args) == (
        "module", "package.module", ("--x",),
    )  # fmt: skip
    program = folder / "run.py"
    program.write_text("#!/usr/bin/env python3\n")
    program.chmod(0o755)
    command = parse("torchrun --no-python ./run.py --x")
    assert (command.kind, Path(command.name).name, command.target().args) == (
        "script", "run.py", ("--x",),
    )  # fmt: skip


def test_the_old_launcher_passes_the_rank_as_an_argument(asked: list[Any]) -> None:
    command = parse("python -m torch.distributed.launch train.py --lr {batch_size:1}")
    assert command.target(batch_size="2").args == ("--local-rank=0", "--lr", "2")
    command = parse("python -m torch.distributed.launch --use-env train.py")
    assert command.target().args == ()


def test_tunables_of_the_script_ask_the_launcher_once(asked: list[Any]) -> None:
    command = parse("torchrun train.py --batch {batch_size:8}")
    for batch in ("8", "16", "24"):
        assert command.target(batch_size=batch).args == ("--batch", batch)
        assert command.environment(batch_size=batch)["WORLD_SIZE"] == "1"
    assert len(asked) == 1


def test_accelerate_sets_what_it_is_told(asked: list[Any]) -> None:
    pytest.importorskip("accelerate")
    line = "accelerate launch --num_processes 1 --mixed_precision={amp:bf16} train.py --lr 1"
    command = parse(line)
    assert command.target().args == ("--lr", "1")
    assert command.environment()["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert command.environment(amp="no")["ACCELERATE_MIXED_PRECISION"] == "no"
    assert command.line(amp="no") == line.replace("{amp:bf16}", "no")
    assert "RANK" not in command.environment()


def test_accelerate_reads_its_configuration(asked: list[Any], folder: Path) -> None:
    pytest.importorskip("accelerate")
    (folder / "fsdp.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 1\n"
        "num_machines: 1\nmixed_precision: bf16\nuse_cpu: false\n"
        "fsdp_config:\n  fsdp_version: 2\n"
    )
    environment = parse("accelerate launch --config_file fsdp.yaml train.py").environment()
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert RANKS.items() <= environment.items()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("torchrun --nproc_per_node 2 train.py", "starts 2 processes"),
        ("torchrun --nnodes 1:4 train.py", "starts 4 processes"),
        ("torchrun --nnodes 2 --nproc_per_node 8 train.py", "--nnodes=1 --nproc-per-node=1"),
        ("torchrun --nproc_per_node 2 train.py", "--nproc-per-node=1, with its own batch size"),
        ("accelerate launch --num_processes 4 --multi_gpu train.py", "--num_processes 1"),
        ("torchrun --no-such-option train.py", "unrecognized arguments: --no-such-option"),
        ("torchrun", "rejects its arguments"),
        ("torchrun nowhere.py", "'nowhere.py': there is no such file"),
        ("torchrun --nproc_per_node=many train.py", "rejects its arguments"),
        ("torchrun --nproc_per_node=0 train.py", "--nproc-per-node 0: expected 1 or more"),
        ("torchrun --nproc_per_node=-2 train.py", "--nproc-per-node -2: expected 1 or more"),
        ("torchrun --nnodes=0 --nproc_per_node=2 train.py", "--nnodes 0: expected 1 or more"),
    ],
)
def test_launchers_that_do_not_start_one_process(asked: list[Any], line: str, says: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse(line)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nproc_per_node=8 train.py --lr 1",
        "python -m torch.distributed.run --standalone --nproc-per-node 8 train.py --lr 1",
        "accelerate launch --num_processes 8 train.py --lr 1",
        "accelerate launch --multi_gpu --num_processes 8 train.py --lr 1",
    ],
)
def test_the_first_of_several_processes_is_known(asked: list[Any], line: str) -> None:
    if line.startswith("accelerate"):
        pytest.importorskip("accelerate")
    command = parse_command(shlex.split(line), several=True)
    assert command.processes == 8
    environment = command.environment()
    assert {environment[name] for name in SIZES} == {"8"}
    assert (environment["RANK"], environment["LOCAL_RANK"]) == ("0", "0")
    assert (environment["GROUP_WORLD_SIZE"], environment["MASTER_ADDR"]) == ("1", "localhost")
    assert command.line() == line


def test_a_process_for_each_gpu(asked: list[Any]) -> None:
    command = parse_command(["torchrun", "--nproc_per_node=gpu", "train.py"], several=True)
    assert command.processes == 1
    assert command.on(4).processes == 4
    assert command.on(4).environment()["WORLD_SIZE"] == "4"
    told = parse_command(["torchrun", "--nproc_per_node=2", "train.py"], several=True)
    assert told.on(4).processes == 2


def test_torchruns_threads_give_way_to_the_users(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = ["torchrun", "--nproc_per_node=2", "train.py"]
    assert parse_command(words, several=True).environment()["OMP_NUM_THREADS"] == "1"
    own = parse_command(["OMP_NUM_THREADS=6", *words], several=True)
    assert own.environment()["OMP_NUM_THREADS"] == "6"


def test_an_interpreter_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrappers._ask.cache_clear()
    monkeypatch.setattr(
        wrappers.subprocess,
        "run",
        lambda words, **_: subprocess.CompletedProcess(words, 1, "", "broken"),
    )
    with pytest.raises(CommandError, match="'torchrun' did not report what it starts"):
        parse("torchrun train.py")


@pytest.mark.slow
def test_a_process_of_its_own_reads_the_words() -> None:
    wrappers._ask.cache_clear()
    assert parse("torchrun --nproc-per-node 1 train.py --lr 1").target().args == ("--lr", "1")


def test_answers_are_checked() -> None:
    answer = Launched(words=2, arguments=("--local-rank=0",), variables={"RANK": "0"})
    assert Launched.from_json(answer.to_json()) == answer
    with pytest.raises(ValueError, match="processes"):
        Launched.from_json('{"processes": "2"}')
    assert os.environ.get("RANK") is None


@pytest.mark.parametrize(
    "line",
    [
        "srun --nodes=2 --ntasks-per-node=1 torchrun --nnodes=2 --nproc-per-node=4 train.py",
        "srun -N2 python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 train.py",
        "srun -n 2 accelerate launch --num_machines 2 --num_processes 8 --machine_rank 0 "
        "--main_process_ip a --main_process_port 29500 train.py",
    ],
)
def test_srun_starts_a_launcher_on_each_machine(asked: list[Any], line: str) -> None:
    command = parse_command(shlex.split(line), several=True)
    assert (command.processes, command.machines, command.name) == (8, 2, "train.py")
    assert command.line() == line


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("srun -N2 torchrun --nproc-per-node=4 train.py", "each a torchrun for 1 machine; start"),
        ("srun -n8 torchrun --nnodes=2 train.py", "8 tasks, each a torchrun for 2 machines"),
        ("srun -N2 accelerate launch --num_processes 4 train.py", "--num_machines=2"),
    ],
)
def test_tasks_of_srun_are_as_many_as_the_launchers_machines(
    asked: list[Any], line: str, says: str
) -> None:
    with pytest.raises(CommandError, match=says):
        parse_command(shlex.split(line), several=True)
