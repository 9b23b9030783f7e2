"""A user's training command: its words, its tunables, and what Python will run.

The command is a list of words as the shell split them. Tunables are written into it as
``{name:present value}`` (:mod:`trainfit.plan.command.tunables`). All other words, braces included,
are passed on as they are.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from trainfit.plan.command.launchers import Launcher, launcher_of, launcher_of_module
from trainfit.plan.command.tunables import (
    CommandError,
    amp_precisions,
    fill,
    float16_amp,
    literal,
    other_amp,
    placeholders,
)
from trainfit.results.runs.sandbox import UNASKED, SandboxRequest
from trainfit.results.runs.trace import Target

__all__ = ["Command", "CommandError", "parse_command", "quote", "split_line"]

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?$")
_FLAGS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


@dataclasses.dataclass(frozen=True)
class _Wrapper:
    """A program that starts another: its options that take a value, its own arguments."""

    valued: str = ""
    valued_long: tuple[str, ...] = ()
    arguments: int = 0


#: They stay in the launch command and are left out of the simulation.
_WRAPPERS = {
    "env": _Wrapper("uCS", ("--unset", "--chdir")),
    "nice": _Wrapper("n", ("--adjustment",)),
    "ionice": _Wrapper("cn", ("--class", "--classdata")),
    "taskset": _Wrapper(arguments=1),
    "chrt": _Wrapper("TPD", arguments=1),
    "numactl": _Wrapper(
        "iwpmNC", ("--interleave", "--preferred", "--membind", "--cpunodebind", "--physcpubind")
    ),
    "nohup": _Wrapper(),
    "setsid": _Wrapper(),
    "stdbuf": _Wrapper("ioe", ("--input", "--output", "--error")),
    "time": _Wrapper("of", ("--output", "--format")),
    "timeout": _Wrapper("ks", ("--kill-after", "--signal"), arguments=1),
}

#: They start Python in a process, or in several, of their own, and are not unwrapped.
_LAUNCHERS = frozenset(
    {
        *("deepspeed", "horovodrun", "mpirun", "mpiexec", "srun"),
        *("uv", "poetry", "pipenv", "pdm", "hatch", "pixi", "conda", "mamba", "micromamba"),
        *("docker", "podman", "apptainer", "singularity", "sudo", "ssh", "sh", "bash", "zsh"),
    }
)


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
    ``python`` is the interpreter, ``python_flags`` its own options; ``kind`` and ``name``
    say what it runs. ``words[arguments_at:]`` are the arguments of that, and
    ``assignments_at`` are the places of ``NAME=value`` words before the program, which is
    ``words[program_at]``. ``launcher`` starts it, where there is one (torchrun). ``sandbox`` says
    what may come of the files that it writes.

    ``supposed`` are tunables that the user has not marked (:mod:`trainfit.plan.options.detected`),
    and
    ``spellings`` how words at these places say them. At present values the command is the user's.
    """

    words: tuple[str, ...]
    present: Mapping[str, str]
    other_amp: str | None
    assignments_at: tuple[int, ...]
    python: str
    python_flags: tuple[str, ...]
    kind: Literal["script", "module"]
    name: str
    arguments_at: int
    program_at: int = 0
    launcher: Launcher | None = None
    sandbox: SandboxRequest = UNASKED
    float16_amp: str | None = None
    supposed: frozenset[str] = frozenset()
    spellings: Mapping[int, Spelling] = dataclasses.field(default_factory=dict)

    @property
    def amp_precisions(self) -> Mapping[str, str]:
        """The values of ``{amp}`` by the precision that they ask for; none where they say just on
        or off."""
        return amp_precisions(self.float16_amp, self.present.get("amp"), self.other_amp)

    def fill(self, **values: str) -> list[str]:
        """The command's words with ``values`` (and current values otherwise)."""
        filled = {**self.present, **values}
        found: list[str] = []
        for at, word in enumerate(self.words):
            spelling = self.spellings.get(at)
            told = None if spelling is None else spelling.words.get(filled[spelling.name])
            found += (fill(word, filled),) if told is None else told
        return found

    def line(self, **values: str) -> str:
        """The launch command as one line for bash."""
        return " ".join(quote(word) for word in self.fill(**values))

    def target(self, **values: str) -> Target:
        """What Python runs, with the arguments filled in."""
        before = () if self.launcher is None else self.launcher.launched.arguments
        words = self.fill(**values)[self.arguments_at :]
        return Target(self.kind, self.name, (*before, *words))

    def wrappers(self) -> list[tuple[str, ...]]:
        """What is put before the program, each with its own words: ``taskset -c 0``, …"""
        words, found, at = self.fill(), [], 0
        while at < self.program_at:
            end = at + 1 if at in self.assignments_at else _behind_wrapper(words, at)
            if at not in self.assignments_at:
                found.append(tuple(words[at:end]))
            at = end
        return found

    def environment(self, **values: str) -> dict[str, str]:
        """The variables that the command sets, and its launcher."""
        words = self.fill(**values)
        pairs = (words[at].partition("=") for at in self.assignments_at)
        launched = {} if self.launcher is None else self.launcher.variables(words)
        return {name: value for name, _, value in pairs} | dict(launched)


