"""A DataLoader: verdict, what to write, throughput against workers, what a batch costs, advice."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from trainfit.report.blocks import (
    Chart,
    Headline,
    Item,
    Items,
    Section,
    Snippet,
    Subject,
    Table,
    Tile,
    Tone,
    facts,
    figures,
    items,
    rows,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.charts import COLORS, TIP, chart, color, parts_bar, tip, values, x, y
from trainfit.report.notes import plain, protection_notes
from trainfit.report.sections.loader_figures import (
    batch_facts,
    best_rate,
    by_workers,
    machine_rows,
    settings_blocks,
    settings_words,
    too_many,
    without_others_words,
    workers_table,
)
from trainfit.results.dataloader import Candidate, Confirmed, LoaderSettings, steady
from trainfit.results.files.contents import Note
from trainfit.results.findings import Finding
from trainfit.results.loader import BUSY, Limit, LoaderResult, SettingReason, most_helpful_first
from trainfit.results.runs.measurement import AS_FAST
from trainfit.results.text import count, duration, percent, rate, times

_TONES: Final[Mapping[str, Tone]] = {
    "change": "warn",
    "keep": "good",
    "nothing_to_gain": "good",
    "no_setting_helps": "bad",
    "cannot_tell": "warn",
}
#: A rate that is so many times the highest of the others is not drawn.
_BEYOND: Final = 4.0
#: A reason that says what the verdict's line says.
_FACTOR: Final = re.compile(rf"[\d.]+× as many batches( \({BUSY}\))?")
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
#: A prediction that is further than this from a measurement is called inaccurate: twice the
#: 90th percentile that the model aims at.
_OFF = 0.24

LIMITS: dict[Limit, str] = {
    "gpu": "the GPU",
    "workers": "the number of workers",
    "cores": "the cores",
    "disk": "the storage",
    "transfer": "the transfer of batches to the main process",
    "lock": "a lock that workers wait for",
    "sampler": "the sampler in the main process",
    "main_process": "the main process, as only it can load batches",
    "unknown": "not known",
}


def loader_subject(result: LoaderResult) -> Subject:
    """The verdict, what to write, rates, costs, settings with their reasons, what else helps."""
    return Subject(
        Headline(
            kind="DataLoader",
            tone=_TONES[result.verdict],
            text=verdict_line(result),
            limit="" if _FACTOR.fullmatch(result.reason) else result.reason,
            subject=result.command or result.loader,
            commands=tuple(_commands(result)),
            tiles=_tiles(result),
        ),
        tuple(loader_sections(result)),
        tuple(_notes(result)),
        machine_rows(result.machine, result.ranks),
    )


def loader_sections(result: LoaderResult, *, settings: bool = True) -> list[Section]:
    """Rates, costs, settings with their reasons, what else would help, faults.

    Without ``settings`` reasons are left out, but for what goes into the script: a plan has them
    with its launch command.
    """
    reasons = [_settings(result) if settings else None, _variables(result, everywhere=settings)]
    limit = LIMITS[result.limit] if result.verdict in ("change", "keep") else ""
    return [
        *section("DataLoader faults", _faults(result)),
        *section(
            "DataLoader settings",
            *settings_blocks(result),
            facts(
                ("without others", without_others_words(result), 25),
                ("limit with them", limit, 12),
                ("a step", step_words(result), 11),
                ("confidence", certainty(result), 10),
                ("DataLoader", title(result), 15),
            ),
            *reasons,
        ),
        *section("Other changes that would help the DataLoader", _advice(result)),
        *section("DataLoader throughput", _workers(result), _runs(result)),
        *section("Too many workers", too_many(result)),
        *section("What a batch costs", _costs(result), batch_facts(result.probe)),
    ]


def _commands(result: LoaderResult) -> Iterator[Snippet]:
    """What to write where."""
    if result.verdict != "cannot_tell" and result.recommended != result.present:
        if result.launch_sets:
            yield Snippet(result.launch, "Run")
        if line := loader_line(result.recommended, result.present, result.launch_sets):
            yield Snippet(line, "Write")
        if result.recommended.worker_threads != result.present.worker_threads:
            threads = f"torch.set_num_threads({result.recommended.worker_threads})"
            yield Snippet(threads, "In the DataLoader's worker_init_fn")
    for variable in result.variables:
        if variable.where != "environment":
            yield Snippet(variable.line, f"In the {variable.where}")
    if result.cores is not None and result.cores.prefix.startswith("torchrun"):
        yield Snippet(f"{result.cores.prefix} …", "Instead of python")
    elif result.launch and not result.launch_sets:
        yield Snippet(result.launch, "Run")
    elif not result.command or result.command.startswith("--loader"):
        yield from (Snippet(line, "Before the command") for line in _before_command(result))


def _notes(result: LoaderResult) -> Iterator[Note]:
    for doubt in result.doubts:
        text = f"{doubt.title}: {doubt.cause}" if doubt.cause else doubt.title
        yield Note("note", text, severity="changes the figures" if doubt.is_critical
                   else "may change the figures")  # fmt: skip
    yield from plain((*result.notes, *protection_notes(result.protection)))


def title(result: LoaderResult) -> str:
    """Which DataLoader it is, how long that took, on which PyTorch."""
    torch = f", torch {result.torch}" if result.torch else ""
    return f"{result.loader} ({duration(round(result.seconds))}{torch})"


# -- verdict -----------------------------------------------------------------------------------


def verdict_line(result: LoaderResult) -> str:
    """The verdict in one line."""
    # What was disturbed does not tell 2%; the reason says what it tells.
    kept = f"Keep the settings ({_now(result)})"
    if not result.was_busy:
        kept = f"Keep the settings: no other is more than 2% faster ({_now(result)})"
    heads = {
        "change": f"Change the settings: {_gain(result)}",
        "keep": kept,
        "nothing_to_gain": f"Nothing to gain: the GPU is the limit ({_now(result)})",
        "no_setting_helps": f"No setting helps: the limit is {LIMITS[result.limit]} "
        f"({_now(result)})",
        "cannot_tell": "Cannot tell which settings are best",
    }
    fault = _excludes(result)
    if fault is not None:
        until = settings_words(result.recommended)
        return f"Fix the data set first: {fault.title}. Until then: {until}"
    return heads[result.verdict]


def _excludes(result: LoaderResult) -> Finding | None:
    """The fault for which slower settings are recommended than the present ones; ``None``: there is
    none, or they are no slower."""
    found = result.compared()
    if result.verdict != "change" or found is None or not found[0] or found[1] >= found[0]:
        return None
    return next(iter(all_faults(result)), None)


def _gain(result: LoaderResult) -> str:
    """Both measured, or both predicted: one of each compares the model with the machine."""
    found = result.compared()
    if found is None or not found[0]:
        return settings_words(result.recommended)
    before, after, evidence = found
    how: str = BUSY if result.was_busy and evidence == "predicted" else evidence
    if abs(after / before - 1) < 0.005:  # what is gained is not within an epoch
        words = settings_words(result.recommended)
        return f"{words} ({rate(after)} batches/s within an epoch, as now, {how})"
    text = f"{rate(before)} → {rate(after)} batches/s, {times(after / before)}"
    return f"{text} ({how})" + (" for each rank" if result.ranks > 1 else "")


def _now(result: LoaderResult) -> str:
    found = best_rate(result, result.present)
    return f"{rate(found[0])} batches/s, {found[1]}" if found is not None else "rate not known"


def step_words(result: LoaderResult) -> str:
    """The step of the GPU, and where its time is from."""
    source = result.step_source
    if result.step_s:
        least = "at least " if result.step_is_bound else ""
        text = f"{least}{duration(result.step_s)}: {source}"
        if result.step_is_bound:
            text += "; --step-time gives the real one"
        return text
    phrase = f" ({source})" if source and source != AS_FAST else ""
    return (
        f"assumed as 0{phrase}, which overstates the gain of workers: give it, as in "
        "--step-time 40ms, or --gpu NAME to predict it"
    )


def certainty(result: LoaderResult) -> str:
    """A sentence on how far the recommended settings' measured rate is from the predicted."""
    ran = [run for run in result.confirmed if run.measured_batches_per_s is not None]
    runs = [run for run in ran if not run.is_disturbed]
    if ran and not runs:
        real = count(len(ran), "real run")
        return f"predicted only; other processes disturbed {real}: not used"
    if not runs and result.was_busy:
        return "predicted only; other processes kept the machine busy: repeat when it is idle"
    if not runs:
        return "predicted only, not confirmed by a real run (--confirm N makes some)"
    chosen = steady(result.recommended)
    mine = [_deviation(run) for run in runs if steady(run.settings) == chosen]
    copies = (
        f", each with {result.ranks} copies of the DataLoader running," if result.ranks > 1 else ""
    )
    if not mine:
        others = [_deviation(run) for run in runs]
        return (
            "predicted only, no undisturbed real run of these settings; "
            f"{count(len(runs), 'run')} of others{copies} differed by {_span(others)} from the "
            "prediction"
        )
    text = f"{count(len(mine), 'real run')} of these settings{copies} differed by "
    text += f"{_span(mine)} from the prediction"
    if max(map(abs, mine)) > _OFF:
        text += "; the predictions are inaccurate here: use the measured rates"
    return text


