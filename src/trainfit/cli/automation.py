"""What programs ask of commands: ``--fail-if`` conditions on a result, and its ``--format``."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import importlib
import json
import operator
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from trainfit.cli.common import OptionGroup, UsageError, duration, memory_size
from trainfit.results.files.contents import Metered, MetricName, MetricUnit, metric
from trainfit.results.text import duration as duration_text
from trainfit.results.text import percent, size, three_digits

if TYPE_CHECKING:
    from trainfit.results.files.contents import Metered


# ---
# ``--fail-if``: conditions on the numbers of a result, told by the exit code.


_OPERATORS: Final[dict[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION: Final = re.compile(r"\s*([A-Za-z][\w/]*)\s*([<>]=?)\s*(\S.*?)\s*")
_EXAMPLE: Final = "'device > 22GiB'"
_NUMBER: Final = re.compile(r"(\d{1,15}(?:\.\d+)?)\s*(%|/s|hz|)", re.I | re.A)
#: How a quantity of each unit may be written, with the ends that are no more than its unit's name.
_WRITTEN: Final[dict[MetricUnit, tuple[str, tuple[str, ...]]]] = {
    "bytes": ("22GiB, 800MiB", ()),
    "s": ("100ms, 2h", ()),
    "1/s": ("30, 30/s", ("", "/s", "hz")),
    "share": ("20%, 0.2", ("%", "")),
    "count": ("8", ("",)),
}


@dataclasses.dataclass(frozen=True)
class FailCondition:
    """``name`` compared with ``limit`` (seconds, bytes, a share, a count); ``text`` as typed."""

    text: str
    name: MetricName
    holds: Callable[[float, float], bool]
    limit: float


def add_fail_if(group: OptionGroup, kind: str = "") -> None:
    """Add ``--fail-if``.

    Conditions are checked at once where ``kind`` names the kind of result, as in
    "plan.result:PlanResult"; it is imported where the option is given. Else :func:`gated` does,
    when it knows the result.
    """
    group.add_argument(
        "--fail-if",
        action="append",
        type=functools.partial(_argument, kind) if kind else str,
        metavar="'NAME > X'",
        help=f"exit with 1 where a number of the result is so, as in {_EXAMPLE} (<, <=, >, >=), or "
        "is not known; repeat the option for more; step, samples/s, loader, …: an unknown name "
        "lists those that there are",
    )


def gated(options: argparse.Namespace, result: Metered, code: int) -> int:
    """``code``, or 1 where that is 0 and a condition holds or cannot be decided; says so on stderr.

    Raises :class:`UsageError` for a condition that is not one of this kind of result.
    """
    found, fails = result.quantities(), False
    for given in options.fail_if or ():
        each = _checked(type(result), given) if isinstance(given, str) else given
        value = found.get(each.name.key)
        if value is not None and not each.holds(value, each.limit):
            continue
        fails = True
        what = "cannot tell: it was neither measured nor predicted"
        if value is not None:
            what = f"it is {_said(value, each.name.unit)}"
        print(f"trainfit: --fail-if {each.text!r}: {what}", file=sys.stderr)
    return 1 if fails and code == 0 else code


def condition(kind: type[Metered], text: str) -> FailCondition:
    """What ``text`` asks of a result of this kind.

    Raises ``argparse.ArgumentTypeError``, to whose text the option's name is added.
    """
    parts = _CONDITION.fullmatch(text)
    if parts is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected NAME, one of < <= > >=, and a quantity, as in {_EXAMPLE}"
        )
    word, sign, quantity = parts.groups()
    names = _names(kind)
    if word not in names:
        near = difflib.get_close_matches(word, names, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(names) or "none"
        raise argparse.ArgumentTypeError(
            f"{text!r}: this result has no {word!r}{meant} (it has: {known})"
        )
    try:
        limit = _quantity(quantity, names[word].unit)
    except (argparse.ArgumentTypeError, ValueError):
        written, _ = _WRITTEN[names[word].unit]
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a number with its unit, such as {written}, got {quantity!r}"
        ) from None
    return FailCondition(text, names[word], _OPERATORS[sign], limit)


def _argument(kind: str, text: str) -> FailCondition:
    """An argparse type."""
    module, _, name = kind.partition(":")
    metered = getattr(importlib.import_module(f"trainfit.results.{module}"), name)
    return condition(metered, text)


def _checked(kind: type[Metered], text: str) -> FailCondition:
    """The condition of an option that argparse could not check."""
    try:
        return condition(kind, text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--fail-if {error}") from None


def _names(kind: type[Metered]) -> dict[str, MetricName]:
    return {each.short: each for each in map(metric, kind.METRICS)}


def _quantity(text: str, unit: MetricUnit) -> float:
    if unit == "bytes" and not text[-1].isdigit():
        return memory_size(text)
    if unit == "s" and not text[-1].isdigit():
        return duration(text, most_s=1e9)
    number = _NUMBER.fullmatch(text)
    if number is None or number[2].lower() not in _WRITTEN[unit][1]:
        raise ValueError(text)
    return float(number[1]) / (100 if number[2] == "%" else 1)


def _said(value: float, unit: MetricUnit) -> str:
    if unit == "bytes":
        return size(value)
    if unit == "s":
        return duration_text(value)
    if unit == "share":
        return percent(value, decimals=1)
    return f"{three_digits(value)}{'/s' if unit == '1/s' else ''}" if value % 1 else f"{value:g}"


# ---
# ``--format``: a result as something else than a screen or its whole document.


#: The forms of a launch line: :data:`trainfit.report.writers.launch_script.LaunchForm`, which takes
#: long to import.
LAUNCH: Final = ("sh", "sbatch", "docker")
METRICS: Final = "metrics"
SARIF: Final = "sarif"


def add_format(group: OptionGroup, *others: str) -> None:
    """Add ``--format`` with the forms of a launch line, and ``others``."""
    also = {
        METRICS: "metrics: the numbers as one flat JSON object",
        SARIF: "sarif: what `trainfit doctor --script` found",
    }
    group.add_argument(
        "--format",
        choices=(*LAUNCH, *others),
        help="print instead a script that runs the launch line: in a shell, by Slurm's sbatch, by "
        "docker run" + "".join(f"; {also[each]}" for each in others),
    )


def formatted(result: Metered, options: argparse.Namespace) -> str | None:
    """The result in the form that ``--format`` asks for; ``None``: it does not ask.

    Raises :class:`UsageError` for what such a result has not,
    :class:`trainfit.report.writers.launch_script.LaunchScriptError` where the job does not fit.
    """
    form = options.format
    if form is None:
        return None
    from trainfit.report.writers.launch_script import launch_script
    from trainfit.report.writers.sarif import sarif_text
    from trainfit.results.doctor import DoctorResult
    from trainfit.results.plan import PlanResult

    check_format(options)
    if form == METRICS:
        return json.dumps(result.metrics(), indent=2, allow_nan=False)
    if form == SARIF:
        if not isinstance(result, DoctorResult) or result.script is None:
            raise UsageError("--format sarif is for a result of `trainfit doctor --script`")
        return sarif_text(result.script)
    if not isinstance(result, PlanResult):
        raise UsageError(f"--format {form} is for a plan, which has a launch line")
    return launch_script(result, form).rstrip("\n")


def check_format(options: argparse.Namespace) -> None:
    """Raise :class:`UsageError` where two forms are asked for."""
    if options.format is not None and options.json:
        raise UsageError(f"--json and --format {options.format}: give one")
