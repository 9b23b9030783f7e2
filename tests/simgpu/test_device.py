"""What a script sees of the simulated device, and that nothing of it remains afterwards."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import optimizer as optim
from torch.utils import _foreach_utils
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trainfit
from trainfit.hardware import GpuNameError
from trainfit.simgpu.device.tensor import SimulatedTensor, SimulationEndedError
from trainfit.simgpu.session import Simulation

GPU = "RTX 4090"
MiB = 1 << 20
GiB = 1 << 30


def mlp(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


# Properties of the device -------------------------------------------------------------------------


def test_torch_cuda_describes_the_gpu(sim: Simulation) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.is_initialized()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    for device in (None, 0, "cuda", "cuda:0", torch.device("cuda", 0)):
        assert "4090" in torch.cuda.get_device_name(device)
        assert torch.cuda.get_device_capability(device) == (8, 9)
    properties = torch.cuda.get_device_properties(0)
    assert properties.total_memory == sim.gpu.memory_bytes
    assert properties.multi_processor_count == sim.gpu.sm_count
    assert "4090" in repr(properties)
    assert torch.cuda.get_arch_list() == ["sm_89"]
    assert torch.cuda.is_bf16_supported()
    assert torch.version.cuda is not None
    assert torch.backends.cuda.is_built()
    assert torch.backends.cudnn.is_available()
    assert torch.backends.cudnn.version() > 90000


def test_each_gpu_answers_for_itself() -> None:
    with trainfit.simulate("h100-80gb-sxm") as simulation:
        assert "H100" in torch.cuda.get_device_name()
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_properties(0).total_memory == simulation.gpu.memory_bytes


def test_unknown_gpu_is_an_error_with_its_name() -> None:
    with pytest.raises(GpuNameError, match="RTX 9999"):
        trainfit.simulate("RTX 9999")


def test_there_is_only_one_gpu(sim: Simulation) -> None:
    for wrong in (
        lambda: torch.zeros(1, device="cuda:1"),
        lambda: torch.zeros(1).cuda(1),
        lambda: torch.zeros(1).to("cuda:3"),
        lambda: torch.cuda.set_device(1),
        lambda: torch.cuda.get_device_properties(1),
        lambda: torch.Generator("cuda:1"),
        lambda: torch.cuda.memory_allocated(2),
    ):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            wrong()


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [("1", "leaves one GPU, which is cuda:0"), ("0,1", '--gpu "2x '), ("", '--gpu "2x ')],
)
def test_gpus_are_numbered_among_the_visible(
    sim: Simulation, monkeypatch: pytest.MonkeyPatch, visible: str, wanted: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(RuntimeError) as raised:
        torch.zeros(1, device="cuda:1")
    assert wanted in str(raised.value)


def test_memory_counters(sim: Simulation) -> None:
    free, total = torch.cuda.mem_get_info()
    assert total == sim.gpu.memory_bytes
    context = sim.constants.used(())[0]
    assert context.name == "context"
    assert free == total - context.value_bytes
    tensor = torch.zeros(1000, device="cuda")
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == 4096
    assert torch.cuda.memory_reserved() == torch.cuda.max_memory_reserved(0) == 2 * MiB
    assert torch.cuda.mem_get_info("cuda")[0] == free - 2 * MiB
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 4096
    del tensor
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() == 4096
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert torch.cuda.mem_get_info()[0] == free


def test_memory_reports(sim: Simulation, tmp_path: Path) -> None:
    tensor = torch.zeros(1000, device="cuda")
    assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
    assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary(abbreviated=True)
    segments = torch.cuda.memory_snapshot()
    assert sum(segment["allocated_size"] for segment in segments) == 4096
    torch.cuda.memory._record_memory_history()
    torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    assert torch.cuda.get_allocator_backend() == "native"
    assert isinstance(torch.cuda.host_memory_stats(), dict)
    torch.cuda.ipc_collect()
    torch.cuda.reset_accumulated_memory_stats()
    del tensor


def test_memory_fraction(sim: Simulation) -> None:
    torch.cuda.set_per_process_memory_fraction(0.1)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(3 * GiB, dtype=torch.uint8, device="cuda")
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    assert torch.cuda.get_per_process_memory_fraction() == 0.5
    torch.empty(3 * GiB, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="Invalid fraction"):
        torch.cuda.set_per_process_memory_fraction(1.5)


def test_torch_accelerator(sim: Simulation) -> None:
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.current_accelerator() == torch.device("cuda")
    assert accelerator.device_count() == 1
    assert accelerator.current_device_index() == 0
    accelerator.set_device_index(0)
    tensor = torch.zeros(3, device=accelerator.current_accelerator())
    assert tensor.is_cuda
    accelerator.synchronize()
    if not hasattr(accelerator, "memory_allocated"):
        pytest.skip("the memory functions came after 2.8")
    assert accelerator.memory_allocated() == 512
    assert accelerator.memory_reserved() == accelerator.max_memory_reserved() == 2 * MiB
    accelerator.reset_peak_memory_stats()
    accelerator.empty_cache()
    accelerator.current_stream().synchronize()
    with accelerator.device_index(0):
        pass
    assert torch.get_device_module() is torch.cuda


def test_events_run_on_the_simulated_clock(sim: Simulation) -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    big = torch.randn(4096, 4096, device="cuda")
    big @ big
    end.record()
    torch.cuda.synchronize()
    end.synchronize()
    assert end.query()
    assert 0 < start.elapsed_time(end) < 1000
    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    assert start.elapsed_time(end) == 0
    with pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(end)


def test_streams(sim: Simulation) -> None:
    main = torch.cuda.current_stream()
    assert main == torch.cuda.default_stream()
    side = torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        tensor = torch.zeros(MiB, device="cuda")
    assert torch.cuda.current_stream() == main
    tensor.record_stream(main)
    main.wait_event(side.record_event())
    with torch.Stream(device="cuda"), torch.cuda.device(0), torch.cuda.device_of(tensor):
        torch.zeros(1, device="cuda")
    with torch.cuda.stream(None):
        pass
    assert side.query()
    streams = sim.recording.alloc_stream.tolist()
    assert streams[0] != 0, "another stream has a pool of its own"
    assert len(set(streams)) == 2


@pytest.mark.parametrize("by_event", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_is_done_is_done_with_what_it_waited_for(
    sim: Simulation, waits: bool, by_event: bool
) -> None:
    """FSDP1's gradients on the stream of its reduce-scatters: the host waits for the computing
    stream alone, which waited for that one; memory grew by a step's gradients in each step."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    tensor = torch.zeros(64 * MiB, device="cuda")
    address = tensor.data_ptr()
    with torch.cuda.stream(side):
        tensor.add_(1)
    tensor.record_stream(side)
    del tensor
    if waits:
        main.wait_stream(side)
    torch.ones(4, device="cuda")
    main.record_event().synchronize() if by_event else main.synchronize()
    assert (torch.zeros(64 * MiB, device="cuda").data_ptr() == address) == waits


