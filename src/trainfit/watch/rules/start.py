"""What comes before the first step: the line of the script that most of it goes to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from trainfit.results.findings import Evidence, Finding, Fix, Unknown
from trainfit.results.runs.watched import COLLECTIONS, LATE_S, START_LOOK_S, StartPart
from trainfit.results.text import duration
from trainfit.watch.rules.code_lines import CostlyLine, costliest
from trainfit.watch.rules.rule import Rule
from trainfit.watch.view import RankView, RunView

KIND: Final = "late_start"
#: Of :data:`LATE_S` and more, the part of the run from which they are worth a word.
LATE_SHARE: Final = 0.5
#: Of these seconds, those at one line from which that is named.
_MOST: Final = 1 / 3
#: Of the looks at a line, those in what it calls from which that is named.
_MOSTLY: Final = 0.6

_KEEP: Final = (
    "do it once and keep what comes of it in a file (np.save and np.load(…, mmap_mode='r'), "
    "torch.save, the cache of datasets.map), which the next start reads; or in several processes "
    "(multiprocessing.Pool)"
)
#: What has an own word: of what libraries do there, and of names that a line calls.
_PARTS: Final[dict[StartPart, tuple[str, str]]] = {
    "import": (
        "imports",
        "`python -X importtime -c 'import …'` says which module costs that: import it where it is "
        "used, or only the part that is",
    ),
    "first batch": (
        "waits for the first batch",
        "make samples cheaper, or the batch smaller; workers that are spawned are sent the data "
        "set, which should be small (paths, a memory map)",
    ),
    "torch.compile": (
        "compiles the model",
        "its cache is used where code, shapes and TORCHINDUCTOR_CACHE_DIR stay the same; "
        'mode="default" compiles sooner than "max-autotune", dynamic=True once for all shapes',
    ),
}
_KNOWN: Final[tuple[tuple[re.Pattern[str], str, str], ...]] = (
    (
        re.compile(r"(?:^|\.)(?:cat|concat\w*|append|[vh]stack)$"),
        "joins tensors or tables",
        "in a loop each round copies all so far: append to a Python list, and join that once",
    ),
    (
        re.compile(
            r"from_pretrained$|load_state_dict$|(?:^|\.)torch\.load$|safetensors|torch\.hub"
        ),
        "loads weights",
        "keep them on a local disk, in safetensors, and load them with torch.load(…, mmap=True) or "
        "low_cpu_mem_usage=True",
    ),
    (
        re.compile(r"init_process_group|torch\.distributed\."),
        "waits for the other ranks",
        "see what the slowest of them does before: each waits until all have come",
    ),
    (
        re.compile(r"^subprocess\.|check_output|(?:^|\.)system$"),
        "waits for a program",
        _KEEP,
    ),
)
#: No work of the script's own, which it could keep.
_USUAL: Final = frozenset(("imports", "waits for the first batch", "compiles the model"))


def late_start_s(rank: RankView) -> float | None:
    """Seconds from the command's start to the end of its first step, where they are most of the
    run; of one that was interrupted before that, all of them. ``None``: there is no late start."""
    steps = rank.record.steps
    if not len(steps):
        times = [event.time_s for event in rank.record.events if event.kind == "exception"]
        cut = rank.header.ending == "interrupted" and times and times[-1] >= LATE_S
        return times[-1] if cut else None
    first, end = float(steps["end_s"][0]), float(steps["end_s"][-1])
    return first if first >= max(LATE_S, LATE_SHARE * end) else None


def _find_late_start(run: RunView) -> Iterator[Finding | Unknown]:
    rank = run.judged
    first, line = late_start_s(rank), costliest(rank.header.start_code)
    if first is None or line is None or line.is_several:
        return
    seconds = min(first, line.count * START_LOOK_S)
    if seconds < max(LATE_S, _MOST * first):
        return
    what, fix = _done(line)
    paused = _collected_s(rank)
    if what not in _USUAL and paused >= _COLLECTED * seconds:
        fix = (
            "gc.disable() before it and gc.enable() after it: Python's garbage collector goes "
            f"through all objects over and over while they become more, {duration(paused)} in "
            f"all; {fix}"
        )
    name = line.most.calls
    looks = sum(call.count for call in line.calls if call.calls == name)
    is_it = name and not name.endswith(">") and looks >= _MOSTLY * line.count
    called = f" (`{name}`)" if is_it else ""
    trains = len(rank.record.steps) > 0
    end = float(rank.record.steps["end_s"][-1]) if trains else first
    came = f"The first step came after {duration(first)} of {duration(end)}"
    yield Finding(
        KIND,
        "info" if what in _USUAL else "warning",
        f"{came if trains else f'No training step in {duration(first)}'}: {line}{called} {what} "
        f"for {duration(seconds)}",
        (
            Evidence("before the end of the first step", first, "s"),
            Evidence("of them at this line", seconds, "s"),
            Evidence("the run so far", end, "s"),
        ),
        "The script does this at each start, before it trains",
        (Fix(fix),),
        "likely",
        seconds / end,
        line.place,
    )


#: What ranks meet in.
_MEETS: Final = re.compile(r"init_process_group|torch\.distributed\.")


def held_up_at(run: RunView, waiting: RankView) -> str:
    """Where another rank was that made no step either and does not wait for the others, while
    ``waiting`` does before its first step, as it is added to a sentence; empty: nowhere."""
    for view in run.ranks:
        line = costliest(view.header.start_code)
        if view.rank == waiting.rank or len(view.record.steps) or line is None:
            continue
        seconds = line.count * START_LOOK_S
        if seconds >= LATE_S and not line.is_several and not _MEETS.search(line.most.calls):
            return f"; rank {view.header.rank} was at {line} for {duration(seconds)}"
    return ""


#: Of the seconds at a line, those of Python's garbage collector from which it is to be told.
_COLLECTED: Final = 1 / 3


def _collected_s(rank: RankView) -> float:
    """Seconds of its pauses before the first step."""
    events = (e for e in rank.record.events if e.kind == COLLECTIONS and e.step <= 0)
    return sum(event.seconds or 0.0 for event in events)


def _done(line: CostlyLine) -> tuple[str, str]:
    """What is done at a line, and the fix."""
    part = next((_PARTS[name] for name in _PARTS if line.most.inner == name), None)
    if part is not None:
        return part
    for pattern, what, fix in _KNOWN:
        if any(map(pattern.search, line.names)):
            return what, fix
    if line.most.waits_for == "network":
        return "waits for the network", "download once, before the training, to a local disk"
    if line.most.waits_for == "sleep":
        return "sleeps", "remove the sleep"
    if line.most.over and not line.most.calls:  # Python itself, and nothing that it calls
        whole = "operators on whole tensors or arrays instead of a loop over elements"
        return f"goes over `{line.most.over}` in Python", f"use {whole}; else {_KEEP}"
    return "is busy", _KEEP


START: Final = Rule((KIND,), _find_late_start, each_rank=True)


# ---
# A run that failed before its first step was over: in which part of it.


#: Files of PyTorch that a part of a step is called in, and the part. What is innermost counts.
_STEP_PARTS: Final = (
    ("torch/nn/modules/module.py", "in the forward pass"),
    ("torch/autograd/graph.py", "in the backward pass"),
    ("torch/optim/", "in the optimizer's step"),
    ("torch/utils/data/", "in the making of a batch"),
    ("torch/distributed/", "in a call of torch.distributed"),
    ("importlib/", "in an import"),
)


def failed_part(files: Sequence[str]) -> str:
    """A clause on where a run failed whose first step was not over, by the files of its traceback,
    outermost first: "before the first step was over, in the forward pass"."""
    parts = (said for file in files for path, said in _STEP_PARTS if path in file)
    last = next(reversed(list(parts)), "in the script's own code")
    return f"before the first step was over, {last}"
