"""Exceptions of data sets and collation whose message reveals the cause."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from trainfit.loader.inspection.objects import walk
from trainfit.loader.inspection.tracebacks import ParsedException
from trainfit.loader.measure.workload import Workload
from trainfit.results.text import short


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
