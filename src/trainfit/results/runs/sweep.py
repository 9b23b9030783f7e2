"""The result of ``trainfit sweep``: each plan or simulation of it as a row, and what is best."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from trainfit.results.files.documents import Format, ResultFile

FORMAT: Final = "trainfit-sweep"
VERSION: Final = 1
_REMAKE: Final = "re-create it with `trainfit sweep --output`"
_WANTED: Final = "give a file that `trainfit sweep --output` wrote"

#: The verbs that a sweep can run.
SweepVerb = Literal["plan", "simulate"]


@dataclasses.dataclass(frozen=True)
class SweepCell:
    """One command with one set of values on one machine, and what its run found.

    ``gpu`` is the machine as it is named ("8x H100 SXM"), of ``gpus`` GPUs in all. ``result`` is
    the file of the run in the sweep's folder; where there is none, ``failure`` says why. Figures
    are at ``batch_size``: the recommended one, or that of the command where the sweep sets it.
    ``device_bytes`` is of one GPU, ``samples_per_s`` of all together (predicted). ``run_s`` and
    ``cost`` are of the whole run, ``price_per_hour`` is of all GPUs; ``None`` is not known.
    ``on_front``: no other cell that fits is at least as good in time, cost and memory and better in
    one of them.
    """

    command: str
    values: Mapping[str, str]
    gpu: str
    gpus: int
    result: str = ""
    failure: str = ""
    fits: bool | None = None
    batch_size: int | None = None
    device_bytes: int | None = None
    memory_bytes: int | None = None
    step_s: float | None = None
    samples_per_s: float | None = None
    run_s: float | None = None
    price_per_hour: float | None = None
    samples_per_unit: float | None = None
    cost: float | None = None
    on_front: bool = False
    launch: str = ""


@dataclasses.dataclass(frozen=True)
class SweepResult(ResultFile):
    """A sweep: its cells, the best first, then those that do not fit, then those that failed.

    ``cheapest``, ``fastest`` and ``best_per_unit`` are places in ``cells`` (``None``: no price, or
    no time, is known of any). ``samples`` are those of the whole run where the user gave them; else
    each cell's run is an epoch of its data set. ``interrupted``: cells were left out.
    """

    FILE: ClassVar = Format(FORMAT, VERSION, _REMAKE, _WANTED)
    METRICS: ClassVar = {
        "cells": "commands with values on machines",
        "fitting_cells": "cells of them that fit",
        "failed_cells": "cells of them without a result",
        "fastest_samples_per_s": "samples a second of the fastest cell, predicted",
    }

    sweep: str
    verb: SweepVerb
    folder: str
    cells: tuple[SweepCell, ...]
    currency: str = ""
    samples: int | None = None
    cheapest: int | None = None
    fastest: int | None = None
    best_per_unit: int | None = None
    interrupted: bool = False
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Does any cell fit?"""
        return any(cell.fits for cell in self.cells)

    def quantities(self) -> Mapping[str, float | None]:
        """Quantities of :class:`Metered`."""
        fastest = None if self.fastest is None else self.cells[self.fastest]
        return {
            "cells": len(self.cells),
            "fitting_cells": sum(bool(cell.fits) for cell in self.cells),
            "failed_cells": sum(bool(cell.failure) for cell in self.cells),
            "fastest_samples_per_s": None if fastest is None else fastest.samples_per_s,
        }
