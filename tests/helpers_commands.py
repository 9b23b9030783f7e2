"""Command lines of users, as words and as what they are refused with."""

from __future__ import annotations

import shlex

import pytest

from trainfit.plan.command.parsing import Command, CommandError, parse_command


def parse(line: str) -> Command:
    return parse_command(shlex.split(line))


def refused(line: str) -> str:
    """Why, in one line."""
    with pytest.raises(CommandError) as caught:
        parse(line)
    assert "\n" not in str(caught.value)
    return str(caught.value)
