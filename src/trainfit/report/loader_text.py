"""What ``trainfit loader`` found, as text for the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainfit.report.loader_costs import batch_section, machine_section
from trainfit.report.loader_words import duration, one_of, rate, settings_words, switch, times
from trainfit.report.sizes import printable, size, wrapped
from trainfit.results.loader import (
    Candidate,
    Confirmed,
    Fault,
    Limit,
    LoaderAdvice,
    LoaderResult,
    LoaderSettings,
    VariableAdvice,
)
from trainfit.results.words import count

#: Rows of the table over workers, at most.
_ROWS = 14
#: A prediction that is further than this from a measurement is called off the mark: twice the
#: 90th percentile that the model aims at.
_OFF = 0.24

_LIMITS: dict[Limit, str] = {
    "gpu": "the GPU",
    "workers": "the number of workers",
    "cores": "the cores",
    "disk": "the storage",
    "hand_off": "taking batches over in the main process",
    "lock": "a lock that workers wait for",
    "sampler": "the sampler in the main process",
    "main_process": "the main process, which alone can load",
    "unknown": "not known",
}

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def loader_text(result: LoaderResult) -> str:
    """The whole result: verdict, costs, machine, settings, what else helps, what to write."""
    parts = [
        _title(result),
        _verdict(result),
        batch_section(result.probe),
        machine_section(result.machine),
        _settings_section(result),
        _table_section(result),
        _too_many_section(result),
        _threads_section(result),
        _advice_section(result.advice),
        _faults_section(_all_faults(result)),
        _notes_section(result),
        _write_section(result),
    ]
    return "\n\n".join(part for part in parts if part)


def _title(result: LoaderResult) -> str:
    torch = f", torch {result.torch}" if result.torch else ""
    return wrapped(printable(f"{result.loader} ({result.seconds:.0f} s{torch})"), "", "  ")


# -- what came out -----------------------------------------------------------------------------


def _verdict(result: LoaderResult) -> str:
    heads = {
        "change": f"CHANGE the settings: {_gain(result)}",
        "keep": f"KEEP the settings: none is better by more than 2% ({_now(result)})",
        "nothing_to_gain": f"NOTHING TO GAIN: the GPU is the limit ({_now(result)})",
        "no_setting_helps": f"NO SETTING HELPS: the limit is {_LIMITS[result.limit]} "
        f"({_now(result)})",
        "cannot_tell": "CANNOT TELL which settings suit",
    }
    lines = [wrapped(heads[result.verdict], "", "  ")]
    if result.reason:
        lines.append(wrapped(printable(result.reason), "  ", "  "))
    if result.verdict in ("change", "keep"):
        lines.append(f"  the limit then: {_LIMITS[result.limit]}")
    lines.append(wrapped(_step(result), "  ", "  "))
    lines.append(wrapped(_certainty(result), "  ", "  "))
    return "\n".join(lines)


def _gain(result: LoaderResult) -> str:
    before, after = _best_rate(result, result.present), _best_rate(result, result.recommended)
    if before is None or after is None or not before[0]:
        return settings_words(result.recommended)
    said = f"{rate(before[0])} → {rate(after[0])} batches/s"
    if abs(after[0] / before[0] - 1) >= 0.005:
        said += f", {times(after[0] / before[0])}"
    if before[1] != after[1]:
        return f"{said} (first {before[1]}, then {after[1]})"
    return f"{said} ({after[1]})"


def _now(result: LoaderResult) -> str:
    found = _best_rate(result, result.present)
    return f"{rate(found[0])} batches/s, {found[1]}" if found is not None else "rate not known"


def _best_rate(result: LoaderResult, settings: LoaderSettings) -> tuple[float, str] | None:
    """Batches per second of these settings: measured if they were run, else predicted."""
    run = result.measured(settings)
    if run is not None and run.measured_batches_per_s is not None:
        return run.measured_batches_per_s, "measured"
    candidate = result.candidate(settings)
    return (candidate.batches_per_s, "predicted") if candidate is not None else None


def _step(result: LoaderResult) -> str:
    source = printable(result.step_source)
    if result.step_s:
        return f"a step of the GPU takes {duration(result.step_s)}: {source}"
    return (
        f"the GPU's step was taken to last no time ({source}), so more workers seem better than "
        "they may be; give its time with --step-time 40ms, or a lower bound of it by --gpu NAME"
    )


def _certainty(result: LoaderResult) -> str:
    """How far measured rates were from predicted ones."""
    runs = [run for run in result.confirmed if run.measured_batches_per_s is not None]
    if not runs:
        return "how sure: predicted only, by no real run (--confirm N makes some)"
    off = [_deviation(run) for run in runs]
    span = f"{min(off):+.0%}" if min(off) == max(off) else f"{min(off):+.0%} to {max(off):+.0%}"
    text = f"how sure: {count(len(runs), 'real run')} gave {span} of what was predicted before"
    if max(map(abs, off)) > _OFF:
        text += "; the predictions are off the mark here: trust the measured rates"
    return text


def _deviation(run: Confirmed) -> float:
    """Measured from predicted, relative to predicted."""
    measured = run.measured_batches_per_s
    assert measured is not None
    if not run.predicted_batches_per_s:
        return 0.0
    return measured / run.predicted_batches_per_s - 1


# -- settings ----------------------------------------------------------------------------------

_HEAD = (
    f"  {'':<12} {'workers':>7} {'prefetch':>8} {'pin':>4} {'persist':>7} {'in order':>8}"
    f" {'predicted':>10} {'measured':>10}  GPU waits"
)


def _settings_section(result: LoaderResult) -> str:
    """Present and recommended settings, and the others that were run; batches per second."""
    rows = [_settings_row(result, "present", result.present)]
    if result.recommended != result.present and result.verdict != "cannot_tell":
        rows.append(_settings_row(result, "recommended", result.recommended))
    known = {result.present, result.recommended}
    others = dict.fromkeys(run.settings for run in result.confirmed if run.settings not in known)
    rows += [_settings_row(result, "also run", settings) for settings in others]
    return "\n".join(["Settings (batches/s)", _HEAD, *rows])


def _settings_row(result: LoaderResult, name: str, settings: LoaderSettings) -> str:
    run = result.measured(settings)
    failed = next((each for each in result.confirmed if each.settings == settings), None)
    candidate = result.candidate(settings)
    predicted = candidate.batches_per_s if candidate else None
    if predicted is None and failed is not None:
        predicted = failed.predicted_batches_per_s
    measured = rate(run.measured_batches_per_s) if run is not None else ""
    if run is None and failed is not None:
        measured = "failed"
    workers = settings.num_workers
    prefetch = str(settings.prefetch_factor) if workers else "-"
    persist = switch(settings.persistent_workers) if workers else "-"
    order = switch(settings.in_order) if workers else "-"
    row = (
        f"  {name:<12} {workers:>7} {prefetch:>8} {switch(settings.pin_memory):>4} {persist:>7}"
        f" {order:>8} {rate(predicted):>10} {measured:>10}  {_waiting(result, candidate, run)}"
    ).rstrip()
    extra = [f"started by {settings.start_method}"] if _start_matters(result, settings) else []
    if settings.worker_threads != 1:
        extra.append(f"{settings.worker_threads} threads a worker")
    return row + (f"\n{'':<15}({', '.join(extra)})" if extra else "")


def _waiting(result: LoaderResult, candidate: Candidate | None, run: Confirmed | None) -> str:
    """The share of time that the GPU waits; nothing where its step takes no time."""
    if not result.step_s:
        return "-"
    measured = run.waiting_share if run is not None else None
    said = f"{candidate.waiting_share:.0%}" if candidate is not None else ""
    if measured is None:
        return said
    return f"{said} (measured {measured:.0%})" if said else f"measured {measured:.0%}"


def _start_matters(result: LoaderResult, settings: LoaderSettings) -> bool:
    """Is its start method not every setting's?"""
    return bool(settings.num_workers) and (
        settings.start_method != "fork" or result.present.start_method != "fork"
    )


