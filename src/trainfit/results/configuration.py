"""One setting of a job: its memory, its batch sizes, and the precision that is chosen for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

from trainfit.results.findings import Finding, Fix, Place
from trainfit.results.memory import MemoryFigures

#: An epoch of fewer steps is told of with the batch size that makes it so short.
FEW_STEPS: Final = 8


@dataclasses.dataclass(frozen=True)
class BatchOption:
    """A faster batch size that changes the samples of an optimizer step: the user's to choose.

    ``samples`` are those of a step with it, ``samples_now`` those at present; ``gain`` is how many
    times the samples a second of the recommended batch size it has (predicted). ``steps`` and
    ``steps_now`` are an epoch's optimizer steps (``None``: not known). ``rate_factor`` is that of
    the learning rate by ``rate_rule``, which ``rate_source`` is for (``None``, empty: no rule is
    known for ``optimizer``).
    """

    batch_size: int
    samples: int
    samples_now: int
    gain: float
    steps: int | None
    steps_now: int | None
    optimizer: str = ""
    rate_factor: float | None = None
    rate_rule: str = ""
    rate_source: str = ""


@dataclasses.dataclass(frozen=True)
class BatchLimits:
    """What a recommended batch size follows from; ``None`` is not known.

    ``memory``: the largest that leaves the headroom. ``knee``: the smallest with nearly the most
    samples a second of those (:data:`trainfit.results.speed.KNEE`, rounded up to a multiple of
    8). ``noise_scale``: of the gradients, in samples, as the user said; the larger a batch is
    compared to it, the more samples the same loss needs. ``trains``: the smallest with nearly the
    fastest progress then.

    ``data_set``: the samples of an epoch, which no batch exceeds. ``at_least``: memory's figures
    are the largest that were simulated (the data set may have no more samples); it may allow
    more. ``reason`` says why the recommended batch size is not the throughput's (empty: it is).
    ``epoch_steps`` are an epoch's steps with it, where they are few (:data:`FEW_STEPS`).
    ``evaluation``: the largest with which the evaluation fits, by a rule from two batch sizes,
    where that is less than training allows (0: none; ``None``: it does not limit, or less is
    known). ``option`` is a faster one with which a step would have other samples (``None``: there
    is none). ``failed_batches`` could not be simulated.
    """

    memory: int | None
    knee: int | None
    noise_scale: float | None = None
    trains: int | None = None
    data_set: int | None = None
    at_least: bool = False
    reason: str = ""
    epoch_steps: int | None = None
    evaluation: int | None = None
    option: BatchOption | None = None
    failed_batches: tuple[int, ...] = ()

    def failed_above(self, batch: int) -> str:
        """The larger sizes than ``batch`` that could not be simulated, in words; empty: none."""
        sizes = [
            str(failed_batch)
            for failed_batch in sorted(self.failed_batches)
            if failed_batch > batch
        ]
        return f"{' and '.join(sizes)} could not be simulated" if sizes else ""

    def is_data_set(self, batch: int) -> bool:
        """Has the data set about as many samples as this batch? (Sizes are rounded to 8.)"""
        return self.data_set is not None and batch + 8 > self.data_set

    @property
    def by_noise(self) -> int | None:
        """The batch size that the noise scale asks for, where memory and the data set allow more;
        ``None``: it asks for none."""
        limit = min((each for each in (self.memory, self.data_set) if each), default=0)
        return self.trains if self.trains is not None and self.trains < limit else None


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
    autocast's dtype ("bfloat16", "float16"), that of FSDP's mixed precision (``by_fsdp``), or
    "off". ``by_kind_bytes`` and ``by_module_bytes`` split the peak of allocated memory;
    ``largest_batch`` is 0 where one sample does not fit and ``None`` where it could not be
    determined. ``recommended_batch`` follows from ``limits``
    (``None``: none is recommended). ``step_s`` is the step time (predicted).
    All of it is that of the process ``rank`` of the job.
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
    by_fsdp: bool = False
    rank: int = 0

    @property
    def by_noise(self) -> int | None:
        """The batch size of :attr:`BatchLimits.by_noise`."""
        return self.limits.by_noise if self.limits is not None else None


#: What needs more memory than training by less is not told of.
ALIKE: Final = 1.02


@dataclasses.dataclass(frozen=True)
class EpochEnd:
    """What the first evaluation needs, and what else comes after an epoch's last step, at
    ``batch_size`` (``None``: whatever the script has), in a run of its own.

    ``reason`` says why it was not simulated, or how long none was seen (empty: the script has none,
    as it ended without one). ``saved``: a
    checkpoint was written meanwhile. ``allocated_bytes`` and ``device_bytes`` are the peak over
    its ``batches`` (``None``: not known, as no DataLoader was cut short), of which each leaves
    ``batch_bytes`` behind (0: memory does not grow) at the line ``kept_at``, and of the next
    epoch's steps, where something is left until then. ``later`` is the line of ``if epoch == 5:``,
    or of the loop over the epochs, where it is the steps after that which need most, ``final`` the
    line after the last epoch that does (``None``: it is none of these). ``unseen`` says what of the
    rest of the run was not simulated (empty: nothing that may need memory is known of).
    ``without_graph_bytes`` is the device memory that an evaluation with gradients on would need
    under ``torch.no_grad()`` (``None``: it has none, or that was not simulated).
    ``evaluation_batch_size`` are the samples of the evaluation's own batches (``None``: not known).
    """

    evaluation: Literal["simulated", "none", "not simulated"]
    reason: str = ""
    saved: bool = False
    allocated_bytes: int | None = None
    device_bytes: int | None = None
    fits: bool | None = None
    batches: int | None = None
    batch_bytes: int | None = None
    batch_size: int | None = None
    later: str | None = None
    final: str | None = None
    unseen: str = ""
    kept_at: str | None = None
    without_graph_bytes: int | None = None
    evaluation_batch_size: int | None = None

    def needs_more_than(self, training_bytes: int) -> bool:
        """Does it need more device memory than training, by what is worth telling?"""
        return (self.device_bytes or 0) > ALIKE * training_bytes

    @property
    def is_of_epoch(self) -> bool:
        """Does it come at the end of each epoch?"""
        return self.later is None and self.final is None

    @property
    def title(self) -> str:
        """What needs the memory, in words."""
        if self.later is not None:
            return "training from a later epoch on"
        if self.final is not None:
            return "final evaluation"
        if self.evaluation == "simulated":
            return "evaluation and checkpoint" if self.saved else "evaluation"
        return "checkpoint" if self.saved else "later steps"

    @property
    def is_plural(self) -> bool:
        """Is what needs the memory more than one thing ("later steps need")?"""
        if self.later is not None or self.final is not None:
            return False
        return self.saved == (self.evaluation == "simulated")


@dataclasses.dataclass(frozen=True)
class BatchShapes:
    """Batches that differ in more than the number of their samples (padding, crops).

    ``median_elements`` and ``longest_elements`` are a sample's, of ``looked_at`` of the data set's
    ``samples`` (``None``: its samples could not be looked at, ``reason`` says why; the figures are
    then of the batches seen). ``longest`` is the memory of the current batch size where each sample
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