def parse_command(words: Sequence[str]) -> Command:
    """Read a command; raises :class:`CommandError`."""
    if not words:
        raise CommandError(
            "no command: write the training command after --, "
            "as in `trainfit plan -- python train.py --batch_size={batch_size:8}`"
        )
    present = placeholders(words)
    plain = [fill(word, present) for word in words]
    at, assignments = _program(plain)
    if at >= len(plain):
        raise CommandError(f"{' '.join(words)!r}: no program is named; add `python train.py`")
    program_at = at
    is_python = _PYTHON.match(Path(plain[at]).name) is not None
    python, flags, kind, name, at = (_python if is_python else _executable)(plain, at)
    if kind == "module":
        launcher = launcher_of_module(plain, name, at, python)
    else:
        launcher = None if is_python else launcher_of(plain, program_at, python)
    if launcher is not None:
        python, flags, kind, name, at = _behind_launcher(plain, launcher, (python, flags))
    return Command(
        words=tuple(words),
        present=present,
        other_amp=other_amp(words, present),
        assignments_at=assignments,
        python=python,
        python_flags=flags,
        kind=kind,
        name=name,
        arguments_at=at,
        program_at=program_at,
        launcher=launcher,
        float16_amp=float16_amp(words, present),
    )


def split_line(line: str) -> list[str]:
    """The words of a command that :meth:`Command.line` wrote; what looks like a placeholder
    in them stays as it is (it was a value)."""
    return [literal(_unquote(word)) for word in _LINE_WORD.findall(line)]


#: A word of a bash command line, quotes and all, as ``quote`` writes them.
_LINE_WORD = re.compile(r"""(?:\$'(?:\\.|[^'\\])*'|'[^']*'|"[^"]*"|\\.|[^\s'"\\])+""")
_ANSI_C = re.compile(r"\$'((?:\\.|[^'\\])*)'")


def _unquote(word: str) -> str:
    name = re.match(r"[A-Za-z_][A-Za-z0-9_]*=(?=\$')", word)
    start, rest = (name.group(0), word[name.end() :]) if name else ("", word)
    found = _ANSI_C.fullmatch(rest)
    if found is None:
        return "".join(shlex.split(word))
    escaped = re.split(r"((?:\\x[0-9a-f]{2})+|\\.)", found[1])
    return start + "".join(map(_plain_ansi_c, escaped))


def _plain_ansi_c(part: str) -> str:
    if part.startswith("\\x"):
        return os.fsdecode(bytes.fromhex(part.replace("\\x", "")))
    return part[1:] if part.startswith("\\") else part


def quote(word: str) -> str:
    """One word of a bash command, printable; an assignment's name stays readable."""
    match = _ASSIGNMENT.match(word)
    if match and word[match.end() :]:
        return match.group(0) + quote(word[match.end() :])
    if match or word.isprintable():
        return word if match else shlex.quote(word)
    return "$'" + "".join(_ansi_c(letter) for letter in word) + "'"


def _ansi_c(letter: str) -> str:
    if letter in "\\'":
        return "\\" + letter
    if letter.isprintable():
        return letter
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(letter))


# -- the program -----------------------------------------------------------------------------

#: Interpreter, its flags, what it runs (kind and name), and where the arguments begin.
_Program = tuple[str, tuple[str, ...], Literal["script", "module"], str, int]


def _program(plain: Sequence[str]) -> tuple[int, tuple[int, ...]]:
    """Where the program's word is, behind assignments and wrappers; the assignments."""
    at, assignments = 0, []
    while at < len(plain):
        if _ASSIGNMENT.match(plain[at]):
            assignments.append(at)
            at += 1
        elif Path(plain[at]).name in _WRAPPERS:
            at = _behind_wrapper(plain, at)
        else:
            break
    return at, tuple(assignments)


