"""Several GPUs of one process: placement, transfers, memory of each, ``DataParallel``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainfit
from trainfit.memory.explanation import summarize
from trainfit.memory.replay import Stream, of_each_gpu, replay
from trainfit.results.runs.recording import Recording, gpu_of
from trainfit.results.runs.steps import KINDS
from trainfit.simgpu.session import Simulation

MIB = 1 << 20
ONE = torch.device("cuda:1")


@pytest.fixture
def sim() -> Iterator[Simulation]:
    with trainfit.simulate("2x RTX 4090") as simulation:
        yield simulation


class Split(nn.Module):
    """A model whose second half is on the second GPU."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(16, hidden).to("cuda:0")
        self.second = nn.Linear(hidden, 4).to("cuda:1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.to("cuda:0")).relu().to("cuda:1"))  # type: ignore[no-any-return]


def kernels(recording: Recording, kind: str) -> list[tuple[int, int]]:
    """GPU and bytes of each kernel of a kind."""
    chosen = recording.kernel_kind == KINDS.index(kind)
    columns = gpu_of(recording.kernel_stream)[chosen], recording.kernel_read[chosen]
    return list(zip(*(each.tolist() for each in columns), strict=True))


def test_both_are_there_and_tensors_say_which_they_are_on(sim: Simulation) -> None:
    assert torch.cuda.device_count() == 2
    assert torch.cuda.get_device_name(1) == sim.gpu.name
    made = [
        torch.zeros(2, device="cuda:1"),
        torch.zeros(2).to(ONE),
        torch.zeros(2).cuda(1),
        torch.tensor([1, 2], device=1),
        torch.ones(2, device="cuda").to("cuda:1"),
        torch.zeros_like(torch.zeros(2, device="cuda:1")),
    ]
    assert {each.device for each in made} == {ONE}
    assert {each.get_device() for each in made} == {1}
    assert torch.zeros(2, device="cuda").device == torch.device("cuda:0")
    assert made[3].tolist() == made[3].to("cuda:0").tolist() == [1, 2]


def test_the_current_gpu_is_each_threads_own(sim: Simulation) -> None:
    found = []
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
        assert torch.zeros(1, device="cuda").device == ONE
        thread = threading.Thread(target=lambda: found.append(torch.cuda.current_device()))
        thread.start()
        thread.join()
    assert torch.cuda.current_device() == 0
    assert found == [0]
    torch.cuda.set_device(1)
    assert torch.zeros(1).cuda().device == ONE
    with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
        assert torch.cuda.current_device() == 0
    assert torch.cuda.current_device() == 1


def test_operands_of_two_gpus_are_refused_in_pytorchs_words(sim: Simulation) -> None:
    there, here = torch.zeros(2, device=ONE), torch.zeros(2, device="cuda")
    with pytest.raises(RuntimeError, match="at least two devices, cuda:1 and cuda:0"):
        there + here


def test_a_gpu_that_is_not_there_says_what_to_name(sim: Simulation) -> None:
    with pytest.raises(RuntimeError, match=r'2 GPUs are simulated.*--gpu "4x RTX 4090"'):
        torch.zeros(1, device="cuda:3")


def test_each_has_its_memory(sim: Simulation) -> None:
    kept = torch.empty(8 * MIB, dtype=torch.uint8, device=ONE)
    assert torch.cuda.memory_allocated(0) == 0
    assert torch.cuda.memory_allocated(1) == kept.numel() == 8 * MIB
    assert torch.cuda.mem_get_info(1)[0] < torch.cuda.mem_get_info(0)[0]
    assert [each.peak_allocated for each in of_each_gpu(Stream.of(sim.recording))] == [8 * MIB]
    other = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda:0")
    peaks = [each.peak_allocated for each in of_each_gpu(Stream.of(sim.recording))]
    assert peaks == [other.numel(), kept.numel()]
    fullest = replay(Stream.of(sim.recording))
    assert (fullest.gpu, fullest.peak_allocated) == (1, 8 * MIB)
    del kept
    assert torch.cuda.memory_allocated(1) == 0


def test_a_summary_says_which_gpu_its_memory_is_of(sim: Simulation) -> None:
    """It named none: half of a model that device_map splits was "memory on RTX 4090"."""

    def notes() -> str:
        return " ".join(summarize(sim.recording, "r").notes)

    kept = [torch.zeros(MIB, device="cuda:0")]
    assert "GPU" not in notes()
    kept.append(torch.zeros(2 * MIB, device="cuda:1"))
    assert "of the 2 GPUs of the process, memory is that of GPU 1, which needs the most" in notes()


def test_the_one_that_is_full_is_named(sim: Simulation) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="GPU 1 has a total capacity"):
        torch.empty(30 << 30, dtype=torch.uint8, device=ONE)
    torch.empty(20 << 30, dtype=torch.uint8, device="cuda:0")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_split_model_trains(sim: Simulation, optimizer: Any) -> None:
    model = Split()
    steps = optimizer(model.parameters(), lr=0.1)
    for _ in range(2):
        nn.functional.mse_loss(model(torch.zeros(8, 16)), torch.zeros(8, 4, device=ONE)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
    for each in model.parameters():
        assert each.grad is not None
        state = [each.grad, *(v for v in steps.state[each].values() if torch.is_tensor(v))]
        assert {v.device for v in state if v.dim()} == {each.device}
    # Its activations go there, their gradients come back.
    copies = [each for each in kernels(sim.recording, "peer_copy") if each[1] == 8 * 64 * 4]
    assert copies == [(0, 8 * 64 * 4), (1, 8 * 64 * 4)] * 2


def test_an_assignment_across_gpus_has_its_gradient_at_home(sim: Simulation) -> None:
    source = torch.ones(4, device=ONE, requires_grad=True)
    target = torch.zeros(2, 4, device="cuda:0")
    target[0] = source
    target[1].copy_(source)
    target.sum().backward()
    assert source.grad is not None and source.grad.device == ONE


def test_data_parallel_divides_the_batch_and_gathers_on_the_first(sim: Simulation) -> None:
    seen: list[tuple[int, torch.Size]] = []

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((x.get_device(), x.shape))
            return super().forward(x)

    weight = 1024 * 1024 * 4
    model = nn.DataParallel(Net(1024, 1024, bias=False).cuda())
    result = model(torch.zeros(7, 1024))
    assert (result.device, result.shape) == (torch.device("cuda:0"), torch.Size([7, 1024]))
    assert sorted(seen) == [(0, (4, 1024)), (1, (3, 1024))]
    assert kernels(sim.recording, "broadcast") == [(0, weight)]
    result.sum().backward()
    assert kernels(sim.recording, "reduce") == [(0, weight)]
    (gradient,) = (each.grad for each in model.parameters())
    assert gradient is not None and gradient.get_device() == 0
    # The copy of the weight, and what the second GPU computed, are there.
    assert torch.cuda.max_memory_allocated(1) >= weight


def test_replicas_run_in_the_same_order_each_time() -> None:
    def operators() -> list[str]:
        with trainfit.simulate("4x RTX 4090") as simulation:
            layers = [nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8)]
            model = nn.DataParallel(nn.Sequential(*layers).cuda())
            for _ in range(3):
                model(torch.zeros(16, 8)).sum().backward()
        recording = simulation.recording
        return [recording.strings[name] for name in recording.op_name.tolist()]

    first = operators()
    assert first.count("aten.relu.default") == 12
    assert all(operators() == first for _ in range(3))


