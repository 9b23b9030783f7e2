"""What the simulated device replaces in ``torch.cuda`` takes what PyTorch's own takes."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import pytest
import torch

import trainfit
from trainfit.simgpu.patching import PatchSet

#: Methods of graphs that show the driver's own graph, which no simulation has.
DRIVERS = {"raw_cuda_graph", "raw_cuda_graph_exec", "get_graph_data"}
#: The two halves of capture_end, for what lies between them.
HALVES = {"capture_end_pre", "capture_end_post"}


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any]]:
    """Path, PyTorch's own and ours, as they were before ours was made to look like it."""
    found: list[tuple[str, Any, Any]] = []
    set_ = PatchSet.set

    def spy(self: PatchSet, owner: Any, name: str, value: Any) -> None:
        found.append((f"{getattr(owner, '__name__', owner)}.{name}", vars(owner).get(name), value))
        set_(self, owner, name, value)

    monkeypatch.setattr(PatchSet, "set", spy)
    with trainfit.simulate("RTX 4090"):
        pass
    return [each for each in found if each[0].startswith("torch.cuda.")]


def refused(original: Any, ours: Any) -> list[str]:
    """Arguments by name that ours does not take."""
    taken = inspect.signature(ours).parameters.values()
    names = {each.name for each in taken}
    if any(each.kind is each.VAR_KEYWORD for each in taken):
        return []
    variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    wanted = inspect.signature(original).parameters.values()
    return [each.name for each in wanted if each.kind not in variable and each.name not in names]


def test_functions_take_the_arguments_of_pytorchs(replaced: list[tuple[str, Any, Any]]) -> None:
    looked = {path: refused(a, b) for path, a, b in replaced if isinstance(a, FunctionType)}
    assert looked.keys() >= {"torch.cuda.set_device", "torch.cuda.memory.mem_get_info"}
    assert {path: names for path, names in looked.items() if names} == {}


def test_graphs_have_the_methods_of_pytorchs(replaced: list[tuple[str, Any, Any]]) -> None:
    ((original, ours),) = ((a, b) for path, a, b in replaced if path == "torch.cuda.CUDAGraph")
    methods = {
        name: value
        for name, value in vars(original).items()
        if isinstance(value, FunctionType) and not name.startswith("_")
    }
    assert len(methods) > 5
    lacking = {name for name in methods if not hasattr(ours, name)}
    assert lacking <= DRIVERS | HALVES
    taken = {name: refused(methods[name], getattr(ours, name)) for name in methods.keys() - lacking}
    assert {name: names for name, names in taken.items() if names} == {}


def test_the_device_is_set_by_name() -> None:
    with trainfit.simulate("RTX 4090"):
        torch.cuda.set_device(device="cuda:0")
        with pytest.raises((RuntimeError, AssertionError), match="ordinal"):
            torch.cuda.set_device(device=1)
