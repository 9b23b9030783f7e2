"""Options of ``trainfit plan``."""

from __future__ import annotations

import argparse
from typing import Final

from trainfit.cli.automation import add_fail_if, add_format
from trainfit.cli.common import (
    OptionGroup,
    VerbOptions,
    add_device_memory,
    add_explain,
    add_gpu,
    add_protection,
    add_result,
    add_simulation,
    seconds,
    share,
    split_command,
)
from trainfit.cli.options.loader import step_time
from trainfit.cli.values import noise_scale, processor
from trainfit.plan.changes.catalogue import NAMES

#: Of `--cpu` where it is not given; ``None`` stands for this machine's.
UNSAID: Final = object()


def _plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit plan``."""
    hardware = parser.add_argument_group("hardware")
    add_gpu(hardware)
    add_device_memory(hardware)
    hardware.add_argument(
        "--cpu",
        type=processor,
        default=UNSAID,
        metavar="cores=N,ghz=X,kind=NAME",
        help="CPU of the machine with the GPU, which launches kernels and runs the DataLoader; "
        "vcpus=N instead of cores=N where two vCPUs are one core; kind is 'ice lake', "
        "'milan', '12th gen', …; "
        "'here': this machine's, measured (default: the rented machine's of --gpu, else an assumed "
        "CPU of 3 GHz)",
    )
    hardware.add_argument(
        "--headroom",
        type=share,
        metavar="SHARE",
        help="share of the GPU's memory to leave free, as 0.1 or 10%% (default: up to the "
        "upper bound of the prediction interval)",
    )
    simulation = parser.add_argument_group("simulation")
    simulation.add_argument(
        "--noise-scale",
        type=noise_scale,
        metavar="SAMPLES",
        help="gradient noise scale, if you know it, or the file of trainfit.batch.NoiseScale.save: "
        "a batch much larger than it needs more samples for the same loss, so a smaller one is "
        "recommended",
    )
    simulation.add_argument(
        "--solve",
        metavar="NAME",
        help="find the largest value of this tunable that fits at the current batch size: seq_len, "
        "max_new_tokens, or an integer option of the script, as image-size",
    )
    add_simulation(simulation)
    simulation.add_argument(
        "--thorough",
        action="store_true",
        help="also simulate and measure what does not change the recommendation: the largest batch "
        "size where batch sizes are simulated one by one, more runs of the DataLoader",
    )
    simulation.add_argument(
        "--versus-cpu",
        action="store_true",
        help="also run the command for a few steps on this machine's CPU and say whether a GPU is "
        "worth it",
    )
    choice = simulation.add_mutually_exclusive_group()
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
    _add_loader(parser.add_argument_group("DataLoader"))
    add_protection(parser)
    result = parser.add_argument_group("result")
    add_result(result)
    add_fail_if(result, "plan:PlanResult")
    add_format(result)
    add_explain(result)


def _add_loader(group: OptionGroup) -> None:
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--loader",
        action="store_true",
        help="tune the DataLoader even if the script does not train (default: tuned if a training "
        "step reads batches from it; needs half a minute)",
    )
    choice.add_argument(
        "--no-loader", action="store_true", help="do not measure and tune the DataLoader"
    )
    group.add_argument(
        "--step-time",
        type=step_time,
        metavar="S",
        help="time of one training step on the GPU, such as 0.04 or 40ms (default: the lower "
        "bound of the prediction)",
    )
    group.add_argument(
        "--probe-time",
        type=seconds,
        metavar="S",
        help="seconds to measure the DataLoader, without the runs that confirm it (default 12; "
        "20 with --thorough)",
    )


PLAN: Final = VerbOptions(
    configure=_plan,
    split=split_command,
    description="Simulate a training command on a GPU and plan its batch size. "
    "Write tunables into the command with their current values.",
    epilog="example: trainfit plan --gpu 'RTX 4090' -- "
    "python train.py --batch_size={batch_size:8} --amp={amp:true} --workers={num_workers:4}; "
    "{grad_accum:4} is gradient accumulation, which changes with the batch size to keep the "
    "effective batch size",
    usage="trainfit plan [options] -- COMMAND",
)
