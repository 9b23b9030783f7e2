"""A DataLoader: verdict, throughput against workers, what a batch costs, reasons and advice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trainfit.report.blocks import (
    Chart,
    Command,
    Headline,
    Item,
    Items,
    Section,
    Table,
    Tile,
    Tone,
    figures,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.charts import COLORS, TIP, chart, color, parts_bar, tip, values, x, y
from trainfit.report.loader import all_faults, loader_line, verdict_line
from trainfit.report.loader_figures import best_rate, by_workers, settings_words
from trainfit.results.dataloader import Candidate, Confirmed
from trainfit.results.loader import LoaderResult, SettingReason, most_helpful_first
from trainfit.results.text import count, duration, percent, rate, size, times

#: The verdict's first words, which a terminal shows in capitals.
_SHOUTED: Final = re.compile(r"^[A-Z]{2}[A-Z ]*\b")
_TONES: Final[Mapping[str, Tone]] = {
    "change": "warn",
    "keep": "good",
    "nothing_to_gain": "good",
    "no_setting_helps": "bad",
    "cannot_tell": "warn",
}
#: A rate that is so many times the highest of the others is not drawn.
_BEYOND: Final = 4.0
#: Names of points.
_RAN: Final = "measured"
_DISTURBED: Final = "measured, disturbed"
_PARTS: Final = {
    "read": COLORS[0],
    "decode": COLORS[1],
    "transform": COLORS[2],
    "collate": COLORS[3],
    "unknown": COLORS[6],
}


def loader_headline(result: LoaderResult) -> Headline:
    """The verdict, and what to write."""
    changes = result.verdict != "cannot_tell" and result.recommended != result.present
    commands = []
    if changes:
        commands.append(Command(loader_line(result.recommended, result.present), "Write"))
    if result.launch:
        commands.append(Command(result.launch, "Run"))
    return Headline(
        kind="DataLoader",
        tone=_TONES[result.verdict],
        text=_SHOUTED.sub(lambda found: found[0].capitalize(), verdict_line(result)),
        limit=result.reason,
        subject=result.command or result.loader,
        commands=tuple(commands),
        tiles=_tiles(result),
    )


def loader_sections(result: LoaderResult, *, settings: bool = True) -> list[Section]:
    """Rates, costs, settings with their reasons, what else would help, faults.

    Without ``settings`` their reasons are left out: a plan has them with its launch command.
    """
    reasons = [_settings(result), _variables(result)] if settings else []
    return [
        *section("DataLoader throughput", _workers(result), _runs(result)),
        *section("what a batch costs", _costs(result), _probe(result)),
        *section("DataLoader settings", *reasons),
        *section("Other changes that would help the DataLoader", _advice(result)),
        *section("DataLoader faults", _faults(result)),
    ]


def _settings(result: LoaderResult) -> Table | None:
    """Settings that stay as they are for one reason are one row."""
    groups: dict[tuple[str, ...], list[SettingReason]] = {}
    for each in result.reasons:
        stays = each.value == each.present
        groups.setdefault((each.reason, each.evidence, "" if stays else each.name), []).append(each)
    rows = [
        (
            ", ".join(each.name for each in group),
            _together([each.value or "not set" for each in group]),
            "the same" if not changed else group[0].present or "not set",
            reason,
            evidence or "-",
        )
        for (reason, evidence, changed), group in groups.items()
    ]
    return table_of(
        ("Setting", "Recommended", "Now", "Why", "Evidence"),
        rows,
        "Each setting with its reason",
        marked=[n for n, (_, _, changed) in enumerate(groups) if changed],
    )


def _together(texts: Sequence[str]) -> str:
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def _tiles(result: LoaderResult) -> tuple[Tile, ...]:
    found = best_rate(result, result.recommended)
    now = best_rate(result, result.present)
    tiles = [Tile("Workers", str(result.recommended.num_workers),
                  f"now {result.present.num_workers}")]  # fmt: skip
    if found is not None:
        before = f"now {rate(now[0])}" if now is not None else ""
        tiles.append(Tile("Batches/s", rate(found[0]), f"{found[1]}; {before}".rstrip("; ")))
    if result.step_s:
        least = "at least " if result.step_is_bound else ""
        tiles.append(
            Tile("GPU uses", f"{rate(1 / result.step_s)}/s", f"a step of {least}"
                 f"{duration(result.step_s)}")
        )  # fmt: skip
    return tuple(tiles)


def _workers(result: LoaderResult) -> Chart | None:
    """The predicted curve, measured points, and what the GPU uses."""
    chosen = [each for each in by_workers(result) if not each.infeasible]
    runs = [run for run in result.confirmed if run.measured_batches_per_s is not None]
    if len(chosen) < 2:
        return None
    curve = [
        row
        for each in chosen
        for row in (
            _point(each, "with the GPU", each.batches_per_s),
            _point(each, "DataLoader alone", each.alone_batches_per_s),
        )
        if row["rate"] is not None
    ]
    points = [_measured(run) for run in runs]
    names = [
        "with the GPU",
        "DataLoader alone",
        *dict.fromkeys(point["name"] for point in points),
    ]
    hues = {names[0]: COLORS[0], names[1]: COLORS[6], _RAN: COLORS[1], _DISTURBED: COLORS[7]}
    up = y("rate", "batches/s", scale={"domainMin": 0})
    across = x("workers", "num_workers", axis={"tickMinStep": 1}, scale={"nice": False})
    hue = color("name", names, [hues[name] for name in names])
    layers: list[dict[str, Any]] = [
        {
            "data": values(curve),
            "mark": {"type": "line", "point": True, **TIP},
            "encoding": {"x": across, "y": up, "color": hue},
        },
        {
            "data": values(points),
            "mark": {
                "type": "point",
                "shape": "diamond",
                "filled": True,
                "opacity": 1,
                "size": 130,
                **TIP,
            },
            "encoding": {"x": across, "y": up, "color": hue},
        },
    ]
    used_rate = 1 / result.step_s if result.step_s else 0.0
    highest = max(row["rate"] for row in (*curve, *points))
    note = ""
    if used_rate > _BEYOND * highest:
        note = f"The GPU could use {rate(used_rate)} batches/s, far above the picture."
    elif used_rate:
        used = {"rate": used_rate, "label": f"the GPU uses {rate(used_rate)}"}
        layers += [
            {
                "data": values([used]),
                "mark": {"type": "rule", "strokeDash": [6, 4], "color": "var(--muted)"},
                "encoding": {"y": up},
            },
            {
                "data": values([used]),
                "mark": {"type": "text", "align": "left", "dx": 4, "dy": -7,
                         "color": "var(--muted)"},
                "encoding": {"y": up, "x": {"value": 0}, "text": {"field": "label"}},
            },
        ]  # fmt: skip
    best = best_rate(result, result.recommended)
    unknown = result.verdict == "cannot_tell"
    says = "Kept, as the best settings are not known" if unknown else "Recommended"
    says += f": {settings_words(result.recommended)}"
    says += f", {rate(best[0])} batches/s ({best[1]})." if best is not None else "."
    table = figures(
        ("Workers", "Settings", "Predicted", "Measured", "GPU waits", "Cores", "RAM"),
        [_row(result, each) for each in chosen],
        "Batches per second by number of workers, each with the settings that suit it best",
        (0, 2, 3, 4, 5, 6),
        [n for n, each in enumerate(chosen) if each.settings == result.recommended],
    )
    return Chart(
        "Throughput against workers: predicted lines, measured points",
        says,
        chart(280, says, layer=layers),
        table,
        note,
    )


def _point(each: Candidate, name: str, per_s: float | None) -> dict[str, Any]:
    return {
        "workers": each.settings.num_workers,
        "rate": per_s,
        "name": name,
        "tip": tip(
            settings_words(each.settings),
            (name, f"{rate(per_s)} batches/s"),
            ("GPU waits", percent(each.waiting_share)),
            ("busy cores", f"{each.busy_cores:.2f}"),
            ("slower because", each.oversubscribed),
        ),
    }


def _measured(run: Confirmed) -> dict[str, Any]:
    disturbed = "while other processes were busy" if run.is_disturbed else ""
    return {
        "workers": run.settings.num_workers,
        "rate": run.measured_batches_per_s,
        "name": _DISTURBED if run.is_disturbed else _RAN,
        "tip": tip(
            settings_words(run.settings),
            ("measured", f"{rate(run.measured_batches_per_s)} batches/s"),
            ("predicted", f"{rate(run.predicted_batches_per_s)} batches/s"),
            ("run", f"{count(run.batches, 'batch', 'batches')} in {duration(run.seconds)}"),
            ("disturbed", disturbed),
        ),
    }


def _row(result: LoaderResult, each: Candidate) -> tuple[str, ...]:
    run = result.measured(each.settings)
    return (
        str(each.settings.num_workers),
        settings_words(each.settings),
        rate(each.batches_per_s),
        rate(run.measured_batches_per_s if run is not None else None),
        percent(each.waiting_share) if result.step_s else "-",
        f"{each.busy_cores:.2f}",
        size(each.ram_bytes),
    )


def _runs(result: LoaderResult) -> Table | None:
    return table_of(
        ("Real run", "Predicted", "Measured", "Difference", "Remark"),
        [
            (
                settings_words(run.settings),
                rate(run.predicted_batches_per_s),
                rate(run.measured_batches_per_s),
                _difference(run),
                run.fault.title
                if run.fault is not None
                else ("other processes were busy: not used" if run.is_disturbed else ""),
            )
            for run in result.confirmed
        ],
        "Real runs of the DataLoader (batches/s)",
        (1, 2, 3),
    )


def _difference(run: Confirmed) -> str:
    measured, predicted = run.measured_batches_per_s, run.predicted_batches_per_s
    if measured is None or not predicted:
        return "-"
    return percent(measured / predicted - 1, signed=True)


def _costs(result: LoaderResult) -> Chart | None:
    """What of a batch's time goes to what, in a worker."""
    probe = result.probe
    if not probe.parts or probe.fetch_s is None:
        return None
    rows = [
        {
            "part": part.name,
            "ms": part.share * probe.fetch_s * 1e3,
            "batch": "batch",
            "tip": tip(
                part.name,
                ("time", duration(part.share * probe.fetch_s)),
                ("share", percent(part.share)),
                ("in", ", ".join(part.what[:4])),
            ),
        }
        for part in probe.parts
    ]
    names = [part.name for part in probe.parts]
    most = max(probe.parts, key=lambda part: part.share)
    says = (
        f"A worker makes a batch in {duration(probe.fetch_s)}; {percent(most.share)} of it is "
        f"{most.name}."
    )
    hue = color("part", names, [_PARTS.get(name, COLORS[7]) for name in names])
    spec = parts_bar(rows, says, "time of a batch in a worker (ms, measured)", "batch", hue)
    table = figures(
        ("Part", "Time", "Share", "Functions"),
        [
            (p.name, duration(p.share * probe.fetch_s), percent(p.share), ", ".join(p.what))
            for p in probe.parts
        ],
        "what a batch costs in a worker",
        (1, 2),
    )
    return Chart("Time of a batch, by part", says, spec, table)


