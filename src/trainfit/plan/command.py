"""A user's training command: its words, its tunables, and what Python will run.

The command is a list of words as the shell split them. Tunables are written into it as
``{name:present value}``; ``{{`` and ``}}`` stand for literal braces.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainfit.results.errors import TrainfitError
from trainfit.results.trace import Target

#: Tunables that trainfit can fill.
TUNABLES = ("batch_size", "amp")

_PLACEHOLDER = re.compile(r"(?<!\{)\{([A-Za-z_]\w*)(?::([^{}]*))?\}(?!\})")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?$")
_FLAGS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")

#: Words that may stand before the interpreter, with how many arguments each takes; they
#: stay in the launch command and are left out of the simulation.
_WRAPPERS = {"env": 0, "nice": 2, "taskset": 2, "numactl": -1, "nohup": 0, "time": 0}

_ON_OFF = (("true", "false"), ("True", "False"), ("1", "0"), ("yes", "no"), ("on", "off"))
_PRECISIONS = ("bf16", "fp16", "no", "fp32", "bfloat16", "float16", "float32", "none")


class CommandError(TrainfitError):
    """A command that cannot be planned; one line with the word, the reason, the remedy."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A training command with tunables.

    ``words`` still hold the placeholders; ``present`` are their present values. ``python``
    is the interpreter, ``python_flags`` its own options, ``environment`` the assignments
    that stand before it. ``target_at`` is where the target's own arguments begin in
    ``words``; ``kind`` and ``name`` say what is run.
    """

    words: tuple[str, ...]
    present: Mapping[str, str]
    environment: Mapping[str, str]
    python: str
    python_flags: tuple[str, ...]
    kind: str
    name: str
    arguments_at: int

    def fill(self, **values: str) -> list[str]:
        """The command's words with ``values`` (and present values otherwise)."""
        return [_fill(word, dict(self.present) | values) for word in self.words]

    def line(self, **values: str) -> str:
        """The launch command as one line for a shell."""
        return " ".join(_quote(word) for word in self.fill(**values))

    def target(self, **values: str) -> Target:
        """What Python runs, with the arguments filled in."""
        arguments = tuple(self.fill(**values)[self.arguments_at :])
        return Target("module" if self.kind == "module" else "script", self.name, arguments)


def parse_command(words: Sequence[str]) -> Command:
    """Read a command; raises :class:`CommandError`."""
    if not words:
        raise CommandError(
            "no command: write the training command after --, "
            "as in `trainfit plan -- python train.py --batch_size={batch_size:8}`"
        )
    present = _placeholders(words)
    plain = [_fill(word, present) for word in words]
    environment, at = _environment(plain)
    at, more = _skip_wrappers(plain, at)
    environment |= more
    if at >= len(plain):
        raise CommandError(f"{' '.join(words)!r}: no program is named; add `python train.py`")
    if _PYTHON.match(Path(plain[at]).name):
        return _python_command(words, plain, at, present, environment)
    return _script_command(words, plain, at, present, environment)


def _placeholders(words: Sequence[str]) -> dict[str, str]:
    present: dict[str, str] = {}
    for word in words:
        for name, value in _PLACEHOLDER.findall(word):
            if name not in TUNABLES:
                near = difflib.get_close_matches(name, TUNABLES, 1)
                hint = f"did you mean {{{near[0]}:…}}?" if near else f"known: {', '.join(TUNABLES)}"
                raise CommandError(
                    f"placeholder {{{name}}} in {word!r} is no tunable; {hint} "
                    "(write {{ and }} for literal braces)"
                )
            if not value:
                raise CommandError(
                    f"placeholder {{{name}}} in {word!r} has no present value; "
                    f"write {{{name}:VALUE}}"
                )
            if present.setdefault(name, value) != value:
                raise CommandError(
                    f"placeholder {{{name}}} has two present values, {present[name]!r} and "
                    f"{value!r}; write the same in both places"
                )
    if "batch_size" in present:
        check_batch_size(present["batch_size"], "placeholder {batch_size}")
    if "amp" in present:
        other_precision(present["amp"])
    return present


