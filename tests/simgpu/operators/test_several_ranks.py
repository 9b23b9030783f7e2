"""``torch.distributed`` as the first of several ranks has it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import trainfit
from helpers_learning import observing
from helpers_ranks import as_rank_0
from trainfit.findings.out_of_memory import of_full_memory
from trainfit.hooks.ranks import goes_over_host
from trainfit.memory.explanation import replayed
from trainfit.memory.held import full_memory
from trainfit.results.runs.communication import JOINS
from trainfit.results.runs.recording import KINDS as MEMORY
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.steps import COLLECTIVES, KINDS
from trainfit.scripts.precision import AccelerateWatch, AmpWatch
from trainfit.simgpu.communication.collectives import Communication
from trainfit.simgpu.communication.process_groups import ProcessGroupNCCL
from trainfit.simgpu.device.errors import UnsupportedOperatorError
from trainfit.torch_private import distributed as private

RANKS = 4
MIB = 1 << 20


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The first process of ``torchrun --nproc-per-node=4``."""
    as_rank_0(monkeypatch, RANKS)
    with trainfit.simulate(f"{RANKS}x H100 SXM") as simulation:
        distributed.init_process_group("cpu:gloo,cuda:nccl")
        yield simulation


def launched(recording: Recording) -> list[tuple[str, int, int, int]]:
    """Kind, bytes, ranks and stream of every collective."""
    codes = {KINDS.index(name): name for name in COLLECTIVES}
    rows = zip(
        recording.kernel_kind.tolist(),
        recording.kernel_read.tolist(),
        recording.kernel_rows.tolist(),
        recording.kernel_stream.tolist(),
        strict=True,
    )
    return [(codes[kind], *rest) for kind, *rest in rows if kind in codes]


def test_the_world_has_its_ranks(gpu: Any) -> None:
    assert torch.cuda.device_count() == distributed.get_world_size() == RANKS
    assert distributed.get_rank() == 0
    distributed.all_reduce(torch.zeros(1, device="cuda"))
    assert gpu.recording.header["ranks"] == RANKS
    assert gpu.recording.header["context_parts"][-1]["name"] == "nccl"
    made = ProcessGroupNCCL(None, 0, RANKS)
    assert isinstance(made, ProcessGroupNCCL) and made.size() == RANKS


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.9",
    reason="PyTorch 2.8 does not tell which reduction an operator makes",
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_reductions_are_those_of_equal_ranks(gpu: Any, device: str) -> None:
    values = torch.arange(RANKS, device=device)
    distributed.all_reduce(values)
    assert values.tolist() == [0, RANKS, 2 * RANKS, 3 * RANKS]
    distributed.all_reduce(values, op=distributed.ReduceOp.MAX)
    distributed.broadcast(values, 0)
    distributed.reduce(values, 1)
    assert values.tolist() == [0, RANKS, 2 * RANKS, 3 * RANKS]
    mine = torch.zeros(2, dtype=torch.int64, device=device)
    distributed.reduce_scatter_tensor(mine, torch.tensor([1, 2] * RANKS, device=device))
    assert mine.tolist() == [RANKS, 2 * RANKS]


def test_what_a_reduction_that_is_not_told_makes_is_unknown(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "reduction_name", lambda boxed: "")
    values = torch.arange(RANKS, device="cuda")
    distributed.all_reduce(values)
    assert values.tolist() == [0] * RANKS


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.9",
    reason="PyTorch 2.8 does not tell which reduction an operator makes",
)
def test_products_and_bits_are_those_of_equal_ranks(gpu: Any) -> None:
    values = torch.tensor([1, 2, 3], device="cuda")
    distributed.all_reduce(values, distributed.ReduceOp.PRODUCT)
    assert values.tolist() == [1, 2**RANKS, 3**RANKS]
    distributed.all_reduce(values, distributed.ReduceOp.BXOR)  # of an even number of ranks
    assert values.tolist() == [0, 0, 0]


