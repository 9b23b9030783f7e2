"""The fix of each fault, as instructions, and the cause that an exception's message reveals."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from trainfit.loader.faults.tracebacks import ParsedException
from trainfit.loader.measure.workload import Workload
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.text import short, size

_OTHER_START: Final = 'pass multiprocessing_context="forkserver" (or "spawn") to the DataLoader'

HANGS: Final[Mapping[str, str]] = {
    "deadlock": f"{_OTHER_START}: workers then do not inherit locks and threads; or open "
    "and start what it waits for in the worker (worker_init_fn, or at the first sample) and "
    "use persistent_workers=True so that it happens once",
    "hung": f"try a longer time limit; if it is stuck, {_OTHER_START}, or num_workers=0",
    "slow_dataset": "slow, not stuck: make the data set faster, or use more workers or time",
    "slow_sampler": "compute the sampler's indices before the epoch (a list), or faster",
    "slow_start": "keep the data set object small for spawned workers: store paths or "
    "a memory-mapped file, not the data; or use fork and persistent_workers=True",
    "start_hangs": "check what worker_init_fn and the script's imports do in a worker: "
    "no download, no lock, no GPU",
}

NOT_RESTARTABLE: Final = (
    "a generator is exhausted after one pass: pass an object whose __iter__ returns a new "
    "iterator each time (or a list)"
)
NO_BATCHES: Final = (
    "check whether the data set is empty, whether drop_last drops its only batch, and "
    "whether __getitem__ raises StopIteration, which ends the loop silently"
)
DIED: Final = "run it with num_workers=0 to see the error message"
BATCH: Final = (
    "return tensors, arrays, numbers, strings, and containers of those from the data set and "
    "collate_fn (no lambda, generator, open file or lock): a worker pickles each batch"
)
LOST: Final = (
    "check stderr: a worker's queue thread prints there why it could not send a batch; "
    "then raise ulimit -n, or return only tensors, arrays, numbers and strings"
)
OPEN_FILES: Final = (
    "raise the limit (ulimit -n 65536 before the command), or call "
    'torch.multiprocessing.set_sharing_strategy("file_system") at the top of the script; fewer '
    "tensors per batch (pack or stack them) or a smaller num_workers × prefetch_factor also help; "
    "a script that keeps batches in a list keeps their files open: clone what it keeps"
)
NOT_PICKLABLE: Final = (
    "use fork, or make every attribute picklable: module-level functions instead of "
    "lambdas, and files, locks and clients opened in the worker at the first sample"
)
UNGUARDED: Final = "Spawned workers import the script, which starts workers again"
MAIN_GUARD: Final = (
    'put top-level code of the script below `if __name__ == "__main__":`, or use fork '
    '(multiprocessing_context="fork")'
)
NOT_IMPORTABLE: Final = (
    "move the class or function to a module of its own that the script imports (what a notebook "
    "or an interactive session defines cannot be imported), or use fork"
)
SPAWN_START: Final = (
    "check stderr for the workers' traceback: usually the script lacks "
    '`if __name__ == "__main__":`, or defines what a worker cannot import; or use fork'
)
TIMEOUT: Final = (
    "set DataLoader(timeout=…) above the time of the slowest batch, including the first ones; "
    "if a batch never arrives, set timeout=0 and let a time limit print the stacks"
)
PIN_THREAD: Final = (
    "pin_memory=False; check stderr: too many open files (ulimit -n) also stop that thread"
)
PINNING: Final = (
    "pin_memory=False, or give the batch's type a pin_memory() method that returns "
    "itself; on CUDA also check that this much memory can be locked"
)
EXITED: Final = (
    "something called exit(), or a library terminated the process: run it with num_workers=0 to "
    "see the error message"
)
KILLED: Final = (
    "find what sent the signal: a scheduler's memory or time limit, a container's limit (its "
    "count of OOM kills), a script; if it was memory, fewer workers need less"
)
CRASHED: Final = (
    "native code crashed: run with num_workers=0 and `python -X faulthandler` to see where; if "
    f"it works there, {_OTHER_START} and open files, decoders and clients in the worker"
)
CRASHES: Final[Mapping[int, str]] = {
    signal.SIGSEGV: "crashed in native code (segmentation fault)",
    signal.SIGABRT: "was aborted by native code",
    signal.SIGILL: "used an instruction that this CPU does not support: a package was "
    "built for another CPU",
    signal.SIGFPE: "crashed in native code (division by zero)",
    signal.SIGBUS: "crashed in native code (bus error)",
}
EXCEPTION: Final = "raises for every DataLoader setting; fix this line"
WORKERS_ONLY: Final = "num_workers=0 works"


def memory(settings: LoaderSettings) -> str:
    """The fix where all workers together need too much RAM."""
    fewer = settings.num_workers // 2
    return (
        f"fewer workers ({fewer} instead of {settings.num_workers}), a smaller prefetch_factor, "
        "or more memory; a data set in Python lists is copied into each worker as "
        "reference counts change: store it in one NumPy array, tensor or memory-mapped file"
    )


def shm(settings: LoaderSettings, need_bytes: int | None) -> str:
    """Where /dev/shm is too small; with the size that is needed, if it is known."""
    if need_bytes is None:
        amount = "docker run --shm-size=8g (or more, as needed)"
    else:
        # A quarter more, in whole GiB: allocations are rounded up, other processes have some.
        gib = max(1, math.ceil(need_bytes * 1.25 / (1 << 30)))
        amount = f"docker run --shm-size={gib}g ({size(need_bytes)} needed)"
    return (
        f"{amount} or --ipc=host; outside of a container mount -o remount,size=… /dev/shm; or "
        f"fewer prefetched batches (num_workers × prefetch_factor is {settings.tokens}), or "
        "smaller ones (uint8 instead of float32); "
        'torch.multiprocessing.set_sharing_strategy("file_system") uses the same memory'
    )


# ---
# What a data set consists of: its attributes and what they hold, each with its path.


#: Objects that are looked at, elements of one container, and how deep.
_MOST_OBJECTS: Final = 5000
_MOST_ELEMENTS: Final = 64
_DEEPEST: Final = 12
_LEAVES: Final = (str, bytes, bytearray, int, float, complex, bool, type(None), np.ndarray)


def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The object and all that it holds, breadth first, as far as the limits go."""
    seen: set[int] = set()
    level = [(path, value)]
    for _ in range(_DEEPEST):
        following: list[tuple[str, Any]] = []
        for name, each in level:
            if id(each) in seen or len(seen) >= _MOST_OBJECTS:
                continue
            seen.add(id(each))
            yield name, each
            following += held(each, name)
        level = following


