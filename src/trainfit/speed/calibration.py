"""Measures how fast a GPU is: matmuls, memory, launches, copies from the host, and programs of
every class of kernels.

Runs in a process of its own (``main``), on a real GPU or on a simulated one, whose clock is
a lower bound and no prediction: a rehearsal's rates only show that all is measured.

Programs are a few operators each. On a real GPU each is timed; on the simulated one it tells which
kernels a call launches, so that the model's time for the very same kernels can be compared
(:mod:`trainfit.speed.measured`). Sizes are of layers of common models. They are timed inside CUDA
graphs, as a CPU could not launch the short ones fast enough; several sets of operands are taken in
turn, so that they do not come from the L2 cache.

A profile knows a program by its name, by which a later version simulates it again: one that
computes something else needs another name.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.nn import functional

from trainfit.results.gpus import Kernel
from trainfit.results.runs.measurement import (
    MeasuringOutcome,
    MeasuringRequest,
    ProgramReadings,
    RateReadings,
)
from trainfit.results.runs.steps import MARKS
from trainfit.results.text import MIB
from trainfit.scripts.measuring import attempt, half_precision, serve
from trainfit.simgpu.session import Simulation, active_simulation
from trainfit.speed.measured import kernels_of
from trainfit.speed.work import Work

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
        yield Program(name, functools.partial(_matmul_program, half, rows, columns, depth))
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


def _matmul_program(half: torch.dtype, rows: int, columns: int, depth: int) -> Call:
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


TRIALS = 5
#: Seconds that one trial lasts at least, so that the events' resolution does not matter
#: (half a microsecond: cudaEventElapsedTime).
_TRIAL_S = 0.02
_MOST_REPEATS = 1 << 14
#: Repeats before the first trial: clocks rise, kernels are loaded.
_WARM_UP = 3

_COPY_BYTES = 256 * MIB
#: More than a CPU caches, as batches are that are new in each step.
_HOST_BYTES = 256 * MIB
#: Launches in a row; enough that the queue of 1,024 pending launches fills up.
_LAUNCHES = 2000


class ClockError(RuntimeError):
    """The device's clock did not advance."""


def measure(request: MeasuringRequest) -> MeasuringOutcome:
    """All rates, or all programs; what could not be measured has a reason."""
    if request.subject == "programs":
        return MeasuringOutcome(programs=measure_programs())
    trials: dict[str, tuple[float, ...]] = {}
    failed: dict[str, str] = {}
    for name, function in _subjects():
        rates = attempt(failed, name, function)
        if rates is not None:
            trials[name] = rates
    return MeasuringOutcome(rates=RateReadings(trials, failed))


def measure_programs() -> ProgramReadings:
    """Seconds of a call of each program; on a simulated device also the kernels of one."""
    trials: dict[str, tuple[float, ...]] = {}
    kernels: dict[str, tuple[Kernel, ...]] = {}
    failed: dict[str, str] = {}
    simulation = active_simulation()
    for program in programs():
        if simulation is None:
            took = attempt(failed, program.name, functools.partial(_timed, program))
        else:
            ran = attempt(failed, program.name, functools.partial(_launched, program, simulation))
            took = None if ran is None else (ran[0],)
            kernels |= {} if ran is None else {program.name: ran[1]}
        if took is not None:
            trials[program.name] = took
    return ProgramReadings(trials, kernels, failed)


def _timed(program: Program) -> tuple[float, ...]:
    """Device seconds of one call, in several trials."""
    torch.cuda.empty_cache()
    call = program.calls()
    if program.graphed:
        call = captured(call)
    return tuple(time / program.sets for time in seconds(call))


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as a CUDA graph; calls before it make what libraries make at first use."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _launched(program: Program, simulation: Simulation) -> tuple[float, tuple[Kernel, ...]]:
    """Seconds and kernels of a call on the simulated device, after a first one."""
    call = program.make()
    call()
    simulation.end_step()
    took = elapsed(call, 1)
    simulation.end_step()
    work = Work.of_step(simulation.recording, simulation.steps - 1)
    return took, kernels_of(work.table[~work.is_kind(*MARKS)])


