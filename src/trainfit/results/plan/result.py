"""The result of ``trainfit plan``.

All memory figures are bytes. ``None`` means not determined; 0 is a figure.

Format history
    1   first version
    2   remedies, inference; steps are calls of the model where there is an inference
    3   data loading; variables of the launch command; whether it has the batch size;
        samples
    4   speed
    5   recordings; limits of the batch size; step times of configurations and remedies; the
        processor
    6   the step on this machine's CPU
    7   calls at a fixed rate
    8   calls of a model on the CPU; the CPU in the place of a GPU that a script asks for
    9   what kept the script from changing files; what an optimizer step consists of; what a
        recommendation follows from: the data set, AMP, batches of varying shape; notes as data;
        what was among the simulated steps; interrupted;
        memory that grows from call to call of a model
    10  whether the recommended batch size was simulated
    11  the parts of the launch command, each with its reason
    12  terms of the DataLoader's result as in its version 3; kernels of the kind "matmul" (was
        "product")
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from trainfit.results.files import documents
from trainfit.results.files.errors import ResultFileError
from trainfit.results.files.notes import Note
from trainfit.results.files.upgrades import Upgrade, rename_key
from trainfit.results.loader import LoaderResult, LoaderSettings
from trainfit.results.loader import upgrade_terms as upgrade_loader_terms
from trainfit.results.machine.constants import Constant
from trainfit.results.plan.amp import AmpCandidate, AmpHazard
from trainfit.results.plan.launch import AllocatorTrial, LaunchPart
from trainfit.results.plan.speed import Speed
from trainfit.results.plan.versus_cpu import VersusCpu
from trainfit.results.runs.coverage import Coverage
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.sandbox import Protection
from trainfit.results.runs.steps import StepMakeup, StepPattern

FORMAT: Final = "trainfit-plan"
VERSION: Final = 12

_REMAKE: Final = "re-create it with `trainfit plan`"
_WANTED: Final = "give a file of `trainfit plan --output` or `trainfit simulate --output`"


def _upgrade_terms(document: dict[str, Any]) -> None:
    upgrade_loader_terms(document, "loading.result.")
    rename_key(document, "speed.by_kind_s", "product", "matmul")


_UPGRADES: Final[Mapping[int, Upgrade]] = {11: _upgrade_terms}

#: How the batch sizes were obtained: computed from two simulated ones (exact for all),
#: simulated one by one, or not at all.
Basis = Literal["two traces", "one trace a batch size", "one trace"]

#: How the figures of a remedy were obtained: the changed script was simulated; the recording
#: was replayed with another allocator; the recording was replayed without the tensors that
#: would go (not simulated). Or why there are none: the trial failed, or it does not apply.
RemedyStatus = Literal["simulated", "replayed", "estimated", "failed", "not applicable"]

#: What becomes of the training: the same up to rounding; the same in lower precision; another
#: one, whose result has to be compared.
Changes = Literal["nothing", "precision", "training"]

#: Share of the device memory below which a remedy has won nothing worth a change.
LEAST_GAIN: Final = 0.002

#: Share of a step's time below which it has not become faster: the model is no finer.
LEAST_FASTER: Final = 0.02


#: An epoch of fewer steps is told of with the batch size that makes it so short.
FEW_STEPS: Final = 8

#: Share of measured jobs whose device memory lay within the predicted range, and above it
#: (bench/memory_accuracy.py, models that the margins were not derived from; most of those
#: above were sampled while cudnn.benchmark tried an algorithm).
RANGE_COVERAGE: Final = 0.90
RANGE_EXCEEDED: Final = 0.07


@dataclasses.dataclass(frozen=True)
class MemoryFigures:
    """The three quantities of GPU memory, in bytes.

    ``allocated`` is torch.cuda.max_memory_allocated, ``reserved`` max_memory_reserved, and
    ``device`` what nvidia-smi shows for the process: reserved + ``context``, which is
    taken to lie in ``context_range``. ``context_parts`` are what it consists of: the bare
    context and what the libraries add that the job uses.

    A ``range`` is the 90% prediction interval (:mod:`trainfit.memory.stream.interval`); ``None``
    in files of earlier versions.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    context_bytes: int
    context_range_bytes: tuple[int, int]
    context_parts: tuple[Constant, ...] = ()
    allocated_range_bytes: tuple[int, int] | None = None
    reserved_range_bytes: tuple[int, int] | None = None
    device_range_bytes: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class HostCpu:
    """The CPU of the machine with the GPU, as given by the user: cores, and their clock in Hz.

    ``core_speed`` is how fast a core of this machine dispatches operators, as a multiple of the
    reference (:mod:`trainfit.speed.model.host`), where that was measured. ``kind`` is the core's
    design
    (:mod:`trainfit.hardware.cpu.cpu_kinds`; empty: not said), ``second_threads`` are hardware
    threads
    in addition to the first of each core, ``hz_range`` what the clock may be, ``name`` the rented
    machine's (:mod:`trainfit.hardware.gpu.rented`) that it is taken from, in words.
    """

    cores: float | None
    core_hz: float | None
    core_speed: float | None = None
    kind: str = ""
    second_threads: float = 0.0
    hz_range: tuple[float, float] | None = None
    ram_bytes: int | None = None
    name: str = ""


