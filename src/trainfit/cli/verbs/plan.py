"""``trainfit plan``: from a training command to a batch size that fits, and a loader for it."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence

from trainfit.cli.automation import check_format, formatted, gated
from trainfit.cli.common import (
    UsageError,
    sandbox_request,
)
from trainfit.cli.job import chosen_device, read_command
from trainfit.cli.output import given_output, name_report, print_plan
from trainfit.cli.parser import meant, nearest
from trainfit.cli.plan_options import UNSAID
from trainfit.cli.progress_bar import shown_progress
from trainfit.cli.values import read_noise, rented_cpu
from trainfit.cli.verbs.loader import given_step
from trainfit.hardware.gpu_lookup import find_rented
from trainfit.plan.calibration import of_this_model
from trainfit.plan.changes.catalogue import NAMES
from trainfit.plan.command.tunables import tunable_named
from trainfit.plan.dataloader.section import plan_tuning
from trainfit.plan.first_run import Settings
from trainfit.plan.planner import RealRuns, plan
from trainfit.report.sections.plan_facts import ends_early
from trainfit.results.plan import HostCpu, PlanResult


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Plan and print; returns the exit code."""
    check_format(options)
    settings, real = _settings(options), _real_runs(options)
    parsed = dataclasses.replace(
        read_command(command, several=True, also=settings.solve),
        sandbox=sandbox_request(options),
        stand_ins=options.assume_installed,
    )
    environment = {**os.environ, **parsed.environment()}
    device = chosen_device(options, environment, parsed.processes, parsed.machines)
    parsed = parsed.on(device.gpu.count)
    rates = None if device.rates is None else of_this_model(device.rates, device.gpu)
    settings = dataclasses.replace(settings, rates=rates)
    output = given_output(options.output)

    def keep(result: PlanResult) -> None:
        if output is not None:
            result.save(output)

    with shown_progress() as progress:
        planned = plan(parsed, device.gpu, settings, real, progress, device.constants, keep)
    keep(planned.result)
    script = formatted(planned.result, options)
    if script is not None:
        print(script, flush=True)
    else:
        print_plan(planned.result, options)
    name_report(output, json=options.json)
    if planned.interrupt is not None:
        raise planned.interrupt
    succeeds = planned.result.fits and not ends_early(planned.result)
    return gated(options, planned.result, 0 if succeeds else 1)


def _settings(options: argparse.Namespace) -> Settings:
    rented = find_rented(options.gpu) if options.gpu is not None else None
    cpu: HostCpu | None = options.cpu
    if cpu is UNSAID:
        cpu = rented_cpu(rented) if rented is not None else None
    return Settings(
        options.headroom,
        options.steps,
        options.time_limit,
        _remedies(options),
        cpu,
        noise_scale=_noise_scale(options),
        rented=_rented(options),
        thorough=options.thorough,
        solve="" if options.solve is None else tunable_named(options.solve),
    )


def _noise_scale(options: argparse.Namespace) -> float | None:
    """The noise scale; where the data set no upper bound, the lower one: never a batch larger than
    they support."""
    noise, _, _ = read_noise(options.noise_scale)
    return None if noise is None else noise.value or noise.low


def _real_runs(options: argparse.Namespace) -> RealRuns:
    for name in ("step_time", "probe_time"):
        if getattr(options, name) is not None and options.no_loader:
            raise UsageError(
                f"--{name.replace('_', '-')} applies to tuning the DataLoader: remove --no-loader"
            )
    tuning = plan_tuning(
        thorough=options.thorough,
        step=given_step(options.step_time),
        seconds=options.probe_time,
    )
    return RealRuns(
        None if options.no_loader else tuning,
        options.loader,
        options.versus_cpu,
        measures_cpu=options.cpu is None,
    )


def _rented(options: argparse.Namespace) -> str:
    """The machine that ``--gpu`` names, in words; empty where it names a GPU."""
    machine = find_rented(options.gpu) if options.gpu is not None else None
    if machine is None:
        return ""
    return machine.words + ("" if options.cpu is UNSAID else "; --cpu gives the processor")


def _remedies(options: argparse.Namespace) -> tuple[str, ...] | None:
    """The remedies to try; ``None``: all where the job does not fit."""
    if options.no_remedies:
        return ()
    if options.remedies is None:
        return None
    if options.remedies == "all":
        return NAMES
    names = [name.strip() for name in options.remedies.split(",")]
    if unknown := [name for name in names if name not in NAMES]:
        asked = meant(nearest(unknown[0], NAMES))
        raise UsageError(
            f"--remedies: unknown remedy {unknown[0]!r}{asked}; trainfit plan --help lists them"
        )
    return tuple(dict.fromkeys(names))
