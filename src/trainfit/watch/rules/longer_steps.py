"""Steps that get longer: a history that is never cut, parameters that are added, hooks; and what is
none of that, larger inputs and other programs. Threads that become more and more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.findings.habits import ALL_AGAIN, GROWING_BATCHES, GROWING_WORK
from trainfit.findings.training.misuse import of_kind
from trainfit.results.findings import Evidence, Finding, Fix, Place, Unknown
from trainfit.results.runs.tables import CHECKPOINT, EPOCH_START, EVALUATION, Table
from trainfit.results.runs.watched import GRAPH, GrowingVariable
from trainfit.results.text import duration, percent
from trainfit.watch import checks, thresholds
from trainfit.watch.measures import robust_slope
from trainfit.watch.rules.core_waits import CoreWaits
from trainfit.watch.rules.fetching import Fetching
from trainfit.watch.rules.growth import goes_on, keeps, what_keeps
from trainfit.watch.rules.rule import Rule, severity
from trainfit.watch.view import PHASES, RankView, RunView, known, median

_RARE: Final = EVALUATION | CHECKPOINT | EPOCH_START
#: Of the median step, by how much steps must have become longer.
_LONGER: Final = 0.2
#: … by which it is told whose work grows, where a variable grows that the step computes with.
_DOUBLED: Final = 1.0
#: Of that, what CPU time (or the GPU's) must explain: other programs make steps longer, too.
_OWN: Final = 0.5
#: Of the steps, the part that shows how long they are at first.
_PART: Final = 10
#: Of the median, by how much CPU time must have grown where other programs share the cores: their
#: caches, and the other half of a core, make the same work cost up to twice as much.
_DEARER: Final = 0.67


def _find_longer_steps(run: RunView) -> Iterator[Finding | Unknown]:
    view = run.judged
    steps = view.steps[(view.steps["flags"] & _RARE) == 0]
    if len(steps) < thresholds.GROWTH_STEPS:
        return  # no trend shows in so few
    numbers = np.asarray(steps["step"], dtype=np.float64)
    slope = robust_slope(numbers, steps["step_s"])
    span = float(numbers[-1] - numbers[0])
    usual = median(steps["step_s"])
    if slope is None or usual is None or slope[1] <= 0:
        return
    longer, own_growth = slope[0] * span, _own_growth(view, steps)
    if own_growth < _LONGER:
        return  # other programs have taken more and more of the cores
    variable = _that_grows(view)
    # What a step computes with goes on growing, also where other programs leave more of the cores
    # in the second half.
    is_seen = variable is not None and variable.kind in _COMPUTED and own_growth >= _DOUBLED
    evenly = goes_on(numbers, steps["step_s"], slope[0], 0.3) or is_seen
    if longer < _LONGER * usual or not evenly:
        return
    added = of_kind("parameters_added", view.header.learning.misuses)
    if added is None and _grows_alike(view, steps, numbers, longer / usual):
        return
    # Each as a part of itself: where programs take turns, a CPU second lasts for longer.
    own = max(
        _trend(numbers, steps[name]) * usual / (median(steps[name]) or usual)
        for name in ("cpu_s", "gpu_s")
    )
    phases = {name: _trend(numbers, steps[f"{name}_s"]) for name in PHASES}
    rest = slope[0] - sum(phases.values())
    phase = max((*phases, "other"), key=lambda name: phases.get(name, rest))
    loader = checks.training_loader(view.header)
    held_up = CoreWaits(view).held_up_by_others or 0.0
    is_pressed = held_up >= thresholds.CRITICAL_SHARE and not checks.has_gpu(view)
    if phase == "input" and not _batches_cost_more(view):
        return  # ready batches that are used up, other programs: no batch needs longer
    if own < _OWN * slope[0] and (
        phase != "input" or (is_pressed and (loader is None or not loader.num_workers))
    ):
        return
    tells = added is not None or (variable is not None and variable.kind in _COMPUTED)
    # Threads that wait for each other compute meanwhile: their CPU time tells nothing then.
    is_dearer = own * span >= _DEARER * usual and not checks.several_compute(view)
    if is_pressed and not tells and not (is_dearer and _rises(steps["step_s"])):
        return
    first, last = usual - longer / 2, usual + longer / 2
    if first <= 0:  # they do not grow evenly
        first = min(usual, median(steps["step_s"][: len(steps) // _PART]) or 0.0)
    share = min(1 - first / usual, longer / 2 / usual)
    # On full cores other programs may have made the rest of it.
    times = 1.0 if is_pressed else last / max(first, _AT_FIRST * usual)
    grown = _inputs_grow(view, numbers, times)
    # What keeps a history grows with each step; an input's own name says nothing else.
    is_input = variable is not None and variable.kind in ("tensor", "array")
    # What no line adds to comes of longer inputs.
    is_new = variable is not None and not variable.place
    if grown is not None and (
        not tells or (added is None and is_input and (is_new or _in_stages(view)))
    ):
        yield _as_inputs_grow(grown, first, last, span)
        return
    evidence = (
        Evidence("a step at first", first, "s"),
        Evidence("a step at last", last, "s"),
        Evidence("growth", slope[0], "s/step"),
        Evidence(f"of it {_CALLED.get(phase, phase)}", phases.get(phase, rest) / slope[0]),
    )
    title = f"Steps get longer: from {duration(first)} to {duration(last)} in {span:.0f} "
    title += f"steps, {percent(phases.get(phase, rest) / slope[0])} of it in {_CALLED[phase]}"
    if added is not None:
        cause, fix, place = added.cause, added.fix, added.place
        title += "; the optimizer gets new parameters again and again"
        yield Finding(
            _LONGER_KIND, severity(share), title, evidence, cause, (fix,), "likely", share, place
        )
        return
    is_log = variable is not None and variable.kind in ("list", "dict") and not variable.holds
    habit = ALL_AGAIN if is_log and phase == "other" else GROWING_WORK
    habit = GROWING_BATCHES if phase == "input" and variable is None else habit
    cause, fix = habit.cause, Fix(habit.action)
    if variable is not None and variable.kind == GRAPH:
        title += f"; {keeps(variable)}"
        cause, fix = what_keeps(variable)
    elif variable is not None:
        what = "elements" if variable.kind in ("tensor", "array") else "entries"
        title += f"; `{variable.name}` grows"
        cause = (
            f"`{variable.name}` grew from {variable.first_size} to {variable.last_size} {what} in "
            f"{variable.steps} steps, and each step computes with all of it"
        )
    yield Finding(
        _LONGER_KIND,
        severity(share),
        title,
        evidence,
        cause,
        (fix,),
        "likely",
        share,
        None if variable is None else Place.parse(variable.place),
    )


_CALLED: Final = {
    "input": "waiting for batches",
    "copy": "copies to the GPU",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "sync": "waiting for the GPU",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "other": "other Python code",
}


def _batches_cost_more(view: RankView) -> bool:
    """Do batches need longer and longer, without the time in which their worker had no core? Unless
    what they cost was not recorded."""
    alone = CoreWaits(view).fetch_s
    times = known(view.fetches["fetch_s"] if alone is None else alone)
    if len(times) < thresholds.GROWTH_STEPS:
        return not len(times)
    if Fetching(view).others_press:
        # How long a worker had no core is read now and then only: CPU time is of each batch.
        times = known(view.fetches["cpu_s"])
    numbers = np.arange(len(times), dtype=np.float64)
    return _trend(numbers, times) * len(times) >= _LONGER * (median(times) or math.inf)


def _grows_alike(view: RankView, steps: Table, numbers: NDArray[np.float64], longer: float) -> bool:
    """Does the optimizer get longer as steps do, by this part of their median? On a CPU it does the
    same work in each step, so that what makes it longer is the machine: threads that wait for each
    other compute meanwhile, and their CPU time grows with what else runs."""
    usual = median(steps["optimizer_s"])
    if checks.has_gpu(view) or not usual:
        return False
    span = float(numbers[-1] - numbers[0])
    return _trend(numbers, steps["optimizer_s"]) * span / usual >= _OWN * longer


#: Parts of the run in each of which steps are longer than before, where their work grows.
_OF_RUN: Final = 4


def _rises(lengths: NDArray[np.generic]) -> bool:
    """Are steps longer in each quarter of the run than in the one before? Programs that come and
    go make them longer in some."""
    parts = [median(each) or 0.0 for each in np.array_split(lengths, _OF_RUN)]
    return all(before < later for before, later in itertools.pairwise(parts))


def _own_growth(view: RankView, steps: Table) -> float:
    """The growth of these steps, as a share of their median, without what other programs add to
    them."""
    ends, lengths = (np.asarray(steps[name], dtype=np.float64) for name in ("end_s", "step_s"))
    own = CoreWaits(view).alone(ends, lengths)
    numbers = np.asarray(steps["step"], dtype=np.float64)
    return _trend(numbers, own) * float(numbers[-1] - numbers[0]) / (median(own) or math.inf)


def _trend(numbers: NDArray[np.float64], values: NDArray[np.generic]) -> float:
    """Seconds a step by which a part grows; 0: not measured, or it does not."""
    found = robust_slope(numbers, values)
    return 0.0 if found is None else max(0.0, found[0])


#: Kinds of variables of which a step computes with all that they have.
_COMPUTED: Final = ("tensor", "array", "sum", GRAPH)


def _that_grows(view: RankView) -> GrowingVariable | None:
    """The variable that a step computes with: a tensor first."""
    order = _COMPUTED
    variables = [
        variable for variable in view.header.growing if variable.kind in order or variable.holds
    ]
    found = variables or list(view.header.growing)
    return min(
        found,
        key=lambda each: order.index(each.kind) if each.kind in order else len(order),
        default=None,
    )


#: Of the usual step, what one at first is at least for how many times longer the last ones are; and
#: of that, in powers, what inputs must have grown by (attention needs the square of a length).
_AT_FIRST: Final = 0.1
_EXPLAINS: Final = 0.3


def _inputs_grow(
    view: RankView, numbers: NDArray[np.float64], times: float
) -> tuple[int, int] | None:
    """Elements of inputs at first and at last, where they grow as steps do, which become so many
    times as long; ``None``: they do not, or it is not known."""
    # By steps: those that are looked at become rarer as a run goes on.
    part = (numbers[-1] - numbers[0]) / 4
    sizes = view.header.input_sizes
    early = [size for step, size in sizes if numbers[0] <= step <= numbers[0] + part]
    late = [size for step, size in sizes if numbers[-1] - part <= step <= numbers[-1]]
    if not early or not late:
        return None
    first, last = int(np.median(early)), int(np.median(late))
    if last <= first or math.log(last / first) < _EXPLAINS * math.log(max(1.0, times)):
        return None
    return first, last


#: Of the steps that were looked at, those whose inputs have a size of their own, up to which sizes
#: change in stages.
_SIZES_OF_STAGES: Final = 0.25


def _in_stages(view: RankView) -> bool:
    """Do inputs keep a size for many steps?"""
    sizes = [size for _, size in view.header.input_sizes]
    return len({*sizes}) <= _SIZES_OF_STAGES * len(sizes)


def _as_inputs_grow(grown: tuple[int, int], first: float, last: float, span: float) -> Finding:
    """A curriculum, larger images or batches from some step on."""
    return Finding(
        _LONGER_KIND,
        "info",
        f"Steps get longer as the model's inputs do: from {grown[0]:,} to {grown[1]:,} numbers, "
        f"and from {duration(first)} to {duration(last)} in {span:.0f} steps",
        (
            Evidence("numbers of an input at first", float(grown[0])),
            Evidence("at last", float(grown[1])),
        ),
        "later steps have longer sequences, larger images or larger batches",
        (Fix("right as it is where that is meant; else cut the history (x[:, -N:])"),),
        "likely",
    )


_LONGER_KIND: Final = "growing_steps"
LONGER_STEPS: Final = Rule((_LONGER_KIND,), _find_longer_steps, each_rank=True)


# ---
# Threads that a script starts, and that do not end.


_THREADS_KIND: Final = "thread_growth"
#: Threads that must have come, more than one pool has by default (32 of ThreadPoolExecutor's, and
#: those of libraries), and parts of the run in each of which there must be more of them.
_MORE_THREADS: Final = 48
_QUARTERS: Final = 4


def _find_threads(run: RunView) -> Iterator[Finding | Unknown]:
    rows = run.judged.main_process
    counts = rows["threads"][rows["threads"] > 0]
    if len(counts) < 2 * _QUARTERS:
        return
    parts = [float(np.median(part)) for part in np.array_split(counts, _QUARTERS)]
    first, last = int(counts[0]), int(counts[-1])
    grows = all(later > before for before, later in itertools.pairwise(parts))
    if not grows or last - first < _MORE_THREADS:
        return
    seconds = float(rows["time_s"][-1] - rows["time_s"][0])
    yield Finding(
        _THREADS_KIND,
        "warning",
        f"Threads that the script starts do not end: {first} at first, {last} in the end",
        (Evidence("more of them", 60 * (last - first) / seconds, "1/min"),),
        "Each keeps its stack until it ends, and the system allows only so many: then starting one "
        "more is an error",
        (
            Fix(
                "make a pool once, before the loop, or end it where it is made (with "
                "ThreadPoolExecutor(…) as pool: …, pool.shutdown()); let a thread's function "
                "return, and join() it"
            ),
        ),
        "likely",
    )


THREADS: Final = Rule((_THREADS_KIND,), _find_threads, each_rank=True)
