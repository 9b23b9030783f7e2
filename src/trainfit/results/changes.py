"""Changes to a job, each with its reason: parts of its launch command, memory remedies."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Final, Literal

from trainfit.results.loader import Basis
from trainfit.results.memory import MemoryFigures

#: How the figures of a remedy were obtained: the changed script was simulated; the recording
#: was replayed with another allocator; the recording was replayed without the tensors that
#: would go (not simulated). Or why there are none: the trial failed, it was not made, as others
#: promised more, or it does not apply.
RemedyStatus = Literal[
    "simulated", "replayed", "estimated", "failed", "not tried", "not applicable"
]

#: What becomes of the training: the same up to rounding; the same in lower precision; another
#: one, whose result has to be compared.
Changes = Literal["nothing", "precision", "training"]

#: Share of the device memory below which a remedy has won nothing worth a change.
LEAST_GAIN: Final = 0.002

#: Share of a step's time below which it has not become faster: the model is no finer.
LEAST_FASTER: Final = 0.02

#: Transformers' names of AdamW (``TrainingArguments.optim``), and of the one whose states of 8 bits
#: are paged.
ADAMW: Final = re.compile(r"(adamw|adam)_(torch|torch_fused|hf|8bit|bnb_8bit)")
PAGED: Final = "paged_adamw_8bit"

#: Methods of models that checkpoint their activations: Transformers' (the second up to version 5)
#: and diffusers'.
OWN_CHECKPOINTING: Final = (
    "activation_checkpointing_enable",
    "gradient_checkpointing_enable",
    "enable_gradient_checkpointing",
)


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
    percent of a step's compute: see :mod:`trainfit.plan.changes.catalogue`. ``how`` are lines for
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
    """Several remedies at once, simulated together, because none suffices by itself, or only one
    that changes the training more.

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
    says why nothing could be tried. ``is_asked``: somebody wants to know of each; else they were
    tried because the job does not fit.
    """

    before: MemoryFigures | None
    batch_size: int | None
    largest_batch: int | None
    steps: int
    items: tuple[Remedy, ...]
    combination: Combination | None = None
    failure: str = ""
    is_asked: bool = False

    @property
    def won(self) -> tuple[Remedy, ...]:
        """The remedies that lower the job's memory by :data:`LEAST_GAIN` or more."""
        if self.before is None:
            return ()
        least = max(1, int(LEAST_GAIN * self.before.device_bytes))
        return tuple(remedy for remedy in self.items if (remedy.saved_bytes or 0) >= least)

    @property
    def faster(self) -> tuple[Remedy, ...]:
        """Remedies that shorten the step by :data:`LEAST_FASTER` or more, the fastest first."""
        remedies = [remedy for remedy in self.items if (remedy.step_change or 0.0) <= -LEAST_FASTER]
        return tuple(sorted(remedies, key=lambda each: each.step_change or 0.0))


# ---
# What a launch command consists of: each part with its reason and its evidence.


#: What becomes of a part: set to another value; the current value stays; it is left unset;
#: the user has to change the script, for the command cannot say it; nothing tells; or it is faster
#: but changes what is learned, so that the user has to choose it.
PartStatus = Literal["set", "kept", "not set", "by hand", "cannot tell", "option"]

#: How the reason of a part begins that would help a job that did not fit.
NOT_NEEDED: Final = "not needed: it fits"

#: Where it is written: before the command, as a program before the user's (taskset), as an
#: argument of the command, or in the script.
PartPlace = Literal["environment", "wrapper", "argument", "script"]


@dataclasses.dataclass(frozen=True)
class LaunchPart:
    """One parameter of a launch command.

    ``name`` is what the user would search for ("OMP_NUM_THREADS", "num_workers", "amp");
    ``value`` is the recommended one and ``present`` the user's, as they are written (empty: there
    is none; a variable that is "not set" and has a present value is to be removed). ``reason`` is
    one line. ``machine`` says which machine or GPU the evidence is from (empty: it is of none).
    Where ``status`` is "by hand" (or "option", of what the command cannot say), ``line`` is what to
    write ("num_workers=4"), ``call`` the call of which that is an argument ("DataLoader"; empty: it
    is a line of its own) and ``place`` where it stands ("train.py:41"; empty: not known).
    ``recommended`` is the value that would be set if the command had none of its own, which is
    kept (empty: it is the same); ``more`` what else there is to say than the reason;
    ``is_needless``: it would gain what the job does not need, as it fits without.
    """

    name: str
    status: PartStatus
    where: PartPlace
    reason: str
    value: str = ""
    present: str = ""
    evidence: Basis = ""
    machine: str = ""
    line: str = ""
    place: str = ""
    call: str = ""
    recommended: str = ""
    more: str = ""
    is_needless: bool = False


@dataclasses.dataclass(frozen=True)
class ScriptLine:
    """A place of a script with a value that no option of the command says: ``line`` at ``place``
    ("train.py:9") with "{}" for the value, an argument of ``call`` ("fit"; empty: it is a line of
    its own)."""

    place: str
    line: str
    call: str = ""


def changes_by_hand(parts: Sequence[LaunchPart]) -> list[tuple[str, str]]:
    """What the user has to change in the script: each place with what to write there, arguments
    of one call together."""
    calls: dict[tuple[str, str], list[str]] = {}
    for part in parts:
        if part.status == "by hand":
            calls.setdefault((part.place, part.call), []).append(part.line)
    return [
        (place, f"{call}(…, {', '.join(lines)})" if call else "; ".join(lines))
        for (place, call), lines in calls.items()
    ]


@dataclasses.dataclass(frozen=True)
class AllocatorTrial:
    """The launched job with the caching allocator as it is set, and with the other kind of segment.

    ``present`` is the setting in force, ``variable`` the variable of the environment that holds it.
    ``expandable``: that has expandable segments; then the other has not. Bytes are of reserved
    memory at its peak, at ``batch_size`` (``None``: not known); ``fits`` and ``other_fits`` say
    whether the job runs on the GPU.
    """

    variable: str
    present: str
    expandable: bool
    batch_size: int | None
    reserved_bytes: int
    other_reserved_bytes: int
    fits: bool
    other_fits: bool
