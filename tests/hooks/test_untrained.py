"""Which tensors without a gradient are said: not those that a library's model has aside."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers_learning import findings_of, train
from trainfit.hooks.learning import LearningObserver


class Pooler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(x)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """As Transformers' BertModel: it pools, whether its caller uses that or not."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
        self.pooler = Pooler()
        self.mask = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        last = self.layers(x)
        return last, self.pooler(last)


class Sentences(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head, self.other = encoder, nn.Linear(8, 1), nn.Linear(8, 1)
        self.cuts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.encoder(x)[0]
        return self.head(last.detach() if self.cuts else last)  # type: ignore[no-any-return]


@pytest.fixture
def of_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder and its pooler are an installed package's."""
    module = types.ModuleType("sentence_models")
    module.__file__ = str(Path(torch.__file__).parents[1] / "sentence_models" / "bert.py")
    monkeypatch.setitem(sys.modules, "sentence_models", module)
    for each in (Encoder, Pooler):
        monkeypatch.setattr(each, "__module__", "sentence_models")


def titles(model: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    def training(observer: LearningObserver) -> None:
        optimizer = torch.optim.SGD(parameters, 0.1)
        train(observer, model, lambda _: model(torch.randn(4, 8)).mean(), range(4), optimizer)

    return [each.title for each in findings_of(training) if each.kind == "no_gradient"]


def without_other(model: Sentences) -> list[nn.Parameter]:
    return [each for name, each in model.named_parameters() if not name.startswith("other")]


@pytest.mark.usefixtures("of_library")
def test_a_librarys_pooler_that_is_not_used_is_nobodys_mistake() -> None:
    model = Sentences(Encoder(layers=20))
    assert titles(model, without_other(model)) == []


@pytest.mark.usefixtures("of_library")
def test_a_part_of_the_scripts_own_that_is_not_used_is_said() -> None:
    model = Sentences(Encoder(layers=20))
    (title,) = titles(model, list(model.parameters()))
    assert title.startswith("2 of 47 trainable tensors") and "other.weight" in title
    model = Sentences(Encoder(layers=20))
    model.encoder.register_module("pooler", nn.Linear(8, 8))
    (title,) = titles(model, without_other(model))
    assert "encoder.pooler.weight" in title and "mask" not in title


@pytest.mark.usefixtures("of_library")
def test_a_librarys_model_that_is_cut_off_from_the_loss_is_said() -> None:
    model = Sentences(Encoder(layers=20))
    model.cuts = True
    (title,) = titles(model, without_other(model))
    assert title.startswith("43 of 45 trainable tensors")


@pytest.mark.usefixtures("of_library")
def test_many_of_a_librarys_tensors_are_said() -> None:
    model = Sentences(Encoder(layers=2))
    (title,) = titles(model, without_other(model))
    assert title.startswith("3 of 9 trainable tensors")
