"""Options of the verbs about this machine: doctor, calibrate, pace, verify."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final, get_args

from trainfit.cli.automation import add_fail_if
from trainfit.cli.common import (
    VerbOptions,
    add_explain,
    add_json,
    add_protection,
    add_result,
    duration,
    file_path,
    memory_size,
    number,
    seconds,
    share,
    whole_number,
)
from trainfit.results.pace import FixName

# ---
# trainfit doctor


#: Names of the checks: :data:`trainfit.doctor.checks.NAMES`, which takes long to import.
NAMES: Final = (
    *("gpu", "torchvision", "cuda-compat", "gpu-state", "mig", "compute-mode", "gpu-processes"),
    *("gpu-memory", "gpu-clocks", "gpu-temperature", "gpu-power", "ecc", "persistence", "pcie"),
    *("numa", "cores", "threads", "frequency", "idle", "memory", "shm", "disk", "files"),
    *("processes", "container", "scheduler"),
)
#: Of --only: the scripts, without any check of the machine.
SCRIPT: Final = "script"


def _doctor(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit doctor``."""
    checks = parser.add_argument_group("checks")
    checks.add_argument(
        "--script",
        type=file_path,
        action="extend",
        nargs="+",
        metavar="FILE",
        help="also read training scripts for costly habits (--only script: nothing else)",
    )
    checks.add_argument(
        "--data",
        metavar="PATH",
        help="file or folder of training data: its storage is checked, its read rate measured",
    )
    known = ", ".join((*NAMES, SCRIPT))
    checks.add_argument(
        "--only", type=_names, metavar="NAMES", help=f"run only these checks, of: {known}"
    )
    checks.add_argument(
        "--skip", type=_names, default=(), metavar="NAMES", help="skip these checks"
    )
    checks.add_argument(
        "--cpu",
        action="store_true",
        help="show the processor as a table: governor and clocks by group of cores, C-states",
    )
    result = parser.add_argument_group("result")
    result.add_argument(
        "-v",
        "--explain",
        action="store_true",
        help="show the good checks with their figures, and what each GPU does now",
    )
    choice = result.add_mutually_exclusive_group()
    add_json(choice)
    choice.add_argument(
        "--format",
        choices=("sarif",),
        help="print what was found in the scripts, and nothing else, as SARIF 2.1.0",
    )
    result.add_argument("-o", "--output", metavar="FILE", help="also write the result to a file")
    recorded = parser.add_argument_group("recorded machine")
    recorded.add_argument(
        "--record", metavar="FILE", help="also record the machine to a file that --machine reads"
    )
    recorded.add_argument(
        "--machine",
        type=file_path,
        metavar="FILE",
        help="check a recorded machine instead of this one",
    )


def _names(text: str) -> tuple[str, ...]:
    """An argparse type: ``gpu,shm``."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"expected names with commas between them, got {text!r}")
    return names


DOCTOR: Final = VerbOptions(
    configure=_doctor,
    description="Check this machine (and a script): why PyTorch sees no GPU, and what makes a "
    "job slow or short of memory. Each finding has its evidence, the command that "
    "fixes it, its undo and its cost. Changes nothing. Exit code 1 if something is "
    "bad.",
    usage="trainfit doctor [options]",
)


# ---
# trainfit calibrate


def _calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit calibrate``."""
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="profile.json",
        help="file to write the profile to (default profile.json)",
    )
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=180.0,
        metavar="S",
        help="time limit in seconds; what has not been measured by then is left out (default 180)",
    )
    parser.add_argument(
        "--rehearse",
        metavar="GPU",
        help="run everything on a simulated GPU instead; plan refuses such a profile",
    )
    parser.add_argument(
        "--other-processes",
        type=memory_size,
        default=0,
        metavar="SIZE",
        help="with --rehearse: memory of the simulated GPU that other processes use",
    )
    parser.add_argument("--json", action="store_true", help="print the profile's JSON instead")
    add_explain(parser, "convolution workspaces, notes")


CALIBRATE: Final = VerbOptions(
    configure=_calibrate,
    usage="trainfit calibrate [options]",
    description="Measure the GPU: the CUDA context and what libraries add to it, workspaces, "
    "rates of matmuls and copies, the cost of a kernel launch. Needs less than three minutes, "
    "during which nothing else should use the GPU.",
)


# ---
# trainfit pace


_MOST_RATES, _MOST_HZ = 8, 2000.0


