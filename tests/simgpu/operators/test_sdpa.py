"""Scaled dot product attention takes the backend that the GPU would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion

import trainfit
from trainfit.simgpu.session import Simulation

OPERATORS = {
    "aten._scaled_dot_product_flash_attention.default": "flash",
    "aten._scaled_dot_product_efficient_attention.default": "efficient",
    "aten._scaled_dot_product_cudnn_attention.default": "cudnn",
    "aten.bmm.default": "math",
}
#: cuDNN's attention comes first on Hopper since this version.
HOPPER = "cudnn" if TorchVersion(torch.__version__) >= (2, 11) else "flash"


def qkv(dtype: torch.dtype, size: int = 64, tokens: int = 32) -> list[torch.Tensor]:
    return [
        torch.randn(2, 4, tokens, size, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(3)
    ]


def backend(sim: Simulation) -> str:
    recording = sim.recording
    names = [recording.strings[name] for name in recording.op_name.tolist()]
    return next(OPERATORS[name] for name in names if name in OPERATORS)


@pytest.mark.parametrize(
    ("gpu", "dtype", "size", "options", "wanted"),
    [
        ("RTX 4090", torch.bfloat16, 64, {}, "flash"),
        ("RTX 4090", torch.float16, 64, {"is_causal": True}, "flash"),
        ("RTX 4090", torch.float16, 60, {}, "flash"),  # padded to a multiple of 8
        ("RTX 4090", torch.float32, 64, {}, "efficient"),
        ("RTX 4090", torch.float32, 66, {}, "math"),  # not aligned to 16 bytes
        ("RTX 4090", torch.bfloat16, 264, {}, "efficient"),  # too wide for flash
        ("RTX 4090", torch.float64, 64, {}, "math"),
        ("a100-80gb-sxm", torch.bfloat16, 64, {"dropout_p": 0.1}, "flash"),
        ("h100-80gb-sxm", torch.bfloat16, 64, {}, HOPPER),
        ("h100-80gb-sxm", torch.float32, 64, {}, "efficient"),
        # cuDNN's dropout has a resolution of 1/16, and its heads are up to 128 wide.
        ("h100-80gb-sxm", torch.bfloat16, 64, {"dropout_p": 0.1}, "flash"),
        ("h100-80gb-sxm", torch.bfloat16, 64, {"dropout_p": 0.125}, HOPPER),
        ("h100-80gb-sxm", torch.bfloat16, 160, {}, "flash"),
        # Flash has no backward for these heads where shared memory is small.
        ("RTX 4090", torch.bfloat16, 200, {}, "efficient"),
        ("RTX 4090", torch.bfloat16, 256, {}, "flash"),
        ("RTX 4090", torch.bfloat16, 256, {"dropout_p": 0.1}, "efficient"),
        ("a100-80gb-sxm", torch.bfloat16, 200, {}, "flash"),
        ("Tesla T4", torch.float16, 64, {}, "efficient"),  # flash needs Ampere
        ("Tesla T4", torch.bfloat16, 64, {}, "math"),  # and bf16 does, too
    ],
)
def test_backend_by_gpu_and_operands(
    gpu: str, dtype: torch.dtype, size: int, options: dict[str, Any], wanted: str
) -> None:
    with trainfit.simulate(gpu) as sim:
        out = F.scaled_dot_product_attention(*qkv(dtype, size), **options)
        assert out.shape == (2, 4, 32, size)
        assert out.dtype is dtype
        out.sum().backward()
        assert backend(sim) == wanted


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.bfloat16])
def test_a_mask_rules_flash_out(sim: Simulation, mask_dtype: torch.dtype) -> None:
    mask = torch.ones(32, 32, dtype=mask_dtype, device="cuda")
    F.scaled_dot_product_attention(*qkv(torch.bfloat16), attn_mask=mask).sum().backward()
    assert backend(sim) == "efficient"


@pytest.mark.parametrize(
    ("allowed", "wanted"),
    [
        ([SDPBackend.MATH], "math"),
        ([SDPBackend.EFFICIENT_ATTENTION], "efficient"),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], "flash"),
    ],
)
def test_the_users_choice_of_backends(
    sim: Simulation, allowed: list[SDPBackend], wanted: str
) -> None:
    with sdpa_kernel(allowed):
        F.scaled_dot_product_attention(*qkv(torch.float16))
    assert backend(sim) == wanted


def test_a_choice_that_no_backend_can_serve(sim: Simulation) -> None:
    with (
        sdpa_kernel([SDPBackend.FLASH_ATTENTION]),
        pytest.raises(RuntimeError, match="No available kernel"),
    ):
        F.scaled_dot_product_attention(*qkv(torch.float32))


def test_autocast_reaches_attention(sim: Simulation) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(*qkv(torch.float32))
    assert out.dtype is torch.bfloat16
    assert backend(sim) == "flash"


def test_only_math_takes_memory_for_every_pair_of_tokens() -> None:
    def peak(backend: SDPBackend) -> int:
        with trainfit.simulate("RTX 4090"), sdpa_kernel(backend):
            F.scaled_dot_product_attention(*qkv(torch.float16, tokens=4096)).sum().backward()
            return torch.cuda.max_memory_allocated()

    pairs = 2 * 4 * 4096 * 4096 * 2
    assert peak(SDPBackend.FLASH_ATTENTION) < pairs / 2
    assert peak(SDPBackend.EFFICIENT_ATTENTION) < pairs / 2
    assert peak(SDPBackend.MATH) > 2 * pairs


def test_flash_keeps_its_output_and_the_sums(sim: Simulation) -> None:
    query, key, value = qkv(torch.bfloat16)
    before = torch.cuda.memory_allocated()
    out = F.scaled_dot_product_attention(query, key, value)
    sums = 2 * 4 * 32 * 4
    kept = torch.cuda.memory_allocated() - before - out.nbytes - sums
    assert 0 <= kept <= 2 * 512, "the seed and the offset of dropout"


def test_grouped_queries(sim: Simulation) -> None:
    query, key, _ = qkv(torch.bfloat16)
    F.scaled_dot_product_attention(query, key[:, :2], key[:, :2], enable_gqa=True)
    assert backend(sim) == "flash"


def test_inference_mode_takes_the_same_backend(sim: Simulation) -> None:
    with torch.inference_mode():
        F.scaled_dot_product_attention(*qkv(torch.bfloat16))
    assert backend(sim) == "flash"


@pytest.mark.parametrize(
    ("allowed", "wanted"),
    [
        ([SDPBackend.CUDNN_ATTENTION], "cudnn"),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], "efficient"),
        ([SDPBackend.MATH], "math"),
    ],
)
def test_the_scripts_order_of_backends(allowed: list[SDPBackend], wanted: str) -> None:
    with trainfit.simulate("a100-80gb-sxm") as sim:
        with sdpa_kernel(allowed, set_priority=True):
            F.scaled_dot_product_attention(*qkv(torch.bfloat16))
        assert backend(sim) == wanted


def test_grouped_queries_need_flash_or_cudnn() -> None:
    for gpu, dtype, wanted in (
        ("RTX 4090", torch.bfloat16, "flash"),
        ("RTX 4090", torch.float32, "math"),
        ("Tesla T4", torch.float16, "math"),
    ):
        with trainfit.simulate(gpu) as sim:
            query = torch.randn(2, 8, 32, 64, device="cuda", dtype=dtype)
            key, value = (torch.randn(2, 2, 32, 64, device="cuda", dtype=dtype) for _ in range(2))
            out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
            assert out.shape == query.shape
            assert backend(sim) == wanted
