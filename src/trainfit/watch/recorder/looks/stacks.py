"""Looks at a thread's stack from another thread: the script's line, and what it waits for there."""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import itertools
import linecache
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Final

from trainfit.findings.source_code import relative_place
from trainfit.results.runs.watched import CodeLine, StackLooks, WaitsFor
from trainfit.scripts.call_sites import STILL_S, Call, called_in, calls_of, locals_in, undisturbed
from trainfit.simgpu.device.user_location import is_library
from trainfit.torch_private.data_loading import NEXT_INDEX

#: Frames of a stack that are looked at, and lines that are kept.
_DEEPEST: Final = 60
_MOST_LINES: Final = 24
_MOST_CALLERS: Final = 6
#: Where the frames of PyTorch's phases are, by the ends of their files' names.
_PHASES: Final = (
    *("torch/nn/modules/module.py", "torch/autograd/__init__.py", "torch/autograd/graph.py"),
    *("torch/optim/optimizer.py", "torch/utils/data/dataloader.py"),
    "torch/distributed/distributed_c10d.py",
)
_SAVES: Final = "torch/serialization.py"
_FETCH: Final = "torch/utils/data/_utils/fetch.py"
_OURS: Final = ("/trainfit/watch/recorder/", "/trainfit/hooks/")
#: Names of functions and modules, and what they wait for; the first that is found counts.
_WAITS: Final[tuple[tuple[re.Pattern[str], WaitsFor], ...]] = (
    (re.compile(r"(?:^|\.)sleep$"), "sleep"),
    (re.compile(r"acquire|flock|lockf|[Ss]em[Ll]ock|synchronize\."), "lock"),
    (
        re.compile(
            r"^(?:_?socket|_?ssl|http|urllib3?|requests|httpx?|aiohttp|boto\w*|grpc|s3fs|gcsfs|smtplib"
            r"|websockets?|wandb|mlflow|redis|pymongo|psycopg\d?)\b|urlopen|\.recv|\.sendall"
        ),
        "network",
    ),
    (
        re.compile(
            r"fsync|fdatasync|(?:^|\.)(?:write|flush|read|readinto|pread|open|dump|save\w*)$"
            r"|^(?:zipfile|_?pickle|shutil|h5py|lmdb|sqlite3)\b"
        ),
        "disk",
    ),
)
#: Functions in which a thread waits for those of a pool; joblib's asks again and again.
_POOLS: Final = ("concurrent.futures.", "multiprocessing.pool.", "joblib.")
#: Where a process waits for what another one sends through a pipe, as queues do.
_PIPE: Final = "multiprocessing.connection."
_WITH_LOCK: Final = re.compile(r"^(?:async\s+)?with\b.*(?:lock|mutex|cond|sem)", re.IGNORECASE)


#: A loop's first line, and a loop or a comprehension that is within a line.
_FOR: Final = re.compile(r"^\s*(?:async\s+)?for\b.+?\bin\s+(.+?):\s*(?:#.*)?$")
_ON_LINE: Final = re.compile(r"\bfor\b.+?\bin\s+([\w.]+(?:\((?:[^()]|\([^()]*\))*\))?)")
#: What only goes over another thing: that is what the loop goes over.
_DRIVEN: Final = re.compile(
    r"(?:enumerate|reversed|iter|list|tuple|tqdm(?:\.tqdm|\.auto\.tqdm)?)\("
    r"((?:[^(),]|\([^()]*\))+)[,)].*",
)
#: What a line reads to its end without a loop of its own: the lines or rows of a file.
_READ_WHOLE: Final = re.compile(
    r"\b(?:list|tuple|sorted|dict|set)\((csv\.\w+\((?:[^()]|\([^()]*\))*\)|(?:\w+\.)?open\([^()]*\))\)"
)
_DRIVERS: Final = frozenset(("enumerate", "reversed", "iter", "list", "tuple"))
_LONGEST_LOOP: Final = 60
_LONGEST_OVER: Final = 60


