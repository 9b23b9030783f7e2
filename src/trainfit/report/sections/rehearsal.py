"""A rehearsed training loop: how busy the GPU would be, why it would idle, what that costs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final

from trainfit.report.blocks import (
    Block,
    Chart,
    Facts,
    Headline,
    Row,
    Snippet,
    Subject,
    Table,
    Text,
    Tile,
    Tone,
    facts,
    figures,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.charts import COLORS, TIP, Spec, chart, thinned, tip, values, x, y
from trainfit.report.notes import plain, protection_notes
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.findings import Finding
from trainfit.results.rehearsal import Cause, Dip, Rehearsal, RehearsedRates, UtilisationTimeline
from trainfit.results.text import core_count, count, duration, percent, rate, wrapped

#: Share of the time from which on what the loader costs is worth a change: the tuner's 2%.
_WORTH: Final = 0.02
#: A step that took so many times what it should is told of.
_LONGER: Final = 1.1
#: Share of the time from which on a cause is listed.
_SHOWN: Final = 0.0005
#: Lines of a fault's evidence that are shown.
_EVIDENCE_LINES: Final = 12
#: Lines of its fix on a screen.
_FIX_LINES: Final = 6
#: Windows of the chart at most, dips that are marked in it, rows of its table.
_WINDOWS: Final = 400
_DIPS: Final = 8
_TABLE_ROWS: Final = 24

#: Each cause's letter below the curve and its name, in the order in which they are listed.
CAUSES: Final[dict[Cause, tuple[str, str]]] = {
    "start_up": ("S", "start-up"),
    "warm_up": ("W", "queues filling"),
    "epoch": ("E", "epoch boundary"),
    "slow_batch": ("L", "late batches"),
    "starving": (" ", "starving"),
    "main_process": (" ", "no workers"),
    "transfer": (" ", "transfer"),
    "end": ("X", "after the end"),
}


def rehearsal_subject(result: Rehearsal) -> Subject:
    """Does the DataLoader keep up? The curve of a terminal, why the GPU was idle, and rates."""
    return Subject(
        _headline(result),
        (
            *section("The DataLoader failed", *_fault(result.fault)),
            *section("Rates", _rates(result)),
            *section("GPU utilization", _course(result), _mean(result)),
            *section(_idle_title(result), _idle(result)),
            *section("Rehearsed", _rehearsed(result)),
        ),
        tuple(plain([*_others(result), *result.notes, *protection_notes(result.protection)])),
    )


def _headline(result: Rehearsal) -> Headline:
    rates = result.steady or result.overall
    waits = result.steady.waiting_share if result.steady is not None else None
    tone: Tone = "plain" if waits is None else "good" if waits < _WORTH else "warn"
    tiles = []
    if rates is not None:
        busy = rates.busy_share
        tiles = [
            Tile("GPU busy", percent(busy), "of the time", busy,
                 "plain" if rates.waiting_share < _WORTH else "bad"),
            Tile("Batches/s", rate(rates.batches_per_s), f"of at most {rate(1 / result.step_s)}"),
        ]  # fmt: skip
    text, command = verdict(result)
    return Headline(
        kind="Rehearsal",
        tone="bad" if result.fault is not None else tone,
        text=f"{text}.",
        subject=result.command or result.loader,
        commands=(Snippet(command, "Next"),) if command else (),
        tiles=tuple(tiles),
    )


def verdict(result: Rehearsal) -> tuple[str, str]:
    """What the DataLoader costs, and what to type next, if that would change it."""
    steady = result.steady
    if result.ended == "interrupted":
        return "Interrupted: results so far", ""
    if result.ended in ("fault", "empty"):
        return "The DataLoader failed; these are the results so far", ""
    if steady is None:
        return "Too short to measure the steady state: give a longer --duration", ""
    share = percent(steady.waiting_share)
    longer = _longer_steps(result, steady)
    if steady.waiting_share < _WORTH and not longer:
        even = " even at the lower bound of the step time" if result.step_is_bound else ""
        return f"Nothing to gain: the GPU is the limit, the DataLoader keeps up with it{even}", ""
    if result.is_disturbed:
        text = (
            "Cannot tell what the DataLoader costs: alongside other processes the GPU waits "
            f"{share} of its time; re-run when they have finished"
        )
        return text, ""
    if steady.waiting_share < _WORTH:
        return f"The DataLoader keeps up, but its GPU steps are late: {longer}", ""
    if result.step_is_bound:
        text = (
            f"At the lower bound of the step time the DataLoader costs {share} of the GPU's time; "
            "the real step is longer: measure it and give it with --step-time"
        )
        return text, ""
    return f"The DataLoader costs {share} of the GPU's time", f"trainfit loader {_next(result)}"


def _longer_steps(result: Rehearsal, rates: RehearsedRates) -> str:
    """What the steps took more than they should, and why; empty where they took what they should.

    A rehearsed step ends late where the main process copies a batch or waits for a core: a real
    GPU would idle meanwhile.
    """
    took = rates.busy_share / rates.batches_per_s if rates.batches_per_s else 0.0
    if took < _LONGER * result.step_s:
        return ""
    copies = "" if result.settings.pin_memory else "copied a batch that is not pinned, or "
    return (
        f"each took {duration(took)}, as the main process {copies}waited for a core after its "
        f"{duration(result.step_s)}"
    )


def _next(result: Rehearsal) -> str:
    step = f"--step-time {1e3 * result.step_s:.7g}ms"
    if result.command.startswith("--loader"):
        return f"{step} {result.command}"
    return f"{step} -- {result.command}" if result.command else step


def _fault(fault: Finding | None) -> list[Block]:
    if fault is None:
        return []
    seen = fault.cause.rstrip().splitlines()[-_EVIDENCE_LINES:]
    # Its last line says the most.
    lines = [Row("", line, 1 + len(seen) - number) for number, line in enumerate(seen)]
    fix = Facts((Row("fix", fault.fix.action, 0),), lines=_FIX_LINES)
    return [Text(fault.title, "bad", 0), Facts(tuple(lines)), fix]


def _rates(result: Rehearsal) -> Facts | None:
    """After the start where that was reached."""
    rates = result.steady or result.overall
    if rates is None:
        return None
    after = "" if result.steady is not None else " (start-up included)"
    measured = f"{rate(rates.batches_per_s)} of at most {rate(1 / result.step_s)} batches/s"
    measured += f", {rate(rates.samples_per_s)} samples/s" if rates.samples_per_s else ""
    predicted = result.predicted
    return facts(
        ("measured", measured + after, 2),
        ("waiting", f"{percent(rates.waiting_share)} of the time for batches", 3),
        ("steps", _longer_steps(result, rates), 4),
        (
            "predicted",
            f"{rate(predicted.batches_per_s)} batches/s, {percent(predicted.waiting_share)} waiting"
            if predicted is not None
            else "",
            6,
        ),
        ("an epoch", _epoch(result), 9),
    )


def _epoch(result: Rehearsal) -> str:
    if result.epoch_s is None:
        return ""
    batches = result.epoch_batches
    of = f" ({count(batches, 'batch', 'batches')})" if batches is not None else ""
    if not result.epoch_measured:
        return f"would need {duration(result.epoch_s)}{of} at this rate; none was completed"
    ended = sum(epoch.complete for epoch in result.epochs)
    mean = f", the mean of {ended}" if ended > 1 else ""
    return f"needs {duration(result.epoch_s)}{mean}{of}"


def _rehearsed(result: Rehearsal) -> Facts | None:
    least = " at least" if result.step_is_bound else ""
    source = f" ({result.step_source})" if result.step_source else ""
    of = f" ({result.settings_source})" if result.settings_source else ""
    return facts(
        ("DataLoader", result.loader, 31),
        ("settings", f"{_settings(result.settings)}{of}", 32),
        ("GPU step", f"{duration(result.step_s)}{least}{source}", 30),
    )


def _settings(settings: LoaderSettings) -> str:
    words = [f"num_workers={settings.num_workers}"]
    if settings.num_workers:
        words += [
            f"prefetch_factor={settings.prefetch_factor}",
            f"persistent_workers={settings.persistent_workers}",
            *([] if settings.in_order else ["in_order=False"]),
        ]
    words.append(f"pin_memory={settings.pin_memory}")
    if settings.num_workers and settings.start_method != "fork":
        words.append(f"workers started by {settings.start_method}")
    return ", ".join(words)


def _others(result: Rehearsal) -> list[str]:
    """Other processes that took cores meanwhile, by name."""
    if not result.is_disturbed:
        return []
    named = ", ".join(f"{name} {cores:.1f}" for name, cores in result.others.items())
    return [
        f"other processes competed for {core_count(result.others_cores or 0.0)}"
        + (f" ({named})" if named else "")
        + ": rates reflect both; re-run when they have finished"
    ]


# -- utilization over time ---------------------------------------------------------------------


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
        [(duration(s), percent(busy)) for s, busy in thinned(means, _TABLE_ROWS)],
        "Utilization over time",
        (0, 1),
    )
    note = "Red: the times in which the GPU waited longest; hover for the cause." if marks else ""
    if each > 1:
        note += f" Each point is the mean of {each} windows of {duration(window)}."
    spec = chart(200, says, layer=layers)
    sketch = functools.partial(_sketch, result) if overall is not None else None
    return Chart(
        "GPU utilization over the rehearsal", says, spec, table, note.strip(), sketch, detail=6
    )


def _mean(result: Rehearsal) -> Facts | None:
    if result.overall is None or not result.timeline.busy_shares:
        return None
    text = percent(result.overall.busy_share)
    if result.steady is not None and result.steady.from_s >= result.timeline.window_s:
        text += (
            f"; {percent(result.steady.busy_share)} after the start "
            f"(from {duration(result.steady.from_s)} on)"
        )
    return facts(("mean", text, 7))


# -- the curve of a terminal -------------------------------------------------------------------


_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_ROWS: Final = 4
_MARGIN: Final = "  {:>4} "
#: Columns of one window at most.
_WIDEST: Final = 4
#: Columns from one tick of the axis to the next at least (as long as its label), and ticks.
_TICK: Final = 8
_MOST_TICKS: Final = 8


def _sketch(result: Rehearsal, columns: int) -> list[str]:
    """Utilization in four rows of eighths, an axis of seconds, and letters below the dips."""
    assert result.overall is not None
    room = columns - len(_MARGIN.format("")) - 2
    head = (
        f"over {duration(result.overall.seconds)}, as nvidia-smi reads it (busy share of each "
        f"{duration(result.timeline.window_s)})"
    )
    heights, column_s = _columns(result.timeline, result.overall.seconds, room)
    lines = [*wrapped(head, "  ", "  ", columns).split("\n"), *_rows(heights)]
    lines += _axis(len(heights), column_s, room)
    marks = _marks(result.dips, len(heights), column_s)
    if marks:
        lines.append(f"{_MARGIN.format('')} {marks}")
        meant = [
            f"{letter} {name}"
            for letter, name in CAUSES.values()
            if letter.strip() and letter in marks
        ]
        lines += wrapped("; ".join(meant), "  ", "  ", columns).split("\n")
    return lines


def _columns(timeline: UtilisationTimeline, total_s: float, room: int) -> tuple[list[float], float]:
    """Mean utilization of each column, and a column's seconds: several windows, or a part."""
    shares, window = timeline.busy_shares, timeline.window_s
    each = -(-len(shares) // room)
    heights = []
    for index in range(0, len(shares), each):
        lengths = [
            min(window, total_s - (index + i) * window)
            for i in range(len(shares[index : index + each]))
        ]
        busy = sum(
            s * max(0.0, n) for s, n in zip(shares[index : index + each], lengths, strict=True)
        )
        heights.append(busy / sum(lengths) if sum(lengths) > 0 else 0.0)
    wide = max(1, min(_WIDEST, room // len(heights)))
    return [height for height in heights for _ in range(wide)], each * window / wide


def _rows(heights: Sequence[float]) -> list[str]:
    steps = len(_EIGHTHS) - 1
    # A busy column is never drawn as an idle one, nor an idle moment away.
    levels = [max(1 if h > 0 else 0, int(h * _ROWS * steps + 1e-9)) for h in heights]
    lines = []
    for row in reversed(range(_ROWS)):
        label = f"{100 * (row + 1) // _ROWS}%"
        cells = (_EIGHTHS[min(steps, max(0, level - row * steps))] for level in levels)
        lines.append((_MARGIN.format(label) + "│" + "".join(cells)).rstrip())
    return lines


def _axis(columns: int, column_s: float, room: int) -> list[str]:
    """A line with up to eight ticks, and seconds below."""
    every = _tick_s(max(_TICK, columns / _MOST_TICKS) * column_s)
    drawn, labels = ["─"] * columns, ""
    ticks = int(columns * column_s / every + 1e-9)
    for number in range(ticks + 1):
        index = round(number * every / column_s)
        label = f"{number * every:g} s"
        if index < columns:
            drawn[index] = "┬"
            if index + len(label) <= room:
                labels = labels.ljust(index) + label
    margin = _MARGIN.format("0%")
    return [f"{margin}└{''.join(drawn)}", f"{_MARGIN.format('')} {labels}".rstrip()]


def _tick_s(least_s: float) -> float:
    """The next round number of seconds: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least_s))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least_s)


def _marks(dips: Sequence[Dip], columns: int, column_s: float) -> str:
    """The letter of the largest dip's cause in each column."""
    marks = [" "] * columns
    for dip in sorted(dips, key=lambda dip: dip.idle_s):
        letter = CAUSES[dip.cause][0]
        first, last = int(dip.start_s / column_s), int(dip.end_s / column_s - 1e-9)
        if letter != " ":
            for number in range(first, min(max(first, last), columns - 1) + 1):
                marks[number] = letter
    return "".join(marks).rstrip()


# -- idle time ---------------------------------------------------------------------------------


def _idle_title(result: Rehearsal) -> str:
    if result.overall is None:
        return ""
    idle = sum(result.idle_s.values())
    return f"The GPU was idle for {duration(idle)} of {duration(result.overall.seconds)}"


def _idle(result: Rehearsal) -> Table | None:
    """The most costly cause first; what is next to nothing is left out."""
    total_s = result.overall.seconds if result.overall is not None else 0.0
    least_s = max(_SHOWN * total_s, 1e-12)
    shown = [cause for cause in CAUSES if result.idle_s.get(cause, 0.0) >= least_s]
    return table_of(
        ("Idle because", "Time", "Share", "What it means"),
        [
            (CAUSES[cause][1], duration(result.idle_s[cause]),
             percent(result.idle_s[cause] / total_s), cause_words(result, cause))
            for cause in sorted(shown, key=lambda cause: -result.idle_s[cause])
            if total_s
        ],
        numeric=(1, 2),
        noun="cause",
        detail=5,
    )  # fmt: skip


def cause_words(result: Rehearsal, cause: Cause) -> str:
    """Details of a cause, and what changes it."""
    dips = [dip for dip in result.dips if dip.cause == cause]
    text = ""
    if dips and cause in ("start_up", "epoch", "slow_batch"):
        largest = max(dips, key=lambda dip: dip.idle_s)
        phrase = f"at {duration(largest.start_s)}: " if cause != "start_up" else ""
        times = f"{len(dips)} times, the longest " if len(dips) > 1 else ""
        text = f"{times}{phrase}{largest.what}" if largest.what else times + phrase.rstrip(": ")
    meaning = _meaning(result.settings, cause)
    if cause == "transfer" and _is_much(result, cause) and not result.settings.pin_memory:
        meaning += "; --pin-memory tests whether a separate thread transfers them sooner"
    return "; ".join(part for part in (text, meaning) if part)


def _is_much(result: Rehearsal, cause: Cause) -> bool:
    assert result.overall is not None
    return result.idle_s[cause] >= _WORTH * result.overall.seconds


def _meaning(settings: LoaderSettings, cause: Cause) -> str:
    if cause == "epoch" and settings.num_workers and not settings.persistent_workers:
        return "persistent_workers=True keeps the workers"
    if cause == "slow_batch" and settings.num_workers > 1 and settings.in_order:
        return "a larger prefetch_factor or in_order=False lets other batches overtake"
    return {
        "starving": "the workers load batches more slowly than the GPU uses them",
        "main_process": "num_workers=0: the GPU waits while each batch is loaded",
        "warm_up": "until the queues were full for the first time",
        "transfer": "transfer of ready batches to the main process",
    }.get(cause, "")
