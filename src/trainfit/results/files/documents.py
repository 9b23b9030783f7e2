"""JSON result files: one document with its format's name and version, and who wrote it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from trainfit.results.files.contents import Metered
from trainfit.results.files.decoding import DecodingError, decode
from trainfit.results.files.display import Displayed
from trainfit.results.files.errors import ResultFileError
from trainfit.results.files.writing import write_file
from trainfit.results.text import size
from trainfit.version import __version__

#: Above this size a file is read only if its first bytes say that it is a result, in bytes.
_LARGE: Final = 16 * 2**20
_LARGEST: Final = 2**30
_HEAD: Final = 4096
#: Says which trainfit wrote a document.
WRITTEN_BY: Final = "written_by"
_SAYS_FORMAT: Final = re.compile(rb'"format"\s*:\s*"trainfit-')


@dataclasses.dataclass(frozen=True)
class Format:
    """A kind of result file.

    ``remake`` tells the user what to do with a damaged file, ``wanted`` with one of another
    format.
    """

    name: str
    version: int
    remake: str
    wanted: str

    @classmethod
    def of(cls, name: str, command: str) -> Format:
        """The first version of a kind of file that ``command`` writes."""
        return cls(name, 1, f"re-create it with `{command}`", f"give a file that `{command}` wrote")

    def head(self) -> dict[str, Any]:
        """The keys that a document begins with."""
        return {"format": self.name, "version": self.version, WRITTEN_BY: __version__}

    def check(self, document: Mapping[str, Any], path: Path) -> None:
        """Raises :class:`ResultFileError` for a document of another version.

        A file without a writer is from before formats restarted at version 1, whatever its number.
        """
        number, writer = document.get("version"), document.get(WRITTEN_BY)
        if type(number) is not int or number < 1:
            raise ResultFileError(path, f"its format version is {number!r}", self.remake)
        if not isinstance(writer, str):
            by = document.get("trainfit")
            which = f"trainfit {by}" if isinstance(by, str) and by else "an earlier trainfit"
            reason = f"{which} wrote it, in version {number} of its format {self.name!r}, which "
            raise ResultFileError(path, f"{reason}this one does not read", self.remake)
        if number != self.version:
            reason = f"its format version {number} is newer than this trainfit reads"
            reason += f" ({self.version}): trainfit {writer} wrote it"
            raise ResultFileError(path, reason, "upgrade trainfit")


class ResultFile(Displayed, Metered):
    """A dataclass that is kept as one JSON document of the format ``FILE``."""

    FILE: ClassVar[Format]

    def to_json(self) -> str:
        """One JSON document, with its format's name and version."""
        assert dataclasses.is_dataclass(self)
        document = {**self.FILE.head(), **dataclasses.asdict(self)}
        return json.dumps(document, indent=2, allow_nan=False)

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
    if not text.strip():
        raise ResultFileError(path, "it is empty", form.remake)
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = f"damaged, or not a result file ({error})"
        raise ResultFileError(path, reason, form.remake) from error
    if not isinstance(document, dict) or "format" not in document:
        raise ResultFileError(path, "not a result of trainfit", form.remake)
    if document["format"] != form.name:
        reason = f"its format is {document['format']!r}, not {form.name!r}"
        raise ResultFileError(path, reason, form.wanted)
    form.check(document, path)
    return {key: value for key, value in document.items() if key not in form.head()}


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

    A large file that is not a result is refused before it is read whole, and a device that gives
    bytes without an end.
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
            most = _LARGEST if _SAYS_FORMAT.search(head) else _LARGE
            content = head + stream.read(most - len(head) + 1)
            if len(content) > most:
                reason = f"not a result of trainfit (more than {size(most)})"
                raise ResultFileError(path, reason, remake)
            return content.decode("utf-8")
    except FileNotFoundError:
        raise ResultFileError(path, "there is no such file", "check the path") from None
    except UnicodeDecodeError as error:
        reason = f"damaged, or not a result file ({error.reason} at byte {error.start})"
        raise ResultFileError(path, reason, remake) from error
    except IsADirectoryError:
        remedy = "name the file in it, or give a watched run's to `trainfit watch --read`"
        raise ResultFileError(path, "it is a folder", remedy) from None
    except OSError as error:
        raise ResultFileError(path, error.strerror or str(error), "check the path") from error


def save(path: Path, text: str) -> None:
    """Write the document; a file appears whole or not at all (see :func:`write_file`)."""
    write_file(path, f"{text}\n".encode())


def _no_constant(name: str) -> None:
    """JSON has neither NaN nor Infinity, though Python reads them."""
    raise ValueError(f"{name} is not valid JSON")
