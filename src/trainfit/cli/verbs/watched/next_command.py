"""Proposes, after a watched run, only what the verb that is named accepts."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainfit.plan.command.parsing import CommandError, parse_command
from trainfit.results.watch.result import WatchResult

#: Verbs that read the command, and may refuse it. The others run any.
_READS: Final = ("plan", "loader")


def accepted(result: WatchResult) -> WatchResult:
    """``result`` without a next command that its verb would refuse: a note says what it needs."""
    verb, command = _parts(result.next_command)
    if verb not in _READS or _is_elsewhere(command):
        return result
    try:
        parse_command(command)
    except CommandError as error:
        note = f"next would be `trainfit {verb}`, which needs another command: {error}"
        return dataclasses.replace(result, next_command="", notes=(note, *result.notes))
    return result


def _parts(line: str) -> tuple[str, list[str]]:
    """Verb and command of "trainfit VERB -- COMMAND"; the verb is empty where that is no such."""
    try:
        words = shlex.split(line)
    except ValueError:
        return "", []
    if words[:1] != ["trainfit"] or words[2:3] != ["--"]:
        return "", []
    return words[1], words[3:]


def _is_elsewhere(command: Sequence[str]) -> bool:
    """Was it run in another folder, where its script is?"""
    return any(word.endswith(".py") and not Path(word).exists() for word in command)
