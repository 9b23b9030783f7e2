"""What a DataLoader that was measured here gives on the cores of another machine.

Its batches cost CPU time here. The same work needs more time on another core by the ratio of their
clocks and of what they do per clock cycle. This core's clock is measured, the other's is said;
the work per clock is known of kinds of CPU, about (:mod:`trainfit.hardware.machine.processor`).
Whatever is assumed widens the range and is said.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from trainfit.hardware.machine import core_speed, processor
from trainfit.hardware.machine.processor import KINDS, CpuKind, find_cpu_kind, read_cpu
from trainfit.hardware.machine.system import System
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.loader import LoaderResult
from trainfit.results.plan import HostCpu
from trainfit.results.text import ghz, percent

#: By what share a clock that the system tells, not measured, may differ from the one at work.
_TOLD_SPREAD: Final = 0.3
#: Of the other machine's RAM, what its workers may hold.
_OF_RAM: Final = 0.5


@dataclasses.dataclass(frozen=True)
class CoreHere:
    """A core of this machine: its clock in Hz (``None``: not known), whether that was measured at
    work or only told by the system, and its kind (``None``: not in the table)."""

    hz: float | None
    is_measured: bool = True
    kind: CpuKind | None = None

    @classmethod
    def measured(cls, system: System | None = None) -> CoreHere:
        """The core of this process: 0.15 s of work
        (:mod:`trainfit.hardware.machine.core_speed`)."""
        system = system or System()
        kind = processor.cpu_kind_here(system)
        hz = core_speed.core_clock_hz()
        if hz is not None:
            return cls(hz, True, kind)
        return cls(max(read_cpu(system).current_hz.value or (), default=None), False, kind)


@dataclasses.dataclass(frozen=True)
class Factor:
    """A ratio, the range that it may lie in, and what it is taken from (empty: nothing assumed)."""

    value: float
    low: float
    high: float
    basis: tuple[str, ...] = ()

    def times(self, other: Factor) -> Factor:
        """The product; errors are taken for independent (their logarithms add in quadrature)."""
        value = self.value * other.value
        low = math.hypot(math.log(self.value / self.low), math.log(other.value / other.low))
        high = math.hypot(math.log(self.high / self.value), math.log(other.high / other.value))
        basis = (*self.basis, *other.basis)
        return Factor(value, value * math.exp(-low), value * math.exp(high), basis)


#: The cores of a loader whose workers all fail.
_MAIN_PROCESS: Final = Factor(1.0, 1.0, 1.0, ("batches can only be loaded in the main process",))


@dataclasses.dataclass(frozen=True)
class OtherInput:
    """Batches a second that another machine's cores give at best, the range that they lie in, what
    that is from, and the number of workers for it."""

    batches_per_s: float
    range: tuple[float, float]
    basis: tuple[str, ...]
    num_workers: int


def other_input(result: LoaderResult, cpu: HostCpu | None, here: CoreHere) -> OtherInput | None:
    """The loader of ``result`` on the cores of ``cpu``, all of them at work.

    ``None`` where there is no ``cpu``, its cores are not said, a batch's CPU time was not measured,
    or this core's clock is not known although it counts.
    """
    seconds = result.probe.fetch_cpu_s
    speed = core_factor(cpu, here) if cpu is not None else None
    if cpu is None or cpu.cores is None or not seconds or speed is None:
        return None
    alone = result.limit == "main_process"
    total = (_MAIN_PROCESS if alone else _cores(cpu)).times(speed)
    rate = total.value / seconds
    return OtherInput(
        rate,
        (total.low / seconds, total.high / seconds),
        total.basis,
        0 if alone else _workers(result, cpu, rate, speed.value),
    )


def is_another(cpu: HostCpu | None) -> bool:
    """Does ``cpu`` say what another machine has (not what was measured of this one)?"""
    return cpu is not None and cpu.cores is not None and cpu.core_speed is None


def settings_there(result: LoaderResult, there: OtherInput) -> LoaderSettings:
    """The recommended settings with the workers for the other machine."""
    count, settings = there.num_workers, result.recommended
    starts_workers = count and not settings.num_workers
    return dataclasses.replace(
        settings,
        num_workers=count,
        persistent_workers=bool(count) and (settings.persistent_workers or bool(starts_workers)),
    )


def core_factor(cpu: HostCpu, here: CoreHere) -> Factor | None:
    """How fast a core of ``cpu`` is, as a multiple of one of this machine; ``None``: cannot tell,
    as this core's clock is not known."""
    if cpu.core_speed is not None:  # this machine's own
        return Factor(1.0, 1.0, 1.0)
    if cpu.core_hz is None and not cpu.kind:
        return Factor(1.0, 1.0, 1.0, ("every core is assumed as fast as this machine's",))
    clock = _clock(cpu, here)
    return clock.times(_per_clock(cpu, here)) if clock is not None else None


