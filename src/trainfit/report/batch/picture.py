"""Time, or steps and samples, to the same loss against batch size: bars for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from trainfit.results.batch.goodput import GoodputCurve, GoodputPoint
from trainfit.results.batch.noise import Interval, samples_text
from trainfit.results.batch.step_times import StepTime
from trainfit.results.format import duration
from trainfit.results.text import columns

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
