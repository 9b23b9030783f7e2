"""``torch.distributed`` with the one process that is simulated."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import trainfit
from helpers_ranks import as_rank_0
from trainfit.results.runs.recording import KINDS
from trainfit.simgpu.device.errors import SeveralGpusError, UnsupportedOperatorError

BLOCK = 2 * 256 * 1024 * 4  # bytes of the parameters of block()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A simulated GPU in the process that ``torchrun --nproc-per-node=1`` starts."""
    as_rank_0(monkeypatch, 1)
    with trainfit.simulate("RTX 4090") as simulation:
        yield simulation


def block() -> nn.Module:
    """Two layers without biases, of 1 MiB each."""
    return nn.Sequential(
        nn.Linear(256, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 256, bias=False)
    )


def train(model: nn.Module, steps: int = 4) -> list[int]:
    """Bytes allocated after each step, without cuBLAS's workspace."""
    layer = nn.Linear(2, 2, device="cuda")
    start = torch.cuda.memory_allocated()
    layer(torch.zeros(2, 2, device="cuda")).sum().backward()
    start = torch.cuda.memory_allocated() - start  # the workspaces of cuBLAS
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    allocated = []
    for _ in range(steps):
        loss = model(torch.randn(8, 256, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del loss
        allocated.append(torch.cuda.memory_allocated() - start)
    return allocated


def rounded(nbytes: int) -> int:
    """In 64 KiB, so that scalars do not count."""
    return round(nbytes / (64 * 1024))


def test_the_group_says_that_it_is_nccls(gpu: Any) -> None:
    distributed.init_process_group("nccl")
    group = distributed.distributed_c10d._get_default_group()
    assert distributed.get_backend() == "nccl"
    assert isinstance(group._get_backend(torch.device("cuda")), distributed.ProcessGroupNCCL)
    assert not isinstance(gpu, distributed.ProcessGroupNCCL)


def test_ddp_holds_parameters_gradients_state_and_buckets(gpu: Any) -> None:
    distributed.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(block().cuda(), device_ids=[0])
    # Parameters, gradients, two moments, and buckets as large as the gradients.
    assert rounded(train(model)[-1]) == rounded(5 * BLOCK)
    assert gpu.steps == 4


def test_ddp_with_gradients_in_its_buckets_holds_them_once(gpu: Any) -> None:
    distributed.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(block().cuda(), gradient_as_bucket_view=True)
    assert rounded(train(model)[-1]) == rounded(4 * BLOCK)


@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}])
def test_ddp_runs_with_its_options(gpu: Any, options: dict[str, bool]) -> None:
    distributed.init_process_group()
    model = nn.parallel.DistributedDataParallel(block().cuda(), **options)
    assert len(set(train(model)[1:])) == 1


