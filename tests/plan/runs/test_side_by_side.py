"""What simulated ranks that run side by side send each other."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from helpers_cli import trainfit
from helpers_ranks import as_rank_0
from trainfit import simulate
from trainfit.plan.runs.side_by_side import Post, pipeline_of
from trainfit.plan.runs.tracing import Trace, _of_heaviest
from trainfit.results.runs.communication import EQUAL, Meeting
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.steps import StepMakeup
from trainfit.results.runs.trace import TraceOutcome
from trainfit.scripts.step_makeup import with_makeup
from trainfit.simgpu.communication.peers import PeerIsGone, Peers


@pytest.fixture
def folders(tmp_path: Path) -> dict[int, Path]:
    found = {rank: tmp_path / str(rank) for rank in (0, 1)}
    for each in found.values():
        each.mkdir()
    return found


def test_values_come_in_order_and_unknown_ones_are_unknown(folders: dict[int, Path]) -> None:
    ranks, post = [Peers(rank, (0, 1), folders[rank]) for rank in (0, 1)], Post(folders)
    for content in (torch.tensor([3]), None, torch.tensor([5])):
        ranks[0].send(1, content)
    ranks[0].send(7, torch.tensor([0]))  # does not run
    assert ranks[1].expect(7) is None
    numbers = [ranks[1].expect(0) for _ in range(3)]
    post.carry()
    found = [ranks[1].receive(0, number or 0) for number in numbers]
    assert [None if each is None else each.item() for each in found] == [3, None, 5]


def test_who_waits_for_one_that_has_ended_is_told(folders: dict[int, Path]) -> None:
    rank, post = Peers(1, (0, 1), folders[1]), Post(folders)
    post.ended(0)
    with pytest.raises(PeerIsGone, match="rank 1 waits for what rank 0 never sends"):
        rank.receive(0, rank.expect(0) or 0)


def test_ranks_that_wait_for_each_other_are_told(folders: dict[int, Path]) -> None:
    post, over = Post(folders), list[int]()

    def wait(rank: int) -> None:
        peers = Peers(rank, (0, 1), folders[rank])
        with pytest.raises(PeerIsGone):
            peers.receive(1 - rank, peers.expect(1 - rank) or 0)
        over.append(rank)

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in folders]
    for each in threads:
        each.start()
    while any(each.is_alive() for each in threads):
        post.carry()
    assert sorted(over) == [0, 1]


def test_a_pipeline_is_all_ranks_of_the_group_that_it_sends_in() -> None:
    def outcome(*kinds: str, ranks: int = 4) -> TraceOutcome:
        return TraceOutcome(
            "finished", meetings=tuple(Meeting(kind, tuple(range(ranks)), 8) for kind in kinds)
        )

    assert pipeline_of(outcome("all_reduce", "send")) == (0, 1, 2, 3)
    assert pipeline_of(outcome("all_reduce")) == ()
    assert pipeline_of(outcome("receive", ranks=64)) == ()


#: As DeepSpeed's ZeRO-3 has it: each rank compares a number with that of rank 0.
COMPARES = """
import os, torch
from torch import distributed
distributed.init_process_group("nccl")
rank = distributed.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
length = torch.tensor([2 if rank == 0 else -1], device="cuda")
distributed.broadcast(length, 0)
if length.item() != {}:
    raise RuntimeError(f"rank {{rank}} has others than rank 0, which has {{length.item()}}")
names = [["weight"] if rank == 0 else None]
distributed.broadcast_object_list(names, src=0)
assert names[0] == ["weight"], names
for step in range(9):
    model(torch.ones(4, 8, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("expected", "fails"), [("2", False), ("(2 if rank == 0 else 3)", True)])
def test_what_rank_0_broadcasts_is_known_to_the_rank_that_is_compared(
    expected: str, fails: bool, tmp_path: Path
) -> None:
    (tmp_path / "compares.py").write_text(COMPARES.format(expected))
    said = trainfit(
        *("plan", "--gpu", "2x RTX 4090", "--no-loader", "--no-remedies", "--json"),
        *("--", "torchrun", "--nproc_per_node=2", "compares.py"),
        cwd=tmp_path,
    )
    assert said.stdout, said.stderr
    titles = [each["title"] for each in json.loads(said.stdout)["findings"]]
    fails_there = [each for each in titles if "rank 1 fails where rank 0 goes on" in each]
    assert bool(fails_there) == fails, titles
    assert all("which has 2" in each for each in fails_there)


def test_of_ranks_that_all_ran_none_is_assumed_and_a_batch_goes_through_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pipeline's plan said that its other ranks were taken to do the same, and that each of them
    had samples of its own."""
    as_rank_0(monkeypatch, 4)
    with simulate("4x RTX 4090") as simulation:
        torch.distributed.init_process_group("nccl")
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            loss = model(torch.ones(4, 8, device="cuda")).sum()
            loss.backward()
            torch.distributed.all_reduce(loss)
            optimizer.step()
    makeup = StepMakeup(8, 4, 32, processes=4)
    recording = with_makeup(simulation.recording, makeup)
    assert EQUAL in recording.header["assumptions"]

    def heaviest(ranks: int) -> Recording:
        traces = {rank: Trace(TraceOutcome("finished"), recording, "") for rank in range(ranks)}
        found = _of_heaviest(traces).recording
        assert found is not None
        return found

    assert EQUAL not in heaviest(4).header["assumptions"]
    assert EQUAL in heaviest(2).header["assumptions"]  # two pipelines: one of them ran
    assert [heaviest(ranks).header["step"]["processes"] for ranks in (4, 2)] == [1, 2]
    assert recording.header["step"]["processes"] == 4
