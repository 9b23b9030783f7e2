"""A training that stands still, ranks that ended first or never came, workers that died."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainfit.findings.facts import FailureContext
from trainfit.findings.fixes import HANGS
from trainfit.findings.hangs import FORK_UNSAFE, Hang, explain
from trainfit.findings.source_code import short_file
from trainfit.findings.tracebacks import ThreadStack, exception_in, parse, parse_stacks
from trainfit.findings.training.misuse import of_kind
from trainfit.results.findings import Evidence, Finding, Fix, Place, Unknown
from trainfit.results.runs.watched import Event
from trainfit.results.text import count, duration, short
from trainfit.watch import checks
from trainfit.watch.checks import loader_settings
from trainfit.watch.rules import ending
from trainfit.watch.rules.growth import PROCESSES
from trainfit.watch.rules.rule import Rule
from trainfit.watch.rules.start import held_up_at
from trainfit.watch.thresholds import NOTICEABLE
from trainfit.watch.view import RankView, RunView, known, median

#: Where a rank waits for others: files, and functions of its stack.
_OF_RANKS: Final = ("torch/distributed/", "torch/nn/parallel/")
_BACKWARD: Final = "_engine_run_backward"
#: A line that asks for a lock.
_LOCK: Final = re.compile(r"\.acquire\s*\(|\bwith\b.*lock", re.IGNORECASE)


#: A line that asks for what a queue holds, and one that waits for anything else.
_GETS: Final = re.compile(r"\.get\s*\(")
_BLOCKED: Final = re.compile(r"\.(?:wait|wait_for|acquire|join|put)\s*\(")


@dataclass(frozen=True)
class _Still:
    """A rank that stands still: since when, and the stacks of its main thread and its workers."""

    view: RankView
    event: Event
    seconds: float

    @property
    def threads(self) -> tuple[ThreadStack, ...]:
        return parse_stacks(self.event.text)

    @property
    def main(self) -> ThreadStack | None:
        return next((thread for thread in self.threads if thread.role != "worker"), None)

    @property
    def locked_out(self) -> ThreadStack | None:
        """The thread of the script that waits for a lock, too, where the main thread does: each may
        have what the other wants."""
        own = [thread for thread in self.threads if thread.role != "worker"]
        if not own or not _waits_for_lock(own[0]):
            return None
        return next((e for e in own[1:] if e.role == "other" and _waits_for_lock(e)), None)

    @property
    def unfed_by(self) -> ThreadStack | None:
        """The thread of the script that waits for something else where the main thread waits for a
        queue: it may be the one that fills it."""
        own = [thread for thread in self.threads if thread.role != "worker"]
        if not own or own[0].where is None or not _GETS.search(own[0].where.code):
            return None
        others = (
            thread for thread in own[1:] if thread.role == "other" and thread.where is not None
        )
        return next((e for e in others if e.where and _BLOCKED.search(e.where.code)), None)

    @property
    def kept_by(self) -> ThreadStack | None:
        """The thread that Python waits for at its end, where the script itself is over, and that is
        at a line of the script."""
        if not _is_over(self.event):
            return None
        kept = next((thread for thread in self.threads[1:] if thread.role == "other"), None)
        return kept if kept is not None and kept.where is not None else None

    @property
    def is_in_backward(self) -> bool:
        frames = () if self.main is None else self.main.frames
        return any(frame.function == _BACKWARD for frame in frames)

    @property
    def waits_for_ranks(self) -> bool:
        if self.view.header.world_size < 2 or self.main is None:
            return False
        return self.is_in_backward or any(
            each in frame.path for each in _OF_RANKS for frame in self.main.frames
        )


def _waits_for_lock(thread: ThreadStack) -> bool:
    """Is it at a line of the script that asks for a lock?"""
    return thread.where is not None and _LOCK.search(thread.where.code) is not None


def still_of(view: RankView) -> _Still | None:
    """What was told of the last pause, where no step came after it."""
    events = [event for event in view.record.events if event.kind == "standstill"]
    if not events or (view.header.ending == "finished" and not _is_over(events[-1])):
        return None
    last = float(view.record.steps["end_s"][-1]) if len(view.record.steps) else 0.0
    if events[-1].time_s < last or events[-1].step < int(view.record.steps["step"].max(initial=-1)):
        return None
    found = _Still(view, events[-1], max(events[-1].seconds or 0.0, end_of(view) - last))
    is_short = found.seconds < NOTICEABLE * end_of(view)
    return None if view.header.ending == "finished" and is_short else found


#: Where Python waits for the script's threads after its last line.
_SHUTDOWN: Final = "threading.py"


def _is_over(event: Event) -> bool:
    """Is the main thread at Python's end, and waits for other threads of the script? It writes what
    it ends by, also where Ctrl-C ends that wait."""
    main = next(iter(parse_stacks(event.text)), None)
    if main is None or not main.frames:
        return False
    outer = main.frames[-1]  # a pool's own end is within it
    return outer.function == "_shutdown" and Path(outer.path).name == _SHUTDOWN


def end_of(view: RankView) -> float:
    """The last moment of which something is known of a rank's process."""
    times = [event.time_s for event in view.record.events]
    rows = view.run.processes
    seen = rows["time_s"][rows["pid"] == view.header.pid]
    return max([*times, *known(seen)], default=0.0)


