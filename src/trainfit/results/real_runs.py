"""Real runs of a planned command: compared with its prediction, and on this machine's CPU.

All memory figures are bytes. ``None`` means not known; 0 is a figure.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.runs.measurement import GpuEnvironment
from trainfit.results.runs.script import Protection
from trainfit.results.runs.trace import ScriptOutcome

#: Quantities of memory that are compared.
_COMPARED: Final = ("allocated", "reserved", "device")

#: The note of a verification without a GPU.
REHEARSED: Final = "a rehearsal on the simulated GPU: nothing was measured"


@dataclasses.dataclass(frozen=True)
class RealRunOutcome(ScriptOutcome):
    """What a real run measured.

    ``allocated_bytes`` and ``reserved_bytes`` are peaks. ``outside_bytes`` was held at the
    end by all processes outside of this one's allocator, ``process_bytes`` is what NVML
    showed for this process in addition to its reserved memory (``None``: it does not know it).
    ``step_seconds`` are the times from the end of a step to the end of the next, on the
    device.
    """

    device: GpuEnvironment | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    outside_bytes: int | None = None
    process_bytes: int | None = None
    step_seconds: tuple[float, ...] = ()
    protection: Protection | None = None
    """What kept the script from changing files (``None``: not told)."""


@dataclasses.dataclass(frozen=True)
class ComparedQuantity:
    """One quantity: predicted, with the range that was stated, and measured, in bytes."""

    predicted_bytes: int
    low_bytes: int
    high_bytes: int
    measured_bytes: int | None

    @property
    def within(self) -> bool | None:
        """Does the measured figure lie in the range? ``None`` if it is not known."""
        if self.measured_bytes is None:
            return None
        return self.low_bytes <= self.measured_bytes <= self.high_bytes


@dataclasses.dataclass(frozen=True)
class Verification(ResultFile):
    """``trainfit verify``: the result of a prediction and a run.

    ``compared`` has "allocated", "reserved" and "device"; it is empty where the run did not
    come to its first step for lack of memory. ``fits_predicted`` and ``fits_measured`` say
    whether the command runs on the GPU. ``step_seconds`` are measured times of steps without
    the first ones, waiting for batches included; ``predicted_step_s`` and its 90% interval
    ``predicted_step_range_s`` are without it (``None``: a recording, which predicts none). They do
    not decide :attr:`good`.
    """

    FILE: ClassVar = Format.of("trainfit-verification", "trainfit verify --json")
    METRICS: ClassVar = {
        **{f"{name}_gib": f"{name} memory, measured" for name in _COMPARED},
        **{f"{name}_error_share": f"error of the predicted {name} memory" for name in _COMPARED},
        "step_ms": "median step, measured",
        "step_error_share": "error of the predicted step time",
    }

    file: str
    command: str
    gpu_predicted: str
    gpu_measured: str
    steps: int
    range_basis: str
    compared: Mapping[str, ComparedQuantity]
    fits_predicted: bool
    fits_measured: bool
    step_seconds: tuple[float, ...]
    notes: tuple[str, ...]
    environment: Mapping[str, str]
    protection: Protection | None = None
    """What kept the script from changing files (``None``: not told)."""
    predicted_step_s: float | None = None
    predicted_step_range_s: tuple[float, float] | None = None

    @property
    def good(self) -> bool:
        """Is everything that was measured within what was stated?"""
        if self.fits_predicted is not self.fits_measured:
            return False
        return all(quantity.within is not False for quantity in self.compared.values())

    def quantities(self) -> Mapping[str, float | None]:
        """Quantities of :class:`Metered`; nothing where the run was a rehearsal on the simulated
        GPU."""
        if REHEARSED in self.notes:
            return {}
        found: dict[str, float | None] = {}
        for name in _COMPARED:
            each = self.compared.get(name)
            real = each.measured_bytes if each is not None else None
            found[f"{name}_gib"] = real
            error = abs(each.predicted_bytes / real - 1) if each is not None and real else None
            found[f"{name}_error_share"] = error
        step = statistics.median(self.step_seconds) if self.step_seconds else None
        predicted = self.predicted_step_s
        error = abs(predicted / step - 1) if step and predicted is not None else None
        return {**found, "step_ms": step, "step_error_share": error}


# ---
# A job's step on this machine's CPU, measured, compared with the prediction for a GPU.


#: The first step allocates, and fills what PyTorch and libraries keep: it does not count.
WARM_UP: Final = 1


#: What is timed: optimizer steps, or calls of a model that is not trained.
Counts = Literal["steps", "calls"]


@dataclasses.dataclass(frozen=True)
class CpuRunOutcome(ScriptOutcome):
    """What became of it: the times from the end of a step to the end of the next, and for how
    long of each the script waited for its DataLoader, in seconds. ``threads`` are PyTorch's."""

    step_seconds: tuple[float, ...] = ()
    waited_s: tuple[float, ...] = ()
    threads: int | None = None


#: Which of the two is faster; "cannot tell" where either time is unknown or their ranges meet.
Faster = Literal["gpu", "cpu", "cannot tell"]


@dataclasses.dataclass(frozen=True)
class VersusCpu:
    """A real run of the command on this machine's CPU.

    ``command`` is what was run, ``step_seconds`` are its steps without the first, of which
    ``waited_s`` went to waiting for the DataLoader; ``threads`` are PyTorch's, ``cores`` what this
    machine gives a job. ``gpu_range_s`` is the predicted step on the GPU. With ``counts`` "calls"
    steps are calls of the model. ``stand_in``: the script asks for a GPU by name, and the CPU
    took its place. ``why`` says why nothing was measured, with the remedy ("": it was).
    """

    command: str
    batch_size: int | None
    step_seconds: tuple[float, ...] = ()
    waited_s: tuple[float, ...] = ()
    threads: int | None = None
    cores: float | None = None
    gpu_range_s: tuple[float, float] | None = None
    why: str = ""
    counts: Counts = "steps"
    stand_in: bool = False

    @property
    def step_s(self) -> float | None:
        """The median step on the CPU."""
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def waiting_share(self) -> float | None:
        """The share of the CPU's steps in which the script waited for its DataLoader (0 to 1)."""
        total = sum(self.step_seconds)
        return min(1.0, sum(self.waited_s) / total) if total > 0 else None

    @property
    def ratio_range(self) -> tuple[float, float] | None:
        """How many times as fast the GPU is, from and to; ``None`` where a time is unknown."""
        if not self.step_seconds or self.gpu_range_s is None or self.gpu_range_s[0] <= 0:
            return None
        low, high = self.gpu_range_s
        return min(self.step_seconds) / high, max(self.step_seconds) / low

    @property
    def faster(self) -> Faster:
        found = self.ratio_range
        if found is None or found[0] <= 1 <= found[1]:
            return "cannot tell"
        return "gpu" if found[0] > 1 else "cpu"
