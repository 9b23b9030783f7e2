"""Fits the speed model's constants to measured steps, for speed_accuracy.py.

scipy's least squares on the logarithm of predicted over measured, less for those far off (soft
L1): a model whose kernels fall into a hole of the library says nothing of the others. Constants
are drawn to where they start as far as the steps say little of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.sparse import csr_matrix

from trainfit.hardware import GpuSpec
from trainfit.speed.efficiency import DEFAULT, Efficiency
from trainfit.speed.kernel_times import KernelTimes, peak_flops
from trainfit.speed.work import COLUMNS

#: How far constants are from their start, as far as is known beforehand (of the logarithm).
_SPREAD_ARITHMETIC, _SPREAD_TRAFFIC, _SPREAD_OTHERS = 0.5, 0.3, 0.5
_PRIOR: Final = 0.02
#: No kernel is faster than the GPU; clocks above the rated boost, and Winograd, are 1.25 of it.
_MOST: Final = {"arithmetic": 1.25, "traffic": 1.0, "": np.inf}
#: Errors above this count less than in proportion.
_FAR: Final = 0.08
_OTHERS: Final = ("small_tile", "unaligned", "wide_groups", "uneven_groups", "cache", "least_s")


@dataclasses.dataclass
class Steps:
    """Measured steps on one GPU, and the kernels that each launches (a table each)."""

    gpu: GpuSpec
    names: list[str]
    measured_s: NDArray[np.float64]
    tables: list[NDArray[np.int64]]

    def __post_init__(self) -> None:
        distinct, place = np.unique(np.concatenate(self.tables), axis=0, return_inverse=True)
        owner = np.repeat(np.arange(len(self.tables)), [len(table) for table in self.tables])
        ones = np.ones(len(owner))
        shape = (len(self.tables), len(distinct))
        #: How often each model's step has each of the distinct kernels.
        self.counts = csr_matrix((ones, (owner, place.ravel())), shape=shape)
        self.kernels = KernelTimes(distinct, self.gpu)

    def predicted_s(self, efficiency: Efficiency) -> NDArray[np.float64]:
        """Seconds of each step's kernels."""
        found: NDArray[np.float64] = self.counts @ self.kernels.seconds(efficiency)
        return found

    def errors(self, efficiency: Efficiency) -> NDArray[np.float64]:
        """Logarithm of predicted over measured."""
        return np.log(self.predicted_s(efficiency) / self.measured_s)

    def kinds(self) -> set[int]:
        """Codes of the kinds of kernels that there are."""
        return set(np.unique(self.kernels.table[:, COLUMNS.index("kind")]).tolist())


def fit(
    sets: Sequence[Steps],
    chosen: Sequence[NDArray[np.bool_]],
    known: Efficiency = DEFAULT,
    near: float = 1.0,
) -> Efficiency:
    """The constants for the chosen steps of these sets, drawn to ``known``.

    ``near``: how far from ``known`` they may be, as a multiple of what is usual.
    """
    names = [
        (group, name) for group in ("arithmetic", "traffic") for name in getattr(DEFAULT, group)
    ]
    names += [("", name) for name in _OTHERS]
    spreads = {"arithmetic": _SPREAD_ARITHMETIC, "traffic": _SPREAD_TRAFFIC, "": _SPREAD_OTHERS}
    spread = near * np.array([spreads[group] for group, _ in names])
    start = np.log([_value(known, *name) for name in names])
    weight = np.sqrt(_PRIOR * sum(int(mask.sum()) for mask in chosen) / len(names))

    def residuals(values: NDArray[np.float64]) -> Any:
        efficiency = _efficiency(names, values)
        errors = [each.errors(efficiency)[mask] for each, mask in zip(sets, chosen, strict=True)]
        return np.concatenate([*errors, weight * _FAR * (values - start) / spread])

    most = np.log([_MOST[group] for group, _ in names])
    bounds = (np.full(len(names), -np.inf), most)
    inside = np.minimum(start, most - 1e-6)
    found = least_squares(
        residuals, inside, bounds=bounds, loss="soft_l1", f_scale=_FAR, diff_step=1e-2, max_nfev=60
    )
    return _efficiency(names, found.x)


def _value(efficiency: Efficiency, group: str, name: str) -> float:
    return float(getattr(efficiency, group)[name] if group else getattr(efficiency, name))


def _efficiency(names: Sequence[tuple[str, str]], values: NDArray[np.float64]) -> Efficiency:
    found: dict[str, Any] = {"arithmetic": {}, "traffic": {}}
    for (group, name), value in zip(names, np.exp(values).tolist(), strict=True):
        if group:
            found[group][name] = value
        else:
            found[name] = value
    found["unaligned"] = min(1.0, found["unaligned"])
    return Efficiency(**found, source="fitted")


def whole_model(
    sets: Sequence[Steps], chosen: Sequence[NDArray[np.bool_]]
) -> Callable[[Steps], NDArray[np.float64]]:
    """For comparison: all FLOPs or all bytes, whichever take longer, times one constant."""

    def roofline(steps: Steps) -> NDArray[np.float64]:
        table = steps.kernels.table.astype(np.float64)
        flops, read, written = (table[:, COLUMNS.index(n)] for n in ("flops", "read", "written"))
        rate = peak_flops(steps.gpu)[steps.kernels.table[:, COLUMNS.index("dtype")]]
        moved = (read + written) / steps.gpu.bandwidth_bytes_per_s
        found: NDArray[np.float64] = np.maximum(steps.counts @ (flops / rate), steps.counts @ moved)
        return found

    ratios = [
        (each.measured_s / roofline(each))[mask] for each, mask in zip(sets, chosen, strict=True)
    ]
    constant = float(np.median(np.concatenate(ratios)))
    return lambda steps: constant * roofline(steps)
