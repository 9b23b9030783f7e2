"""The result of ``trainfit plan``, and what it consists of."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Final, Literal

from trainfit.results.changes import AllocatorTrial, LaunchPart, Remedies, ScriptLine
from trainfit.results.configuration import (
    AmpChoice,
    BatchCheck,
    BatchLimits,
    BatchOption,
    BatchShapes,
    Configuration,
    EpochEnd,
)
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.files.contents import Note
from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.files.errors import ResultFileError
from trainfit.results.findings import Finding
from trainfit.results.memory import METRICS as MEMORY_METRICS
from trainfit.results.memory import BatchMemory, MemoryFigures, StepMemory
from trainfit.results.real_runs import VersusCpu
from trainfit.results.runs.continuation import whole
from trainfit.results.runs.generation import Generation
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.script import Protection
from trainfit.results.runs.steps import Coverage, StepMakeup, StepPattern
from trainfit.results.speed import (
    KNEE,
    DataLoading,
    GpusOfProcess,
    Ranks,
    RunRate,
    Speed,
    StepSpeed,
    StepWork,
)
from trainfit.results.text import count, percent, times

# ---
# What a value of a tunable costs: a sequence's length, or any whole number of a command. Memory and
# time over (batch size, value), and the largest value that fits.


@dataclasses.dataclass(frozen=True)
class TunablePoint:
    """A job at a value of its tunable and a batch size.

    Attributes:
        value: of the tunable.
        batch_size: ``None``: not known.
        device_bytes: at the peak, as ``nvidia-smi`` shows them.
        fits: is that on the GPU?
        step_s: seconds of a step (``None``: no rates of this GPU).
        is_simulated: a run at these; otherwise it follows from runs at two other batch sizes.
    """

    value: int
    batch_size: int | None
    device_bytes: int
    fits: bool
    step_s: float | None = None
    is_simulated: bool = True


@dataclasses.dataclass(frozen=True)
class TunableLimit:
    """About the largest ``value`` at a batch size, from the memory at values that were simulated;
    no run was made there. ``by_model``: the model is made for no more."""

    batch_size: int
    value: int
    by_model: bool = False


@dataclasses.dataclass(frozen=True)
class TunableSizes:
    """A tunable's values, and what they cost.

    Attributes:
        tunable: its name; ``shown`` is the option as the command says it.
        present: its value now.
        points: by value, then by batch size.
        largest: that was simulated and fits, at the current batch size (0: none does; ``None``:
            it was not looked for).
        recommended: the same with the safety margin left free.
        too_large: the smallest that was simulated and does not fit (``None``: none).
        limit: values above this one were not looked at; ``limit_reason`` says why (empty: there is
            none).
        limits: about the largest at other batch sizes.
        growth: "linear", "quadratic", or "mixed": how memory at the peak grows with the value;
            empty where that was not seen.
        quadratic_bytes: of the peak at ``present``, what grows with the square.
        quadratic_in: the module whose tensors have most of it (empty: none has).
        command: the user's, with the recommended value.
        reason: why there is nothing, or no more.
    """

    tunable: str
    shown: str
    present: int
    points: tuple[TunablePoint, ...] = ()
    largest: int | None = None
    recommended: int | None = None
    too_large: int | None = None
    limit: int | None = None
    limit_reason: str = ""
    limits: tuple[TunableLimit, ...] = ()
    growth: str = ""
    quadratic_bytes: int = 0
    quadratic_in: str = ""
    command: str = ""
    reason: str = ""


# ---
# The result of ``trainfit plan``.
#
# All memory figures are bytes. ``None`` means not determined; 0 is a figure.


#: How the batch sizes were obtained: computed from two simulated ones (exact for all),
#: simulated one by one, or not at all.
Basis = Literal["two traces", "one trace a batch size", "one trace"]


@dataclasses.dataclass(frozen=True)
class HostCpu:
    """The CPU of the machine with the GPU, as given by the user: cores, and their clock in Hz.

    ``core_speed`` is how fast a core of this machine dispatches operators, as a multiple of the
    reference (:mod:`trainfit.speed.step`), where that was measured. ``kind`` is the core's
    design
    (:mod:`trainfit.hardware.machine.processor`; empty: not said), ``second_threads`` are hardware
    threads
    in addition to the first of each core, ``hz_range`` what the clock may be, ``name`` the rented
    machine's (:mod:`trainfit.hardware.gpu_lookup`) that it is taken from, in words.
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
class Inference:
    """Memory of a script that does not train, with gradients recorded and without.

    ``records_gradients`` says what the script itself does; the other way round is ``None``
    where it could not be simulated (``failure`` says why).
    """

    records_gradients: bool
    without_gradients: MemoryFigures | None
    with_gradients: MemoryFigures | None
    failure: str = ""


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
            remake = PlanResult.FILE.remake
            raise ResultFileError(path, f"it is damaged ({error})", remake) from error
        return whole(Recording.from_bytes(content, path))