def held(value: Any, path: str) -> list[tuple[str, Any]]:
    """What an object holds, one level down; of long containers the first elements."""
    if isinstance(value, (*_LEAVES, torch.Tensor, type)) or inspect.ismodule(value):
        return []
    if isinstance(value, Mapping):
        pairs = [(f"{path}[{key!r:.40}]", each) for key, each in _first(value.items())]
        return pairs + _attributes(value, path)
    if isinstance(value, list | tuple | set | frozenset):
        items = [(f"{path}[{number}]", each) for number, each in enumerate(_first(value))]
        return items + _attributes(value, path)
    if isinstance(value, functools.partial):
        arguments = [(f"{path}.args[{n}]", each) for n, each in enumerate(value.args)]
        named = [(f"{path}.keywords[{key!r}]", each) for key, each in value.keywords.items()]
        return [(f"{path}.func", value.func), *arguments, *named]
    if inspect.ismethod(value):
        return [(f"{path}.__self__", value.__self__)]
    if inspect.isroutine(value) or inspect.isgenerator(value):
        return []
    return _attributes(value, path)


def described(value: Any) -> str:
    """An object's type, or of a function its name and place."""
    if inspect.isfunction(value):
        code = value.__code__
        return f"{value.__qualname__}, {code.co_filename}:{code.co_firstlineno}"
    kind = type(value)
    module = kind.__module__.split(".")[0]
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__name__}"


def _attributes(value: Any, path: str) -> list[tuple[str, Any]]:
    """As they are stored, without running the object's own code."""
    names: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):
        names |= object.__getattribute__(value, "__dict__")
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            try:
                names.setdefault(name, object.__getattribute__(value, name))
            except AttributeError:
                continue
    return [(f"{path}.{name}", each) for name, each in names.items()]


def _first(values: Any) -> list[Any]:
    return [each for _, each in zip(range(_MOST_ELEMENTS), values, strict=False)]


# ---
# Exceptions of data sets and collation whose message reveals the cause.


@dataclass(frozen=True)
class KnownFault:
    """A fault's kind, summary and fix, derived from an exception."""

    kind: str
    summary: str
    fix: str


