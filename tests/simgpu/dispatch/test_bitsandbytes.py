"""What bitsandbytes does on a GPU by its C library, which is not there."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from trainfit.simgpu.session import simulate


def _no_library(*_: Any, **__: Any) -> Any:
    raise RuntimeError("Method 'cget_managed_ptr' not available in CPU-only version")


def test_states_of_paged_optimizers_are_outside_of_pytorchs_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functional: Any = types.ModuleType("bitsandbytes.functional")
    functional.get_paged = functional.prefetch_tensor = functional.fill = _no_library
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", functional)
    with simulate("RTX 4090") as simulation:
        before = torch.cuda.memory_allocated()
        state = functional.get_paged(1 << 20, dtype=torch.uint8, device=torch.device("cuda", 0))
        functional.fill(state, 0)
        functional.prefetch_tensor(state)
        assert state.is_paged and state.shape == (1 << 20,)
        assert torch.cuda.memory_allocated() == before
        assert any("paged optimizer" in text for text in simulation.engine.assumptions)
    assert functional.get_paged is _no_library


def test_a_parameters_type_makes_parameters() -> None:
    """As Accelerate's hooks do that move a model's parameters to the GPU and back."""
    with simulate("RTX 4090"):
        parameter = torch.nn.Linear(2, 2).cuda().weight
        there = type(parameter)(parameter.detach(), requires_grad=False)
        assert isinstance(there, torch.nn.Parameter) and there.is_cuda
        back = type(parameter)(torch.zeros(2), requires_grad=True).to("meta")
        assert back.device.type == "meta"
