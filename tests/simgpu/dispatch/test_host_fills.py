"""Random values of large tensors on the host wait until something reads them."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
import torch

import trainfit
from trainfit.simgpu.device import host_fills

SIDE = 8192
NBYTES = 4 * SIDE * SIDE


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[trainfit.Simulation]:
    monkeypatch.setattr(host_fills, "AT_ONCE_BYTES", 0)
    with trainfit.simulate("custom:8GiB") as simulation:
        yield simulation


def ram_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def test_weights_that_move_to_the_gpu_are_never_drawn(simulation: trainfit.Simulation) -> None:
    before = ram_bytes()
    linear = torch.nn.Linear(SIDE, SIDE, bias=False)  # kaiming_uniform_
    torch.nn.init.trunc_normal_(linear.weight, std=0.02)
    linear = linear.to(torch.bfloat16)
    assert linear.cuda().weight.dtype == torch.bfloat16
    assert torch.cuda.memory_allocated() == NBYTES // 2
    assert ram_bytes() - before < NBYTES // 4


def test_who_reads_them_gets_them(simulation: trainfit.Simulation) -> None:
    weight = torch.nn.Parameter(torch.empty(2048, 1024))
    torch.nn.init.uniform_(weight)
    torch.nn.init.normal_(weight, mean=1.0, std=0.5)
    state = torch.get_rng_state()
    copy, half = weight.detach().clone(), weight.detach().to(torch.bfloat16)
    assert torch.equal(copy, weight)
    assert torch.equal(half, weight.detach().bfloat16())
    assert abs(weight[0].mean().item() - 1.0) < 0.1 and abs(weight.std().item() - 0.5) < 0.01
    assert torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        torch.nn.init.trunc_normal_(weight, std=0.5, a=-0.5, b=0.5)
        assert weight.abs().max().item() <= 0.5 and weight.std().item() > 0.2
        torch.nn.init.normal_(weight)
        assert weight.detach().numpy().std() > 0.9
        torch.nn.init.normal_(weight)
        weight[3] = 7.0  # a part of it: the rest is drawn
        assert weight[3].sum().item() == 7 * 1024 and weight[4].std().item() > 0.9
        torch.nn.init.normal_(weight).copy_(torch.ones_like(weight))
    assert weight.sum().item() == weight.numel()


def test_what_nobody_holds_does_not_wait(simulation: trainfit.Simulation) -> None:
    weight = torch.nn.Parameter(torch.empty(2048, 1024))
    torch.nn.init.normal_(weight)
    assert len(simulation.engine.host_fills) == 1
    del weight
    assert len(simulation.engine.host_fills) == 0


def test_small_models_have_their_values_at_once() -> None:
    with trainfit.simulate("custom:8GiB") as simulation:
        torch.nn.Linear(2048, 2048)
        assert len(simulation.engine.host_fills) == 0


def test_saved_tensors_on_the_host_cost_no_ram(simulation: trainfit.Simulation) -> None:
    """Activations that wait in the host's memory were filled twice: minutes for each step."""
    weight = torch.nn.Parameter(torch.empty(4096, 4096, device="cuda"))
    rows = torch.empty(8192, 4096, device="cuda")
    before, held = ram_bytes(), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor.cpu())
        return held[-1]

    for hooks in (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.cuda()),
        torch.autograd.graph.save_on_cpu(pin_memory=True),
    ):
        with hooks:
            loss = (rows @ weight).relu().sum()
        loss.backward()
    assert weight.grad is not None and len(held) >= 2
    assert {each.device.type for each in held} == {"cpu"}
    assert ram_bytes() - before < rows.nbytes // 4
    assert rows[:512].cpu().min().item() == 1.0  # what the script itself looks at is healthy
