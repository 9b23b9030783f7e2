"""Times of some 320 small programs of every class of kernels, and what the CPU takes to launch.

Like the programs of `trainfit calibrate` (:mod:`trainfit.speed.calibration`), but many more, so
that the model of kernels can be looked at class by class; on a machine with an NVIDIA GPU, some 40
seconds. What it predicts of the same ones is in bench/gpu/kernel_truth.py.

    python bench/gpu/kernels.py --output FILE [--time-limit S] [--gate FILE]

`--gate FILE`: import everything, but do not touch the GPU before this file is there.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu.simulated import import_trainfit

import_trainfit()

from trainfit.speed.calibration import Program  # noqa: E402

Call = Callable[[], Any]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
_DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32, "tf32": FP32}


def programs() -> Iterator[Program]:
    """All of them; a name says the class first."""
    for source in (products, attention, convolutions, norms, memory, optimizers, recurrent):
        yield from source()


def random(*shape: int, dtype: torch.dtype = BF16, gradient: bool = False) -> Tensor:
    made = torch.randn(*shape, device="cuda", dtype=dtype if dtype.is_floating_point else FP32)
    return made.requires_grad_(gradient)


def with_gradient(compute: Callable[[], Tensor], *inputs: Tensor) -> Call:
    """Forward and backward pass, from a gradient that is there already."""
    given = torch.ones_like(compute())

    def call() -> Any:
        return torch.autograd.grad(compute(), inputs, given)

    return call


# -- matmuls ---------------------------------------------------------------------------------------

_LARGE = (
    *((8192, 8192, 8192), (4096, 4096, 4096), (8192, 1024, 4096), (16384, 3072, 768)),
    *((4096, 11008, 4096), (4096, 4096, 11008), (2048, 2048, 2048), (3072, 3072, 3072)),
    *((12608, 3072, 768), (12608, 768, 3072), (12608, 2304, 768), (1576, 3072, 768)),
    *((8192, 50264, 768), (8192, 768, 768), (4096, 512, 4096), (16384, 1024, 1024)),
)
_MEDIUM = (
    *((1024, 1024, 1024), (1024, 4096, 1024), (2048, 768, 768), (512, 4096, 1024)),
    *((256, 4096, 4096), (4096, 256, 4096), (1024, 768, 3072), (4096, 64, 4096)),
    *((8192, 16, 4096), (4096, 4096, 16), (1576, 768, 768), (512, 768, 3072)),
)
_SMALL = ((512, 512, 512), (256, 1024, 1024), (128, 768, 768), (400, 512, 512), (1024, 64, 1024))
_DECODE = (4096, 4096), (11008, 4096), (4096, 11008), (2048, 2048), (768, 768)
_GRADIENTS = (12608, 3072, 768), (4096, 4096, 4096), (1024, 768, 768), (8192, 1024, 4096)
_BATCHED = (96, 128, 128, 64), (96, 197, 197, 64), (768, 197, 197, 64), (96, 197, 64, 197)


def products() -> Iterator[Program]:
    for kind, shapes in (
        ("bf16", (*_LARGE, *_MEDIUM, *_SMALL)),
        ("fp16", (_LARGE[1], _LARGE[8], *_MEDIUM[:3])),
        ("tf32", (_LARGE[1], _LARGE[6], _LARGE[8], *_MEDIUM[:4], _SMALL[0])),
        ("fp32", (_LARGE[1], _LARGE[6], _LARGE[8], *_MEDIUM[:4], *_SMALL[:3])),
    ):
        for m, n, k in shapes:
            name = f"matmul {kind}: {m}x{n}x{k}"
            yield Program(name, functools.partial(_linear, kind, m, n, k))
    for n, k in _DECODE:
        for m in (1, 8, 32) if n * k > 1e6 else (1, 64):
            name = f"matmul bf16: {m}x{n}x{k}"
            yield Program(name, functools.partial(_linear, "bf16", m, n, k))
    for m, n, k in _GRADIENTS:
        yield Program(
            f"matmul bf16, weight gradient: {m}x{n}x{k}", functools.partial(_wgrad, m, n, k)
        )
        yield Program(
            f"matmul bf16, input gradient: {m}x{n}x{k}", functools.partial(_dgrad, m, n, k)
        )
        yield Program(f"matmul bf16, bias: {m}x{n}x{k}", functools.partial(_biased, m, n, k))
    for b, m, n, k in _BATCHED:
        for kind in ("bf16", "fp32"):
            name = f"matmul {kind}, batched: {b}x {m}x{n}x{k}"
            yield Program(name, functools.partial(_bmm, kind, b, m, n, k))


def _tf32(kind: str, call: Call) -> Call:
    def with_setting() -> Any:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        try:
            return call()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return with_setting


def _linear(kind: str, m: int, n: int, k: int) -> Call:
    given, weight = random(m, k, dtype=_DTYPES[kind]), random(n, k, dtype=_DTYPES[kind])
    return _tf32(kind, lambda: functional.linear(given, weight))


def _biased(m: int, n: int, k: int) -> Call:
    given, weight, bias = random(m, k), random(n, k), random(n)
    return lambda: functional.linear(given, weight, bias)


def _wgrad(m: int, n: int, k: int) -> Call:
    gradient, given = random(m, n), random(m, k)
    return lambda: torch.mm(gradient.t(), given)


def _dgrad(m: int, n: int, k: int) -> Call:
    gradient, weight = random(m, n), random(n, k)
    return lambda: torch.mm(gradient, weight)


def _bmm(kind: str, b: int, m: int, n: int, k: int) -> Call:
    one, other = random(b, m, k, dtype=_DTYPES[kind]), random(b, k, n, dtype=_DTYPES[kind])
    return lambda: torch.bmm(one, other)


# -- attention -------------------------------------------------------------------------------------

#: Samples, heads, tokens, size of a head; causal; dropout; dtype; mask.
_ATTENTION: tuple[tuple[Any, ...], ...] = (
    (4, 16, 2048, 128, True, 0.0, "bf16", False), (4, 16, 2048, 128, False, 0.0, "bf16", False),
    (1, 16, 8192, 128, True, 0.0, "bf16", False), (2, 16, 4096, 64, True, 0.0, "bf16", False),
    (8, 12, 1024, 64, True, 0.0, "bf16", False), (1, 12, 1024, 64, True, 0.0, "bf16", False),
    (16, 12, 512, 64, False, 0.0, "bf16", False), (64, 12, 197, 64, False, 0.0, "bf16", False),
    (8, 12, 197, 64, False, 0.0, "bf16", False), (64, 12, 128, 64, False, 0.0, "bf16", False),
    (4, 12, 128, 64, False, 0.0, "bf16", False), (8, 12, 1024, 64, True, 0.1, "bf16", False),
    (16, 12, 512, 64, False, 0.1, "bf16", False), (64, 12, 128, 64, False, 0.1, "bf16", False),
    (4, 16, 2048, 128, True, 0.1, "bf16", False), (8, 12, 512, 64, False, 0.0, "bf16", True),
    (2, 16, 2048, 128, False, 0.0, "bf16", True), (8, 12, 512, 64, False, 0.0, "fp32", False),
    (4, 12, 1024, 64, True, 0.0, "fp32", False), (16, 12, 197, 64, False, 0.0, "fp32", False),
    (8, 12, 512, 64, False, 0.1, "fp32", False), (2, 16, 2048, 128, True, 0.0, "fp32", False),
    (8, 8, 602, 64, False, 0.0, "bf16", False), (32, 8, 602, 64, False, 0.0, "bf16", False),
)  # fmt: skip


def attention() -> Iterator[Program]:
    for b, h, t, d, causal, dropout, kind, masked in _ATTENTION:
        what = [f"{b}x{h} heads, {t} of {d}"]
        what += ["causal"] if causal else []
        what += [f"dropout {dropout}"] if dropout else []
        what += ["mask"] if masked else []
        for gradient in (False, True):
            name = f"attention {kind}{' and gradients' if gradient else ''}: {', '.join(what)}"
            made = functools.partial(_sdpa, (b, h, t, d), causal, dropout, kind, masked, gradient)
            yield Program(name, made)


def _sdpa(
    shape: tuple[int, ...], causal: bool, dropout: float, kind: str, masked: bool, gradient: bool
) -> Call:
    dtype, tokens = _DTYPES[kind], shape[2]
    query, key, value = (random(*shape, dtype=dtype, gradient=gradient) for _ in range(3))
    mask = torch.zeros(shape[0], 1, tokens, tokens, device="cuda", dtype=dtype) if masked else None
    compute = functools.partial(
        functional.scaled_dot_product_attention, query, key, value, mask, dropout, causal
    )
    return with_gradient(compute, query, key, value) if gradient else compute


# -- convolutions ----------------------------------------------------------------------------------

#: Samples, input and output channels, side, kernel, stride, groups, bias.
_CONVOLUTIONS = (
    (64, 3, 64, 224, 7, 2, 1, False), (64, 64, 64, 56, 1, 1, 1, False),
    (64, 64, 64, 56, 3, 1, 1, False), (64, 64, 256, 56, 1, 1, 1, False),
    (64, 256, 128, 56, 1, 1, 1, False), (64, 128, 128, 56, 3, 2, 1, False),
    (64, 256, 256, 14, 3, 1, 1, False), (64, 1024, 256, 14, 1, 1, 1, False),
    (64, 512, 512, 7, 3, 1, 1, False), (64, 2048, 512, 7, 1, 1, 1, False),
    (8, 256, 256, 14, 3, 1, 1, False), (8, 64, 64, 56, 3, 1, 1, False),
    (64, 96, 96, 56, 7, 1, 96, True), (64, 768, 768, 7, 7, 1, 768, True),
    (64, 144, 144, 56, 3, 1, 144, False), (64, 672, 672, 14, 5, 1, 672, False),
    (64, 3, 96, 224, 4, 4, 1, True), (4, 64, 64, 256, 3, 1, 1, True),
    (4, 512, 256, 64, 3, 1, 1, True),
)  # fmt: skip


def convolutions() -> Iterator[Program]:
    for layer in _CONVOLUTIONS:
        kinds = ("bf16", "fp32") if layer[6] == 1 and layer[0] != 4 else ("bf16",)
        for kind in kinds:
            for last in (True, False):
                if kind == "fp32" and last:
                    continue
                name = f"convolution {kind} {'nhwc' if last else 'nchw'}: {_layer(layer)}"
                yield Program(name, functools.partial(_convolution, kind, layer, last))


def _layer(layer: tuple[Any, ...]) -> str:
    b, inputs, outputs, side, kernel, stride, groups, bias = layer
    more = f", {groups} groups" if groups > 1 else ""
    return f"{b}x{inputs}x{side}x{side} to {outputs}, {kernel}x{kernel} by {stride}{more}" + (
        ", bias" if bias else ""
    )


def _convolution(kind: str, layer: tuple[Any, ...], last: bool) -> Call:
    b, inputs, outputs, side, kernel, stride, groups, biased = layer
    dtype = _DTYPES[kind]
    layout = torch.channels_last if last else torch.contiguous_format
    given = random(b, inputs, side, side, dtype=dtype).to(memory_format=layout).requires_grad_()
    weight = random(outputs, inputs // groups, kernel, kernel, dtype=dtype)
    weight = weight.to(memory_format=layout).requires_grad_()
    bias = random(outputs, dtype=dtype, gradient=True) if biased else None
    padding = 0 if kernel == stride else kernel // 2
    conv = functools.partial(
        functional.conv2d, given, weight, bias, stride=stride, padding=padding, groups=groups
    )
    # The gradient of pictures is not asked for.
    inputs_of = [each for each in (given, weight, bias) if each is not None]
    return with_gradient(conv, *(inputs_of if inputs > 3 else inputs_of[1:]))


# -- norms -----------------------------------------------------------------------------------------


def norms() -> Iterator[Program]:
    for shape in ((64, 64, 112, 112), (64, 256, 56, 56), (64, 1024, 14, 14), (8, 256, 56, 56)):
        for last in (True, False):
            for kind in ("bf16", "fp32"):
                sizes = "x".join(map(str, shape))
                name = f"batch norm {kind} {'nhwc' if last else 'nchw'}: {sizes}"
                yield Program(name, functools.partial(_batch_norm, kind, shape, last))
    for rows, width in ((8192, 768), (1024, 768), (8192, 4096), (200704, 96), (12608, 768)):
        for kind in ("bf16", "fp32"):
            name = f"layer norm {kind}: {rows}x{width}"
            yield Program(name, functools.partial(_layer_norm, kind, rows, width))
    yield Program("group norm bf16: 8x320x64x64", functools.partial(_group_norm, "bf16"))
    yield Program("group norm fp32: 8x320x64x64", functools.partial(_group_norm, "fp32"))


def _batch_norm(kind: str, shape: tuple[int, ...], last: bool) -> Call:
    layout = torch.channels_last if last else torch.contiguous_format
    given = random(*shape, dtype=_DTYPES[kind]).to(memory_format=layout).requires_grad_()
    weight, bias = (random(shape[1], dtype=FP32, gradient=True) for _ in range(2))
    means, variances = (torch.ones(shape[1], device="cuda") for _ in range(2))
    norm = functools.partial(
        functional.batch_norm, given, means, variances, weight, bias, training=True
    )
    return with_gradient(norm, given, weight, bias)


def _layer_norm(kind: str, rows: int, width: int) -> Call:
    given = random(rows, width, dtype=_DTYPES[kind], gradient=True)
    weight, bias = (random(width, dtype=_DTYPES[kind], gradient=True) for _ in range(2))
    norm = functools.partial(functional.layer_norm, given, (width,), weight, bias)
    return with_gradient(norm, given, weight, bias)


def _group_norm(kind: str) -> Call:
    given = random(8, 320, 64, 64, dtype=_DTYPES[kind], gradient=True)
    weight, bias = (random(320, dtype=_DTYPES[kind], gradient=True) for _ in range(2))
    norm = functools.partial(functional.group_norm, given, 32, weight, bias)
    return with_gradient(norm, given, weight, bias)


# -- what the memory bounds ------------------------------------------------------------------------

_ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "addition": lambda x, y: x + y,
    "product by a number": lambda x, y: x * 2,
    "tanh": lambda x, y: x.tanh(),
    "to float32": lambda x, y: x.float(),
    "dropout": lambda x, y: functional.dropout(x, 0.1),
    "copy": lambda x, y: x.clone(),
    "row added": lambda x, y: x + y[0],
    "concatenation": lambda x, y: torch.cat((x, y)),
    "heads first": lambda x, y: x.view(-1, 128, 16, x.shape[1] // 16).transpose(1, 2).contiguous(),
    "transposed": lambda x, y: x.t().contiguous(),
    "sum of rows": lambda x, y: x.sum(0),
    "sum of columns": lambda x, y: x.sum(1),
    "sum of all": lambda x, y: x.sum(),
    "largest of columns": lambda x, y: x.argmax(1),
    "comparison": lambda x, y: torch.where(x > y, x, y),
}
_ACTIVATIONS = {"gelu": functional.gelu, "silu": functional.silu, "relu": functional.relu}


def memory() -> Iterator[Program]:
    for rows, width in ((256, 1024), (8192, 768), (8192, 4096)):
        for name, function in _ELEMENTWISE.items():
            title = f"pointwise and sums: {name} {rows}x{width}"
            yield Program(title, functools.partial(_elementwise, function, rows, width))
        for name, activation in _ACTIVATIONS.items():
            title = f"activation and gradient: {name} {rows}x{width}"
            yield Program(title, functools.partial(_activation, activation, rows, width))
    for kind in ("bf16", "fp32"):
        for rows, width in ((4096, 32000), (8192, 50257), (256, 1000)):
            title = f"cross-entropy and gradient {kind}: {rows}x{width}"
            yield Program(title, functools.partial(_cross_entropy, kind, rows, width))
        for rows, width in ((8192, 4096), (18912, 197), (64, 50257)):
            title = f"softmax and gradient {kind}: {rows}x{width}"
            yield Program(title, functools.partial(_softmax, kind, rows, width))
    for words, width, tokens in ((32000, 2048, 8192), (50257, 768, 4096), (30522, 768, 512)):
        for gradient in (False, True):
            title = f"embedding{' and gradient' if gradient else ''}: {tokens} of {words}x{width}"
            make = functools.partial(_embedding, words, width, tokens, gradient)
            yield Program(title, make, graphed=not gradient)
    for last in (False, True):
        layout = "nhwc" if last else "nchw"
        yield Program(
            f"max pooling and gradient {layout}: 64x64x112x112", functools.partial(_pooling, last)
        )
        yield Program(f"sum of pictures {layout}: 64x256x56x56", functools.partial(_sums, last))
    yield Program("bilinear resampling: 8x128x64x64 by 2", _resampling)


def _elementwise(function: Callable[[Tensor, Tensor], Tensor], rows: int, width: int) -> Call:
    one, other = random(rows, width), random(rows, width)
    return lambda: function(one, other)


def _activation(function: Callable[[Tensor], Tensor], rows: int, width: int) -> Call:
    given = random(rows, width, gradient=True)
    return with_gradient(lambda: function(given), given)


def _cross_entropy(kind: str, rows: int, width: int) -> Call:
    logits = random(rows, width, dtype=_DTYPES[kind], gradient=True)
    targets = torch.randint(0, width, (rows,)).to("cuda")
    return with_gradient(lambda: functional.cross_entropy(logits, targets), logits)


def _softmax(kind: str, rows: int, width: int) -> Call:
    given = random(rows, width, dtype=_DTYPES[kind], gradient=True)
    return with_gradient(lambda: given.softmax(-1), given)


def _embedding(words: int, width: int, tokens: int, gradient: bool) -> Call:
    table = random(words, width, dtype=FP32, gradient=gradient)
    chosen = torch.randint(0, words, (tokens,)).to("cuda")
    if not gradient:
        return lambda: functional.embedding(chosen, table)
    return with_gradient(lambda: functional.embedding(chosen, table), table)


def _pooling(last: bool) -> Call:
    layout = torch.channels_last if last else torch.contiguous_format
    given = random(64, 64, 112, 112).to(memory_format=layout).requires_grad_()
    return with_gradient(functools.partial(functional.max_pool2d, given, 3, 2, 1), given)


def _sums(last: bool) -> Call:
    layout = torch.channels_last if last else torch.contiguous_format
    given = random(64, 256, 56, 56).to(memory_format=layout)
    return lambda: given.sum((0, 2, 3))


def _resampling() -> Call:
    given = random(8, 128, 64, 64)
    return lambda: functional.interpolate(given, scale_factor=2, mode="bilinear")


# -- optimizers and recurrent layers ---------------------------------------------------------------


def optimizers() -> Iterator[Program]:
    """Timed without a graph: large enough that the CPU is no limit."""
    for name, kind, options in (
        ("adamw foreach", torch.optim.AdamW, {"foreach": True}),
        ("adamw fused", torch.optim.AdamW, {"fused": True}),
        ("sgd foreach", torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
        ("sgd fused", torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    ):
        make = functools.partial(_optimizer, kind, options)
        yield Single(f"optimizer {name}: 150 of 2 million", make, graphed=False)
    yield Single("optimizer norm of gradients: 150 of 2 million", _clip, graphed=False)


class Single(Program):
    """One set of operands: it is larger than any cache."""

    def calls(self) -> Call:
        return self.make()

    @property
    def sets(self) -> int:
        return 1


def _parameters() -> list[nn.Parameter]:
    made = [nn.Parameter(random(2_000_000, dtype=FP32)) for _ in range(150)]
    for each in made:
        each.grad = torch.randn_like(each)
    return made


def _optimizer(kind: Callable[..., Any], options: dict[str, Any]) -> Call:
    optimizer = kind(_parameters(), lr=1e-6, **options)
    return lambda: optimizer.step()


def _clip() -> Call:
    given = _parameters()
    return lambda: nn.utils.clip_grad_norm_(given, 1e9)


def recurrent() -> Iterator[Program]:
    for kind in (nn.LSTM, nn.GRU):
        for dtype in ("bf16", "fp32"):
            for b, t, width in ((64, 64, 512), (32, 128, 256), (256, 128, 1024)):
                for gradient in (False, True):
                    what = f"{kind.__name__} {dtype}{' and gradients' if gradient else ''}"
                    name = f"recurrent {what}: {b}x{t}x{width}"
                    make = functools.partial(_recurrent, kind, dtype, (b, t, width), gradient)
                    yield Single(name, make, graphed=False)
                    if dtype == "bf16" and width == 512:
                        yield Single(f"{name}, in a graph", make)


def _recurrent(kind: Any, dtype: str, shape: tuple[int, int, int], gradient: bool) -> Call:
    b, t, width = shape
    layer = kind(width, width, device="cuda", dtype=_DTYPES[dtype])
    given = random(t, b, width, dtype=_DTYPES[dtype], gradient=gradient)
    if gradient:
        return with_gradient(lambda: layer(given)[0], given, *layer.parameters())

    def call() -> Any:
        with torch.no_grad():
            return layer(given)

    return call


# -- what the CPU takes ----------------------------------------------------------------------------


def host_calls() -> Iterator[tuple[str, int, Callable[[], Call]]]:
    """Calls of tiny tensors: a name, kernels or so that a call launches, and how to make it."""
    small = functools.partial(random, 8, 8)
    yield "add_ of a number", 1, lambda: functools.partial(_in_place, small())
    yield "view", 0, lambda: functools.partial(Tensor.view, small(), 64)
    yield "addition, no gradient", 1, lambda: _of_two(torch.add, gradient=False)
    yield "addition, gradient", 1, lambda: _of_two(torch.add, gradient=True)
    yield "addition, backward", 1, lambda: _chain(lambda x, w: x + w)
    yield "product, backward", 2, lambda: _chain(lambda x, w: x * w)
    yield "matmul, no gradient", 1, lambda: _of_two(torch.mm, gradient=False)
    yield "matmul, gradient", 1, lambda: _of_two(torch.mm, gradient=True)
    yield "matmul, backward", 2, lambda: _chain(lambda x, w: x @ w)
    yield "linear module under autocast", 3, lambda: _module(nn.Linear(64, 64), (8, 64))
    yield "linear module", 1, lambda: _module(nn.Linear(64, 64), (8, 64), cast=False)
    yield "linear module, backward", 3, lambda: _module(nn.Linear(64, 64), (8, 64), back=True)
    yield "layer norm module", 1, lambda: _module(nn.LayerNorm(64), (8, 64))
    yield "layer norm, backward", 2, lambda: _module(nn.LayerNorm(64), (8, 64), back=True)
    conv = functools.partial(nn.Conv2d, 16, 16, 3, padding=1, bias=False)
    yield "convolution module", 1, lambda: _module(conv(), (2, 16, 8, 8), cast=False)
    yield "convolution under autocast", 2, lambda: _module(conv(), (2, 16, 8, 8))
    yield "convolution, backward", 2, lambda: _module(conv(), (2, 16, 8, 8), back=True)
    yield "batch norm module", 1, lambda: _module(nn.BatchNorm2d(16), (2, 16, 8, 8))
    yield "batch norm, backward", 1, lambda: _module(nn.BatchNorm2d(16), (2, 16, 8, 8), back=True)
    yield "relu module", 1, lambda: _module(nn.ReLU(), (8, 64))
    yield "gelu, backward", 1, lambda: _module(nn.GELU(), (8, 64), back=True)
    yield (
        "attention, no gradient",
        1,
        lambda: _sdpa((1, 2, 16, 64), False, 0.0, "bf16", False, False),
    )
    yield (
        "attention and backward",
        4,
        lambda: _sdpa((1, 2, 16, 64), False, 0.0, "bf16", False, True),
    )
    for number in (50, 150):
        yield f"adamw foreach, {number} tensors", 13, functools.partial(_tiny_optimizer, number, {})
        fused = functools.partial(_tiny_optimizer, number, {"fused": True})
        yield f"adamw fused, {number} tensors", 2, fused
    yield "adamw loop, 50 tensors", 600, functools.partial(_tiny_optimizer, 50, {"foreach": False})
    yield "dropout module", 1, lambda: _module(nn.Dropout(0.1), (8, 64))
    yield "embedding module", 1, _lookup


def _in_place(given: Tensor) -> Any:
    given.add_(1)


def _of_two(function: Callable[[Tensor, Tensor], Tensor], *, gradient: bool) -> Call:
    one, other = (random(8, 8, gradient=gradient) for _ in range(2))
    return lambda: function(one, other)


class _chain:
    """The backward pass of 50 of them in a row: seconds are of one."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._function = function
        self._weight = random(8, 8, gradient=True)
        self.of, self.value = 50, self._weight

    def prepare(self) -> None:
        value = self._weight
        for _ in range(self.of):
            value = self._function(value, self._weight)
        self.value = value.sum()

    def __call__(self) -> Any:
        return torch.autograd.grad(self.value, self._weight)


