"""Times of a step, by micro-batch, accumulation and GPUs, as a user or a plan gives them."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any, Final, Literal

from trainfit.results.batch.noise import MOST_SAMPLES
from trainfit.results.files import documents
from trainfit.results.files.errors import ResultFileError

_REMEDY: Final = (
    "write CSV with a header such as micro_batch,accumulation,gpus,seconds (the two in the middle "
    "are 1 if left out)"
)
#: Spreadsheets begin CSV with it.
_BYTE_ORDER_MARK: Final = "\ufeff"
_NEEDED: Final = ("micro_batch", "seconds")
_COLUMNS: Final = ("micro_batch", "accumulation", "gpus", "seconds")

Basis = Literal["measured", "predicted", "derived"]
"""By a clock; by a speed model; from the time of one micro-batch, by accumulating."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """``seconds`` of an optimizer step of ``accumulation`` × ``micro_batch`` samples on each of
    ``gpus``."""

    micro_batch: int
    accumulation: int
    gpus: int
    seconds: float
    basis: Basis = "measured"

    def __post_init__(self) -> None:
        if min(self.micro_batch, self.accumulation, self.gpus) < 1:
            raise ValueError("micro_batch, accumulation and gpus must be at least 1")
        if self.batch_size > MOST_SAMPLES:
            raise ValueError(f"a step has at most {MOST_SAMPLES:,} samples")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"a step of {self.seconds} s")

    @property
    def batch_size(self) -> int:
        """Samples of the step."""
        return self.micro_batch * self.accumulation * self.gpus

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.batch_size / self.seconds


def read(path: Path) -> tuple[StepTime, ...]:
    """A table of step times: CSV; or a plan's result, with the steps that it predicts.

    Raises :class:`ResultFileError`: missing, no table, a value that is no positive number.
    """
    text = documents.read(path, _REMEDY).removeprefix(_BYTE_ORDER_MARK)
    if text.lstrip().startswith("{"):
        return _of_plan(text, path)
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    names = [name.strip() for name in rows.fieldnames or ()]
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise ResultFileError(path, f"it has no column {missing[0]!r}", _REMEDY)
    if len(set(names)) < len(names):
        raise ResultFileError(path, "two of its columns have one name", _REMEDY)
    unknown = [name for name in names if name not in _COLUMNS]
    if unknown:
        raise ResultFileError(path, f"the column {unknown[0]!r} is not known", _REMEDY)
    rows.fieldnames = names
    found = [_row(row, number, path) for number, row in enumerate(rows, 2)]
    if not found:
        raise ResultFileError(path, "it has no row", _REMEDY)
    keys = [(each.micro_batch, each.accumulation, each.gpus) for each in found]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ResultFileError(path, f"micro_batch {twice[0]} appears twice", "keep one row")
    return tuple(found)


def _row(row: dict[str | None, Any], number: int, path: Path) -> StepTime:
    try:
        if None in row:
            raise ValueError("more values than columns")
        return StepTime(
            int(row["micro_batch"]),
            int(row.get("accumulation") or 1),
            int(row.get("gpus") or 1),
            float(row["seconds"]),
        )
    except (TypeError, ValueError) as error:
        reason = f"line {number} is not a row of positive numbers ({error})"
        raise ResultFileError(path, reason, _REMEDY) from error


def _of_plan(text: str, path: Path) -> tuple[StepTime, ...]:
    """The throughput curve of a plan, on one GPU: a step has as many micro-batches as the script
    accumulates."""
    try:
        steps = json.loads(text)["speed"]["curve"]
        found = [
            StepTime(
                int(step["batch_size"]),
                max(1, round(step["samples_per_s"] * step["seconds"] / step["batch_size"])),
                1,
                float(step["seconds"]),
                "predicted",
            )
            for step in steps
            if step["batch_size"] and step["samples_per_s"]
        ]
    except (KeyError, TypeError, ValueError):
        found = []
    if not found:
        raise ResultFileError(path, "it has no step times by batch size", _REMEDY)
    return tuple(found)
