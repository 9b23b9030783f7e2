"""What is said of a result on a terminal, as text."""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.report.blocks import Block, Headline, Section, Subject
from trainfit.report.layout import plain_text
from trainfit.report.sections.plan import plan_subject
from trainfit.report.writers import terminal
from trainfit.results.plan import PlanResult
from trainfit.results.text import laid_out_for


def whole(subject: Subject) -> str:
    """All of it, as ``--explain`` shows it."""
    return plain_text(terminal.whole(subject))


def screen(subject: Subject) -> str:
    """One screen."""
    return plain_text(terminal.screen(subject))


def on_one_line(text: str) -> str:
    """Without line breaks and columns."""
    return " ".join(text.split())


def plan_text(plan: PlanResult) -> str:
    """All of a plan."""
    return whole(plan_subject(plan))


def plan_screen(plan: PlanResult, columns: int = 80) -> str:
    """A plan on one screen."""
    with laid_out_for(columns):
        return screen(plan_subject(plan))


def of_sections(sections: Sequence[Section]) -> str:
    """All of these alone."""
    return whole(Subject(Headline("", "plain", ""), tuple(sections)))


def of_blocks(*blocks: Block | None) -> str:
    """All of these alone."""
    return of_sections([Section("", tuple(block for block in blocks if block is not None))])
