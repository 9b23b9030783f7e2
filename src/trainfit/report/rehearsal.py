"""A rehearsal as text for the terminal: utilization over time, causes of dips, cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from trainfit.report.layout import (
    Line,
    Style,
    blank,
    block,
    made,
    note_block,
    screen,
    table,
    table_rows,
)
from trainfit.report.notes import protection_notes
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.findings import Finding
from trainfit.results.rehearsal import Cause, Dip, Rehearsal, Timeline
from trainfit.results.text import (
    columns,
    core_count,
    count,
    duration,
    instructions,
    percent,
    printable,
    rate,
    wrapped,
)

_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_ROWS: Final = 4
_MARGIN: Final = "  {:>4} "
#: Columns of one window at most.
_WIDEST: Final = 4
#: Columns from one tick of the axis to the next at least (as long as its label), and ticks.
_TICK: Final = 8
_MOST_TICKS: Final = 8
#: Share of the time from which on what the loader costs is worth a change: the tuner's 2%.
_WORTH: Final = 0.02
#: Share of the time from which on a cause is listed.
_SHOWN: Final = 0.0005
#: Before the command to type next.
_NEXT: Final = "; next: "
#: Lines of a fault's evidence that are shown.
_EVIDENCE_LINES: Final = 12

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


def _room() -> int:
    """Columns of the picture."""
    return columns() - len(_MARGIN.format("")) - 2


def rehearsal_text(result: Rehearsal) -> str:
    """Whose loader, the curve, where the GPU was idle and why, rates, faults, verdict."""
    parts = [
        "\n".join(
            wrapped(line, "" if not n else "  ", "  ") for n, line in enumerate(_heading(result))
        ),
        _curve(result),
        "\n".join(_idle(result)),
        "\n".join(wrapped(line, "", "    ") for line in _rates(result)),
        _fault(result.fault) if result.fault is not None else "",
        "\n".join(wrapped(printable(note), "Note: ", "      ") for note in _notes(result)),
        verdict_line(result),
    ]
    return "\n\n".join(part for part in parts if part)


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


def rehearsal_screen(result: Rehearsal) -> list[Line]:
    """The verdict, rates, the curve, where the GPU was idle and why: at most 25 lines."""
    style: Style = "bad"
    if result.fault is None:
        waits = result.steady.waiting_share if result.steady is not None else None
        style = "title" if waits is None else "good" if waits < _WORTH else "bad"
    rates = _rates(result)[1:]
    # A command is never broken into lines.
    verdict, mark, command = verdict_line(result).partition(_NEXT)
    following = f"  next: {command}" if mark else ""
    shown = _shown_causes(result)
    by_time = sorted(shown, key=lambda cause: -result.idle_s[cause])
    rows = zip(shown, table_rows(_idle_rows(result), "llrrw"), strict=True)
    fault = result.fault
    return screen(
        [
            block(verdict, style=style),
            made(following),
            *([made(_fault(fault), 1)] if fault is not None else []),
            *(block(line.strip(), 6, first="  ", rest="    ") for line in rates),
            blank(),
            *(
                block(line, 30 + at, style="quiet", first="  " if at else "")
                for at, line in enumerate(_heading(result))
            ),
            made(_curve(result), 10),
            blank(),
            *(block(_idle_title(result), 4, style="title") for _ in shown[:1]),
            *(made(row, 5 + 6 * by_time.index(cause)) for cause, row in rows),
            *(note_block(printable(note), 40 + at) for at, note in enumerate(_notes(result))),
        ],
        "every cause, notes",
    )


def _notes(result: Rehearsal) -> list[str]:
    return [*_others(result), *result.notes, *protection_notes(result.protection)]


def _heading(result: Rehearsal) -> list[str]:
    """Lines that are not wrapped: the command, its loader and step, its settings."""
    settings, source = _settings(result.settings), printable(result.settings_source)
    least = " at least" if result.step_is_bound else ""
    step = f"against a GPU step of {duration(result.step_s)}{least}"
    step += f" ({printable(result.step_source)})" if result.step_source else ""
    lines = [
        printable(result.command),
        f"{printable(result.loader)}, {step}",
        settings + (f" ({source})" if source else ""),
    ]
    return [line for line in lines if line]


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


# --- The curve ----------------------------------------------------------------------------------
def _curve(result: Rehearsal) -> str:
    overall = result.overall
    if overall is None or not result.timeline.busy_shares:
        return ""
    window = result.timeline.window_s
    head = (
        f"GPU utilization over {duration(overall.seconds)}, as nvidia-smi reads it "
        f"(busy share of each {duration(window)})"
    )
    heights, column_s = _columns(result.timeline, overall.seconds)
    lines = [wrapped(head, "", "  "), *_rows(heights), _axis(len(heights), column_s)]
    marks = _marks(result.dips, len(heights), column_s)
    lines += [_MARGIN.format("") + " " + marks] if marks.strip() else []
    mean = f"  mean {percent(overall.busy_share)}"
    if result.steady is not None and result.steady.from_s >= result.timeline.window_s:
        mean += (
            f"; {percent(result.steady.busy_share)} after the start "
            f"(from {duration(result.steady.from_s)} on)"
        )
    return "\n".join([*lines, mean])


def _columns(timeline: Timeline, total_s: float) -> tuple[list[float], float]:
    """Mean utilization of each column, and a column's seconds: several windows, or a part."""
    shares, window = timeline.busy_shares, timeline.window_s
    each = -(-len(shares) // _room())
    heights = []
    for at in range(0, len(shares), each):
        lengths = [
            min(window, total_s - (at + i) * window) for i in range(len(shares[at : at + each]))
        ]
        busy = sum(s * max(0.0, n) for s, n in zip(shares[at : at + each], lengths, strict=True))
        heights.append(busy / sum(lengths) if sum(lengths) > 0 else 0.0)
    wide = max(1, min(_WIDEST, _room() // len(heights)))
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


def _axis(columns: int, column_s: float) -> str:
    """A line with up to eight ticks, and seconds below."""
    every = _tick_s(max(_TICK, columns / _MOST_TICKS) * column_s)
    drawn, labels = ["─"] * columns, ""
    ticks = int(columns * column_s / every + 1e-9)
    for number in range(ticks + 1):
        at = round(number * every / column_s)
        label = f"{number * every:g} s"
        if at < columns:
            drawn[at] = "┬"
            if at + len(label) <= _room():
                labels = labels.ljust(at) + label
    margin = _MARGIN.format("0%")
    return f"{margin}└{''.join(drawn)}\n{_MARGIN.format('')} {labels}"


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
            for at in range(first, min(max(first, last), columns - 1) + 1):
                marks[at] = letter
    return "".join(marks).rstrip()


# --- Words --------------------------------------------------------------------------------------
def _idle(result: Rehearsal) -> list[str]:
    rows = table(_idle_rows(result), "llrrw")
    return [_idle_title(result), *rows] if rows else []


def _idle_title(result: Rehearsal) -> str:
    assert result.overall is not None
    idle = sum(result.idle_s.values())
    return f"The GPU was idle for {duration(idle)} of {duration(result.overall.seconds)}"


def _shown_causes(result: Rehearsal) -> list[Cause]:
    if result.overall is None:
        return []
    least = _SHOWN * result.overall.seconds
    return [cause for cause in CAUSES if result.idle_s.get(cause, 0.0) >= max(least, 1e-12)]


def _idle_rows(result: Rehearsal) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for cause in _shown_causes(result):
        assert result.overall is not None
        (letter, name), seconds = CAUSES[cause], result.idle_s[cause]
        share = percent(seconds / result.overall.seconds)
        rows.append((letter, name, duration(seconds), share, cause_words(result, cause)))
    return rows


def cause_words(result: Rehearsal, cause: Cause) -> str:
    """Details of a cause, and what changes it."""
    dips = [dip for dip in result.dips if dip.cause == cause]
    seen = ""
    if dips and cause in ("start_up", "epoch", "slow_batch"):
        largest = max(dips, key=lambda dip: dip.idle_s)
        at = f"at {duration(largest.start_s)}: " if cause != "start_up" else ""
        times = f"{len(dips)} times, the longest " if len(dips) > 1 else ""
        seen = f"{times}{at}{largest.what}" if largest.what else times + at.rstrip(": ")
    meaning = _meaning(result.settings, cause)
    if cause == "transfer" and _is_much(result, cause) and not result.settings.pin_memory:
        meaning += "; --pin-memory tests whether a separate thread transfers them sooner"
    return printable("; ".join(part for part in (seen, meaning) if part))


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


def _rates(result: Rehearsal) -> list[str]:
    """A title and lines that are not wrapped."""
    rates = result.steady or result.overall
    if rates is None:
        return []
    after = "after the start" if result.steady is not None else "start-up included"
    samples = f", {rate(rates.samples_per_s)} samples/s" if rates.samples_per_s else ""
    lines = [
        f"Rates ({after})",
        f"  {rate(rates.batches_per_s)} of at most {rate(1 / result.step_s)} batches/s"
        f"{samples}; {percent(rates.waiting_share)} of the time waiting for batches",
    ]
    if result.predicted is not None:
        lines.append(
            f"  predicted: {rate(result.predicted.batches_per_s)} batches/s, "
            f"{percent(result.predicted.waiting_share)} waiting"
        )
    return [*lines, *_epoch(result)]


def _epoch(result: Rehearsal) -> list[str]:
    if result.epoch_s is None:
        return []
    batches = f"{count(result.epoch_batches, 'batch')}" if result.epoch_batches == 1 else ""
    if result.epoch_batches is not None and not batches:
        batches = f"{result.epoch_batches} batches"
    of = f" ({batches})" if batches else ""
    if result.epoch_measured:
        ended = sum(epoch.complete for epoch in result.epochs)
        mean = f", the mean of {ended}" if ended > 1 else ""
        return [f"  an epoch{of} needs {duration(result.epoch_s)}{mean}"]
    return [
        f"  an epoch{of} would need {duration(result.epoch_s)} at this rate; none was completed"
    ]


def _fault(fault: Finding) -> str:
    lines = [wrapped(printable(fault.title), "FAULT: ", "  ")]
    evidence = fault.cause.rstrip().splitlines()
    lines += [wrapped(printable(line), "  ", "    ") for line in evidence[-_EVIDENCE_LINES:]]
    return "\n".join([*lines, instructions(fault.fix.action, "  Fix: ", "  ")])


def verdict_line(result: Rehearsal) -> str:
    """The verdict in one line."""
    if result.ended == "interrupted":
        return "Interrupted: results so far"
    if result.ended in ("fault", "empty"):
        return "The DataLoader FAILED; above are the results so far"
    if result.steady is None:
        return "Too short to measure the steady state: give a longer --duration"
    if result.is_disturbed and result.steady.waiting_share >= _WORTH:
        share = percent(result.steady.waiting_share)
        return (
            "Cannot tell what the DataLoader costs: alongside other processes the GPU waits "
            f"{share} of its time; re-run when they have finished"
        )
    if result.steady.waiting_share < _WORTH:
        even = " even at the lower bound of the step time" if result.step_is_bound else ""
        return f"Nothing to gain: the GPU is the limit, the DataLoader keeps up with it{even}"
    share = percent(result.steady.waiting_share)
    if result.step_is_bound:
        return (
            f"At the lower bound of the step time the DataLoader costs {share} of the GPU's time; "
            "the real step is longer: measure it and give it with --step-time"
        )
    lost = f"The DataLoader costs {share} of the GPU's time"
    return f"{lost}{_NEXT}trainfit loader {_next(result)}"


def _next(result: Rehearsal) -> str:
    step = f"--step-time {1e3 * result.step_s:.7g}ms"
    if result.command.startswith("--loader"):
        return f"{step} {printable(result.command)}"
    return f"{step} -- {printable(result.command)}" if result.command else step
