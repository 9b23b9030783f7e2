"""Tasks of Slurm and MPI that are ranks: how many, on how many machines, and what is set."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from helpers_commands import parse, refused
from trainfit.plan.command.parsing import Command, parse_command
from trainfit.plan.command.prefix import words_to_start
from trainfit.plan.launch_line import launch

#: What Open MPI 5.0.11's mpirun set for the first of two (`mpirun -np 2 env`).
OPEN_MPI = {
    **{f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK")},
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "hosts").write_text("# two machines\na slots=4\nb slots=4\n")
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("SLURM", "OMPI", "PMI", "MASTER")):
            monkeypatch.delenv(name)
    return tmp_path


def several(line: str) -> Command:
    return parse_command(shlex.split(line), several=True)


@pytest.mark.parametrize(
    ("before", "processes", "machines"),
    [
        ("srun -n 8", 8, 1),
        ("srun --ntasks=8 --gres=gpu:8 --cpus-per-task 12", 8, 1),
        ("srun -N 2 --ntasks-per-node=8", 16, 2),
        ("srun -N2 -n16", 16, 2),
        ("srun --ntasks 16 --ntasks-per-node 8", 16, 2),
        ("srun -N2", 2, 2),
        ("nice srun -n 2 env A=b", 2, 1),
        ("mpirun -np 8", 8, 1),
        ("mpirun -n 8 --bind-to none -map-by slot -mca pml ob1 -mca btl ^openib -x PATH", 8, 1),
        ("mpirun --allow-run-as-root -np 8 -H a:4,b:4", 8, 2),
        ("mpirun -np 2 -H a:4,b:4", 2, 1),
        ("mpirun -np 8 --hostfile hosts", 8, 2),
        ("mpirun --hostfile hosts", 8, 2),
        ("mpirun -H a,b -N 4", 8, 2),
        ("mpiexec -n 16 -ppn 8 -genv NCCL_DEBUG INFO", 16, 2),
        ("orterun -np 2", 2, 1),
    ],
)
def test_so_many_tasks_on_so_many_machines(before: str, processes: int, machines: int) -> None:
    line = f"{before} python train.py --lr 1"
    command = several(line)
    assert (command.processes, command.machines, command.name) == (processes, machines, "train.py")
    assert command.target().args == ("--lr", "1")
    assert shlex.split(command.line()) == shlex.split(line)


def test_slurm_sets_what_its_tasks_read() -> None:
    environment = several("srun -N 2 --ntasks-per-node=4 -c 8 python train.py").environment()
    wanted = {
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8",
        "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_CPUS_PER_TASK": "8", "MASTER_ADDR": "localhost",
    }  # fmt: skip
    assert wanted.items() <= environment.items()
    assert "RANK" not in environment and "CUDA_VISIBLE_DEVICES" not in environment
    alone = parse("srun --export=ALL,A=b python train.py").environment()
    assert (alone["SLURM_NTASKS"], alone["SLURM_PROCID"], alone["A"]) == ("1", "0", "b")
    assert "SLURM_NTASKS_PER_NODE" not in alone


@pytest.mark.parametrize(
    ("options", "visible"),
    [
        ("--gpus-per-task=1", "0"),
        ("--gpus-per-task=a100:1", "0"),
        ("--gpu-bind=single:1", "0"),
        ("--gpus-per-task=1 --gpu-bind=none", None),
        ("--gpus-per-task=2", None),
        ("--gres=gpu:8", None),
    ],
)
def test_a_task_that_sees_one_gpu(options: str, visible: str | None) -> None:
    environment = several(f"srun -n 8 {options} python train.py").environment()
    assert environment.get("CUDA_VISIBLE_DEVICES") == visible


def test_mpi_sets_what_its_tasks_read() -> None:
    environment = several("mpirun -np 2 -x A=b -x C=d=e -x PATH python train.py").environment()
    assert OPEN_MPI.items() <= environment.items()
    assert (environment["A"], environment["C"]) == ("b", "d=e") and "PATH" not in environment
    intel = several("mpiexec -n 4 -ppn 2 -genv A b python train.py").environment()
    assert (intel["PMI_RANK"], intel["PMI_SIZE"], intel["MPI_LOCALNRANKS"]) == ("0", "4", "2")
    assert intel["A"] == "b" and "OMPI_COMM_WORLD_RANK" not in intel


def test_a_meeting_place_of_the_users_own_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    before = several("MASTER_ADDR=head srun -n 2 python train.py").environment()
    assert (before["MASTER_ADDR"], before["MASTER_PORT"]) == ("head", "29500")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert "MASTER_PORT" not in several("srun -n 2 python train.py").environment()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("mpirun python train.py", "it does not say how many processes it starts; write -np 8"),
        ("mpirun -np many python train.py", "does not say how many processes"),
        ("mpirun -np 0 python train.py", "does not say how many processes"),
        ("mpirun -np 2 python train.py : -np 2 python b.py", "':' starts different programs"),
        ("mpirun -wdir /tmp -np 2 python train.py", "mpirun --wdir /tmp changes the working"),
        ("srun -n 4 python train.py", "which only `trainfit plan` and `trainfit simulate` take"),
        ("srun -n4 python train.py", "--ntasks=1 --nodes=1, with its own batch size"),
        ("mpirun -np 4 python train.py", "-np 1, with its own batch size"),
        ("srun --ntasks=0 python train.py", "--ntasks=0 does not say how many tasks"),
        ("mpirun -np 2", "no program is named"),
    ],
)
def test_what_is_refused(line: str, says: str) -> None:
    assert says in refused(line)


def test_cores_are_those_of_the_tasks() -> None:
    command = parse("mpirun -np 1 -x A=b python train.py")
    made = launch(command, {}, {"X": "y"})
    assert made.line == "X=y mpirun -np 1 -x A=b python train.py"
    assert words_to_start(["srun", "-n", "4", "python", "train.py"])[1] == ""
