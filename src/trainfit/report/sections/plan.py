"""A plan: the answer, what to run, and why; batch sizes, precision, remedies, the DataLoader."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from trainfit.report.blocks import (
    Facts,
    Headline,
    Item,
    Items,
    Section,
    Snippet,
    Subject,
    Table,
    Tile,
    Tone,
    facts,
    items,
    rows,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.changes import change_lines, memory_text, remedies_sections, why
from trainfit.report.lengths import generation_sections, length_sections
from trainfit.report.notes import (
    finding_items,
    note_text,
    plain,
    plan_notes,
    protection_notes,
    short_place,
)
from trainfit.report.sections import plan_facts, plan_ranks
from trainfit.report.sections.loader import loader_sections
from trainfit.report.sections.loader_figures import loading_facts
from trainfit.report.sections.memory import (
    INTERVALS,
    figures_table,
    peak_facts,
    peak_sections,
    quantities,
)
from trainfit.report.sections.memory_charts import by_batch
from trainfit.report.sections.plan_facts import (
    BOUNDS,
    amp_text,
    answer,
    changes_together,
    fix_lines,
    fix_title,
    rate_unit,
    step_at,
)
from trainfit.report.sections.real_runs import versus_cpu_facts
from trainfit.report.sections.speed import speed_sections
from trainfit.report.steps import only_seen, step_lines
from trainfit.results.changes import LaunchPart
from trainfit.results.configuration import BatchCheck, BatchLimits, Configuration
from trainfit.results.files.contents import Note
from trainfit.results.findings import Finding
from trainfit.results.gpus import NO_TENSOR_CORES
from trainfit.results.plan import Inference, JobDetail, PlanResult, largest_words, run_rate
from trainfit.results.speed import KNEE, StepSpeed
from trainfit.results.text import count, duration, percent, rate, size, times

_STATUS: Final = {
    "set": "set",
    "kept": "kept",
    "not set": "left unset",
    "by hand": "change in the script",
    "cannot tell": "cannot tell",
    "option": "option, not in the launch command",
}
_LOADER: Final = {
    "gpu": "keeps up with the GPU",
    "loader": "is the bottleneck",
    "unknown": "not known whether it keeps up",
}
_ORDER: Final = ("set", "by hand", "option", "kept", "not set", "cannot tell")


_BASIS: Final = {
    "two traces": "from two simulated batch sizes",
    "one trace a batch size": "each one simulated",
    "one trace": "only the current one was simulated",
}


def plan_subject(
    result: PlanResult, detail: JobDetail | None = None, *, with_loader: bool = True
) -> Subject:
    """All of a plan, with what its recordings tell (``detail``).

    ``with_loader``: with what it holds of the DataLoader.
    """
    now = result.now
    noted = plan_notes(result)
    detailed = result.basis_detail if now.largest_batch is not None else ""
    notes = [
        *(note for note in noted if note.kind != "action"),
        *([Note("note", detailed)] if detailed else []),
        *plain(protection_notes(result.protection)),
    ]
    actions = [note_text(note) for note in noted if note.kind == "action"]
    loading = result.loading if with_loader else None
    measured = loading.result if loading is not None else None
    return Subject(
        Headline(
            kind="Plan",
            tone="good" if result.fits_now and result.can_start else "bad",
            text=answer(result),
            limit=_limit(result),
            subject=f"{result.command} on {result.gpu}",
            commands=(Snippet(result.launch, "Run"),) if result.can_start else (),
            changes=(*change_lines(result.launch_parts), *actions),
            tiles=_tiles(result),
        ),
        (
            *section("What is wrong", finding_items(result.findings, detail=1)),
            *_memory(result),
            *section("Batch size and speed (predicted)", plan_facts.facts(result)),
            *section(plan_ranks.ranks_title(result), plan_ranks.ranks_facts(result)),
            *section(plan_ranks.gpus_title(result), plan_ranks.gpus_facts(result)),
            *length_sections(result.sizes, result.gpu_memory_bytes),
            *generation_sections(result.generation),
            *section(fix_title(result), _fixes(result)),
            *section("Why these settings", _reasons(result)),
            *section(_batch_title(result), _batches(result)),
            *section("Mixed precision (AMP)", *_precision(result)),
            *peak_sections(now.by_kind_bytes, now.by_module_bytes, result.gpu_memory_bytes, detail),
            *section("Memory by batch size", by_batch(result, detail) if detail else None),
            *speed_sections(result, detail),
            *section("Is a GPU worth it?", versus_cpu_facts(result.versus_cpu, result.speed)
                     if result.versus_cpu is not None else None),
            *section("Gradients (inference: no optimizer step was seen)",
                     *gradients_facts(result.inference)),
            *remedies_sections(result.remedies),
            *section("Data loading", loading_facts(loading, result) if loading else None),
            *(loader_sections(measured, settings=False) if measured is not None else ()),
        ),
        tuple(notes),
    )  # fmt: skip


def _computes_in(now: Configuration) -> str:
    return f"{now.amp} by FSDP's mixed precision" if now.by_fsdp else f"AMP {now.amp}"


def _memory(result: PlanResult) -> list[Section]:
    now, best = result.now, result.chosen.recommended_batch
    unnamed = "all samples" if plan_facts.is_whole(result) else "the current batch size"
    present = f"batch size {now.batch_size}" if now.batch_size else unnamed
    present += f", rank {now.rank}" if now.rank else ""
    columns = {present: now.memory}
    other = f"AMP {result.chosen.amp}" if result.chosen is not now else ""
    if result.recommended is not None and best and (best != now.batch_size or other):
        columns[f"batch size {best}, {other or 'recommended'}"] = result.recommended
    others = result.other_processes_bytes
    return section(
        f"Memory on {result.gpu}, {_computes_in(now)} ({INTERVALS})",
        figures_table(columns),
        peak_facts(now.by_kind_bytes, now.by_module_bytes, now.memory.allocated_bytes),
        facts(
            (_evaluation_label(result), _evaluation(result), 5),
            ("held", f"{size(others)} by other processes" if others else "", 20),
        ),
        quantities(now.memory),
    )


def _evaluation_label(result: PlanResult) -> str:
    end = result.epoch_end
    if end is None or (end.evaluation == "simulated" and end.is_of_epoch):
        return "evaluation"
    return end.title


def _evaluation(result: PlanResult) -> str:
    """What the evaluation needs, where that is more than training does."""
    texts = []
    pairs = (
        (result.epoch_end, result.now.memory),
        (result.recommended_epoch_end, result.recommended),
    )
    for end, training in pairs:
        if end is None or end.device_bytes is None or end.allocated_bytes is None:
            continue
        if training is not None and not end.needs_more_than(training.device_bytes):
            continue
        phrase = f"batch size {end.batch_size}: " if end.batch_size else ""
        text = f"{phrase}allocated {size(end.allocated_bytes)}, device {size(end.device_bytes)}"
        if end.batch_bytes and end.batches:
            kept = "" if end.kept_at is None else f", kept at {short_place(end.kept_at)}"
            text += f" ({size(end.batch_bytes)} more with each of {end.batches} batches{kept})"
        if end.later is not None:
            text += f", from {short_place(end.later)} on"
        if end.final is not None:
            text += f", {short_place(end.final)}"
        texts.append(text)
    return "; ".join(texts)


def _fixes(result: PlanResult) -> Items | None:
    tone: Tone = "plain" if result.fits else "warn"
    changes = changes_together(result)
    return items(
        [
            Item(line, tone, "", rows(*((*pair, 6) for pair in changes.get(line, ()))), detail=6)
            for line in fix_lines(result)
        ]
    )


def _reasons(result: PlanResult) -> Table | None:
    """Each parameter with its reason and evidence."""
    parts = sorted(_grouped(result.launch_parts), key=lambda part: _ORDER.index(part.status))
    return table_of(
        ("Parameter", "Value", "Why", "Evidence"),
        [(part.name, _value(part), why(part), _evidence(part))
         for part in parts],
        "Each part of the launch command, and what was left out of it",
        marked=[place for place, part in enumerate(parts) if part.status in ("set", "by hand")],
    )  # fmt: skip


def _grouped(parts: Sequence[LaunchPart]) -> list[LaunchPart]:
    """Parts that are left out for one reason are one row."""
    groups: dict[tuple[str, ...], list[LaunchPart]] = {}
    for part in parts:
        left_out = part.status in ("not set", "cannot tell") and not part.present
        own = () if left_out else (part.name,)
        key = (part.status, why(part), part.evidence, part.machine, *own)
        groups.setdefault(key, []).append(part)
    return [
        dataclasses.replace(group[0], name=", ".join(part.name for part in group))
        for group in groups.values()
    ]


def _limit(result: PlanResult) -> str:
    """What limits the job: the GPU's part that bounds a step, or the DataLoader."""
    step = step_at(result, result.chosen.recommended_batch or result.now.batch_size)
    parts = []
    loading, run = result.loading, run_rate(result)
    if run is not None and run.limit == "loader":
        by = times(run.step_s / run.gpu_step_s)
        parts.append(f"What limits: the DataLoader, which is {by} too slow for the GPU")
    elif step is not None:
        share = ""
        if loading is not None and loading.bottleneck == "gpu":
            share = "; the DataLoader keeps up"
        parts.append(f"What limits: {BOUNDS[step.bound]}{share}")
    if not result.fits:
        parts.insert(0, f"What limits: memory of {result.gpu} ({size(result.gpu_memory_bytes)})")
    return ". ".join(parts[:1]) + "." if parts else ""


