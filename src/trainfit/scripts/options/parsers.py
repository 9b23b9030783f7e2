"""The options that a command line's parser defines: argparse's, click's, draccus', absl's, tyro's,
Fire's.

One function for each kind of parser, after it has parsed. They look at what is there and may raise
whatever an odd parser raises: :mod:`trainfit.scripts.watch.options` calls them so that no script
notices.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from trainfit.results.runs.script_option import ScriptOption
from trainfit.scripts.options.values import is_plain, text_of
from trainfit.scripts.options.words import place_of

#: ``nargs`` of argparse's arguments that take all that follows: a subcommand's, and the rest.
_TAKES_REST: Final = (argparse.PARSER, argparse.REMAINDER)


def of_argparse(
    parser: argparse.ArgumentParser, words: Sequence[str], namespace: Any
) -> Iterator[ScriptOption]:
    """The options of ``parser``, which has made ``namespace`` of ``words``."""
    actions = [action for action in parser._actions if action.option_strings]
    known = {flag for action in actions for flag in action.option_strings}
    ahead = any(action.nargs in _TAKES_REST for action in parser._actions)
    by_name: dict[str, list[argparse.Action]] = {}
    for action in actions:
        by_name.setdefault(action.dest, []).append(action)
    for name, same in by_name.items():
        try:
            value = _value_in(namespace, name)
        except LookupError:
            continue
        option = _of_actions(name, same, value, parser.get_default(name), ahead=ahead)
        if option is not None:
            yield _with_given(option, words, known)


def _of_actions(
    name: str, actions: Sequence[argparse.Action], value: Any, default: Any, *, ahead: bool
) -> ScriptOption | None:
    """The option that these make together ("--amp" and "--no-amp"); ``None`` where it is none that
    holds one value."""
    valued = [each for each in actions if each.nargs in (None, argparse.OPTIONAL)]
    on: list[str] = []
    off: list[str] = []
    for each in actions:
        if isinstance(each, argparse.BooleanOptionalAction):
            off += [flag for flag in each.option_strings if flag.startswith("--no-")]
            on += [flag for flag in each.option_strings if not flag.startswith("--no-")]
        elif each.nargs == 0 and isinstance(each.const, bool):
            (on if each.const else off).extend(each.option_strings)
    flags = [flag for each in valued for flag in each.option_strings] or on
    if not (flags or off) or not (is_plain(value) and is_plain(default)):
        return None
    first = valued[0] if valued else None
    return ScriptOption(
        flags=tuple(flags),
        name=name,
        value=text_of(value),
        given=False,
        choices=_choices(first.choices if first is not None else None),
        switch=first is None,
        default=text_of(None if default is argparse.SUPPRESS else default),
        off=tuple(off),
        bare=first is not None and first.nargs == argparse.OPTIONAL,
        type=getattr(first.type, "__name__", "") if first is not None else "",
        ahead=ahead,
    )


def of_click(context: Any, words: Sequence[str]) -> Iterator[ScriptOption]:
    """The options of the command of a click ``context`` that has parsed ``words``."""
    options = [each for each in context.command.params if each.param_type_name == "option"]
    known = {flag for each in options for flag in (*each.opts, *each.secondary_opts)}
    ahead = hasattr(context.command, "commands")
    for each in options:
        if each.name not in context.params or each.multiple or each.nargs != 1 or each.count:
            continue
        value, default = context.params[each.name], each.get_default(context)
        kind = getattr(each, "type", None)
        if not is_plain(value):
            continue
        option = ScriptOption(
            flags=tuple(each.opts),
            name=each.name,
            value=text_of(value),
            given=False,
            choices=_choices(getattr(kind, "choices", None)),
            switch=each.is_flag,
            default=text_of(default) if is_plain(default) else None,
            off=tuple(each.secondary_opts),
            type=str(getattr(kind, "name", "")),
            ahead=ahead,
        )
        # click's own "boolean" understands false, too.
        yield _with_given(option, words, known)


def of_absl(flags: Any, words: Sequence[str]) -> Iterator[ScriptOption]:
    """The flags of absl's registry."""
    names = list(flags)
    known = {f"--{name}" for name in names}
    for name in names:
        flag = flags[name]
        if not (is_plain(flag.value) and is_plain(flag.default)):
            continue
        shorts = (f"-{flag.short_name}",) if flag.short_name else ()
        option = ScriptOption(
            flags=(f"--{flag.name}", f"-{flag.name}", *shorts),
            name=flag.name,
            value=text_of(flag.value),
            given=False,
            choices=_choices(getattr(flag.parser, "enum_values", None)),
            default=text_of(flag.default),
            off=(f"--no{flag.name}",) if flag.boolean else (),
            bare=bool(flag.boolean),
            type=str(flag.flag_type()) if not flag.boolean else "",
        )
        yield _with_given(option, words, known)


