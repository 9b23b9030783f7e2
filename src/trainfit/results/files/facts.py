"""A fact about a machine: known, absent, or not to be told, and where it was read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

T = TypeVar("T")
U = TypeVar("U")

State = Literal["known", "absent", "cannot_tell"]


@dataclasses.dataclass(frozen=True)
class Fact(Generic[T]):
    """One fact, with ``source``, the file, call or variable that it was read from.

    ``absent`` means that the machine was asked and has no such thing (no swap, no cpufreq in a
    virtual machine); ``cannot_tell`` that it could not be asked. ``reason`` says why in both
    cases. ``value`` is ``None`` unless the fact is known.
    """

    state: State
    value: T | None
    source: str
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.state == "known") != (self.value is not None):
            raise ValueError(f"a fact of {self.source} is {self.state} with value {self.value!r}")

    @property
    def is_known(self) -> bool:
        return self.state == "known"

    @property
    def is_absent(self) -> bool:
        return self.state == "absent"

    def map(self, function: Callable[[T], U | None], wanted: str) -> Fact[U]:
        """What ``function`` makes of a known value; others stay what they are.

        Where it raises ``ValueError`` or gives ``None``, the text was not ``wanted`` and the
        fact cannot be told.
        """
        if self.value is None:
            return Fact(self.state, None, self.source, self.reason)
        try:
            result = function(self.value)
        except (ValueError, ArithmeticError, LookupError):
            result = None
        if result is None:
            shown = repr(self.value)
            shown = shown if len(shown) <= 60 else shown[:60] + "…"
            return cannot_tell(self.source, f"it says {shown}, not {wanted}")
        return known(result, self.source)


def known(value: T, source: str) -> Fact[T]:
    """A fact that was read."""
    return Fact("known", value, source)


def absent(source: str, reason: str) -> Fact[T]:
    """The machine has no such thing."""
    return Fact("absent", None, source, reason)


def cannot_tell(source: str, reason: str) -> Fact[T]:
    """The machine could not be asked, or its answer could not be read."""
    return Fact("cannot_tell", None, source, reason)
