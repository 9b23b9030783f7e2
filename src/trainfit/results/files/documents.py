"""JSON result files: one document with its format's name and version, written whole."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from trainfit.results.files.decoding import DecodingError, decode
from trainfit.results.files.errors import ResultFileError
from trainfit.results.files.upgrades import Upgrade, upgrade

_T = TypeVar("_T")

_NO_UPGRADES: Final[Mapping[int, Upgrade]] = {}


def to_json(value: Any, name: str, version: int) -> str:
    """The dataclass ``value`` as one JSON document of this format."""
    document = {"format": name, "version": version, **dataclasses.asdict(value)}
    return json.dumps(document, indent=2, allow_nan=False)


def from_json(
    kind: type[_T],
    text: str,
    path: Path,
    name: str,
    version: int,
    *,
    remake: str,
    wanted: str,
    upgrades: Mapping[int, Upgrade] = _NO_UPGRADES,
    former_names: Collection[str] = (),
) -> _T:
    """The reverse of :func:`to_json`; raises :class:`ResultFileError` for ``path``.

    ``remake`` tells the user what to do with a damaged file, ``wanted`` with one of another
    format. ``upgrades`` bring documents of earlier versions to ``version``, each from the version
    that is its key to the next; ``former_names`` are names that the format had in these.
    """
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ResultFileError(path, f"damaged, or not a result file ({error})", remake) from error
    if not isinstance(document, dict) or "format" not in document:
        raise ResultFileError(path, "not a result of trainfit", remake)
    found, number = document.pop("format"), document.pop("version", None)
    if found != name and found not in former_names:
        raise ResultFileError(path, f"its format is {found!r}, not {name!r}", wanted)
    if type(number) is not int or number < 1:
        raise ResultFileError(path, f"its format version is {number!r}", remake)
    if number > version:
        reason = f"its format version {number} is newer than this trainfit reads ({version})"
        raise ResultFileError(path, reason, "upgrade trainfit")
    upgrade(document, number, upgrades, version)
    try:
        return decode(kind, document)
    except (DecodingError, ValueError) as error:
        raise ResultFileError(path, f"it is damaged ({error})", remake) from error


def format_of(text: str) -> str | None:
    """The name of the format that a document says it is in; ``None`` if it says nothing."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = document.get("format") if isinstance(document, dict) else None
    return name if isinstance(name, str) else None


def read(path: Path, remake: str) -> str:
    """The file's text; raises :class:`ResultFileError`."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ResultFileError(path, "there is no such file", "check the path") from None
    except UnicodeDecodeError as error:
        reason = f"damaged, or not a result file ({error.reason} at byte {error.start})"
        raise ResultFileError(path, reason, remake) from error
    except OSError as error:
        raise ResultFileError(path, error.strerror or str(error), "check the path") from error


def save(path: Path, text: str) -> None:
    """Write the document; the file appears whole or not at all."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(text + "\n", encoding="utf-8")
    scratch.replace(path)


def _no_constant(name: str) -> None:
    """JSON has neither NaN nor Infinity, though Python reads them."""
    raise ValueError(f"{name} is not valid JSON")
