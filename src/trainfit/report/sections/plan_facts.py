"""What a plan says in short: its answer, the facts that decide, what would make a job fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from trainfit.report.blocks import Facts
from trainfit.report.blocks import facts as facts_of
from trainfit.report.changes import (
    MOST,
    change_text,
    evaluation_line,
    left_out_text,
    named_remedies,
    remedy_lines,
    removed_text,
    threads_text,
    together_line,
)
from trainfit.report.lengths import solved_text
from trainfit.report.notes import (
    beyond_text,
    other_steps_text,
    protection_notes,
    spoilt_text,
    until_later_text,
)
from trainfit.report.sections.loader_figures import keeps_up_text, wrong_data_text
from trainfit.report.sections.real_runs import verdict
from trainfit.report.steps import (
    coverage_text,
    eager_text,
    half_text,
    largest_text,
    shapes_text,
    step_lines,
)
from trainfit.results.changes import LaunchPart
from trainfit.results.configuration import ALIKE, AmpChoice, Configuration, EpochEnd
from trainfit.results.findings import EPOCH_GROWTH, FAILS_LATER, LAST_BATCH, SCHEDULE_ENDS
from trainfit.results.loader import BUSY
from trainfit.results.memory import MemoryFigures
from trainfit.results.plan import PlanResult, batch_reasons, data_set_text, run_rate
from trainfit.results.speed import DataLoading, RunRate, StepSpeed
from trainfit.results.text import count, duration, rate, size, times

#: A rate that differs from another by less does not differ.
_SAME: Final = 1.05
#: Rates that differ by less are one and the same.
_EQUAL: Final = 1e-6
#: What may limit a step.
BOUNDS: Final = {
    "tensor cores": "Tensor cores",
    "shader cores": "CUDA cores",
    "bandwidth": "memory bandwidth",
    "launches": "kernel launches on the CPU",
    "host copies": "copies between host and GPU",
    "communication": "communication between GPUs",
}


# ---
# The answer in one or two sentences.


def answer(result: PlanResult) -> str:
    """Fits or not, the largest batch size, the recommended one, and how fast that is; the largest
    value of a tunable that was asked for."""
    parts = (_fits(result), _batches(result), solved_text(result.sizes))
    return " ".join(part for part in parts if part)


def _fits(result: PlanResult) -> str:
    now, chosen = result.now, result.chosen
    need, there = size(now.memory.device_bytes), size(result.gpu_memory_bytes)
    text = ""
    if now.batch_size and (now.batch_size != chosen.recommended_batch or chosen is not now):
        text = f" at batch size {now.batch_size}"
    if chosen is not now:
        text += f" with AMP {now.amp}"
    if now.rank:
        text += f" (rank {now.rank}, which needs more than rank 0)"
    text += eager_text(result.coverage)
    end = result.epoch_end
    # How many epochs there are until then tells more than what the last one needs.
    grows_until = end is not None and end.later and _subject(result, EPOCH_GROWTH)
    if now.fits and end is not None and end.fits is False and not grows_until:
        need = size(end.device_bytes or 0)
        verb = "need" if end.is_plural else "needs"
        return f"Does not fit: the {end.title} {verb} {need} of {there}{text}{_without_graph(end)}."
    if now.fits and (until := full_after(result)) is not None:
        return (
            f"Fits at first: {need} of {there}{text}, but memory grows: full after about {until}."
        )
    if now.fits and (until := _subject(result, EPOCH_GROWTH)):
        grows = f"memory grows with each epoch: full after {until}"
        return f"Fits at first: {need} of {there}{text}, but {grows}."
    if now.fits and (growth := until_bound(result)) > (ALIKE - 1) * now.memory.device_bytes:
        most = size(now.memory.device_bytes + growth)
        is_freed = result.pattern is not None and result.pattern.freed_every
        when = "at the end of an epoch" if is_freed else "once its buffer is full"
        there += f" at first, {most} {when}"
    later = _subject(result, FAILS_LATER) or _subject(result, SCHEDULE_ENDS)
    if now.fits and later:
        return f"Fits: {need} of {there}{text}, but the script fails {later}."
    if now.fits and (last := _last_batch(result)):
        return f"Fits: {need} of {there}{text}, but {last}."
    if now.fits and end is not None and end.needs_more_than(now.memory.device_bytes):
        there += f" (the {end.title}; training {need})"
        need = size(end.device_bytes or 0)
    if now.fits:
        more = (
            f"{largest_text(result.shapes)}{_released(now.memory)}"
            f"{beyond_text(now.memory, result.gpu_memory_bytes)}"
            f"{spoilt_text(result.findings)}{_not_looked_at(result)}"
        )
        return f"Fits: {need} of {there}{text}{more}."
    only = " (no simulated size fits)" if now.largest_batch == 0 else ""
    return f"Does not fit: needs {need} of {there}{text}{largest_text(result.shapes)}{only}."


def _without_graph(end: EpochEnd) -> str:
    """What it would need without the graph that nobody uses."""
    if end.without_graph_bytes is None:
        return ""
    return f" ({size(end.without_graph_bytes)} under torch.no_grad())"


def _released(memory: MemoryFigures | None) -> str:
    """A sentence that says that memory is full of blocks that PyTorch keeps, of which it releases
    what it needs; else empty."""
    if memory is None or not memory.retries:
        return ""
    return ", PyTorch releases the blocks it keeps when that is full"


def ends_early(result: PlanResult) -> bool:
    """Will the job that ``launch`` runs end before its time, by what the first line tells?

    Its memory grows until the GPU is full, or its script fails: later, where its schedule of
    learning rates ends, or with the last batch of an epoch.
    """
    size = result.chosen.recommended_batch or result.now.batch_size
    kinds = (EPOCH_GROWTH, FAILS_LATER, SCHEDULE_ENDS)
    return (
        full_after(result) is not None
        or str(size) in _failing_batches(result)
        or any(_subject(result, kind) for kind in kinds)
    )


def _subject(result: PlanResult, kind: str) -> str:
    """The subject of the finding of a kind; empty where there is none."""
    return next((finding.subject for finding in result.findings if finding.kind == kind), "")


def _failing_batches(result: PlanResult) -> list[str]:
    """Batch sizes with which an epoch's last batch fails."""
    return [finding.subject for finding in result.findings if finding.kind == LAST_BATCH]