#: What a thread was found at: the fields of a CodeLine without its count.
Key = tuple[str, tuple[str, ...], str, str, WaitsFor, str, str]
_NO_CODE: Final[frozenset[CodeType]] = frozenset()


class StackCounts:
    """Lines that a thread was found at. One thread looks; another may ask for the result.

    Looks count when the step, or the batch, that they were in is over (:meth:`settle`): neither
    those of a pause that does not end, nor what a script does after its last step, are of any.
    """

    def __init__(self) -> None:
        self.looks = 0
        self._lines: collections.Counter[Key] = collections.Counter()
        self._open_looks = 0
        self._open_lines: collections.Counter[Key] = collections.Counter()
        self._of = 0

    def look(self, of: int) -> None:
        """A look in the step, or the batch, of this number."""
        self.settle(of)
        self._open_looks += 1

    def settle(self, of: int) -> None:
        """What was seen before that one counts."""
        if of != self._of:
            self._of = of
            self.looks, self._open_looks = self.looks + self._open_looks, 0
            self._lines.update(self._open_lines)
            self._open_lines.clear()

    def count(self, stack: Sequence[Call], loop: frozenset[CodeType] = _NO_CODE) -> WaitsFor:
        """A look at a stack, innermost first; what is waited for there. Where no frame is the
        script's, its line has no place. ``loop`` are functions of the training loop: what called
        them is the same always."""
        inmost = next((n for n, node in enumerate(stack) if node[0] in loop), len(stack))
        key = key_of(stack[: inmost + 1])
        self._open_lines[key] += 1
        return key[4]

    def summary(self) -> StackLooks:
        """The most frequent lines."""
        return StackLooks(self.looks, most_frequent(self._lines.copy()))


def merged(parts: Iterable[StackLooks]) -> StackLooks:
    """The looks of several processes, merged."""
    lines: collections.Counter[Key] = collections.Counter()
    looks = 0
    for part in parts:
        looks += part.looks
        for line in part.lines:
            what = line.calls, line.inner, line.waits_for, line.over, line.function
            lines[line.place, line.callers, *what] += line.count
    return StackLooks(looks, most_frequent(lines))


def most_frequent(lines: collections.Counter[Key]) -> tuple[CodeLine, ...]:
    """The most frequent; of the others the lines without what they call, which may be a different
    function of a library at each look: only which library that is."""
    every = lines.most_common()
    others: collections.Counter[Key] = collections.Counter()
    for (place, callers, calls, inner, waits_for, over, function), count in every[_MOST_LINES:]:
        library = _library(calls) or _library(inner)
        others[place, callers, "", library, waits_for, over, function] += count
    return tuple(_told(*each) for each in (*every[:_MOST_LINES], *others.most_common(_MOST_LINES)))


def _library(name: str) -> str:
    """ "pandas.…" of "pandas.core.series.__getitem__"; empty: it is of none, or of Python's own."""
    first, dot, _ = name.partition(".")
    is_one = bool(dot) and first in sys.modules and first not in sys.stdlib_module_names
    return f"{first}.…" if is_one and first != "torch" else ""


def _told(key: Key, count: int) -> CodeLine:
    place, callers, calls, inner, waits_for, over, function = key
    return CodeLine(place, count, callers, calls, inner, waits_for, over, function)


#: Seconds within which a thread gives the interpreter's lock to one that waits for it, during a
#: look, and the longest that such a look waits before it asks.
_AT_ONCE_S: Final = 1e-4
_MOMENT_S: Final = 0.005


