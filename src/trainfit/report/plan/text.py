"""A plan as text for the terminal."""

from __future__ import annotations

from trainfit.report.memory_parts import breakdown_section, memory_section
from trainfit.report.notes import notes_section, plain, plan_notes, protection_notes
from trainfit.report.plan.launch import change_lines, launch_lines, parts_section
from trainfit.report.plan.loading import loading_section
from trainfit.report.plan.remedies import inference_section, remedies_section
from trainfit.report.plan.speed import answer, speed_section
from trainfit.report.sections.real_runs import versus_cpu_facts
from trainfit.report.steps import coverage_text, only_seen, shapes_text, step_lines
from trainfit.results.configuration import BatchCheck, BatchLimits, Configuration
from trainfit.results.files.contents import Note
from trainfit.results.findings import Finding
from trainfit.results.gpus import NO_TENSOR_CORES
from trainfit.results.plan import PlanResult, run_rate
from trainfit.results.speed import KNEE
from trainfit.results.text import count, duration, percent, printable, size, wrapped

#: Column of the text next to a batch size.
_COLUMN = 31
#: Larger GPUs that are named.
_GPUS = 4

_BASIS = {
    "two traces": "from two simulated batch sizes",
    "one trace a batch size": "each one simulated",
    "one trace": "only the current one was simulated",
}


def plan_text(result: PlanResult) -> str:
    """The whole plan: figures now, what they consist of, batch sizes, launch command."""
    now = result.now
    fits = "" if now.fits else ": DOES NOT FIT"
    detail = []
    if result.basis_detail and now.largest_batch is not None:
        detail = [Note("note", result.basis_detail)]
    parts = [
        wrapped(printable(answer(result)), "", "  "),
        "\n".join(filter(None, [_title(result), _simulated(result)])),
        memory_section(f"Memory {_at(now)}{fits}", now.memory),
        breakdown_section(now.by_kind_bytes, now.by_module_bytes, now.memory.allocated_bytes),
        _batch_section(result),
        _amp_section(result),
        speed_section(result.speed, run_rate(result)) if result.speed is not None else "",
        _versus_cpu(result),
        inference_section(result.inference) if result.inference is not None else "",
        remedies_section(result.remedies) if result.remedies is not None else "",
        loading_section(result.loading, result) if result.loading is not None else "",
        notes_section([*plan_notes(result), *detail, *plain(protection_notes(result.protection))]),
        _launch_section(result),
    ]
    return "\n\n".join(part for part in parts if part)


def _versus_cpu(result: PlanResult) -> str:
    found = versus_cpu_facts(result.versus_cpu, result.speed) if result.versus_cpu else None
    rows = found.rows if found is not None else ()
    lines = [wrapped(printable(row.text), f"  {row.label:<10}", " " * 12) for row in rows]
    title = "Is a GPU worth it? The same command on this machine's CPU"
    return "\n".join([title, *lines]) if lines else ""


def _title(result: PlanResult) -> str:
    torch = printable(result.environment.get("torch", ""))
    what = "optimizer step" if result.inference is None else "model call"
    steps = count(result.steps, what)
    others = result.other_processes_bytes
    held = f", of which other processes hold {size(others)}" if others else ""
    return wrapped(
        f"{printable(result.gpu)}, {size(result.gpu_memory_bytes)}{held} "
        f"({steps} simulated, torch {torch}, {duration(round(result.seconds))})",
        "",
        "  ",
    )


def _simulated(result: PlanResult) -> str:
    """What was among the steps; nothing in files of versions that did not say."""
    what = "step" if result.inference is None else "call"
    texts = {
        "Simulated": coverage_text(result.coverage, result.steps, what),
        "Shapes": shapes_text(result.shapes),
    }
    return "\n".join(
        wrapped(printable(f"{title}: {text}"), "", "  ") for title, text in texts.items() if text
    )


def _at(configuration: Configuration) -> str:
    batch = configuration.batch_size
    where = f"batch size {batch}" if batch else "the current batch size"
    return f"at {where}, AMP {printable(configuration.amp)}"


