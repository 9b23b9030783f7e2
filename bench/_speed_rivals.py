"""Other ways to predict a step's time, for speed_accuracy.py: each fitted to the same steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from _speed_fit import Steps
from numpy.typing import NDArray

from trainfit.speed.kernel_times import peak_flops
from trainfit.speed.work import COLUMNS

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Predictor = Callable[[Steps], Floats]

#: Shares of peak rate and bandwidth that the roofline of each operator tries.
_SHARES = np.linspace(0.2, 1.2, 41)


def _work(steps: Steps) -> tuple[Floats, Floats]:
    """Of each distinct kernel: seconds of its FLOPs and bytes at the GPU's peaks."""
    table = steps.kernels.table

    def column(name: str) -> Floats:
        return table[:, COLUMNS.index(name)].astype(np.float64)

    rate = peak_flops(steps.gpu)[table[:, COLUMNS.index("dtype")]]
    moved = column("read") + column("written")
    return column("flops") / rate, moved / steps.gpu.bandwidth_bytes_per_s


def whole_model(sets: Sequence[Steps], chosen: Sequence[Mask]) -> Predictor:
    """All FLOPs or all bytes, whichever take longer, times one constant."""

    def roofline(steps: Steps) -> Floats:
        arithmetic, traffic = _work(steps)
        found: Floats = np.maximum(steps.counts @ arithmetic, steps.counts @ traffic)
        return found

    ratios = [
        (each.measured_s / roofline(each))[mask] for each, mask in zip(sets, chosen, strict=True)
    ]
    constant = float(np.median(np.concatenate(ratios)))
    return lambda steps: constant * roofline(steps)


def per_operator(sets: Sequence[Steps], chosen: Sequence[Mask]) -> Predictor:
    """Each kernel's FLOPs at a share of the peak rate, or bytes at a share of the bandwidth."""

    def predicted(steps: Steps, rate: float, bandwidth: float) -> Floats:
        arithmetic, traffic = _work(steps)
        found: Floats = steps.counts @ np.maximum(arithmetic / rate, traffic / bandwidth)
        return found

    def error(rate: float, bandwidth: float) -> float:
        logs = [
            np.abs(np.log(predicted(each, rate, bandwidth) / each.measured_s))[mask]
            for each, mask in zip(sets, chosen, strict=True)
        ]
        return float(np.mean(np.concatenate(logs)))

    best = min(((error(a, b), a, b) for a in _SHARES for b in _SHARES), key=lambda each: each[0])
    return lambda steps: predicted(steps, best[1], best[2])


def pytorchs(sets: Sequence[Steps], chosen: Sequence[Mask]) -> Predictor:
    """As torch/utils/_runtime_estimation.py (2.13) has it; nothing is fitted."""

    def predicted(steps: Steps) -> Floats:
        arithmetic, traffic = _work(steps)
        found: Floats = steps.counts @ np.maximum(arithmetic / 2 / 0.75, traffic)
        return found

    return predicted
