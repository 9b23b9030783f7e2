"""The result of ``trainfit loader``: on one screen, and as the whole text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from trainfit.report.layout import Line, ScreenBlock, Style, blank, block, made, screen, shortened
from trainfit.report.loader_figures import (
    batch_section,
    best_rate,
    machine_section,
    settings_section,
    settings_words,
    table_section,
    too_many_section,
    without_others_words,
)
from trainfit.report.notes import protection_notes
from trainfit.results.dataloader import Confirmed, LoaderSettings, steady
from trainfit.results.findings import Finding
from trainfit.results.loader import (
    BUSY,
    RATE_WITH_IT,
    Limit,
    LoaderResult,
    VariableAdvice,
    most_helpful_first,
)
from trainfit.results.text import (
    count,
    duration,
    instructions,
    one_line,
    percent,
    printable,
    rate,
    times,
    wrapped,
)

# ---
# The result of ``trainfit loader`` as text for the terminal.


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


def loader_text(result: LoaderResult) -> str:
    """The whole result: verdict, what to write, costs, machine, settings, what else helps."""
    parts = [
        wrapped(title(result), "", "  "),
        _verdict(result),
        write_section(result),
        batch_section(result.probe),
        machine_section(result.machine, result.ranks),
        settings_section(result),
        table_section(result),
        too_many_section(result),
        _threads_section(result),
        _advice_section(result.advice),
        _faults_section(all_faults(result)),
        _notes_section(result),
    ]
    return "\n\n".join(part for part in parts if part)


def title(result: LoaderResult) -> str:
    """Which DataLoader it is, how long that took, on which PyTorch."""
    torch = f", torch {result.torch}" if result.torch else ""
    return printable(f"{result.loader} ({duration(round(result.seconds))}{torch})")


# -- verdict -----------------------------------------------------------------------------------


def verdict_line(result: LoaderResult) -> str:
    """The verdict in one line."""
    # What was disturbed does not tell 2%; the reason says what it tells.
    kept = f"KEEP the settings ({_now(result)})"
    if not result.was_busy:
        kept = f"KEEP the settings: no other is more than 2% faster ({_now(result)})"
    heads = {
        "change": f"CHANGE the settings: {_gain(result)}",
        "keep": kept,
        "nothing_to_gain": f"NOTHING TO GAIN: the GPU is the limit ({_now(result)})",
        "no_setting_helps": f"NO SETTING HELPS: the limit is {LIMITS[result.limit]} "
        f"({_now(result)})",
        "cannot_tell": "CANNOT TELL which settings are best",
    }
    return heads[result.verdict]


def _verdict(result: LoaderResult) -> str:
    lines = [wrapped(verdict_line(result), "", "  ")]
    if result.reason:
        lines.append(wrapped(printable(result.reason), "  ", "  "))
    if result.verdict in ("change", "keep"):
        lines.append(f"  limit with them: {LIMITS[result.limit]}")
    if result.without_others is not None:
        lines.append(wrapped(without_others_words(result), "  ", "  "))
    lines.append(wrapped(step_words(result), "  ", "  "))
    lines.append(wrapped(certainty(result), "  ", "  "))
    return "\n".join(lines)


def _gain(result: LoaderResult) -> str:
    """Both measured, or both predicted: one of each compares the model with the machine."""
    found = result.compared()
    if found is None or not found[0]:
        return settings_words(result.recommended)
    before, after, evidence = found
    how: str = BUSY if result.was_busy and evidence == "predicted" else evidence
    said = f"{rate(before)} → {rate(after)} batches/s"
    if abs(after / before - 1) >= 0.005:
        said += f", {times(after / before)}"
    return f"{said} ({how})" + (" for each rank" if result.ranks > 1 else "")


def _now(result: LoaderResult) -> str:
    found = best_rate(result, result.present)
    return f"{rate(found[0])} batches/s, {found[1]}" if found is not None else "rate not known"


def step_words(result: LoaderResult) -> str:
    """The step of the GPU, and where its time is from."""
    source = printable(result.step_source)
    if result.step_s:
        least = "at least " if result.step_is_bound else ""
        text = f"a step of the GPU needs {least}{duration(result.step_s)}: {source}"
        if result.step_is_bound:
            text += ". The real step is longer and waits less for batches: give "
            text += "its time with --step-time"
        return text
    return (
        f"the step time of the GPU is assumed as 0 ({source}), which overstates the gain of more "
        "workers; give it with --step-time 40ms, or predict it with --gpu NAME"
    )


def certainty(result: LoaderResult) -> str:
    """By how much the measured rate of the recommended settings differs from the predicted one."""
    ran = [run for run in result.confirmed if run.measured_batches_per_s is not None]
    runs = [run for run in ran if not run.is_disturbed]
    if ran and not runs:
        real = count(len(ran), "real run")
        return f"confidence: predicted only; other processes disturbed {real}: not used"
    if not runs:
        return "confidence: predicted only, not confirmed by a real run (--confirm N makes some)"
    chosen = steady(result.recommended)
    mine = [_deviation(run) for run in runs if steady(run.settings) == chosen]
    copies = (
        f", each with {result.ranks} copies of the DataLoader running," if result.ranks > 1 else ""
    )
    if not mine:
        others = [_deviation(run) for run in runs]
        return (
            "confidence: predicted only, no undisturbed real run of these settings; "
            f"{count(len(runs), 'run')} of others{copies} differed by {_span(others)} from the "
            "prediction"
        )
    text = f"confidence: {count(len(mine), 'real run')} of these settings{copies} differed by "
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


def _advice_section(advice: Sequence[Finding]) -> str:
    """Predicted gains first; of other changes the share of the time that they concern."""
    predicted = [each for each in most_helpful_first(advice) if each.fix.gain is not None]
    others = [each for each in most_helpful_first(advice) if each.fix.gain is None]
    lines = ["Other changes (predicted)"] if predicted else []
    for each in predicted:
        told = f"{each.title} ({rate(each.value_of(RATE_WITH_IT))} batches/s)"
        lines += _change_lines(each, times(each.fix.gain), told)
    lines += ["Other changes (share of the time that they concern, measured)"] if others else []
    for each in others:
        lines += _change_lines(each, percent(each.share), each.title)
    return "\n".join(lines)


def _change_lines(each: Finding, figure: str, told: str) -> list[str]:
    lines = [wrapped(printable(told), f"  {figure:>6}  ", " " * 10)]
    lines.append(wrapped(printable(each.fix.action), " " * 10, " " * 10))
    if each.cause:
        lines.append(wrapped(printable(each.cause), " " * 10 + "evidence: ", " " * 12))
    return lines


def all_faults(result: LoaderResult) -> list[Finding]:
    """All faults, each once."""
    met = (run.fault for run in result.confirmed if run.fault is not None)
    found: dict[tuple[str, str], Finding] = {}
    for fault in (*result.faults, *result.probe.faults, *met):
        found.setdefault((fault.kind, fault.title), fault)
    return list(found.values())


def _faults_section(faults: Sequence[Finding]) -> str:
    if not faults:
        return ""
    lines = ["Faults"]
    for fault in faults:
        where = f" (with {settings_words(fault.loader)})" if fault.loader is not None else ""
        said = f"{fault.title}{where}"
        lines.append(wrapped(printable(said), f"  {printable(fault.kind)}: ", " " * 6))
        lines.append(instructions(fault.fix.action, "      fix: ", " " * 12))
        lines.append(_evidence(one_line(fault.cause)))
    return "\n".join(filter(None, lines))


def _notes_section(result: LoaderResult) -> str:
    notes = [*result.notes, *protection_notes(result.protection)]
    if not notes:
        return ""
    return "\n".join(["Notes", *(wrapped(printable(n), "  - ", "    ") for n in notes)])


# -- what to write -----------------------------------------------------------------------------


def write_section(result: LoaderResult) -> str:
    """What to write where; commands are never broken into lines."""
    lines = []
    change = result.verdict != "cannot_tell" and result.recommended != result.present
    if change:
        lines.append(f"  {loader_line(result.recommended, result.present)}")
        if result.recommended.worker_threads != result.present.worker_threads:
            threads = f"torch.set_num_threads({result.recommended.worker_threads})"
            lines.append(f"  {threads}  (in the DataLoader's worker_init_fn)")
    for variable in result.variables:
        if variable.where != "environment":
            lines.append(f"  {printable(variable.line)}")
    if result.cores is not None and result.cores.prefix.startswith("torchrun"):
        lines.append(f"  {printable(result.cores.prefix)} …  (instead of python)")
    elif result.launch:
        lines.append(f"  {printable(result.launch)}")
    elif not result.command or result.command.startswith("--loader"):
        lines += [f"  {printable(line)}" for line in _before_command(result)]
    return "\n".join(["Write", *lines]) if lines else ""


def loader_line(settings: LoaderSettings, present: LoaderSettings) -> str:
    """The call of ``DataLoader``; what is PyTorch's default now and shall be stays out."""
    words = [f"num_workers={settings.num_workers}"]
    if settings.num_workers:
        words.append(f"prefetch_factor={settings.prefetch_factor}")
    elif present.num_workers:  # PyTorch refuses them without workers
        words.append("prefetch_factor=None")
    words.append(f"pin_memory={settings.pin_memory}")
    if settings.num_workers:
        words.append(f"persistent_workers={settings.persistent_workers}")
        if not (settings.in_order and present.in_order):
            words.append(f"in_order={settings.in_order}")
        if settings.start_method != present.start_method:
            words.append(f'multiprocessing_context="{settings.start_method}"')
    elif present.persistent_workers:
        words.append("persistent_workers=False")
    return f"DataLoader(…, {', '.join(words)})"