@contextlib.contextmanager
def at_any_line(share: float) -> Iterator[None]:
    """Come to a moment that the thread which is looked at has not chosen, ``share`` of 5 ms later.

    A thread that waits for the interpreter's lock gets it where another gives it away by itself, as
    operators of PyTorch do, or after 5 ms: of a training that calls one more often than that it
    would never see the Python between them. Then nobody takes it from us (:func:`undisturbed`).
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_AT_ONCE_S)
    ours = sys.getswitchinterval()
    try:
        time.sleep(share * _MOMENT_S)
        sys.setswitchinterval(STILL_S)  # at once: the thread waits already
        ours = sys.getswitchinterval()
        yield
    finally:
        if sys.getswitchinterval() == ours:
            sys.setswitchinterval(usual)


#: Of a function: does it make batches (1), is it one of PyTorch's phases (2), or neither (0)?
_kinds: dict[CodeType, int] = {}


def is_busy_elsewhere(thread: int) -> bool:
    """Is a thread in what PyTorch does in a step, and makes no batch? A few microseconds, so that
    only a stack that tells something is taken."""
    found = 0
    for code, _, _ in calls_of(thread)[:_DEEPEST]:
        kind = _kinds.get(code)
        if kind is None:
            name = code.co_filename
            makes = name.endswith(_FETCH) or code.co_name == NEXT_INDEX.name
            kind = _kinds[code] = 1 if makes else 2 if _is_of_phase(code) else 0
        if kind == 1:
            return False
        found |= kind
    return found == 2


def users_stack(thread: int) -> list[Call]:
    """The calls that a thread is in, the innermost first, without those of our hooks; none while it
    is in one of these."""
    calls = calls_of(thread)[:_DEEPEST]
    if calls and _is_ours(calls[0]):
        return []  # what a hook costs is no line's of the script
    return [node for node in calls if not _is_ours(node)]


def _is_ours(call: Call) -> bool:
    return any(our in _file(call) for our in _OURS)


def holds_lock(stack: Sequence[Call]) -> bool:
    """Is a line of the script within a ``with`` of a lock, and not one that waits for it?"""
    own = [node for node in stack if not is_library(_file(node))]
    if not own or stack[0][0].co_name in ("__enter__", "acquire"):
        return False
    if own[0] is stack[0] and key_of(stack)[4] == "lock":
        return False
    return any(_is_within_lock(code, line_at(code, lasti)) for code, lasti, _ in own)


@functools.lru_cache(1 << 10)
def _is_within_lock(code: CodeType, number: int) -> bool:
    least: int | None = None
    for index in range(number, max(code.co_firstlineno, number - _LONGEST_LOOP) - 1, -1):
        text = linecache.getline(code.co_filename, index)
        if not text.strip():
            continue
        indent = len(text) - len(text.lstrip())
        if least is None or indent < least:
            if index < number and _WITH_LOCK.match(text.strip()):
                return True
            if _WITH_LOCK.match(text.strip()) and not text.rstrip().endswith(":"):
                return True  # its body is on the same line
            least = indent
    return False


def in_fetch(stack: Sequence[Call]) -> Sequence[Call] | None:
    """The part of a stack within the making of a batch; ``None``: it makes none."""
    for number, node in enumerate(stack):
        if _file(node).endswith(_FETCH):
            return stack[:number]
    return None


def in_sampler(stack: Sequence[Call]) -> Sequence[Call] | None:
    """The part of a stack within the choice of a batch's indices; ``None``: none are chosen."""
    names = (code.co_name for code, _, _ in stack)
    inside = next((n for n, name in enumerate(names) if name == NEXT_INDEX.name), None)
    return None if inside is None else stack[:inside]


def code_below(frame: FrameType | None) -> frozenset[CodeType]:
    """The script's functions from ``frame`` outwards: the training loop, and what called it."""
    code = set()
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            code.add(frame.f_code)
        frame = frame.f_back
    return frozenset(code)


def is_in_phase(stack: Sequence[Call]) -> bool:
    """Is the thread in what PyTorch does in a step: a module, a backward pass, an optimizer, a
    DataLoader, a checkpoint?"""
    return any(_is_of_phase(code) for code, _, _ in stack)


def _is_of_phase(code: CodeType) -> bool:
    """Is it of a phase? Of torch.serialization only what saves is: to load a file is the script's
    own affair."""
    name = code.co_filename
    if name.endswith(_SAVES):
        return "save" in code.co_name
    return name.endswith(_PHASES)


