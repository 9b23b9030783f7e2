"""`trainfit plan`'s launch lines against sweeps of threads × workers × prefetch.

Five scripts (launch_scripts/, and the ACT example), each bound by something else, are planned with
the CLI as a user would. Then `trainfit rehearse` runs the script's real DataLoader, in the real
environment of a line, against a GPU whose step takes what the plan predicts:

    sweep    threads of the libraries (as the user has them, 1, 2) × workers × prefetch, everything
             else as in the launch line: each setting once, in random order
    finals   the sweep's best three, the launch line and the user's own in turns: only these rounds
             count, by their medians
    regret   1 - rate of the launch line / rate of the best; the best is told by every other round,
             its rate by the rounds between, and the other way round
    slower   1 - rate of the launch line / rate of the user's own line
    line     planned before and after all that: is it the same, letter by letter?

Rates are what the clock said: run it on a quiet machine. What a line cannot say, and the plan shows
as a line to change by hand, is not set. Data files are made where they are absent.

    python bench/launch.py [--quick] [--only NAME ...] [--rounds N] [--json]
"""

from __future__ import annotations

import dataclasses
import json
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from _bench import ROOT, BenchFigure, finish, leave, needs, parser, say, table, trainfit
from _loader_workloads import BY_NAME, DATA

from trainfit.plan.command.parsing import split_line
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.files.errors import TrainfitError
from trainfit.results.plan import PlanResult

GPU = "RTX 4090"
SCRIPTS = ROOT / "bench" / "launch_scripts"
#: What sets the threads of libraries from outside.
THREADS: Final = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"),
)
FINALISTS = 3
#: Of each command: what it says of a failure is kept.
LIMITS: Final = {"stderr": subprocess.PIPE, "timeout": 900}
QUICK = ("blas", "python")
#: By script: the user's words after "python".
CASES: Final[Mapping[str, str]] = {
    "blas": f"{SCRIPTS}/whiten.py --batch-size=4 --num-workers=2",
    "python": f"{SCRIPTS}/tokenise.py -b 16 -j {{num_workers:1}}",
    "memmap": f"{SCRIPTS}/recording_windows.py RECORDING --workers={{num_workers:0}} "
    "--prefetch={prefetch_factor:2}",
    "gpu_bound": f"{SCRIPTS}/language_model.py",
    "act": f"{ROOT}/examples/act/train.py --dataset=VIDEOS --batch_size=8 --image_scale=0.5 "
    "--amp=true --num_workers={num_workers:4} --prefetch_factor={prefetch_factor:2}",
}


@dataclasses.dataclass(frozen=True)
class Key:
    """What is measured: a line (as words), and the settings of its DataLoader."""

    line: tuple[str, ...]
    settings: LoaderSettings

    @property
    def text(self) -> str:
        at = self.settings
        variables = " ".join(word for word in self.line if "THREADS" in word and "=" in word)
        return f"{at.num_workers} × {at.prefetch_factor}" + (f" {variables}" if variables else "")


#: Batches a second of each round that ran.
Rates = dict[Key, list[float | None]]


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__, quick=f"{', '.join(QUICK)} on a small grid")
    made.add_argument("--only", nargs="+", choices=list(CASES), metavar="NAME", default=[])
    made.add_argument("--rounds", type=int, default=0, help="of the finals (4; quick: 2)")
    made.add_argument("--seconds", type=float, default=4.0, help="of a rehearsal (4)")
    options = made.parse_args(argv)
    rounds = options.rounds or (2 if options.quick else 4)
    if rounds < 2 or options.seconds <= 0:
        leave("--rounds is 2 or more, --seconds above 0")
    names = options.only or (QUICK if options.quick else list(CASES))
    needs(*(("av",) if "act" in names else ()))
    grid = ((1,), (0, 1, 2), (2,)) if options.quick else ((1, 2), (0, 1, 2, 3, 4), (1, 2, 4))
    rows = [studied(name, grid, rounds, options.seconds) for name in names]
    heads = ("script", "user's line", "launch line", "best", "its settings", "regret", "same twice")
    shown = [
        (row["script"], row["own"], row["launch"], row["best"], row["best_is"], row["regret"],
         row["same_line"]) for row in rows
    ]  # fmt: skip
    return finish(figures(rows), options.json, {"scripts": rows}, [table(heads, shown)])


def figures(rows: Sequence[Mapping[str, Any]]) -> list[BenchFigure]:
    """A script whose plan or loader failed has no regret, and reaches no goal."""
    nan = float("nan")
    regrets = [nan if row["regret"] is None else row["regret"] for row in rows]
    slower = [nan if row["slower"] is None else row["slower"] for row in rows]
    same = sum(row["same_line"] for row in rows)
    failed = any(each != each for each in regrets)
    return [
        BenchFigure(
            "launch_median_regret", nan if failed else statistics.median(regrets), 5, True, "%"
        ),
        BenchFigure("launch_worst_regret", nan if failed else max(regrets), 15, True, "%"),
        BenchFigure("launch_slower_than_own", nan if failed else max(slower), 5, True, "%"),
        BenchFigure("launch_same_line_twice", same, len(rows), False),
    ]


def studied(
    name: str, grid: tuple[Sequence[int], ...], rounds: int, seconds: float
) -> dict[str, Any]:
    """Plan, sweep, finals, and plan again."""
    began = time.monotonic()
    row: dict[str, Any] = dict.fromkeys(("own", "launch", "best", "best_is", "regret", "slower"))
    row |= {"script": name, "same_line": False}
    words = ["python", *shlex.split(with_data(CASES[name]))]
    try:
        first = planned(words)
        row |= measured(name, words, first, grid, rounds, seconds)
        lines = [first.launch, planned(words).launch]
        row |= {"lines": lines, "same_line": lines[0] == lines[1]}
    except (TrainfitError, subprocess.SubprocessError, ValueError) as error:
        row["failure"] = str(error)
        say(f"{name}: {error}")
    return row | {"seconds": time.monotonic() - began}