def _behind_wrapper(plain: Sequence[str], at: int) -> int:
    wrapper = _WRAPPERS[Path(plain[at]).name]
    at += 1
    while at < len(plain) and plain[at].startswith("-"):
        word = plain[at]
        at += 1
        if word == "--":
            break
        if word.startswith("--"):
            at += word in wrapper.valued_long
        elif any(letter in wrapper.valued for letter in word[1:]):
            # A value may follow in the same word, as in -n5.
            first = min(i for i, letter in enumerate(word) if i and letter in wrapper.valued)
            at += first == len(word) - 1
    return at + wrapper.arguments


def _python(plain: Sequence[str], at: int) -> _Program:
    """``python [flags] script.py`` or ``python [flags] -m module``.

    A bare ``python`` is the interpreter that runs trainfit, for that one can import it.
    """
    python = sys.executable
    if os.sep in plain[at]:
        python = plain[at]
        if shutil.which(python) is None:
            raise CommandError(f"program {python!r}: there is no such program; check the path")
    at += 1
    flags: list[str] = []
    while at < len(plain) and plain[at].startswith("-"):
        word = plain[at]
        at += 1
        if word == "-m" and at < len(plain):
            return python, tuple(flags), "module", plain[at], at + 1
        if word.startswith("-m") and word != "-m":
            return python, tuple(flags), "module", word[2:], at
        if word == "-" or word.startswith("-c"):
            raise CommandError(
                f"python {word}: only code in a file can be planned; put it into a script"
            )
        flags.append(word)
        if word in _FLAGS_WITH_VALUE and at < len(plain):
            flags.append(plain[at])
            at += 1
    if at >= len(plain):
        raise CommandError(f"{' '.join(plain)!r}: no script after python; give one")
    _check_script(plain[at])
    return python, tuple(flags), "script", plain[at], at + 1


def _behind_launcher(
    plain: Sequence[str], launcher: Launcher, own: tuple[str, tuple[str, ...]]
) -> _Program:
    """What the launcher's process runs; ``own`` is the launcher's interpreter with its flags,
    which is its process's too."""
    at, kind = launcher.ends, launcher.launched.kind
    if kind == "program":
        return _executable(plain, at)
    if kind == "script":
        _check_script(plain[at])
    return (*own, kind, plain[at], at + 1)


def _check_script(name: str) -> None:
    path = Path(name)
    if path.is_dir():
        raise CommandError(f"script {name!r} is a folder; name the file in it")
    if not path.is_file():
        raise CommandError(
            f"script {name!r}: there is no such file; check the path "
            f"(the working directory is {os.getcwd()})"
        )
    if not os.access(path, os.R_OK):
        raise CommandError(f"script {name!r} cannot be read; check its permissions")


def _executable(plain: Sequence[str], at: int) -> _Program:
    """A console script (``lerobot-train``) or an executable Python file."""
    name = plain[at]
    if Path(name).name in _LAUNCHERS:
        raise CommandError(
            f"launcher {name!r} starts the training in its own processes, where it cannot be "
            "simulated; give the command of one process, as in `python train.py …`"
        )
    # A path is used as it is; a name may be installed next to the interpreter.
    sibling = Path(sys.executable).parent / name if os.sep not in name else None
    found = shutil.which(name) or (str(sibling) if sibling and sibling.is_file() else None)
    if found is None:
        is_script = name.endswith(".py") and Path(name).is_file()
        reason = "is not executable" if is_script else "there is no such program"
        begin = f"python {name}" if name.endswith(".py") else "python script.py"
        raise CommandError(
            f"program {name!r}: {reason}; begin the command with `{begin}` "
            "or the name of an installed console script"
        )
    python = _interpreter(found)
    if python is None:
        raise CommandError(
            f"program {name!r} is not a Python program; begin the command with `python script.py`"
        )
    return python, (), "script", found, at + 1


def _interpreter(program: str) -> str | None:
    """The Python that an executable file names in its first lines, ``None`` if none."""
    with open(program, "rb") as stream:
        first, second = (stream.readline(512).decode(errors="replace") for _ in range(2))
    if not first.startswith("#!"):
        return None
    # Installers write paths that are too long for a "#!" line into a second one.
    exec_line = re.match(r"'''exec' (\"[^\"]+\"|\S+)", second)
    words = [exec_line[1].strip('"')] if exec_line else first[2:].split()
    if not words:
        return None
    if Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
        return sys.executable if words and _PYTHON.match(words[0]) else None
    return words[0] if _PYTHON.match(Path(words[0]).name) else None