def _last_batch(result: PlanResult) -> str:
    """A clause that says that an epoch's last batch fails, at the present batch size or the
    recommended one; else empty."""
    batches = _failing_batches(result)
    if not batches:
        return ""
    here = str(result.now.batch_size) in batches
    return "the last batch of an epoch fails" + ("" if here else f" at batch size {batches[0]}")


def _not_looked_at(result: PlanResult) -> str:
    """What of an epoch was not simulated, and why."""
    for end in (result.epoch_end, result.recommended_epoch_end):
        if end is not None and end.unseen:
            return f"; {end.unseen}"
        if end is None or end.evaluation == "simulated" or not end.reason:
            continue
        if end.evaluation == "none":
            return f"; {end.reason}"
        text = f" at batch size {end.batch_size}" if end is not result.epoch_end else ""
        return f"; evaluation not simulated{text}: {end.reason}"
    return ""


def _batches(result: PlanResult) -> str:
    chosen = result.chosen
    best, limits = chosen.recommended_batch, chosen.limits
    if result.now.fits and full_after(result) is not None:
        return "No batch size is recommended."
    if result.never_evaluates:
        return "No smaller batch size makes it fit."
    amp = amp_text(result)
    if chosen.largest_batch is None:
        if best:
            return f"Recommended batch {best}{amp}{_speed(result)}."
        unknown = "It has no batch size" if is_whole(result) else "Other batch sizes are not known"
        if amp:
            return f"Recommended:{amp}{_speed(result)}. {unknown}."
        return f"{unknown}{_speed(result)}."
    if chosen.largest_batch == 0:
        return f"Not even one sample fits{amp}."
    more = "at least " if limits is not None and limits.at_least else ""
    largest = f"Largest batch {more}{chosen.largest_batch}"
    if more and limits is not None and not limits.is_data_set(chosen.largest_batch):
        failed = limits.failed_above(chosen.largest_batch)
        largest += f" ({failed or 'larger ones not simulated'})"
    samples = (limits.data_set if limits is not None else None) or result.samples
    if samples is not None and chosen.largest_batch >= samples:
        largest = f"Any batch size fits ({data_set_text(result, samples)})"
    largest += until_later_text(result.epoch_end, chosen.limits, result.now)
    if best:
        released = _released(result.recommended) if best != result.now.batch_size else ""
        return f"{largest}, recommended {best}{amp}{_speed(result)}{released}."
    why = ": none leaves the safety margin" if best == 0 else ""
    return f"{largest}, none recommended{why}."


