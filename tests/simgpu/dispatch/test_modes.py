"""What does not come to the modes: work of the host alone, and the engine's own questions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trainfit
from trainfit.simgpu.device.host_fills import HostFills
from trainfit.simgpu.device.modes import FunctionMode


def test_the_engine_asks_its_tensors_past_the_mode_for_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a backward pass that mode is there for the script's hooks alone."""
    seen: list[Any] = []
    call = FunctionMode._call
    monkeypatch.setattr(
        FunctionMode,
        "_call",
        lambda self, func, *rest: (seen.append(func), call(self, func, *rest))[1],
    )
    with trainfit.simulate("RTX 4090"):
        model = torch.nn.Linear(4, 4).cuda()
        model.weight.register_hook(lambda gradient: gradient * 2)
        loss = model(torch.randn(2, 4, device="cuda")).tanh().sum()
        seen.clear()
        loss.backward()
    assert [func.__name__ for func in seen if func is not torch.Tensor.backward] == ["mul"]


def test_what_the_host_computes_does_not_come_to_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """…unless something asks for it: hooks of what autograd saves, torch.func, a default device."""
    seen: list[Any] = []
    run = HostFills.run
    monkeypatch.setattr(
        HostFills, "run", lambda self, func, *rest: (seen.append(func), run(self, func, *rest))[1]
    )
    with trainfit.simulate("RTX 4090"):
        weight = torch.nn.Parameter(torch.ones(3))
        seen.clear()
        made = torch.tanh(torch.cat((weight, torch.zeros(3)))[1:].view(5) + 1).sum()
        assert not seen and made.item() > 0
        made.backward()
        assert weight.grad is not None and weight.grad[0] == 0
        mapped = torch.func.vmap(torch.sin)(torch.randn(3, 2, device="cuda"))
        assert mapped.is_cuda and mapped.shape == (3, 2)
        with torch.device("cuda"):
            assert torch.zeros(2).is_cuda
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            assert torch.tanh(weight * 2).sum().item() > 0
        assert torch.cat((torch.ones(2, device="cuda"), torch.zeros(2, device="cuda"))).is_cuda
        assert torch.ones(4)[torch.tensor([1], device="cuda")[0].item()] == 1
        count = torch.tensor([3], device="cuda")[0]
        assert torch.ones(4)[: count + 0].shape == torch.ones(2, 4)[0, : int(count)].shape == (3,)