def _table_section(result: LoaderResult) -> str:
    """Over the number of workers, each with the other settings that suit it best."""
    rows = _by_workers(result)
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


def _by_workers(result: LoaderResult) -> list[Candidate]:
    """One candidate for each number of workers: the recommended, present or measured one, else
    the fastest."""
    chosen: dict[int, Candidate] = {}

    def rank(candidate: Candidate) -> tuple[bool, bool, bool, bool, float]:
        settings = candidate.settings
        return (
            not candidate.infeasible,
            settings == result.recommended,
            settings == result.present,
            result.measured(settings) is not None,
            candidate.batches_per_s,
        )

    for candidate in result.candidates:
        workers = candidate.settings.num_workers
        if workers not in chosen or rank(candidate) > rank(chosen[workers]):
            chosen[workers] = candidate
    return [chosen[workers] for workers in sorted(chosen)]


def _table_row(result: LoaderResult, candidate: Candidate) -> str:
    settings = candidate.settings
    run = result.measured(settings)
    value = f"{rate(run.measured_batches_per_s)}*" if run else f"{rate(candidate.batches_per_s)} "
    waits = f"{candidate.waiting_share:.0%}" if result.step_s else "-"
    if run is not None and run.waiting_share is not None and result.step_s:
        waits = f"{run.waiting_share:.0%}"
    ram = size(candidate.ram_bytes) if candidate.ram_bytes is not None else "-"
    prefetch = settings.prefetch_factor if settings.num_workers else "-"
    start = (
        f"  {settings.num_workers:>7} {prefetch:>8} {value:>10} {waits:>9} "
        f"{candidate.busy_cores:>6.1f} {ram:>9}"
    )
    marks = []
    if settings == result.recommended and result.verdict != "cannot_tell":
        marks.append("recommended")
    if settings == result.present:
        marks.append("present")
    if candidate.infeasible:
        marks.append(f"cannot be: {printable(candidate.infeasible)}")
    return wrapped(", ".join(marks), f"{start}  ", " " * 60) if marks else start


