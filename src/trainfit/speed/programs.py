"""Programs of a few operators each, of every class of kernels, for ``trainfit calibrate``.

On a real GPU each is timed; on the simulated one it tells which kernels a call launches, so that
the model's time for the very same kernels can be compared (:mod:`trainfit.speed.measured`). Sizes
are of layers of common models. They are timed inside CUDA graphs, as a CPU could not launch the
short ones fast enough; several sets of operands are taken in turn, so that they do not come from
the L2 cache.

A profile knows a program by its name, by which a later version simulates it again: one that
computes something else needs another name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.nn import functional

from trainfit.scripts.measuring import half_precision

Call = Callable[[], Any]

#: Sets of operands: published rows of matmuls take six in turn.
_SETS: Final = 6

#: Rows, columns and depth of matmuls: MLPs and projections of transformers, from a whole batch of
#: tokens to one.
_MATMULS: Final = (
    *((4096, 4096, 4096), (8192, 1024, 4096), (2048, 2048, 2048), (16384, 3072, 768)),
    *((1024, 1024, 1024), (512, 4096, 1024), (4096, 256, 4096), (2048, 768, 768)),
    *((512, 512, 512), (256, 1024, 1024), (16, 4096, 4096), (1, 11008, 4096)),
)
#: Samples, heads, tokens and head size of causal attention.
_ATTENTIONS: Final = (
    *((4, 16, 2048, 128), (1, 16, 8192, 128), (2, 16, 4096, 64)),
    *((8, 16, 512, 64), (16, 12, 128, 64), (16, 12, 192, 64)),
)
#: Samples, input and output channels, height and width, kernel, groups: layers of ResNets, ResNeXts
#: and MobileNets.
_CONVOLUTIONS: Final = (
    *((32, 64, 64, 56, 3, 1), (32, 256, 256, 14, 3, 1), (32, 512, 2048, 7, 1, 1)),
    *((32, 256, 256, 28, 3, 32), (32, 144, 144, 56, 3, 144), (32, 576, 576, 14, 3, 576)),
)
#: Rows and columns of what is bound by the memory.
_TALL: Final = (8192, 4096)


@dataclasses.dataclass(frozen=True)
class Program:
    """Operators to time.

    Attributes:
        name: what it computes, with sizes.
        make: builds operands on the device and gives a call that computes with them.
        graphed: can a CUDA graph take it? What cannot takes longer than its launch.
    """

    name: str
    make: Callable[[], Call]
    graphed: bool = True

    def calls(self) -> Call:
        """One call after the other, each with the next set of operands."""
        made = [self.make() for _ in range(_SETS)]

        def call() -> None:
            for one in made:
                one()

        return call

    @property
    def sets(self) -> int:
        """Calls of :attr:`make`'s result in one of :meth:`calls`."""
        return _SETS


def programs() -> Iterator[Program]:
    """All of them; what a CUDA graph may refuse comes last."""
    half = half_precision()
    for rows, columns, depth in _MATMULS:
        name = f"matmul {rows}x{depth} by {depth}x{columns}"
        yield Program(name, functools.partial(_matmul, half, rows, columns, depth))
    for shape in _ATTENTIONS:
        name = "causal attention {}x{} heads, {} tokens of {}".format(*shape)
        yield Program(name, functools.partial(_attention, half, shape))
    for title, make in _BOUND_BY_MEMORY.items():
        yield Program(title, functools.partial(make, half))
    for layer in _CONVOLUTIONS:
        for last in (False, True):
            make = functools.partial(_convolution, half, layer, channels_last=last)
            yield Program(_layer_name(layer, channels_last=last), make)
    yield Program("sort of 64 rows of 65536", _sort, graphed=False)
    lstm = functools.partial(_lstm, half)
    yield Program("LSTM 512 to 512, 64 steps, batch 64", lstm, graphed=False)


def _layer_name(layer: tuple[int, ...], *, channels_last: bool) -> str:
    samples, inputs, outputs, side, kernel, groups = layer
    shape = f"{samples}x{inputs}x{side}x{side} to {outputs}"
    layout = "channels_last" if channels_last else "contiguous"
    parts = f", {groups} groups" if groups > 1 else ""
    return f"convolution {kernel}x{kernel} and gradients, {shape}{parts}, {layout}"


def _random(*shape: int, dtype: torch.dtype, gradient: bool = False) -> torch.Tensor:
    """Numbers of size 1; zeros would draw too little power and raise clocks."""
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_(gradient)


def _matmul(half: torch.dtype, rows: int, columns: int, depth: int) -> Call:
    """A linear layer without bias, without gradient."""
    given, weight = _random(rows, depth, dtype=half), _random(columns, depth, dtype=half)
    return lambda: functional.linear(given, weight)


