"""Gradients that a script limits or averages by hand, each with a twin that is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers_learning import Kinds

Parameters = list[nn.Parameter]


def _clamp(parameters: Parameters) -> None:
    for each in parameters:
        each.grad.data.clamp_(-1, 1)  # type: ignore[union-attr]


def _replace(parameters: Parameters) -> None:
    for each in parameters:
        each.grad = each.grad.clip(-1, 1)  # type: ignore[union-attr]


def _by_norm(parameters: Parameters) -> None:
    norm = torch.sqrt(sum(each.grad.pow(2).sum() for each in parameters))  # type: ignore
    factor = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
    for each in parameters:
        each.grad.data.mul_(factor)  # type: ignore[union-attr]


def _by_list(parameters: Parameters) -> None:
    gradients = [each.grad for each in parameters]
    norm = torch.stack([each.norm() for each in gradients]).norm()  # type: ignore[union-attr]
    torch._foreach_mul_(gradients, 1.0 / (norm + 1e-6))  # type: ignore[arg-type]


def _average(parameters: Parameters) -> None:
    for each in parameters:
        each.grad.div_(4)  # type: ignore[union-attr]


def _scaled(
    by_hand: Callable[[Parameters], Any], *, unscales: bool = False, batches: int = 1
) -> Any:
    """Steps under a GradScaler; ``by_hand`` changes the gradients before each."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda")
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(batches):
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(model(torch.randn(4, 8).cuda()), torch.arange(4).cuda())
            scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
        by_hand([*model.parameters()])
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("by_hand", [_clamp, _replace, _by_norm, _by_list])
def test_scaled_gradients_that_are_limited_by_hand(
    kinds: Kinds, by_hand: Callable[[Parameters], Any]
) -> None:
    found = kinds(lambda: _scaled(by_hand))["clipped_by_hand"]
    assert found.place is not None and found.fixes[0].line == "scaler.unscale_(optimizer)"
    assert "clipped_by_hand" not in kinds(lambda: _scaled(by_hand, unscales=True))


def test_gradients_that_are_averaged_by_hand(kinds: Kinds) -> None:
    found = kinds(lambda: _scaled(_average, batches=4))
    assert not {"clipped_by_hand", "loss_not_divided"} & found.keys()
    assert "loss_not_divided" in kinds(lambda: _scaled(lambda _: None, batches=4))


def test_weights_that_are_limited_are_no_gradients(kinds: Kinds) -> None:
    def limit(parameters: Parameters) -> None:
        for each in parameters:
            each.data.clamp_(-0.01, 0.01)

    assert "clipped_by_hand" not in kinds(lambda: _scaled(limit))


def _adversarial(order: str) -> None:
    """Steps of a generator and of its critic; ``order`` says when gradients are set to zero."""
    made, critic = nn.Linear(8, 16).cuda(), nn.Linear(16, 1).cuda()
    of_made = torch.optim.SGD(made.parameters(), 0.1)
    of_critic = torch.optim.SGD(critic.parameters(), 0.1)
    for _ in range(4):
        of_made.zero_grad()
        if order != "before its loss":
            of_critic.zero_grad(set_to_none=order != "kept as zeros")
        fake = made(torch.randn(4, 8).cuda())
        critic(fake).mean().backward()
        if order == "one pass":
            of_made.step()
            of_critic.step()
            continue
        of_made.step()
        if order != "at the beginning":
            of_critic.zero_grad(set_to_none=order != "kept as zeros")
        (critic(fake.detach()) - critic(torch.randn(4, 16).cuda())).mean().backward()
        of_critic.step()


def test_gradients_of_another_loss_that_a_step_uses(kinds: Kinds) -> None:
    found = kinds(lambda: _adversarial("at the beginning"))["gradients_mixed"]
    assert found.place is not None and "right before" in found.fixes[0].action


@pytest.mark.parametrize("order", ["before its loss", "kept as zeros", "one pass"])
def test_gradients_of_one_loss(kinds: Kinds, order: str) -> None:
    assert "gradients_mixed" not in kinds(lambda: _adversarial(order))
