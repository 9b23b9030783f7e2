"""What the CUDA context and each library take of the GPU when they are first used.

A process of its own, for it disturbs what comes later: after each stage the caching
allocator's share is known, so the growth of used memory beyond it is the context's, a
library's handle's, or lazily loaded code's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpu import machine


def measure(simulated: bool) -> dict[str, Any]:
    memory = machine.DeviceMemory(simulated)
    memory.note("before", context=False)
    torch.cuda.init()
    memory.note("context")
    failed = {}
    for name, use in STAGES.items():
        try:
            use()
            torch.cuda.synchronize()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        memory.note(name)
    return {
        "status": "ran",
        "simulated": simulated,
        "case": None,
        "machine": machine.describe(simulated),
        "device_memory": memory.stages,
        "failed_stages": failed,
        "recorded_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _tensor() -> None:
    torch.empty(1, device="cuda")


def _kernel() -> None:
    torch.ones(1024, device="cuda") + 1


def _cublas() -> None:
    x = torch.ones(64, 64, device="cuda")
    x @ x


def _cublas_half() -> None:
    x = torch.ones(64, 64, device="cuda", dtype=torch.float16)
    x @ x


def _cublaslt() -> None:
    x = torch.ones(64, 64, device="cuda", dtype=torch.float16)
    functional.linear(x, x, x[0])


def _convolution(dtype: torch.dtype, channels_last: bool = False) -> Callable[[], None]:
    def use() -> None:
        layer = nn.Conv2d(16, 16, 3, padding=1).to("cuda", dtype)
        x = torch.ones(4, 16, 32, 32, device="cuda", dtype=dtype, requires_grad=True)
        if channels_last:
            layer = layer.to(memory_format=torch.channels_last)
            x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
        layer(x).sum().backward()

    return use


def _batch_norm() -> None:
    layer = nn.BatchNorm2d(16).cuda()
    layer(torch.ones(4, 16, 8, 8, device="cuda")).sum().backward()


def _lstm() -> None:
    layer = nn.LSTM(16, 16).cuda()
    layer(torch.ones(4, 2, 16, device="cuda"))[0].sum().backward()


def _attention() -> None:
    x = torch.ones(1, 2, 64, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    functional.scaled_dot_product_attention(x, x, x).sum().backward()


def _solver() -> None:
    torch.linalg.inv(torch.eye(8, device="cuda"))


def _fft() -> None:
    torch.fft.fft(torch.ones(64, device="cuda"))


def _sort() -> None:
    torch.ones(5000, device="cuda").sort()


def _fused_optimizer() -> None:
    weight = nn.Parameter(torch.ones(64, device="cuda"))
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], fused=True).step()


STAGES: dict[str, Callable[[], None]] = {
    "first tensor": _tensor,
    "first kernel": _kernel,
    "cuBLAS, float32": _cublas,
    "cuBLAS, float16": _cublas_half,
    "cuBLASLt": _cublaslt,
    "cuDNN convolution, float32": _convolution(torch.float32),
    "cuDNN convolution, float16": _convolution(torch.float16),
    "cuDNN convolution, float16, channels_last": _convolution(torch.float16, True),
    "batch norm": _batch_norm,
    "LSTM": _lstm,
    "attention": _attention,
    "sort": _sort,
    "fused optimizer": _fused_optimizer,
    "cuSOLVER": _solver,
    "cuFFT": _fft,
}