def test_what_is_used_after_an_event_is_not_done_with_it(sim: Simulation) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    tensor = torch.zeros(64 * MiB, device="cuda")
    address = tensor.data_ptr()
    main.wait_stream(side)
    before = main.record_event()
    with torch.cuda.stream(side):
        tensor.add_(1)
    tensor.record_stream(side)
    del tensor
    main.wait_stream(side)
    before.synchronize()  # came before the other stream's work
    other = torch.zeros(64 * MiB, device="cuda")
    assert other.data_ptr() != address
    main.record_event().synchronize()
    assert torch.zeros(64 * MiB, device="cuda").data_ptr() == address


def test_a_threads_stream_is_its_own(sim: Simulation) -> None:
    def prefetch() -> None:
        torch.cuda.set_stream(torch.cuda.Stream())
        torch.zeros(3).cuda()

    thread = threading.Thread(target=prefetch)
    thread.start()
    thread.join()
    torch.zeros(3).cuda()
    streams = sim.recording.alloc_stream.tolist()
    assert streams[0] != 0
    assert streams[1] == 0


def test_settings_of_backends_can_be_changed(sim: Simulation) -> None:
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.is_acceptable(torch.zeros(3, device="cuda"))
    assert not torch.cuda.is_current_stream_capturing()
    torch.backends.cuda.preferred_linalg_library()
    with torch.cuda.nvtx.range("name"):
        torch.cuda.nvtx.mark("name")
    torch.cuda.nvtx.range_pop()


# Random numbers -----------------------------------------------------------------------------------


def test_seeds_and_states(sim: Simulation) -> None:
    torch.cuda.manual_seed(1)
    torch.cuda.manual_seed_all(7)
    assert torch.cuda.initial_seed() == 7
    state = torch.cuda.get_rng_state()
    assert state.numel() == 16, "CUDA's state: a seed and an offset"
    torch.manual_seed(3)
    assert torch.cuda.initial_seed() == 3
    torch.cuda.set_rng_state(state)
    assert torch.cuda.initial_seed() == 7
    torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
    with torch.random.fork_rng():
        torch.manual_seed(9)
    assert torch.cuda.initial_seed() == 7
    torch.cuda.default_generators[0].manual_seed(4)
    assert torch.cuda.initial_seed() == 4


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), 0])
def test_a_generator_on_the_device(sim: Simulation, device: Any) -> None:
    generator = torch.Generator(device=device).manual_seed(5)
    assert isinstance(generator, torch.Generator)
    assert generator.device == torch.device("cuda", 0)
    assert generator.initial_seed() == 5
    made = (
        torch.randn(3, 4, generator=generator, device="cuda"),
        torch.randperm(10, generator=generator, device="cuda"),
        torch.empty(3, device="cuda").normal_(generator=generator),
        torch.randint(0, 5, (3,), device="cuda", generator=generator),
        torch.multinomial(torch.ones(3, device="cuda"), 2, generator=generator),
        torch.bernoulli(torch.rand(3, device="cuda"), generator=generator),
        nn.init.kaiming_uniform_(torch.empty(3, 4, device="cuda"), generator=generator),
    )
    assert all(tensor.is_cuda for tensor in made)
    other = torch.Generator("cuda")
    other.set_state(generator.get_state())
    assert other.initial_seed() == 5


