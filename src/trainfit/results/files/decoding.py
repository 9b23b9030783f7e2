"""From JSON to dataclasses, with every type checked; files between our own processes."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from trainfit.results.files.errors import TrainfitError

_T = TypeVar("_T")


class DecodingError(ValueError):
    """JSON that does not describe the wanted type; the message names the place."""


def decode(kind: type[_T], value: Any) -> _T:
    """``value``, as ``json.loads`` gives it, as the dataclass ``kind``.

    Raises :class:`DecodingError` for a missing or unknown key and for a wrong type.
    """
    decoded: _T = _decode(kind, value, kind.__name__)
    return decoded


def _decode(kind: Any, value: Any, place: str) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, value, place)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(origin) and isinstance(origin, type):
        return _dataclass(origin, value, place, arguments)
    if origin in (types.UnionType, typing.Union):
        return _optional(arguments, value, place)
    if origin is typing.Literal:
        _require(value in arguments, value, place, f"one of {arguments}")
        return value
    if origin is tuple:
        return _tuple(arguments, value, place)
    if origin is Mapping:
        _require(isinstance(value, dict), value, place, "an object")
        return {key: _decode(arguments[1], v, f"{place}.{key}") for key, v in value.items()}
    if kind is float:
        _require(isinstance(value, int | float) and not isinstance(value, bool), value, place)
        return float(value)
    # bool is a kind of int in Python, not in JSON.
    _require(type(value) is kind, value, place, kind.__name__)
    return value


def _dataclass(kind: type, value: Any, place: str, arguments: tuple[Any, ...] = ()) -> Any:
    """``arguments`` are those of a generic dataclass: ``int`` of ``Fact[int]``."""
    _require(isinstance(value, dict), value, place, "an object")
    hints = _hints(kind, arguments)
    if unknown := sorted(set(value) - set(hints)):
        raise DecodingError(f"{place} has the unknown key {unknown[0]!r}")
    for field in dataclasses.fields(kind):
        without_default = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if field.name not in value and without_default:
            raise DecodingError(f"{place} has no {field.name!r}")
    decoded = {key: _decode(hints[key], v, f"{place}.{key}") for key, v in value.items()}
    try:
        return kind(**decoded)
    except DecodingError:
        raise
    except ValueError as error:  # the type's own checks
        raise DecodingError(f"{place}: {error}") from error


def _optional(arguments: tuple[Any, ...], value: Any, place: str) -> Any:
    """One type or ``None``, or a number or text, are the unions that are used here."""
    if value is None and type(None) in arguments:
        return None
    kinds = [argument for argument in arguments if argument is not type(None)]
    if len(kinds) > 1 and str in kinds:
        kinds = [str] if isinstance(value, str) else [kind for kind in kinds if kind is not str]
    (kind,) = kinds
    return _decode(kind, value, place)


def _tuple(arguments: tuple[Any, ...], value: Any, place: str) -> tuple[Any, ...]:
    _require(isinstance(value, list), value, place, "a list")
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    _require(len(value) == len(arguments), value, place, f"a list of {len(arguments)}")
    return tuple(
        _decode(kind, item, f"{place}[{index}]")
        for index, (kind, item) in enumerate(zip(arguments, value, strict=True))
    )


@functools.cache
def _hints(kind: type, arguments: tuple[Any, ...]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    if not arguments:
        return hints
    return {
        name: hint[arguments] if getattr(hint, "__parameters__", ()) else hint
        for name, hint in hints.items()
    }


def _require(good: bool, value: Any, place: str, text: str = "a number") -> None:
    if not good:
        shown = repr(value)
        shown = shown if len(shown) <= 40 else shown[:40] + "…"
        raise DecodingError(f"{place} is {shown}, not {text}")


# ---
# Files by which our processes hand each other requests and outcomes.


def toml_document(
    path: Path, what: str, error: type[TrainfitError], example: str
) -> dict[str, Any]:
    """A TOML file of the user's, ``what`` in messages ("price"); raises ``error`` where it cannot
    be read or is none, with ``example``, which says how one begins."""
    import tomllib  # only what reads such a file pays for it

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise error(f"{what} file {str(path)!r}: {reason}; check the path") from None
    except ValueError as problem:  # no UTF-8, or no TOML
        raise error(f"{what} file {str(path)!r} is not valid TOML ({problem}); {example}") from None


def as_json(value: Any) -> str:
    """A dataclass as JSON."""
    return json.dumps(dataclasses.asdict(value), allow_nan=False)


def write_whole(path: Path, text: str) -> None:
    """The file appears whole or not at all: another process waits for it."""
    scratch = path.with_suffix(".part")
    scratch.write_text(text)
    scratch.replace(path)


class Exchanged:
    """A dataclass that one of our processes hands another as JSON, without format and version."""

    def to_json(self) -> str:
        """The document on one line."""
        return as_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The reverse; raises ``ValueError`` for other text."""
        return decode(cls, json.loads(text))

    def save(self, path: Path) -> None:
        """Write it; the file appears whole or not at all."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ``OSError`` where there is none yet."""
        return cls.from_json(path.read_text())
