"""How long the sequences are that models are given, and how long they may be."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainfit.results.runs.trace import ContextSeen
from trainfit.scripts.samples.context_length import ContextWatch, positions_of
from trainfit.simgpu.patching import PatchSet


class Model(torch.nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(8, 2)
        if config:
            self.config = SimpleNamespace(**config)

    def forward(self, length: int) -> None:
        self.words(torch.zeros(2, length, dtype=torch.long))


@pytest.fixture
def watch() -> Iterator[ContextWatch]:
    found, patches = ContextWatch(), PatchSet()
    found.install(patches)
    yield found
    patches.restore()


def test_each_model_has_positions_of_its_own(watch: ContextWatch) -> None:
    short, long = Model(max_position_embeddings=77), Model(max_position_embeddings=2048)
    short(77), long(512), Model()(4096)
    assert watch.seen() == ContextSeen(512, 2048) and not watch.seen().too_long
    short(78)
    assert watch.seen() == ContextSeen(78, 77) and "longer than the 77" in watch.seen().warning()


def test_a_text_is_as_long_as_it_gets(watch: ContextWatch) -> None:
    Model(n_positions=128)(20)
    watch.generates(128, 128)
    assert not watch.seen().too_long
    watch.generates(129, 128)
    assert watch.seen() == ContextSeen(129, 128)


def test_a_model_that_does_not_say_has_none(watch: ContextWatch) -> None:
    assert watch.seen() == ContextSeen()
    Model()(30)
    assert watch.seen() == ContextSeen(30, None)


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"n_positions": 1024}, 1024),
        ({"n_positions": 512, "relative_attention_num_buckets": 32}, None),  # T5
        ({"max_position_embeddings": 514, "relative_attention_num_buckets": 32}, 514),  # MPNet
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            },
            8192,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
            },
            131072,
        ),
    ],
)
def test_positions_of_a_configuration(config: dict[str, Any], positions: int | None) -> None:
    assert positions_of(SimpleNamespace(**config)) == positions
