"""Noise scale, and the trade between batch sizes, as text and as bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from trainfit.report.layout import Line, made, screen, table, table_rows
from trainfit.results.batch import (
    BatchExplanation,
    Claim,
    GoodputCurve,
    GoodputPoint,
    Interval,
    ModuleNoise,
    NoiseResult,
    StepTime,
    samples_text,
)
from trainfit.results.text import columns, count, duration, percent, printable, wrapped

# ---
# Time, or steps and samples, to the same loss against batch size: bars for the terminal.


#: Columns of the longest bar on a screen of 80, and at least.
_BAR: Final = 26
_LEAST_BAR: Final = 1
_SCREEN: Final = 80
_SPLIT: Final = "micro×accum.×GPUs"
_TIME: Final = ("time to the same loss ÷ the fastest's", "time ÷ the fastest's")
_SAME: Final = " to the same loss"
_ROWS: Final = 6
_BLOCKS: Final = " ▏▎▍▌▋▊▉█"


def goodput_picture(curve: GoodputCurve, before: int, after: int) -> list[str]:
    """Time to the same loss, as a multiple of the best point's."""
    rows = _chosen(curve, before, after)
    best = curve.best_point
    times = [best.per_s / point.per_s for point in rows]
    most = max(times)
    # How a step is split is said where some batch size is more than a micro-batch.
    splits = [_split(point.step) for point in rows]
    is_split = any(point.step.micro_batch != point.step.batch_size for point in rows)
    width = max(map(len, (*splits, _SPLIT))) if is_split else 0
    head = f"  {'batch':>7}  {_SPLIT if is_split else '':<{width}}{'step':>9}  "
    lines = [_fitting(*(head + each for each in _TIME))]
    for point, split, time in zip(rows, splits, times, strict=True):
        mark = _mark(point, best, before, after)
        split = split if is_split else ""
        bar = _bar(time / most, _room(width))
        row = (
            f"  {point.step.batch_size:>7}  {split:<{width}}{duration(point.step.seconds):>9}  "
            f"{bar} {_times(time)}"
        )
        lines.append(_fitting(row + mark, row + mark[1:]))
    return lines


def _split(step: StepTime) -> str:
    return f"{step.micro_batch}×{step.accumulation}×{step.gpus}"


def _times(value: float) -> str:
    return f"{value:.2f} ×" if value < 100 else f"{value:,.0f} ×"


def _chosen(curve: GoodputCurve, before: int, after: int) -> list[GoodputPoint]:
    """The best of each batch size; the current one, the other, the best, and what is near them."""
    found: dict[int, GoodputPoint] = {}
    for point in curve.points:
        size = point.step.batch_size
        if size not in found or point.per_s > found[size].per_s:
            found[size] = point
    sizes = sorted(found)
    kept = {size for size in (before, after, curve.best_point.step.batch_size) if size in found}
    others = [size for size in sizes if size not in kept]
    room = max(0, _ROWS - len(kept))
    if len(others) > room:
        places = [round(n * (len(others) - 1) / max(1, room - 1)) for n in range(room)]
        others = [others[place] for place in places]
    return [found[size] for size in sorted({*kept, *others})]


def _mark(point: GoodputPoint, best: GoodputPoint, before: int, after: int) -> str:
    size = point.step.batch_size
    words = [
        word
        for word, is_it in (
            ("now", size == before),
            ("asked", size == after),
            ("fastest", point is best),
            (point.step.basis, point.step.basis != "measured"),
        )
        if is_it
    ]
    return f"  {', '.join(words)}" if words else ""


def steps_picture(noise: Interval, before: int, after: int) -> list[str]:
    """Steps to the same loss by batch size, compared with the current one."""
    value = noise.value if noise.value else noise.low
    if not value:
        return []
    said = (f"steps (bar) and samples{each} ÷ those of {before}" for each in (_SAME, ""))
    lines = [_fitting(*(f"  {'batch':>7}  {each}" for each in said))]
    sizes = sizes_around(before, after)
    steps = [(1 + value / size) / (1 + value / before) for size in sizes]
    for size, factor in zip(sizes, steps, strict=True):
        mark = "  now" if size == before else "  asked" if size == after else ""
        samples = factor * size / before
        bar = _bar(factor / max(steps), _room())
        lines.append(
            f"  {size:>7}  {bar} {_number(factor)} × steps, {_number(samples)} × samples{mark}"
        )
    return lines


