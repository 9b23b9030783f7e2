"""Resolution of a script's names by its imports, and the user's own files among these."""

from __future__ import annotations

import ast
import dataclasses
import io
import os
import sys
import tokenize
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Final

from trainfit.results.files.errors import TrainfitError

# ---
# One file of a user's script as text and syntax tree; nothing in it is executed or imported.


#: A larger file is no script: a notebook's data or a generated table.
MAX_BYTES: Final = 16 << 20
#: Characters of code in a title; a longer call or assignment is shortened.
_LONG: Final = 60


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

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree, as ``ast.walk`` gives them: a dozen rules go through them, and a
        walk is the most that reading a file costs."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def size(self) -> int:
        """Characters, about."""
        return sum(map(len, self.lines))

    def line(self, number: int) -> str:
        """One line, counted from 1; empty beyond the end."""
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    def column(self, node: ast.expr | ast.stmt) -> int:
        """The column at which a node begins, in characters from 1 (the tree counts bytes of
        UTF-8)."""
        return _characters(self.line(node.lineno), node.col_offset) + 1

    def text(self, node: ast.expr | ast.stmt) -> str:
        """A node as it is written, if it stands on one line, else as Python would write it."""
        if node.end_lineno != node.lineno or node.end_col_offset is None:
            return unparsed(node)
        line = self.line(node.lineno)
        return line[_characters(line, node.col_offset) : _characters(line, node.end_col_offset)]

    def short(self, node: ast.expr | ast.stmt) -> str:
        """The node's text for a title: of a long call its function, of a long assignment its
        target."""
        text = self.text(node)
        if len(text) <= _LONG:
            return text
        if isinstance(node, ast.Call):
            return f"{self.text(node.func)}(…)"
        if isinstance(node, ast.Assign):
            return f"{self.text(node.targets[0])} = …"
        return text

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
    if _is_data(tree):
        raise UnreadableError(
            "it holds data, not Python statements",
            "give a Python file (of a notebook: jupyter nbconvert --to script)",
        )
    return Source(path, name, tuple(text.split("\n")), tree)


def _is_data(tree: ast.Module) -> bool:
    """Is it JSON (a result, a configuration, a notebook), which Python reads as one expression?"""
    match tree.body:
        case [ast.Expr(value=ast.Dict() | ast.List())]:
            return True
    return False


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


# ---
# Resolution of a script's names by its imports, and the user's own files among these.


#: A script with more files of its own is not read further; `unread` then says so.
MAX_FILES: Final = 200
#: The same for the characters of all files together.
MAX_CHARACTERS: Final = 4_000_000

#: … where a plan waits for it, two seconds of a small processor: the files that are nearest to the
#: script (measured on timm, whose train.py imports 200 files of its own and more).
NEAREST_CHARACTERS: Final = 500_000

#: Modules that are re-exported from elsewhere, longest first: the name that rules know.
_FURTHER: Final = "were read, the limit; further ones are skipped"
_CANONICAL: Final = (
    ("torch.nn.parallel.data_parallel.DataParallel", "torch.nn.DataParallel"),
    ("torch.nn.parallel.DataParallel", "torch.nn.DataParallel"),
    ("torch.utils.data.dataloader.", "torch.utils.data."),
    ("torch.utils.data.dataset.", "torch.utils.data."),
    ("torch.nn.modules.module.", "torch.nn."),
    ("torch.autograd.grad_mode.", "torch."),
    ("torch.autograd.no_grad", "torch.no_grad"),
    ("torch.autograd.enable_grad", "torch.enable_grad"),
    ("torch.autograd.inference_mode", "torch.inference_mode"),
    ("torch.autograd.set_grad_enabled", "torch.set_grad_enabled"),
    ("torch.cuda.amp.autocast_mode.", "torch.cuda.amp."),
    ("torch.cuda.amp.grad_scaler.", "torch.cuda.amp."),
    ("torch.amp.autocast_mode.", "torch.amp."),
    ("torch.amp.grad_scaler.", "torch.amp."),
)


@dataclasses.dataclass(eq=False)
class File:
    """A source with what its names were imported as.

    ``imported`` maps a name to every origin that an import gives it anywhere in the file: a dotted
    name, or for an own file ``@N`` with the file's number.
    """

    number: int
    source: Source
    imported: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    #: Top-level modules that are not own files.
    foreign: set[str] = dataclasses.field(default_factory=set)
    stars: set[str] = dataclasses.field(default_factory=set)
    _origins: dict[ast.AST, frozenset[str]] = dataclasses.field(default_factory=dict)

    def origins(self, node: ast.AST) -> frozenset[str]:
        """Every dotted name that an expression may stand for; empty if no import gives it."""
        found = self._origins.get(node)
        if found is None:
            found = self._origins[node] = self._find_origins(node)
        return found

    def _find_origins(self, node: ast.AST) -> frozenset[str]:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imported:
            return frozenset()
        rest = "".join(f".{part}" for part in reversed(parts))
        return frozenset(_canonical(base + rest) for base in self.imported[node.id])

    def origin(self, node: ast.AST) -> str:
        """The one dotted name that an expression stands for, or nothing."""
        found = self.origins(node)
        return next(iter(found)) if len(found) == 1 else ""