def _before_command(result: LoaderResult) -> list[str]:
    """Variables and cores where no command is known to write them before."""
    variables = [f"{v.name}={v.value}" for v in result.variables if v.where == "environment"]
    prefix = [result.cores.prefix] if result.cores is not None else []
    words = [*variables, *prefix]
    return [" ".join([*words, "COMMAND"])] if words else []


# ---
# The result of ``trainfit loader`` on one screen: the verdict, what to write, what decides.


_STYLES: Final[dict[str, Style]] = {
    "change": "bad",
    "keep": "good",
    "nothing_to_gain": "good",
    "no_setting_helps": "bad",
    "cannot_tell": "title",
}
#: Lines of a fault, of a change or of a note.
_LINES: Final = 2


def loader_screen(result: LoaderResult) -> list[Line]:
    """At most 25 lines."""
    return screen(_blocks(result), "what a batch costs, the machine, all settings, threads, notes")


def _blocks(result: LoaderResult) -> Iterator[ScreenBlock]:
    yield block(verdict_line(result), style=_STYLES[result.verdict])
    if result.reason:
        yield block(printable(result.reason), 1, first="  ")
    yield _short(without_others_words(result), 25)
    yield blank()
    if write := write_section(result).split("\n")[1:]:
        yield made(write, title="Write")
        yield blank()
    for number, fault in enumerate(all_faults(result)):
        said = made(shortened(printable(f"{fault.kind}: {fault.title}"), _LINES, "  ", "    "))
        fix = made(shortened(printable(f"fix: {fault.fix.action}"), _LINES, "    ", "    "))
        head = [] if number else [Line("Faults", "title")]
        yield ScreenBlock((*head, *said.lines, *fix.lines), 2 + 20 * number)
    yield block(title(result), 15, style="title")
    if result.verdict in ("change", "keep"):
        yield block(f"limit with these settings: {LIMITS[result.limit]}", 12, first="  ")
    yield _short(step_words(result), 11)
    yield _short(certainty(result), 10)
    section = settings_section(result, tried=False).split("\n")
    yield made(section[1:], 5, title=section[0])
    for number, each in enumerate(most_helpful_first(result.advice)):
        figure = times(each.fix.gain) if each.fix.gain is not None else percent(each.share)
        of = "predicted" if each.fix.gain is not None else "of the time"
        text = printable(f"{figure} ({of}): {each.title}: {each.fix.action}")
        head = [] if number else [Line("Other changes", "title")]
        lines = made(shortened(text, _LINES, "  - ", "    ")).lines
        yield ScreenBlock((*head, *lines), 30 + 10 * number)
    for number, note in enumerate([*result.notes, *protection_notes(result.protection)]):
        yield made(shortened(printable(note), _LINES, "  - ", "    "), 35 + 10 * number, notes=1)


def _short(text: str, rank: int) -> ScreenBlock:
    return made(shortened(text, _LINES, "  ", "    "), rank) if text else ScreenBlock(())
