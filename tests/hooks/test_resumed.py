"""Data sets that change what they keep, checkpoints of which a part is lost, models whose layers
are made by their first batch; and the same as they are meant to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, Dataset, Subset

from helpers_learning import Kinds


def train(model: nn.Module, optimizer: Any, batches: Any) -> None:
    for x in batches:
        optimizer.zero_grad()
        model(x.float().cuda()).mean().backward()
        optimizer.step()


# -- data sets ---------------------------------------------------------------------------------


class Kept(Dataset[Any]):
    """Gives what it keeps."""

    def __init__(self, samples: Any) -> None:
        self.x = samples

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index]


class Scaled(Kept):
    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        x -= 0.5
        return x


class ByMethods(Kept):
    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        return x.sub_(0.5).div_(0.25)


class OfArray(Kept):
    def __getitem__(self, index: int) -> Any:
        x = torch.from_numpy(self.x[index])
        x[0] = x[0] / 255
        return x


class Copied(Kept):
    def __getitem__(self, index: int) -> Any:
        x = self.x[index].clone()
        x -= 0.5
        return x


class Renamed(Kept):
    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        x = x - 0.5
        x /= 0.25
        return x


class Clamped(Kept):
    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        x[x < 0] = 0
        x.clamp_(0, 1)
        return x


def of_data(data: Any, **options: Any) -> Callable[[], None]:
    def training() -> None:
        model = nn.Linear(4, 2).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, optimizer, DataLoader(data, 4, **options))

    return training


def rows() -> torch.Tensor:
    return torch.rand(16, 4)


@pytest.mark.parametrize(
    "data",
    [
        lambda: Scaled(rows()),
        lambda: Scaled(rows().numpy()),
        lambda: Scaled(list(rows())),
        lambda: Subset(Scaled(rows()), range(8)),
        lambda: ByMethods(rows()),
        lambda: OfArray(rows().numpy()),
    ],
)
def test_samples_that_are_changed_where_they_are_kept(kinds: Kinds, data: Any) -> None:
    found = kinds(of_data(data()))["samples_changed"]
    assert found.place is not None and found.place.file.endswith("test_resumed.py")
    assert ".clone()" in found.fix.action and "self.x" in found.title


@pytest.mark.parametrize(
    "data",
    [
        lambda: Kept(rows()),
        lambda: Copied(rows()),
        lambda: Renamed(rows()),
        lambda: Clamped(rows()),
        lambda: Scaled(np.random.rand(16)),  # a number is no view
        lambda: Scaled([1.0] * 16),
    ],
)
def test_samples_that_are_given_as_they_are_kept(kinds: Kinds, data: Any) -> None:
    def training() -> None:
        DataLoader(data(), 4).__iter__()
        of_data(Kept(rows()))()

    assert "samples_changed" not in kinds(training)


def test_workers_of_an_epoch_change_copies(kinds: Kinds) -> None:
    def training() -> None:
        of_data(Scaled(rows()), num_workers=1)()

    assert "samples_changed" not in kinds(training)


# -- checkpoints -------------------------------------------------------------------------------


def resuming(
    make: Callable[[Any], Any], *, moved: bool = True, restores: bool = False, first: bool = False
) -> Callable[[], Any]:
    """A training goes on with the optimizer's state of a run whose schedule had ``moved``; its own
    schedule is made ``first``, and its state ``restores``, too."""

    def training() -> Any:
        model = nn.Linear(4, 2).cuda()
        before = torch.optim.SGD(model.parameters(), 0.1)
        old = make(before)
        for _ in range(3 if moved else 0):
            before.param_groups[0]["lr"] *= 0.5
            old.last_epoch += 1
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = make(optimizer) if first else None
        optimizer.load_state_dict(before.state_dict())
        scheduler = scheduler or make(optimizer)
        if restores:
            scheduler.load_state_dict(old.state_dict())
        train(model, optimizer, torch.rand(4, 3, 4))
        return scheduler

    return training


@pytest.mark.parametrize("first", [True, False])
def test_a_schedule_whose_state_is_not_loaded(kinds: Kinds, first: bool) -> None:
    found = kinds(resuming(lambda it: schedules.CosineAnnealingLR(it, 50), first=first))
    assert "CosineAnnealingLR begins from its start" in found["schedule_restarted"].title


@pytest.mark.parametrize(
    "training",
    [
        resuming(lambda it: schedules.CosineAnnealingLR(it, 50), restores=True),
        resuming(lambda it: schedules.CosineAnnealingLR(it, 50), moved=False),
        resuming(lambda it: schedules.ReduceLROnPlateau(it)),
    ],
    ids=["loaded", "the run before had only begun", "goes by a loss"],
)
def test_a_schedule_that_goes_on(kinds: Kinds, training: Any) -> None:
    assert "schedule_restarted" not in kinds(training)


def initializing(order: str) -> Callable[[], None]:
    def init(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def training() -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
        state = nn.Sequential(*[type(each)(4, 8) for each in model[:1]], *model[1:]).state_dict()
        if order == "before":
            model.apply(init)
        model.load_state_dict(state)
        if order == "after":
            model.apply(init)
        elif order == "its data after":
            for each in model.parameters():
                nn.init.normal_(each.data, 0.0, 0.02)
        elif order == "the last layer":
            model[3].apply(init)
        model.cuda()
        train(model, torch.optim.SGD(model.parameters(), 0.1), torch.rand(4, 3, 4))

    return training


@pytest.mark.parametrize("order", ["after", "its data after"])
def test_weights_that_are_initialized_after_they_were_loaded(kinds: Kinds, order: str) -> None:
    found = kinds(initializing(order))["weights_initialized_again"]
    assert found.place is not None and "3 of 3 matrices" in found.title


@pytest.mark.parametrize("order", ["before", "the last layer", "never"])
def test_weights_that_are_kept(kinds: Kinds, order: str) -> None:
    assert "weights_initialized_again" not in kinds(initializing(order))


def test_a_layer_that_its_first_batch_makes_is_looked_at(kinds: Kinds) -> None:
    """Asked for its numbers before, it raises, and nothing more would be seen of the training."""

    def training() -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LazyLinear(2)).cuda()
        model(torch.rand(1, 4).cuda())
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        train(model, optimizer, torch.rand(4, 3, 4))

    assert "rate_zero" in kinds(training)