def read_files(path: Path, most: int = MAX_CHARACTERS) -> tuple[list[File], list[str]]:
    """The script and its own imports, in the order they are met, up to about ``most`` characters;
    what could not be read, and why.

    Raises :class:`UnreadableError` for the script itself.
    """
    roots = _roots(path)
    files = [File(0, load(path, str(path)))]
    numbers = {os.path.realpath(path): 0}
    unread: list[str] = []
    failed: set[str] = set()
    for file in files:  # grows while it is walked
        for statement in _imports(file.source):
            for target in _targets(statement, file.source.path, roots):
                number = None
                for candidate in target.files:  # the last is the one that the name is from
                    number = _number(candidate, files, numbers, unread, failed, most)
                _bind(file, target, number)
    return files, unread


@dataclasses.dataclass(frozen=True)
class _Target:
    """One name of an import: what it is bound to here ("" for nothing), and the own files it runs.

    ``dotted`` is the whole name as written; ``is_module``: it stands for the last file itself.
    """

    bound: str
    files: list[Path]
    dotted: str
    is_module: bool
    is_relative: bool = False


def _number(
    path: Path,
    files: list[File],
    numbers: dict[str, int],
    unread: list[str],
    failed: set[str],
    limit: int,
) -> int | None:
    real = os.path.realpath(path)
    if real in numbers:
        return numbers[real]
    if real in failed:
        return None
    size = sum(file.source.size for file in files)
    if len(files) >= MAX_FILES or size > limit:
        failed.add(real)
        if not any(_FURTHER in each for each in unread):
            unread.append(f"{path}: {len(files)} files {_FURTHER}")
        return None
    try:
        files.append(File(len(files), load(path, str(path))))
    except UnreadableError as error:
        failed.add(real)
        unread.append(f"{path}: {error.reason}")
        return None
    numbers[real] = len(files) - 1
    return numbers[real]


def _roots(path: Path) -> list[tuple[Path, str]]:
    """The folders in which absolute imports of own files are sought, and of what package only ("":
    of any).

    Beside the script; and where the script is part of a package, that package.
    """
    folder, package = around_package(path)
    return [(path.parent, ""), (folder, package)] if package else [(path.parent, "")]


def around_package(path: Path) -> tuple[Path, str]:
    """The folder around the package that a file is in, and the package ("": it is in none)."""
    folder = Path(os.path.abspath(path.parent))
    package = ""
    while _exists(folder / "__init__.py") and folder != folder.parent:
        package, folder = folder.name, folder.parent
    return folder, package


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _imports(source: Source) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def _targets(
    statement: ast.Import | ast.ImportFrom, path: Path, roots: list[tuple[Path, str]]
) -> Iterator[_Target]:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            parts = alias.name.split(".")
            files = _module_files(parts, roots)
            yield _Target(alias.asname or "", files, alias.name, True)
            if not alias.asname:
                # The name stands for the package; its submodules are reached through it.
                yield _Target(parts[0], _module_files(parts[:1], roots), parts[0], True)
        return
    parts = statement.module.split(".") if statement.module else []
    relative = statement.level > 0
    where = [(_above(path, statement.level), "")] if relative else roots
    base = _module_files(parts, where) if parts else []
    for alias in statement.names:
        bound, dotted = alias.asname or alias.name, ".".join([*parts, alias.name])
        below = _module_files([*parts, alias.name], where) if alias.name != "*" else []
        if len(below) > len(base) and _is_own(below[-1], alias.name):
            yield _Target(bound, below, dotted, True, relative)
        else:
            yield _Target(bound, base, dotted, False, relative)


def _is_own(path: Path, name: str) -> bool:
    return path.stem == name or (path.stem == "__init__" and path.parent.name == name)


def _above(path: Path, level: int) -> Path:
    folder = path.parent
    for _ in range(level - 1):
        folder = folder / ".."
    return Path(os.path.normpath(folder))


def _module_files(parts: list[str], roots: list[tuple[Path, str]]) -> list[Path]:
    """The own files that importing a.b.c runs, outermost first; empty if a.b.c is none."""
    for root, package in roots:
        if package and parts[0] != package:
            continue
        folder, files, last = root, [], False
        for part in parts:
            last = False
            if _exists(folder / part / "__init__.py"):
                files.append(folder / part / "__init__.py")
                last = True
            elif _exists(folder / f"{part}.py"):
                files.append(folder / f"{part}.py")
                last = True
            folder = folder / part
        if files and last:
            return files
    return []


def _bind(file: File, target: _Target, number: int | None) -> None:
    """Note one imported name; one from an own file that is not read has no origin that is known."""
    is_own = bool(target.files) or target.is_relative
    if not is_own:
        file.foreign.add(target.dotted.split(".")[0])
    if not target.bound:
        return
    origin = target.dotted
    if is_own:
        module = f"?{target.dotted}" if number is None else f"@{number}"
        origin = module if target.is_module else f"{module}.{target.dotted.split('.')[-1]}"
    if target.bound == "*":
        file.stars.add(origin.removesuffix(".*"))
    else:
        file.imported.setdefault(target.bound, set()).add(origin)


def _canonical(dotted: str) -> str:
    for long, short in _CANONICAL:
        if dotted.startswith(long):
            return short + dotted[len(long) :]
    return dotted
