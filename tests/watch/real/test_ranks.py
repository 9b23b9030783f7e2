"""Real ranks of torchrun on gloo, one of which has more to do: who is slow, why, who waits."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import environment, json_of, trainfit

#: Rank 1 needs long for each of its samples ("sleep"), or has more of them ("more"), or computes
#: longer ("length"); "manual" averages gradients by itself.
SCRIPT = """
import sys, time, torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1:]
batch = 8 if rank and "more" in how else 2
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 45 * batch
    def __getitem__(self, index):
        time.sleep(0.03 if rank and "sleep" in how else 0.01 if "more" in how else 0.0)
        return torch.ones(64)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
    def forward(self, x):
        if rank and "length" in how:
            time.sleep(0.06)
        return self.layer(x)
model = Model()
manual = "manual" in how
if not manual:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x in torch.utils.data.DataLoader(Data(), batch_size=batch):
    optimizer.zero_grad()
    model(x).mean().backward()
    if manual:
        for each in model.parameters():
            dist.all_reduce(each.grad)
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def launch(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *words]


def watched(folder: Path, *how: str) -> dict[str, Any]:
    command = launch("--nproc_per_node=2", "train.py", *how)
    done = trainfit("watch", "--quiet", "--json", "--folder", "run", "--", *command, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json_of(done)


def straggler(document: dict[str, Any]) -> dict[str, Any]:
    (found,) = [each for each in document["findings"] if each["kind"] == "straggler"]
    return found


# By made-up rows rules/test_each_rank.py has the same of the rule, recorder's tests of its rows.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        (("sleep",), "its data: most of the difference is its DataLoader, with as many samples"),
        (("sleep", "manual"), "its data: most of the difference is its DataLoader"),
        (("more",), "its data: it has more samples in a step than the others"),
        (("length",), "its computation: most of the difference is the forward pass"),
    ],
    ids=["sleep", "manual", "more", "length"],
)
def test_the_slow_rank_its_cause_and_who_waits_are_told(
    folder: Path, how: tuple[str, ...], cause: str
) -> None:
    document = watched(folder, *how)
    found = straggler(document)
    assert found["rank"] == 1 and found["cause"].startswith(cause)
    # Rank 0, whose figures these are, waits for batches as well where it sleeps, too.
    assert document["limit"] == "communication" or "more" in how
    # What it is behind by is most of the step, which it spends elsewhere than the other.
    evidence = {each["what"]: each["value"] for each in found["evidence"]}
    assert evidence["own work of rank 1"] > 2 * evidence["own work of the others, median"]
    assert evidence["the others in collectives, median"] > 2 * evidence["in collectives"]
    ranks = {each["rank"]: each for each in document["ranks"]}
    assert ranks[0]["collectives_share"] > 2 * ranks[1]["collectives_share"]
    assert [ranks[n]["samples_per_step"] for n in (0, 1)] == [2, 8 if "more" in how else 2]


@pytest.mark.slow
def test_alike_ranks_have_no_straggler_and_calls_are_counted(folder: Path) -> None:
    document = watched(folder, "manual")
    headers = document["header"]["communication"]
    assert headers["gradients"] is None
    # Two parameters in each of the steps that were recorded in detail, which are not few.
    assert headers["calls"] > 20 and headers["calls"] % 2 == 0


@pytest.mark.slow
def test_ranks_of_two_machines_are_judged_together(folder: Path) -> None:
    """Each machine is watched by itself, into a folder of its own."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    started = []
    for node in (0, 1):
        where = ("--nnodes=2", f"--node_rank={node}", "--master_addr=127.0.0.1")
        command = launch(*where, f"--master_port={port}", "--nproc_per_node=1", "train.py", "sleep")
        words = ["-m", "trainfit", "watch", "--quiet", "--folder", f"machine{node}", "--", *command]
        started.append(
            subprocess.Popen([sys.executable, *words], cwd=folder, env=environment(),
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )  # fmt: skip
    assert [each.wait(timeout=240) for each in started] == [0, 0]
    alone = json_of(trainfit("watch", "--json", "--read", "machine0", cwd=folder))
    assert "1 of 2 ranks were recorded" in alone["notes"]
    words = ("watch", "--json", "--read", "machine1", "--read", "machine0")
    document = json_of(trainfit(*words, cwd=folder))
    found = straggler(document)
    assert found["rank"] == 1 and found["cause"].startswith("its data")
    ranks = {each["rank"]: each for each in document["ranks"]}
    assert ranks[0]["collectives_share"] > 2 * ranks[1]["collectives_share"]
