"""The simulator's own tensors, while a script has replaced PyTorch's constructors."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trainfit
from trainfit.simgpu import constructors

NAMES = ("arange", "empty", "full", "ones", "tensor", "zeros")
SOURCES = Path(trainfit.__file__).parent / "simgpu"


def replaced(make: Callable[..., Any]) -> Callable[..., Any]:
    """As DeepSpeed's `zero.Init` replaces it: on the GPU, and in the model's type."""

    @functools.wraps(make)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("device", torch.device("cuda", 0))
        made = make(*args, **kwargs)
        return made.to(torch.bfloat16) if made.is_floating_point() else made

    return wrapper


def test_own_tensors_are_as_the_simulator_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators within `zero.Init` were of unknown cost, and views of another type."""
    with trainfit.simulate("T4", limited=False) as simulation:
        for name in NAMES:
            monkeypatch.setattr(torch, name, replaced(getattr(torch, name)))
        assert torch.ones(2).dtype == torch.bfloat16  # the script's own are as it wants them
        made = torch.nn.Parameter(torch.empty_like(torch.arange(6.0), dtype=torch.float32))
        with torch.no_grad():
            made.zero_().fill_(2)
        assert made.view(2, 3).dtype == made.new_empty(2).dtype == torch.float32
        steps = torch.empty((), dtype=torch.int64).zero_()
        steps += 3
        assert steps.item() == 3 and made.new_tensor([1.0]).dtype == torch.float32
        assert not simulation.engine.accounting.errors
        monkeypatch.undo()


def test_none_of_the_simulator_is_by_a_name_that_a_script_may_replace() -> None:
    assert all(getattr(constructors, name) is getattr(torch, name) for name in NAMES)
    called = re.compile(rf"(?<![\w.`])torch\.({'|'.join(NAMES)})\(")
    found = {
        f"{path.name}: {match[0]}"
        for room in ("device", "operators")
        for path in (SOURCES / room).glob("*.py")
        for match in called.finditer(path.read_text())
    }
    assert not found, "call trainfit.simgpu.constructors"
