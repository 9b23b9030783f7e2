"""``trainfit plan``: from a training command to its launch line, step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from trainfit.hardware import GpuSpec
from trainfit.plan.command.parsing import Command
from trainfit.plan.dataloader.measurement import tune_command
from trainfit.plan.dataloader.other_cpu import CoreHere
from trainfit.plan.dataloader.section import (
    is_tuned,
    predicted_step,
    timed_samples,
    tuned_command,
    with_loader_options,
    with_loading,
    with_sample_cost,
)
from trainfit.plan.launch import with_launch
from trainfit.plan.planner import Settings, simulated
from trainfit.plan.runs.processes import WarmProcesses
from trainfit.plan.this_cpu import measured_cpu, with_cpu
from trainfit.results.gpus import DeviceConstants
from trainfit.results.loader import LoaderResult
from trainfit.results.plan import HostCpu, PlanResult, with_run_rate
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.spec import LoaderSpec, RunSpec, TuningSpec

Say = Callable[[str], None]

#: Seconds of a probe, and real runs that confirm it; in a thorough plan.
_PROBE_S, _CONFIRM = 12.0, 2
_THOROUGH_S, _THOROUGH_CONFIRM = 20.0, 4
#: How often the probe's time all of the DataLoader's measuring may take at most.
_MEASURING: Final = 10


def plan_tuning(
    *, thorough: bool, step: Consumer | None = None, seconds: float | None = None
) -> TuningSpec:
    """How a plan tunes the DataLoader: in less time than ``trainfit loader`` takes, unless it is
    ``thorough`` or its probe gets ``seconds``."""
    usual = _THOROUGH_S if thorough else _PROBE_S
    confirm = _THOROUGH_CONFIRM if thorough else _CONFIRM
    return TuningSpec(step, step is None, seconds or usual, confirm, thorough)


_USUAL: Final = plan_tuning(thorough=False)


@dataclasses.dataclass(frozen=True)
class RealRuns:
    """What is to be run on this machine for a plan, in addition to simulated runs.

    ``loader`` is how the DataLoader is tuned (``None``: it is left out), ``asks_loader``: also
    where the script does not train. ``versus_cpu``: also a few steps on the CPU.
    ``measures_cpu``: the processor next to the GPU is this machine's, whose speed is measured.
    """

    loader: TuningSpec | None = _USUAL
    asks_loader: bool = False
    versus_cpu: bool = False
    measures_cpu: bool = False


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan, and the user's interrupt that ended it early, if one did."""

    result: PlanResult
    interrupt: KeyboardInterrupt | None = None


def plan(
    command: Command,
    gpu: GpuSpec,
    settings: Settings,
    real: RealRuns,
    progress: Say = lambda text: None,
    constants: DeviceConstants | None = None,
    keep: Callable[[PlanResult], None] = lambda result: None,
) -> Planned:
    """Plan ``command`` for ``gpu``; what was found before the user's interrupt is a plan, too.

    ``constants`` are what the process takes in addition to PyTorch's memory (the catalogue's).
    ``keep`` is given the plan of the simulated runs before the script runs for real: whatever
    that does to the machine, these need not be repeated.

    Raises :class:`~trainfit.plan.runs.failures.ScriptError` where the script gives nothing to
    plan with, :class:`~trainfit.plan.command.parsing.CommandError` where its placeholder for the
    batch size has no effect, ``KeyboardInterrupt`` where nothing was known by then.
    """
    with WarmProcesses() as warm:
        return _planned(command, gpu, settings, real, progress, constants, keep, warm)


def _planned(
    command: Command,
    gpu: GpuSpec,
    settings: Settings,
    real: RealRuns,
    progress: Say,
    constants: DeviceConstants | None,
    keep: Callable[[PlanResult], None],
    warm: WarmProcesses,
) -> Planned:
    if real.measures_cpu:
        progress("measuring how fast a core of this machine dispatches operators")
        settings = dataclasses.replace(settings, cpu=measured_cpu(command))
    found = simulated(command, gpu, settings, progress, constants, warm)
    result, options, interrupt = found.result, found.options, found.interrupt
    launched, tuning = options.proven_command, real.loader
    if tuning is not None and not is_tuned(result, command, asked=real.asks_loader):
        tuning = None
    if interrupt is None and (real.versus_cpu or tuning is not None):
        keep(with_run_rate(with_launch(result, launched)))
        try:
            if real.versus_cpu:
                result = with_cpu(result, command, settings.time_limit_s, progress)
            if tuning is not None:
                progress("tuning the DataLoader (--no-loader leaves it out)")
                result, interrupt = _with_loading(result, launched, gpu, settings, tuning, progress)
            if tuning is not None and interrupt is None:
                launched = with_loader_options(result, options, gpu, settings.time_limit_s, warm)
        except KeyboardInterrupt as error:
            interrupt = error
        result = dataclasses.replace(result, interrupted=interrupt is not None)
    return Planned(with_run_rate(with_launch(result, launched)), interrupt)


def _with_loading(
    result: PlanResult,
    command: Command,
    gpu: GpuSpec,
    settings: Settings,
    tuning: TuningSpec,
    progress: Say,
) -> tuple[PlanResult, KeyboardInterrupt | None]:
    """The plan with what real runs of the DataLoader showed, those before the user's interrupt if
    one ended them."""

    def spec() -> RunSpec:
        found = dataclasses.replace(tuning, step=tuning.step or predicted_step(result))
        # The script's way to its first step may take as long as any simulated run.
        probe_s = _THOROUGH_S if tuning.seconds == _PROBE_S else tuning.seconds
        limit_s = settings.time_limit_s + _MEASURING * probe_s
        loading = LoaderSpec(found, script_limit_s=settings.time_limit_s)
        return RunSpec(gpu=gpu, time_limit_s=limit_s, loading=loading)

    result = with_sample_cost(
        result,
        lambda batch: tuned_command(result, command, batch),
        lambda filled: timed_samples(filled, spec(), progress),
    )

    interrupts: list[KeyboardInterrupt] = []

    def tune(filled: Command) -> LoaderResult:
        tuned = tune_command(filled, spec(), progress)
        if tuned.interrupt is not None:
            interrupts.append(tuned.interrupt)
        return tuned.result

    here = _core_here(result.cpu)
    result = with_loading(result, command, tune, step_is_bound=tuning.step is None, here=here)
    return result, next(iter(interrupts), None)


def _core_here(cpu: HostCpu | None) -> CoreHere | None:
    """A core of this machine, measured where it is to be compared with another's."""
    if cpu is None or cpu.core_speed is not None:
        return None
    return CoreHere.measured() if cpu.core_hz is not None or cpu.kind else None