def test_a_generator_of_the_host_stays_real(sim: Simulation) -> None:
    one, two = torch.Generator().manual_seed(1), torch.Generator(device="cpu").manual_seed(1)
    assert torch.equal(torch.randn(3, generator=one), torch.randn(3, generator=two))
    assert isinstance(one, torch.Generator)
    data = TensorDataset(torch.arange(10))
    order = [int(x) for (b,) in DataLoader(data, 2, shuffle=True, generator=one) for x in b]
    assert sorted(order) == list(range(10))


def test_a_loader_may_shuffle_on_the_device(sim: Simulation) -> None:
    """With a default device of cuda, PyTorch asks for a generator there."""
    torch.set_default_device("cuda")
    data = TensorDataset(torch.arange(10))
    loader = DataLoader(data, 2, shuffle=True, generator=torch.Generator(device="cuda"))
    batches = [batch for (batch,) in loader]
    assert all(batch.is_cuda for batch in batches)
    assert sorted(x for batch in batches for x in batch.tolist()) == list(range(10))


# Devices by any name ------------------------------------------------------------------------------

HOST = torch.arange(6).reshape(2, 3)

MOVES: dict[str, Callable[[], torch.Tensor]] = {
    "to-str": lambda: HOST.to("cuda"),
    "to-index": lambda: HOST.to("cuda:0"),
    "to-int": lambda: HOST.to(0),
    "to-device": lambda: HOST.to(torch.device("cuda")),
    "to-keyword": lambda: HOST.to(device="cuda"),
    "to-int-keyword": lambda: HOST.to(device=0),
    "to-dtype": lambda: HOST.to("cuda", torch.float16),
    "to-dtype-keyword": lambda: HOST.to(dtype=torch.float32, device="cuda"),
    "to-like": lambda: HOST.to(torch.zeros(2, device="cuda")),
    "to-non-blocking": lambda: HOST.pin_memory().to("cuda", non_blocking=True),
    "cuda": lambda: HOST.cuda(),
    "cuda-int": lambda: HOST.cuda(0),
    "cuda-str": lambda: HOST.cuda("cuda"),
    "cuda-keyword": lambda: HOST.cuda(device="cuda", non_blocking=True),
    "type": lambda: HOST.type("torch.cuda.FloatTensor"),
    "legacy-type": lambda: HOST.type(torch.cuda.FloatTensor),
    "legacy-constructor": lambda: torch.cuda.FloatTensor(3),
    "legacy-data": lambda: torch.cuda.LongTensor([1, 2]),
    "tensor": lambda: torch.tensor([1, 2], device="cuda"),
    "as_tensor": lambda: torch.as_tensor(np.zeros(3), device="cuda"),
    "asarray": lambda: torch.asarray([1, 2], device="cuda"),
    "zeros": lambda: torch.zeros(2, device=0),
    "arange": lambda: torch.arange(3, device=torch.device("cuda")),
    "hann_window": lambda: torch.hann_window(8, device="cuda"),
    "tril_indices": lambda: torch.tril_indices(3, 3, device="cuda"),
    "zeros_like": lambda: torch.zeros_like(HOST, device="cuda"),
    "new_zeros": lambda: HOST.new_zeros(3, device="cuda"),
    "pinned": lambda: torch.empty(3, pin_memory=True).cuda(),
    "requires_grad": lambda: torch.tensor(3.0, device="cuda", requires_grad=True),
    "linear": lambda: nn.Linear(3, 4, device=0).weight,
    "module-to-int": lambda: nn.Linear(3, 4).to(0).weight,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_every_spelling_of_the_device(sim: Simulation, move: Callable[[], torch.Tensor]) -> None:
    tensor = move()
    assert tensor.is_cuda
    assert not tensor.is_cpu
    assert tensor.device == torch.device("cuda", 0)
    assert tensor.get_device() == 0


def test_a_move_within_the_device_is_no_copy(sim: Simulation) -> None:
    tensor = torch.zeros(3, device="cuda")
    before = torch.cuda.memory_allocated()
    for same in (tensor.to("cuda"), tensor.cuda(), tensor.to(0), tensor.to(tensor), tensor.float()):
        assert same is tensor
    assert torch.cuda.memory_allocated() == before
    assert tensor.to("cuda", copy=True) is not tensor
    assert tensor.half().is_cuda


def test_values_come_back_from_the_device(sim: Simulation) -> None:
    tensor = HOST.to("cuda")
    assert tensor.tolist() == HOST.tolist()
    assert tensor.cpu().numpy().tolist() == HOST.tolist()
    assert tensor.to("cpu").device.type == "cpu"
    assert tensor.max().item() == 5
    assert tensor.new_zeros(2, device="cpu").tolist() == [0, 0]
    assert torch.ones_like(tensor, device="cpu").tolist() == [[1] * 3] * 2
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        tensor.numpy()
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        np.asarray(tensor)
    unknown = torch.randn(4, device="cuda").sum()
    assert np.isfinite(float(unknown))
    assert f"{unknown:.3f}"
    assert "cuda:0" in repr(unknown)


def test_the_default_device(sim: Simulation) -> None:
    torch.set_default_device("cuda")
    assert torch.get_default_device() == torch.device("cuda", 0)
    model = nn.Linear(3, 4)
    assert model.weight.is_cuda
    model(torch.randn(2, 3)).sum().backward()
    assert torch.tensor([1, 2]).is_cuda
    torch.set_default_device("cpu")
    assert not torch.zeros(3).is_cuda


def test_the_default_device_ends_with_the_simulation() -> None:
    with trainfit.simulate(GPU):
        torch.set_default_device("cuda")
    assert torch.zeros(3).device.type == "cpu"


def test_device_as_a_context(sim: Simulation) -> None:
    with torch.device("cuda"):
        model = nn.TransformerEncoderLayer(8, 2)
        assert all(parameter.is_cuda for parameter in model.parameters())
        model(torch.randn(2, 3, 8)).sum().backward()
    assert not torch.zeros(3).is_cuda


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_default_tensor_type(sim: Simulation) -> None:
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    try:
        assert torch.zeros(3).is_cuda
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")
    assert not torch.zeros(3).is_cuda


def test_meta_tensors_stay_meta(sim: Simulation) -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 4)
    tensor = torch.empty(3, 3, device="meta")
    for each in (model.weight, tensor + 1, torch.zeros_like(tensor), tensor.new_zeros(3)):
        assert each.is_meta
        assert each.device.type == "meta"
    assert torch.randn(2, device="cuda").to("meta").is_meta
    assert torch.randn(2).to("meta").is_meta
    model(tensor).sum().backward()
    assert torch.cuda.memory_allocated() == 0
    model.to_empty(device="cuda")
    assert isinstance(model.weight, nn.Parameter)
    assert model(torch.randn(2, 3, device="cuda")).is_cuda


