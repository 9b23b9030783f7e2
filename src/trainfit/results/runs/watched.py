"""A watched run as it was recorded: a folder with a header, events and tables for each rank.

run-folder/
  rank0.json             RunHeader; written at the start, again at the end
  rank0.events.jsonl     an Event a line, appended
  noise-rank0.json       NoiseResult, of `trainfit watch --noise-scale`; written at the end
  rank0.steps.bin        tables of :mod:`trainfit.results.runs.tables`, appended
  rank0.fetches.<pid>.bin  one a worker process
  rank0.code.<pid>       lines at which a worker was found; rank0.stack.<pid>: where it hangs;
                         rank0.died.<pid>: where it crashed; rank0.locked.<pid>: where code in C
                         lets no thread of Python run
  machine.bin, gpus.bin, processes.bin, memory.bin, folders.bin, core_waits.bin
                         by the sampler, one a machine
  sampler.events.jsonl   Events of the sampler: what it could not sample, its end
"""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, Literal

import numpy as np

from trainfit.results.files.decoding import DecodingError, decode
from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.files.errors import ResultFileError
from trainfit.results.runs import tables
from trainfit.results.runs.communication import NO_COMMUNICATION, RankCommunication
from trainfit.results.runs.learning import NOTHING_SEEN, LearningFacts
from trainfit.results.runs.locked_stacks import locked_path, stacks_of_locked
from trainfit.results.runs.tables import Table
from trainfit.results.text import signal_name

#: In the run's folder; an Event a line, appended.
SAMPLER_EVENTS: Final = "sampler.events.jsonl"
#: What a note of the header says where the kernel's counters tell why a run was killed.
OOM_KILLED: Final = "the kernel's OOM killer"
#: Kind of the events that tell how long Python's garbage collector stopped a process: ``seconds``
#: of ``values["pauses"]`` pauses since the last such event, ``values["longest_s"]`` the longest.
COLLECTIONS: Final = "collections"
_REMAKE: Final = "re-run it with `trainfit watch`"
_WANTED: Final = "give a folder that `trainfit watch` wrote"
_ONE: Final = "give one folder for each machine of one run"

Ending = Literal["running", "finished", "failed", "interrupted"]


@dataclasses.dataclass(frozen=True)
class WatchedLoader:
    """A DataLoader of the script; ``role`` is what its batches were used for."""

    role: Literal["training", "evaluation", "unknown"]
    place: str
    """Where the script made it ("train.py:41")."""
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    batch_size: int | None
    batches: int | None
    """Of an epoch; ``None``: it does not say."""
    start_method: str = ""
    made: int = 1
    """Times that the script has made it again, with the same settings."""
    passes: int = 0
    """Times that it was gone over to its end."""


@dataclasses.dataclass(frozen=True)
class WatchedGpu:
    """A GPU that the run could use; ``None`` is what neither NVML nor PyTorch says."""

    name: str
    uuid: str = ""
    memory_bytes: int | None = None
    capability: tuple[int, int] | None = None
    tensor_flops_per_s: float | None = None
    """Peak of dense matmuls in 16 bits, from the catalogue."""


#: What a thread waits for, by the function that it was found in.
WaitsFor = Literal["", "sleep", "lock", "network", "process", "disk"]


@dataclasses.dataclass(frozen=True)
class CodeLine:
    """A line of the script that a thread was found at ``count`` times, by looks at its stack.

    ``place`` is "train.py:41", ``calls`` what it called there as the source writes it
    ("np.savez"), ``inner`` the innermost function ("os.fsync"), ``callers`` the lines of the script
    that led there, up to the training loop. ``over`` is what the loop around the line goes over,
    as the source writes it ("model.parameters()"), ``function`` whose line it is ("Flip.__call__").
    """

    place: str
    count: int
    callers: tuple[str, ...] = ()
    calls: str = ""
    inner: str = ""
    waits_for: WaitsFor = ""
    over: str = ""
    function: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """What is called there, and the innermost function, where they are known."""
        return tuple(filter(None, (self.calls, self.inner)))


@dataclasses.dataclass(frozen=True)
class StackLooks:
    """Looks at a thread's stack, and the lines of the script that it was found at; ``looks`` are
    all of them, also those that found it elsewhere."""

    looks: int = 0
    lines: tuple[CodeLine, ...] = ()

    def share(self, count: int) -> float:
        """The share of the looks, 0 to 1."""
        return count / self.looks if self.looks else 0.0