def _tiles(result: PlanResult) -> tuple[Tile, ...]:
    chosen = result.chosen
    best = chosen.recommended_batch
    memory = result.recommended if result.recommended is not None and best else result.now.memory
    at = best if result.recommended is not None and best else result.now.batch_size
    share = memory.device_bytes / result.gpu_memory_bytes
    tone: Tone = "bad" if share > 1 else "plain"
    tiles = [
        Tile(
            "GPU memory",
            size(memory.device_bytes),
            f"{percent(share)} of {size(result.gpu_memory_bytes)}"
            + (f" at batch size {at}" if at else ""),
            min(share, 1.0),
            tone,
        )
    ]
    if chosen.largest_batch is not None:
        more = chosen.limits is not None and chosen.limits.at_least
        tiles.append(
            Tile(
                "Batch size",
                str(best or "-"),
                f"recommended; largest {'at least ' if more else ''}{chosen.largest_batch}",
            )
        )
    step = step_at(result, best or result.now.batch_size)
    if step is not None:
        tiles += _speed_tiles(result, step)
    loading = result.loading
    if loading is not None and loading.result is not None:
        settings = loading.launched or loading.result.recommended
        tiles.append(
            Tile(
                "DataLoader",
                count(settings.num_workers, "worker"),
                _LOADER[loading.bottleneck],
                tone="bad" if loading.bottleneck == "loader" else "plain",
            )
        )
    return tuple(tiles)


