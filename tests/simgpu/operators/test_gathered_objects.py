"""A script that reads an object which only another rank gave to a gathering."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import distributed

import trainfit
from helpers_ranks import as_rank_0
from trainfit.results.runs.trace import ScriptOutcome
from trainfit.simgpu.communication.collectives import Communication
from trainfit.simgpu.communication.peers import Peers

SCRIPT = """\
settings = {"rate": 0.1} if rank == 1 else None
dist.all_gather_object(everyone, settings)
print(rank)
rate = everyone[1]["rate"]
other = missing["rate"]
"""
FAILED = "TypeError: 'NoneType' object is not subscriptable"


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    made = Peers()
    made.gave_none_at = f"{script}:2"
    yield made


def outcome(peers: Peers, line: int, message: str = FAILED) -> ScriptOutcome:
    file = str(peers.gave_none_at).rpartition(":")[0]
    return peers.explained(ScriptOutcome("failed", message=message, location=f"{file}:{line}"))


def test_what_another_rank_gave_is_not_known(peers: Peers) -> None:
    told = outcome(peers, 4)
    assert told.status == "unsupported"
    assert "only rank 0 runs, which gives None there" in told.message
    assert f"called at {peers.gave_none_at}" in told.message


def test_another_failure_is_the_scripts(peers: Peers) -> None:
    assert outcome(peers, 5).message == FAILED  # another None
    assert outcome(peers, 4, "KeyError: 'rate'").status == "failed"
    peers.gave_none_at = None
    assert peers.explained(ScriptOutcome("failed", message=FAILED)).status == "failed"


def test_the_line_of_a_gathering_of_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank_0(monkeypatch, 2)
    with trainfit.simulate("2x H100 SXM"):
        distributed.init_process_group("nccl")
        assert Communication.current is not None
        seen = Communication.current.peers
        gathered: list[object] = [None, None]
        distributed.all_gather_object(gathered, {"rate": 0.1})
        assert seen.gave_none_at is None
        distributed.all_gather_object(gathered, None)
        assert seen.gave_none_at is not None