def _find_standstill(run: RunView) -> Iterator[Finding | Unknown]:
    found = [still for view in run.ranks if (still := still_of(view)) is not None]
    if not found:
        of_children = list(filter(None, map(_of_children, run.ranks)))
        ended = all(each.severity != "critical" for each in of_children)
        if not ended or not any(True for _ in PROCESSES.look(run)):
            yield from of_children  # else they are many: to end them all needs that long
        return
    # Who waits for others is no cause; who has made the fewest steps comes first.
    first = min(found, key=lambda each: (each.waits_for_ranks, each.event.step))
    apart = _apart(run, found)
    if apart:
        first = apart[0]
    is_over, kept, other = _is_over(first.event), first.kept_by, first.locked_out or first.unfed_by
    stops = next(filter(None, (_stopped(run, each) for each in found)), None)
    title, cause, fix, where = (
        (*_of_stopped(first, stops), _where(first)[1])
        if stops is not None
        else _of_calls(apart)
        if apart
        else _of_end(first)
        if is_over
        else _of_pause(first)
    )
    if first.waits_for_ranks and first.event.step <= 0:
        title += held_up_at(run, first.view)
    usual = median(first.view.steps["step_s"])
    evidence = [] if usual is None else [Evidence("usual step", usual, "s")]
    evidence.append(Evidence("steps so far", float(first.event.step)))
    evidence += uneven_batches(run) if apart or first.waits_for_ranks else ()
    others = [each for each in found if each is not first]
    if others and not apart:
        names = ", ".join(str(each.view.header.rank) for each in others)
        evidence.append(Evidence("ranks that wait for it", names))
    stacks = [kept] if kept is not None else [e for each in apart or [first] for e in _busy(each)]
    evidence += [Evidence("stack", _stack(stack)) for stack in stacks]
    evidence += [Evidence("stack of the other", _stack(other))] if other is not None else []
    # A profiler keeps the interpreter's lock while it ends, so that mostly no stack is seen.
    profiled = of_kind("profiler_on", first.view.header.learning.misuses)
    if profiled is not None and (where is None or _is_in_profiler(first)):
        title = f"No step for {duration(first.seconds)}: a profiler has recorded all steps"
        title += ", and puts that together"
        cause, fix, where = profiled.cause, profiled.fix, profiled.place
    yield Finding(
        "standstill",
        "warning" if first.view.header.ending == "finished" else "critical",
        title,
        tuple(evidence),
        cause,
        (fix,),
        "likely" if first.threads else "possible",
        place=where,
        rank=first.view.rank,
        last_step=first.event.step,
    )


