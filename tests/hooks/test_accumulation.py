"""Steps of several batches: which gradients they use, and what stays in memory until they do; what
forums ask about averages, last activations, draws and workers. Each with a twin that is right."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    get_worker_info,
    random_split,
)

from helpers_learning import Kinds, observing
from trainfit.findings.training.learning import of_learning
from trainfit.simgpu.session import Simulation

_STEPS = 4


def net(*last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), *last).cuda()


def classes(batches: int = 16) -> DataLoader[Any]:
    rows = 4 * batches
    return DataLoader(TensorDataset(torch.randn(rows, 8), torch.arange(rows) % 4), 4)


def accumulating(
    steps: Callable[[int], bool], each: Callable[[nn.Module], Any] = lambda _: None
) -> Any:
    """Two epochs of micro-batches: a step where it is to be one, ``each`` after each."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for index, (x, y) in enumerate(classes()):
            (F.cross_entropy(model(x.cuda()), y.cuda()) / 4).backward()
            each(model)
            if steps(index):
                optimizer.step()
                optimizer.zero_grad()


def test_a_first_step_of_one_micro_batch(kinds: Kinds) -> None:
    found = kinds(lambda: accumulating(lambda index: index % 4 == 0))["first_step_early"]
    assert found.place is not None and "others those of 4" in found.title


@pytest.mark.parametrize(
    "steps",
    [lambda index: (index + 1) % 4 == 0, lambda index: True, lambda index: index in (3, 5, 11)],
    ids=["counted from 1", "each", "of other numbers"],
)
def test_other_first_steps(kinds: Kinds, steps: Callable[[int], bool]) -> None:
    assert "first_step_early" not in kinds(lambda: accumulating(steps))


def test_one_step_to_begin_with_is_of_another_line(kinds: Kinds) -> None:
    def training() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x, y = next(iter(classes()))
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()  # are there gradients?
        optimizer.step()
        for index, (x, y) in enumerate(classes()):
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            if (index + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    assert "first_step_early" not in kinds(training)


def attacking(order: str) -> Callable[[], Any]:
    """Each step looks for an adversarial example, by a pass of its own, and trains on it."""

    def training() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(_STEPS):
            x, y = torch.randn(4, 8).cuda(), torch.zeros(4, dtype=torch.long).cuda()
            if order == "zeroed before":
                optimizer.zero_grad()
            changed = x.clone().requires_grad_()
            F.cross_entropy(model(changed), y).backward()
            assert changed.grad is not None
            changed = (changed + changed.grad.sign()).detach()
            if order == "zeroed after":
                optimizer.zero_grad()
            F.cross_entropy(model(changed), y).backward()
            optimizer.step()

    return training


@pytest.mark.parametrize("order", ["zeroed before", "zeroed after"])
def test_a_pass_to_the_inputs_is_no_micro_batch(kinds: Kinds, order: str) -> None:
    assert not {"gradients_dropped", "loss_not_divided"} & kinds(attacking(order)).keys()


def test_a_pass_over_another_batch_whose_gradients_are_dropped(kinds: Kinds) -> None:
    def training() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(_STEPS):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(4, 8).cuda()).mean().backward()
            optimizer.step()

    assert "gradients_dropped" in kinds(training)


@pytest.mark.parametrize("carried", [True, False])
def test_gradients_that_parameters_carry_until_the_step(kinds: Kinds, carried: bool) -> None:
    """As Opacus does, whose optimizer sums what it clipped of each micro-batch; the last pass is
    not yet part of it."""

    def training() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sums: list[dict[str, Any]] = [{} for _ in model.parameters()]
        for _ in range(_STEPS):
            for last in (False, True):
                model(torch.randn(4, 8).cuda()).square().mean().backward()
                for parameter, kept in zip(model.parameters(), sums, strict=True):
                    of_it = parameter.__dict__ if carried else kept
                    of_it["summed_grad"] = of_it.get("summed_grad", 0) + parameter.grad
                    if last and carried:
                        parameter.grad = of_it.pop("summed_grad")
                if last:
                    optimizer.step()
                optimizer.zero_grad()

    assert ("gradients_dropped" in kinds(training)) is not carried


def closing(zeroes: Callable[[torch.optim.Optimizer, nn.Module], Any]) -> Callable[[], Any]:
    """LBFGS, with what ``zeroes`` does first in its closure."""

    def training() -> None:
        model = nn.Linear(8, 1).cuda()
        x, y = torch.randn(16, 8).cuda(), torch.randn(16, 1).cuda()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)

        def closure() -> Any:
            zeroes(optimizer, model)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        for _ in range(_STEPS):
            optimizer.zero_grad()
            optimizer.step(closure)

    return training


