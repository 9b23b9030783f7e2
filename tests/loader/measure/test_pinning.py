"""Pinned memory where a process may not use the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainfit.loader.measure.running import emulated_pinning


@pytest.mark.parametrize("refused", [True, False])
def test_where_the_driver_refuses_pinning_is_emulated(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process forked off one that asked the driver: "CUDA error: initialization error"."""
    tensor: Any = torch.Tensor
    asked = []

    def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        asked.append(tensor.numel())
        if refused:
            raise torch.AcceleratorError("CUDA error: initialization error")
        return tensor

    monkeypatch.setattr(tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with emulated_pinning():
        batch = torch.arange(3.0)
        pinned = batch.pin_memory()
    assert torch.equal(pinned, batch)
    assert asked == ([1] if refused else [1, 3])
