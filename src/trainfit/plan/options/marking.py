"""Marks the settings of a DataLoader that a command says, by their names alone.

For who changes them and looks in the run whether they followed; a plan has more to go by
(:mod:`trainfit.plan.options.detected`).
"""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.plan.command.parsing import Command, parse_command
from trainfit.plan.command.tunables import (
    LOADER_SWITCHES,
    LOADER_TUNABLES,
    NUMBER,
    CommandError,
    as_switch,
)
from trainfit.plan.options.candidates import candidates
from trainfit.plan.options.names import tunable_of
from trainfit.plan.options.words import Candidate, said, write_value, written


def marked(words: Sequence[str]) -> tuple[str, ...]:
    """``words`` with placeholders for the values of such options (``--workers={num_workers:4}``
    for ``--workers=4``); as they are where the user marked one, several have a name, or
    the command is none that is understood (it may run all the same)."""
    try:
        command = parse_command(words)
    except CommandError:
        return tuple(words)
    options = candidates(command, ())
    writings = {}
    for name in LOADER_TUNABLES:
        named = [each for each in options if _says(command, each, name)]
        if len(named) == 1 and name not in command.present:
            writings[name] = write_value(command, named[0], name, said(command, named[0]))
    return written(command, writings).words


def _says(command: Command, option: Candidate, name: str) -> bool:
    if tunable_of(option.shown) != name:
        return False
    text = said(command, option)
    read = as_switch(text) if name in LOADER_SWITCHES else NUMBER.fullmatch(text)
    return read is not None