def _subjects() -> Iterator[tuple[str, Callable[[], tuple[float, ...]]]]:
    capability = torch.cuda.get_device_capability(0)
    yield "matmul.float32", lambda: _matmul(torch.float32)
    if capability >= (8, 0):
        yield "matmul.tfloat32", lambda: _matmul(torch.float32, tf32=True)
    yield "matmul.float16", lambda: _matmul(torch.float16)
    if torch.cuda.is_bf16_supported(False):
        yield "matmul.bfloat16", lambda: _matmul(torch.bfloat16)
    yield "memory_bandwidth", _memory_bandwidth
    yield "launch", _launch
    yield "host_to_device_pinned", lambda: _host_to_device(pinned=True)
    yield "host_to_device_pageable", lambda: _host_to_device(pinned=False)


def _matmul(dtype: torch.dtype, *, tf32: bool = False) -> tuple[float, ...]:
    """Dense FLOP/s of a square matmul; zeros would draw too little power and raise clocks."""
    side = _side(dtype)
    left = torch.randn(side, side, device="cuda").to(dtype)
    right = torch.randn(side, side, device="cuda").to(dtype)
    out = torch.empty(side, side, device="cuda", dtype=dtype)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        times = seconds(lambda: torch.mm(left, right, out=out))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return tuple(2 * side**3 / time for time in times)


def _side(dtype: torch.dtype) -> int:
    """8192 for halves, 4096 for float32; less on a GPU that is nearly full."""
    side = 8192 if dtype.itemsize == 2 else 4096
    # Two operands in float32 for a moment, and the result.
    while side > 256 and 4 * side * side * 4 > _free_bytes():
        side //= 2
    return side


def _memory_bandwidth() -> tuple[float, ...]:
    """Bytes read and written in a second by a copy on the device."""
    nbytes = min(_COPY_BYTES, _free_bytes() // 4)
    source = torch.zeros(nbytes, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return tuple(2 * nbytes / time for time in seconds(lambda: target.copy_(source)))


def _launch() -> tuple[float, ...]:
    """Seconds from one small kernel to the next in eager mode: dispatch and launch."""
    small = torch.zeros(1, device="cuda")

    def launches() -> None:
        for _ in range(_LAUNCHES):
            small.add_(1)

    return tuple(time / _LAUNCHES for time in seconds(launches))


def _host_to_device(*, pinned: bool) -> tuple[float, ...]:
    """Bytes copied to the device in a second; the host's memory holds data, as a batch does: pages
    that were never written are all the same one, which the CPU's cache has."""
    nbytes = min(_HOST_BYTES, _free_bytes() // 4)
    host = torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    host = host.pin_memory() if pinned else host
    target = torch.empty(nbytes, device="cuda", dtype=torch.uint8)
    times = seconds(lambda: target.copy_(host, non_blocking=pinned))
    return tuple(nbytes / time for time in times)


def _free_bytes() -> int:
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(0)[0])


def seconds(function: Callable[[], Any]) -> tuple[float, ...]:
    """Device seconds of one call, in several trials of as many calls as a trial needs."""
    for _ in range(_WARM_UP):
        function()
    repeats = 1
    while (took := elapsed(function, repeats)) < _TRIAL_S and repeats < _MOST_REPEATS:
        # A tenth more than the last trial suggests, for it was not exact.
        target = 1.1 * repeats * _TRIAL_S / took if took > 0 else 2.0 * repeats
        repeats = min(max(repeats + 1, math.ceil(target)), _MOST_REPEATS)
    times = [elapsed(function, repeats) / repeats for _ in range(TRIALS)]
    if min(times) <= 0:
        raise ClockError("no time passed on the device")
    return tuple(times)


def elapsed(function: Callable[[], Any], repeats: int) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in itertools.repeat(None, repeats):
        function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def main() -> None:
    """The measuring process's entry point."""
    serve(measure)