def _batch_section(result: PlanResult) -> str:
    now, chosen = result.now, result.chosen
    title = f"Batch size ({_BASIS[result.basis]}{only_seen(result.pattern)})"
    if chosen is not now:
        title = f"Batch size with AMP {printable(chosen.amp)}{title.removeprefix('Batch size')}"
    title = "\n".join([title, *(wrapped(line, "  ", "    ") for line in step_lines(result.step))])
    if chosen.largest_batch is None:
        return "\n".join([title, *_unknown(result)])
    if chosen.largest_batch == 0:
        return "\n".join(
            [title, "  not even one sample fits. What would help:", *_remedies(result)]
        )
    limits = chosen.limits
    bound = _at_least(limits, chosen.largest_batch)
    lines = [title, _batch_row("largest batch", chosen.largest_batch, bound)]
    lines += _recommended(result)
    if not now.fits:
        lines.append(f"  the current batch size, {now.batch_size}, does not fit. What would help:")
        lines += _remedies(result)
    return "\n".join(lines)


def _unknown(result: PlanResult) -> list[str]:
    """Nothing but the current batch size could be judged."""
    detail = wrapped(f"others are not known: {printable(result.basis_detail)}", "  ", "  ")
    if result.now.fits:
        limits = result.now.limits
        why = printable(limits.reason) if limits is not None else ""
        kept = f"recommended: the current one ({why})" if why else "the current one fits"
        return [wrapped(kept, "  ", "  "), detail]
    return ["  the current one does not fit. What would help:", *_remedies(result), detail]


def _recommended(result: PlanResult) -> list[str]:
    chosen, memory = result.chosen, result.recommended
    best, limits = chosen.recommended_batch, chosen.limits
    lines = []
    if limits is not None and limits.data_set is not None and _is_bound(limits):
        lines.append(_batch_row("the data set has", limits.data_set, "samples: at most one batch"))
    if not best:
        return [*lines, *_none(result)]
    share = percent(result.headroom_share, decimals=1)
    margin = f"with {share} of the GPU free, as set"
    if not result.headroom_is_set:
        margin = f"with a {share} safety margin (upper bound of the prediction interval)"
    why = "the current one; " if best == result.now.batch_size else ""
    why += _why(best, limits, margin)
    if limits is not None and limits.memory is not None and best < limits.memory:
        at_least = _at_least(limits, limits.memory)
        text = f"{at_least}{'; ' if at_least else ''}largest batch {margin}"
        lines.append(_batch_row("with the margin", limits.memory, text))
    has_tensor_cores = result.gpu_sources.get("tensor_flops") != NO_TENSOR_CORES
    if has_tensor_cores and best >= 8 and best % 8 == 0 and result.basis == "two traces":
        why += ", as a multiple of 8 (tensor cores)"
    lines.append(_batch_row("recommended", best, why))
    if memory is not None:
        lines.append(
            f"{'':{_COLUMN}}allocated {size(memory.allocated_bytes)}, reserved "
            f"{size(memory.reserved_bytes)}, device {size(memory.device_bytes)}"
        )
    checked = _checked(result.batch_check)
    if checked:
        lines.append(wrapped(checked, " " * _COLUMN, " " * _COLUMN))
    if limits is not None and limits.epoch_steps is not None:
        what = f"an epoch of {limits.data_set} samples is then {count(limits.epoch_steps, 'step')}"
        lines.append(wrapped(what, " " * _COLUMN, " " * _COLUMN))
    if limits is not None and limits.noise_scale is not None:
        text = "as given; about here (within 3 times) the same loss needs twice the samples"
        lines.append(_batch_row("noise scale", round(limits.noise_scale), text))
    return lines


def _checked(check: BatchCheck | None) -> str:
    """Was it simulated, and how far from it was what followed from other batch sizes?"""
    if check is None:
        return ""
    if check.reason:
        return f"not simulated itself: {printable(check.reason)}"
    shares = (("reserved", check.peak_share), ("step", check.step_share))
    against = ", ".join(f"{what} {share:+.1%}" for what, share in shares if share is not None)
    return f"simulated itself; against the rule from others: {against}" if against else ""


def _at_least(limits: BatchLimits | None, batch: int) -> str:
    """Said of a figure above which none was simulated."""
    if limits is None or not limits.at_least:
        return ""
    full = "the data set has no more"
    return f"at least; {full if limits.is_data_set(batch) else 'no larger batch was simulated'}"


