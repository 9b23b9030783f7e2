"""What grows: RAM of the run's processes, files in memory and of temporary folders, steps."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainfit.findings import fixes
from trainfit.findings.habits import CYCLED, KEPT_BATCHES, KEPT_GRAPHS
from trainfit.results.findings import Evidence, Finding, Fix, Place, Unknown
from trainfit.results.runs.tables import (
    SHARED_MEMORY,
    TEMPORARY,
    Table,
)
from trainfit.results.runs.watched import FIGURES, GRAPH, Event, GrowingVariable, Holds
from trainfit.results.text import count, duration, size
from trainfit.watch import checks, thresholds
from trainfit.watch.measures import robust_slope
from trainfit.watch.rules.rule import Rule
from trainfit.watch.view import RankView, RunView, known

#: Seconds after which growth is no start any more: pools and caches have filled.
_LEAST_S: Final = 20
#: Bytes that must have come, and of what is held. Where graphs of past steps are seen to be kept,
#: which nobody means to, less: steps are slow on a machine that others use.
LEAST_BYTES: Final = 8 * thresholds.GROWTH_BYTES
_LEAST_OF_GRAPHS: Final = thresholds.GROWTH_BYTES
#: Samples from which growth is told whose variable is seen to grow: on a full machine the sampler
#: reads every few seconds. Of graphs, each of the pairs of four must grow.
_FEW_SAMPLES: Final = 5
_SAMPLES_OF_GRAPHS: Final = 4
#: Seconds within which a run mostly still goes on: what is full by then ends it.
_SOON_S: Final = 24 * 3600
#: Seconds of growth without a cause from which nothing else is expected.
_LASTING_S: Final = 120
#: Times the growth that was seen, within which it fills the RAM as surely.
_TIMES_SEEN: Final = 10.0
#: … and what files that were counted some time ago must have come to.
_COUNTED: Final = 1 / 3
#: Of files that were told of by name: bytes and number at least, and how many times the time until
#: they should be told of again may pass without that.
_LEAST_OF_FILES: Final = 4 * thresholds.GROWTH_BYTES
_FILES: Final = 10
_LATE: Final = 3.0
#: Bytes that a variable must gain in each step for its RAM to be looked at sooner.
_LEAST_A_STEP: Final = 1024
#: Of a growth, what a part of it must be to be the cause.
MOSTLY: Final = 0.5


def kept_tensors(view: RankView) -> GrowingVariable | None:
    """The variable that keeps the tensors of past steps; ``None``: none was seen."""
    variables = view.header.growing
    return next(
        (variable for variable in variables if variable.holds and variable.kind != "tensor"), None
    )


def _kept_by(view: RankView, role: int) -> GrowingVariable | None:
    """What keeps the RAM of the training process (0), or of a worker (1)."""
    if role == 0 and (variable := kept_tensors(view)) is not None:
        return variable
    every = view.header.growing if role == 0 else view.header.worker_growing
    kinds = (_CACHE, FIGURES)
    caches = [
        growing_variable
        for growing_variable in every
        if growing_variable.kind in kinds or (role and growing_variable.holds)
    ]
    return max(caches, key=lambda each: each.last_size, default=None)


def _explains(view: RankView, role: int, per_step: float) -> GrowingVariable | None:
    """The variable whose new entries come to most of these bytes a step, of the training process
    (0) or of a worker (1)."""
    every = view.header.growing if role == 0 else view.header.worker_growing
    variable = max(every, key=lambda each: each.bytes_per_step, default=None)
    return (
        variable if variable is not None and variable.bytes_per_step >= MOSTLY * per_step else None
    )


#: A function's results that ``functools.lru_cache`` keeps.
_CACHE: Final = "cache"


def keeps(variable: GrowingVariable) -> str:
    """What it does, in words: "`history` (train.py:41) keeps each step's tensors"."""
    if variable.kind == _CACHE:
        return f"`{variable.name}` keeps all that it has returned"
    if variable.kind == FIGURES:
        return f"{variable.name} keeps each figure that is not closed"
    if variable.kind == GRAPH:
        return f"`{variable.name}` goes from step to step with its autograd graph"
    return f"`{variable.name}` keeps each step's {_HELD[variable.holds]}"


_HELD: Final[dict[Holds, str]] = {
    "graphs": "autograd graph",
    "tensors": "tensors",
    "": "Python objects",
}


def what_keeps(variable: GrowingVariable) -> tuple[str, Fix]:
    """Cause and fix."""
    if variable.kind == FIGURES:
        return (
            f"{variable.last_size} figures were open at the last look, which {variable.name} keeps "
            "until they are closed",
            Fix(_CLOSE, line="plt.close(fig)"),
        )
    if variable.kind == GRAPH:
        return (
            f"the graph of `{variable.name}` goes back through {variable.last_size} steps: a "
            "backward pass goes through all of them, and none of what they keep is freed",
            Fix(_DETACH),
        )
    grown = f"`{variable.name}` grew from {variable.first_size} to {variable.last_size} "
    grown += f"{'additions' if variable.kind == 'sum' else 'entries'} in {variable.steps} steps"
    if not variable.holds and variable.item_bytes:
        return f"{grown}, of {size(variable.item_bytes)} each", Fix(_KEEP_LESS)
    habit = KEPT_GRAPHS if variable.holds == "graphs" else KEPT_BATCHES
    habit = CYCLED if variable.kind == "cycle" else habit
    return f"{grown}; {habit.cause}", Fix(habit.action)


_DETACH: Final = (
    "detach() what one step gives to the next, each tensor of it, before it uses it (or every N "
    "steps: truncated backpropagation); then backward() needs no retain_graph=True"
)
_KEEP_LESS: Final = (
    "keep what is read later: a mean, the last ones (collections.deque(maxlen=1000)), or write "
    "them to a file every few hundred steps; numbers in a NumPy array need a quarter of it"
)
_CLOSE: Final = (
    "close each figure when it is saved, or make one before the loop and draw into it after "
    "ax.clear(); matplotlib.figure.Figure() makes one that pyplot does not know"
)


# ---
# RAM of the training process, or of the workers.


def _find_ram_growth(run: RunView) -> Iterator[Finding | Unknown]:
    view = run.judged
    if not len(view.steps):
        return
    main = list(_of_processes(view, 0, "the training process", view.main_process))
    if not any(isinstance(finding, Finding) for finding in main):
        main = list(_kept_graphs(view)) or list(_open_figures(view)) or main
    yield from main
    if not any(True for _ in _find_processes(run)):  # the RAM of ever more of them is no cache
        yield from _of_processes(view, 1, "the workers", view.workers)


#: Steps in which a variable has kept graphs of nearly each, from which that is no window of some.
_LONG_KEPT: Final = 100
#: … and of outputs of layers, of which a window is kept more rarely than of losses: steps, bytes.
_LONG_FOR_OUTPUTS: Final = 40
_OUTPUTS: Final = 1 << 16


def _kept_graphs(view: RankView) -> Iterator[Finding]:
    """The finding on kept graphs that are small, or whose run is too short for RAM to tell."""
    variable = kept_tensors(view)
    if variable is None or variable.holds != "graphs":
        return
    are_outputs = (variable.item_bytes or 0) >= _OUTPUTS
    if variable.steps < (_LONG_FOR_OUTPUTS if are_outputs else _LONG_KEPT):
        return
    if variable.last_size - variable.first_size < MOSTLY * variable.steps:
        return
    yield _kept(variable)


def _kept(variable: GrowingVariable) -> Finding:
    cause, fix = what_keeps(variable)
    return Finding(
        "ram_growth",
        "warning",
        f"{keeps(variable)}, for as long as the run goes on",
        (Evidence("kept at the last look", float(variable.last_size)),),
        cause,
        (fix,),
        "certain",
        place=Place.parse(variable.place),
    )


#: Open figures of which Matplotlib itself warns (its ``figure.max_open_warning``).
_MOST_FIGURES: Final = 20


def _open_figures(view: RankView) -> Iterator[Finding]:
    """The finding on figures that are still small."""
    for variable in view.header.growing:
        if variable.kind == FIGURES and variable.last_size > _MOST_FIGURES:
            yield _kept(variable)


def _of_processes(view: RankView, role: int, who: str, table: Table) -> Iterator[Finding | Unknown]:
    at, held = _held(table)
    variable = _kept_by(view, role)
    keeps_graphs = variable is not None and variable.holds == "graphs"
    few = _SAMPLES_OF_GRAPHS if keeps_graphs else _FEW_SAMPLES
    is_seen = variable is not None or _explains(view, role, _LEAST_A_STEP) is not None
    slope = robust_slope(at, held, few if is_seen else 8)
    kinds = _kinds(view, role)
    if slope is None or slope[1] <= 0 or not view.header.ram_bytes:
        return
    seconds = float(at[-1] - at[0])
    # Files that are mapped are no memory that a process keeps: the kernel takes it back.
    rate = slope[0] - max(0.0, kinds.get("files", 0.0))
    grown = rate * seconds
    least = _LEAST_OF_GRAPHS if keeps_graphs else LEAST_BYTES
    if grown < max(least, thresholds.RAM_LEFT * float(np.median(held))):
        return
    step_s = view.seconds / len(view.steps)
    most = None if keeps_graphs else _explains(view, role, rate * step_s)
    if most is not None and (variable is None or most.bytes_per_step > variable.bytes_per_step):
        variable = most
    if seconds < _LEAST_S and variable is None:
        reason = f"RAM of {who} grew by {size(grown)} in {duration(seconds)}: too short to tell"
        yield Unknown("ram_growth", reason, f"{_LEAST_S} s of training")
        return
    if not goes_on(at, held, slope[0]):
        return
    left = known(view.machine["ram_available_bytes"])
    evidence = [Evidence("growth", rate * 60, "bytes/min")]
    evidence += [
        Evidence(f"of it {name}", part * 60, "bytes/min")
        for name, part in kinds.items()
        if part > 0.1 * rate
    ]
    full_s = float(left[-1]) / rate if len(left) else math.inf
    if len(left):
        evidence.append(Evidence("RAM used up in", full_s, "s"))
    # A data set's cache may be full when all was read once.
    of_data = variable is not None and (role == 1 or variable.of_data or variable.kind == _CACHE)
    sure = (
        (variable is not None and not of_data)
        or (role == 0 and view.header.collector_off)
        or seconds >= _LASTING_S
        or _outgrows(view, full_s, seconds)
        or _outgrows_ram(view, variable)
    )
    title = f"RAM of {who} grows by {size(rate * step_s)} a step"
    if variable is not None and of_data:
        cause, fix = _what_a_data_set_keeps(variable, role), _WHO_KEEPS[1][1]
        title += f": {keeps(variable).replace('each step', 'each batch')}"
    elif variable is not None:
        cause, fix = what_keeps(variable)
        title += f": {keeps(variable)}"
    elif role == 0 and view.header.collector_off:
        cause, fix = _CYCLES
        title += ": gc.disable() is in effect"
    else:
        cause, fix = _WHO_KEEPS[role]
    at_line = view.header.collector_off if role == 0 and variable is None else ""
    yield Finding(
        "ram_growth",
        "critical" if sure and full_s < _SOON_S else "warning",
        title,
        tuple(evidence),
        cause,
        (fix,),
        "certain" if variable is not None else "likely",
        place=Place.parse(at_line if variable is None else variable.place),
    )


#: Where the script has switched the garbage collector off.
_CYCLES: Final = (
    "objects that refer to each other in a circle (an exception with its frames, an object that "
    "knows its owner) are freed by the garbage collector only, which is off",
    Fix("leave out gc.disable(), or call gc.collect() every few hundred steps"),
)


def _what_a_data_set_keeps(variable: GrowingVariable, role: int) -> str:
    """A clause on a variable that grows in a worker, or in what makes the batches itself."""
    many, name = f"{variable.first_size} to {variable.last_size} entries", f"`{variable.name}`"
    if role:
        return (
            f"{name} grew from {many} in {variable.steps} batches of a worker, and each worker has "
            "one of its own"
        )
    return f"{name} grew from {many} in {variable.steps} steps"


def _outgrows(view: RankView, full_s: float, seconds: float) -> bool:
    """Is the RAM full soon, and long before the data set has been read once? A cache that holds the
    data set would level off with its first epoch."""
    loader = checks.training_loader(view.header)
    if loader is None or loader.batches is None or full_s > _TIMES_SEEN * seconds:
        return False
    left = loader.batches - len(view.record.steps)
    return left * view.seconds / len(view.steps) > full_s


def _outgrows_ram(view: RankView, variable: GrowingVariable | None) -> bool:
    """Would what is kept of all samples of the data set be more than the RAM that is left?"""
    loader, left = checks.training_loader(view.header), known(view.machine["ram_available_bytes"])
    if variable is None or loader is None or not len(left):
        return False
    samples = (loader.batches or 0) * (loader.batch_size or 1)
    return (variable.item_bytes or 0) * samples > float(left.max())


#: Cause and fix where nothing tells what it is, of the training process and of workers.
_WHO_KEEPS: Final = (
    (
        f"something keeps what past steps made: {KEPT_GRAPHS.cause}; or batches, outputs, caches",
        Fix(f"{KEPT_GRAPHS.action}; look for lists, caches and hooks that grow"),
    ),
    (
        "the data set keeps what it has read in each worker: a cache, open files, lists that grow",
        Fix(
            "limit the cache (functools.lru_cache(maxsize=…)), and close what was opened; "
            f"{fixes.LISTS}"
        ),
    ),
)


def _held(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Times, and bytes of all these processes."""
    table = table[table["rss_bytes"] >= 0]
    times, group = np.unique(table["time_s"], return_inverse=True)
    return times, np.bincount(group, table["rss_bytes"], minlength=len(times))


