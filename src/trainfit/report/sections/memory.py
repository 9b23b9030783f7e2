"""Memory: of a recorded run, with everything about its peak, and the parts that a plan has, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from trainfit.findings.out_of_memory import asked_in_vain, needed_and_there
from trainfit.report.blocks import (
    Facts,
    Headline,
    Output,
    Section,
    Subject,
    Table,
    Text,
    Tile,
    facts,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.lengths import generation_sections
from trainfit.report.notes import (
    beyond_text,
    finding_items,
    generation_notes,
    profile_note,
    protection_notes,
    spoilt_text,
)
from trainfit.report.sections.memory_charts import (
    kind_title,
    memory_growth,
    modules_chart,
    over_step,
    owners,
    peak_text,
)
from trainfit.report.sections.speed import of_work
from trainfit.report.steps import (
    coverage_text,
    eager_text,
    only_seen,
    pattern_lines,
    pattern_notes,
    step_lines,
    timeline_section,
    unseen_text,
)
from trainfit.results.files.contents import Note, complete
from trainfit.results.findings import FAILS_LATER, Finding
from trainfit.results.memory import (
    RANGE_COVERAGE,
    RANGE_EXCEEDED,
    Allocation,
    MemoryFigures,
    MemoryReport,
    Moment,
    OptimizerTable,
    OptimizerUse,
    RecordingSummary,
    SettingOutcome,
)
from trainfit.results.plan import JobDetail
from trainfit.results.runs.steps import StepPattern
from trainfit.results.text import GIB, MIB, count, percent, share, size, size_parts, times

#: Modules that are listed by name, and the share of the peak from which they are.
_MODULES: Final = 12
_MODULE_SHARE: Final = 0.005
#: Kinds, and modules, of a fact, and the share of the peak from which they are.
_PARTS, _LEAST = 3, 0.01
#: Share of the peak, and bytes, from which a single allocation is told.
_LARGE_ONE: Final = 0.15
_LEAST_LARGE: Final = 64 << 20
#: Groups of alike allocations that are listed, and what of the growth with the batch size is.
_GROUPS: Final = 8
#: What the intervals of memory are.
INTERVALS: Final = f"{percent(RANGE_COVERAGE)} prediction intervals"
_QUANTITIES: Final = (
    ("allocated", "allocated"),
    ("reserved", "reserved"),
    ("device", "device (nvidia-smi)"),
)


# ---
# Parts of any result on memory.


def figures_table(columns: Mapping[str, MemoryFigures]) -> Table | None:
    """The three quantities, each with its interval, of one configuration or several."""
    rows = [
        (title, *(_cell(memory, key) for memory in columns.values())) for key, title in _QUANTITIES
    ]
    head = ("At the peak", *columns)
    return table_of(head, rows, f"Predicted, with {INTERVALS}", detail=0)


def quantities(memory: MemoryFigures) -> Facts | None:
    """What the three quantities are in other tools, and what their intervals are."""
    low, high = map(size, memory.context_range_bytes)
    between = f"; {low} to {high}" if low != high else ""
    ranges = [getattr(memory, f"{key}_range_bytes") for key, _ in _QUANTITIES]
    has_range = any(bounds is not None and bounds[0] != bounds[1] for bounds in ranges)
    return facts(
        ("allocated", "torch.cuda.max_memory_allocated()"),
        ("reserved", "torch.cuda.max_memory_reserved()"),
        ("device", f"nvidia-smi: reserved + {size(memory.context_bytes)} {_context_name(memory)} "
                   f"({context_basis(memory)}{between})"),
        ("intervals", f"{INTERVALS}; {percent(RANGE_EXCEEDED)} "
                      "of measured jobs used more than their upper ends" if has_range else ""),
    )  # fmt: skip


#: How the parts of the process's other memory are called; what is PyTorch's own (its kernels,
#: those of attention) goes under the context.
_LIBRARY_TITLES = {
    "cublas": "cuBLAS",
    "cublas_backward": "cuBLAS",
    "cudnn_forward": "cuDNN",
    "cudnn_backward": "cuDNN",
}


def _context_name(memory: MemoryFigures) -> str:
    """ "CUDA context", with the libraries that add to it."""
    counted = [part.name for part in memory.context_parts if part.value_bytes]
    names = dict.fromkeys(_LIBRARY_TITLES[name] for name in counted if name in _LIBRARY_TITLES)
    return ", ".join(["CUDA context", *names])


def context_basis(memory: MemoryFigures) -> str:
    """Source of the figure: "assumed", "measured", or which part is what."""
    bases = {part.name: part.basis for part in memory.context_parts if part.value_bytes}
    context = bases.pop("context", "assumed")
    others = sorted(set(bases.values()) - {context})
    return f"context {context}, rest {' and '.join(others)}" if others else context


def _cell(memory: MemoryFigures, key: str) -> str:
    bounds = getattr(memory, f"{key}_range_bytes")
    value = getattr(memory, f"{key}_bytes")
    if bounds is None or bounds[0] == bounds[1]:
        return size(value)
    low, middle, high, unit = _alike(bounds[0], value, bounds[1])
    return f"{middle} ({low} to {high}) {unit}"


def _alike(*sizes: int) -> tuple[str, ...]:
    """Sizes in the unit of the largest, and that unit."""
    _, unit = size_parts(max(sizes))
    each = {"TiB": 1024 * GIB, "GiB": GIB, "MiB": MIB, "KiB": 1024, "B": 1}[unit]
    return (*(f"{nbytes / each:.{2 if each >= GIB else 0}f}" for nbytes in sizes), unit)


def peak_facts(
    by_kind: Mapping[str, int], by_module: Mapping[str, int], total: int
) -> Facts | None:
    """The kinds, and the modules, that most of the peak is of."""
    kinds = {kind_title(kind): nbytes for kind, nbytes in by_kind.items() if nbytes}
    named = sorted(((n, path) for path, n in by_module.items() if path and n), reverse=True)
    modules = without_prefix({path: nbytes for nbytes, path in named[:_PARTS]})
    return facts(
        ("at the peak", _largest(kinds, total), 12), ("in modules", _largest(modules, total), 45)
    )


def without_prefix(named: Mapping[str, int]) -> dict[str, int]:
    """The same figures under names without the parts that all of them begin with; the number of a
    layer keeps the name before it."""
    paths = [path.split(".") for path in named]
    common = 0
    while paths and all(
        len(path) > common + 1 and path[common] == paths[0][common] for path in paths
    ):
        common += 1
    while common and any(path[common].isdigit() for path in paths):
        common -= 1
    return {".".join(path[common:]): named[".".join(path)] for path in paths}


def _largest(parts: Mapping[str, int], total: int) -> str:
    largest = sorted(parts.items(), key=lambda item: -item[1])[:_PARTS]
    return ", ".join(
        f"{name} {share(nbytes, total)}" for name, nbytes in largest if nbytes >= _LEAST * total
    )


def peak_sections(
    by_kind: Mapping[str, int],
    by_module: Mapping[str, int],
    capacity: int,
    detail: JobDetail | None = None,
) -> list[Section]:
    """What the peak is of: pictures where ``detail`` is known, else tables."""
    memory = detail.memory if detail is not None else None
    total = sum(by_kind.values())
    if memory is not None:
        return [
            *section("Memory over the step", over_step(memory), owners(memory),
                     answer=peak_text(memory, capacity)),
            *section("Memory by module", modules_chart(memory)),
        ]  # fmt: skip
    # Activations first: the batch size drives them.
    ordered = sorted(by_kind.items(), key=lambda item: (item[0] != "activation", -item[1]))
    kinds = [(kind_title(kind), size(n), share(n, total)) for kind, n in ordered if n]
    return [
        *section("Memory over the step", table_of(("Kind", "At the peak", "Share"), kinds,
                                                  "Allocated memory by kind", (1, 2))),
        *section("Memory by module", table_of(("Module", "At the peak", "Share"),
                                              _module_rows(by_module, total),
                                              "Allocated memory by module", (1, 2))),
    ]  # fmt: skip


def _module_rows(by_module: Mapping[str, int], total: int) -> list[tuple[str, str, str]]:
    named = {path: nbytes for path, nbytes in by_module.items() if path and nbytes}
    largest = sorted(named, key=lambda path: -named[path])[:_MODULES]
    shown = [path for path in largest if named[path] >= _MODULE_SHARE * total]
    rows = [(path, named[path]) for path in shown]
    rest = sum(named.values()) - sum(named[path] for path in shown)
    if others := len(named) - len(shown):
        rows.append((count(others, "other module"), rest))
    if by_module.get(""):
        rows.append(("outside of modules", by_module[""]))
    return [(name, size(nbytes), share(nbytes, total)) for name, nbytes in rows]


# ---
# A recorded run.


def recording_subject(summary: RecordingSummary, detail: JobDetail | None = None) -> Subject:
    """Does it fit, what its memory is of, and how it goes on from step to step."""
    need, there = summary.memory.device_bytes, summary.gpu_memory_bytes
    full = summary.out_of_memory
    ends = _ends_early(summary.findings)
    spoilt = ends or spoilt_text(summary.findings)
    unseen = unseen_text(summary.coverage, summary.pattern, summary.steps)
    limits = "" if ends else _of_what(summary) or unseen
    figures = f"{size(need)} of {size(there)}{eager_text(summary.coverage)}{spoilt}"
    close = beyond_text(summary.memory, there)
    others = summary.other_processes_bytes
    fits = full is None and need <= there
    what = summary.pattern.unit if summary.pattern is not None else "optimizer step"
    steps, unit = summary.steps, "call" if what == "model call" else "step"
    if summary.generation is not None:
        steps = min(steps, summary.generation.simulated_calls)
    run = (
        f"{count(steps, what)}, {count(summary.operators, 'operator')}, torch "
        f"{summary.torch}; trainfit memory explains it, trainfit report opens it"
    )
    pattern = _course(summary)
    timeline = timeline_section(summary.timeline_bytes) if detail is None else ""
    return Subject(
        Headline(
            kind="Simulated run",
            tone="good" if fits else "bad",
            text=f"Fits: {figures}{close}{limits}." if fits else _not_fitting(full, f"{figures}."),
            limit=needed_and_there(full) if full else "",
            subject=f"{summary.file} on {summary.gpu}",
            tiles=(
                Tile("GPU memory", size(need), f"of {size(there)}", min(1.0, need / there)),
                Tile("Simulated", count(steps, unit),
                     count(summary.operators, "operator")),
            ),
        ),
        (
            *section("What is wrong", finding_items(summary.findings, detail=1)),
            *section(
                f"Memory on {summary.gpu} ({INTERVALS})",
                figures_table({"this run": summary.memory}),
                peak_facts(summary.by_kind_bytes, summary.by_module_bytes,
                           summary.memory.allocated_bytes),
                facts(
                    ("largest", _largest_one(summary.largest, summary.memory.allocated_bytes), 14),
                    ("held", f"{size(others)} by other processes" if others else "", 20),
                    *(("step", line, 15) for line in step_lines(summary.step)),
                    ("simulated", coverage_text(summary.coverage, steps, unit), 30),
                    ("of", run, 25),
                ),
                quantities(summary.memory),
            ),
            *generation_sections(summary.generation),
            *peak_sections(summary.by_kind_bytes, summary.by_module_bytes, there, detail),
            *section("Allocated over the last step", Output(timeline) if timeline else None),
            *section("Over the steps", *_steps(pattern_lines(pattern)) if pattern else ()),
            *of_work(detail.work if detail is not None else None),
        ),
        tuple(_recording_notes(summary)),
    )  # fmt: skip


def _course(summary: RecordingSummary) -> StepPattern | None:
    """How memory goes on; what ran out of it in its first step has nothing to settle."""
    return summary.pattern if summary.steps or summary.out_of_memory is None else None


def _largest_one(allocation: Allocation | None, total: int) -> str:
    """The largest allocation at the peak, where it is a good part of it."""
    if allocation is None or allocation.nbytes < max(_LARGE_ONE * total, _LEAST_LARGE):
        return ""
    text = f" at {allocation.line}" if allocation.line is not None else ""
    module = f" in {allocation.module}" if allocation.module else ""
    return (
        f"{size(allocation.nbytes)} ({share(allocation.nbytes, total)}) in one piece: "
        f"{kind_title(allocation.kind)} by {allocation.operator}{module}{text}"
    )


def _not_fitting(out_of_memory: str | None, figures: str) -> str:
    """What the memory was asked for in vain, or what it would have to be."""
    asked = asked_in_vain(out_of_memory or "")
    return f"Does not fit: {asked}." if asked else f"Does not fit: needs {figures}"


def _of_what(summary: RecordingSummary) -> str:
    """What limits the figures, where they are not for all that the script does."""
    text = summary.generation
    if text is not None and text.reason:
        return f"; for {text.known_tokens:,} of {text.new_tokens:,} new tokens only"
    return only_seen(summary.pattern)


def _ends_early(findings: Iterable[Finding]) -> str:
    """A clause that says that the recorded run did not go on, in the words that end a headline;
    else empty."""
    when = next((finding.subject for finding in findings if finding.kind == FAILS_LATER), "")
    return f", but the run ends {when}" if when else ""


def _steps(lines: Iterable[str]) -> Iterator[Text]:
    return (Text(line) for line in lines)


def _recording_notes(summary: RecordingSummary) -> list[Note]:
    """All notes, those that change the figures first."""
    serious = [*pattern_notes(_course(summary)), *profile_note(summary.profile)]
    return complete(
        [
            *generation_notes(summary.generation),
            *(Note("note", text, severity="changes the figures") for text in serious),
            *summary.structured_notes,
        ],
        [*summary.notes, *protection_notes(summary.protection)],
        summary.assumptions,
    )


# ---
# All about the memory of one recording, or of two.


def memory_subject(report: MemoryReport) -> Subject:
    """Does it fit, when is the peak, what is it of, what stays, and how it grows with the batch."""
    batch = f" at batch size {report.batch_size}" if report.batch_size is not None else ""
    need = f"{size(report.memory.device_bytes)} of {size(report.gpu_memory_bytes)}{batch}"
    need += eager_text(report.coverage)
    unseen = unseen_text(report.coverage, report.pattern, report.pattern.steps)
    unseen = _ends_early(report.findings) or unseen
    full = report.out_of_memory
    close = beyond_text(report.memory, report.gpu_memory_bytes)
    text = f"Fits: {need}{close}{unseen}." if report.fits else _not_fitting(full, f"{need}.")
    law = report.batches
    largest = law.largest_batch if law is not None and law.law != "none" else None
    if largest is not None:
        text += f" Largest batch {largest}." if largest else " Not even one sample fits."
    peak, best = report.peak, report.best_setting
    saved = ""
    if best is not None:
        less = size(report.settings[0].reserved_bytes - best.reserved_bytes)
        saved = f"{best.environment} reserves {less} less"
    timeline = timeline_section(report.timeline_bytes, report.timeline_phases)
    return Subject(
        Headline(
            kind="Memory",
            tone="good" if report.fits else "bad",
            text=text,
            limit=f"The peak is in {moment_text(peak.moment)}",
            subject=f"{report.file}: {report.gpu}, "
            f"{count(report.pattern.steps, report.pattern.unit)}, torch {report.torch}",
        ),
        (
            *section(
                f"Memory on {report.gpu}{batch} ({INTERVALS})",
                figures_table({"this run": report.memory}),
                peak_facts(peak.by_kind_bytes, peak.by_module_bytes, peak.allocated_bytes),
                facts(
                    ("between steps", _between(report), 12),
                    ("optimizer", _optimizer_text(report.optimizers), 25),
                    ("allocator", saved, 10),
                    *(("step", line, 15) for line in step_lines(report.step)),
                ),
                quantities(report.memory),
            ),
            *section("Why", finding_items(report.findings, detail=3 if report.fits else 1)),
            *section("Largest allocations at the peak", _allocations(report)),
            *peak_sections(peak.by_kind_bytes, peak.by_module_bytes, report.gpu_memory_bytes),
            *section("Allocated over the last step", Output(timeline) if timeline else None),
            *section("Between steps", _between_table(report)),
            *section("Parameters by optimizer", *_optimizers(report.optimizers)),
            *section("Over the steps", *_steps(pattern_lines(report.pattern))),
            *section("Fragmentation at the peak", *_fragmentation(report)),
            *section("With the batch size", *memory_growth(report)),
        ),
        tuple(
            complete(
                [Note("note", text, severity="changes the figures")
                 for text in pattern_notes(report.pattern)],
                report.notes, report.assumptions,
            )
        ),
    )  # fmt: skip


def moment_text(moment: Moment) -> str:
    """When and where the peak is."""
    module = moment.module
    if moment.phase == "optimizer":
        where = "in the optimizer's step"
    elif moment.phase == "setup":
        where = "before the first forward pass"
    else:
        where = f"in the {moment.phase} of {module}" if module else f"in the {moment.phase}"
        where += "" if module else ", outside of modules"
    text = (
        f"step {moment.step}, {where}, {percent(moment.through_step)} through the step, "
        f"at {moment.operator}"
    )
    if moment.line is not None:
        text += f" ({moment.line})"
    return text


def _allocations(report: MemoryReport) -> Table | None:
    """The largest single allocations; those that differ in the module alone are one row."""
    groups: dict[Allocation, list[str]] = {}
    for each in report.peak.largest:
        groups.setdefault(Allocation(**{**vars(each), "module": ""}), []).append(each.module)
    rows = []
    for each, modules in list(groups.items())[:_GROUPS]:
        others = len(set(modules)) - 1
        rows.append(
            (
                (f"{len(modules)} x " if len(modules) > 1 else "") + size(each.nbytes),
                kind_title(each.kind),
                (modules[0] or "-") + (f" and {count(others, 'other module')}" if others else ""),
                f"{each.operator} in {each.phase}, step {each.step}"
                + (f", {each.line}" if each.line is not None else ""),
            )
        )
    head = ("Memory", "Kind", "Module", "Allocated by")
    return table_of(head, rows, numeric=(0,), detail=22)


def _between(report: MemoryReport) -> str:
    stays = report.remaining
    if stays is None:
        return ""
    after = sorted(stays.after_step_bytes.items(), key=lambda item: -item[1])
    named = [f"{kind_title(kind)} {size(nbytes)}" for kind, nbytes in after if nbytes]
    text = f"{size(sum(stays.after_step_bytes.values()))} allocated: {', '.join(named[:_PARTS])}"
    return f"{text}; CUDA context {size(stays.context_bytes)} ({context_basis(report.memory)})"


def _between_table(report: MemoryReport) -> Table | None:
    stays = report.remaining
    if stays is None:
        return None
    after, kept = stays.after_step_bytes, stays.kept_bytes
    rows = []
    for kind, nbytes in sorted(after.items(), key=lambda item: -item[1]):
        if not nbytes:
            continue
        note = ""
        if kept is not None and kept[kind] == 0:
            note = "allocated in each step"
        elif kept is not None and kept[kind] < nbytes:
            note = f"{size(nbytes - kept[kind])} of it allocated in each step"
        rows.append((kind_title(kind), size(nbytes), note))
    basis = f"{context_basis(report.memory)}, outside the allocator"
    rows.append(("CUDA context", size(stays.context_bytes), basis))
    pattern = report.pattern
    caption = f"{size(sum(after.values()))} allocated after {pattern.unit} {pattern.steps}"
    return table_of(("Kind", "Memory", "Remark"), rows, caption, (1,))


def _optimizer_text(optimizers: OptimizerTable | None) -> str:
    """The script's, and the one that needs least, in multiples of the parameters."""
    if optimizers is None or not optimizers.trained_bytes:
        return ""
    present = f"{optimizers.present or 'its optimizer'}: "
    present += f"{size(optimizers.present_bytes)} with parameters and gradients"
    present += f" ({times(optimizers.present_bytes / optimizers.trained_bytes)} the parameters)"
    least = min(
        (row for row in optimizers.rows if row.between_steps_bytes is not None),
        key=lambda row: row.between_steps_bytes or 0,
        default=None,
    )
    if least is None or (least.between_steps_bytes or 0) >= optimizers.present_bytes:
        return present
    return f"{present}; least of those simulated: {least.name} {size(least.between_steps_bytes)}"


