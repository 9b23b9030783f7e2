"""The machine reads memory back from swap while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import checks, thresholds
from trainfit.watch.figures.view import RunView, known, median
from trainfit.watch.rules.rule import Rule

KIND: Final = "swapping"


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    if few:
        return
    machine = rank.machine
    rows = machine[(machine["swap_in_bytes"] >= 0) & (machine["interval_s"] > 0)]
    if len(rows) < thresholds.LEAST_SLOW_SAMPLES:
        yield Unknown(
            KIND,
            f"fewer than {thresholds.LEAST_SLOW_SAMPLES} samples of swap",
            "the sampler, and a few seconds",
        )
        return
    # Swap is not read in each sample; what is read is of all the time since it was read last.
    seconds = float(np.nansum(machine["interval_s"], dtype=np.float64))
    rate = float(np.sum(rows["swap_in_bytes"], dtype=np.float64)) / seconds
    often = np.mean(rows["swap_in_bytes"] > 0)
    if rate < thresholds.SWAP_BYTES_PER_S or often < thresholds.SWAP_SAMPLES:
        return
    pressure = known(rows["memory_pressure"])
    share = min(1.0, float(np.mean(pressure))) if len(pressure) else None
    written = rows["swap_out_bytes"][rows["swap_out_bytes"] >= 0]
    evidence = [
        Evidence("read from swap", rate, "bytes/s"),
        Evidence("written to swap", float(np.sum(written, dtype=np.float64)) / seconds, "bytes/s"),
    ]
    available = median(rows["ram_available_bytes"])
    if available is not None:
        evidence.append(Evidence("RAM that is available", available, "bytes"))
    if share is not None:
        evidence.append(Evidence("threads that wait for memory", share, "of the time"))
    yield Finding(
        KIND,
        "warning" if share is None or share < thresholds.CRITICAL_SHARE else "critical",
        "The machine swaps: RAM does not hold all that runs on it",
        tuple(evidence),
        "Memory that is needed was written to disk and is read back, which stops the threads that "
        "need it",
        "use less RAM: fewer workers or a lower prefetch_factor, no data set held in every worker, "
        "no other programs",
        "likely",
        share,
    )


RULE: Final = Rule((KIND,), _look, each_rank=True)
