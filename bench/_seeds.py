"""What the table of the seeds consists of: commands, rows with their checks, verdicts.

A row's check gets what its commands answered (their JSON, in the order in which the row names
them) and gives a verdict with its figure. It raises, or gives none, where the answer lacks what it
needs: the row is then open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

GIB: Final = 1 << 30
MIB: Final = 1 << 20

Article = Literal["act", "utilisation", "t4", "conclusions"]
RowKind = Literal["practice", "formula", "symptom", "command"]
#: What becomes of a claim: it holds; not as it is written; where something else does; the command
#: gives what the claim asks for; nothing here can tell.
Outcome = Literal["agrees", "differs", "with a condition", "answered", "impossible here"]

ARTICLES: Final[Mapping[Article, str]] = {
    "act": "Hardware-aware training parameters, by the example of ACT (2026-06-06)",
    "utilisation": "GPU memory and utilisation, batch_size and num_workers (in Chinese)",
    "t4": "A rented T4: its figures, memory and batch size (in Chinese)",
    "conclusions": "Conclusions from training models (2025-08-15)",
}

#: What a command answered: its JSON document.
Answer = dict[str, Any]


@dataclass(frozen=True)
class Command:
    """A command as a user types it in a checkout of this repository.

    ``after`` names commands whose files this one reads. ``exits`` are the exit codes with which
    it has answered: 1 is bad news, and an answer.
    """

    name: str
    line: str
    after: tuple[str, ...] = ()
    exits: tuple[int, ...] = (0, 1)


@dataclass(frozen=True)
class Verdict:
    """What came of a claim, with the figure that says so."""

    outcome: Outcome
    text: str


@dataclass(frozen=True)
class Row:
    """A claim of an article, in our words, and how it is answered."""

    article: Article
    kind: RowKind
    claim: str
    commands: tuple[str, ...]
    check: Callable[..., Verdict]


#: Adds the check that it decorates to a list of rows.
Adder = Callable[[Callable[..., Verdict]], Callable[..., Verdict]]


def adds_to(rows: list[Row], article: Article) -> Callable[..., Adder]:
    """A decorator's maker, ``row(kind, claim, command, …)``, for the rows of an article."""

    def row(kind: RowKind, claim: str, *commands: str) -> Adder:
        def add(check: Callable[..., Verdict]) -> Callable[..., Verdict]:
            rows.append(Row(article, kind, claim, commands, check))
            return check

        return add

    return row


def agrees(text: str) -> Verdict:
    return Verdict("agrees", text)


def differs(text: str) -> Verdict:
    return Verdict("differs", text)


def holds(claim: bool, text: str) -> Verdict:
    """Do the figures of the text bear the claim out?"""
    return agrees(text) if claim else differs(text)


def condition(text: str) -> Verdict:
    return Verdict("with a condition", text)


def answered(text: str) -> Verdict:
    return Verdict("answered", text)


def impossible(text: str) -> Verdict:
    return Verdict("impossible here", text)


def within(value: float, low: float, high: float, unit: str, why_not: str) -> Verdict:
    """Does a figure lie in the article's range? ``why_not`` is said where it does not."""
    said = f"{value:.2f}{unit}, said {low:g} to {high:g}"
    return agrees(said) if low <= value <= high else differs(f"{said}: {why_not}")


def near(value: float, said: float, share: float, unit: str, why_not: str) -> Verdict:
    """Is a figure the article's, up to a share of it?"""
    shown = f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    text = f"{shown}{unit}, said {said:,.10g}"
    close = abs(value - said) <= share * abs(said)
    return agrees(text) if close else differs(f"{text}: {why_not}")


def only(items: Sequence[Answer], **wanted: Any) -> Answer:
    """The item with these values; an error where there is none, or more than one."""
    found = [each for each in items if all(each[key] == value for key, value in wanted.items())]
    if len(found) != 1:
        raise LookupError(f"{len(found)} items with {wanted}")
    return found[0]


def gib(nbytes: float) -> float:
    return nbytes / GIB


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def changes(advice: Sequence[Mapping[str, Any]]) -> str:
    """Changes beyond the settings: the predicted gain, or the share of the time it concerns."""
    return ", ".join(
        f"{each['kind']} {each['fixes'][0]['gain']:.2f}x"
        if each["fixes"][0]["gain"] is not None
        else f"{each['kind']} (concerns {percent(each['share'] or 0.0)} of the time)"
        for each in advice
    )


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"