def amp_text(result: PlanResult) -> str:
    """The AMP of the launch command, where the present one is another."""
    chosen = result.chosen
    return f" with AMP {chosen.amp}" if chosen is not result.now else ""


def until_bound(result: PlanResult) -> int:
    """Bytes that memory grows by until what keeps it is full, where that fits."""
    pattern = result.pattern
    if pattern is None or pattern.steps_until_full is not None:
        return 0
    return pattern.grows_by_bytes or 0


def full_after(result: PlanResult) -> str | None:
    """When the GPU is full, where memory grows by too much for a batch size to be recommended."""
    pattern = result.pattern
    if pattern is None or pattern.course != "growing" or pattern.unit == "model call":
        return None
    if result.chosen.recommended_batch or pattern.steps_until_full is None:
        return None
    steps, epoch = pattern.steps_until_full, _steps_of_epoch(result)
    until = count(steps, pattern.unit)
    return f"{until}, unless an epoch's end ({count(epoch, 'step')}) frees it" if epoch else until


def _steps_of_epoch(result: PlanResult) -> int | None:
    """The steps of an epoch that ends before the GPU is full."""
    coverage, pattern = result.coverage, result.pattern
    steps = coverage.steps_per_epoch if coverage is not None else None
    full = pattern.steps_until_full if pattern is not None else None
    return steps if steps and full and steps < full else None


def _speed(result: PlanResult) -> str:
    """How fast the run will be at the recommended batch size, else at the current one."""
    run = run_rate(result)
    if run is None:
        return ""
    what = "call" if result.inference is not None else "step"
    least, most = ("at least ", "at most ") if run.is_bound else ("", "")
    run, on = of_all_ranks(run, result)
    unit = rate_unit(result)
    samples = f", {most}{rate(run.samples_per_s)} {unit}/s{on}" if run.samples_per_s else ""
    limit = limit_text(run, result.loading) + other_steps_text(result.findings)
    return f" ({least}{duration(run.step_s)} a {what}{samples}{limit})"


def rate_unit(result: PlanResult) -> str:
    """What a step has one of for each of its batch: of a call that generates text, a token."""
    return "tokens" if result.generation is not None else "samples"


def of_all_ranks(run: RunRate, result: PlanResult) -> tuple[RunRate, str]:
    """The rate with the samples of all processes of a job, and what is to be said of their
    number."""
    if result.ranks is None:
        return run, ""
    ranks, own, gpu = result.ranks.replicas, run.samples_per_s, run.gpu_samples_per_s
    whole = dataclasses.replace(
        run,
        samples_per_s=None if own is None else ranks * own,
        gpu_samples_per_s=None if gpu is None else ranks * gpu,
    )
    return whole, f" on {result.ranks.count} GPUs"


def limit_text(run: RunRate, loading: DataLoading | None = None) -> str:
    """What is to be said of the DataLoader next to a run's rate; empty where it keeps up."""
    if run.limit == "loader":
        alone = f"need {duration(run.gpu_step_s)}"
        if run.gpu_samples_per_s:
            alone = f"do {rate(run.gpu_samples_per_s)}"
        marked = f", {BUSY}" if run.loader == "busy" else ""
        return f": the DataLoader is the limit{marked}; the GPU alone would {alone}"
    if run.limit == "gpu only":
        could = "could not be" if loading is not None and loading.failure else "was not"
        return f"; GPU step only: the DataLoader {could} measured"
    return "; GPU step only: the DataLoader's rate is not known" if run.limit == "unknown" else ""


