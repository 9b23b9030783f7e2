"""How busy a rank's GPU is, by CUDA events first and by NVML where there are none."""

from __future__ import annotations

import numpy as np

from trainfit.watch.view import RankView, known, median


def gpu_busy(view: RankView) -> float | None:
    """Share of the steady steps in which the stream had work; ``None``: not measured.

    NVML's utilisation is the share of its sampling period in which any kernel ran: an upper bound.
    """
    steps = view.steps
    spans = known(steps["gpu_s"])
    if len(spans) and view.seconds:
        measured = np.isfinite(steps["gpu_s"]) & np.isfinite(steps["step_s"])
        whole = float(steps["step_s"][measured].sum())
        return min(1.0, float(steps["gpu_s"][measured].sum()) / whole) if whole else None
    return median(view.gpu["utilization"])


def peak_share(view: RankView) -> float | None:
    """Of the GPU's memory, what the process reserves at its peak."""
    gpu, reserved = view.header.gpu, known(view.record.steps["reserved_bytes"])
    if gpu is None or gpu >= len(view.header.gpus) or not len(reserved):
        return None
    total = view.header.gpus[gpu].memory_bytes
    return float(reserved.max()) / total if total else None


def mfu(view: RankView) -> float | None:
    """Model FLOP utilization: of the peak of the GPU's Tensor cores, what the model's own
    matmuls and convolutions are (PaLM, Chowdhery et al. 2022, appendix B)."""
    gpu = view.header.gpu
    if gpu is None or gpu >= len(view.header.gpus):
        return None
    peak, each = view.header.gpus[gpu].tensor_flops_per_s, view.header.flops_per_sample
    samples = known(view.steps["samples"])
    if not peak or each is None or not len(samples) or not view.seconds:
        return None
    return each * float(samples.sum()) / (view.seconds * peak)
