"""The launch command: the user's with recommended values, variables and cores before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from trainfit.plan.command import Command, quote
from trainfit.results.loader import CoreAdvice, VariableAdvice

#: Read by Accelerate where the script does not say which mixed precision it wants.
ACCELERATE: Final = "ACCELERATE_MIXED_PRECISION"
#: autocast's dtypes in Accelerate's words.
PRECISIONS: Final = {"bfloat16": "bf16", "float16": "fp16"}
#: numactl's options that choose cores; with others it only places memory.
_CHOOSES_CORES: Final = ("-C", "-N", "--physcpubind", "--cpunodebind")


@dataclasses.dataclass(frozen=True)
class Launch:
    """A command line for bash, and what is to be said of it."""

    line: str
    notes: tuple[str, ...] = ()


def launch(
    command: Command,
    values: Mapping[str, str],
    variables: Mapping[str, str],
    advice: Sequence[VariableAdvice] = (),
    cores: CoreAdvice | None = None,
) -> Launch:
    """``command`` with ``values``; before it ``variables``, those of ``advice`` that belong into
    the environment, and ``cores``.

    What the command sets itself is kept, and never set twice.
    """
    own = command.environment(**values)
    wanted = {**variables, **{each.name: each.value for each in _environment(advice)}}
    notes = [
        f"{name}={own[name]} of the command is kept; recommended is {value}"
        for name, value in wanted.items()
        if own.get(name, value) != value
    ]
    words = command.fill(**values)
    before = [f"{name}={value}" for name, value in wanted.items() if name not in own]
    at = _behind_assignments(command)
    prefix = cores.prefix.split() if cores is not None else []
    present = _chooses_cores(words[: command.program_at])
    if prefix and present:
        notes.append(f"the command's own {present} is kept; recommended is {' '.join(prefix)}")
        prefix = []
    words = [*before, *words[:at], *prefix, *words[at:]]
    return Launch(" ".join(map(quote, words)), tuple(notes))


def _environment(advice: Sequence[VariableAdvice]) -> list[VariableAdvice]:
    return [each for each in advice if each.where == "environment"]


def _behind_assignments(command: Command) -> int:
    """Where a program may be put before the user's: behind what the shell itself assigns."""
    at = 0
    while at in command.assignments_at:
        at += 1
    return at


def _chooses_cores(words: Sequence[str]) -> str:
    """The wrapper that chooses cores already ("taskset"); empty where there is none."""
    for at, word in enumerate(words):
        name = Path(word).name
        if name == "taskset":
            return name
        if name == "numactl" and any(
            other.partition("=")[0].startswith(_CHOOSES_CORES) for other in words[at + 1 :]
        ):
            return name
    return ""