def check_batch_size(text: str, where: str) -> int:
    """A positive whole number, or :class:`CommandError`."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise CommandError(f"{where}: {text!r} is no batch size; give a whole number from 1 on")
    return int(text)


def is_on(value: str) -> bool:
    """Does an ``amp`` value switch autocast on?"""
    return value in {on for on, _ in _ON_OFF} | {"bf16", "fp16", "bfloat16", "float16"}


def other_precision(value: str) -> str:
    """The ``amp`` value that means the opposite, in the same spelling."""
    for on, off in _ON_OFF:
        if value in (on, off):
            return off if value == on else on
    if value in _PRECISIONS:
        short = value in ("bf16", "fp16", "no", "fp32")
        if is_on(value):
            return "no" if short else "float32"
        return "bf16" if short else "bfloat16"
    known = [*(v for pair in _ON_OFF for v in pair), *_PRECISIONS]
    raise CommandError(
        f"placeholder {{amp}}: {value!r} is not understood; write one of {', '.join(known)}"
    )


def _environment(plain: Sequence[str]) -> tuple[dict[str, str], int]:
    found: dict[str, str] = {}
    at = 0
    while at < len(plain) and _ASSIGNMENT.match(plain[at]):
        name, _, value = plain[at].partition("=")
        found[name] = value
        at += 1
    return found, at


def _skip_wrappers(plain: Sequence[str], at: int) -> tuple[int, dict[str, str]]:
    """Past ``taskset -c 0-7``, ``nice -n 10``, ``env NAME=value`` and the like."""
    environment: dict[str, str] = {}
    while at < len(plain) and Path(plain[at]).name in _WRAPPERS:
        count = _WRAPPERS[Path(plain[at]).name]
        at += 1
        if count >= 0:
            at += count
        else:
            while at < len(plain) and plain[at].startswith("-"):
                at += 1
        more, skipped = _environment(plain[at:])
        environment |= more
        at += skipped
    return at, environment


def _python_command(
    words: Sequence[str],
    plain: Sequence[str],
    at: int,
    present: Mapping[str, str],
    environment: Mapping[str, str],
) -> Command:
    python = plain[at] if os.sep in plain[at] else sys.executable
    at += 1
    flags: list[str] = []
    while at < len(plain) and plain[at].startswith("-") and plain[at] != "-":
        if plain[at] == "-m" and at + 1 < len(plain):
            return Command(
                tuple(words), present, environment, python, tuple(flags),
                "module", plain[at + 1], at + 2,
            )  # fmt: skip
        if plain[at] == "-c":
            raise CommandError(
                "python -c: code in the command cannot be planned; put it into a file"
            )
        flags.append(plain[at])
        if plain[at] in _FLAGS_WITH_VALUE and at + 1 < len(plain):
            at += 1
            flags.append(plain[at])
        at += 1
    if at >= len(plain):
        raise CommandError(f"{' '.join(words)!r}: no script after python; name one")
    script = plain[at]
    if not Path(script).is_file():
        raise CommandError(
            f"script {script!r}: there is no such file here; check the path "
            f"(the working directory is {os.getcwd()})"
        )
    return Command(
        tuple(words), present, environment, python, tuple(flags), "script", script, at + 1
    )


def _script_command(
    words: Sequence[str],
    plain: Sequence[str],
    at: int,
    present: Mapping[str, str],
    environment: Mapping[str, str],
) -> Command:
    """A console script (``lightning``, ``my-train``) or an executable Python file."""
    name = plain[at]
    beside = Path(sys.executable).with_name(name)
    found = shutil.which(name) or (str(beside) if beside.is_file() else None)
    if found is None:
        raise CommandError(
            f"program {name!r}: there is no such program; begin the command with "
            "`python script.py` or the name of an installed console script"
        )
    with open(found, "rb") as stream:
        first = stream.readline(512)
    if not first.startswith(b"#!") or b"python" not in first:
        raise CommandError(
            f"program {found!r} is no Python program; begin the command with `python script.py`"
        )
    words_of_shebang = first[2:].decode(errors="replace").split()
    python = words_of_shebang[0] if "env" not in words_of_shebang[0] else sys.executable
    return Command(tuple(words), present, environment, python, (), "script", found, at + 1)


def _fill(word: str, values: Mapping[str, str]) -> str:
    filled = _PLACEHOLDER.sub(lambda m: values.get(m.group(1), m.group(0)), word)
    return filled.replace("{{", "{").replace("}}", "}")


def _quote(word: str) -> str:
    """Shell quoting that leaves an assignment's name readable."""
    match = _ASSIGNMENT.match(word)
    if match:
        return match.group(0) + shlex.quote(word[match.end() :]) if word[match.end() :] else word
    return shlex.quote(word)