#: Before the first step: the seconds that one look stands for, and what is not told by lines of
#: libraries, as ``inner`` of a line of the script says it.
START_LOOK_S: Final = 0.1
#: Seconds before the end of the first step from which they are worth a word: what is done once is
#: soon made up for by a training of hours.
LATE_S: Final = 10.0
StartPart = Literal["import", "first batch", "torch.compile"]


@dataclasses.dataclass(frozen=True)
class ThreadLooks:
    """Looks at the Python threads next to the one that trains, while they compute: their lines, and
    of the busiest the part of a core that it has (``cpu_share``); how many threads compute, and the
    cores that they have together."""

    code: StackLooks = StackLooks()
    cpu_share: float = 0.0
    threads: int = 0
    cores: float = 0.0


NO_THREADS: Final = ThreadLooks()

#: What the entries of a variable keep: tensors, or tensors with their autograd graphs.
Holds = Literal["", "tensors", "graphs"]


#: The kind of what pyplot keeps.
FIGURES: Final = "figures"
#: … and of a tensor whose graph goes back through the steps: its size is how many.
GRAPH: Final = "graph"


@dataclasses.dataclass(frozen=True)
class GrowingVariable:
    """A variable of the script that grew with the steps: from ``first_size`` to ``last_size``
    entries (of a tensor or an array: elements; of a "sum": additions in its graph) in ``steps``.

    ``name`` is as the script writes it ("self.history"), ``place`` the line that adds to it,
    ``kind`` "list", "dict", "tensor", "sum" and so on; ``item_bytes`` of the last entry: of its
    tensors and arrays, or of Python objects, where it has none. ``of_data``: it belongs to the data
    set that makes the training process's own batches.
    """

    name: str
    place: str
    kind: str
    first_size: int
    last_size: int
    steps: int
    holds: Holds = ""
    item_bytes: int | None = None
    of_data: bool = False

    @property
    def bytes_per_step(self) -> float:
        """What its new entries come to, each as large as the last one."""
        grown = self.last_size - self.first_size
        return grown * (self.item_bytes or 0) / max(1, self.steps)


@dataclasses.dataclass(frozen=True)
class ElementLoop:
    """A loop of the forward pass over the elements of a tensor, at ``place`` ("model.py:12").

    ``over`` is what it goes over as the source writes it ("range(x.shape[1])"), ``rounds`` how many
    elements there are; of ``of_looks`` looks in the forward pass, ``looks`` found it.
    """

    place: str
    over: str
    rounds: int
    looks: int
    of_looks: int


#: Paths of the generators that PyTorch seeds in each worker.
GLOBAL_GENERATORS: Final = ("numpy.random", "random", "torch's generator")


@dataclasses.dataclass(frozen=True)
class WorkerCopies:
    """What a DataLoader's workers have in common that each should have for itself.

    ``handles`` are files and connections that the data set held open as workers began (path →
    type); ``by_workers`` and ``by_epochs`` paths of random generators that workers, or the workers
    of two epochs, began with in one state and drew from. ``same_batches``: two workers that iterate
    the data set gave the same. ``empty`` of ``workers`` came to their end without a sample.
    """

    handles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    by_workers: tuple[str, ...] = ()
    by_epochs: tuple[str, ...] = ()
    same_batches: bool = False
    empty: int = 0
    workers: int = 0


#: Of a run whose workers have told nothing.
NO_COPIES: Final = WorkerCopies()
#: Of a run that nobody looked at.
NO_LOOKS: Final = StackLooks()