def _kinds(view: RankView, role: int) -> dict[str, float]:
    """Bytes a second of each kind of memory, from the first to the last look; nothing: fewer than
    two looks."""
    table = view.memory[view.memory["role"] == role]
    times, group = np.unique(table["time_s"], return_inverse=True)
    if len(times) < 2:
        return {}
    kinds = {}
    for name, column in (
        ("private (tensors, Python objects)", "anonymous_bytes"),
        ("shared with workers (their batches)", "shared_bytes"),
        ("files", "file_bytes"),
    ):
        held = np.bincount(group, np.maximum(0, table[column]), len(times))
        kinds[name] = float(held[-1] - held[0]) / float(times[-1] - times[0])
    return kinds


def goes_on(
    at: NDArray[np.generic], held: NDArray[np.generic], slope: float, least: float = 0.5
) -> bool:
    """Does the second half grow by half as much as the whole? What levels off is a cache."""
    half = len(at) // 2
    later = robust_slope(at[half:], held[half:])
    if later is None:  # too few for a half
        return float(held[-1]) > float(held[half])
    return later[1] > 0 and later[0] > least * slope


RAM_GROWTH: Final = Rule(("ram_growth",), _find_ram_growth, each_rank=True)


# ---
# Folders that fill: /dev/shm, and that of temporary files.


