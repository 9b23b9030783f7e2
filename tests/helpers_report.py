"""What is said of a result on a terminal, as text."""

from __future__ import annotations

from trainfit.report.blocks import Subject
from trainfit.report.layout import plain_text
from trainfit.report.writers import terminal


def whole(subject: Subject) -> str:
    """All of it, as ``--explain`` shows it."""
    return plain_text(terminal.whole(subject))


def screen(subject: Subject) -> str:
    """One screen."""
    return plain_text(terminal.screen(subject))


def on_one_line(text: str) -> str:
    """Without line breaks and columns."""
    return " ".join(text.split())