def with_data(words: str) -> str:
    """Files are made where they are absent."""
    for mark, name, field in (("RECORDING", "memmap", "path"), ("VIDEOS", "act_video", "root")):
        if mark in words:
            words = words.replace(mark, str(getattr(BY_NAME[name].dataset(DATA), field)))
    return words


def planned(words: Sequence[str]) -> PlanResult:
    """By the CLI, as a user would; raises ``ValueError`` with its last lines."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "plan.json"
        line = ("plan", "--loader", "--gpu", GPU, "--output", str(output), "--", *words)
        done = trainfit(*line, **LIMITS)
        if not output.is_file():
            raise ValueError(" / ".join(done.stderr.strip().splitlines()[-3:]))
        plan_result = PlanResult.load(output)
    if plan_result.loading is None or plan_result.loading.result is None:
        raise ValueError("the plan did not tune the DataLoader")
    return plan_result


def measured(
    name: str,
    words: Sequence[str],
    plan: PlanResult,
    grid: tuple[Sequence[int], ...],
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """The rates of the launch line, the user's own, and the best of the grid."""
    assert plan.loading is not None and plan.loading.result is not None
    tuned = plan.loading.result
    launch = Key(tuple(split_line(plan.launch)), tuned.recommended)
    there = rehearsed(launch, tuned.step_s, 1.0) or {}
    step = plan.speed.at(there.get("batch_size")) if plan.speed is not None else None
    step_s = tuned.step_s if step is None else step.seconds
    own = Key(in_place(words, launch.line), tuned.present)
    keys = settings_of(own, launch, grid)
    say(f"{name}: {plan.launch}\n{name}: {len(keys)} settings, step {1e3 * step_s:.2f} ms")
    order = random.Random(0).sample(keys, len(keys))
    swept: Rates = {key: [rate(key, step_s, seconds)] for key in order}
    finalists = list(dict.fromkeys([launch, own, *best_of(swept)[:FINALISTS]]))
    finals: Rates = {key: [] for key in finalists}
    for turn in range(rounds):
        index = turn % len(finalists)
        for key in finalists[index:] + finalists[:index]:
            finals[key].append(rate(key, step_s, seconds))
    best = best_of(finals)[0]
    return {
        **{what: middle(finals[key]) for what, key in (("own", own), ("launch", launch))},
        "best": middle(finals[best]),
        "best_is": best.text,
        "regret": regret(finals, launch),
        "slower": 100 * max(0.0, 1 - middle(finals[launch]) / middle(finals[own])),
        "step_s": step_s,
    }


def in_place(words: Sequence[str], launch: Sequence[str]) -> tuple[str, ...]:
    """The user's environment with the arguments of the launch line: a plan may choose another batch
    size, and only lines at the same one can be compared."""
    at = next(i for i, word in enumerate(launch) if word.endswith(".py"))
    return (words[0], *launch[at:])


def settings_of(own: Key, launch: Key, grid: tuple[Sequence[int], ...]) -> list[Key]:
    """The grid: the user's line as it is and with threads limited, workers, prefetch."""
    threads, workers, prefetch = grid
    lines = [own.line]
    lines += [(*(f"{name}={count}" for name in THREADS), *own.line) for count in threads]
    keys = []
    for line in lines:
        for count in workers:
            for factor in prefetch if count else (2,):
                text = dataclasses.replace(
                    launch.settings, num_workers=count, prefetch_factor=factor,
                    persistent_workers=False, library_threads=None,
                )  # fmt: skip
                keys.append(Key(line, text))
    return keys


def rate(key: Key, step_s: float, seconds: float) -> float | None:
    """Batches a second of a rehearsal in its steady part; ``None`` where it has none."""
    found = rehearsed(key, step_s, seconds)
    part = found and (found["steady"] or found["overall"])
    return float(part["batches_per_s"]) if part else None


def rehearsed(key: Key, step_s: float, seconds: float) -> dict[str, Any] | None:
    """What the CLI says of the line with these settings."""
    settings = key.settings
    options = [f"--num-workers={settings.num_workers}"]
    options += [f"--prefetch-factor={settings.prefetch_factor}"] if settings.num_workers else []
    options += ["--pin-memory" if settings.pin_memory else "--no-pin-memory"]
    done = trainfit(
        "rehearse", "--json", f"--step-time={1e3 * step_s:.4f}ms", f"--duration={seconds:g}s",
        *options, "--", *key.line, **LIMITS,
    )  # fmt: skip
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        say(f"{key.text}: {' '.join(done.stderr.split())[-200:]}")
        return None
    return found


def middle(rates: Sequence[float | None]) -> float:
    """The median; 0 where a line did not run."""
    return statistics.median(each or 0.0 for each in rates) if rates else 0.0


def best_of(rates: Rates) -> list[Key]:
    """The fastest first."""
    return sorted(rates, key=lambda key: -middle(rates[key]))


def regret(finals: Rates, launch: Key) -> float:
    """Per cent that the launch line lacks to the best, never below 0: rounds that tell which is the
    best do not say how fast it is, as the best of several noisy medians is too high."""
    found = []
    for half in (0, 1):
        judge = {key: rates[half::2] for key, rates in finals.items()}
        other = {key: rates[1 - half :: 2] for key, rates in finals.items()}
        best = best_of(judge)[0]
        reached = middle(other[best])
        found.append(100 * (1 - middle(other[launch]) / reached) if reached else 100.0)
    return max(0.0, statistics.fmean(found))


if __name__ == "__main__":
    sys.exit(main())