def sizes_around(before: int, after: int) -> Sequence[int]:
    """Both, and powers of 2 around and between."""
    low, high = sorted((before, after))
    span = max(2, math.ceil(math.log2(high / low)) + 2)
    factor = max(2, 2 ** math.ceil(span / (_ROWS - 1)))
    found = {before, after, high * factor, max(1, low // factor)}
    size = low * factor
    while size < high:
        found.add(size)
        size *= factor
    return sorted(found)[: _ROWS + 1]


def _room(taken: int = 0) -> int:
    """Columns of the longest bar."""
    return max(_LEAST_BAR, _BAR - taken - max(0, _SCREEN - columns()))


def _fitting(long: str, short: str) -> str:
    return long if len(long) <= columns() else short


def _bar(share: float, width: int) -> str:
    eighths = max(1, round(8 * width * share))
    bar = "█" * (eighths // 8) + (_BLOCKS[eighths % 8] if eighths % 8 else "")
    return bar.ljust(width)


def _number(value: float) -> str:
    return samples_text(value) if value >= 10 else f"{value:.2g}"


# ---
# The trade between two batch sizes as text: the answer, a picture, claims with their sources.


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


# ---
# A measured noise scale as text.


#: Modules with the largest parts of tr Σ that are on the screen.
_SHOWN = 6
METHODS = {
    "accumulation": "micro-batches of a step",
    "ranks": "ranks of a data-parallel run",
    "parts": "halves of a batch, in a measuring pass",
    "examples": "single samples, of Linear and normalization modules alone",
    "none": "nothing",
}


def noise_screen(result: NoiseResult) -> list[Line]:
    """At most 25 lines: the first ones say the most."""
    blocks = [made(line, at) for at, line in enumerate(_parts(result, _SHOWN))]
    return screen(blocks, "all modules, steps left out, notes")


def noise_text(result: NoiseResult) -> str:
    """The whole result."""
    return "\n".join(_parts(result))


def _parts(result: NoiseResult, most: int | None = None) -> list[str]:
    """Each of a line or several; ``most`` modules."""
    first = printable(result.line)
    lines = [wrapped(first[0].upper() + first[1:], "", "  ")]
    ranks = count(result.ranks, "rank")
    batch = f"{result.micro_batch} × {result.accumulation} micro-batches × {ranks}"
    lines.append(
        wrapped(
            f"measured on {METHODS[result.method]}; a step is {batch}; "
            f"{count(result.steps_used, 'measured step')} of {result.steps_seen}",
            "  ",
            "    ",
        )
    )
    if result.cost_share is not None:
        lines.append(f"  cost {percent(result.cost_share, decimals=1)} of the time (on the host)")
    lines += _history(result)
    lines += _modules(result.modules, most)
    for reason, number in result.steps_left_out.items():
        lines.append(
            wrapped(f"{count(number, 'step')} left out: {printable(reason)}", "  ", "    ")
        )
    for each in (*result.left_out, *result.notes):
        lines.append(wrapped(printable(each), "  Note: ", "    "))
    if result.noise is not None:
        lines.insert(1, "  90% intervals; next: trainfit batch explain FILE --to BATCH")
    return lines


def _history(result: NoiseResult) -> list[str]:
    if len(result.history) < 2:
        return []
    first, last = result.history[0], result.history[-1]
    return [
        wrapped(
            f"over time: {first.noise.text} around step {first.step}, "
            f"{last.noise.text} around step {last.step}",
            "  ",
            "    ",
        )
    ]


def _modules(modules: tuple[ModuleNoise, ...], most: int | None) -> list[str]:
    ordered = sorted(modules, key=lambda each: -(each.trace_share or 0.0))
    if len(ordered) < 2:
        return []
    rows = [
        (
            printable(each.name) or "(itself)",
            each.noise.text if each.noise is not None else "",
            percent(each.trace_share) if each.trace_share is not None else "",
        )
        for each in ordered[:most]
    ]
    lines = ["\n".join(table(rows, "wrr", ("module", "noise scale, samples", "of the noise")))]
    if left := len(ordered) - len(rows):
        lines.append(f"  {count(left, 'more module')}")
    return lines
