"""Where a loss that is not finite comes from: the line, the batch, or weights that are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers_watch import finding, run, step_rows
from trainfit.findings.training.losses import not_finite
from trainfit.results.runs.learning import Misuse
from trainfit.results.runs.tables import LOSS_FINITE, LOSS_NOT_FINITE
from trainfit.watch.judge import judge
from trainfit.watch.recorder.gpu_step import StepNumbers
from trainfit.watch.recorder.looks.bad_batches import (
    KeptBatches,
    WorkerBatches,
    bad_in,
    question,
)


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


# ---
# Samples that have it already.


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ([torch.ones(3, 2), torch.tensor([0.0, math.inf, 1.0])], ("[1]", 1)),
        ({"x": {"y": GAP[0]}}, ("['x']['y']", 0)),
        (list(GOOD), None),
        (torch.full((3, 2), 3e38), None),  # whose sum is too large
        ([torch.ones(2, dtype=torch.long), "name", None], None),
    ],
)
def test_the_part_and_the_row_of_a_batch(batch: Any, found: tuple[str, int] | None) -> None:
    assert bad_in(batch) == found


def test_a_worker_names_the_samples_and_looks_at_all_batches_when_asked(tmp_path: Path) -> None:
    stem = tmp_path / "rank0"
    batches = WorkerBatches(question(stem))
    batches.made(list(GOOD), [4, 5, 6, 7], 1.0, 0.5)
    batches.made([GAP[0], GOOD[1]], [8, 9, 10, 11], 1.0, 1.5)
    assert batches.found == {"sample 8, batch[0]": 1.5}
    hurried = WorkerBatches(question(stem))
    hurried.made(list(GOOD), [0], 0.0, 0.1)  # it has cost something now, of no time
    hurried.made(list(GAP), [None] * 4, 0.0, 0.2)
    assert not hurried.found
    question(stem).touch()
    hurried.look_for_question()
    hurried.made(list(GAP), [None] * 4, 0.0, 0.3)
    assert hurried.found == {"row 0 of a batch, batch[0]": 0.3}


def test_the_last_small_batches_of_the_training_process_are_kept() -> None:
    kept = KeptBatches()
    kept.looked_at(GOOD, 48)
    assert kept.keeps
    for index in range(40):
        kept.add(([4 * index + n for n in range(4)], MISSING if index == 30 else GOOD))
    found = kept.first_bad()
    assert found is not None and found.told == ("sample 120, batch[1]",)
    told = not_finite(found)
    assert told is not None and told[0].endswith("(sample 120, batch[1])")
    kept.looked_at(GOOD, 1 << 30)
    assert not kept.keeps and kept.first_bad() is None
    kept.looked_at(MISSING, 48)  # as the data are
    kept.looked_at(GOOD, 48)
    assert not kept.keeps


def of_arrays(numbers: StepNumbers, net: nn.Module, rows: Tensor) -> None:
    mask = torch.full((2, 2), -math.inf).triu(1)
    for step in range(6):
        out = net(rows[step : step + 1] + 0 * mask.exp()[:1])
        loss = (out - 1.0).square().mean()
        if not bool(torch.isfinite(loss)):
            nn.init.constant_(net.weight, math.nan)
        numbers.note_loss(loss if step < 4 else net(rows[:1]).sum(), None, None)


def test_an_array_of_the_scripts_own_that_had_a_gap_from_the_start() -> None:
    numbers = StepNumbers()
    rows = torch.ones(6, 2)
    rows[3, 1] = math.nan
    of_arrays(numbers, nn.Linear(2, 1), rows)
    assert numbers.made_by == Misuse("sample_not_finite", ("`rows`, row 3",))


def test_who_may_know_the_sample_is_asked_once() -> None:
    numbers, asked = StepNumbers(), [Misuse("sample_not_finite", ("sample 4",)), None]
    numbers.suspect = lambda: asked.pop(0)
    for value in (1.0, math.nan, math.nan):
        numbers.note_loss(torch.tensor(value), None, None)
    assert numbers.made_by == Misuse("sample_not_finite", ("sample 4",)) and asked == [None]


@pytest.mark.parametrize(("at", "named"), [(2.4, True), (0.5, False)])
def test_a_sample_is_named_where_the_loss_was_finite_until_it_came(at: float, named: bool) -> None:
    rows = step_rows(200)
    rows["flags"] = LOSS_FINITE
    rows["flags"][25:] = LOSS_NOT_FINITE
    made = run(rows, header={"bad_samples": {"sample 7, batch[0]": at + float(rows["end_s"][0])}})
    found = finding(judge(made), "loss_not_finite")
    assert ("sample 7" in found.title) is named
