"""What looks at stacks tell: the line that costs most, and what those who make batches wait for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trainfit.results.findings import Place
from trainfit.results.runs.watched import CodeLine, StackLooks, WaitsFor
from trainfit.watch import thresholds

#: Looks that tell what batches wait for; of them, those at a lock from which it is what holds
#: batches up.
LEAST_LOOKS: Final = 10
_LOCKED: Final = 0.2


def waits_for(looks: StackLooks) -> tuple[WaitsFor, float, CodeLine | None]:
    """What batches wait for most: its share of the looks, and the line. "" where too few looks
    found them waiting."""
    if looks.looks < LEAST_LOOKS:
        return "", 0.0, None
    counts: Counter[WaitsFor] = Counter()
    for line in looks.lines:
        counts["" if _is_for_threads(line) else line.waits_for] += line.count
    # Whoever holds a lock computes, reads or sleeps: the others' wait is what limits.
    if counts["lock"] >= _LOCKED * looks.looks:
        kind: WaitsFor = "lock"
    else:
        waits: list[WaitsFor] = ["sleep", "network", "disk"]
        kind = max(waits, key=lambda each: counts[each])
    share = counts[kind] / looks.looks
    if share < thresholds.CRITICAL_SHARE and kind != "lock":
        return "", 0.0, None
    lines = [e for e in looks.lines if e.waits_for == kind and not _is_for_threads(e)]
    return kind, share, max(lines, key=lambda each: each.count, default=None)


#: Where a thread waits for others of its own process, and not for a lock that another one holds.
_FOR_THREADS: Final = re.compile(
    r"\bwaiter\.acquire$|tstate_lock|[Pp]ool\b|Pool\w*$|Executor$|^concurrent\.futures\.|^joblib\."
)


def _is_for_threads(line: CodeLine) -> bool:
    if line.waits_for != "lock":
        return False
    return any(_FOR_THREADS.search(each) for each in (line.inner, line.calls))


def has_own_threads(looks: StackLooks) -> bool:
    """Do the data set's own threads (a pool) make the samples that batches are of?"""
    waits = sum(line.count for line in looks.lines if _is_for_threads(line))
    return looks.looks >= LEAST_LOOKS and waits >= _LOCKED * looks.looks


# ---
# The line that costs most.


#: Of the looks at a line, those at one that it calls (or so many of one function), from which that
#: is the one to name.
_MOSTLY: Final = 0.6
_FEW_LINES: Final = 3
#: Lines from one to the next of one place, at most: a blank one, a comment or the head of a loop
#: is between them. Of all looks at neighbouring lines, those at one of them, from which that alone
#: is the place, and below which one at an end is not told with them.
_NEAR: Final = 3
_ALONE: Final = 0.5
_HARDLY: Final = 0.05
#: What the step computes, also where no module is called for it: Python's functions, and those in C
#: that they stand for.
_OF_MODEL: Final = re.compile(
    r"torch\.(?:nn\.functional|\w+\._nn)\."
    r"|torch\.(?:log_)?softmax$|torch\.(?:sigmoid|tanh|relu|celu|selu|dropout|einsum|b?addmm|b?mm"
    r"|matmul|conv\dd|\w+_norm|\w+_loss|cosine_similarity|pairwise_distance)$"
)
#: What a step is made of, or is begun by: the time in it is that of a phase or of a library's loop.
_OF_STEP: Final = re.compile(r"(?:^|\.)(?:backward|zero_grad|train|fit|fit_loop|learn)$")
#: How the names of comprehensions and generators end, after that of the function they stand in.
_COMPREHENSION: Final = re.compile(r"<(?:listcomp|setcomp|dictcomp|genexpr)>")
_COMPREHENSIONS: Final = re.compile(rf"(?:(?:\.<locals>)?\.?{_COMPREHENSION.pattern})+$")
#: As a script calls them; some of them stand for a function in C of the same name.
_FUNCTIONAL: Final = re.compile(r"(?:^|\.)(?:F|functional)\.(\w+)$")


