"""Loops of a forward pass over samples and time steps, told from loops over layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from trainfit.results.runs.watched import ElementLoop
from trainfit.watch.recorder.looks.element_loops import ElementLoops
from trainfit.watch.recorder.looks.stacks import users_stack


class Looked(nn.Module):
    """A layer that is looked at each time that it is called."""

    def __init__(self, looks: ElementLoops) -> None:
        super().__init__()
        self.looks = looks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.looks.look(threading.get_ident(), users_stack(threading.get_ident()))
        return x


class Model(nn.Module):
    def __init__(self, looks: ElementLoops, way: Callable[[Model, torch.Tensor], object]) -> None:
        super().__init__()
        self.layer, self.way = Looked(looks), way
        self.layers = nn.ModuleList(self.layer for _ in range(12))

    def forward(self, x: torch.Tensor) -> object:
        return self.way(self, x)


def by_time(model: Model, x: torch.Tensor) -> None:
    for t in range(x.shape[1]):
        model.layer(x[:, t])


def by_sample(model: Model, x: torch.Tensor) -> None:
    for _, sample in enumerate(x):
        model.layer(sample)


def unbound(model: Model, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([model.layer(each) for each in x.unbind(1)])


def by_layer(model: Model, x: torch.Tensor) -> torch.Tensor:
    for number, layer in enumerate(model.layers):
        x = layer(x) if number else x
    return x


def by_index(model: Model, x: torch.Tensor) -> torch.Tensor:
    outputs = [x] * 12
    for i in range(12):
        outputs[i] = model.layers[i](x[:2])
    return outputs[0]


def by_expert(model: Model, x: torch.Tensor) -> torch.Tensor:
    chosen = x.argmax(1)
    for expert in range(12):
        x[chosen == expert] = model.layer(x[chosen == expert])
    return x


def by_weighted_expert(model: Model, x: torch.Tensor) -> torch.Tensor:
    weights = x.softmax(1)
    return sum(layer(x) * weights[:, i : i + 1] for i, layer in enumerate(model.layers))


def straight(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.layer(x)
    return x


def found(way: Callable[[Model, torch.Tensor], object]) -> Iterator[ElementLoop]:
    looks = ElementLoops()
    Model(looks, way)(torch.zeros(16, 20))
    assert looks.looks
    yield from looks.summary()


@pytest.mark.parametrize(
    ("way", "over", "rounds"),
    [(by_time, "range(x.shape[1])", 20), (by_sample, "enumerate(x)", 16)],
)
def test_loops_over_elements(
    way: Callable[[Model, torch.Tensor], object], over: str, rounds: int
) -> None:
    (loop,) = found(way)
    line = way.__code__.co_firstlineno + 1
    assert loop.place.endswith(f"test_element_loops.py:{line}")
    assert (loop.over, loop.rounds, loop.looks, loop.of_looks) == (over, rounds, rounds, rounds)


def test_a_comprehension_over_what_unbind_gives() -> None:
    (loop,) = found(unbound)
    assert loop.over == "x.unbind(1)" and loop.rounds == 20


@pytest.mark.parametrize("way", [by_layer, by_index, by_expert, by_weighted_expert, straight])
def test_loops_over_layers_and_experts_are_none(
    way: Callable[[Model, torch.Tensor], object],
) -> None:
    assert not [*found(way)]


def test_outside_of_a_model_nothing_is_looked_at() -> None:
    looks = ElementLoops()
    for _ in torch.zeros(20):
        assert not looks.look(threading.get_ident(), users_stack(threading.get_ident()))
    assert looks.looks == 0 and not looks.summary()