def of_tyro(made: Any, words: Sequence[str]) -> Iterator[ScriptOption]:
    """What tyro has ``made`` of the words, a dataclass or a function's keywords:
    ``--data.batch-size 8``, and of a boolean ``--amp`` and ``--no-amp``."""
    yield from _all_with_given([_of_field(*each) for each in _fields(made, "")], words)


def _fields(made: Any, before: str) -> Iterator[tuple[str, str, Any]]:
    """Prefix, name and value of the plain ones."""
    values = made
    if dataclasses.is_dataclass(made):
        values = {each.name: getattr(made, each.name) for each in dataclasses.fields(made)}
    for name, value in values.items():
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{before}{name}.")
        elif is_plain(value):
            yield before, name, value


def _of_field(before: str, name: str, value: Any) -> ScriptOption:
    # tyro takes dashes and underscores alike, and writes dashes.
    names = dict.fromkeys(((before + name).replace("_", "-"), before + name))
    negated = f"{before}no_{name}".replace("_", "-")
    is_switch = isinstance(value, bool)
    return ScriptOption(
        tuple(f"--{each}" for each in names),
        before + name,
        value.name if isinstance(value, enum.Enum) else text_of(value),
        given=False,
        switch=is_switch,
        off=(f"--{negated}",) if is_switch else (),
    )


def of_fire(values: Mapping[str, Any], words: Sequence[str]) -> Iterator[ScriptOption]:
    """The arguments of a function that Fire is about to call with these ``values``:
    ``--batch_size 8``, and of a boolean ``--amp`` and ``--noamp``. None where some stand without a
    name: one that is named in addition would shift them."""
    if _has_unnamed(words):
        return
    options = [
        ScriptOption(
            tuple(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))),
            name,
            text_of(value),
            given=False,
            off=(f"--no{name}",) if isinstance(value, bool) else (),
            bare=isinstance(value, bool),
        )
        for name, value in values.items()
        if is_plain(value)
    ]
    yield from _all_with_given(options, words)


def _has_unnamed(words: Sequence[str]) -> bool:
    """Is there a word that is neither an option nor what follows one?"""
    follows = False
    for word in words:
        if not word.startswith("-") and not follows:
            return True
        follows = word.startswith("-") and "=" not in word
    return False


def _all_with_given(
    options: Sequence[ScriptOption], words: Sequence[str]
) -> Iterator[ScriptOption]:
    """``options`` that are all there are."""
    known = {flag for each in options for flag in (*each.flags, *each.off)}
    for option in options:
        yield _with_given(option, words, known)


def _with_given(option: ScriptOption, words: Sequence[str], known: Iterable[str]) -> ScriptOption:
    known = set(known)
    on = place_of(words, option.flags, known, switch=option.switch, bare=option.bare)
    off = place_of(words, option.off, known, switch=True)
    if on is None and off is None:  # whatever it is, a configuration file's or the parser's
        return dataclasses.replace(option, default=option.value)
    return dataclasses.replace(option, given=True)


def _choices(choices: Any) -> tuple[str, ...]:
    """As they are typed; none where they are not a short list of plain values."""
    if choices is None:
        return ()
    found = [text_of(each) for each in choices if is_plain(each)]
    return tuple(text for text in found if text is not None)


def _value_in(namespace: Any, name: str) -> Any:
    """An attribute by its dotted name (``data.batch_size``); raises ``LookupError``."""
    own = vars(namespace)
    if name in own:
        return own[name]
    for part in name.split("."):
        namespace = _attribute(namespace, part)
    return namespace


def _attribute(owner: Any, name: str) -> Any:
    try:
        return owner[name] if isinstance(owner, dict) else getattr(owner, name)
    except (AttributeError, KeyError):
        raise LookupError(name) from None
