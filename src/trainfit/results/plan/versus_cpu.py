"""A job's step on this machine's CPU, measured, compared with the prediction for a GPU."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Final, Literal

from trainfit.results.files.exchange import Exchanged
from trainfit.results.runs.trace import OwnFault, Status, Target

#: The first step allocates, and fills what PyTorch and libraries keep: it does not count.
WARM_UP: Final = 1


#: What is timed: optimizer steps, or calls of a model that is not trained.
Counts = Literal["steps", "calls"]


@dataclasses.dataclass(frozen=True)
class CpuRunRequest(Exchanged):
    """One run of a user's script on the CPU, for up to ``most_steps`` steps: the optimizer's, or
    calls of a model.

    It ends earlier once ``enough_s`` have passed since the first step, with ``least_steps`` at
    the least. ``outcome`` is the file to write. With ``stand_in`` the script is told that there
    is a GPU, and it runs on the CPU instead.
    """

    target: Target
    outcome: str
    least_steps: int
    most_steps: int
    enough_s: float
    time_limit_s: float = 600.0
    counts: Counts = "steps"
    stand_in: bool = False


@dataclasses.dataclass(frozen=True)
class CpuRunOutcome(Exchanged):
    """What became of it: the times from the end of a step to the end of the next, and for how
    long of each the script waited for its DataLoader, in seconds. ``threads`` are PyTorch's."""

    status: Status
    steps: int
    seconds: float
    message: str = ""
    traceback: str = ""
    location: str | None = None
    step_seconds: tuple[float, ...] = ()
    waited_s: tuple[float, ...] = ()
    threads: int | None = None
    own_fault: OwnFault | None = None


#: Which of the two is faster; "cannot tell" where either time is unknown or their ranges meet.
Faster = Literal["gpu", "cpu", "cannot tell"]


@dataclasses.dataclass(frozen=True)
class VersusCpu:
    """The same command on this machine's CPU, run for real.

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
        """Of the CPU's steps, the share in which the script waited for its DataLoader."""
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
