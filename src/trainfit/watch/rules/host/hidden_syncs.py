"""Calls that wait for the GPU, after which it is idle until the host has launched again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import checks, copying, gpu_time, thresholds
from trainfit.watch.figures.view import RunView, known
from trainfit.watch.rules.host.main_thread import MainThread
from trainfit.watch.rules.rule import Rule, severity

KIND: Final = "hidden_syncs"


def _look(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    if not gpu_time.has_gpu(rank):
        return
    yield from (few := list(checks.too_few_steps(rank, KIND)))
    if few:
        return
    main = MainThread(rank)
    counts = known(rank.steps["syncs"])
    idle = main.unexplained_idle
    if idle is None or not len(counts) or main.phases["sync"] is None:
        yield Unknown(KIND, "synchronizations or CUDA events were not recorded", "CUDA events")
        return
    # A copy from pageable memory waits for what was launched before it, too: it has its own rule.
    copies = main.phases["copy"] or 0.0
    if (copying.unpinned_share(rank) or 0.0) > 0.5 and copies > main.sync:
        return
    lasting = np.mean(counts >= 1) >= thresholds.LASTING and main.idle_lasts
    if idle < thresholds.HOST_IDLE or main.sync < thresholds.SYNC_SHARE or not lasting:
        return
    yield Finding(
        KIND,
        severity(idle),
        f"Waiting for the GPU {np.mean(counts):.3g} times a step leaves it idle "
        f"{checks.in_percent(idle)} of the time",
        (
            Evidence("synchronizations", float(np.mean(counts)), "1/step"),
            Evidence("waiting in them", main.sync * rank.seconds / len(rank.steps), "s/step"),
            Evidence("GPU idle, not for lack of input", idle, "of the time"),
        ),
        "item(), cpu(), print(tensor) and the like wait until the GPU is done; it is idle until "
        "the host has launched the next kernels",
        "read the loss every 50 steps only (loss.detach() in between), and compute metrics on the "
        "GPU",
        "likely",
        idle,
        line="if step % 50 == 0: print(loss.item())",
    )


RULE: Final = Rule((KIND,), _look, each_rank=True)