def _too_many_section(result: LoaderResult) -> str:
    """What more workers than needed cost."""
    base = _best_rate(result, result.recommended)
    candidate = result.candidate(result.recommended)
    if not result.too_many or base is None:
        return ""
    lines = ["Too many workers"]
    for each in result.too_many:
        lines.append(_too_many_line(result, each, candidate))
    return "\n".join(lines)


def _too_many_line(result: LoaderResult, more: Candidate, base: Candidate | None) -> str:
    run, usual = result.measured(more.settings), result.measured(result.recommended)
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
    if more.infeasible:
        said.append(f"cannot be: {printable(more.infeasible)}")
    first = f"  {count(more.settings.num_workers, 'worker')}".ljust(15)
    return wrapped(", ".join(said), first, " " * 15)


# -- threads, advice, faults -------------------------------------------------------------------


def _threads_section(result: LoaderResult) -> str:
    lines = []
    for variable in result.variables:
        lines += _variable_lines(variable)
    if result.cores is not None:
        first = f"  {printable(result.cores.prefix)}: "
        lines.append(wrapped(printable(result.cores.reason), first, " " * 6))
        lines.append(_evidence(result.cores.evidence))
    return "\n".join(["Threads and cores", *filter(None, lines)]) if lines else ""


def _variable_lines(variable: VariableAdvice) -> list[str]:
    places = {"environment": "", "worker_init_fn": " (worker_init_fn)", "script": " (script)"}
    place = places.get(variable.where, f" ({printable(variable.where)})")
    first = f"  {printable(variable.line)}{place}: "
    return [wrapped(printable(variable.reason), first, " " * 6), _evidence(variable.evidence)]


