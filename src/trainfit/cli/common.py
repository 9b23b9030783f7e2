"""Options and checks shared by several commands."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainfit.hardware import GpuNameError, GpuSpec, device_constants, find_gpu, local_gpu
from trainfit.hardware.gpu.context_memory import check_profile, gpu_of_profile
from trainfit.hardware.gpu.local_gpu import local_usage
from trainfit.plan.command.parsing import Command, parse_command
from trainfit.results.files.errors import TrainfitError
from trainfit.results.format import size
from trainfit.results.machine.constants import DeviceConstants
from trainfit.results.machine.profile import Profile, Rates
from trainfit.results.runs.sandbox import SandboxRequest
from trainfit.results.text import printable

_SIZE = re.compile(
    r"(?P<number>\d{1,15}(?:\.\d+)?)\s*(?P<unit>gib|mib|kib|gb|mb|kb|b|)", re.I | re.A
)
_UNITS = {
    unit + suffix: base**power
    for power, unit in enumerate(("", "k", "m", "g"))
    for suffix, base in (("", 1), ("b", 1000), ("ib", 1024))
    if unit or suffix != "ib"
}

_TIME = re.compile(r"(?P<number>\d{1,9}(?:\.\d*)?|\.\d+)\s*(?P<unit>us|µs|ms|s|)", re.A)
_TIME_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}


class UsageError(TrainfitError):
    """Options that cannot work together or have impossible values."""


def add_gpu(parser: argparse.ArgumentParser) -> None:
    """Add ``--gpu``."""
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help='GPU to simulate: "RTX 4090", a100-80gb-sxm, custom:24GiB, or a rented machine with '
        'its processor: "Colab T4", g5.xlarge; default: this machine\'s',
    )


def add_device_memory(parser: argparse.ArgumentParser) -> None:
    """Add the options for GPU memory that PyTorch does not use."""
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="GPU profile that `trainfit calibrate` wrote",
    )
    parser.add_argument(
        "--force-profile",
        action="store_true",
        help="use the profile even if it was measured on another GPU or driver",
    )
    parser.add_argument(
        "--other-processes",
        type=memory_size,
        metavar="SIZE",
        help="GPU memory that other processes use, such as 800MiB (default: current use on this "
        "machine's GPU, 0 for a GPU given by name)",
    )


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """Add the options of every simulated run: ``--steps`` and ``--time-limit``."""
    parser.add_argument(
        "--steps",
        type=whole_number,
        default=None,
        metavar="N",
        help="optimizer steps to simulate (default: until memory no longer changes from step to "
        "step, 3 to 12)",
    )
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=600.0,
        metavar="S",
        help="time limit of one simulated run in seconds (default 600)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def add_protection(parser: argparse.ArgumentParser) -> None:
    """Add the options for files that a script writes."""
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--allow-writes",
        action="store_true",
        help="let the script write its files (default: writes go to a scratch layer that is "
        "discarded at the end)",
    )
    choice.add_argument(
        "--keep-writes",
        metavar="DIR",
        help="copy what the script would have written to DIR, a new or empty folder",
    )


def sandbox_request(options: argparse.Namespace) -> SandboxRequest:
    """From ``--allow-writes`` and ``--keep-writes``; raises :class:`UsageError`."""
    if options.keep_writes is None:
        return SandboxRequest(allow_writes=options.allow_writes)
    folder = Path(options.keep_writes).absolute()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--keep-writes {options.keep_writes!r} is a file; name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(
            f"--keep-writes {options.keep_writes!r} is not empty; name a new folder, or empty it"
        )
    parent = folder if folder.is_dir() else folder.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UsageError(
            f"--keep-writes {options.keep_writes!r}: {str(parent)!r} is not writable; name "
            "another folder"
        )
    return SandboxRequest(keep=str(folder))


def add_result(parser: argparse.ArgumentParser) -> None:
    """Add the options for the form of the result: ``--json`` and ``--output``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument("--output", metavar="FILE", help="also write the result to FILE")


@dataclasses.dataclass(frozen=True)
class Device:
    """The GPU to simulate, its constants, and the rates of the user's calibration profile
    (``None``: there is none that holds for it)."""

    gpu: GpuSpec
    constants: DeviceConstants
    rates: Rates | None = None