#: The frames that passes are made from, and those of them that call hooks.
_PASSES: Final = ("torch/nn/modules/module.py", "torch/autograd/graph.py")
_CALL_HOOKS: Final = (*_PASSES, "torch/utils/hooks.py")


def is_in_pass(stack: Sequence[Call]) -> bool:
    """Is the thread in a module, or in a backward pass?"""
    return any(_file(node).endswith(_PASSES) for node in stack)


def in_hook(stack: Sequence[Call]) -> Sequence[Call] | None:
    """The part of a stack within a hook of the script that PyTorch calls in a forward or backward
    pass, and that only looks: one that returns a value is a part of the model. ``None``: there is
    none."""
    for number in range(len(stack) - 2, -1, -1):
        code, caller = stack[number][0], stack[number + 1]
        if is_library(code.co_filename) or not _file(caller).endswith(_CALL_HOOKS):
            continue
        if _calls_hook(*caller[:2]) and _gives_nothing(code):
            return stack[: number + 1]
    return None


@functools.lru_cache(1 << 8)
def _calls_hook(code: CodeType, lasti: int) -> bool:
    """Does PyTorch call a hook there? The forward pass is called from the same function."""
    if code.co_filename.endswith("torch/autograd/graph.py"):
        return True  # what the engine calls by itself, next to a Function's backward()
    return "hook(" in linecache.getline(code.co_filename, line_at(code, lasti))


@functools.lru_cache(1 << 8)
def _gives_nothing(code: CodeType) -> bool:
    """Has a function no value that it returns?"""
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        nothing = before is not None and before.opname == "LOAD_CONST" and before.argval is None
        if instruction.opname == "RETURN_VALUE" and not nothing:
            return False
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return False
        before = instruction
    return True


#: What waits, or writes, where a model only has to compute.
_NO_COMPUTING: Final = re.compile(r"(?:^|\.)(?:sleep|fsync|flush|write|print)$|urlopen|\.recv\w*$")


def waits_in_pass(stack: Sequence[Call]) -> bool:
    """Does the script's innermost line sleep, log or wait for the network? Of a stack that is in a
    pass."""
    own = next((n for n, node in enumerate(stack) if not is_library(_file(node))), None)
    if own is None:
        return False
    # What prints a tensor is in PyTorch's own functions: what the line calls tells it, too.
    names = *_names(stack[: own + 1]), called_in(*stack[own][:2])
    return any(_NO_COMPUTING.search(name) is not None for name in names)


def fetched_index(thread: int, stack: Sequence[Call]) -> str:
    """The index of the sample that a thread makes, which was in these calls; empty: it is not
    told."""
    code = next((node[0] for node in stack[1:] if _file(node).endswith(_FETCH)), None)
    if code is None:
        return ""
    with undisturbed():
        index = locals_in(thread, code).get("idx")
        return str(index) if isinstance(index, int) else ""


def stack_text(stack: Sequence[Call]) -> str:
    """The stack as :mod:`faulthandler` writes it."""
    lines = ["Thread 0x0000000000000000 (most recent call first):"]
    for code, lasti, _ in stack:
        lines.append(f'  File "{code.co_filename}", line {line_at(code, lasti)} in {code.co_name}')
    return "\n".join(lines)


