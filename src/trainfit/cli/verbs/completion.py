"""``trainfit completion``: commands, options, GPUs and files for a shell's completion.

shtab makes the shell's code of argparse's parsers: pure Python without dependencies, three shells
and more, kept up; argcomplete instead would start Python at every press of the key.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

import shtab

from trainfit.cli.parser import VERBS, OptionParser
from trainfit.hardware import catalogue

#: Metavariables of files, of folders, and of GPUs by name.
_FILES: Final = ("FILE", "PATH", "RESULT", "RECORDING", "RECORDING2", "A", "B")
_GPUS: Final = ("--gpu", "--rehearse", "names")


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Print the completion; returns the exit code."""
    print(shtab.complete(whole_parser(), options.shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """All verbs as one parser's subcommands, with what each option's value is completed by."""
    whole = argparse.ArgumentParser(prog="trainfit")
    whole.add_argument("--version", action="store_true", help="print the version")
    verbs = whole.add_subparsers()
    gpus = gpu_names()
    for name, verb in VERBS.items():
        own = OptionParser(verb)
        parser = verbs.add_parser(name, help=verb.purpose, parents=[own], add_help=False)
        for action in parser._actions:
            _complete(action, gpus)
        if verb.options().split is not None:
            # Of "*" shtab makes one word for zsh.
            rest = parser.add_argument(
                "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command"
            )
            _set(rest, shtab.FILE)
    return whole


def gpu_names() -> list[str]:
    """The names of the catalogue's GPUs, as one word each: a space would end it in the shell."""
    return sorted(spec.key.lower().replace(" ", "-") for spec in catalogue())


def _complete(action: argparse.Action, gpus: Sequence[str]) -> None:
    if {action.dest, *action.option_strings} & set(_GPUS):
        action.choices = gpus
    elif action.metavar == "DIR":
        _set(action, shtab.DIRECTORY)
    elif action.metavar in _FILES or action.dest in ("results", "file", "target", "loader"):
        _set(action, shtab.FILE)


def _set(action: argparse.Action, completer: object) -> None:
    """shtab reads an attribute that argparse does not know."""
    vars(action)["complete"] = completer
