"""Data loading as a section of a plan's text: does the DataLoader keep up with the GPU?"""

from __future__ import annotations

from collections.abc import Iterator

from trainfit.report.plan.launch import launch_lines
from trainfit.report.sections.loader_figures import library_words, without_others_words
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.findings import Finding
from trainfit.results.loader import LoaderResult, most_helpful_first
from trainfit.results.plan import HostCpu, PlanResult
from trainfit.results.speed import DataLoading
from trainfit.results.text import (
    core_count,
    cores,
    ghz,
    instructions,
    percent,
    printable,
    rate,
    times,
    wrapped,
)

#: Column of the text next to a name.
_COLUMN = 18
#: Pieces of advice, and faults, that are shown; `trainfit loader` shows all.
_SHOWN = 2
#: Below this a rate that differs from another does not differ.
_SAME = 1.05


def loading_section(loading: DataLoading, plan: PlanResult) -> str:
    """Present and recommended settings, which part waits for which, and what would help."""
    found = loading.result
    if found is None:
        lines = ["Data loading", _line(f"not tuned: {printable(loading.failure)}")]
        return "\n".join([*lines, *_more(plan)])
    lines = [
        f"Data loading ({printable(found.loader)})",
        *_settings(found),
        _gpu(loading, found),
        *_verdict(loading, found),
        *_other_cpu(loading, plan),
    ]
    lines += [*_doubts(found), *_faults(found), *_elsewhere(found), *_more(plan)]
    return "\n".join(lines)


def _settings(found: LoaderResult) -> Iterator[str]:
    present, best = found.present, found.recommended
    kept = present == best
    yield _row(
        "current, kept" if kept else "current", f"{settings_text(present)}: {_rate(found, present)}"
    )
    if not kept:
        yield _row("recommended", f"{settings_text(best)}: {_rate(found, best)}")


def settings_text(settings: LoaderSettings) -> str:
    """A DataLoader's arguments; those that mean nothing or are the default are left out."""
    parts = [f"num_workers={settings.num_workers}"]
    if settings.num_workers:
        parts.append(f"prefetch_factor={settings.prefetch_factor}")
    parts.append(f"pin_memory={settings.pin_memory}")
    if settings.num_workers:
        parts.append(f"persistent_workers={settings.persistent_workers}")
        parts += [] if settings.in_order else ["in_order=False"]
        parts += [] if settings.start_method == "fork" else [f"by {settings.start_method}"]
        threads = settings.worker_threads
        parts += [] if threads == 1 else [f"{threads} threads a worker"]
        held = settings.library_threads
        parts += [] if held is None else [library_words(held)]
    return ", ".join(parts)


def _rate(found: LoaderResult, settings: LoaderSettings) -> str:
    real, candidate = found.measured(settings), found.candidate(settings)
    if real is not None and real.measured_batches_per_s is not None:
        return (
            f"{rate(real.measured_batches_per_s)} batches/s measured, "
            f"{rate(real.predicted_batches_per_s)} predicted"
        )
    if candidate is None:
        return "rate not known"
    if candidate.infeasible:
        return f"infeasible: {printable(candidate.infeasible)}"
    return f"{rate(candidate.batches_per_s)} batches/s predicted"


def _gpu(loading: DataLoading, found: LoaderResult) -> str:
    source = printable(found.step_source)
    if found.step_s <= 0:
        return _row("the GPU", f"step time not known ({source})")
    most = "at most " if loading.step_is_bound else ""
    return _row("the GPU", f"{most}{rate(1 / found.step_s)} batches/s ({source})")


def _other_cpu(loading: DataLoading, plan: PlanResult) -> Iterator[str]:
    """The rate on the processor given by the user, with its interval and assumptions."""
    cpu = plan.cpu
    if cpu is None or cpu.cores is None:
        return
    named = _processor(cpu)
    if loading.input_at_most is None:
        yield _line(
            f"with {named}: cannot tell, as the CPU time of a batch or the clock of this "
            "machine's cores is not known; run trainfit on that machine"
        )
        return
    yield _row("other cores", f"{named}: {input_text(loading)}")
    if loading.input_basis:
        yield _line(f"assumed: {printable('; '.join(loading.input_basis))}", 4)


def input_text(loading: DataLoading) -> str:
    """The highest rate on the other processor, and which part is the limit there."""
    most = loading.input_at_most
    assert most is not None
    low, high = loading.input_range or (most, most)
    text = f"at most {rate(most)} batches/s"
    if low < high:
        text += f" ({rate(low)} to {rate(high)})"
    if loading.input_workers is not None:
        text += f" with num_workers={loading.input_workers}"
    return text + _limit_there(loading, low, high)


