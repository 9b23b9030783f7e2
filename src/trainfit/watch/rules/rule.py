"""What a rule is, and how its findings come about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainfit.results.watch.result import Finding, Unknown
from trainfit.watch.view import RunView

#: Gives findings, or what would be needed to tell; nothing where nothing is wrong.
Look = Callable[[RunView], Iterator[Finding | Unknown]]


@dataclass(frozen=True)
class Rule:
    """``kinds`` are the kinds of findings (and of unknowns) that ``look`` may give."""

    kinds: tuple[str, ...]
    look: Look
