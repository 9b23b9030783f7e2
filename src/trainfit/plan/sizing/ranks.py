"""The processes of a job for several GPUs, by what the first of them does."""

from __future__ import annotations

from typing import Final

import numpy as np

from trainfit.hardware.gpu.topology import link_of, network_words
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.costing import has_rates, steady_work
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.steps import TRANSFERS
from trainfit.results.speed import CollectiveTime, Ranks
from trainfit.speed.collectives import collective_seconds
from trainfit.speed.step import Machine
from trainfit.speed.work import Work

_EQUAL: Final = (
    "rank 0 was simulated; the others are taken to have batches of the same shapes, the same model "
    "and a GPU of the same speed"
)
#: What is said of sharded training in addition.
_SHARDED: Final = "; sharded training (FSDP) has not been compared with real runs"
#: Likewise of a pipeline of more ranks than are simulated side by side.
_STAGES: Final = (
    "; it sends to and receives from other ranks in its steps: stages of a pipeline hold other "
    "layers, and what those need cannot be told from rank 0"
)


def ranks_of(recording: Recording, machine: Machine, compared: str = "") -> Ranks | None:
    """Of a job of several processes; ``None`` for one. ``compared`` says which other rank was."""
    count = recording.ranks
    if count < 2:
        return None
    found = transfers(steady_work(recording), machine) if recording.steps else ()
    sharded = any(each.kind == "reduce_scatter" for each in found)
    words = ", ".join(filter(None, (link_of(machine.gpu).words, network_words(machine.gpu))))
    equal = _EQUAL + (f"; {compared}" if compared else "") + (_SHARDED if sharded else "")
    if any(each.kind == "send_receive" for each in found):
        equal += _STAGES
    sharing = recording.sharing
    return Ranks(count, words, found, equal, machine.gpu.machines, sharing=sharing)


def replicas_of(trace: Trace) -> int:
    """How many processes of its job have samples of their own."""
    recording = recording_of(trace)
    return max(1, recording.ranks // max(1, len(trace.ranks)) // recording.sharing)


def transfers(work: Work, machine: Machine) -> tuple[CollectiveTime, ...]:
    """What passes between GPUs in a step, by kind, the longest first; of work of several steps
    their mean."""
    rated = has_rates(machine.gpu)
    seconds = collective_seconds(work, machine.gpu) if rated else np.zeros(len(work.table))
    found = []
    for kind in TRANSFERS:
        chosen = work.is_kind(kind)
        if chosen.any():
            count = max(1, round(int(chosen.sum()) / work.steps))
            nbytes = int(work.column("read")[chosen].sum()) // work.steps
            took = float(seconds[chosen].sum()) / work.steps
            found.append(CollectiveTime(kind, count, nbytes, took))
    return tuple(sorted(found, key=lambda each: -each.seconds))
