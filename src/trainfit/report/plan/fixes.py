"""Remedies that make a job fit or lower its memory, a line each."""

from __future__ import annotations

from trainfit.report.plan.answer import full_after
from trainfit.results.format import size
from trainfit.results.plan.remedies import Remedies, Remedy
from trainfit.results.plan.result import PlanResult

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
    lines = [_remedy(each, grows=grows) for each in won]
    together = remedies.combination
    if not lines and together is not None and together.memory is not None:
        fits = "" if together.fits else " (does not fit either)"
        names = " + ".join(together.names)
        lines.append(f"{names}: {size(together.memory.device_bytes)}{fits}")
    return lines


def _remedy(remedy: Remedy, *, grows: bool) -> str:
    """Without a largest batch size where memory ``grows`` until it is full."""
    parts = [size(remedy.memory.device_bytes)] if remedy.memory is not None else []
    if remedy.largest_batch and not grows:
        parts.append(f"largest batch {remedy.largest_batch}")
    if remedy.step_change is not None:
        parts.append(f"a step {round(100 * remedy.step_change):+d}%")
    if remedy.changes == "training":
        parts.append("changes training")
    return f"{remedy.title} [{remedy.name}]: {', '.join(parts)}"