def _speed_tiles(result: PlanResult, step: StepSpeed) -> Iterator[Tile]:
    """The speed of the launched run, which may be slower than ``step``, the GPU's."""
    run = run_rate(result)
    if run is None:
        return
    low, high = step.range_s
    what = "Call" if result.inference is not None else "Step"
    least = "at least " if run.is_bound else ""
    detail = f"predicted, {duration(low)} to {duration(high)}"
    if run.limit == "loader":
        detail = f"by the DataLoader; the GPU alone {duration(run.gpu_step_s)}"
    elif run.limit != "gpu":
        detail += "; the GPU alone"
    yield Tile(what, f"{least}{duration(run.step_s)}", detail)
    if run.samples_per_s:
        epoch = f"; an epoch in {least}{duration(run.epoch_s)}" if run.epoch_s else ""
        most = "at most " if run.is_bound else ""
        detail = f"{rate_unit(result)} a second{epoch}"
        yield Tile("Throughput", f"{most}{rate(run.samples_per_s)}/s", detail)


def _value(part: LaunchPart) -> str:
    value = part.line if part.status == "by hand" and part.line else part.value
    was = f" (was {part.present})" if part.present and part.present != part.value else ""
    status = "" if part.status == "set" else _STATUS[part.status]
    return f"{value}{was}" + (f" · {status}" if status and value else status)


def _evidence(part: LaunchPart) -> str:
    return ", ".join(each for each in (part.evidence, part.machine) if each) or "-"


# -- batch sizes -------------------------------------------------------------------------------


def _batch_title(result: PlanResult) -> str:
    return f"Batch size{amp_text(result)} ({_BASIS[result.basis]}{only_seen(result.pattern)})"


def _batches(result: PlanResult) -> Facts | None:
    chosen = result.chosen
    largest, limits = chosen.largest_batch, chosen.limits
    makeup = [("a step", line) for line in step_lines(result.step)]
    if largest is None:
        why = limits.reason if limits is not None else ""
        kept = "the current one does not fit"
        if result.now.fits:
            kept = f"the current one{f' ({why})' if why else ' fits'}"
        if plan_facts.is_whole(result):
            return facts(*makeup, ("others", f"none: {result.basis_detail}"))
        return facts(
            *makeup, ("recommended", kept), ("others", f"not known: {result.basis_detail}")
        )
    if not largest:
        return facts(*makeup, ("largest batch", "not even one sample fits"))
    bound = _at_least(limits, largest)
    return facts(
        *makeup,
        ("largest batch", f"{largest}{f' ({bound})' if bound else ''}"),
        *_recommended(result),
        lines=5,
    )


