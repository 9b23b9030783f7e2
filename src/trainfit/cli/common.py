"""Options and checks that several verbs share."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from trainfit.hardware import GpuSpec, find_gpu, local_gpu
from trainfit.results.errors import TrainfitError


class UsageError(TrainfitError):
    """Options that cannot work together or have impossible values."""


def add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help='GPU to simulate: "RTX 4090", a100-80gb-sxm, custom:24GiB; default: this machine\'s',
    )


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


def with_memory(gpu: GpuSpec, nbytes: int | None) -> GpuSpec:
    """The GPU with a measured memory size in place of the catalogue's."""
    return gpu if nbytes is None else dataclasses.replace(gpu, memory_bytes=nbytes)


def progress(text: str) -> None:
    """One line on standard error; results alone go to standard output."""
    print(f"trainfit: {text} …", file=sys.stderr, flush=True)


def output_file(text: str | None) -> Path | None:
    """An output path whose folder exists, checked before anything is measured."""
    if text is None:
        return None
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"output file {text!r}: its folder does not exist; make it first")
    return path


def whole_number(text: str) -> int:
    """An argparse type: 1, 2, 3 …"""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def seconds(text: str) -> float:
    """An argparse type: a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value