def test_a_failing_replica_fails_the_call(sim: Simulation) -> None:
    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.get_device() == 1:
                raise ValueError("not here")
            return super().forward(x)

    with pytest.raises(ValueError, match="not here"):
        nn.DataParallel(Fails(2, 2).cuda())(torch.zeros(2, 2))
    assert nn.DataParallel(nn.Linear(2, 2).cuda())(torch.zeros(2, 2)).shape == (2, 2)


def test_files_keep_the_gpu(sim: Simulation, tmp_path: Path) -> None:
    torch.save(torch.zeros(3, device=ONE), tmp_path / "kept.pt")
    assert torch.load(tmp_path / "kept.pt").device == ONE
    moved = torch.load(tmp_path / "kept.pt", map_location="cuda:0")
    assert moved.device == torch.device("cuda:0")


def test_a_device_map_of_accelerate_spreads_a_model(sim: Simulation) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    spread = accelerate.infer_auto_device_map(model, max_memory={0: "600KiB", 1: "10MiB"})
    assert set(spread.values()) == {0, 1}
    model = accelerate.dispatch_model(model, spread)
    model(torch.zeros(8, 256)).sum().backward()
    gradients = [each.grad for each in model.parameters()]
    assert {each.get_device() for each in gradients if each is not None} == {0, 1}


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device="cuda:1")