def test_a_closure_that_adds_its_gradients_up(kinds: Kinds) -> None:
    found = kinds(closing(lambda *_: None))
    assert (
        "no_gradient" not in found
        and "first line of the closure" in found["closure_adds"].fix.action
    )


@pytest.mark.parametrize(
    "zeroes",
    [
        lambda optimizer, _: optimizer.zero_grad(),
        lambda optimizer, _: optimizer.zero_grad(set_to_none=False),
        lambda _, model: [setattr(each, "grad", None) for each in model.parameters()],
        lambda _, model: [
            each.grad.zero_() for each in model.parameters() if each.grad is not None
        ],
    ],
)
def test_a_closure_that_sets_its_gradients_to_zero(kinds: Kinds, zeroes: Any) -> None:
    assert not {"closure_adds", "no_gradient"} & kinds(closing(zeroes)).keys()


@pytest.mark.parametrize("trains", [True, False])
def test_steps_before_a_training_that_goes_on(simulation: Simulation, trains: bool) -> None:
    """A schedule that is brought to where the run before ended."""
    with observing(simulation) as observer:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(_STEPS):
            optimizer.step()
        for x, y in classes(4):
            observer.called(model)
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            if trains:
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
        found = {each.kind for each in of_learning(observer.facts())}
    assert ("no_gradient" in found) is not trains


def _clips(model: nn.Module, limit: float = 1.0) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), limit)


def test_gradients_that_are_clipped_after_each_micro_batch(kinds: Kinds) -> None:
    found = kinds(lambda: accumulating(lambda index: index % 4 == 3, _clips))["clipped_in_parts"]
    assert found.place is not None and "4 micro-batches" in found.title


@pytest.mark.parametrize(
    "each",
    [lambda model: _clips(model, 1e6), lambda _: None],
    ids=["their norm is measured", "not at all"],
)
def test_micro_batches_that_are_not_clipped(kinds: Kinds, each: Callable[[Any], Any]) -> None:
    found = kinds(lambda: accumulating(lambda index: index % 4 == 3, each))
    assert "clipped_in_parts" not in found


def test_gradients_that_are_clipped_in_each_step(kinds: Kinds) -> None:
    assert "clipped_in_parts" not in kinds(lambda: accumulating(lambda _: True, _clips))


