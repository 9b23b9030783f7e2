"""What ``trainfit gpus --for`` answers: a job on each of several GPUs.

Bytes, seconds, samples; ``None`` is not known. Prices are in the user's currency.

Format history
    1   first version
    2   what an optimizer step consists of
    3   the format's name (was "trainfit-offers"), "gpus" (was "offers"), "at_saturation" of a GPU
        (was "enough")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.files.upgrades import Upgrade, rename_key
from trainfit.results.plan.speed import StepSpeed
from trainfit.results.runs.steps import StepMakeup

FORMAT: Final = "trainfit-gpu-comparison"
_FORMER_NAMES: Final = ("trainfit-offers",)
VERSION: Final = 3

_REMAKE: Final = "re-create it with `trainfit gpus --for RESULT --json`"
_WANTED: Final = "give a file that `trainfit gpus --for RESULT --json` wrote"


def _upgrade_terms(document: dict[str, Any]) -> None:
    rename_key(document, "", "offers", "gpus")
    rename_key(document, "gpus", "enough", "at_saturation")


_UPGRADES: Final[Mapping[int, Upgrade]] = {2: _upgrade_terms}


@dataclasses.dataclass(frozen=True)
class Effect:
    """What a tenth more of one figure of a GPU changes for the job.

    ``value`` is written for people, with its unit. ``step_change`` is that of the step's time
    (-0.04: 4% shorter), ``largest_batch`` the one that would fit then; ``None``: not known, or
    no matter of it.
    """

    figure: str
    value: str
    step_change: float | None = None
    largest_batch: int | None = None


@dataclasses.dataclass(frozen=True)
class GpuEstimate:
    """The job on one GPU.

    ``device_bytes`` is the device memory of the unchanged job, ``fits`` says whether that fits.
    ``largest_batch`` is 0 where one sample does not fit, and about right where it is not exact.
    ``now`` is the step as the job is,
    ``at_saturation`` that at the smallest batch size with nearly the best throughput of those
    that fit. What follows is of the whole run: at the job's own batch size where that fits, else
    at ``at_saturation`` (``run_batch``). ``power_w`` is the board's limit as sold.
    """

    gpu: str
    capability: tuple[int, int]
    laptop: bool
    shared_memory: bool
    memory_bytes: int
    power_w: float | None
    device_bytes: int
    fits: bool
    largest_batch: int | None = None
    now: StepSpeed | None = None
    at_saturation: StepSpeed | None = None
    run_batch: int | None = None
    samples_per_s: float | None = None
    samples_per_joule: float | None = None
    run_s: float | None = None
    price_per_hour: float | None = None
    samples_per_unit: float | None = None
    cost: float | None = None
    notes: tuple[str, ...] = ()
    effects: tuple[Effect, ...] = ()
    largest_is_exact: bool = True

    @property
    def runs(self) -> bool:
        """Does it fit, with the job's batch size or another?"""
        return self.fits or bool(self.largest_batch)


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A step that the user measured: ``factor`` times the prediction for it."""

    gpu: str
    seconds: float
    factor: float


@dataclasses.dataclass(frozen=True)
class GpuComparison(ResultFile):
    """A job on GPUs, the best first: what fits, by the cost of the run where it is known, else by
    its time.

    ``samples`` are the whole run's (``None``: not known). ``cheapest`` and ``fastest`` are keys
    of GPUs that the job fits and, with a ``budget``, whose run costs no more. ``step`` is what an
    optimizer step consists of.
    """

    FILE: ClassVar = Format(
        FORMAT, VERSION, _REMAKE, _WANTED, upgrades=_UPGRADES, former_names=_FORMER_NAMES
    )

    job: str
    batch_size: int | None
    samples: int | None
    gpus: tuple[GpuEstimate, ...]
    currency: str = ""
    budget: float | None = None
    cheapest: str | None = None
    fastest: str | None = None
    anchor: Anchor | None = None
    constants: str = ""
    notes: tuple[str, ...] = ()
    step: StepMakeup | None = None

    @property
    def fits(self) -> bool:
        """Does the job fit any of them?"""
        return any(estimate.runs for estimate in self.gpus)