#: Of the looks at the line with the most of them, those within another function of the script that
#: it calls, from which it is a place of its own, whatever lies next to it.
_CALLS_OWN: Final = 0.8


@dataclass(frozen=True)
class CostlyLine:
    """A line that looks found the thread at, with what it calls; ``count`` are these looks.

    Where they are of several lines of one function, it is the one with most of them; ``lines`` are
    the first and the last.
    """

    place: Place
    count: int
    calls: tuple[CodeLine, ...]
    lines: tuple[int, int]

    @property
    def most(self) -> CodeLine:
        """What it was found in most often: of the functions that it calls, each with all that these
        call."""
        counts: Counter[tuple[str, str]] = Counter()
        for call in self.calls:
            counts[call.place, call.calls] += call.count if call.calls or call.inner else 0
        return max(self.calls, key=lambda each: (counts[each.place, each.calls], each.count))

    @property
    def names(self) -> tuple[str, ...]:
        """What is called there most often, and the innermost function, where they are known."""
        return self.most.names

    @property
    def is_several(self) -> bool:
        """Lines of which none stands for all?"""
        return self.lines[0] != self.lines[1]

    def __str__(self) -> str:
        """ "train.py:12", and of several lines "train.py:10-14"."""
        first, last = self.lines
        return str(self.place) if first == last else f"{self.place.file}:{first}-{last}"


def costliest(looks: StackLooks, least: float = 0.0) -> CostlyLine | None:
    """The line with the most looks: from the training loop inwards, as long as one line has most
    of them (and ``least``), or few lines of the function that it calls. Neighbouring lines of the
    loop none of which has half of their looks are one place. ``None``: none of the script was
    found."""
    within: Sequence[CodeLine] = [e for e in looks.lines if e.place and not _is_of_model(e)]
    found, depth = None, 0
    while within:
        counts: Counter[Place] = Counter()
        for line in within:
            if (place := _at(line, depth)) is not None:
                counts[place] += line.count
        if not counts:
            break
        place, count = counts.most_common(1)[0]
        functions = _functions(within, depth)
        calls_own = _calls_own(within, place, depth) >= _CALLS_OWN * count
        several = {} if calls_own else _neighbours(counts, functions, _of_step(looks))
        if found is None and several:
            found = _of_lines(several, within, depth)
            break
        is_enough = found is None or count >= least or found.count < least
        if found is None or (is_enough and count >= _MOSTLY * found.count):
            within = [code_line for code_line in within if _at(code_line, depth) == place]
            found = CostlyLine(place, count, tuple(within), (place.line, place.line))
            depth += 1
            continue
        same = place.file, functions.get(place, "")
        own = {
            each: n for each, n in counts.items() if (each.file, functions.get(each, "")) == same
        }
        own = dict(Counter(own).most_common(_FEW_LINES))
        if sum(own.values()) >= min(_MOSTLY * found.count, least or found.count):
            found = _of_lines(own, within, depth)
        break
    return _from_several(looks, found)


def _calls_own(lines: Sequence[CodeLine], place: Place, depth: int) -> int:
    """Looks at a line, so far inwards, that found the thread in a function that it calls."""
    code_lines = (line for line in lines if _at(line, depth) == place)
    return sum(line.count for line in code_lines if len(_chain(line)) > depth + 1)


def _of_lines(counts: Mapping[Place, int], within: Sequence[CodeLine], depth: int) -> CostlyLine:
    """Several lines of one file as one place; ``counts`` are looks at each."""
    most = max(counts, key=lambda each: counts[each])
    lines = min(each.line for each in counts), max(each.line for each in counts)
    calls = tuple(line for line in within if _at(line, depth) in counts)
    return CostlyLine(most, sum(counts.values()), calls, lines)


