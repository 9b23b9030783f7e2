"""Remedies that make a job fit or lower its memory, as text: a line each, or a section."""

from __future__ import annotations

from trainfit.report.plan.launch import launch_lines
from trainfit.report.plan.speed import full_after
from trainfit.results.changes import Combination, ExtraCompute, Remedies, Remedy
from trainfit.results.memory import MemoryFigures
from trainfit.results.plan import Inference, PlanResult
from trainfit.results.text import percent, printable, share, size, wrapped

_CHANGES = {
    "nothing": "training: the same",
    "precision": "training: the same in lower precision",
    "training": "CHANGES TRAINING",
}
_INDENT = " " * 6


def remedies_section(remedies: Remedies) -> str:
    """Every remedy that was tried, best first, with its price and what to change."""
    if remedies.before is None:
        return wrapped(f"Remedies: none could be tried: {printable(remedies.failure)}", "", "  ")
    before = remedies.before
    at = f"batch size {remedies.batch_size}" if remedies.batch_size else "the current batch size"
    lines = [
        wrapped(
            f"Remedies at {at}, by memory saved per percent of extra compute "
            f"(each simulated by itself over {remedies.steps} steps)",
            "",
            "  ",
        )
    ]
    for number, remedy in enumerate(remedies.won, start=1):
        lines += _remedy(number, remedy, before, remedies.largest_batch)
    if not remedies.won:
        lines.append("  none of the applicable ones lowers the memory")
    lines += _rest(remedies)
    if remedies.combination is not None:
        lines += _combination(remedies.combination)
    return "\n".join(lines)


def inference_section(inference: Inference) -> str:
    """Memory with and without gradients, of a script that does not train."""
    does = "records" if inference.records_gradients else "does not record"
    lines = [f"Gradients (no optimizer step was seen: inference; the script {does} gradients)"]
    for title, memory in (
        ("under torch.no_grad()", inference.without_gradients),
        ("with gradients", inference.with_gradients),
    ):
        if memory is None:
            text = f"not simulated: {printable(inference.failure)}"
            lines.append(wrapped(text, f"  {title:<23}", " " * 25))
        else:
            lines.append(
                f"  {title:<23}allocated {size(memory.allocated_bytes)}, reserved "
                f"{size(memory.reserved_bytes)}, device {size(memory.device_bytes)}"
            )
    if inference.records_gradients:
        lines.append("  wrap the model calls in `with torch.no_grad():`")
    return "\n".join(lines)


def _remedy(
    number: int, remedy: Remedy, before: MemoryFigures, largest_before: int | None
) -> list[str]:
    assert remedy.memory is not None
    kind = {"estimated": " (NOT SIMULATED)", "replayed": " (replayed)"}.get(remedy.status, "")
    fits = "" if remedy.fits else ": DOES NOT FIT"
    title = f"{printable(remedy.title)} [{printable(remedy.name)}]{kind}{fits}"
    detail = f": {printable(remedy.changes_detail)}" if remedy.changes_detail else ""
    price = [_CHANGES[remedy.changes] + detail, _step(remedy.step_change), _extra(remedy.extra)]
    if remedy.largest_batch is not None:
        was = "" if largest_before is None else f"{largest_before} -> "
        price.insert(0, f"largest batch {was}{remedy.largest_batch}")
    lines = [
        wrapped(title, f"  {number:>2}. ", _INDENT),
        wrapped(_before_after(before, remedy.memory), _INDENT, _INDENT),
        wrapped("; ".join(filter(None, price)), _INDENT, _INDENT),
    ]
    if remedy.reason:
        lines.append(wrapped(printable(remedy.reason), _INDENT, _INDENT))
    if remedy.name == "checkpoint" and remedy.found:
        lines.append(wrapped(f"found: {printable(remedy.found)}", _INDENT, _INDENT + "  "))
    for each in remedy.how:
        lines.append(wrapped(printable(each), _INDENT + "> ", _INDENT + "  "))
    if remedy.launch is not None:
        lines.append(launch_lines(remedy.launch, len(_INDENT) + 2))
    return lines


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


def _rest(remedies: Remedies) -> list[str]:
    """What makes the step faster, and what wins no memory, in one line each; what failed, a line
    each."""
    lines = []
    if remedies.faster:
        named = ", ".join(
            f"{e.name} ({percent(e.step_change or 0.0, signed=True)})" for e in remedies.faster
        )
        text = f"makes the step faster (predicted): {printable(named)}"
        lines.append(wrapped(text, "  - ", "    "))
    won = {each.name for each in remedies.won}
    none = [e for e in remedies.items if e.saved_bytes is not None and e.name not in won]
    if none:
        named = ", ".join(f"{each.name} ({_nothing(each)})" for each in none)
        lines.append(wrapped(f"no memory saved here: {printable(named)}", "  - ", "    "))
    for each in remedies.items:
        if each.status == "failed":
            text = f"{each.name} was tried and failed: {each.reason}"
            lines.append(wrapped(printable(text), "  - ", "    "))
    return lines