def _pace(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit pace``."""
    parser.add_argument("target", nargs="?", metavar="MODULE:CALLABLE", help=argparse.SUPPRESS)
    measurement = parser.add_argument_group("measurement")
    measurement.add_argument(
        "--hz",
        type=rates,
        default=(15.0, 30.0, 60.0),
        metavar="HZ,…",
        help="calls a second, one rate or several (default 15,30,60)",
    )
    measurement.add_argument(
        "--duration",
        type=duration,
        default=10.0,
        metavar="S",
        help="seconds at each rate: 10, 10s, 500ms (default 10)",
    )
    measurement.add_argument(
        "--setup",
        metavar="MODULE:FN",
        help="called once before the measurement; its return value is the callable's argument",
    )
    measurement.add_argument(
        "--rehearse",
        metavar="MODULE:FN",
        help="does the callable's work, gets the same argument and changes no state: needed of a "
        "policy that keeps one, such as a queue of actions",
    )
    measurement.add_argument(
        "--no-attribution", action="store_true", help="only measure, without looking for the cause"
    )
    fixes = parser.add_argument_group("fixes")
    fixes.add_argument(
        "--fix",
        choices=get_args(FixName),
        help="apply a fix and measure before and after: busy-wait, a rehearsal call before each "
        "tick, forbid deep idle states, or set the performance governor (kept if it helped)",
    )
    fixes.add_argument(
        "--undo", action="store_true", help="restore what --fix governor changed, and exit"
    )
    result = parser.add_argument_group("result")
    result.add_argument(
        "-v",
        "--explain",
        action="store_true",
        help="show the whole report: calls over time and as a histogram, evidence, all fixes",
    )
    add_result(result)
    add_fail_if(result, "pace:PaceResult")


def _split_pace(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Our own options, and the command behind ``--``; a name alone is ours."""
    if "--" not in words:
        return list(words), []
    index = words.index("--")
    return list(words[:index]), list(words[index + 1 :])


def rates(text: str) -> tuple[float, ...]:
    """An argparse type: ``30`` or ``15,30,60``, each above 0."""
    found = [number(part) for part in text.split(",")]
    if len(found) > _MOST_RATES or not all(0 < each <= _MOST_HZ for each in found):
        raise argparse.ArgumentTypeError(
            f"expected up to {_MOST_RATES} rates above 0 and up to {_MOST_HZ:g}, such as "
            f"15,30,60, got {text!r}"
        )
    return tuple(dict.fromkeys(found))


PACE: Final = VerbOptions(
    configure=_pace,
    split=_split_pace,
    description="Time calls back to back and at fixed rates. Where paced calls are slower, "
    "keep the core, the GPU or neither busy between calls, in turns, to find the "
    "cause. Exit code 1: a rate cannot be held.",
    epilog="example: trainfit pace policy.py:act --setup policy.py:load --hz 15,30,60",
    usage="trainfit pace [options] MODULE:CALLABLE\n"
    "       trainfit pace [options] -- COMMAND     (answers each line with one)\n"
    "       trainfit pace --undo",
)


# ---
# trainfit verify


def _verify(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trainfit verify``."""
    parser.add_argument(
        "result", type=file_path, metavar="RESULT", help="file of plan --output or of simulate"
    )
    parser.add_argument(
        "--steps",
        type=whole_number,
        default=10,
        metavar="N",
        help="optimizer steps to run (default 10)",
    )
    parser.add_argument(
        "--recommended",
        action="store_true",
        help="verify the recommended batch size instead of the current one",
    )
    parser.add_argument(
        "--tolerance",
        type=share,
        metavar="SHARE",
        help="largest accepted error of a prediction (0.02, 2%%); default: the range that the "
        "result states",
    )
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=600.0,
        metavar="S",
        help="time limit of the script in seconds (default 600)",
    )
    parser.add_argument(
        "--rehearse",
        metavar="GPU",
        help="run on a simulated GPU instead, to test that the script can be measured",
    )
    add_protection(parser)
    result = parser.add_argument_group("result")
    add_result(result)
    add_fail_if(result, "real_runs:Verification")
    add_explain(result, "all notes")


VERIFY: Final = VerbOptions(
    configure=_verify,
    usage="trainfit verify [options] RESULT",
    description="Run the command of a result file on this machine's GPU for a few optimizer "
    "steps and compare the measured memory and step time with the predicted ones. "
    "Exit code 0: within the stated "
    "range, 1: not. The script runs for real, but what it writes goes to a scratch layer.",
)
