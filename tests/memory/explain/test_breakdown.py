"""What the peak consists of, by module: tables that look through wrappers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trainfit
from trainfit.memory.peak import by_module, divided
from trainfit.memory.replay import Stream, replay

_PARTS = {"encoder.0": 40, "encoder.1": 20, "decoder": 30, "head": 10}


@pytest.mark.parametrize(
    "wrapper",
    [
        "DataParallel.module",
        "DistributedDataParallel.module._orig_mod",
        "PeftModelForCausalLM.base_model.model.model",
        "LightningModule.trainable_module.0.auto_model",
        "OptimizedModule._orig_mod",
    ],
)
def test_wrappers_are_looked_through(wrapper: str) -> None:
    totals = {f"{wrapper}.{path}": nbytes for path, nbytes in _PARTS.items()}
    found = divided({**totals, wrapper: 1, "": 7})
    assert found == {
        f"{wrapper}.encoder": 60,
        f"{wrapper}.decoder": 30,
        f"{wrapper}.head": 10,
        "": 7,
        wrapper: 1,
    }


def test_a_model_is_cut_after_its_children() -> None:
    assert divided({f"Net.{path}": nbytes for path, nbytes in _PARTS.items()}) == {
        "Net.encoder": 60,
        "Net.decoder": 30,
        "Net.head": 10,
    }


def test_a_table_of_one_row_is_divided_further() -> None:
    layers = {f"Llama.model.layers.{n}": 30 for n in range(3)}
    assert list(divided({**layers, "Llama.lm_head": 5})) == [*layers, "Llama.lm_head"]
    assert list(divided({"Net.only": 5, "": 3})) == ["Net.only", ""]


@given(
    st.dictionaries(
        st.lists(st.sampled_from(["a", "b", "module", "0"]), min_size=0, max_size=6).map(".".join),
        st.integers(0, 1 << 40),
        max_size=30,
    )
)
def test_nothing_is_lost_or_counted_twice(totals: dict[str, int]) -> None:
    found = divided(totals)
    assert sum(found.values()) == sum(totals.values())
    assert list(found.values()) == sorted(found.values(), reverse=True)
    for path in found:
        assert any(each == path or each.startswith(f"{path}.") for each in totals) or not path


class _Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)  # type: ignore[no-any-return]


def test_a_wrapped_model_on_the_simulated_gpu() -> None:
    with trainfit.simulate("T4") as simulation:
        inner = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda()
        model = _Wrapper(_Wrapper(inner))
        model(torch.randn(64, 512, device="cuda")).sum().backward()
        simulation.end_step()
    recording = simulation.recording
    stream = Stream.of(recording)
    found = by_module(recording, stream, replay(stream))
    assert {f"_Wrapper.module.module.{n}" for n in range(4)} <= set(found)
