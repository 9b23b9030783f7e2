"""The result of ``trainfit memory`` as text."""

from __future__ import annotations

from trainfit.report.memory.batches import batches_section
from trainfit.report.memory.sections import (
    KIND_TITLES,
    breakdown_section,
    context_basis,
    memory_section,
)
from trainfit.report.notes_text import notes_section
from trainfit.report.steps.course import steps_section
from trainfit.report.steps.step import step_lines
from trainfit.report.steps.timeline import timeline_section
from trainfit.report.table import table
from trainfit.results.files.notes import complete
from trainfit.results.format import MIB, count, percent, share, size, times
from trainfit.results.memory.explanation import (
    Allocation,
    MemoryReport,
    Moment,
    OptimizerUse,
    SettingOutcome,
)
from trainfit.results.text import printable, wrapped

#: Groups of alike allocations that are listed.
_GROUPS = 8


def explain_text(report: MemoryReport) -> str:
    """The whole report: peak, what stays, steps, fragmentation, batch size."""
    peak = report.peak
    parts = [
        "\n".join([_title(report), *(wrapped(x, "", "  ") for x in step_lines(report.step))]),
        memory_section(
            "Memory at the peak" + ("" if report.fits else ": DOES NOT FIT"), report.memory
        ),
        wrapped(moment_text(peak.moment), "The peak is in ", "  "),
        breakdown_section(peak.by_kind_bytes, peak.by_module_bytes, peak.allocated_bytes),
        _largest(report),
        timeline_section(report.timeline_bytes, report.timeline_phases),
        _between(report),
        _optimizers(report),
        steps_section(report.pattern),
        _fragmentation(report),
        batches_section(report),
        notes_section(complete((), report.notes, report.assumptions)),
    ]
    return "\n\n".join(part for part in parts if part)


def _title(report: MemoryReport) -> str:
    batch = "unknown" if report.batch_size is None else str(report.batch_size)
    text = (
        f"{printable(report.file)}: {printable(report.gpu)}, {size(report.gpu_memory_bytes)} "
        f"(batch size {batch}, {count(report.pattern.steps, 'optimizer step')}, "
        f"torch {printable(report.torch)})"
    )
    return wrapped(text, "", "  ")


def moment_text(moment: Moment) -> str:
    """When and where the peak is."""
    module = printable(moment.module)
    if moment.phase == "optimizer":
        where = "in the optimizer's step"
    elif moment.phase == "setup":
        where = "before the first forward pass"
    else:
        where = f"in the {moment.phase} of {module}" if module else f"in the {moment.phase}"
        where += "" if module else ", outside of modules"
    text = (
        f"step {moment.step}, {where}, {percent(moment.through_step)} through the step, "
        f"at {printable(moment.operator)}"
    )
    if moment.line is not None:
        text += f" ({printable(moment.line)})"
    return text


def _largest(report: MemoryReport) -> str:
    """The largest single allocations; those that differ in the module alone are one row."""
    groups: dict[Allocation, list[str]] = {}
    for each in report.peak.largest:
        alike = Allocation(**{**vars(each), "module": ""})
        groups.setdefault(alike, []).append(each.module)
    rows = []
    for each, modules in list(groups.items())[:_GROUPS]:
        times = f"{len(modules)} x " if len(modules) > 1 else ""
        others = len(set(modules)) - 1
        of = f" of {printable(modules[0])}" if modules[0] else ""
        of += f" and {count(others, 'other module')}" if others else ""
        line = f", {printable(each.line)}" if each.line is not None else ""
        text = (
            f"{each.kind.replace('_', ' ')}{of}: {printable(each.operator)} "
            f"in {each.phase}, step {each.step}{line}"
        )
        rows.append((times + size(each.nbytes), text))
    return "\n".join(["Largest single allocations at the peak", *table(rows, "rw")])


