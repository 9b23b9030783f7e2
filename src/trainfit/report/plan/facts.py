"""A plan on one screen: the answer, the launch command, the facts that decide, notes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Final

from trainfit.report.layout import LINES, Line, ScreenBlock, Style, cut_short, plain_text, within
from trainfit.report.memory_parts import kinds_text, memory_rows, modules_text
from trainfit.report.notes import note_text, plan_notes, protection_notes, short_place
from trainfit.report.plan.launch import (
    change_lines,
    launch_lines,
    left_out_text,
    removed_text,
    threads_text,
)
from trainfit.report.plan.loading import effect_text, helps, input_text
from trainfit.report.plan.remedies import fix_lines, fix_title
from trainfit.report.plan.speed import answer, full_after, step_at
from trainfit.report.sections.real_runs import verdict
from trainfit.report.steps import coverage_text, shapes_text, step_lines
from trainfit.results.configuration import AmpChoice, Configuration
from trainfit.results.files.contents import Note
from trainfit.results.loader import BUSY, most_helpful_first
from trainfit.results.plan import PlanResult, batch_reasons, run_rate
from trainfit.results.speed import StepSpeed
from trainfit.results.text import WIDEST, count, duration, printable, size, times, wrapped

# ---
# Facts that decide a plan, each as a short text with a name.


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
    if choice is not None and (
        choice.configuration or any(h.is_critical for h in choice.own_hazards)
    ):
        return choice.reason.removeprefix("AMP ")
    if other is None:
        return choice.reason.removeprefix("AMP ") if choice and _is_barred(choice) else ""
    grows = full_after(result) is not None
    sides = "; ".join(_amp_side(each, grows=grows) for each in (result.now, other))
    return f"{_faster_amp(result, other)}{sides}"


def _is_barred(choice: AmpChoice | None) -> bool:
    """Did the script fail in a half precision that was tried, and stays as it is?"""
    hazards = choice.hazards if choice is not None and choice.configuration is None else ()
    return any(each.is_critical and each.kind in ("fails", "overflow") for each in hazards)


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
        text += f"; {effect_text(helpful)}: {helpful.title}"
    return text


def _wrong_data(result: PlanResult) -> str:
    """What makes workers read other data than they are asked for, and its fix."""
    found = result.loading.result if result.loading is not None else None
    faults = found.faults if found is not None else ()
    wrong = next((each for each in faults if each.kind in _WRONG_DATA), None)
    return f"{wrong.title}; fix: {wrong.fix.action}" if wrong is not None else ""


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


#: Kinds of faults of a DataLoader by which its workers give wrong samples.
_WRONG_DATA = ("shared_handle", "handle_before_fork", "iterable_not_sharded")
#: What is shown, in this order: its name, its rank (see :class:`Fact`), its text.
_PRODUCERS: tuple[tuple[str, int, Producer], ...] = (
    ("batch size", 0, _batch),
    ("AMP", 30, _amp),
    ("step", 10, _step),
    ("micro-batch", 25, _makeup),
    ("shapes", 22, _shapes),
    ("DataLoader", 20, _loader),
    ("fault", 5, _wrong_data),
    ("threads", 12, _threads),
    ("variables", 0, _removed),
    ("not set", 55, _left_out),
    ("gradients", 5, _gradients),
    ("CPU", 15, _cpu),
    ("files", 35, _files),
    ("simulated", 50, _coverage),
)


#: Columns from which it has at most so many lines, and the fewest that it is laid out for.
COLUMNS: Final = 80
NARROWEST: Final = 52

#: Lines of a launch command from which it is one long line, which a terminal wraps and from which
#: it can be copied as well.
_LAUNCH_LINES: Final = 5
#: Lines of a fact or a note at most, and notes.
_FACT_LINES: Final = 2
_NOTES: Final = 3
_LABEL: Final = 12
_PLACE: Final = re.compile(r"(?<![\w/])/?(?:[^\s/:]+/){2,}[^\s/:]+:\d+")

_UNIT: Final = re.compile(r"(?<=\d) (?=(?:[KMG]iB|B|ms|s|h|min)\b)")
_FIXED: Final = "\u00a0"


def plan_screen(result: PlanResult, columns: int = COLUMNS) -> list[Line]:
    """At most :data:`LINES` lines of ``columns``, but for words that are longer.

    A terminal of fewer columns than :data:`COLUMNS` gets more lines.
    """
    width = max(NARROWEST, min(columns, WIDEST))
    notes = plan_notes(result)
    blocks = [
        *_answer(result, width),
        *_launch(result, notes, width),
        *_memory(result, width),
        *_facts(result, width),
        *_fixes(result, width),
        *_notes([note for note in notes if note.kind != "action"], width),
    ]
    if width >= COLUMNS:
        blocks = within(blocks, LINES - 1)
    hidden = len(notes) - sum(block.notes for block in blocks)
    lines = [line for block in blocks for line in block.lines]
    return [*lines, Line(_more(result, hidden, width), "quiet")]


def screen_text(result: PlanResult) -> str:
    """The same as plain text."""
    return plain_text(plan_screen(result))


def _answer(result: PlanResult, width: int) -> list[ScreenBlock]:
    style: Style = "good" if result.now.fits else "bad"
    text = wrapped(printable(answer(result)), "", "  ", width)
    return [ScreenBlock(tuple(Line(line, style) for line in text.split("\n"))), _blank(92)]


def _launch(result: PlanResult, notes: Sequence[Note], width: int) -> list[ScreenBlock]:
    """The launch command, and what the user has to change because it cannot."""
    blocks = []
    if result.can_start:
        text = launch_lines(result.launch, 2, width)
        if text.count("\n") >= _LAUNCH_LINES:
            text = f"  {printable(result.launch)}"
        blocks.append(ScreenBlock(tuple(map(Line, text.split("\n")))))
    changes = change_lines(result.launch_parts)
    for number, change in enumerate(changes):
        rank = 0 if not number else 30 + number
        blocks.append(ScreenBlock(_wrapped(_shortened(change), "  - ", width), rank))
    for number, note in enumerate(note for note in notes if note.kind == "action"):
        rank = 0 if not number + len(changes) else 40 + number
        blocks.append(ScreenBlock(_wrapped(_short(note), "  - ", width), rank, notes=1))
    return [*blocks, _blank(91)] if blocks else []


def _memory(result: PlanResult, width: int) -> list[ScreenBlock]:
    now, chosen = result.now, result.chosen
    best = chosen.recommended_batch
    other_amp = f", {chosen.amp}" if chosen is not now else ""
    differs = best != now.batch_size or bool(other_amp)
    both = result.recommended is not None and best is not None and differs
    present = f"batch size {now.batch_size}" if now.batch_size else "the current batch size"
    gpu, amp = printable(result.gpu), f"AMP {printable(now.amp)}"
    where = f"{gpu}, {amp}" if both else f"{gpu} at {present}, {amp}"
    title = wrapped(f"Memory on {where} (90% prediction interval)", "", "  ", width)
    columns, titles = [now.memory], list[str]()
    if both and result.recommended is not None and width >= COLUMNS:
        columns.append(result.recommended)
        second = f"batch size {best}{other_amp or ', recommended'}"
        titles = [present, printable(second)]
    rows = [
        *(Line(line, "title") for line in title.split("\n")),
        *map(Line, memory_rows(columns, titles)),
    ]
    total = now.memory.allocated_bytes
    kinds, modules = kinds_text(now.by_kind_bytes, total), modules_text(now.by_module_bytes, total)
    blocks = [ScreenBlock(tuple(rows))]
    if kinds:
        blocks.append(ScreenBlock(_wrapped(kinds, f"  {'at the peak':<21}", width), 12))
    if modules:
        blocks.append(ScreenBlock(_wrapped(modules, f"  {'in modules':<21}", width), 45))
    return blocks


def _facts(result: PlanResult, width: int) -> list[ScreenBlock]:
    title = ScreenBlock((Line("Batch size and speed (predicted)", "title"),), 70)
    found = [
        ScreenBlock(_wrapped(_shortened(fact.text), f"  {fact.label:<{_LABEL}}", width), fact.rank)
        for fact in facts(result)
    ]
    return [title, *found] if found else []


def _fixes(result: PlanResult, width: int) -> list[ScreenBlock]:
    lines = fix_lines(result)
    if not lines:
        return []
    found = [
        ScreenBlock((Line(_fitted(f"  - {printable(text)}", width)),), 6 + 15 * number)
        for number, text in enumerate(lines)
    ]
    return [ScreenBlock((Line(fix_title(result), "title"),)), *found]


def _fitted(line: str, width: int) -> str:
    return line if len(line) <= width else cut_short(line, width)


def _notes(notes: Sequence[Note], width: int) -> list[ScreenBlock]:
    shown = notes[:_NOTES]
    if not shown:
        return []
    found = []
    for number, note in enumerate(shown):
        serious = note.severity == "changes the figures"
        rank = 3 if serious and not number else 48 + 20 * number - 10 * serious
        lines = _wrapped(_short(note), "  - ", width)
        if not number:
            lines = (Line("Notes", "title"), *lines)
        found.append(ScreenBlock(lines, rank, notes=1))
    return found


def _more(result: PlanResult, hidden: int, width: int) -> str:
    """Where to read more, and how the figures came about, as far as that has room."""
    what = "optimizer step" if result.inference is None else "model call"
    torch = printable(result.environment.get("torch", "?"))
    more = f"{count(hidden, 'more note')} and details" if hidden else "Details"
    steps, seconds = f"{count(result.steps, what)} simulated", duration(round(result.seconds))
    facts = ((steps, f"torch {torch}", seconds), (steps, seconds), (steps,))
    said = [f"{more}: --explain ({', '.join(each)})" for each in facts]
    return next((each for each in said if len(each) <= width), f"{more}: --explain")


def _blank(rank: int) -> ScreenBlock:
    return ScreenBlock((Line(""),), rank)


def _wrapped(text: str, first: str, width: int) -> tuple[Line, ...]:
    """At most :data:`_FACT_LINES` lines; what does not fit into them ends in an ellipsis."""
    whole = _UNIT.sub(_FIXED, printable(text))  # no line break between a number and its unit
    lines = wrapped(whole, first, " " * len(first), width).replace(_FIXED, " ").split("\n")
    if len(lines) > _FACT_LINES:
        lines = [*lines[: _FACT_LINES - 1], cut_short(lines[_FACT_LINES - 1], width)]
    return tuple(map(Line, lines))


def _short(note: Note) -> str:
    return _shortened(note_text(note, short=True))


def _shortened(text: str) -> str:
    """Places in the user's code without the folders that they lie in."""
    return _PLACE.sub(lambda found: short_place(found[0]), text)
