"""Prints a plan on standard output: one screen, in colour on a terminal, or the whole report."""

from __future__ import annotations

import argparse
from typing import Final

from rich.console import Console
from rich.text import Text

from trainfit.report.plan.screen import Style, plan_screen, screen_text
from trainfit.report.plan.text import plan_text
from trainfit.results.plan.result import PlanResult

#: In rich's words; NO_COLOR leaves bold and dim, a pipe nothing at all.
STYLES: Final[dict[Style, str]] = {
    "good": "bold green",
    "bad": "bold red",
    "title": "bold",
    "plain": "",
    "quiet": "dim",
}


def print_plan(result: PlanResult, options: argparse.Namespace) -> None:
    """As ``--json`` and ``--explain`` ask for it."""
    if options.json:
        print(result.printed(), flush=True)
    elif options.explain:
        print(plan_text(result), flush=True)
    else:
        _print_screen(result)


def _print_screen(result: PlanResult) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        print(screen_text(result), flush=True)
        return
    for text in styled(result, console.width):
        # A line of the launch command that is too long stays one line when it is copied.
        console.print(text, soft_wrap=True)


def styled(result: PlanResult, columns: int) -> list[Text]:
    """The lines of the screen as a terminal of so many columns shows them."""
    return [Text(line.text, STYLES[line.style]) for line in plan_screen(result, columns)]
