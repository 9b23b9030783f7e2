"""`trainfit pace`: is the cause found, and only then claimed? And how well does it keep a pace?

On simulated machines (tests/helpers_paced_machine.py), noisy and seeded: each cause alone, pairs
of causes, healthy machines, and the seed's case (ACT on an RTX 4090 with a 12th-generation Intel:
30 Hz took 7 to 8 ms more than 60 Hz, 14.4 ms offline; `performance` fixed it).

On this machine: how late calls start, sleep against sleep then busy-wait, interleaved; what
measuring costs a call, against the same calls in a bare loop; and what a rehearsal call right
before each tick removes of the time that a policy of 20 linear layers needs more at 30 Hz than
back to back (where other processes use the cores: `sudo chrt -f 10 python bench/pace.py`).

    attribution    of 100 runs of each cause, those that name it and nothing else (the least)
    healthy        of 100 runs of each healthy machine, those that claim nothing (the least)
    pairs          of 100 runs of each pair, those that name both and nothing else (no goal of ours)
    late           p99 of starts after they are due, sleep then busy-wait over sleep (median)
    overhead       of a call, in microseconds
    rehearsal      share of the excess that it removes, of the medians of blocks in turns

    python bench/pace.py [--quick] [--json]
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from _bench import BenchFigure, finish, parser, table

from helpers_pace import ACT, FREQUENCY, PAIRS, SINGLE, SOUND, measured
from trainfit.pace.attribution import causes
from trainfit.pace.callee import Function
from trainfit.pace.host import RealHost
from trainfit.pace.loop import Caller, Plan

CASES = (*SINGLE, *SOUND, *PAIRS)
RUNS, QUICK_RUNS = 100, 12
#: Of the real machine: rounds of blocks, seconds of each.
ROUNDS, QUICK_ROUNDS, BLOCK_S = 10, 4, 2.0


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__, quick=f"{QUICK_RUNS} runs of each machine").parse_args(argv)
    pace = pacing(QUICK_ROUNDS if options.quick else ROUNDS)
    cost = overhead()
    warmed = rehearsal(QUICK_ROUNDS if options.quick else ROUNDS)
    shares = attribution(QUICK_RUNS if options.quick else RUNS)
    seed = the_seeds_case()
    rows = [(name, f"{right:.0%}", said) for name, (right, said) in shares.items()]
    milliseconds = [
        *((f"the seed, {arm[:-2]}", 1e3 * value) for arm, value in seed.items()),
        *((f"starts late (p99), {arm[:-2]}", 1e3 * value) for arm, value in pace.items()),
        *((f"20 linear layers, {arm}", 1e3 * warmed[arm]) for arm in warmed if arm != "made"),
    ]
    tables = [table(("machine", "right", "wrong"), rows), table(("arm", "ms"), milliseconds)]
    excess = warmed["sleep"] - warmed["back_to_back"]
    single = [shares[name][0] for name, *_ in SINGLE]
    healthy = [shares[name][0] for name, *_ in SOUND]
    more = 1e3 * (seed["slow_s"] - seed["fast_s"])
    figures = [
        BenchFigure("pace_attribution", 100 * min(single), 95, False, "%"),
        BenchFigure("pace_healthy", 100 * min(healthy), 98, False, "%"),
        BenchFigure("pace_seed_excess_least", more, 7, False, " ms"),
        BenchFigure("pace_seed_excess_most", more, 8, True, " ms"),
        BenchFigure(
            "pace_seed_cured", 1e3 * (seed["cured_s"] - seed["offline_s"]), 0.5, True, " ms"
        ),
        BenchFigure("pace_late_ratio", pace["hybrid_s"] / pace["sleep_s"], 0.1, True),
        BenchFigure("pace_overhead", 1e6 * cost, 50, True, " us"),
        BenchFigure(
            "pace_rehearsal", 100 * (warmed["sleep"] - warmed["rehearse"]) / excess, 60, False, "%"
        ),
    ]
    details: dict[str, Any] = {"shares": shares, "seed": seed, "late": pace, "overhead_s": cost}
    details["rehearsal"] = warmed
    return finish(figures, options.json, details, tables)


def attribution(runs: int) -> dict[str, tuple[float, str]]:
    """Of each machine the share of runs with the right answer, and the wrong ones in words."""
    jobs = [(number, seed) for number in range(len(CASES)) for seed in range(runs)]
    with ProcessPoolExecutor() as pool:
        found = list(pool.map(_found, jobs, chunksize=8))
    shares = {}
    for number, (name, _, _, wanted) in enumerate(CASES):
        answers = [answer for (case, _), answer in zip(jobs, found, strict=True) if case == number]
        wrong = [", ".join(sorted(answer)) or "nothing" for answer in answers if answer != wanted]
        counts = {text: wrong.count(text) for text in dict.fromkeys(wrong)}
        words = "; ".join(f"{times} times {each}" for each, times in counts.items())
        shares[name] = (1 - len(wrong) / runs, words)
    return shares


def _found(job: tuple[int, int]) -> frozenset[str]:
    number, seed = job
    _, traits, work, _ = CASES[number]
    return frozenset(causes(measured(traits, work, seed).attribution))


def the_seeds_case() -> dict[str, float]:
    """Medians over seeds, in seconds."""
    rows: dict[str, list[float]] = {"offline_s": [], "fast_s": [], "slow_s": [], "cured_s": []}
    for seed in range(5):
        found = measured(FREQUENCY, ACT, seed, hz=(30.0, 60.0), fix="governor")
        assert found.back_to_back is not None and found.fix_trial is not None
        rows["offline_s"].append(found.back_to_back.calls.p50)
        rows["slow_s"].append(found.rates[0].calls.p50)
        rows["fast_s"].append(found.rates[1].calls.p50)
        rows["cured_s"].append(found.fix_trial.after.calls.p50)
    return {name: statistics.median(values) for name, values in rows.items()}


def pacing(rounds: int) -> dict[str, float]:
    """p99 of starts after they are due, at 30 Hz, of the arms in turns (s): the median of blocks,
    as something else runs on this machine now and then, in whichever arm's block."""
    caller = Caller(Function(_work), RealHost())
    late: dict[str, list[float]] = {"sleep": [], "hybrid": [], "spin": []}
    for _ in range(rounds):
        for arm, found in late.items():
            block = caller.block(Plan(arm, 30.0, BLOCK_S))  # type: ignore[arg-type]
            starts, due = np.asarray(block.started_s), np.asarray(block.due_s)
            found.append(float(np.percentile(np.maximum(0.0, starts - due), 99)))
    return {f"{arm}_s": statistics.median(found) for arm, found in late.items()}


