"""Constructors of findings: three verdicts, and evidence that names its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from trainfit.results.files.facts import Fact
from trainfit.results.machine.doctor import Check, Evidence, Fix

T = TypeVar("T")


def evidence(what: str, fact: Fact[T], show: Callable[[T], Any] = str) -> Evidence:
    """A fact as evidence: its value in words, or why there is none."""
    if fact.value is not None:
        return Evidence(what, str(show(fact.value)), fact.source)
    state = "none" if fact.is_absent else "cannot tell"
    return Evidence(what, f"{state} ({fact.reason})", fact.source)


def good(name: str, summary: str, found: Sequence[Evidence] = (), why: str = "") -> Check:
    """Nothing is wrong."""
    return Check(name, "good", "", summary, why, tuple(found))


def bad(
    name: str,
    cause: str,
    summary: str,
    why: str,
    found: Sequence[Evidence],
    remedies: Sequence[Fix],
) -> Check:
    """Something costs the job its GPU, speed or memory; ``cause`` is a stable identifier."""
    return Check(name, "bad", cause, summary, why, tuple(found), tuple(remedies))


def unsure(name: str, summary: str, needed: str, found: Sequence[Evidence] = ()) -> Check:
    """Undetermined; ``needed`` says what would be needed to tell."""
    return Check(name, "cannot_tell", "", summary, needed, tuple(found))