def _optimizers(optimizers: OptimizerTable | None) -> list[Table | Text | None]:
    if optimizers is None or not optimizers.trained_bytes:
        return []
    trained = optimizers.trained_bytes
    known = [row for row in optimizers.rows if row.between_steps_bytes is not None]
    present = (
        f"this script, {optimizers.present or 'its optimizer'}",
        times(optimizers.present_bytes / trained),
        size(optimizers.present_bytes),
        "",
        "",
    )
    unknown = [
        (row.name, f"cannot tell: {row.reason}")
        for row in optimizers.rows
        if row.between_steps_bytes is None
    ]
    frozen = f"{size(optimizers.frozen_bytes)} of frozen parameters come on top of each"
    return [
        table_of(
            ("Optimizer", "Between steps", "Bytes", "Peak", "Peak bytes"),
            [*(_optimizer_row(row, trained) for row in known), present],
            f"Each simulated on the {size(trained)} of parameters that this script trains, in "
            "multiples of them (between steps: with gradients and state; peak: of its step)",
            (1, 2, 3, 4),
        ),
        table_of(("Optimizer", "Not simulated"), unknown),
        Text(frozen) if optimizers.frozen_bytes else None,
    ]  # fmt: skip


def _optimizer_row(row: OptimizerUse, trained: int) -> tuple[str, ...]:
    between, peak = row.between_steps_bytes or 0, row.peak_bytes
    return (
        row.name,
        times(between / trained),
        size(between),
        times(peak / trained) if peak is not None else "-",
        size(peak),
    )


