"""`trainfit plan`'s launch lines against exhaustive sweeps of threads × workers × prefetch.

Eight scripts (launch_scripts/, and the ACT example), each bound by something else, are planned with
the CLI as a user would. What the launch line says (variables of the environment, cores, DataLoader
settings) is measured next to every other setting, and next to what the user's own line has.

A measurement runs the script's real DataLoader in the real environment of a line: a process
that was started with its variables and wrappers has run the script up to its first step, and then
runs the loader with given settings against a consumer whose step takes what the plan predicts
for the GPU (as `trainfit rehearse` does; batches that are not pinned are copied). All lines have
the batch size of the launch line. Counted is the steady state.

    sweep    threads of the libraries (as the user has them, 1, 2; a value that the user's line
             has anyway is not measured twice) × workers × prefetch, everything else as in the
             launch line: each setting once, in random order; what is clearly slower than the best
             is dropped then, the others are measured again
    finals   the sweep's best three, the launch line and the user's own in turns: only these rounds
             count, and which setting is best is told by other rounds than how fast it is
    regret   1 - rate of the launch line / rate of the best
    slower   the launch line's rate below that of the user's own line by more than the noise: half
             of the 95% interval of the rounds' ratios, taken to be 1% at least and 5% at most
    line     planned before and after all that: is it the same, letter by letter, and are the
             settings, also those that it cannot say?

Rates are at the cores' full speed, which is watched meanwhile, as in loader_accuracy.py. What a
line cannot say and the plan shows as a line to change by hand is set as it says; the table marks
it. Data files are made where they are absent (data/loader-bench).

    python bench/launch.py [--quick] [--only NAME ...] [--rounds N] [--record FILE] [--json]
    python bench/launch.py --read FILE ... [--json]
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _bench import finish

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import _launch_figures as found  # noqa: E402
from _launch_cases import BY_CASE, CASES, QUICK  # noqa: E402
from _launch_figures import Key, Study  # noqa: E402
from _launch_rig import Effort  # noqa: E402
from _launch_study import GPU, Grid, studied  # noqa: E402
from _loader_sweep import to_stderr  # noqa: E402
from loader_workloads import DATA, NotInstalledError  # noqa: E402

from trainfit.results.dataloader import LoaderSettings  # noqa: E402

THREADS, WORKERS, PREFETCH = (1, 2), (0, 1, 2, 3, 4), (1, 2, 4)
QUICK_THREADS, QUICK_WORKERS, QUICK_PREFETCH = (1,), (0, 1, 2), (2,)
QUICK_PROBE_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.read:
        return read(options)
    names = options.only or (QUICK if options.quick else tuple(BY_CASE))
    whole = Grid(options.threads, options.workers, options.prefetch)
    effort = Effort(options.sweep_rounds, options.rounds, options.seconds, options.repeats)
    studies: list[Study] = []
    left_out: dict[str, str] = {}
    about = {
        "cpus": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "quick": options.quick,
        "gpu": GPU,
        "began": time.time(),
        "wanted": len(names),
    }
    for name in names:
        try:
            command = BY_CASE[name].command(options.data)
        except NotInstalledError as error:
            left_out[name] = str(error)
            to_stderr(f"{name} is left out: {error}")
            continue
        studies.append(studied(BY_CASE[name], command, whole, effort, options.probe_time))
        if options.record is not None:
            found.save(options.record, studies, {**about, "left_out": left_out})
    return report(studies, len(names), options.json, left_out)


def read(options: argparse.Namespace) -> int:
    """The figures of kept records."""
    studies: list[Study] = []
    left_out: dict[str, str] = {}
    wanted = 0
    try:
        for file in options.read:
            kept, about = found.load(file)
            studies += kept
            left_out |= about["left_out"]
            wanted += about["wanted"]
    except (OSError, ValueError) as error:
        print(f"launch: error: {error}", file=sys.stderr)
        return 2
    return report(studies, wanted, options.json, left_out)


# What is printed ---------------------------------------------------------------------------------


def report(studies: Sequence[Study], wanted: int, as_json: bool, left_out: dict[str, str]) -> int:
    rows = [row(study) for study in studies]
    if not as_json:
        for name, reason in left_out.items():
            print(f"{name}: left out, {reason}")
        print_rows(rows)
    details = {"scripts": rows, "left_out": left_out}
    return finish(found.figures(studies, wanted), as_json, details)


def row(study: Study) -> dict[str, Any]:
    """One script's figures."""
    versus, finals = found.versus_own(study), found.rates(study.of(found.FINALS))
    best = max(finals, key=lambda key: finals[key], default=None)
    return {
        "script": study.script,
        "command": study.command,
        "launch_lines": list(study.lines),
        "recommended": list(study.said),
        "same_line": study.same_line,
        "plan_seconds": list(study.plan_seconds),
        "seconds": study.seconds,
        "step_s": study.step_s,
        "tuned_step_s": study.tuned_step_s,
        "batch_size": study.batch_size,
        "regret_percent": found.regret_percent(study),
        "gain_percent": None if versus is None else 100 * versus.gain,
        "noise_percent": None if versus is None else 100 * versus.noise,
        "slower": None if versus is None else versus.slower,
        "own": shown(study.own, finals),
        "launch": shown(study.launch, finals),
        "best": shown(best, finals),
        "by_hand": list(study.by_hand),
        "places": dict(study.places),
        "disturbed": found.disturbed(study),
        "failure": study.failure,
    }