@dataclasses.dataclass(frozen=True)
class JobDetail:
    """What the recordings of one job say; in no file, as it follows from them.

     ``memory`` and ``work`` are of the recorded batch size; ``batches`` the job at
    others, smallest first (none: they are not known); ``gpu_bytes`` the memory of GPUs to compare
    with, by name, the planned one first. ``None``: the recordings do not tell."""

    memory: StepMemory | None = None
    work: StepWork | None = None
    batches: tuple[BatchMemory, ...] = ()
    gpu_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PlanResult(ResultFile):
    """Everything that ``trainfit plan`` found out.

    ``recommended`` are the figures at ``chosen.recommended_batch``. ``basis_detail`` says why,
    where ``basis`` is not the usual "two traces". ``other_gpus`` are GPUs of the catalogue on which
    the current batch size would run when it does not here, smallest first. ``remedies`` are
    ``None`` where none were tried, ``inference`` where the script trains. ``pattern`` says how
    memory goes on from step to step at the current batch size. ``loading`` is ``None`` where the
    DataLoader was not tuned; ``variables`` are those that ``launch`` sets in addition to the user's
    own and the loader's. ``batch_in_command``: ``launch`` has the recommended batch size, for the
    command has a placeholder for it. ``samples`` are the data set's (``None``: not known).
    ``speed`` is ``None`` where nothing can be said of it (a custom GPU specification, a script
    whose kernels were not seen). ``other_processes_bytes`` of the GPU are held by others;
    ``profile`` names the calibration profile in use ("": none, the context is assumed).
    ``recordings`` are what the figures are from, the job as it is first: with them other GPUs can
    be judged without another run (``trainfit gpus --for``); in files, but not in what is printed.
    ``cpu`` is what the user said of the processor. ``versus_cpu`` is ``None`` where the CPU was not
    asked about. ``protection`` is what kept the script from changing files in the run as the job
    is, ``step`` what an optimizer step consists of (``None``: no step was counted). ``amp_choice``
    is ``None`` where there was nothing to choose from, ``shapes`` where all full batches have one
    shape. ``structured_notes`` are ``notes`` and ``assumptions`` as data, grouped; ``coverage``
    says what was among the simulated steps. ``interrupted``: the user ended the plan early; this is
    what was known by then. ``batch_check`` says whether the recommended batch size was simulated
    (``None``: none is recommended). ``launch_parts`` are what ``launch`` consists of, and what was
    left out of it (none: the job does not fit). ``allocator`` is the trial of the allocator's other
    kind of segment. ``loader_at`` is the line that makes the DataLoader that fed the first step
    (empty: it could not be told; ``None``: none did), ``sample_loading_s`` what fetching a sample
    took a worker (or the script itself) in the simulated run, or in a short real one (``None``: not
    known). ``run`` is how fast the launched run will be, with its DataLoader (``None``: not known).
    ``findings`` are what is wrong with the job in addition to its DataLoader: its learning, and of
    what memory is full. ``script_lines`` are where the script has tunables that the command does
    not say, by name (none: that cannot be told). ``epoch_end`` is what its evaluation needs
    (``None``: the script does not train), ``recommended_epoch_end`` the same at the recommended
    batch size (``None``: that is the current one, or it was not looked at). ``generation`` is of
    the text that it generates (``None``: it generates none). ``sizes`` are the values of a tunable
    that the user asked about (``None``: none was). ``ranks`` are the processes of a job that has
    several (``None``: it has one); all figures but ``ranks_samples_per_s`` are of one of them then,
    on its GPU. ``gpus`` are those of a job of one process that uses several (``None``: it uses
    one); memory is of the fullest of them then.
    """

    FILE: ClassVar = Format(
        "trainfit-plan",
        1,
        "re-create it with `trainfit plan`",
        "give a file of `trainfit plan --output` or `trainfit simulate --output`",
    )
    METRICS: ClassVar = {
        **MEMORY_METRICS,
        "device_gib": "device memory of the process with its evaluation, as nvidia-smi shows it",
        "step_ms": "time of a step on the GPU, predicted",
        "samples_per_s": "samples a second on the GPU, if the DataLoader keeps up",
        "epoch_s": "time of an epoch, if the DataLoader keeps up",
        "mfu_share": "model FLOPs utilization",
        "loader_batches_per_s": "rate of the DataLoader with its current settings",
        "largest_batch": "largest batch size that fits",
        "recommended_batch": "recommended batch size",
        "recommended_device_gib": "device memory at the recommended batch size",
        "recommended_step_ms": "time of a step at the recommended batch size",
        "recommended_samples_per_s": "samples a second then, if the DataLoader keeps up",
        "recommended_loader_batches_per_s": "rate of the DataLoader as it is launched",
        "run_step_ms": "time of a step as launched: of the slower of DataLoader and GPU",
        "run_samples_per_s": "samples a second as launched, likewise",
        "run_epoch_s": "time of an epoch as launched, likewise",
        "ranks_samples_per_s": "samples a second of all processes as launched, likewise",
        "efficiency_share": "throughput of a process, as a share of what it would be alone",
    }

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
    run: RunRate | None = None
    findings: tuple[Finding, ...] = ()
    epoch_end: EpochEnd | None = None
    recommended_epoch_end: EpochEnd | None = None
    generation: Generation | None = None
    script_lines: Mapping[str, ScriptLine] = dataclasses.field(default_factory=dict)
    ranks: Ranks | None = None
    gpus: GpusOfProcess | None = None
    sizes: TunableSizes | None = None

    @property
    def chosen(self) -> Configuration:
        """The configuration that ``launch`` asks for, but for its batch size."""
        choice = self.amp_choice
        return choice.configuration if choice is not None and choice.configuration else self.now

    @property
    def needed_bytes(self) -> int:
        """Device memory of the job as it is: of its training, or of what comes after an epoch's
        steps where that needs more."""
        return _most(self.now.memory.device_bytes, self.epoch_end)

    @property
    def needed_then_bytes(self) -> int | None:
        """Memory needed at the recommended batch size; ``None``: none is recommended."""
        end = self.recommended_epoch_end
        if end is None and self.chosen is self.now:
            end = self.epoch_end if self.now.batch_size == self.now.recommended_batch else None
        return None if self.recommended is None else _most(self.recommended.device_bytes, end)

    @property
    def all_samples(self) -> int | None:
        """Samples of the whole run; of one epoch where it is not known how many there are, and
        ``None`` where neither is."""
        epochs = self.coverage.all_epochs if self.coverage is not None else None
        return self.samples and self.samples * (epochs or 1)

    @property
    def fits_now(self) -> bool:
        """Does the job fit as it is, with its evaluation as far as that is known?"""
        return self.now.fits and self._is_evaluated

    @property
    def _is_evaluated(self) -> bool:
        return self.epoch_end is None or self.epoch_end.fits is not False

    @property
    def never_evaluates(self) -> bool:
        """Does the evaluation fit with no batch size that was looked at?"""
        limits = self.chosen.limits
        return limits is not None and limits.evaluation == 0

    @property
    def fits(self) -> bool:
        """Is there a batch size, or the current one where no other is known, that fits?"""
        largest = self.chosen.largest_batch
        if self.never_evaluates:
            return False
        return self.chosen.fits and self._is_evaluated if largest is None else largest > 0

    @property
    def can_start(self) -> bool:
        """Does the job that ``launch`` runs fit, with its batch size or the recommended one?"""
        if self.never_evaluates:
            return False
        return bool(self.chosen.recommended_batch) or (self.chosen.fits and self._is_evaluated)

    def printed(self) -> str:
        """The document without the recordings, which are long and for programs of ours alone."""
        return dataclasses.replace(self, recordings=()).to_json()

    def quantities(self) -> Mapping[str, float | None]:
        """Quantities of :class:`Metered`: of the command as it is, and as ``launch`` recommends
        it."""
        speed, best = self.speed, self.chosen.recommended_batch
        then = speed.at(best) if speed is not None and best else None
        loading = self.loading
        loader = loading.result if loading is not None else None
        # Of a run whose DataLoader is not known no rate is.
        run = self.run if self.run is not None and self.run.limit in ("gpu", "loader") else None
        memory, needed = self.now.memory.quantities(), self.needed_bytes
        most = memory["device_high_gib"]
        return {
            **memory,
            "device_gib": needed,
            "device_high_gib": None if most is None else max(most, needed),
            "step_ms": speed.now.seconds if speed is not None else None,
            "samples_per_s": speed.now.samples_per_s if speed is not None else None,
            "epoch_s": speed.epoch_s if speed is not None else None,
            "mfu_share": speed.mfu if speed is not None else None,
            "loader_batches_per_s": loader.rate(loader.present) if loader is not None else None,
            "largest_batch": self.chosen.largest_batch,
            "recommended_batch": best or None,
            "recommended_device_gib": self.needed_then_bytes,
            "recommended_step_ms": then.seconds if then is not None else None,
            "recommended_samples_per_s": then.samples_per_s if then is not None else None,
            "recommended_loader_batches_per_s": (
                loader.rate((loading and loading.launched) or loader.recommended)
                if loader is not None
                else None
            ),
            "run_step_ms": run.step_s if run is not None else None,
            "run_samples_per_s": run.samples_per_s if run is not None else None,
            "run_epoch_s": run.epoch_s if run is not None else None,
            "ranks_samples_per_s": self._of_all_ranks(run),
            "efficiency_share": (
                (then or self.speed.now).efficiency
                if self.ranks and self.ranks.sharing == 1 and self.speed
                else None
            ),
        }

    def _of_all_ranks(self, run: RunRate | None) -> float | None:
        rate = run.samples_per_s if run is not None else None
        return rate * self.ranks.replicas if self.ranks is not None and rate is not None else None