def _span(off: Sequence[float]) -> str:
    return f"{min(off):+.0%}" if min(off) == max(off) else f"{min(off):+.0%} to {max(off):+.0%}"


def _deviation(run: Confirmed) -> float:
    """Measured from predicted, relative to predicted."""
    measured = run.measured_batches_per_s
    assert measured is not None
    if not run.predicted_batches_per_s:
        return 0.0
    return measured / run.predicted_batches_per_s - 1


def all_faults(result: LoaderResult) -> list[Finding]:
    """All faults, each once."""
    met = (run.fault for run in result.confirmed if run.fault is not None)
    found = [*result.faults, *result.probe.faults, *met]
    return list({(fault.kind, fault.title): fault for fault in reversed(found)}.values())[::-1]


def loader_line(
    settings: LoaderSettings, present: LoaderSettings, launched: Collection[str] = ()
) -> str:
    """The call of ``DataLoader``, without what a launch line says (``launched``); maybe empty."""
    words: dict[str, object] = {"num_workers": settings.num_workers}
    if settings.num_workers:
        words["prefetch_factor"] = settings.prefetch_factor
    elif present.num_workers:  # PyTorch refuses them without workers
        words["prefetch_factor"] = None
    words["pin_memory"] = settings.pin_memory
    if settings.num_workers:
        words["persistent_workers"] = settings.persistent_workers
        if not (settings.in_order and present.in_order):
            words["in_order"] = settings.in_order
        if settings.start_method != present.start_method:
            words["multiprocessing_context"] = f'"{settings.start_method}"'
    elif present.persistent_workers:
        words["persistent_workers"] = False
    if launched:
        words = {
            name: value
            for name, value in words.items()
            if name not in launched and value != getattr(present, name, None)
        }
    said = ", ".join(f"{name}={value}" for name, value in words.items())
    return f"DataLoader(…, {said})" if said else ""