def _of_step(looks: StackLooks) -> frozenset[Place]:
    """Lines of the training loop that were found in the step itself."""
    places = (_at(line, 0) for line in looks.lines if line.place and _is_of_model(line))
    return frozenset(place for place in places if place is not None)


def _functions(lines: Sequence[CodeLine], depth: int) -> dict[Place, str]:
    """The functions of lines so far inwards, by their place, where they are known.

    Before Python 3.12 comprehensions are functions with frames of their own, as generators still
    are: their lines are those of the function that they stand in.
    """
    found: dict[Place | None, str] = {}
    for line in lines:
        inner = _COMPREHENSIONS.search(line.function)
        frames = 0 if inner is None else len(_COMPREHENSION.findall(inner[0]))
        if len(_chain(line)) == depth + 1 + frames:
            name = _COMPREHENSIONS.sub("", line.function)
            found[_at(line, depth)] = name or ("<module>" if frames else "")
    return {place: name for place, name in found.items() if place is not None and name}


def _neighbours(
    counts: Mapping[Place, int], functions: Mapping[Place, str], parting: frozenset[Place]
) -> dict[Place, int]:
    """Looks at the lines of a function that lie next to each other, with none of ``parting``
    between them, and have most of all together; empty: one of them has half of that."""
    groups: list[dict[Place, int]] = [{}]
    for place in sorted({*counts, *parting}, key=lambda each: (each.file, each.line)):
        last = next(reversed(groups[-1]), None)
        apart = last and (place.file != last.file or place.line > last.line + _NEAR)
        names = {
            functions[each] for each in (last, place) if each is not None and each in functions
        }
        apart = apart or len(names) > 1
        if apart or place in parting:
            groups.append({})
        if place not in parting:
            groups[-1][place] = counts[place]
    most = max(groups, key=lambda each: sum(each.values()))
    # Of two that are close by chance, one has half: neither is told to be part of the other.
    every = sum(most.values())
    if not every or max(counts.values()) >= _ALONE * every:
        return {}
    told = [each for each in most if most[each] >= _HARDLY * every]
    return {each: n for each, n in most.items() if told[0].line <= each.line <= told[-1].line}


#: By how much more looks found a line that several lines of the loop call, for it to be named.
_MORE: Final = 1.25


def _from_several(looks: StackLooks, found: CostlyLine | None) -> CostlyLine | None:
    """A line that is reached from more than one line of the training loop, where it has most."""
    counts: Counter[Place] = Counter()
    lines = [e for e in looks.lines if e.place and e.callers and not _is_of_model(e)]
    for line in lines:
        if (place := Place.parse(line.place)) is not None:
            counts[place] += line.count
    if found is None or not counts:
        return found
    place, count = counts.most_common(1)[0]
    if count < _MORE * found.count:
        return found
    calls = tuple(each for each in lines if Place.parse(each.place) == place)
    return CostlyLine(place, count, calls, (place.line, place.line))


def place_of_most(looks: StackLooks) -> Place | None:
    """The line with the most looks; ``None``: too few found any."""
    line = costliest(looks)
    return None if line is None or line.count < thresholds.LOOKS_AT_LINE else line.place


def _is_of_model(line: CodeLine) -> bool:
    """Is it a function of neural networks, called outside of modules (mostly the loss), or the
    step itself?"""
    if _OF_MODEL.match(line.inner) is not None or _OF_STEP.search(line.calls) is not None:
        return True
    named = _FUNCTIONAL.search(line.calls)
    return named is not None and line.inner == f"torch.{named[1]}"


def _at(line: CodeLine, depth: int) -> Place | None:
    """The line so far inwards from the training loop."""
    chain = _chain(line)
    return Place.parse(chain[depth]) if depth < len(chain) else None


def _chain(line: CodeLine) -> tuple[str, ...]:
    """The chain of calls from the training loop inwards."""
    return (*reversed(line.callers), line.place)
