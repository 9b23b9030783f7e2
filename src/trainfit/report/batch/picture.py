"""Time, or steps and samples, to the same loss against batch size: bars for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from trainfit.results.batch.goodput import GoodputCurve, GoodputPoint
from trainfit.results.batch.noise import Interval, samples_text
from trainfit.results.format import duration

_BAR: Final = 28
_ROWS: Final = 6
_BLOCKS: Final = " ▏▎▍▌▋▊▉█"


def goodput_picture(
    curve: GoodputCurve, before: int, after: int, ascii_only: bool = False
) -> list[str]:
    """Time to the same loss, as a multiple of the best point's, with its range."""
    rows = _chosen(curve, before, after)
    best = curve.best_point
    # The same noise scale holds for both: the range is that of the ratio at each end.
    times = [best.per_s / point.per_s for point in rows]
    most = max(times)
    lines = [f"  {'batch':>7}  {'step':>9}  time to the same loss, compared with the fastest"]
    for point, time in zip(rows, times, strict=True):
        mark = _mark(point, best, before, after)
        lines.append(
            f"  {point.step.batch_size:>7}  {duration(point.step.seconds):>9}  "
            f"{_bar(time / most, ascii_only)} {time:.2f} ×{mark}"
        )
    return lines


def _chosen(curve: GoodputCurve, before: int, after: int) -> list[GoodputPoint]:
    """The best of each batch size; the present one, the other, the best, and what is near them."""
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


def steps_picture(noise: Interval, before: int, after: int, ascii_only: bool = False) -> list[str]:
    """Steps to the same loss by batch size, compared with the present one."""
    value = noise.value if noise.value else noise.low
    if not value:
        return []
    lines = [f"  {'batch':>7}  steps to the same loss (bar) and samples, compared with {before}"]
    sizes = _sizes(before, after)
    steps = [(1 + value / size) / (1 + value / before) for size in sizes]
    for size, factor in zip(sizes, steps, strict=True):
        mark = "  now" if size == before else "  asked" if size == after else ""
        samples = factor * size / before
        lines.append(
            f"  {size:>7}  {_bar(factor / max(steps), ascii_only)} {_number(factor)} × steps, "
            f"{_number(samples)} × samples{mark}"
        )
    return lines


def _sizes(before: int, after: int) -> Sequence[int]:
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


def _bar(share: float, ascii_only: bool) -> str:
    if ascii_only:
        return ("#" * max(1, round(_BAR * share))).ljust(_BAR)
    eighths = max(1, round(8 * _BAR * share))
    bar = "█" * (eighths // 8) + (_BLOCKS[eighths % 8] if eighths % 8 else "")
    return bar.ljust(_BAR)


def _number(value: float) -> str:
    return samples_text(value) if value >= 10 else f"{value:.2g}"