def summed(batches: int, how: str = "sum") -> None:
    """Epochs of so many batches, of one backward pass each, or one a batch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(_STEPS):
        losses = []
        for x, y in classes(batches):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            if how == "each":
                loss.backward()
            losses.append(loss.detach() if how == "each" else loss)
        if how == "sum":
            sum(losses).backward()  # type: ignore[union-attr]
        elif how == "mean":
            torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_losses_of_many_batches_before_one_backward_pass(kinds: Kinds, how: str) -> None:
    found = kinds(lambda: summed(8, how))["backward_of_many"]
    assert found.place is not None and "8 batches" in found.title


@pytest.mark.parametrize(("batches", "how"), [(8, "each"), (2, "sum")])
def test_losses_of_few_batches(kinds: Kinds, batches: int, how: str) -> None:
    assert "backward_of_many" not in kinds(lambda: summed(batches, how))


def test_a_loss_of_many_terms_of_one_batch(kinds: Kinds) -> None:
    def training() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, _ in classes():
            output = model(x.cuda())
            sum(output[:, part].square().mean() for part in [0, 1, 2, 3] * 4).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert "backward_of_many" not in kinds(training)


def scaled(order: str) -> None:
    """Two models, one scaler: when is it updated?"""
    one, other = net(), net()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (one, other)]
    scaler = torch.amp.GradScaler("cuda")
    for x, y in classes():
        for model, optimizer in zip((one, other), optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x.cuda()), y.cuda())).backward()
            if order == "in turns":
                scaler.step(optimizer)
                scaler.update()
        if order != "in turns":
            for optimizer in optimizers:
                scaler.step(optimizer)
                if order == "between":
                    scaler.update()
            if order == "at the end":
                scaler.update()


@pytest.mark.parametrize(
    ("order", "is_wrong"), [("between", True), ("at the end", False), ("in turns", False)]
)
def test_an_update_of_the_scale_between_two_steps(kinds: Kinds, order: str, is_wrong: bool) -> None:
    found = kinds(lambda: scaled(order))
    assert ("scale_updated_between" in found) == is_wrong


def averaged(ends: Callable[[Any, Any], Any], **options: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).cuda()
    average = swa_utils.AveragedModel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for x, y in classes(8):
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()
        average.update_parameters(model)
    ends(average, [x.cuda() for x, _ in classes(2)])
    average.eval()
    with torch.no_grad():
        average(torch.randn(4, 8).cuda())


def _own_pass(average: nn.Module, batches: list[torch.Tensor]) -> None:
    average.train()
    with torch.no_grad():
        for x in batches:
            average(x)


def test_an_average_with_the_statistics_of_the_model(kinds: Kinds) -> None:
    found = kinds(lambda: averaged(lambda *_: None))["norm_of_average"]
    assert found.place is not None and "update_bn" in found.fix.line


@pytest.mark.parametrize("ends", [lambda it, of: swa_utils.update_bn(of, it), _own_pass])
def test_an_average_with_statistics_of_its_own(kinds: Kinds, ends: Any) -> None:
    assert "norm_of_average" not in kinds(lambda: averaged(ends))


def test_an_ema_is_near_its_model(kinds: Kinds) -> None:
    ema = swa_utils.get_ema_multi_avg_fn(0.9)
    assert "norm_of_average" not in kinds(lambda: averaged(lambda *_: None, multi_avg_fn=ema))


@pytest.mark.parametrize(("calls", "frozen", "is_told"), [(6, False, True), (6, True, False),
                                                         (2, False, False)])  # fmt: skip
def test_features_that_keep_the_graphs_of_a_backbone(
    simulation: Simulation, calls: int, frozen: bool, is_told: bool
) -> None:
    """A head is trained on what a backbone gave before, in several calls; two may be a trial."""
    with observing(simulation, counts_in_place=False) as observer:
        backbone, head = net().requires_grad_(not frozen), nn.Linear(4, 4).cuda()
        features = []
        for x, _ in classes(calls):
            observer.called(backbone)
            features.append(backbone(x.cuda()))
            observer.returned(backbone, features[-1])
        optimizer = torch.optim.SGD(head.parameters(), 0.1)
        for each in [*features, *features]:
            observer.called(head)
            optimizer.zero_grad()
            head(each.detach()).mean().backward()
            optimizer.step()
        found = {each.kind: each for each in of_learning(observer.facts())}
    assert ("graph_unused" in found) == is_told
    assert not is_told or found["graph_unused"].place is not None


def compared(last: nn.Module | None, targets: torch.Tensor) -> None:
    model = net(*([last] if last is not None else []))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in DataLoader(TensorDataset(torch.randn(64, 8), targets), 16):
        optimizer.zero_grad()
        F.mse_loss(model(x.cuda()), y.cuda()).backward()
        optimizer.step()


_BOTH = torch.linspace(-1, 1, 256).reshape(64, 4)


@pytest.mark.parametrize(
    ("last", "targets"),
    [(nn.ReLU(), _BOTH), (nn.Sigmoid(), _BOTH * 3), (nn.Tanh(), _BOTH * 100)],
    ids=["relu", "sigmoid", "tanh"],
)
def test_targets_that_the_last_activation_never_gives(
    kinds: Kinds, last: nn.Module, targets: torch.Tensor
) -> None:
    found = kinds(lambda: compared(last, targets))["targets_unreachable"]
    assert type(last).__name__.lower() in found.title and found.place is not None


@pytest.mark.parametrize(
    ("last", "targets"),
    [
        (nn.ReLU(), _BOTH.abs()),
        (nn.Sigmoid(), _BOTH.abs()),
        (nn.Tanh(), _BOTH),
        (None, _BOTH * 100),
        (nn.ReLU(), torch.where(torch.arange(256).reshape(64, 4) % 64 == 0, -1.0, 1.0)),
    ],
    ids=["relu", "sigmoid", "tanh", "none", "single ones"],
)
def test_targets_that_the_last_activation_gives(
    kinds: Kinds, last: nn.Module | None, targets: torch.Tensor
) -> None:
    assert "targets_unreachable" not in kinds(lambda: compared(last, targets))


def drawn(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    policy = net()
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    for _ in range(_STEPS):
        scores = policy(torch.randn(16, 8).cuda())
        action = draw(scores).reshape(16, 1)
        optimizer.zero_grad()
        (-F.log_softmax(scores, 1).gather(1, action).mean()).backward()
        optimizer.step()


def test_scores_that_classes_are_drawn_with(kinds: Kinds) -> None:
    found = kinds(lambda: drawn(lambda scores: torch.multinomial(scores, 1)))["scores_drawn"]
    assert "softmax" in found.fix.line and found.place is not None
    categorical = torch.distributions.Categorical
    found_too = kinds(lambda: drawn(lambda it: categorical(it, validate_args=False).sample()))
    assert "scores_drawn" in found_too


@pytest.mark.parametrize(
    "draw",
    [
        lambda scores: torch.multinomial(scores.softmax(1), 1),
        lambda scores: torch.multinomial(F.relu(scores) + 0.1, 1),
        lambda scores: torch.distributions.Categorical(logits=scores).sample(),
        lambda scores: torch.distributions.Categorical(scores.softmax(1)).sample(),
    ],
)
def test_probabilities_that_classes_are_drawn_with(
    kinds: Kinds, draw: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert "scores_drawn" not in kinds(lambda: drawn(draw))


class Noisy(Dataset[Any]):
    def __init__(self, *, own: bool = True) -> None:
        self.rng = np.random.default_rng(0) if own else None

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return self.drawn(), index % 4

    def drawn(self) -> torch.Tensor:
        assert self.rng is not None
        return torch.from_numpy(self.rng.normal(size=8).astype("float32"))


class MadeInWorker(Noisy):
    def drawn(self) -> torch.Tensor:
        if self.rng is None:
            self.rng = np.random.default_rng(torch.initial_seed())
        return super().drawn()


class Shuffled(Noisy):
    """Its generator is for the order that it makes once."""

    def __init__(self) -> None:
        super().__init__()
        assert self.rng is not None
        self.order = self.rng.permutation(32)

    def drawn(self) -> torch.Tensor:
        return torch.ones(8) * float(self.order[0])


class Transformed(Noisy):
    """Its transform has the generator."""

    def __init__(self) -> None:
        super().__init__(own=False)
        self.transform = Jitter()

    def drawn(self) -> torch.Tensor:
        return self.transform(torch.ones(8))


class Jitter:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(8, generator=self.generator)


def worked(data: Dataset[Any], **options: Any) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in DataLoader(data, 16, **{"num_workers": 2, **options}):
        optimizer.zero_grad()
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()


def test_a_generator_that_workers_copy(kinds: Kinds) -> None:
    found = kinds(lambda: worked(Noisy()))["generator_of_workers"]
    assert "dataset.rng" in found.title and found.place is not None
    parts = kinds(lambda: worked(random_split(Transformed(), [32, 0])[0]))
    assert "dataset.transform.generator" in parts["generator_of_workers"].title


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (Noisy(), {"num_workers": 0}),
        (Noisy(), {"worker_init_fn": print}),
        (MadeInWorker(own=False), {}),
        (MadeInWorker(), {}),
        (Shuffled(), {}),
    ],
)
def test_generators_that_workers_may_have(
    kinds: Kinds, data: Dataset[Any], options: dict[str, Any]
) -> None:
    assert "generator_of_workers" not in kinds(lambda: worked(data, **options))


class OfFile(Dataset[Any]):
    """Reads its samples of a file that is open before its workers are."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path.open("rb")

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        self.file.seek(index)
        return torch.full((8,), float(self.file.read(1)[0])), 0


