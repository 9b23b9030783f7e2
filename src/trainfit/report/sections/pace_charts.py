"""Charts of paced calls: their latency by rate, over time, and as a histogram."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from trainfit.report.blocks import PAGE, WHOLE, Chart, figures
from trainfit.report.charts import COLORS, TIP, Spec, chart, color, thinned, tip, values, x, y
from trainfit.report.layout import Sketch, bars, blocks, parts
from trainfit.results.pace import CallBlock, PaceResult, Phase, RateSummary
from trainfit.results.text import duration, percent, times

#: Points of a distribution; cells of a line of blocks, and rows of a histogram.
_POINTS: Final = 120
_CELLS: Final = 64
_ROWS: Final = 8


def rate_name(hz: float | None) -> str:
    """The name of calls at a rate; ``None``: of those without one."""
    return "back to back" if hz is None else f"{hz:g} Hz"


def all_rates(result: PaceResult) -> list[RateSummary]:
    """Calls back to back, if they were measured, and those at each rate."""
    first = [result.back_to_back] if result.back_to_back is not None else []
    return [*first, *result.rates]


def _of(result: PaceResult, hz: float | None, arm: str, phases: Sequence[Phase]) -> list[float]:
    """Seconds of all calls that count and do the work, of these blocks."""
    return [
        wall
        for block in result.blocks
        if block.hz == hz and block.arm == arm and block.phase in phases
        for wall in call_walls(block, result)
    ]


def call_walls(block: CallBlock, result: PaceResult) -> list[float]:
    """Seconds of a block's calls that count and do the work."""
    return [
        wall
        for number, wall in enumerate(block.wall_s)
        if number >= block.settled
        and (block.first_call + number) % result.period == result.phase % result.period
    ]


def _quantiles(seconds: Sequence[float]) -> list[tuple[float, float]]:
    """Share of calls and their longest time: all of few calls, else evenly spaced with the
    slowest."""
    count = len(seconds)
    points = [((place + 1) / count, wall) for place, wall in enumerate(sorted(seconds))]
    return thinned(points, _POINTS, range(max(0, count - 10), count))


def latency_curves(
    named: Sequence[tuple[str, Sequence[float]]],
    title: str,
    says: str,
    sketch: Sketch | None = None,
) -> Chart | None:
    """The share of calls that are done within a time, a line for each name."""
    there = [(name, seconds) for name, seconds in named if len(seconds) >= 2]
    if not there:
        return None
    rows: list[dict[str, Any]] = []
    for name, seconds in there:
        for share, wall in _quantiles(seconds):
            said = tip(name, (f"{percent(share, decimals=1)} of calls within", duration(wall)))
            rows.append({"ms": wall * 1e3, "share": 100 * share, "name": name, "tip": said})
    spread = [wall for _, seconds in there for wall in seconds]
    wide = max(spread) > 20 * max(min(spread), 1e-9)
    scale: Spec = {"type": "log", "nice": False} if wide else {"zero": False, "nice": False}
    label = "time of a call (ms, logarithmic)" if wide else "time of a call (ms)"
    spec = chart(
        260,
        says,
        data=values(rows),
        mark={"type": "line", "interpolate": "step-after", "strokeWidth": 2, "point":
              {"size": 12, "opacity": 0.6}, **TIP},
        encoding={
            "x": x("ms", label, scale=scale, axis={"format": "~g"}),
            "y": y("share", "share of calls (%)", scale={"domain": [0, 100]}),
            "color": color("name", [name for name, _ in there], COLORS[: len(there)]),
        },
    )  # fmt: skip
    levels = (0.5, 0.9, 0.95, 0.99, 1.0)
    table = figures(
        ("Calls", "Number", *(percent(level) for level in levels)),
        [
            (name, str(len(seconds)),
             *(duration(sorted(seconds)[max(0, -(-int(level * 1000) * len(seconds) // 1000) - 1)])
               for level in levels))
            for name, seconds in there
        ],
        "Time within which a share of calls is done",
        range(1, 7),
    )  # fmt: skip
    note = "Further left is faster; a steep line means that calls are alike."
    if any(len(seconds) > _POINTS for _, seconds in there):
        note += f" Of many calls {_POINTS} quantiles and the ten slowest are drawn."
    return Chart(title, says, spec, table, note, sketch, WHOLE if sketch else PAGE)


def latency_distribution(result: PaceResult) -> Chart | None:
    """The latencies of all calls, a line for each rate; ``None``: there are too few."""
    named = [
        (
            rate_name(row.hz),
            _of(result, row.hz, row.arm, ("baseline", "attribution")),
        )
        for row in all_rates(result)[: len(COLORS)]
    ]
    slow = max((row for row in result.rates), key=lambda row: row.calls.p50, default=None)
    says = ""
    if slow is not None and slow.ratio is not None:
        says = (
            f"At {slow.hz:g} Hz the median call needs {duration(slow.calls.p50)}, "
            f"{times(slow.ratio.value)} that of calls back to back."
        )
    return latency_curves(named, "Latency distribution by rate (measured)", says, _sketch(result))


def base_walls(result: PaceResult) -> list[tuple[str, list[float]]]:
    """Calls with work of the base measurement, in order of time, by rate."""
    rows: dict[str, list[float]] = {}
    for block in result.blocks:
        if block.phase == "baseline":
            rows.setdefault(rate_name(block.hz), []).extend(call_walls(block, result))
    return list(rows.items())


def _sketch(result: PaceResult) -> Sketch:
    """The median of each stretch of time, all rates on one scale; the slowest rate's histogram."""

    def drawn(columns: int) -> list[str]:
        named = [(name, walls) for name, walls in base_walls(result) if len(walls) >= _ROWS]
        if not named:
            return []
        least = min(min(walls) for _, walls in named)
        maximum = max(_quantile(walls, 0.99) for _, walls in named)
        lines = [f"  Over time ({duration(least)} to {duration(maximum)})"]
        for name, walls in named:
            medians = [_quantile(walls[a:b], 0.5) for a, b in parts(len(walls), _CELLS)]
            lines.append(f"    {name:<14}{blocks(medians, least, maximum)}")
        return [*lines, *_histogram(result, columns)]

    return drawn


def _histogram(result: PaceResult, columns: int) -> Sequence[str]:
    """A histogram of the slowest rate, compared with calls back to back."""
    if not result.rates:
        return []
    worst = max(result.rates, key=lambda row: row.calls.p50)
    base = dict(base_walls(result))
    shown = [name for name in (rate_name(worst.hz), "back to back") if base.get(name)]
    walls = [value for name in shown for value in base[name]]
    if len(walls) < 2 * _ROWS:
        return []
    least, most = min(walls), _quantile(walls, 0.99)
    if most <= least:
        return []
    width = (most - least) / _ROWS
    shares = {name: _bins(base[name], least, width) for name in shown}
    drawn = []
    for place in range(_ROWS):
        end = "and more" if place == _ROWS - 1 else f"to {duration(least + (place + 1) * width)}"
        for number, name in enumerate(shown):
            label = "" if number else f"{duration(least + place * width)} {end}"
            share = shares[name][place]
            drawn.append(((label, name), share, percent(share)))
    return bars(drawn, "ll", title="  Distribution (share of the calls)")(columns)


def _bins(values: Sequence[float], least: float, width: float) -> list[float]:
    counts = [0] * _ROWS
    for value in values:
        counts[min(_ROWS - 1, int((value - least) / width))] += 1
    return [number / len(values) for number in counts]


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# -- why ---------------------------------------------------------------------------------------
