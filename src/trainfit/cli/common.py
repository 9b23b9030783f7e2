"""Options and checks shared by several commands; imports nothing that takes time."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainfit.results.files.errors import TrainfitError
from trainfit.results.runs.script import STAND_INS, SandboxRequest
from trainfit.results.text import printable

_SIZE = re.compile(
    r"(?P<number>\d{1,15}(?:\.\d+)?)\s*(?P<unit>gib|mib|kib|gb|mb|kb|b|)", re.I | re.A
)
_UNITS = {
    unit + suffix: base**power
    for power, unit in enumerate(("", "k", "m", "g"))
    for suffix, base in (("", 1), ("b", 1000), ("ib", 1024))
    if unit or suffix != "ib"
}

_TIME = re.compile(r"(?P<number>\d{1,9}(?:\.\d*)?|\.\d+)\s*(?P<unit>us|µs|ms|s|min|h|)", re.A)
_TIME_UNITS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0}


#: What options are added to: a parser, or a group of it with a heading.
OptionGroup = argparse._ArgumentGroup | argparse.ArgumentParser


Split = Callable[[argparse.ArgumentParser, Sequence[str]], tuple[list[str], list[str]]]


@dataclass(frozen=True)
class VerbOptions:
    """What can be typed after a verb.

    Attributes:
        configure: adds the options to a parser.
        description: what the verb does, for its help; ``usage`` and ``epilog`` as in argparse.
        split: divides the words into our own options and the user's command, where one follows.
    """

    configure: Callable[[argparse.ArgumentParser], None]
    description: str
    usage: str
    epilog: str | None = None
    split: Split | None = None


class UsageError(TrainfitError):
    """Options that cannot work together or have impossible values."""


def add_gpu(group: OptionGroup) -> None:
    """Add ``--gpu``."""
    group.add_argument(
        "--gpu",
        metavar="NAME",
        help='GPU to simulate: "RTX 4090", a100-80gb-sxm, custom:24GiB, or a rented machine with '
        'its processor: "Colab T4", g5.xlarge; default: this machine\'s',
    )


def add_device_memory(group: OptionGroup) -> None:
    """Add the options for GPU memory that PyTorch does not use."""
    group.add_argument(
        "--profile",
        type=file_path,
        metavar="FILE",
        help="GPU profile that `trainfit calibrate` wrote",
    )
    group.add_argument(
        "--force-profile",
        action="store_true",
        help="use the profile even if it was measured on another GPU or driver",
    )
    group.add_argument(
        "--other-processes",
        type=memory_size,
        metavar="SIZE",
        help="GPU memory that other processes use, such as 800MiB (default: current use on this "
        "machine's GPU, 0 for a GPU given by name)",
    )


def add_simulation(group: OptionGroup) -> None:
    """Add the options of every simulated run: ``--steps`` and ``--time-limit``."""
    group.add_argument(
        "--steps",
        type=whole_number,
        default=None,
        metavar="N",
        help="optimizer steps to simulate (default: until memory no longer changes from step to "
        "step, 3 to 12)",
    )
    group.add_argument(
        "--time-limit",
        type=seconds,
        default=600.0,
        metavar="S",
        help="time limit of one simulated run in seconds, not counting those for which others "
        "have this machine's cores (default 600)",
    )
    group.add_argument(
        "--assume-installed",
        type=stand_ins,
        default=(),
        metavar="NAME,…",
        help="packages that are not installed here and will be where it runs: stand-ins take their "
        f"place ({', '.join(STAND_INS)}; by default where the script fails without)",
    )


def stand_ins(text: str) -> tuple[str, ...]:
    """Packages that there are stand-ins for, with commas between them."""
    names = tuple(dict.fromkeys(part.strip().replace("-", "_") for part in text.split(",")))
    if unknown := [name for name in names if name not in STAND_INS]:
        raise argparse.ArgumentTypeError(
            f"there is no stand-in for {unknown[0]!r}: there is for {', '.join(STAND_INS)}; "
            "install others here"
        )
    return names


def add_protection(parser: argparse.ArgumentParser) -> None:
    """Add the options for files that a script writes."""
    group = parser.add_argument_group("files that the script writes")
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--allow-writes",
        action="store_true",
        help="let the script write its files (default: writes go to a scratch layer that is "
        "discarded at the end)",
    )
    choice.add_argument(
        "--keep-writes",
        metavar="DIR",
        help="copy what the script would have written to DIR, a new or empty folder",
    )


def sandbox_request(options: argparse.Namespace) -> SandboxRequest:
    """The sandbox that ``--allow-writes`` and ``--keep-writes`` ask for; raises
    :class:`UsageError`."""
    if options.keep_writes is None:
        return SandboxRequest(allow_writes=options.allow_writes)
    folder = Path(options.keep_writes).absolute()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--keep-writes {options.keep_writes!r} is a file; name a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(
            f"--keep-writes {options.keep_writes!r} is not empty; name a new folder, or empty it"
        )
    parent = folder if folder.is_dir() else folder.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UsageError(
            f"--keep-writes {options.keep_writes!r}: {str(parent)!r} is not writable; name "
            "another folder"
        )
    return SandboxRequest(keep=str(folder))


def add_json(group: OptionGroup) -> None:
    """Add ``--json``."""
    group.add_argument("--json", action="store_true", help="print one JSON document instead")


def add_result(group: OptionGroup) -> None:
    """Add the options for the form of the result: ``--json`` and ``--output``."""
    add_json(group)
    group.add_argument("-o", "--output", metavar="FILE", help="also write the result to FILE")


def add_explain(
    group: OptionGroup,
    what: str = "memory breakdown, remedies, notes and the sources of the figures",
) -> None:
    """Add ``--explain`` and ``-v``."""
    group.add_argument(
        "-v", "--explain", action="store_true", help=f"show the whole report: {what}"
    )


def split_command(
    parser: argparse.ArgumentParser, words: Sequence[str], *, module: bool = False
) -> tuple[list[str], list[str]]:
    """Our own options, and the user's command, untouched.

    The command begins behind the first ``--``, or with the first word that is neither one
    of the parser's options nor the value of one. With ``module`` it may begin with ``-m`` too.
    An option that may do without its value (``--remedies``) has the next word where that leads
    to a ``--``.
    """
    with_value = options_with_value(parser)
    for valued in (with_value | options_with_value(parser, "?"), with_value):
        index = 0
        while index < len(words) and words[index] != "--":
            if not words[index].startswith("-") or (module and words[index].startswith("-m")):
                break
            index += 2 if words[index] in valued and words[index + 1 : index + 2] != ["--"] else 1
        if words[index : index + 1] == ["--"]:
            return list(words[:index]), list(words[index + 1 :])
    return list(words[:index]), list(words[index:])


def options_with_value(parser: argparse.ArgumentParser, nargs: str | None = None) -> frozenset[str]:
    """The parser's options whose next word is their value (``nargs`` "?": may be)."""
    return frozenset(
        name
        for action in parser._actions
        if action.nargs == nargs
        for name in action.option_strings
    )


