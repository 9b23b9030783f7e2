"""Rates of settings, by the model and by real runs together, each by how much it may be off.

A single run of settings that differ by less than runs do says little of which is faster: planned
twice, the one or the other was recommended. The model errs alike both times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from trainfit.loader.tune.search import Choice
from trainfit.results.loader.settings import LoaderSettings

#: What the model says too much or too little of settings, apart from what it does of all of a
#: loader's: the standard deviation of the rate's logarithm. Its errors over 400 settings have a
#: median of 3.9% (docs/figures.md), which is one of 5.8%; half of that variance is taken to be
#: common to a loader's settings.
OWN_ERROR: Final = 0.04


def estimated_rates(
    choice: Choice, measured: Mapping[LoaderSettings, float], noise: float
) -> dict[LoaderSettings, float]:
    """Batches a second of the settings that can be.

    ``measured`` has the rates of real runs, whose logarithms differ from run to run by the
    standard deviation ``noise``. What the model says is corrected by what it said too much or too
    little of those; of settings that were run it is weighed with the run, by both variances, and
    differs from it by ``noise`` at most: where the model is wrong, it is far off.
    """
    ratio = (noise / OWN_ERROR) ** 2
    missed = [
        math.log(rate / choice.look(settings).batches_per_s)
        for settings, rate in measured.items()
        if math.isfinite(choice.look(settings).batches_per_s)
    ]
    common = sum(missed) / (len(missed) + 1 + ratio)
    return {
        settings: _weighed(math.exp(common) * rate, measured.get(settings), noise, ratio)
        for settings, rate in choice.rates().items()
    }


def _weighed(predicted: float, measured: float | None, noise: float, ratio: float) -> float:
    if measured is None:
        return predicted
    if not math.isfinite(predicted) or predicted <= 0:
        return measured
    off = math.log(predicted / measured) * ratio / (1 + ratio)
    return measured * math.exp(min(max(off, -noise), noise))