def _find_files(run: RunView) -> Iterator[Finding | Unknown]:
    view = run.judged
    if len(view.steps):
        machine = view.machine[view.machine["shm_used_bytes"] >= 0]
        columns = machine["time_s"], machine["shm_used_bytes"], machine["shm_free_bytes"]
        yield from _filling(view, SHARED_MEMORY, *columns)
        first, last = view.window
        every = view.run.folders
        rows = every[(every["folder"] == TEMPORARY) & (every["time_s"] >= first)]
        rows = rows[rows["time_s"] <= last]
        yield from _filling(view, TEMPORARY, rows["time_s"], rows["used_bytes"], rows["free_bytes"])


def _filling(
    view: RankView,
    folder: int,
    at: NDArray[np.generic],
    used: NDArray[np.generic],
    free: NDArray[np.generic],
) -> Iterator[Finding | Unknown]:
    kind, name = _FOLDERS[folder]
    if not len(at):
        return
    rate, files = _grows_by(at, used), _new_files(view, folder)
    grown = rate * float(at[-1] - at[0])
    counted = files.values["bytes"] if files is not None else 0.0
    of_files = grown >= LEAST_BYTES and counted >= _COUNTED * grown
    if not of_files and (by_files := _files_grow_by(view, folder)):
        rate, of_files = by_files, True
    batches = folder == SHARED_MEMORY and not of_files and _shares(view) >= MOSTLY * rate
    if not of_files and (not batches or grown < LEAST_BYTES):
        return  # other programs, or checkpoints that another file system has
    if batches and kept_tensors(view) is not None:
        return  # ram_growth says it
    full_s = float(free[-1]) / rate
    evidence = [
        Evidence("growth", rate * 60, "bytes/min"),
        Evidence("full in", full_s, "s"),
    ]
    place = _writes_at(view) if of_files else None
    if files is not None and of_files:
        number = int(files.values["files"])
        title = f"{name} fills by {size(rate * 60)}/min: {count(number, 'file')} {files.text}"
        evidence.append(Evidence("new files", float(number)))
        cause, fix = "files are written there that nobody deletes", Fix(_DELETE)
    else:
        title = f"{name} fills by {size(rate * 60)}/min: batches of workers are kept"
        cause, fix = KEPT_BATCHES.cause, Fix(KEPT_BATCHES.action)
    yield Finding(
        kind,
        "critical" if full_s < _SOON_S else "warning",
        title,
        tuple(evidence),
        cause,
        (fix,),
        "certain" if of_files else "likely",
        place=place,
    )


