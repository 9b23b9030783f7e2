"""Settings as the model sees them, on a machine, and the real runs of them."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

from trainfit.results.loader.probe import Fault
from trainfit.results.loader.settings import LoaderSettings

#: Cores that others keep busy on average, beyond those that idle, above which a run counts as
#: disturbed: its rate depends on both.
DISTURBED_CORES: Final = 0.25

#: Bytes of the checkpoint that is saved to measure the time of that: some 20 to 50 ms.
SAVE_BYTES: Final = 32 << 20


@dataclasses.dataclass(frozen=True)
class LoaderMachine:
    """What of the machine bounds a loader; ``None`` where it cannot be told."""

    usable_cores: float
    affinity: tuple[int, ...]
    physical_cores: int | None
    quota_cores: float | None
    core_speeds: tuple[float, ...]
    """Of the usable logical CPUs relative to the fastest, fastest first; a core's second thread
    counts with what it adds, so the first n add up to what n workers get."""
    available_bytes: int | None
    shm_free_bytes: int | None
    open_files: int | None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One setting as the model sees it; ``infeasible`` is why it cannot start, or empty.
    ``oversubscribed`` says why it is slower than so many workers promise, or is empty.

    ``batches_per_s`` is with the consumer, ``alone_batches_per_s`` what the loader would give
    to a step time of 0. ``save_s`` is what saving a checkpoint (``SAVE_BYTES``) would take
    while the workers go on.
    """

    settings: LoaderSettings
    batches_per_s: float
    waiting_share: float
    busy_cores: float
    ram_bytes: int | None = None
    shm_bytes: int | None = None
    infeasible: str = ""
    alone_batches_per_s: float | None = None
    save_s: float | None = None
    oversubscribed: str = ""


@dataclasses.dataclass(frozen=True)
class Confirmed:
    """A real run of the DataLoader, with the model's prediction before it.

    ``measured_batches_per_s`` and ``waiting_share`` are ``None`` where the run failed.
    ``context_switches_per_batch`` and ``private_bytes`` are of all workers together.
    ``core_speed`` is the cores' mean speed meanwhile, as a share of their full speed (``None``:
    not seen), at which the measured rate is given.
    """

    settings: LoaderSettings
    predicted_batches_per_s: float
    measured_batches_per_s: float | None
    waiting_share: float | None
    batches: int
    seconds: float
    context_switches_per_batch: float | None = None
    private_bytes: int | None = None
    fault: Fault | None = None
    core_speed: float | None = None
    save_s: float | None = None
    """What saving a checkpoint (``SAVE_BYTES``) took at its end, while the workers went on."""
    others_cores: float | None = None
    """Cores that other processes kept busy meanwhile, beyond those that idled; ``None``: not
    told."""
    tries: int = 1
    """Number of runs: repeated where other processes were busy; the least disturbed counts."""

    @property
    def is_disturbed(self) -> bool:
        """Does the rate tell as much of other processes as of these settings?"""
        return (self.others_cores or 0.0) > DISTURBED_CORES


@dataclasses.dataclass(frozen=True)
class Doubt:
    """Something from outside that bent what was measured.

    ``kind``: "others" (other processes kept ``cores`` busy, on average over ``runs``, beyond those
    that idled), "slowed" (the cores ran at ``speed`` of their full speed, from the lowest to the
    highest of ``runs``). ``summary`` says that in a line, and ``meaning`` what it means for the
    verdict; ``decides``: it leaves the verdict to the model.
    """

    kind: Literal["others", "slowed"]
    runs: tuple[str, ...]
    summary: str
    meaning: str
    cores: float | None = None
    speed: tuple[float, float] | None = None
    decides: bool = False
