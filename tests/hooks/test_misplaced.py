"""Numbers that are compared with, or multiplied by, those of another place; losses of nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers_learning import Kinds

Tensor = torch.Tensor


def _language(order: Callable[[Tensor], Tensor], targets: Callable[[Tensor], Tensor]) -> None:
    embed, layer, head = nn.Embedding(50, 8).cuda(), nn.GRU(8, 8).cuda(), nn.Linear(8, 50).cuda()
    optimizer = torch.optim.SGD([*embed.parameters(), *layer.parameters()], 0.1)
    for _ in range(3):
        tokens = torch.randint(0, 50, (6, 11)).cuda()
        out = head(layer(embed(tokens[:, :-1].t()))[0])
        loss = F.cross_entropy(order(out).reshape(-1, 50), targets(tokens[:, 1:]).reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_outputs_with_positions_first_and_targets_with_samples(kinds: Kinds) -> None:
    found = kinds(lambda: _language(lambda out: out, lambda y: y))["targets_misordered"]
    assert "10×6×50" in found.title and "6×10" in found.title and found.place is not None


@pytest.mark.parametrize(
    ("order", "targets"),
    [(lambda out: out, lambda y: y.t()), (lambda out: out.transpose(0, 1), lambda y: y)],
)
def test_outputs_and_targets_of_one_order(
    kinds: Kinds, order: Callable[[Tensor], Tensor], targets: Callable[[Tensor], Tensor]
) -> None:
    assert "targets_misordered" not in kinds(lambda: _language(order, targets))


def _noised(shape: tuple[int, ...], of: Callable[[Tensor], Tensor]) -> None:
    net = nn.Conv2d(3, 3, 1).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    alphas = torch.linspace(0.9, 0.1, 100).cuda()
    for _ in range(3):
        x = torch.randn(shape).cuda()
        steps = torch.randint(0, 100, (len(x),), device="cuda")
        F.mse_loss(net(of(alphas[steps].sqrt()) * x), x).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_factor_of_each_sample_along_the_width(kinds: Kinds) -> None:
    found = kinds(lambda: _noised((8, 3, 8, 8), lambda it: it))["samples_over_width"]
    assert "8×3×8×8" in found.title and found.place is not None
    right = kinds(lambda: _noised((8, 3, 8, 8), lambda it: it.view(-1, 1, 1, 1)))
    assert "samples_over_width" not in right


def test_a_window_along_the_width(kinds: Kinds) -> None:
    window = torch.hann_window(8).cuda()
    found = kinds(lambda: _noised((8, 3, 8, 8), lambda it: it.view(-1, 1, 1, 1) * window))
    assert "samples_over_width" not in found


def _boxes(loss: Callable[[Tensor, Tensor], Any], positives: int) -> None:
    net = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        labels = torch.arange(8) < positives
        boxes = net(torch.randn(8, 4).cuda())
        is_one = labels.cuda()
        (loss(boxes[is_one], torch.zeros(8, 4).cuda()[is_one]) + boxes.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_loss_of_no_number(kinds: Kinds) -> None:
    found = kinds(lambda: _boxes(F.smooth_l1_loss, 0))["loss_of_nothing"]
    assert "smooth_l1_loss" in found.title and found.place is not None
    assert "loss_of_nothing" not in kinds(lambda: _boxes(F.smooth_l1_loss, 2))

    def added(one: Tensor, other: Tensor) -> Tensor:
        return F.smooth_l1_loss(one, other, reduction="sum")

    assert "loss_of_nothing" not in kinds(lambda: _boxes(added, 0))
