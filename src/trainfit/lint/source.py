"""One file of a user's script as text and syntax tree; nothing in it is executed or imported."""

from __future__ import annotations

import ast
import dataclasses
import io
import sys
import tokenize
import warnings
from pathlib import Path
from typing import Final

from trainfit.results.files.errors import TrainfitError

#: A larger file is no script: a notebook's data or a generated table.
MAX_BYTES: Final = 16 << 20


class UnreadableScriptError(TrainfitError):
    """A script that cannot be read at all."""

    def __init__(self, path: Path, reason: str, remedy: str) -> None:
        super().__init__(f"script {str(path)!r}: {reason}; {remedy}")
        self.path = path


class UnreadableError(Exception):
    """Why one file cannot be read, and what to do about it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A parsed file; ``name`` is how it is shown, ``lines`` are without their ends."""

    path: Path
    name: str
    lines: tuple[str, ...]
    tree: ast.Module

    def line(self, number: int) -> str:
        """One line, counted from 1; empty beyond the end."""
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    def column(self, node: ast.expr | ast.stmt) -> int:
        """Where a node begins, in characters from 1 (the tree counts bytes of UTF-8)."""
        return _characters(self.line(node.lineno), node.col_offset) + 1

    def text(self, node: ast.expr) -> str:
        """A node as it is written, if it stands on one line, else as Python would write it."""
        if node.end_lineno != node.lineno or node.end_col_offset is None:
            return unparsed(node)
        line = self.line(node.lineno)
        return line[_characters(line, node.col_offset) : _characters(line, node.end_col_offset)]

    def method_at(self, call: ast.Call) -> tuple[int, int]:
        """Line and column of a called method's name: in a chain over lines not where it begins."""
        func = call.func
        if not isinstance(func, ast.Attribute) or func.end_lineno is None:
            return call.lineno, self.column(call)
        line = self.line(func.end_lineno)
        return func.end_lineno, _characters(line, func.end_col_offset or 0) + 1 - len(func.attr)

    def edited(self, number: int, edits: list[tuple[int, int, str]]) -> str:
        """A line with parts (from, to: columns from 0) replaced, innermost first."""
        line = self.line(number)
        for start, end, new in sorted(edits, reverse=True):
            line = line[:start] + new + line[end:]
        return line.strip()

    def span(self, node: ast.expr) -> tuple[int, int, int]:
        """Line of a node's end, and there its columns from 0 (a node over lines starts at 0)."""
        number = node.end_lineno or node.lineno
        line = self.line(number)
        start = _characters(line, node.col_offset) if node.lineno == number else 0
        return number, start, _characters(line, node.end_col_offset or 0)

    def replaced(self, node: ast.expr, new: str) -> str:
        """The node's line with the node replaced; only the new text if it spans lines."""
        if node.end_lineno != node.lineno or node.end_col_offset is None:
            return new
        line = self.line(node.lineno)
        before = line[: _characters(line, node.col_offset)]
        return (before + new + line[_characters(line, node.end_col_offset) :]).strip()


def load(path: Path, name: str) -> Source:
    """Read and parse one file; raises :class:`UnreadableError`."""
    text = _decoded(_content(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes are the user's business
            tree = ast.parse(text)
    except SyntaxError as error:
        raise UnreadableError(
            f"syntax error at line {error.lineno or 1}: {error.msg}",
            f"correct it (it was read with the grammar of Python {sys.version_info.major}."
            f"{sys.version_info.minor})",
        ) from None
    except (RecursionError, MemoryError, SystemError):
        raise UnreadableError("it is nested too deeply", "split the expression") from None
    except (ValueError, OverflowError) as error:
        raise UnreadableError(f"it is not Python source ({error})", "give a Python file") from None
    return Source(path, name, tuple(text.split("\n")), tree)


def unparsed(node: ast.AST) -> str:
    """A node as Python would write it; "…" where it is nested too deeply for that."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return "…"


def _content(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise UnreadableError("it is a directory", "give the path of the script in it")
        if path.exists() and not path.is_file():
            raise UnreadableError("it is not a regular file", "give a Python file")
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UnreadableError("there is no such file", "give the path of a Python file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreadableError(f"it cannot be read ({reason})", "make it readable") from None
    if len(content) > MAX_BYTES:
        raise UnreadableError(
            f"it is larger than {MAX_BYTES >> 20} MiB", "give the script, not its data"
        )
    return content


def _decoded(content: bytes) -> str:
    """The text, its line ends as Python counts them."""
    encoding = "utf-8-sig"
    declared = ""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    except SyntaxError as error:  # it cannot be decoded, or what it declares is unknown
        declared = str(error.msg).partition(" for ")[0]
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableError(
            f"it is not UTF-8: byte 0x{content[error.start]:02x} at line {line}"
            if encoding.startswith("utf-8")
            else f"it declares {encoding}, but byte {error.start} is not",
            "save it as UTF-8",
        ) from None
    except (LookupError, ValueError) as error:
        declared = str(error).partition("\n")[0]
    if declared:
        raise UnreadableError(f"it is not UTF-8 ({declared})", "save it as UTF-8")
    return io.StringIO(text, newline=None).read()


def _characters(line: str, offset: int) -> int:
    if line.isascii():
        return offset
    return len(line.encode("utf-8", "replace")[:offset].decode("utf-8", "ignore"))
