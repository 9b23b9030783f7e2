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
        _when(peak.moment),
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


def _when(moment: Moment) -> str:
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
    return "The peak is\n" + wrapped(text, "  ", "  ")


def _largest(report: MemoryReport) -> str:
    """The largest single allocations; those that differ in the module alone are one row."""
    groups: dict[Allocation, list[str]] = {}
    for each in report.peak.largest:
        alike = Allocation(**{**vars(each), "module": ""})
        groups.setdefault(alike, []).append(each.module)
    lines = ["Largest single allocations at the peak"]
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
        lines.append(wrapped(text, f"  {times + size(each.nbytes):>12}  ", " " * 16))
    return "\n".join(lines)


def _between(report: MemoryReport) -> str:
    stays = report.remaining
    if stays is None:
        return ""
    after, kept = stays.after_step_bytes, stays.kept_bytes
    step, total = report.pattern.steps, size(sum(after.values()))
    lines = [f"Between steps, {total} allocated (after optimizer step {step})"]
    for kind, nbytes in sorted(after.items(), key=lambda item: -item[1]):
        if not nbytes:
            continue
        note = ""
        if kept is not None and kept[kind] == 0:
            note = "allocated in each step"
        elif kept is not None and kept[kind] < nbytes:
            note = f"{size(nbytes - kept[kind])} of it allocated in each step"
        lines.append(f"  {KIND_TITLES.get(kind, kind):<34}{size(nbytes):>10}  {note}".rstrip())
    context = f"  {'CUDA context':<34}{size(stays.context_bytes):>10}"
    lines.append(f"{context}  {context_basis(report.memory)}, outside the allocator")
    return "\n".join(lines)


def _optimizers(report: MemoryReport) -> str:
    table = report.optimizers
    if table is None or not table.trained_bytes:
        return ""
    trained = table.trained_bytes
    lines = [
        wrapped(
            f"Parameters by optimizer: each simulated on the {size(trained)} of parameters that "
            "this script trains",
            "",
            "  ",
        ),
        f"  {'':<25}{'with gradients and state':>25}{'at the peak of its step':>28}",
    ]
    lines += [_optimizer_row(row, trained) for row in table.rows]
    present = table.present or "its optimizer"
    lines.append(
        f"  {'this script, ' + printable(present):<25}"
        f"{times(table.present_bytes / trained):>12}{size(table.present_bytes):>13}"
    )
    if table.frozen_bytes:
        lines.append(f"  {size(table.frozen_bytes)} of frozen parameters come on top of each")
    return "\n".join(lines)


def _optimizer_row(row: OptimizerUse, trained: int) -> str:
    if row.between_steps_bytes is None or row.peak_bytes is None:
        return wrapped(f"cannot tell: {printable(row.reason)}", f"  {row.name:<25}", " " * 27)
    return (
        f"  {row.name:<25}{times(row.between_steps_bytes / trained):>12}"
        f"{size(row.between_steps_bytes):>13}"
        f"{times(row.peak_bytes / trained):>15}{size(row.peak_bytes):>13}"
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
        f"  {'allocator setting, simulated':<36}{'reserved':>11}{'change':>12}   at this GPU",
    ]
    lines += [_setting_row(each, settings[0]) for each in settings]
    best = report.best_setting
    if best is None:
        lines.append("  no setting saves a noticeable amount")
    else:
        lines.append(wrapped(f"set {printable(best.environment)}", "  ", "    "))
    return "\n".join(lines)


def _figure(label: str, text: str) -> str:
    return wrapped(text, f"  {label}  ", " " * (len(label) + 4))


def _setting_row(each: SettingOutcome, present: SettingOutcome) -> str:
    name = each.setting or (f"as it is ({each.environment})" if each.environment else "as it is")
    delta = each.reserved_bytes - present.reserved_bytes
    change = _change(delta) if each.setting else ""
    verdict = "fits" if each.fits else "does not fit"
    if each.retries:
        verdict += f", releases its cache {count(each.retries, 'time')}"
    if each.device_allocations_per_step:
        verdict += f", {each.device_allocations_per_step} cudaMalloc a step"
    return f"  {printable(name):<36}{size(each.reserved_bytes):>11}{change:>12}   {verdict}"


def _change(delta: int) -> str:
    """A difference in bytes, with its sign."""
    return "0" if abs(delta) < MIB // 2 else size(delta, signed=True)
