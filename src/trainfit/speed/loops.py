"""Lines of a script that run once for each sample: a loop over a batch on the GPU, whose operators
are too small for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.findings import Evidence, Finding, Fix, Place
from trainfit.results.runs.recording import PHASES, Recording
from trainfit.results.text import percent

#: How often a line runs in a step, and what share of the step's operators such lines have.
_OFTEN: Final = 128
_SHARE: Final = 0.5
#: Where data is prepared, outside of the model.
_BEFORE_BACKWARD: Final = tuple(map(PHASES.index, ("setup", "input", "forward")))
#: Lines that are named.
_NAMED: Final = 3


def loops_on_gpu(recording: Recording) -> Iterator[Finding]:
    """Lines that make most of a step's operators, one sample after another, before the model."""
    step = recording.steps - 1
    if step < 1:
        return
    operators = recording.alloc_op
    made_by = np.maximum(operators, 0)
    modules = recording.op_module[made_by].tolist()
    known = (operators >= 0) & (recording.alloc_line >= 0)
    of_step = known & (recording.op_step[made_by] == step)
    outside = np.array([module < 0 or not recording.strings[module] for module in modules], bool)
    of_data = of_step & outside & np.isin(recording.op_phase[made_by], _BEFORE_BACKWARD)
    runs = Counter(
        zip(
            recording.alloc_line[of_data].tolist(),
            recording.op_name[operators[of_data]].tolist(),
            strict=True,
        )
    )
    lines: Counter[int] = Counter()
    for (line, _), times in runs.items():
        if times >= _OFTEN:
            lines[line] += times
    total = int(np.count_nonzero(recording.op_step == step))
    made = lines.total()
    if not total or made < _SHARE * total:
        return
    places = [Place.parse(recording.strings[line]) for line, _ in lines.most_common(_NAMED)]
    yield Finding(
        "loop_on_gpu",
        "info",
        f"{percent(made / total)} of a step's {total:,} operators are of lines that run hundreds "
        f"of times in it: {', '.join(map(str, places))}",
        (Evidence("operators", f"{made:,} of {total:,}"),),
        "a loop over samples on the GPU: each operator is a launch of a few microseconds for one "
        "sample, however small",
        (
            Fix(
                "work on the whole batch at once (a random number for each sample, torch.where for "
                "conditions, torch.vmap)"
            ),
            Fix("or in the data set, by the DataLoader's workers, before it is moved to the GPU"),
        ),
        place=places[0],
    )