def _processor(cpu: HostCpu) -> str:
    assert cpu.cores is not None
    words = core_count(cpu.cores)
    if cpu.core_speed is not None:
        words += " of this machine"
    if cpu.second_threads:
        words += f" ({cores(cpu.cores + cpu.second_threads)} threads)"
    if cpu.core_hz is not None:
        words += f" at {ghz(cpu.core_hz)}"
    words += f" ({cpu.kind})" if cpu.kind else ""
    return f"{printable(cpu.name)}, {words}" if cpu.name else words


def _limit_there(loading: DataLoading, low: float, high: float) -> str:
    """Which part would wait for the other there, where that is sure."""
    found = loading.result
    if found is None or found.step_s <= 0:
        return ""
    wanted = 1 / found.step_s
    if high < wanted:
        most = "up to " if loading.step_is_bound else ""
        by = times(wanted / (loading.input_at_most or high))
        return f"; the DataLoader is the limit there by {most}{by}"
    if low >= wanted:
        return "; the GPU is the limit there"
    return "; either part may be the limit there"


def _verdict(loading: DataLoading, found: LoaderResult) -> Iterator[str]:
    why = printable(found.reason)
    if loading.bottleneck == "unknown":
        reason = "no step time is known; give --step-time"
        if found.step_s > 0:
            reason = "the loader's rate is not known; see the errors below"
        yield _line(f"cannot tell which part is the limit: {reason}")
    elif loading.bottleneck == "loader":
        by = times(loading.factor)
        bound = (
            " if the GPU reaches the lower bound of its step time" if loading.step_is_bound else ""
        )
        most = "up to " if loading.step_is_bound else ""
        yield _line(f"the DataLoader is the limit by {most}{by}{bound}")
    else:
        feeds = "the DataLoader keeps up"
        if loading.factor is not None and loading.factor >= _SAME:
            feeds = f"the DataLoader could supply {times(loading.factor)} as much"
        best = " even at the lower bound of its step time" if loading.step_is_bound else ""
        yield _line(f"the GPU is the limit{best}: {feeds}")
    if why:
        yield _line(why, 4)
    if found.without_others is not None:
        yield _line(printable(without_others_words(found)), 4)
    elif loading.bottleneck != "gpu":
        yield from _other_changes(found)


def _other_changes(found: LoaderResult) -> Iterator[str]:
    """Other changes that would help, the largest predicted gain first."""
    for each in [each for each in most_helpful_first(found.advice) if helps(each)][:_SHOWN]:
        how = f": {printable(each.fix.action)}" if each.fix.action else ""
        yield _line(f"{effect_text(each)}: {printable(each.title)}{how}", 4)


def helps(advice: Finding) -> bool:
    """Is it worth a line? One whose gain is not predicted is."""
    return advice.fix.gain is None or advice.fix.gain >= _SAME


def effect_text(advice: Finding) -> str:
    """ "1.42× with", or "to reduce 46% of the time"."""
    if advice.fix.gain is not None:
        return f"{times(advice.fix.gain)} with"
    return f"to reduce {percent(advice.share)} of the time"


def _doubts(found: LoaderResult) -> Iterator[str]:
    """External disturbances of the measurements."""
    for each in found.doubts:
        yield _line(f"{printable(each.summary)}: {printable(each.meaning)}")


def _faults(found: LoaderResult) -> Iterator[str]:
    for fault in found.faults[:_SHOWN]:
        yield _line(printable(fault.title))
        yield instructions(fault.fix.action, "    fix: ", " " * 9)


def _elsewhere(found: LoaderResult) -> Iterator[str]:
    """What is to be set in the script; the environment's part is in the launch command."""
    for each in found.variables:
        if each.where != "environment":
            place = {"worker_init_fn": "the worker_init_fn", "script": "the script"}
            where = place.get(each.where, printable(each.where))
            yield _line(f"in {where}: {printable(each.line)} ({printable(each.reason)})")


def _more(plan: PlanResult) -> list[str]:
    command = f"trainfit loader --gpu {_quoted(plan.gpu)} -- {plan.command}"
    return ["  details, at the current batch size:", launch_lines(command, 4)]


def _quoted(gpu: str) -> str:
    return f"'{printable(gpu)}'" if " " in gpu else printable(gpu)


def _row(name: str, text: str) -> str:
    return wrapped(text, f"  {name:<{_COLUMN - 2}}", " " * _COLUMN)


def _line(text: str, indent: int = 2) -> str:
    return wrapped(text, " " * indent, " " * (indent + 2))