def test_objects_of_which_each_rank_writes_its_own_bytes(gpu: Any) -> None:
    """As Fairseq gathers them: pickled into its part of a buffer of zeros, which is added up."""
    written, size = torch.tensor([200, 100, 7], dtype=torch.uint8), 4 * RANKS
    buffer = torch.zeros(size, dtype=torch.uint8, device="cuda")
    buffer[:3].copy_(written)
    distributed.all_reduce(buffer)
    assert buffer.view(RANKS, 4)[:, :3].tolist() == [written.tolist()] * RANKS
    distributed.all_reduce(flags := torch.ones(RANKS, dtype=torch.uint8, device="cuda"))
    assert flags.tolist() == [RANKS] * RANKS


def test_a_sharded_checkpoint_is_planned_as_if_others_had_the_rest(
    gpu: Any, tmp_path: Path
) -> None:
    """``torch.distributed.checkpoint`` checks that all ranks together write each tensor whole."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = fully_shard(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda())
    state = get_model_state_dict(model)
    checkpoint.save({"model": state}, checkpoint_id=tmp_path)
    written = sum(each.stat().st_size for each in tmp_path.glob("*.distcp"))
    whole = 4 * sum(each.numel() for each in model.parameters())
    assert whole / RANKS < written < 1.2 * whole / RANKS  # of this rank
    checkpoint.load({"model": state}, checkpoint_id=tmp_path)


def test_tensors_that_are_gathered_together(gpu: Any) -> None:
    parts = [
        [torch.zeros(each, dtype=torch.int64, device="cuda") for each in (3, 5)]
        for _ in range(RANKS)
    ]
    given = [torch.arange(each, device="cuda") for each in (3, 5)]
    distributed.all_gather_coalesced(parts, given)
    assert [[each.tolist() for each in part] for part in parts] == [
        [[0, 1, 2], [0, 1, 2, 3, 4]]
    ] * RANKS
    assert [each[:3] for each in launched(gpu.recording)] == [("all_gather", 8 * 8 * RANKS, RANKS)]


@pytest.mark.parametrize("way", ["wait", "synchronize", "block_current_stream"])
def test_the_current_stream_waits_for_a_handle_in_every_way(gpu: Any, way: str) -> None:
    values = torch.arange(1 << 10, device="cuda")
    handle = distributed.all_reduce(values, async_op=True)
    if not hasattr(handle, way):
        pytest.skip("this PyTorch has it not")
    waits = KINDS.index("event_wait")
    before = int((gpu.recording.kernel_kind == waits).sum())
    getattr(handle, way)()
    assert int((gpu.recording.kernel_kind == waits).sum()) == before + 1
    assert handle.result()[0] is values


@pytest.mark.skipif(not hasattr(distributed, "split_group"), reason="since PyTorch 2.6")
def test_groups_that_are_split_from_one_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """``init_process_group(…, device_id=…)``, by which ``init_device_mesh`` splits."""
    as_rank_0(monkeypatch, RANKS)
    with trainfit.simulate(f"{RANKS}x H100 SXM") as simulation:
        distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
        mesh = distributed.device_mesh.init_device_mesh("cuda", (2, 2), mesh_dim_names=("a", "b"))
        ranks = [distributed.get_process_group_ranks(mesh.get_group(each)) for each in ("a", "b")]
        assert ranks == [[0, 2], [0, 1]]
        pair = distributed.split_group(None, [[0, 3], [1, 2]])
        assert distributed.get_process_group_ranks(pair) == [0, 3]
        assert distributed.split_group(pair, [[0], [1]]).size() == 1
        distributed.all_reduce(torch.ones(8, device="cuda"), group=pair)
        assert [each[:3] for each in launched(simulation.recording)] == [("all_reduce", 32, 2)]
        outside = distributed.split_group(None, [[1, 2]])
        assert outside in (None, distributed.GroupMember.NON_GROUP_MEMBER)


def test_of_a_group_of_no_device_none_is_split(gpu: Any) -> None:
    if hasattr(distributed, "split_group"):
        with pytest.raises(RuntimeError, match="No device associated"):
            distributed.split_group(None, [[0, 1], [2, 3]])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_gathered_is_that_of_equal_ranks(gpu: Any, device: str) -> None:
    whole = torch.zeros(2 * RANKS, dtype=torch.int64, device=device)
    distributed.all_gather_into_tensor(whole, torch.tensor([1, 2], device=device))
    assert whole.tolist() == [1, 2] * RANKS
    parts = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(RANKS)]
    distributed.all_gather(parts, torch.tensor([1, 2], device=device))
    assert [part.tolist() for part in parts] == [[1, 2]] * RANKS


def test_objects_and_barriers(gpu: Any) -> None:
    found: list[Any] = [None] * RANKS
    distributed.all_gather_object(found, {"loss": 0.5})
    assert found == [{"loss": 0.5}] * RANKS
    host = distributed.new_group(backend="gloo")
    distributed.all_gather_object(found, 3, group=host)
    assert found == [3] * RANKS
    large = {"boxes": bytes(range(256)) * 2000}  # as predictions
    distributed.all_gather_object(found, large)
    assert found == [large] * RANKS
    distributed.gather_object(large, found)
    assert found == [large] * RANKS
    distributed.monitored_barrier(host)
    distributed.barrier()
    assert distributed.get_world_size(distributed.new_group([0, 1])) == 2
    assert "the other ranks" in " ".join(gpu.recording.header["assumptions"])


def test_what_the_host_reduces_is_no_work_of_the_gpu(gpu: Any) -> None:
    distributed.all_reduce(torch.zeros(MIB))
    assert launched(gpu.recording) == []


def test_a_collective_that_is_not_waited_for_has_a_stream_of_its_own(gpu: Any) -> None:
    values = torch.zeros(MIB, device="cuda")
    distributed.all_reduce(values)
    work = distributed.all_reduce(values, async_op=True)
    work.wait()
    assert work.is_completed()
    (_, size, ranks, own), (_, _, _, other) = launched(gpu.recording)
    assert (size, ranks) == (4 * MIB, RANKS)
    assert own == 0 != other
    marks = [KINDS[kind] for kind in gpu.recording.kernel_kind[-5:].tolist()]
    assert marks == ["event", "event_wait", "all_reduce", "event", "event_wait"]
    assert gpu.recording.kernel_stream[-1] == 0


def _train(model: Any, steps: int = 2) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.randn(8, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_ddp_reduces_its_buckets_while_the_backward_pass_goes_on(gpu: Any) -> None:
    layers = (nn.Linear(1024, 1024, bias=False) for _ in range(4))
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).cuda(), bucket_cap_mb=8)
    _train(model)
    recording = gpu.recording
    reduced = [row for row in launched(recording) if row[0] == "all_reduce"]
    # All at once in the first step, then by the buckets that are rebuilt in the gradients' order.
    assert [size for _, size, _, _ in reduced] == [16 * MIB, 8 * MIB, 8 * MIB]
    kinds = [KINDS[kind] for kind in recording.kernel_kind.tolist()]
    last = [at for at, kind in enumerate(kinds) if kind == "all_reduce"][-2:]
    assert "matmul" in kinds[last[0] : last[1]]
    # The waits come at the end of the backward pass, behind the last of them.
    waits = [at for at, kind in enumerate(kinds) if kind == "event_wait"]
    assert sum(at > last[1] for at in waits) == 2


def test_no_sync_reduces_nothing(gpu: Any) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024).cuda())
    before = len(launched(gpu.recording))
    with model.no_sync():
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
    assert len(launched(gpu.recording)) == before
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    assert len(launched(gpu.recording)) > before


def test_fully_shard_keeps_a_share_of_each_parameter(gpu: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(2))).cuda()
    for each in model:
        fully_shard(each)
    fully_shard(model)
    _train(model)
    kinds = {kind for kind, *_ in launched(gpu.recording)}
    assert {"all_gather", "reduce_scatter"} <= kinds
    shards = [parameter.to_local().shape for parameter in model.parameters()]
    assert shards == [(1024 // RANKS, 1024)] * 2
    share = {"parameter", "gradient"}
    kinds = {MEMORY[kind] for kind in gpu.recording.alloc_kind.tolist()}
    assert share <= kinds


def test_gradients_of_whole_parameters_that_wait_for_a_reduction_are_gradients(gpu: Any) -> None:
    """Of micro-batches before the last: they were counted as temporaries."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = nn.Linear(1024, 1024, bias=False).cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    recording = gpu.recording
    gradients = recording.alloc_bytes[recording.alloc_kind == MEMORY.index("gradient")]
    assert 1024 * 1024 * 4 in gradients.tolist()


