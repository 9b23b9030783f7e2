"""CPU time of dispatching operators and launching kernels.

PyTorch in eager mode spends some microseconds of one core on every operator: Python, autograd's
bookkeeping, the dispatcher, and the library's own set-up of a kernel. These times fall with the
core's clock and its work a clock, so they are given for one core and scaled by how fast another
is.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.runs.kernels import KINDS
from trainfit.results.runs.recording import PHASES
from trainfit.speed.model.work import Floats, Work

#: The clock of the core that the costs below are given for (Hz).
REFERENCE_HZ: Final = 3.0e9
#: What an operator takes that core in :mod:`trainfit.speed.dispatch_probe` (s): 2.79 to 2.85 us in
#: six runs on a virtual core of an AMD EPYC with torch 2.13, which is taken for one of 3 GHz (its
#: clock is not told).
REFERENCE_OPERATOR_S: Final = 2.8e-6


@dataclasses.dataclass(frozen=True)
class HostCosts:
    """Seconds of one core at :data:`REFERENCE_HZ`; assumed, nothing of it was measured by us.

    Published overheads of eager PyTorch are 5 to 25 us an operator, of which 1 to 3 us are the
    driver's launch and 1 to 5 us a library's choice of a kernel.

    ``operator_s`` is an operator's by phase; ``library_s`` what a kernel of cuBLAS or cuDNN takes
    in addition (choosing an algorithm, descriptors), ``launch_s`` any kernel's launch.
    """

    forward_s: float = 8e-6
    backward_s: float = 6e-6
    optimizer_s: float = 8e-6
    library_s: float = 8e-6
    launch_s: float = 2.5e-6


_LIBRARY: Final = tuple(
    name
    for name in KINDS
    if name.startswith(
        ("matmul", "convolution", "normalization", "batch_norm", "attention", "recurrent")
    )
)


def _in_graphs(work: Work) -> NDArray[np.bool_]:
    """Which rows are launched by a graph's launch."""
    starts = np.flatnonzero(work.is_kind("graph"))
    changes = np.zeros(len(work.table) + 1, dtype=np.int64)
    np.add.at(changes, starts + 1, 1)
    ends = np.minimum(starts + 1 + work.column("rows")[starts], len(work.table))
    np.add.at(changes, ends, -1)
    covered: NDArray[np.bool_] = np.cumsum(changes[:-1]) > 0
    return covered


def issue_seconds(work: Work, costs: HostCosts, speed: float = 1.0) -> tuple[Floats, Floats]:
    """When each kernel is launched, and when each operator is done, from the step's begin if the
    CPU never waits.

    ``speed`` is the core's, as a multiple of the reference's.
    """
    by_phase = np.full(len(PHASES), costs.forward_s)
    by_phase[PHASES.index("backward")] = costs.backward_s
    by_phase[PHASES.index("optimizer")] = costs.optimizer_s
    of_operators = by_phase[work.op_phase]
    launches = work.column("launches") * costs.launch_s
    launches = launches + np.where(work.is_kind(*_LIBRARY), costs.library_s, 0.0)
    launches = np.where(_in_graphs(work), 0.0, launches)
    of_kernels = np.bincount(work.op, weights=launches, minlength=len(of_operators))
    done = np.cumsum(of_operators + of_kernels)
    # A kernel is launched when its operator has been dispatched, after the kernels before it.
    before = np.cumsum(launches)
    dispatched = np.cumsum(of_operators)[work.op]
    return (dispatched + before) / speed, done / speed
