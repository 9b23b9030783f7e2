"""Watched runs: what limits one and its course with the findings marked; two compared."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Final

from trainfit.findings.failure import KINDS
from trainfit.findings.ranking import headline
from trainfit.report.blocks import (
    TONES,
    Chart,
    Facts,
    Headline,
    Item,
    Snippet,
    Subject,
    Table,
    Text,
    Tile,
    Tone,
    facts,
    figures,
    items,
    rows,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.charts import (
    COLORS,
    LANE,
    TIP,
    areas,
    chart,
    color,
    finding_lanes,
    hover_rule,
    lane_layers,
    parts_bar,
    stacked,
    thinned,
    tip,
    values,
    x,
    y,
)
from trainfit.report.layout import bars
from trainfit.report.notes import plain
from trainfit.report.watch import (
    PHASES,
    answer,
    evidence_text,
    limit_of,
    nothing_found,
    setting_text,
    title,
)
from trainfit.results.findings import Finding
from trainfit.results.runs.watched import OOM_KILLED, exit_words
from trainfit.results.text import GIB, MIB, count, duration, percent, rate, size
from trainfit.results.watch import (
    HostMemory,
    LedgerPoint,
    MemoryLedger,
    PhaseName,
    TimelinePoint,
    WatchResult,
)

_COLORS: Final[Mapping[PhaseName, str]] = {
    "input": COLORS[1],
    "copy": COLORS[5],
    "forward": COLORS[0],
    "backward": COLORS[3],
    "optimizer": COLORS[2],
    "sync": COLORS[7],
    "checkpoint": COLORS[4],
    "evaluation": "var(--c9)",
    "other": COLORS[6],
}
#: Findings that the screen has first; how dispensable each of them is, and others.
_FINDINGS: Final = 4
_SHOWN, _MORE = 1, 50
#: Lines of the fix of what ended the run, which is not cut.
_WHOLE_FIX: Final = 12
#: Bars of phases on a terminal, and the least share of the time that has one.
_BARS: Final = 6
_LEAST_SHARE: Final = 0.01
#: Exit codes of what SIGKILL ended, by itself and as a shell says it.
_KILLED: Final = (-signal.SIGKILL, 128 + signal.SIGKILL)
#: Points that are drawn, and rows of their tables.
_POINTS, _ROWS = 300, 24
_TIME: Final = "time in the run (s)"
_LEDGER: Final = {
    "allocated": ("tensors", COLORS[0]),
    "cached": ("cached by PyTorch, free", COLORS[2]),
    "beyond": ("context and libraries", COLORS[5]),
    "others": ("other processes", COLORS[4]),
}


def _headline(result: WatchResult) -> Headline:
    """The verdict, the worst finding, what to type next."""
    worst = result.findings[0] if result.findings else None
    severe = worst is not None and worst.severity != "info"
    commands = []
    if worst is not None and severe and (worst.fix.line or worst.fix.settings):
        commands.append(Snippet(setting_text(worst), "Change"))
    if result.next_command:
        # The same command once more: after what the first finding says to change.
        is_repeated = result.next_command == f"trainfit watch -- {result.header.command}"
        commands.append(Snippet(result.next_command, "After the fix" if is_repeated else "Next"))
    told = headline(result.findings) is not None and result.steps
    return Headline(
        kind="Watched run",
        tone="bad" if severe else "good" if result.steps else "warn",
        text=answer(result) + ".",
        limit=f"{limit_of(result)}." if told else "",
        subject=result.header.command or "a notebook, or an interactive session",
        commands=tuple(commands),
        tiles=_tiles(result),
    )


def watch_subject(result: WatchResult) -> Subject:
    """All of a watched run: findings, phases, its course, memory, what could not be told."""
    unknown = table_of(
        ("Cannot tell", "Why", "What it needs"),
        [(each.kind, each.reason, each.needs) for each in result.unknown],
        "Findings that could not be confirmed or ruled out in this run",
    )
    nothing = nothing_found(result)
    sections = (
        *section(
            "Findings in the watched run",
            items(
                [_item(finding, index) for index, finding in enumerate(result.findings)], "finding"
            ),
            Text(nothing, "good", 0) if nothing else None,
        ),
        *section("The watched run", _facts(result)),
        *section("Time of a watched step", _phases(result), _ranks(result)),
        *section("The watched run over time", *_course(result)),
        *section("GPU memory of the watched run", _memory(result.ledger)),
        *section("What could not be determined", unknown),
    )
    return Subject(_headline(result), sections, tuple(plain(result.notes)))


def _facts(result: WatchResult) -> Facts | None:
    ledger = result.ledger
    ended = result.header.ending in ("failed", "interrupted")
    return facts(
        ("judged", _judged(result) if result.steps else "", 6),
        ("end", _ending(result) if ended else "", 3),
        ("GPU memory", _at_peak(ledger) if ledger is not None else "", 8),
        ("RAM", "; ".join(map(_held, result.host_memory)), 30),
    )


def _judged(result: WatchResult) -> str:
    """How much was looked at, and on what."""
    header = result.header
    where = "CPU"
    if header.gpu is not None and header.gpu < len(header.gpus):
        where = header.gpus[header.gpu].name
    parts = [f"{count(result.steps, 'steady step')} in {duration(result.seconds)}", where]
    if header.world_size > 1:
        parts.append(f"{count(header.world_size, 'rank')} (figures of rank {header.rank})")
    if header.autocast:
        parts.append(f"AMP {header.autocast}")
    elif header.precision != "unknown":
        parts.append(header.precision)
    if result.gpu_utilization is not None:
        parts.append(f"NVML utilisation {percent(result.gpu_utilization)}")
    if result.mfu is not None:
        parts.append(f"MFU {percent(result.mfu)}")
    return ", ".join(parts)


def _ending(result: WatchResult) -> str:
    ending, code = result.header.ending, result.header.exit_code
    how = "" if code is None else f" {exit_words(code)}"
    if code is not None and code < 0:
        verb = "was ended"
    else:
        verb = "was interrupted" if ending == "interrupted" else "failed"
    hint = ""
    if code in _KILLED and not any(OOM_KILLED in note for note in result.notes):
        hint = " `kill -9`, batch systems and the kernel's OOM killer send SIGKILL."
    return f"The run {verb}{how}.{hint}"


def _held(part: HostMemory) -> str:
    """ "2 workers 600 MiB (520 MiB private, 10 MiB shared, 70 MiB of files)"."""
    kinds = (
        (part.private_bytes, "private"),
        (part.shared_bytes, "shared"),
        (part.file_bytes, "of files"),
    )
    who = {
        "training": "the training process",
        "workers": count(part.processes, "worker"),
        "others": count(part.processes, "other process", "other processes"),
    }[part.who]
    told = ", ".join(f"{size(nbytes)} {kind}" for nbytes, kind in kinds)
    return f"{who} {size(sum(nbytes for nbytes, _ in kinds))} ({told})"


def _at_peak(ledger: MemoryLedger) -> str:
    peak, total = ledger.peak_reserved_bytes, ledger.total_bytes
    if peak is None:
        return ""
    text = f"{size(peak)} reserved at the peak"
    if ledger.peak_allocated_bytes is not None:
        text += f", {size(ledger.peak_allocated_bytes)} of it in tensors"
    return text + (f", of {size(total)}" if total else "")


def _tiles(result: WatchResult) -> tuple[Tile, ...]:
    waits = next((phase.share for phase in result.phases if phase.name == "input"), None)
    tiles = []
    if result.step_s is not None:
        spread = result.step_interval_s
        detail = f"{duration(spread[0])} to {duration(spread[1])} (80%)" if spread else ""
        tiles.append(Tile("Step", duration(result.step_s), detail))
    if result.samples_per_s is not None:
        tiles.append(Tile("Throughput", f"{rate(result.samples_per_s)}/s", "samples a second"))
    if waits is not None:
        tone: Tone = "bad" if waits >= 0.1 else "plain"
        tiles.append(Tile("Waiting for batches", percent(waits), "of the time", waits, tone))
    if result.gpu_busy is not None:
        busy = result.gpu_busy
        tiles.append(Tile("GPU busy", percent(busy), "of the time", busy))
    elif result.gpu_utilization is not None:
        used = result.gpu_utilization
        tiles.append(Tile("GPU utilisation", percent(used), "by NVML", used))
    tiles.append(Tile("Judged", count(result.steps, "step"), f"in {duration(result.seconds)}"))
    return tuple(tiles)


def _item(finding: Finding, place: int) -> Item:
    steps = ""
    if finding.first_step is not None and finding.last_step is not None:
        steps = f"{finding.first_step} to {finding.last_step}"
    setting = setting_text(finding)
    ends = finding.kind in KINDS
    detail = 0 if ends and not place else _SHOWN if place < _FINDINGS else _MORE
    sure = "" if finding.confidence == "certain" else f", {finding.confidence}"
    return Item(
        title(finding),
        TONES[finding.severity],
        finding.severity + sure,
        rows(
            ("evidence", "; ".join(map(evidence_text, finding.evidence)), detail),
            ("cause", finding.cause),
            ("fix", finding.fix.action, detail),
            ("steps", steps),
        ),
        (Snippet(setting, "Change", detail),) if setting else (),
        detail,
        _WHOLE_FIX if ends else 2,
    )


# -- phases ------------------------------------------------------------------------------------


def _phases(result: WatchResult) -> Chart | None:
    shown = [phase for phase in result.phases if phase.host_s > 0]
    if not shown:
        return None
    rows = [
        {
            "phase": PHASES[phase.name],
            "ms": phase.host_s * 1e3,
            "step": "a step",
            "tip": tip(
                PHASES[phase.name],
                ("host", duration(phase.host_s)),
                ("share", percent(phase.share)),
                ("GPU", duration(phase.gpu_s) if phase.gpu_s is not None else ""),
            ),
        }
        for phase in shown
    ]
    most = max(shown, key=lambda each: each.share)
    says = f"Of a step's time {percent(most.share)} is {PHASES[most.name]}."
    hue = color("phase", [PHASES[e.name] for e in shown], [_COLORS[e.name] for e in shown])
    spec = parts_bar(rows, says, "time of a step (ms, measured, mean)", "step", hue)
    table = figures(
        ("Phase", "Host", "Share", "GPU"),
        [(PHASES[e.name], duration(e.host_s), percent(e.share), duration(e.gpu_s)) for e in shown],
        "Mean time of a step by phase",
        (1, 2, 3),
    )
    drawn = sorted(
        (phase for phase in shown if phase.share >= _LEAST_SHARE), key=lambda each: -each.share
    )[:_BARS]
    sketch = bars(
        [
            ((PHASES[e.name], percent(e.share), duration(e.host_s)), min(1.0, e.share),
             f"GPU {duration(e.gpu_s)}" if e.gpu_s is not None else "")
            for e in drawn
        ],
        "lrr",
    )  # fmt: skip
    return Chart("Time of a step, by phase (measured)", says, spec, table, "", sketch, 20)


def _ranks(result: WatchResult) -> Table | None:
    if len(result.ranks) < 2:
        return None
    return table_of(
        ("Rank", "Host", "Steps", "Step", "Samples", "Waiting for batches", "In collectives",
         "GPU busy", "Reserved"),
        [
            (str(e.rank), e.host, str(e.steps), duration(e.step_s),
             "-" if e.samples_per_step is None else f"{e.samples_per_step:g}",
             percent(e.input_share), percent(e.collectives_share), percent(e.gpu_busy),
             "-" if e.reserved_bytes is None else size(e.reserved_bytes))
            for e in result.ranks
        ],
        "Ranks",
        (0, 2, 3, 4, 5, 6, 7, 8),
    )  # fmt: skip


# -- over time ---------------------------------------------------------------------------------


def _course(result: WatchResult) -> list[Chart | None]:
    """Step time by phase over the run, findings marked; utilization below."""
    if len(result.timeline) < 2:
        return []
    slowest = max(range(len(result.timeline)), key=lambda n: result.timeline[n].step_s)
    points = thinned(result.timeline, _POINTS, (slowest,))
    note = ""
    if len(points) < len(result.timeline):
        note = (
            f"{len(points)} of {len(result.timeline)} points are drawn, the slowest steps among "
            "them."
        )
    return [_steps(result, points, note), _load(points)]


def _steps(result: WatchResult, points: Sequence[TimelinePoint], note: str) -> Chart:
    names = [name for name in _COLORS if any(point.phases.get(name, 0) > 0 for point in points)]
    titles = [PHASES[name] for name in names]
    rows = stacked(
        [
            (p.time_s, {PHASES[n]: p.phases.get(n, 0.0) * p.step_s * 1e3 for n in names})
            for p in points
        ],
        titles,
    )
    wide = [{"at": point.time_s, "tip": _point_tip(point)} for point in points]
    end = points[-1].time_s
    says = (
        f"Steps of {duration(min(p.step_s for p in points))} to "
        f"{duration(max(p.step_s for p in points))} over {duration(end - points[0].time_s)}, by "
        "phase."
    )
    marks = finding_lanes(result.findings, result.timeline)
    if marks:
        says += f" Marked: {'; '.join(mark['title'] for mark in marks)}."
    across = x("at", _TIME, scale={"nice": False, "zero": False})
    room = LANE * len(marks)
    scale = {"domainMin": 0, "range": [{"expr": "height"}, room]}
    spec = chart(
        220 + room,
        says,
        layer=[
            areas(
                rows,
                across,
                y("from", "time of a step (ms)", scale=scale),
                color("name", titles, [_COLORS[name] for name in names]),
                "step",
            ),
            hover_rule(wide, _TIME),
            *lane_layers(marks, across),
        ],
    )
    table = figures(
        ("Time", "Step", "Step time", *(PHASES[name] for name in names)),
        [
            (duration(p.time_s), str(p.step), duration(p.step_s),
             *(percent(p.phases.get(name, 0.0)) for name in names))
            for p in thinned(points, _ROWS)
        ],
        "The run over time",
        range(3 + len(names)),
    )  # fmt: skip
    return Chart("Time of steps over the run, findings marked", says, spec, table, note)


def _point_tip(point: TimelinePoint) -> list[list[str]]:
    parts = sorted(point.phases.items(), key=lambda item: -item[1])
    return tip(
        f"step {point.step} at {duration(point.time_s)}",
        ("step", duration(point.step_s)),
        *((PHASES.get(name, name), percent(share)) for name, share in parts if share >= 0.005),
        ("GPU utilisation", percent(point.gpu_utilization) if point.gpu_utilization else ""),
        ("cores busy", f"{point.cores_busy:.2f}" if point.cores_busy is not None else ""),
    )


def _load(points: Sequence[TimelinePoint]) -> Chart | None:
    """Utilization of the GPU and busy cores, as sampled."""
    gpu = [p for p in points if p.gpu_utilization is not None]
    cores = [p for p in points if p.cores_busy is not None]
    if len(gpu) < 2 and len(cores) < 2:
        return None
    name, chosen = ("GPU utilisation (%)", gpu) if len(gpu) >= 2 else ("busy cores", cores)
    rows = [
        {
            "s": p.time_s,
            "v": 100 * (p.gpu_utilization or 0) if len(gpu) >= 2 else p.cores_busy,
            "tip": _point_tip(p),
        }
        for p in chosen
    ]
    levels = [row["v"] for row in rows if isinstance(row["v"], float)]
    says = f"{name[0].upper()}{name[1:]} over the run: {min(levels):.3g} to {max(levels):.3g}."
    spec = chart(
        120,
        says,
        data=values(rows),
        mark={"type": "area", "line": {"color": COLORS[2]}, "color": COLORS[2], "opacity": 0.35,
              **TIP},
        encoding={
            "x": x("s", _TIME, scale={"nice": False, "zero": False}),
            "y": y("v", name, scale={"domainMin": 0}),
        },
    )  # fmt: skip
    table = figures(
        ("Time", name),
        [
            (duration(p.time_s), f"{row['v']:.3g}")
            for p, row in thinned(list(zip(chosen, rows, strict=True)), _ROWS)
        ],
        f"{name} over the run",
        (0, 1),
    )
    return Chart(f"{name[0].upper()}{name[1:]} over the run", says, spec, table)


# -- memory ------------------------------------------------------------------------------------


def _memory(ledger: MemoryLedger | None) -> Chart | None:
    if ledger is None or len(ledger.points) < 2:
        return None
    points = thinned(ledger.points, _POINTS)
    names = [n for n in _LEDGER if any(getattr(p, n) for p in points)]
    if not names:
        return None
    unit, of = (GIB, "GiB") if (ledger.total_bytes or GIB) >= GIB else (MIB, "MiB")
    titles = [_LEDGER[name][0] for name in names]
    rows = stacked(
        [(p.time_s, {_LEDGER[n][0]: (getattr(p, n) or 0) / unit for n in names}) for p in points],
        titles,
    )
    says = f"GPU memory: {size(ledger.peak_reserved_bytes)} reserved at the peak"
    says += f" of {size(ledger.total_bytes)}." if ledger.total_bytes else "."
    if ledger.growth_bytes_per_step and ledger.out_of_memory_step:
        says += (
            f" It grows by {size(ledger.growth_bytes_per_step)} a step: full at step "
            f"{ledger.out_of_memory_step}."
        )
    wide = [{"at": p.time_s, "tip": _ledger_tip(p, names)} for p in points]
    drawn = areas(
        rows,
        x("at", _TIME, scale={"nice": False, "zero": False}),
        y("from", of, scale={"domainMin": 0}),
        color("name", titles, [_LEDGER[name][1] for name in names]),
        "linear",
    )
    spec = chart(220, says, layer=[drawn, hover_rule(wide, _TIME)])
    table = figures(
        ("Time", "Step", *(_LEDGER[name][0] for name in names)),
        [
            (duration(p.time_s), str(p.step), *(size(getattr(p, n)) for n in names))
            for p in thinned(points, _ROWS)
        ],
        "GPU memory over the run",
        range(2 + len(names)),
    )
    return Chart("GPU memory over the run (measured)", says, spec, table)


def _ledger_tip(point: LedgerPoint, names: Sequence[str]) -> list[list[str]]:
    rows = [(_LEDGER[name][0], size(getattr(point, name))) for name in names]
    return tip(f"step {point.step} at {duration(point.time_s)}", *rows)
