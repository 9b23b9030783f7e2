"""A user's training command: its words, its tunables, and what Python will run.

The command is a list of words as the shell split them. Tunables are written into it as
``{name:present value}`` (:mod:`trainfit.plan.command.tunables`). All other words, braces included,
are passed on as they are.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from trainfit.plan.command.interpreter import Interpreter, first_line, is_python
from trainfit.plan.command.prefix import Prefix, read_prefix
from trainfit.plan.command.tunables import (
    CommandError,
    amp_precisions,
    fill,
    float16_amp,
    literal,
    other_amp,
    placeholders,
)
from trainfit.plan.command.wrappers import (
    Launcher,
    launcher_of,
    launcher_of_module,
    launcher_of_tasks,
    refuse,
    require_tasks,
)
from trainfit.results.runs.script import STAND_INS_VARIABLE, UNASKED, SandboxRequest
from trainfit.results.runs.trace import Target
from trainfit.results.text import line_of, words_of

__all__ = ["Command", "CommandError", "parse_command", "piped_input", "split_line"]

_THREADS = "OMP_NUM_THREADS"
_FLAGS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How a word says a tunable by more than a value within it: ``words`` are what stands in its
    place at some values (none: nothing does); at others its placeholder is filled."""

    name: str
    words: Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Command:
    """A training command with tunables.

    ``words`` still hold the placeholders; ``present`` are their current values, and
    ``other_amp`` is what switches AMP the other way round (``None`` without ``{amp}``),
    ``float16_amp`` what asks for float16 (``None`` also where ``{amp}`` is on or off).
    ``python_flags`` are the ``interpreter``'s own options; ``kind`` and ``name`` say what it runs.
    ``words[arguments_at:]`` are the arguments of that, and ``prefix`` is what stands before the
    program. ``launcher`` starts it, where there is one (torchrun), in a machine of ``gpus``.
    ``sandbox`` says what may come of the files that it writes.

    ``supposed`` are tunables that the user has not marked (:mod:`trainfit.plan.runs.options`),
    and
    ``spellings`` how words at these places say them. At present values the command is the user's.
    ``stand_ins`` are packages that are not installed, and are taken to be where it runs.
    """

    words: tuple[str, ...]
    present: Mapping[str, str]
    other_amp: str | None
    prefix: Prefix
    interpreter: Interpreter
    python_flags: tuple[str, ...]
    kind: Literal["script", "module"]
    name: str
    arguments_at: int
    launcher: Launcher | None = None
    gpus: int = 1
    sandbox: SandboxRequest = UNASKED
    float16_amp: str | None = None
    supposed: frozenset[str] = frozenset()
    spellings: Mapping[int, Spelling] = dataclasses.field(default_factory=dict)
    stand_ins: tuple[str, ...] = ()

    @property
    def amp_precisions(self) -> Mapping[str, str]:
        """The values of ``{amp}`` by the precision that they ask for; none where they say just on
        or off."""
        return amp_precisions(self.float16_amp, self.present.get("amp"), self.other_amp)

    def fill(self, **values: str) -> list[str]:
        """The command's words with ``values`` (and current values otherwise)."""
        filled = {**self.present, **values}
        found: list[str] = []
        for index, word in enumerate(self.words):
            spelling = self.spellings.get(index)
            told = None if spelling is None else spelling.words.get(filled[spelling.name])
            found += (fill(word, filled),) if told is None else told
        return found

    def line(self, **values: str) -> str:
        """The launch command as one line for bash."""
        return line_of(self.fill(**values))

    def target(self, **values: str) -> Target:
        """What Python runs, with the arguments filled in."""
        before = () if self.launcher is None else self.launcher.launched.arguments
        words = self.fill(**values)[self.arguments_at :]
        return Target(
            self.kind,
            self.name,
            (*before, *words),
            terminal=_terminal(),
            input_file=_input_file(),
        )

    @property
    def python(self) -> str:
        """The path that starts the interpreter."""
        return self.interpreter.path

    @property
    def assignments_at(self) -> tuple[int, ...]:
        """The places of ``NAME=value`` words before the program."""
        return self.prefix.assignments_at

    @property
    def program_at(self) -> int:
        """The place of the program's word."""
        return self.prefix.program_at

    def wrappers(self) -> list[tuple[str, ...]]:
        """What is put before the program, each with its own words: ``taskset -c 0``, …"""
        words = self.fill()
        return [tuple(words[begin:end]) for begin, end in self.prefix.wrappers_at]

    def environment(self, **values: str) -> dict[str, str]:
        """The variables that the command sets, its environment manager, and its launcher; and
        which packages have stand-ins."""
        words = self.fill(**values)
        found = self.prefix.variables(words)
        launched = {} if self.launcher is None else dict(self.launcher.variables(words))
        if _THREADS in found or _THREADS in os.environ:
            launched.pop(_THREADS, None)  # torchrun sets it where the user does not
        if self.stand_ins:
            launched[STAND_INS_VARIABLE] = ",".join(self.stand_ins)
        return found | launched

    @property
    def processes(self) -> int:
        """How many its launcher starts; 1 without one."""
        return 1 if self.launcher is None else self.launcher.launched.processes

    @property
    def machines(self) -> int:
        """The number of machines that its processes are on; 1 without a launcher."""
        return 1 if self.launcher is None else self.launcher.launched.machines

    def on(self, gpus: int) -> Command:
        """The same command in a machine of so many GPUs: a launcher may start a process for
        each."""
        launcher = None if self.launcher is None else self.launcher.on(gpus, self.fill())
        return dataclasses.replace(self, launcher=launcher, gpus=gpus)


