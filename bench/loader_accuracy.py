"""`trainfit loader` against exhaustive sweeps of real DataLoaders, and against other rules.

For each workload (loader_workloads.py) every setting of a grid, workers × prefetch × pin ×
order, is measured for real, in rounds: each setting once a round, in another order each time,
because a machine's speed drifts within seconds; the median counts. Amid the rounds the tool
has its turn: a probe, from which it predicts every setting of the grid, and a tuning, from
which it chooses (any order of batches will do). Twice: with a consumer that takes batches as
fast as it can, and with one whose step takes 0.8 of the time between two batches of the sweep's
best setting.

Rates are at the cores' full speed, which is watched meanwhile: on a shared host neighbours slow
the cores by up to 1.7 times for seconds (docs/decisions/0028). What was read on slowed cores is
read again a few times, and the reading at the highest speed counts. --json has the errors of what
the clock said, too.

    error    predicted rate over measured rate less 1, of all settings without a step. Measured is
             minutes before or after the probe, and the machine drifts by several percent: some
             settings are measured right before and after the probe as well, and by what these
             differ from the sweep's, all of the workload's are corrected (docs/decisions/0036).
             --json has the errors without that, too
    regret   how much slower the chosen setting is than the best. The choices and the sweep's
             best three are measured once more for it, in turns: the best by every other turn,
             its rate by the turns between, and the other way round. (The best of several noisy
             medians would be too high; regrets from that are in --json, too)
    time     of tuning, confirming runs too, over that of an exhaustive sweep: each setting
             of the full grid measured once, by runs as long as ours

Beside it: PyTorch's default, rules of thumb, and loadtune if it is installed. Pinning is
emulated where there is no GPU (trainfit.loader.measure.running).

All of it takes hours: name workloads with --only, take a part of the grid (--workers,
--prefetch), keep what was read with --save, and lay several files together with --read, which
measures nothing. --again makes new probes for the sweeps of kept files.

    python bench/loader_accuracy.py [--quick] [--only NAME ...] [--save FILE] [--json]
    python bench/loader_accuracy.py --again FILE ... [--save FILE] [--json]
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

import torch
from _bench import finish

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import _loader_figures as found  # noqa: E402
import _loader_rivals as rivals  # noqa: E402
from _loader_figures import Choice, Study  # noqa: E402
from _loader_sweep import (  # noqa: E402
    PREFETCH,
    QUICK_PREFETCH,
    QUICK_WORKERS,
    WORKERS,
    Bench,
    Plan,
    grid,
    studied,
    to_stderr,
)
from loader_workloads import BY_NAME, CASES, DATA, NotInstalledError  # noqa: E402

from trainfit.hardware.machine.core_speed import CoreSpeeds  # noqa: E402
from trainfit.hardware.machine.survey import survey  # noqa: E402
from trainfit.hardware.machine.system import System  # noqa: E402
from trainfit.loader.measure.machine_limits import loader_machine  # noqa: E402
from trainfit.loader.measure.workload import Workload  # noqa: E402
from trainfit.results.dataloader import LoaderMachine, LoaderSettings  # noqa: E402
from trainfit.results.runs.measurement import Consumer  # noqa: E402
from trainfit.results.runs.spec import TuningSpec  # noqa: E402

QUICK = ("jpeg_augment", "lock_bound", "remote")
#: Steps of a trial of loadtune in --quick (its default is 100).
QUICK_STEPS = 30
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
    ) -> tuple[Choice, Any]:
        from trainfit.loader.tuning import tune

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
        return Choice(found.OURS, result.recommended, seconds, note), dataclasses.asdict(result)


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
        wanted = found.GOALS["workloads"]
        return report(studies, wanted, options.json)
    # That a grid goes beyond the number of CPUs is its purpose.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    if options.again:
        return again(options)
    names = options.only or (QUICK if options.quick else [case.name for case in CASES])
    about = {"cpus": len(os.sched_getaffinity(0)), "torch": torch.__version__, "began": time.time()}
    benches, left_out = [], {}
    for name in names:
        try:
            BY_NAME[name].dataset(options.data)
        except NotInstalledError as error:
            left_out[name] = str(error)
            to_stderr(f"{name} is left out: {error}")
            continue
        benches.append(bench_of(name, options))

    def keep(studies: Sequence[Study]) -> None:
        if options.save is not None:
            found.save(options.save, studies, {**about, "left_out": left_out})

    wanted = min(int(found.GOALS["workloads"]), len(names))
    return report(studied(benches, keep), wanted, options.json, left_out)


def again(options: argparse.Namespace) -> int:
    """New probes for the sweeps that were kept."""
    studies: list[Study] = []
    for study in (each for file in options.again for each in found.load(file)):
        if study.consumer == found.FAST:
            settings = tuple(dict.fromkeys(each.settings for each in study.sweep))
            studies.append(bench_of(study.workload, options, settings).again(study))
            to_stderr(f"{study.workload}: predicted again")
            if options.save is not None:
                found.save(options.save, studies, {"again": list(map(str, options.again))})
    return report(studies, int(found.GOALS["workloads"]), options.json)


def bench_of(
    name: str, options: argparse.Namespace, settings: tuple[LoaderSettings, ...] = ()
) -> Bench:
    """The study of one workload, as the options say; of these settings, if there are any."""
    case = BY_NAME[name]
    plan = Plan(
        settings or grid(options.workers, options.prefetch),
        options.seconds,
        options.rounds,
        options.paced_rounds,
        options.final_rounds,
        options.repeats,
    )
    probe_s = QUICK_PROBE_S if options.quick else PROBE_S
    steps = QUICK_STEPS if options.quick else rivals.STEPS

    def others(step_s: float) -> list[Choice]:
        return [*rivals.rules(), rivals.loadtune(case, options.data, step_s, steps)]

    tool = Trainfit(loader_machine(survey(System())), probe_s, options.seconds)
    return Bench(case, options.data, plan, tool, others, to_stderr)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), metavar="NAME", default=[])
    parser.add_argument("--data", type=Path, default=DATA, help=f"workloads' files ({DATA})")
    parser.add_argument("--save", type=Path, help="keep all readings here, as JSON")
    parser.add_argument("--read", type=Path, nargs="+", help="figures of kept readings alone")
    parser.add_argument("--again", type=Path, nargs="+", help="new probes for kept sweeps")
    parser.add_argument("--seconds", type=float, help="counted seconds of a run (2)")
    parser.add_argument("--rounds", type=int, help="of the sweep (3)")
    parser.add_argument("--paced-rounds", type=int, help="of the paced sweep (1); 0: none")
    parser.add_argument("--final-rounds", type=int, help="of choices and best settings (5)")
    parser.add_argument("--workers", type=int, nargs="+", help="of the grid (0 1 2 3 4 6 8)")
    parser.add_argument("--prefetch", type=int, nargs="+", help="of the grid (1 2 4 8)")
    parser.add_argument("--repeats", type=int, help="of what ran on slowed cores, at most (2)")
    parser.add_argument("--quick", action="store_true", help="three workloads, a small grid")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(argv)
    defaults: dict[str, Any] = {
        "seconds": 2.0,
        "rounds": 3,
        "paced_rounds": 1,
        "final_rounds": 5,
        "repeats": 2,
    }
    defaults |= {"workers": WORKERS, "prefetch": PREFETCH}
    quick: dict[str, Any] = {
        "seconds": 0.4,
        "rounds": 2,
        "paced_rounds": 1,
        "final_rounds": 2,
        "repeats": 0,
    }
    quick |= {"workers": QUICK_WORKERS, "prefetch": QUICK_PREFETCH}
    for name, value in (quick if options.quick else defaults).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if min(options.workers) < 0 or min(options.prefetch) < 1:
        parser.error("--workers are 0 or more, --prefetch 1 or more")
    if options.seconds <= 0 or options.rounds < 1 or options.final_rounds < 1:
        parser.error("--seconds, --rounds and --final-rounds are above 0")
    for file in (*(options.read or ()), *(options.again or ())):
        if not file.is_file():
            parser.error(f"{file}: no such file; give what --save wrote")
    return options


# What is printed ---------------------------------------------------------------------------------


def report(
    studies: Sequence[Study], wanted: int, as_json: bool, left_out: dict[str, str] | None = None
) -> int:
    details = found.details(studies)
    if not as_json:
        for name, reason in (left_out or {}).items():
            print(f"{name}: {reason}")
        print_studies(details["studies"])
        print_choosers(details)
    document = found.plain({**details, "left_out": left_out or {}})
    return finish(found.figures(studies, wanted), as_json, document)


def print_studies(rows: Sequence[dict[str, Any]]) -> None:
    head = f"{'workload':<16}{'step':>8}{'error':>8}{'p90':>7}{'bias':>7}{'drift':>7}{'failed':>8}"
    print(f"{head}{'sweep':>9}   {'who':<20}{'regret':>8}{'time':>9}   chosen")
    for row in rows:
        step = f"{1e3 * row['step_s']:.1f} ms" if row["step_s"] else "none"
        errors = f"{row['median_error_percent']:>7.1f}%{row['p90_error_percent']:>6.1f}%"
        print(
            f"{row['workload']:<16}{step:>8}{errors}{row['bias_percent']:>+6.1f}%"
            f"{row['drift_percent']:>+6.1f}%"
            f"{row['settings_failed']:>8}{row['sweep_seconds']:>7.0f} s   "
            f"{'best':<20}{'':>8}{'':>9}   {words(row['best'])}"
        )
        for choice in row["choices"]:
            regret = choice["regret_percent"]
            shown = "" if regret is None else f"{regret:.1f}%"
            chosen = words(choice["settings"]) if choice["settings"] else choice["note"]
            cost = f"{choice['seconds']:.1f} s"
            print(f"{'':<73}{choice['who']:<20}{shown:>8}{cost:>9}   {chosen}")


def print_choosers(details: dict[str, Any]) -> None:
    print(
        "\nwithout the correction for the machine's drift: "
        f"median {details['drifting_median_percent']:.1f}%, "
        f"p90 {details['drifting_p90_percent']:.1f}%\n"
        "a single run against the median of the same setting's others: "
        f"median {details['single_run_median_percent']:.1f}%, "
        f"p90 {details['single_run_p90_percent']:.1f}%\n"
    )
    head = f"{'who':<20}{'studies':>8}{'median regret':>15}{'worst':>8}"
    print(f"{head}{'median time':>13}{'of a sweep':>12}")
    for who, row in details["choosers"].items():
        print(
            f"{who:<20}{row['studies']:>8}{row['median_regret_percent']:>14.1f}%"
            f"{row['worst_regret_percent']:>7.1f}%{row['seconds']:>11.1f} s"
            f"{row['share_percent']:>11.1f}%"
        )
    print()


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