def _evidence(text: str) -> str:
    return wrapped(printable(text), "      evidence: ", " " * 8) if text else ""


def _advice_section(advice: Sequence[LoaderAdvice]) -> str:
    """The largest gain first."""
    if not advice:
        return ""
    lines = ["Beyond the settings (predicted)"]
    for each in sorted(advice, key=lambda a: -a.gain):
        first = f"  {times(each.gain):>6}  "
        told = f"{each.summary} ({rate(each.batches_per_s)} batches/s)"
        lines.append(wrapped(printable(told), first, " " * 10))
        lines.append(wrapped(printable(each.how), " " * 10, " " * 10))
        if each.evidence:
            lines.append(wrapped(printable(each.evidence), " " * 10 + "evidence: ", " " * 12))
    return "\n".join(lines)


def _all_faults(result: LoaderResult) -> list[Fault]:
    """Each once, wherever it was met."""
    met = (run.fault for run in result.confirmed if run.fault is not None)
    found = dict.fromkeys([*result.faults, *result.probe.faults, *met])
    return list({(fault.kind, fault.summary): fault for fault in reversed(found)}.values())[::-1]


def _faults_section(faults: Sequence[Fault]) -> str:
    if not faults:
        return ""
    lines = ["Faults"]
    for fault in faults:
        where = f" (with {settings_words(fault.settings)})" if fault.settings is not None else ""
        said = f"{fault.summary}{where}"
        lines.append(wrapped(printable(said), f"  {printable(fault.kind)}: ", " " * 6))
        lines.append(wrapped(printable(fault.cure), "      cure: ", " " * 12))
        lines.append(_evidence(one_of(fault.evidence)))
    return "\n".join(filter(None, lines))


def _notes_section(result: LoaderResult) -> str:
    if not result.notes:
        return ""
    return "\n".join(["Notes", *(wrapped(printable(n), "  - ", "    ") for n in result.notes)])


# -- what to write -----------------------------------------------------------------------------


def _write_section(result: LoaderResult) -> str:
    """What to write where; commands are never broken into lines."""
    lines = []
    change = result.verdict != "cannot_tell" and result.recommended != result.present
    if change:
        lines.append(f"  {loader_line(result.recommended, result.present)}")
    for variable in result.variables:
        if variable.where != "environment":
            lines.append(f"  {printable(variable.line)}")
    if launch := launch_line(result):
        lines.append(f"  {printable(launch)}")
    return "\n".join(["Write", *lines]) if lines else ""


def loader_line(settings: LoaderSettings, present: LoaderSettings) -> str:
    """The call of ``DataLoader``; what is PyTorch's default now and shall be stays out."""
    words = [f"num_workers={settings.num_workers}"]
    if settings.num_workers:
        words.append(f"prefetch_factor={settings.prefetch_factor}")
    words.append(f"pin_memory={settings.pin_memory}")
    if settings.num_workers:
        words.append(f"persistent_workers={settings.persistent_workers}")
        if not (settings.in_order and present.in_order):
            words.append(f"in_order={settings.in_order}")
        if settings.start_method != present.start_method:
            words.append(f'multiprocessing_context="{settings.start_method}"')
    return f"DataLoader(…, {', '.join(words)})"


def launch_line(result: LoaderResult) -> str:
    """The command with variables and cores before it; empty without either, or a command."""
    variables = [f"{v.name}={v.value}" for v in result.variables if v.where == "environment"]
    prefix = result.cores.prefix if result.cores is not None else ""
    if not variables and not prefix:
        return ""
    command = result.command
    if not command or command.startswith("--loader"):
        command = "COMMAND"
    # What stands between variables and the program must be a program.
    env = "env" if prefix and _ASSIGNMENT.match(command) else ""
    return " ".join(filter(None, [*variables, prefix, env, command]))
