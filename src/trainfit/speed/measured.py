"""A machine whose GPU was measured: the model's constants from a calibration profile.

The model gives the shares of the peaks that kinds of kernels reach. A profile measures some
kernels on the GPU itself (``trainfit calibrate``). What the model says of the very same kernels is
brought to that in two steps: peaks are changed until square matmuls and a copy take what they
took, so that all kernels follow; what is then still off of a class of kernels
(:data:`trainfit.speed.spread.CLASSES`) is a factor on the whole class, by its programs' median, if
each of them is the nearer for what the others say of it; and how far the programs are apart is the
class's part of the prediction interval.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from trainfit.results.gpus import OF_DATA, GpuFigure, Kernel, MeasuredProgram, Rates
from trainfit.results.runs.recording import IntArray
from trainfit.results.runs.steps import DTYPES
from trainfit.speed.kernel_times import KernelTimes
from trainfit.speed.spread import CLASSES, ClassCost, classes_of
from trainfit.speed.step import HostedGpu, TimedWork
from trainfit.speed.work import CODES, COLUMNS, Work

#: What :mod:`trainfit.speed.calibration` measures: sides of square matmuls, bytes of a copy on the
#: device.
_SIDES: Final = {"float16": 8192, "bfloat16": 8192, "float32": 4096, "tfloat32": 4096}
_COPY_BYTES: Final = 256 << 20
#: Arithmetic and traffic overlap, and small tiles win where the cores are slow: the peak for a
#: measured rate is found in so many rounds.
_ROUNDS: Final = 4
#: No measured peak is so many times the datasheet's.
_MOST_FACTOR: Final = 10.0
#: The measured time from one launch to the next is the CPU's if it is so many times what any
#: kernel takes; else the GPU may have been the limit.
_BY_CPU: Final = 1.2
#: What a class is taken to be known to at best (the repeats of one program differ by a few per
#: cent).
_LEAST_SPREAD: Final = 0.04
#: Nine of ten values of a normal distribution lie within so many standard deviations.
_NINE_OF_TEN: Final = 1.645
#: Of what a class's only program is off, the part that the class is taken to be: nothing says which
#: of both it is.
_OF_ONE: Final = 0.5
#: A program that takes so many times more or less than the model says was disturbed, or ran
#: something else than the model thinks: it says nothing of its class.
_UNLIKELY: Final = 5.0


def with_rates(machine: HostedGpu, rates: Rates, title: str) -> HostedGpu:
    """``machine`` with what was measured in place of the datasheet's and of what is assumed.

    ``title`` is the profile's name. What the profile lacks stays as it is.
    """
    gpu = machine.gpu
    tensor = dict(gpu.tensor_flops)
    changes: dict[str, Any] = {}
    for dtype, side in _SIDES.items():
        measured = _value(rates.matmul.get(dtype))
        if measured is None:
            continue
        factor = _rate_factor(machine, dtype, side, measured)
        if dtype in tensor:
            tensor[dtype] *= factor
        elif dtype == "float32":
            changes["fp32_flops"] = gpu.fp32_flops * factor
    if (copied := _value(rates.memory_bandwidth)) is not None:
        factor = _bandwidth_factor(machine, copied)
        changes["bandwidth_bytes_per_s"] = gpu.bandwidth_bytes_per_s * factor
    gpu = dataclasses.replace(gpu, tensor_flops=tensor, **changes)
    found = dataclasses.replace(machine, gpu=gpu, datasheet=machine.rated, profile=title)
    found = _with_host(found, rates)
    return dataclasses.replace(found, classes=class_costs(found, rates.programs))


def _with_host(machine: HostedGpu, rates: Rates) -> HostedGpu:
    """Copies, and how fast the core that launched is."""
    changes: dict[str, Any] = {}
    if (pinned := _value(rates.host_to_device_pinned)) is not None:
        changes["pinned_bytes_per_s"] = pinned
    if (pageable := _value(rates.host_to_device_pageable)) is not None:
        pages = rates.host_to_device_pageable
        held_data = pages is not None and pages.how == OF_DATA
        most = math.inf if held_data else machine.pageable_bytes_per_s
        changes["pageable_bytes_per_s"] = min(pageable, most)
    launch = _value(rates.launch)
    if launch is not None and launch > _BY_CPU * machine.efficiency.least_s:
        # The measured loop is of nothing but one operator, which launches one kernel.
        usual = machine.host.bare_s + machine.host.launch_s
        changes |= {"core_speed": usual / launch, "core_measured": True}
    return dataclasses.replace(machine, **changes)


def product_flops(machine: HostedGpu, dtype: str, side: int) -> float:
    """FLOP/s of a square matmul, as the model has it."""
    return 2 * side**3 / float(_square(dtype, side, machine).seconds(machine.efficiency)[0])


def _rate_factor(machine: HostedGpu, dtype: str, side: int, measured: float) -> float:
    """The factor by which the peak changes where a square matmul runs at ``measured`` FLOP/s: its
    arithmetic follows the peak, its launch and its results' passage do not."""
    factor = 1.0
    for _ in range(_ROUNDS):
        peaks = {name: rate * factor for name, rate in machine.gpu.tensor_flops.items()}
        shaders = machine.gpu.fp32_flops * factor
        gpu = dataclasses.replace(machine.gpu, tensor_flops=peaks, fp32_flops=shaders)
        times = _square(dtype, side, dataclasses.replace(machine, gpu=gpu))
        arithmetic = float(times.arithmetic(machine.efficiency)[0])
        others = float(times.seconds(machine.efficiency)[0]) - arithmetic
        factor *= arithmetic / max(2 * side**3 / measured - others, arithmetic / _MOST_FACTOR)
    return min(factor, _MOST_FACTOR)