def _stopped(run: RunView, still: _Still) -> tuple[str, int] | None:
    """The process of the job that was seen stopped when a rank stood still, and its PID."""
    value = still.event.values.get("stopped")
    if value is None:
        return None
    pid, rows = int(value), run.run.processes
    rank = next((e.header.rank for e in run.ranks if e.header.pid == pid), None)
    if rank is not None:
        return f"rank {rank}", pid
    workers = rows[(rows["pid"] == pid) & (rows["role"] == 1)]
    if not len(workers):
        return "a process of the run", pid
    number = int(workers["worker"].max())
    return "a DataLoader worker" if number < 0 else f"DataLoader worker {number}", pid


def _of_stopped(still: _Still, stopped: tuple[str, int]) -> tuple[str, str, Fix]:
    """Title, cause and fix of a standstill by a process of the run that cannot run."""
    who, pid = stopped
    return (
        f"No step for {duration(still.seconds)}: {who} (PID {pid}) is stopped",
        "The kernel has it in state T: it was sent SIGSTOP or SIGTSTP (`kill -STOP`, Ctrl-Z, a "
        "scheduler that suspends jobs), or a debugger holds it; the others wait for it",
        Fix(f"let it go on: kill -CONT {pid} (or leave the debugger), and find who stops it"),
    )


def _is_in_profiler(still: _Still) -> bool:
    frames = () if still.main is None else still.main.frames
    return any(part in frame.path for frame in frames for part in _OF_PROFILER)


_OF_PROFILER: Final = ("torch/profiler/", "torch/autograd/profiler")


#: What keeps ranks from waiting for each other in different calls.
SAME_CALLS: Final = (
    "let all ranks decide alike what leads there (all_reduce the condition of an if, a "
    "continue or a break), give them as many batches (DistributedSampler, drop_last=True), "
    "or train within torch.distributed.algorithms.Join([model])"
)


def uneven_batches(run: RunView) -> tuple[Evidence, ...]:
    """How many batches of an epoch each rank has, where they differ: who has fewer goes on to the
    next call while the others still train."""
    counts = {}
    for view in run.ranks:
        loader = checks.training_loader(view.header)
        if loader is not None and loader.batches is not None:
            counts[view.header.rank] = loader.batches
    if len(set(counts.values())) < 2:
        return ()
    least, most = min(counts, key=lambda e: counts[e]), max(counts, key=lambda e: counts[e])
    return tuple(
        Evidence(f"batches of an epoch, rank {rank}", float(counts[rank])) for rank in (most, least)
    )


def _apart(run: RunView, found: Sequence[_Still]) -> list[_Still]:
    """The different places at which ranks stand where all of them wait for the others, and not all
    at one line: one of each line, that with the fewest ranks first, and a call of the script's own
    before a backward pass. Else nothing."""
    every = len(found) == found[0].view.header.world_size == len(run.ranks)
    if not every or not all(each.waits_for_ranks for each in found):
        return []
    at: dict[str, list[_Still]] = {}
    for each in found:
        at.setdefault(str(_where(each)[1]), []).append(each)
    if len(at) < 2 or "None" in at:
        return []
    return [each[0] for each in sorted(at.values(), key=lambda e: (len(e), e[0].is_in_backward))]


def _of_calls(apart: Sequence[_Still]) -> tuple[str, str, Fix, Place | None]:
    """The title, cause, fix and place of ranks that wait for each other in different calls."""
    texts = []
    for each in apart[:2]:
        _, where, function = _where(each)
        texts.append(f"rank {each.view.header.rank} at {where} in {function}")
    first = apart[0]
    title = f"No step for {duration(first.seconds)}: the ranks wait for each other in different "
    return (
        f"{title}calls, {' and '.join(texts)}",
        "Each call waits until all ranks make it: they have to make the same ones in one order",
        Fix(SAME_CALLS),
        _where(first)[1],
    )


def _of_pause(still: _Still) -> tuple[str, str, Fix, Place | None]:
    """What is said of a training that stands still: title, cause, fix, and the line."""
    who, where, function = _where(still)
    text = f"at {where} in {function}" if where is not None else f"in {function}"
    title = f"No step for {duration(still.seconds)}: {who} is {text}"
    other = still.locked_out or still.unfed_by
    if other is not None and other.where is not None:
        text = f"{short_file(other.where.path)}:{other.where.line}"
        title += f", and another thread waits at {text} `{short(other.where.code, 60)}`"
    died = _died_before(still)
    title += f", and a thread ended by {died.raised}" if died is not None else ""
    hang = _hang(still)
    if hang is not None and hang.kind == "deadlock" and hang.library:
        title += f", inside {hang.library}, which does not survive a fork"
    return title, *_cause_and_fix(still), where


