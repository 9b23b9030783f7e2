"""The verbs; from words to a verb and its options, what is wrong in at most three lines.

argparse stays: seventeen verbs have their options in it, their names are a promise, and
what it lacked is here in one place. Other libraries (click, cyclopts) would want every option
rewritten, and neither leaves the user's command behind the options alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NoReturn

from trainfit.cli.common import VerbOptions, options_with_value
from trainfit.cli.config import use_config
from trainfit.results.text import printable
from trainfit.version import __version__

# ---
# The verbs: what each is for, and where its options and its code are.


@dataclasses.dataclass(frozen=True)
class Verb:
    """A verb, and what it is for in one line of help.

    Its options are in the module ``{place}_options``, its code in the module of its name in
    :mod:`trainfit.cli.verbs`, or in that of ``beside``, a verb like it.
    """

    name: str
    purpose: str
    place: str
    beside: str = ""

    def options(self) -> VerbOptions:
        """What can be typed after it."""
        module = importlib.import_module(f"trainfit.cli.{self.place}_options")
        options: VerbOptions = getattr(module, self.name.upper())
        return options

    def code(self) -> Callable[[argparse.Namespace, Sequence[str]], int]:
        """What it does with options and a command. The import is slow; the help does without it."""
        module = importlib.import_module(f"trainfit.cli.verbs.{self.beside or self.name}")
        run: Callable[[argparse.Namespace, Sequence[str]], int]
        run = getattr(module, f"run_{self.name}" if self.beside else "run")
        return run


#: By the heading that they have in the help.
HEADINGS: Final[Mapping[str, tuple[Verb, ...]]] = {
    "before a run, no GPU needed": (
        Verb("plan", "memory, best batch size and launch command of a training command", "plan"),
        Verb(
            "simulate",
            "record a script on a simulated GPU and show its memory",
            "simulated",
            "memory",
        ),
        Verb("memory", "explain what uses the memory at the peak and by batch size", "simulated"),
        Verb("gpus", "list GPUs, explain their figures, compare them for a job", "simulated"),
        Verb(
            "sweep", "plan commands on GPUs, counts and values; which is best", "simulated", "gpus"
        ),
        Verb("batch", "what a smaller or larger batch does to learning", "results"),
    ),
    "the DataLoader": (
        Verb("loader", "DataLoader settings that keep the GPU from waiting", "plan"),
        Verb(
            "rehearse",
            "GPU utilization with the real DataLoader and a simulated step",
            "plan",
            "loader",
        ),
    ),
    "a real run": (
        Verb("watch", "run a training command and explain what limits it", "results"),
        Verb("compare", "say what changed from one watched run to another", "results", "watch"),
        Verb(
            "verify",
            "run a planned command for a few steps, compare with the prediction",
            "machine",
        ),
        Verb("pace", "inference at a fixed rate: why it is slow, and which fix helps", "machine"),
    ),
    "this machine": (
        Verb(
            "doctor", "why PyTorch sees no GPU, what makes jobs slow or short of memory", "machine"
        ),
        Verb("calibrate", "measure this machine's GPU, for plan and simulate", "machine", "verify"),
    ),
    "results": (
        Verb("show", "show a result file", "results", "report"),
        Verb("report", "make one page of results: HTML, Markdown, JSON or SVG", "results"),
    ),
    "the shell": (Verb("completion", "print the completion of bash, zsh or fish", "results"),),
}
VERBS: Final = {verb.name: verb for verbs in HEADINGS.values() for verb in verbs}


_FIRST: Final = 'trainfit plan --gpu "RTX 4090" -- python train.py'
#: A value that begins as an option does.
_NEGATIVE: Final = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)
#: How alike a word and what may be meant are at least, of 1.
_ALIKE: Final = 0.6
#: Words that begin a user's command.
_LAUNCHERS: Final = ("python", "python3", "torchrun", "accelerate", "uv", "deepspeed")


_OF_THE_COMMAND: Final = "; an option of your script goes behind the script's name"


class OptionParser(argparse.ArgumentParser):
    """A verb's parser, which says what is wrong in two lines."""

    def __init__(self, verb: Verb) -> None:
        options = verb.options()
        super().__init__(
            prog=f"trainfit {verb.name}",
            usage=options.usage,
            description=options.description,
            epilog=options.epilog,
            allow_abbrev=False,
        )
        options.configure(self)
        self._split = options.split
        self._verb = verb.name

    def read(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options, and the user's command; exits where they are wrong.

        Raises:
            ConfigError: a file of defaults says what no option is.
        """
        own, command = self._split(self, words) if self._split is not None else (list(words), [])
        own = self._checked(own, has_command=bool(command))
        if not {"-h", "--help"} & set(own):
            use_config(self, self._verb, own, VERBS, lambda name: OptionParser(VERBS[name]))
        options, rest = self.parse_known_intermixed_args(own)
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return options, command

    def print_help(self, file: Any = None) -> None:
        """Print the help, with an error where it cannot be written: argparse says nothing then."""
        (sys.stdout if file is None else file).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Say it with one line of usage; exit code 2."""
        first = " ".join(self.format_usage().split("\n")[0].split())
        usage = f"{first} ({self.prog} --help: all options)"
        self.exit(2, f"{usage}\n{self.prog}: error: {printable(message)}\n")

    def _checked(self, words: Sequence[str], has_command: bool) -> list[str]:
        """The words as argparse understands them: a negative number is the value that it is.

        Exits for an option that there is not, or that lacks its value.
        """
        found: list[str] = []
        left, with_value = list(words), options_with_value(self)
        while left:
            word = left.pop(0)
            if word == "--":
                return [*found, word, *left]
            if word.startswith("-") and word != "-" and not self._is_known(word):
                near = nearest(word.partition("=")[0], self._option_string_actions)
                asked = meant(near) if near or not has_command else _OF_THE_COMMAND
                self.error(f"unknown option {word.partition('=')[0]!r}{asked}")
            found.append(word)
            if word not in with_value:
                continue
            if not left or self._is_known(left[0]):
                self.error(f"{word} needs a value: {word} {self._example(word)}")
            value = left.pop(0)
            if word.startswith("--") and _NEGATIVE.match(value):
                found[-1] = f"{word}={value}"
            else:
                found.append(value)
        return found

    def _is_known(self, word: str) -> bool:
        known: dict[str, Any] = self._option_string_actions
        if word.startswith("--"):
            return word == "--" or word.partition("=")[0] in known
        return word[:2] in known and not _NEGATIVE.match(word)

    def _example(self, option: str) -> str:
        action: argparse.Action = self._option_string_actions[option]
        return self._get_formatter()._format_args(action, action.dest.upper())


def read_words(words: Sequence[str]) -> tuple[Verb, argparse.Namespace, list[str]]:
    """The verb, its options and the user's command; exits for help, and where they are wrong."""
    first = words[0] if words else ""
    if first in VERBS:
        options, command = OptionParser(VERBS[first]).read(words[1:])
        return VERBS[first], options, command
    if first == "help" and len(words) > 1:
        first, words = words[1], words[1:]
        if first in VERBS:
            OptionParser(VERBS[first]).read(["--help"])
    if first in ("-h", "--help", "help"):
        print(overview())
        sys.exit(0)
    if first == "--version":
        print(f"trainfit {__version__}")
        sys.exit(0)
    if not words:
        _refuse(f"trainfit {__version__} fits a PyTorch job to the hardware it runs on.",
                f"start with:   {_FIRST}", "all commands: trainfit --help")  # fmt: skip
    _refuse(
        "usage: trainfit COMMAND [options] (trainfit --help: all commands)",
        f"trainfit: error: {printable(_not_a_verb(first, words))}",
    )


def overview() -> str:
    """The help of the whole command."""
    lines = [
        "usage: trainfit COMMAND [options]",
        "",
        "Fit a PyTorch job to the hardware it runs on. Start with:",
        f"  {_FIRST}",
    ]
    for heading, verbs in HEADINGS.items():
        lines += ["", f"{heading}:", *(f"  {verb.name:<12}{verb.purpose}" for verb in verbs)]
    lines += ["", "  trainfit COMMAND --help   options of a command", "  trainfit --version"]
    return "\n".join(lines)


def nearest(word: str, known: Collection[str]) -> str:
    """What was meant by a mistyped word; empty where nothing is near."""
    longer = [each for each in known if len(word) > 2 and each.startswith(word)]
    if longer:
        return min(longer, key=len)
    matches = difflib.get_close_matches(word, known, n=1, cutoff=_ALIKE)
    return matches[0] if matches else ""


def _not_a_verb(word: str, words: Sequence[str]) -> str:
    if word.startswith("-"):
        return f"unknown option {word!r}: options go behind the command, as in {_FIRST}"
    if word in _LAUNCHERS or word.endswith(".py"):
        command = " ".join(words) if word in _LAUNCHERS else f"python {' '.join(words)}"
        return f"{word!r} is not a command of trainfit: trainfit plan -- {command}"
    return f"unknown command {word!r}{meant(nearest(word.lower(), VERBS))}"


def meant(near: str) -> str:
    """A question that ends a message: was ``near`` meant? Empty without one."""
    return f"; did you mean {near!r}?" if near else ""


def _refuse(*lines: str) -> NoReturn:
    print("\n".join(lines), file=sys.stderr)
    sys.exit(2)
