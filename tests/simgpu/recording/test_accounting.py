"""What counts a run's work fails without ending the run, and is listed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trainfit
from trainfit.simgpu.allocator.segments import OutOfDeviceMemory
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.operators import flops as operator_flops
from trainfit.simgpu.operators import kernel_rules as gpu_kernels


def raises(*_: Any, **__: Any) -> Any:
    raise TypeError("got multiple values for argument 'out_shape'")


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm"])
def test_products_with_a_positional_dtype_are_counted(name: str) -> None:
    with trainfit.simulate("RTX 4090") as sim:
        left = torch.empty(8, 4, device="cuda", dtype=torch.bfloat16)
        right = torch.empty(4, 16, device="cuda", dtype=torch.bfloat16)
        if name == "bmm":
            left, right = left[None], right[None]
        added = (torch.empty(16, device="cuda"),) if name == "addmm" else ()
        out = getattr(torch.ops.aten, name).dtype(*added, left, right, torch.float32)
        assert out.dtype is torch.float32
    assert sim.recording.kernel_flops.sum() == 2 * 8 * 4 * 16
    assert sim.recording.header["assumptions"] == {}


def test_a_formula_that_fails_is_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(operator_flops._FORMULAS, torch.ops.aten.mm, raises)
    with trainfit.simulate("RTX 4090") as sim:
        a = torch.empty(8, 8, device="cuda", requires_grad=True)
        for size in (8, 16, 32):
            (a @ torch.empty(8, size, device="cuda")).sum().backward()
        assert a.grad is not None and a.grad.shape == a.shape
    notes = sim.recording.header["assumptions"]
    assert notes == {"unknown cost: aten.mm": 6}
    assert "out_shape" in str(sim.engine.accounting.errors["aten.mm"])


@pytest.mark.parametrize("part", ["library", "kernel", "rule", "values"])
def test_every_part_of_the_accounting_may_fail(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with trainfit.simulate("RTX 4090") as sim:
        a = torch.ones(4, device="cuda")
        if part == "rule":
            monkeypatch.setitem(gpu_kernels.RULES, "add", raises)
        elif part == "values":
            monkeypatch.setattr(sim.engine.values, "compute", raises)
        else:
            monkeypatch.setattr(sim.engine.info(torch.ops.aten.add.Tensor), part, raises)
        b = a + a
        assert b.shape == (4,)
        assert torch.cuda.memory_allocated() == 1024
    assert sim.recording.header["assumptions"] == {"unknown cost: aten.add.Tensor": 1}


def test_memory_that_runs_out_in_a_kernel_is_no_failure_to_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def takes(engine: Engine, *_: Any) -> None:
        engine.workspace(("index_tensors", (1 << 40,)))

    with trainfit.simulate("RTX 4090") as sim:
        a = torch.ones(4, device="cuda")
        monkeypatch.setattr(sim.engine.info(torch.ops.aten.add.Tensor), "kernel", takes)
        with pytest.raises(torch.OutOfMemoryError):
            a + a
    assert issubclass(OutOfDeviceMemory, Exception)
    assert sim.recording.header["assumptions"] == {}
