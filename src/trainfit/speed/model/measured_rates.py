"""A machine whose rates were measured: the model's constants from a calibration profile.

The model gives the shares of the peaks that kinds of kernels reach. A profile measures some
kernels on the GPU itself (``trainfit calibrate``); what the model says of the very same kernels is
brought to that by changing the peaks, so that all kernels follow.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from trainfit.results.machine.profile import Figure, Rates
from trainfit.results.runs.kernels import DTYPES
from trainfit.results.runs.recording import IntArray
from trainfit.speed.model.kernel_times import KernelTimes
from trainfit.speed.model.step import Machine
from trainfit.speed.model.work import CODES, COLUMNS

#: What ``speed.calibration`` measures: sides of square matmuls, bytes of a copy on the device.
_SIDES: Final = {"float16": 8192, "bfloat16": 8192, "float32": 4096, "tfloat32": 4096}
_COPY_BYTES: Final = 256 << 20
#: The measured time from one launch to the next is the CPU's if it is so many times what any
#: kernel takes; else the GPU may have been the limit.
_BY_CPU: Final = 1.2


def with_rates(machine: Machine, rates: Rates, title: str) -> Machine:
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
        factor = measured / product_flops(machine, dtype, side)
        if dtype in tensor:
            tensor[dtype] *= factor
        elif dtype == "float32":
            changes["fp32_flops"] = gpu.fp32_flops * factor
    if (copied := _value(rates.memory_bandwidth)) is not None:
        factor = copied / _copy_bytes_per_s(machine)
        changes["bandwidth_bytes_per_s"] = gpu.bandwidth_bytes_per_s * factor
    gpu = dataclasses.replace(gpu, tensor_flops=tensor, **changes)
    found = dataclasses.replace(machine, gpu=gpu, datasheet=machine.rated, profile=title)
    return _with_host(found, rates)


def _with_host(machine: Machine, rates: Rates) -> Machine:
    """Copies, and how fast the core that launched is."""
    changes: dict[str, Any] = {}
    if (pinned := _value(rates.host_to_device_pinned)) is not None:
        changes["pinned_bytes_per_s"] = pinned
    if (pageable := _value(rates.host_to_device_pageable)) is not None:
        changes["pageable_bytes_per_s"] = pageable
    launch = _value(rates.launch)
    if launch is not None and launch > _BY_CPU * machine.efficiency.least_s:
        # The measured loop is an operator without gradient, which launches one kernel.
        usual = machine.host.forward_s + machine.host.launch_s
        changes |= {"core_speed": usual / launch, "core_measured": True}
    return dataclasses.replace(machine, **changes)


def product_flops(machine: Machine, dtype: str, side: int) -> float:
    """FLOP/s of a square matmul, as the model has it."""
    flops = 2 * side**3
    row = _kernel("matmul", dtype, flops=flops, rows=side, columns=side, depth=side)
    return flops / float(KernelTimes(row, machine.gpu).arithmetic(machine.efficiency)[0])


def _copy_bytes_per_s(machine: Machine) -> float:
    """Bytes read and written by a copy on the device, as the model has it."""
    row = _kernel("pointwise", "integer", read=_COPY_BYTES, written=_COPY_BYTES)
    seconds = KernelTimes(row, machine.gpu).traffic(machine.efficiency)
    return 2 * _COPY_BYTES / float(seconds[0])


def _kernel(kind: str, dtype: str, **columns: int) -> IntArray:
    values = {"kind": CODES[kind], "dtype": DTYPES.index(dtype), "batches": 1, "launches": 1}
    return np.array([[{**values, **columns}.get(name, 0) for name in COLUMNS]], np.int64)


def _value(figure: Figure | None) -> float | None:
    """A rate that was measured on the GPU itself."""
    measured = figure is not None and figure.basis == "measured" and figure.value > 0
    return figure.value if measured and figure is not None else None