def test_a_module_goes_to_where_a_tensor_is(sim: Simulation) -> None:
    """BoTorch's models go to where their data is, module.to(tensor)."""
    x = torch.randn(2, device="cuda", dtype=torch.float64)
    for module in (torch.nn.Linear(2, 2).to(x), torch.nn.Linear(2, 2).to(tensor=x)):
        assert module.weight.is_cuda and module.weight.dtype is torch.float64
        assert module.weight.detach().to(device="cpu").is_cpu
        assert module.to(module.weight).bias.is_cuda and module.to("cpu").weight.is_cpu
        assert module.to(torch.zeros(2, device="meta")).weight.is_meta
    assert torch.nn.Linear(2, 2, device="cuda").to(torch.zeros(2)).weight.is_cpu


def test_meta_tensors_after_the_model_of_one_on_the_device(sim: Simulation) -> None:
    """DeepSpeed keeps the shapes of all parameters so: as memory they would be a second model."""
    x = torch.randn(1024, 1024, device="cuda")
    before = torch.cuda.memory_allocated()
    made = [
        torch.zeros_like(x, device="meta"),
        torch.empty_like(x, device="meta"),
        torch.full_like(x, 2.0, device="meta"),
        torch.randint_like(x, 5, device="meta"),
        x.new_zeros(4096, 1024, device="meta"),
        x.new_empty_strided((4096, 1024), (1024, 1), device="meta"),
        torch.zeros_like(x, device="meta") + 1,
        torch.nn.Linear(1024, 1024, device="cuda").to_empty(device="meta").weight,
    ]
    assert all(each.is_meta for each in made)
    assert torch.cuda.memory_allocated() == before
    assert torch.zeros_like(made[0], device="cuda").is_cuda
    assert torch.zeros_like(x).is_cuda and x.new_ones(2).is_cuda


def test_host_tensors_stay_real(sim: Simulation) -> None:
    x, w = torch.randn(3), torch.randn(3, requires_grad=True)
    (x * w).sum().backward()
    assert torch.equal(w.grad, x)
    assert not isinstance(x, SimulatedTensor)


def test_gradients_flow_between_host_and_device(sim: Simulation) -> None:
    x = torch.randn(3, requires_grad=True)
    (x.cuda() * 2).sum().backward()
    assert x.grad.device.type == "cpu"
    y = torch.randn(3, device="cuda", requires_grad=True)
    (y * 2).cpu().sum().backward()
    assert y.grad.is_cuda


# Mistakes -----------------------------------------------------------------------------------------

