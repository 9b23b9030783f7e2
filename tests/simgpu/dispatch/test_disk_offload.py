"""Weights that Accelerate offloads to the disk: neither written nor read, but for small ones."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from trainfit.results.runs.recording import KINDS
from trainfit.simgpu.session import simulate


@pytest.fixture
def offload(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for ``accelerate.utils.offload``."""
    module: Any = types.ModuleType("accelerate.utils.offload")

    def offload_weight(
        weight: Any, weight_name: str, offload_folder: Any, index: Any = None
    ) -> Any:
        torch.save(weight, Path(offload_folder, f"{weight_name}.dat"))
        index[weight_name] = {"dtype": "float32", "shape": list(weight.shape)}
        return index

    def load_offloaded_weight(weight_file: Any, weight_info: Any) -> Any:
        return torch.load(weight_file)

    class OffloadedWeightsLoader:
        def __init__(self, state_dict: Any, index: Any, folder: Path) -> None:
            self.state_dict, self.index, self.folder = state_dict, index, folder

        def __getitem__(self, key: str) -> Any:
            if key in self.state_dict:
                return self.state_dict[key]
            return module.load_offloaded_weight(self.folder / f"{key}.dat", self.index[key])

    module.OffloadedWeightsLoader = OffloadedWeightsLoader
    module.offload_weight, module.load_offloaded_weight = offload_weight, load_offloaded_weight
    monkeypatch.setitem(sys.modules, "accelerate.utils.offload", module)
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_a_large_weight_is_a_hole(offload: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    with simulate("RTX 4090") as simulation:
        weight = torch.empty(1024, 2048, dtype=dtype)
        index = offload.offload_weight(weight, "layer", tmp_path, index={})
        assert index == {"layer": {"dtype": str(dtype)[6:], "shape": [1024, 2048]}}
        file = tmp_path / "layer.dat"
        assert file.stat().st_size == weight.nbytes and file.stat().st_blocks <= 8
        weights = offload.OffloadedWeightsLoader({"in RAM": weight}, index, tmp_path)
        assert weights["in RAM"] is weight and not simulation.engine.assumptions
        read = weights["layer"]
        assert (read.dtype, read.shape, read.device.type) == (dtype, weight.shape, "cpu")
        assert read.cuda().is_cuda and not read[0, 0]
        assert any("on the disk are read" in text for text in simulation.engine.assumptions)


def test_a_small_one_keeps_its_values(offload: Any, tmp_path: Path) -> None:
    original = offload.offload_weight
    with simulate("RTX 4090") as simulation:
        index = offload.offload_weight(torch.arange(4.0), "scale", tmp_path, index={})
        read = offload.OffloadedWeightsLoader({}, index, tmp_path)["scale"]
        assert read.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert not simulation.engine.assumptions
    assert offload.offload_weight is original


def test_weights_that_come_with_a_call_are_parameters() -> None:
    """Of Accelerate's hook, which makes them for the call of a layer and lets them go after it."""
    hooks = pytest.importorskip("accelerate.hooks")
    with simulate("RTX 4090") as simulation:
        layer = torch.nn.Linear(1024, 1024)
        weights = {name: each.detach().clone() for name, each in layer.named_parameters()}
        hook = hooks.AlignDevicesHook(
            execution_device="cuda:0", offload=True, weights_map=weights, io_same_device=True
        )
        hooks.add_hook_to_module(layer, hook)
        for _ in range(2):
            layer(torch.rand(8, 1024, device="cuda"))
        recording = simulation.recording
    large = recording.alloc_bytes == 4 * 1024 * 1024
    assert [KINDS[kind] for kind in recording.alloc_kind[large]] == ["parameter"] * 2
