"""Where a loss that is not finite comes from: the line, the batch, or weights that are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainfit.findings.training.losses import not_finite
from trainfit.results.runs.learning import Misuse
from trainfit.watch.recorder.gpu_step import StepNumbers


def line_of(mark: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return str(next(n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}")))


def logs(numbers: StepNumbers, net: nn.Module, batches: list[Any]) -> None:
    for x, y in batches:
        x, y = x.to("cpu"), y.to("cpu")
        logs = x.log()  # the log
        loss = (net(logs) - y).square().mean()
        numbers.note_loss(loss, None, None)


def plain(numbers: StepNumbers, net: nn.Module, batches: list[Any]) -> None:
    mask = torch.full((2,), -math.inf)
    for x, y in batches:  # the batch
        out = net(x) + torch.softmax(torch.zeros(2) + mask * 0 + 1, 0).nan_to_num()[:1]
        loss = (out - y).square().mean()
        numbers.note_loss(loss, None, None)


def several(numbers: StepNumbers, net: nn.Module, batches: list[Any]) -> None:
    def step(out: Tensor, y: Tensor) -> None:
        loss = (out - y).nanmean() if y.isnan().any() else (out - y).square().mean()
        loss.backward()
        numbers.note_loss(loss, None, None)

    for x, y in batches:
        out = net(x) / x.sum()  # the division
        step(out, y)


def of_itself(numbers: StepNumbers, net: nn.Module, batches: list[Any]) -> None:
    for x, y in batches:
        x = x.log()
        loss = (net(x) - y).square().mean()
        numbers.note_loss(loss, None, None)


GOOD = torch.ones(4, 2), torch.ones(4, 1)
NEGATIVE = torch.ones(4, 2) - 2, torch.ones(4, 1)
GAP = torch.full((4, 2), math.nan), torch.ones(4, 1)
ZERO = torch.zeros(4, 2), torch.ones(4, 1)
MISSING = torch.ones(4, 2), torch.tensor([[math.nan], [1.0], [1.0], [1.0]])


@pytest.mark.parametrize(
    ("train", "batches", "kind", "name", "mark"),
    [
        (logs, [GOOD, GOOD, NEGATIVE, GOOD], "made_not_finite", "logs", "the log"),
        (plain, [GOOD, GAP], "batch_not_finite", "x", "the batch"),
        (several, [GOOD, ZERO], "made_not_finite", "out", "the division"),
        (several, [MISSING, ZERO], "made_not_finite", "out", "the division"),
    ],
)
def test_the_line_or_the_batch_that_made_it(
    train: Callable[..., None], batches: list[Any], kind: str, name: str, mark: str
) -> None:
    numbers = StepNumbers()
    train(numbers, nn.Linear(2, 1), batches)
    place = f"{Path(__file__).name}:{line_of(mark)}"
    found = numbers.made_by
    assert found is not None and str(found.place).endswith(place)
    assert found == Misuse(kind, (name,), found.place)


@pytest.mark.parametrize("train", [logs, plain, several, of_itself])
def test_nothing_is_told_of_weights_that_are_not_finite_nor_of_a_healthy_run(
    train: Callable[..., None],
) -> None:
    """A mask of -inf and labels that are missing are so in healthy steps, too."""
    numbers, net = StepNumbers(), nn.Linear(2, 1)
    train(numbers, net, [GOOD, GOOD])
    assert numbers.made_by is None
    with torch.no_grad():
        net.weight.fill_(math.nan)
    train(numbers, net, [GOOD, GOOD])
    assert numbers.made_by is None


def test_of_a_variable_that_is_made_of_itself_nobody_knows() -> None:
    numbers = StepNumbers()
    of_itself(numbers, nn.Linear(2, 1), [GOOD, NEGATIVE])
    assert numbers.loss is not None and not math.isfinite(numbers.loss)
    assert numbers.made_by is None


@pytest.mark.parametrize(
    ("losses", "distance", "told"),
    [
        ((3.0, 2.0, 1.0), torch.sqrt, ("sqrt",)),
        ((1.0, 4.0, 90.0), torch.sqrt, None),  # it grew: the steps are too large
        ((3.0,), torch.sqrt, None),
        ((3.0, 2.0, 1.0), torch.square, None),
    ],
)
def test_weights_that_a_gradient_broke_are_told_by_the_slope_in_the_loss(
    losses: tuple[float, ...],
    distance: Callable[[Tensor], Tensor],
    told: tuple[str, ...] | None,
) -> None:
    numbers, net = StepNumbers(), nn.Linear(2, 1)
    for each in losses:
        numbers.note_loss(torch.tensor(each), None, None)
    with torch.no_grad():
        net.weight.fill_(math.nan)
    loss = distance(net(torch.ones(4, 2))).mean()
    numbers.note_loss(loss, None, None)
    found = numbers.made_by
    assert (found and (found.kind, found.told)) == (told and ("slope_infinite", told))


class _Attends(nn.Module):
    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        scores = x @ x.transpose(0, 1) / 2**0.5
        scores = scores.masked_fill(pad, float("-inf"))  # the mask
        return scores.softmax(-1) @ x


class _Looks(nn.Module):
    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        self.log("x", x.mean())
        causal = torch.triu(torch.full((4, 4), float("-inf")), 1)
        return (x @ x.transpose(0, 1) + causal).softmax(-1) @ x / x.shape[0]

    def log(self, name: str, value: Tensor) -> None:
        pass


def attends(numbers: StepNumbers, net: nn.Module, model: nn.Module, losses: list[float]) -> None:
    psnr = 10 * torch.log10(1 / torch.ones(1))  # no part of the loss
    for each in losses:
        numbers.note_loss(psnr + each, None, None)
    out = net(model(torch.ones(4, 2), torch.zeros(4, 4, dtype=torch.bool)))
    loss = out.square().mean()
    numbers.note_loss(loss, None, None)


@pytest.mark.parametrize(
    ("model", "losses", "mark"),
    [
        (_Attends(), [3.0, 2.0, 1.0], "the mask"),
        (_Attends(), [1.0, 4.0, 90.0], ""),
        (_Looks(), [3.0, 2.0, 1.0], ""),
    ],
)
def test_weights_that_a_batch_broke_unseen_are_told_by_the_source(
    model: nn.Module, losses: list[float], mark: str
) -> None:
    numbers, net = StepNumbers(), nn.Linear(2, 1)
    with torch.no_grad():
        net.weight.fill_(math.nan)
    attends(numbers, net, model, losses)
    found = numbers.made_by
    assert (found is not None) == bool(mark)
    if found is not None:
        assert found.kind == "may_be_made" and found.told[0] == "mask"
        assert str(found.place).endswith(f"{Path(__file__).name}:{line_of(mark)}")
        why = not_finite(found)
        assert why is not None and "may have made so" in why[0] and "softmax" in why[1]


def in_one_line(numbers: StepNumbers, net: nn.Module, losses: list[float]) -> None:
    for each in losses:
        numbers.note_loss(torch.tensor(each), None, None)
    p = net(torch.ones(4, 2)).softmax(1)
    picked = p[:, 0]
    loss = -picked.log().mean()  # the logarithm
    net.zero_grad(); numbers.note_loss(loss, None, None)  # fmt: skip  # noqa: E702


def test_of_several_statements_on_a_line_all_count() -> None:
    numbers, net = StepNumbers(), nn.Linear(2, 3)
    with torch.no_grad():
        net.weight.fill_(math.nan)
    in_one_line(numbers, net, [3.0, 2.0, 1.0])
    found = numbers.made_by
    assert found is not None and found.told[0] == "logarithm"
    assert str(found.place).endswith(f":{line_of('the logarithm')}")


def test_the_line_within_a_model_that_made_it() -> None:
    numbers, net, model = StepNumbers(), nn.Linear(2, 1), _Attends()
    for masked in (False, True):
        pad = torch.full((4, 4), masked)
        out = model(torch.ones(4, 2), pad)  # the call
        loss = net(out).square().mean()
        numbers.note_loss(loss, None, None)
    found = numbers.made_by
    assert found is not None and str(found.place).endswith(line_of("the call"))
    assert found.told[:2] == ("out", "mask") and found.told[3].endswith(line_of("the mask"))
    why = not_finite(found)
    assert why is not None and "may have made it so" in why[0] and "softmax" in why[1]
