"""Numbers that come of others without an error: roots, angles, bytes, predictions; targets, data
sets and tables that are not what a loss or an optimizer is for. What is told, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from helpers_learning import found_of, on_gpu, train
from trainfit.findings.training.numbers import NUMBERS
from trainfit.hooks.learning import LearningObserver
from trainfit.results.findings import Finding
from trainfit.simgpu.session import Simulation

Tensor = torch.Tensor
Loss = Callable[[Any, Tensor, Tensor], Tensor]
Kinds = Callable[..., dict[str, Finding]]
_BATCH = 8
ROWS = torch.rand(32, 8)
CLASSES = torch.arange(32) % 4


@pytest.fixture
def kinds(simulation: Simulation) -> Kinds:
    """Of a training with a loss of the model and a batch, its findings by kind."""

    def of(
        loss: Loss,
        data: Callable[[], Any] = lambda: TensorDataset(ROWS, CLASSES),
        model: nn.Module | None = None,
    ) -> dict[str, Finding]:
        def training(observer: LearningObserver) -> Any:
            own = (model or net()).cuda()
            kept = data()  # with the other parts of a split
            batches = kept[0] if isinstance(kept, tuple) else kept
            if isinstance(batches, Dataset):
                batches = DataLoader(batches, _BATCH)
            train(observer, own, on_gpu(own, loss), batches)
            return kept

        return found_of(training, simulation)

    return of


def net(outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


def apart(x: Tensor) -> Tensor:
    return ((x.unsqueeze(1) - x.unsqueeze(0)) ** 2).sum(-1)


@pytest.mark.parametrize(
    ("root", "told"),
    [
        (lambda x: torch.sqrt(x), ["root_of_output"]),
        (lambda x: torch.where(x > 0, x.sqrt(), torch.zeros_like(x)), ["root_of_output"]),
        (lambda x: x**0.5, ["root_of_output"]),
        (lambda x: torch.sqrt(x.clamp(min=1e-8)), []),
        (lambda x: torch.sqrt(F.softplus(x)), []),
        (lambda x: torch.sqrt(x.exp()), []),
        (lambda x: apart(x).sqrt(), ["root_at_zero"]),
        (lambda x: ((x[:, None] - x[None, :]) * 1).pow(2).sum(-1).sqrt(), []),
        (lambda x: torch.sqrt(apart(x) + 1e-8), []),
        (lambda x: torch.sqrt(((x[1:] - x[:-1]) ** 2).sum(-1)), []),
        (lambda x: torch.sqrt(((x[:, None] - x.detach()[None]) ** 2).sum(-1)), []),
        (lambda x: torch.cdist(x, x), []),
        (lambda x: torch.sqrt(F.relu(x)), ["root_at_zero"]),
        (lambda x: apart(x).clamp(min=0).sqrt(), ["root_at_zero"]),
        (lambda x: apart(x).clamp(min=1e-12).sqrt(), []),
    ],
)
def test_roots_have_no_slope_at_zero(
    kinds: Kinds, root: Callable[[Tensor], Tensor], told: list[str]
) -> None:
    found = kinds(lambda m, x, y: root(m(x)).mean())
    assert [each for each in found if each in NUMBERS] == told
    # What no backward pass goes through is a number to look at.
    assert not kinds(lambda m, x, y: root(m(x)).mean().detach() * 0 + m(x).mean()).keys() & NUMBERS


def cosine(x: Tensor) -> Tensor:
    unit = F.normalize(x, dim=1)
    return (unit * unit.detach().roll(1, 0)).sum(1)


@pytest.mark.parametrize(
    ("angle", "told"),
    [
        (lambda x: torch.acos(cosine(x)), True),
        (lambda x: torch.acos(cosine(x).abs()), True),
        (lambda x: torch.asin((cosine(x) - 1) / 2), True),
        (lambda x: torch.acos(cosine(x).clamp(-1, 1)), True),
        (lambda x: torch.acos(cosine(x).clamp(-1 + 1e-6, 1 - 1e-6)), False),
        (lambda x: torch.acos(cosine(x) * 0.9999), False),
        (lambda x: torch.acos(torch.tanh(x)), False),
        (lambda x: torch.atan2(x[:, 0], x[:, 1]), False),
    ],
)
def test_angles_of_computed_cosines(
    kinds: Kinds, angle: Callable[[Tensor], Tensor], *, told: bool
) -> None:
    found = kinds(lambda m, x, y: angle(m(x)).mean())
    assert [each for each in found if each in NUMBERS] == ["angle_beyond"] * told


class Differences(Dataset[Any]):
    def __init__(self, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.between = between
        self.frames = (torch.arange(33 * 8) * 37 % 251).to(torch.uint8).reshape(33, 8)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return self.between(self.frames[index + 1], self.frames[index]).float(), index % 4


@pytest.mark.parametrize(
    ("between", "told"),
    [
        (lambda a, b: a - b, True),
        (lambda a, b: a.float() - b.float(), False),
        (lambda a, b: a.int() - b.int(), False),
        (lambda a, b: torch.maximum(a, b) - b, False),
        (lambda a, b: (a > b).to(torch.uint8) * b, False),
    ],
)
def test_bytes_that_go_below_zero(
    kinds: Kinds, between: Callable[[Tensor, Tensor], Tensor], *, told: bool
) -> None:
    found = kinds(lambda m, x, y: F.cross_entropy(m(x), y), lambda: Differences(between))
    assert [each for each in found if each in NUMBERS] == ["bytes_wrap"] * told


@pytest.mark.parametrize(
    ("predict", "outputs", "told"),
    [
        (lambda out: torch.max(out, 1)[0], 4, ["values_as_classes"]),
        (lambda out: out.max(dim=1).values.detach(), 4, ["values_as_classes"]),
        (lambda out: torch.max(out, 1)[1], 4, []),
        (lambda out: out.argmax(1), 4, []),
        (lambda out: torch.max(out, 0)[1], 8, ["classes_over_samples"]),
        (lambda out: out.softmax(1).argmax(dim=0), 8, ["classes_over_samples"]),
        (lambda out: out.max(1).indices.squeeze(), 8, []),
        # Each text's image, of similarities: rows and columns are samples.
        (lambda out: (out @ out.T).argmax(0), 8, []),
    ],
)
def test_predictions_are_positions_of_classes(
    kinds: Kinds, predict: Callable[[Tensor], Tensor], outputs: int, told: list[str]
) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        with torch.no_grad():
            predict(out) == y  # noqa: B015
        return F.cross_entropy(out, y)

    assert [each for each in kinds(loss, model=net(outputs)) if each in NUMBERS] == told


@pytest.mark.parametrize(("signs", "told"), [(lambda y: y, True), (lambda y: 2 * y - 1, False)])
@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: F.cosine_embedding_loss(out, out.detach() + 1, y),
        lambda out, y: F.margin_ranking_loss(out[:, 0], out[:, 1], target=y),
        lambda out, y: F.soft_margin_loss(out[:, 0], y),
        lambda out, y: nn.HingeEmbeddingLoss()(out[:, 0], y),
    ],
)
def test_targets_of_pairs_are_signs(
    kinds: Kinds,
    loss: Callable[[Tensor, Tensor], Tensor],
    signs: Callable[[Tensor], Tensor],
    *,
    told: bool,
) -> None:
    found = kinds(
        lambda m, x, y: loss(m(x), y.float()),
        lambda: TensorDataset(ROWS, signs(torch.arange(32) % 2)),
    )
    assert ("targets_of_zero" in found) == told


@pytest.mark.parametrize(("device", "told"), [("cpu", True), ("cuda", False)])
def test_autocast_is_of_a_device(kinds: Kinds, device: str, *, told: bool) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return F.cross_entropy(model(x), y)

    assert ("autocast_of_cpu" in kinds(loss)) == told


def split(whole: Any, *, trained: int | None, validated: int | None) -> tuple[Any, ...]:
    """The loader of the training, over a part of a split or all of it, and what else there is."""
    parts = torch.utils.data.random_split(whole, [24, 8])
    used = None if validated is None else DataLoader(parts[validated], _BATCH)
    return DataLoader(whole if trained is None else parts[trained], _BATCH), parts, used


@pytest.mark.parametrize(
    ("trained", "validated", "told"),
    [(None, 1, True), (0, 1, False), (None, None, False)],
)
def test_a_validation_is_no_part_of_the_training(
    kinds: Kinds, trained: int | None, validated: int | None, *, told: bool
) -> None:
    whole = TensorDataset(ROWS, CLASSES)
    found = kinds(
        lambda m, x, y: F.cross_entropy(m(x), y),
        lambda: split(whole, trained=trained, validated=validated),
    )
    assert ("validation_trained" in found) == told


def test_samples_of_the_training_may_be_looked_at(kinds: Kinds) -> None:
    whole = TensorDataset(ROWS, CLASSES)

    def data() -> tuple[Any, ...]:
        return DataLoader(whole, _BATCH), DataLoader(Subset(whole, range(8)), _BATCH)

    assert "validation_trained" not in kinds(lambda m, x, y: F.cross_entropy(m(x), y), data)


def test_the_line_that_cuts_a_graph_off_is_told(kinds: Kinds) -> None:
    model = nn.ModuleList([net(8), net(4)])

    def loss(parts: Any, x: Tensor, y: Tensor, cut: bool = True) -> Tensor:
        features = parts[0](x)
        if cut:
            features = features.detach()
        return F.cross_entropy(parts[1](features), y)

    found = kinds(loss, model=model)["no_gradient"]
    assert found.place is not None and "detach" in found.cause and "4 of 8" in found.title
    assert "no_gradient" not in kinds(lambda m, x, y: loss(m, x, y, False), model=model)


@pytest.mark.parametrize(
    ("right", "told"),
    [
        (lambda out: out > 0.5, ["threshold_on_logits"]),
        (lambda out: out.squeeze(1).detach() >= 0.5, ["threshold_on_logits"]),
        (lambda out: out > 0, []),
        (lambda out: torch.sigmoid(out) > 0.5, []),
        (lambda out: out.argmax(1), ["one_output_chosen"]),
        (lambda out: torch.max(out.sigmoid(), 1)[1], ["one_output_chosen"]),
        (lambda out: torch.cat([-out, out], 1).argmax(1), []),
        (lambda out: out.max(1).values > 0, []),
    ],
)
def test_one_output_for_yes_or_no(
    kinds: Kinds, right: Callable[[Tensor], Tensor], told: list[str]
) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        found = F.binary_cross_entropy_with_logits(out, (y[:, None] % 2).float())
        predicted = right(out)
        predicted.reshape(-1) == y  # noqa: B015
        return found

    assert [each for each in kinds(loss, model=net(1)) if each in NUMBERS] == told


def test_a_number_may_be_any_limit_of_other_outputs(kinds: Kinds) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        assert (out > 0.5).shape == out.shape
        return F.mse_loss(out, y[:, None].float())

    assert "threshold_on_logits" not in kinds(loss, model=net(1))


def dice(p: Tensor, t: Tensor) -> Tensor:
    return (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


@pytest.mark.parametrize(
    ("of", "told"),
    [
        (dice, True),
        (lambda p, t: F.binary_cross_entropy(p, t) + 0.5 * dice(p, t), True),
        (lambda p, t: 2.0 * (p * t).sum(1) / (p.sum(1) + t.sum(1)), True),
        (lambda p, t: 1 - dice(p, t), False),
        (lambda p, t: -dice(p, t), False),
        (lambda p, t: F.binary_cross_entropy(p, t) - dice(p, t), False),
        (lambda p, t: 1 - (1 - dice(p, t)), False),
        (lambda p, t: F.binary_cross_entropy(p, t) + dice(p, t).detach(), False),
        (lambda p, t: (p * t).sum() / t.sum(), False),
    ],
)
def test_an_overlap_is_to_grow(
    kinds: Kinds, of: Callable[[Tensor, Tensor], Tensor], *, told: bool
) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return of(torch.sigmoid(model(x)), F.one_hot(y, 4).float()).mean()

    assert ("overlap_minimized" in kinds(loss)) == told


@pytest.mark.parametrize(
    ("options", "labels", "told"),
    [
        (lambda: {"shuffle": True}, CLASSES, True),
        (dict, CLASSES, False),
        (lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(0)}, CLASSES, False),
        # Two kinds of images, of which none belongs to another.
        (lambda: {"shuffle": True}, torch.rand(32, 8), False),
        (lambda: {"shuffle": True}, CLASSES[:24], False),
    ],
)
def test_inputs_and_labels_are_shuffled_together(
    kinds: Kinds, options: Callable[[], dict[str, Any]], labels: Tensor, *, told: bool
) -> None:
    def data() -> tuple[Any, ...]:
        both: Any = (ROWS, labels)
        sides: list[Any] = [DataLoader(each, _BATCH, **options()) for each in both]
        return zip(*sides, strict=False), sides

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return F.mse_loss(out, y[:, :4]) if y.dim() > 1 else F.cross_entropy(out, y)

    assert ("shuffled_apart" in kinds(loss, data)) == told