def test_parameters_that_are_gathered_again_are_no_activations(gpu: Any) -> None:
    """A plan of fully_shard said that checkpointing had computed 256 MiB of them again."""
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))).cuda()
    for each in model:
        fully_shard(each)
    fully_shard(model)
    for _ in range(3):
        model(torch.randn(8, 4096, device="cuda")).sum().backward()
    memory = full_memory(gpu.recording, replayed(gpu.recording))
    assert "one_checkpoint" not in {each.kind for each in of_full_memory(memory)}


def test_a_key_that_only_another_rank_sets_is_not_waited_for(gpu: Any) -> None:
    store = distributed.distributed_c10d._get_default_store()
    store.set("mine", "1")
    assert store.get("mine") == b"1"
    with pytest.raises(UnsupportedOperatorError, match="only another rank has"):
        store.get("of another rank")


def test_objects_of_another_rank_are_not_known(gpu: Any) -> None:
    sent = ["mine"]
    distributed.broadcast_object_list(sent, src=0)
    assert sent == ["mine"]
    with pytest.raises(UnsupportedOperatorError, match="only rank 1 has"):
        distributed.broadcast_object_list([None], src=1)


def test_functional_collectives_wait_on_a_stream_of_their_own(gpu: Any) -> None:
    from torch.distributed import _functional_collectives as functional

    group = distributed.group.WORLD
    values = torch.arange(RANKS, device="cuda")
    reduced = functional.all_reduce(values, "sum", group)
    gathered = functional.all_gather_tensor(values, 0, group)
    part = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
    assert reduced.tolist() == [0, RANKS, 2 * RANKS, 3 * RANKS]
    assert values.tolist() == [0, 1, 2, 3]  # they make new memory
    assert gathered.tolist() == [0, 1, 2, 3] * RANKS
    assert part.tolist() == [0, RANKS, 2 * RANKS, 3 * RANKS]
    kinds = [(kind, size) for kind, size, _, stream in launched(gpu.recording) if stream]
    sizes = 8 * RANKS, 8 * RANKS * RANKS
    assert kinds == [
        ("all_reduce", sizes[0]), ("all_gather", sizes[1]), ("reduce_scatter", sizes[1])
    ]  # fmt: skip


