"""JSON result files: one document with its format's name and version, older ones upgraded."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from trainfit.results.files.contents import Metered
from trainfit.results.files.decoding import DecodingError, decode
from trainfit.results.files.display import Displayed
from trainfit.results.files.errors import ResultFileError
from trainfit.results.files.writing import write_file
from trainfit.results.text import size

# ---
# Documents of earlier format versions, brought to the current one before they are decoded.


#: Changes a parsed document in place, from one format version to the next.
Upgrade = Callable[[dict[str, Any]], None]


def upgrade(
    document: dict[str, Any], version: int, upgrades: Mapping[int, Upgrade], present: int
) -> None:
    """Apply the upgrades from ``version`` to ``present``; a version without one only added keys."""
    for number in range(version, present):
        if number in upgrades:
            upgrades[number](document)


def rename_key(document: dict[str, Any], path: str, former: str, name: str) -> None:
    """Rename a key of every object at ``path`` (see :func:`objects_at`)."""
    for found in objects_at(document, path):
        if former in found:
            found[name] = found.pop(former)


def rename_value(document: dict[str, Any], path: str, key: str, former: str, name: str) -> None:
    """Replace one value of a key in every object at ``path`` (see :func:`objects_at`)."""
    for found in objects_at(document, path):
        if found.get(key) == former:
            found[key] = name


def objects_at(document: Any, path: str) -> Iterator[dict[str, Any]]:
    """The JSON objects at a path of keys, such as "probe.faults" ("": the document itself).

    A list stands for each of its items. What is missing or of another type is skipped: the
    decoder, which knows the types, refuses it.
    """
    if isinstance(document, list):
        for item in document:
            yield from objects_at(item, path)
    elif isinstance(document, dict):
        key, _, rest = path.partition(".")
        if not key:
            yield document
        else:
            yield from objects_at(document.get(key), rest)


#: Above this size a file is read only if its first bytes say that it is a result, in bytes.
_LARGE: Final = 16 * 2**20
_LARGEST: Final = 2**30
_HEAD: Final = 4096
_SAYS_FORMAT: Final = re.compile(rb'"format"\s*:\s*"trainfit-')


@dataclasses.dataclass(frozen=True)
class Format:
    """A kind of result file.

    ``remake`` tells the user what to do with a damaged file, ``wanted`` with one of another
    format. ``upgrades`` bring documents of earlier versions to ``version``, each from the version
    that is its key to the next; ``former_names`` are names that the format had in these.
    """

    name: str
    version: int
    remake: str
    wanted: str
    upgrades: Mapping[int, Upgrade] = dataclasses.field(default_factory=dict)
    former_names: Collection[str] = ()


class ResultFile(Displayed, Metered):
    """A dataclass that is kept as one JSON document of the format ``FILE``."""

    FILE: ClassVar[Format]

    def to_json(self) -> str:
        """One JSON document, with its format's name and version."""
        assert dataclasses.is_dataclass(self)
        head = {"format": self.FILE.name, "version": self.FILE.version}
        return json.dumps({**head, **dataclasses.asdict(self)}, indent=2, allow_nan=False)

    def save(self, path: Path) -> None:
        """Write the document; the file appears whole or not at all."""
        save(path, self.to_json())

    @classmethod
    def from_json(cls, text: str, path: Path) -> Self:
        """The reverse of :meth:`to_json`; raises :class:`ResultFileError` for ``path``."""
        document = _document(cls.FILE, text, path)
        try:
            return decode(cls, document)
        except (DecodingError, ValueError) as error:
            raise ResultFileError(path, f"it is damaged ({error})", cls.FILE.remake) from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that :meth:`save` wrote; raises :class:`ResultFileError`."""
        return cls.from_json(read(path, cls.FILE.remake), path)


def _document(form: Format, text: str, path: Path) -> dict[str, Any]:
    """The document in its present version, without format and version."""
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = f"damaged, or not a result file ({error})"
        raise ResultFileError(path, reason, form.remake) from error
    if not isinstance(document, dict) or "format" not in document:
        raise ResultFileError(path, "not a result of trainfit", form.remake)
    found, number = document.pop("format"), document.pop("version", None)
    if found != form.name and found not in form.former_names:
        raise ResultFileError(path, f"its format is {found!r}, not {form.name!r}", form.wanted)
    if type(number) is not int or number < 1:
        raise ResultFileError(path, f"its format version is {number!r}", form.remake)
    if number > form.version:
        reason = f"its format version {number} is newer than this trainfit reads ({form.version})"
        raise ResultFileError(path, reason, "upgrade trainfit")
    upgrade(document, number, form.upgrades, form.version)
    return document


def format_of(text: str) -> str | None:
    """The name of the format that a document says it is in; ``None`` if it says nothing."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = document.get("format") if isinstance(document, dict) else None
    return name if isinstance(name, str) else None


def read(path: Path, remake: str) -> str:
    """The file's text; raises :class:`ResultFileError`.

    A large file that is not a result is refused before it is read whole.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEAD)
            length = os.fstat(stream.fileno()).st_size
            if length > _LARGE and not _SAYS_FORMAT.search(head):
                raise ResultFileError(path, f"not a result of trainfit ({size(length)})", remake)
            if length > _LARGEST:
                reason = f"{size(length)}, and no result is larger than {size(_LARGEST)}"
                raise ResultFileError(path, reason, remake)
            return (head + stream.read()).decode("utf-8")
    except FileNotFoundError:
        raise ResultFileError(path, "there is no such file", "check the path") from None
    except UnicodeDecodeError as error:
        reason = f"damaged, or not a result file ({error.reason} at byte {error.start})"
        raise ResultFileError(path, reason, remake) from error
    except OSError as error:
        raise ResultFileError(path, error.strerror or str(error), "check the path") from error


def save(path: Path, text: str) -> None:
    """Write the document; a file appears whole or not at all (see :func:`write_file`)."""
    write_file(path, f"{text}\n".encode())


def _no_constant(name: str) -> None:
    """JSON has neither NaN nor Infinity, though Python reads them."""
    raise ValueError(f"{name} is not valid JSON")
