"""A plan's answer; the job on several GPUs; its prediction compared with a real run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from trainfit.report.blocks import (
    Command,
    Headline,
    Item,
    Items,
    Section,
    Table,
    Tile,
    Tone,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.plan.facts import facts
from trainfit.report.plan.launch import change_lines
from trainfit.report.plan.remedies import fix_lines, fix_title
from trainfit.report.plan.speed import BOUNDS, answer, step_at
from trainfit.report.sections.memory import figures_table, peak_sections, quantities
from trainfit.report.sections.memory_charts import by_batch
from trainfit.results.changes import LaunchPart
from trainfit.results.plan import JobDetail, PlanResult, run_rate
from trainfit.results.speed import StepSpeed
from trainfit.results.text import count, duration, percent, rate, size, times

_STATUS: Final = {
    "set": "set",
    "kept": "kept",
    "not set": "left unset",
    "by hand": "change in the script",
    "cannot tell": "cannot tell",
}
_LOADER: Final = {
    "gpu": "keeps up with the GPU",
    "loader": "is the bottleneck",
    "unknown": "not known whether it keeps up",
}
_ORDER: Final = ("set", "by hand", "kept", "not set", "cannot tell")


def plan_headline(result: PlanResult) -> Headline:
    """Fits or not, what limits, what to run."""
    return Headline(
        kind="Plan",
        tone="good" if result.can_start else "bad",
        text=answer(result),
        limit=_limit(result),
        subject=f"{result.command} on {result.gpu}",
        commands=(Command(result.launch, "Run"),) if result.can_start else (),
        changes=tuple(change_lines(result.launch_parts)),
        tiles=_tiles(result),
    )


def command_sections(result: PlanResult) -> list[Section]:
    """Each parameter with its reason and evidence, and what decides."""
    parts = sorted(_grouped(result.launch_parts), key=lambda part: _ORDER.index(part.status))
    reasons = table_of(
        ("Parameter", "Value", "Why", "Evidence"),
        [(part.name, _value(part), part.reason or "reason not known", _evidence(part))
         for part in parts],
        "Each part of the launch command, and what was left out of it",
        marked=[place for place, part in enumerate(parts) if part.status in ("set", "by hand")],
    )  # fmt: skip
    deciding = table_of(
        ("Subject", "What decides"), [(fact.label, fact.text) for fact in facts(result)]
    )
    return section("Why these settings", reasons, deciding)


def remedy_sections(result: PlanResult) -> list[Section]:
    """What would lower the memory, and all that was tried."""
    fixes = [Item(line, "warn" if not result.fits else "plain") for line in fix_lines(result)]
    listed = Items(tuple(fixes)) if fixes else None
    return section(fix_title(result), listed, _remedies(result))


def _grouped(parts: Sequence[LaunchPart]) -> list[LaunchPart]:
    """Parts that are left out for one reason are one row."""
    groups: dict[tuple[str, ...], list[LaunchPart]] = {}
    for part in parts:
        left_out = part.status in ("not set", "cannot tell") and not part.present
        own = () if left_out else (part.name,)
        key = (part.status, part.reason, part.evidence, part.machine, *own)
        groups.setdefault(key, []).append(part)
    return [
        dataclasses.replace(group[0], name=", ".join(part.name for part in group))
        for group in groups.values()
    ]


def _limit(result: PlanResult) -> str:
    """What limits the job: the GPU's part that bounds a step, or the DataLoader."""
    step = step_at(result, result.chosen.recommended_batch or result.now.batch_size)
    parts = []
    loading, run = result.loading, run_rate(result)
    if run is not None and run.limit == "loader":
        by = times(run.step_s / run.gpu_step_s)
        parts.append(f"What limits: the DataLoader, which is {by} too slow for the GPU")
    elif step is not None:
        share = ""
        if loading is not None and loading.bottleneck == "gpu":
            share = "; the DataLoader keeps up"
        parts.append(f"What limits: {BOUNDS[step.bound]}{share}")
    if not result.fits:
        parts.insert(0, f"What limits: memory of {result.gpu} ({size(result.gpu_memory_bytes)})")
    return ". ".join(parts[:1]) + "." if parts else ""


