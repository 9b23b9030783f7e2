"""What ``trainfit rehearse`` saw: a script's DataLoader against a GPU step of given length.

Times are seconds from the first ``iter(loader)``; rates are of one DataLoader. ``None`` is not
measured (or cannot be told), 0 is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from trainfit.results.dataloader import DISTURBED_CORES, LoaderSettings
from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.findings import Finding
from trainfit.results.runs.script import Protection

#: Why the GPU is idle.
#: "start_up": until the first batch; "warm_up": until the queues are full for the first time;
#: "epoch": from an epoch's last step until the next epoch's queues are full;
#: "starving": batches are made slower than they are used, all the time;
#: "main_process": there are no workers, each batch is made while the GPU waits;
#: "slow_batch": a batch came late, while they come in time as a rule;
#: "transfer": the time of ``next`` for a batch that is ready;
#: "end": after the last step (the loader failed, or had no batch left).
Cause = Literal[
    "start_up",
    "warm_up",
    "epoch",
    "starving",
    "main_process",
    "slow_batch",
    "transfer",
    "end",
]


@dataclasses.dataclass(frozen=True)
class UtilisationTimeline:
    """Utilisation over time, as nvidia-smi reads it.

    ``busy_shares`` are the shares of consecutive windows of ``window_s`` in which a step ran;
    the last window ends with the rehearsal and may be shorter.
    """

    window_s: float
    busy_shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.window_s <= 0:
            raise ValueError(f"expected a window longer than 0 s, got {self.window_s}")


@dataclasses.dataclass(frozen=True)
class RehearsedRates:
    """Rates of a part of the rehearsal.

    ``busy_share`` is the mean utilisation, ``waiting_share`` what of the time the loop spent in
    ``next``. ``samples_per_s`` is ``None`` where the batch size is not known.
    """

    from_s: float
    seconds: float
    batches: int
    busy_share: float
    waiting_share: float
    batches_per_s: float
    samples_per_s: float | None


@dataclasses.dataclass(frozen=True)
class Dip:
    """A time in which the GPU was less busy than it could be; ``idle_s`` of it by this cause.

    ``first_batch`` and ``batches`` are what was waited for (counted from 0 over all epochs).
    ``what`` says in words what was seen.
    """

    cause: Cause
    start_s: float
    end_s: float
    idle_s: float
    first_batch: int
    batches: int
    what: str = ""


@dataclasses.dataclass(frozen=True)
class RehearsedEpoch:
    """One pass of the loader, from its ``iter`` to the next; ``complete``: until it ended.

    ``first_batch_s`` is what passed until its first batch (``None``: there was none).
    """

    start_s: float
    seconds: float
    batches: int
    complete: bool
    first_batch_s: float | None


@dataclasses.dataclass(frozen=True)
class Predicted:
    """What the loader's model said before the rehearsal, of the time after the start."""

    batches_per_s: float
    waiting_share: float


@dataclasses.dataclass(frozen=True)
class Rehearsal(ResultFile):
    """What ``trainfit rehearse`` saw.

    ``step_s`` is the step of the simulated GPU and ``step_source`` where it is from. ``overall``
    is the whole rehearsal, ``steady`` what comes after the queues were full for the first time
    (``None``: it was too short to tell). ``idle_s`` divides the idle time of the whole
    rehearsal by cause; ``dips`` are the largest, in order of time. ``epochs`` are the first
    ones, ``epochs_begun`` counts all. ``epoch_s`` is the time of an epoch: measured if
    ``epoch_measured``, else from the steady rate. ``ended``: "duration" (all of it was
    rehearsed), "fault" (the loader failed), "interrupted" (by the user), "empty" (it gave no
    batch).
    """

    FILE: ClassVar = Format.of("trainfit-rehearsal", "trainfit rehearse --output")
    METRICS: ClassVar = {
        "step_ms": "step of the simulated GPU",
        "loader_batches_per_s": "batches a second, after the queues were full for the first time",
        "samples_per_s": "samples a second, likewise",
        "gpu_utilization_share": "GPU utilization, likewise",
        "waiting_for_batches_share": "share of the time that the loop waits, likewise",
        "epoch_s": "time of an epoch: measured, else from the steady rate",
    }

    command: str
    loader: str
    batch_size: int | None
    epoch_batches: int | None
    settings: LoaderSettings
    settings_source: str
    step_s: float
    step_source: str
    ended: Literal["duration", "fault", "interrupted", "empty"]
    duration_s: float
    overall: RehearsedRates | None
    steady: RehearsedRates | None
    timeline: UtilisationTimeline
    idle_s: Mapping[str, float]
    dips: tuple[Dip, ...]
    epochs: tuple[RehearsedEpoch, ...]
    epochs_begun: int
    epoch_s: float | None
    epoch_measured: bool
    predicted: Predicted | None = None
    fault: Finding | None = None
    notes: tuple[str, ...] = ()
    torch: str = ""
    step_is_bound: bool = False
    """The step's time is the least that it can be, not what it is."""
    protection: Protection | None = None
    """What kept the script from changing files (``None``: not told)."""
    others_cores: float | None = None
    """Cores that other processes kept busy meanwhile, beyond those that idled; ``None``: not
    told."""
    others: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The busiest of them by name, with the cores that each kept busy."""

    @property
    def is_disturbed(self) -> bool:
        """Do the rates tell as much of other processes as of the DataLoader?"""
        return (self.others_cores or 0.0) > DISTURBED_CORES

    def quantities(self) -> Mapping[str, float | None]:
        """Quantities of :class:`Metered`; nothing but the step where it was too short to be
        steady."""
        steady = self.steady
        return {
            "step_ms": self.step_s,
            "loader_batches_per_s": steady.batches_per_s if steady else None,
            "samples_per_s": steady.samples_per_s if steady else None,
            "gpu_utilization_share": steady.busy_share if steady else None,
            "waiting_for_batches_share": steady.waiting_share if steady else None,
            "epoch_s": self.epoch_s,
        }
