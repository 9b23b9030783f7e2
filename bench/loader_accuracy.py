"""`trainfit loader` against exhaustive sweeps of real DataLoaders, and against other rules.

For each workload (_loader_workloads.py) every setting of a grid, workers × prefetch × pin ×
order, is measured for real, in rounds: each setting once a round, in another order each time,
because a machine's speed drifts within seconds; the median counts. Amid the rounds the tool
has its turn: a probe, from which it predicts every setting of the grid, and a tuning, from
which it chooses (any order of batches will do). The consumer takes batches as fast as it can.

Rates are at the cores' full speed, which is watched meanwhile: on a shared host neighbours slow
the cores by up to 1.7 times for seconds (docs/decisions/0028). What was read on slowed cores is
read again a few times, and the reading at the highest speed counts.

    error    predicted rate over measured rate less 1, of all settings without a step. Measured is
             minutes before or after the probe, and the machine drifts by several percent: some
             settings are measured right before and after the probe as well, and by what these
             differ from the sweep's, all of the workload's are corrected (docs/decisions/0036).
             --json has the errors without that, too
    regret   how much slower the chosen setting is than the best. The choices and the sweep's
             best three are measured once more for it, in turns: the best by every other turn,
             its rate by the turns between, and the other way round
    time     of tuning, confirming runs too, over that of an exhaustive sweep: each setting
             of the full grid measured once, by runs as long as ours

Beside it PyTorch's default. Pinning is
emulated where there is no GPU (trainfit.loader.measure.running).

All of it takes hours: name workloads with --only, take a part of the grid (--workers,
--prefetch), keep what was read with --save, and lay several files together with --read, which
measures nothing.

    python bench/loader_accuracy.py [--quick] [--only NAME ...] [--save FILE] [--json]
    python bench/loader_accuracy.py --read FILE ... [--json]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _loader_figures as found
import torch
from _bench import finish, leave, parser, say, table
from _loader_figures import Study, ToolChoice
from _loader_sweep import (
    PREFETCH,
    QUICK_PREFETCH,
    QUICK_WORKERS,
    WORKERS,
    LoaderStudy,
    SweepPlan,
    grid,
    studied,
)
from _loader_workloads import BY_NAME, CASES, DATA, NotInstalledError

from trainfit.hardware.machine.core_speed import CoreSpeeds
from trainfit.hardware.machine.survey import survey
from trainfit.hardware.machine.system import System
from trainfit.loader.measure.machine_limits import loader_machine
from trainfit.loader.measure.workload import Workload
from trainfit.results.dataloader import LoaderMachine, LoaderSettings
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.spec import TuningSpec

QUICK = ("jpeg_augment", "lock_bound", "heavy_tail")
PROBE_S, QUICK_PROBE_S = 20.0, 5.0


class Trainfit:
    """The tool under test, by its Python API."""

    def __init__(self, machine: LoaderMachine, seconds: float, run_s: float) -> None:
        self._machine, self._seconds, self._run_s = machine, seconds, run_s

    def probe(self, workload: Workload, watch: CoreSpeeds) -> Any:
        from trainfit.loader.probe import probe_workload

        measured = probe_workload(workload, self._machine, self._seconds, watch=watch)
        return _Probed(measured, self._run_s)

    def choose(
        self, workload: Workload, consumer: Consumer, watch: CoreSpeeds
    ) -> tuple[ToolChoice, Any]:
        from trainfit.loader.local_tuning import tune

        source = "as fast as it can" if not consumer.step_s else "given"
        began = time.monotonic()
        result = tune(
            workload,
            self._machine,
            TuningSpec(
                dataclasses.replace(consumer, source=source),
                seconds=self._seconds,
                any_order=True,  # the grid has both orders
            ),
            watch=watch,
        )
        seconds = time.monotonic() - began
        note = f"{result.verdict}: limited by {result.limit}"
        return ToolChoice(found.OURS, result.recommended, seconds, note), dataclasses.asdict(result)


class _Probed:
    def __init__(self, measured: Any, run_s: float) -> None:
        self._measured, self._run_s = measured, run_s
        self.seconds: float = measured.probe.seconds
        self.about = dataclasses.asdict(measured.probe)

    def batches_per_s(self, settings: LoaderSettings, consumer: Consumer) -> float:
        rate: float = self._measured.predict(settings, consumer, self._run_s).batches_per_s
        return rate


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.read:
        studies = [study for file in options.read for study in found.load(file)]
        goal = found.GOALS["workloads"]
        return report(studies, goal, options.json)
    # That a grid goes beyond the number of CPUs is its purpose.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    names = options.only or (QUICK if options.quick else [case.name for case in CASES])
    about = {"cpus": len(os.sched_getaffinity(0)), "torch": torch.__version__, "began": time.time()}
    benches, left_out = [], {}
    for name in names:
        try:
            BY_NAME[name].dataset(options.files)
        except NotInstalledError as error:
            left_out[name] = str(error)
            say(f"{name} is left out: {error}")
            continue
        benches.append(bench_of(name, options))

    def keep(studies: Sequence[Study]) -> None:
        if options.save is not None:
            found.save(options.save, studies, {**about, "left_out": left_out})

    target = min(int(found.GOALS["workloads"]), len(names))
    return report(studied(benches, keep), target, options.json, left_out)


def bench_of(name: str, options: argparse.Namespace) -> LoaderStudy:
    """The study of one workload, as the options say."""
    plan = SweepPlan(
        grid(options.workers, options.prefetch),
        options.seconds,
        options.rounds,
        options.final_rounds,
        options.repeats,
    )
    probe_s = QUICK_PROBE_S if options.quick else PROBE_S
    tool = Trainfit(loader_machine(survey(System())), probe_s, options.seconds)
    return LoaderStudy(BY_NAME[name], options.files, plan, tool, say)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__, quick="three workloads, a small grid")
    made.add_argument("--only", nargs="+", choices=list(BY_NAME), metavar="NAME", default=[])
    made.add_argument("--files", type=Path, default=DATA, help=f"workloads' files ({DATA})")
    made.add_argument("--save", type=Path, help="keep all readings here, as JSON")
    made.add_argument("--read", type=Path, nargs="+", help="figures of kept readings alone")
    made.add_argument("--seconds", type=float, help="counted seconds of a run (2)")
    made.add_argument("--rounds", type=int, help="of the sweep (3)")
    made.add_argument("--final-rounds", type=int, help="of choices and best settings (5)")
    made.add_argument("--workers", type=int, nargs="+", help="of the grid (0 1 2 3 4 6 8)")
    made.add_argument("--prefetch", type=int, nargs="+", help="of the grid (1 2 4 8)")
    made.add_argument("--repeats", type=int, help="of what ran on slowed cores, at most (2)")
    options = made.parse_args(argv)
    for name, values in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.quick])
    if min(options.workers) < 0 or min(options.prefetch) < 1:
        leave("--workers are 0 or more, --prefetch 1 or more")
    if options.seconds <= 0 or options.rounds < 1 or options.final_rounds < 1:
        leave("--seconds, --rounds and --final-rounds are above 0")
    for file in options.read or ():
        if not file.is_file():
            leave(f"{file}: no such file; give what --save wrote")
    return options


#: By option: of the whole run, and of --quick.
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "seconds": (2.0, 0.4),
    "rounds": (3, 2),
    "final_rounds": (5, 2),
    "repeats": (2, 0),
    "workers": (WORKERS, QUICK_WORKERS),
    "prefetch": (PREFETCH, QUICK_PREFETCH),
}


# What is printed ---------------------------------------------------------------------------------


def report(
    studies: Sequence[Study], wanted: int, as_json: bool, left_out: dict[str, str] | None = None
) -> int:
    details = found.details(studies)
    for name, reason in (left_out or {}).items():
        say(f"{name}: {reason}")
    rows = []
    for row in details["studies"]:
        errors = (row[f"{each}_percent"] for each in ("median_error", "p90_error", "bias", "drift"))
        shown = [f"{error:.1f}%" for error in errors]
        rows.append((row["workload"], *shown, "best", None, None, words(row["best"])))
        for choice in row["choices"]:
            regret = choice["regret_percent"]
            lost = None if regret is None else f"{regret:.1f}%"
            chosen = words(choice["settings"]) if choice["settings"] else choice["note"]
            rows.append(("", "", "", "", "", choice["who"], lost, choice["seconds"], chosen))
    heads = ("workload", "error", "p90", "bias", "drift", "who", "regret", "seconds", "chosen")
    document = found.plain({**details, "left_out": left_out or {}})
    return finish(found.figures(studies, wanted), as_json, document, [table(heads, rows)])


def words(settings: LoaderSettings | None) -> str:
    """The settings in short."""
    if settings is None:
        return "nothing"
    if settings.num_workers == 0:
        return "0 workers" + (", pinned" if settings.pin_memory else "")
    parts = [f"{settings.num_workers} × {settings.prefetch_factor}"]
    parts += ["pinned"] if settings.pin_memory else []
    parts += [] if settings.in_order else ["any order"]
    parts += ["persistent"] if settings.persistent_workers else []
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