MIXES: dict[str, Callable[[], Any]] = {
    "add": lambda: torch.zeros(3).cuda() + torch.zeros(3),
    "add-host-first": lambda: torch.zeros(3) + torch.zeros(3).cuda(),
    "add_": lambda: torch.zeros(3).cuda().add_(torch.zeros(3)),
    "add_-host-first": lambda: torch.zeros(3).add_(torch.zeros(3).cuda()),
    "input": lambda: nn.Linear(3, 4).cuda()(torch.zeros(2, 3)),
    "model": lambda: nn.Linear(3, 4)(torch.zeros(2, 3).cuda()),
    "conv": lambda: nn.Conv2d(3, 4, 3)(torch.zeros(1, 3, 8, 8).cuda()),
    "norm": lambda: nn.LayerNorm(3)(torch.zeros(2, 3).cuda()),
    "cat": lambda: torch.cat([torch.zeros(3).cuda(), torch.zeros(3)]),
    "labels": lambda: F.cross_entropy(torch.randn(3, 4).cuda(), torch.tensor([1, 2, 3])),
    "embedding": lambda: nn.Embedding(3, 4).cuda()(torch.tensor([1])),
}


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES.keys())
def test_host_and_device_do_not_mix(sim: Simulation, mix: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mix()


def test_what_may_be_mixed(sim: Simulation) -> None:
    x = torch.zeros(3).cuda()
    assert (x + torch.tensor(2.0)).is_cuda
    assert (torch.tensor(2.0) * x).is_cuda
    assert x[torch.tensor([0, 1])].shape == (2,)
    x[:2] = torch.ones(2)
    x.copy_(torch.ones(3))
    torch.ones(3).copy_(x)
    with pytest.raises(RuntimeError, match="indices should be either on cpu"):
        torch.zeros(3)[torch.tensor([0]).cuda()]


WRONG_SHAPES: dict[str, tuple[Callable[[], Any], str]] = {
    "linear": (
        lambda: nn.Linear(3, 4).cuda()(torch.zeros(2, 5).cuda()),
        r"mat1 and mat2 shapes cannot be multiplied \(2x5 and 3x4\)",
    ),
    "add": (
        lambda: torch.zeros(2, 3).cuda() + torch.zeros(4, 5).cuda(),
        r"The size of tensor a \(3\) must match the size of tensor b \(5\)",
    ),
    "view": (lambda: torch.zeros(2, 3).cuda().view(7), "invalid for input of size 6"),
    "cat": (
        lambda: torch.cat([torch.zeros(2, 3).cuda(), torch.zeros(2, 4).cuda()]),
        "Expected size 3 but got size 4 for tensor number 1 in the list",
    ),
    "conv": (
        lambda: nn.Conv2d(3, 4, 3).cuda()(torch.zeros(1, 5, 8, 8).cuda()),
        "to have 3 channels, but got 5 channels instead",
    ),
    "copy": (
        lambda: torch.zeros(2, 3).cuda().copy_(torch.zeros(5).cuda()),
        r"The size of tensor a \(3\) must match the size of tensor b \(5\)",
    ),
    "dtype": (
        lambda: F.linear(torch.zeros(2, 3).cuda(), torch.zeros(4, 3).cuda().half()),
        "same dtype",
    ),
    "conv-dtype": (
        lambda: nn.Conv2d(3, 4, 3).cuda()(torch.zeros(1, 3, 8, 8).cuda().half()),
        "Input type .* should be the same",
    ),
    "scalar-backward": (
        lambda: torch.zeros(2, device="cuda", requires_grad=True).exp().backward(),
        "grad can be implicitly created only for scalar outputs",
    ),
}


@pytest.mark.parametrize(("call", "words"), WRONG_SHAPES.values(), ids=WRONG_SHAPES.keys())
def test_errors_have_pytorchs_words(sim: Simulation, call: Callable[[], Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        call()


# Out of memory ------------------------------------------------------------------------------------


def test_out_of_memory_says_what_pytorch_says(sim: Simulation) -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        torch.empty(25 * GiB, dtype=torch.uint8, device="cuda")
    message = str(caught.value)
    assert message.startswith("CUDA out of memory. Tried to allocate 25.00 GiB. GPU 0 has a total")
    assert isinstance(caught.value, RuntimeError)
    assert torch.cuda.memory_allocated() == 0


def test_memory_can_be_freed_after_out_of_memory(sim: Simulation) -> None:
    held = []
    with pytest.raises(RuntimeError, match="out of memory"):
        while True:
            held.append(torch.empty(GiB, dtype=torch.uint8, device="cuda"))
    assert torch.cuda.memory_allocated() == len(held) * GiB
    assert len(held) == (sim.gpu.memory_bytes - sim.constants.parts[0].value_bytes) // GiB
    assert torch.cuda.memory_stats()["num_ooms"] == 1
    held.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    torch.empty(GiB, dtype=torch.uint8, device="cuda")


def test_a_search_by_trial_goes_on_after_out_of_memory(sim: Simulation) -> None:
    model = mlp(4096).cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(batch, 4096, device="cuda")).sum().backward()
        optimizer.step()

    step(8)
    before = torch.cuda.memory_allocated()
    for batch in (1 << 20, 1 << 19):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            step(batch)
        torch.cuda.empty_cache()
    step(8)
    assert torch.cuda.memory_allocated() == before


def test_without_a_limit_nothing_runs_out() -> None:
    with trainfit.simulate(GPU, limited=False):
        torch.empty(100 * GiB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.max_memory_allocated() == 100 * GiB


# Modules and their parameters ---------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def test_tied_weights_stay_tied(sim: Simulation) -> None:
    model = Tied().cuda()
    assert torch.cuda.memory_allocated() == 512
    for change in (nn.Module.half, nn.Module.float, copy.deepcopy, nn.Module.cpu, nn.Module.cuda):
        model = change(model)
        assert model.head.weight is model.embed.weight
    model(torch.zeros(2, dtype=torch.long, device="cuda")).sum().backward()
    model.cpu()
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.grad.device.type == "cpu"


def test_an_optimizer_made_before_cuda_keeps_its_parameters(sim: Simulation) -> None:
    model = mlp()
    weight = model[0].weight
    weight.no_decay = True
    optimizer = torch.optim.Adam(model.parameters())
    model.cuda()
    assert model[0].weight is weight
    assert weight.is_cuda
    assert weight.no_decay, "users' marks stay"
    model(torch.randn(2, 64, device="cuda")).sum().backward()
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].is_cuda


def test_memory_follows_the_models_moves(sim: Simulation) -> None:
    model = mlp(1024).cuda()
    assert torch.cuda.memory_allocated() == 2 * (1024 * 1024 + 1024) * 4
    model.half()
    assert torch.cuda.memory_allocated() == 2 * (1024 * 1024 + 1024) * 2
    out = model(torch.randn(1, 1024, device="cuda", dtype=torch.half))
    model.cpu()  # while a graph holds the parameters
    del out
    assert torch.cuda.memory_allocated() <= 9 * MiB, "only cuBLAS keeps its workspace"
    assert model(torch.randn(1, 1024, dtype=torch.half)).device.type == "cpu"


def test_a_copy_of_a_model_is_a_model(sim: Simulation) -> None:
    model = mlp().cuda()
    average = copy.deepcopy(model)
    assert isinstance(average[0].weight, nn.Parameter)
    assert average[0].weight is not model[0].weight
    with torch.no_grad():
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            mean.mul_(0.9).add_(value, alpha=0.1)
    swa = torch.optim.swa_utils.AveragedModel(model)
    swa.update_parameters(model)
    swa.update_parameters(model)


def test_assigning_to_data(sim: Simulation) -> None:
    weight = nn.Parameter(torch.zeros(4, 4).cuda())
    weight.data = torch.ones(2, 2, device="cuda")
    assert weight.shape == (2, 2)
    assert isinstance(weight, nn.Parameter)
    weight.data = torch.ones(3)
    assert weight.device.type == "cpu"
    assert weight.tolist() == [1, 1, 1]
    weight.data = torch.ones(3, device="cuda")
    assert weight.is_cuda
    assert weight.requires_grad


def test_data_change_the_device_although_views_are_held(sim: Simulation) -> None:
    weight = nn.Parameter(torch.zeros(4, device="cuda"))
    views = weight.detach()[:2], weight[2:]
    weight.data = torch.ones(4)
    assert weight.device.type == "cpu" and weight.is_leaf
    assert {view.device.type for view in views} == {"cuda"}
    with pytest.raises(RuntimeError, match="changed the device between forward and backward"):
        views[1].sum().backward()
    weight.sum().backward()
    assert weight.grad is not None and weight.grad.device.type == "cpu"


def test_data_come_back_for_the_backward_pass(sim: Simulation) -> None:
    """As FSDP's parameters do that are offloaded: the gradient arrives, and stays on the device
    when they leave it once more."""
    weight = nn.Parameter(torch.zeros(4))
    host, seen = weight.data, []
    weight.data = torch.zeros(4, device="cuda")
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *_: seen.append(weight.grad))
    loss = (weight * 2).sum()
    weight.data = host
    weight.mark = 1  # type: ignore[attr-defined]
    weight.data = torch.ones(4, device="cuda")
    loss.backward()
    gradient = weight.grad
    assert gradient is not None and gradient.is_cuda and seen[0] is not None
    weight.data = host
    assert weight.grad is gradient and weight.device.type == "cpu"
    assert isinstance(weight, nn.Parameter) and weight.mark == 1  # type: ignore[attr-defined]
    weight.grad = torch.ones(4)
    assert type(weight) is nn.Parameter and weight.grad.device.type == "cpu"
    weight.data = torch.ones(4, device="cuda")
    assert weight.is_cuda and weight.grad is None


def test_gradients_follow_a_model_to_the_host_and_copies_have_their_own(sim: Simulation) -> None:
    layer = nn.Linear(4, 4).cuda()
    layer(torch.ones(2, 4, device="cuda")).sum().backward()
    layer.cpu()
    assert layer.weight.grad is not None and layer.weight.grad.device.type == "cpu"
    assert type(layer.weight) is nn.Parameter
    layer.cuda().weight.data = torch.ones(4, 4)  # its gradient stays behind
    other = copy.deepcopy(layer.weight)
    (2 * other).sum().backward()
    assert other.grad is not None and other.grad.tolist() == [[2.0] * 4] * 4


@pytest.mark.parametrize("location", [None, "cuda", "cuda:0", torch.device("cuda"), "cpu"])
def test_checkpoints(sim: Simulation, location: Any) -> None:
    model = mlp().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 64, device="cuda")).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=location)
    assert loaded["model"]["0.weight"].is_cuda == (location != "cpu")
    other = mlp().cuda()
    other.load_state_dict(loaded["model"])
    again = torch.optim.Adam(other.parameters())
    again.load_state_dict(loaded["optimizer"])
    assert again.state[other[0].weight]["exp_avg"].is_cuda
    assert other[0].weight.is_cuda