@dataclasses.dataclass(frozen=True)
class BatchLimits:
    """What a recommended batch size follows from; ``None`` is not known.

    ``memory``: the largest that leaves the headroom. ``knee``: the smallest with nearly the most
    samples a second of those (:data:`trainfit.results.plan.speed.KNEE`, rounded up to a multiple of
    8). ``noise_scale``: of the gradients, in samples, as the user said; the larger a batch is
    compared to it, the more samples the same loss needs. ``trains``: the smallest with nearly the
    fastest progress then.

    ``data_set``: the samples of an epoch, which no batch exceeds. ``at_least``: memory's figures
    are the largest that were simulated (the data set may have no more samples); it may allow
    more. ``reason`` says why the recommended batch size is not the throughput's (empty: it is).
    ``epoch_steps`` are an epoch's steps with it, where they are few (:data:`FEW_STEPS`).
    """

    memory: int | None
    knee: int | None
    noise_scale: float | None = None
    trains: int | None = None
    data_set: int | None = None
    at_least: bool = False
    reason: str = ""
    epoch_steps: int | None = None


@dataclasses.dataclass(frozen=True)
class BatchCheck:
    """Whether the recommended batch size, ``batch_size``, was itself simulated.

    ``reason`` says why not (empty: it was). ``peak_share`` and ``step_share`` are by how much its
    peak of reserved memory and its step lay above what followed from other batch sizes (0.01: 1%;
    ``None``: nothing followed, or it was not compared); the figures are those of the simulated run.
    """

    batch_size: int
    reason: str = ""
    peak_share: float | None = None
    step_share: float | None = None


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One setting of the job and what it needs.

    ``batch_size`` is ``None`` where the script's batch size could not be told. ``amp`` is
    autocast's dtype ("bfloat16", "float16") or "off". ``by_kind_bytes`` and ``by_module_bytes``
    split the peak of allocated memory; ``largest_batch`` is 0 where one sample does not fit and
    ``None`` where it could not be determined. ``recommended_batch`` follows from ``limits``
    (``None``: none is recommended). ``step_s`` is the step time (predicted).
    """

    batch_size: int | None
    amp: str
    memory: MemoryFigures
    fits: bool
    by_kind_bytes: Mapping[str, int]
    by_module_bytes: Mapping[str, int]
    step_peak_allocated_bytes: tuple[int, ...]
    largest_batch: int | None
    recommended_batch: int | None
    limits: BatchLimits | None = None
    step_s: float | None = None


@dataclasses.dataclass(frozen=True)
class AmpChoice:
    """Which mixed precision the launch command asks for, and why.

    ``value`` is for the placeholder (``None``: the command has none), ``dtype`` what autocast then
    computes in ("off": none); ``variable`` is the value of ``ACCELERATE_MIXED_PRECISION`` that asks
    for it (empty: it is not set for it). ``configuration`` is the job with it where that is not the
    present setting. ``reason`` is one line; ``samples_per_s`` are those at the recommended batch
    sizes, by dtype. ``by_hand`` is a change of the script that is faster still ("": none is), for
    ``by_hand_dtype``, and ``line`` what to write at ``place`` ("train.py:41"; empty: not known).
    ``hazards`` are those of every candidate and of what could not be simulated; ``memory_reason``
    and ``time_reason`` say what AMP saves at the present batch size, and where it is little, why.
    """

    value: str | None
    dtype: str
    reason: str
    configuration: Configuration | None = None
    samples_per_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    by_hand: str = ""
    variable: str = ""
    by_hand_dtype: str = ""
    line: str = ""
    place: str = ""
    hazards: tuple[AmpHazard, ...] = ()
    candidates: tuple[AmpCandidate, ...] = ()
    memory_reason: str = ""
    time_reason: str = ""

    @property
    def own_hazards(self) -> tuple[AmpHazard, ...]:
        """Those of the dtype that is chosen."""
        return tuple(each for each in self.hazards if each.dtype == self.dtype)

    @property
    def told_hazards(self) -> tuple[AmpHazard, ...]:
        """Those to tell of: of the chosen dtype, and what keeps others from being chosen that the
        command can ask for."""
        asked = {each.dtype for each in self.candidates if each.asked != "by hand"}
        told = {
            each.text: each
            for each in self.hazards
            if each.dtype == self.dtype
            or (each.blocks and (each.dtype in asked or each.kind in ("fails", "overflow")))
        }
        return tuple(told.values())


@dataclasses.dataclass(frozen=True)
class BatchShapes:
    """Batches that differ in more than the number of their samples (padding, crops).

    ``median_elements`` and ``longest_elements`` are a sample's, of ``looked_at`` of the data set's
    ``samples`` (``None``: its samples could not be looked at, ``reason`` says why; the figures are
    then of the batches seen). ``longest`` is the memory of the present batch size where each sample
    is the longest. ``typical_step_s`` and ``longest_step_s`` are a step's with batches as they came
    and with the longest.
    """

    looked_at: int | None
    samples: int | None
    median_elements: int | None = None
    longest_elements: int | None = None
    longest: MemoryFigures | None = None
    longest_fits: bool | None = None
    typical_step_s: float | None = None
    longest_step_s: float | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class ExtraCompute:
    """The work of one optimizer step against the job as written; 0.25 is a quarter more.

    ``flops_share`` counts matmuls, convolutions and attention; ``traffic_share`` the
    bytes that all operators read and write; ``operators_share`` how many operators run.
    """

    flops_share: float
    traffic_share: float
    operators_share: float


@dataclasses.dataclass(frozen=True)
class Remedy:
    """One remedy.

    ``memory``, ``fits``, ``saved_bytes`` (of device memory; negative: it uses more),
    ``extra`` and ``cost_percent`` are ``None`` where there are no figures; ``largest_batch`` also
    where no law of the batch size was cheap to get. ``step_change`` is that of the time of an
    optimizer's step (-0.1: 10% shorter), predicted for this GPU. ``cost_percent`` is the price in
    percent of a step's compute: see :mod:`trainfit.plan.remedies.cost`. ``how`` are lines for
    people: what to change, and where. ``launch`` is the command with it, where the command changes.
    """

    name: str
    title: str
    status: RemedyStatus
    reason: str
    changes: Changes
    changes_detail: str
    found: str = ""
    memory: MemoryFigures | None = None
    fits: bool | None = None
    saved_bytes: int | None = None
    largest_batch: int | None = None
    extra: ExtraCompute | None = None
    cost_percent: float | None = None
    how: tuple[str, ...] = ()
    launch: str | None = None
    step_change: float | None = None


@dataclasses.dataclass(frozen=True)
class Combination:
    """Several remedies at once, simulated together, because none suffices by itself.

    ``batch_size`` is what goes into the command or the DataLoader, smaller than the present
    one where gradients are accumulated. ``memory`` is ``None`` where they could not be
    simulated together; ``failure`` says why.
    """

    names: tuple[str, ...]
    memory: MemoryFigures | None
    fits: bool
    batch_size: int | None
    extra: ExtraCompute | None
    launch: str
    failure: str = ""
    step_change: float | None = None


@dataclasses.dataclass(frozen=True)
class Remedies:
    """Everything that was tried on a job, best first.

    ``before`` are the figures of the job as written over the same ``steps`` as the trials.
    ``combination`` is the last one tried where no remedy alone makes the job fit; ``failure``
    says why nothing could be tried.
    """

    before: MemoryFigures | None
    batch_size: int | None
    largest_batch: int | None
    steps: int
    items: tuple[Remedy, ...]
    combination: Combination | None = None
    failure: str = ""

    @property
    def won(self) -> tuple[Remedy, ...]:
        """Those that lower the memory of the job by :data:`LEAST_GAIN` or more."""
        if self.before is None:
            return ()
        least = max(1, int(LEAST_GAIN * self.before.device_bytes))
        return tuple(each for each in self.items if (each.saved_bytes or 0) >= least)

    @property
    def faster(self) -> tuple[Remedy, ...]:
        """Those that shorten the step by :data:`LEAST_FASTER` or more, the fastest first."""
        found = [each for each in self.items if (each.step_change or 0.0) <= -LEAST_FASTER]
        return tuple(sorted(found, key=lambda each: each.step_change or 0.0))


@dataclasses.dataclass(frozen=True)
class Inference:
    """Memory of a script that does not train, with gradients recorded and without.

    ``records_gradients`` says what the script itself does; the other way round is ``None``
    where it could not be simulated (``failure`` says why).
    """

    records_gradients: bool
    without_gradients: MemoryFigures | None
    with_gradients: MemoryFigures | None
    failure: str = ""


#: Which part makes the other wait; "unknown" where the time of a step is.
Bottleneck = Literal["gpu", "loader", "unknown"]


@dataclasses.dataclass(frozen=True)
class DataLoading:
    """How the DataLoader keeps up with the GPU at ``batch_size`` (``None``: the script's own).

    ``result`` is the whole of what ``trainfit loader`` finds; where it is ``None``, ``failure``
    says why, with the fix. ``bottleneck`` is for the recommended settings, and ``factor`` says by
    how much: what the other part could do, divided by what it can (1 and more; ``None`` where that
    is not known). ``step_is_bound``: ``result.step_s`` is a lower bound of the GPU's step time, not
    measured. ``input_at_most`` are the batches a second that the cores of ``PlanResult.cpu`` give
    at best, ``input_range`` what they may be, ``input_basis`` what that is from, and
    ``input_workers`` the fewest workers that give as many as the GPU uses, or all. ``launched`` are
    the settings in the launch command (``None``: those of ``result``).
    """

    result: LoaderResult | None
    batch_size: int | None = None
    step_is_bound: bool = True
    bottleneck: Bottleneck = "unknown"
    factor: float | None = None
    failure: str = ""
    input_at_most: float | None = None
    input_range: tuple[float, float] | None = None
    input_basis: tuple[str, ...] = ()
    input_workers: int | None = None
    launched: LoaderSettings | None = None


def rate_of(found: LoaderResult, settings: LoaderSettings) -> float | None:
    """Batches per second of the loader with the GPU: measured where it was, else predicted."""
    real, candidate = found.measured(settings), found.candidate(settings)
    if real is not None:
        return real.measured_batches_per_s
    return candidate.batches_per_s if candidate is not None else None


@dataclasses.dataclass(frozen=True)
class Recorded:
    """One of the simulated runs: the bytes of its recording's file, as base64."""

    batch_size: int | None
    content: str

    @classmethod
    def of(cls, batch_size: int | None, recording: Recording) -> Recorded:
        return cls(batch_size, base64.b64encode(recording.to_bytes()).decode("ascii"))

    def recording(self, path: Path) -> Recording:
        """What was recorded; raises :class:`ResultFileError` for ``path``, the result's file."""
        try:
            content = base64.b64decode(self.content, validate=True)
        except ValueError as error:
            raise ResultFileError(path, f"it is damaged ({error})", _REMAKE) from error
        return Recording.from_bytes(content, path)


@dataclasses.dataclass(frozen=True)
class PlanResult:
    """Everything that ``trainfit plan`` found out.

    ``recommended`` are the figures at ``chosen.recommended_batch``. ``basis_detail`` says why,
    where ``basis`` is not the usual "two traces". ``other_gpus`` are GPUs of the catalogue on which
    the present batch size would run when it does not here, smallest first. ``remedies`` are
    ``None`` where none were tried, ``inference`` where the script trains. ``pattern`` says how
    memory goes on from step to step at the present batch size. ``loading`` is ``None`` where the
    DataLoader was not tuned; ``variables`` are those that ``launch`` sets in addition to the user's
    own and the loader's. ``batch_in_command``: ``launch`` has the recommended batch size, for the
    command has a placeholder for it. ``samples`` are the data set's (``None``: not known).
    ``speed`` is ``None`` where nothing can be said of it (a custom GPU specification, a script
    whose kernels were not seen). ``other_processes_bytes`` of the GPU are held by others;
    ``profile`` names the calibration profile in use ("": none, the context is assumed).
    ``recordings`` are what the figures are from, the job as it is first: with them other GPUs can
    be judged without another run (``trainfit gpus --for``); in files, but not in what is printed.
    ``cpu`` is what the user said of the processor. ``versus_cpu`` is ``None`` where the CPU was not
    asked about. ``protection`` is what kept the script from changing files in the run as the job is
    (``None`` in files of earlier versions), ``step`` what an optimizer step consists of (``None``:
    an older result, or no step was counted). ``amp_choice`` is ``None`` where there was nothing to
    choose from, ``shapes`` where all full batches have one shape. ``structured_notes`` are
    ``notes`` and ``assumptions`` as data, grouped; ``coverage`` says what was among the simulated
    steps (``None``: an older result). ``interrupted``: the user ended the plan early; this is what
    was known by then. ``batch_check`` says whether the recommended batch size was simulated
    (``None``: none is recommended, or an older result). ``launch_parts`` are what ``launch``
    consists of, and what was left out of it (none: an older result, or the job does not fit).
    ``allocator`` is the trial of the allocator's other kind of segment. ``loader_at`` is the line
    that makes the DataLoader that fed the first step (empty: it could not be told; ``None``: none
    did, or an older result), ``sample_loading_s`` what a sample needed to load in the simulated run
    (``None``: not known).
    """

    command: str
    gpu: str
    gpu_memory_bytes: int
    headroom_share: float
    steps: int
    now: Configuration
    recommended: MemoryFigures | None
    other_amp: Configuration | None
    basis: Basis
    basis_detail: str
    launch: str
    assumptions: Mapping[str, int]
    notes: tuple[str, ...]
    other_gpus: tuple[str, ...]
    gpu_sources: Mapping[str, str]
    environment: Mapping[str, str]
    seconds: float
    remedies: Remedies | None = None
    inference: Inference | None = None
    pattern: StepPattern | None = None
    other_processes_bytes: int = 0
    profile: str = ""
    headroom_is_set: bool = True
    loading: DataLoading | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    batch_in_command: bool = True
    samples: int | None = None
    speed: Speed | None = None
    recordings: tuple[Recorded, ...] = ()
    cpu: HostCpu | None = None
    versus_cpu: VersusCpu | None = None
    protection: Protection | None = None
    step: StepMakeup | None = None
    amp_choice: AmpChoice | None = None
    shapes: BatchShapes | None = None
    structured_notes: tuple[Note, ...] = ()
    coverage: Coverage | None = None
    interrupted: bool = False
    batch_check: BatchCheck | None = None
    launch_parts: tuple[LaunchPart, ...] = ()
    allocator: AllocatorTrial | None = None
    loader_at: str | None = None
    sample_loading_s: float | None = None

    @property
    def chosen(self) -> Configuration:
        """The configuration that ``launch`` asks for, but for its batch size."""
        choice = self.amp_choice
        return choice.configuration if choice is not None and choice.configuration else self.now

    @property
    def fits(self) -> bool:
        """Is there a batch size, or the present one where no other is known, that fits?"""
        largest = self.chosen.largest_batch
        return self.chosen.fits if largest is None else largest > 0

    @property
    def can_start(self) -> bool:
        """Does the job that ``launch`` runs fit, with its batch size or the recommended one?"""
        return self.chosen.fits or bool(self.chosen.recommended_batch)

    def to_json(self) -> str:
        """One JSON document, with its format's name and version."""
        return documents.to_json(self, FORMAT, VERSION)

    def printed(self) -> str:
        """The same without the recordings, which are long and for programs of ours alone."""
        return dataclasses.replace(self, recordings=()).to_json()

    @classmethod
    def from_json(cls, text: str, path: Path) -> PlanResult:
        """The reverse of :meth:`to_json`; raises :class:`ResultFileError` for ``path``."""
        return documents.from_json(
            cls,
            text,
            path,
            FORMAT,
            VERSION,
            remake=_REMAKE,
            wanted=_WANTED,
            upgrades=_UPGRADES,
        )

    def save(self, path: Path) -> None:
        """Write the result; the file appears whole or not at all."""
        documents.save(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> PlanResult:
        """Read a result file; raises :class:`ResultFileError`."""
        return cls.from_json(documents.read(path, _REMAKE), path)
