"""How far a simulated run has come, as its process tells the one that waits for it."""

from __future__ import annotations

import dataclasses

from trainfit.results.files.exchange import Exchanged

#: Its file, next to the run's outcome.
STATUS_FILE = "status.json"
#: What was recorded by the second step, or soon after it, there too.
EARLY_FILE = "early.trainfit"
#: The file, there too, that asks the process to end and to tell what it has by then.
INTERRUPT_FILE = "interrupt"


@dataclasses.dataclass(frozen=True)
class RunStatus(Exchanged):
    """A run after ``steps`` optimizer steps (or calls of a model that is not trained).

    It ends after ``least`` to ``most`` of them. ``seconds`` have passed since the script began,
    ``loading_s`` of them in its own DataLoader.
    """

    steps: int
    least: int
    most: int
    seconds: float
    loading_s: float

    @property
    def loading_share(self) -> float:
        """The share of the time that the script waited for its DataLoader, 0 to 1."""
        return min(self.loading_s / self.seconds, 1.0) if self.seconds > 0 else 0.0
