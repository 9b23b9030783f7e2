"""What stands before a command's program: assignments, wrappers and environment managers.

They decide which file a name is: the last PATH counts, as for the shell.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from trainfit.plan.command.environments import environment_of
from trainfit.plan.command.interpreter import (
    LEAST_PYTHON,
    Interpreter,
    find_program,
    first_line,
    interpreter_of,
    is_python,
    told_by,
)
from trainfit.plan.command.tasks import Tasks
from trainfit.plan.command.tunables import CommandError
from trainfit.plan.command.wrappers import WRAPPERS, check
from trainfit.results.runs.communication import MEETING_PLACE
from trainfit.results.text import ASSIGNMENT

#: Seconds in which pyenv has said which file a name is.
_LIMIT_S: Final = 10.0


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The words before the program, which is at ``program_at``: the places of assignments
    (``NAME=value``), of wrappers and managers (where each begins and ends), and the variables
    that a manager or a starter of tasks sets, by its place.

    ``manager`` is the last one (``uv run``; empty: none), and ``runs`` what it takes the word at
    ``program_at`` for. ``tasks`` are what a wrapper (srun) starts of it.
    """

    program_at: int = 0
    assignments_at: tuple[int, ...] = ()
    wrappers_at: tuple[tuple[int, int], ...] = ()
    managed: Mapping[int, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    manager: str = ""
    runs: Literal["program", "script", "module"] = "program"
    tasks: Tasks = dataclasses.field(default_factory=Tasks)

    def variables(self, words: Sequence[str]) -> dict[str, str]:
        """The variables that are set before the program; ``words`` are the command's."""
        found: dict[str, str] = {}
        for at in sorted({*self.assignments_at, *self.managed}):
            if at in self.managed:
                found |= self.managed[at]
            else:
                name, _, found[name] = words[at].partition("=")
        return found

    def environment(self, words: Sequence[str]) -> dict[str, str]:
        """The whole environment of the program."""
        return {**os.environ, **self.variables(words)}

    def interpreter(
        self, named: str, flags: Sequence[str], words: Sequence[str], *, script: str = ""
    ) -> Interpreter:
        """The one that ``named`` starts, or the first line of the program ``script``.

        Raises :class:`CommandError`.
        """
        environment = self.environment(words)
        if script and os.sep in named and find_program(named, environment) is None:
            raise CommandError(
                f"program {script!r}: the interpreter of its first line, {named!r}, does not "
                "exist; install the program again, or name the Python: `python script.py`"
            )
        managed = f"the Python of {self.manager}" if self.manager else ""
        return interpreter_of(named, environment, flags, managed=managed)

    def program(self, name: str, words: Sequence[str]) -> tuple[str | None, str]:
        """The file that ``name`` starts (``None``: there is none), and what is to be said of it.

        A name that is not on PATH may be installed next to trainfit's own Python.
        """
        environment = self.environment(words)
        found = find_program(name, environment)
        if found is not None:
            return _behind_shim(name, found, environment), ""
        sibling = Path(sys.executable).parent / name
        if os.sep in name or self.manager or not sibling.is_file():
            return None, ""
        return str(sibling), (
            f"{name} is not on PATH: {sibling}, next to trainfit's own Python, is run; activate "
            "its environment, or write its path"
        )


def read_prefix(plain: list[str]) -> Prefix:
    """Read ``plain``, words without placeholders, up to the program; a word in which a manager
    names the program otherwise (Hatch's ``test:python``) is replaced.

    Raises :class:`CommandError`, also where no program is named.
    """
    at, prefix = 0, Prefix()
    while at < len(plain):
        begin, name = at, Path(plain[at]).name
        if ASSIGNMENT.match(plain[at]):
            at += 1
            prefix = dataclasses.replace(prefix, assignments_at=(*prefix.assignments_at, begin))
            continue
        if (wrapper := WRAPPERS.get(name)) is not None:
            given, at = wrapper.read(plain, at + 1)
            check(name, wrapper, given)
            at += wrapper.arguments
            if (tasks := wrapper.starts(given)).starter:
                prefix = _with_tasks(prefix, tasks, begin, plain)
        elif (made := environment_of(plain, at, prefix.environment(plain))) is not None:
            at = made.begins
            plain[at] = made.program
            prefix = dataclasses.replace(
                prefix,
                managed={**prefix.managed, begin: made.variables},
                manager=f"{name} run",
                runs=made.runs,
            )
        else:
            break
        prefix = dataclasses.replace(prefix, wrappers_at=(*prefix.wrappers_at, (begin, at)))
        if prefix.runs != "program":
            break
    if at >= len(plain):
        raise CommandError(f"{' '.join(plain)!r}: no program is named; add `python train.py`")
    return dataclasses.replace(prefix, program_at=at)


def _with_tasks(prefix: Prefix, tasks: Tasks, begin: int, plain: Sequence[str]) -> Prefix:
    """``tasks`` with the variables of the first, but for a meeting place that is set already."""
    known = prefix.environment(plain)
    variables = {
        name: value
        for name, value in tasks.variables.items()
        if name not in MEETING_PLACE or name not in known
    }
    return dataclasses.replace(prefix, tasks=tasks, managed={**prefix.managed, begin: variables})


def words_to_start(words: Sequence[str]) -> tuple[list[str], str]:
    """A command that is run for real, with the Python that a plan of it has, and what is to be
    said of that in one line (empty: nothing).

    Only a plain ``python`` without PyTorch, and a console script that is not on PATH, are
    replaced. What is not understood stays as it is. Raises :class:`CommandError` for an
    interpreter that does not exist.
    """
    found, plain = list(words), list(words)
    try:
        prefix = read_prefix(plain)
    except CommandError:
        return found, ""
    if prefix.tasks.count != 1:  # it runs on other machines, too
        return found, ""
    program = prefix.program_at
    if prefix.manager:
        named = plain[program] if prefix.runs == "program" else "python"
        return found, _of_manager(named, prefix, words) if is_python(named) else ""
    if not is_python(found[program]):
        path, note = prefix.program(found[program], words)
        if note and path is not None and first_line(path):
            found[program] = path
        return found, note if found[program] == path else ""
    try:
        interpreter = prefix.interpreter(found[program], (), words)
    except CommandError as error:
        return found, _unrecorded(found[program], prefix.environment(words), error)
    if interpreter.is_own and interpreter.note:
        found[program] = interpreter.path
        return found, interpreter.note
    return found, ""


def _of_manager(named: str, prefix: Prefix, words: Sequence[str]) -> str:
    """What is to be said of a manager's Python, which nothing takes the place of."""
    try:
        prefix.interpreter(named, (), words)
    except CommandError as error:
        return _unrecorded(named, prefix.environment(words), error)
    return ""


def _unrecorded(named: str, environment: Mapping[str, str], error: CommandError) -> str:
    """Why nothing may be recorded of a Python in which our code does not run; the error itself is
    raised where there is no such Python."""
    path = find_program(named, environment)
    told = {"failure": ""} if path is None else told_by(path, environment)
    if "failure" in told:
        raise error
    number = ".".join(map(str, told["version"]))
    if tuple(told["version"]) < LEAST_PYTHON:
        least = ".".join(map(str, LEAST_PYTHON))
        return f"{path} is Python {number}, and {least} is needed to record: it runs unrecorded"
    if not told.get("torch"):
        return f"{path} (Python {number}) has no torch: it runs as it is, with nothing to record"
    return ""  # the recorder needs less than a plan


def _behind_shim(name: str, text: str, environment: Mapping[str, str]) -> str:
    """The file that a shim of pyenv's starts: a shell script that looks for it."""
    pyenv = find_program("pyenv", environment)
    if pyenv is None or Path(text).parent.name != "shims":
        return text
    try:
        done = subprocess.run(
            [pyenv, "which", name],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
        )
    except (OSError, subprocess.TimeoutExpired):
        return text
    answer = done.stdout.strip()
    return answer if not done.returncode and shutil.which(answer) else text
