"""Trainings that step and do not learn, or learn one batch; none of those that do what is meant."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, TensorDataset

from helpers_learning import found_of
from trainfit.hooks.learning import LearningObserver
from trainfit.results.findings import Finding

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def found(training: Callable[[LearningObserver], Any]) -> dict[str, Finding]:
    """Of a training on the CPU, whose values are read."""
    return found_of(training, reads_values=True)


def net(activation: type[nn.Module] = nn.ReLU, outputs: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), activation(), nn.Linear(32, outputs))


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), rate)


def train(
    observer: LearningObserver,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 9,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    between: Callable[[int], Any] = lambda step: None,
    x: Callable[[], Tensor] = lambda: torch.randn(8, 16),
    y: Callable[[], Tensor] = lambda: torch.randint(0, 4, (8,)),
) -> None:
    for step in range(steps):
        observer.called(model)
        optimizer.zero_grad()
        error = loss(model(x()), y())
        error.backward()
        between(step)
        optimizer.step()


def line(finding: Finding) -> str:
    assert finding.place is not None
    with open(finding.place.file) as file:
        return file.read().splitlines()[finding.place.line - 1]


def clipped(
    limit: float, call: Callable[..., Any] = nn.utils.clip_grad_norm_
) -> dict[str, Finding]:
    model = net()

    def training(observer: LearningObserver) -> None:
        clip = lambda step: call(model.parameters(), limit)  # noqa: E731
        train(observer, model, sgd(model), between=clip)

    return found(training)


@pytest.mark.parametrize("call", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_a_limit_that_leaves_nothing_of_gradients(call: Callable[..., Any]) -> None:
    told = clipped(0.0, call)
    assert [*told] == ["clipped_to_nothing"]  # and not that they are 0
    assert told["clipped_to_nothing"].is_critical
    assert "nothing is learned" in told["clipped_to_nothing"].title
    assert "call(model.parameters(), limit)" in line(told["clipped_to_nothing"])
    assert not clipped(1.0, call)


def test_a_negative_limit_turns_gradients_around() -> None:
    assert "point the other way" in clipped(-1.0)["clipped_to_nothing"].title


def test_a_norm_that_is_measured_is_no_limit() -> None:
    assert not clipped(float("inf"))
    model = net()

    def after(observer: LearningObserver) -> None:
        for _ in range(4):
            train(observer, model, sgd(model), steps=1)
            nn.utils.clip_grad_norm_(model.parameters(), 0.0)

    assert "clipped_to_nothing" not in found(after)


def test_units_that_began_alike() -> None:
    def run(first: Callable[[nn.Sequential], Any], kind: type[nn.Module]) -> dict[str, Finding]:
        def training(observer: LearningObserver) -> nn.Module:
            model = net(kind)
            first(model)
            train(observer, model, sgd(model))
            return model

        return found(training)

    def constant(model: nn.Sequential) -> None:
        for each in (model[0], model[2]):
            nn.init.constant_(each.weight, 0.01)
            nn.init.zeros_(each.bias)

    told = run(constant, nn.Tanh)["units_alike"]
    assert told.is_critical and told.title.startswith("All 32 units of 0.weight are one and")
    assert "nn.init.constant_" in line(told)
    assert not run(lambda model: nn.init.zeros_(model[2].weight), nn.Tanh)  # a last layer of 0
    assert not run(lambda model: nn.init.constant_(model[2].weight, 0.1), nn.Tanh)
    assert not run(lambda model: nn.init.constant_(model[0].bias, 0.1), nn.ReLU)


def test_gradients_that_no_weight_gets() -> None:
    def run(bias: float, last: type[nn.Module] = nn.Identity) -> dict[str, Finding]:
        model = net()
        nn.init.constant_(model[0].bias, bias)
        nn.init.constant_(model[2].bias, bias)
        model.append(last())
        return found(lambda observer: train(observer, model, sgd(model), steps=16))

    told = run(-1e4)["gradients_zero"]
    assert told.is_critical and "2 of the optimizer's 4 tensors" in told.title
    assert "torch.optim.SGD" in line(told)
    assert "gradients_zero" in run(-1e4, nn.ReLU)  # not even the last bias
    assert not run(0.0)


def test_units_that_are_dead() -> None:
    def run(bias: float, live: int, steps: int = 64) -> dict[str, Finding]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 4))
        with torch.no_grad():
            model[0].bias[live:] = bias
        return found(lambda observer: train(observer, model, sgd(model, 1e-3), steps=steps))

    told = run(-1e4, 3)["units_dead"]
    assert told.title.startswith("125 of the 128 units of 0.weight are dead")
    assert "torch.optim.SGD" in line(told)
    assert "units_dead" not in run(-1e4, 3, steps=32)
    assert "units_dead" not in run(-1e4, 64)
    assert not run(0.0, 3)


@pytest.mark.parametrize(
    ("optimizer", "is_told"),
    [
        (lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=50), True),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.02, weight_decay=25), True),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=5e-4), False),
        (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), False),
    ],
)
def test_weights_that_decay_to_nothing(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], is_told: bool
) -> None:
    model = net()
    nothing = lambda: torch.zeros(8, 16)  # noqa: E731 - no gradient holds weights up
    done = found(lambda observer: train(observer, model, optimizer(model), steps=128, x=nothing))
    assert ("weights_decayed" in done) == is_told
    if is_told:
        told = done["weights_decayed"]
        assert [*done] == ["weights_decayed"]  # and not that they are denormal, which they are
        assert told.is_critical and "removes 50% of each in every step" in told.title
        assert "torch.optim" in line(told)


def test_a_loss_that_has_reached_its_least_has_no_gradient() -> None:
    model = net(outputs=1)

    def hinge(out: Tensor, _: Tensor) -> Tensor:
        return torch.relu(out - 1e3).mean()

    assert not found(lambda observer: train(observer, model, sgd(model), loss=hinge))


def test_gradients_that_come_back() -> None:
    model, given = net(), [0.0] * 8 + [1.0] * 8

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) * given.pop(0) + 1.0

    told = found(lambda observer: train(observer, model, sgd(model), loss=loss, steps=16))
    assert "gradients_zero" not in told


def test_an_optimizer_that_gets_more_and_more_parameters() -> None:
    def run(make: Callable[[nn.Sequential], nn.Module]) -> dict[str, Finding]:
        model = net()
        model.append(nn.ModuleList(nn.Linear(4, 4) for _ in range(10)))
        later = model[3]
        del model[3]
        around = nn.Sequential(model)
        around.later = later

        def training(observer: LearningObserver) -> Any:
            optimizer = sgd(model)

            def add(step: int) -> None:
                if step % 2:
                    optimizer.add_param_group({"params": make(later[step]).parameters()})

            train(observer, around, optimizer, between=add, steps=13)
            return optimizer

        around.forward = lambda x: model(x)  # type: ignore[method-assign]
        later.extend(nn.Linear(4, 4) for _ in range(3))
        return found(training)

    told = run(lambda known: nn.Linear(4, 4))["parameters_added"]
    assert "6 times so far, from 4 to 16 tensors" in told.title
    assert "add_param_group" in line(told)
    # What a model had from the start is frozen first, and trained later.
    assert "parameters_added" not in run(lambda known: known)


@pytest.mark.filterwarnings("ignore:optimizer contains")
def test_parameters_that_an_optimizer_has_twice() -> None:
    model = net()
    every = [*model.parameters(), *model[2].parameters()]

    def training(observer: LearningObserver) -> None:
        train(observer, model, torch.optim.SGD(every, 0.1), steps=4)

    told = found(training)["parameters_twice"]
    assert "2 of 4 tensors" in told.title and "torch.optim.SGD(every" in line(told)


def test_a_profiler_that_records_all_steps() -> None:
    model = net()
    cpu = [ProfilerActivity.CPU]

    def run(steps: int = 64, after: int = 0, **options: Any) -> dict[str, Finding]:
        def training(observer: LearningObserver) -> None:
            optimizer = sgd(model)
            with profile(activities=cpu, **options) as profiler:
                ticks = (lambda step: profiler.step()) if options else (lambda step: None)
                train(observer, model, optimizer, steps=steps, between=ticks)
            train(observer, model, optimizer, steps=after)

        return found(training)

    told = run()["profiler_on"]
    assert "64 or more" in told.title and "with profile(" in line(told)
    assert not run(steps=32)
    assert not run(after=64)  # it was of the beginning
    assert not run(schedule=schedule(wait=1, warmup=1, active=2, repeat=1))


def test_what_follows_all_python_code() -> None:
    """And not what was switched off, or is trainfit's own."""
    model = net()

    def run(on: Callable[[], Any], off: Callable[[], Any], after: int = 0) -> dict[str, Finding]:
        def training(observer: LearningObserver) -> None:
            optimizer = sgd(model)
            before = sys.gettrace()
            on()
            try:
                train(observer, model, optimizer, steps=16)
            finally:
                off()
                sys.settrace(before)
            train(observer, model, optimizer, steps=after)

        return found(training)

    def trace(*_: Any) -> None:
        pass

    told = run(lambda: tracemalloc.start(5), tracemalloc.stop)["tracing_on"]
    assert "tracemalloc is on" in told.title and "5 frames" in told.title
    assert "sys.settrace is on" in run(lambda: sys.settrace(trace), trace)["tracing_on"].title
    assert not run(lambda: tracemalloc.start(1), tracemalloc.stop, after=16)
    trace.__module__ = "trainfit.scripts.phases"
    assert not run(lambda: sys.settrace(trace), trace) and not run(trace, trace)


def test_one_batch_for_all_steps() -> None:
    def run(steps: int, taken: int, samples: int = 40) -> dict[str, Finding]:
        model = net()
        data = TensorDataset(torch.randn(samples, 16), torch.randint(0, 4, (samples,)))

        def training(observer: LearningObserver) -> Any:
            loader = DataLoader(data, 8)
            batches = iter(loader)
            for _ in range(taken):
                x, y = next(batches)
            given = (lambda: x), (lambda: y)
            train(observer, model, sgd(model), steps=steps, x=given[0], y=given[1])
            return loader

        return found(training)

    told = run(64, 1)["one_batch"]
    assert told.title.endswith("the DataLoader has 5") and "iter(loader)" in line(told)
    assert not run(32, 1)
    assert not run(64, 1, samples=8)  # which is all of the data
    assert not run(64, 2)
