"""Autocast on the simulated device: dtypes by operator, the weight cache, the scaler."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainfit
from trainfit.simgpu.operators.autocast_lists import policies
from trainfit.simgpu.session import Simulation

HALVES = [torch.bfloat16, torch.float16]


def random(*shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", **kwargs)


def test_every_operator_that_autocast_knows_has_a_policy() -> None:
    """Read from the installed PyTorch on both sides: its header and its dispatcher."""
    every = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    # Named tensors, which 2.8 still has overloads for, are not simulated; torchvision brings
    # rules of its own.
    registered = {name for name in every if ".names_" not in name and name.startswith("aten::")}
    ours = {name for names in policies().values() for name in names}
    # The first raises in autocast; the others are registered apart from the header's lists.
    others = {"aten::binary_cross_entropy", "aten::_cudnn_rnn", "aten::linalg_matrix_sqrth"}
    assert registered - ours <= others
    assert len(ours & registered) > 100


@pytest.mark.parametrize("dtype", HALVES)
def test_dtypes_by_operator(sim: Simulation, dtype: torch.dtype) -> None:
    full, half = random(4, 8, 8), random(4, 8, 8, dtype=dtype)
    image, kernel = random(1, 8, 4, 4), random(8, 8, 3, 3)
    with torch.autocast("cuda", dtype=dtype):
        for lower in (
            full @ full,
            F.linear(full, full[0]),
            F.conv2d(image, kernel),
            torch.einsum("bij,bjk->bik", full, full),
            torch.baddbmm(full, full, full),
            nn.LSTMCell(8, 8).cuda()(full[0])[0],
        ):
            assert lower.dtype is dtype
        for wide in (
            half.softmax(-1),
            half.exp(),
            F.layer_norm(half, (8,)),
            half.sum(),
            half.cumsum(0),
            half.norm(),
            F.cross_entropy(half[0], torch.zeros(8, dtype=torch.long, device="cuda")),
            F.mse_loss(half, half),
        ):
            assert wide.dtype is torch.float32
        for promoted in (torch.cat([full, half]), torch.addcmul(full, half, half)):
            assert promoted.dtype is torch.float32
        for kept in (half + half, half.relu(), F.gelu(half)):
            assert kept.dtype is dtype
        assert (full.double() @ full.double()).dtype is torch.float64
    assert (full @ full).dtype is torch.float32


def test_every_way_to_say_it(sim: Simulation) -> None:
    model, x = nn.Linear(8, 8).cuda(), random(2, 8)
    with torch.autocast(device_type="cuda"):
        assert model(x).dtype is torch.float16
        with torch.autocast("cuda", enabled=False):
            assert model(x).dtype is torch.float32
    with torch.amp.autocast("cuda", dtype=torch.bfloat16), torch.no_grad():
        assert model(x).dtype is torch.bfloat16
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.inference_mode():
        assert model(x).dtype is torch.bfloat16

    @torch.autocast("cuda", dtype=torch.bfloat16)
    def forward() -> torch.Tensor:
        assert torch.is_autocast_enabled("cuda")
        return model(x)

    assert forward().dtype is torch.bfloat16
    assert torch.amp.is_autocast_available("cuda")


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp")
def test_the_old_names(sim: Simulation) -> None:
    scaler = torch.cuda.amp.GradScaler()
    assert scaler.is_enabled()
    with torch.cuda.amp.autocast():
        assert nn.Linear(8, 8).cuda()(random(2, 8)).dtype is torch.float16


def test_the_cpus_autocast_is_left_alone(sim: Simulation) -> None:
    host, device = torch.randn(3, 3), random(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (host @ host).dtype is torch.bfloat16
        assert (device @ device).dtype is torch.float32
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (host @ host).dtype is torch.float32


# The cache of cast weights ------------------------------------------------------------------------


def casts(sim: Simulation, run: Any) -> int:
    before = len(sim.recording.op_name)
    run()
    recording = sim.recording
    names = [recording.strings[name] for name in recording.op_name.tolist()[before:]]
    return names.count("aten._to_copy.default")


def test_weights_are_cast_once_and_kept_until_the_region_ends(sim: Simulation) -> None:
    weight, x = nn.Parameter(random(512, 512)), random(4, 512, dtype=torch.bfloat16)
    x @ x.T  # cuBLAS's workspace
    with torch.autocast("cuda", dtype=torch.bfloat16):
        before = torch.cuda.memory_allocated()
        assert casts(sim, lambda: F.linear(x, weight)) == 1
        assert torch.cuda.memory_allocated() - before == weight.nbytes // 2
        assert casts(sim, lambda: F.linear(x, weight)) == 0
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert casts(sim, lambda: F.linear(x, weight)) == 0
        assert torch.cuda.memory_allocated() - before == weight.nbytes // 2
    assert torch.cuda.memory_allocated() == before


def test_what_is_not_cached(sim: Simulation) -> None:
    x = random(4, 8)
    leaf = nn.Parameter(random(8, 8))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for weight in (random(8, 8), leaf * 1, leaf.detach(), leaf[:]):
            assert casts(sim, lambda w=weight: (F.linear(x, w), F.linear(x, w))) == 4
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
        assert casts(sim, lambda: (F.linear(x, leaf), F.linear(x, leaf))) == 4


def test_gradients_have_the_parameters_dtype(sim: Simulation) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(random(2, 8)).float().mean()
    loss.backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_custom_functions_in_autocast(sim: Simulation) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype is torch.float32
            assert not torch.is_autocast_enabled("cuda")
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    with torch.autocast("cuda"):
        Double.apply(random(3, dtype=torch.float16, requires_grad=True)).sum().backward()


# The scaler ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_the_scaler_never_skips_a_step(sim: Simulation, fused: bool) -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(model(random(2, 8)), random(2, 8))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert sim.steps == 3
    assert scaler.get_scale() == 2.0**16
    scaler.load_state_dict(copy.deepcopy(scaler.state_dict()))


def test_the_scaler_grows_as_after_healthy_steps(sim: Simulation) -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(random(2, 8)).mean()
    assert scaler.scale(torch.tensor(2.0, device="cuda")).item() == 8
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax_of_halves_makes_no_float_copy_of_its_operand(function):
    """CUDA's kernel reads float16 and writes float32; only bfloat16 is converted first."""
    with trainfit.simulate("RTX 4090") as simulation:
        scores = torch.randn(64, 64, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.float16):
            result = function(scores.half(), dim=-1)
        result.sum().backward()
    names = [simulation.recording.strings[i] for i in simulation.recording.op_name]
    assert result.dtype is torch.float32
    forward = names[: names.index("aten.sum.default") if "aten.sum.default" in names else None]
    assert forward.count("aten._to_copy.default") == 1  # scores.half() itself
    assert scores.grad is not None


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax_of_halves_is_whole_in_inference_mode_too(function: Any) -> None:
    with trainfit.simulate("RTX 4090") as simulation, torch.inference_mode():
        scores = random(64, 64, dtype=torch.float16)
        before = simulation.recording.op_name.size
        result = function(scores, dim=-1, dtype=torch.float32)
    names = [simulation.recording.strings[i] for i in simulation.recording.op_name[before:]]
    assert result.dtype is torch.float32
    assert names == [f"aten._{function.__name__}.default"]


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_weights_that_a_pass_without_gradients_cast_are_as_on_the_cpu(
    sim: Simulation, without: Any
) -> None:
    """A later pass of the same region: this PyTorch gives it gradients or not."""
    outcomes = []
    for device in ("cpu", "cuda"):
        layer = nn.Linear(4, 4).to(device)
        x = torch.ones(2, 4).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            with without():
                layer(x)
            try:
                outcomes.append(layer(x).requires_grad)
            except RuntimeError as error:
                outcomes.append("inference" in str(error).lower())
    assert outcomes[0] == outcomes[1]
