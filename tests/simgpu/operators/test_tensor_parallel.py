"""Tensor parallelism by DTensor: collectives against real ranks, by gloo on the CPU; memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import distributed, nn

import trainfit
from helpers_ranks import as_rank_0
from tests.simgpu.operators.gloo import real_ranks, recorded_ranks
from tests.simgpu.operators.test_several_ranks import launched
from trainfit.memory.replay import Stream, replay

RANKS: Final = 4
WIDTH: Final = 256

#: Trainings that are the same on any device, by name.
TRAIN: Final = """
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel,
    parallelize_module,
)

WIDTH, WORDS, LENGTH = 256, 128, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def columns_and_rows(device):
    mesh = init_device_mesh(device, (4,))
    model = Model().to(device)
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, False


def sequences(device, mesh=None):
    mesh = mesh or init_device_mesh(device, (4,))
    model = Model().to(device)
    parallelize_module(model, mesh, {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    })
    for layer in model.layers:
        parallelize_module(layer, mesh, {
            "norm": SequenceParallel(),
            "up": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        })
        parallelize_module(layer, mesh, {
            "up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1)),
        })
    return model, True


def two_dimensions(device):
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    model, is_parallel = sequences(device, mesh["tp"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, is_parallel


def data_sharded(device):
    mesh = init_device_mesh(device, (4,))
    model = Model().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, False


def train(device, job):
    torch.manual_seed(0)
    model, loss_is_parallel = globals()[job](device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=job == "data_sharded")
    for _ in range(2):
        words = torch.randint(WORDS, (2, LENGTH), device=device)
        scores = model(words).flatten(0, 1)
        if loss_is_parallel:
            with loss_parallel():
                nn.functional.cross_entropy(scores, words.flatten()).backward()
        else:
            nn.functional.cross_entropy(scores, words.flatten()).backward()
        if job == "data_sharded":  # others have parameters on several meshes
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

JOBS: Final = ("columns_and_rows", "sequences", "two_dimensions", "data_sharded")


@pytest.mark.slow
def test_real_ranks_send_what_is_recorded(tmp_path: Path) -> None:
    assert real_ranks(tmp_path, TRAIN, JOBS, RANKS) == recorded_ranks(TRAIN, JOBS, RANKS)


@pytest.fixture(scope="module")
def real() -> dict[str, list[list[tuple[str, int]]]]:
    """Of each job, what each rank sends."""
    ranks = recorded_ranks(TRAIN, JOBS, RANKS)
    return {job: [rank[number] for rank in ranks] for number, job in enumerate(JOBS)}


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank_0(monkeypatch, RANKS)


@pytest.mark.parametrize("job", JOBS)
def test_what_is_sent_is_what_real_ranks_send(
    job: str, real: dict[str, list[list[tuple[str, int]]]], rank_0: None
) -> None:
    first, *others = real[job]
    assert len(first) > 8 and all(other == first for other in others)
    script: dict[str, Any] = {}
    exec(TRAIN, script)
    with trainfit.simulate(f"{RANKS}x RTX 4090") as simulation:
        distributed.init_process_group("nccl")
        script["train"]("cuda", job)
    sent = [
        (kind, nbytes // ranks if kind == "send_receive" else nbytes)  # of a scatter, one part
        for kind, nbytes, ranks, _ in launched(simulation.recording)
    ]
    assert sent == first
    # Of all ranks so many have the same samples.
    tensor_parallel = {"data_sharded": 1, "two_dimensions": 2}
    assert simulation.recording.sharing == tensor_parallel.get(job, RANKS)


def test_a_rank_has_a_part_of_the_parameters(rank_0: None) -> None:
    """Memory of a model in columns and rows: the blocks' matrices in four parts, the rest whole."""

    def peak(parallel: bool) -> tuple[int, int]:
        script: dict[str, Any] = {}
        exec(TRAIN, script)
        with trainfit.simulate(f"{RANKS}x RTX 4090", limited=False) as simulation:
            distributed.init_process_group("nccl")
            before = torch.cuda.memory_allocated()
            model = script["columns_and_rows"]("cuda")[0] if parallel else script["Model"]().cuda()
            held = torch.cuda.memory_allocated() - before
            assert isinstance(model, nn.Module)
        return held, replay(Stream.of(simulation.recording)).peak_allocated

    whole, parts = peak(parallel=False)[0], peak(parallel=True)[0]
    matrices = 2 * 4 * (2 * WIDTH * 4 * WIDTH)  # two blocks, float32
    biases = 2 * 4 * 4 * WIDTH
    assert whole - parts == pytest.approx(3 / 4 * (matrices + biases), abs=2 * 2 * 512)


def test_attention_dropout_and_random_values_of_a_part(rank_0: None) -> None:
    """What C++ decides by the device is as on a GPU, of whose tensors a DTensor is made."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with trainfit.simulate(f"{RANKS}x RTX 4090") as simulation:
        distributed.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (RANKS,))
        whole = torch.zeros(2, 8, 128, 64, device="cuda", dtype=torch.float16)
        heads = distribute_tensor(whole, mesh, [Shard(1)])
        seen = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        kept = nn.functional.dropout(seen, 0.5)
        weight = distribute_tensor(torch.empty(8, 4, device="cuda"), mesh, [Shard(0)])
        assert nn.init.uniform_(weight).to_local().shape == (2, 4)
        assert kept.to_local().shape == (2, 2, 128, 64)
        plain = torch.zeros(1, 1, 4, 4, device="meta")
        assert nn.functional.scaled_dot_product_attention(plain, plain, plain).is_meta
    names = set(simulation.recording.strings)
    assert "aten._scaled_dot_product_flash_attention.default" in names
    assert "aten.native_dropout.default" in names
