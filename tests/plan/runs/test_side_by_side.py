"""What simulated ranks that run side by side send each other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from trainfit.plan.runs.side_by_side import Post, pipeline_of
from trainfit.results.runs.communication import Meeting
from trainfit.results.runs.trace import TraceOutcome
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
