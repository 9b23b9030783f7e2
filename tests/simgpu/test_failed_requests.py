"""What an operator asked a full GPU for, and what that says of the script."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import trainfit
from trainfit.findings.out_of_memory import of_request
from trainfit.results.findings import Finding
from trainfit.simgpu.device.errors import REQUEST


@pytest.fixture(scope="module", autouse=True)
def gpu() -> Iterator[None]:
    with trainfit.simulate("RTX 4090"):
        yield


def of(function: Callable[[], Any]) -> list[Finding]:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        function()
    return list(of_request(getattr(raised.value, REQUEST), None))


def test_a_result_of_all_pairs() -> None:
    x = torch.zeros(8192, 128, device="cuda")
    (finding,) = of(lambda: x[:, None] - x[None])
    assert finding.title.startswith("32.00 GiB at once for one result of sub: 4096 times")
    assert finding.evidence[1].value == "8192×1×128 and 1×8192×128"
    assert "torch.cdist" in finding.fixes[0].action
    # Expanded first, as its own function does.
    (finding,) = of(lambda: x[:, None].expand(-1, 8192, -1) - x[None].expand(8192, -1, -1))
    assert "4096 times" in finding.title
    points = torch.zeros(2, 60_000, 3, device="cuda")
    (finding,) = of(lambda: torch.cdist(points, points))
    assert "rows" in finding.fixes[0].action
    rows = torch.zeros(100_000, 128, device="cuda")
    (finding,) = of(lambda: rows @ rows.T)
    assert "result of mm" in finding.title


def test_a_result_that_is_as_large_as_what_it_is_of() -> None:
    large = torch.zeros(4 << 30, device="cuda")
    image = torch.zeros(64, 3, 512, 512, device="cuda")
    layer = torch.nn.Conv2d(3, 256, 3, device="cuda")
    for function in (
        lambda: large * 2,
        lambda: torch.zeros(10**11, device="cuda"),
        lambda: layer(image),  # many channels of few
    ):
        assert of(function) == []


class NeedsTooMuch(torch.autograd.Function):
    """Its backward pass does not fit."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] + torch.empty(1 << 34, device="cuda").sum()


def test_a_backward_pass_without_memory_leaves_no_graph() -> None:
    """The other branch waits for its turn: a GPU's thread drops it at once, as a script that tries
    a smaller batch relies on."""
    x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
    gc.collect()  # what the other tests left
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        (x.exp() + NeedsTooMuch.apply(x)).sum().backward()  # type: ignore[no-untyped-call]
    gc.collect()
    assert torch.cuda.memory_allocated() == before
