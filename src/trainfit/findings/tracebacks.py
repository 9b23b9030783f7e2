"""Parsers of what Python prints of a failure: tracebacks, and the stacks of threads that hang."""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from trainfit.findings.source_code import file_syntax, from_here
from trainfit.results.findings import Place
from trainfit.results.runs.trace import OwnFault
from trainfit.torch_private.needed import PIN_MEMORY_FILE, PIN_MEMORY_LOOP, WORKER_FILE, WORKER_LOOP

_CAUGHT: Final = re.compile(
    r"Caught (?P<type>\S+) (?P<where>in [^\n]*?)\.\n(?:Original )?(?P<text>.*)", re.DOTALL
)
_HEADING: Final = "Traceback (most recent call last):\n"
#: The line of a traceback that names the exception.
_RAISED: Final = re.compile(r"^[A-Za-z_][\w.]*(?:: .*|:)?$")
_OF_THE_MACHINE: Final = (OSError, MemoryError, ModuleNotFoundError)
#: `unable to mmap … Cannot allocate memory (12)`; PyTorch's allocator for the CPU
#: (`c10/core/impl/alloc_cpu.cpp`), NumPy's ("Unable to allocate 7 GiB for an array"), C++'s; a
#: library that the loader has no room for.
NO_MEMORY: Final = re.compile(
    r"Cannot allocate memory|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|MemoryError|\[Errno 12\]|Unable to allocate [\d.]+ \w+ for an array|std::bad_alloc"
    r"|failed to map segment from shared object"
)
#: Of an import (ModuleNotFoundError).
NO_MODULE: Final = re.compile(r"No module named '([\w.]+)'")
_WORKER: Final = re.compile(r"worker process (\d+)")
_FRAME: Final = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
#: Python's own library, of whatever installation.
_LIBRARY: Final = re.compile(r"/lib(?:64)?/python3\.\d+/")
#: Between the exceptions of a chain (`traceback.py`).
_CHAINED: Final = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):\n\n"
)


_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_FROM: Final = "\n\nThe above exception was the direct cause of the following exception:\n\n"


@dataclass(frozen=True)
class Frame:
    """A line of a traceback or of a stack; ``code`` is its text where that was given."""

    path: str
    line: int
    function: str
    code: str = ""

    @property
    def package(self) -> str:
        """The installed package that the file is part of, or empty."""
        for folder in ("site-packages", "dist-packages"):
            _, found, inside = self.path.replace(os.sep, "/").rpartition(f"/{folder}/")
            if found:
                return inside.split("/")[0].removesuffix(".py")
        return ""

    @property
    def is_ours(self) -> bool:
        return self.path.startswith(_own_folder())

    @property
    def is_user(self) -> bool:
        """Is it neither PyTorch's, nor Python's, nor an installed package's, nor ours?"""
        return not (
            self.package
            or self.is_ours
            or self.path.startswith("<")
            or self.path.startswith(_python_folders())
            or _LIBRARY.search(self.path) is not None
        )

    @property
    def place(self) -> Place:
        """Relative to the folder that this process runs in, where it lies below that."""
        return Place(from_here(self.path) or self.path, self.line)

    def __str__(self) -> str:
        return f"{self.path}:{self.line} in {self.function}"


@dataclass(frozen=True)
class ParsedException:
    """An exception: ``where`` it was caught ("in DataLoader worker process 0") or empty."""

    type: str
    message: str
    where: str
    frames: tuple[Frame, ...]

    @property
    def worker(self) -> int | None:
        match = _WORKER.search(self.where)
        return int(match[1]) if match else None

    @property
    def culprit(self) -> Frame | None:
        """The user's line: the innermost that is not of PyTorch or another package.

        Where no line is the user's, the innermost of a package that is not PyTorch.
        """
        users = [frame for frame in self.frames if frame.is_user]
        packages = [frame for frame in self.frames if frame.package not in ("", "torch")]
        return next(reversed(users or packages), None)

    @property
    def place(self) -> Place | None:
        return None if self.culprit is None else self.culprit.place

    @property
    def code(self) -> str:
        """The text of the culprit's line; empty where it is not known."""
        return self.culprit.code if self.culprit is not None else ""

    @property
    def lines(self) -> list[str]:
        """The lines of the user's file up to the one that is the user's."""
        culprit = self.culprit
        return linecache.getlines(culprit.path)[: culprit.line] if culprit is not None else []

    @property
    def folder(self) -> Path:
        """The folder of the user's line; this one where no line is the user's."""
        here, culprit = Path.cwd(), self.culprit
        return here / Path(culprit.path).parent if culprit and culprit.is_user else here