def shown(key: Key | None, rates: dict[Key, float]) -> str:
    """A setting with its rate in the finals."""
    if key is None:
        return ""
    rate = f"{rates[key]:.1f}/s " if key in rates else ""
    return f"{rate}{words(key.settings)}, {key.place}"


def words(settings: LoaderSettings) -> str:
    """The settings in short."""
    if not settings.num_workers:
        text = "0 workers"
    else:
        text = f"{settings.num_workers} × {settings.prefetch_factor}"
    text += ", pinned" if settings.pin_memory else ""
    held = settings.library_threads
    return text + (f", held to {held} in workers" if held is not None else "")


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    for each in rows:
        if each["failure"]:
            print(f"{each['script']}: {each['failure']}")
            continue
        gain, noise = each["gain_percent"], each["noise_percent"]
        print(
            f"{each['script']}: regret {each['regret_percent']:.1f}%; against the user's own line "
            f"{gain:+.1f}% ± {noise:.1f}%{' SLOWER' if each['slower'] else ''}; "
            f"step {1e3 * each['step_s']:.2f} ms, batch {each['batch_size']}; "
            f"{each['seconds']:.0f} s, of them plans "
            + " and ".join(f"{seconds:.0f} s" for seconds in each["plan_seconds"])
        )
        for name in ("own", "launch", "best"):
            print(f"    {name:<8}{each[name]}")
        for line in dict.fromkeys(each["launch_lines"]):
            print(f"    line    {line}")
        for line in each["by_hand"]:
            print(f"    by hand {line}")
        if each["same_line"] is False:
            print("    planned twice, not the same: " + " / ".join(each["recommended"]))
        if abs(each["tuned_step_s"] - each["step_s"]) > 0.05 * each["step_s"]:
            tuned = 1e3 * each["tuned_step_s"]
            print(f"    the plan tuned the loader for a step of {tuned:.2f} ms")
        beside, finals = each["disturbed"]
        if beside:
            print(f"    {beside} of {finals} final readings alongside other processes: in doubt")
    print()


# Options -----------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=[])
    parser.add_argument("--quick", action="store_true", help="three scripts, a small grid")
    parser.add_argument("--rounds", type=int, help="of the finals (5)")
    parser.add_argument("--sweep-rounds", type=int, help="of the sweep (2)")
    parser.add_argument("--seconds", type=float, help="counted seconds of a run (0.8)")
    parser.add_argument("--repeats", type=int, help="of what was disturbed, at most (1)")
    parser.add_argument("--probe-time", type=float, help="of the plans (their default)")
    parser.add_argument("--threads", type=int, nargs="+", help="of the grid (1 2)")
    parser.add_argument("--workers", type=int, nargs="+", help="of the grid (0 1 2 3 4)")
    parser.add_argument("--prefetch", type=int, nargs="+", help="of the grid (1 2 4)")
    parser.add_argument("--data", type=Path, default=DATA, help=f"folder of the files ({DATA})")
    parser.add_argument("--record", type=Path, help="keep all readings here, as JSON")
    parser.add_argument("--read", type=Path, nargs="+", help="figures of kept records alone")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(argv)
    for name, value in (QUICK_DEFAULTS if options.quick else DEFAULTS).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    check(parser, options)
    return options


DEFAULTS: dict[str, Any] = {
    "rounds": 5,
    "sweep_rounds": 2,
    "seconds": 0.8,
    "repeats": 1,
    "probe_time": None,
    "threads": THREADS,
    "workers": WORKERS,
    "prefetch": PREFETCH,
}
QUICK_DEFAULTS: dict[str, Any] = {
    "rounds": 2,
    "sweep_rounds": 1,
    "seconds": 0.5,
    "repeats": 0,
    "probe_time": QUICK_PROBE_S,
    "threads": QUICK_THREADS,
    "workers": QUICK_WORKERS,
    "prefetch": QUICK_PREFETCH,
}


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Leave with one line for options that cannot work."""
    if min(options.workers) < 0 or min(options.prefetch) < 1 or min(options.threads) < 1:
        parser.error("--workers are 0 or more, --prefetch and --threads 1 or more")
    if options.seconds <= 0 or min(options.rounds, options.sweep_rounds) < 1:
        parser.error("--seconds, --rounds and --sweep-rounds are above 0")
    if options.repeats < 0 or (options.probe_time is not None and options.probe_time <= 0):
        parser.error("--repeats are 0 or more, --probe-time is above 0")
    for file in options.read or ():
        if not file.is_file():
            parser.error(f"{file}: no such file; give what --record wrote")
    if options.record is not None and not options.record.parent.is_dir():
        parser.error(f"{options.record}: there is no folder {options.record.parent}; make it")


if __name__ == "__main__":
    sys.exit(main())
