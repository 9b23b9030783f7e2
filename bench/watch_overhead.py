"""What does `trainfit watch` cost the training that it watches?

One training in blocks of steps that take turns in changing order: one with the recorder's hooks in
PyTorch and the sampler next to it, as `trainfit.watch()` does it, and two without, the sampler
standing still. All blocks are those of one process, as where a process lies in memory makes it
faster or slower by more than the recorder costs; after some rounds it is started again.

A figure is the median, over the rounds, of how many milliseconds longer the watched block's median
step is than the mean of the others'; its 95% interval is of the bootstrap over rounds. The goal is
the same for every length of a step. Next to it, in CPU time: what the process spends on a step,
which other programs on the machine disturb less, the share of the machine's cores that the sampler
spends, and what the recorder measures of itself. The noise floor is the same figure of the two
blocks that are not watched: nothing below it can be told. The recorder's first steps, which it all
records in detail, do not count.

    2 ms, 20 ms, 100 ms   steps of a small network on one core, from a DataLoader without workers
    memory                growth of this process over 1,000,000 steps that only the recorder sees

    python bench/watch_overhead.py [--quick] [--json]
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from _bench import BenchFigure, finish, parser, say
from torch import nn

from trainfit.results.runs.watched import load_run
from trainfit.watch.launch import injected
from trainfit.watch.recorder.recorder import Recorder, RecordingPlace
from trainfit.watch.sampler.start import SamplerHandle, start_sampler

STEPS, QUICK_STEPS = 1_000_000, 100_000
MIB = 2**20
_TRAINING: Final = Path(__file__).with_name("_watch_training.py")
_ROLES: Final = ("watched", "one", "other")
#: Seconds of the first block, which does not count: files are opened, and the sampler reads what
#: there is.
_SETTLE_S: Final = 2.0


@dataclass(frozen=True)
class OverheadCase:
    """A training whose step takes about so long. ``starts`` processes make ``rounds`` rounds of
    blocks of ``block_s`` each."""

    seconds: float
    width: int
    batch: int
    block_s: float
    starts: int
    rounds: int


CASES = (
    OverheadCase(2e-3, 96, 24, 0.4, 6, 16),
    OverheadCase(20e-3, 384, 60, 0.6, 5, 16),
    OverheadCase(0.1, 768, 104, 1.0, 5, 12),
)
#: Milliseconds of a step that watching may cost, whatever its length.
MOST_MS: Final = 0.1
#: Of ``--quick``.
FEWER = 3


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__, quick=f"a {FEWER}rd of the starts").parse_args(argv)
    figures, details = [], {}
    for case in CASES:
        found = overhead(case, max(1, case.starts // (FEWER if options.quick else 1)))
        name = f"watch on a step of {case.seconds * 1e3:g} ms"
        figures.append(BenchFigure(name, found["ms"], MOST_MS, True, " ms"))
        details[name] = found
        say(_line(name, found))
    memory = growth(QUICK_STEPS if options.quick else STEPS)
    figures.append(BenchFigure("memory growth of the recorder", memory["mib"], 8.0, True, " MiB"))
    details["memory"] = memory
    return finish(figures, options.json, details)


def _line(name: str, found: dict[str, Any]) -> str:
    low, high = found["interval"]
    return (
        f"{name} ({found['step_ms']:.1f} ms): {found['ms']:.3f} ms ({low:.3f} to {high:.3f}), in "
        f"CPU time {found['cpu_ms']:.3f} ms ({found['cpu_interval'][0]:.3f} to "
        f"{found['cpu_interval'][1]:.3f}); the recorder says of itself "
        f"{found['recorder_percent_by_itself']:.2f}%; sampler "
        f"{found['sampler_percent_of_cores']:.2f}% of the cores; noise floor "
        f"{found['noise_ms']:.3f} ms ({found['noise_interval'][0]:.3f} to "
        f"{found['noise_interval'][1]:.3f}), in CPU time {found['cpu_noise_ms']:.3f} ms"
    )


class TrainingProcess:
    """A training of ``case`` in a process of its own, and the sampler of the run in ``folder``."""

    def __init__(self, case: OverheadCase, folder: Path) -> None:
        started = time.time(), time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, str(_TRAINING), str(case.width), str(case.batch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=injected(folder, "bench", os.environ, started),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._asked, self._told = self._process.stdin, self._process.stdout
        self._sampler: SamplerHandle = start_sampler(folder, int(self._told.readline()))
        self._sampler_process = psutil.Process(self._sampler.pid)
        self._signal(signal.SIGSTOP)
        self.sampler_cpu_s = self.seconds = 0.0

    def block(self, role: str, seconds: float) -> dict[str, Any]:
        """A block of steps; of the watched one with the sampler at work."""
        watched = role == "watched"
        began, cpu_s = time.monotonic(), self._cpu_s()
        if watched:
            self._signal(signal.SIGCONT)
        print(seconds, "on" if watched else "off", file=self._asked)
        line = self._told.readline()
        if watched:
            self._signal(signal.SIGSTOP)
            self.sampler_cpu_s += self._cpu_s() - cpu_s
            self.seconds += time.monotonic() - began
        return json.loads(line)  # type: ignore[no-any-return]

    def forget(self) -> None:
        """What the first block has cost does not count."""
        self.sampler_cpu_s = self.seconds = 0.0

    def _cpu_s(self) -> float:
        times = self._sampler_process.cpu_times()
        return float(times.user + times.system)

    def _signal(self, number: int) -> None:
        if self._sampler.is_running:
            os.kill(self._sampler.pid, number)

    def close(self) -> None:
        """End both."""
        self._signal(signal.SIGCONT)
        self._asked.close()
        self._told.read()
        self._told.close()
        self._process.wait(60)
        self._sampler.stop()


def overhead(case: OverheadCase, starts: int) -> dict[str, Any]:
    """Milliseconds that a step takes longer when it is watched."""
    rounds = [each for _ in range(starts) for each in _rounds(case)]
    wall, cpu, floor, cpu_floor = [], [], [], []
    for each in rounds:
        step_s = {role: statistics.median(each[role]["steps_s"]) for role in _ROLES}
        cpu_s = {role: each[role]["cpu_s"] / len(each[role]["steps_s"]) for role in _ROLES}
        wall.append(_more(step_s["watched"], (step_s["one"] + step_s["other"]) / 2))
        cpu.append(_more(cpu_s["watched"], (cpu_s["one"] + cpu_s["other"]) / 2))
        floor.append(_more(step_s["one"], step_s["other"]))
        cpu_floor.append(_more(cpu_s["one"], cpu_s["other"]))
    return {
        "ms": statistics.median(wall),
        "interval": _interval(wall),
        "cpu_ms": statistics.median(cpu),
        "cpu_interval": _interval(cpu),
        "noise_ms": statistics.median(floor),
        "noise_interval": _interval(floor),
        "cpu_noise_ms": statistics.median(cpu_floor),
        "sampler_percent_of_cores": statistics.mean(each["sampler"] for each in rounds),
        "recorder_percent_by_itself": statistics.mean(
            each["watched"]["recorder"] for each in rounds
        ),
        "step_ms": statistics.median(statistics.median(r["one"]["steps_s"]) for r in rounds) * 1e3,
        "rounds": len(rounds),
        "starts": starts,
    }


def _more(value: float, than: float) -> float:
    return (value - than) * 1e3


def _interval(values: Sequence[float]) -> list[float]:
    """95% of the medians of resampled values."""
    random = np.random.default_rng(0)
    drawn = np.median(random.choice(np.asarray(values), (2000, len(values))), axis=1)
    return [float(each) for each in np.percentile(drawn, (2.5, 97.5))]


def _rounds(case: OverheadCase) -> list[dict[str, Any]]:
    """Rounds of a process that was started afresh."""
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingProcess(case, Path(folder))
        try:
            training.block("watched", _SETTLE_S)
            training.forget()
            for number in range(case.rounds):
                first = number % len(_ROLES)
                order = (*_ROLES[first:], *_ROLES[:first])
                order = order if number % 2 else order[::-1]
                found: dict[str, Any] = {role: training.block(role, case.block_s) for role in order}
                cores = training.seconds * (os.cpu_count() or 1)
                found["sampler"] = 100 * training.sampler_cpu_s / cores
                rounds.append(found)
        finally:
            training.close()
        (rank,) = load_run(Path(folder)).ranks
        if not len(rank.steps):
            raise SystemExit("no step was recorded: nothing was measured")
    return rounds


def growth(steps: int) -> dict[str, Any]:
    """Memory of this process after a tenth of the steps and at their end, in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(RecordingPlace(Path(folder), time.time(), time.monotonic(), "bench"))
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        loss = torch.zeros(())
        own = psutil.Process()
        first = 0
        began = time.perf_counter()
        for number in range(steps):
            if number == steps // 10:
                first = own.memory_info().rss
            _empty_step(recorder.steps, model, optimizer, loss)
        seconds = time.perf_counter() - began
        grown = own.memory_info().rss - first
        recorder.stop()
        lost = recorder.lost_rows
    return {
        "mib": grown / MIB,
        "steps": steps,
        "microseconds_of_a_step": seconds / steps * 1e6,
        "lost_rows": lost,
    }


def _empty_step(steps: Any, model: Any, optimizer: Any, loss: Any) -> None:
    """What the hooks tell in a step, without the step."""
    entered = steps.enter_root(model, (loss,))
    steps.leave_root(entered)
    steps.leave_backward(steps.enter_backward(loss))
    steps.enter_optimizer(optimizer, sys._getframe())
    steps.leave_optimizer(optimizer)


if __name__ == "__main__":
    sys.exit(main())
