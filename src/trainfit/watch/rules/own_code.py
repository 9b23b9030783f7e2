"""The script's own code: the line between the phases that costs most, threads next to the training
that take the interpreter's lock from it, and loops of the forward pass over a tensor's elements."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from trainfit.findings.own_code import (
    ALONE,
    BATCHES,
    DRAWS,
    LOGS,
    Habit,
    adds_to,
    from_memory,
    habit_of,
    held_at,
    is_queue,
    more_handlers,
    over_all_of,
)
from trainfit.results.findings import Evidence, Finding, Fix, Place, Unknown
from trainfit.results.runs.watched import COLLECTIONS, FIGURES, CodeLine, StackLooks
from trainfit.results.text import count, duration
from trainfit.watch import checks, thresholds
from trainfit.watch.rules.code_lines import CostlyLine, costliest
from trainfit.watch.rules.core_waits import CoreWaits
from trainfit.watch.rules.main_thread import MainThread
from trainfit.watch.rules.rule import Rule, severity
from trainfit.watch.view import RankView, RunView

KIND: Final = "other_code"


def share_of_line(rank: RankView, line: CostlyLine) -> float:
    """The share of the steady steps' time that a line costs: what phases leave, divided as the
    looks tell; on a GPU only while that is idle for no other reason."""
    main = MainThread(rank)
    every = sum(each.count for each in rank.header.other_code.lines)
    share = (main.other or 0.0) * line.count / max(1, every)
    if not checks.has_gpu(rank):
        return share
    return min(share, main.unexplained_idle or 0.0)


def _added_to(rank: RankView, line: CostlyLine) -> str:
    """The tensor or array that these lines make again with more in it; empty: none is known."""
    first, last = line.lines
    for variable in rank.header.growing:
        place = Place.parse(variable.place)
        if place is None or variable.kind not in ("tensor", "array", "DataFrame"):
            continue
        if place.file == line.place.file and first <= place.line <= last:
            return variable.name
    return ""


def _gone_over(rank: RankView, line: CostlyLine) -> str:
    """The variable that becomes longer with each step and is computed over here; empty: none is
    known."""
    for variable in rank.header.growing:
        if variable.kind in _COMPUTED and re.search(
            rf"(?<![\w.]){re.escape(variable.name)}(?![\w(])(?:\[\])?(?:\.{_OF_ALL}\b|$)",
            _operand(line),
        ):
            return variable.name
    return ""


#: Kinds of variables that lines compute over, and what goes over all of one.
_COMPUTED: Final = ("tensor", "array", "DataFrame", "list")
_OF_ALL: Final = (
    r"(?:mean|sum|std|var|median|quantile|min|max|sort\w*|describe|copy|to_\w+|tolist|arg\w+|topk"
    r"|(?:log_)?softmax|sigmoid|exp|log|abs|norm|cum\w+|unique\w*|bincount|histc|round|clone|float"
    r"|double|long|all|any|is\w+|eq|ne|gt|lt)"
)


def _operand(line: CostlyLine) -> str:
    """What is called at the line, with what it is called of; else what its loop goes over."""
    return line.most.calls if "." in line.most.calls else line.most.over


#: Of the looks at several lines, those in which one thing is done, from which all are told as it;
#: and those in which a batch is joined, after lists of its parts were made.
_SAME: Final = 0.5
_NEARLY: Final = 0.4
_OF_BATCHES: Final = 0.3


#: Of the time, what the making of samples by the training itself costs beyond what is usual.
_MOST_OF_ALL: Final = 0.5


def _named(line: CodeLine) -> str:
    """What is called there; empty: nothing but the line itself (a comprehension), or not known."""
    name = line.calls or line.inner
    return "" if name.endswith(">") or _is_bare(line) else name


def _is_bare(line: CodeLine) -> bool:
    """Is nothing called there: is the function whose line it is the innermost?"""
    own = line.function.rpartition(".")[2]
    return bool(own) and not line.calls and line.inner.endswith(f".{own}")


def _done_at(line: CostlyLine, *, has_loader: bool) -> tuple[Habit, str]:
    """What is done there, and what it calls; of several lines, what half of the looks found."""
    maximum = line.most

    def habit(one: CodeLine) -> Habit:
        bare = bool(one.callers) and _is_bare(one)
        return habit_of(one.names, one.waits_for, has_loader=has_loader, over=one.over, bare=bare)

    # A line that calls a function stands for many of that one's, like several next to each other.
    if not line.is_several and (maximum.place == str(line.place) or len(line.calls) == 1):
        return habit(maximum), _named(maximum)
    counts: Counter[Habit] = Counter()
    called: Counter[str] = Counter()
    for call in line.calls:
        counts[habit(call)] += call.count
        called[_named(call)] += call.count
    (same, looks), (name, of_name) = counts.most_common(1)[0], called.most_common(1)[0]
    whole = _SAME * line.count
    # One thing that is known, next to several that are not.
    known = max(
        (each for each in counts if each.what != ALONE.what), key=lambda e: counts[e], default=None
    )
    if known is not None and counts[known] >= _NEARLY * line.count:
        same, looks, whole = known, line.count, _NEARLY * line.count
    if counts[BATCHES] >= _OF_BATCHES * line.count:
        same, looks = BATCHES, line.count
    return (
        same if looks >= whole else habit_of((), "", has_loader=has_loader),
        name if of_name >= whole else "",
    )


def _find_other_code(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    if checks.are_few(rank):
        return
    line = costliest(rank.header.other_code)
    if line is None or line.count < thresholds.LOOKS_AT_LINE:
        return
    share = share_of_line(rank, line)
    if share < thresholds.WARNING_SHARE:
        return
    grown = _added_to(rank, line)
    habit, name = _done_at(line, has_loader=bool(rank.header.loaders))
    usual, weight = habit, severity(share)
    held = costliest(rank.header.lock_code)
    handlers = next((e for e in rank.header.growing if e.name.endswith(".handlers")), None)
    if grown:
        habit = adds_to(grown)
    elif gone := _gone_over(rank, line):
        habit = over_all_of(gone)
    elif handlers is not None and habit is LOGS:
        habit = more_handlers(handlers.name, handlers.place)
    elif line.most.waits_for == "lock" and held is not None and _is_held(rank, held):
        habit = held_at(str(held))
    elif not rank.header.loaders:
        if rank.header.memories:
            habit = from_memory(rank.header.memories[0], habit)
        makes_data = _steps_an_environment(rank) and usual in (BATCHES, ALONE)
        # What nobody has a word for, and is at no line of its own, is no habit that could be left.
        nothing = usual is DRAWS or (usual is ALONE and line.is_several)
        if habit is not usual or makes_data or nothing:
            # Such a training is partly that: what it learns from it has to make itself. A loop in
            # Python within that is worth a word sooner.
            loops = line.most.over and line.most.callers and share >= thresholds.CRITICAL_SHARE
            weight = "warning" if share >= _MOST_OF_ALL or loops else "info"
        elif usual in (ALONE, BATCHES) and share < thresholds.CRITICAL_SHARE:
            weight = "info"  # what a step learns from has to be made somewhere
    if share < thresholds.CRITICAL_SHARE and any(map(_FOR_ALL.search, _inner(line))):
        weight = "info"  # an average of the weights, as it is best made
    if share < thresholds.CRITICAL_SHARE and habit.what == ALONE.what and _is_of_loss(line):
        weight = "info"  # what a light step learns from has to be computed somewhere
    if (kept := _figures_kept(rank, line)) is not None:
        closes = f"plt.close(fig) after it: pyplot keeps each figure that {kept} makes"
        habit = dataclasses.replace(habit, action=f"{habit.action}; {closes}")
    if (at := _threads_waited_for(rank, line)) is not None:
        yield _waits_for_threads(rank, line, at, share)
        return
    called = f" (`{name}`)" if name else ""
    yield Finding(
        KIND,
        weight,
        f"{line} {habit.what}{called} for {checks.in_percent(share)} of the time",
        (
            Evidence("outside of all phases", MainThread(rank).other or 0.0, "of the time"),
            Evidence("looks at the main thread", float(rank.header.other_code.looks)),
            Evidence("of them at this line", float(line.count)),
        ),
        "The training waits for this line of the script in each step, or in some of them",
        (Fix(habit.action),),
        "likely",
        share,
        line.place,
    )


#: What draws, as a line calls it.
_DRAWS: Final = re.compile(r"savefig|^plt\.|pyplot|matplotlib|subplots|\bfig\b")


def _figures_kept(rank: RankView, line: CostlyLine) -> str | None:
    """The line whose figures pyplot keeps, where this one draws; ``None``: it does not, or none
    are kept."""
    if not any(map(_DRAWS.search, line.names)):
        return None
    return next(
        (variable.place for variable in rank.header.growing if variable.kind == FIGURES), None
    )


def _is_held(rank: RankView, at: CostlyLine) -> bool:
    """Was another thread found there most times that the training waited for a lock?"""
    looks = rank.header.lock_code.looks
    return at.count >= max(thresholds.LOOKS_AT_LINE, _SAME * looks)


#: One operator for all weights of an average (``torch.optim.swa_utils``).
_FOR_ALL: Final = re.compile(r"_foreach_(?:lerp|mul|add)_?$")


def _inner(line: CostlyLine) -> Iterator[str]:
    return (call.inner for call in line.calls if call.calls.endswith("update_parameters"))


#: Operators on what a call gives, one after the other: of a loss that a line of the loop computes
#: of its model's result. What they call is an operator itself, and no library's code in Python.
_OF_A_RESULT: Final = re.compile(
    r"[\w.]+\(\)(?:\.(?:pow|square|abs|sqrt|log|exp|neg|add|sub|mul|div|clamp|clamp_min|clamp_max"
    r"|float|squeeze|unsqueeze|view|reshape|flatten|transpose|t|mean|sum|norm)(?:\(\))?)+"
)


def _is_of_loss(line: CostlyLine) -> bool:
    """Do most looks find such operators at the line, one of the training loop?"""
    total = sum(
        call.count
        for call in line.calls
        if call.calls == call.inner and _OF_A_RESULT.fullmatch(call.calls) and not call.callers
    )
    return total > _SAME * line.count


#: How scripts call what reinforcement learning learns from.
_ENVIRONMENT: Final = re.compile(
    r"(?:^|\.)(?:\w*envs?|environment|game|sim(?:ulator)?|world)\.(?:step|reset)$|^gym(?:nasium)?\."
)


def _steps_an_environment(rank: RankView) -> bool:
    """Does the training itself play what it learns from?"""
    lines = rank.header.other_code.lines
    return any(_ENVIRONMENT.search(name) is not None for line in lines for name in line.names)


#: Cores that threads have together, from which they compute what the training waits for; and from
#: which they do that side by side, outside of Python.
_AT_WORK: Final = 0.25
_SIDE_BY_SIDE: Final = 1.2


def _threads_waited_for(rank: RankView, line: CostlyLine) -> CostlyLine | None:
    """The line at which threads of the script compute while the training waits for them."""
    threads = rank.header.other_threads
    at = costliest(_at_work(threads.code))
    if line.most.waits_for != "lock" or at is None or at.count < thresholds.LOOKS_AT_LINE:
        return None
    # What waits for a queue waits for who fills it, however little that computes.
    if threads.cores < (MainThread(rank).cpu or 0.0) and not is_queue(line.names, "lock"):
        return None
    # Next to other programs they get as little of a core as the training does.
    alone = threads.cores * (CoreWaits(rank).training_stretch or 1.0)
    return at if alone >= _AT_WORK else None


def _waits_for_threads(rank: RankView, line: CostlyLine, at: CostlyLine, share: float) -> Finding:
    threads = rank.header.other_threads
    # Next to other programs they have less of the cores than they could use.
    in_turns = threads.cores * (CoreWaits(rank).training_stretch or 1.0) < _SIDE_BY_SIDE
    who = f"{threads.threads} threads" if threads.threads > 1 else "a thread"
    return Finding(
        KIND,
        severity(share),
        f"{line} waits for {who} of the script, busy at {at}, for {checks.in_percent(share)} of "
        "the time",
        (
            Evidence("outside of all phases", MainThread(rank).other or 0.0, "of the time"),
            Evidence("looks at the main thread", float(rank.header.other_code.looks)),
            Evidence("of them at this line", float(line.count)),
            Evidence("cores of these threads together", threads.cores, "cores"),
        ),
        "Python runs one thread at a time, however many there are"
        if in_turns
        else "The training needs what they compute sooner than they have it",
        (
            Fix(
                "processes instead: a torch.utils.data.Dataset whose DataLoader has workers, or "
                "ProcessPoolExecutor; more threads would not help"
                if in_turns
                else "begin the next batch before the step (a DataLoader with workers does), or "
                "make it cheaper"
            ),
        ),
        "likely",
        share,
        line.place,
    )


OTHER_CODE: Final = Rule((KIND,), _find_other_code, each_rank=True)


# ---
# A Python thread next to the training: both want the interpreter's lock.


THREAD_KIND: Final = "python_thread"
#: Of the main thread's CPU time, what a thread's must be that takes turns with it.
_TAKES_TURNS: Final = 0.25


def _find_thread(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    threads, main = rank.header.other_threads, MainThread(rank)
    line = costliest(_at_work(threads.code))
    if (
        checks.are_few(rank)
        or line is None
        or line.count < thresholds.LOOKS_AT_LINE
        or main.cpu is None
    ):
        return
    share = _off_core(rank)
    if threads.cpu_share < _TAKES_TURNS * main.cpu or share < thresholds.NOTICEABLE:
        return
    yield Finding(
        THREAD_KIND,
        severity(share),
        f"A Python thread computes at {line} while the training waits {checks.in_percent(share)} "
        "of the time for the interpreter's lock",
        (
            Evidence("that thread's CPU time", threads.cpu_share, "cores"),
            Evidence("the training thread's CPU time", main.cpu, "of the step"),
            Evidence("ready, without a core", CoreWaits(rank).main_thread or 0.0, "of the time"),
        ),
        "One Python thread runs at a time: the training gives the lock back at each operator of "
        "PyTorch, and the other thread keeps it for 5 ms then",
        (
            Fix(
                "do it in a process of its own (multiprocessing), or less often: a wait "
                "(Event.wait(1)) in each round of the thread; sys.setswitchinterval(0.0005) makes "
                "each wait shorter"
            ),
        ),
        "likely",
        share,
        line.place,
    )


#: What a line waits in for something else than the interpreter's lock, where its kind is not told.
_BLOCKS: Final = re.compile(
    r"^subprocess\.|(?:^|\.)(?:wait\w*|join|poll|select|communicate|accept|get|input|result)$"
)


def _at_work(looks: StackLooks) -> StackLooks:
    """The looks without the lines at which a thread waits: who holds the interpreter's lock
    computes."""
    lines = tuple(line for line in looks.lines if not _waits(line))
    return dataclasses.replace(looks, lines=lines)


def _waits(line: CodeLine) -> bool:
    return bool(line.waits_for) or any(map(_BLOCKS.search, line.names))


def _off_core(rank: RankView) -> float:
    """Share of the time in forward, backward and optimizer, and at lines between them that wait for
    nothing, in which the main thread neither is on a core nor lacks one, at least. There it waits
    for no batch, queue or file."""
    main = MainThread(rank)
    launches, waits = main.launches, CoreWaits(rank).main_thread
    if launches is None or main.cpu is None or waits is None or checks.has_gpu(rank):
        return 0.0
    lines = rank.header.other_code.lines
    every = sum(line.count for line in lines)
    own = sum(line.count for line in lines if not _waits(line)) / every if every else 0.0
    return max(0.0, launches + own * (main.other or 0.0) - main.cpu - waits)


PYTHON_THREAD: Final = Rule((THREAD_KIND,), _find_thread, each_rank=True)


# ---
# Python's garbage collector, which goes through all objects; nothing else of Python runs meanwhile.


PAUSES_KIND: Final = "collector_pauses"
#: What a line calls that asks for a collection itself: that line is named then, by `other_code`.
_ASKED_FOR: Final = re.compile(r"(?:^|\.)(?:collect|empty_cache)$")


def _find_pauses(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    if checks.are_few(rank):
        return
    first, last = rank.window
    events = [e for e in rank.record.events if e.kind == COLLECTIONS and first < e.time_s <= last]
    seconds = sum(event.seconds or 0.0 for event in events)
    share = min(1.0, seconds / rank.seconds) if rank.seconds else 0.0
    if checks.has_gpu(rank):
        share = min(share, MainThread(rank).unexplained_idle or 0.0)
    if share < thresholds.NOTICEABLE or _asks_for_it(rank):
        return
    pauses = round(sum(event.values.get("pauses", 0.0) for event in events))
    longest = max(event.values.get("longest_s", 0.0) for event in events)
    yield Finding(
        PAUSES_KIND,
        severity(share),
        f"Python's garbage collector stops the training for {checks.in_percent(share)} of the time "
        f"({count(pauses, 'pause', 'pauses')} of up to {duration(longest)})",
        (
            Evidence("pauses", float(pauses)),
            Evidence("the longest", longest, "s"),
            Evidence("all of them together", seconds, "s"),
        ),
        "It goes through all lists, dicts, tuples and other objects that the process keeps, each "
        "time that enough new ones have been made",
        (
            Fix(
                "gc.disable() before the loop, and gc.collect() once an epoch: what nothing refers "
                "to is freed all the same, what refers to itself in a circle is freed then; "
                "gc.freeze() before the loop is enough where most objects are a data set that was "
                "read before. Keep what each step adds (a replay buffer, a log) in tensors or "
                "arrays that are made once: these have no objects to go through",
                line="gc.disable()",
            ),
        ),
        "certain",
        share,
    )


def _asks_for_it(rank: RankView) -> bool:
    """Does the script itself call for collections, at a line that looks have found often?"""
    lines = rank.header.other_code.lines
    asked = sum(e.count for e in lines if any(map(_ASKED_FOR.search, e.names)))
    return asked >= thresholds.LOOKS_AT_LINE


COLLECTOR_PAUSES: Final = Rule((PAUSES_KIND,), _find_pauses, each_rank=True)


# ---
# A loop of the forward pass over samples or time steps: many small operators, each of which costs
# more than what it computes.


LOOP_KIND: Final = "loop_over_elements"
#: Seconds of a round of such a loop, from which its operators compute for long: one operator for
#: all elements would not be much quicker. A cell of an LSTM needs 0.1 to 0.3 ms on a core.
_SHORT_ROUND_S: Final = 0.001


def _find_loop(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    loop = next(iter(rank.header.element_loops), None)
    if loop is None or checks.are_few(rank) or loop.looks < thresholds.LOOKS_AT_LINE:
        return
    main, part = MainThread(rank), loop.looks / max(1, loop.of_looks)
    forward = part * (main.phases["forward"] or 0.0)
    # What it made is gone through backwards one by one, too.
    share = forward + part * (main.phases["backward"] or 0.0)
    round_s = forward * rank.seconds / len(rank.steps) / loop.rounds
    round_s /= CoreWaits(rank).training_stretch or 1.0
    if checks.has_gpu(rank):
        share = min(share, main.unexplained_idle or 0.0)
    elif round_s > _SHORT_ROUND_S:
        return
    if share < thresholds.WARNING_SHARE:
        return
    # What comes with each sample (boxes, as many as there are) is gone over with them.
    is_ragged = loop.over.startswith("zip(") and share < thresholds.CRITICAL_SHARE
    yield Finding(
        LOOP_KIND,
        "info" if is_ragged else severity(share),
        f"{loop.place} goes over `{loop.over}` in Python in the forward pass: with its backward "
        f"pass {checks.in_percent(share)} of the time",
        (
            Evidence("rounds of the loop", float(loop.rounds)),
            Evidence("a round, at most", round_s, "s"),
            Evidence("looks at the forward pass", float(loop.of_looks)),
            Evidence("of them in this loop", float(loop.looks)),
        ),
        "Each round launches operators on a small part of a tensor, which cost more than what they "
        "compute",
        (
            Fix(
                "over samples: operators on the whole batch (torch.bmm, a mask, torch.vmap); over "
                "time steps: nn.LSTM, nn.GRU or nn.RNN instead of a cell in a loop; else "
                "torch.compile of the loop's function, or a larger batch"
            ),
        ),
        "likely",
        share,
        Place.parse(loop.place),
    )


ELEMENT_LOOP: Final = Rule((LOOP_KIND,), _find_loop, each_rank=True)


# ---
# In forward and backward passes, what does not compute: hooks that only look (statistics of
# activations and gradients), and lines of the model that sleep, log or wait.


PASS_KIND: Final = "pass_code"


def _find_in_passes(view: RunView) -> Iterator[Finding | Unknown]:
    rank = view.judged
    for looks, is_hook in ((rank.header.hook_code, True), (rank.header.pass_code, False)):
        line, count = costliest(looks), sum(each.count for each in looks.lines)
        if checks.are_few(rank) or line is None or line.count < thresholds.LOOKS_AT_LINE:
            continue
        share = _share_of_passes(rank, looks.share(count))
        if share >= thresholds.WARNING_SHARE:
            yield _in_passes(rank, looks, line, share, is_hook=is_hook)


def _share_of_passes(rank: RankView, part: float) -> float:
    """The share of the time in ``part`` of forward and backward passes; on a GPU only while that is
    idle."""
    main = MainThread(rank)
    passes = (main.phases["forward"] or 0.0) + (main.phases["backward"] or 0.0)
    share = passes * part
    return min(share, main.unexplained_idle or 0.0) if checks.has_gpu(rank) else share


def _in_passes(
    rank: RankView, looks: StackLooks, line: CostlyLine, share: float, *, is_hook: bool
) -> Finding:
    habit, name = _done_at(line, has_loader=bool(rank.header.loaders))
    called, cost = f" (`{name}`)" if name else "", checks.in_percent(share)
    title = f"A hook at {line}{called} costs {cost} of the time"
    fix = (
        "register it for a few steps only (handle = module.register_forward_hook(…), then "
        "handle.remove()), or let it return at once in most steps; take sums or a part of the "
        "values, without .item() and sorting"
    )
    if not is_hook:
        title, fix = f"{line} {habit.what}{called} in the model, {cost} of the time", habit.action
    return Finding(
        PASS_KIND,
        severity(share),
        title,
        (
            Evidence("looks at forward and backward passes", float(looks.looks)),
            Evidence("of them at this line", float(line.count)),
        ),
        "PyTorch calls hooks of modules and tensors in each pass, which waits for them"
        if is_hook
        else "The forward or backward pass waits for this line of the script",
        (Fix(fix),),
        "likely",
        share,
        line.place,
    )


IN_PASSES: Final = Rule((PASS_KIND,), _find_in_passes, each_rank=True)
