"""Sequences of tokens, with their padding and their positions, and labels of them: what is not what
a layer or a loss is for, and what is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from helpers_learning import found_of, on_gpu, train
from trainfit.findings.training.inputs import SEQUENCES
from trainfit.hooks.learning import LearningObserver
from trainfit.simgpu.session import Simulation

Tensor = torch.Tensor
Kinds = Callable[..., list[str]]
_BATCH, _STEPS, _WIDTH = 8, 13, 16


@pytest.fixture
def kinds(simulation: Simulation) -> Kinds:
    """Of a training with a loss of the model, tokens and labels, the kinds of :data:`SEQUENCES`."""

    def of(model: nn.Module, loss: Callable[[Any, Tensor, Tensor], Tensor], x: Tensor) -> list[str]:
        def training(observer: LearningObserver) -> None:
            batches = DataLoader(TensorDataset(x, torch.arange(len(x)) % 4), _BATCH)
            own = model.cuda()
            train(observer, own, on_gpu(own, loss), batches)

        found = found_of(training, simulation)
        return [each for each in found if each in SEQUENCES]

    return of


def classes(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def texts(*, padded: bool = True, left: bool = False) -> Tensor:
    """Tokens from 1 on, in rows that are as long as they are or filled up with 0."""
    tokens = torch.arange(32 * _STEPS).reshape(32, _STEPS) * 7 % 97 + 1
    for row in range(len(tokens) if padded else 0):
        tokens[row, 3 + row % 10 :] = 0
    return tokens.flip(1) if left else tokens


class Recurrent(nn.Module):
    """``last``: features of its outputs, states and tokens."""

    def __init__(self, last: Callable[..., Tensor], *, packs: bool = False) -> None:
        super().__init__()
        self.last, self.packs = last, packs
        self.embedding = nn.Embedding(100, _WIDTH, padding_idx=0)
        self.layer = nn.GRU(_WIDTH, _WIDTH, batch_first=True)
        self.head = nn.Linear(_WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        e = self.embedding(x)
        lengths = torch.full((len(x),), 3)
        y = pack_padded_sequence(e, lengths, batch_first=True) if self.packs else e
        out, h = self.layer(y)
        return self.head(self.last(out, h, x))


def own_last(out: Tensor, _: Tensor, x: Tensor) -> Tensor:
    return out[torch.arange(len(out), device=x.device), (x != 0).sum(1) - 1]


@pytest.mark.parametrize(
    ("last", "tokens", "told"),
    [
        (lambda out, h, x: out[:, -1], texts(), True),
        (lambda out, h, x: out[:, -1, :], texts(), True),
        (lambda out, h, x: h[-1], texts(), True),
        (lambda out, h, x: h.squeeze(0), texts(), True),
        (own_last, texts(), False),
        (lambda out, h, x: out.sum(1), texts(), False),
        (lambda out, h, x: out[:, -1], texts(padded=False), False),
        (lambda out, h, x: out[:, -1], texts(left=True), False),
    ],
)
def test_the_last_step_is_no_padding(
    kinds: Kinds, last: Callable[..., Tensor], tokens: Tensor, *, told: bool
) -> None:
    assert kinds(Recurrent(last), classes, tokens) == ["last_step_padded"] * told


def test_a_packed_sequence_ends_where_it_does(kinds: Kinds) -> None:
    assert kinds(Recurrent(lambda out, h, x: h[-1], packs=True), classes, texts()) == []


class Encoder(nn.Module):
    """``positions`` gives what is added to embedded tokens, ``masks`` what the layers are given."""

    def __init__(
        self,
        masks: Callable[[Tensor], dict[str, Any]] = lambda x: {},
        positions: Callable[[Tensor, Tensor], Tensor] = lambda x, table: x,
        padding: int | None = 0,
    ) -> None:
        super().__init__()
        self.masks, self.positions = masks, positions
        self.embedding = nn.Embedding(100, _WIDTH, padding_idx=padding)
        layer = nn.TransformerEncoderLayer(_WIDTH, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(_WIDTH, 100)
        self.register_buffer("table", torch.rand(50, 1, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        features = self.positions(self.embedding(x), self.table)  # type: ignore[arg-type]
        return self.head(self.layers(features, **self.masks(x)))  # type: ignore[no-any-return]


def pooled(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).mean(1), y)


def causal(x: Tensor) -> dict[str, Any]:
    return {"mask": nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)}


@pytest.mark.parametrize(
    ("masks", "tokens", "padding", "told"),
    [
        (lambda x: {}, texts(), 0, True),
        (lambda x: {}, texts(), None, True),
        (lambda x: {"src_key_padding_mask": x == 0}, texts(), 0, False),
        (causal, texts(), 0, False),
        (lambda x: {}, texts(padded=False), 0, False),
        # Of one length, so that 0 may be a token as any other.
        (
            lambda x: {},
            torch.cat([texts(padded=False)[:, 2:], texts()[:, -2:] * 0], 1),
            None,
            False,
        ),
    ],
)
def test_attention_leaves_padding_out(
    kinds: Kinds,
    masks: Callable[[Tensor], dict[str, Any]],
    tokens: Tensor,
    padding: int | None,
    *,
    told: bool,
) -> None:
    found = kinds(Encoder(masks, padding=padding), pooled, tokens)
    assert ("padding_attended" in found) == told


@pytest.mark.parametrize(
    ("positions", "told"),
    [
        (lambda x, table: x + table[: x.size(0)], True),
        (lambda x, table: table[: x.size(0), :] + x, True),
        (lambda x, table: x + table[: x.size(1)].transpose(0, 1), False),
        (lambda x, table: x + table.transpose(0, 1)[:, : x.size(1)], False),
        # One for each sample, which is no part of a table.
        (lambda x, table: x + table[: x.size(0)].clone(), False),
    ],
)
def test_positions_are_those_of_steps(
    kinds: Kinds, positions: Callable[[Tensor, Tensor], Tensor], *, told: bool
) -> None:
    found = kinds(Encoder(positions=positions), pooled, texts(padded=False))
    assert found == ["positions_by_sample"] * told


def test_positions_of_steps_that_come_first(kinds: Kinds) -> None:
    def turned(x: Tensor, table: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return (x + table[: x.size(0)]).transpose(0, 1)

    assert kinds(Encoder(positions=turned), pooled, texts(padded=False)) == []


def same(model: Any, x: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def shifted(model: Any, x: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def hidden(model: Any, x: Tensor, _: Tensor) -> Tensor:
    """Tokens that the model is to find where it is not given them."""
    return F.cross_entropy(model(x * 0 + 5).flatten(0, 1), x.flatten())


def moved(x: Tensor, _: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def test_a_model_may_shift_its_tokens_by_itself(kinds: Kinds) -> None:
    assert kinds(Encoder(causal, moved), same, texts(padded=False)) == []


@pytest.mark.parametrize(
    ("loss", "masks", "told"),
    [
        (same, causal, True),
        (shifted, causal, False),
        (hidden, causal, False),
        (same, lambda x: {}, False),  # an encoder that sees all
    ],
)
def test_a_causal_model_gives_the_next_token(
    kinds: Kinds,
    loss: Callable[[Any, Tensor, Tensor], Tensor],
    masks: Callable[[Tensor], dict[str, Any]],
    *,
    told: bool,
) -> None:
    assert kinds(Encoder(masks), loss, texts(padded=False)) == ["labels_not_shifted"] * told


class Decoder(nn.Module):
    """``steps`` makes what the head is for of a recurrent layer's outputs and its state."""

    def __init__(self, steps: Callable[[Tensor, Tensor], Tensor], *, both: bool = False) -> None:
        super().__init__()
        self.steps = steps
        self.embedding = nn.Embedding(100, _WIDTH)
        width = _WIDTH // 2 if both else _WIDTH
        self.layer = nn.GRU(_WIDTH, width, batch_first=True, bidirectional=both)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(_WIDTH, 100)

    def forward(self, x: Tensor) -> Tensor:
        out, h = self.layer(self.embedding(x))
        return self.head(self.drop(self.steps(out, h)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "loss", "told"),
    [
        (Decoder(lambda out, h: out), same, True),
        (Decoder(lambda out, h: out), shifted, False),
        (Decoder(lambda out, h: out, both=True), same, False),
        # An autoencoder: all steps of one state.
        (Decoder(lambda out, h: h[-1][:, None].expand(-1, _STEPS, -1)), same, False),
        (Decoder(lambda out, h: out + h[-1][:, None]), same, False),
    ],
)
def test_a_recurrent_model_gives_the_next_token(
    kinds: Kinds, model: nn.Module, loss: Callable[..., Tensor], *, told: bool
) -> None:
    assert kinds(model, loss, texts(padded=False)) == ["labels_not_shifted"] * told


@pytest.mark.parametrize(("first", "blank", "told"), [(0, 0, True), (1, 0, False), (0, 99, False)])
def test_a_blank_is_no_letter(kinds: Kinds, first: int, blank: int, *, told: bool) -> None:
    letters = torch.tensor([[0, 1, 2, 0]] * _BATCH) + first
    lengths = torch.full((_BATCH,), 3)

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        steps = model(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(
            steps, letters.cuda(), torch.full((_BATCH,), _STEPS), lengths, blank=blank
        )

    model = nn.Sequential(nn.Embedding(100, _WIDTH), nn.Linear(_WIDTH, 100))
    assert kinds(model, loss, texts(padded=False)) == ["blank_in_labels"] * told
