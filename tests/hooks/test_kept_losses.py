"""Losses that are kept with their graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers_learning import Kinds

Tensor = torch.Tensor


def _trained(keep: Callable[[Tensor], Any], steps: int = 3) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        loss = model(torch.rand(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keep(loss)


@pytest.mark.parametrize(
    "to_keep", [lambda loss: loss, lambda loss: loss.cpu() * 2, lambda loss: {"loss": loss}]
)
def test_a_list_of_losses(kinds: Kinds, to_keep: Callable[[Tensor], Any]) -> None:
    history: list[Any] = []

    def train() -> None:
        _trained(lambda loss: history.append(to_keep(loss)))

    found = kinds(train)["graphs_kept"]
    assert "in history" in found.title and found.fix.line == "loss.item()"
    assert found.at.file.endswith("test_kept_losses.py")


def test_losses_without_their_graph(kinds: Kinds) -> None:
    history: list[Any] = []
    assert "graphs_kept" not in kinds(lambda: _trained(lambda loss: history.append(loss.detach())))
    assert "graphs_kept" not in kinds(lambda: _trained(lambda loss: history.append(loss.item())))
    last: dict[str, Tensor] = {}
    assert "graphs_kept" not in kinds(lambda: _trained(lambda loss: last.update(loss=loss)))


def test_losses_of_an_accumulated_step(kinds: Kinds) -> None:
    """They are added up within a step, and dropped after it."""

    def train() -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            losses = []
            for _ in range(3):
                losses.append(model(torch.rand(8, 4)).square().mean())
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()

    assert "graphs_kept" not in kinds(train)
