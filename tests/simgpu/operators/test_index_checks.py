"""Labels and indices of which the host knows that they are out of range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import trainfit


@pytest.mark.parametrize("labels", [[1, 10], [-1, 2]])
def test_a_label_that_is_none_of_the_classes(labels: list[int]) -> None:
    with trainfit.simulate("T4"), pytest.raises(IndexError, match="is out of bounds"):
        functional.cross_entropy(torch.randn(2, 10).cuda(), torch.tensor(labels).cuda())


def test_a_token_that_is_not_in_the_table() -> None:
    with trainfit.simulate("T4"), pytest.raises(IndexError, match="index out of range in self"):
        torch.nn.Embedding(10, 4).cuda()(torch.tensor([[0, 10]]).cuda())


@pytest.mark.parametrize(
    "used",
    [
        lambda table, at: table.gather(1, at[:, None]),
        lambda table, at: table.scatter_(1, at[:, None], 1.0),
        lambda table, at: table.scatter_add(1, at[:, None], torch.ones_like(table)),
        lambda table, at: table.index_add_(1, at, torch.ones_like(table)[:, :2]),
        lambda table, at: table.index_select(1, at),
        lambda table, at: table[:, at],
        lambda table, at: table[at],
        lambda table, at: table.__setitem__(at, 1.0),
        lambda table, at: table[-at - 1],
    ],
)
def test_an_index_beyond_the_end(used: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    with trainfit.simulate("T4"):
        table = torch.zeros(2, 2).cuda()
        used(torch.zeros(3, 3).cuda(), torch.tensor([0, 1]).cuda())
        with pytest.raises(IndexError, match=r"index -?\d is out of bounds|index out of range"):
            used(table, torch.tensor([0, 2]).cuda())


def test_what_is_in_range_or_ignored_or_not_known() -> None:
    with trainfit.simulate("T4"):
        scores = torch.randn(2, 10, requires_grad=True).cuda()
        functional.cross_entropy(scores, torch.tensor([9, -100]).cuda()).backward()
        functional.cross_entropy(scores, scores.argmax(1)).backward()
        pixels = torch.full((2, 4, 4), 255).cuda()
        functional.cross_entropy(torch.randn(2, 10, 4, 4).cuda(), pixels, ignore_index=255)
        functional.cross_entropy(torch.randn(10).cuda(), torch.tensor(9).cuda())
        table = torch.randn(4, 2, device="cuda")
        table.gather(1, scores.argmax(1)[:, None].expand(2, 2) * 0)
        table[[-4, 3]] = table[[0, -1]]
        table.gather(0, (table != 0).nonzero()[:, :1] + 9)
        torch.nn.Embedding(10, 4, padding_idx=9).cuda()(torch.tensor([[0, 9]]).cuda())
