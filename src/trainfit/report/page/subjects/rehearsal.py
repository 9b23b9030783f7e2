"""A rehearsed training loop: how busy the GPU would be, and why it would idle."""

from __future__ import annotations

from typing import Final

from trainfit.report.loader.rehearsal import CAUSES, cause_words, verdict_line
from trainfit.report.page.blocks import (
    Chart,
    Command,
    Headline,
    Section,
    Table,
    Tile,
    figures,
    section,
)
from trainfit.report.page.blocks import table as table_of
from trainfit.report.page.charts import COLORS, TIP, Spec, chart, thinned, tip, values, x, y
from trainfit.results.format import duration, percent, rate
from trainfit.results.loader.rehearsal import Rehearsal

#: Windows that are drawn at most, dips that are marked, rows of the table.
_WINDOWS, _DIPS, _ROWS = 400, 8, 24
_WORTH: Final = 0.02


def rehearsal_headline(result: Rehearsal) -> Headline:
    """Does the DataLoader keep up?"""
    rates = result.steady or result.overall
    good = rates is not None and rates.waiting_share < _WORTH
    tiles = []
    if rates is not None:
        busy = rates.busy_share
        tiles = [
            Tile("GPU busy", percent(busy), "of the time", busy, "plain" if good else "bad"),
            Tile(
                "Batches/s",
                rate(rates.batches_per_s),
                f"of at most {rate(1 / result.step_s)}" if result.step_s else "",
            ),
        ]
    text, _, command = verdict_line(result).partition("; next: ")
    return Headline(
        kind="Rehearsal",
        tone="good" if good else "bad" if result.fault is not None else "warn",
        text=f"{text}.",
        subject=result.command or result.loader,
        commands=(Command(command, "Next"),) if command else (),
        tiles=tuple(tiles),
    )


def rehearsal_sections(result: Rehearsal) -> list[Section]:
    """Utilization over time, idle time by cause."""
    return section("Rehearsed GPU utilization", _course(result), _idle(result))


def _course(result: Rehearsal) -> Chart | None:
    shares, window = result.timeline.busy_shares, result.timeline.window_s
    if len(shares) < 2:
        return None
    each = -(-len(shares) // _WINDOWS)
    # The mean of several windows: what nvidia-smi would show with a longer one.
    means = [
        (start * window, sum(part) / len(part))
        for start in range(0, len(shares), each)
        if (part := shares[start : start + each])
    ]
    rows = [
        {"s": s, "busy": 100 * busy, "tip": tip(duration(s), ("GPU busy", percent(busy)))}
        for s, busy in means
    ]
    dips = sorted(result.dips, key=lambda dip: -dip.idle_s)[:_DIPS]
    marks = [
        {
            "from": dip.start_s,
            "to": dip.end_s,
            "tip": tip(CAUSES[dip.cause][1], ("idle", duration(dip.idle_s)), ("seen", dip.what)),
        }
        for dip in dips
    ]
    overall = result.overall
    says = f"The GPU would be busy {percent(overall.busy_share)} of the time." if overall else ""
    layers: list[Spec] = [
        {
            "data": values(rows),
            "mark": {"type": "area", "line": {"color": COLORS[2]}, "color": COLORS[2],
                     "opacity": 0.35, "interpolate": "step-after", **TIP},
            "encoding": {
                "x": x("s", "time (s)", scale={"nice": False}),
                "y": y("busy", "GPU busy (%)", scale={"domain": [0, 100]}),
            },
        },
        {
            "data": values(marks),
            "mark": {"type": "rect", "color": "var(--bad)", "opacity": 0.25, **TIP},
            "encoding": {
                "x": {"field": "from", "type": "quantitative"},
                "x2": {"field": "to"},
                "y": {"value": 0},
                "y2": {"value": "height"},
            },
        },
    ]  # fmt: skip
    table = figures(
        ("Time", "GPU busy"),
        [(duration(s), percent(busy)) for s, busy in thinned(means, _ROWS)],
        "Utilization over time",
        (0, 1),
    )
    note = "Red: the times in which the GPU waited longest; hover for the cause." if marks else ""
    if each > 1:
        note += f" Each point is the mean of {each} windows of {duration(window)}."
    spec = chart(200, says, layer=layers)
    return Chart("GPU utilization over the rehearsal", says, spec, table, note.strip())


def _idle(result: Rehearsal) -> Table | None:
    whole = result.overall.seconds if result.overall is not None else 0.0
    rows = sorted(result.idle_s.items(), key=lambda item: -item[1])
    return table_of(
        ("Idle because", "Time", "Share", "What it means"),
        [
            (CAUSES[cause][1], duration(seconds), percent(seconds / whole) if whole else "-",
             cause_words(result, cause))
            for cause, seconds in rows
            if seconds and cause in CAUSES
        ],
        "Idle time of the GPU by cause",
        (1, 2),
    )  # fmt: skip