@dataclasses.dataclass(frozen=True)
class RunHeader(ResultFile):
    """What one rank's process is and has; ``None`` is not known (yet).

    ``started_unix`` and ``started_monotonic`` are the same moment on two clocks.
    """

    FILE: ClassVar = Format("trainfit-watched-run", 1, _REMAKE, _WANTED)

    command: str
    rank: int
    world_size: int
    pid: int
    host: str
    started_unix: float
    started_monotonic: float
    trainfit: str
    python: str
    torch: str | None = None
    framework: str = ""
    """"Lightning", "Transformers", "Accelerate", or empty: a loop of the script's own."""
    gpu: int | None = None
    """Index in ``gpus`` of the GPU that this rank computes on; ``None``: none, or not known."""
    gpus: tuple[WatchedGpu, ...] = ()
    cpu: str = ""
    """The processor's name, as the system says it; empty: it says none."""
    usable_cores: float | None = None
    quota_cores: float | None = None
    ram_bytes: int | None = None
    loaders: tuple[WatchedLoader, ...] = ()
    parameters: int | None = None
    trained_parameters: int | None = None
    optimizer: str = ""
    precision: Literal["float64", "float32", "tf32", "float16", "bfloat16", "unknown"] = "unknown"
    default_dtype: str = ""
    """That PyTorch gives new tensors; empty: unknown."""
    autocast: str = ""
    """dtype of the autocast regions that were entered; empty: none."""
    flops_per_sample: float | None = None
    """Of a training step's forward and backward pass: matmuls and convolutions, by shapes."""
    distributed: Literal["", "ddp", "fsdp", "data_parallel", "other"] = ""
    threads: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Of the main process by library ("torch": 8)."""
    worker_threads: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Of a DataLoader worker by library."""
    worker_threads_at: str = ""
    """The line that set PyTorch's number of them in a worker; empty: none did."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of the environment, those that set threads, the allocator or GPUs."""
    ending: Ending = "running"
    exit_code: int | None = None
    lost_rows: int = 0
    """Rows that could not be written."""
    refused_rows: int | None = None
    """Of them, those that the disk refused (it was full); the others came faster than they could
    be written."""
    first_lost_step: int | None = None
    """The step of the first of them, where it is a row of a step."""
    recording_share: float | None = None
    """Of the training's time, what the recorder's own calls in it took."""
    light_steps: int = 0
    """Steps of which only the length and the wait for batches were recorded (short ones)."""
    learning: LearningFacts = NOTHING_SEEN
    """What was seen of parameters, gradients and learning rates."""
    other_code: StackLooks = NO_LOOKS
    """Of the main thread, in the training: lines that belong to no phase."""
    fetch_code: StackLooks = NO_LOOKS
    """Of threads while they make batches: lines of the data set."""
    sampler_code: StackLooks = NO_LOOKS
    """Of the main thread, in the training: lines of what chooses the samples of batches."""
    lock_code: StackLooks = NO_LOOKS
    """Of other threads, while the main thread waits for a lock: lines that hold one."""
    sync_code: StackLooks = NO_LOOKS
    """Of the main thread, while it waits for the GPU: the lines that wait."""
    copy_code: StackLooks = NO_LOOKS
    """Of the main thread, while it copies to the GPU."""
    start_code: StackLooks = NO_LOOKS
    """Of the main thread, from the import of PyTorch to the end of the first step: lines, and how
    many times :data:`START_LOOK_S` it was at each."""
    collective_code: StackLooks = NO_LOOKS
    """Of the main thread, in calls of ``torch.distributed``: the lines that make them."""
    hook_code: StackLooks = NO_LOOKS
    """Of the main thread, in forward and backward passes: lines of hooks that only look."""
    pass_code: StackLooks = NO_LOOKS
    """… and lines that sleep, log or wait for the network there."""
    copies: WorkerCopies = NO_COPIES
    """What workers have in common that each should have for itself."""
    other_threads: ThreadLooks = NO_THREADS
    """Of the script's own Python threads."""
    input_sizes: tuple[tuple[int, int], ...] = ()
    """Steps, and elements of the largest tensor that a model was given in each: some of all."""
    growing: tuple[GrowingVariable, ...] = ()
    """Variables of the script that grew with the steps; what keeps tensors first."""
    worker_growing: tuple[GrowingVariable, ...] = ()
    """The same in a worker, with its batches as steps: what its data set keeps."""
    collector_off: str = ""
    """The line of the script that has switched Python's garbage collector off; "?": it was before
    PyTorch was imported."""
    memories: tuple[str, ...] = ()
    """Lists that the training itself fills with samples (a replay memory)."""
    element_loops: tuple[ElementLoop, ...] = ()
    """In the forward pass, the loop over a tensor's elements that it was found in most."""
    slow_samples: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of samples that held their batch up, by index."""
    bad_samples: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Samples with a NaN or an infinity that workers have seen, and when (seconds of the run)."""
    loss_at: str = ""
    """The line that calls backward() of the loss, of the first one that is not finite."""
    communication: RankCommunication = NO_COMMUNICATION
    """Its time in collectives, where there are several ranks."""
    notes: tuple[str, ...] = ()


def exit_words(code: int) -> str:
    """How a process ended: "with exit code 3", "by SIGKILL", and of what a shell says of a child
    that a signal ended, "with exit code 137 (SIGKILL)"."""
    if code < 0:
        return f"by {signal_name(-code)}"
    named = code > 128 and code - 128 in set(signal.Signals)
    return f"with exit code {code}" + (f" ({signal_name(code - 128)})" if named else "")


