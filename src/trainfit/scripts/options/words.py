"""Positions of an option in a command line, as argparse and click parse it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence


@dataclasses.dataclass(frozen=True)
class OptionPlace:
    """``words[at]`` names an option, by ``flag``; its value is ``words[value_at][start:]``
    (``value_at`` of ``None``: it stands without one)."""

    at: int
    flag: str
    value_at: int | None = None
    start: int = 0


def is_name(flag: str) -> bool:
    """Is it an option in ``name=value`` alone?"""
    return flag[:1] not in ("", "-", "+")


def place_of(
    words: Sequence[str],
    flags: Sequence[str],
    known: Collection[str] = (),
    *,
    switch: bool = False,
    bare: bool = False,
) -> OptionPlace | None:
    """The last place in ``words`` that says the option with these ``flags``, which is the one that
    counts; ``None`` where none does.

    ``known`` are the flags of all options: a beginning of one of ours that is of no other is an
    abbreviation. ``switch``: it takes no value; ``bare``: it may stand without. What follows "--"
    are no options.
    """
    found = None
    for at, word in enumerate(words):
        if word == "--":
            break
        flag, joined = _flag_in(word, flags, known, switch=switch)
        if not flag:
            continue
        if joined is not None:
            found = OptionPlace(at, flag, at, joined)
        elif is_name(flag):
            continue
        elif switch or (bare and not _is_value(words, at + 1)):
            found = OptionPlace(at, flag)
        elif at + 1 < len(words):
            found = OptionPlace(at, flag, at + 1)
    return found


def _flag_in(
    word: str, flags: Sequence[str], known: Collection[str], *, switch: bool
) -> tuple[str, int | None]:
    """The flag that ``word`` is or begins with (empty: none of ours), and where in the word its
    value begins (``None``: not in this word)."""
    name, equals, _ = word.partition("=")
    start = len(name) + 1 if equals else None
    if name in flags:
        return name, start
    if name in known:
        return "", None
    if name.startswith("--") and len(name) > len("--"):
        meant = {flag for flag in known if flag.startswith(name)}
        ours = [flag for flag in flags if flag in meant]
        return (ours[0], start) if ours and meant <= set(flags) else ("", None)
    if switch:
        return "", None
    short = next((flag for flag in flags if _is_short(flag) and word.startswith(flag)), "")
    return (short, len(short) + (word[len(short) : len(short) + 1] == "=")) if short else ("", None)


def _is_short(flag: str) -> bool:
    return len(flag) == len("-x") and flag[0] == "-" != flag[1]


def _is_value(words: Sequence[str], at: int) -> bool:
    return at < len(words) and not words[at].startswith("-")
