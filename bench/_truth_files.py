"""What bench/gpu measured on a real GPU: one training job, one limit, step times, or kernels.

Truth files are JSON (``.json`` or ``.json.gz``), data only. They are written by bench/gpu,
which needs no trainfit, and read here. All sizes are in bytes.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from trainfit.results.files.decoding import DecodingError, decode
from trainfit.results.files.errors import ResultFileError

FORMAT: Final = "trainfit-gpu-truth"
VERSION: Final = 1

#: Letters of ``AllocatorTrace.kinds`` that have an entry in ``sizes``; see there.
SIZED: Final = frozenset("aSsMUo")
LETTERS: Final = frozenset("afrcSsMUo")


@dataclasses.dataclass(frozen=True)
class MeasuringMachine:
    """Where it was measured. ``cudnn`` is its version as one number (91501: 9.15.1)."""

    gpu: str
    capability: tuple[int, int]
    memory_bytes: int
    sm_count: int
    driver: str | None
    torch: str
    cuda: str | None
    cudnn: int | None
    python: str
    libraries: Mapping[str, str]
    environment: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class TruthCase:
    """The job: the fields of ``Case`` in bench/gpu/cases.py, which explains them."""

    name: str
    model: str
    batch: int
    precision: str
    optimizer: str
    kind: str
    attention: str
    checkpointing: bool
    accumulation: int
    clip: bool
    channels_last: bool
    benchmark: bool
    tf32: str
    set_to_none: bool
    alloc_conf: str
    cap_bytes: int | None
    steps: int
    mode: str = "training"


@dataclasses.dataclass(frozen=True)
class MemoryTotals:
    """The allocator's figures at the end of the job."""

    max_allocated_bytes: int
    max_reserved_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    retries: int
    ooms: int


@dataclasses.dataclass(frozen=True)
class MemoryStage:
    """The GPU's memory at a point of the process.

    ``free_bytes`` and ``total_bytes`` are cudaMemGetInfo's (``None`` before there is a
    context); ``device_used_bytes`` of all processes and ``process_used_bytes`` of this one
    are NVML's, ``None`` where it could not be asked.
    """

    stage: str
    free_bytes: int | None
    total_bytes: int | None
    device_used_bytes: int | None
    process_used_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int


@dataclasses.dataclass(frozen=True)
class Mark:
    """The allocator's own statistics at a named point of a step.

    The point is after ``allocations`` allocations and ``frees`` frees asked for since the
    process began, which is where the trace begins. Peaks are since then, too.
    """

    name: str
    allocations: int
    frees: int
    allocated_bytes: int
    reserved_bytes: int
    active_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclasses.dataclass(frozen=True)
class MemorySegment:
    """A range of reserved memory; ``blocks`` are (address, bytes, asked for, state).

    States: "a" in use, "p" freed but waiting for another stream, "i" free.
    """

    address: int
    bytes: int
    stream: int
    small: bool
    expandable: bool
    blocks: tuple[tuple[int, int, int, str], ...]


@dataclasses.dataclass(frozen=True)
class AllocatorTrace:
    """Every event of the caching allocator from the process's first allocation on.

    ``kinds`` has a letter per event: a allocation, f free that completed at once, r free that
    waits for another stream, c its completion, S/s segment allocated/freed, M/U pages
    mapped/unmapped, o out of memory. ``addresses`` (one for every letter but o) are in units
    of ``unit_bytes`` from ``base_address``. ``sizes`` (one for each of "aSsMUo") are in bytes,
    as asked for. ``streams`` are (event, stream): from that event on it is that stream, 0 at
    first. ``free_bytes`` is the device's free memory at each o.

    ``settings`` is the value of PYTORCH_CUDA_ALLOC_CONF, ``allowed_bytes`` what a memory
    fraction allowed. ``whole`` is false where later events were left out; ``segments``, the
    state at the end, is empty then.
    """

    settings: str
    allowed_bytes: int | None
    kinds: str
    base_address: int
    unit_bytes: int
    addresses: tuple[int, ...]
    sizes: tuple[int, ...]
    streams: tuple[tuple[int, int], ...]
    free_bytes: tuple[int, ...]
    whole: bool
    marks: tuple[Mark, ...]
    segments: tuple[MemorySegment, ...]

    def check(self) -> None:
        """Raise ``DecodingError`` unless the columns belong together."""
        if unknown := set(self.kinds) - LETTERS:
            raise DecodingError(f"trace.kinds has the unknown letter {min(unknown)!r}")
        fulls = self.kinds.count("o")
        sized = sum(self.kinds.count(letter) for letter in SIZED)
        for name, length in (
            ("addresses", len(self.kinds) - fulls),
            ("sizes", sized),
            ("free_bytes", fulls),
        ):
            column = getattr(self, name)
            if len(column) != length or any(value < 0 for value in column):
                raise DecodingError(f"trace.{name} does not belong to trace.kinds")
        if self.unit_bytes < 1:
            raise DecodingError(f"trace.unit_bytes is {self.unit_bytes}, not above 0")