def _nothing(remedy: Remedy) -> str:
    """What a remedy changes that saves nothing, and why it does not, where that is known."""
    change = _more(-(remedy.saved_bytes or 0))
    return f"{change}: {remedy.reason}" if remedy.reason else change


def _more(nbytes: int) -> str:
    sign = "+" if nbytes > 0 else "-"
    return f"{sign}{size(abs(nbytes))}" if nbytes else "±0"


def _combination(combination: Combination) -> list[str]:
    memory = combination.memory
    names = " + ".join(combination.names)
    if memory is None:
        text = f"Together: {names}: could not be simulated: {combination.failure}"
        return [wrapped(printable(text), "  ", "    ")]
    fits = "fits" if combination.fits else "does not fit either"
    text = (
        f"Together: {names}: {fits}: allocated {size(memory.allocated_bytes)}, reserved "
        f"{size(memory.reserved_bytes)}, device {size(memory.device_bytes)}"
    )
    if combination.batch_size is not None:
        text += f", batch size {combination.batch_size}"
    extra = "; ".join(filter(None, (_step(combination.step_change), _extra(combination.extra))))
    lines = [wrapped(printable(text), "  ", "    ")]
    if extra:
        lines.append(wrapped(extra, "    ", "    "))
    lines.append("    the changes of each as above, launched with")
    lines.append(launch_lines(combination.launch, 4))
    return lines


# ---
# Remedies that make a job fit or lower its memory, a line each.


#: Lines that are shown, and GPUs that are named.
MOST, _GPUS = 3, 3


def fix_title(result: PlanResult) -> str:
    """What the lines of :func:`fix_lines` do."""
    return "What would make it fit" if not result.now.fits else "What lowers the memory"


def fix_lines(result: PlanResult) -> list[str]:
    """The best few, the best first; for a job that fits only what was asked for."""
    grows = full_after(result) is not None
    fits, tried = result.now.fits, result.remedies
    lines = _remedies(tried, fits, grows=grows) if tried is not None else []
    if result.now.fits:
        return lines[:MOST]
    now, other = result.now, result.other_amp
    first = []
    chosen = result.chosen
    best = chosen.recommended_batch
    if best and (best != now.batch_size or chosen is not now):
        amp = f" with AMP {chosen.amp}" if chosen is not now else ""
        first.append(f"batch size {best}{amp}, as in the command above")
    elif now.largest_batch:
        first.append(f"batch size {now.largest_batch}, without a safety margin")
    if other is not None and other.fits:
        first.append(f"AMP {other.amp}: {size(other.memory.device_bytes)}")
    elif other is not None and other.largest_batch and not now.largest_batch:
        first.append(f"AMP {other.amp}: up to batch size {other.largest_batch}")
    larger = [f"a larger GPU: {', '.join(result.other_gpus[:_GPUS])}"] if result.other_gpus else []
    room = MOST - bool(larger)
    found = [*first[:1], *lines, *first[1:]][:room] + larger
    return found or ["no single GPU of the catalogue; use a smaller model or input"]


def _remedies(remedies: Remedies, fits_already: bool, *, grows: bool) -> list[str]:
    """Those that suffice; together where none does alone."""
    won = [each for each in remedies.won if fits_already or each.fits]
    lines = [_fix(each, grows=grows) for each in won]
    together = remedies.combination
    if not lines and together is not None and together.memory is not None:
        fits = "" if together.fits else " (does not fit either)"
        names = " + ".join(together.names)
        lines.append(f"{names}: {size(together.memory.device_bytes)}{fits}")
    return lines


def _fix(remedy: Remedy, *, grows: bool) -> str:
    """Without a largest batch size where memory ``grows`` until it is full."""
    parts = [size(remedy.memory.device_bytes)] if remedy.memory is not None else []
    if remedy.largest_batch and not grows:
        parts.append(f"largest batch {remedy.largest_batch}")
    if remedy.step_change is not None:
        parts.append(f"a step {round(100 * remedy.step_change):+d}%")
    if remedy.changes == "training":
        parts.append("changes training")
    return f"{remedy.title} [{remedy.name}]: {', '.join(parts)}"