def _of_end(still: _Still) -> tuple[str, str, Fix, Place | None]:
    """The title, cause, fix and place of a script that is over, and whose process does not end."""
    title = f"The script is over, and its process did not end for {duration(still.seconds)}"
    where, kept = None, still.kept_by
    if kept is not None and (frame := kept.where) is not None:
        where = Place(short_file(frame.path), frame.line, source=frame.code)
        code = f" `{short(frame.code, 60)}`" if frame.code else ""
        title += f": a thread is at {where} in {frame.function}{code}"
    return title, "Python ends when all threads have that are no daemons", Fix(_END_THREAD), where


#: Seconds for which a process that is over may wait for others that it has started.
_WAITS_S: Final = 5.0
#: A process that nobody ends.
_END_PROCESS: Final = (
    "tell the process to end after the last step (put None into its queue, and let it return at "
    "that), and get() all that it has put into a multiprocessing.Queue: before that it does not "
    "end; Process(daemon=True) is ended with the script"
)


def _of_queue(view: RankView) -> Finding | None:
    """The finding on a script that is over, and whose process waits until its queues are read."""
    event = next((each for each in view.record.events if each.kind == "awaits_queue"), None)
    seconds = 0.0 if event is None else end_of(view) - event.time_s
    if event is None or seconds < max(_WAITS_S, NOTICEABLE * end_of(view)):
        return None
    return Finding(
        "standstill",
        "warning" if view.header.ending == "finished" else "critical",
        f"The script is over, and its process did not end for {duration(seconds)}: what it has put "
        "into a multiprocessing.Queue is not read",
        (),
        "Python ends when all that was put into such a queue is sent, and a pipe holds 64 KiB",
        (
            Fix(
                "get() all of it before the process that reads it ends; or, where nobody needs it "
                "any more, queue.cancel_join_thread() at the end"
            ),
        ),
        "likely",
        rank=view.rank,
        last_step=event.step,
    )


def _of_children(view: RankView) -> Finding | None:
    """The finding on a script that is over, and whose process waits for others that it has
    started."""
    awaited = [event for event in view.record.events if event.kind == "awaits"]
    if not awaited:
        return _of_queue(view)
    seconds = end_of(view) - awaited[-1].time_s
    if seconds < max(_WAITS_S, NOTICEABLE * end_of(view)):
        return None
    first = awaited[0]
    started = {e.values["pid"]: e.text for e in view.record.events if e.kind == "child"}
    place = Place.parse(started.get(first.values["pid"]))
    text = f", which {place} started" if place is not None else ""
    others = f" and {count(len(awaited) - 1, 'other')}" if len(awaited) > 1 else ""
    return Finding(
        "standstill",
        "warning" if view.header.ending == "finished" else "critical",
        f"The script is over, and its process did not end for {duration(seconds)}: it waits for "
        f"the process {first.text}{text}{others}",
        (Evidence("PID", f"{first.values['pid']:.0f}"),),
        "Python ends when all processes of multiprocessing have that are no daemons",
        (Fix(_END_PROCESS),),
        "certain",
        place=place,
        rank=view.rank,
        last_step=first.step,
    )


@dataclass(frozen=True)
class _Died:
    """A thread of the script that an error ended: "KeyError: 5 at train.py:7"."""

    raised: str
    place: Place | None


def raised_by(event: Event) -> str:
    return ": ".join(filter(None, exception_in(event.text)))