def test_gradients_on_gpus_that_go_over_gloo(gpu: Any) -> None:
    """C++ takes what has gloo's name for gloo's group, and asks it for its threads."""
    model = nn.Linear(4, 4).cuda()
    by_gloo = nn.parallel.DistributedDataParallel(model, process_group=distributed.new_group(
        backend="gloo"))  # fmt: skip
    by_gloo(torch.ones(2, 4, device="cuda")).sum().backward()
    by_nccl = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    of_host = nn.parallel.DistributedDataParallel(
        nn.Linear(4, 4), process_group=by_gloo.process_group
    )
    assert [goes_over_host(each) for each in (by_gloo, by_nccl, of_host)] == [True, False, False]


def test_an_optimizers_step_on_the_cpu_is_told(gpu: Any) -> None:
    """Its time is in no step: of 67 million numbers a plan said nothing."""
    model = nn.Linear(1024, 8192, bias=False).cuda()
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    _train(model.cpu())
    (told,) = [each for each in gpu.recording.header["assumptions"] if "step on the CPU" in each]
    assert str(1024 * 8192 // RANKS) in told


def test_of_an_optimizer_on_the_gpu_nothing_is_told(gpu: Any) -> None:
    model = nn.Linear(1024, 8192, bias=False).cuda()
    fully_shard(model)
    _train(model)
    assert not any("on the CPU" in each for each in gpu.recording.header["assumptions"])


def test_parameters_of_fsdp_that_are_offloaded(gpu: Any) -> None:
    """They leave the GPU after the forward pass and come back for the backward pass."""
    from torch.distributed.fsdp import CPUOffload

    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    model = FullyShardedDataParallel(
        layers, cpu_offload=CPUOffload(offload_params=True), device_id=0,
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, nn.Linear),
    )  # fmt: skip
    optimizer, kept = torch.optim.AdamW(model.parameters()), set()
    for _ in range(3):
        model(torch.ones(4, 256, device="cuda")).sum().backward()
        assert {each.grad.device.type for each in model.parameters() if each.numel()} == {"cpu"}
        optimizer.step()
        optimizer.zero_grad()
        kept.add(torch.cuda.memory_allocated() - 2 * (32 << 20))
    assert kept in ({0}, {1 << 20}), "cuBLAS's workspace of two streams, in 2.8 also cuBLASLt's"


