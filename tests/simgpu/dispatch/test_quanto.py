"""Quanto's weights of 4 bits: its tests for the very class of a tensor, and PyTorch's matmul."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

import trainfit
from trainfit.results.runs.recording import KINDS


def test_a_gpus_tensor_is_of_the_class_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("optimum.quanto.tensor.weights.qbits")
    exec("def kind(x):\n    return type(x)", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with trainfit.simulate("RTX 4090"):
        values = torch.zeros(4, device="cuda")
        kinds = [module.kind(values), module.kind(torch.nn.Parameter(values)), module.kind(4)]
        assert kinds == [torch.Tensor, torch.nn.Parameter, int]
    assert "type" not in vars(module)


def test_a_matmul_with_weights_of_four_bits() -> None:
    with trainfit.simulate("RTX 4090") as simulation:
        source = torch.zeros(16, 1024, device="cuda", dtype=torch.bfloat16)
        packed = torch.zeros(512 // 8, 1024 // 128, 32, 4, device="cuda", dtype=torch.int32)
        scales = torch.zeros(1024 // 128, 512, 2, device="cuda", dtype=torch.bfloat16)
        assert torch._weight_int4pack_mm(source, packed, 128, scales).shape == (16, 512)
        recording = simulation.recording
    flops = 2 * 16 * 512 * 1024
    (kernel,) = (recording.kernel_flops == flops).nonzero()[0]
    read = source.nbytes + packed.nbytes + scales.nbytes
    assert recording.kernel_read[kernel] == read < 512 * 1024


class Packed(torch.Tensor):
    """Elements that lie in another tensor, as Quanto's and torchao's."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, packed: Any) -> Any:
        shape, dtype, device = values.shape, values.dtype, values.device
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def __init__(self, values: torch.Tensor, packed: Any) -> None:
        self.packed = packed

    def __tensor_flatten__(self) -> Any:
        return ["packed"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]  # detach()


def test_what_a_packed_weight_holds_is_a_parameter() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = torch.zeros(64, 64, device="cuda")
            inner = Packed(values, torch.zeros(777, device="cuda"))
            self.weight = torch.nn.Parameter(Packed(values, inner), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    with trainfit.simulate("RTX 4090") as simulation:
        Layer()(torch.zeros(2, device="cuda"))
        recording = simulation.recording
    (number,) = (recording.alloc_bytes == 4 * 777).nonzero()[0]
    assert KINDS[recording.alloc_kind[number]] == "parameter"
