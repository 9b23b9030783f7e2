"""What of a simulated run is recorded: the recorder looks at some of short steps only, and the
sampler reads memory, disks and swap twice a second."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from trainfit.results.runs import tables
from trainfit.results.runs.tables import Table
from trainfit.watch.recorder.current_step import Budget

#: Seconds that recording a step in detail costs: median and spread (log) of a CPU in use.
_COST_S: Final = 150e-6
_SPREAD: Final = 0.3
#: Samples of the machine between two that have everything.
_WHOLE_EVERY: Final = 5
_GAUGES: Final = (
    *("ram_used_bytes", "ram_available_bytes", "shm_used_bytes", "shm_free_bytes", "cpu_hz"),
    *("memory_pressure", "io_pressure"),
)
_COUNTERS: Final = (
    *("swap_in_bytes", "swap_out_bytes", "disk_read_bytes", "disk_written_bytes"),
    *("net_received_bytes", "net_sent_bytes"),
)
#: What a light step has of a row.
_LIGHT: Final = frozenset(
    (
        *("step", "end_s", "step_s", "input_s", "samples", "batches", "loss", "flags"),
        *("allocated_bytes", "peak_allocated_bytes", "reserved_bytes", "alloc_retries"),
    )
)
_RARE: Final = tables.EPOCH_START | tables.EVALUATION | tables.CHECKPOINT | tables.STEP_SKIPPED


def lightly(steps: Table, random: np.random.Generator) -> Table:
    """A copy, recorded as the recorder's budget has it."""
    steps = steps.copy()
    budget, light = Budget(), np.zeros(len(steps), bool)
    costs = _COST_S * random.lognormal(0.0, _SPREAD, len(steps))
    for index, row in enumerate(steps):
        began = float(row["end_s"] - row["step_s"])
        light[index] = budget.is_light(began) and not row["flags"] & _RARE
        if not light[index]:
            budget.looked(began, float(costs[index]))
    nothing = tables.empty_rows(tables.STEPS)[0]
    for name in set(steps.dtype.names or ()) - _LIGHT:
        steps[name][light] = nothing[name]
    steps["flags"][light] |= tables.LIGHT
    return steps


def sample_in_turns(machine: Table) -> None:
    """Rows between those that have everything: cores, run queue and quota only."""
    whole = np.arange(len(machine)) % _WHOLE_EVERY == 0
    nothing: Any = tables.empty_rows(tables.MACHINE)[0]
    for name in _COUNTERS:
        told = machine[name] >= 0
        if told.all():
            machine[name][whole] *= _WHOLE_EVERY
    for name in (*_GAUGES, *_COUNTERS):
        machine[name][~whole] = nothing[name]