def _most(device_bytes: int, end: EpochEnd | None) -> int:
    return max(device_bytes, (end.device_bytes or 0) if end is not None else 0)


# ---
# How fast a planned run will be: as fast as the slower of its DataLoader and its GPU.


#: A DataLoader that is slower than the GPU by less keeps up: its rate is good to some percent.
KEEPS_UP: Final = 0.05


def with_run_rate(plan: PlanResult) -> PlanResult:
    """``plan`` with its ``run``."""
    return dataclasses.replace(plan, run=run_rate(plan))


def run_rate(plan: PlanResult) -> RunRate | None:
    """The rate of the recommended batch size, else of the current one; ``None`` where the time of a
    step on the GPU is not known."""
    batch = plan.chosen.recommended_batch or plan.now.batch_size
    step = plan.speed.at(batch) if plan.speed is not None else None
    if step is None:
        return None
    gpu = RunRate(
        batch_size=step.batch_size,
        step_s=step.seconds,
        samples_per_s=step.samples_per_s,
        epoch_s=_epoch(plan, step.samples_per_s),
        limit="gpu",
        gpu_step_s=step.seconds,
        gpu_samples_per_s=step.samples_per_s,
    )
    loading = plan.loading
    if loading is None or loading.result is None:
        feeds = plan.loader_at is not None and plan.inference is None
        return dataclasses.replace(gpu, limit="gpu only") if feeds or loading is not None else gpu
    settings = loading.launched or loading.result.recommended
    there = _is_of_another(plan)
    batches = loading.input_at_most if there else loading.result.rate(settings)
    if not batches:
        return dataclasses.replace(gpu, limit="unknown")
    seconds = _loader_step_s(plan, loading, settings, step, batches)
    fastest = (loading.input_range or (batches, batches))[1] if there else batches
    evidence = loading.evidence
    if seconds * batches / fastest <= (1 + KEEPS_UP) * step.seconds:
        return dataclasses.replace(gpu, loader=evidence)
    samples = step.samples_per_s
    rate = None if samples is None else samples * step.seconds / seconds
    return dataclasses.replace(
        gpu,
        step_s=seconds,
        samples_per_s=rate,
        epoch_s=_epoch(plan, rate),
        limit="loader",
        loader=evidence,
        is_bound=there,
    )