class OpenedByWorker(OfFile):
    """Opens it where a sample is read."""

    def __getitem__(self, index: int) -> Any:
        self.file = self.path.open("rb")
        return super().__getitem__(index)


def test_a_file_that_is_open_before_the_workers(kinds: Kinds, tmp_path: Path) -> None:
    path = tmp_path / "samples"
    path.write_bytes(bytes(32))
    found = kinds(lambda: worked(OfFile(path)))["handle_of_workers"]
    assert found.title.startswith("dataset.file (_io.") and found.place is not None
    assert "handle_of_workers" not in kinds(lambda: worked(OpenedByWorker(path)))
    for options in ({"num_workers": 0}, {"num_workers": 1}, {"worker_init_fn": print}):
        assert "handle_of_workers" not in kinds(
            lambda options=options: worked(OfFile(path), **options)  # type: ignore[misc]
        )


def of_files(files: list[str]) -> Iterator[Any]:
    for _ in files:
        yield from ((torch.zeros(8), 0) for _ in range(32))


def by_slice(self: Any) -> Iterator[Any]:
    worker: Any = get_worker_info()
    yield from of_files(self.files[worker.id :: worker.num_workers])


def by_islice(self: Any) -> Iterator[Any]:
    worker: Any = get_worker_info()
    yield from of_files(list(itertools.islice(self.files, worker.id, None, worker.num_workers)))


