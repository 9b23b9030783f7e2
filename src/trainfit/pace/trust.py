"""What makes a measurement doubtful, said in the result itself.

Thresholds are those of hyperfine (outliers), pyperf (deviation) and torch.utils.benchmark
(interquartile range).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from trainfit.pace.statistics import Sample, Values
from trainfit.results.pace import Block

#: Times of the median absolute deviation beyond which a call is an outlier (hyperfine), as
#: 0.6745 × (x - median) / MAD.
_OUTLIER: Final = 14.826
#: Calls that the percentiles need: p95 of fewer is their largest.
_FEW: Final = 20
#: Interquartile range by the median above which calls vary (torch.utils.benchmark).
_VARIES: Final = 0.25
#: Change of the median from the first third to the last.
_DRIFT: Final = 0.05
#: Cores that others keep busy on average; the first call, times a usual one.
_OTHERS: Final = 0.3
_FIRST: Final = 5.0


def warnings_of(sample: Sample, name: str) -> list[str]:
    """Of one rate's calls."""
    if not sample.count:
        return []
    values = np.concatenate(sample.wall)
    said = []
    if len(values) < _FEW:
        said.append(
            f"{name}: {len(values)} calls that do the work are few; a longer --duration says more"
        )
    outliers = _outliers(values)
    if outliers:
        said.append(
            f"{name}: {outliers} of {len(values)} calls are far beyond the others (up to "
            f"{1e3 * values.max():.3g} ms); something else ran meanwhile"
        )
    low, middle, high = np.percentile(values, (25, 50, 75))
    if middle > 0 and (high - low) / middle >= _VARIES:
        said.append(
            f"{name}: calls vary (half of them within {1e3 * low:.3g} to {1e3 * high:.3g} ms)"
        )
    drift = _drift(values)
    if abs(drift) >= _DRIFT:
        direction = "slower" if drift > 0 else "faster"
        said.append(
            f"{name}: calls became {abs(drift):.0%} {direction} while this was measured (heat, or "
            "another load)"
        )
    return said


def machine_warnings(
    blocks: Sequence[Block], first_call_s: float | None, usual_s: float | None
) -> list[str]:
    """Of the machine meanwhile."""
    said = []
    if first_call_s is not None and usual_s and first_call_s > _FIRST * usual_s:
        said.append(
            f"the very first call took {first_call_s:.3g} s; it is not counted, a robot has to "
            "make it before it moves"
        )
    others = [
        block.readings.others_cores for block in blocks if block.readings.others_cores is not None
    ]
    if others and float(np.mean(others)) > _OTHERS:
        said.append(f"other processes kept {np.mean(others):.1f} cores busy meanwhile")
    throttled = sum(block.readings.throttled or 0 for block in blocks)
    if throttled:
        said.append(f"the CPU was slowed for heat {throttled} times meanwhile")
    if any(block.readings.gpu_slowed for block in blocks):
        said.append("the GPU was slowed for heat or power meanwhile")
    return said


def _outliers(values: Values) -> int:
    middle = np.median(values)
    deviation = np.median(np.abs(values - middle))
    if not deviation:
        return 0
    return int((0.6745 * np.abs(values - middle) / deviation > _OUTLIER).sum())


def _drift(values: Values) -> float:
    third = len(values) // 3
    if third < _FEW:
        return 0.0
    first, last = np.median(values[:third]), np.median(values[-third:])
    return float(last / first - 1) if first > 0 else 0.0
