"""The kernels of one step, as columns."""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.kernels import KINDS
from trainfit.results.recording import IntArray, Recording

Floats = NDArray[np.float64]

#: What a kernel's time depends on, in the order of the columns of :attr:`Work.table`.
COLUMNS: Final = (
    "kind",
    "dtype",
    "flops",
    "read",
    "written",
    "rows",
    "columns",
    "depth",
    "batches",
    "launches",
)
CODES: Final = {name: code for code, name in enumerate(KINDS)}


@dataclasses.dataclass(frozen=True)
class Work:
    """Kernels in the order in which they were launched.

    ``table`` has a row a kernel and the columns of :data:`COLUMNS` (whole numbers; bytes, FLOPs,
    sizes); ``stream`` and ``op`` are each kernel's stream and operator, counted from the first
    of this work; ``op_phase`` the phase of every operator (index of ``recording.PHASES``).
    """

    table: IntArray
    stream: IntArray
    op: IntArray
    op_phase: IntArray

    @classmethod
    def of_step(cls, recording: Recording, step: int) -> Work:
        """What step ``step`` (from 0) launched; empty where the recording has no kernels."""
        ops = np.flatnonzero(recording.op_step == step)
        first, last = (int(ops[0]), int(ops[-1])) if len(ops) else (0, -1)
        mine = (recording.kernel_op >= first) & (recording.kernel_op <= last)
        table = np.stack([getattr(recording, f"kernel_{name}")[mine] for name in COLUMNS], axis=1)
        return cls(
            table,
            recording.kernel_stream[mine],
            recording.kernel_op[mine] - first,
            recording.op_phase[first : last + 1],
        )

    def part(self, first: int, last: int) -> Work:
        """The kernels from number ``first`` on and before ``last``."""
        part = slice(first, last)
        return dataclasses.replace(
            self, table=self.table[part], stream=self.stream[part], op=self.op[part]
        )

    def column(self, name: str) -> IntArray:
        """One column of :data:`COLUMNS`."""
        return self.table[:, COLUMNS.index(name)]

    def is_kind(self, *names: str) -> NDArray[np.bool_]:
        """Which rows are of one of these kinds."""
        return np.isin(self.column("kind"), [CODES[name] for name in names])
