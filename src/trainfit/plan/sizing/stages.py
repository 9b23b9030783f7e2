"""The stages of a pipeline: what each needs, how long a step is, and what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import numpy as np

from trainfit.memory.capacity import context_parts
from trainfit.memory.replay import Stream
from trainfit.plan.runs.tracing import Trace
from trainfit.plan.sizing.costing import has_rates
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.plan.sizing.speed import transfers
from trainfit.results.findings import Evidence, Finding, Fix
from trainfit.results.runs.recording import Recording
from trainfit.results.speed import CollectiveTime, PipelineStage, Ranks, Speed, StepSpeed
from trainfit.results.text import duration, percent, size
from trainfit.speed.pipeline import pipeline_step
from trainfit.speed.step import HostedGpu
from trainfit.speed.work import Work

#: Bubbles of a larger share of a step are worth a word.
_WORTH_A_WORD: Final = 0.2
#: Stages that differ by no more are balanced.
_BALANCED: Final = 1.2

_STAGES: Final = (
    "each stage of the pipeline was simulated, and what they send each other goes from one to the "
    "next; memory and batch sizes are those of the stage that needs the most"
)


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The ranks of a pipeline with one step of each, and that step's seconds (``None``: not known)
    of all of them together."""

    stages: tuple[PipelineStage, ...] = ()
    seconds: float | None = None
    micro_batches: int = 0
    #: Of a step, with ranks that are not of the pipeline.
    collectives: tuple[CollectiveTime, ...] = ()

    def ranks(self, ranks: Ranks | None) -> Ranks | None:
        """The same ranks with what is known of the stages."""
        if ranks is None or not self.stages:
            return ranks
        return dataclasses.replace(
            ranks, stages=self.stages, bubble_share=self.bubble_share, equal=_STAGES
        )

    @property
    def bubble_share(self) -> float | None:
        computing = [each.computing_s for each in self.stages]
        known = [each for each in computing if each is not None]
        if not self.seconds or len(known) < len(computing):
            return None
        return max(0.0, 1 - sum(known) / len(known) / self.seconds)

    def speed(self, found: Speed | None) -> Speed | None:
        """Steps as long as the pipeline's: at other batch sizes as much longer than one stage's
        alone as at this one."""
        if found is None or not self.seconds or not self.stages:
            return found
        longer = max(1.0, self.seconds / (found.now.seconds - found.now.slowest_s))
        epoch_s = None if found.epoch_s is None else found.epoch_s * longer
        now, *curve = (_longer(each, longer) for each in (found.now, *found.curve))
        return dataclasses.replace(found, now=now, curve=tuple(curve), epoch_s=epoch_s)

    def findings(self) -> tuple[Finding, ...]:
        """Bubbles, and stages that differ."""
        return (*self._bubble(), *self._uneven())

    def _bubble(self) -> tuple[Finding, ...]:
        share, stages, parts = self.bubble_share, len(self.stages), self.micro_batches
        if share is None or share <= _WORTH_A_WORD or self.seconds is None:
            return ()
        least = (stages - 1) / (parts + stages - 1)
        more = (stages - 1) / (4 * parts + stages - 1)
        kinds = ", ".join(f"{_name(each.kind)}s" for each in self.collectives)
        reduced = f", and {kinds} with the other pipelines" if kinds else ""
        return (
            Finding(
                "pipeline_bubble",
                "warning",
                f"the GPUs of the stages compute nothing in {percent(share)} of a step",
                (
                    Evidence("a step", duration(self.seconds)),
                    Evidence("micro-batches", str(parts)),
                    *(
                        Evidence(f"all {_name(each.kind)}s of a step", duration(each.seconds))
                        for each in self.collectives
                    ),
                    *(
                        Evidence(f"rank {each.rank} computes", duration(each.computing_s))
                        for each in self.stages
                        if each.computing_s is not None
                    ),
                ),
                f"a pipeline of {stages} stages fills and empties with each step: with {parts} "
                f"micro-batches of equal stages that is {percent(least)} of it, and the rest are "
                f"stages that differ, launches and transfers{reduced}",
                (
                    Fix(
                        f"more micro-batches: with {4 * parts}, filling and emptying is "
                        f"{percent(more)} of a step; an interleaved schedule divides it by its "
                        "stages a rank",
                        cost="smaller micro-batches use the GPU less well",
                    ),
                ),
                share=share,
            ),
        )

    def _uneven(self) -> tuple[Finding, ...]:
        known = [each for each in self.stages if each.computing_s]
        if len(known) < 2 or len(known) < len(self.stages):
            return ()
        slow = max(known, key=lambda each: each.computing_s or 0.0)
        fast = min(known, key=lambda each: each.computing_s or 0.0)
        mean = sum(each.computing_s or 0.0 for each in known) / len(known)
        assert slow.computing_s is not None and fast.computing_s is not None
        if slow.computing_s <= _BALANCED * mean:
            return ()
        return (
            Finding(
                "stages_uneven",
                "warning",
                f"the stage of rank {slow.rank} computes {duration(slow.computing_s)} of a step, "
                f"that of rank {fast.rank} {duration(fast.computing_s)}",
                tuple(Evidence(f"rank {e.rank} holds", size(e.device_bytes)) for e in known),
                "a pipeline is as fast as its slowest stage: the others wait for it",
                (Fix(f"move layers from rank {slow.rank}'s stage to rank {fast.rank}'s"),),
                share=1 - mean / slow.computing_s,
            ),
        )


