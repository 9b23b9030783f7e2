"""A script's constant that is its batch size (``batch_size = 20``), where neither an option nor a
DataLoader says it.

Only at the top level of the script, and only where that is its one assignment there. A run with
another value has to show it in the model's calls, as for an option.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

from trainfit.plan.command.parsing import Command
from trainfit.plan.options.names import tunable_of
from trainfit.scripts.options.constants import constants_of


@dataclasses.dataclass(frozen=True)
class ScriptConstant:
    """``name`` has ``value`` at ``place`` ("train.py:18")."""

    name: str
    value: int
    place: str


def batch_constant(command: Command, seen: int | None) -> ScriptConstant | None:
    """The one that has the batch size that was ``seen``; ``None``: there is none, or several."""
    path = Path(command.name)
    if seen is None or command.kind != "script" or command.launcher is not None:
        return None
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    found = [
        ScriptConstant(name, value.value, f"{command.name}:{value.lineno}")
        for name, value in constants_of(tree).items()
        if tunable_of(name) == "batch_size" and value.value == seen
    ]
    return found[0] if len(found) == 1 else None
