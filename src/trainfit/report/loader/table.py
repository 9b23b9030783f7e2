"""Predicted and measured rates: a row for each setting, and over the number of workers.

Whether workers persist matters between epochs, not for the rates here: settings are looked up by
what matters within one (:func:`trainfit.results.loader.settings.steady`).
"""

from __future__ import annotations

from trainfit.report.loader.words import library_words, switch
from trainfit.report.table import table
from trainfit.results.format import count, percent, rate, size
from trainfit.results.loader.candidates import SAVE_BYTES, Candidate, Confirmed
from trainfit.results.loader.result import LoaderResult
from trainfit.results.loader.settings import LoaderSettings, steady
from trainfit.results.text import printable, wrapped

#: Rows of the table over workers, at most.
_ROWS = 14


def _run_of(result: LoaderResult, settings: LoaderSettings) -> Confirmed | None:
    """The real run of these settings; one that did not fail, if there is one."""
    runs = [run for run in result.confirmed if steady(run.settings) == steady(settings)]
    runs.sort(
        key=lambda run: (
            run.measured_batches_per_s is None,
            run.is_disturbed,
            run.settings != settings,
        )
    )
    return runs[0] if runs else None


def _measured(result: LoaderResult, settings: LoaderSettings) -> Confirmed | None:
    """Likewise, if it did not fail and other processes did not disturb it."""
    run = _run_of(result, settings)
    if run is None or run.measured_batches_per_s is None or run.is_disturbed:
        return None
    return run


def best_rate(result: LoaderResult, settings: LoaderSettings) -> tuple[float, str] | None:
    """Batches per second of these settings: measured if they were run, else predicted."""
    run = _measured(result, settings)
    if run is not None and run.measured_batches_per_s is not None:
        return run.measured_batches_per_s, "measured"
    candidate = result.candidate(settings)
    return (candidate.batches_per_s, "predicted") if candidate is not None else None


_HEAD = (
    *("", "workers", "prefetch", "pin", "persist", "order"),
    *("predicted", "measured", "GPU waits"),
)


def settings_section(result: LoaderResult, *, tried: bool = True) -> str:
    """Present and recommended settings, and (``tried``) the others that were run; batches/s."""
    shown = [("current", result.present)]
    if result.recommended != result.present and result.verdict != "cannot_tell":
        shown.append(("recommended", result.recommended))
    known = {steady(result.present), steady(result.recommended)}
    runs = [run.settings for run in result.confirmed] if tried else []
    others = dict.fromkeys(settings for settings in runs if steady(settings) not in known)
    shown += [("also run", settings) for settings in others]
    rows = table([_settings_row(result, *each) for each in shown], "lrrrrrrrw", _HEAD)
    remarks: dict[str, list[str]] = {}
    for name, settings in shown:
        which = f"{name}, {count(settings.num_workers, 'worker')}" if name == "also run" else name
        for remark in _remarks(result, settings):
            remarks.setdefault(remark, []).append(which)
    lines = [
        wrapped(f"{'; '.join(names)}: {remark}", "  ", "    ") for remark, names in remarks.items()
    ]
    return "\n".join(["Settings (batches/s)", *rows, *lines])


def _settings_row(result: LoaderResult, name: str, settings: LoaderSettings) -> tuple[str, ...]:
    run = _measured(result, settings)
    failed = _run_of(result, settings)
    candidate = result.candidate(settings)
    predicted = candidate.batches_per_s if candidate else None
    if predicted is None and failed is not None:
        predicted = failed.predicted_batches_per_s
    measured = rate(run.measured_batches_per_s) if run is not None else ""
    if run is None and failed is not None:
        measured = "failed" if failed.fault is not None else "too slow"
        measured = rate(failed.measured_batches_per_s) if failed.is_disturbed else measured
    workers = settings.num_workers
    return (
        name,
        str(workers),
        str(settings.prefetch_factor) if workers else "-",
        switch(settings.pin_memory),
        switch(settings.persistent_workers) if workers else "-",
        switch(settings.in_order) if workers else "-",
        rate(predicted),
        measured,
        _waiting(result, candidate, run),
    )


def _remarks(result: LoaderResult, settings: LoaderSettings) -> list[str]:
    """What the columns do not say of settings."""
    run, failed = _measured(result, settings), _run_of(result, settings)
    said = [f"started by {settings.start_method}"] if _start_matters(result, settings) else []
    if run is None and failed is not None and failed.is_disturbed:
        said.append("measured while other processes were busy: not used")
    if settings.worker_threads != 1:
        said.append(f"{settings.worker_threads} threads a worker")
    if settings.library_threads is not None:
        said.append(library_words(settings.library_threads))
    return said


def _waiting(result: LoaderResult, candidate: Candidate | None, run: Confirmed | None) -> str:
    """The share of time that the GPU waits; nothing where the step time is 0."""
    if not result.step_s:
        return "-"
    measured = run.waiting_share if run is not None else None
    said = percent(candidate.waiting_share) if candidate is not None else ""
    if measured is None:
        return said
    return f"{said} (measured {percent(measured)})" if said else f"measured {percent(measured)}"