def _epoch(plan: PlanResult, samples_per_s: float | None) -> float | None:
    return plan.samples / samples_per_s if plan.samples and samples_per_s else None


def _is_of_another(plan: PlanResult) -> bool:
    """Is the DataLoader's rate that of another processor than this machine's?"""
    cpu, loading = plan.cpu, plan.loading
    given = cpu is not None and cpu.cores is not None and cpu.core_speed is None
    return given and loading is not None and loading.input_at_most is not None


def _loader_step_s(
    plan: PlanResult,
    loading: DataLoading,
    settings: LoaderSettings,
    step: StepSpeed,
    batches_per_s: float,
) -> float:
    """Seconds between two optimizer steps at this rate of the DataLoader.

    It may have been measured at another batch size, with the same samples a second. Without
    workers a batch is made while the GPU waits: what a step lasts beyond the one that the rate is
    for comes on top.
    """
    found = loading.result
    assert found is not None
    makeup, size = plan.step, found.probe.batch_size
    batches = float((makeup.loader_batches if makeup is not None else None) or 1)
    if step.samples_per_s and size:
        batches = step.samples_per_s * step.seconds / size
    seconds = batches / batches_per_s
    if not settings.num_workers:
        seconds += max(0.0, step.seconds - batches * found.step_s)
    return seconds


