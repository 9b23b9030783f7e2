"""What losses, layers and optimizers are given that is not what they are for, and what is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from helpers_learning import found_of, observing, on_gpu, train
from trainfit.findings.training.inputs import INPUTS
from trainfit.findings.training.learning import of_learning
from trainfit.hooks.learning import LearningObserver
from trainfit.results.findings import Finding
from trainfit.simgpu.session import Simulation

Tensor = torch.Tensor
Kinds = Callable[..., dict[str, Finding]]
Loss = Callable[[Any, Tensor, Tensor], Tensor]
_BATCH = 8


@pytest.fixture
def kinds(simulation: Simulation) -> Kinds:
    """Of a training with a loss of the model and a batch, the findings of :data:`INPUTS`."""

    def of(
        loss: Loss,
        *data: Tensor,
        model: nn.Module,
        prepare: Callable[[Any], None] = lambda _: None,
        around: Callable[[LearningObserver], None] = lambda _: None,
    ) -> dict[str, Finding]:
        def training(observer: LearningObserver) -> None:
            own = model.cuda()
            optimizer = torch.optim.SGD(own.parameters(), 0.1)
            prepare(optimizer)

            def step(batch: Any) -> Tensor:
                around(observer)
                return on_gpu(own, loss)(batch)

            train(observer, own, step, DataLoader(TensorDataset(*data), _BATCH), optimizer)

        found = found_of(training, simulation)
        return {kind: each for kind, each in found.items() if kind in INPUTS}

    return of


def net(outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, outputs))


ROWS = torch.rand(32, 8)
CLASSES = torch.arange(32) % 4


def test_a_loss_of_probabilities_that_gets_its_arguments_the_other_way_round(kinds: Kinds) -> None:
    model = nn.Sequential(net(1), nn.Sigmoid())
    targets = (torch.arange(32) % 2).float()[:, None]
    bce = F.binary_cross_entropy
    found = kinds(lambda m, x, y: bce(y, m(x)), ROWS, targets, model=model)
    assert found["arguments_swapped"].is_critical and found["arguments_swapped"].place is not None
    assert kinds(lambda m, x, y: bce(m(x), y), ROWS, targets, model=model) == {}
    # Both have a graph: a model that learns from another one, which learns, too.
    assert kinds(lambda m, x, y: bce(m(x), m(x)), ROWS, targets, model=model) == {}


def test_labels_of_a_batch_that_are_all_left_out(kinds: Kinds) -> None:
    none, some = torch.full((32,), -100), torch.full((32,), -100)
    some[::4] = 1

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    assert kinds(loss, ROWS, none, model=net())["labels_ignored"].is_critical
    assert kinds(loss, ROWS, some, model=net()) == {}

    def summed(model: Any, x: Tensor, y: Tensor) -> Tensor:
        counted = (y != -100).sum().clamp(min=1)
        return F.cross_entropy(model(x), y, reduction="sum") / counted

    assert kinds(summed, ROWS, none, model=net()) == {}


def test_targets_of_several_classes(kinds: Kinds) -> None:
    several = torch.zeros(32, 4)
    several[:, 0] = several[::2, 2] = 1
    mixed = 0.7 * F.one_hot(CLASSES, 4) + 0.3 * F.one_hot(CLASSES.flip(0), 4)

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    found = kinds(loss, ROWS, several, model=net())["several_classes"]
    assert found.is_critical and "up to 2 classes" in found.title
    assert kinds(loss, ROWS, F.one_hot(CLASSES, 4).float(), model=net()) == {}
    assert kinds(loss, ROWS, mixed, model=net()) == {}
    bce = F.binary_cross_entropy_with_logits
    assert kinds(lambda m, x, y: bce(m(x), y), ROWS, several, model=net()) == {}
    # Made to add up to one on the way.
    shares = kinds(
        lambda m, x, y: F.cross_entropy(m(x), y / y.sum(1, keepdim=True)),
        *(ROWS, several),
        model=net(),
    )
    assert shares == {}


TOKENS = torch.arange(32 * 13).reshape(32, 13) * 7 % 31


class LanguageModel(nn.Module):
    def __init__(self, *, masked: bool, by_hand: bool = False) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(31, 16), nn.Embedding(12, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.last, self.is_masked, self.by_hand = nn.Linear(16, 31), masked, by_hand

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embedding(ids) + self.positions(torch.arange(length, device=ids.device))
        if self.by_hand:
            parts = (x.view(len(x), length, 2, 8).transpose(1, 2),) * 3
            h = F.scaled_dot_product_attention(*parts, is_causal=self.is_masked)
            h = h.transpose(1, 2).reshape(x.shape)
        elif self.is_masked:
            mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
            h = self.layer(x, src_mask=mask)
        else:
            h = self.layer(x)
        found: Tensor = self.last(h)
        return found


def _next_token(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).reshape(-1, 31), labels.reshape(-1))


@pytest.mark.parametrize("by_hand", [False, True])
def test_tokens_that_are_predicted_and_seen(kinds: Kinds, *, by_hand: bool) -> None:
    ids, labels = TOKENS[:, :-1].clone(), TOKENS[:, 1:].clone()

    def of(labels: Tensor, *, masked: bool) -> dict[str, Finding]:
        return kinds(_next_token, ids, labels, model=LanguageModel(masked=masked, by_hand=by_hand))

    assert of(labels, masked=False)["sees_ahead"].is_critical
    assert of(labels, masked=True) == {}
    # A tag for each token, tokens that are hidden: all of the text may be seen.
    assert of(ids % 5, masked=False) == {}
    hidden = torch.where(ids % 3 == 0, ids, -100)
    assert of(hidden, masked=False) == {}


def test_tokens_that_only_an_encoder_sees(kinds: Kinds) -> None:
    """Another text, all of which is there when its translation is written."""

    class Translates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.embedding = LanguageModel(masked=False), nn.Embedding(31, 16)
            self.decoder, self.last = nn.GRU(16, 31, batch_first=True), nn.Linear(31, 31)

        def forward(self, ids: Tensor) -> Tensor:
            out, _ = self.decoder(self.embedding(ids))
            found: Tensor = self.last(out + self.encoder(ids.flip(0)))
            return found

    ids, labels = TOKENS[:, :-1].clone(), TOKENS[:, 1:].clone()
    assert kinds(_next_token, ids, labels, model=Translates()) == {}


class Attention(nn.Module):
    def __init__(self, weights: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None] * torch.ones(6, 1, device=x.device)
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 3
        out: Tensor = (self.weights(scores) @ self.v(x)).mean(1)
        return out


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        (lambda s: s.softmax(1), True),
        (lambda s: F.dropout(F.softmax(s, dim=-2), 0.1), True),
        (lambda s: s.softmax(-1), False),
        (lambda s: s.softmax(1).transpose(1, 2), False),
        # Slot attention: slots compete, and the weights of each are normalized after.
        (lambda s: (s.softmax(1) + 1e-8) / s.softmax(1).sum(-1, keepdim=True), False),
    ],
)
def test_weights_of_an_attention_add_up_over_the_keys(
    kinds: Kinds, weights: Callable[[Tensor], Tensor], *, told: bool
) -> None:
    found = kinds(lambda m, x, y: F.cross_entropy(m(x), y), ROWS, CLASSES, model=Attention(weights))
    assert list(found) == ["softmax_over_queries"] * told


class Recurrent(nn.Module):
    def __init__(self, last: Callable[[Tensor, Tensor], Tensor], **options: bool) -> None:
        super().__init__()
        self.layer, self.last = nn.GRU(1, 5, batch_first=True, **options), last
        self.out = nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        out, h = self.layer(x[:, :, None])
        found: Tensor = self.out(self.last(out, h))
        return found


@pytest.mark.parametrize(
    ("last", "both", "told"),
    [
        (lambda out, h: out[:, -1], True, True),
        (lambda out, h: out[:, -1, :], True, True),
        (lambda out, h: out[:, -1], False, False),
        (lambda out, h: torch.cat([out[:, -1, :5], out[:, 0, 5:]], 1), True, False),
        (lambda out, h: torch.cat([h[-2], h[-1]], 1), True, False),
        (lambda out, h: out.mean(1), True, False),
    ],
)
def test_the_last_step_of_a_layer_in_both_directions(
    kinds: Kinds, last: Callable[[Tensor, Tensor], Tensor], *, both: bool, told: bool
) -> None:
    model = Recurrent(last, bidirectional=both).cuda()
    model(ROWS.cuda())
    found = kinds(lambda m, x, y: F.cross_entropy(m(x), y), ROWS, CLASSES, model=model)
    assert list(found) == ["backward_at_its_start"] * told


IMAGES = (torch.arange(32 * 3 * 12 * 12) * 37 % 256).reshape(32, 3, 12, 12)


@pytest.mark.parametrize(
    ("images", "prepare", "told"),
    [
        (IMAGES.float(), lambda x: x, True),
        (IMAGES.to(torch.uint8), lambda x: x.float(), True),
        (IMAGES.float(), lambda x: x / 255, False),
        (IMAGES.float(), lambda x: x - 127.5, False),
        (IMAGES.float(), lambda x: x.div_(255), False),
        (IMAGES.float() / 255, lambda x: x, False),
        (IMAGES.float() % 20, lambda x: x, False),
    ],
)
def test_images_are_scaled(
    kinds: Kinds, images: Tensor, prepare: Callable[[Tensor], Tensor], *, told: bool
) -> None:
    def of(*layers: nn.Module) -> dict[str, Finding]:
        model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(400, 4))
        return kinds(
            lambda m, x, y: F.cross_entropy(m(prepare(x)), y), images, CLASSES, model=model
        )

    assert list(of(nn.Conv2d(3, 4, 3))) == ["images_unscaled"] * told
    # What a norm right after the layer brings to a common scale.
    assert of(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)) == {}


def test_a_teacher_is_in_evaluation_mode(kinds: Kinds) -> None:
    def of(teacher: nn.Module, model: nn.Module) -> dict[str, Finding]:
        teacher.cuda()

        def loss(student: Any, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                soft = teacher(x).softmax(1)
            return F.cross_entropy(student(x), soft)

        return kinds(
            loss, ROWS, CLASSES, model=model, around=lambda observer: observer.called(teacher)
        )

    def large(rate: float = 0.3) -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 99), nn.Dropout(rate), nn.Linear(99, 4))

    found = of(large(), net())["teacher_in_training"]
    assert "Dropout" in found.title and found.severity == "warning"
    assert of(large().eval(), net()) == {}
    assert of(large(0), net()) == {}
    # A copy that follows the training, in its mode.
    model = nn.Sequential(large(), nn.Linear(4, 4))
    assert of(copy.deepcopy(model[0]), model) == {}


@pytest.mark.parametrize("recomputed", [True, False])
def test_a_frozen_part_that_a_checkpoint_recomputes_is_no_teacher(
    kinds: Kinds, *, recomputed: bool
) -> None:
    """As of a model with adapters: its other layers are called by themselves in the backward
    pass."""
    part = nn.Sequential(nn.Linear(8, 99), nn.Dropout(0.3)).cuda().requires_grad_(False)
    observers: list[Any] = []

    def loss(student: Any, x: Tensor, y: Tensor) -> Tensor:
        result = student(x)
        if recomputed:
            result.register_hook(lambda _: observers[0].called(part))
        else:
            observers[0].called(part)
        return F.cross_entropy(result, y)

    found = kinds(loss, ROWS, CLASSES, model=net(), around=observers.append)
    assert ("teacher_in_training" in found) is not recomputed


def test_a_state_brings_its_learning_rate_back(kinds: Kinds) -> None:
    state = torch.optim.SGD([nn.Parameter(torch.zeros(2)) for _ in range(4)], 0.5).state_dict()

    def of(prepare: Callable[[Any], None]) -> dict[str, Finding]:
        return kinds(
            lambda m, x, y: F.cross_entropy(m(x), y), ROWS, CLASSES, model=net(), prepare=prepare
        )

    found = of(lambda optimizer: optimizer.load_state_dict(state))["rate_restored"]
    assert "0.5: lr=0.1, that SGD was made with" in found.title and found.place is not None

    def sets_it(optimizer: Any) -> None:
        optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            group["lr"] = 0.1

    def has_a_schedule(optimizer: Any) -> None:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.load_state_dict(state)
        optimizer.param_groups[0].setdefault("initial_lr", 0.1)

    assert of(sets_it) == of(has_a_schedule) == {}
    same = copy.deepcopy(state)
    same["param_groups"][0]["lr"] = 0.1
    assert of(lambda optimizer: optimizer.load_state_dict(same)) == {}


def test_a_divergence_is_a_sum_over_classes(kinds: Kinds) -> None:
    def of(**options: str) -> dict[str, Finding]:
        def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
            return F.kl_div(F.log_softmax(model(x), 1), F.one_hot(y, 4).float(), **options)

        return kinds(loss, ROWS, CLASSES, model=net())

    assert "4 times smaller" in of()["divergence_averaged"].title
    assert of(reduction="batchmean") == of(reduction="sum") == {}


@pytest.mark.filterwarnings("ignore:dropout option")
@pytest.mark.parametrize(
    ("layers", "rate", "told"), [(1, 0.5, True), (2, 0.5, False), (1, 0.0, False)]
)
def test_dropout_is_between_recurrent_layers(
    kinds: Kinds, layers: int, rate: float, *, told: bool
) -> None:
    model = Recurrent(lambda out, h: out.mean(1))
    model.layer = nn.GRU(1, 5, layers, batch_first=True, dropout=rate)
    model.cuda()(ROWS.cuda())
    found = kinds(lambda m, x, y: F.cross_entropy(m(x), y), ROWS, CLASSES, model=model)
    assert list(found) == ["dropout_of_one_layer"] * told


def test_targets_that_a_layer_does_not_get_to(kinds: Kinds) -> None:
    prices = 200_000 + 1000 * torch.arange(32.0)[:, None]

    def of(targets: Tensor, scale: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, Finding]:
        return kinds(lambda m, x, y: F.mse_loss(scale(m(x)), y), ROWS, targets, model=net(1))

    assert "203,500" in of(prices)["targets_large"].title
    assert of(prices / 1e5) == of(prices, lambda x: x.exp()) == {}
    assert of(prices, lambda x: 200_000 + 50_000 * x) == {}


def test_targets_of_a_loss_of_probabilities_are_such(kinds: Kinds) -> None:
    """Masks as image files have them; a number that is left out has a weight of 0."""
    ones = (torch.arange(32) % 2).float()[:, None]

    def of(targets: Tensor, **options: Any) -> dict[str, Finding]:
        def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
            weight = (y >= 0).float() if options.get("weighted") else None
            found: Tensor = F.binary_cross_entropy_with_logits(
                model(x), y, weight, reduction=options.get("reduction", "mean")
            )
            return found.mean()

        return kinds(loss, ROWS, targets, model=net(1))

    told = of(255 * ones)["targets_outside"]
    assert "from 0 to 255" in told.title and "target / 255" in told.fix.action
    assert told.is_critical and "reduction='none'" in of(2 * ones - 1)["targets_outside"].fix.action
    assert of(ones) == of(0.9 * ones + 0.05) == of(1.001 * ones) == {}
    assert of(2 * ones - 1, weighted=True) == of(2 * ones - 1, reduction="none") == {}


class _Table(nn.Module):
    """Rows of a table, and the whole table as output layer where it is ``tied``."""

    def __init__(self, *, sparse: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.rows, self.tied = nn.Embedding(70_000, 128, sparse=sparse), tied

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rows(x)
        return F.linear(found, self.rows.weight) if self.tied else found


def test_a_large_table_of_which_a_batch_needs_few_rows(kinds: Kinds) -> None:
    """34 MiB: and few are enough, a sparse gradient, or an output layer that needs all."""
    words = torch.arange(32)[:, None]

    def of(tokens: Tensor = words, **options: bool) -> dict[str, Finding]:
        model = _Table(**options)
        return kinds(lambda m, x, _: m(x).square().mean(), tokens, CLASSES, model=model)

    told = of()["rows_untouched"]
    assert "8 of the 70,000 rows" in told.title and "sparse=True" in told.fix.action
    assert told.severity == "info" and "is 34 MiB" in told.title  # what it costs, watch knows
    assert of(tied=True) == of(words.expand(32, 100)) == {}
    assert of(sparse=True) == {}


def test_a_scaler_is_for_float16(kinds: Kinds) -> None:
    def of(*, cast: bool, enabled: bool = True) -> dict[str, Finding]:
        scaler = torch.amp.GradScaler("cuda", enabled=enabled)

        def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.float16, enabled=cast):
                found = F.cross_entropy(model(x), y)
            scaled: Tensor = scaler.scale(found)
            return scaled

        return kinds(loss, ROWS, CLASSES, model=net())

    assert list(of(cast=False)) == ["scaler_in_vain"]
    assert of(cast=True) == of(cast=False, enabled=False) == {}


@pytest.mark.parametrize(
    ("patience", "every", "told"), [(1, 1, True), (10, 1, False), (1, 4, False)]
)
def test_a_plateau_is_of_epochs(kinds: Kinds, patience: int, every: int, *, told: bool) -> None:
    """Of 4 batches."""
    made: list[Any] = []

    def begins(optimizer: Any) -> None:
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=patience)
        made.append(plateau)
        done = iter(range(1, 99))
        optimizer.register_step_post_hook(
            lambda *_: plateau.step(1.0) if next(done) % every == 0 else None
        )

    found = kinds(
        lambda m, x, y: F.cross_entropy(m(x), y), ROWS, CLASSES, model=net(), prepare=begins
    )
    assert list(found) == ["plateau_by_batch"] * told


def test_predictions_are_made_in_evaluation_mode(simulation: Simulation) -> None:
    def of(model: nn.Module, *, graph: bool = False) -> list[str]:
        own = model.cuda()
        with observing(simulation, counts_in_place=False) as observer:
            for x in ROWS.split(_BATCH):
                with torch.set_grad_enabled(graph):
                    observer.called(own)
                    own(x.cuda())
            return [each.kind for each in of_learning(observer.facts())]

    def dropping() -> nn.Module:
        return nn.Sequential(net(), nn.Dropout(0.5))

    assert of(dropping()) == ["predicts_in_training"]
    assert of(dropping().eval()) == of(net()) == of(dropping(), graph=True) == []
