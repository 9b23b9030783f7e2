"""Changes of a plan in words: remedies, what each saves and costs; parts of the launch command."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from trainfit.report.blocks import Item, Items, Section, Snippet, facts, items, rows, section
from trainfit.results.changes import (
    NOT_NEEDED,
    Combination,
    ExtraCompute,
    LaunchPart,
    Remedies,
    Remedy,
    changes_by_hand,
)
from trainfit.results.findings import CALLS_WITH_GRAPH
from trainfit.results.memory import MemoryFigures
from trainfit.results.plan import PlanResult
from trainfit.results.text import percent, share, size

_CHANGES: Final = {
    "nothing": "training: the same",
    "precision": "training: the same in lower precision",
    "training": "CHANGES TRAINING",
}
#: Of an evaluation, by whether there is one.
_LESS: Final = {
    "simulated": "the evaluation in smaller batches, or with less kept of each batch",
    "none": "copies of the model, or of what is saved, on the CPU",
}
#: Where each of its batches leaves something behind in a library's own loop.
_LESS_KEPT: Final = {
    "Transformers": "TrainingArguments(eval_accumulation_steps=1): predictions go to the CPU; or "
    "preprocess_logits_for_metrics that gives their argmax, or prediction_loss_only=True",
    "Lightning": "no outputs kept on self: update a metric of torchmetrics in validation_step, or "
    "keep `.argmax(1).cpu()` of them",
}


def remedies_sections(tried: Remedies | None) -> list[Section]:
    """Every remedy that was tried, best first, with its price and what to change."""
    if tried is None:
        return []
    if tried.before is None:
        return section("Remedies", facts(("none tried", tried.failure)))
    before = tried.before
    text = f"batch size {tried.batch_size}" if tried.batch_size else "the current batch size"
    won = [_remedy(remedy, before, tried.largest_batch) for remedy in tried.won]
    none = "" if tried.won else "none of the applicable ones lowers the memory"
    return section(
        f"Remedies at {text}",
        facts(
            ("order", "by memory saved per percent of extra compute (each simulated by itself over "
                      f"{tried.steps} steps)"),
            ("result", none),
        ),
        items(won),
        facts(*_others(tried), lines=4),
        _together(tried.combination),
    )  # fmt: skip


def memory_text(memory: MemoryFigures) -> str:
    return (
        f"allocated {size(memory.allocated_bytes)}, reserved {size(memory.reserved_bytes)}, "
        f"device {size(memory.device_bytes)}"
    )


def _remedy(remedy: Remedy, before: MemoryFigures, largest_before: int | None) -> Item:
    assert remedy.memory is not None
    kind = {"estimated": "not simulated", "replayed": "replayed"}.get(remedy.status, "")
    largest = ""
    if remedy.largest_batch is not None:
        was = "" if largest_before is None else f"{largest_before} -> "
        largest = f"{was}{remedy.largest_batch}"
    changes = _CHANGES[remedy.changes]
    changes += f": {remedy.changes_detail}" if remedy.changes_detail else ""
    text = remedy.found if remedy.name == "checkpoint" else ""
    return Item(
        f"{remedy.title} [{remedy.name}]" + ("" if remedy.fits else ": does not fit"),
        "plain" if remedy.fits else "warn",
        kind,
        rows(
            ("memory", _before_after(before, remedy.memory)),
            ("largest batch", largest),
            ("training", changes),
            ("step", _step(remedy.step_change)),
            ("extra", _extra(remedy.extra)),
            ("because", remedy.reason),
            ("found", text),
            *(("change", each) for each in remedy.how),
        ),
        (Snippet(remedy.launch, "Run"),) if remedy.launch is not None else (),
    )


def _before_after(before: MemoryFigures, after: MemoryFigures) -> str:
    pairs = (
        ("allocated", before.allocated_bytes, after.allocated_bytes),
        ("reserved", before.reserved_bytes, after.reserved_bytes),
        ("device", before.device_bytes, after.device_bytes),
    )
    text = ", ".join(f"{name} {_pair(one, two)}" for name, one, two in pairs)
    saved = before.device_bytes - after.device_bytes
    return f"{text} (-{share(saved, before.device_bytes)})" if saved > 0 else text


def _pair(one: int, two: int) -> str:
    """Two sizes; the unit is written once where they have the same."""
    first, second = size(one), size(two)
    if first.partition(" ")[2] == second.partition(" ")[2]:
        first = first.partition(" ")[0]
    return f"{first} -> {second}"


def _extra(extra: ExtraCompute | None) -> str:
    if extra is None:
        return ""
    named = {
        "FLOPs": extra.flops_share,
        "bytes moved": extra.traffic_share,
        "operators": extra.operators_share,
    }
    return ", ".join(f"{name} {percent(part, signed=True)}" for name, part in named.items())


def _step(change: float | None) -> str:
    return "" if change is None else f"a step {percent(change, signed=True)} (predicted)"


def _others(tried: Remedies) -> Iterator[tuple[str, str]]:
    """What makes the step faster, what wins no memory, what failed."""
    if tried.faster:
        named = ", ".join(
            f"{each.name} ({percent(each.step_change or 0.0, signed=True)})"
            for each in tried.faster
        )
        yield "faster step", f"{named} (predicted)"
    won = {remedy.name for remedy in tried.won}
    none = [each for each in tried.items if each.saved_bytes is not None and each.name not in won]
    if none:
        yield "no memory saved", ", ".join(f"{each.name} ({_nothing(each)})" for each in none)
    left = [each.name for each in tried.items if each.status == "not tried"]
    if left:
        yield "not tried", f"{', '.join(left)} (--remedies tries all)"
    for each in tried.items:
        if each.status == "failed":
            yield "failed", f"{each.name}: {each.reason}"


def _nothing(remedy: Remedy) -> str:
    """What a remedy changes that saves nothing, and why it does not, where that is known."""
    change = _more(-(remedy.saved_bytes or 0))
    return f"{change}: {remedy.reason}" if remedy.reason else change


def _more(nbytes: int) -> str:
    sign = "+" if nbytes > 0 else "-"
    return f"{sign}{size(abs(nbytes))}" if nbytes else "±0"


def _together(combination: Combination | None) -> Items | None:
    if combination is None:
        return None
    names, memory = " + ".join(combination.names), combination.memory
    if memory is None:
        return items([Item(f"{names}: could not be simulated", "warn", "together",
                           rows(("because", combination.failure)))])  # fmt: skip
    fits = "fits" if combination.fits else "does not fit either"
    batch = "" if combination.batch_size is None else str(combination.batch_size)
    told = rows(
        ("memory", memory_text(memory)),
        ("batch size", batch),
        ("step", _step(combination.step_change)),
        ("extra", _extra(combination.extra)),
        ("change", "as for each of them"),
    )
    launch = (Snippet(combination.launch, "Run"),)
    return items([Item(f"{names}: {fits}", "plain", "together", told, launch)])


# ---
# A launch command in words: what each of its parts is for, and what is to be changed by hand.


def part_reason(part: LaunchPart) -> str:
    """A part with its reason and what that is from, in one line."""
    return f"{_headed(part)}: {_reason(part)}{_evidence(part)}"


def _headed(part: LaunchPart) -> str:
    if part.status in ("not set", "cannot tell"):
        return part.name
    if part.where == "wrapper":
        return part.value
    return f"{part.name}={part.value}"


def why(part: LaunchPart) -> str:
    """The reason alone: also what is recommended where the command's own value is kept."""
    if part.recommended:
        return f"the command's own; recommended is {part.recommended}: {part.reason}"
    words = (NOT_NEEDED if part.is_needless else "", part.reason, part.more)
    return "; ".join(filter(None, words)) or "reason not known"


