"""Batches that differ in more than their number of samples: the batch that represents them."""

from __future__ import annotations

import dataclasses
from typing import Final

from trainfit.plan.runs.runs import Variant
from trainfit.plan.runs.tracing import Trace
from trainfit.results.runs.trace import SampleOverride, SampleScan

#: Samples whose elements differ by less than this share are alike: what makes the batches differ
#: in shape lies elsewhere.
_ALIKE: Final = 0.02
#: Where usual batches are nearly as long as the longest, runs with the longest time them, too.
_AS_LONG: Final = 0.1


@dataclasses.dataclass(frozen=True)
class VaryingShapes:
    """The samples that are simulated in the place of all: memory must hold a batch of the longest,
    throughput is that of the median, or of what usual batches are padded to. ``None`` where the
    data set's samples do not tell; ``reason`` says why."""

    scan: SampleScan
    longest: SampleOverride | None = None
    typical: SampleOverride | None = None
    reason: str = ""

    def sized(self, variant: Variant) -> Variant:
        """Runs for memory: each batch of the longest sample."""
        return dataclasses.replace(variant, sample=self.longest)

    def timed(self, variant: Variant) -> Variant:
        """Runs for step times: each batch of one sample that stands for all."""
        return dataclasses.replace(variant, sample=self.typical)


def varying_shapes(first: Trace) -> VaryingShapes | None:
    """Of a run as the command is written; ``None`` where all full batches have one shape."""
    loader = first.outcome.loader
    if loader is None or not loader.varies:
        return None
    scan = loader.scan or SampleScan(
        reason="the DataLoader no longer existed at the end of the run"
    )
    if scan.reason or loader.index is None:
        return VaryingShapes(scan, reason=scan.reason or "its DataLoader is not known")
    if scan.longest_elements - scan.typical_elements <= _ALIKE * scan.longest_elements:
        why = "its samples have one size: batches differ only after that"
        return VaryingShapes(scan, reason=why)
    longest = SampleOverride(loader.index, scan.longest)
    if scan.padded is not None:
        longest = dataclasses.replace(longest, padded=scan.typical)
    return VaryingShapes(scan, longest, _typical(scan, longest))


def _typical(scan: SampleScan, longest: SampleOverride) -> SampleOverride:
    """What stands for all batches in time; ``longest`` itself where it is about as long."""
    if scan.padded is None:
        return dataclasses.replace(longest, key=scan.typical)
    if scan.longest_elements - scan.padded_elements <= _AS_LONG * scan.longest_elements:
        return longest
    return dataclasses.replace(longest, key=scan.padded)