def _square(dtype: str, side: int, machine: HostedGpu) -> KernelTimes:
    flops = 2 * side**3
    sizes = {"rows": side, "columns": side, "depth": side}
    return KernelTimes(_kernel("matmul", dtype, flops=flops, **sizes), machine.gpu)


def _bandwidth_factor(machine: HostedGpu, measured: float) -> float:
    """The factor by which the bandwidth changes where a copy on the device reads and writes
    ``measured`` bytes a second: its passage follows the bandwidth, its launch does not."""
    row = _kernel("pointwise", "integer", read=_COPY_BYTES, written=_COPY_BYTES)
    times = KernelTimes(row, machine.gpu)
    passage = float(times.traffic(machine.efficiency)[0])
    launch = float(times.seconds(machine.efficiency)[0]) - passage
    return passage / max(2 * _COPY_BYTES / measured - launch, passage / _MOST_FACTOR)


def _kernel(kind: str, dtype: str, **columns: int) -> IntArray:
    values = {"kind": CODES[kind], "dtype": DTYPES.index(dtype), "batches": 1, "launches": 1}
    return np.array([[{**values, **columns}.get(name, 0) for name in COLUMNS]], np.int64)


def _value(figure: GpuFigure | None) -> float | None:
    """A rate that was measured on the GPU itself."""
    measured = figure is not None and figure.basis == "measured" and figure.value > 0
    return figure.value if measured and figure is not None else None


# ---
# Classes of kernels, by programs that were measured.


def class_costs(machine: HostedGpu, programs: Iterable[MeasuredProgram]) -> Mapping[str, ClassCost]:
    """The cost of each class that a program was measured of; ``machine`` has the measured peaks."""
    logs: dict[str, list[float]] = {}
    for program in programs:
        measured = _value(program.seconds)
        modelled = modelled_as(program.kernels, machine)
        if measured is None or modelled is None or _waits_for_cpu(program, machine):
            continue
        ratio = math.log(measured / modelled.seconds)
        if abs(ratio) < math.log(_UNLIKELY):
            logs.setdefault(modelled.group, []).append(ratio)
    return {name: _cost(values) for name, values in logs.items()}


def _waits_for_cpu(program: MeasuredProgram, machine: HostedGpu) -> bool:
    """Does it take as long as its launches, which say nothing of its kernels? No graph takes
    recurrent layers; the programs of others are in one, or longer than their launches."""
    if not any(kernel.kind == "recurrent" for kernel in program.kernels):
        return False
    timed = TimedWork(work_of(*program.kernels), machine)
    return timed.issued()[1] > float(timed.seconds.sum())


def _cost(logs: Sequence[float]) -> ClassCost:
    """A class's cost by its programs' times, given as logarithms of multiples of the model's
    seconds."""
    if len(logs) == 1:
        return ClassCost(math.exp(_OF_ONE * logs[0]))
    left_out = [
        statistics.median([*logs[:place], *logs[place + 1 :]]) for place in range(len(logs))
    ]
    without = sum(map(abs, logs))
    nearer = sum(abs(log - others) for log, others in zip(logs, left_out, strict=True)) < without
    middle = statistics.median(logs) if nearer else 0.0
    # A step has many of a class's kernels, as there are several programs: their mean counts.
    apart = math.sqrt(sum((value - middle) ** 2 for value in logs)) / len(logs)
    return ClassCost(math.exp(middle), max(_LEAST_SPREAD, _NINE_OF_TEN * apart))


class Modelled(NamedTuple):
    """What the model says of a program: seconds, and the class in which most of them lie."""

    seconds: float
    group: str


def modelled_as(kernels: Sequence[Kernel], machine: HostedGpu) -> Modelled | None:
    """The model's times of a program's kernels one after the other; ``None`` of no kernels, or
    where this version knows none such."""
    if any(kernel.kind not in CODES or kernel.dtype not in DTYPES for kernel in kernels):
        return None
    work = work_of(*kernels)
    seconds = TimedWork(work, dataclasses.replace(machine, classes={})).seconds
    totals = np.bincount(classes_of(work), weights=seconds, minlength=len(CLASSES))
    total = float(seconds.sum())
    return Modelled(total, CLASSES[int(np.argmax(totals))]) if total > 0 else None


def work_of(*kernels: Kernel) -> Work:
    """Kernels one after the other on one stream, each of an operator of its own."""
    rows = [
        [CODES[kernel.kind], DTYPES.index(kernel.dtype), *dataclasses.astuple(kernel)[2:]]
        for kernel in kernels
    ]
    place = np.arange(len(rows), dtype=np.int64)
    none = np.zeros(len(rows), dtype=np.int64)
    return Work(np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS)), none, place, none)


def kernels_of(table: IntArray) -> tuple[Kernel, ...]:
    """Rows of a table (:data:`trainfit.speed.work.COLUMNS`), with names in place of codes."""
    kinds = list(CODES)
    return tuple(
        Kernel(kinds[kind], DTYPES[dtype], *sizes) for kind, dtype, *sizes in table.tolist()
    )