def _between(report: MemoryReport) -> str:
    stays = report.remaining
    if stays is None:
        return ""
    after, kept = stays.after_step_bytes, stays.kept_bytes
    step, total = report.pattern.steps, size(sum(after.values()))
    rows = []
    for kind, nbytes in sorted(after.items(), key=lambda item: -item[1]):
        if not nbytes:
            continue
        note = ""
        if kept is not None and kept[kind] == 0:
            note = "allocated in each step"
        elif kept is not None and kept[kind] < nbytes:
            note = f"{size(nbytes - kept[kind])} of it allocated in each step"
        rows.append((KIND_TITLES.get(kind, kind), size(nbytes), note))
    basis = f"{context_basis(report.memory)}, outside the allocator"
    rows.append(("CUDA context", size(stays.context_bytes), basis))
    title = f"Between steps, {total} allocated (after optimizer step {step})"
    return "\n".join([title, *table(rows, "lrw")])


def _optimizers(report: MemoryReport) -> str:
    found = report.optimizers
    if found is None or not found.trained_bytes:
        return ""
    trained = found.trained_bytes
    title = wrapped(
        f"Parameters by optimizer: each simulated on the {size(trained)} of parameters that "
        "this script trains (between steps: with gradients and state; peak: of its step)",
        "",
        "  ",
    )
    head = ("", "between steps", "", "peak", "")
    present = (
        f"this script, {printable(found.present) or 'its optimizer'}",
        times(found.present_bytes / trained),
        size(found.present_bytes),
        "",
        "",
    )
    known = [row for row in found.rows if row.between_steps_bytes is not None]
    rows = [*(_optimizer_row(row, trained) for row in known), present]
    lines = [title, *table(rows, "wrrrr", head)]
    unknown = [
        (row.name, f"cannot tell: {printable(row.reason)}")
        for row in found.rows
        if row.between_steps_bytes is None
    ]
    lines += table(unknown, "lw")
    if found.frozen_bytes:
        lines.append(f"  {size(found.frozen_bytes)} of frozen parameters come on top of each")
    return "\n".join(lines)


def _optimizer_row(row: OptimizerUse, trained: int) -> tuple[str, ...]:
    between, peak = row.between_steps_bytes or 0, row.peak_bytes
    return (
        row.name,
        times(between / trained),
        size(between),
        times(peak / trained) if peak is not None else "-",
        size(peak),
    )


def _fragmentation(report: MemoryReport) -> str:
    state, settings = report.fragmentation, report.settings
    ratio = state.reserved_bytes / max(state.allocated_bytes, 1)
    of = share(state.inactive_split_bytes, state.reserved_bytes)
    lines = [
        "Fragmentation at the peak",
        _figure(
            "reserved / allocated",
            f"{ratio:.3f}   {size(state.reserved_bytes)} / {size(state.allocated_bytes)}; most "
            f"reserved in the run: {size(state.peak_reserved_bytes)}",
        ),
        _figure(
            "free within segments",
            f"{size(state.inactive_split_bytes)} ({of} of reserved) in "
            f"{count(state.segments, 'segment')}; largest free block "
            f"{size(state.largest_free_block_bytes)}",
        ),
        *table(
            [_setting_row(each, settings[0]) for each in settings],
            "wrrw",
            ("allocator setting, simulated", "reserved", "change", "at this GPU"),
        ),
    ]
    best = report.best_setting
    if best is None:
        lines.append("  no setting saves a noticeable amount")
    else:
        lines.append(wrapped(f"set {printable(best.environment)}", "  ", "    "))
    return "\n".join(lines)


def _figure(label: str, text: str) -> str:
    return wrapped(text, f"  {label}  ", " " * (len(label) + 4))


def _setting_row(each: SettingOutcome, present: SettingOutcome) -> tuple[str, ...]:
    name = each.setting or (f"as it is ({each.environment})" if each.environment else "as it is")
    delta = each.reserved_bytes - present.reserved_bytes
    verdict = "fits" if each.fits else "does not fit"
    if each.retries:
        verdict += f", releases its cache {count(each.retries, 'time')}"
    if each.device_allocations_per_step:
        verdict += f", {each.device_allocations_per_step} cudaMalloc a step"
    change = _change(delta) if each.setting else ""
    return printable(name), size(each.reserved_bytes), change, verdict


def _change(delta: int) -> str:
    """A difference in bytes, with its sign."""
    return "0" if abs(delta) < MIB // 2 else size(delta, signed=True)