def missing_rows(lost: int, refused: int | None, first_step: int | None) -> str:
    """What a user is told of rows that could not be written: how many, since when and why."""
    if refused is None:
        why = "the disk was full or slow"
    elif refused == lost:
        why = "the disk was full"
    elif refused == 0:
        why = "they came faster than they could be written"
    else:
        why = (
            f"the disk was full ({refused} rows), and rows came faster than they could be written "
            f"({lost - refused} rows)"
        )
    since = "" if first_step is None else f", from step {first_step} on"
    return f"{lost} rows of the recording are missing{since}: {why}"


def noise_path(stem: Path) -> Path:
    """The file of the noise scale of the rank whose files begin with ``stem``."""
    return stem.with_name(f"noise-{stem.name}.json")


def memory_path(stem: Path) -> Path:
    """The file of the memory snapshot of the rank whose files begin with ``stem``."""
    return stem.with_name(f"memory-{stem.name}.pickle")


def plain_uuid(uuid: str) -> str:
    """PyTorch writes a GPU's UUID without its prefix."""
    return uuid.removeprefix("GPU-").lower()


def gpu_places(headers: Iterable[RunHeader]) -> dict[str, int]:
    """Places of GPUs among those of all ranks, in order, by UUID. Ranks that each see one GPU alone
    (CUDA_VISIBLE_DEVICES) call it 0 all."""
    gpus = (gpu for header in headers for gpu in header.gpus)
    uuids = dict.fromkeys(plain_uuid(gpu.uuid) for gpu in gpus if gpu.uuid)
    return {uuid: place for place, uuid in enumerate(uuids)}