def rehearsal(rounds: int) -> dict[str, float]:
    """Median seconds of a call of 20 linear layers by arm, blocks in turns; ``made``: the share of
    the ticks that had a rehearsal call."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(20))).eval()
    observed = torch.zeros(1, 128)

    @torch.inference_mode()
    def act() -> object:
        return model(observed)

    caller = Caller(Function(act), RealHost())
    walls: dict[str, list[float]] = {"back_to_back": [], "sleep": [], "rehearse": []}
    for _ in range(rounds):
        for arm, found in walls.items():
            hz = None if arm == "back_to_back" else 30.0
            block = caller.block(Plan(arm, hz, BLOCK_S))  # type: ignore[arg-type]
            found += block.wall_s[block.settled :]
    made = sum(each.made for each in caller.rehearsals)
    skipped = sum(each.skipped for each in caller.rehearsals)
    medians = {arm: statistics.median(found) for arm, found in walls.items()}
    return {**medians, "made": made / (made + skipped)}


def _work() -> int:
    return sum(range(20000))


def overhead(rounds: int = 15) -> float:
    """Seconds that a call takes more in our loop than in a bare one; the median of rounds."""
    caller, more = Caller(Function(_nothing), RealHost()), []
    for _ in range(rounds):
        began = time.perf_counter()
        block = caller.block(Plan("back_to_back", None, 0.2))
        ours = (time.perf_counter() - began) / len(block.wall_s)
        count = 20000
        began = time.perf_counter()
        for _ in range(count):
            _nothing()
        more.append(ours - (time.perf_counter() - began) / count)
    return statistics.median(more) if more else math.nan


def _nothing() -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