def test_loading_to_the_device_takes_memory_once_for_each_storage(sim: Simulation) -> None:
    whole = torch.randn(256, 4)
    file = io.BytesIO()
    torch.save([whole, whole[128:]], file)
    file.seek(0)
    one, two = torch.load(file, map_location="cuda")
    assert torch.cuda.memory_allocated() == whole.nbytes
    assert two.data_ptr() == one.data_ptr() + whole.nbytes // 2
    file.seek(0)
    one, two = torch.load(file, map_location=lambda storage, _: storage.cuda())
    assert one.is_cuda


def test_storages(sim: Simulation) -> None:
    tensor = torch.zeros(1024, device="cuda")
    storage = tensor.untyped_storage()
    assert storage.nbytes() == 4096
    assert storage.device == torch.device("cuda", 0)
    storage.resize_(0)
    assert torch.cuda.memory_allocated() == 0
    storage.resize_(8192)
    assert torch.cuda.memory_allocated() == 8192
    assert torch.zeros(3).untyped_storage().device.type == "cpu"


# Threads and workers ------------------------------------------------------------------------------


def test_threads_may_move_tensors(sim: Simulation) -> None:
    with ThreadPoolExecutor(2) as pool:
        moved = list(pool.map(lambda n: torch.full((3,), n).cuda() + 1, range(8)))
    assert [tensor.tolist() for tensor in moved] == [[n + 1] * 3 for n in range(8)]


