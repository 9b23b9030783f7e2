"""One thread has no more to give while most cores are idle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import checks, gpu_time, thresholds
from trainfit.watch.figures.view import RunView, known
from trainfit.watch.rules.host.main_thread import MainThread
from trainfit.watch.rules.rule import Rule, severity

KIND: Final = "one_hot_thread"


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    if few:
        return
    hottest, cores = known(rank.main_process["hottest_thread"]), checks.cores(rank)
    if cores is None or len(hottest) < thresholds.LEAST_SLOW_SAMPLES:
        yield Unknown(
            KIND,
            f"fewer than {thresholds.LEAST_SLOW_SAMPLES} samples of the threads",
            "the sampler, and a few seconds",
        )
        return
    hot = np.mean(hottest >= thresholds.HOT_THREAD) >= thresholds.LASTING
    if not hot or cores.idle < max(1.0, thresholds.IDLE_CORES * cores.usable):
        return
    main = MainThread(rank)
    share, threads = _own_code(main), rank.header.threads.get("torch")
    evidence = (
        Evidence("its busiest thread", float(np.median(hottest)), "cores"),
        Evidence("idle cores", cores.idle, "cores"),
        Evidence("usable cores", cores.usable, "cores"),
    )
    if share >= thresholds.OTHER_CODE:
        yield Finding(
            KIND,
            severity(share),
            "The main thread is busy with the script's own code while cores are idle",
            (*evidence, Evidence("outside of all phases", main.other or 0.0, "of the time")),
            "Python code between the phases (metrics, logging, preparing batches) runs in one "
            "thread",
            "move it into the data set, so that workers do it, or onto the GPU; `py-spy top` "
            "shows which lines it is",
            "likely",
            share,
        )
    elif not gpu_time.has_gpu(rank) and threads is not None and 2 * threads <= cores.usable:
        value = max(1, int(cores.idle) + threads)
        yield Finding(
            KIND,
            "warning",
            f"PyTorch computes with {threads} thread{'s' if threads > 1 else ''} while "
            f"{cores.idle:.1f} cores are idle",
            (*evidence, Evidence("threads of PyTorch", float(threads))),
            "OMP_NUM_THREADS, torchrun or the script limits the number of threads",
            f"set OMP_NUM_THREADS={value}",
            "likely",
            settings={"OMP_NUM_THREADS": str(value)},
        )


def _own_code(main: MainThread) -> float:
    """Share of the time that the script's own code costs: on a GPU only while that is idle."""
    other = main.other or 0.0
    if main.cpu is not None and main.cpu < thresholds.MAIN_THREAD:
        return 0.0
    if not gpu_time.has_gpu(main.rank):
        return other
    # Where launches dominate, or the host waits for the GPU, other rules say so.
    idle = main.unexplained_idle
    launches_dominate = (main.launches or 0.0) >= thresholds.LAUNCHES
    if idle is None or launches_dominate or main.sync >= thresholds.SYNC_SHARE:
        return 0.0
    return min(other, idle)


RULE: Final = Rule((KIND,), _look, each_rank=True)