def _tiles(result: PlanResult) -> tuple[Tile, ...]:
    chosen = result.chosen
    best = chosen.recommended_batch
    memory = result.recommended if result.recommended is not None and best else result.now.memory
    at = best if result.recommended is not None and best else result.now.batch_size
    share = memory.device_bytes / result.gpu_memory_bytes
    tone: Tone = "bad" if share > 1 else "plain"
    tiles = [
        Tile(
            "GPU memory",
            size(memory.device_bytes),
            f"{percent(share)} of {size(result.gpu_memory_bytes)}"
            + (f" at batch size {at}" if at else ""),
            min(share, 1.0),
            tone,
        )
    ]
    if chosen.largest_batch is not None:
        more = chosen.limits is not None and chosen.limits.at_least
        tiles.append(
            Tile(
                "Batch size",
                str(best or "-"),
                f"recommended; largest {'at least ' if more else ''}{chosen.largest_batch}",
            )
        )
    step = step_at(result, best or result.now.batch_size)
    if step is not None:
        tiles += _speed_tiles(result, step)
    loading = result.loading
    if loading is not None and loading.result is not None:
        settings = loading.launched or loading.result.recommended
        tiles.append(
            Tile(
                "DataLoader",
                count(settings.num_workers, "worker"),
                _LOADER[loading.bottleneck],
                tone="bad" if loading.bottleneck == "loader" else "plain",
            )
        )
    return tuple(tiles)


def _speed_tiles(result: PlanResult, step: StepSpeed) -> Iterator[Tile]:
    """Of the launched run, which may be slower than ``step``, the GPU's."""
    run = run_rate(result)
    if run is None:
        return
    low, high = step.range_s
    what = "Call" if result.inference is not None else "Step"
    least = "at least " if run.is_bound else ""
    detail = f"predicted, {duration(low)} to {duration(high)}"
    if run.limit == "loader":
        detail = f"by the DataLoader; the GPU alone {duration(run.gpu_step_s)}"
    elif run.limit != "gpu":
        detail += "; the GPU alone"
    yield Tile(what, f"{least}{duration(run.step_s)}", detail)
    if run.samples_per_s:
        epoch = f"; an epoch in {least}{duration(run.epoch_s)}" if run.epoch_s else ""
        most = "at most " if run.is_bound else ""
        yield Tile("Throughput", f"{most}{rate(run.samples_per_s)}/s", f"samples a second{epoch}")


def _value(part: LaunchPart) -> str:
    value = part.line if part.status == "by hand" else part.value
    was = f" (was {part.present})" if part.present and part.present != part.value else ""
    status = "" if part.status == "set" else _STATUS[part.status]
    return f"{value}{was}" + (f" · {status}" if status and value else status)


def _evidence(part: LaunchPart) -> str:
    return ", ".join(each for each in (part.evidence, part.machine) if each) or "-"


def _remedies(result: PlanResult) -> Table | None:
    """What was tried, with what each saves and costs."""
    remedies = result.remedies
    if remedies is None:
        return None
    tried = [each for each in remedies.items if each.status != "not applicable"]
    order = sorted(tried, key=lambda each: -(each.saved_bytes or 0))
    return table_of(
        ("Remedy", "Device memory", "Saves", "Largest batch", "Step", "Training", "How"),
        [
            (
                each.title,
                size(each.memory.device_bytes) if each.memory is not None else "-",
                size(each.saved_bytes, signed=False),
                "-" if each.largest_batch is None else str(each.largest_batch),
                percent(each.step_change, signed=True),
                each.changes_detail or each.changes,
                "; ".join(each.how) or each.reason,
            )
            for each in order
        ],
        f"All {len(order)} remedies that were tried, each alone (the step's change is predicted)",
        numeric=(1, 2, 3, 4),
        folded=True,
    )


def plan_memory(result: PlanResult, detail: JobDetail | None) -> list[Section]:
    """Sections on a plan's memory."""
    now, best = result.now, result.chosen.recommended_batch
    columns = {f"batch size {now.batch_size or 'as it is'}": now.memory}
    if result.recommended is not None and best and best != now.batch_size:
        columns[f"batch size {best} (recommended)"] = result.recommended
    return [
        *section("Memory", figures_table(columns), quantities(now.memory)),
        *peak_sections(now.by_kind_bytes, now.by_module_bytes, result.gpu_memory_bytes, detail),
        *section("Memory by batch size", by_batch(result, detail) if detail else None),
    ]
