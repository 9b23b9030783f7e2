"""The rules: each maps the reading of a script to findings, certain ones only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from trainfit.lint.reading.project import Project
from trainfit.lint.rules import (
    datasets,
    evaluation,
    graphs,
    loaders,
    portability,
    precision,
    steps,
    syncs,
)
from trainfit.results.machine.doctor import Finding

RULES: Final[tuple[Callable[[Project], Iterator[Finding]], ...]] = (
    portability.hard_coded_cuda,
    portability.data_parallel,
    precision.deprecated_amp,
    precision.no_autocast,
    datasets.cuda_in_dataset,
    datasets.data_on_gpu_before_loop,
    loaders.loader_defaults,
    loaders.non_blocking_without_pinning,
    evaluation.no_no_grad,
    syncs.sync_every_step,
    graphs.loss_kept_with_graph,
    steps.zero_grad,
    steps.retain_graph,
)
