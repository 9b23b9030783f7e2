"""Launchers of training processes in a command, unwrapped where they start just one."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from trainfit.plan.command.interpreter import Interpreter
from trainfit.plan.command.tunables import CommandError
from trainfit.results.runs.launcher import LAUNCHER_MODULES, Launched

#: Read by Accelerate where the script does not say which mixed precision it wants.
ACCELERATE: Final = "ACCELERATE_MIXED_PRECISION"

#: autocast's dtypes in Accelerate's words.
PRECISIONS: Final = {"bfloat16": "bf16", "float16": "fp16"}


#: Seconds in which a launcher has read its words; it imports PyTorch.
_LIMIT_S: Final = 120.0
#: Console scripts that are launchers.
_PROGRAMS: Final = {"torchrun": "torchrun", "accelerate-launch": "accelerate"}
_READ: Final = "from trainfit.scripts.launcher_words import main; main()"


@dataclasses.dataclass(frozen=True)
class Launcher:
    """A launcher in a command: its name, the Python that runs it, and its words.

    They begin at ``begins`` and end before ``ends``, where its script is named; ``given`` is what
    they are at the tunables' present values, ``launched`` what it starts then.
    """

    name: str
    python: Interpreter
    begins: int
    ends: int
    given: tuple[str, ...]
    launched: Launched

    def variables(self, plain: Sequence[str]) -> Mapping[str, str]:
        """What it sets in the environment of its process; ``plain`` is the whole command."""
        words = tuple(plain[self.begins : self.ends])
        if words == self.given:
            return self.launched.variables
        return _ask(self.python, self.name, (*words, plain[self.ends])).variables


#: How each is told to start one process.
_ONE: Final = dict.fromkeys(LAUNCHER_MODULES.values(), "--nproc-per-node=1") | {
    "accelerate": "--num_processes 1"
}


def launcher_of(plain: Sequence[str], at: int, python: Interpreter) -> Launcher | None:
    """The launcher that the program at ``plain[at]`` is, which ``python`` runs; ``None`` for any
    other program. Raises :class:`CommandError` unless it starts one process."""
    name = Path(plain[at]).name
    if name == "accelerate" and list(plain[at + 1 : at + 2]) == ["launch"]:
        return _launcher(name, python, plain, at + 2)
    return _launcher(_PROGRAMS[name], python, plain, at + 1) if name in _PROGRAMS else None


def launcher_of_module(
    plain: Sequence[str], name: str, at: int, python: Interpreter
) -> Launcher | None:
    """Likewise of ``python -m name``, whose arguments begin at ``plain[at]``."""
    launcher = LAUNCHER_MODULES.get(name)
    return None if launcher is None else _launcher(launcher, python, plain, at)


def _launcher(name: str, python: Interpreter, plain: Sequence[str], begins: int) -> Launcher:
    launched = _ask(python, name, tuple(plain[begins:]))
    ends = len(plain) - launched.words
    return Launcher(name, python, begins, ends, tuple(plain[begins:ends]), launched)


@functools.lru_cache(maxsize=64)
def _ask(python: Interpreter, launcher: str, words: tuple[str, ...]) -> Launched:
    """The launcher's own reading of its words, in a process of its interpreter."""
    try:
        ended = subprocess.run(
            [*python.start(_READ), launcher, *words],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=_LIMIT_S,
        )
        found = Launched.from_json(ended.stdout.strip().rpartition("\n")[2])
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise CommandError(
            f"launcher {launcher!r} did not report what it starts ({error}); give the command of "
            "one "
            "process, as in `python train.py …`"
        ) from None
    if found.error:
        raise CommandError(
            f"launcher {launcher!r} rejects its arguments ({found.error}); correct them"
        )
    if found.processes > 1:
        raise CommandError(
            f"launcher {launcher!r} starts {found.processes} processes, each with a GPU of its "
            "own, and one GPU is simulated; plan the share of one process: "
            f"{_ONE[launcher]}, with its own batch size"
        )
    return found
