"""The answer of a plan in one or two sentences."""

from __future__ import annotations

from trainfit.results.format import count, duration, rate, size
from trainfit.results.loader.result import BUSY
from trainfit.results.plan.loading import RunRate
from trainfit.results.plan.result import PlanResult
from trainfit.results.plan.run_rate import run_rate
from trainfit.results.plan.speed import StepSpeed


def answer(result: PlanResult) -> str:
    """Fits or not, the largest batch size, the recommended one, and how fast that is."""
    return " ".join(part for part in (_fits(result), _batches(result)) if part)


def _fits(result: PlanResult) -> str:
    now, chosen = result.now, result.chosen
    need, there = size(now.memory.device_bytes), size(result.gpu_memory_bytes)
    at = ""
    if now.batch_size and (now.batch_size != chosen.recommended_batch or chosen is not now):
        at = f" at batch size {now.batch_size}"
    if chosen is not now:
        at += f" with AMP {now.amp}"
    if now.fits and (until := full_after(result)) is not None:
        return f"Fits at first: {need} of {there}{at}, but memory grows: full after about {until}."
    if now.fits:
        return f"Fits: {need} of {there}{at}."
    only = " (no simulated size fits)" if now.largest_batch == 0 else ""
    return f"Does not fit: needs {need} of {there}{at}{only}."


def _batches(result: PlanResult) -> str:
    chosen = result.chosen
    best, limits = chosen.recommended_batch, chosen.limits
    if result.now.fits and full_after(result) is not None:
        return "No batch size is recommended."
    amp = f" with AMP {chosen.amp}" if chosen is not result.now else ""
    if chosen.largest_batch is None:
        if best:
            return f"Recommended batch {best}{amp}{_speed(result)}."
        return f"Other batch sizes are not known{_speed(result)}."
    if chosen.largest_batch == 0:
        return f"Not even one sample fits{amp}."
    more = "at least " if limits is not None and limits.at_least else ""
    largest = f"Largest batch {more}{chosen.largest_batch}"
    if more and limits is not None and not limits.is_data_set(chosen.largest_batch):
        largest += " (larger ones not simulated)"
    if result.samples is not None and chosen.largest_batch >= result.samples:
        largest = f"Any batch size fits (the data set has {result.samples} samples)"
    if best:
        return f"{largest}, recommended {best}{amp}{_speed(result)}."
    why = ": none leaves the safety margin" if best == 0 else ""
    return f"{largest}, none recommended{why}."


def full_after(result: PlanResult) -> str | None:
    """When the GPU is full, where memory grows by too much for a batch size to be recommended."""
    pattern = result.pattern
    if pattern is None or pattern.course != "growing" or pattern.unit != "optimizer step":
        return None
    if result.chosen.recommended_batch or pattern.steps_until_full is None:
        return None
    return count(pattern.steps_until_full, "optimizer step")


def _speed(result: PlanResult) -> str:
    """How fast the run will be at the recommended batch size, else at the current one."""
    run = run_rate(result)
    if run is None:
        return ""
    what = "call" if result.inference is not None else "step"
    least, most = ("at least ", "at most ") if run.is_bound else ("", "")
    samples = f", {most}{rate(run.samples_per_s)} samples/s" if run.samples_per_s else ""
    return f" ({least}{duration(run.step_s)} a {what}{samples}{limit_text(run)})"


def limit_text(run: RunRate) -> str:
    """What is to be said of the DataLoader next to a run's rate; empty where it keeps up."""
    if run.limit == "loader":
        alone = f"need {duration(run.gpu_step_s)}"
        if run.gpu_samples_per_s:
            alone = f"do {rate(run.gpu_samples_per_s)}"
        marked = f", {BUSY}" if run.loader == "busy" else ""
        return f": the DataLoader is the limit{marked}; the GPU alone would {alone}"
    if run.limit == "gpu only":
        return "; GPU step only: the DataLoader was not measured"
    return "; GPU step only: the DataLoader's rate is not known" if run.limit == "unknown" else ""


def step_at(result: PlanResult, batch: int | None) -> StepSpeed | None:
    """The step at this batch size, where it is known."""
    return result.speed.at(batch) if result.speed is not None else None
