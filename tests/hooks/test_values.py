"""Denormal numbers of weights, gradients and averages, and numbers that are not finite."""

from __future__ import annotations

import linecache
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from helpers_learning import observing
from trainfit.findings.training.learning import of_learning
from trainfit.findings.training.losses import not_finite
from trainfit.hooks import values
from trainfit.hooks.learning import LearningObserver
from trainfit.hooks.provenance.copies import lies_by_pixels
from trainfit.hooks.values import anomaly_at, denormals, rooted_at
from trainfit.results.runs.learning import LearningFacts, Misuse


@pytest.fixture(autouse=True)
def denormals_are_kept() -> Iterator[None]:
    torch.set_flush_denormal(False)
    yield
    torch.set_flush_denormal(False)


def trained(scale: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    model(torch.rand(4, 64)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(scale)
    return model, optimizer


def test_a_healthy_model_has_none() -> None:
    _, optimizer = trained()
    assert denormals(optimizer) == {"weights": 0.0, "gradients": 0.0, "averages": 0.0}


def test_weights_that_have_decayed() -> None:
    model, optimizer = trained(1e-38)
    before = [each.clone() for each in model.parameters()]
    assert denormals(optimizer)["weights"] > 0.9
    assert all(map(torch.equal, before, model.parameters()))
    trained(0.0)
    _, optimizer = trained(0.0)
    assert denormals(optimizer)["weights"] == 0  # zeros are none


def test_what_a_core_takes_as_0_costs_nothing() -> None:
    _, optimizer = trained(1e-38)
    if torch.set_flush_denormal(True):
        assert denormals(optimizer)["weights"] == 0


def test_tensors_of_other_kinds_are_left_alone() -> None:
    sparse = nn.Embedding(100, 64, sparse=True)
    optimizer = torch.optim.SparseAdam(sparse.parameters())
    sparse(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert set(denormals(optimizer)) <= {"weights", "averages"}
    half = nn.Linear(64, 64, dtype=torch.bfloat16)
    assert denormals(torch.optim.SGD(half.parameters(), 0.1)) == {}


def test_it_is_looked_at_rarely_and_only_where_values_may_be_read() -> None:
    model, optimizer = trained(1e-38)
    for reads, expected in ((True, "weights"), (False, "")):
        observer = LearningObserver(lambda: "x.py:1", reads_values=reads)
        for _ in range(16):
            observer.stepping(optimizer)
            observer.stepped(optimizer)
        assert observer.facts().denormal_in == expected
    assert model is not None


def test_what_is_said_of_them() -> None:
    (most,) = of_learning(LearningFacts(steps=5, denormal=0.97, denormal_in="weights"))
    assert most.is_critical and "97% of the weights are denormal" in most.title
    assert most.fix.line == "torch.set_flush_denormal(True)"
    (some,) = of_learning(LearningFacts(steps=5, denormal=0.2, denormal_in="gradients"))
    (kept,) = of_learning(LearningFacts(steps=5, denormal=0.9, denormal_in="averages"))
    assert (some.severity, kept.severity) == ("warning", "info")
    assert not of_learning(LearningFacts(steps=5, denormal=0.01, denormal_in="weights"))


def test_a_slope_that_is_infinite_is_told_from_the_first_gradients(tmp_path: Path) -> None:
    def run(distance: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        observer = LearningObserver(lambda: f"{script}:3", reads_values=True)
        for _ in range(2):
            optimizer.zero_grad()
            z = model(torch.randn(8, 4))
            loss = distance(((z[:, None] - z[None]) ** 2).sum(-1)).mean()
            observer.backward(loss)
            loss.backward()
            observer.stepping(optimizer)
            optimizer.step()
            observer.stepped(optimizer)
        return observer.facts().not_finite

    script = tmp_path / "train.py"
    script.write_text("# sqrt( is steep\nd = torch.sqrt(x)\n")
    assert run(torch.sqrt) == Misuse("slope_infinite", ("sqrt",), f"{script}:2")
    script = tmp_path / "more.py"
    script.write_text("d = torch.sqrt(x)\ne = torch.sqrt(y)\n")
    assert run(torch.sqrt) == Misuse("slope_infinite", ("sqrt",), None)
    assert run(lambda squares: squares**0.5).told == ("a power below 1",)
    assert run(lambda squares: torch.sqrt(squares + 1e-12)) is None
    assert run(lambda squares: squares) is None


def test_a_gap_in_the_data_is_told_where_the_loss_is_not_finite() -> None:
    def run(x: torch.Tensor) -> Any:
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with observing(place=lambda: "train.py:3", reads_values=True) as observer:
            for (batch,) in DataLoader(TensorDataset(x), 4):
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
        return observer.facts().not_finite

    x = torch.randn(16, 4)
    assert run(x) is None
    x[5, 2] = float("nan")
    assert run(x) == Misuse("data_not_finite", ("tensors[0]", "5", "1"))
    assert run(x.nan_to_num()) is None
    assert not_finite(None) is None
    told = not_finite(Misuse("data_not_finite", ("tensors[0]", "5", "1")))
    assert told is not None and "row 5" in told[0]


def test_the_line_that_sets_the_anomaly_mode(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    place = lambda: f"{script}:9"  # noqa: E731
    for text, line in (
        ("import torch\nif not fix: torch.autograd.set_detect_anomaly(True)\n", 2),
        ("with autograd.detect_anomaly():\n    pass\n", 1),
        ("torch.autograd.set_detect_anomaly(False)\nTrainer(detect_anomaly=True)\n", 2),
        ("torch.autograd.set_detect_anomaly(mode=False)\n", 0),
    ):
        script.write_text(text)
        linecache.clearcache()
        assert anomaly_at(place) == ()
        with torch.autograd.set_detect_anomaly(True):
            assert anomaly_at(place) == ((f"{script}:{line}" if line else ""),)
    (found,) = of_learning(LearningFacts(steps=5, anomaly=True, anomaly_at="train.py:2"))
    assert str(found.place) == "train.py:2"


def test_the_line_that_makes_a_loss_without_a_graph_a_root(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("loss = f(x)\nloss.requires_grad_(True)\nloss.backward()\n")
    assert rooted_at(f"{script}:3") == f"{script}:2"
    script = tmp_path / "more.py"
    script.write_text("p.requires_grad_(False)\nq.requires_grad = False\nloss.backward()\n")
    assert rooted_at(f"{script}:3") == f"{script}:3"
    script = tmp_path / "two.py"
    script.write_text("x.requires_grad = True\nloss.requires_grad_()\nloss.backward()\n")
    assert rooted_at(f"{script}:3") == f"{script}:3"


def test_numbers_that_are_not_finite_are_looked_at_without_a_warning() -> None:
    """Of NumPy's, which the script would print, or raise where it asks for that."""
    weight = torch.full((4, 8), math.inf, requires_grad=True)
    weight.grad = torch.full((4, 8), math.nan)
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not values._are_alike(weight)
        assert lies_by_pixels(torch.full((2, 3, 64, 64), math.inf)) is None
    even = torch.full((4, 8), 0.5, requires_grad=True)
    even.grad = torch.full((4, 8), 0.25)
    assert values._are_alike(even)
