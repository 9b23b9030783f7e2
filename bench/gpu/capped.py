"""The largest batch under a limit: predicted by trainfit, then found out by running it."""

from __future__ import annotations

import dataclasses
import json
import sys
import uuid
from pathlib import Path
from typing import Any

from gpu.cases import Case
from gpu.children import environment, run

PREDICT = Path(__file__).resolve().parent / "predict.py"

#: Seconds for the two simulated runs that a prediction takes.
PREDICTION_S = 600.0


class CappedSearch:
    """Which batch to run next: the predicted one, the next one up, then whatever closes in.

    Each is tried once. The search ends when some batch ran and the next one up did not, or
    after ``most`` tries.
    """

    def __init__(self, predicted: int, most: int = 8) -> None:
        self.predicted = predicted
        self._most = most
        self.tries: list[tuple[int, str]] = []

    @property
    def largest_ran(self) -> int:
        return max((batch for batch, status in self.tries if status == "ran"), default=0)

    @property
    def smallest_full(self) -> int | None:
        full = [batch for batch, status in self.tries if status == "out_of_memory"]
        return min(full, default=None)

    @property
    def complete(self) -> bool:
        return self.smallest_full is not None and self.largest_ran + 1 >= self.smallest_full

    def next(self) -> int | None:
        """The batch to run next, ``None`` at the end."""
        if self.complete or len(self.tries) >= self._most:
            return None
        if any(status not in ("ran", "out_of_memory") for _, status in self.tries):
            return None
        low, high = self.largest_ran, self.smallest_full
        if not self.tries:
            return max(self.predicted, 1)
        if high is None:
            # Too careful a prediction: up, in steps that grow.
            return low + (1 if low <= self.predicted else max(1, low - self.predicted + low // 16))
        if low == 0 and self.tries[-1][0] == high:
            return max(1, min(high - 1, high - max(1, high // 16)))
        return (low + high) // 2

    def tell(self, batch: int, status: str) -> None:
        self.tries.append((batch, status))

    def result(self) -> dict[str, Any]:
        return {
            "predicted": self.predicted,
            "largest_ran": self.largest_ran,
            "smallest_full": self.smallest_full,
            "tries": [[batch, status] for batch, status in self.tries],
        }


def predict(case: Case, gpu: str | dict[str, Any], scratch: str) -> int | str:
    """The largest batch by trainfit, in a process of its own; a text says why there is none.

    ``gpu`` is what this machine's is (``children.ask_gpu``), or in a rehearsal a name.
    """
    request = Path(scratch) / f"predict-{uuid.uuid4().hex}.json"
    request.write_text(json.dumps({"case": dataclasses.asdict(case), "gpu": gpu}))
    # It must not touch the GPU, on which something else is being measured.
    env = {**environment(""), "CUDA_VISIBLE_DEVICES": ""}
    code, output, errors = run([sys.executable, str(PREDICT), str(request)], env, PREDICTION_S)
    lines = output.strip().splitlines()
    if code != 0 or not lines:
        reason = errors.strip().splitlines()[-1:] or [f"it ended with exit code {code}"]
        return f"no prediction: {reason[0]}"[:300]
    return int(json.loads(lines[-1])["largest"])