def _attention(half: torch.dtype, shape: tuple[int, ...]) -> Call:
    query, key, value = (_random(*shape, dtype=half) for _ in range(3))
    attention = functional.scaled_dot_product_attention
    return lambda: attention(query, key, value, is_causal=True)


def _with_gradient(compute: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> Call:
    """Forward and backward pass; gradients are given back, not kept in the inputs."""

    def call() -> Any:
        result = compute()
        return torch.autograd.grad(result, inputs, torch.ones_like(result))

    return call


def _addition(half: torch.dtype) -> Call:
    one, other = (_random(*_TALL, dtype=half) for _ in range(2))
    return lambda: one + other


def _gelu(half: torch.dtype) -> Call:
    given = _random(*_TALL, dtype=half, gradient=True)
    return _with_gradient(lambda: functional.gelu(given), given)


def _softmax(half: torch.dtype) -> Call:
    given = _random(*_TALL, dtype=half, gradient=True)
    return _with_gradient(lambda: given.softmax(-1), given)


def _layer_norm(half: torch.dtype) -> Call:
    given = _random(*_TALL, dtype=half, gradient=True)
    weight, bias = (_random(_TALL[1], dtype=half, gradient=True) for _ in range(2))
    norm = functools.partial(functional.layer_norm, given, (_TALL[1],), weight, bias)
    return _with_gradient(norm, given, weight, bias)


def _batch_norm(half: torch.dtype) -> Call:
    given = _random(32, 64, 112, 112, dtype=half, gradient=True)
    weight, bias = (_random(64, dtype=torch.float32, gradient=True) for _ in range(2))
    norm = functools.partial(functional.batch_norm, given, None, None, weight, bias, training=True)
    return _with_gradient(norm, given, weight, bias)


def _transposition(half: torch.dtype) -> Call:
    given = _random(*_TALL, dtype=half)
    return lambda: given.t().contiguous()


def _cross_entropy(half: torch.dtype) -> Call:
    logits = _random(4096, 32000, dtype=torch.float32, gradient=True)
    targets = torch.randint(0, 32000, (4096,)).to("cuda")
    return _with_gradient(lambda: functional.cross_entropy(logits, targets), logits)


def _embedding(half: torch.dtype) -> Call:
    table = _random(32000, 4096, dtype=half)
    tokens = torch.randint(0, 32000, (8192,)).to("cuda")
    return lambda: functional.embedding(tokens, table)


def _pooling(half: torch.dtype) -> Call:
    given = _random(32, 64, 112, 112, dtype=half, gradient=True)
    pool = functools.partial(functional.max_pool2d, given, 3, 2, 1)
    return _with_gradient(pool, given)


def _resampling(half: torch.dtype) -> Call:
    given = _random(8, 128, 64, 64, dtype=half)
    return lambda: functional.interpolate(given, scale_factor=2, mode="bilinear")


def _sort() -> Call:
    given = _random(64, 65536, dtype=torch.float32)
    return lambda: given.sort(dim=-1)


_BOUND_BY_MEMORY: Final = {
    "addition of 8192x4096": _addition,
    "GELU and gradient, 8192x4096": _gelu,
    "softmax and gradient, 8192x4096": _softmax,
    "layer norm and gradients, 8192x4096": _layer_norm,
    "batch norm and gradients, 32x64x112x112": _batch_norm,
    "transposition of 8192x4096": _transposition,
    "cross-entropy and gradient, 4096x32000": _cross_entropy,
    "embedding of 8192 tokens in 4096": _embedding,
    "max pooling and gradient, 32x64x112x112": _pooling,
    "bilinear resampling, 8x128x64x64 to 128x128": _resampling,
}


def _convolution(half: torch.dtype, layer: tuple[int, ...], *, channels_last: bool) -> Call:
    samples, inputs, outputs, side, kernel, groups = layer
    layout = torch.channels_last if channels_last else torch.contiguous_format
    given = torch.randn(samples, inputs, side, side, device="cuda").to(half)
    given = given.to(memory_format=layout).requires_grad_()
    weight = torch.randn(outputs, inputs // groups, kernel, kernel, device="cuda").to(half)
    weight = weight.to(memory_format=layout).requires_grad_()
    conv = functools.partial(functional.conv2d, given, weight, padding=kernel // 2, groups=groups)
    return _with_gradient(conv, given, weight)


def _lstm(half: torch.dtype) -> Call:
    layer = torch.nn.LSTM(512, 512, device="cuda", dtype=half)
    given = _random(64, 64, 512, dtype=half)

    def call() -> Any:
        with torch.no_grad():
            return layer(given)

    return call