class _module:
    """20 modules in a row, forward, or backward (which is timed alone): seconds are of one."""

    def __init__(
        self, module: nn.Module, shape: tuple[int, ...], cast: bool = True, back: bool = False
    ) -> None:
        self._module = module.cuda()
        self._given = random(*shape, dtype=FP32, gradient=True)
        self._cast, self._back = cast, back
        self.of, self._value = 20, self._given

    def _forward(self) -> Tensor:
        value = self._given
        with torch.autocast("cuda", dtype=BF16, enabled=self._cast):
            for _ in range(self.of):
                value = self._module(value)
        return value

    def prepare(self) -> None:
        if self._back:
            self._value = self._forward().float().sum()

    def __call__(self) -> Any:
        if not self._back:
            return self._forward()
        inputs = [self._given, *self._module.parameters()]
        return torch.autograd.grad(self._value, inputs)


def _lookup() -> Call:
    table, chosen = random(100, 64, dtype=FP32), torch.arange(8).to("cuda")
    return lambda: functional.embedding(chosen, table)


def _tiny_optimizer(number: int, options: dict[str, Any]) -> Call:
    made = [nn.Parameter(random(8, 8, dtype=FP32)) for _ in range(number)]
    for each in made:
        each.grad = torch.ones_like(each)
    optimizer = torch.optim.AdamW(made, lr=1e-6, **options)
    return lambda: optimizer.step()


