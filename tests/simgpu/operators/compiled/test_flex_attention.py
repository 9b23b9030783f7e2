"""FlexAttention on the simulated device: compiled it is one kernel, else a matrix of scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import trainfit
from trainfit.results.runs.steps import KINDS

BATCH, HEADS, LENGTH, SIZE = 2, 4, 512, 64


@pytest.fixture(autouse=True)
def simulation() -> Iterator[trainfit.Simulation]:
    with trainfit.simulate("RTX 4090") as sim:
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # cuBLAS's workspace
        yield sim


def operand(**options: Any) -> torch.Tensor:
    shape = (BATCH, HEADS, LENGTH, SIZE)
    return torch.zeros(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True, **options)


def causal() -> BlockMask:
    return create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cuda")


def peak_of(function: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, int]:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = function(*args, **kwargs)
    return out, torch.cuda.max_memory_allocated() - before


def test_compiled_it_holds_results_and_sums(simulation: trainfit.Simulation) -> None:
    query, key, value = operand(), operand(), operand()
    mask = causal()
    compiled = torch.compile(flex_attention)
    out, peak = peak_of(compiled, query, key, value, block_mask=mask)
    sums = 4 * BATCH * HEADS * LENGTH
    assert out.shape == query.shape and out.dtype is torch.bfloat16
    assert peak == out.numel() * 2 + sums
    before = torch.cuda.memory_allocated()
    out.backward(torch.zeros_like(out))
    assert all(each.grad is not None and each.grad.shape == each.shape for each in (query, key))
    # The sums are let go, and the gradients stay.
    assert torch.cuda.memory_allocated() - before == 3 * out.numel() * 2 - sums
    recording = simulation.recording
    flops = {
        kind: int(recording.kernel_flops[recording.kernel_kind == KINDS.index(kind)].sum())
        for kind in ("attention", "attention_gradient")
    }
    whole = 2 * BATCH * HEADS * LENGTH * LENGTH * 2 * SIZE
    assert flops["attention"] == pytest.approx(whole / 2, rel=0.03)
    assert flops["attention_gradient"] == pytest.approx(flops["attention"] * 2.5)
    assert recording.header["assumptions"] == {}  # nothing was left out


def test_uncompiled_it_holds_the_scores() -> None:
    query, key, value = operand(), operand(), operand()
    out, peak = peak_of(flex_attention, query, key, value, block_mask=causal())
    scores = 4 * BATCH * HEADS * LENGTH * LENGTH
    assert out.shape == query.shape
    assert 2 * scores < peak < 6 * scores
    out.sum().backward()
    assert value.grad is not None and value.grad.shape == value.shape


def test_results_lie_as_queries_do() -> None:
    query = torch.zeros(BATCH, LENGTH, HEADS, SIZE, device="cuda").transpose(1, 2)
    for function in (flex_attention, torch.compile(flex_attention)):
        assert function(query, query, query).stride() == query.stride()


@pytest.mark.parametrize("compiled", [False, True])
def test_scores_are_modified_and_heads_shared(compiled: bool) -> None:
    bias = torch.zeros(LENGTH, device="cuda", requires_grad=True)
    function = torch.compile(flex_attention) if compiled else flex_attention
    key = torch.zeros(BATCH, 2, LENGTH, SIZE, device="cuda", requires_grad=True)
    query = torch.zeros(BATCH, HEADS, LENGTH, SIZE, device="cuda", requires_grad=True)
    out = function(query, key, key, lambda s, b, h, i, j: s + bias[j], enable_gqa=True)
    out.sum().backward()
    assert key.grad is not None and key.grad.shape == key.shape
    assert bias.grad is not None and bias.grad.shape == bias.shape


def test_autocast_and_the_sums() -> None:
    query = torch.zeros(1, 1, LENGTH, SIZE, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out, sums = torch.compile(flex_attention)(query, query, query, return_lse=True)
    assert out.dtype is torch.bfloat16 and sums.shape == (1, 1, LENGTH)


def test_a_compiled_model_counts_as_compiled(simulation: trainfit.Simulation) -> None:
    class Attends(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return flex_attention(x, x, x)  # type: ignore[return-value]

    _, peak = peak_of(torch.compile(Attends()), operand().detach())
    assert peak < 4 * BATCH * HEADS * LENGTH * LENGTH
    notes = simulation.recording.header["assumptions"]
    assert len([text for text in notes if "torch.compile was skipped" in text]) == 1
