"""The figures of GPU memory that every result gives, and how far to trust them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from trainfit.results.machine.constants import Constant

#: Share of measured jobs whose device memory lay within the predicted range, and above it
#: (bench/memory_accuracy.py, models that the margins were not derived from; most of those
#: above were sampled while cudnn.benchmark tried an algorithm).
RANGE_COVERAGE: Final = 0.90
RANGE_EXCEEDED: Final = 0.07

#: Of :meth:`MemoryFigures.quantities`.
METRICS: Final[Mapping[str, str]] = {
    "allocated_gib": "peak of torch.cuda.max_memory_allocated",
    "reserved_gib": "peak of torch.cuda.max_memory_reserved",
    "device_gib": "device memory of the process, as nvidia-smi shows it",
    "device_high_gib": "the same, upper bound of the 90% prediction interval",
}


@dataclasses.dataclass(frozen=True)
class MemoryFigures:
    """The three quantities of GPU memory, in bytes.

    ``allocated`` is torch.cuda.max_memory_allocated, ``reserved`` max_memory_reserved, and
    ``device`` what nvidia-smi shows for the process: reserved + ``context``, which is
    taken to lie in ``context_range``. ``context_parts`` are what it consists of: the bare
    context and what the libraries add that the job uses.

    A ``range`` is the 90% prediction interval (:mod:`trainfit.memory.stream.interval`); ``None``
    in files of earlier versions.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    context_bytes: int
    context_range_bytes: tuple[int, int]
    context_parts: tuple[Constant, ...] = ()
    allocated_range_bytes: tuple[int, int] | None = None
    reserved_range_bytes: tuple[int, int] | None = None
    device_range_bytes: tuple[int, int] | None = None

    def quantities(self) -> Mapping[str, float | None]:
        """Bytes by the keys of :data:`METRICS`."""
        device = self.device_range_bytes
        return {
            "allocated_gib": self.allocated_bytes,
            "reserved_gib": self.reserved_bytes,
            "device_gib": self.device_bytes,
            "device_high_gib": device[1] if device is not None else None,
        }