class Modes(Dataset[Any]):
    """Says how many of PyTorch's modes are active where it is read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
        return {"index": torch.tensor(index), "modes": torch.tensor(modes)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_pinned_memory(sim: Simulation, workers: int) -> None:
    loader = DataLoader(Modes(), 2, num_workers=workers, pin_memory=True)
    seen = []
    for batch in loader:
        assert not batch["index"].is_cuda
        assert batch["index"].is_pinned()
        if workers:
            assert batch["modes"].tolist() == [0, 0], "a worker's own work must not pay"
        seen += batch["index"].to("cuda", non_blocking=True).tolist()
    assert seen == list(range(8))


# Beginning and end --------------------------------------------------------------------------------


def test_simulate_as_a_decorator() -> None:
    simulation = trainfit.simulate(GPU)

    @simulation
    def train(batch: int) -> int:
        """Runs in a simulation of its own."""
        torch.zeros(batch, 1024, device="cuda")
        return torch.cuda.max_memory_allocated()

    assert train(4) == 4 * 4096
    assert train(8) == 8 * 4096
    assert simulation.recording.alloc_bytes.tolist() == [8 * 4096]
    assert train.__name__ == "train"


def test_no_recording_before_the_beginning() -> None:
    with pytest.raises(RuntimeError, match="nothing has been simulated"):
        _ = trainfit.simulate(GPU).recording


def test_a_tensor_that_outlives_its_simulation_says_so() -> None:
    with trainfit.simulate(GPU):
        tensor = torch.zeros(3, device="cuda")
    with pytest.raises(SimulationEndedError, match="after its simulation ended"):
        tensor + 1
    del tensor
    if not torch.cuda.is_available():  # what PyTorch says where there never was a GPU
        with pytest.raises((AssertionError, RuntimeError), match=r"with CUDA|no NVIDIA driver"):
            torch.zeros(3, device="cuda")


def test_memory_is_freed_by_the_garbage_collector(sim: Simulation) -> None:
    class Node:
        pass

    for _ in range(5):
        node: Any = Node()
        node.itself = node
        node.tensor = torch.zeros(1000, device="cuda")
    del node
    gc.collect()
    assert torch.cuda.memory_allocated() == 0


OWNERS = (
    torch,
    torch._C,
    torch._C._nn,
    torch._utils,
    torch.autograd,
    torch.cuda,
    torch.cuda.graphs,
    torch.cuda.graphs.graph,
    torch.cuda.memory,
    torch.cuda.nvtx,
    torch.cuda.random,
    torch.cuda.streams,
    torch.accelerator,
    torch.serialization,
    torch.version,
    torch.__future__,
    torch.backends.cuda,
    torch.backends.cudnn.m,
    torch.backends.cudnn.rnn,
    torch.nn.parallel._functions,
    torch.nn.parallel.scatter_gather,
    torch.utils._device,
    torch.utils._device.DeviceContext,
    optim,
    _foreach_utils,
    torch.Tensor,
    torch.UntypedStorage,
    torch.storage._StorageBase,
    nn.Module,
    DataLoader,
    threading.Thread,
)
#: Operators that the simulation registers kernels for, and some that it does not.
DUMPED = [
    "addmm", "linear", "dropout", "scaled_dot_product_attention", "ctc_loss.Tensor",
    "silu_backward", "mish_backward", "cudnn_convolution", "norm.Scalar", "add.Tensor", "cat",
]  # fmt: skip


def state_of_pytorch() -> dict[str, Any]:
    """Everything a simulation touches: namespaces, registrations, hooks, modes."""
    state: dict[str, Any] = {}
    for owner in OWNERS:
        for name, value in vars(owner).items():
            # Counters and caches of PyTorch's own are not patches.
            if not isinstance(value, int | float | dict | set) or isinstance(value, bool):
                state[f"{owner!r}.{name}"] = value
    dispatch = torch._C
    for key in ("AutocastCUDA", "AutogradCUDA", "CUDA"):
        state[key] = sorted(dispatch._dispatch_get_registrations_for_dispatch_key(key))
    for name in DUMPED:
        state[f"dispatch of {name}"] = dispatch._dispatch_dump_table(f"aten::{name}")
    module = torch.nn.modules.module
    state["hooks"] = [
        len(hooks)
        for hooks in (
            module._global_forward_pre_hooks,
            module._global_forward_hooks,
            module._global_forward_hooks_always_called,
            optim._global_optimizer_pre_hooks,
            optim._global_optimizer_post_hooks,
        )
    ]
    state["modes"] = (
        dispatch._len_torch_dispatch_stack(),
        dispatch._len_torch_function_stack(),
        dispatch._only_lift_cpu_tensors(),
        torch.utils._python_dispatch.is_in_torch_dispatch_mode(),
    )
    return state


def assert_untouched(before: dict[str, Any]) -> None:
    after = state_of_pytorch()
    # PyTorch itself imports some of its modules when they are first needed.
    added = {
        name for name in after.keys() - before.keys() if type(after[name]).__name__ != "module"
    }
    assert not added
    assert not before.keys() - after.keys()
    changed = [
        name
        for name, value in before.items()
        if after[name] is not value and not np.array_equal(after[name], value)
    ]
    assert not changed


def use_everything() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Dropout(), nn.LSTM(8, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda"):
        loss = model(torch.randn(4, 2, 8, device="cuda"))[0].float().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.set_default_device("cuda")
    torch.compile(model)
    torch.cuda.manual_seed(1)
    nn.DataParallel(nn.Linear(2, 2).cuda())(torch.zeros(2, 2))


@pytest.fixture
def pytorch_before() -> dict[str, Any]:
    with trainfit.simulate(GPU):  # what PyTorch imports and caches on first use
        use_everything()
    return state_of_pytorch()


def test_nothing_of_pytorch_stays_patched(pytorch_before: dict[str, Any]) -> None:
    with trainfit.simulate(GPU):
        assert torch.cuda.is_available()
        use_everything()
    assert_untouched(pytorch_before)
    assert torch.zeros(3).device.type == "cpu"


def test_nothing_stays_patched_after_an_exception(pytorch_before: dict[str, Any]) -> None:
    with pytest.raises(KeyError), trainfit.simulate(GPU):
        use_everything()
        raise KeyError
    assert_untouched(pytorch_before)


def test_nothing_stays_patched_after_out_of_memory(pytorch_before: dict[str, Any]) -> None:
    with pytest.raises(torch.OutOfMemoryError), trainfit.simulate(GPU):
        torch.autocast("cuda").__enter__()
        torch.zeros(1 << 40, device="cuda")
    torch.set_autocast_enabled("cuda", False)
    while torch.autocast_decrement_nesting() > 0:
        pass
    assert_untouched(pytorch_before)


def test_simulations_do_not_nest(pytorch_before: dict[str, Any]) -> None:
    with trainfit.simulate(GPU):
        with pytest.raises(RuntimeError, match="cannot be nested"):
            trainfit.simulate("A100-80GB").__enter__()
        assert "4090" in torch.cuda.get_device_name()
        assert torch.zeros(3, device="cuda").is_cuda
    assert_untouched(pytorch_before)


def test_a_mode_that_a_script_leaves_behind_is_not_taken_for_ours(
    pytorch_before: dict[str, Any],
) -> None:
    mode = torch.overrides.BaseTorchFunctionMode()
    with trainfit.simulate(GPU):
        mode.__enter__()
    assert torch._C._len_torch_function_stack() == 1
    mode.__exit__(None, None, None)
    assert_untouched(pytorch_before)


def test_a_checkpoint_of_large_parameters_takes_no_ram_and_no_disk(tmp_path: Path) -> None:
    def anonymous_bytes() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    with trainfit.simulate("custom:8GiB"):
        model = torch.nn.Linear(16384, 8192, bias=False, device="cuda", dtype=torch.bfloat16)
        model(torch.ones(1, 16384, device="cuda", dtype=torch.bfloat16))
        before = anonymous_bytes()
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        assert anonymous_bytes() - before < (64 << 20) < state["weight"].nbytes
        assert state["weight"].is_contiguous() and state["weight"].dtype == torch.bfloat16
        small = torch.nn.Linear(2, 2, bias=False, device="cuda").weight.detach().cpu()
        assert small.sum() == 4
        files = [tmp_path / "state.pt"]
        torch.save({**state, "small": small}, files[0])
        found = [torch.load(files[0])]
        with contextlib.suppress(ImportError):
            from safetensors.torch import load_file, save_file

            files.append(tmp_path / "state.safetensors")
            save_file({**state, "small": small}, files[1], {"format": "pt"})
            found.append(load_file(files[1]))
    for file, loaded in zip(files, found, strict=True):
        assert (
            file.stat().st_blocks * 512 < (1 << 20) < state["weight"].nbytes < file.stat().st_size
        )
        assert loaded["weight"].shape == (8192, 16384) and torch.equal(loaded["small"], small)