def _cores(cpu: HostCpu) -> Factor:
    """Cores with what their second threads add."""
    cores, threads = cpu.cores or 0.0, cpu.second_threads
    if not threads:
        return Factor(cores, cores, cores)
    gain, (low, high) = processor.SIBLING_GAIN, processor.SIBLING_RANGE
    return Factor(
        cores + gain * threads,
        cores + low * threads,
        cores + high * threads,
        (f"a core's second thread adds {percent(gain)} ({percent(low)} to {percent(high)})",),
    )


def _clock(cpu: HostCpu, here: CoreHere) -> Factor | None:
    if cpu.core_hz is None:
        return Factor(
            1.0, 1.0, 1.0, ("the clock is assumed to be this core's, as ghz= is not given",)
        )
    if here.hz is None:
        return None
    spread = core_speed.SPREAD if here.is_measured else _TOLD_SPREAD
    how = "measured by MD5" if here.is_measured else "reported by the system, not measured"
    low, high = cpu.hz_range or (cpu.core_hz, cpu.core_hz)
    basis = (f"this core at {ghz(here.hz)} ({how}, ±{percent(spread)})",)
    factor = Factor(cpu.core_hz, low, high, basis)
    return factor.times(Factor(1 / here.hz, (1 - spread) / here.hz, (1 + spread) / here.hz))


def _per_clock(cpu: HostCpu, here: CoreHere) -> Factor:
    """Work per clock cycle of the other core, as a multiple of this one's."""
    slowest, fastest = (pick(kind.per_clock for kind in KINDS) for pick in (min, max))
    mine = here.kind.per_clock if here.kind is not None else None
    spread = Factor(1.0, 1 / (1 + processor.SPREAD), 1 + processor.SPREAD)
    if not cpu.kind:
        ends = (slowest / mine, fastest / mine) if mine else (slowest / fastest, fastest / slowest)
        range_ = Factor(1.0, *ends)
        named = f" ({here.kind.key})" if here.kind is not None else ""
        text = f"the same work per clock as this core{named}: kind= narrows the range"
        return dataclasses.replace(range_.times(spread), basis=(text,))
    theirs = find_cpu_kind(cpu.kind)
    if mine is None:
        middle = math.sqrt(slowest * fastest)
        ratio = Factor(
            theirs.per_clock / middle, theirs.per_clock / fastest, theirs.per_clock / slowest
        )
        text = (
            f"{theirs.key} compared with a core of unknown kind (between the slowest and the "
            "fastest)"
        )
        return dataclasses.replace(ratio.times(spread), basis=(text,))
    value = theirs.per_clock / mine
    assert here.kind is not None
    text = (
        f"work per clock {theirs.key} {theirs.per_clock:.2g}, here {here.kind.key} {mine:.2g} "
        f"(Skylake 1; ±{percent(processor.SPREAD)})"
    )
    return dataclasses.replace(Factor(value, value, value).times(spread), basis=(text,))


def _workers(result: LoaderResult, cpu: HostCpu, rate: float, speed: float) -> int:
    """The fewest that give as many as the GPU uses; at most one for each hardware thread."""
    probe = result.probe
    assert probe.fetch_cpu_s is not None and cpu.cores is not None
    waits = max(0.0, (probe.fetch_s or 0.0) - probe.fetch_cpu_s)
    wanted = min(rate, 1 / result.step_s) if result.step_s > 0 else rate
    needed = math.ceil(wanted * (probe.fetch_cpu_s / speed + waits) - 1e-9)
    maximum = round(cpu.cores + cpu.second_threads)
    if needed > cpu.cores:  # with the second threads each worker is slower
        needed = maximum
    if cpu.ram_bytes and probe.worker_private_bytes:
        maximum = min(maximum, int(_OF_RAM * cpu.ram_bytes / probe.worker_private_bytes))
    return max(1, min(needed, maximum))
