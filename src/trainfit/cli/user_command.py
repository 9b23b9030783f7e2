"""The user's command, as the verbs that run it read it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainfit.plan.command.parsing import Command, parse_command
from trainfit.results.text import printable


def read_command(words: Sequence[str]) -> Command:
    """The command, with a line on standard error where another Python runs it than its reader
    would expect.

    Raises:
        CommandError: no Python is found in it, or none that can run it.
    """
    command = parse_command(words)
    if command.interpreter.note:
        sys.stderr.write(f"trainfit: {printable(command.interpreter.note)}\n")
        sys.stderr.flush()
    return command