def progress(text: str) -> None:
    """One line on standard error; results alone go to standard output."""
    # Written at once: several threads may write.
    sys.stderr.write(f"trainfit: {printable(text)} …\n")
    sys.stderr.flush()


def discard_output() -> None:
    """Discard output after the reader (head, less) has closed the pipe: nothing may be flushed to
    it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def only_ascii() -> bool:
    """Does the terminal's (or the file's) encoding lack block characters?"""
    try:
        "▁█│└┬".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def whole_number(text: str) -> int:
    """An argparse type: 1, 2, 3 …"""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def file_path(text: str) -> Path:
    """An argparse type: a path; an empty one, as of a variable that is not set, is none."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def memory_size(text: str) -> int:
    """An argparse type: ``800MiB``, ``1.5GiB``, ``2GB``, or a plain number of bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 800MiB or 1.5GiB, got {text!r}")
    return int(float(match["number"]) * _UNITS[match["unit"].lower()])


def number(text: str) -> float:
    """The number that a text is; NaN, which is within no bounds, where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def seconds(text: str) -> float:
    """An argparse type: a positive number of seconds, as far as a clock can wait."""
    value = number(text)
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def duration(
    text: str, what: str = "time", example: str = "30s or 0.5", most_s: float = 3600.0
) -> float:
    """An argparse type: ``0.04``, ``0.04s``, ``40ms``, ``800us``, ``5min``; in seconds."""
    match = _TIME.fullmatch(text.strip())
    value = float(match["number"]) * _TIME_UNITS[match["unit"]] if match is not None else -1.0
    if not 0 < value <= most_s:
        raise argparse.ArgumentTypeError(
            f"expected a {what} above 0 and up to an hour, such as {example}, got {text!r}"
        )
    return value


def share(text: str) -> float:
    """An argparse type: ``0.1`` or ``10%``, from 0 to below 1."""
    value = number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a share from 0 to below 1 (100%), got {text!r}")
    return value
