"""Ranks that do not call the same collectives, from what simulated ranks did."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import cast

import pytest

from trainfit.plan.runs.agreement import _one_file, _uneven, agreement, disagreement, same_gpu
from trainfit.plan.runs.runs import Runs
from trainfit.plan.runs.tracing import Trace
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.communication import JOINS, LEAVES, Meeting
from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.trace import LoaderInfo, Status, TraceOutcome

PAIR, ALL = (0, 1), (0, 1, 2, 3)


def reduced(line: int, nbytes: int = 4096, group: tuple[int, ...] = PAIR) -> Meeting:
    return Meeting("all_reduce", group, nbytes, f"/home/me/train.py:{line}")


BARRIER = Meeting("barrier", PAIR, 0, "/home/me/train.py:12")


def outcome(*meetings: Meeting, status: Status = "finished") -> TraceOutcome:
    return TraceOutcome(status, 2, meetings=meetings)


def said(first: TraceOutcome, other: TraceOutcome) -> str:
    return disagreement(first, other, 1)


def test_a_barrier_of_rank_0_alone_is_named_with_both_lines() -> None:
    found = said(outcome(reduced(10), BARRIER, reduced(10)), outcome(reduced(10), reduced(10)))
    assert "rank 0 calls barrier at train.py:12" in found
    assert "rank 1 all_reduce of 4 KiB at train.py:10 (number 2" in found


def test_other_shapes_and_another_order_are_named() -> None:
    found = said(outcome(reduced(7, 16)), outcome(reduced(7, 20)))
    assert "all_reduce of 16 B at train.py:7, rank 1 all_reduce of 20 B at train.py:7" in found
    assert said(outcome(BARRIER, reduced(9)), outcome(reduced(9), BARRIER))


def test_ranks_that_agree() -> None:
    same = outcome(reduced(10), BARRIER)
    assert not said(same, same)
    # One was simulated for more steps.
    assert not said(outcome(reduced(10), reduced(10)), outcome(reduced(10)))
    # Objects, and what only a root has whole: bytes may differ.
    assert not said(outcome(reduced(3, 0)), outcome(reduced(3, 48)))
    # Groups without both of them, and what two ranks do alone.
    others = Meeting("send", ALL, 8, None, 3), reduced(4, group=(0, 2))
    assert not said(outcome(*others), outcome())


def test_groups_are_compared_each_for_itself() -> None:
    crossed = outcome(reduced(1, group=ALL), BARRIER), outcome(BARRIER, reduced(1, group=ALL))
    assert not said(*crossed)


@pytest.mark.parametrize("ends_early", [0, 1])
def test_a_script_that_has_ended_where_the_other_goes_on(ends_early: int) -> None:
    short = outcome(reduced(10), status="ended")
    long = dataclasses.replace(outcome(reduced(10), reduced(10)), status="ended")
    found = said(short, long) if ends_early == 0 else said(long, short)
    assert f"where the script of rank {ends_early} has ended" in found
    assert f"rank {1 - ends_early} calls all_reduce" in found


@pytest.mark.parametrize("ends_early", [0, 1])
def test_what_follows_a_join_is_the_work_of_ranks_that_still_have_batches(ends_early: int) -> None:
    """`with model.join():` shadows their collectives, which are not the same."""
    leaves = Meeting(LEAVES, PAIR, 0, "/home/me/train.py:9")
    short = outcome(reduced(10), leaves, reduced(9, 8), status="ended")
    long = outcome(reduced(10), reduced(10, 4), BARRIER, leaves, reduced(9, 8), status="ended")
    assert not (said(short, long) if ends_early == 0 else said(long, short))
    before = outcome(BARRIER, leaves, status="ended")
    assert said(before, long)


def test_two_ranks_that_use_one_gpu() -> None:
    """NCCL refuses a GPU that another rank of the machine has."""
    mine, theirs = (outcome(Meeting("all_reduce", PAIR, 8, gpu=gpu)) for gpu in (0, 1))
    assert same_gpu(mine, theirs, 1) is None
    assert same_gpu(mine, mine, 1) == mine.meetings[0]
    unknown = outcome(reduced(3))
    assert same_gpu(unknown, unknown, 1) is None


def test_ranks_with_other_numbers_of_batches_hang() -> None:
    def of(samples: int, *meetings: Meeting) -> TraceOutcome:
        loader = LoaderInfo(0, 8, samples, 3, LoaderSettings(0), "list", None)
        return dataclasses.replace(outcome(*meetings), loader=loader)

    assert not _uneven(of(160), of(160), 1)
    cause, fails = _uneven(of(160), of(80), 1)
    assert cause.title == "Rank 0 has 20 batches an epoch, rank 1 has 10"
    assert fails.subject.startswith("when rank 1 has no more batches (10 an epoch, others 20)")
    joins = Meeting(JOINS, (0,), 0)
    assert not _uneven(of(160, joins), of(80), 1)


def test_a_checkpoint_that_two_ranks_write() -> None:
    def wrote(**files: str) -> TraceOutcome:
        paths = {f"/home/me/{name}.pt": f"/home/me/train.py:{line}" for name, line in files.items()}
        return dataclasses.replace(outcome(), saves=paths)

    (found,) = _one_file(wrote(log="3", best="12"), wrote(best="12"), 1)
    assert found.title == "rank 0 and rank 1 write the same file best.pt"
    assert found.place is not None and found.place.line == 12
    # A file for each rank, and one that rank 0 alone writes.
    assert not _one_file(wrote(rank0="12"), wrote(rank1="12"), 1)
    assert not _one_file(wrote(best="12"), outcome(), 1)


def test_a_rank_that_goes_wrong_alone_is_run_next_to_rank_0() -> None:
    """What rank 0 sends it (a length to compare with its own) is not known to a rank alone."""
    asked: list[tuple[int, ...]] = []

    def compared(alone: Status, *met: Meeting) -> bool:
        def attempt(_: object, spec: RunSpec) -> Trace:
            asked.append(spec.company)
            return Trace(outcome(*met, status="finished" if spec.company else alone), None, "")

        asked.clear()
        first, runs = Trace(outcome(*met), None, ""), cast(Runs, SimpleNamespace(attempt=attempt))
        return not agreement(first, None, runs, None, 1).findings

    sent = Meeting("broadcast", PAIR, 8, "/home/me/train.py:4")
    for alone in ("failed", "unsupported"):
        assert compared(alone, sent, reduced(7)), "it does not fail"
        assert asked == [(), (0, 1)]
    compared("finished", sent, reduced(7))
    assert asked == [()], "it was compared alone"
    assert not compared("failed", reduced(7))
    assert asked == [()], "rank 0 sends it nothing"