def _start_matters(result: LoaderResult, settings: LoaderSettings) -> bool:
    """Is its start method not every setting's?"""
    return bool(settings.num_workers) and (
        settings.start_method != "fork" or result.present.start_method != "fork"
    )


def table_section(result: LoaderResult) -> str:
    """Over the number of workers, each with the other settings that suit it best."""
    rows = by_workers(result)
    if len(rows) < 2:
        return ""
    title = "By number of workers (batches/s; * measured)"
    head = ("workers", "prefetch", "rate", "GPU waits", "cores", "RAM", "")
    cells = [_table_row(result, candidate) for candidate in rows[:_ROWS]]
    lines = [title, *table(cells, "rrrrrrw", head)]
    if len(rows) > _ROWS:
        lines.append(
            f"  {len(rows) - _ROWS} more, up to {count(rows[-1].settings.num_workers, 'worker')}"
        )
    return "\n".join(lines)


def by_workers(result: LoaderResult) -> list[Candidate]:
    """One candidate for each number of workers: the recommended, present or measured one, else
    the fastest."""
    chosen: dict[int, Candidate] = {}

    def rank(candidate: Candidate) -> tuple[bool, bool, bool, bool, float]:
        settings = candidate.settings
        return (
            not candidate.infeasible,
            steady(settings) == steady(result.recommended),
            steady(settings) == steady(result.present),
            _measured(result, settings) is not None,
            candidate.batches_per_s,
        )

    for candidate in result.candidates:
        workers = candidate.settings.num_workers
        if workers not in chosen or rank(candidate) > rank(chosen[workers]):
            chosen[workers] = candidate
    return [chosen[workers] for workers in sorted(chosen)]


def _table_row(result: LoaderResult, candidate: Candidate) -> tuple[str, ...]:
    settings = candidate.settings
    run = _measured(result, settings)
    waits = percent(candidate.waiting_share) if result.step_s else "-"
    if run is not None and run.waiting_share is not None and result.step_s:
        waits = percent(run.waiting_share)
    marks = []
    if steady(settings) == steady(result.recommended) and result.verdict != "cannot_tell":
        marks.append("recommended")
    if steady(settings) == steady(result.present):
        marks.append("current")
    if candidate.infeasible:
        marks.append(f"infeasible: {printable(candidate.infeasible)}")
    elif candidate.oversubscribed:
        marks.append(f"oversubscribed: {printable(candidate.oversubscribed)}")
    return (
        str(settings.num_workers),
        str(settings.prefetch_factor) if settings.num_workers else "-",
        f"{rate(run.measured_batches_per_s)}*" if run else f"{rate(candidate.batches_per_s)} ",
        waits,
        f"{candidate.busy_cores:.1f}",
        size(candidate.ram_bytes) if candidate.ram_bytes is not None else "-",
        ", ".join(marks),
    )


def too_many_section(result: LoaderResult) -> str:
    """Cost of more workers than needed."""
    base = best_rate(result, result.recommended)
    candidate = result.candidate(result.recommended)
    if not result.too_many or base is None:
        return ""
    rows = [
        (
            count(each.settings.num_workers, "worker"),
            _too_many_words(result, each, candidate),
        )
        for each in result.too_many
    ]
    return "\n".join(["Too many workers", *table(rows, "lw")])


def _saving(result: LoaderResult, more: Candidate, run: Confirmed | None) -> str:
    """Slow-down of saving a checkpoint while so many workers are running."""
    alone = result.save_alone_s
    measured = run.save_s if run is not None else None
    if not alone or more.save_s is None:
        return ""
    said = (
        f"saving {size(SAVE_BYTES)} of a checkpoint {more.save_s / alone:.1f} times as long as "
        "without workers"
    )
    return said if measured is None else f"{said} (measured {measured / alone:.1f})"


def _too_many_words(result: LoaderResult, more: Candidate, base: Candidate | None) -> str:
    run, usual = _measured(result, more.settings), _measured(result, result.recommended)
    said = [f"{rate(more.batches_per_s)} batches/s predicted"]
    if base is not None and base.batches_per_s:
        said[0] += f" ({more.batches_per_s / base.batches_per_s - 1:+.0%})"
    if run is not None:
        said.append(f"{rate(run.measured_batches_per_s)} measured")
    if more.ram_bytes is not None and base is not None and base.ram_bytes is not None:
        said.append(f"{size(max(0, more.ram_bytes - base.ram_bytes))} more RAM")
    if run is not None and run.context_switches_per_batch is not None:
        text = f"{run.context_switches_per_batch:.0f} context switches a batch"
        if usual is not None and usual.context_switches_per_batch is not None:
            text += f" (recommended: {usual.context_switches_per_batch:.0f})"
        said.append(text)
    if saving := _saving(result, more, run):
        said.append(saving)
    if more.infeasible:
        said.append(f"infeasible: {printable(more.infeasible)}")
    elif more.oversubscribed:
        said.append(f"oversubscribed: {printable(more.oversubscribed)}")
    return ", ".join(said)
