"""A simulated rank that is a task of Slurm or of MPI: its number, its GPU, its communicator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

import trainfit
from helpers_cli import trainfit as run
from trainfit.results.runs.trace import Target
from trainfit.scripts.launchers import LaunchInPlace, as_rank
from trainfit.simgpu.communication import mpi
from trainfit.simgpu.device.errors import UnsupportedOperatorError
from trainfit.simgpu.patching import PatchSet

#: Of the first of 8 tasks on 2 machines.
SLURM = {
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_NODELIST": "node[1-2]",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """A copy, which tests may change."""
    with mock.patch.dict(os.environ):
        for name in list(os.environ):
            if "RANK" in name or name.startswith(("SLURM", "OMPI", "CUDA")):
                del os.environ[name]
        yield


def test_another_rank_is_another_task() -> None:
    os.environ.update(SLURM)
    as_rank(6, 8, Target("script", "train.py", ()))
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    assert [os.environ[name] for name in names] == ["6", "2", "1"]
    assert "LOCAL_RANK" not in os.environ and "RANK" not in os.environ


def test_torchrun_in_a_task_of_each_machine() -> None:
    os.environ.update(SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"})
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"})
    as_rank(6, 8, Target("script", "train.py", ()))
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID")
    assert [os.environ[name] for name in names] == ["6", "2", "1", "1", "0"]


def test_hidden_gpus_are_not_there() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    with trainfit.simulate("4x RTX 4090"):
        assert torch.cuda.device_count() == 1
        torch.ones(2, device="cuda:0")
        with pytest.raises(RuntimeError, match=r"CUDA error: invalid device ordinal"):
            torch.cuda.set_device(3)
    for shown in ("", "0,1,2,3", "4,5,6,7"):
        os.environ["CUDA_VISIBLE_DEVICES"] = shown
        with trainfit.simulate("4x RTX 4090"):
            assert torch.cuda.device_count() == 4
            torch.ones(2, device="cuda:3")


@pytest.mark.parametrize(
    ("command", "shell"),
    [
        (["scontrol", "show", "hostnames", "node[1-2]"], False),
        ("scontrol show hostname $SLURM_JOB_NODELIST", True),
    ],
)
def test_hosts_of_the_job_where_slurm_is_not_installed(command: Any, shell: bool) -> None:
    os.environ.update(SLURM)
    patches = PatchSet()
    LaunchInPlace(lambda target: None).install(patches)
    try:
        assert subprocess.check_output(command, shell=shell, text=True) == "node1\nnode2\n"
        assert subprocess.check_output(["echo", "scontrol"], text=True) == "scontrol\n"
    finally:
        patches.restore()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """mpi4py as it is without mpirun."""
    made: Any = ModuleType("mpi4py.MPI")
    made.COMM_WORLD, made.COMM_TYPE_SHARED = "one task", 1
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", made)
    return made


def test_mpi4py_has_the_tasks_of_mpirun(module: Any) -> None:
    patches = PatchSet()
    mpi.install(patches)
    assert module.COMM_WORLD == "one task"
    os.environ.update(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "3"})
    mpi.install(patches)
    world = module.COMM_WORLD
    assert (world.Get_rank(), world.size) == (3, 4)
    assert (world.Split_type(1).rank, world.Split_type(1).size) == (1, 2)
    assert world.allgather("host") == ["host"] * 4 and world.gather("x") is None
    assert world.bcast("address") == "address"
    for call in (lambda: world.bcast(None), lambda: world.allreduce(1), lambda: world.scatter()):
        with pytest.raises(UnsupportedOperatorError, match="what only others have is not known"):
            call()
    patches.restore()
    assert module.COMM_WORLD == "one task"


SCRIPT = """
import os, torch, torch.distributed as dist
rank, ranks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("nccl", rank=rank, world_size=ranks)
torch.cuda.set_device({device})
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).cuda())
optimizer = torch.optim.SGD(model.parameters())
for _ in range(20):
    model(torch.ones(8, 512, device="cuda")).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("brief", "warm")
@pytest.mark.parametrize(
    ("options", "device", "says"),
    [
        ("--ntasks=4", 'int(os.environ["SLURM_LOCALID"])', "4 GPUs (predicted)"),
        (
            "--ntasks=4 --gpus-per-task=1",
            'int(os.environ["SLURM_LOCALID"])',
            "rank 3 fails where rank 0 goes on",
        ),
    ],
)
def test_tasks_are_planned(options: str, device: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(device=device))
    line = ("srun", *options.split(), "python", "train.py")
    done = run("plan", "--no-loader", "--no-remedies", "--gpu=4x T4", "--", *line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert says in " ".join(done.stdout.split())
    assert f"srun {options} python train.py" in done.stdout
    assert "rank 3 fails" in done.stdout or "CUDA" not in done.stdout
