"""Scripts that do not train: what they need with gradients recorded, and without."""

from __future__ import annotations

from trainfit.memory.stream.replay import Stream
from trainfit.plan.runs.failures import NotSimulated, what_happened
from trainfit.plan.runs.runs import Runs, Variant
from trainfit.plan.runs.tracing import Trace
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.results.memory.figures import MemoryFigures
from trainfit.results.plan.result import Inference
from trainfit.results.runs.trace import InterventionRequest


def gradients_both_ways(
    runs: Runs, memory_model: MemoryModel, batch: int | None, first: Trace
) -> Inference:
    """The memory of ``first``, and of the same with gradients the other way round."""
    records = first.outcome.forward.with_grad > 0
    request = InterventionRequest("forward-grad", ("off" if records else "on",))
    title = "gradients off" if records else "gradients on"
    mine, others, failure = _figures(memory_model, first), None, ""
    try:
        other = runs.attempt(batch, Variant(interventions=(request,), title=title))
    except NotSimulated as error:
        return _inference(records, mine, None, str(error))
    if other.recording is not None and other.outcome.steps >= first.outcome.steps:
        others = _figures(memory_model, other)
    else:
        failure = what_happened(other.outcome)
    return _inference(records, mine, others, failure)


def _inference(
    records: bool, mine: MemoryFigures, others: MemoryFigures | None, failure: str
) -> Inference:
    return Inference(
        records_gradients=records,
        without_gradients=others if records else mine,
        with_gradients=mine if records else others,
        failure=failure,
    )


def _figures(memory_model: MemoryModel, trace: Trace) -> MemoryFigures:
    assert trace.recording is not None
    return memory_model.figures(memory_model.shown(Stream.of(trace.recording))[0])
