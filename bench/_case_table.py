"""The cases of bench/cases.py: what a folder's ``cases.toml`` says of its scripts.

``[commands]`` has command lines by name; ``{script}`` (always "train.py") and ``{out}`` (where
the result is to be written) are filled in. Each ``[case.NAME]`` has:

    section      what it is of, a number: figures are made of each
    command      one of the names, or a command line of its own
    script       the file (default: NAME.py)
    first        regular expressions, each of which must match in the first lines of the screen
    screen       the same, anywhere on the screen
    kinds        findings that must be among the result's; "a|b": one of them
    never        regular expressions that must match nowhere on the faulty script's screen
    replace, by  how the fault is fixed: text of the script that stands in it once
    and_replace, and_by    the same again
    fixed        regular expressions for the first lines of the fixed script's screen
    allow        kinds of findings that the fixed script may have as well

Screens are compared as one line, with spaces as one. The fixed script is right if no finding of
``kinds`` is among the result's, none that is critical or a warning, nothing of ``first`` on the
screen's first lines (unless ``fixed`` says what is), and the exit status is 0. A case without
``replace`` has nothing to fix: trainfit has to manage the script as it is.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

#: The name under which every script is run: its own would match what its screen has to say.
NEUTRAL: Final = "train.py"
#: Lines of a screen that are its first.
FIRST_LINES: Final = 8
#: Findings that say what else the machine does, which no script decides.
_OF_THE_MACHINE: Final = frozenset(
    {"cpu_contention", "cgroup_throttling", "swapping", "ram_near_limit", "gpu_shared"}
)


class TableError(Exception):
    """A table that cannot be used: the file, the case, the reason."""


@dataclasses.dataclass(frozen=True)
class FaultCase:
    """A script with a fault, and how to fix it; the module's docstring says the rest."""

    name: str
    command: str
    section: int = 0
    script: str = ""
    first: tuple[str, ...] = ()
    screen: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    replace: str = ""
    by: str = ""
    and_replace: str = ""
    and_by: str = ""
    fixed: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return self.script or f"{self.name}.py"

    @property
    def has_counterpart(self) -> bool:
        """Is there a healthy counterpart?"""
        return bool(self.replace)

    def fixed_script(self, text: str) -> str:
        """The script without the fault; raises :class:`TableError` where the text to replace is
        not there once."""
        for old, new in ((self.replace, self.by), (self.and_replace, self.and_by)):
            if old and text.count(old) != 1:
                raise TableError(
                    f"case {self.name}: {old!r} stands {text.count(old)} times in {self.file}; "
                    "give text that stands there once"
                )
            text = text.replace(old, new) if old else text
        return text


@dataclasses.dataclass(frozen=True)
class Answer:
    """What trainfit said: its screen, the result's findings (kind, severity), its exit status."""

    screen: str
    findings: tuple[tuple[str, str], ...]
    status: int

    @property
    def first(self) -> str:
        return on_one_line("\n".join(self.screen.splitlines()[:FIRST_LINES]))

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(kind for kind, _ in self.findings)


def load(folder: Path) -> list[FaultCase]:
    """The cases of a folder, in the table's order; raises :class:`TableError`."""
    path = folder / "cases.toml"
    try:
        document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TableError(f"{path}: {error.strerror}; --cases expects a folder with it") from None
    except ValueError as error:
        raise TableError(f"{path}: {error}") from None
    commands = document.get("commands", {})
    return [_case(name, row, commands, folder) for name, row in document.get("case", {}).items()]


def _case(name: str, row: dict[str, Any], commands: dict[str, str], folder: Path) -> FaultCase:
    unknown = set(row) - {field.name for field in dataclasses.fields(FaultCase)} | {"name"} & set(
        row
    )
    if unknown:
        raise TableError(f"case {name}: unknown {', '.join(sorted(unknown))}")
    if "command" not in row:
        raise TableError(f"case {name}: no command")
    values = {key: tuple(each) if isinstance(each, list) else each for key, each in row.items()}
    values["command"] = commands.get(row["command"], row["command"])
    case = FaultCase(name=name, **values)
    if not (folder / case.file).is_file():
        raise TableError(f"case {name}: there is no {case.file}; give its script")
    return case


def on_one_line(text: str) -> str:
    """Its words with one space in between: how wide the screen was does not matter."""
    return " ".join(text.split())


def faults(case: FaultCase, answer: Answer) -> list[str]:
    """What is wrong with what was said of the faulty script; nothing: it is right."""
    whole = on_one_line(answer.screen)
    wrong = [f"first lines lack {each!r}" for each in _missing(case.first, answer.first)]
    wrong += [f"the screen lacks {each!r}" for each in _missing(case.screen, whole)]
    for kind in case.kinds:
        if not answer.kinds & set(kind.split("|")):
            text = ", ".join(sorted(answer.kinds)) or "none"
            wrong.append(f"no finding {kind} (found: {text})")
    return wrong + [f"the screen has {each!r}" for each in _matching(case.never, whole)]


def alarms(case: FaultCase, answer: Answer) -> list[str]:
    """What is wrong with what was said of the fixed script."""
    target = {kind for each in case.kinds for kind in each.split("|")} - set(case.allow)
    wrong = [
        f"finding {kind} ({severity})"
        for kind, severity in answer.findings
        if kind in target
        or (severity != "info" and kind not in _OF_THE_MACHINE and kind not in case.allow)
    ]
    if case.fixed:
        wrong += [f"first lines lack {each!r}" for each in _missing(case.fixed, answer.first)]
    else:
        wrong += [f"first lines have {each!r}" for each in _matching(case.first, answer.first)]
    return wrong + ([f"exit status {answer.status}"] if answer.status else [])


def _missing(patterns: Sequence[str], text: str) -> list[str]:
    return [pattern for pattern in patterns if not re.search(pattern, text)]


def _matching(patterns: Sequence[str], text: str) -> list[str]:
    return [pattern for pattern in patterns if re.search(pattern, text)]