@dataclass(frozen=True)
class _Rule:
    kind: str
    message: re.Pattern[str]
    summary: str
    fix: str


_RULES: Final = (
    _Rule(
        "cuda_in_worker",  # torch/cuda/__init__.py (and xpu, mtia); the driver's own words
        re.compile(r"Cannot re-initialize \w+ in forked subprocess|CUDA error: initialization e"),
        "The data set uses the GPU in a forked worker",
        "keep the data set on the CPU and move batches in the loop; or multiprocessing_context="
        '"spawn" with what is on the GPU made in the worker; or num_workers=0',
    ),
    _Rule(
        "nested_processes",  # multiprocessing/process.py
        re.compile(r"daemonic processes are not allowed to have children"),
        "The data set starts processes, which a worker cannot do",
        "num_workers=0, or make the data set single-process: the DataLoader's workers "
        "already run in parallel",
    ),
    _Rule(
        "collate",  # torch.stack; torch/utils/data/_utils/collate.py; ATen/native/Resize
        re.compile(
            r"stack expects each tensor to be equal size|should be of equal size"
            r"|Trying to resize storage that is not resizable"
        ),
        "Samples of one batch differ in size and cannot be stacked",
        "resize, crop or pad samples to one size in the data set, or pass a collate_fn "
        "that pads them or keeps them in a list",
    ),
    _Rule(
        "collate",  # torch/utils/data/_utils/collate.py
        re.compile(r"default_collate: batch must contain tensors"),
        "Samples contain a type that default_collate does not support",
        "return tensors, arrays, numbers, strings or containers of them, or pass a collate_fn",
    ),
)

#: What libraries say when a file that was opened before the fork is read in a worker.
_HANDLES: Final[dict[str, re.Pattern[str]]] = {
    "h5py": re.compile(
        r"Unable to (?:synchronously )?(?:open|read|get)|Can't (?:synchronously )?read data"
        r"|wrong B-tree signature|addr overflow|bad (?:object|local heap|symbol)|inflate\(\) failed"
    ),
    "lmdb": re.compile(r"MDB_BAD_RSLOT|MDB_READERS_FULL|opened by this process"),
    "zipfile": re.compile(
        r"Bad magic number|Bad CRC-32|Error -3 while decompressing|Overlapped entries"
    ),
    "tarfile": re.compile(
        r"(?:unexpected end of data|bad checksum|truncated header|invalid header)"
    ),
    "av": re.compile(r"Invalid data found|avcodec_send_packet|Operation not permitted"),
}
#: Of these an exception says enough by itself.
_CERTAIN: Final = re.compile(r"MDB_BAD_RSLOT")


def known(raised: ParsedException, workload: Workload | None) -> KnownFault | None:
    """The known cause of an exception, if it has one."""
    for rule in _RULES:
        if rule.message.search(raised.message):
            at = f" ({short(raised.message, 80)})" if rule.kind == "collate" else ""
            return KnownFault(rule.kind, rule.summary + at, rule.fix)
    return _handle(raised, workload) if raised.worker is not None else None


def _handle(raised: ParsedException, workload: Workload | None) -> KnownFault | None:
    """A file that was opened before workers were forked, and that two of them now read."""
    text = f"{raised.type}: {raised.message}"
    suspects = [name for name, said in _HANDLES.items() if said.search(text)]
    if not suspects:
        return None
    found = open_handles(workload, lambda name: name in suspects) if workload else {}
    if not found and not _CERTAIN.search(text):
        return None
    what = ", ".join(f"{path} ({kind})" for path, kind in found.items()) or f"a {suspects[0]} file"
    return KnownFault(
        "handle_before_fork",
        f"{what} was opened before the workers were forked, and they share its file position",
        "open it in the worker: set the attribute to None in __init__ and open at "
        "the first __getitem__ (one handle per worker), or in worker_init_fn",
    )


def open_handles(workload: Workload, wanted: Callable[[str], bool]) -> dict[str, str]:
    """Attributes of the data set that are objects of such libraries: path → type."""

    def is_handle(value: Any) -> bool:
        return wanted(type(value).__module__.split(".")[0]) and not isinstance(value, type)

    return {
        path: f"{type(value).__module__.split('.')[0]}.{type(value).__qualname__}"
        for path, value in walk(workload.dataset, "dataset")
        if is_handle(value)
    }