def by_names(self: Any) -> Iterator[Any]:
    worker: Any = get_worker_info()
    mine, n = (worker.id, worker.num_workers) if worker else (0, 1)
    yield from of_files(self.files[mine::n])


def by_rest(self: Any) -> Iterator[Any]:
    worker: Any = get_worker_info()
    mine, n = worker.id, worker.num_workers if worker else 1
    yield from of_files([each for at, each in enumerate(self.files) if at % n == mine])


def by_what_is_left_out(self: Any) -> Iterator[Any]:
    worker: Any = get_worker_info()
    for at, each in enumerate(self.files):
        if worker.id != at % worker.num_workers:
            continue
        yield from of_files([each])


def by_sample(self: Any) -> Iterator[Any]:
    """Every worker has samples of each file."""
    worker: Any = get_worker_info()
    samples = (each for file in self.files for each in [file] * 8)
    for at, _ in enumerate(samples):
        if at % worker.num_workers == worker.id:
            yield from of_files(["one"])


def sharded(files: int, iterate: Callable[[Any], Iterator[Any]]) -> IterableDataset[Any]:
    data: Any = type("Sharded", (IterableDataset,), {"__iter__": iterate})()
    data.files = [str(each) for each in range(files)]
    return data  # type: ignore[no-any-return]


@pytest.mark.parametrize("iterate", [by_slice, by_islice, by_names, by_rest, by_what_is_left_out])
def test_fewer_shards_than_workers(kinds: Kinds, iterate: Callable[[Any], Iterator[Any]]) -> None:
    found = kinds(lambda: worked(sharded(1, iterate)))["workers_without_shard"]
    assert found.title.startswith("1 of 2 workers get samples") and found.place is not None
    assert "workers_without_shard" not in kinds(lambda: worked(sharded(2, iterate)))


def test_samples_that_workers_share_are_no_shards(kinds: Kinds) -> None:
    assert "workers_without_shard" not in kinds(lambda: worked(sharded(1, by_sample)))
    assert "workers_without_shard" not in kinds(lambda: worked(Noisy()))


def pinning(*, before: bool) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in [(x.pin_memory() if before else x, y) for x, y in classes()]:
        pinned = x if before else x.pin_memory()
        optimizer.zero_grad()
        F.cross_entropy(model(pinned.to("cuda", non_blocking=True)), y.cuda()).backward()
        optimizer.step()


class Rows(list[torch.Tensor]):
    """A batch that a DataLoader pins by this method."""

    def pin_memory(self) -> Rows:
        return Rows(each.pin_memory() for each in self)


def test_batches_that_a_loader_pins_by_their_method(kinds: Kinds) -> None:
    def training() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        rows: Any = torch.randn(32, 8)
        for batch in DataLoader(rows, 4, collate_fn=Rows, pin_memory=True):
            optimizer.zero_grad()
            model(torch.stack(batch).cuda()).mean().backward()
            optimizer.step()

    assert "pinned_by_hand" not in kinds(training)


def test_batches_that_are_pinned_by_hand(kinds: Kinds) -> None:
    found = kinds(lambda: pinning(before=False))["pinned_by_hand"]
    assert found.place is not None and "pin_memory=True" in found.fix.action
    assert "pinned_by_hand" not in kinds(lambda: pinning(before=True))


def test_activations_that_are_saved_on_the_host_are_not_pinned_by_hand(kinds: Kinds) -> None:
    """Their memory is made pinned, and nothing is copied into it on the host."""

    def training() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in classes():
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                loss = F.cross_entropy(model(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()
            assert torch.empty(8, pin_memory=True).is_pinned()

    assert "pinned_by_hand" not in kinds(training)


def test_results_that_are_copied_to_the_host_are_not_pinned_by_hand(kinds: Kinds) -> None:
    def training() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in classes():
            output = model(x.cuda())
            F.cross_entropy(output, y.cuda()).backward()
            optimizer.step()
            assert output.detach().to("cpu", non_blocking=True).is_pinned()

    assert "pinned_by_hand" not in kinds(training)
