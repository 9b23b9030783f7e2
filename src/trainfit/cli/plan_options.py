"""Options of ``trainfit plan``.

Options of ``trainfit loader`` and ``trainfit rehearse``.
"""

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
    duration,
    file_path,
    seconds,
    share,
    split_command,
    whole_number,
)
from trainfit.cli.values import noise_scale, processor
from trainfit.plan.changes.catalogue import NAMES

# ---
# trainfit loader


#: Most real runs of the loader to confirm predictions with.
_CONFIRM = 4
#: Each real run has a copy of the DataLoader for every other process; no machine has more GPUs.
_MOST_RANKS = 64


def _loader(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit loader``."""
    add_step(parser.add_argument_group("training step"))
    measurement = parser.add_argument_group("measurement")
    measurement.add_argument(
        "--probe-time",
        type=seconds,
        default=20.0,
        metavar="S",
        help="seconds spent on measuring the cost of a batch (default 20)",
    )
    measurement.add_argument(
        "--confirm",
        type=_confirm,
        default=_CONFIRM,
        metavar="N",
        help="number of real runs of the best settings, 0 to 4 (default 4)",
    )
    measurement.add_argument(
        "--max-workers", type=whole_number, metavar="N", help="recommend no more than N workers"
    )
    measurement.add_argument(
        "--any-order",
        action="store_true",
        help="allow batches to arrive out of the sampler's order (in_order=False)",
    )
    add_ranks(measurement)
    measurement.add_argument(
        "--time-limit",
        type=seconds,
        default=600.0,
        metavar="S",
        help="time limit of the whole command in seconds; when it is reached after the probe, the "
        "results so far are shown (default 600)",
    )
    add_source(parser)
    add_protection(parser)
    result = parser.add_argument_group("result")
    add_result(result)
    add_fail_if(result, "loader:LoaderResult")
    add_explain(result, "what a batch costs, the machine, all settings, threads, notes")


def add_step(group: OptionGroup) -> None:
    """Add the options for the time of a GPU step."""
    group.add_argument(
        "--step-time",
        type=step_time,
        metavar="S",
        help="time of a training step without the DataLoader, 0.04 or 40ms (default: the lower "
        "bound of the prediction for --gpu; 0 without --gpu)",
    )
    group.add_argument(
        "--gpu",
        metavar="NAME",
        help='GPU to simulate the script on ("RTX 4090"); without --step-time, the lower bound of '
        "its predicted step time is used",
    )


def add_ranks(group: OptionGroup) -> None:
    """Add the option for other training processes on the machine."""
    group.add_argument(
        "--ranks",
        type=_ranks,
        default=1,
        metavar="N",
        help="training processes on this machine, each with its own DataLoader (default 1)",
    )


def _ranks(text: str) -> int:
    """An argparse type: a number of processes, of which each GPU of a machine has one."""
    number = whole_number(text)
    if number > _MOST_RANKS:
        raise argparse.ArgumentTypeError(
            f"expected up to {_MOST_RANKS} processes on this machine, got {text!r}"
        )
    return number


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a DataLoader."""
    group = parser.add_argument_group("DataLoader instead of a command")
    group.add_argument(
        "--loader",
        metavar="MODULE:CALLABLE",
        help="instead of a command: a callable without arguments that returns a DataLoader or a "
        "data set; also path/to/file.py:CALLABLE",
    )
    group.add_argument(
        "--batch-size",
        type=whole_number,
        metavar="N",
        help="batch size, if --loader returns a data set",
    )


def step_time(text: str) -> float:
    """An argparse type: as :func:`duration`, said of a step."""
    return duration(text, "time of a step", "0.04 or 40ms")


def _confirm(text: str) -> int:
    """An argparse type: 0 to 4."""
    if text not in map(str, range(_CONFIRM + 1)):
        raise argparse.ArgumentTypeError(
            f"expected a number of runs from 0 to {_CONFIRM}, got {text!r}"
        )
    return int(text)


LOADER: Final = VerbOptions(
    configure=_loader,
    split=split_command,
    description="Run a training command on a simulated GPU up to its first step, measure the "
    "DataLoader that fed it, predict its rate for every setting and confirm the "
    "best settings in real runs.",
    epilog="example: trainfit loader --step-time 40ms -- python train.py --epochs 3",
    usage="trainfit loader [options] -- COMMAND\n"
    "       trainfit loader [options] --loader MODULE:CALLABLE",
)


# ---
# trainfit rehearse


def _rehearse(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit rehearse``."""
    step = parser.add_argument_group("training step")
    add_gpu(step)
    step.add_argument(
        "--step-time",
        type=step_time,
        metavar="TIME",
        help="time of a training step, such as 40ms (default: the lower bound of the simulated "
        "step on the GPU)",
    )
    rehearsal = parser.add_argument_group("rehearsal")
    rehearsal.add_argument(
        "--duration",
        type=duration,
        default=30.0,
        metavar="TIME",
        help="length of the rehearsal, such as 60s (default 30s)",
    )
    rehearsal.add_argument(
        "--compare",
        type=file_path,
        metavar="FILE",
        help="a result of `trainfit loader --output`, whose prediction is shown for comparison",
    )
    rehearsal.add_argument(
        "--time-limit",
        type=seconds,
        default=600.0,
        metavar="S",
        help="time limit until the script's first step in seconds (default 600)",
    )
    _add_settings(parser)
    add_source(parser)
    add_protection(parser)
    result = parser.add_argument_group("result")
    add_result(result)
    add_fail_if(result, "rehearsal:Rehearsal")
    add_explain(result, "every cause of idle time, notes")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings of the DataLoader", "default: the script's own")
    group.add_argument("--num-workers", type=_from_zero, metavar="N")
    group.add_argument("--prefetch-factor", type=whole_number, metavar="N")
    for name in ("--pin-memory", "--persistent-workers", "--in-order"):
        group.add_argument(name, action=argparse.BooleanOptionalAction)
    group.add_argument("--start-method", choices=("fork", "spawn", "forkserver"))


def _from_zero(text: str) -> int:
    """An argparse type: 0, 1, 2 …"""
    return 0 if text == "0" else whole_number(text)


REHEARSE: Final = VerbOptions(
    configure=_rehearse,
    split=split_command,
    description="Run a training command on the simulated GPU until its first step, then its "
    "real DataLoader, epoch after epoch, with a GPU step of the given time; show "
    "the utilization that nvidia-smi would show, where it dips and why. A step "
    "keeps the GPU busy from its start to its end, and the loop waits for it (like "
    "one that reads its loss).",
    epilog="example: trainfit rehearse --step-time 40ms -- python train.py",
    usage="trainfit rehearse [options] -- COMMAND\n"
    "       trainfit rehearse [options] --loader MODULE:CALLABLE",
)


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
