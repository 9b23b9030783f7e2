"""CUDA graphs on the simulated GPU: capture, private pools, replay."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trainfit
from helpers_cli import trainfit as command
from trainfit.memory.replay import Stream, replay
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.steps import KINDS
from trainfit.simgpu.allocator.blocks import pool_of, private_pool, stream_of
from trainfit.simgpu.allocator.caching import CachingAllocator
from trainfit.simgpu.session import Simulation
from trainfit.speed.step import HostCosts, issue_seconds
from trainfit.speed.work import Work, steady

MIB = 1 << 20


def capture(work: Any, **options: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        work()
    return graph


def kinds(recording: Recording) -> list[str]:
    return [KINDS[code] for code in recording.kernel_kind.tolist()]


# Kernels ------------------------------------------------------------------------------------------


def test_capture_runs_nothing_and_replay_all_with_one_launch(sim: Simulation) -> None:
    x = torch.zeros(1 << 20, device="cuda")
    before = len(sim.recording.kernel_op)
    graph = capture(lambda: (x.add_(1), x.mul_(2), x.sub_(3)))
    assert "pointwise" not in kinds(sim.recording)[before:]
    before = len(sim.recording.kernel_op)
    graph.replay()
    graph.replay()
    assert kinds(sim.recording)[before:] == ["graph", *["pointwise"] * 3] * 2
    recording = sim.recording
    assert recording.kernel_rows[before] == 3
    assert set(recording.kernel_op[before + 1 : before + 4]) == {recording.kernel_op[before]}


def test_random_numbers_cost_two_fills_more(sim: Simulation) -> None:
    x = torch.zeros(1024, device="cuda")
    graph = capture(lambda: nn.functional.dropout(x))
    before = len(sim.recording.kernel_op)
    graph.replay()
    assert kinds(sim.recording)[before : before + 3] == ["fill", "fill", "graph"]


def test_kernels_of_streams_that_join_are_captured(sim: Simulation) -> None:
    x = torch.zeros(1 << 20, device="cuda")
    side = torch.cuda.Stream()

    def work() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            x.add_(1)
        torch.cuda.current_stream().wait_stream(side)

    graph = capture(work)
    before = len(sim.recording.kernel_op)
    graph.replay()
    assert kinds(sim.recording)[before:] == ["graph", "pointwise"]
    with torch.cuda.stream(side):
        assert not torch.cuda.is_current_stream_capturing()


def work_of(rows: list[tuple[str, int]]) -> Work:
    """Kernels of kinds with their ``rows``, all of one operator in the forward pass."""
    table = np.zeros((len(rows), 10), dtype=np.int64)
    for place, (kind, number) in enumerate(rows):
        table[place, 0], table[place, 5], table[place, 9] = KINDS.index(kind), number, 1
    zeros = np.zeros(len(rows), dtype=np.int64)
    return Work(table, zeros, zeros, np.array([2]))


@given(inside=st.integers(0, 5), outside=st.integers(0, 5))
def test_a_graphs_kernels_take_no_launches_of_their_own(inside: int, outside: int) -> None:
    costs = HostCosts()
    rows = [("graph", inside), *[("matmul", 1)] * inside, *[("pointwise", 0)] * outside]
    _, done = issue_seconds(work_of(rows), costs)
    assert done[-1] == pytest.approx(costs.forward_s + (1 + outside) * costs.launch_s)


# Memory -------------------------------------------------------------------------------------------


def test_freed_blocks_stay_in_the_private_pool(sim: Simulation) -> None:
    x = torch.zeros(4 * MIB, device="cuda")
    before = torch.cuda.memory_reserved()
    graph = capture(lambda: (x + 1).sum())
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    # The temporary's segment stays for replays, and another tensor does not get it.
    assert held - before >= 16 * MIB
    y = torch.zeros(4 * MIB, device="cuda")
    assert torch.cuda.memory_reserved() == held + 16 * MIB
    del y, graph
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held


def test_captures_share_a_pool_that_is_given(sim: Simulation) -> None:
    x = torch.zeros(4 * MIB, device="cuda")
    first = capture(lambda: (x + 1).sum())
    reserved = torch.cuda.memory_reserved()
    second = capture(lambda: (x + 1).sum(), pool=first.pool())
    assert torch.cuda.memory_reserved() == reserved
    assert second.pool() == first.pool()
    handle = torch.cuda.graph_pool_handle()
    third = capture(lambda: (x + 1).sum(), pool=handle)
    assert third.pool() == handle
    assert torch.cuda.memory_reserved() > reserved


def test_the_snapshot_tells_private_pools(sim: Simulation) -> None:
    x = torch.zeros(4 * MIB, device="cuda")
    graph = capture(lambda: (x + 1).sum())
    segments = torch.cuda.memory_snapshot()
    assert {each["segment_pool_id"] for each in segments} == {(0, 0), (0, 1)}
    assert all(each["stream"] < 100 for each in segments)
    assert graph.pool() is not None


def test_a_recording_replays_to_the_same_memory(sim: Simulation) -> None:
    x = torch.zeros(4 * MIB, device="cuda")
    graph = capture(lambda: (x + 1).sum())
    y = torch.zeros(4 * MIB, device="cuda") * 2
    graph.replay()
    torch.cuda.empty_cache()
    found = replay(Stream.of(sim.recording))
    assert found.peak_allocated == torch.cuda.max_memory_allocated()
    assert found.peak_reserved == torch.cuda.max_memory_reserved()
    assert found.stats["reserved_bytes"] == torch.cuda.memory_reserved()
    assert y.is_cuda


@given(stream=st.integers(0, (1 << 47) - 1), pool=st.integers(1, 1000))
def test_numbers_of_private_pools(stream: int, pool: int) -> None:
    number = private_pool(stream, pool)
    assert (stream_of(number), pool_of(number)) == (stream, pool)
    assert (stream_of(stream), pool_of(stream)) == (stream, 0)


def test_a_released_pool_makes_room_for_others() -> None:
    allocator = CachingAllocator(64 * MIB)
    block = allocator.malloc(40 * MIB, private_pool(1, 1))
    allocator.free(block)
    with pytest.raises(Exception, match="tried to allocate"):
        allocator.malloc(40 * MIB)
    allocator.release_pool(1)
    assert allocator.malloc(40 * MIB).size == 40 * MIB


# What others hang on a graph ----------------------------------------------------------------------


def test_hooks_run_at_their_moments(sim: Simulation) -> None:
    ran: list[str] = []
    graph: Any = torch.cuda.CUDAGraph(keep_graph=True)
    for moment in ("capture_start", "capture_end", "post_instantiate", "replay_start"):
        register = getattr(graph, f"register_{moment}_hook")
        register(lambda _, moment=moment: ran.append(moment))
    last = graph.register_replay_end_hook(lambda each: ran.append(f"end {each is graph}"))
    with torch.cuda.graph(graph):
        torch.zeros(3, device="cuda")
    assert ran == ["capture_start", "capture_end"]
    graph.replay()
    assert ran[2:] == ["post_instantiate", "replay_start", "end True"]
    last.remove()
    graph.replay()
    assert ran[5:] == ["replay_start"]


def test_what_a_graph_keeps_goes_with_its_capture(sim: Simulation) -> None:
    ran: list[str] = []
    graph: Any = capture(lambda: torch.zeros(3, device="cuda"))
    graph.retain_object(kept := torch.nn.Linear(1, 1))
    graph.register_destroy_callback(lambda: ran.append("reset"))
    held = weakref.ref(kept)
    del kept
    assert held() is not None and not ran
    graph.reset()
    assert held() is None and ran == ["reset"]
    graph.register_destroy_callback(lambda: 1 / 0)
    graph.register_destroy_callback(lambda: ran.append("gone"))
    del graph
    gc.collect()
    assert ran == ["reset", "gone"]


@pytest.mark.skipif(
    not hasattr(torch.cuda.graphs, "register_graph_replay_end_hook"), reason="since PyTorch 2.14"
)
def test_hooks_for_every_graph_end_with_the_simulation() -> None:
    ran: list[Any] = []

    def broken(graph: Any) -> None:
        ran.append(graph)
        raise RuntimeError("its own affair")

    for _ in range(2):
        with trainfit.simulate("RTX 4090"):
            graphs: Any = torch.cuda.graphs
            if not ran:
                graphs.register_graph_replay_end_hook(broken)
            graph = capture(lambda: torch.zeros(3, device="cuda"))
            graph.replay()
    assert len(ran) == 1


# Rules --------------------------------------------------------------------------------------------


def test_what_capture_forbids(sim: Simulation) -> None:
    x = torch.zeros(4, device="cuda")
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        capture(lambda: x.sum().item())
    with pytest.raises(RuntimeError, match="must be captured on a non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        torch.cuda.CUDAGraph().replay()
    graph = capture(lambda: x.add_(1))
    with pytest.raises(RuntimeError, match="already owns a captured graph"):
        graph.capture_begin()
    graph.reset()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    optimizer = torch.optim.Adam([nn.Parameter(x)])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="capturable"):
        capture(optimizer.step)


# Steps --------------------------------------------------------------------------------------------

SCRIPT = """
import torch, sys
from torch import nn
batch = int(sys.argv[1])
model = nn.Sequential(nn.Linear(256, 512), nn.Dropout(0.1), nn.Linear(512, 256)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(batch, 256, device="cuda"), torch.randn(batch, 256, device="cuda")

def step():
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    loss = step()
while True:
    x.copy_(torch.randn(batch, 256))
    graph.replay()
    loss.item()
"""


def test_a_captured_step_counts_at_each_replay(sim: Simulation) -> None:
    model = nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.zeros(8, 256, device="cuda")

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    graph = capture(step)
    assert sim.steps == 1
    for _ in range(4):
        graph.replay()
    assert sim.steps == 5
    recording = sim.recording
    assert steady(recording) > 1
    products = Work.of_steady_step(recording).is_kind("matmul").sum()
    assert products == 2  # forward, and the weight's gradient


@pytest.mark.slow
def test_the_warm_up_does_not_end_a_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = command("simulate", "--gpu", "RTX 4090", "train.py", "64", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recording = Recording.load(tmp_path / "recording.trainfit")
    # Three of the warm-up, and replays until four of them are alike.
    assert recording.steps >= 7
    assert kinds(recording).count("graph") == recording.steps - 3
    assert "graphs is not counted" in " ".join(done.stdout.split())


def test_graphed_modules_train(sim: Simulation) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
    head = nn.Linear(256, 10).cuda()
    sample = torch.randn(64, 256, device="cuda")
    model = torch.cuda.make_graphed_callables(model, (sample,))
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    peaks = []
    for _ in range(4):
        optimizer.zero_grad(set_to_none=True)
        head(model(torch.randn(64, 256, device="cuda"))).sum().backward()
        optimizer.step()
        peaks.append(torch.cuda.memory_allocated())
    assert sim.steps == 4
    assert all(parameter.grad is not None for parameter in parameters)
    assert len(set(peaks[1:])) == 1
    # A graph for the forward pass and one for the backward pass in each step.
    recording = sim.recording
    of_last = recording.kernel_kind[recording.op_step[recording.kernel_op] == 3]
    assert [KINDS[code] for code in of_last.tolist()].count("graph") == 2