def _longer(step: StepSpeed, longer: float) -> StepSpeed:
    low, high = step.range_s
    rate = step.samples_per_s
    return dataclasses.replace(
        step,
        seconds=step.seconds * longer,
        range_s=(low * longer, high * longer),
        samples_per_s=None if rate is None else rate / longer,
        exposed_s=max(0.0, step.exposed_s + step.seconds * (longer - 1)),
    )


def pipeline(
    traces: Mapping[int, Trace], machine: HostedGpu, memory_model: MemoryModel
) -> Pipeline:
    """The pipeline of the ranks that were simulated side by side; empty where there are none."""
    recordings = {
        rank: each.recording
        for rank, each in traces.items()
        if each.recording is not None and each.recording.steps
    }
    if len(recordings) < 2 or len(recordings) < len(traces):
        return Pipeline()
    works = {rank: Work.of_steady_step(each) for rank, each in recordings.items()}
    sends = [int(_sends(each).sum()) // each.steps for each in works.values()]
    if not any(sends):  # they sent to each other before the steps alone
        return Pipeline()
    step = pipeline_step(works, machine) if has_rates(machine.gpu) else None
    computing = {} if step is None else step.computing_s
    stages = tuple(
        _stage(rank, each, memory_model, computing.get(rank), works[rank])
        for rank, each in recordings.items()
    )
    seconds = None if step is None else step.seconds
    found = transfers(works[min(works)], machine)
    others = tuple(each for each in found if each.kind != "send_receive")
    return Pipeline(stages, seconds, max(1, min(sends)), others)


def _name(kind: str) -> str:
    return kind.replace("_", "-")


def _stage(
    rank: int, recording: Recording, model: MemoryModel, computing_s: float | None, work: Work
) -> PipelineStage:
    shown, _ = model.shown(Stream.of(recording))
    figures = model.figures(shown, context_parts(recording))
    sent = int(work.column("read")[_sends(work)].sum()) // work.steps
    return PipelineStage(rank, shown.peak_allocated, figures.device_bytes, computing_s, sent)


def _sends(work: Work) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """A mask of the rows that are sends: they write nothing here."""
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
        work.is_kind("send_receive") & (work.column("depth") > 0) & (work.column("written") == 0)
    )
    return found
