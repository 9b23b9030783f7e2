"""Tokens that a router gives to experts: how many they are says what ranks send each other."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import distributed

import trainfit
from helpers_ranks import as_rank_0
from tests.simgpu.operators.test_several_ranks import launched

RANKS: Final = 4
EXPERTS: Final = 8
CHOSEN: Final = 2
WIDTH: Final = 16


@pytest.fixture(autouse=True)
def rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank_0(monkeypatch, RANKS)


def _by_bincount(chosen: torch.Tensor) -> torch.Tensor:
    return torch.bincount(chosen.flatten(), minlength=EXPERTS)


def _by_histogram(chosen: torch.Tensor) -> torch.Tensor:
    return torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).long()


@pytest.mark.parametrize("count", [_by_bincount, _by_histogram])
def test_tokens_that_were_sent_to_experts_come_back(count: Any) -> None:
    """The ranks' experts had a token each: what came to them, and back, was next to nothing."""
    tokens = 64
    with trainfit.simulate(f"{RANKS}x RTX 4090") as simulation:
        distributed.init_process_group("nccl")
        x = torch.randn(tokens, WIDTH, device="cuda")
        chosen = torch.randn(tokens, EXPERTS, device="cuda").topk(CHOSEN).indices
        counts = count(chosen)
        others = torch.empty_like(counts)
        distributed.all_to_all_single(others, counts)
        sent, came = (each.view(RANKS, -1).sum(1).tolist() for each in (counts, others))
        assert sent == came == [tokens * CHOSEN // RANKS] * RANKS
        rows = x[chosen.flatten().argsort() // CHOSEN]
        got = torch.empty(sum(came), WIDTH, device="cuda")
        distributed.all_to_all_single(got, rows, came, sent)
        back = torch.empty_like(rows)
        distributed.all_to_all_single(back, got, sent, came)
    rows_bytes = tokens * CHOSEN * WIDTH * 4
    moved = [nbytes for kind, nbytes, *_ in launched(simulation.recording) if kind == "all_to_all"]
    assert moved == [EXPERTS * 8, rows_bytes, rows_bytes]
    assert any(
        "as many in each of 8 bins" in text for text in simulation.recording.header["assumptions"]
    )


def test_counts_that_do_not_divide_and_sums_of_weights() -> None:
    with trainfit.simulate("RTX 4090"):
        values = torch.randint(4, (10,), device="cuda")
        unknown = torch.randn(10, 4, device="cuda").argmax(1)
        assert torch.bincount(unknown, minlength=4).tolist() == [3, 3, 2, 2]
        for weights, expected in ((torch.float32, torch.float32), (torch.int64, torch.float64)):
            summed = torch.bincount(values, torch.ones(10, device="cuda", dtype=weights), 4)
            assert summed.dtype == expected and len(summed) >= 4