def test_spawned_ranks_run_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def work(rank: int, size: int) -> None:
        distributed.init_process_group("nccl", "tcp://127.0.0.1:1", rank=rank, world_size=size)
        seen.append((distributed.get_rank(), distributed.get_world_size()))

    with trainfit.simulate("2x RTX 4090"):
        torch.multiprocessing.spawn(work, args=(2,), nprocs=2)
    assert seen == [(0, 2)]
    assert not distributed.is_initialized()


def test_sync_batch_norm_gathers_statistics_and_reduces_gradients(gpu: Any) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.SyncBatchNorm.convert_sync_batchnorm(layers).cuda()
    ddp = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        with torch.autocast("cuda", torch.float16):
            result = ddp(torch.randn(4, 3, 16, 16, device="cuda"))
        assert result.shape == (4, 8, 14, 14)
        before = len(launched(gpu.recording))
        result.float().sum().backward()
    # Mean, deviation and count of each rank; sums of both gradients.
    sent = launched(gpu.recording)
    assert ("all_gather", RANKS * 4 * (2 * 8 + 1), RANKS, 0) in sent
    assert ("all_reduce", 4 * 2 * 8, RANKS, 0) in sent[before:]
    assert all(parameter.grad is not None for parameter in model.parameters())
    # Equal ranks have samples all: nothing was assumed of which do.
    assert not any("mask" in each for each in gpu.recording.header["assumptions"])


def test_groups_say_on_how_many_machines_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank_0(monkeypatch, 4, of_machine=2)
    with trainfit.simulate("2x(2x H100 SXM), 400Gb/s") as simulation:
        distributed.init_process_group("nccl")
        assert torch.cuda.device_count() == 2
        inside, across = distributed.new_group([0, 1]), distributed.new_group([0, 2])
        for group in (None, inside, across):
            distributed.all_reduce(torch.zeros(8, device="cuda"), group=group)
    recording = simulation.recording
    chosen = recording.kernel_kind == KINDS.index("all_reduce")
    columns = recording.kernel_rows[chosen], recording.kernel_columns[chosen]
    assert list(zip(*(each.tolist() for each in columns), strict=True)) == [(4, 2), (2, 1), (2, 2)]