def _reason(part: LaunchPart) -> str:
    was = f"was {part.present}: " if part.present and part.present != part.value else ""
    before = {
        "set": was,
        "kept": "kept: " if part.where != "script" else "",
        "not set": f"was {part.present}, " if _is_removed(part) else "not set: ",
        "by hand": f"in {_file(part)}, {was}",
        "cannot tell": "cannot tell: ",
        "option": "option: ",
    }
    return before[part.status] + why(part)


def _file(part: LaunchPart) -> str:
    """The name of the file in which a change by hand is made: a configuration file's line is named,
    a script is not."""
    name = part.place.rpartition(":")[0]
    return "the script" if not name or name.endswith(".py") else name


def _evidence(part: LaunchPart) -> str:
    if not part.evidence:
        return ""
    return f" [{part.evidence}{f', {part.machine}' if part.machine else ''}]"


def change_lines(parts: Sequence[LaunchPart]) -> list[str]:
    """What the user has to change in the script, a line for each place."""
    # Another batch size is in a plan's figures, wherever it is written; another precision is not.
    without = {part.line for part in parts if part.name == "amp" and part.status == "by hand"}
    return [
        f"change {place or 'in the script'}"
        f"{' (not in these figures)' if any(map(line.endswith, without)) else ''}: {line}"
        for place, line in changes_by_hand(parts)
    ]


def change_text(part: LaunchPart) -> str:
    """The place at which one part is written in the script, and what to write there."""
    by_hand = dataclasses.replace(part, status="by hand")
    return ": ".join(changes_by_hand([by_hand])[0])


