"""A GPU that is always at work and does little: small kernels, small batches.

NVML's utilisation is the share of time in which at least one kernel runs: 100% is not full.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import gpu_time, thresholds
from trainfit.watch.figures.ledger import peak_share
from trainfit.watch.figures.measures import mfu
from trainfit.watch.figures.view import RunView, median
from trainfit.watch.rules.gpu import ranks
from trainfit.watch.rules.rule import Rule


def look(run: RunView) -> Iterator[Finding | Unknown]:
    """Of the judged rank."""
    view = run.judged
    if view.header.gpu is None or not len(view.steps):
        return
    idle = gpu_time.idle_share(view)
    if idle is None or 1 - idle < thresholds.GPU_BOUND:
        return  # something else is the limit, and has rules of its own
    if any(isinstance(each, Finding) for each in ranks.look(run)):
        return  # the time that ranks wait for one another says nothing of their batches
    used, active = mfu(view), median(view.gpu["sm_active"])
    if used is None and active is None:
        reason = "neither the model's FLOPs nor counters of the multiprocessors were measured"
        yield Unknown("low_mfu", reason, "a GPU in the catalogue, or GPM (Hopper and newer)")
        return
    low = used is not None and used < thresholds.LOW_MFU
    small = active is not None and active < thresholds.SMALL_KERNELS
    if not (low or small):
        return
    evidence = [Evidence("GPU busy", 1 - idle)]
    evidence += [] if used is None else [Evidence("MFU", used)]
    evidence += [] if active is None else [Evidence("multiprocessors busy", active)]
    room = peak_share(view)
    if room is not None and room < thresholds.ROOMY:
        evidence.append(Evidence("GPU memory reserved at the peak", room))
        yield Finding(
            "small_batch", "warning", "The batch is too small to fill the GPU", tuple(evidence),
            "kernels are too small for its multiprocessors, and memory is left for a larger batch",
            "run `trainfit plan` on this command: it gives the batch size at which the GPU is "
            "saturated, and what fits",
            "likely" if small else "possible",
        )  # fmt: skip
    else:
        yield Finding(
            "low_mfu", "info", "The GPU is always busy and far from its peak", tuple(evidence),
            "its time goes to kernels that move memory or are small, not to matmuls",
            "try torch.compile, fused optimizers and channels-last convolutions; a profile "
            "(torch.profiler) names the kernels",
            "possible",
        )  # fmt: skip


RULE: Final = Rule(("small_batch", "low_mfu"), look, each_rank=True)