@dataclasses.dataclass(frozen=True)
class Reports:
    """What the allocator reported to the profiler in the last step.

    ``block_bytes`` is the block's size of every allocation and, negative, of every free;
    ``events`` how many of both there were before and at the end of the step.
    """

    allocated_before_bytes: int
    block_bytes: tuple[int, ...]
    sums_agree: bool
    events: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Truth:
    """One measured training job. ``simulated``: a rehearsal, which is no truth."""

    status: Literal["ran", "out_of_memory"]
    message: str
    simulated: bool
    case: TruthCase
    machine: MeasuringMachine
    memory: MemoryTotals
    stats: Mapping[str, int]
    device_memory: tuple[MemoryStage, ...]
    step_seconds: tuple[float, ...]
    trace: AllocatorTrace
    reports: Reports | None
    profile_error: str | None
    recorded_at: str


@dataclasses.dataclass(frozen=True)
class Limit:
    """Which batches ran under a limit; ``predicted`` is what was foretold at the time.

    ``smallest_full`` is the smallest batch that ran out of memory, ``None`` where none did.
    Between it and ``largest_ran`` there may be batches that were not tried.
    """

    predicted: int
    largest_ran: int
    smallest_full: int | None
    tries: tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True)
class LimitTruth:
    """The largest batch of a job under a limit of ``case.cap_bytes``."""

    simulated: bool
    case: TruthCase
    machine: MeasuringMachine
    capped: Limit


@dataclasses.dataclass(frozen=True)
class TimedBatch:
    """Steps at one batch size in seconds, each to the GPU's end of it; none if it did not fit.

    ``host_s`` is when the CPU came to each part's end, from the step's begin, ``kernels`` name,
    launches and seconds of a step's kernels; empty where it was not recorded.
    """

    batch: int
    status: Literal["ran", "out_of_memory"]
    seconds: tuple[float, ...]
    host_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    kernels: tuple[tuple[str, int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class TimedSteps:
    """Step times of a job at several batch sizes (``case.batch`` is the first).

    ``operator_s`` is the time of an operator on the machine's core (``speed.dispatch_probe``),
    ``None`` where that was not measured.
    """

    simulated: bool
    case: TruthCase
    machine: MeasuringMachine
    operator_s: float | None
    timed: tuple[TimedBatch, ...]


AnyTruth = Truth | LimitTruth | TimedSteps


def read_json(path: Path) -> Any:
    """A JSON file, gzip or not; raises :class:`ResultFileError`."""
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except FileNotFoundError:
        raise ResultFileError(path, "there is no such file", "check the path") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ResultFileError(path, f"it is damaged ({error})", "re-measure it") from None


def read_truth(path: Path) -> AnyTruth | None:
    """A truth file; ``None`` where it holds nothing to compare (a failure).

    Raises :class:`ResultFileError` for a damaged, foreign or newer file.
    """
    document = read_json(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ResultFileError(path, "not a truth file", "give a file of bench/gpu")
    version = document.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        reason = f"its format version {version!r} is not one that this trainfit reads ({VERSION})"
        raise ResultFileError(path, reason, "upgrade trainfit")
    try:
        return _decoded(document)
    except DecodingError as error:
        raise ResultFileError(path, f"it is damaged ({error})", "re-measure it") from None


def _decoded(document: dict[str, Any]) -> AnyTruth | None:
    if document.get("status") in ("searched", "bracketed"):
        return _part(LimitTruth, document)
    if "timed" in document:
        return _part(TimedSteps, document)
    if "trace" not in document:
        return None
    names = [field.name for field in dataclasses.fields(Truth)]
    truth = decode(Truth, {name: document[name] for name in names if name in document})
    truth.trace.check()
    return truth


_Part = TypeVar("_Part", LimitTruth, TimedSteps)


def _part(cls: type[_Part], document: dict[str, Any]) -> _Part:
    """What ``cls`` has of the document; the rest is for people."""
    names = [field.name for field in dataclasses.fields(cls)]
    return decode(cls, {name: document.get(name) for name in names})