@functools.lru_cache(1 << 12)
def line_at(code: CodeType, lasti: int) -> int:
    """The line of an instruction, or of the last one before it that has one: the jump back to a
    loop's head, at which a thread lets others run, has none."""
    places = itertools.islice(code.co_positions(), max(0, lasti) // 2 + 1)
    lines = [place[0] for place in places if place and place[0]]
    return lines[-1] if lines else code.co_firstlineno


def _file(call: Call) -> str:
    return call[0].co_filename


def key_of(stack: Sequence[Call]) -> Key:
    """The script's innermost line in a stack, and what is done there."""
    users = [n for n, each in enumerate(stack) if not is_library(_file(each))]
    if not users:
        calls = _name(stack[-1]) if stack else ""
        return "", (), calls, _innermost(stack), _waits_for(stack, ""), "", ""
    own = users[0]
    # Of many, those next to the training loop: a line is looked for from there inwards.
    callers = tuple(place_of(stack[n]) for n in users[1:][-_MOST_CALLERS:])
    code, lasti, _ = stack[own]
    number = line_at(code, lasti)
    calls = called_in(code, lasti)
    if not calls and own:
        # What was made by exec() has no module: what it calls tells more.
        node = next((each for each in reversed(stack[:own]) if each[2].get("__name__")), None)
        calls = _name(stack[own - 1] if node is None else node)
    within = stack[: own + 1]
    source = linecache.getline(code.co_filename, number).strip()
    waits = _waits_for(within, source)
    over = _over(code, number)
    if calls in _DRIVERS and over:  # of "enumerate(csv.reader(file))" the reader is what works
        calls = over.partition("(")[0] if "(" in over else ""
    inner = _innermost(within)
    pool = next((name for name in _names(within) if name.startswith(_POOLS)), "")
    if pool and waits in ("lock", "sleep"):  # told as whose wait it is
        inner, waits = pool, "lock"
    return place_of(stack[own]), callers, calls, inner, waits, over, code.co_qualname


@functools.lru_cache(1 << 10)
def _over(code: CodeType, number: int) -> str:
    """What the innermost loop around a line of a function goes over; empty: it is in none."""
    indented: int | None = None
    for index in range(number, max(code.co_firstlineno, number - _LONGEST_LOOP) - 1, -1):
        text = linecache.getline(code.co_filename, index)
        if not text.strip():
            continue
        indent = len(text) - len(text.lstrip())
        within = indented is None or indent < indented
        if index == number and (whole := _READ_WHOLE.search(text)):
            return whole[1][:_LONGEST_OVER]
        if within and (loop := (_FOR if index < number else _ON_LINE).search(text)):
            driven = _DRIVEN.fullmatch(loop[1].strip())
            over = (driven or loop)[1].strip()
            return (_opened(code, index, over) or over)[:_LONGEST_OVER]
        indented = indent if indented is None else min(indent, indented)
    return ""


def _opened(code: CodeType, number: int, name: str) -> str:
    """The call of open() whose file has this name at a line of a function; empty: it is none."""
    if not name.isidentifier():
        return ""
    opens = re.compile(rf"\bwith\s+([\w.]*open\([^()]*\))\s+as\s+{name}\b")
    for index in range(number, max(code.co_firstlineno, number - _LONGEST_LOOP) - 1, -1):
        if found := opens.search(linecache.getline(code.co_filename, index)):
            return found[1]
    return ""


def place_of(call: Call) -> str:
    """The line that a call is at: "train.py:41"."""
    code, lasti, _ = call
    return relative_place(f"{code.co_filename}:{line_at(code, lasti)}")


def _name(call: Call) -> str:
    return f"{call[2].get('__name__', '')}.{call[0].co_name}"


def _innermost(stack: Sequence[Call]) -> str:
    return next(iter(_names(stack)), "")


def _waits_for(stack: Sequence[Call], source: str) -> WaitsFor:
    """What a stack waits for, by what functions are called that are not the script's own: its
    ``dump()`` may compute."""
    names = [*_called(stack), *(_name(e) for e in stack if is_library(_file(e)))]
    if any(name.startswith(_PIPE) for name in names):
        return "process"
    for name in names:
        for pattern, kind in _WAITS:
            if pattern.search(name):
                return kind
    return "lock" if len(stack) == 1 and _WITH_LOCK.match(source) else ""


def _called(stack: Sequence[Call]) -> Iterator[str]:
    """What the innermost function calls now, which has no frame."""
    if stack and (called := called_in(*stack[0][:2])):
        yield called


def _names(stack: Sequence[Call]) -> Iterator[str]:
    """The names of functions, the innermost first."""
    yield from _called(stack)
    yield from map(_name, stack)