def test_a_checkpoint_of_fsdp_has_what_other_ranks_have(gpu: Any) -> None:
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.api import FullOptimStateDictConfig

    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(RANKS)))
    model = FullyShardedDataParallel(layers.cuda(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    with FullyShardedDataParallel.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    ):
        for _ in range(2):  # it trains on after a checkpoint
            model(torch.ones(2, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            weights = model.state_dict()
            states = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    names = {f"{number}.weight" for number in range(RANKS)}
    assert weights.keys() == states.keys() == names
    assert {each.device.type for each in weights.values()} == {"cpu"}
    assert {each["exp_avg"].shape for each in states.values()} == {(64, 64)}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_precision_that_fully_shard_computes_in_is_seen(
    gpu: Any, dtype: torch.dtype | None
) -> None:
    model = nn.Linear(8, 8, device="cuda")
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    watch = AmpWatch(AccelerateWatch())
    watch.called(model)
    assert watch.seen().fsdp == ("bfloat16" if dtype is not None else "")


def test_of_a_reduction_without_a_name_zeros_are_known(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in PyTorch 2.8; a rank that waits for others to join asks so how many are left."""
    monkeypatch.setattr(private, "reduction_name", lambda boxed: "")
    numbers = torch.zeros(2, device="cuda")
    distributed.all_reduce(numbers)
    assert numbers.tolist() == [0, 0]
    numbers[0] = 2
    distributed.all_reduce(numbers)
    assert gpu.engine.values.read(numbers) is None


def test_a_rank_whose_batches_are_over_is_told(gpu: Any) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8, device="cuda"))
    with (join := Join([model])):
        model(torch.ones(2, 8, device="cuda")).sum().backward()
    assert private.ranks_of_join(join) == list(range(RANKS))
    assert private.ranks_of_join(Join([model], enable=False)) == []


def test_what_ranks_do_together_is_on_a_gpu_of_each(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else NCCL refuses: two ranks that have the same one are told from what each says it was."""
    torch.cuda.set_device(2)
    distributed.all_reduce(torch.zeros(8, device="cuda"))
    distributed.barrier()
    distributed.all_reduce(torch.zeros(8))  # by gloo
    for name, value in (("CUDA_VISIBLE_DEVICES", "2"), ("SLURM_PROCID", "0")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)  # number 0 may be another GPU in each rank
            distributed.all_reduce(torch.zeros(8, device="cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    distributed.all_reduce(torch.zeros(8, device="cuda"))
    meetings = Communication.current.peers.meetings  # type: ignore[union-attr]
    assert [each.gpu for each in meetings] == [2, None, None, None, None, 2]


def test_a_join_is_known_before_the_batches_are_over(gpu: Any) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8, device="cuda"))
    with Join([model]):
        assert Communication.current.peers.meetings[-1].kind == JOINS  # type: ignore[union-attr]


def test_the_norm_of_a_shard_is_not_that_of_the_gradients(gpu: Any) -> None:
    def kinds(strategy: ShardingStrategy) -> list[str]:
        model = FullyShardedDataParallel(nn.Linear(64, 64).cuda(), sharding_strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with observing(place=lambda: "train.py:7") as observer:
            for _ in range(3):
                observer.called(model)
                model(torch.ones(2, 64, device="cuda")).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return [each.kind for each in observer.facts().misuses]

    assert kinds(ShardingStrategy.FULL_SHARD) == ["norm_of_a_shard"]
    assert kinds(ShardingStrategy.NO_SHARD) == []


def layers_of(number: int, *, bias: bool = False) -> nn.Sequential:
    """Above 100 million parameters in like layers, which are not initialized."""
    with torch.device("meta"):
        made = nn.Sequential(*(nn.Linear(6144, 6144, bias=bias) for _ in range(number)))
    return made.to_empty(device="cuda")


def gathered(make: Any, width: int = 6144) -> list[str]:
    """What is told of a model that ``make`` shards, as it trains."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with observing(place=lambda: "train.py:7") as observer:
        for _ in range(3):
            observer.called(model)
            model(torch.ones(2, width, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each for found in observer.facts().misuses for each in (found.kind, *found.told)]


@pytest.mark.parametrize("original", [True, False])
def test_a_model_that_fsdp_gathers_at_once_is_told(gpu: Any, original: bool) -> None:
    """All of its layers are one unit: 4 of 36 million parameters in float32."""
    whole = str(4 * 6144 * 6144 * 4)
    told = ["gathered_at_once", "Linear", "4", whole, whole]

    def first(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, **kwargs: Any) -> Any:
        return lambda: FullyShardedDataParallel(
            layers_of(4), sharding_strategy=strategy, use_orig_params=original, **kwargs
        )

    assert gathered(first()) == told
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    assert gathered(first(auto_wrap_policy=policy)) == []
    assert gathered(first(ShardingStrategy.SHARD_GRAD_OP)) == []
    biased = functools.partial(FullyShardedDataParallel, layers_of(4, bias=True))
    assert gathered(functools.partial(biased, use_orig_params=original))[:3] == told[:3]


def test_units_of_layers_of_fsdp2_are_not_gathered_at_once(gpu: Any) -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def second(*units: int, more: int = 0) -> Any:
        def make() -> Any:
            model = layers_of(4)
            if more:  # a table that no layer can be divided by, with most of the parameters
                model.append(nn.Linear(6144, more, bias=False, device="cuda"))
            for number in units:
                fully_shard(model[number], mp_policy=half)
            return fully_shard(model, mp_policy=half)

        return make

    whole = str(4 * 6144 * 6144 * 2)
    assert gathered(second()) == ["gathered_at_once", "Linear", "4", whole, whole]
    assert gathered(second(0, 1, 2, 3)) == []
    assert gathered(second(0, 1, 2, 3, more=50_000)) == []
    assert gathered(second(0, 1)) == []  # the other half