def step_at(result: PlanResult, batch: int | None) -> StepSpeed | None:
    """The step at this batch size, where it is known."""
    return result.speed.at(batch) if result.speed is not None else None


# ---
# Facts that decide a plan, each as a short text with a name.


def facts(result: PlanResult) -> Facts | None:
    """All that have a text, with how dispensable each is."""
    return facts_of(*((label, producer(result), rank) for label, rank, producer in _PRODUCERS))


def _batch(result: PlanResult) -> str:
    """Why this batch size."""
    chosen = result.chosen
    best, limits = chosen.recommended_batch, chosen.limits
    reason = limits.reason if limits is not None else ""
    if not best:
        if chosen.largest_batch is None:
            detail = reason or result.basis_detail
            return detail if is_whole(result) else f"other batch sizes are not known: {detail}"
        return f"none recommended: {reason}" if reason else ""
    if limits is None or (limits.memory is None and not reason and chosen.largest_batch is None):
        return ""
    return f"{best}: {'; '.join(batch_reasons(result, best, limits))}"


def is_whole(result: PlanResult) -> bool:
    """Has the job no batches, each step being of all samples?"""
    return (
        result.now.batch_size is None
        and result.step is not None
        and result.step.is_whole
        and result.chosen.largest_batch is None
    )


def _option(result: PlanResult) -> str:
    """A faster batch size that changes what is learned."""
    part = _option_part(result)
    return f"{part.value}: {part.reason}" if part is not None else ""


def _option_line(result: PlanResult) -> str:
    """The line of the script at which the option is written, if it is not in the command; else
    empty."""
    part = _option_part(result)
    return change_text(part) if part is not None and part.place else ""


def _option_part(result: PlanResult) -> LaunchPart | None:
    return next((part for part in result.launch_parts if part.status == "option"), None)


def _amp(result: PlanResult) -> str:
    """Autocast both ways; why another setting, where the launch command has one."""
    other, choice = result.other_amp, result.amp_choice
    if choice is not None and (
        choice.configuration or any(h.is_critical for h in choice.own_hazards)
    ):
        return choice.text
    if other is None:
        return choice.text if choice and _is_barred(choice) else ""
    grows = full_after(result) is not None
    limits = result.chosen.limits
    grows = grows or (limits is not None and limits.evaluation is not None)
    sides = "; ".join(_amp_side(each, grows=grows) for each in (result.now, other))
    return f"{_faster_amp(result, other)}{sides}{half_text(result.now, other)}"


def _is_barred(choice: AmpChoice | None) -> bool:
    """Did the script fail in a half precision that was tried, and stays as it is?"""
    hazards = choice.hazards if choice is not None and choice.configuration is None else ()
    return any(hazard.is_critical and hazard.kind in ("fails", "overflow") for hazard in hazards)


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
    """No batch size is the largest where memory ``grows`` until it is full, or where the
    evaluation limits it, which was not simulated with both."""
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
    text = f"{_time(speed.now)}, limited by {BOUNDS[speed.now.bound]}"
    if differs and best is not None:
        text = f"batch size {now.batch_size}: {text}; {now.recommended_batch}: {_time(best)}"
        if best.bound != speed.now.bound:
            text += f", limited by {BOUNDS[best.bound]}"
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
    return lines[0] if lines else ""


def _shapes(result: PlanResult) -> str:
    return shapes_text(result.shapes)


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
    cpu = result.versus_cpu
    return verdict(cpu, result.speed) if cpu is not None else ""


