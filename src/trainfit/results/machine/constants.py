"""Memory of a process on a GPU outside PyTorch's allocator, by cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Final, Literal

Library = Literal["cublas", "cudnn_forward", "cudnn_backward", "sdpa", "kernels"]

#: What adds to a fresh process's context when it is first used, in the order in which
#: ``trainfit calibrate`` measures: matmuls, convolutions and recurrent networks and
#: their gradients, fused attention, and the kernels of many operators (lazy module loading).
LIBRARIES: Final[tuple[Library, ...]] = (
    "cublas",
    "cudnn_forward",
    "cudnn_backward",
    "sdpa",
    "kernels",
)

#: The name of the part that every process has.
CONTEXT: Final = "context"

#: Where a figure is from: this GPU, a publication, worked out from one, a rule, or the
#: simulated device (a rehearsal, which measured what the simulation was told).
Basis = Literal["measured", "published", "derived", "assumed", "simulated"]


@dataclasses.dataclass(frozen=True)
class Constant:
    """Device memory of one cause, in bytes, with the range in which it is taken to lie.

    ``name`` is :data:`CONTEXT` or one of :data:`LIBRARIES`. ``source`` says in words where
    the figure is from.
    """

    name: str
    value_bytes: int
    low_bytes: int
    high_bytes: int
    basis: Basis
    source: str

    def __post_init__(self) -> None:
        if not 0 <= self.low_bytes <= self.value_bytes <= self.high_bytes:
            raise ValueError(f"{self.name} is not between its own limits")


@dataclasses.dataclass(frozen=True)
class DeviceConstants:
    """Memory of a process on one GPU in addition to reserved memory.

    ``parts`` are the context and each library's addition. ``other_processes_bytes`` is what
    others hold of the GPU. ``profile`` names the calibration profile in use, "" without one;
    ``notes`` is what a result has to say of it, ``torch`` the version that it was made with.
    """

    parts: tuple[Constant, ...]
    other_processes_bytes: int = 0
    profile: str = ""
    notes: tuple[str, ...] = ()
    torch: str = ""

    def __post_init__(self) -> None:
        if [part.name for part in self.parts] != [CONTEXT, *LIBRARIES]:
            raise ValueError("expected the context and each library exactly once")
        if self.other_processes_bytes < 0:
            raise ValueError("the memory of other processes is negative")

    def used(self, libraries: Collection[str]) -> tuple[Constant, ...]:
        """The context, and what the ``libraries`` that a job uses add to it."""
        return tuple(p for p in self.parts if p.name == CONTEXT or p.name in libraries)


def total(parts: Iterable[Constant]) -> tuple[int, int, int]:
    """Bytes of all parts together: expected, least, most.

    The limits are added up: the parts of one GPU err the same way, not independently.
    """
    listed = tuple(parts)
    return (
        sum(part.value_bytes for part in listed),
        sum(part.low_bytes for part in listed),
        sum(part.high_bytes for part in listed),
    )
