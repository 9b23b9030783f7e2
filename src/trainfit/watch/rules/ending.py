"""Why a run ended: the exception or the signal of the rank that failed first."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from typing import Final

from trainfit.findings.facts import Failure, FailureContext
from trainfit.findings.failure import KINDS, of_failure, of_own_error
from trainfit.findings.fixes import CRASHED_AT
from trainfit.findings.tracebacks import exception_in, parse, parse_stacks
from trainfit.hardware.machine.cgroup import OomKills
from trainfit.results.findings import Evidence, Finding, Fix, Place, Unknown
from trainfit.results.runs.watched import OOM_KILLED, Event, RunHeader
from trainfit.results.text import exception_text, short
from trainfit.watch.checks import loader_settings, training_loader
from trainfit.watch.rules.rule import Rule
from trainfit.watch.rules.start import failed_part
from trainfit.watch.view import RankView, RunView

#: Signals of a crash, which nobody else sends. (SIGABRT is also how a rank ends whose
#: communication with others timed out.)
_CRASHES: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
#: What :mod:`faulthandler` calls them (Modules/faulthandler.c), where no exit code tells.
_SAID: Final = {
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating-point exception": signal.SIGFPE,
    "Floating point exception": signal.SIGFPE,
}
#: The kernel killed for want of memory, as the header's note says with the number.
_KILLED: Final = FailureContext(oom_kills=OomKills(machine=1))
#: Ends of workers that the training process sees nothing of but an exit code,
#: and of one that hangs; what tells the stack that it was in.
_OF_WORKERS: Final = {
    "worker_exited": "worker_stack",
    "worker_crashed": "worker_stack",
    "timeout": "worker_hangs",
}
#: Ends that need no explanation.
_MEANT: Final = ("KeyboardInterrupt", "SystemExit")


def _find_why_it_ended(run: RunView) -> Iterator[Finding | Unknown]:
    """The first failure that is explained: others are mostly ranks that miss the failed one."""
    for rank, event in _exceptions(run):
        found = _explained(rank.header, event)
        if found is not None:
            step, at = event.step, (_when(event),)
            if found.place is None and (told := _OF_WORKERS.get(found.kind)):
                found = dataclasses.replace(found, place=_line_of_worker(rank, told))
            yield dataclasses.replace(found, evidence=at, rank=rank.rank, last_step=step)
            return
    for rank in run.ranks:
        finding = _killed(rank, is_alone=len(run.ranks) == 1)
        if finding is not None:
            yield dataclasses.replace(finding, rank=rank.rank)
            return
    # Of several ranks, most exceptions follow from another one's end: `standing` tells them apart.
    own = _own_error(run) if len(run.ranks) == 1 else None
    if own is not None:
        at = (_when(own[1]),)
        failure = Failure(*exception_in(own[1].text), own[1].text)
        yield dataclasses.replace(of_own_error(failure), evidence=at, last_step=own[1].step)


def _when(event: Event) -> Evidence:
    """The step that a rank failed in, or the part of the first one."""
    if event.step > 0:
        return Evidence("in step", float(event.step))
    raised = parse(*exception_in(event.text), event.text)
    return Evidence("failed", failed_part([frame.path for frame in raised.frames]))


def _line_of_worker(rank: RankView, kind: str) -> Place | None:
    """The line that a worker ended or hung at, by its last stack."""
    texts = [event.text for event in rank.record.events if event.kind == kind]
    frame = next((stack.where for text in texts for stack in parse_stacks(text)), None)
    return None if frame is None else frame.place


def _explained(header: RunHeader, event: Event) -> Finding | None:
    note = _oom_note(header)
    name, message = exception_in(event.text)
    if not name:
        return None
    # The main process may only see that a worker is gone.
    failure = Failure(name, message, event.text, worker_exits=(-signal.SIGKILL,) if note else ())
    context = _KILLED if note else FailureContext(epoch_batches=_batches_gone(header, event))
    found = of_failure(failure, loader_settings(header), context)
    killed = found is not None and found.kind == "worker_killed"
    return dataclasses.replace(found, cause=note) if found and killed and note else found


def _batches_gone(header: RunHeader, event: Event) -> int | None:
    """Batches of an epoch of the DataLoader that trains, where the steps before were made of whole
    epochs, each gone over to its end; ``None``: that is not so, or not known."""
    loader = training_loader(header)
    if loader is None or loader.batches is None or loader.passes < 1:
        return None
    # The step that fails may have begun, or not.
    steps = event.step - loader.passes * loader.batches
    return loader.batches if steps in (0, 1) else None


def _own_error(run: RunView) -> tuple[RankView, Event] | None:
    """The exception that ended a run, where nothing more is known of it."""
    for rank, event in _exceptions(run):
        name, _ = exception_in(event.text)
        if not name or name in _MEANT or _explained(rank.header, event):
            return None
        return rank, event
    return None


def unexplained(run: RunView) -> str:
    """The first exception of several ranks, in a line, where nothing more is known; else empty."""
    own = _own_error(run) if len(run.ranks) > 1 else None
    if own is None:
        return ""
    rank, event = own
    raised = parse(*exception_in(event.text), event.text)
    text = f" at {raised.culprit}" if raised.culprit is not None else ""
    said = short(exception_text(raised.type, raised.message), 160)
    return f"the run ended by {said}{text} (rank {rank.header.rank})"


def _exceptions(run: RunView) -> list[tuple[RankView, Event]]:
    """What ended ranks, the first first."""
    exceptions = [
        (rank, event)
        for rank in run.ranks
        for event in rank.record.events
        if event.kind == "exception" and rank.header.ending != "finished"
    ]
    return sorted(exceptions, key=lambda each: each[1].time_s)


def _killed(rank: RankView, *, is_alone: bool) -> Finding | None:
    """A crash in native code, or the kernel for want of memory; other signals are somebody's."""
    header, code = rank.header, rank.header.exit_code
    crash = next((event for event in rank.record.events if event.kind == "crash"), None)
    number = 0 if code is None else -code if code < 0 else code - 128
    if code is None and crash is not None and header.ending != "finished":
        number = _signal_said(crash.text)
    note = _oom_note(header)
    if number in _CRASHES or (number == signal.SIGABRT and crash is not None and is_alone):
        found = of_failure(Failure(exit_code=-number), loader_settings(header))
        found = found if found is None or crash is None else _at_stack(found, crash.text)
    elif number == signal.SIGKILL and note:
        found = of_failure(Failure(exit_code=-number), loader_settings(header), _KILLED)
    else:
        return None
    return found and dataclasses.replace(found, cause=note or found.cause)


def _signal_said(text: str) -> int:
    """The signal that the first line of a crash says, of those that nobody sends; 0: none of
    them."""
    said = text.partition("\n")[0]
    return next((int(number) for name, number in _SAID.items() if said.endswith(name)), 0)


def _at_stack(finding: Finding, text: str) -> Finding:
    """The finding with the line that a process crashed at, where its stack tells one."""
    stack = next(iter(parse_stacks(text)), None)
    frame = None if stack is None else stack.where
    if stack is None or frame is None or frame.place is None:
        return finding
    inner = stack.frames[0]
    within = f", in {inner.function}()" if not inner.is_user else ""
    called = f" `{frame.code}`" if frame.code else ""
    return dataclasses.replace(
        finding,
        place=frame.place,
        cause=f"The crash is in what this line calls{called}{within}: Python itself has no "
        "error to raise there",
        fixes=(Fix(CRASHED_AT),),
    )


def _oom_note(header: RunHeader) -> str:
    """What the header says of the kernel's OOM killer; empty: nothing."""
    return next((note for note in header.notes if OOM_KILLED in note), "")


ENDING: Final = Rule(KINDS, _find_why_it_ended)
RULES: Final[tuple[Rule, ...]] = (ENDING,)