@pytest.mark.parametrize(
    "function",
    [
        lambda: nn.functional.scaled_dot_product_attention(
            _ones(2, 4, 8, 16).requires_grad_(), _ones(2, 2, 8, 16), _ones(2, 2, 8, 16),
            is_causal=True, enable_gqa=True,
        ),
        lambda: nn.functional.scaled_dot_product_attention(
            *[_ones(2, 4, 8, 16)] * 3, attn_mask=_ones(8, 8, dtype=torch.bool)
        ),
        lambda: torch.where(_ones(2, dtype=torch.bool), 0.0, -1.0),
        lambda: torch.where(_ones(2, dtype=torch.bool), _ones(2), 0.0),
        lambda: nn.functional.one_hot(_ones(3, dtype=torch.long), 4),
        lambda: torch.cov(nn.Parameter(_ones(4, 4))),
        lambda: nn.functional.ctc_loss(
            _ones(5, 2, 4).log_softmax(-1), _ones(2, 3, dtype=torch.long), (5, 5), (3, 3)
        ),
    ],
    ids=["grouped", "masked", "scalars", "scalar", "one_hot", "cov", "ctc"],
)  # fmt: skip
def test_what_cpp_makes_for_a_function_is_on_the_gpu_of_its_arguments(
    sim: Simulation, function: Callable[[], torch.Tensor]
) -> None:
    """Llama's layers on the second GPU (device_map) ended in DeviceMismatch, in their attention."""
    torch.ones(2, device="cuda").sum()  # the latest operator was on the first GPU
    assert function().device == ONE
    assert torch.ones(2, device="cuda").device == torch.device("cuda:0")
    with pytest.raises(RuntimeError, match="at least two devices"):
        _ones(2) + torch.ones(2, device="cuda")


class Grouped(nn.Module):
    """Attention whose causal mask C++ makes."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.project(x).view(x.shape[0], 4, -1, 16)
        made = torch.ones(1, device=x.device)  # of no argument: the thread's call stays its own
        groups = query[:, :2]
        attend = nn.functional.scaled_dot_product_attention
        return attend(query, groups, groups, is_causal=True, enable_gqa=True) * made


def test_each_thread_has_calls_of_its_own(sim: Simulation) -> None:
    """DataParallel's replicas run in a thread each."""
    model = nn.DataParallel(nn.Sequential(*(Grouped() for _ in range(4))).cuda())
    for _ in range(3):
        model(torch.ones(8, 4, 8, 16, device="cuda").flatten(1, 2)).sum().backward()
    assert all(each.grad is not None and each.grad.is_cuda for each in model.parameters())


def test_a_call_of_another_thread_says_nothing_of_the_gpu(sim: Simulation) -> None:
    sim.engine.placing.call.gpu = 1
    seen = []
    thread = threading.Thread(target=lambda: seen.append(sim.engine.placing.call.gpu))
    thread.start()
    thread.join()
    sim.engine.placing.call.gpu = None
    assert seen == [None]
