"""Models, losses, masks and DataLoaders that are not put together as they are meant to be; and none
of those that are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from helpers_learning import found_of, train
from trainfit.findings.training.learning import of_later_learning, of_learning
from trainfit.hooks.learning import LearningObserver
from trainfit.hooks.provenance.copies import line_of_view
from trainfit.results.findings import Finding
from trainfit.results.runs.learning import LearningFacts, Misuse
from trainfit.simgpu.session import Simulation

Tensor = torch.Tensor
#: A step: it computes a loss, goes back and steps.
Training = Callable[["Observed"], None]


class Observed:
    """What a test trains with on the simulated device."""

    def __init__(self, observer: LearningObserver) -> None:
        self.observer = observer

    def steps(
        self,
        model: nn.Module,
        loss: Callable[[Any], Tensor],
        batches: Any,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """A step of each batch."""
        train(self.observer, model, loss, batches, optimizer)


@pytest.fixture
def kinds(simulation: Simulation) -> Callable[[Training], dict[str, Finding]]:
    def of(training: Training) -> dict[str, Finding]:
        return found_of(lambda observer: training(Observed(observer)), simulation)

    return of


Kinds = Callable[[Training], dict[str, Finding]]


def _data(columns: int = 8, rows: int = 32, batch: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.rand(rows, columns), torch.zeros(rows)), batch)


# -- masks of attention ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "how"),
    [
        (lambda n: torch.tril(torch.ones(n, n, device="cuda")).bool(), "itself and all before it"),
        (lambda n: torch.triu(torch.ones(n, n, device="cuda")) == 1, "itself and all after it"),
        (lambda n: torch.ones(n, n).tril().bool().cuda(), "itself and all before it"),
        (lambda n: torch.tril(torch.ones(n, n, device="cuda")), "added"),
        (lambda n: torch.triu(torch.ones(n, n, device="cuda"), diagonal=1).bool(), ""),
        (lambda n: ~torch.ones(n, n, dtype=torch.bool, device="cuda").tril(), ""),
        (lambda n: torch.ones(n, n).triu(1).bool().cuda(), ""),
        (lambda n: torch.full((n, n), float("-inf"), device="cuda").triu(1), ""),
        (lambda n: nn.Transformer.generate_square_subsequent_mask(n).cuda(), ""),
        (
            lambda n: torch.zeros(n, n, device="cuda").masked_fill(
                torch.tril(torch.ones(n, n, device="cuda")) == 0, float("-inf")
            ),
            "",
        ),
    ],
)
def test_a_mask_of_attention_hides_what_it_is_meant_to(
    kinds: Kinds, mask: Callable[[int], Tensor], how: str
) -> None:
    def train(run: Observed) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        model = nn.TransformerEncoder(layer, 1).cuda()
        run.steps(model, lambda x: model(x, mask=mask(6)).mean(), [_sequence()] * 2)

    found = kinds(train).get("mask_misused")
    assert (found is not None) == bool(how)
    if found is not None:
        assert how in found.title and found.place is not None


def _sequence() -> Tensor:
    return torch.rand(4, 6, 8, device="cuda")


@pytest.mark.parametrize(
    ("mask", "is_wrong"),
    [
        (lambda tokens: tokens != 0, True),
        (lambda tokens: ~(tokens == 0), True),
        (lambda tokens: tokens == 0, False),
        (lambda tokens: (tokens != 0) == 0, False),
        (lambda tokens: torch.arange(6, device="cuda")[None] < tokens[:, :1], True),
        (lambda tokens: torch.arange(6, device="cuda")[None] >= tokens[:, :1], False),
    ],
)
def test_a_mask_of_padding_hides_padding(
    kinds: Kinds, mask: Callable[[Tensor], Tensor], is_wrong: bool
) -> None:
    def train(run: Observed) -> None:
        tokens = torch.randint(0, 5, (4, 6), device="cuda")
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).cuda()
        model = nn.ModuleList([layer])
        run.steps(
            model,
            lambda x: layer(x, src_key_padding_mask=mask(tokens)).mean(),
            [_sequence()] * 2,
        )

    assert ("mask_misused" in kinds(train)) is is_wrong


def test_a_mask_of_a_fused_attention_is_of_what_is_seen(kinds: Kinds) -> None:
    def of(make: Callable[[], Tensor]) -> bool:
        def train(run: Observed) -> None:
            model, mask = nn.Linear(8, 8).cuda(), make()

            def loss(x: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(model(x), x, x, attn_mask=mask).mean()

            run.steps(model, loss, [_sequence()] * 2)

        return "mask_misused" in kinds(train)

    assert not of(lambda: torch.ones(6, 6, dtype=torch.bool, device="cuda"))
    assert of(lambda: torch.ones(6, 6).triu(1).bool().cuda())
    assert not of(lambda: torch.ones(6, 6).tril().bool().cuda())


# -- what is given and what is compared --------------------------------------------------------


def test_predictions_that_are_compared_with_all_targets(kinds: Kinds) -> None:
    def of(correct: Callable[[Tensor, Tensor], Tensor], outputs: int = 1) -> bool:
        def train(run: Observed) -> None:
            model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, outputs)).cuda()

            def loss(batch: list[Tensor]) -> Tensor:
                x, y = (each.cuda() for each in batch)
                with torch.no_grad():
                    correct(model(x), y)
                return model(x).mean()

            run.steps(model, loss, _data())

        return "compared_with_all" in kinds(train)

    assert of(lambda out, y: (torch.round(torch.sigmoid(out)) == y).sum())
    assert of(lambda out, y: ((out > 0).float() == y).sum())
    assert of(lambda out, y: (out.argmax(1, keepdim=True) == y).sum(), 3)
    assert not of(lambda out, y: (torch.round(torch.sigmoid(out)) == y.unsqueeze(1)).sum())
    assert not of(lambda out, y: (torch.round(out).squeeze(1) == y).sum())
    assert not of(lambda out, y: (y[:, None] == y).sum())
    assert not of(lambda out, y: (out.argmax(1) == y).sum(), 3)


def test_a_dropout_or_a_view_between_the_last_layer_and_the_loss(kinds: Kinds) -> None:
    def of(change: Callable[[Tensor], Tensor], classes: Callable[[Tensor], Tensor]) -> set[str]:
        def train(run: Observed) -> None:
            model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))
            model.cuda()

            def loss(x: Tensor) -> Tensor:
                out = classes(model(x))
                return F.cross_entropy(
                    change(out), torch.zeros(len(out), dtype=torch.long, device="cuda")
                )

            run.steps(model, loss, [torch.rand(2, 3, 6, 12, device="cuda")] * 2)

        return set(kinds(train)) & {"activation_clips", "view_for_transpose"}

    whole = lambda out: out.permute(0, 2, 3, 1).reshape(-1, 4)  # noqa: E731
    assert of(lambda out: F.dropout(out, 0.5), whole) == {"activation_clips"}
    assert of(lambda out: out, lambda out: out.view(-1, 4)) == {"view_for_transpose"}
    assert not of(lambda out: out, whole)
    assert not of(lambda out: out, lambda out: out.mean((2, 3)))


def test_images_that_are_scaled_twice(kinds: Kinds) -> None:
    def of(scaled: Callable[[Tensor], Tensor]) -> bool:
        def train(run: Observed) -> None:
            model = nn.Conv2d(3, 4, 3).cuda()
            images = scaled(torch.randint(0, 256, (16, 3, 16, 16)).float() / 255)
            loader = DataLoader(TensorDataset(images), 4)
            run.steps(model, lambda batch: model(batch[0].cuda()).mean(), loader)

        return "images_flat" in kinds(train)

    assert of(lambda x: x / 255)
    assert of(lambda x: (x - 127.5) / 128)
    assert not of(lambda x: x)
    assert not of(torch.zeros_like)
    assert not of(lambda x: torch.rand_like(x) * 0.003)  # no 8 bits
    assert not of(lambda x: (x - 0.5) / 0.25)


def test_masks_of_classes_that_are_scaled(kinds: Kinds) -> None:
    def of(targets: Callable[[Tensor], Tensor], size: int = 6) -> bool:
        def train(run: Observed) -> None:
            model = nn.Conv2d(3, 4, 3, padding=1).cuda()
            classes = targets(torch.arange(12 * size * size).view(12, size, size) % 4)
            loader = DataLoader(TensorDataset(torch.rand(12, 3, size, size), classes.long()), 4)

            def loss(batch: Any) -> Tensor:
                return F.cross_entropy(model(batch[0].cuda()), batch[1].cuda())

            run.steps(model, loss, loader)

        return "pixels_of_one_class" in kinds(train)

    assert of(lambda classes: classes / 255)
    assert not of(lambda classes: classes)
    assert not of(
        lambda classes: classes * (torch.arange(12)[:, None, None] >= 4)
    )  # one batch of 0


@pytest.mark.parametrize(
    ("mask", "value", "is_wrong"),
    [
        (lambda padding: padding.unsqueeze(2), float("-inf"), True),
        (lambda padding: padding.unsqueeze(1), float("-inf"), False),
        (lambda padding: padding.unsqueeze(2), -1e9, False),
        (lambda padding: padding.unsqueeze(2) & padding.unsqueeze(1), float("-inf"), False),
    ],
)
def test_a_mask_of_queries_leaves_a_softmax_nothing(
    kinds: Kinds, mask: Callable[[Tensor], Tensor], value: float, is_wrong: bool
) -> None:
    def train(run: Observed) -> None:
        model = nn.Linear(8, 8).cuda()
        padding = torch.arange(6, device="cuda").expand(4, 6) >= 4

        def loss(x: Tensor) -> Tensor:
            scores = model(x) @ x.transpose(1, 2)
            return scores.masked_fill(mask(padding), value).softmax(-1).square().mean()

        run.steps(model, loss, [_sequence()] * 2)

    found = kinds(train).get("mask_misused")
    assert (found is not None) is is_wrong
    assert found is None or ("whole rows" in found.title and found.place is not None)


def test_labels_of_padding(kinds: Kinds) -> None:
    tokens = torch.randint(1, 9, (16, 8))
    mask = torch.ones_like(tokens)
    mask[:, 5:] = tokens[:, 5:] = 0

    def of(labels: Tensor, ignored: int = -100, reduction: str = "mean") -> bool:
        rows = [
            {"input_ids": a, "attention_mask": b, "labels": c}
            for a, b, c in zip(tokens, mask, labels, strict=True)
        ]

        def train(run: Observed) -> None:
            model = nn.Embedding(9, 9).cuda()

            def loss(batch: dict[str, Tensor]) -> Tensor:
                out, y = model(batch["input_ids"].cuda()), batch["labels"].cuda()
                given = out[:, :-1].flatten(0, 1), y[:, 1:].flatten()
                return F.cross_entropy(*given, ignore_index=ignored, reduction=reduction).mean()

            run.steps(model, loss, DataLoader(rows, 4))  # type: ignore[arg-type]

        return "padding_learned" in kinds(train)

    assert of(tokens.clone())
    assert not of(tokens.masked_fill(mask == 0, -100))
    assert not of(tokens.clone(), ignored=0)
    assert not of(tokens.clone(), reduction="none")


# -- models ------------------------------------------------------------------------------------


def test_settings_and_modes_of_layers(kinds: Kinds) -> None:
    def of(momentum: float | None, *, train_mode: bool = True, checkpointing: bool = False) -> Any:
        def train(run: Observed) -> None:
            model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=momentum)).cuda()
            model.train(train_mode)
            model[0].gradient_checkpointing = checkpointing
            run.steps(model, lambda batch: model(batch[0].cuda()).mean(), _data())

        return set(kinds(train)) & {"norm_forgets", "checkpointing_idle"}

    assert of(0.99) == {"norm_forgets"}
    for momentum in (0.1, 0.01, 1.0, None):
        assert not of(momentum)
    assert of(0.1, train_mode=False, checkpointing=True) == {"checkpointing_idle"}
    assert not of(0.1, checkpointing=True) and not of(0.1, train_mode=False)


class Tied(nn.Module):
    """A decoder with the weights of its encoder."""

    def __init__(self, tie: Callable[[nn.Linear, nn.Linear], None]) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        tie(self.encoder, self.decoder)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.encoder(x))
        return out


def test_weights_that_are_tied_by_their_memory(kinds: Kinds) -> None:
    def by_parameter(encoder: nn.Linear, decoder: nn.Linear) -> None:
        decoder.weight = nn.Parameter(encoder.weight.t())

    def by_data(encoder: nn.Linear, decoder: nn.Linear) -> None:
        decoder.weight.data = encoder.weight.data.t()

    def of(tie: Callable[[nn.Linear, nn.Linear], None], device: str) -> Finding | None:
        def train(run: Observed) -> None:
            model = Tied(tie).to(device)
            run.steps(model, lambda batch: model(batch[0].to(device)).mean(), _data())

        return kinds(train).get("tie_lost")

    for tie in (by_parameter, by_data):
        moved, stays = of(tie, "cuda"), of(tie, "cpu")
        assert moved is not None and "trained apart" in moved.title
        assert stays is not None and "one memory" in stays.title
    assert of(lambda *_: None, "cuda") is None


def test_parts_that_are_frozen_or_trained_from_some_epoch_on(kinds: Kinds) -> None:
    def of(
        needs: bool,
        to_none: bool,
        *,
        whole: bool,
        momentum: float = 0.9,
        add: bool = False,
    ) -> set[str]:
        def train(run: Observed) -> None:
            body, head = nn.Linear(8, 8), nn.Linear(8, 1)
            model = nn.Sequential(body, head).cuda()
            body.requires_grad_(not needs)
            given = model.parameters() if whole else head.parameters()
            optimizer = torch.optim.SGD(given, 0.1, momentum=momentum)
            loader = _data(rows=80)
            for epoch in range(3):
                if epoch == 1:
                    body.requires_grad_(needs)
                    if add:
                        optimizer.add_param_group({"params": list(body.parameters())})
                for x, _ in loader:
                    run.observer.called(model)
                    optimizer.zero_grad(set_to_none=to_none)
                    model(x.cuda()).mean().backward()
                    optimizer.step()

        return set(kinds(train)) & {"frozen_moves", "unfrozen_untrained"}

    assert of(False, False, whole=True) == {"frozen_moves"}
    assert not of(False, True, whole=True)
    assert not of(False, False, whole=True, momentum=0.0)
    assert of(True, True, whole=False) == {"unfrozen_untrained"}
    assert not of(True, True, whole=True)
    assert not of(True, True, whole=False, add=True)


def test_gradients_that_a_script_gives_by_itself(kinds: Kinds) -> None:
    def train(run: Observed) -> None:
        model = nn.Linear(8, 1).cuda().requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters())
        for x, _ in _data(rows=40):
            run.observer.called(model)
            scale = torch.ones((), device="cuda", requires_grad=True)
            (model(x.cuda()).mean() * scale).backward()
            for each in model.parameters():
                each.grad = torch.randn_like(each)
            optimizer.step()

    assert "frozen_moves" not in kinds(train)


def test_weights_of_attention_that_nobody_uses(
    kinds: Kinds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainfit.hooks.provenance.outputs._LARGE", 1)

    def of(use: Callable[[Tensor | None], Any], *, wanted: bool = True) -> bool:
        def train(run: Observed) -> None:
            model = nn.MultiheadAttention(8, 2, batch_first=True).cuda()

            def loss(x: Tensor) -> Tensor:
                out, weights = model(x, x, x, need_weights=wanted)
                total: Tensor = out.mean() + use(weights)
                return total

            run.steps(model, loss, [_sequence()] * 4)

        return "weights_unused" in kinds(train)

    kept: list[Any] = []
    assert of(lambda _: 0.0)
    assert not of(lambda _: 0.0, wanted=False)
    assert not of(lambda weights: weights.mean())  # type: ignore[union-attr]
    assert not of(lambda weights: kept.append(weights) or 0.0)  # type: ignore[func-returns-value]


def test_a_loss_that_the_scaler_does_not_scale(kinds: Kinds) -> None:
    def of(both: bool, *, together: bool = False, read: bool = False) -> bool:
        def train(run: Observed) -> None:
            body, one, other = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)
            model = nn.ModuleList([body, one, other]).cuda()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler("cuda")
            for x, _ in _data():
                run.observer.called(model)
                optimizer.zero_grad()
                h = body(x.cuda())
                first, second = one(h).mean(), other(h).mean()
                scale = scaler.get_scale() if read else 1.0
                if together:
                    (scaler.scale(first) + scaler.scale(second)).backward()
                else:
                    scaler.scale(first).backward(retain_graph=True)
                    (scaler.scale(second) if both else second * scale).backward()
                scaler.step(optimizer)
                scaler.update()

        return "loss_not_scaled" in kinds(train)

    assert of(False)
    assert not of(True) and not of(True, together=True) and not of(False, read=True)


# -- DataLoaders -------------------------------------------------------------------------------


def test_a_sampler_with_weights_of_classes(kinds: Kinds) -> None:
    def of(weights: Tensor) -> Finding | None:
        def train(run: Observed) -> None:
            model = nn.Linear(8, 1).cuda()
            data = TensorDataset(torch.rand(32, 8))
            loader = DataLoader(data, 8, sampler=WeightedRandomSampler(weights.tolist(), 32))
            run.steps(model, lambda batch: model(batch[0].cuda()).mean(), loader)

        return kinds(train).get("samples_never_drawn")

    found = of(torch.ones(3))
    assert found is not None and found.place is not None and "first 3" in found.title
    assert of(torch.ones(32)) is None


class Epochs(Dataset[Tensor]):
    """Samples that depend on the epoch."""

    def __init__(self) -> None:
        self.epoch = self.asked = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return self._noise() * index

    def _noise(self) -> Tensor:
        return torch.full((8,), float(self.epoch))


@pytest.mark.parametrize(("name", "told"), [("epoch", True), ("asked", False)])
def test_workers_that_do_not_hear_of_the_next_epoch(kinds: Kinds, name: str, told: bool) -> None:
    def of(persistent: bool) -> bool:
        def train(run: Observed) -> None:
            data = Epochs()
            loader = DataLoader(data, 8, num_workers=1, persistent_workers=persistent)
            model = nn.Linear(8, 1).cuda()
            run.steps(model, lambda x: model(x).mean(), [torch.rand(8, 8, device="cuda")])
            for epoch in range(2):
                setattr(data, name, epoch)
                run.observer.iterated(loader)

        return "workers_not_told" in kinds(train)

    assert of(True) is told and not of(False)


def test_batches_of_samples_on_the_gpu(kinds: Kinds) -> None:
    def of(device: str, size: int) -> bool:
        def train(run: Observed) -> None:
            model = nn.Linear(8, 1).cuda()
            loader = DataLoader(TensorDataset(torch.rand(256, 8).to(device)), size)
            run.steps(model, lambda batch: model(batch[0].cuda()).mean(), loader)

        return "batch_from_gpu" in kinds(train)

    assert of("cuda", 64) and not of("cuda", 4) and not of("cpu", 64)


def test_attention_that_a_script_computes_by_itself(
    kinds: Kinds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainfit.hooks.provenance.outputs._LARGE", 1)
    monkeypatch.setattr("trainfit.hooks.provenance.outputs._LEAST_POSITIONS", 6)

    def of(attend: Callable[[Tensor, nn.Linear], Tensor]) -> bool:
        def train(run: Observed) -> None:
            model = nn.Linear(8, 8).cuda()
            run.steps(model, lambda x: attend(x, model).mean(), [_sequence()] * 2)

        found = kinds(train).get("attention_by_hand")
        assert found is None or "(1 layer, " in found.title
        return found is not None

    def by_hand(x: Tensor, layer: nn.Linear) -> Tensor:
        q = layer(x)
        scores = q @ q.transpose(-2, -1) / 8**0.5
        mask = torch.triu(torch.ones(6, 6, dtype=torch.bool, device="cuda"), 1)
        return F.softmax(scores.masked_fill(mask, float("-inf")), dim=-1) @ q

    assert of(by_hand)
    assert not of(lambda x, layer: F.scaled_dot_product_attention(layer(x), x, x))
    assert not of(lambda x, layer: F.softmax(layer(x), dim=-1))


@pytest.mark.parametrize(
    ("kind", "rate", "told"),
    [
        (torch.optim.SGD, 100.0, True),
        (torch.optim.Adam, 1.0, True),
        (torch.optim.SGD, 1.0, False),
        (torch.optim.Adam, 0.1, False),
        (torch.optim.Adadelta, 1.0, False),
    ],
)
def test_a_learning_rate_with_which_nothing_is_learned(
    kinds: Kinds, kind: Callable[..., torch.optim.Optimizer], rate: float, told: bool
) -> None:
    def train(run: Observed) -> None:
        model = nn.Linear(8, 1).cuda()
        optimizer = kind(model.parameters(), lr=rate)
        run.steps(model, lambda batch: model(batch[0].cuda()).mean(), _data(), optimizer)

    assert ("rate_large" in kinds(train)) is told


def test_what_is_not_of_a_model_may_move_far(kinds: Kinds) -> None:
    def train(run: Observed) -> None:
        image = torch.rand(8, 8, device="cuda", requires_grad=True)
        model = nn.Linear(8, 1).cuda()
        optimizer = torch.optim.Adam([image], lr=10.0)
        run.steps(model, lambda _: model(image).mean(), range(2), optimizer)

    assert "rate_large" not in kinds(train)


def test_what_a_later_epoch_shows_first_is_told_of_its_run_alone() -> None:
    facts = LearningFacts(
        steps=4,
        misuses=(
            Misuse("compared_with_all", ("8×1", "8"), "train.py:3"),
            Misuse("frozen_moves", ("2", "body.weight")),
            Misuse("norm_forgets", ("1", "bn", "0.99")),
        ),
    )
    assert {each.kind for each in of_later_learning(facts)} == {"compared_with_all", "frozen_moves"}
    assert len(of_learning(facts)) == 3


class Pictures(Dataset[Any]):
    """Smooth ones of three colours, (H, W, 3) as files have them."""

    def __init__(self, to_front: Callable[[Tensor], Tensor]) -> None:
        self._to_front = to_front

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        y, x = torch.meshgrid(torch.arange(16.0), torch.arange(24.0), indexing="ij")
        colours = ((x / 5 + index).sin(), (y / 4).cos(), (x + y) / 40)
        return self._to_front(torch.stack(colours, -1))


def reaches(observer: LearningObserver, batch: Tensor) -> Tensor:
    """Of the real device alone: a simulated one has no numbers of what a model is given."""
    observer.misuse.reached((batch,))
    return batch


def test_images_whose_colours_are_not_in_front(kinds: Kinds) -> None:
    def of(to_front: Callable[[Tensor], Tensor], used: Callable[[Tensor], Tensor]) -> set[str]:
        def train(run: Observed) -> None:
            model = nn.Conv2d(3, 4, 3).cuda()
            loader = DataLoader(Pictures(to_front), 4)

            def loss(x: Tensor) -> Tensor:
                return model(reaches(run.observer, used(x)).cuda()).mean()

            run.steps(model, loss, loader)

        found = kinds(train).get("images_by_pixels")
        assert found is None or found.is_critical  # it comes before all that costs time
        return set() if found is None else {found.title}

    same = lambda x: x  # noqa: E731
    mixed = of(lambda x: x.view(3, *x.shape[:2]), same)
    assert len(mixed) == 1 and "colours and positions are mixed" in mixed.pop()
    # Numbers that are scaled meanwhile are no view of the batch any more.
    assert of(same, lambda x: (x / 2 - 1).reshape(len(x), 3, 16, 24))
    for healthy in (
        lambda x: x.permute(2, 0, 1),
        lambda x: x.permute(2, 0, 1).contiguous(),
        lambda x: torch.rand(3, 16, 24),  # noise, or classes of a board: no number is like another
        lambda x: (torch.rand(3, 16, 24) > 0.5).float(),
        lambda x: torch.zeros(3, 16, 24),
        lambda x: (torch.arange(24.0) % 3).expand(3, 16, 24).clone(),  # stripes of three pixels
    ):
        assert not of(healthy, same), healthy
    assert not of(same, lambda x: x.permute(0, 3, 1, 2).contiguous())


def test_the_line_of_a_view_that_is_used_below(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = a.view(1)\ny = x.reshape(2)\n\nloss = f(net(y))\n")
    assert line_of_view(f"{script}:4") == f"{script}:2"
    assert line_of_view(f"{script}:1") == f"{script}:1"
    script.with_name("other.py").write_text("review(x)\nnet(x)\n")
    for place in (f"{tmp_path}/other.py:2", f"{tmp_path}/none.py:2", ""):
        assert line_of_view(place) == place