def _probe(result: LoaderResult) -> Table | None:
    probe = result.probe
    storage = probe.storage
    rows = [
        ("batch", f"{probe.batch_size or '?'} samples, {size(probe.batch_bytes)} in "
                  f"{count(probe.batch_tensors, 'tensor')}"),
        ("in a worker", _timed(probe.fetch_s, probe.fetch_cpu_s)),
        ("in the main process", duration(probe.alone_s)),
        ("receiving", duration(probe.receive_s)),
        ("pinning", duration(probe.pin_s)),
        ("two workers against one", times(probe.scaling)),
        ("from storage (cold)", duration(storage.cold_s) if storage is not None else "-"),
        ("spread", percent(probe.variation) if probe.variation is not None else "-"),
    ]  # fmt: skip
    there = [row for row in rows if row[1] != "-"]
    return table_of(("Measured", "Value"), there, "Costs of a batch (means)")


def _timed(wall: float | None, cpu: float | None) -> str:
    if wall is None:
        return "-"
    return f"{duration(wall)}, CPU time {duration(cpu)}" if cpu is not None else duration(wall)


def _variables(result: LoaderResult) -> Items | None:
    found = [
        Item(
            each.line,
            "warn",
            each.where,
            (("why", each.reason), ("evidence", each.evidence),
             ("gain", times(each.gain) if each.gain is not None else "")),
        )
        for each in result.variables
    ]  # fmt: skip
    if result.cores is not None:
        rows = (("why", result.cores.reason), ("evidence", result.cores.evidence))
        found.append(Item(result.cores.prefix, "warn", "cores", rows))
    return Items(tuple(found)) if found else None


def _advice(result: LoaderResult) -> Items | None:
    found = [
        Item(
            each.title,
            "plain",
            times(each.fix.gain)
            if each.fix.gain is not None
            else f"{percent(each.share)} of the time",
            (("how", each.fix.action), ("evidence", each.cause)),
        )
        for each in most_helpful_first(result.advice)
    ]
    return Items(tuple(found)) if found else None


def _faults(result: LoaderResult) -> Items | None:
    found = [
        Item(each.title, "bad", each.kind, (("fix", each.fix.action), ("evidence", each.cause)))
        for each in all_faults(result)
    ]
    return Items(tuple(found)) if found else None
