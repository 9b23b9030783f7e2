"""How far a simulated run has come, as its process tells the one that waits for it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from trainfit.results.files.decoding import decode
from trainfit.results.files.exchange import as_json, write_whole

#: Its file, next to the run's outcome.
STATUS_FILE = "status.json"


@dataclasses.dataclass(frozen=True)
class RunStatus:
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

    def save(self, path: Path) -> None:
        """Write it; the file appears whole or not at all."""
        write_whole(path, as_json(self))

    @classmethod
    def load(cls, path: Path) -> RunStatus:
        """Raises ``OSError`` where there is none yet."""
        return decode(cls, json.loads(path.read_text()))
