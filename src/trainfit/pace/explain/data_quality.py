"""Warnings about a measurement's quality, for the result itself.

Thresholds are those of hyperfine (outliers), pyperf (deviation) and torch.utils.benchmark
(interquartile range).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from trainfit.pace.explain.statistics import Sample, Values
from trainfit.results.format import core_count, count, duration, percent
from trainfit.results.machine.pace import Block

#: Times of the median absolute deviation beyond which a call is an outlier (hyperfine), as
#: 0.6745 × (x - median) / MAD.
_OUTLIER: Final = 14.826
#: Calls that the percentiles need: p95 of fewer is their largest.
FEW: Final = 20
#: Interquartile range by the median above which calls vary (torch.utils.benchmark).
_VARIES: Final = 0.25
#: Change of the median from the first third to the last.
_DRIFT: Final = 0.05
#: Cores that others keep busy on average; the first call, times a usual one.
_OTHERS: Final = 0.3
_FIRST: Final = 5.0


def warnings_of(sample: Sample, name: str, enough_s: float | None = None) -> list[str]:
    """Of one rate's calls; ``enough_s`` is the ``--duration`` that gives :data:`FEW` of them
    (``None``: a user's own loop)."""
    if not sample.count:
        return []
    values = np.concatenate(sample.wall)
    said = []
    if len(values) < FEW:
        more = f"{FEW} are needed"
        if enough_s is not None:
            more = f"--duration {math.ceil(enough_s)} gives about {FEW}"
        said.append(f"{name}: {count(len(values), 'call')} with work: too few for p95; {more}")
    outliers = _outliers(values)
    if outliers and len(values) >= FEW:
        said.append(
            f"{name}: {outliers} of {len(values)} calls are outliers (up to "
            f"{duration(values.max())}); other work ran at the same time"
        )
    low, middle, high = np.percentile(values, (25, 50, 75))
    if middle > 0 and (high - low) / middle >= _VARIES:
        said.append(f"{name}: calls vary (half of them within {duration(low)} to {duration(high)})")
    drift = _drift(values)
    if abs(drift) >= _DRIFT:
        direction = "slower" if drift > 0 else "faster"
        said.append(
            f"{name}: calls became {percent(abs(drift))} {direction} during the measurement "
            "(heat, or another load)"
        )
    return said


def machine_warnings(
    blocks: Sequence[Block], first_call_s: float | None, usual_s: float | None
) -> list[str]:
    """Of the machine meanwhile."""
    said = []
    if first_call_s is not None and usual_s and first_call_s > _FIRST * usual_s:
        said.append(
            f"the first call took {duration(first_call_s)}; it is not counted; a robot "
            "must make it before it moves"
        )
    others = [
        block.readings.others_cores for block in blocks if block.readings.others_cores is not None
    ]
    if others and float(np.mean(others)) > _OTHERS:
        said.append(
            f"other processes used {core_count(float(np.mean(others)))} during the measurement"
        )
    throttled = sum(block.readings.throttled or 0 for block in blocks)
    if throttled:
        said.append(f"the CPU throttled {throttled} times for heat during the measurement")
    if any(block.readings.gpu_slowed for block in blocks):
        said.append("the GPU throttled for heat or power during the measurement")
    return said


def _outliers(values: Values) -> int:
    middle = np.median(values)
    deviation = np.median(np.abs(values - middle))
    if not deviation:
        return 0
    return int((0.6745 * np.abs(values - middle) / deviation > _OUTLIER).sum())


def _drift(values: Values) -> float:
    third = len(values) // 3
    if third < FEW:
        return 0.0
    first, last = np.median(values[:third]), np.median(values[-third:])
    return float(last / first - 1) if first > 0 else 0.0
