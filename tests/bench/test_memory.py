"""The parts of the memory benchmarks that could be wrong without a figure showing it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def _bench_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCH))
    yield
    for name in ("_bench", "_peers", "memory_accuracy", "memory_peers", "memory_hf_guide"):
        sys.modules.pop(name, None)


def _saved_bytes(function: Any, scores: torch.Tensor) -> int:
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(scores * 1)
    del result
    return sum(saved.values())


def test_softmax_of_then_is_softmax_and_keeps_its_input_too() -> None:
    from memory_hf_guide import softmax_of_then

    softmax = softmax_of_then()
    scores = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.equal(softmax(scores), torch.softmax(scores, -1))
    assert torch.autograd.gradcheck(softmax, scores)
    now = _saved_bytes(lambda each: torch.softmax(each, -1), scores)
    assert now == 3 * 7 * 8
    assert _saved_bytes(softmax, scores) == 2 * now


def test_adamw_of_then_takes_the_same_steps_as_pytorchs() -> None:
    from memory_hf_guide import adamw_of_then

    torch.manual_seed(0)
    start, gradients = torch.randn(5, 3), torch.randn(4, 5, 3)
    ends = []
    for kind, options in ((adamw_of_then(), {}), (torch.optim.AdamW, {"weight_decay": 0.0})):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind([parameter], lr=0.1, **options)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        ends.append(parameter.detach())
    assert not torch.allclose(ends[0], start, atol=0.1)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_two_peers_agree_on_the_peak_they_both_measure() -> None:
    """MemTracker and our naive count are separate code over the same storages."""
    from memory_accuracy import import_timm

    import_timm()
    pytest.importorskip("timm")
    import _peers

    naive = _peers.fake_tensor("resnet10t", [2, 8])
    tracked = _peers.mem_tracker("resnet10t", [2, 5, 8])
    assert naive == {batch: pytest.approx(tracked[batch]) for batch in (2, 8)}
    assert tracked[5] == pytest.approx((tracked[2] + tracked[8]) / 2)
    assert naive[8] > naive[2] > 0


def test_a_peer_is_judged_by_its_better_reading_on_the_cases_it_answered() -> None:
    from memory_peers import CONTEXT_MIB, OURS, Case, Score, figures

    truth = 10_000
    ours = [
        Case(OURS, name, 8, truth, truth - CONTEXT_MIB + off, 1.0)
        for name, off in (("a", 100.0), ("b", -300.0))
    ]
    # Right without the context for "a", silent about "b".
    peer = [Case("torchinfo", "a", 8, truth, truth - 500, 1.0)]
    score = Score.of(ours, CONTEXT_MIB)
    assert (score.median, score.p90, score.under) == pytest.approx((2.0, 3.0, 50.0))
    median, ratio, models = figures(ours + peer, 2)
    assert median.value == pytest.approx(2.0)
    assert median.holds
    assert ratio.value == pytest.approx(5.0)  # 5% by 1%, both of "a"
    assert models.value == 2


def test_without_any_answer_no_goal_is_reached() -> None:
    from memory_peers import figures

    assert not any(figure.holds for figure in figures([], 2))
