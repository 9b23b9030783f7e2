"""Sparse tensors, as gradients of embeddings are, with their memory; other layouts; extensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils import cpp_extension

import trainfit
from trainfit.results.runs.recording import KINDS
from trainfit.simgpu.device.errors import UnsupportedOperatorError
from trainfit.simgpu.session import Simulation

ROWS, WIDTH = 1000, 64
INDICES = torch.arange(40).reshape(8, 5) % 30


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(ROWS, WIDTH, sparse=True),
    "padding": lambda: nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=3),
    "sum": lambda: nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum"),
    "mean": lambda: nn.EmbeddingBag(ROWS, WIDTH, sparse=True),
}


def gradient(layer: Any, device: str, passes: int = 1) -> torch.Tensor:
    layer.to(device)
    for _ in range(passes):
        layer(INDICES.to(device)).sum().backward()
    return layer.weight.grad  # type: ignore[no-any-return]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_gradient_is_what_it_is_on_the_cpu(sim: Simulation, layer: str) -> None:
    expected, made = (gradient(LAYERS[layer](), device) for device in ("cpu", "cuda"))
    for one, other in ((expected, made), (expected.coalesce(), made.coalesce())):
        assert other.is_cuda and other.is_sparse and other.layout is torch.sparse_coo
        assert other.is_coalesced() == one.is_coalesced()
        assert (other.shape, other.dtype) == (one.shape, one.dtype)
        assert (other._nnz(), other.sparse_dim(), other.dense_dim()) == (one._nnz(), 1, 1)
        assert torch.equal(other._indices().cpu(), one._indices())
        assert other._values().shape == one._values().shape
    assert not sim.recording.header["assumptions"]
    assert made.to_dense().shape == expected.shape


def test_the_gradients_of_two_passes_are_kept_side_by_side(sim: Simulation) -> None:
    made = gradient(LAYERS["embedding"](), "cuda", passes=2)
    assert made._nnz() == 2 * INDICES.numel()  # add_out_sparse_cuda; the CPU sums them up
    assert made.coalesce()._nnz() == 30


def test_a_gradient_takes_memory_for_its_rows_only(sim: Simulation) -> None:
    layer, indices = nn.Embedding(ROWS, WIDTH, sparse=True).cuda(), INDICES.cuda()
    out = layer(indices)
    given = torch.ones_like(out)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out.backward(given)
    assert (
        torch.cuda.memory_allocated() == before
    )  # views of the gradient given, and of the indices
    assert torch.cuda.max_memory_allocated() == before
    del given, out
    values = INDICES.numel() * WIDTH * 4
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == before
    summed = layer.weight.grad.coalesce()  # type: ignore[union-attr]
    kept = 512 + 30 * WIDTH * 4  # the sorted indices' storage, and 30 rows
    assert torch.cuda.memory_allocated() == before + kept
    assert summed._values().shape[0] * WIDTH * 4 < values
    layer.zero_grad()
    del summed
    assert torch.cuda.memory_allocated() == before - values


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), 0),
    "SparseAdam": (lambda p: torch.optim.SparseAdam(p), 2),
    "Adagrad": (lambda p: torch.optim.Adagrad(p), 1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_optimizers_step(sim: Simulation, optimizer: str) -> None:
    layer = nn.Embedding(ROWS, WIDTH, sparse=True).cuda()
    make, states = OPTIMIZERS[optimizer]
    chosen = make(list(layer.parameters()))
    for _ in range(3):
        gradient(layer, "cuda")
        chosen.step()
        chosen.zero_grad()
    weight = ROWS * WIDTH * 4
    assert sim.steps == 3
    assert torch.cuda.memory_allocated() == (1 + states) * weight
    recording = sim.recording
    found = {KINDS[kind] for kind in recording.alloc_kind.tolist()}
    assert {"parameter", "gradient"} <= found
    assert ("optimizer_state" in found) is bool(states)


def test_unknown_indices_are_taken_as_different(sim: Simulation) -> None:
    layer = nn.Embedding(ROWS, WIDTH, sparse=True).cuda()
    drawn = torch.rand(90, ROWS, device="cuda").argmax(1)
    layer(drawn).sum().backward()
    assert layer.weight.grad.coalesce()._nnz() == 90  # type: ignore[union-attr]
    assert "keep 90 of 90 rows" in str(sim.recording.header["assumptions"])


def test_a_sparse_tensor_goes_to_the_device_and_back(sim: Simulation) -> None:
    host = torch.eye(4).to_sparse()
    moved = host.cuda()
    assert moved.is_cuda and moved._nnz() == 4
    assert torch.equal(moved.cpu().to_dense(), host.to_dense())
    made = torch.sparse_coo_tensor([[0, 1], [2, 3]], [1.0, 2.0], (4, 4), device="cuda")
    assert made.is_cuda and made.coalesce()._indices().tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("name", ["@", "sparse.mm", "mm", "spmm"])
def test_a_graphs_matrix_times_its_nodes_is_what_it_is_on_the_cpu(
    sim: Simulation, name: str
) -> None:
    def of(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        edges = torch.tensor([[0, 1, 1, 2], [1, 2, 0, 3]])
        graph = torch.sparse_coo_tensor(edges, torch.ones(4), (3, 4)).to(device)
        layer = nn.Linear(8, 5, bias=False).to(device)
        nodes = layer(torch.ones(4, 8).to(device))
        if name == "@":
            made = graph @ nodes
        else:
            multiply = torch.sparse.mm if name == "sparse.mm" else getattr(torch, name)
            made = multiply(graph, nodes)
        made.sum().backward()
        assert layer.weight.grad is not None
        return made, layer.weight.grad

    for one, other in zip(of("cpu"), of("cuda"), strict=True):
        assert (other.shape, other.dtype, other.layout) == (one.shape, one.dtype, one.layout)
        assert other.is_cuda


def test_what_a_product_with_a_sparse_matrix_allocates(sim: Simulation) -> None:
    edges = torch.stack([torch.arange(1000) % 300, torch.arange(1000)]).cuda()
    graph = torch.sparse_coo_tensor(edges, torch.ones(1000).cuda(), (300, 1000)).coalesce()
    nodes = torch.ones(1000, 64).cuda()
    before, torch_before = len(sim.recording.alloc_bytes), torch.cuda.memory_allocated()
    made = graph @ nodes
    sizes = sim.recording.alloc_bytes[before:].tolist()
    # Zeros, the result, offsets, rows and columns, and what cuSPARSE writes.
    dense = 300 * 64 * 4
    assert sizes == [dense, dense, 301 * 4, 1000 * 4, 1000 * 4, dense]
    assert torch.cuda.memory_allocated() - torch_before == made.nbytes


def test_a_sparse_matrix_is_transposed_and_made_of_a_dense_one(sim: Simulation) -> None:
    graph = torch.eye(4).cuda().to_sparse()
    assert graph.is_sparse and graph.is_coalesced() and graph.sparse_dim() == 2
    turned = torch.zeros(3, 5).cuda().to_sparse().t()
    assert tuple(turned.shape) == (5, 3) and not turned.is_coalesced()
    assert (turned @ torch.ones(3, 2).cuda()).shape == (5, 2)


@pytest.mark.parametrize("how", ["moved", "made", "made there"])
def test_compressed_rows_are_refused_by_name(sim: Simulation, how: str) -> None:
    offsets, columns, values = torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2)
    with pytest.raises(UnsupportedOperatorError, match=r"of layout torch\.sparse_csr"):
        if how == "moved":
            torch.sparse_csr_tensor(offsets, columns, values, (2, 2)).cuda()
        elif how == "made":
            torch.sparse_csr_tensor(offsets.cuda(), columns.cuda(), values.cuda(), (2, 2))
        else:
            torch.sparse_csr_tensor(offsets, columns, values, (2, 2), device="cuda")


def test_what_is_not_simulated_for_sparse_tensors_is_named(sim: Simulation) -> None:
    made = torch.eye(4).to_sparse().cuda()
    with pytest.raises(UnsupportedOperatorError, match="not simulated for sparse tensors"):
        torch.sparse.log_softmax(made, 1)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("load", {"sources": ["a.cpp", "kernel.cu"]}),
        ("load", {"sources": "kernel.cu"}),
        ("load", {"sources": ["a.cpp"], "with_cuda": True}),
        ("load_inline", {"cpp_sources": "", "cuda_sources": "__global__ void f() {}"}),
    ],
)
def test_the_build_of_a_cuda_extension_is_refused_by_name(name: str, given: Any) -> None:
    before = getattr(cpp_extension, name)
    with trainfit.simulate("RTX 4090"):
        with pytest.raises(UnsupportedOperatorError) as caught:
            getattr(cpp_extension, name)(name="fused_rays", **given)
        assert "the CUDA extension 'fused_rays'" in str(caught.value)
        assert f"{__file__}:" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert getattr(cpp_extension, name) is before


def test_the_adam_that_deepspeed_builds_is_that_of_pytorch(sim: Simulation) -> None:
    """In place, by a kernel that reads four numbers and writes three of each parameter."""
    files = ["/site-packages/deepspeed/ops/csrc/adam/multi_tensor_adam.cu"]
    module: Any = cpp_extension.load(name="fused_adam", sources=files, with_cuda=True)
    lists = [[torch.zeros(1 << 20, device="cuda", dtype=torch.bfloat16)] for _ in range(4)]
    before = sim.allocator.peak_allocated_bytes
    with torch.no_grad():
        skips = torch.zeros(1, dtype=torch.int32, device="cuda")
        module.multi_tensor_adam(2048 * 32, skips, lists, 1e-3, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    assert sim.allocator.peak_allocated_bytes == before + 512  # the flag alone
    with pytest.raises(UnsupportedOperatorError):
        cpp_extension.load(name="fused_adam", sources=["mine/kernel.cu"])


def test_jagged_tensors(sim: Simulation) -> None:
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, device="cuda")
    layer = nn.Linear(8, 4).cuda()
    out = layer(nested).relu()
    assert out.is_cuda and out.values().shape == (8, 4)
    assert out.to_padded_tensor(0.0).shape == (2, 5, 4)
    out.values().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.is_cuda


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.15", reason="since PyTorch 2.15")
def test_gradients_with_few_rows_are_clipped(sim: Simulation) -> None:
    layer = nn.Embedding(ROWS, WIDTH, sparse=True).cuda()
    layer(torch.tensor([3, 3, 7], device="cuda")).sum().backward()
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    assert norm.shape == () and layer.weight.grad is not None and layer.weight.grad.is_sparse
    # The values of rows with the same index are summed up before: two rows are left.
    assert 2 * WIDTH * 4 in sim.recording.alloc_bytes.tolist()
