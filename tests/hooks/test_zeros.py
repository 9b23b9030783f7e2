"""-inf and 0 that make NaN of a loss, each with a twin that is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from helpers_learning import Kinds

Tensor = torch.Tensor


def _entropies(fill: float, logarithm: Callable[[Tensor], Tensor]) -> None:
    net = nn.Linear(8, 4).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    allowed = torch.tensor([True, True, False, True]).cuda()
    for _ in range(3):
        scores = net(torch.randn(16, 8).cuda()).masked_fill(~allowed, fill)
        p = scores.softmax(-1)
        (p * logarithm(p)).sum(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_probability_of_0_times_its_logarithm(kinds: Kinds) -> None:
    assert kinds(lambda: _entropies(-torch.inf, torch.log))["zero_times_log"].place is not None


@pytest.mark.parametrize(
    ("fill", "logarithm"),
    [(-1e9, torch.log), (-torch.inf, lambda p: (p + 1e-8).log()),
     (-torch.inf, lambda p: p.clamp(min=1e-8).log())],
)  # fmt: skip
def test_logarithms_that_are_limited(
    kinds: Kinds, fill: float, logarithm: Callable[[Tensor], Tensor]
) -> None:
    assert "zero_times_log" not in kinds(lambda: _entropies(fill, logarithm))


def _attention(shortest: int, fill: float = -torch.inf) -> None:
    tokens = torch.randint(1, 50, (12, 10))
    tokens[3, shortest:] = 0
    embed, head = nn.Embedding(50, 16).cuda(), nn.Linear(16, 2).cuda()
    optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], 0.1)
    for (rows,) in DataLoader(TensorDataset(tokens), 4):
        rows = rows.cuda()
        x = embed(rows)
        scores = (x @ x.transpose(1, 2)).masked_fill((rows == 0)[:, None, :], fill)
        head((scores.softmax(-1) @ x)[:, 0]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_sample_that_is_nothing_but_padding(kinds: Kinds) -> None:
    found = kinds(lambda: _attention(0))["mask_misused"]
    assert "nothing but padding" in found.title and found.place is not None
    assert "mask_misused" not in kinds(lambda: _attention(1))
    assert "mask_misused" not in kinds(lambda: _attention(0, -1e9))
