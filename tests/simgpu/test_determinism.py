"""Operators without a deterministic form are refused as PyTorch refuses them on a GPU, and only
while it is asked to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import trainfit
from trainfit.simgpu.device import registry


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with trainfit.simulate("T4"):
        yield


def _image(size: int = 8) -> torch.Tensor:
    return torch.rand(2, 3, size, size, device="cuda", requires_grad=True)


def _pixels() -> torch.Tensor:
    return torch.zeros(2, 8, 8, dtype=torch.long, device="cuda")


@pytest.mark.parametrize(
    "refused",
    [
        lambda: F.cross_entropy(_image(), _pixels()),
        lambda: F.adaptive_avg_pool2d(_image(), 3).sum().backward(),
        lambda: F.pad(_image(), (1, 1, 1, 1), mode="reflect").sum().backward(),
        lambda: F.grid_sample(_image(), torch.zeros(2, 4, 4, 2, device="cuda")).sum().backward(),
        lambda: torch.rand(9, device="cuda").cumsum(0),
        lambda: torch.bincount(_pixels().flatten(), weights=torch.rand(128, device="cuda")),
        lambda: torch.rand(4, 4, device="cuda").median(1),
    ],
)
def test_refused(refused: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        refused()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with contextlib.suppress(UserWarning):
        refused()


@pytest.mark.parametrize(
    "allowed",
    [
        lambda: F.cross_entropy(_image(), _pixels(), reduction="none").mean().backward(),
        lambda: F.adaptive_avg_pool2d(_image(), 1).sum().backward(),  # a mean
        lambda: F.interpolate(_image(), scale_factor=2, mode="bilinear").sum().backward(),
        lambda: torch.arange(9, device="cuda").cumsum(0),
        lambda: torch.bincount(_pixels().flatten()),
        lambda: (_image().flatten(1) @ _image().flatten(1).T).sum().backward(),
    ],
)
def test_allowed(allowed: Callable[[], Any]) -> None:
    allowed()


def test_matmuls_want_a_variable_where_pytorch_documents_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "wants_config", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    told = registry.refusal("mm", "")
    assert told is not None and "CUBLAS_WORKSPACE_CONFIG=:4096:8" in str(told((), {}))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert told((), {}) is None
    monkeypatch.setattr(registry, "wants_config", lambda: False)
    assert registry.refusal("mm", "") is None
