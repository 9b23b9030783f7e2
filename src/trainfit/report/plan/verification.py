"""A verification as text for the terminal."""

from __future__ import annotations

import statistics

from trainfit.report.notes_text import note_text, notes_section, plain
from trainfit.report.protection_text import protection_notes
from trainfit.report.screen import Line, blank, block, made, note_block, screen
from trainfit.report.table import table
from trainfit.results.format import count, size
from trainfit.results.plan.verification import Comparison, Verification
from trainfit.results.text import printable

VERDICTS = {True: "within", False: "OUTSIDE", None: "not known"}


def verification_screen(result: Verification) -> list[Line]:
    """The verdict, then the prediction compared with the measurement: at most 25 lines."""
    good = result.good
    compared, steps = _table(result).split("\n"), _steps(result).split("\n")
    notes = plain([*result.notes, *protection_notes(result.protection)])
    return screen(
        [
            block(verdict_text(result), style="good" if good else "bad"),
            *(block(line, 20, style="quiet") for line in _title(result).split("\n")),
            blank(),
            made(compared[1:], title=compared[0]),
            made(steps[1:], 5, title=steps[0]),
            blank(),
            *(note_block(printable(note_text(note)), 30 + at) for at, note in enumerate(notes)),
        ],
        "notes",
    )


def verification_text(result: Verification) -> str:
    """The verdict, the prediction compared with the measurement, step time, notes."""
    parts = [
        verdict_text(result),
        _title(result),
        _table(result),
        _steps(result),
        notes_section(plain([*result.notes, *protection_notes(result.protection)])),
    ]
    return "\n\n".join(part for part in parts if part)


def _title(result: Verification) -> str:
    return (
        f"{printable(result.gpu_measured)}, {count(result.steps, 'optimizer step')} run "
        f"(torch {printable(result.environment.get('torch', ''))})\n"
        f"  predicted for {printable(result.gpu_predicted)} in {printable(result.file)}"
    )


def _table(result: Verification) -> str:
    if not result.compared:
        return ""
    head = ("", "predicted", "measured", "difference", "stated range")
    rows = [_row(name, each) for name, each in result.compared.items()]
    return "\n".join(["Memory", *table(rows, "lrrrw", head)])


def _row(name: str, each: Comparison) -> tuple[str, ...]:
    measured = "?" if each.measured_bytes is None else size(each.measured_bytes)
    stated = f"{size(each.low_bytes)} to {size(each.high_bytes)}: {VERDICTS[each.within]}"
    return name, size(each.predicted_bytes), measured, difference_text(each), stated


def difference_text(each: Comparison) -> str:
    """What was measured more, in bytes and as a share of the prediction."""
    if each.measured_bytes is None:
        return ""
    nbytes = each.measured_bytes - each.predicted_bytes
    share = f" ({100 * nbytes / each.predicted_bytes:+.1f}%)" if each.predicted_bytes else ""
    return f"{'+' if nbytes > 0 else ''}{size(nbytes)}{share}"


def _steps(result: Verification) -> str:
    times = result.step_seconds
    if not times:
        return ""
    low, middle, high = (1e3 * x for x in (min(times), statistics.median(times), max(times)))
    return (
        f"Step time (measured on the device; nothing was predicted)\n"
        f"  {middle:.4g} ms, from {low:.4g} to {high:.4g} ms in {count(len(times), 'step')}"
    )


def verdict_text(result: Verification) -> str:
    """Whether it came as predicted, in one line."""
    if result.fits_predicted and not result.fits_measured:
        return "WRONG: predicted to fit, but ran out of GPU memory"
    if result.fits_measured and not result.fits_predicted:
        return "WRONG: predicted not to fit, but it fits"
    if not result.fits_measured:
        return "As predicted: it does not fit"
    basis = printable(result.range_basis)
    return f"{'As predicted' if result.good else 'NOT as predicted'} (stated range: {basis})"
