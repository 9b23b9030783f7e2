"""Facts that decide a plan, each as a short text with a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from trainfit.report.plan.answer import full_after, step_at
from trainfit.report.plan.launch_parts import left_out_text, removed_text, threads_text
from trainfit.report.plan.loading import effect_text, helps, input_text
from trainfit.report.plan.versus_cpu import verdict
from trainfit.report.protection_text import protection_notes
from trainfit.report.steps.coverage import coverage_text
from trainfit.report.steps.shapes import shapes_text
from trainfit.report.steps.step import step_lines
from trainfit.results.format import duration, size, times
from trainfit.results.loader.advice import most_helpful_first
from trainfit.results.loader.result import BUSY
from trainfit.results.plan.amp import AmpChoice
from trainfit.results.plan.batch_reasons import batch_reasons
from trainfit.results.plan.configuration import Configuration
from trainfit.results.plan.result import PlanResult
from trainfit.results.plan.run_rate import run_rate
from trainfit.results.plan.speed import StepSpeed

#: A rate that differs from another by less does not differ.
_SAME = 1.05
#: Rates that differ by less are one and the same.
_EQUAL = 1e-6

_BOUNDS = {
    "tensor cores": "Tensor cores",
    "shader cores": "shader cores",
    "bandwidth": "memory bandwidth",
    "launches": "kernel launches",
    "host copies": "host copies",
}


@dataclasses.dataclass(frozen=True)
class Fact:
    """``rank`` says how dispensable it is where room is scarce; 0 is always shown."""

    label: str
    text: str
    rank: int = 0


#: Texts (without control characters made visible yet) that are shown in this order; empty ones
#: are left out.
Producer = Callable[[PlanResult], str]


def facts(result: PlanResult) -> list[Fact]:
    """All facts that have a text."""
    found = [Fact(label, producer(result), rank) for label, rank, producer in _PRODUCERS]
    return [fact for fact in found if fact.text]


def _batch(result: PlanResult) -> str:
    """Why this batch size."""
    chosen = result.chosen
    best, limits = chosen.recommended_batch, chosen.limits
    reason = limits.reason if limits is not None else ""
    if not best:
        if chosen.largest_batch is None:
            return f"other batch sizes are not known: {reason or result.basis_detail}"
        return f"none recommended: {reason}" if reason else ""
    if limits is None or (limits.memory is None and not reason and chosen.largest_batch is None):
        return ""
    return f"{best}: {'; '.join(batch_reasons(result, best, limits))}"


def _amp(result: PlanResult) -> str:
    """Autocast both ways; why another setting, where the launch command has one."""
    other, choice = result.other_amp, result.amp_choice
    if choice is not None and (choice.configuration or any(h.blocks for h in choice.own_hazards)):
        return choice.reason.removeprefix("AMP ")
    if other is None:
        return choice.reason.removeprefix("AMP ") if choice and _is_barred(choice) else ""
    grows = full_after(result) is not None
    sides = "; ".join(_amp_side(each, grows=grows) for each in (result.now, other))
    return f"{_faster_amp(result, other)}{sides}"


def _is_barred(choice: AmpChoice | None) -> bool:
    """Did the script fail in a half precision that was tried, and stays as it is?"""
    hazards = choice.hazards if choice is not None and choice.configuration is None else ()
    return any(each.blocks and each.kind in ("fails", "overflow") for each in hazards)


def _faster_amp(result: PlanResult, other: Configuration) -> str:
    """Which setting is faster at the recommended batch size, where another is faster at the present
    one, or a change of the script is recommended for it."""
    choice, now = result.amp_choice, result.now
    rates = choice.samples_per_s if choice is not None else {}
    if choice is None or not {now.amp, other.amp} <= rates.keys():
        return ""
    if not now.step_s or not other.step_s or _is_of_the_present(rates[now.amp], result):
        return ""
    fast = max(rates, key=lambda dtype: rates[dtype])
    than = now.amp if fast != now.amp else other.amp
    ratio = rates[fast] / rates[than] if rates[than] else 1.0
    is_slower_now = fast == (other.amp if now.step_s < other.step_s else now.amp)
    if ratio < _SAME or not (is_slower_now or choice.by_hand):
        return ""
    now_at = f" (batch size {now.batch_size})" if now.batch_size else ""
    return f"{fast} {times(ratio)} as fast as {than} at the recommended batch; now{now_at} "


def _is_of_the_present(samples_per_s: float, result: PlanResult) -> bool:
    """Is this the rate at the current batch size, which is recommended, or as that at the
    recommended one is not known?"""
    batch, step_s = result.now.batch_size, result.now.step_s
    if not batch or not step_s:
        return False
    is_kept = result.chosen.recommended_batch == batch
    return is_kept or abs(samples_per_s * step_s / batch - 1) < _EQUAL


def _amp_side(configuration: Configuration, *, grows: bool) -> str:
    """No batch size is the largest where memory ``grows`` until it is full."""
    step, largest = configuration.step_s, configuration.largest_batch
    parts = [duration(step) if step is not None else size(configuration.memory.device_bytes)]
    if largest is not None and not grows:
        parts.append(f"largest batch {largest}")
    return f"{configuration.amp}: {', '.join(parts)}"


def _step(result: PlanResult) -> str:
    """Step time and what limits it, also at the recommended batch size."""
    speed, now = result.speed, result.chosen
    if speed is None:
        return ""
    best = step_at(result, now.recommended_batch)
    differs = best is not None and best is not speed.now
    text = f"{_time(speed.now)}, limited by {_BOUNDS[speed.now.bound]}"
    if differs and best is not None:
        text = f"batch size {now.batch_size}: {text}; {now.recommended_batch}: {_time(best)}"
        if best.bound != speed.now.bound:
            text += f", limited by {_BOUNDS[best.bound]}"
    epoch = epoch_text(result)
    return f"{text}; epoch {epoch}" if epoch else text


def epoch_text(result: PlanResult) -> str:
    """How long an epoch of the run will last, and of what part that is; empty: not known."""
    run = run_rate(result)
    if run is None or run.epoch_s is None:
        return ""
    of = {"loader": " (by the DataLoader)", "gpu": ""}.get(run.limit, " (by the GPU alone)")
    return f"{'at least ' if run.is_bound else ''}{duration(run.epoch_s)}{of}"


def _time(step: StepSpeed) -> str:
    texts = [duration(seconds) for seconds in (step.range_s[0], step.seconds, step.range_s[1])]
    units = {text.partition(" ")[2] for text in texts}
    if len(units) > 1 or not units <= {"ms", "s"}:
        return f"{texts[1]} ({texts[0]} to {texts[2]})"
    low, now, high = (text.partition(" ")[0] for text in texts)
    return f"{now} ({low} to {high}) {units.pop()}"


def _makeup(result: PlanResult) -> str:
    """Samples of an optimizer step, where they are not those of a batch."""
    lines = step_lines(result.step)
    return lines[0].removeprefix("micro-batch ") if lines else ""


def _shapes(result: PlanResult) -> str:
    return shapes_text(result.shapes)


def _loader(result: PlanResult) -> str:
    """Does the DataLoader keep up?"""
    loading = result.loading
    if loading is None:
        return ""
    found = loading.result
    if found is None:
        return f"not tuned: {loading.failure}"
    if loading.input_at_most is not None and result.cpu is not None and not result.cpu.core_speed:
        where = result.cpu.name or "the other processor"
        return f"on {where}: {input_text(loading)}; measured here, see --explain"
    settings = f"num_workers={(loading.launched or found.recommended).num_workers}"
    factor = loading.factor or 0.0
    marked = f" ({BUSY})" if loading.evidence == "busy" else ""
    if loading.bottleneck == "unknown":
        why = f": {found.reason}" if found.faults and not found.candidates else ""
        return f"cannot tell whether {settings} keeps up{why}: see --explain"
    if loading.bottleneck == "gpu":
        more = f" ({times(factor)} the GPU's rate)" if factor >= _SAME else ""
        return f"{settings} keeps up{more}{marked}"
    most = "up to " if loading.step_is_bound else ""
    text = f"{settings} slows the step {most}{times(factor)}{marked}"
    helpful = next(filter(helps, most_helpful_first(found.advice)), None)
    if helpful is not None:
        text += f"; {effect_text(helpful)}: {helpful.summary}"
    return text


def _threads(result: PlanResult) -> str:
    """Variables and cores before the command."""
    return threads_text(result.launch_parts)


def _removed(result: PlanResult) -> str:
    """Variables that are not in the launch command any more."""
    return removed_text(result.launch_parts)


def _left_out(result: PlanResult) -> str:
    parts = result.launch_parts
    if _is_barred(result.amp_choice):  # which is another reason than that it gains nothing
        parts = tuple(part for part in parts if part.name != "amp")
    return left_out_text(parts)


def _gradients(result: PlanResult) -> str:
    """Memory of a script that does not train."""
    inference = result.inference
    if inference is None:
        return ""
    with_, without = inference.with_gradients, inference.without_gradients
    if not inference.records_gradients or with_ is None or without is None:
        return "none: the script does not train"
    return (
        f"the script does not train but records gradients: {size(without.device_bytes)} instead of "
        f"{size(with_.device_bytes)} under torch.no_grad()"
    )


def _cpu(result: PlanResult) -> str:
    found = result.versus_cpu
    return verdict(found, result.speed) if found is not None else ""


def _coverage(result: PlanResult) -> str:
    what = "step" if result.inference is None else "call"
    return coverage_text(result.coverage, result.steps, what)


def _files(result: PlanResult) -> str:
    return "; ".join(protection_notes(result.protection))


#: What is shown, in this order: its name, its rank (see :class:`Fact`), its text.
_PRODUCERS: tuple[tuple[str, int, Producer], ...] = (
    ("batch size", 0, _batch),
    ("AMP", 30, _amp),
    ("step", 10, _step),
    ("micro-batch", 25, _makeup),
    ("shapes", 22, _shapes),
    ("DataLoader", 20, _loader),
    ("threads", 12, _threads),
    ("variables", 0, _removed),
    ("not set", 55, _left_out),
    ("gradients", 5, _gradients),
    ("CPU", 15, _cpu),
    ("files", 35, _files),
    ("simulated", 50, _coverage),
)