def parse(error_type: str, message: str, text: str) -> ParsedException:
    """What was raised, from an exception's type, message and traceback.

    A worker's exception is looked for in the message, then in the traceback, which shows it
    where the message was lost.
    """
    match = _CAUGHT.search(message) or _CAUGHT.search(text)
    if match is None:
        return ParsedException(error_type, message, "", frames(text))
    name, inner = match["type"], match["text"]
    return ParsedException(name, _message(name, inner), match["where"], frames(inner))


def exception_in(text: str) -> tuple[str, str]:
    """Type and message of the exception that a printed traceback ends with; empty: there is none.

    A worker's traceback, chains in it included, is part of the message of what the main process
    raised (`torch/_utils.py`, ``ExceptionWrapper``).
    """
    blocks = _CHAINED.split(text)
    found = ("", "")
    for number, block in enumerate(blocks):
        lines = block.strip("\n").split("\n")
        start = next((index for index, line in enumerate(lines) if _RAISED.match(line)), None)
        if start is None:
            continue
        name, _, first = lines[start].partition(": ")
        found = name.rpartition(".")[2], "\n".join([first, *lines[start + 1 :]]).strip()
        if _CAUGHT.match(found[1]):
            return found[0], "\n\n".join([found[1], *blocks[number + 1 :]]).strip()
    return found


def printed_traceback(output: str) -> str:
    """The last traceback in what a process printed, with what it was raised from; empty without
    one. Frameworks that start a user's function (Hydra) print its exception and exit."""
    begin = output.rfind(_HEADING)
    while (before := output.rfind(_HEADING, 0, max(begin, 0))) >= 0:
        if not _CHAINED.search(output, before, begin):
            break
        begin = before
    return output[begin:] if begin >= 0 else ""


def raised_from(text: str) -> Iterator[tuple[str, str, str]]:
    """Type, message and traceback of the exceptions that the last one of a printed traceback was
    raised from, the nearest first: libraries say at the end that something could not be imported.
    """
    *blocks, _ = text.split(_FROM)
    for block in reversed(blocks):
        name, said = exception_in(block)
        if name:
            yield name, said, block


def defined_at(text: str, qualname: str) -> Place | None:
    """The place at which the user's files of a traceback define what Python calls so
    ("Set.__init__.<locals>.<lambda>"); ``None``: not there, or more than once."""
    files = dict.fromkeys(frame.path for frame in frames(text) if frame.is_user)
    found = [(path, line) for path in files for line in _definitions(path, qualname)]
    return Frame(*found[0], "").place if len(found) == 1 else None


def _definitions(path: str, qualname: str) -> list[int]:
    names, linenos = qualname.replace(".<locals>", "").split("."), list[int]()
    waiting: list[tuple[ast.AST, int]] = [(tree, 0)] if (tree := file_syntax(path)) else []
    while waiting:
        node, depth = waiting.pop()
        for child in ast.iter_child_nodes(node):
            name = "<lambda>" if isinstance(child, ast.Lambda) else getattr(child, "name", "")
            if not isinstance(child, _SCOPES):
                waiting.append((child, depth))
            elif name == names[depth] and depth + 1 < len(names):
                waiting.append((child, depth + 1))
            elif name == names[depth]:
                linenos.append(child.lineno)
    return linenos


def indexes_by_parameter(frame: Frame, function: str) -> bool:
    """Is a frame's line one of a method of this name whose only index is its first parameter, as
    it was given (or the first of a row's, or with a sum of it)?"""
    tree = file_syntax(frame.path) if frame.function == function else None
    methods = [] if tree is None else [
        node for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == function
        and node.lineno <= frame.line <= (node.end_lineno or node.lineno)
    ]  # fmt: skip
    if not methods or len(methods[-1].args.args) < 2:
        return False
    method, name = methods[-1], methods[-1].args.args[1].arg
    inside = list(ast.walk(method))
    if any(isinstance(node, ast.Name) and node.id == name and _is_set(node) for node in inside):
        return False
    indices = [
        subscript.slice for subscript in inside
        if isinstance(subscript, ast.Subscript) and _is_read(subscript)
        and subscript.lineno <= frame.line <= (subscript.end_lineno or subscript.lineno)
    ]  # fmt: skip
    return bool(indices) and all(_is_by(index, name) for index in indices)


