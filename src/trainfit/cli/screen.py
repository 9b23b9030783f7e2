"""Prints results on standard output: one screen, in colour on a terminal, or the whole report."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from rich.console import Console
from rich.text import Text

from trainfit.report.plan.screen import plan_screen
from trainfit.report.plan.text import plan_text
from trainfit.report.screen import Line, Style, lines_of, plain_text
from trainfit.results.plan.result import PlanResult
from trainfit.results.text import columns as screen_columns

#: In rich's words; NO_COLOR leaves none of it, nor does a pipe.
STYLES: Final[dict[Style, str]] = {
    "good": "bold green",
    "bad": "bold red",
    "title": "bold",
    "plain": "",
    "quiet": "dim",
}
#: What a result is shown as: its screen, and the whole report.
Report = Callable[[Any], Sequence[Line] | str]


def print_shown(
    result: Any, options: argparse.Namespace, screen: Report, whole: Report, json: str = ""
) -> None:
    """As ``--json`` (``json`` or the result's own) and ``--explain`` ask for it."""
    if options.json:
        print(json or result.to_json(), flush=True)
    else:
        print_lines((whole if options.explain else screen)(result))


def print_plan(result: PlanResult, options: argparse.Namespace) -> None:
    """Likewise; the printed document of a plan has no timeline."""
    json = result.printed() if options.json else ""
    print_shown(result, options, lambda plan: plan_screen(plan, screen_columns()), plan_text, json)


def print_lines(shown: Sequence[Line] | str, *, stderr: bool = False) -> None:
    """Lines in their styles on a terminal; as they are in a pipe, and with NO_COLOR."""
    lines = lines_of(shown) if isinstance(shown, str) else shown
    console = make_console(stderr=stderr)
    if not console.is_terminal:
        print(plain_text(lines), file=console.file, flush=True)
        return
    for line in lines:
        # A command that is too long stays one line when it is copied.
        console.print(_text(line), soft_wrap=True)


def make_console(*, stderr: bool = False) -> Console:
    """The terminal; NO_COLOR, of which rich leaves bold and dim, means no styles at all."""
    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(stderr=stderr, color_system=colors, highlight=False, markup=False, emoji=False)


def styled(result: PlanResult, columns: int) -> list[Text]:
    """The lines of a plan's screen as a terminal of so many columns shows them."""
    return [_text(line) for line in plan_screen(result, columns)]


def _text(line: Line) -> Text:
    return Text(line.text, STYLES[line.style])
