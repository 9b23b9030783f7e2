"""Predicted and measured rates: a row for each setting, and over the number of workers.

Whether workers persist matters between epochs, not for the rates here: settings are looked up by
what matters within one (:func:`trainfit.results.loader.settings.steady`).
"""

from __future__ import annotations

from trainfit.report.loader.words import library_words, switch
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
    f"  {'':<11} {'workers':>7} {'prefetch':>8} {'pin':>4} {'persist':>7} {'order':>5}"
    f" {'predicted':>9} {'measured':>9}  GPU waits"
)


def settings_section(result: LoaderResult) -> str:
    """Present and recommended settings, and the others that were run; batches per second."""
    rows = [_settings_row(result, "current", result.present)]
    if result.recommended != result.present and result.verdict != "cannot_tell":
        rows.append(_settings_row(result, "recommended", result.recommended))
    known = {steady(result.present), steady(result.recommended)}
    runs = [run.settings for run in result.confirmed]
    others = dict.fromkeys(settings for settings in runs if steady(settings) not in known)
    rows += [_settings_row(result, "also run", settings) for settings in others]
    return "\n".join(["Settings (batches/s)", _HEAD, *rows])


def _settings_row(result: LoaderResult, name: str, settings: LoaderSettings) -> str:
    run = _measured(result, settings)
    failed = _run_of(result, settings)
    candidate = result.candidate(settings)
    predicted = candidate.batches_per_s if candidate else None
    if predicted is None and failed is not None:
        predicted = failed.predicted_batches_per_s
    measured = rate(run.measured_batches_per_s) if run is not None else ""
    disturbed = run is None and failed is not None and failed.is_disturbed
    if run is None and failed is not None:
        measured = "failed" if failed.fault is not None else "too slow"
        measured = rate(failed.measured_batches_per_s) if disturbed else measured
    workers = settings.num_workers
    prefetch = str(settings.prefetch_factor) if workers else "-"
    persist = switch(settings.persistent_workers) if workers else "-"
    order = switch(settings.in_order) if workers else "-"
    row = (
        f"  {name:<11} {workers:>7} {prefetch:>8} {switch(settings.pin_memory):>4} {persist:>7}"
        f" {order:>5} {rate(predicted):>9} {measured:>9}  {_waiting(result, candidate, run)}"
    ).rstrip()
    extra = [f"started by {settings.start_method}"] if _start_matters(result, settings) else []
    if disturbed:
        extra.append("measured while other processes were busy: not used")
    if settings.worker_threads != 1:
        extra.append(f"{settings.worker_threads} threads a worker")
    if settings.library_threads is not None:
        extra.append(library_words(settings.library_threads))
    indent = " " * 15
    return "\n".join([row, wrapped(f"({', '.join(extra)})", indent, indent)]) if extra else row


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
    head = f"  {'workers':>7} {'prefetch':>8} {'rate':>9}  {'GPU waits':>9} {'cores':>6} {'RAM':>9}"
    lines = [title, head]
    lines += [_table_row(result, candidate) for candidate in rows[:_ROWS]]
    if len(rows) > _ROWS:
        lines.append(
            f"  … {len(rows) - _ROWS} more, up to {count(rows[-1].settings.num_workers, 'worker')}"
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


def _table_row(result: LoaderResult, candidate: Candidate) -> str:
    settings = candidate.settings
    run = _measured(result, settings)
    value = f"{rate(run.measured_batches_per_s)}*" if run else f"{rate(candidate.batches_per_s)} "
    waits = percent(candidate.waiting_share) if result.step_s else "-"
    if run is not None and run.waiting_share is not None and result.step_s:
        waits = percent(run.waiting_share)
    ram = size(candidate.ram_bytes) if candidate.ram_bytes is not None else "-"
    prefetch = settings.prefetch_factor if settings.num_workers else "-"
    start = (
        f"  {settings.num_workers:>7} {prefetch:>8} {value:>10} {waits:>9} "
        f"{candidate.busy_cores:>6.1f} {ram:>9}"
    )
    marks = []
    if steady(settings) == steady(result.recommended) and result.verdict != "cannot_tell":
        marks.append("recommended")
    if steady(settings) == steady(result.present):
        marks.append("current")
    if candidate.infeasible:
        marks.append(f"infeasible: {printable(candidate.infeasible)}")
    elif candidate.oversubscribed:
        marks.append(f"oversubscribed: {printable(candidate.oversubscribed)}")
    return wrapped(", ".join(marks), f"{start}  ", " " * 60) if marks else start


def too_many_section(result: LoaderResult) -> str:
    """Cost of more workers than needed."""
    base = best_rate(result, result.recommended)
    candidate = result.candidate(result.recommended)
    if not result.too_many or base is None:
        return ""
    lines = ["Too many workers"]
    for each in result.too_many:
        lines.append(_too_many_line(result, each, candidate))
    return "\n".join(lines)


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


def _too_many_line(result: LoaderResult, more: Candidate, base: Candidate | None) -> str:
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
    first = f"  {count(more.settings.num_workers, 'worker')}".ljust(15)
    return wrapped(", ".join(said), first, " " * 15)