# ---
# What speaks for and against each precision of mixed precision, and which is chosen.


def amp_hazard(
    kind: str,
    dtype: str,
    title: str,
    place: str = "",
    remedy: str = "",
    share: float | None = None,
    blocks: bool = False,
) -> Finding:
    """Something that was seen of autocast in ``dtype``.

    Args:
        kind: what can go wrong with a precision, or keeps it from a gain. "emulated": the GPU
            computes in it by way of another; "no tensor cores": it has no units that are faster in
            it; "no scaler": float16 without a gradient scaler, so that small gradients become 0;
            "float16 weights": the same without AMP, of a model that is in float16 itself;
            "fails", "overflow": the script raises in it, the latter for a number that float16
            cannot hold; "outside autocast": operators that autocast would run in float32 ran in
            float16; "custom function", "custom operator": code that does not know of autocast;
            "float32 operators": autocast runs much of the step in float32.
        place: the user's ("file:line"; empty: none).
        share: that of a step's time (``None``: not known).
        blocks: the dtype is not recommended for it (then it is critical).
    """
    return Finding(
        kind,
        "critical" if blocks else "warning",
        title,
        fixes=(Fix(remedy),) if remedy else (),
        share=share,
        place=Place.parse(place),
        subject=dtype,
    )


#: How a precision is asked for: it is there already; a value of ``{amp}``; Accelerate's variable;
#: a change of the script.
AmpAsked = Literal["present", "placeholder", "variable", "by hand"]


@dataclasses.dataclass(frozen=True)
class AmpCandidate:
    """A precision that was compared: ``value`` is the placeholder's or the variable's.

    ``as_of`` is the dtype of the run that its figures are from, where it was not simulated itself:
    bfloat16 and float16 have as many bytes, autocast casts the same operators, and Tensor cores
    that have both are equally fast in both (empty: it was simulated).
    """

    dtype: str
    asked: AmpAsked
    value: str = ""
    as_of: str = ""


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
    and ``time_reason`` say what AMP saves at the current batch size, and where it is little, why.
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
    hazards: tuple[Finding, ...] = ()
    candidates: tuple[AmpCandidate, ...] = ()
    memory_reason: str = ""
    time_reason: str = ""

    @property
    def by_hand_gain(self) -> str:
        """What the change by hand gains, without its line and place."""
        return self.by_hand.removesuffix(f": {self.line}").removesuffix(f": {self.place}")

    @property
    def text(self) -> str:
        """The dtype with the reason."""
        return f"{self.dtype}: {self.reason}"

    @property
    def own_hazards(self) -> tuple[Finding, ...]:
        """The hazards of the dtype that is chosen."""
        return tuple(hazard for hazard in self.hazards if hazard.subject == self.dtype)

    @property
    def told_hazards(self) -> tuple[Finding, ...]:
        """Hazards to tell of: of the chosen dtype, and what keeps others from being chosen that the
        command can ask for."""
        asked = {candidate.dtype for candidate in self.candidates if candidate.asked != "by hand"}
        told = {
            hazard.title: hazard
            for hazard in self.hazards
            if hazard.subject == self.dtype
            or (
                hazard.is_critical
                and (hazard.subject in asked or hazard.kind in ("fails", "overflow"))
            )
        }
        return tuple(told.values())