def host_seconds(make: Callable[[], Call], launches: int) -> tuple[float, float]:
    """Of one call: until it returns, and until the GPU is done, if the queue never fills up."""
    call = make()
    prepare = getattr(call, "prepare", lambda: None)
    of = getattr(call, "of", 1)
    repeats = 1 if hasattr(call, "prepare") else max(1, min(100, 600 // max(1, launches * of)))
    issued, done = [], []
    for _ in range(15):
        prepare()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        issued.append((returned - began) / repeats / of)
        done.append((time.perf_counter() - began) / repeats / of)
    return sorted(issued)[7], sorted(done)[7]


# -- measuring -------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--output", type=Path, required=True)
    made.add_argument("--time-limit", type=float, default=60.0, metavar="S")
    made.add_argument("--gate", type=Path)
    options = made.parse_args(argv)
    from gpu import machine
    from gpu.timing import operator_seconds
    from trainfit.speed import calibration  # noqa: F401

    while options.gate is not None and not options.gate.exists():
        time.sleep(0.05)
    deadline = time.monotonic() + options.time_limit
    found: dict[str, Any] = {"operator_s": machine.attempt(operator_seconds), "failed": {}}
    torch.backends.cuda.matmul.allow_tf32 = False
    found["machine"] = machine.describe(False)
    found["host_s"] = {}
    for name, launches, make in host_calls():
        try:
            found["host_s"][name] = host_seconds(make, launches)
        except Exception as error:
            found["failed"][f"host: {name}"] = f"{type(error).__name__}: {error}"[:300]
    found["seconds"] = {}
    everything = list(programs())
    # A stride, so that a stopped run has some of each class.
    for number, program in enumerate(each for start in range(4) for each in everything[start::4]):
        if time.monotonic() > deadline:
            found["failed"]["rest"] = program.name
            break
        began = time.monotonic()
        try:
            found["seconds"][program.name] = timed(program)
        except Exception as error:
            found["failed"][program.name] = f"{type(error).__name__}: {error}"[:300]
        if time.monotonic() - began > 1:
            print(f"{program.name}: {time.monotonic() - began:.1f} s", flush=True)
        if number % 10 == 0:
            write(options.output, found)
    write(options.output, found)
    print(f"{len(found['seconds'])} programs, {len(found['failed'])} failed", flush=True)
    return 0


def write(path: Path, found: dict[str, Any]) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(found, indent=0, allow_nan=False))
    part.replace(path)


#: Seconds of a trial, and trials, of which the median counts.
_TRIAL_S, _TRIALS = 0.006, 3


def timed(program: Program) -> float:
    """Seconds of a call: the median of a few trials, by events around a graph where it can be."""
    from trainfit.speed import calibration

    call = program.calls()
    if program.graphed:
        call = calibration.captured(call)
    else:
        call()
        call()
    elapsed = calibration.elapsed
    one = elapsed(call, 1)
    repeats = max(1, math.ceil(_TRIAL_S / max(one, 1e-6)))
    elapsed(call, repeats)
    times = sorted(elapsed(call, repeats) / repeats for _ in range(_TRIALS))
    del call
    torch.cuda.empty_cache()
    return round(times[_TRIALS // 2] / program.sets, 9)


if __name__ == "__main__":
    sys.exit(main())
