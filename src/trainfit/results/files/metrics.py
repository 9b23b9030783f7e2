"""The numbers of a result under stable names, for experiment trackers and for conditions.

A key ends with its unit, which `Kind.METRICS` (by key: what it is) thus declares:

    step_ms             a time, in milliseconds (epoch_s: in seconds)
    device_gib          bytes, in GiB
    samples_per_s       a rate; loader_batches_per_s, reached_hz
    mfu_share           a share, from 0 to 1
    largest_batch       a count
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from trainfit.results.format import GIB

#: What all keys of the flat form begin with.
PREFIX: Final = "trainfit/"

MetricUnit = Literal["s", "bytes", "1/s", "share", "count"]


@dataclasses.dataclass(frozen=True)
class MetricName:
    """``short`` is how conditions name it ("step", "samples/s"); a value in ``unit`` times
    ``scale`` is in that of the key."""

    key: str
    short: str
    unit: MetricUnit
    scale: float = 1.0


#: By the end of the key, a longer one first: what replaces it in the short name, unit and scale.
_ENDS: Final[tuple[tuple[str, str, MetricUnit, float], ...]] = (
    ("_batches_per_s", "", "1/s", 1.0),
    ("_per_s", "/s", "1/s", 1.0),
    ("_share", "", "share", 1.0),
    ("_gib", "", "bytes", 1 / GIB),
    ("_ms", "", "s", 1e3),
    ("_hz", "", "1/s", 1.0),
    ("_s", "", "s", 1.0),
)


def metric(key: str) -> MetricName:
    """What a key says of itself."""
    for end, short, unit, scale in _ENDS:
        if key.endswith(end):
            return MetricName(key, key.removesuffix(end) + short, unit, scale)
    return MetricName(key, key, "count")


class Metered:
    """Has numbers under stable names."""

    METRICS: ClassVar[Mapping[str, str]] = {}
    """By key: what it is. No key is renamed, nor its unit changed."""

    def quantities(self) -> Mapping[str, float | None]:
        """The values by the keys of ``METRICS``, in seconds, bytes, shares and counts; ``None``:
        neither measured nor predicted."""
        return {}

    def metrics(self) -> dict[str, float]:
        """A flat dict of numbers for a tracker: {"trainfit/step_ms": 12.3, …}.

        What was neither measured nor predicted is left out. Empty for a kind of result that has no
        such numbers.
        """
        return {
            PREFIX + key: value if (scale := metric(key).scale) == 1 else value * scale
            for key, value in self.quantities().items()
            if value is not None and math.isfinite(value)
        }