def data_set_text(plan: PlanResult, samples: int) -> str:
    """How many ``samples`` bound the batch size: the data set's, or a process's share of them."""
    if plan.ranks is not None and samples == plan.samples:
        return f"each process gets {samples} samples of the data set"
    return f"the data set has {samples} samples"


# ---
# Why a batch size is recommended, in words that a launch command and a report share.


def batch_reasons(result: PlanResult, best: int, limits: BatchLimits) -> Iterator[str]:
    """Why this one, what else bounds it, and what it makes of an epoch."""
    memory, data_set = limits.memory, limits.data_set
    if limits.reason:
        yield limits.reason
    elif best == data_set:
        yield "the whole data set"
    elif memory is None or best >= memory:
        yield f"{largest_words(best, limits)} {_margin(result)}"
    elif limits.trains is not None:
        yield f"smallest that trains {percent(KNEE)} as fast as any at this noise scale"
    else:
        yield f"smallest with {percent(KNEE)} of the best throughput"
    if data_set is not None and (memory is None or data_set <= memory):
        yield data_set_text(result, data_set)
    elif memory is not None and best < memory:
        at_least = "at least " if limits.at_least else ""
        yield f"largest batch {_margin(result)}: {at_least}{memory}"
    if limits.epoch_steps is not None:
        yield f"an epoch is then {count(limits.epoch_steps, 'step')}"


def option_text(option: BatchOption) -> str:
    """What a faster batch size does that changes the samples of a step, in a line."""
    text = f"{times(option.gain)} the samples/s"
    if option.samples != option.batch_size:
        text += f", {option.samples} samples a step (now {option.samples_now})"
    if option.steps is not None:
        text += f", {count(option.steps, 'step')} an epoch (now {option.steps_now})"
    name = option.optimizer or "this optimizer"
    if option.rate_factor is None:
        return f"{text}; learning rate: no rule is known for {name}, tune it"
    return (
        f"{text}; learning rate × {option.rate_factor:.3g} by the {option.rate_rule} rule for "
        f"{name} ({option.rate_source})"
    )


def largest_words(batch: int, limits: BatchLimits | None) -> str:
    """What the largest batch is called that leaves the margin: perhaps none above was simulated."""
    if limits is not None and limits.at_least and not limits.is_data_set(batch):
        return "largest batch that was simulated, and"
    return "largest batch"


def _margin(result: PlanResult) -> str:
    share = percent(result.headroom_share, decimals=1)
    if result.headroom_is_set:
        return f"with {share} of the GPU left free, as set"
    return f"with a {share} safety margin"
