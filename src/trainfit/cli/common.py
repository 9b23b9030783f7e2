"""Options and checks that several verbs share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainfit.hardware import GpuSpec, find_gpu, local_gpu
from trainfit.results.errors import TrainfitError


class UsageError(TrainfitError):
    """Options that cannot work together or have impossible values."""


def add_gpu(parser: argparse.ArgumentParser) -> None:
    """Add ``--gpu``."""
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help='GPU to simulate: "RTX 4090", a100-80gb-sxm, custom:24GiB; default: this machine\'s',
    )


def add_simulation(parser: argparse.ArgumentParser) -> None:
    """Add what every simulated run takes: ``--steps`` and ``--time-limit``."""
    parser.add_argument(
        "--steps",
        type=whole_number,
        default=None,
        metavar="N",
        help="optimizer steps to simulate (default: until memory has settled, 3 to 12)",
    )
    parser.add_argument(
        "--time-limit",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds that one simulated run may take (default 600)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def chosen_gpu(name: str | None) -> tuple[GpuSpec, str]:
    """The GPU to simulate and the name that finds it again.

    Raises ``GpuNameError`` for a bad name, :class:`UsageError` with no name and no GPU.
    """
    if name is not None:
        return find_gpu(name), name
    gpu = local_gpu()
    if gpu is None:
        raise UsageError(
            'no GPU in this machine (or no NVML to see it): name one, as in --gpu "RTX 4090", '
            "or give a size, as in --gpu custom:24GiB"
        )
    return gpu, gpu.key


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


def progress(text: str) -> None:
    """One line on standard error; results alone go to standard output."""
    print(f"trainfit: {text} …", file=sys.stderr, flush=True)


def output_file(text: str) -> Path:
    """A path that can be written, checked before anything is simulated."""
    path = Path(text)
    if path.is_dir():
        raise UsageError(f"output file {text!r} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"output file {text!r}: its folder does not exist; make it first")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"output file {text!r}: its folder cannot be written; name another")
    return path


def whole_number(text: str) -> int:
    """An argparse type: 1, 2, 3 …"""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def seconds(text: str) -> float:
    """An argparse type: a positive number of seconds, as far as a clock can wait."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def share(text: str) -> float:
    """An argparse type: ``0.1`` or ``10%``, from 0 to below 1."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to below 1 (or 100%)")
    return value
