"""Writes tunables into the words of a command, at their options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from trainfit.plan.command.parsing import Command, Spelling
from trainfit.plan.command.tunables import as_switch, opposite_switch
from trainfit.results.runs.script import ScriptOption
from trainfit.scripts.option_parsers import OptionPlace, is_name

#: What stands for a boolean that is said by words which come and go.
ON: Final = "true"
OFF: Final = "false"


@dataclasses.dataclass(frozen=True)
class OptionCandidate:
    """An option that may be a tunable, and where the command says it (``None``: it does not)."""

    option: ScriptOption
    place: OptionPlace | None

    @property
    def shown(self) -> str:
        """The option as the command says it, or by its longest spelling."""
        if self.place is not None:
            return self.place.flag
        return max((*self.option.flags, *self.option.off), key=len)


@dataclasses.dataclass(frozen=True)
class Edit:
    """A word in the place of another: ``word``, or what ``words`` has for a tunable's value."""

    word: str
    words: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Writing:
    """How a command says a tunable: ``edits`` of its words, and what is ``added``; ``ahead`` of
    the script's other arguments, or behind them."""

    edits: Mapping[int, Edit] = dataclasses.field(default_factory=dict)
    added: tuple[Edit, ...] = ()
    ahead: bool = False

    def __add__(self, other: Writing) -> Writing:
        return Writing(
            {**self.edits, **other.edits}, self.added + other.added, self.ahead or other.ahead
        )


def said(command: Command, candidate: OptionCandidate) -> str:
    """The value that the command says; empty where it says the option without one, or not."""
    place = candidate.place
    if place is None or place.value_at is None:
        return ""
    return command.words[place.value_at][place.start :]


def write_value(command: Command, candidate: OptionCandidate, name: str, present: str) -> Writing:
    """The tunable ``name`` as the option's value: in its place, or added where it is another than
    ``present``, which is the default."""
    place = candidate.place
    if place is not None and place.value_at is not None:
        start = command.words[place.value_at][: place.start]
        value = said(command, candidate)
        return Writing({place.value_at: Edit(f"{start}{{{name}:{value}}}")})
    flag = _long_flag(candidate.option)
    unsaid: Mapping[str, tuple[str, ...]] = {present: ()}
    value = f"{{{name}:{present}}}"
    if _takes_equals(flag):
        return Writing({}, (Edit(f"{flag}={value}", unsaid),), candidate.option.ahead)
    return Writing({}, (Edit(flag, unsaid), Edit(value, unsaid)), candidate.option.ahead)


def write_texts(
    command: Command,
    candidate: OptionCandidate,
    texts: Mapping[str, str],
    unsaid: str | None = None,
) -> Writing:
    """The option's value for each of a tunable's: ``texts``; it is not added where it is what it is
    by default, or at ``unsaid`` alone."""
    place = candidate.place
    if place is not None and place.value_at is not None:
        word = command.words[place.value_at]
        start = word[: place.start]
        return Writing(
            {place.value_at: Edit(word, {at: (start + text,) for at, text in texts.items()})}
        )
    flag, default = _long_flag(candidate.option), candidate.option.value
    words = {
        at: () if (text == default if unsaid is None else at == unsaid) else (f"{flag}={text}",)
        for at, text in texts.items()
    }
    return Writing({}, (Edit(flag, words),), candidate.option.ahead)


def write_switch(
    command: Command, candidate: OptionCandidate, on_at: Mapping[str, bool]
) -> Writing | None:
    """The option, which is a boolean, on and off at a tunable's values; ``None`` where the command
    line cannot say one of them."""
    option, place = candidate.option, candidate.place
    if place is not None and place.value_at is not None:
        return _write_said_boolean(command, candidate, on_at)
    now = bool(as_switch(option.value))
    told = () if place is None else (command.words[place.at],)
    other = _words_for(option, to=not now, alone=place is None)
    if other is None:
        return None
    words = {at: told if on == now else other for at, on in on_at.items()}
    if place is not None:
        return Writing({place.at: Edit(command.words[place.at], words)})
    return Writing({}, (Edit(candidate.shown, words),), option.ahead)


def _write_said_boolean(
    command: Command, candidate: OptionCandidate, on_at: Mapping[str, bool]
) -> Writing | None:
    """The writing of a switch that the command says with a value ("--amp true")."""
    place = candidate.place
    assert place is not None and place.value_at is not None
    word = command.words[place.value_at]
    start, text = word[: place.start], word[place.start :]
    now = bool(as_switch(candidate.option.value))
    if candidate.option.type == "bool":  # every text but the empty one is true
        spelled = {True: text or "True", False: ""}
    elif as_switch(text) is None or as_switch(text) != now:
        return None
    else:
        spelled = {now: text, not now: opposite_switch(text)}
    return Writing(
        {place.value_at: Edit(word, {at: (start + spelled[on],) for at, on in on_at.items()})}
    )


def _words_for(option: ScriptOption, *, to: bool, alone: bool) -> tuple[str, ...] | None:
    """What makes a boolean option ``to``: nothing, where that is the default and it is not said."""
    if not alone and bool(as_switch(option.default)) == to:
        return ()
    if to and (option.switch or option.bare) and option.flags:
        return (_long_flag(option),)
    if not to and option.off:
        return (max(option.off, key=len),)
    flag = _long_flag(option)
    if option.switch or not _takes_equals(flag):
        return None
    text = _boolean_text(option, to=to)
    return None if text is None else (f"{flag}={text}",)


def _boolean_text(option: ScriptOption, *, to: bool) -> str | None:
    if option.choices:
        return next((text for text in option.choices if as_switch(text) is to), None)
    if option.type == "bool":  # Python's own, for which "False" is true
        return "True" if to else ""
    now = option.value
    return opposite_switch(now) if now is not None and as_switch(now) is not None else str(to)


def _takes_equals(flag: str) -> bool:
    """Is it said in one word with its value (``--name=value``, ``name=value``)?"""
    return flag.startswith("--") or is_name(flag)


def _long_flag(option: ScriptOption) -> str:
    """The spelling to write: a long one, the first of them."""
    if not option.flags:
        return ""
    return next((flag for flag in option.flags if flag.startswith("--")), option.flags[0])


def written(command: Command, writings: Mapping[str, Writing]) -> Command:
    """``command`` whose words say the tunables of ``writings`` as these do.

    Words are added at the end of the script's arguments, before a "--" behind which there are no
    options; or at their beginning.
    """
    words: list[tuple[str, Spelling | None]] = [
        (word, command.spellings.get(index)) for index, word in enumerate(command.words)
    ]
    ahead: list[tuple[str, Spelling | None]] = []
    behind: list[tuple[str, Spelling | None]] = []
    for name, writing in writings.items():
        for at, edit in writing.edits.items():
            words[at] = (edit.word, _spelling(name, edit))
        place = ahead if writing.ahead else behind
        place += [(edit.word, _spelling(name, edit)) for edit in writing.added]
    begins = command.arguments_at
    own = list(command.words[begins:])
    ends = begins + (own.index("--") if "--" in own else len(own))
    words = [*words[:begins], *ahead, *words[begins:ends], *behind, *words[ends:]]
    return dataclasses.replace(
        command,
        words=tuple(word for word, _ in words),
        spellings={index: each for index, (_, each) in enumerate(words) if each is not None},
    )


def _spelling(name: str, edit: Edit) -> Spelling | None:
    return Spelling(name, edit.words) if edit.words else None
