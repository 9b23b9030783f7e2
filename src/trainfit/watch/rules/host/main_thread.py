"""Where the main thread's time goes in a step, and what of the GPU's idle time that explains."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from trainfit.watch.figures import checks, copying, gpu_time, thresholds
from trainfit.watch.figures.view import PHASES, RankView, known


@dataclass(frozen=True)
class MainThread:
    """Shares of the steady steps' time; ``None`` is not measured."""

    rank: RankView

    @functools.cached_property
    def phases(self) -> dict[str, float | None]:
        return {name: self.rank.share(name) for name in PHASES}

    @functools.cached_property
    def launches(self) -> float | None:
        """In forward, backward and optimizer: on a GPU, the launching of kernels."""
        found = [self.phases[name] for name in ("forward", "backward", "optimizer")]
        return None if found[0] is None else sum(each or 0.0 for each in found)

    @functools.cached_property
    def other(self) -> float | None:
        """Outside all phases: the script's own code."""
        if self.launches is None:
            return None
        return max(0.0, 1 - sum(each or 0.0 for each in self.phases.values()))

    @functools.cached_property
    def sync(self) -> float:
        """In waiting for the GPU, where that was measured."""
        return self.phases["sync"] or 0.0

    @functools.cached_property
    def cpu(self) -> float | None:
        """Median of the main thread's CPU time over the step's."""
        ratios = known(gpu_time.column(self.rank, "cpu_s") / gpu_time.column(self.rank, "step_s"))
        return float(np.median(ratios)) if len(ratios) else None

    @functools.cached_property
    def unexplained_idle(self) -> float | None:
        """Share of the time in which the GPU was idle, less what input, checkpoints and
        evaluation are to blame for; ``None``: not measured."""
        idle = gpu_time.idle_share(self.rank)
        if idle is None:
            return None
        named = checks.share_of(self.rank, gpu_time.input_lost(self.rank))
        named += (self.phases["checkpoint"] or 0.0) + (self.phases["evaluation"] or 0.0)
        copies = copying.lost(self.rank)
        # Copies keep the stream busy; NVML alone counts them as idle.
        if copies is not None and idle > 1 - (gpu_time.busy_by_events(self.rank) or 1.0):
            named += checks.share_of(self.rank, copies)
        return max(0.0, idle - named)

    @functools.cached_property
    def idle_lasts(self) -> bool:
        """Was the GPU idle in a third of the run? NVML's mean is trusted where events see less."""
        steps = self.rank.steps
        gap = np.nan_to_num(gpu_time.gap(self.rank))
        gap = np.maximum(0.0, gap - np.nan_to_num(gpu_time.column(self.rank, "input_s")))
        if checks.lasts(self.rank, gap):
            return True
        values = known(self.rank.gpu["utilization"])
        idle = 1 - (gpu_time.utilization(self.rank) or 1.0) >= thresholds.NVML_IDLE
        below = len(values) and np.mean(values <= 1 - thresholds.NOTICEABLE)
        return bool(len(steps) and idle and below >= thresholds.LASTING)
