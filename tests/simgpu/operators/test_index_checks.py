"""Labels and indices of which the host knows that they are out of range."""

from __future__ import annotations

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


def test_what_is_in_range_or_ignored_or_not_known() -> None:
    with trainfit.simulate("T4"):
        scores = torch.randn(2, 10, requires_grad=True).cuda()
        functional.cross_entropy(scores, torch.tensor([9, -100]).cuda()).backward()
        functional.cross_entropy(scores, scores.argmax(1)).backward()
        pixels = torch.full((2, 4, 4), 255).cuda()
        functional.cross_entropy(torch.randn(2, 10, 4, 4).cuda(), pixels, ignore_index=255)
        functional.cross_entropy(torch.randn(10).cuda(), torch.tensor(9).cuda())
        torch.nn.Embedding(10, 4, padding_idx=9).cuda()(torch.tensor([[0, 9]]).cuda())