def threads_text(parts: Sequence[LaunchPart]) -> str:
    """Variables and cores that go before the command, and why; empty without any."""
    launch_parts = [part for part in parts if part.where in ("environment", "wrapper")]
    told = [part for part in launch_parts if part.status == "set" or _is_overruled(part)]
    reasons = dict.fromkeys(f"{why(part)}{_evidence(part)}" for part in told)
    return f"{' '.join(map(_headed, told))}: {'; '.join(reasons)}" if told else ""


def _is_overruled(part: LaunchPart) -> bool:
    """Kept, although another value is recommended."""
    return part.status == "kept" and bool(part.recommended)


def _is_removed(part: LaunchPart) -> bool:
    """A variable that is set now, and should not be."""
    return part.status == "not set" and part.where == "environment" and bool(part.present)


def removed_text(parts: Sequence[LaunchPart]) -> str:
    """Variables whose values no library can use, and what became of them; empty without any."""
    found = filter(_is_removed, parts)
    return "; ".join(f"{part.name}={part.present} {part.reason}" for part in found)


def left_out_text(parts: Sequence[LaunchPart]) -> str:
    """What was considered and not set; the reasons are in the whole report."""
    launch_parts = [part for part in parts if part.status == "not set" and not _is_removed(part)]
    needless = [part.name for part in launch_parts if part.is_needless]
    others = [part.name for part in launch_parts if not part.is_needless]
    texts = [f"{', '.join(others)}: no gain"] if others else []
    texts += [f"{', '.join(needless)}: {NOT_NEEDED}"] if needless else []
    return "; ".join(texts)


# ---
# Remedies, a line each.


#: Lines that are shown.
MOST: Final = 3


def remedy_lines(remedies: Remedies, fits_already: bool, *, grows: bool) -> list[str]:
    """A line for each remedy that suffices; before them one for all together, where none does alone
    or what does changes the training more; and one for each that was asked for by name."""
    won = [remedy for remedy in remedies.won if fits_already or remedy.fits]
    lines = [_line_of(remedy, grows=grows) for remedy in won]
    together = remedies.combination
    if together is not None and together.memory is not None and (together.fits or not lines):
        lines.insert(0, together_line(together, remedies))
    return [
        *lines,
        *(
            _short_line(remedy, grows=grows)
            for remedy in named_remedies(remedies)
            if remedy not in won
        ),
    ]


def named_remedies(remedies: Remedies) -> tuple[Remedy, ...]:
    """The remedies that somebody wants to know of: a few, not all."""
    return remedies.items if remedies.is_asked and len(remedies.items) <= MOST else ()


def _short_line(remedy: Remedy, *, grows: bool) -> str:
    """One that does not suffice: by how much, or why it could not be tried."""
    if remedy.memory is None:
        return f"{remedy.title} [{remedy.name}]: {remedy.reason or remedy.status}"
    return _line_of(remedy, grows=grows) + (", saves nothing" if remedy.fits else ", does not fit")


def together_line(combination: Combination, tried: Remedies) -> str:
    """Several at once, and where the lines to change stand."""
    assert combination.memory is not None
    fits = "" if combination.fits else " (does not fit either)"
    parts = [f"{size(combination.memory.device_bytes)}{fits}"]
    if combination.step_change is not None:
        parts.append(f"a step {round(100 * combination.step_change):+d}%")
    if any(each.changes == "training" for each in tried.items if each.name in combination.names):
        parts.append("changes training")
    return f"{' + '.join(combination.names)}: {', '.join(parts)}"


def _line_of(remedy: Remedy, *, grows: bool) -> str:
    """A remedy's line, without a largest batch size where memory ``grows`` until it is full."""
    parts = [size(remedy.memory.device_bytes)] if remedy.memory is not None else []
    if remedy.largest_batch and not grows:
        parts.append(f"largest batch {remedy.largest_batch}")
    if remedy.step_change is not None:
        parts.append(f"a step {round(100 * remedy.step_change):+d}%")
    if remedy.changes == "training":
        parts.append("changes training")
    return f"{remedy.title} [{remedy.name}]: {', '.join(parts)}"


def evaluation_line(result: PlanResult) -> str:
    """What lets fit what follows the first steps: an evaluation, samples, a copy of the model."""
    if idle := next(
        (finding for finding in result.findings if finding.kind == CALLS_WITH_GRAPH), None
    ):
        return idle.fixes[0].action
    end, step = result.epoch_end, result.step
    loop = step.loop if step is not None and end is not None and end.batch_bytes else ""
    return _LESS_KEPT.get(loop) or _LESS[end.evaluation if end is not None else "none"]
