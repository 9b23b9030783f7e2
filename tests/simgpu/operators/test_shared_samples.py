"""How many ranks work on the same samples: what the effective batch size is counted by."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module

import trainfit
from helpers_ranks import as_rank_0
from trainfit.simgpu.communication.sharing import samples_shared

RANKS: Final = 8


@pytest.fixture(autouse=True)
def rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank_0(monkeypatch, RANKS)


class Experts(ParallelStyle):
    """A style of a library's own, as that which spreads experts over ranks of other samples."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((), 1),
        (("layers",), 2),
        (("sequences",), 4),
        (("layers", "sequences"), 8),
        (("experts",), 1),
    ],
)
def test_ranks_with_the_same_samples(kinds: tuple[str, ...], expected: int) -> None:
    experimental = pytest.importorskip("torch.distributed.tensor.experimental")
    if not hasattr(experimental, "context_parallel"):
        pytest.skip("this PyTorch has no context parallelism")
    with trainfit.simulate(f"{RANKS}x RTX 4090") as simulation:
        distributed.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("cp", "tp"))
        model = nn.Linear(64, 64).cuda()
        if "layers" in kinds:
            parallelize_module(model, mesh["tp"], ColwiseParallel())
        if "experts" in kinds:
            parallelize_module(model, mesh["tp"], Experts())
        for _ in range(2):
            x = torch.randn(2, 128, 64, device="cuda")
            if "sequences" in kinds:
                with experimental.context_parallel(mesh["cp"], buffers=[x], buffer_seq_dims=[1]):
                    assert x.shape[1] == 128 // 4
                    model(x).sum().backward()
            else:
                model(x).sum().backward()
    assert simulation.recording.sharing == expected


def test_groups_that_cross_in_one_rank_multiply_and_nested_ones_do_not() -> None:
    pair, row = frozenset({0, 1}), frozenset({0, 2, 4, 6})
    assert samples_shared([]) == 1
    assert samples_shared([pair, row]) == 8
    assert samples_shared([pair, frozenset({0, 1, 2, 3})]) == 4


def test_a_model_of_transformers_that_its_plan_spreads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=8)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with trainfit.simulate(f"{RANKS}x RTX 4090") as simulation:
        distributed.init_process_group("nccl")
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, tp_plan="auto")
    assert simulation.recording.sharing == RANKS