def chosen_device(options: argparse.Namespace, environment: Mapping[str, str]) -> Device:
    """From ``--gpu``, ``--profile`` and ``--other-processes``; ``environment`` is the job's.

    Without ``--gpu`` it is this machine's GPU, else the profile's. Raises ``GpuNameError`` for a
    bad name, :class:`UsageError` with no name and no GPU.
    """
    profile = Profile.load(options.profile) if options.profile is not None else None
    if options.force_profile and profile is None:
        raise UsageError("--force-profile is for use with --profile FILE")
    here = local_gpu() if options.gpu is None else None
    usage = local_usage() if here is not None else None
    driver = usage.driver if usage is not None else None
    if options.gpu is not None:
        gpu = find_gpu(options.gpu)
    elif here is not None:
        gpu = here
    elif profile is not None:
        gpu = gpu_of_profile(profile)
    else:
        raise UsageError(
            'no GPU in this machine (or no NVML to see it): name one, as in --gpu "RTX 4090", '
            "or give a size, as in --gpu custom:24GiB"
        )
    notes: tuple[str, ...] = ()
    if profile is not None:
        if options.gpu is not None:
            driver = _driver_here(gpu)
        notes = check_profile(
            profile, str(options.profile), gpu, driver, force=options.force_profile
        )
        if profile.memory.usable is not None and not notes:
            gpu = dataclasses.replace(gpu, memory_bytes=int(profile.memory.usable.value))
    others = options.other_processes
    if others is None:
        others = (usage.used_bytes or 0) if usage is not None else 0
    if others >= gpu.memory_bytes:
        raise UsageError(
            f"other processes hold {size(others)} of the {size(gpu.memory_bytes)} of {gpu.key}: no "
            "memory is free; stop them, or correct --other-processes"
        )
    constants = device_constants(
        gpu,
        profile=profile,
        title=str(options.profile) if profile is not None else "",
        module_loading="eager" if _loads_eagerly(environment) else "lazy",
        other_processes_bytes=others,
        notes=notes,
    )
    # A profile that was forced is another GPU's, or a rehearsal's.
    rates = profile.rates if profile is not None and not notes else None
    return Device(gpu, constants, rates)


def _driver_here(gpu: GpuSpec) -> str | None:
    """The driver of this machine, if its GPU is the one that was named."""
    try:
        here = local_gpu()
    except GpuNameError:  # there is one that is not known, and thus not the one
        return None
    usage = local_usage() if here is not None and here.name == gpu.name else None
    return usage.driver if usage is not None else None


def _loads_eagerly(environment: Mapping[str, str]) -> bool:
    """Lazy is the default of PyTorch since 1.13, and of CUDA since 12.2."""
    return environment.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"


def split_command(
    words: Sequence[str], options_with_value: Sequence[str], *, module: bool = False
) -> tuple[list[str], list[str]]:
    """Our own options, and the user's command, untouched.

    The command begins behind the first ``--``, or with the first word that is neither one
    of our options nor the value of one. With ``module`` it may begin with ``-m`` too.
    """
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            return list(words[:at]), list(words[at + 1 :])
        if not word.startswith("-") or (module and word.startswith("-m")):
            break
        at += 2 if word in options_with_value else 1
    return list(words[:at]), list(words[at:])


def read_command(words: Sequence[str]) -> Command:
    """The user's command, with a line on standard error where another Python runs it than its
    reader would expect; raises :class:`CommandError`."""
    command = parse_command(words)
    if command.interpreter.note:
        sys.stderr.write(f"trainfit: {printable(command.interpreter.note)}\n")
        sys.stderr.flush()
    return command


def progress(text: str) -> None:
    """One line on standard error; results alone go to standard output."""
    # Written at once: several threads may write.
    sys.stderr.write(f"trainfit: {printable(text)} …\n")
    sys.stderr.flush()


def only_ascii() -> bool:
    """Does the terminal's (or the file's) encoding lack block characters?"""
    try:
        "▁█│└┬".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def whole_number(text: str) -> int:
    """An argparse type: 1, 2, 3 …"""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def memory_size(text: str) -> int:
    """An argparse type: ``800MiB``, ``1.5GiB``, ``2GB``, or a plain number of bytes."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 800MiB or 1.5GiB, got {text!r}")
    return int(float(found["number"]) * _UNITS[found["unit"].lower()])


def seconds(text: str) -> float:
    """An argparse type: a positive number of seconds, as far as a clock can wait."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def duration(text: str, what: str = "time", example: str = "30s or 0.5") -> float:
    """An argparse type: ``0.04``, ``0.04s``, ``40ms``, ``800us``; up to an hour, in seconds."""
    found = _TIME.fullmatch(text.strip())
    value = float(found["number"]) * _TIME_UNITS[found["unit"]] if found is not None else -1.0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(
            f"expected a {what} above 0 and up to an hour, such as {example}, got {text!r}"
        )
    return value


def share(text: str) -> float:
    """An argparse type: ``0.1`` or ``10%``, from 0 to below 1."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to below 1 (100%), got {text!r}")
    return value