def _recommended(result: PlanResult) -> list[tuple[str, str]]:
    chosen, memory = result.chosen, result.recommended
    best, limits = chosen.recommended_batch, chosen.limits
    told = []
    if limits is not None and limits.data_set is not None and _is_bound(limits):
        told.append(("data set", f"{limits.data_set} samples: at most one batch"))
    if not best:
        return [*told, ("recommended", _none(result))]
    free = percent(result.headroom_share, decimals=1)
    margin = f"with {free} of the GPU free, as set"
    if not result.headroom_is_set:
        margin = f"with a {free} safety margin (upper bound of the prediction interval)"
    why = "the current one; " if best == result.now.batch_size else ""
    why += _why(best, limits, margin)
    if limits is not None and limits.memory is not None and best < limits.memory:
        least = _at_least(limits, limits.memory)
        told.append(("with the margin", f"{limits.memory}: {least}{'; ' if least else ''}largest "
                                        f"batch {margin}"))  # fmt: skip
    has_tensor_cores = result.gpu_sources.get("tensor_flops") != NO_TENSOR_CORES
    if has_tensor_cores and best >= 8 and best % 8 == 0 and result.basis == "two traces":
        why += ", as a multiple of 8 (tensor cores)"
    told.append(("recommended", f"{best}: {why}"))
    if memory is not None:
        told.append(("its memory", memory_text(memory)))
    told.append(("checked", _checked(result.batch_check)))
    if limits is not None and limits.epoch_steps is not None:
        steps = count(limits.epoch_steps, "step")
        told.append(("an epoch", f"of {limits.data_set} samples is then {steps}"))
    if limits is not None and limits.noise_scale is not None:
        text = "as given; about here (within 3 times) the same loss needs twice the samples"
        told.append(("noise scale", f"{limits.noise_scale:.0f}: {text}"))
    return told


def _checked(check: BatchCheck | None) -> str:
    """Was it simulated, and how far from it was what followed from other batch sizes?"""
    if check is None:
        return ""
    if check.reason:
        return f"not simulated itself: {check.reason}"
    shares = (("reserved", check.peak_share), ("step", check.step_share))
    against = ", ".join(f"{what} {share:+.1%}" for what, share in shares if share is not None)
    return f"simulated itself; against the rule from others: {against}" if against else ""


def _at_least(limits: BatchLimits | None, batch: int) -> str:
    """Said of a figure above which none was simulated."""
    if limits is None or not limits.at_least:
        return ""
    if limits.is_data_set(batch):
        return "at least; the data set has no more"
    return f"at least; {limits.failed_above(batch) or 'no larger batch was simulated'}"


def _is_bound(limits: BatchLimits) -> bool:
    """Does the data set bound the batch size before memory does?"""
    return limits.memory is None or (limits.data_set or 0) <= limits.memory


def _why(best: int, limits: BatchLimits | None, margin: str) -> str:
    """Why this batch size and no other."""
    if limits is not None and limits.reason:
        return limits.reason
    if limits is None or limits.memory is None or best >= limits.memory:
        return f"{largest_words(best, limits)} {margin}"
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


def _none(result: PlanResult) -> str:
    best, limits = result.chosen.recommended_batch, result.chosen.limits
    if limits is not None and limits.reason:
        return f"none: {limits.reason}"
    free = f"{percent(result.headroom_share, decimals=1)} of the GPU free"
    return f"none: no {'simulated ' if best is None else ''}batch size leaves {free}"


# -- precision, gradients ----------------------------------------------------------------------


def _precision(result: PlanResult) -> list[Table | Facts | None]:
    other, choice = result.other_amp, result.amp_choice
    if other is None and choice is None:
        return []
    sides = [side for side in (result.now, other) if side is not None]
    reasons: tuple[str, ...] = ()
    if choice is not None:
        reasons = (f"AMP {choice.text}", choice.by_hand, choice.memory_reason, choice.time_reason,
                   *map(_hazard, choice.told_hazards))  # fmt: skip
    return [
        table_of(
            ("AMP", "Allocated", "Reserved", "Largest batch", "Step (predicted)"),
            [
                (
                    side.amp,
                    size(side.memory.allocated_bytes),
                    size(side.memory.reserved_bytes),
                    "-" if side.largest_batch is None else str(side.largest_batch),
                    duration(side.step_s),
                )
                for side in sides
            ],
            numeric=(1, 2, 3, 4),
        ),
        facts(
            *(("" if index else "chosen", text) for index, text in enumerate(filter(None, reasons)))
        ),
    ]


def _hazard(hazard: Finding) -> str:
    place = f" ({hazard.place})" if hazard.place is not None else ""
    return f"hazard in {hazard.subject}{place}: {hazard.title}" + (
        f"; {hazard.fix.action}" if hazard.fixes else ""
    )


def gradients_facts(inference: Inference | None) -> list[Facts | None]:
    """Memory with and without gradients, of a script that does not train."""
    if inference is None:
        return []
    failed = f"not simulated: {inference.failure}"
    with_, without = inference.with_gradients, inference.without_gradients
    does = "records" if inference.records_gradients else "does not record"
    wrap = "wrap the model calls in `with torch.no_grad():`"
    return [
        facts(
            ("the script", f"{does} gradients"),
            ("under torch.no_grad()", memory_text(without) if without is not None else failed),
            ("with gradients", memory_text(with_) if with_ is not None else failed),
            ("change", wrap if inference.records_gradients else ""),
        )
    ]