_FOLDERS: Final = {
    SHARED_MEMORY: ("shm_growth", "/dev/shm"),
    TEMPORARY: ("temporary_growth", "The folder of temporary files"),
}
_DELETE: Final = (
    "delete each file when it is done with (tempfile.TemporaryFile does it by itself, a block of "
    "multiprocessing.shared_memory needs close() and unlink()), or write to one file again"
)


def _grows_by(at: NDArray[np.generic], used: NDArray[np.generic]) -> float:
    """Bytes a second by which a file system fills, for good; 0: it does not."""
    slope = robust_slope(at, used)
    if slope is None or slope[1] <= 0 or not goes_on(at, used, slope[0]):
        return 0.0
    return slope[0]


def _all_new_files(view: RankView, folder: int) -> list[Event]:
    """What the sampler said of new files there."""
    return [
        event
        for event in view.run.sampler_events
        if event.kind == "new_files" and int(event.values.get("folder", -1)) == folder
    ]


def _new_files(view: RankView, folder: int) -> Event | None:
    """The last thing the sampler said of new files there; ``None``: nothing."""
    return next(reversed(_all_new_files(view, folder)), None)


def _files_grow_by(view: RankView, folder: int) -> float:
    """Bytes a second by which files of one name grow, whatever else comes and goes on the file
    system; 0: there are few, or they were told of once, or not for long."""
    first, last = view.window
    files = [file for file in _all_new_files(view, folder) if first <= file.time_s <= last]
    events = [file for file in files if file.text == files[-1].text]
    if len(events) < 2 or events[-1].values["bytes"] < _LEAST_OF_FILES:
        return 0.0
    grown = events[-1].values["bytes"] - events[0].values["bytes"]
    rate = grown / max(1.0, events[-1].time_s - events[0].time_s)
    if events[-1].values["files"] < _FILES or rate <= 0:
        return 0.0
    # It is told again where they are half as large again.
    due_s = 0.5 * events[-1].values["bytes"] / rate
    return rate if last - events[-1].time_s <= _LATE * due_s else 0.0


