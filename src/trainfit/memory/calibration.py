"""Measures GPU memory outside PyTorch's allocator, and workspaces.

Runs in a fresh process (``main``), on a real GPU or on a simulated one that answers the same
calls. What is read is the device's used memory less what the allocator reserved; the process
that asked takes off what others hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch.nn import functional

from trainfit.results.gpus import CONTEXT, ConvolutionWorkspace
from trainfit.results.runs.measurement import (
    MeasuringOutcome,
    MeasuringRequest,
    MemoryReadings,
    WorkspaceReadings,
)
from trainfit.results.text import dtype_name
from trainfit.scripts.measuring import attempt, describe, half_precision, serve

#: Sides of square matmuls: cuBLAS loads another kernel for each kind of size.
_SIDES = (64, 512, 2048)
#: (samples, input channels, output channels, height and width, kernel size): shapes of
#: ResNet and VGG, the first with two numbers of samples.
_CONVOLUTIONS = (
    (8, 64, 64, 56, 3),
    (32, 64, 64, 56, 3),
    (8, 64, 64, 224, 3),
    (8, 256, 256, 14, 3),
    (8, 256, 64, 56, 1),
    (8, 3, 64, 224, 7),
)


def outside_bytes() -> int:
    """Device memory that is held, by anyone, outside this process's allocator."""
    torch.cuda.synchronize()
    free, capacity = torch.cuda.mem_get_info(0)
    return capacity - free - torch.cuda.memory_reserved(0)


def measure(request: MeasuringRequest) -> MeasuringOutcome:
    """What ``request`` asks for: "memory" or "workspaces"."""
    if request.subject == "workspaces":
        return MeasuringOutcome(workspaces=measure_workspaces())
    return MeasuringOutcome(memory=measure_memory(context_only=request.hold))


def measure_memory(*, context_only: bool = False) -> MemoryReadings:
    """The context, and its growth as one library after the other is first used."""
    torch.zeros(1).cuda()
    readings = {CONTEXT: outside_bytes()}
    failed: dict[str, str] = {}
    workspace = None
    if not context_only:
        for name, stage in _STAGES.items():
            if name == "cublas":
                workspace = attempt(failed, "cublas_workspace", _cublas_workspace)
            attempt(failed, name, stage)
            if name not in failed:
                readings[name] = outside_bytes()
    return MemoryReadings(describe(), readings, workspace, failed)


def _cublas_workspace() -> int:
    """Bytes of PyTorch's allocator that stay allocated after a first matmul."""
    square = torch.zeros(64, 64, device="cuda")
    before = torch.cuda.memory_allocated(0)
    square @ square
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(0) - before


# -- first uses ------------------------------------------------------------------------------


def _products() -> None:
    for dtype in (torch.float32, half_precision()):
        for side in _SIDES:
            square = torch.zeros(side, side, device="cuda", dtype=dtype)
            bias = torch.zeros(side, device="cuda", dtype=dtype)
            torch.addmm(bias, square, square)
            torch.bmm(square[None], square[None])


def _products_backward() -> None:
    """Gradients are computed in a thread of their own, which has its own handle."""
    for dtype in (torch.float32, half_precision()):
        for side in _SIDES:
            square = torch.zeros(side, side, device="cuda", dtype=dtype, requires_grad=True)
            (square @ square).backward(torch.zeros_like(square))


def _operands(dtype: torch.dtype, *, backward: bool) -> Iterator[tuple[Any, Any]]:
    for channels, side, kernel in ((16, 32, 3), (64, 56, 3), (64, 28, 1)):
        source = torch.zeros(4, channels, side, side, device="cuda", dtype=dtype)
        weight = torch.zeros(channels, channels, kernel, kernel, device="cuda", dtype=dtype)
        yield source.requires_grad_(backward), weight.requires_grad_(backward)


