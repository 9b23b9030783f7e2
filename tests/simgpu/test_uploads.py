"""Copies to the GPU that each step repeats."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import trainfit
from trainfit.results.runs.steps import HostCopy, WaitKind
from trainfit.simgpu.device.uploads import Uploads

Tensor = torch.Tensor


def _found(
    model: Callable[[], nn.Module],
    weight: Callable[[], Tensor] | None = None,
    batch: Callable[[], Tensor] = lambda: torch.rand(8, 16),
) -> list[HostCopy]:
    with trainfit.simulate("T4") as simulation:
        uploads = Uploads(simulation.module)
        simulation.on_upload(uploads.copied)
        simulation.on_step(lambda _: uploads.step_ended())
        net = model().to("cuda")
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(4):
            loss = net(batch().to("cuda")).mean()
            if weight is not None:
                loss = (loss * weight().to("cuda")).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return list(uploads.found())


class _Masked(nn.Module):
    def __init__(self, buffer: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.mask: Tensor
        if buffer:
            self.register_buffer("mask", torch.ones(16))
        else:
            self.mask = torch.ones(16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * self.mask.to(x.device)
        return result


class _Makes(nn.Module):
    def __init__(self, where: str = "cpu") -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(16, 16), where

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(16, device=self.where)
        place = place.to(x.device)
        result: Tensor = self.layer(x) * place
        return result


class _MovesItself(nn.Module):
    """Its batches are all alike, as the masks of texts of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x.to("cuda"))
        return result


def test_a_mask_that_is_moved_in_each_forward_pass() -> None:
    (found,) = _found(_Masked)
    assert not found.is_made and (found.times, found.nbytes) == (1, 16 * 4)
    assert found.line.rpartition(":")[0].endswith("test_uploads.py")
    assert not _found(lambda: _Masked(buffer=True))


def test_what_a_forward_pass_makes_on_the_cpu() -> None:
    (found,) = _found(_Makes)
    assert found.is_made and found.nbytes == 16 * 8
    assert not _found(lambda: _Makes("cuda"))


def test_batches_are_moved_and_no_more() -> None:
    assert not _found(lambda: nn.Linear(16, 4))
    same = torch.ones(8, 16)
    assert not _found(lambda: nn.Linear(16, 4), batch=lambda: same)  # a script that times itself
    assert not _found(_MovesItself, batch=lambda: torch.ones(8, 16))


def test_a_weight_that_the_loop_moves() -> None:
    weight = torch.rand(4)
    (found,) = _found(lambda: nn.Linear(16, 4), lambda: weight)
    assert not found.is_made
    assert not _found(lambda: nn.Linear(16, 4), lambda: torch.rand(4))


def test_what_the_host_waits_for() -> None:
    seen: list[WaitKind] = []
    with trainfit.simulate("T4") as simulation:
        simulation.on_wait = seen.append
        x = torch.rand(8, 4).to("cuda")
        x.sum().item()
        x.cpu()
        x.sum().cpu()
        x[x > 0.5]
        torch.cuda.synchronize()
    assert seen == ["value", "copy", "value", "size", "all"]
