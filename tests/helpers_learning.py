"""A training that is looked at as a simulated or a watched run looks at it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from trainfit.findings.training.learning import of_learning
from trainfit.hooks.learning import LearningObserver
from trainfit.hooks.learning_hooks import install
from trainfit.results.findings import Finding
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation

#: Findings of a training by their kind.
Found = dict[str, Finding]
#: What trains, and tells the observer which models are called.
Training = Callable[[LearningObserver], Any]
#: Runs a training, and gives its findings by their kind.
Kinds = Callable[[Callable[[], Any]], Found]


@contextlib.contextmanager
def observing(
    simulation: Simulation | None = None,
    place: Callable[[], Any] = user_frame,
    **options: bool,
) -> Iterator[LearningObserver]:
    """PyTorch's calls in the block are told to an observer with these options, and those of the
    arithmetic on a simulated device where one is given."""
    patches = PatchSet()
    observer = LearningObserver(place, **options)
    told: tuple[Any, ...] = ()
    if simulation is not None:
        told = simulation.on_arithmetic, simulation.on_view, simulation.on_result
    install(observer, patches, *told)
    try:
        yield observer
    finally:
        patches.restore()


def findings_of(
    training: Training, simulation: Simulation | None = None, **options: bool
) -> tuple[Finding, ...]:
    """What is found of a training: on a simulated device, on the CPU without one. What it returns
    lives until then."""
    options = options or {"counts_in_place": simulation is None}
    with observing(simulation, **options) as observer:
        kept = training(observer)
        found = of_learning(observer.facts())
        del kept
    return found


def found_of(training: Training, simulation: Simulation | None = None, **options: bool) -> Found:
    """… by its kind."""
    return {each.kind: each for each in findings_of(training, simulation, **options)}


def train(
    observer: LearningObserver,
    model: nn.Module,
    loss: Callable[..., torch.Tensor],
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    between: Callable[[], Any] = lambda: None,
) -> None:
    """A step of each batch, by the loss of a batch; ``between``: after its backward pass."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        observer.called(model)
        optimizer.zero_grad()
        loss(batch).backward()
        between()
        optimizer.step()


def on_gpu(
    model: nn.Module, loss: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
) -> Callable[[Any], torch.Tensor]:
    """A loss of a batch (inputs and targets), which is moved to the GPU, by one of the model and of
    both."""
    return lambda batch: loss(model, batch[0].cuda(), batch[1].cuda())