def _coverage(result: PlanResult) -> str:
    what, end = "step" if result.inference is None else "call", result.epoch_end
    torch = result.environment.get("torch", "?")
    run = f"{count(result.steps, what)}, torch {torch}, {duration(round(result.seconds))}"
    if end is not None and end.evaluation == "simulated":
        return f"{run}; {end.title} in a run of its own"
    return "; ".join(filter(None, (run, coverage_text(result.coverage, result.steps, what))))


def _files(result: PlanResult) -> str:
    return "; ".join(protection_notes(result.protection))


#: What is shown, in this order: its name, its detail, its text.
def _not_measured(result: PlanResult) -> str:
    """Why the DataLoader of a job that can start was not measured."""
    failed = result.loading is not None and result.loading.failure and result.can_start
    return keeps_up_text(result) if failed else ""


_PRODUCERS: tuple[tuple[str, int, Callable[[PlanResult], str]], ...] = (
    ("batch size", 0, _batch),
    ("option", 8, _option),
    ("its line", 9, _option_line),
    ("AMP", 30, _amp),
    ("step", 10, _step),
    ("samples", 25, _makeup),
    ("shapes", 22, _shapes),
    ("DataLoader", 7, _not_measured),
    ("DataLoader", 20, lambda result: "" if _not_measured(result) else keeps_up_text(result)),
    ("fault", 5, wrong_data_text),
    ("threads", 12, _threads),
    ("variables", 0, _removed),
    ("not set", 55, _left_out),
    ("gradients", 5, _gradients),
    ("CPU", 15, _cpu),
    ("files", 35, _files),
    ("simulated", 50, _coverage),
)


# ---
# What would make a job fit, or lower its memory: a line each.


#: GPUs that are named.
_GPUS: Final = 3


def fix_title(result: PlanResult) -> str:
    """What the lines of :func:`fix_lines` do."""
    return "What would make it fit" if not result.fits_now else "What lowers the memory"


def fix_lines(result: PlanResult) -> list[str]:
    """The best few, the best first; for a job that fits only what was asked for."""
    grows = full_after(result) is not None
    fits, tried = result.now.fits, result.remedies
    lines = remedy_lines(tried, fits, grows=grows) if tried is not None else []
    if result.fits_now:
        return lines[:MOST]
    now, other = result.now, result.other_amp
    first = []
    chosen = result.chosen
    best = chosen.recommended_batch
    if best and (best != now.batch_size or chosen is not now):
        first.append(f"batch size {best}{amp_text(result)}, as in the command above")
    elif now.largest_batch:
        first.append(f"batch size {now.largest_batch}, without a safety margin")
    if now.fits:  # its training, and none of the others was evaluated
        other, lines = None, [evaluation_line(result)]
        end = result.epoch_end
        if end is not None and end.without_graph_bytes is not None:
            text = f" at batch size {now.batch_size}" if now.batch_size else ""
            need = size(end.without_graph_bytes)
            first.insert(0, f"the evaluation under torch.no_grad(): {need}{text}")
    if other is not None and other.fits:
        first.append(f"AMP {other.amp}: {size(other.memory.device_bytes)}")
    elif other is not None and other.largest_batch and not now.largest_batch:
        first.append(f"AMP {other.amp}: up to batch size {other.largest_batch}")
    larger = [f"a larger GPU: {', '.join(result.other_gpus[:_GPUS])}"] if result.other_gpus else []
    asked = [] if now.fits or tried is None else named_remedies(tried)
    room = max(MOST - bool(larger), bool(first) + len(asked))
    found = [*first[:1], *lines, *first[1:]][:room] + larger
    return found or ["no single GPU of the catalogue; use a smaller model or input"]


def changes_together(result: PlanResult) -> dict[str, tuple[tuple[str, str], ...]]:
    """Lines to change for each of several remedies that fit only together, by the line of
    :func:`fix_lines` that names them."""
    tried = result.remedies
    together = tried.combination if tried is not None else None
    if tried is None or together is None or together.memory is None or not together.fits:
        return {}
    found = [each for each in tried.items if each.name in together.names]
    changes = [(each.name, line) for each in found for line in each.how]
    return {together_line(together, tried): tuple(changes)}