def _input_file() -> str:
    """The regular file that is trainfit's standard input, which each run of the script reads from
    its beginning; empty where it is none: what comes through a pipe comes once."""
    own = f"/proc/{os.getpid()}/fd/0"
    try:
        if not stat.S_ISREG(os.fstat(0).st_mode):
            return ""
        path = os.readlink(own)
    except OSError:  # it is closed, or the system has no such links
        return ""
    return path if os.path.isfile(path) else own  # bash deletes the file of a here-document


#: How a script reads its standard input.
_READS_INPUT: Final = re.compile(r"\bstdin\b|\binput\s*\(|\bfileinput\b")


def piped_input(command: Command) -> str:
    """What is to be said where a script reads its standard input, and that is a pipe: it comes
    once, and the script runs several times. Else empty."""
    try:
        mode = os.fstat(0).st_mode
        if command.kind != "script" or not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            return ""
        source = Path(command.name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if _READS_INPUT.search(source) is None:
        return ""
    return (
        "standard input is a pipe, which is read once, and the script runs several times: it is "
        f"empty in each run; write it to a file (… > FILE) and give that: < FILE ({command.name} "
        "reads it)"
    )


def _terminal() -> tuple[int, int] | None:
    """Lines and columns of the terminal that trainfit was started in; ``None``: it was in none."""
    try:
        size = os.get_terminal_size(0)
    except OSError:
        return None
    return size.lines, size.columns


def parse_command(words: Sequence[str], *, several: bool = False, also: str = "") -> Command:
    """Read a command; ``several``: also one whose launcher starts several processes; ``also``: a
    name that is a tunable, too.

    Raises :class:`CommandError`.
    """
    if not words:
        raise CommandError(
            "no command: write the training command after --, "
            "as in `trainfit plan -- python train.py --batch_size={batch_size:8}`"
        )
    present = placeholders(words, also)
    plain = [fill(word, present) for word in words]
    prefix = read_prefix(plain)
    program = prefix.program_at
    if prefix.runs != "program":
        found = _run_by_manager(plain, prefix)
    else:
        found = (_python if is_python(plain[program]) else _executable)(plain, program, prefix)
    interpreter, flags, kind, name, at = found
    if kind == "module":
        launcher = launcher_of_module(plain, name, at, interpreter)
    elif prefix.runs != "program" or is_python(plain[prefix.program_at]):
        launcher = None
    else:
        launcher = launcher_of(plain, prefix.program_at, interpreter)
    require_tasks(prefix.tasks, launcher)
    if launcher is None and prefix.tasks.count != 1:
        launcher = launcher_of_tasks(prefix.tasks, prefix.program_at, interpreter)
        if not several:
            launcher.require_one_process()
    elif launcher is not None:
        if not several:
            launcher.require_one_process()
        interpreter, flags, kind, name, at = _behind_launcher(
            plain, prefix, launcher, (interpreter, flags)
        )
    return Command(
        words=tuple(words),
        present=present,
        other_amp=other_amp(words, present),
        prefix=prefix,
        interpreter=interpreter,
        python_flags=flags,
        kind=kind,
        name=name,
        arguments_at=at,
        launcher=launcher,
        float16_amp=float16_amp(words, present),
    )


def split_line(line: str) -> list[str]:
    """The words of a command that :meth:`Command.line` wrote; what looks like a placeholder
    in them stays as it is (it was a value)."""
    return [literal(word) for word in words_of(line)]


# -- the program -----------------------------------------------------------------------------

#: Interpreter, its flags, what it runs (kind and name), and where the arguments begin.
_Program = tuple[Interpreter, tuple[str, ...], Literal["script", "module"], str, int]


def _python(plain: Sequence[str], at: int, prefix: Prefix) -> _Program:
    """``python [flags] script.py`` or ``python [flags] -m module``."""
    named = plain[at]
    at += 1
    flags: list[str] = []
    kind: Literal["script", "module"] = "script"
    name = ""
    while not name and at < len(plain) and plain[at].startswith("-"):
        word = plain[at]
        at += 1
        if word == "-m" and at < len(plain):
            kind, name = "module", plain[at]
            at += 1
        elif word.startswith("-m") and word != "-m":
            kind, name = "module", word[2:]
        elif word == "-" or word.startswith("-c"):
            raise CommandError(
                f"python {word}: only code in a file can be planned; put it into a script"
            )
        else:
            flags.append(word)
            if word in _FLAGS_WITH_VALUE and at < len(plain):
                flags.append(plain[at])
                at += 1
    if not name:
        if at >= len(plain):
            raise CommandError(f"{' '.join(plain)!r}: no script after python; give one")
        _check_script(plain[at])
        name = plain[at]
        at += 1
    return prefix.interpreter(named, flags, plain), tuple(flags), kind, name, at


def _run_by_manager(plain: Sequence[str], prefix: Prefix) -> _Program:
    """``uv run train.py``, ``uv run -m module``: the manager starts its Python."""
    program = prefix.program_at
    kind: Literal["script", "module"] = "module" if prefix.runs == "module" else "script"
    if kind == "script":
        _check_script(plain[program])
    return prefix.interpreter("python", (), plain), (), kind, plain[program], program + 1


def _behind_launcher(
    plain: Sequence[str],
    prefix: Prefix,
    launcher: Launcher,
    own: tuple[Interpreter, tuple[str, ...]],
) -> _Program:
    """What the launcher's process runs; ``own`` is the launcher's interpreter with its flags,
    which is its process's too."""
    ends, kind = launcher.ends, launcher.launched.kind
    if kind == "program":
        return _executable(plain, ends, prefix)
    if kind == "script":
        _check_script(plain[ends])
    return (*own, kind, plain[ends], ends + 1)


def _check_script(name: str) -> None:
    path = Path(name)
    if path.is_dir():
        raise CommandError(f"script {name!r} is a folder; name the file in it")
    if not path.is_file():
        refuse(name)
        raise CommandError(
            f"script {name!r}: there is no such file; check the path "
            f"(the working directory is {os.getcwd()})"
        )
    if path.suffix == ".ipynb":
        raise CommandError(
            f"script {name!r} is a notebook, which Python does not run; write its cells into a "
            "script: jupyter nbconvert --to script, then plan the .py file"
        )
    if not os.access(path, os.R_OK):
        raise CommandError(f"script {name!r} cannot be read; check its permissions")


def _executable(plain: Sequence[str], at: int, prefix: Prefix) -> _Program:
    """A console script (``lerobot-train``) or an executable Python file."""
    name = plain[at]
    refuse(name)
    found, note = prefix.program(name, plain)
    if found is None:
        is_script = name.endswith(".py") and Path(name).is_file()
        reason = "is not executable" if is_script else "there is no such program"
        begin = f"python {name}" if name.endswith(".py") else "python script.py"
        raise CommandError(
            f"program {name!r}: {reason}; begin the command with `{begin}` "
            "or the name of an installed console script"
        )
    words = first_line(found)
    if not words:
        raise CommandError(
            f"program {name!r} is not a Python program; begin the command with `python script.py`"
        )
    interpreter = prefix.interpreter(words[0], words[1:], plain, script=name)
    if note:
        interpreter = dataclasses.replace(interpreter, note=note)
    return interpreter, tuple(words[1:]), "script", found, at + 1
