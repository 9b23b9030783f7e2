"""The options that a command line's parser defines, their words, and what overrides them."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from trainfit.findings.source_code import names_in
from trainfit.results.runs.script import ScriptOption

# ---
# Values that one word of a command line says.


#: Letters of a value beyond which it is no setting of a number or a name.
_LONGEST: Final = 200


def is_plain(value: Any) -> bool:
    """Is it a value that one word says?"""
    if isinstance(value, enum.Enum):
        value = value.value
    return value is None or (
        isinstance(value, str | int | float | bool) and len(str(value)) <= _LONGEST
    )


def text_of(value: Any) -> str | None:
    """A plain value as text."""
    if isinstance(value, enum.Enum):
        value = value.value
    return None if value is None else str(value)


# ---
# Positions of an option in a command line, as argparse and click parse it.


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
    place = None
    for index, word in enumerate(words):
        if word == "--":
            break
        flag, joined = _flag_in(word, flags, known, switch=switch)
        if not flag:
            continue
        if joined is not None:
            place = OptionPlace(index, flag, index, joined)
        elif is_name(flag):
            continue
        elif switch or (bare and not _is_value(words, index + 1)):
            place = OptionPlace(index, flag)
        elif index + 1 < len(words):
            place = OptionPlace(index, flag, index + 1)
    return place


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
    for action in actions:
        if isinstance(action, argparse.BooleanOptionalAction):
            off += [flag for flag in action.option_strings if flag.startswith("--no-")]
            on += [flag for flag in action.option_strings if not flag.startswith("--no-")]
        elif action.nargs == 0 and isinstance(action.const, bool):
            (on if action.const else off).extend(action.option_strings)
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
    for parameter in options:
        if (
            parameter.name not in context.params
            or parameter.multiple
            or parameter.nargs != 1
            or parameter.count
        ):
            continue
        value, default = context.params[parameter.name], parameter.get_default(context)
        kind = getattr(parameter, "type", None)
        if not is_plain(value):
            continue
        option = ScriptOption(
            flags=tuple(parameter.opts),
            name=parameter.name,
            value=text_of(value),
            given=False,
            choices=_choices(getattr(kind, "choices", None)),
            switch=parameter.is_flag,
            default=text_of(default) if is_plain(default) else None,
            off=tuple(parameter.secondary_opts),
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
    yield from _all_with_given([_of_field(*field) for field in _fields(made, "")], words)


def _fields(made: Any, before: str) -> Iterator[tuple[str, str, Any]]:
    """Prefix, name and value of the plain ones."""
    values = made
    if dataclasses.is_dataclass(made):
        values = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
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
    known = {
        flag for script_option in options for flag in (*script_option.flags, *script_option.off)
    }
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
    """The choices as they are typed; none where they are not a short list of plain values."""
    if choices is None:
        return ()
    texts = [text_of(choice) for choice in choices if is_plain(choice)]
    return tuple(text for text in texts if text is not None)


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


# ---
# Values that words of a command line override: in a configuration, as Hydra's, or in the script's
# global variables, as nanoGPT's.
#
# As in :mod:`trainfit.scripts.option_parsers` they may raise whatever what they look at raises.


def of_omegaconf(config: Any, words: Sequence[str]) -> Iterator[ScriptOption]:
    """The plain values of an OmegaConf ``config`` by their dotted names, which words such as
    ``data.batch_size=8`` override. What refers to another value (``${...}``) follows that one."""
    # "+name=value" and "++name=value" say it, too; whoever writes words finds those by themselves.
    given = {word.partition("=")[0].lstrip("+") for word in words if "=" in word}
    for name, value in _plain_values(config, ""):
        yield _option(name, name, value, given=name in given)


def of_globals(variables: Mapping[str, Any], words: Sequence[str]) -> Iterator[ScriptOption]:
    """A script's global ``variables`` where its ``words`` override them, as those of nanoGPT do:
    ``--name=value`` is such a variable with that value, or a word is a Python file, which is run
    for its assignments."""
    plain = {
        name: value
        for name, value in variables.items()
        if not name.startswith("_") and value is not None and is_plain(value)
    }
    said = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    overrides = any(name in plain and _reads_as(said[name], plain[name]) for name in said)
    if not overrides and not any(word.endswith(".py") for word in words):
        return
    for name, value in plain.items():
        yield _option(f"--{name}", name, value, given=name in said)


def _option(flag: str, name: str, value: Any, *, given: bool) -> ScriptOption:
    """What it has without being given is not told where it is."""
    text = text_of(value)
    return ScriptOption((flag,), name, text, given=given, default=None if given else text)


def _reads_as(text: str, value: Any) -> bool:
    if text == str(value):
        return True
    try:
        return bool(ast.literal_eval(text) == value)
    except (ValueError, SyntaxError):
        return False


def _plain_values(config: Any, before: str) -> Iterator[tuple[str, Any]]:
    for key in config:
        node = config._get_node(key) if isinstance(key, str) else None
        if node is None or node._is_interpolation() or node._is_missing():
            continue
        value = config[key]
        if is_plain(value):
            yield before + key, value
        elif hasattr(value, "keys"):
            yield from _plain_values(value, f"{before}{key}.")


# ---
# Constants of a script: whole numbers that it assigns at its top level, each once.


def constants_of(tree: ast.Module) -> dict[str, Any]:
    """The nodes of their values (``ast.Constant``) by name."""
    found: dict[str, Any] = {}
    assigned: list[str] = []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        for target in targets:
            assigned += names_in(target)
        value = getattr(node, "value", None)
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and _is_number(value):
            found[targets[0].id] = value
    return {name: value for name, value in found.items() if assigned.count(name) == 1}


def with_constants(source: bytes, path: str, values: Mapping[str, int]) -> Any:
    """The code of a script's ``source`` in which these constants have other values."""
    tree = ast.parse(source, path)
    for name, node in constants_of(tree).items():
        if name in values:
            node.value = values[name]
    return compile(tree, path, "exec", dont_inherit=True)


def _is_number(node: Any) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int
