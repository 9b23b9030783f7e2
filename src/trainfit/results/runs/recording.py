"""The recording of a simulated run: the one lossless file everything else is read from.

A recording holds columns, not objects: operators in the order they ran, allocations with
their origin, and the stream of mallocs and frees. It is saved as a zip of ``.npy`` columns
and one JSON header, so reading it executes nothing.
"""

from __future__ import annotations

import dataclasses
import io
import json
import typing
import zipfile
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypedDict, TypeVar, cast

import numpy as np
import numpy.typing as npt

from trainfit.results.files.decoding import decode
from trainfit.results.files.display import Displayed
from trainfit.results.files.documents import Format
from trainfit.results.files.errors import ResultFileError
from trainfit.results.files.writing import write_file
from trainfit.results.gpus import Constant
from trainfit.results.runs.steps import DTYPES, StepMakeup
from trainfit.results.runs.steps import KINDS as KERNEL_KINDS

# ---
# The header of a recording: what it says of the run, with the types of its values.


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of the model: its allocation's number, shape, dtype ("float32"), and whether
    an optimizer updates it."""

    alloc: int
    shape: tuple[int, ...]
    dtype: str
    trained: bool


class KnownHeader(TypedDict):
    """What every recording says of its run."""

    gpu: str
    gpu_memory_bytes: int
    context_bytes: int
    context_range_bytes: list[int]
    torch: str
    assumptions: dict[str, int]
    limited: bool


class RecordingHeader(KnownHeader, total=False):
    """What a recording says of its run; entries without a value, or that are not there, are not
    known.

    ``script`` is its name, ``template`` its command for bash with placeholders, ``command`` the
    launch command that was run. ``optimizer`` is a class, ``alloc_conf`` what
    ``PYTORCH_ALLOC_CONF`` has, ``out_of_memory`` the message with which the simulated GPU was full.
    ``parameters`` are ``[allocation, shape, dtype, is trained]`` each, ``context_parts`` those of
    the context, ``notes`` what a result has to say of the profile and of these. ``protection`` is
    what kept the script from changing files
    (:class:`~trainfit.results.runs.script.Protection`), ``coverage`` what was among the steps
    (:class:`~trainfit.results.runs.steps.Coverage`), ``findings`` what is wrong with it, ``step``
    what one consists of (:class:`~trainfit.results.runs.steps.StepMakeup`; without a value where
    none was counted).
    ``generation`` is of the text that its calls make
    (:class:`~trainfit.results.runs.generation.GeneratedText`), ``continued_calls`` how many of them
    were added to those simulated.
    ``full_window`` is a call of that text whose sliding windows are full
    (:class:`FullWindowCall`; without a value: they never are, or it was not made).
    ``ranks`` are the processes of its largest process group (without a value: there was none).
    ``evaluations`` are the operators of evaluations among the steps, ``[first, after the last]``
    each (without a value: it was not told). ``repeated`` are calls of a model that stand for
    further ones, as :class:`RepeatedCall` has them. ``buffers`` are the containers with a bound
    that keep tensors: the bytes of each, its elements, and how many more it has room for. ``read``
    are the allocations that hold what was read from a file straight to the GPU.
    ``deterministic``: deterministic algorithms were on at its end.
    """

    batch_size: int | None
    script: str | None
    template: str | None
    optimizer: str | None
    alloc_conf: str | None
    parameters: list[Any] | None
    out_of_memory: str | None
    context_parts: list[Any] | None
    other_processes_bytes: int | None
    profile: str | None
    notes: list[str] | None
    protection: dict[str, Any] | None
    coverage: dict[str, Any] | None
    findings: list[dict[str, Any]]
    command: str | None
    step: dict[str, Any] | None
    generation: dict[str, Any] | None
    continued_calls: int
    full_window: dict[str, Any] | None
    module_calls: int
    ranks: int | None
    sharing: int | None
    evaluations: list[Any] | None
    repeated: list[list[int]] | None
    buffers: list[list[int]] | None
    read: list[Any] | None
    deterministic: bool | None


class RepeatedCall(NamedTuple):
    """A call for one more token of a text that is made within a step: ``more`` calls follow, which
    are not in the recording.

    Its operators begin with number ``first`` and end before ``after``; those of the call before it,
    from which on it has grown, begin with ``before``.
    """

    before: int
    first: int
    after: int
    more: int


class FullWindowCall(TypedDict):
    """Kernels of a call for one more token whose sliding windows are full.

    ``op_phase`` has a value for each operator of the model's call; ``op`` (from 0), ``stream`` and
    each column of ``table`` (as a recording's ``kernel_…``) one for each of its kernels. ``before``
    are the operators of a simulated call that come before its model's.
    """

    before: int
    op_phase: list[int]
    op: list[int]
    stream: list[int]
    table: dict[str, list[int]]


def check_header(header: RecordingHeader) -> None:
    """Raise ``ValueError`` unless it has what it must, of the types that it must be of."""
    for key, hint in typing.get_type_hints(RecordingHeader).items():
        value, kinds = header.get(key), typing.get_args(hint) if _is_optional(hint) else (hint,)
        allowed = [typing.get_origin(kind) or kind for kind in kinds]
        if key not in KnownHeader.__annotations__:
            allowed.append(type(None))
        if type(value) not in allowed:
            raise ValueError(f"{key} is {value!r}")
    if [type(each) for each in header["context_range_bytes"]] != [int, int]:
        raise ValueError("context_range_bytes is not a pair of numbers")
    decode_context_parts(header)


def decode_parameters(header: RecordingHeader) -> tuple[Parameter, ...] | None:
    """The model's parameters; ``None``: not recorded. Raises ``ValueError``."""
    entries = header.get("parameters")
    return None if entries is None else tuple(_parameter(entry) for entry in entries)


def decode_context_parts(header: RecordingHeader) -> tuple[Constant, ...]:
    """The context's parts as the header holds them; none: not recorded.

    Raises ``ValueError``.
    """
    return tuple(decode(Constant, part) for part in header.get("context_parts") or ())


def _is_optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _parameter(entry: Any) -> Parameter:
    """One entry of the header; raises ``ValueError`` for anything else."""
    match entry:
        case [int(alloc), [*shape], str(dtype), bool(trained)] if all(
            type(size) is int and size >= 0 for size in shape
        ):
            return Parameter(alloc, tuple(shape), dtype, trained)
    raise ValueError(f"a parameter is {entry!r}")


_FILE: Final = Format("trainfit-recording", 1, "re-record it", "give a recording file")

#: Phases of a step, in the order of their codes.
PHASES: Final = ("setup", "input", "forward", "backward", "optimizer")

#: What an allocation is for, in the order of its codes.
KINDS: Final = (
    "parameter",
    "buffer",
    "gradient",
    "optimizer_state",
    "activation",
    "input",
    "temporary",
    "workspace",
    "kv_cache",
    "data",
    "bucket",
)

#: Codes of the event stream: ``event = value * 4 + code``.
MALLOC, FREE, STEP_END, OTHER = 0, 1, 2, 3
#: Values of OTHER: :data:`EMPTY_CACHE`, or ``allocation * 2`` plus USED (another stream uses
#: the allocation, so its block waits for that stream after its free) or DONE (the wait is over).
EMPTY_CACHE, USED, DONE = 0, 1, 2

IntArray = npt.NDArray[np.int64]

#: Streams of a GPU, and private pools of graphs, are numbered in multiples of these.
_STREAMS_OF_GPU: Final = 1 << 40
_GPUS: Final = 1 << 8
_Streams = TypeVar("_Streams", int, IntArray)


def gpu_of(stream: _Streams) -> _Streams:
    """The number of the GPU (from 0) that streams, as ``alloc_stream`` and ``kernel_stream`` have
    them, are of."""
    return stream // _STREAMS_OF_GPU % _GPUS


def stream_on(gpu: int, stream: int) -> int:
    """The number of a GPU's stream in those columns."""
    return gpu * _STREAMS_OF_GPU + stream


def _swapped(streams: IntArray, gpu: int) -> IntArray:
    """Streams with those of the first GPU and of this one exchanged."""
    of = gpu_of(streams)
    found: IntArray = streams + ((of == 0).astype(int) - (of == gpu)) * gpu * _STREAMS_OF_GPU
    return found


class NotAffineError(Exception):
    """Two recordings do not follow one law; the message says where they part."""


@dataclasses.dataclass(frozen=True)
class Recording(Displayed):
    """Columns of a simulated run.

    ``strings`` is the table that ``op_name``, ``op_module``, ``alloc_module`` (-1: no module),
    ``alloc_line`` ("file:line" of the user's code, -1: not known) and ``workspace_model`` index.
    ``alloc_bytes`` are bytes as asked of the allocator, before its rounding. A workspace's
    size is ``model(*arguments)`` of :mod:`trainfit.simgpu.allocator.workspaces`; the arguments of
    the i-th are ``workspace_args[workspace_start[i]:workspace_start[i + 1]]``.

    ``alloc_stream`` is a CUDA stream, or a private pool's number for one
    (:mod:`trainfit.simgpu.allocator.blocks`); of a process with several GPUs it says which one's
    (:func:`gpu_of`).

    A row of the ``kernel_`` columns is a kernel, or a copy
    or wait, of operator ``kernel_op`` (-1: before the first) on ``kernel_stream``; kinds and
    dtypes are indices of :mod:`trainfit.results.runs.steps`, which says what the columns hold.

    ``simulated`` is what a run recorded, where calls were added to that
    (:mod:`trainfit.results.runs.continuation`); a file of it holds no more than that.
    """

    header: RecordingHeader
    strings: tuple[str, ...]
    op_name: IntArray
    op_phase: IntArray
    op_module: IntArray
    op_step: IntArray
    alloc_bytes: IntArray
    alloc_op: IntArray
    alloc_kind: IntArray
    alloc_module: IntArray
    alloc_stream: IntArray
    alloc_line: IntArray
    events: IntArray
    workspace_alloc: IntArray
    workspace_model: IntArray
    workspace_start: IntArray
    workspace_args: IntArray
    kernel_op: IntArray
    kernel_stream: IntArray
    kernel_kind: IntArray
    kernel_dtype: IntArray
    kernel_flops: IntArray
    kernel_read: IntArray
    kernel_written: IntArray
    kernel_rows: IntArray
    kernel_columns: IntArray
    kernel_depth: IntArray
    kernel_batches: IntArray
    kernel_launches: IntArray
    simulated: Recording | None = None

    @property
    def steps(self) -> int:
        """Number of completed optimizer steps."""
        return len(step_ends(self.events))

    @property
    def ranks(self) -> int:
        """Processes of the job, of which this is one."""
        return self.header.get("ranks") or 1

    @property
    def sharing(self) -> int:
        """How many of them work on the same samples together (tensor, context parallelism)."""
        return self.header.get("sharing") or 1

    @property
    def makeup(self) -> StepMakeup | None:
        """What its optimizer steps consist of; ``None`` where that was not recorded."""
        found = self.header.get("step")
        return None if found is None else decode(StepMakeup, found)

    def in_evaluation(self) -> npt.NDArray[np.bool_]:
        """Which operators are of an evaluation among the steps, with the copies of inputs before
        it, and without those of the training's before its next call."""
        zeros = np.zeros(len(self.op_name), dtype=bool)
        is_input = self.op_phase == PHASES.index("input")
        for first, last in self.header.get("evaluations") or ():
            last = min(last, len(zeros))
            while 0 < first < len(zeros) and is_input[first - 1]:
                first -= 1
            while last > first and is_input[last - 1]:
                last -= 1
            zeros[first:last] = True
        return zeros

    def repeated(self) -> list[RepeatedCall]:
        """Calls that stand for further ones, of those that are in it whole."""
        calls = [RepeatedCall(*each) for each in self.header.get("repeated") or ()]
        return [call for call in calls if call.after <= len(self.op_name)]

    def evaluated_steps(self) -> frozenset[int]:
        """Steps (from 0) with an evaluation among their operators."""
        return frozenset(self.op_step[self.in_evaluation()].tolist())

    def check(self) -> None:
        """Raise ``ValueError`` unless everything that reads a recording can rely on it."""
        check_header(self.header)
        for each in self.header.get("evaluations") or ():
            if [type(end) for end in each] != [int, int] or not 0 <= each[0] <= each[1]:
                raise ValueError(f"an evaluation is {each!r}")
        for call in self.header.get("repeated") or ():
            ordered = [0, *call[:3]] == sorted([0, *call[:3]])
            if [type(each) for each in call] != [int] * 4 or not ordered or call[3] < 0:
                raise ValueError(f"a repeated call is {call!r}")
        _ = self.makeup
        ops, allocs = len(self.op_name), len(self.alloc_bytes)
        self._check_parameters(allocs)
        for number in self.header.get("read") or ():
            if type(number) is not int or not 0 <= number < allocs:
                raise ValueError(f"read names allocation {number!r}")
        workspaces, strings = len(self.workspace_alloc), len(self.strings)
        kernels = len(self.kernel_op)
        for name, length, low, high in (
            ("op_name", ops, 0, strings),
            ("op_phase", ops, 0, len(PHASES)),
            ("op_module", ops, -1, strings),
            ("op_step", ops, 0, self.steps + 1),
            ("alloc_bytes", allocs, 0, 1 << 60),
            ("alloc_op", allocs, -1, ops),
            ("alloc_kind", allocs, 0, len(KINDS)),
            ("alloc_module", allocs, -1, strings),
            ("alloc_stream", allocs, 0, 1 << 62),
            ("alloc_line", allocs, -1, strings),
            ("workspace_alloc", workspaces, 0, allocs),
            ("workspace_model", workspaces, 0, strings),
            ("workspace_start", workspaces + 1, 0, len(self.workspace_args) + 1),
            ("kernel_op", kernels, -1, ops),
            ("kernel_kind", kernels, 0, len(KERNEL_KINDS)),
            ("kernel_dtype", kernels, 0, len(DTYPES)),
            *((name, kernels, 0, 1 << 62) for name in _KERNEL_SIZES),
        ):
            column = getattr(self, name)
            if len(column) != length or (length and (column.min() < low or column.max() >= high)):
                raise ValueError(f"column {name} does not belong to the others")
        _check_events(self.events, allocs)

    def parameters(self) -> tuple[Parameter, ...] | None:
        """The model's parameters; ``None``: not recorded."""
        return decode_parameters(self.header)

    def _check_parameters(self, allocs: int) -> None:
        for parameter in self.parameters() or ():
            if not 0 <= parameter.alloc < allocs:
                raise ValueError(f"parameters name allocation {parameter.alloc}")

    def seen_from(self, gpu: int) -> Recording:
        """The recording with this GPU as the first, and the first in its place."""
        if not gpu:
            return self
        waits = self.kernel_kind == KERNEL_KINDS.index("event_wait")
        others = np.where(waits, _swapped(self.kernel_columns, gpu), self.kernel_columns)
        return dataclasses.replace(
            self,
            alloc_stream=_swapped(self.alloc_stream, gpu),
            kernel_stream=_swapped(self.kernel_stream, gpu),
            kernel_columns=others,
        )

    def first_steps(self, count: int) -> Recording:
        """The recording up to the end of optimizer step ``count``; itself if it ends there."""
        ends = step_ends(self.events)
        if not 1 <= count <= len(ends):
            raise ValueError(f"{count} of {len(ends)} recorded steps")
        events = self.events[: ends[count - 1] + 1]
        if len(events) == len(self.events):
            return self
        allocs = int(np.count_nonzero(events % 4 == MALLOC))
        ops = int(np.count_nonzero(self.op_step < count))
        workspaces = int(np.count_nonzero(self.workspace_alloc < allocs))
        starts = self.workspace_start[: workspaces + 1]
        kernels = int(np.count_nonzero(self.kernel_op < ops))
        ends_of = {"op": ops, "alloc": allocs, "kernel": kernels}
        cut = {
            name: getattr(self, name)[: ends_of[name.partition("_")[0]]]
            for name in _COLUMNS
            if name.partition("_")[0] in ends_of
        }
        return dataclasses.replace(
            self,
            events=events,
            workspace_alloc=self.workspace_alloc[:workspaces],
            workspace_model=self.workspace_model[:workspaces],
            workspace_start=starts,
            workspace_args=self.workspace_args[: starts[-1]],
            simulated=None,
            **cut,
        )

    def save(self, path: Path) -> None:
        """Write the recording; a file appears whole or not at all (see :func:`write_file`)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, self._bytes(level=1))

    def to_bytes(self) -> bytes:
        """What a file of it contains, as small as it gets; the same for the same recording."""
        return self._bytes(level=9)

    def _bytes(self, level: int) -> bytes:
        stream = io.BytesIO()
        header = {
            **_FILE.head(),
            "strings": list(self.strings),
            "header": dict(self.header),
        }
        columns = {f"{name}.npy": getattr(self.simulated or self, name) for name in _COLUMNS}
        with zipfile.ZipFile(stream, "w") as archive:
            for name in ("header.json", *columns):
                content = _npy(columns[name]) if name in columns else json.dumps(header)
                entry = zipfile.ZipInfo(name)  # of 1980: the time of writing is not part of it
                entry.external_attr = 0o600 << 16
                archive.writestr(entry, content, zipfile.ZIP_DEFLATED, level)
        return stream.getvalue()

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a recording; raises :class:`ResultFileError` for anything but a whole one."""
        if path.exists() and not (path.is_file() or path.is_dir()):  # one without an end is read on
            raise ResultFileError(path, "it is no regular file", "name the recording's")
        return cls._read(path, path)

    @classmethod
    def from_bytes(cls, content: bytes, path: Path) -> Recording:
        """The reverse of :meth:`to_bytes`; raises :class:`ResultFileError` for ``path``."""
        return cls._read(io.BytesIO(content), path)

    @classmethod
    def _read(cls, source: Path | IO[bytes], path: Path) -> Recording:
        try:
            with zipfile.ZipFile(source) as archive:
                document = json.loads(archive.read("header.json"))
                _check_format(path, document)
                columns: dict[str, Any] = {
                    name: _read_npy(archive.read(f"{name}.npy")) for name in _COLUMNS
                }
            header = cast(RecordingHeader, dict(document["header"]))
            strings = tuple(map(str, document["strings"]))
            recording = cls(header=header, strings=strings, **columns)
            recording.check()
        except ResultFileError:
            raise
        except FileNotFoundError:
            raise ResultFileError(path, "there is no such file", "check the path") from None
        except OSError as error:
            raise ResultFileError(path, error.strerror or str(error), "check the path") from error
        except Exception as error:  # what zip, zlib, JSON and NumPy raise for damaged bytes
            reason = f"damaged, or not a recording ({error})"
            raise ResultFileError(path, reason, _FILE.remake) from error
        return recording


_COLUMNS: Final = tuple(
    field.name
    for field in dataclasses.fields(Recording)
    if field.name not in ("header", "strings", "simulated")
)
_KERNEL_COLUMNS: Final = tuple(name for name in _COLUMNS if name.startswith("kernel_"))
_KERNEL_SIZES: Final = tuple(
    name for name in _KERNEL_COLUMNS if name not in ("kernel_op", "kernel_kind", "kernel_dtype")
)


def _npy(column: IntArray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, _narrow(column), allow_pickle=False)
    return buffer.getvalue()


def _narrow(column: IntArray) -> npt.NDArray[Any]:
    """The smallest signed integer type that holds the column."""
    if column.size == 0:
        return column.astype(np.int8)
    low, high = int(column.min()), int(column.max())
    for kind in (np.int8, np.int16, np.int32):
        info = np.iinfo(kind)
        if info.min <= low and high <= info.max:
            return column.astype(kind)
    return column


def _read_npy(data: bytes) -> IntArray:
    column: npt.NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    if column.ndim != 1 or column.dtype.kind != "i":
        raise ValueError("a column is not a list of integers")
    return column.astype(np.int64)


def _check_format(path: Path, document: Any) -> None:
    if not isinstance(document, dict) or document.get("format") != _FILE.name:
        raise ResultFileError(path, "it is not a trainfit recording", _FILE.wanted)
    _FILE.check(document, path)


def step_ends(events: IntArray) -> IntArray:
    """Places in ``events`` at which an optimizer step ends."""
    return np.flatnonzero(events & 3 == STEP_END)


def step_around(events: IntArray, event: int) -> tuple[int, int]:
    """The first event of the step that ``event`` is in, and its end; ``len(events)`` where it does
    not end."""
    ends = step_ends(events)
    index = int(np.searchsorted(ends, event))
    return int(ends[index - 1]) + 1 if index else 0, int(ends[index]) if index < len(ends) else len(
        events
    )


def _check_events(events: IntArray, allocs: int) -> None:
    """Each allocation is made once, in order, and freed at most once and later."""
    values, codes = events >> 2, events & 3
    made, freed = values[codes == MALLOC], values[codes == FREE]
    other = values[codes == OTHER]
    if len(other) and (other.min() < 0 or other.max() > 2 * allocs):
        raise ValueError("another stream uses an allocation that does not exist")
    if not np.array_equal(made, np.arange(allocs)):
        raise ValueError("column events does not belong to the others")
    if len(freed):
        if freed.min() < 0 or freed.max() >= allocs or len(np.unique(freed)) != len(freed):
            raise ValueError("a free of an allocation that does not exist")
        born = np.flatnonzero(codes == MALLOC)[freed]
        if (np.flatnonzero(codes == FREE) < born).any():
            raise ValueError("an allocation is freed before it is allocated")
