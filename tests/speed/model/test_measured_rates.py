"""The speed model's constants from a calibration profile."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_cli import ROOT
from trainfit.hardware import find_gpu
from trainfit.plan.sizing.costing import constants_of, machine_of
from trainfit.results.gpus import (
    OF_DATA,
    Basis,
    GpuFigure,
    Kernel,
    MeasuredProgram,
    Profile,
    Rates,
    Unit,
)
from trainfit.results.plan import HostCpu
from trainfit.results.runs.steps import DTYPES
from trainfit.simgpu import Simulation
from trainfit.speed.calibration import measure_programs
from trainfit.speed.kernel_times import KernelTimes
from trainfit.speed.measured import modelled_as, with_rates, work_of
from trainfit.speed.spread import CLASSES, spread_of
from trainfit.speed.step import HostedGpu, TimedWork
from trainfit.speed.work import CODES, COLUMNS

USUAL = machine_of(find_gpu("RTX 4090"))


def figure(value: float, unit: Unit, basis: Basis = "measured") -> GpuFigure:
    return GpuFigure(value, value, value, unit, basis, "five trials")


def rates(**values: float) -> Rates:
    """Matrix products by dtype; copies; launches."""
    units: dict[str, Unit] = {"memory_bandwidth": "B/s", "launch": "s"}
    units |= {"host_to_device_pinned": "B/s", "host_to_device_pageable": "B/s"}
    return Rates(
        matmul={n: figure(v, "FLOP/s") for n, v in values.items() if n in DTYPES},
        **{n: figure(v, units[n]) for n, v in values.items() if n in units},  # type: ignore[arg-type]
    )


def seconds(machine: HostedGpu, kind: str, dtype: str = "integer", **columns: int) -> float:
    """One kernel."""
    values = {"kind": CODES[kind], "dtype": DTYPES.index(dtype), "batches": 1, "launches": 1}
    table = np.array([[{**values, **columns}.get(name, 0) for name in COLUMNS]], np.int64)
    return float(KernelTimes(table, machine.gpu).seconds(machine.efficiency)[0])


def product(machine: HostedGpu, dtype: str, side: int = 8192) -> float:
    """FLOP/s of a square one."""
    flops = 2 * side**3
    sides = {"rows": side, "columns": side, "depth": side}
    return flops / seconds(machine, "matmul", dtype, flops=flops, **sides)


@given(share=st.floats(0.2, 1.5), gpu=st.sampled_from(("RTX 4090", "A40", "H100 PCIe")))
def test_a_product_takes_what_was_measured(share: float, gpu: str) -> None:
    """Also where the model has Tensor cores that are not fed, or too little power."""
    usual = machine_of(find_gpu(gpu))
    measured = {name: share * product(usual, name) for name in ("float16", "bfloat16")}
    machine = with_rates(usual, rates(**measured), "p.json")
    for name, rate in measured.items():
        assert product(machine, name) == pytest.approx(rate, rel=0.01)
    # What the profile does not have is as before.
    assert product(machine, "tfloat32") == product(usual, "tfloat32")
    assert machine.rated == usual.gpu and usual.rated == usual.gpu


def test_float32_is_what_shader_cores_do() -> None:
    machine = with_rates(USUAL, rates(float32=0.5 * product(USUAL, "float32", 4096)), "p.json")
    assert product(machine, "float32", 4096) == pytest.approx(
        0.5 * product(USUAL, "float32", 4096), rel=0.01
    )


def test_copies_take_what_was_measured() -> None:
    machine = with_rates(
        USUAL,
        rates(memory_bandwidth=4e11, host_to_device_pinned=11e9, host_to_device_pageable=3e9),
        "p.json",
    )
    size = 256 << 20
    took = seconds(machine, "pointwise", read=size, written=size)
    assert 2 * size / took == pytest.approx(4e11, rel=0.01)
    # Of a copy that takes hardly longer than its launch, too.
    fast = with_rates(machine_of(find_gpu("H200")), rates(memory_bandwidth=4.1e12), "p.json")
    took = seconds(fast, "pointwise", read=size, written=size)
    assert 2 * size / took == pytest.approx(4.1e12, rel=0.001)
    assert (machine.pinned_bytes_per_s, machine.pageable_bytes_per_s) == (11e9, 3e9)


def test_a_copy_from_pages_that_hold_nothing_bounds_the_rate() -> None:
    """Earlier profiles read pages that were never written: no batch comes faster."""
    usual = USUAL.pageable_bytes_per_s
    read = GpuFigure(9e9, 9e9, 9e9, "B/s", "measured", OF_DATA)
    with_data = with_rates(USUAL, Rates(host_to_device_pageable=read), "p.json")
    assert with_data.pageable_bytes_per_s == 9e9
    for value, expected in ((9e9, usual), (3e9, 3e9)):
        empty = with_rates(USUAL, rates(host_to_device_pageable=value), "p.json")
        assert empty.pageable_bytes_per_s == expected


def test_the_core_is_as_fast_as_its_launches() -> None:
    usual = USUAL.host.bare_s + USUAL.host.launch_s
    slow = with_rates(USUAL, rates(launch=2 * usual), "p.json")
    assert slow.core_speed == pytest.approx(0.5) and slow.core_measured
    # Where the GPU may have been the limit, nothing is learnt of the core.
    fast = with_rates(USUAL, rates(launch=USUAL.efficiency.least_s), "p.json")
    assert fast.core_speed == 1.0 and not fast.core_measured


def test_only_what_was_measured_on_the_gpu_counts() -> None:
    rehearsed = Rates(
        matmul={"float16": figure(1e9, "FLOP/s", "simulated")},
        memory_bandwidth=figure(1e6, "B/s", "simulated"),
    )
    machine = with_rates(USUAL, rehearsed, "p.json")
    assert dataclasses.replace(machine, datasheet=None, profile="") == USUAL


def test_the_result_says_where_the_constants_are_from() -> None:
    gpu = USUAL.gpu
    found = machine_of(gpu, None, rates(host_to_device_pinned=25e9), "mine.json")
    assert "rates as measured (profile mine.json)" in constants_of(found)
    assert constants_of(found).endswith("copies over PCIe at 25 GB/s")
    assert constants_of(USUAL).endswith("copies over PCIe at 20 GB/s (assumed)")
    assert "profile" not in constants_of(USUAL)


def test_what_the_user_says_of_the_processor_goes_before_the_profile() -> None:
    measured = rates(launch=4 * (USUAL.host.bare_s + USUAL.host.launch_s))
    assert machine_of(USUAL.gpu, None, measured, "p").core_speed == pytest.approx(0.25)
    told = machine_of(USUAL.gpu, HostCpu(None, 6e9), measured, "p")
    assert told.core_speed == 2.0 and not told.core_measured
    assert machine_of(USUAL.gpu, HostCpu(None, None, 0.7), measured, "p").core_speed == 0.7
    cores_only = machine_of(USUAL.gpu, HostCpu(8.0, None), measured, "p")
    assert cores_only.core_speed == pytest.approx(0.25)
    custom = find_gpu("custom:24GiB")
    assert machine_of(custom, None, measured, "p") == machine_of(custom)


# -- programs of each class of kernels ----------------------------------------------------------


def matmul(side: int) -> Kernel:
    sides = {"rows": side, "columns": side, "depth": side}
    return Kernel("matmul", "float16", flops=2 * side**3, **sides)


ADDITION = Kernel("pointwise", "float16", read_bytes=1 << 27, written_bytes=1 << 26)
SLOWER = {"large matmuls": 1.5, "small matmuls": 0.8, "memory-bound kernels": 1.2}


def programs(*noise: float) -> tuple[MeasuredProgram, ...]:
    """Of three classes: what the model says, so many times slower, with ``noise`` (factors)."""
    kernels = {"large matmuls": matmul(4096), "small matmuls": matmul(512)}
    kernels["memory-bound kernels"] = ADDITION
    found = []
    for name, factor in SLOWER.items():
        modelled = modelled_as((kernels[name],), USUAL)
        assert modelled is not None and modelled.group == name
        found += [
            MeasuredProgram(name, figure(modelled.seconds * factor * each, "s"), (kernels[name],))
            for each in noise or (1.0,)
        ]
    return tuple(found)


def test_each_class_takes_what_its_programs_took() -> None:
    machine = with_rates(USUAL, Rates(programs=programs(1.0, 1.0)), "p.json")
    assert {name: cost.factor for name, cost in machine.classes.items()} == pytest.approx(SLOWER)
    (alone,) = with_rates(USUAL, Rates(programs=programs()[:1]), "p.json").classes.values()
    assert alone.factor == pytest.approx(1.5**0.5)
    sort = Kernel("sorting", "float32", read_bytes=1 << 26)
    in_float32 = dataclasses.replace(matmul(4096), dtype="float32")
    work = work_of(matmul(8192), matmul(256), ADDITION, sort, in_float32)
    before, after = (TimedWork(work, each).seconds for each in (USUAL, machine))
    # A class without a program stays as it was, and other kernels than those in half precision.
    assert (after / before).tolist() == pytest.approx([1.5, 0.8, 1.2, 1.0, 1.0])


def test_programs_far_apart_leave_a_wide_class() -> None:
    alike = with_rates(USUAL, Rates(programs=programs(0.99, 1.0, 1.01)), "p.json")
    apart = with_rates(USUAL, Rates(programs=programs(0.5, 1.0, 2.0)), "p.json")
    assert {cost.spread for cost in alike.classes.values()} == {0.04}
    assert all(cost.spread is not None and cost.spread > 0.5 for cost in apart.classes.values())
    # Programs that say the opposite of each other correct nothing.
    # None of them is the nearer for what the others say: the class stays as it was.
    assert {cost.factor for cost in apart.classes.values()} == {1.0}
    work = work_of(matmul(8192))
    seconds = TimedWork(work, USUAL).seconds
    widths = []
    for classes in (apart.classes, {}, alike.classes):
        spread = spread_of(
            work,
            seconds,
            float(seconds.sum()),
            core_measured=False,
            calibrated=True,
            measured=classes,
        )
        widths.append(spread.high / spread.low)
    assert widths == sorted(widths, reverse=True) and widths[0] > widths[1] > widths[2]


def test_a_disturbed_program_says_nothing() -> None:
    kernel = matmul(4096)
    modelled = modelled_as((kernel,), USUAL)
    assert modelled is not None
    disturbed = MeasuredProgram("large", figure(20 * modelled.seconds, "s"), (kernel,))
    simulated = MeasuredProgram("large", figure(modelled.seconds, "s", "simulated"), (kernel,))
    later = MeasuredProgram(
        "large", figure(modelled.seconds, "s"), (Kernel("of a later version", "float16"),)
    )
    empty = MeasuredProgram("large", figure(modelled.seconds, "s"))
    for program in (disturbed, simulated, later, empty):
        assert with_rates(USUAL, Rates(programs=(program,)), "p.json").classes == {}


@pytest.mark.parametrize("gpu", ["GTX 1080 Ti", "T4", "A100 80GB SXM"])
def test_programs_are_of_every_class_that_one_gpu_has(gpu: str) -> None:
    """Their kernels are those that the simulated device launches."""
    with Simulation(gpu):
        readings = measure_programs()
    assert readings.failed == {}
    assert list(readings.trials) == list(readings.kernels)
    machine = machine_of(find_gpu(gpu))
    found = [modelled_as(kernels, machine) for kernels in readings.kernels.values()]
    classes = {each.group for each in found if each is not None}
    unmeasured = {"operators without a FLOP rule", "launches by the CPU", "copies from the host"}
    assert classes == set(CLASSES) - unmeasured - {"collectives"}
    # By their names a profile's programs are simulated again.
    profile = Profile.load(ROOT / "bench" / "gpu" / "h200-profile.json")
    assert {each.name for each in profile.rates.programs} == set(readings.kernels)
