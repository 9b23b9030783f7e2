"""The options of a command: those that its script's parser knows, and words that look like some.

A script that reads its words itself (``name=value`` of Hydra, a loop over ``sys.argv``) has no
parser that could be asked; neither have variables before the program, and a launcher's words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import as_switch, placeholders
from trainfit.plan.options.names import tunable_of, without_negation
from trainfit.plan.options.words import Candidate
from trainfit.results.files.errors import TrainfitError
from trainfit.results.runs.script_option import ScriptOption
from trainfit.scripts.options.words import OptionPlace, place_of

#: ``--name=value``, ``name=value``, Hydra's ``+name=value``, a variable.
_ASSIGNED: Final = re.compile(r"((?:\+{0,2}|-{0,2})[A-Za-z_][\w./\-]*)=(.*)", re.DOTALL)
_FLAG: Final = re.compile(r"-{1,2}[A-Za-z_][\w.\-]*")


def candidates(command: Command, options: Sequence[ScriptOption]) -> list[Candidate]:
    """All options of ``command``, of which ``options`` are its parser's; none of those that hold a
    placeholder of the user's."""
    begins = command.arguments_at
    arguments = command.words[begins:]
    known = {flag for each in options for flag in (*each.flags, *each.off)}
    found, taken = [], set()
    for option in options:
        place = _last(
            place_of(arguments, option.flags, known, switch=option.switch, bare=option.bare),
            place_of(arguments, option.off, known, switch=True),
        )
        if option.given != (place is not None):
            continue  # its parser reads the words in another way
        if place is not None:
            place = _moved(place, begins)
            taken |= {place.at, place.value_at}
        found.append(Candidate(_upright(option), place))
    found += _literals(command, known, {at for at in taken if at is not None})
    return [each for each in found if not _is_marked(command, each)]


def _last(one: OptionPlace | None, other: OptionPlace | None) -> OptionPlace | None:
    """The later of two: it counts."""
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda place: place.at)


def _moved(place: OptionPlace, by: int) -> OptionPlace:
    value_at = None if place.value_at is None else place.value_at + by
    return OptionPlace(place.at + by, place.flag, value_at, place.start)


def _upright(option: ScriptOption) -> ScriptOption:
    """A switch that is named by what it switches off ("--no-amp"), as its opposite."""
    if not option.switch or option.off or any(map(tunable_of, option.flags)):
        return option
    name = next(filter(None, map(without_negation, option.flags)), "")
    if not name:
        return option

    def turned(text: str | None) -> str:
        return str(not as_switch(text))

    return ScriptOption(
        flags=(),
        name=name,
        value=turned(option.value),
        given=option.given,
        switch=True,
        default=turned(option.default),
        off=option.flags,
        ahead=option.ahead,
    )


def _is_marked(command: Command, candidate: Candidate) -> bool:
    place = candidate.place
    if place is None:
        return False
    words = {command.words[at] for at in (place.at, place.value_at) if at is not None}
    return any(map(_has_braces, words))


def _has_braces(word: str) -> bool:
    """Is there anything in it that is, or may become, a placeholder?"""
    try:
        return bool(placeholders([word])) or "{{" in word
    except TrainfitError:
        return True


# -- words that no parser told of --------------------------------------------------------------


def _literals(command: Command, known: set[str], taken: set[int]) -> Iterator[Candidate]:
    for at in command.assignments_at:
        yield from _assigned(command.words[at], at)
    launcher = command.launcher
    if launcher is not None:
        own = range(launcher.begins, launcher.ends)
        for each in _in_words(command, own, set(), set()):
            # What else a launcher is told is of processes.
            if tunable_of(each.shown) == "amp":
                yield each
    yield from _in_words(command, range(command.arguments_at, len(command.words)), known, taken)


def _in_words(
    command: Command, places: range, known: set[str], taken: set[int]
) -> Iterator[Candidate]:
    words = command.words
    for at in places:
        word = words[at]
        if at in taken:
            continue
        if word == "--" and word not in known:
            return
        if _ASSIGNED.fullmatch(word):
            if word.partition("=")[0] not in known:
                yield from _assigned(word, at)
        elif _FLAG.fullmatch(word) and word not in known:
            follows = at + 1 in places and at + 1 not in taken and words[at + 1][:1] != "-"
            value = words[at + 1] if follows else "True"
            place = OptionPlace(at, word, at + 1 if follows else None)
            yield Candidate(_literal(word, value, switch=not follows), place)


def _assigned(word: str, at: int) -> Iterator[Candidate]:
    match = _ASSIGNED.fullmatch(word)
    if match is not None:
        place = OptionPlace(at, match[1], at, len(match[1]) + 1)
        yield Candidate(_literal(match[1], match[2], switch=False), place)


def _literal(name: str, value: str, *, switch: bool) -> ScriptOption:
    """An option of which only the words are known; without its word a switch is off."""
    default = "False" if switch else None
    return ScriptOption((name,), name, value, given=True, switch=switch, default=default)
