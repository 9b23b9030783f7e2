"""Time in collectives: calls of ``torch.distributed``, and what DDP times of its own.

DDP's reducer is C++, which no hook sees. It times some of its backward passes by itself, on a GPU
by CUDA events that it waits for in any case; what it found is only read here.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Final

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from trainfit.results.runs.communication import GradientTimes, RankCommunication
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.distributed import ddp_times, where_collectives_are
from trainfit.watch.recorder import phases as ph
from trainfit.watch.recorder.guard import Host, in_phase

#: Functions of ``torch.distributed`` in which a rank meets others.
_COLLECTIVES: Final = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all"),
    *("all_to_all_single", "barrier", "monitored_barrier", "broadcast", "broadcast_object_list"),
    *("gather", "gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list", "recv"),
)
#: Step after which DDP has timed its first passes, and steps until it times another one.
_FIRST_LOOK: Final = 11
_EVERY: Final = 100


def install(host: Host, patches: PatchSet) -> None:
    """Hook from now on, until ``patches`` is restored: calls are a phase of their own."""
    if not distributed.is_available():
        return
    for name in _COLLECTIVES:
        original = getattr(distributed, name, None)
        if original is None:
            continue
        around = functools.partial(in_phase, host, ph.COLLECTIVE)
        for module in where_collectives_are(name, original):
            patches.hook(module, name, around)


class CommunicationLooks:
    """What is known of a rank's communication, looked at between steps."""

    def __init__(self) -> None:
        self._ddp: weakref.ref[Any] | None = None
        self._due = _FIRST_LOOK
        self._gradients: GradientTimes | None = None

    def of_model(self, module: torch.nn.Module) -> None:
        """The model that is trained."""
        found = (each for each in module.modules() if isinstance(each, DistributedDataParallel))
        if (ddp := next(found, None)) is not None:
            self._ddp = weakref.ref(ddp)

    def after(self, step: int) -> None:
        """A step is over, which was recorded in detail."""
        if step < self._due:
            return
        self._due = step + _EVERY
        ddp = self._ddp() if self._ddp is not None else None
        if ddp is not None:
            self._gradients = _times_of(ddp) or self._gradients

    def facts(self, called: ph.CollectiveSeconds) -> RankCommunication:
        """The facts that the hooks have counted; asks nobody."""
        return RankCommunication(called.mean_s, called.calls, self._gradients)


def _times_of(ddp: DistributedDataParallel) -> GradientTimes | None:
    found = ddp_times(ddp)

    def seconds(name: str) -> float:
        return int(found.get(f"avg_backward_{name}") or 0) / 1e9

    if not seconds("comm_time"):
        return None
    return GradientTimes(
        seconds("comm_time"),
        seconds("compute_comm_overlap_time"),
        seconds("compute_time"),
        "CUDA events" if next(ddp.parameters()).is_cuda else "the host's clock",
    )
