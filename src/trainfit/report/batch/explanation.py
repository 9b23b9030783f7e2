"""The trade between two batch sizes as text: the answer, a picture, claims with their sources."""

from __future__ import annotations

from trainfit.report.batch.picture import goodput_picture, steps_picture
from trainfit.report.screen import Line, made, screen
from trainfit.report.table import table, table_rows
from trainfit.results.batch.explanation import BatchExplanation, Claim
from trainfit.results.batch.noise import Interval, samples_text
from trainfit.results.text import printable, wrapped


def explanation_screen(result: BatchExplanation) -> list[Line]:
    """25 lines at most: the first claims matter most."""
    answer, *head = _head(result)
    claims = table_rows([(each.topic, _words(each)) for each in result.claims], "lw")
    blocks = [
        made(answer),
        *(made(part, 1) for part in head),
        *(made(claim, 5 + at, notes=1) for at, claim in enumerate(claims)),
    ]
    return screen(blocks, "sources in full", "claim")


def explanation_text(result: BatchExplanation) -> str:
    """Every claim, with its sources in full."""
    rows = [(each.topic, f"{printable(each.text)} [{printable(each.source)}]") for each in
            result.claims]  # fmt: skip
    lines = [line for part in _head(result) for line in part]
    return "\n".join([*lines, *table(rows, "lw")])


def _head(result: BatchExplanation) -> list[list[str]]:
    """The answer, the picture, the noise scale, the critical batch."""
    parts = [wrapped(result.answer, "", "").split("\n")]
    if result.goodput is not None:
        parts.append(goodput_picture(result.goodput, result.before, result.after))
    elif result.noise is not None:
        parts.append(steps_picture(result.noise, result.before, result.after))
    if result.noise is not None:
        source = printable(result.noise_source)
        parts.append([wrapped(f"noise scale {result.noise.text} samples ({source})", "  ", "    ")])
    if result.critical_batch is not None:
        parts.append([wrapped(_critical(result.critical_batch), "  ", "    ")])
    return parts


def _critical(found: Interval) -> str:
    low = samples_text(found.low)
    where = f"{low} to {samples_text(found.high)}" if found.high is not None else f"{low} or more"
    return f"critical batch of a training: {where} (all ranges here cover it)"


def _words(claim: Claim) -> str:
    """The source in brackets at the end: authors and year, as the rest takes the lines of other
    claims."""
    source = "; ".join(each.partition(", ")[0] for each in claim.source.split("; "))
    return printable(f"{claim.text} [{source}]")
