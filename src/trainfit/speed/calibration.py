"""Measures how fast a GPU is: matmuls, memory, launches, copies from the host, and programs of
every class of kernels.

Runs in a process of its own (``main``), on a real GPU or on a simulated one, whose clock is
a lower bound and no prediction: a rehearsal's rates only show that all is measured.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainfit.results.gpus import Kernel
from trainfit.results.runs.measurement import (
    MeasuringOutcome,
    MeasuringRequest,
    ProgramReadings,
    RateReadings,
)
from trainfit.results.runs.steps import MARKS
from trainfit.results.text import MIB
from trainfit.scripts.measuring import attempt, serve
from trainfit.simgpu.session import Simulation, active_simulation
from trainfit.speed.measured import kernels_of
from trainfit.speed.programs import Program, programs
from trainfit.speed.work import Work

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
        wanted = 1.1 * repeats * _TRIAL_S / took if took > 0 else 2.0 * repeats
        repeats = min(max(repeats + 1, math.ceil(wanted)), _MOST_REPEATS)
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
