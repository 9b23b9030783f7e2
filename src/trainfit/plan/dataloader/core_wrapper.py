"""Programs before a command that choose its cores or its priority: ``taskset``, ``nice``, ….

A loader is measured as it will run, so its process is started with the same.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainfit.plan.command.parsing import Command
from trainfit.plan.runs.failures import one_line

#: Programs that choose cores, or a priority on them or on disks, for the one that they start.
_CORES: Final = ("taskset", "numactl")
_CHOOSES: Final = (*_CORES, "nice", "ionice", "chrt")
#: Seconds that one gets to start nothing.
_PATIENCE_S: Final = 20.0


@dataclass(frozen=True)
class CoreWrapper:
    """Words before a process that choose its cores and priority; ``failure`` says why some of the
    command's cannot be used here."""

    words: tuple[str, ...] = ()
    failure: str = ""


def core_wrapper(command: Command) -> CoreWrapper:
    """The wrappers of ``command`` that choose cores or priority, once they have started something
    here.

    One that does not (it is not installed, or names cores of another machine) is left out.
    """
    found = [words for words in command.wrappers() if Path(words[0]).name in _CHOOSES]
    words: tuple[str, ...] = ()
    failures = []
    for each in found:
        failure = _tried((*words, *each, command.python, "-c", ""))
        if not failure:
            words += each
            continue
        without = "on all cores available to this process"
        if Path(each[0]).name not in _CORES:
            without = "without it"
        failures.append(
            f"the command's `{' '.join(each)}` does not work here ({failure}): the DataLoader was "
            f"measured {without}"
        )
    return CoreWrapper(words, "; ".join(failures))


def _tried(words: Sequence[str]) -> str:
    """The error of this run; empty: none."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return one_line(str(error))
    return "" if not done.returncode else one_line(done.stderr) or f"exit code {done.returncode}"
