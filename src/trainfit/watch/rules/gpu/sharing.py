"""Other processes on the run's GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.results.watch.result import Evidence, Finding, Unknown
from trainfit.watch.figures import thresholds
from trainfit.watch.figures.view import RunView, median
from trainfit.watch.rules.rule import Rule


def look(run: RunView) -> Iterator[Finding | Unknown]:
    """Of each rank's GPU; silent where NVML does not tell processes apart."""
    for view in run.ranks:
        gpu = view.header.gpu
        if gpu is None or gpu >= len(view.header.gpus):
            continue
        total, others = view.header.gpus[gpu].memory_bytes, median(view.gpu["others_bytes"])
        if not total or others is None or others < thresholds.OTHERS_MEMORY * total:
            continue
        yield Finding(
            "gpu_shared",
            "warning",
            "Other processes are on this GPU",
            (Evidence("memory of other processes", others / 2**30, "GiB"),),
            "their kernels compete with this run's, and they use memory that it may need",
            "list them with nvidia-smi; stop them or choose another GPU with CUDA_VISIBLE_DEVICES",
            "certain",
            rank=view.rank,
        )


RULE: Final = Rule(("gpu_shared",), look)
