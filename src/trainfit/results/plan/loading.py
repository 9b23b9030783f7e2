"""How the DataLoader keeps up with the GPU, in a plan."""

from __future__ import annotations

import dataclasses
from typing import Literal

from trainfit.results.loader.result import LoaderResult
from trainfit.results.loader.settings import LoaderSettings

#: Which part makes the other wait; "unknown" where the time of a step is.
Bottleneck = Literal["gpu", "loader", "unknown"]
#: Where a DataLoader's rate is from; "busy": predicted, as other processes kept the cores busy.
RateFrom = Literal["measured", "predicted", "busy", ""]
#: What a run is as fast as; "gpu only": the DataLoader was not measured; "unknown": its rate is
#: not known.
RunLimit = Literal["gpu", "loader", "gpu only", "unknown"]


@dataclasses.dataclass(frozen=True)
class RunRate:
    """How fast the launched run will be, at ``batch_size`` (``None``: not known).

    ``step_s`` is the time from one step (an optimizer's, or a call of the model) to the next,
    ``samples_per_s`` and ``epoch_s`` are ``None`` where they are not known. ``limit`` is the slower
    part, which they are of; ``gpu_step_s`` and ``gpu_samples_per_s`` what the GPU alone would do
    (predicted). ``loader`` says where the DataLoader's rate is from (empty: there is none);
    ``is_bound``: it is what another processor gives at best.
    """

    batch_size: int | None
    step_s: float
    samples_per_s: float | None
    epoch_s: float | None
    limit: RunLimit
    gpu_step_s: float
    gpu_samples_per_s: float | None
    loader: RateFrom = ""
    is_bound: bool = False


@dataclasses.dataclass(frozen=True)
class DataLoading:
    """How the DataLoader keeps up with the GPU at ``batch_size`` (``None``: the script's own).

    ``result`` is the whole of what ``trainfit loader`` finds; where it is ``None``, ``failure``
    says why, with the fix. ``bottleneck`` is for the recommended settings, and ``factor`` says by
    how much: what the other part could do, divided by what it can (1 and more; ``None`` where that
    is not known). ``step_is_bound``: ``result.step_s`` is a lower bound of the GPU's step time, not
    measured. ``input_at_most`` are the batches a second that the cores of ``PlanResult.cpu`` give
    at best, ``input_range`` what they may be, ``input_basis`` what that is from, and
    ``input_workers`` the fewest workers that give as many as the GPU uses, or all. ``launched`` are
    the settings in the launch command (``None``: those of ``result``).
    """

    result: LoaderResult | None
    batch_size: int | None = None
    step_is_bound: bool = True
    bottleneck: Bottleneck = "unknown"
    factor: float | None = None
    failure: str = ""
    input_at_most: float | None = None
    input_range: tuple[float, float] | None = None
    input_basis: tuple[str, ...] = ()
    input_workers: int | None = None
    launched: LoaderSettings | None = None

    @property
    def evidence(self) -> RateFrom:
        """Where the rate of the launched settings is from."""
        found = self.result
        if found is None:
            return ""
        if self.input_at_most is None and found.measured(self.launched or found.recommended):
            return "measured"
        return "busy" if found.was_busy else "predicted"