def _is_by(index: ast.expr, name: str) -> bool:
    if isinstance(index, ast.Tuple) and index.elts:
        index = index.elts[0]
    if isinstance(index, ast.BinOp) and isinstance(index.op, ast.Add):
        index = index.left
    return isinstance(index, ast.Name) and index.id == name


def _is_set(name: ast.Name) -> bool:
    return not isinstance(name.ctx, ast.Load)


def _is_read(index: ast.Subscript) -> bool:
    return isinstance(index.ctx, ast.Load)


def own_fault_in(text: str) -> OwnFault | None:
    """The fault of trainfit's own code with whose traceback the output of one of its processes
    ends; ``None`` where it does not. Missing files, packages and memory are no faults of the code.
    """
    begin = text.rfind(_HEADING)
    if begin < 0:
        return None
    found = _frames_of(text[begin:])
    ours = [frame for frame in found if frame.is_ours]
    rest = text[begin:].split("\n")[1:]
    part = next((line for line in rest if line and not line.startswith(" ")), "")
    kind = getattr(builtins, part.partition(":")[0], Exception)
    if not ours or not part or any(frame.is_user for frame in found):
        return None
    if not isinstance(kind, type) or issubclass(kind, _OF_THE_MACHINE):
        return None
    if NO_MEMORY.search(part):
        return None
    place = os.path.relpath(ours[-1].path, Path(_own_folder()).parent)
    return OwnFault(part, f"{place}:{ours[-1].line}", text.strip())


def frames(text: str) -> tuple[Frame, ...]:
    """All frames, of the last exception of a chain if there are any, outermost first."""
    blocks = [_frames_of(block) for block in _CHAINED.split(text)]
    with_user = [block for block in blocks if any(frame.is_user for frame in block)]
    last = blocks[-1]
    if with_user and not any(frame.is_user for frame in last):
        return with_user[-1]
    return last


def _frames_of(text: str) -> tuple[Frame, ...]:
    found: list[Frame] = []
    lines = text.split("\n")
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if match := _FRAME.match(line):
            code = following.strip() if following.startswith("    ") else ""
            found.append(Frame(match["path"], int(match["line"]), match["function"] or "", code))
    return tuple(found)


def _message(name: str, text: str) -> str:
    """What follows the exception's type after the last frame of the last exception."""
    last = _CHAINED.split(text)[-1].rstrip("\n")
    starts = re.compile(rf"^(?:[\w.<>]+\.)?{re.escape(name)}(?:: |$)", re.MULTILINE)
    found = starts.search(last)
    return last[found.end() :] if found else short_tail(last.split("\n"))


def short_tail(lines: Sequence[str]) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


@functools.cache
def _own_folder() -> str:
    return str(Path(__file__).resolve().parents[1]) + os.sep


@functools.cache
def _python_folders() -> tuple[str, ...]:
    """Folders of Python's own library (packages installed in them are distinguished before)."""
    names = ("stdlib", "platstdlib")
    return tuple({os.path.join(sysconfig.get_path(name), "") for name in names})


# ---
# Stacks of threads that hang, as ``faulthandler`` writes them, and what the threads wait in.


_THREAD: Final = re.compile(r"^(?:(?:Current thread|Thread) 0x[0-9a-f]+|Stack \(most recent call)")
_STACK_FRAME: Final = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+) in (?P<function>.+)$')
#: Waiting for a lock, in a line of Python; ``recv()`` is a pipe's, ``recv(4096)`` a socket's.
_LOCK_CALL: Final = re.compile(
    r"\.(?:acquire|wait|wait_for|join|result|get|put)\s*\(|\.recv\s*\(\s*\)"
)
_LOCK_NAME: Final = re.compile(r"^(?:async\s+)?with\b.*(?:lock|mutex|cond|sem)", re.IGNORECASE)
_LOCK_MODULES: Final = ("/threading.py", "/queue.py", "/concurrent/futures/", "/multiprocessing/")
Role = Literal["worker", "iterating", "pinning", "other"]


