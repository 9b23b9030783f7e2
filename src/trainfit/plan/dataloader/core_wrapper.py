"""Programs before a command that choose its cores: ``taskset`` or ``numactl``.

A loader is measured on the cores that it will have, so its process is started with the same.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainfit.plan.command.parsing import Command
from trainfit.plan.runs.failures import one_line

#: Programs that choose cores for the one that they start.
_CHOOSES: Final = ("taskset", "numactl")
#: Seconds that one gets to start nothing.
_PATIENCE_S: Final = 20.0


@dataclass(frozen=True)
class CoreWrapper:
    """Words before a process that choose its cores, or the reason why the command's cannot be used
    here."""

    words: tuple[str, ...] = ()
    failure: str = ""


def core_wrapper(command: Command) -> CoreWrapper:
    """The wrapper of ``command`` that chooses cores, once it has started something here.

    One that does not (it is not installed, or names cores of another machine) is left out.
    """
    found = [words for words in command.wrappers() if Path(words[0]).name in _CHOOSES]
    if not found:
        return CoreWrapper()
    words = tuple(word for each in found for word in each)
    failure = _tried((*words, command.python, "-c", ""))
    if not failure:
        return CoreWrapper(words)
    return CoreWrapper(
        (),
        f"the command's `{' '.join(words)}` does not work here ({failure}): the DataLoader was "
        "measured on all cores available to this process",
    )


def _tried(words: Sequence[str]) -> str:
    """The error of this run; empty: none."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return one_line(str(error))
    return "" if not done.returncode else one_line(done.stderr) or f"exit code {done.returncode}"