def _died_before(still: _Still) -> _Died | None:
    """The last thread that ended by an error before a rank's main thread came to stand still in its
    own code: it may wait for what that should have made."""
    if still.waits_for_ranks or (still.main is not None and still.main.role == "iterating"):
        return None
    events = [event for event in still.view.record.events if event.kind == "thread_died"]
    if not events:
        return None
    culprit = parse(*exception_in(events[-1].text), events[-1].text).culprit
    place = None if culprit is None else Place(short_file(culprit.path), culprit.line)
    text = "" if place is None else f" at {place}"
    return _Died(f"{short(raised_by(events[-1]), 80)}{text}", place)


def _busy(still: _Still) -> list[ThreadStack]:
    """The threads that something else waits for: workers in a batch, else the main thread."""
    workers = [thread for thread in still.threads if thread.role == "worker" and not thread.is_idle]
    iterating = still.main is not None and still.main.role == "iterating"
    if workers and iterating:
        return workers
    return [still.main] if still.main is not None else []


def _where(still: _Still) -> tuple[str, Place | None, str]:
    busy = next(iter(_busy(still)), None)
    frame = busy.where if busy is not None else None
    if busy is None or frame is None:
        return "the training", None, "a call that is not known"
    who = "a DataLoader worker" if busy.role == "worker" else "the main thread"
    if busy.role == "iterating":  # no worker tells where it is
        frame = next((each for each in busy.frames if each.is_user), frame)
        who = "the main thread waits for a batch and"
    code = f" `{short(frame.code, 60)}`" if frame.code else ""
    place = Place(short_file(frame.path), frame.line, source=frame.code)
    return who, place, f"{frame.function}{code}"


def _stack(thread: ThreadStack) -> str:
    calls = [f"{short_file(each.path)}:{each.line} in {each.function}" for each in thread.own[:4]]
    return " < ".join(calls)


def _hang(still: _Still) -> Hang | None:
    """What a DataLoader does whose workers the main thread waits for."""
    settings, main = loader_settings(still.view.header), still.main
    if settings is None or main is None or main.role != "iterating":
        return None
    longest = float(known(still.view.record.fetches["fetch_s"]).max(initial=0.0)) or None
    context = FailureContext(
        silent_s=still.seconds,
        longest_s=longest,
        idle=bool(still.event.values.get("workers_idle")),
        threads=still.view.header.worker_threads.get("torch"),
    )
    return explain(still.event.text, settings, context)


def _cause_and_fix(still: _Still) -> tuple[str, Fix]:
    if (hang := _hang(still)) is not None:
        first = next(iter(_busy(still)), None)
        usual = HANGS[hang.kind] if hang.kind == "deadlock" else _end_of_wait(first)
        action = FORK_UNSAFE.get(hang.library, usual or "fix what this line waits for")
        return (
            f"{hang.summary}: {hang.evidence}",
            Fix(f"{action}; DataLoader(timeout=60) makes such a wait an error"),
        )
    if still.waits_for_ranks:
        return (
            "It waits for other ranks, none of which is known to do anything else",
            Fix(
                "check that all ranks make the same calls: a branch that only some take, data of "
                "unequal length, a rank that is gone"
            ),
        )
    if still.view.header.world_size > 1:
        return (
            "The other ranks wait for this one in their next collective operation",
            Fix(
                "fix what this line waits for; init_process_group(timeout=…) makes such a wait an "
                "error"
            ),
        )
    if _died_before(still) is not None:
        return (
            "The main thread waits since then, and nothing comes of the thread that has ended",
            Fix(
                "fix that error; catch it in the thread and put it into the queue, so that the "
                "training raises it, or let get(timeout=60) end the wait"
            ),
        )
    if still.locked_out is not None:
        return (
            "Two threads wait for a lock: each may hold the one that the other wants",
            Fix(
                "take both locks in the same order in both threads, or hold one at a time (copy "
                "what is needed under the first, let it go, then take the second); "
                "acquire(timeout=60) makes such a wait an error"
            ),
        )
    if still.unfed_by is not None:
        return (
            "The main thread waits for a queue, and a thread that may fill it waits, too",
            Fix(
                "see what the other thread waits for (a Condition or an Event that nobody sets, a "
                "full queue, a lock): wait(timeout=60) and get(timeout=60) make such waits errors"
            ),
        )
    fix = _end_of_wait(next(iter(_busy(still)), None)) or "fix what it waits for"
    return ("The main thread has been in this call since then", Fix(fix))


