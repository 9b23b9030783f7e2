"""Losses and results of models that are kept with their graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helpers_learning import Kinds
from trainfit.findings.training.misuse import of_misuse
from trainfit.hooks.graphs import UnusedResults
from trainfit.torch_private.autograd import nodes_of

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


def _unused(*, with_grad: bool = True, parts: bool = False) -> UnusedResults:
    """Of a model that is called 16 times before a step: for a rollout, or for the loss in parts."""
    seen, model = UnusedResults(), nn.Linear(4, 2)
    for step in range(4):
        with torch.set_grad_enabled(with_grad):
            kept = [model(torch.rand(8, 4)) for _ in range(16)]
        for each in kept:
            seen.gave({"out": each} if step % 2 else each, lambda: "train.py:7")
        for loss in kept if parts else (model(torch.rand(8, 4)),):
            seen.look(functools.partial(nodes_of, loss.mean().grad_fn), step)
    return seen


def test_a_rollout_with_its_graph() -> None:
    found = _unused().found
    assert found is not None and (found.told, found.place) == (("16",), "train.py:7")
    finding = of_misuse(found)
    assert "16 results" in finding.title and "no_grad" in finding.fix.line
    assert _unused(with_grad=False).found is None
    assert _unused(parts=True).found is None