def test_buckets_are_gradients(gpu: Any) -> None:
    distributed.init_process_group("nccl")
    train(nn.parallel.DistributedDataParallel(block().cuda()), 2)
    recording = gpu.recording
    buckets = recording.alloc_bytes[recording.alloc_kind == KINDS.index("gradient")]
    # Gradients, and the buckets before and after they were rebuilt in the order of the backward.
    assert (buckets == BLOCK).sum() + (buckets == BLOCK // 2).sum() >= 3


def test_fully_shard_keeps_each_parameter_and_gradient(gpu: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("nccl")
    model = nn.Sequential(block(), block()).cuda()
    for each in model:
        fully_shard(each)
    fully_shard(model)
    assert rounded(train(model)[-1]) == rounded(2 * 4 * BLOCK)
    assert all(parameter.device == torch.device("cuda", 0) for parameter in model.parameters())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = torch.cuda.memory_allocated()
    assert model.to("cuda", non_blocking=True) is model and model.to("cuda:0") is model
    assert torch.cuda.memory_allocated() == before, "it is there already"


def test_collectives_of_one_process_return_what_they_were_given(gpu: Any) -> None:
    distributed.init_process_group("nccl")
    values = torch.arange(4, device="cuda")
    gathered = torch.zeros(4, dtype=torch.int64, device="cuda")
    distributed.all_gather_into_tensor(gathered, values)
    several = [torch.zeros(4, dtype=torch.int64, device="cuda")]
    distributed.all_gather(several, values)
    distributed.all_reduce(values)
    distributed.broadcast(values, 0)
    scattered = torch.zeros(4, dtype=torch.int64, device="cuda")
    distributed.reduce_scatter_tensor(scattered, values)
    distributed.barrier()
    for each in (gathered, several[0], values, scattered):
        assert each.tolist() == [0, 1, 2, 3]


def test_objects_travel(gpu: Any) -> None:
    distributed.init_process_group("nccl")
    objects: list[Any] = [None]
    distributed.all_gather_object(objects, {"loss": 0.5})
    assert objects == [{"loss": 0.5}]
    distributed.broadcast_object_list(objects, src=0)
    assert objects == [{"loss": 0.5}]


def test_what_is_in_place_launches_nothing(gpu: Any) -> None:
    distributed.init_process_group("nccl")
    values = torch.zeros(1 << 20, device="cuda")
    before = len(gpu.recording.kernel_op)
    distributed.all_reduce(values)
    assert len(gpu.recording.kernel_op) == before
    distributed.all_gather_into_tensor(torch.empty_like(values), values)
    assert len(gpu.recording.kernel_op) == before + 1


def test_work_can_be_waited_for(gpu: Any) -> None:
    distributed.init_process_group("nccl")
    work = distributed.all_reduce(torch.zeros(4, device="cuda"), async_op=True)
    work.wait()
    assert work.is_completed()


def test_what_nobody_waits_for_does_not_stay(gpu: Any) -> None:
    """A script averages its loss by the way; DDP's ``join()`` asks so whether all are there."""
    distributed.init_process_group("nccl")
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    sums: list[weakref.ref[torch.Tensor]] = []
    for _ in range(5):
        loss = model(torch.zeros(4, 8, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        told = loss.detach().clone()
        distributed.all_reduce(told, async_op=True)
        sums.append(weakref.ref(told))
        del told
    assert [each() is not None for each in sums] == [False, False, False, True, True]


def test_gloo_and_both_at_once(gpu: Any) -> None:
    distributed.init_process_group("cpu:gloo,cuda:nccl")
    on_host = torch.ones(2)
    distributed.all_reduce(on_host)
    distributed.all_reduce(torch.ones(2, device="cuda"))
    assert on_host.tolist() == [1, 1]
    assert distributed.get_world_size(distributed.new_group([0])) == 1


def test_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank_0(monkeypatch, 1)
    module = distributed.distributed_c10d
    before = (module.rendezvous, module.is_nccl_available, sys.excepthook)
    with trainfit.simulate("RTX 4090"):
        distributed.init_process_group("nccl")
    assert not distributed.is_initialized()
    assert (module.rendezvous, module.is_nccl_available, sys.excepthook) == before


def _by_arguments() -> None:
    distributed.init_process_group("nccl", init_method="tcp://127.0.0.1:1", rank=0, world_size=2)


def _by_environment() -> None:
    distributed.init_process_group("gloo")


def _by_own_store() -> None:
    store = distributed.HashStore()
    distributed.init_process_group("nccl", store=store, rank=0, world_size=4)


@pytest.mark.parametrize("start", [_by_arguments, _by_environment, _by_own_store])
def test_more_processes_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[], None]
) -> None:
    as_rank_0(monkeypatch, 2)
    wanted = r'of [24] processes.*: one GPU is simulated.* --gpu "[24]x RTX 4090"'
    with trainfit.simulate("RTX 4090"), pytest.raises(SeveralGpusError, match=wanted):
        start()


def test_without_a_launcher_it_fails_as_it_does_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    wanted = "environment variable RANK expected, but not set"
    with trainfit.simulate("RTX 4090"), pytest.raises(ValueError, match=wanted):
        distributed.init_process_group("nccl")


def test_communication_hooks_and_tensor_parallel_modules_run(gpu: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    distributed.init_process_group("nccl")
    mesh = distributed.device_mesh.init_device_mesh("cuda", (1,))
    model = parallelize_module(nn.Linear(256, 256).cuda(), mesh, ColwiseParallel())
    model(torch.randn(2, 256, device="cuda")).sum().backward()
    wrapped = nn.parallel.DistributedDataParallel(block().cuda())
    wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    assert len(set(train(wrapped)[2:])) == 1


def test_spawning_one_process_runs_it_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, size: int) -> None:
        distributed.init_process_group("nccl", "tcp://127.0.0.1:1", rank=rank, world_size=size)
        train(nn.parallel.DistributedDataParallel(block().to(rank), device_ids=[rank]), 2)
        distributed.destroy_process_group()

    with trainfit.simulate("RTX 4090") as simulation:
        count = torch.cuda.device_count()
        torch.multiprocessing.spawn(work, args=(count,), nprocs=count)
        assert simulation.steps == 2
        assert torch.multiprocessing.spawn(work, (count,), join=False).join()
        with pytest.raises(SeveralGpusError, match="spawn of 2 processes"):
            torch.multiprocessing.spawn(work, args=(2,), nprocs=2)


def join_group(rank: int, size: int, ran: list[int]) -> None:
    distributed.init_process_group("nccl", "tcp://127.0.0.1:1", rank=rank, world_size=size)
    ran.append(rank)


def rank_of(local: int, size: int, ran: list[int]) -> None:
    join_group(local, size, ran)


def test_of_processes_that_become_ranks_the_simulated_one_runs_here(tmp_path: Path) -> None:
    """A loop over ``Process(...).start()``, as in PyTorch's tutorial; other processes start."""
    ran: list[int] = []
    with trainfit.simulate("2x RTX 4090"):
        context = torch.multiprocessing.get_context("spawn")
        started = [context.Process(target=rank_of, args=(rank, 2, ran)) for rank in range(2)]
        for process in started:
            process.start()
        for process in started:
            process.join()
            assert process.exitcode == 0 and not process.is_alive()
        assert ran == [0]
        other = torch.multiprocessing.get_context("fork").Process(target=(tmp_path / "x").touch)
        other.start()
        other.join()
        torch.multiprocessing.start_processes(lambda rank: ran.append(rank + 5), nprocs=2)
    assert (tmp_path / "x").exists()
    assert ran == [0, 5]


def test_one_process_that_becomes_a_rank_runs_here_on_one_gpu() -> None:
    ran: list[int] = []
    with trainfit.simulate("RTX 4090"):
        torch.multiprocessing.Process(target=rank_of, args=(0, 1, ran)).start()
    assert ran == [0]


def work_beside(rank: int, model: nn.Module, file: Path) -> None:
    if rank == 0:
        model(torch.zeros(1, 4, device=next(model.parameters()).device)).sum().backward()
    file.touch()


def test_processes_that_train_on_one_gpu_are_refused_by_name(tmp_path: Path) -> None:
    """As in pytorch/examples' mnist_hogwild; one that is given nothing of the GPU starts."""
    context, file = torch.multiprocessing.get_context("fork"), tmp_path / "x"
    with trainfit.simulate("RTX 4090"):
        model = nn.Linear(4, 4).cuda()
        with pytest.raises(UnsupportedOperatorError, match=r"\(work_beside\).*in place of start"):
            context.Process(target=work_beside, args=(0, model, file)).start()
        helper = context.Process(target=work_beside, args=(1, nn.Linear(4, 4), file))
        helper.start()
        helper.join()
    assert file.exists()


def test_calls_of_other_processes_are_refused_by_name() -> None:
    """As in pytorch/examples' distributed/rpc; it would wait for them without end."""
    rpc = pytest.importorskip("torch.distributed.rpc")
    refused = pytest.raises(UnsupportedOperatorError, match=r"init_rpc.*only rank 0 runs")
    with trainfit.simulate("RTX 4090"), refused:
        rpc.init_rpc("worker", rank=0, world_size=2)


def test_an_overflow_check_over_unknown_gradients_finds_none(gpu: Any) -> None:
    """As DeepSpeed's ZeRO makes it: it adds to a count in place, and reduces that."""
    distributed.init_process_group("nccl")
    count = torch.zeros([1], dtype=torch.float, device="cuda")
    for _ in range(2):
        gradient = torch.randn(1 << 12, device="cuda")
        bad = gradient.isnan().logical_or(gradient.isinf())
        count += bad.float().max()
    found = count.bool().byte()
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
    assert found[0].item() == 0


def test_parameters_move_although_weak_references_are_held_to_them(gpu: Any) -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight
    reference = weakref.ref(weight)
    layer.cuda()
    assert layer.weight is weight and reference() is weight
    assert weight.is_cuda


def test_a_model_on_the_host_can_leave_its_data(gpu: Any) -> None:
    """As Accelerate does before it shards a model with FSDP2."""
    layer = nn.Linear(2, 2).to(torch.device("meta"))
    assert layer.weight.device.type == "meta"
    assert layer.to_empty(device="cuda").weight.is_cuda


# --- What no group of several ranks accepts ----------------------------------------------------


def _ones(*size: int, device: str = "cuda") -> torch.Tensor:
    return torch.ones(*size, device=device)


#: Calls that fail in a group of four by NCCL, and what PyTorch says of them (ProcessGroup.hpp,
#: ProcessGroupNCCL.cpp, Utils.hpp).
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "host": (lambda: distributed.all_reduce(_ones(4, device="cpu")), "device type cpu"),
    "hosts": (
        lambda: distributed.all_gather([_ones(4, device="cpu")] * 4, _ones(4, device="cpu")),
        "No backend type associated with device type cpu",
    ),
    "gathered": (
        lambda: distributed.all_gather_into_tensor(_ones(4), _ones(4)),
        "output tensor size must be equal to world_size times input tensor size",
    ),
    "scattered": (
        lambda: distributed.reduce_scatter_tensor(_ones(5), _ones(16)),
        "input tensor must be the same size as output size times world size",
    ),
    "list": (lambda: distributed.all_gather([_ones(4)] * 2, _ones(4)), "2 inputs and 4 partic"),
    "parts": (lambda: distributed.reduce_scatter(_ones(4), [_ones(4)] * 3), "3 inputs and 4"),
    "even": (
        lambda: distributed.all_to_all_single(_ones(6), _ones(6)),
        "does not divide equally across group size",
    ),
    "splits": (
        lambda: distributed.all_to_all_single(_ones(8), _ones(8), [2] * 4, [1] * 4),
        "Split sizes doesn't match total dim 0 size",
    ),
    "root": (lambda: distributed.broadcast(_ones(4), 7), "invalid root 7|out of range|rank 7"),
}


@pytest.mark.parametrize("call", REFUSED)
def test_calls_that_no_group_accepts_fail_as_they_do_for_real(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    as_rank_0(monkeypatch, 4)
    fails, says = REFUSED[call]
    with trainfit.simulate("4x H100 SXM"):
        distributed.init_process_group("nccl")
        with pytest.raises((RuntimeError, ValueError), match=says):
            fails()


def test_a_group_of_both_backends_sends_what_is_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lists may be uneven, too."""
    as_rank_0(monkeypatch, 4)
    with trainfit.simulate("4x H100 SXM"):
        distributed.init_process_group("cpu:gloo,cuda:nccl")
        distributed.all_reduce(_ones(4, device="cpu"))
        distributed.all_gather([_ones(4 + rank) for rank in range(4)], _ones(4))
        distributed.all_to_all_single(_ones(4), _ones(10), [1] * 4, [1, 2, 3, 4])
        distributed.gather(_ones(4), [_ones(4)] * 4)
        found: list[Any] = [None] * 4
        distributed.all_gather_object(found, {"loss": 0.5})
        assert found[3] == {"loss": 0.5}


def test_states_of_other_ranks_are_consolidated_without_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``ZeroRedundancyOptimizer``: of five parameters each of two ranks updates two or three."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    as_rank_0(monkeypatch, 2)
    with trainfit.simulate("2x H100 SXM"):
        distributed.init_process_group("nccl")
        layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5))).cuda()
        model = nn.parallel.DistributedDataParallel(layers)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        model(_ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.consolidate_state_dict(to=0)
        state = optimizer.state_dict()
        assert len(state["state"]) == 3 and len(state["param_groups"][0]["params"]) == 5


@pytest.mark.parametrize("kind", ["THREAD", "PROCESS"])
def test_checkpoints_are_copied_into_ram_and_written_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """``async_save`` copies storages; by a process of its own it would start one."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from torch.distributed.fsdp import fully_shard

    as_rank_0(monkeypatch, 2)
    with trainfit.simulate("2x H100 SXM"):
        distributed.init_process_group("cpu:gloo,cuda:nccl")
        model = fully_shard(nn.Linear(512, 512, bias=False).cuda())
        optimizer = torch.optim.AdamW(model.parameters())
        model(_ones(4, 512)).sum().backward()
        optimizer.step()
        states = get_state_dict(model, optimizer)
        held = torch.cuda.memory_allocated()
        by = AsyncCheckpointerType[kind]
        saved: Any = checkpoint.async_save(
            {"all": states}, checkpoint_id=tmp_path, async_checkpointer_type=by
        )
        saved.result(timeout=60)
        assert torch.cuda.memory_allocated() == held
    written = sum(each.stat().st_size for each in tmp_path.glob("*.distcp"))
    share = 3 * 4 * 512 * 512 / 2  # weights and two moments, half of each
    assert share < written < 1.2 * share
