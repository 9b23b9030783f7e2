"""Casts to float32 within autocast that a layer undoes, and those that are meant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers_learning import Kinds

Tensor = torch.Tensor


def _training(between: Callable[[Tensor], Tensor], *, width: int = 1024) -> None:
    first, second = nn.Linear(64, width).cuda(), nn.Linear(width, 8).cuda()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    for _ in range(3):
        x = torch.randn(1 << 14, 64).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            logits = second(between(first(x)))
        F.cross_entropy(logits.float(), torch.zeros(len(x), dtype=torch.long).cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "between",
    [
        lambda x: F.gelu(x.float()),
        lambda x: x.to(torch.float32),
        lambda x: x.float().chunk(1, -1)[0].relu(),
    ],
)
def test_casts_that_a_layer_undoes(kinds: Kinds, between: Callable[[Tensor], Tensor]) -> None:
    found = kinds(lambda: _training(between))["casts_undone"]
    assert found.evidence[0].value == (1 << 14) * 1024 * 4 and found.place is not None


def _norm(x: Tensor) -> Tensor:
    numbers = x.float()
    return (numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("between", [F.gelu, _norm])
def test_layers_and_norms_that_are_right(kinds: Kinds, between: Callable[[Tensor], Tensor]) -> None:
    assert "casts_undone" not in kinds(lambda: _training(between))


def test_casts_of_few_numbers(kinds: Kinds) -> None:
    assert "casts_undone" not in kinds(lambda: _training(lambda x: x.float(), width=64))


@pytest.mark.parametrize(
    ("cast", "has_line"),
    [
        (lambda: nn.Linear(8, 4).cuda().half(), True),
        (lambda: nn.Linear(8, 4).to("cuda", torch.float16), True),
        (lambda: nn.Linear(8, 4, dtype=torch.float16).cuda(), False),
    ],
)
def test_the_line_that_casts_a_model_to_float16(
    kinds: Kinds, cast: Callable[[], nn.Module], has_line: bool
) -> None:
    def training() -> None:
        model = cast()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.randn(4, 8).cuda().half()).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert (kinds(training)["small_eps"].place is not None) == has_line