def _end_of_wait(thread: ThreadStack | None) -> str:
    """What ends the wait at the line of the script that a thread is at; empty: not known."""
    code = thread.where.code if thread is not None and thread.where is not None else ""
    return next((fix for said, fix in _WAITS if said.search(code)), "")


#: A thread that nobody ends.
_END_THREAD: Final = (
    "tell the thread to end after the last step (put None into its queue and let it return at "
    "that, or set an Event that it asks in each round), then join() it; Thread(daemon=True) ends "
    "with the script, and loses what it has not written yet"
)
#: What a line waits for, and what ends the wait.
_WAITS: Final = (
    (
        re.compile(r"\binput\s*\(|\bstdin\b|getpass"),
        "it waits for somebody to type: answer it, or let an option of the script say it",
    ),
    (
        re.compile(r"\bpool\b|\.(?:i?map|starmap|imap_unordered|map_async)\s*\(", re.IGNORECASE),
        "a process of a multiprocessing.Pool that was killed, or crashed, is replaced, and nobody "
        "does what it had to do: concurrent.futures.ProcessPoolExecutor raises BrokenProcessPool "
        "then; imap(…).next(timeout=60) and get(timeout=60) make such a wait an error",
    ),
    (
        re.compile(
            r"\.(?:recv|recv_into|recvfrom|getresponse)\s*\(\s*[^)\s]|\burlopen\b|\brequests\."
        ),
        "the other end of the connection sends nothing: a timeout (settimeout(60) of a socket, "
        "timeout=60 of a call) makes such a wait an error, after which it can connect again",
    ),
    (
        re.compile(r"\.put\s*\("),
        "the queue is full: see whether the thread or process that reads it still does (its error "
        "is in its own output); put(…, timeout=60) makes such a wait an error, put_nowait() lets "
        "the training drop what nobody reads",
    ),
    (
        re.compile(r"\.get\s*\("),
        "see whether the thread or process at the other end of the queue still runs (its error is "
        "in its own output); get(timeout=60) makes such a wait an error",
    ),
    (
        re.compile(r"\.wait\s*\(\s*\)"),
        "see what the thread or process that it waits for does; a program whose output is a pipe "
        "stands still when that is full: communicate() or subprocess.run(…, capture_output=True) "
        "read it meanwhile; a timeout makes such a wait an error",
    ),
    (
        re.compile(r"\.join\s*\(|\.result\s*\(|\.wait\s*\("),
        "see what the thread or process that it waits for does: a process that has put more into a "
        "multiprocessing.Queue than was taken out does not end (get() all of it before join()), a "
        "thread not without its sentinel; a timeout makes such a wait an error",
    ),
    (
        _LOCK,
        "see who holds the lock and waits for this thread; take locks in one order, and let them "
        "go with `with`",
    ),
    (re.compile(r"\bsleep\s*\("), "remove the sleep"),
)


# ---
# A worker that died, where the script did not end by it.


def _find_dead_worker(run: RunView) -> Iterator[Finding | Unknown]:
    for view in run.ranks:
        died = [event for event in view.record.events if event.kind == "worker_died"]
        if not died or any(True for _ in ending.ENDING.look(run)):
            continue
        last = int(view.record.steps["step"].max(initial=-1))
        goes_on = last > died[-1].step
        yield Finding(
            "worker_died",
            "warning" if goes_on else "critical",
            f"{count(len(died), 'DataLoader worker')} died, the last in step {died[-1].step}",
            (),
            short(died[-1].text.partition("\n")[0], 200),
            (
                Fix(
                    "find what ended it: memory (fewer workers need less), a signal, a crash in a "
                    "library; num_workers=0 shows an error of the data set itself"
                ),
            ),
            rank=view.rank,
            last_step=died[-1].step,
        )


RULES: Final[Sequence[Rule]] = (
    Rule(("standstill",), _find_standstill),
    Rule(("worker_died",), _find_dead_worker),
)