NO_VALUES: Final[Mapping[str, float]] = {}


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened once: "epoch", "evaluation", "checkpoint", "out_of_memory"
    (and "out_of_memory_at" which line),
    "exception", "thread_died" (one of the script's, by an error), "worker_died", "worker_stack" (in
    which one ended), "worker_hangs" (in which one stands at the end), "skipped_step", "compiled"
    (by torch.compile), "restart" (a second training in one script), "program" (PID and line of one
    that the script started), "threads" (the line that set PyTorch's number of them), "crash" (the
    stack in which the rank's own process crashed: read from a file of its own),
    :data:`COLLECTIONS`."""

    time_s: float
    kind: str
    step: int = -1
    seconds: float | None = None
    text: str = ""
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RankRecord:
    """What one rank recorded; tables as in :mod:`trainfit.results.runs.tables`."""

    header: RunHeader
    steps: Table
    fetches: Table
    events: tuple[Event, ...] = ()


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A whole watched run: its ranks in order, and the samples of the machine."""

    ranks: tuple[RankRecord, ...]
    machine: Table
    gpus: Table
    processes: Table
    folder: str = ""
    sampler_events: tuple[Event, ...] = ()
    """What the sampler says of itself: kinds "gpu", "nvml_lost", "nvml_back", "not_sampled",
    "new_files", "sampler_ended"."""
    memory: Table = dataclasses.field(default_factory=lambda: np.zeros(0, tables.MEMORY))
    folders: Table = dataclasses.field(default_factory=lambda: np.zeros(0, tables.FOLDERS))
    core_waits: Table = dataclasses.field(default_factory=lambda: np.zeros(0, tables.CORE_WAITS))
    elsewhere: tuple[RunRecord, ...] = ()
    """Ranks and samples of the same run on other machines, each on its own clock."""

    @property
    def header(self) -> RunHeader:
        """The header of the first rank."""
        return self.ranks[0].header

    @property
    def gpu_numbers(self) -> dict[str, int]:
        """Numbers that samples of GPUs have (column ``gpu``), by UUID: what the sampler tells, or
        else places among the ranks' GPUs."""
        numbers = gpu_places(rank.header for rank in self.ranks)
        for event in self.sampler_events:
            if event.kind == "gpu" and "gpu" in event.values:
                numbers[plain_uuid(event.text.partition(" ")[0])] = int(event.values["gpu"])
        return numbers

    @property
    def machines(self) -> tuple[RunRecord, ...]:
        """The records of each machine, this one first."""
        return (self, *self.elsewhere)


def load_run(folder: Path) -> RunRecord:
    """Read a run's folder, also one whose run goes on or was killed.

    Raises :class:`ResultFileError` where there is no header, or it is damaged.
    """
    paths = sorted(folder.glob("rank*.json"), key=lambda path: int(path.stem[4:] or 0))
    if not paths:
        there = "it contains no watched run" if folder.exists() else "there is no such folder"
        raise ResultFileError(folder, there, _WANTED)
    try:
        ranks = tuple(_load_rank(path) for path in paths)
        machine, gpus, processes, memory, filled, waits = (
            tables.read_table(folder / f"{name}.bin", tables.BY_NAME[name])
            for name in tables.SAMPLED
        )
        events = load_events(folder / SAMPLER_EVENTS)
    except OSError as error:
        raise ResultFileError(folder, error.strerror or str(error), "check the path") from error
    return RunRecord(
        *(ranks, machine, gpus, processes, str(folder), events),
        memory=memory,
        folders=filled,
        core_waits=waits,
    )


def load_machines(folders: Sequence[Path]) -> RunRecord:
    """One run of several machines, each of which recorded into a folder of its own.

    The one with the lowest rank comes first. Raises :class:`ResultFileError` as :func:`load_run`,
    and where the folders are not of one run: a rank that is in two of them, other world sizes.
    """
    first, *others = sorted(map(load_run, folders), key=lambda each: each.header.rank)
    found = {rank.header.rank: first for rank in first.ranks}
    for run in others:
        for header in (rank.header for rank in run.ranks):
            folder, known = Path(run.folder), found.setdefault(header.rank, run)
            if known is not run:
                raise ResultFileError(folder, f"rank {header.rank} is also in {known.folder}", _ONE)
            if header.world_size != first.header.world_size:
                sizes = f"{header.world_size} and not {first.header.world_size}"
                raise ResultFileError(folder, f"its run has {sizes} ranks", _ONE)
    return dataclasses.replace(first, elsewhere=tuple(others))


def _load_rank(path: Path) -> RankRecord:
    stem = path.with_suffix("")
    fetches = [
        tables.read_table(file, tables.FETCHES)
        for file in sorted(path.parent.glob(f"{stem.name}.fetches.*.bin"))
    ]
    made = np.concatenate([np.zeros(0, tables.FETCHES), *fetches])
    header = RunHeader.load(path)
    events = load_events(path.parent / f"{stem.name}.events.jsonl")
    steps = tables.read_table(path.parent / f"{stem.name}.steps.bin", tables.STEPS)
    return RankRecord(
        header,
        steps,
        made[np.argsort(made["end_s"], kind="stable")],
        events + _crash(stem, header) + locked_of(stem, header, steps),
    )


def died_path(stem: Path, pid: int) -> Path:
    """The path at which a process leaves the stack that it crashes in; ``stem`` is of its rank's
    files."""
    return stem.with_name(f"{stem.name}.died.{pid}")


def _crash(stem: Path, header: RunHeader) -> tuple[Event, ...]:
    """The crash of the rank's own process, as :mod:`faulthandler` wrote it; there is none in most
    runs."""
    path = died_path(stem, header.pid)
    try:
        text, mtime = path.read_text(encoding="utf-8", errors="replace"), path.stat().st_mtime
    except OSError:
        return ()
    return (Event(mtime - header.started_unix, "crash", text=text),) if text else ()


def locked_of(stem: Path, header: RunHeader, steps: Table) -> tuple[Event, ...]:
    """A standstill of the rank's own process in which no thread of Python could tell of it, as
    :mod:`faulthandler` wrote it; there is none in most runs."""
    path = locked_path(stem, header.pid)
    try:
        text, mtime = path.read_text(encoding="utf-8", errors="replace"), path.stat().st_mtime
    except OSError:
        return ()
    if not (stacks := stacks_of_locked(text)):
        return ()
    phrase = f"pid {header.pid}\n\n{stacks}"
    step = int(steps["step"].max(initial=-1)) + 1
    return (Event(mtime - header.started_unix, "standstill", step, text=phrase),)


def load_events(path: Path) -> tuple[Event, ...]:
    """Lines that are whole; a writer that was killed leaves half of one."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ()
    events = []
    for number, line in enumerate(lines):
        try:
            events.append(decode(Event, json.loads(line)))
        except (ValueError, DecodingError) as error:
            if number < len(lines) - 1:
                reason = f"line {number + 1} is damaged ({error})"
                raise ResultFileError(path, reason, _REMAKE) from error
    return tuple(events)