def _shares(view: RankView) -> float:
    """Bytes a second by which the training process maps more of /dev/shm."""
    return _kinds(view, 0).get("shared with workers (their batches)", 0.0)


def _writes_at(view: RankView) -> Place | None:
    """The line of the script that was found writing most often; ``None``: none was."""
    lines = [line for line in view.header.other_code.lines if line.waits_for == "disk"]
    most = max(lines, key=lambda each: each.count, default=None)
    return None if most is None else Place.parse(most.place)


FILES: Final = Rule(("shm_growth", "temporary_growth"), _find_files, each_rank=True)

# ---
# Processes that the script starts, and that do not end.


_PROCESSES_KIND: Final = "process_growth"
#: Processes that must have come, and that are there in the end; parts of the run in each of which
#: there must be more of them: a pool is full some time.
_MORE_PROCESSES: Final = 4
_PARTS: Final = 4


def _find_processes(run: RunView) -> Iterator[Finding]:
    view = run.judged
    rows = view.children
    times, at = np.unique(rows["time_s"], return_inverse=True)
    if len(times) < 2 * _PARTS or not len(view.steps):
        return
    counts = np.bincount(at)
    parts = [float(np.median(part)) for part in np.array_split(counts, _PARTS)]
    grows = all(later > before for before, later in itertools.pairwise(parts))
    if not grows or counts[-1] - parts[0] < _MORE_PROCESSES:
        return
    last = rows[rows["time_s"] == times[-1]]
    place, held = _started_at(view, last), float(np.sum(np.maximum(0, last["rss_bytes"])))
    seconds = float(times[-1] - times[0])
    yield Finding(
        _PROCESSES_KIND,
        "critical" if _takes_ram(view, seconds, held * (1 - parts[0] / counts[-1])) else "warning",
        f"Processes that the script starts do not end: {parts[0]:.0f} at first, {counts[-1]} in "
        "the end",
        (
            Evidence("more of them", 60 * (counts[-1] - parts[0]) / seconds, "1/min"),
            Evidence("their RAM (pages that they share count for each)", held, "bytes"),
        ),
        "Each keeps its memory and its place in the system's table of processes until it ends",
        (
            Fix(
                "start them once, before the loop (a Manager, a pool, a DataLoader with "
                "persistent_workers), or end each when it is done with: a with block, close() and "
                "join(), Manager().shutdown(), Popen.wait()"
            ),
        ),
        "certain" if place is not None else "likely",
        place=place,
    )


def _takes_ram(view: RankView, seconds: float, grown: float) -> bool:
    """Will the RAM be full soon, by what has gone of it while these processes have come? They share
    pages: what has gone is a part of what each seems to have."""
    left = known(view.machine["ram_available_bytes"])
    gone = float(left[0] - left[-1]) if len(left) > 1 else 0.0
    if gone < max(LEAST_BYTES, _SHARED * grown):
        return False
    return float(left[-1]) * seconds / gone < _SOON_S


#: Of the RSS of processes that were forked off a training, what may be pages of their own.
_SHARED: Final = 0.1


def _started_at(view: RankView, alive: Table) -> Place | None:
    """The line that started most of these processes; ``None``: it was not seen."""
    pids = {float(each) for each in alive["pid"]}
    events = [event for event in view.record.events if event.kind in ("child", "program")]
    lines = Counter(event.text for event in events if event.values["pid"] in pids)
    line, number = next(iter(lines.most_common(1)), ("", 0))
    return Place.parse(line) if number >= _MORE_PROCESSES else None


PROCESSES: Final = Rule((_PROCESSES_KIND,), _find_processes, each_rank=True)

RULES: Final = (RAM_GROWTH, FILES, PROCESSES)