def _convolutions(*, backward: bool) -> None:
    for dtype in (torch.float32, half_precision()):
        for source, weight in _operands(dtype, backward=backward):
            result = functional.conv2d(source, weight, padding=weight.shape[-1] // 2)
            result = functional.batch_norm(result.float(), None, None, training=True)
            if backward:
                result.backward(torch.zeros_like(result))


def _attention() -> None:
    shape = (2, 8, 128, 64)
    query = torch.zeros(shape, device="cuda", dtype=half_precision(), requires_grad=True)
    result = functional.scaled_dot_product_attention(query, query, query)
    result.backward(torch.zeros_like(result))


def _many_kernels() -> None:
    """About as many different operators as training steps of common models use."""
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    y = x
    for name in ("relu", "gelu", "silu", "sigmoid", "tanh", "elu", "softplus", "leaky_relu"):
        y = getattr(functional, name)(y)
    for unary in (torch.exp, torch.sin, torch.cos, torch.abs, torch.sqrt, torch.rsqrt, torch.log):
        y = unary(y.abs() + 1)
    y = functional.layer_norm(y, (64,)).softmax(-1).log_softmax(0) * 2 - x / 3
    y = functional.dropout(y.clamp(-1, 1).pow(2).masked_fill(y > 0, 0.5), 0.1)
    image = functional.group_norm(y.view(1, 4, 32, 32), 2)
    image = functional.max_pool2d(functional.interpolate(image, scale_factor=2.0), 2)
    image = functional.avg_pool2d(functional.pad(image, (1, 1, 1, 1)), 2)
    targets = torch.arange(4, device="cuda") % 3
    loss = functional.cross_entropy(image.mean((2, 3)).view(-1, 1).expand(4, 3), targets)
    loss = loss + torch.cat([y, y]).std() + torch.stack([y, y]).var() + y.max() + y.cumsum(0).sum()
    loss = loss + functional.embedding(targets, x).norm() + torch.where(y > 0, y, -y).mean()
    loss = loss + functional.mse_loss(y, x) + functional.smooth_l1_loss(y, x) + y[targets].sum()
    torch.sort(y.detach())
    loss.backward()
    torch.optim.AdamW([x]).step()
    torch.optim.SGD([x], lr=0.1, momentum=0.9).step()


_STAGES: dict[str, Callable[[], None]] = {
    "kernels": _many_kernels,
    "cublas": _products,
    "cublas_backward": _products_backward,
    "cudnn_forward": lambda: _convolutions(backward=False),
    "cudnn_backward": lambda: _convolutions(backward=True),
    "sdpa": _attention,
}


# -- workspaces of convolutions ----------------------------------------------------------------


def measure_workspaces() -> WorkspaceReadings:
    """Convolution workspaces in addition to operands and results, as the heuristics choose."""
    found: list[ConvolutionWorkspace] = []
    failed: dict[str, str] = {}
    for shape in _CONVOLUTIONS:
        for dtype in (torch.float32, half_precision()):
            for channels_last in (False, True):
                name = f"{shape} {dtype} channels_last={channels_last}"
                attempt(failed, name, lambda: found.extend(_pair(shape, dtype, channels_last)))  # noqa: B023
                torch.cuda.empty_cache()
    return WorkspaceReadings(tuple(found), failed)


def _pair(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, channels_last: bool
) -> list[ConvolutionWorkspace]:
    """Forward and backward of one convolution."""
    samples, inputs, outputs, side, kernel = shape
    layout = torch.channels_last if channels_last else torch.contiguous_format
    source = torch.zeros(samples, inputs, side, side, device="cuda", dtype=dtype)
    source = source.contiguous(memory_format=layout)
    weight = torch.zeros(outputs, inputs, kernel, kernel, device="cuda", dtype=dtype)
    weight = weight.contiguous(memory_format=layout)
    places = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    forward = torch.ops.aten.convolution.default
    backward = torch.ops.aten.convolution_backward.default
    result = forward(source, weight, None, *places)
    gradient = torch.zeros_like(result)
    del result

    def reading(direction: Literal["forward", "backward"], nbytes: int) -> ConvolutionWorkspace:
        sizes = (samples, inputs, outputs, side, side, kernel)
        name = dtype_name(dtype)
        return ConvolutionWorkspace(sizes, name, direction, channels_last, nbytes)

    needs = [True, True, False]
    return [
        reading("forward", _besides(lambda: forward(source, weight, None, *places))),
        reading(
            "backward",
            _besides(lambda: backward(gradient, source, weight, None, *places, needs)),
        ),
    ]


def _besides(function: Callable[[], Any]) -> int:
    """Peak bytes that ``function`` allocated beyond what it leaves allocated."""
    function()  # the first call loads kernels and plans
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(0)
    result = function()
    torch.cuda.synchronize()
    nbytes = torch.cuda.max_memory_allocated(0) - torch.cuda.memory_allocated(0)
    del result
    return nbytes


def main() -> None:
    """The measuring process's entry point."""
    serve(measure)
