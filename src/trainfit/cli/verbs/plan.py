"""``trainfit plan``: from a training command to a batch size that fits, and a loader for it."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from trainfit.cli.common import (
    UsageError,
    add_device_memory,
    add_gpu,
    add_protection,
    add_simulation,
    chosen_device,
    read_command,
    sandbox_request,
    seconds,
    share,
    split_command,
)
from trainfit.cli.noise_input import noise_scale, read_noise
from trainfit.cli.output import given_output, name_report
from trainfit.cli.processor import processor, rented_cpu
from trainfit.cli.progress_bar import shown_progress
from trainfit.cli.screen import add_explain, print_plan
from trainfit.cli.verbs.loader import given_step, step_time
from trainfit.hardware.gpu.rented import find_rented
from trainfit.plan.pipeline import LoaderTuning, RealRuns, plan
from trainfit.plan.planner import Settings
from trainfit.plan.remedies.catalogue import NAMES
from trainfit.results.plan.result import HostCpu, PlanResult

PARSER: dict[str, Any] = {
    "help": "predict the GPU memory of a training command, its best batch size and launch command",
    "description": "Simulate a training command on a GPU and plan its batch size. "
    "Write tunables into the command with their current values.",
    "epilog": "example: trainfit plan --gpu 'RTX 4090' -- "
    "python train.py --batch_size={batch_size:8} --amp={amp:true} --workers={num_workers:4}; "
    "{grad_accum:4} is gradient accumulation, which changes with the batch size to keep the "
    "effective batch size",
    "usage": "trainfit plan [options] -- COMMAND",
}

_WITH_VALUE = (
    *("--gpu", "--profile", "--other-processes", "--headroom"),
    *("--steps", "--time-limit", "--output", "--step-time", "--probe-time", "--cpu"),
    *("--noise-scale", "--keep-writes"),
)

_UNSAID = HostCpu(None, None)
#: Seconds of probing the DataLoader.
_PROBE_S = 20.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_gpu(parser)
    add_device_memory(parser)
    parser.add_argument(
        "--headroom",
        type=share,
        metavar="SHARE",
        help="share of the GPU's memory to leave free, as 0.1 or 10%% (default: up to the "
        "upper bound of the prediction interval)",
    )
    parser.add_argument(
        "--noise-scale",
        type=noise_scale,
        metavar="SAMPLES",
        help="gradient noise scale, if you know it, or the file of trainfit.batch.NoiseScale.save: "
        "a batch much larger than it needs more samples for the same loss, so a smaller one is "
        "recommended",
    )
    add_simulation(parser)
    add_protection(parser)
    add_explain(parser)
    parser.add_argument("--output", metavar="FILE", help="also write the result to FILE")
    parser.add_argument(
        "--cpu",
        type=processor,
        default=_UNSAID,
        metavar="cores=N,ghz=X,kind=NAME",
        help="CPU of the machine with the GPU, which launches kernels and runs the DataLoader; "
        "vcpus=N instead of cores=N where two vCPUs are one core; kind is 'ice lake', "
        "'milan', '12th gen', …; "
        "'here': this machine's, measured (default: the rented machine's of --gpu, else an assumed "
        "CPU of 3 GHz)",
    )
    parser.add_argument(
        "--versus-cpu",
        action="store_true",
        help="also run the command for a few steps on this machine's CPU and say whether a GPU is "
        "worth it",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--remedies",
        nargs="?",
        const="all",
        metavar="NAME,…",
        help=f"try remedies that lower the memory even if the job fits: all, or those in "
        f"--remedies=A,B ({', '.join(NAMES)})",
    )
    choice.add_argument(
        "--no-remedies", action="store_true", help="try no remedies even if the job does not fit"
    )
    _add_loader(parser)


def _add_loader(parser: argparse.ArgumentParser) -> None:
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--loader",
        action="store_true",
        help="tune the DataLoader even if the script does not train (default: tuned if a training "
        "step reads batches from it; needs half a minute)",
    )
    choice.add_argument(
        "--no-loader", action="store_true", help="do not measure and tune the DataLoader"
    )
    parser.add_argument(
        "--step-time",
        type=step_time,
        metavar="S",
        help="time of one training step on the GPU, such as 0.04 or 40ms (default: the lower "
        "bound of the prediction)",
    )
    parser.add_argument(
        "--probe-time",
        type=seconds,
        metavar="S",
        help="seconds to measure the DataLoader, without the runs that confirm it (default 20)",
    )


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own options, and the training command."""
    return split_command(words, _WITH_VALUE)


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Plan and print; returns the exit code."""
    settings, real = _settings(options), _real_runs(options)
    parsed = dataclasses.replace(read_command(command), sandbox=sandbox_request(options))
    device = chosen_device(options, {**os.environ, **parsed.environment()})
    settings = dataclasses.replace(settings, rates=device.rates)
    output = given_output(options.output)

    def keep(result: PlanResult) -> None:
        if output is not None:
            result.save(output)

    with shown_progress() as progress:
        planned = plan(parsed, device.gpu, settings, real, progress, device.constants, keep)
    keep(planned.result)
    print_plan(planned.result, options)
    name_report(output, json=options.json)
    if planned.interrupt is not None:
        raise planned.interrupt
    return 0 if planned.result.fits else 1


def _settings(options: argparse.Namespace) -> Settings:
    rented = find_rented(options.gpu) if options.gpu is not None else None
    cpu: HostCpu | None = options.cpu
    if cpu is _UNSAID:
        cpu = rented_cpu(rented) if rented is not None else None
    return Settings(
        options.headroom,
        options.steps,
        options.time_limit,
        _remedies(options),
        cpu,
        noise_scale=_noise_scale(options),
        rented=_rented(options),
    )


def _noise_scale(options: argparse.Namespace) -> float | None:
    """Where the data set no upper bound, the lower one: never a batch larger than they support."""
    noise, _, _ = read_noise(options.noise_scale)
    return None if noise is None else noise.value or noise.low


def _real_runs(options: argparse.Namespace) -> RealRuns:
    for name in ("step_time", "probe_time"):
        if getattr(options, name) is not None and options.no_loader:
            raise UsageError(
                f"--{name.replace('_', '-')} applies to tuning the DataLoader: remove --no-loader"
            )
    probe_s = _PROBE_S if options.probe_time is None else options.probe_time
    tuning = LoaderTuning(options.loader, given_step(options.step_time), probe_s)
    return RealRuns(
        None if options.no_loader else tuning, options.versus_cpu, measures_cpu=options.cpu is None
    )


def _rented(options: argparse.Namespace) -> str:
    """Which machine ``--gpu`` names, in words; empty where it names a GPU."""
    found = find_rented(options.gpu) if options.gpu is not None else None
    if found is None:
        return ""
    return found.words + ("" if options.cpu is _UNSAID else "; --cpu gives the processor")


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
        raise UsageError(f"--remedies: unknown remedy {unknown[0]!r}; known: {', '.join(NAMES)}")
    return tuple(dict.fromkeys(names))