def _before_command(result: LoaderResult) -> list[str]:
    """Variables and cores where no command is known to write them before."""
    variables = [f"{v.name}={v.value}" for v in result.variables if v.where == "environment"]
    prefix = [result.cores.prefix] if result.cores is not None else []
    words = [*variables, *prefix]
    return [" ".join([*words, "COMMAND"])] if words else []


def _settings(result: LoaderResult) -> Table | None:
    """Settings that stay as they are for one reason are one row."""
    groups: dict[tuple[str, ...], list[SettingReason]] = {}
    for each in result.reasons:
        stays = each.value == each.present
        why = reason_text(each), each.evidence, "" if stays else each.name
        groups.setdefault(why, []).append(each)
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


def reason_text(reason: SettingReason) -> str:
    """Why a setting has its value, or stays as it is."""
    if reason.misread:
        return f"{reason.present!r} {reason.misread}; {reason.reason}"
    return f"kept: {reason.reason}" if reason.is_kept else reason.reason


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
    chosen = [worker for worker in by_workers(result) if not worker.infeasible]
    runs = [run for run in result.confirmed if run.measured_batches_per_s is not None]
    if len(chosen) < 2:
        return None
    curve = [
        row
        for worker in chosen
        for row in (
            _point(worker, "with the GPU", worker.batches_per_s),
            _point(worker, "DataLoader alone", worker.alone_batches_per_s),
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
    return Chart(
        "Throughput against workers: predicted lines, measured points",
        says,
        chart(280, says, layer=layers),
        workers_table(result),
        note,
    )


def _point(candidate: Candidate, name: str, per_s: float | None) -> dict[str, Any]:
    return {
        "workers": candidate.settings.num_workers,
        "rate": per_s,
        "name": name,
        "tip": tip(
            settings_words(candidate.settings),
            (name, f"{rate(per_s)} batches/s"),
            ("GPU waits", percent(candidate.waiting_share)),
            ("busy cores", f"{candidate.busy_cores:.2f}"),
            ("slower because", candidate.oversubscribed),
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
        "What a batch costs in a worker",
        (1, 2),
    )
    return Chart("Time of a batch, by part", says, spec, table)


def _variables(result: LoaderResult, *, everywhere: bool) -> Items | None:
    """What to set; without ``everywhere`` in the script alone, not before the command."""
    found = [
        Item(
            variable.line,
            "warn",
            variable.where,
            (("why", variable.reason), ("evidence", variable.evidence),
             ("gain", times(variable.gain) if variable.gain is not None else "")),
        )
        for variable in result.variables
        if everywhere or variable.where != "environment"
    ]  # fmt: skip
    if everywhere and result.cores is not None:
        rows = (("why", result.cores.reason), ("evidence", result.cores.evidence))
        found.append(Item(result.cores.prefix, "warn", "cores", rows))
    return items(found)


def _advice(result: LoaderResult) -> Items | None:
    found = [
        Item(
            finding.title,
            "plain",
            f"{times(finding.fix.gain)} (predicted)"
            if finding.fix.gain is not None
            else f"{percent(finding.share)} of the time",
            rows(("how", finding.fix.action, 30), ("evidence", finding.cause)),
            detail=30,
        )
        for finding in most_helpful_first(result.advice)
    ]
    return items(found, "change")


def _faults(result: LoaderResult) -> Items | None:
    found = [
        Item(
            fault.title + (f" (with {settings_words(fault.loader)})" if fault.loader else ""),
            "bad",
            fault.kind,
            rows(
                ("line", str(fault.place or ""), 1),
                ("fix", fault.fix.action, 1),
                ("evidence", fault.cause),
            ),
            detail=2,
        )
        for fault in all_faults(result)
    ]
    return items(found, "fault")
