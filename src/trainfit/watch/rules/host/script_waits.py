"""The script itself waits: its main thread neither computes nor waits for batches or the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import checks, gpu_time, thresholds
from trainfit.watch.figures.view import RankView, RunView, known, median
from trainfit.watch.rules.host.main_thread import MainThread
from trainfit.watch.rules.rule import Rule, severity

KIND: Final = "script_waits"

#: In which the main thread waits for what other rules look at.
_WAITS: Final = ("copy", "sync", "checkpoint", "evaluation")


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    if len(rank.steps) < thresholds.LEAST_STEPS or _is_held_up(rank):
        return  # what is measured without steps enough, or on a machine that swaps, says little
    # Who waits for a slower rank is no cause; what the least of them waits, all of them do.
    share = min(_share(each) for each in view.ranks)
    least = thresholds.OTHER_CODE
    if share < least or not checks.lasts(rank, _waits(rank), least):
        return
    main = MainThread(rank)
    evidence = [
        Evidence("the main thread waits", share * rank.seconds / len(rank.steps), "s/step"),
        Evidence("CPU time of the main thread", main.cpu or 0.0),
        Evidence("outside of all phases", main.other or 0.0),
    ]
    storage = median(rank.main_process["waits_for_io"]) or 0.0
    if storage >= thresholds.NOTICEABLE:
        evidence.append(Evidence("waits for a disk", storage))
    yield Finding(
        KIND,
        severity(share),
        f"The script itself waits {checks.in_percent(share)} of the time, for neither batches nor "
        "the GPU",
        tuple(evidence),
        "The main thread neither computes nor waits for what is recorded: it sleeps, or waits for "
        "a file, the network, another process or a lock",
        "find the line: `faulthandler.dump_traceback_later(5, repeat=True)` in the script prints "
        "it, or `py-spy dump --pid PID`",
        "likely",
        share,
    )


def _share(rank: RankView) -> float:
    """Of the time; on a GPU only while that is idle for no other reason."""
    share = checks.share_of(rank, _waits(rank))
    if not gpu_time.has_gpu(rank):
        return share
    return min(share, MainThread(rank).unexplained_idle or 0.0)


def _waits(rank: RankView) -> NDArray[np.float64]:
    """Seconds of each steady step in which the main thread is neither on a core nor in a wait that
    has a name; 0: not measured. Less than that where two of them cannot be told apart."""
    step_s, cpu_s = gpu_time.column(rank, "step_s"), gpu_time.column(rank, "cpu_s")
    named = np.sum([np.nan_to_num(gpu_time.column(rank, f"{each}_s")) for each in _WAITS], axis=0)
    named += np.nan_to_num(gpu_time.column(rank, "input_s")) * (1 - _computes_batches(rank))
    if gpu_time.has_gpu(rank) or rank.header.world_size > 1:
        # Autograd's thread launches the backward pass; other ranks are waited for in it.
        named += np.nan_to_num(gpu_time.column(rank, "backward_s"))
    waits = np.nan_to_num(np.maximum(0.0, step_s - cpu_s - named))
    return waits if _would_get_more(rank, cpu_s, step_s - named) else np.zeros(len(waits))


def _computes_batches(rank: RankView) -> float:
    """Of the time in the DataLoader, what is CPU time of the main thread; 0 with workers."""
    loader = checks.training_loader(rank.header)
    rows = rank.fetches
    if loader is None or loader.num_workers or not len(rows):
        return 0.0
    return min(1.0, max(0.0, median(rows["cpu_s"] / rows["fetch_s"]) or 0.0))


def _would_get_more(
    rank: RankView, cpu_s: NDArray[np.float64], rest_s: NDArray[np.float64]
) -> bool:
    """Does the thread use less than it would get among those that want to run? Schedulers are fair
    to a factor of two."""
    usable, runnable = checks.usable_cores(rank.header), median(rank.machine["runnable"])
    if usable is None or runnable is None or runnable <= usable:
        return True
    total = float(np.nansum(rest_s))
    return (
        total > 0 and float(np.nansum(cpu_s)) / total < thresholds.WANTS_CORES * usable / runnable
    )


def _is_held_up(rank: RankView) -> bool:
    """Is the main thread stopped by a quota, or by memory that is read back from swap?"""
    machine = rank.machine
    rows = machine[machine["cgroup_periods"] > 0]
    stopped = float(np.sum(np.maximum(0, rows["cgroup_throttled"]), dtype=np.float64))
    periods = float(np.sum(rows["cgroup_periods"], dtype=np.float64))
    swapped = known(machine["swap_in_bytes"])
    swaps = len(swapped) > 0 and float(np.mean(swapped > 0)) >= thresholds.SWAP_SAMPLES
    return swaps or (periods > 0 and stopped / periods >= thresholds.THROTTLED)


RULE: Final = Rule((KIND,), _look, each_rank=True)