def _is_bound(limits: BatchLimits) -> bool:
    """Does the data set bound the batch size before memory does?"""
    return limits.memory is None or (limits.data_set or 0) <= limits.memory


def _why(best: int, limits: BatchLimits | None, margin: str) -> str:
    """Why this batch size and no other."""
    if limits is not None and limits.reason:
        return printable(limits.reason)
    if limits is None or limits.memory is None or best >= limits.memory:
        return f"largest batch {margin}"
    if best == limits.data_set:
        return "the whole data set"
    if limits.trains is not None:
        return (
            f"the smallest with {percent(KNEE)} of the fastest training at this noise scale "
            "(predicted)"
        )
    return (
        f"saturation batch size (smallest with {percent(KNEE)} of the best throughput; predicted)"
    )


def _none(result: PlanResult) -> list[str]:
    best, limits = result.chosen.recommended_batch, result.chosen.limits
    if limits is not None and limits.reason:
        return [wrapped(f"none: {printable(limits.reason)}", f"  {'recommended':<20}  ", "  ")]
    free = f"{percent(result.headroom_share, decimals=1)} of the GPU free"
    none = "no simulated batch size leaves" if best is None else "no batch size leaves"
    return [f"  {'recommended':<20}  none: {none} {free}"]


def _batch_row(title: str, batch: int | str, text: str = "") -> str:
    start = f"  {title:<18} {batch:>7}".ljust(_COLUMN)
    return wrapped(text, start, " " * _COLUMN) if text else start.rstrip()


def _remedies(result: PlanResult) -> list[str]:
    """Changes that make the job fit; for a larger GPU, at the current batch size."""
    lines = []
    now, other = result.now, result.other_amp
    if result.chosen.recommended_batch and result.chosen.recommended_batch != now.batch_size:
        lines.append(f"  - batch size {result.chosen.recommended_batch}, as in the command below")
    elif now.largest_batch:
        lines.append(f"  - batch size {now.largest_batch}, without a safety margin")
    if other is not None and other.largest_batch:
        lines.append(f"  - AMP {printable(other.amp)}: up to batch size {other.largest_batch}")
    elif other is not None and other.fits:
        lines.append(f"  - AMP {printable(other.amp)}, at the current batch size")
    if result.other_gpus:
        named = ", ".join(map(printable, result.other_gpus[:_GPUS]))
        batch = f"batch size {now.batch_size}" if now.batch_size else "the current batch size"
        lines.append(f"  - a larger GPU, at {batch}: {named}")
    if not lines:
        lines.append("  - no single GPU of the catalogue; use a smaller model or input")
    return lines


def _amp_section(result: PlanResult) -> str:
    other, choice = result.other_amp, result.amp_choice
    if other is None and choice is None:
        return ""
    lines = ["Mixed precision (AMP)"]
    for configuration in filter(None, (result.now, other)):
        memory, largest = configuration.memory, configuration.largest_batch
        at_most = "" if largest is None else f", largest batch {largest}"
        step = configuration.step_s
        step_words = "" if step is None else f", a step {duration(step)} (predicted)"
        text = (
            f"allocated {size(memory.allocated_bytes)}, reserved {size(memory.reserved_bytes)}"
            f"{at_most}{step_words}"
        )
        lines.append(wrapped(text, f"  {printable(configuration.amp):<10} ", " " * 13))
    if choice is not None:
        reasons = (choice.reason, choice.by_hand, choice.memory_reason, choice.time_reason)
        said = (*filter(None, reasons), *map(_hazard, choice.told_hazards))
        lines += [wrapped(printable(text), "  ", "    ") for text in said]
    return "\n".join(lines)


def _hazard(hazard: Finding) -> str:
    place = f" ({hazard.place})" if hazard.place is not None else ""
    return f"hazard in {hazard.subject}{place}: {hazard.title}" + (
        f"; {hazard.fix.action}" if hazard.fixes else ""
    )


def _launch_section(result: PlanResult) -> str:
    if not result.can_start:
        return ""
    changes = change_lines(result.launch_parts)
    lines = [wrapped(printable(each), "  - ", "    ") for each in changes]
    whole = "\n".join(["Launch", launch_lines(result.launch), *lines])
    return "\n\n".join(filter(None, (whole, parts_section(result.launch_parts))))