def _fragmentation(report: MemoryReport) -> list[Facts | Table | Text | None]:
    state, settings = report.fragmentation, report.settings
    ratio = state.reserved_bytes / max(state.allocated_bytes, 1)
    of = share(state.inactive_split_bytes, state.reserved_bytes)
    best = report.best_setting
    return [
        facts(
            ("reserved", f"{ratio:.3f} of allocated: {size(state.reserved_bytes)} / "
                         f"{size(state.allocated_bytes)}; most reserved in the run: "
                         f"{size(state.peak_reserved_bytes)}"),
            ("free within segments", f"{size(state.inactive_split_bytes)} ({of} of reserved) in "
                                     f"{count(state.segments, 'segment')}; largest free block "
                                     f"{size(state.largest_free_block_bytes)}"),
        ),
        table_of(
            ("Allocator setting", "Reserved", "Change", "At this GPU"),
            [_setting_row(setting, settings[0]) for setting in settings],
            "Allocator settings, each simulated",
            (1, 2),
        ),
        Text(f"set {best.environment}" if best is not None
             else "no setting saves a noticeable amount"),
    ]  # fmt: skip


def _setting_row(outcome: SettingOutcome, present: SettingOutcome) -> tuple[str, ...]:
    name = outcome.setting or (
        f"as it is ({outcome.environment})" if outcome.environment else "as it is"
    )
    delta = outcome.reserved_bytes - present.reserved_bytes
    verdict = "fits" if outcome.fits else "does not fit"
    if outcome.retries:
        verdict += f", releases its cache {count(outcome.retries, 'time')}"
    if outcome.device_allocations_per_step:
        verdict += f", {outcome.device_allocations_per_step} cudaMalloc a step"
    change = "0" if abs(delta) < MIB // 2 else size(delta, signed=True)
    return name, size(outcome.reserved_bytes), change if outcome.setting else "", verdict