@dataclass(frozen=True)
class ThreadStack:
    """A thread's frames, innermost first."""

    frames: tuple[Frame, ...]

    @property
    def role(self) -> Role:
        """The thread of a worker that makes batches, the one that iterates, or another.

        A forked worker's stack goes on, below ``_worker_loop``, with the fork's.
        """
        for frame in self.frames:
            if _is(frame, WORKER_FILE, WORKER_LOOP):
                return "worker"
            if _is(frame, PIN_MEMORY_FILE, PIN_MEMORY_LOOP):
                return "pinning"
            if _is(frame, "utils/data/dataloader.py"):
                return "iterating"
        return "other"

    @property
    def own(self) -> tuple[Frame, ...]:
        """The frames above the loop that its role has."""
        kept: list[Frame] = []
        for frame in self.frames:
            if self.role == "worker" and frame.function == WORKER_LOOP:
                break
            if self.role == "iterating" and frame.function == "__next__":
                break
            kept.append(frame)
        return tuple(kept)

    def within(self, file: str, function: str = "") -> bool:
        """Does it pass through this function of PyTorch or Python?"""
        return any(_is(frame, file, function) for frame in self.own)

    @property
    def is_idle(self) -> bool:
        """A worker that waits to be asked for a batch."""
        return self.role == "worker" and not self.within("_utils/fetch.py") and self._waits_queue

    @property
    def _waits_queue(self) -> bool:
        return self.within("multiprocessing/queues.py", "get")

    @property
    def user(self) -> Frame | None:
        """The innermost line of the user's code."""
        return next((frame for frame in self.own if frame.is_user), None)

    @property
    def where(self) -> Frame | None:
        """The user's line, or else the innermost of all."""
        return self.user or next(iter(self.own), None)


def parse_stacks(text: str) -> tuple[ThreadStack, ...]:
    """The stacks in what processes wrote, in their order."""
    stacks: list[list[Frame]] = []
    for line in text.split("\n"):
        if _THREAD.match(line):
            stacks.append([])
        elif stacks and (match := _STACK_FRAME.match(line)):
            number = int(match["line"])
            code = linecache.getline(match["path"], number).strip()
            stacks[-1].append(Frame(match["path"], number, match["function"], code))
    return tuple(ThreadStack(tuple(frames)) for frames in stacks if frames)


def library(stack: ThreadStack, known: Mapping[str, object]) -> str:
    """The library of ``known`` that a thread is in, or empty.

    Native code has no frames of its own: where the innermost line is the user's, the names in
    that line tell, by what its file imports them as.
    """
    for frame in stack.own:
        module = _module(frame)
        if module in known:
            return module
        if frame.is_user:
            named = modules_named(frame)
            return next((name for name in named if name in known), "")
    return ""


def waits_for_lock(stack: ThreadStack) -> bool:
    """Is the innermost line one that waits for a lock, a thread or a queue?"""
    frame = next(iter(stack.own), None)
    if frame is None:
        return False
    if any(part in frame.path for part in _LOCK_MODULES) and not frame.package:
        return True
    return bool(_LOCK_NAME.match(frame.code) or _LOCK_CALL.search(frame.code))


def _module(frame: Frame) -> str:
    """The package of a frame; of Python's own, ``logging``."""
    if frame.package:
        # PyTorch's loader itself is under every worker's stack.
        return "" if "/torch/utils/data/" in frame.path else frame.package
    return "logging" if frame.path.endswith("/logging/__init__.py") else ""


def modules_named(frame: Frame) -> list[str]:
    """Top-level modules that the names in a line stand for."""
    aliases = _aliases(frame.path)
    words = re.findall(r"[A-Za-z_]\w*", frame.code)
    return [aliases[word] for word in words if word in aliases]


@functools.lru_cache(maxsize=64)
def _aliases(path: str) -> Mapping[str, str]:
    """What a file imports: the name in it → the top-level module."""
    tree = file_syntax(path)
    aliases: dict[str, str] = {}
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name.split(".")[0]
                aliases[name.asname or top] = top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                aliases[name.asname or name.name] = node.module.split(".")[0]
    return aliases


def _is(frame: Frame, file: str, function: str = "") -> bool:
    return frame.path.endswith(file) and function in ("", frame.function)
