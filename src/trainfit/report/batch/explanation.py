"""The trade between two batch sizes as text: the answer, a picture, claims with their sources."""

from __future__ import annotations

import textwrap
from typing import Final

from trainfit.report.batch.picture import goodput_picture, steps_picture
from trainfit.results.batch.explanation import BatchExplanation, Claim
from trainfit.results.batch.noise import Interval, samples_text
from trainfit.results.format import count
from trainfit.results.text import columns, printable

_TOPIC: Final = 17
#: Lines on a terminal, the picture included.
MOST_LINES: Final = 25


def explanation_text(result: BatchExplanation, *, ascii_only: bool = False) -> str:
    """25 lines at most: claims that do not fit are counted, and are in the JSON."""
    lines = _wrapped(result.answer)
    if result.goodput is not None:
        lines += goodput_picture(result.goodput, result.before, result.after, ascii_only)
    elif result.noise is not None:
        lines += steps_picture(result.noise, result.before, result.after, ascii_only)
    if result.noise is not None:
        lines += _wrapped(
            f"  noise scale {result.noise.text} samples ({printable(result.noise_source)})"
        )
    if result.critical_batch is not None:
        lines += _wrapped(f"  {_critical(result.critical_batch)}")
    left = MOST_LINES - len(lines) - 1
    blocks = [_claim(claim) for claim in result.claims]
    while sum(map(len, blocks)) > left:
        blocks.pop()
    lines += [line for block in blocks for line in block]
    more = len(result.claims) - len(blocks)
    hidden = f"{count(more, 'more claim')}, and " if more else ""
    lines.append(f"  {hidden}sources in full: --json")
    return "\n".join(lines)


def _critical(found: Interval) -> str:
    low = samples_text(found.low)
    where = f"{low} to {samples_text(found.high)}" if found.high is not None else f"{low} or more"
    return f"critical batch of a training: {where} (all ranges here cover it)"


def _claim(claim: Claim) -> list[str]:
    """The topic in a column of its own, the source in brackets at the end: authors and year, as the
    rest takes the lines of other claims."""
    source = "; ".join(each.partition(", ")[0] for each in claim.source.split("; "))
    words = f"{claim.text} [{source}]"
    lines = _wrapped(printable(words), columns() - _TOPIC - 2)
    return [
        f"  {claim.topic if number == 0 else '':<{_TOPIC}}{line}"
        for number, line in enumerate(lines)
    ]


def _wrapped(text: str, width: int | None = None) -> list[str]:
    return textwrap.wrap(text, width or columns(), break_long_words=False, break_on_hyphens=False)
