"""Times the campaign's `steps-…` jobs in few processes, one at a time on the GPU.

Each process makes one job after the other, the next one's model while another measures: a context
and a profiler for each job, as campaign.py has them for memory's sake, would take longer than the
steps. Results are what campaign.py writes; in the order of the patterns, and of its list, so that a
stopped run has the first ones.

    python bench/gpu/step_times.py --out DIR [--only PATTERN] [--processes N] [--time-limit S]

`--gate FILE`: prepare, but do not touch the GPU before this file is there.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import cases, children
from gpu.measure import FORMAT, VERSION, failure, simulation, write


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for bad options; what failed says so in its file."""
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker:
        JobProcess(options).run()
        return 0
    command = [sys.executable, "-u", __file__, *(argv or sys.argv[1:]), "--worker"]
    env = children.environment("")
    started = [
        subprocess.Popen(command, env={**env, "STEP_TIMES_DEADLINE": str(deadline(options))})
        for _ in range(options.processes)
    ]
    for process in started:
        process.wait()
    return 0


def deadline(options: argparse.Namespace) -> float:
    """Seconds since the epoch."""
    return float(os.environ.get("STEP_TIMES_DEADLINE", time.time() + options.time_limit))


def parse(argv: list[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--only", action="append", default=[], metavar="PATTERN")
    made.add_argument("--processes", type=int, default=4)
    made.add_argument("--time-limit", type=float, default=100.0, metavar="S")
    made.add_argument("--gate", type=Path)
    made.add_argument("--simulate", metavar="GPU", help="a rehearsal, no truth")
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return made.parse_args(argv)


class JobProcess:
    """One process: claims jobs that no other has, prepares each, and measures it in turn."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._deadline = options, deadline(options)
        self._host: float | None = None
        self._loaded = False

    def run(self) -> None:
        import torch  # noqa: F401

        from gpu.timing import operator_seconds

        if not self._options.simulate:
            self._host = operator_seconds()
        for timed in _in_order(self._options.only):
            if time.time() >= self._deadline:
                return
            if self._claimed(timed.name):
                self._measure(timed)
                gc.collect()

    def _claimed(self, name: str) -> bool:
        try:
            os.close(os.open(self._options.out / f"{name}.claim", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _measure(self, timed: cases.TimedCase) -> None:
        import torch

        from gpu.timing import SHORT, StepTimer
        from gpu.training import TrainingJob

        result: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        simulate = self._options.simulate
        began = time.time()
        held = began
        with simulation(simulate):
            try:
                steps = StepTimer(TrainingJob(timed.case), timed.batches, SHORT)
                self._wait()
                if not simulate:
                    self._load()
                with self._alone(fcntl.LOCK_EX):
                    held = time.time()
                    if held >= self._deadline:
                        return
                    try:
                        result |= steps.measure(bool(simulate), self._host)
                    finally:
                        del steps
                        gc.collect()
                        torch.cuda.empty_cache()
            except Exception as error:
                request = {"case": vars(timed.case), "simulate": simulate}
                result |= failure(request, error)
        write(self._options.out / f"{timed.name}.json.gz", result)
        took = f"{held - began:.1f} s until its turn, {time.time() - held:.1f} s"
        print(json.dumps([timed.name, result["status"], result["message"][:200], took]), flush=True)

    def _wait(self) -> None:
        gate = self._options.gate
        while gate is not None and not gate.exists() and time.time() < self._deadline:
            time.sleep(0.05)

    def _load(self) -> None:
        """The context, libraries and the profiler: seconds each, which several processes can take
        at a time while none measures."""
        if self._loaded:
            return
        self._loaded = True
        import torch

        with self._alone(fcntl.LOCK_SH):
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities):
                for dtype in (torch.float32, torch.bfloat16):
                    given = torch.ones(8, 8, 8, 8, device="cuda", dtype=dtype, requires_grad=True)
                    result = torch.nn.functional.conv2d(given, given) @ given.new_ones(1, 8)
                    result.sum().backward()
                torch.cuda.synchronize()

    @contextlib.contextmanager
    def _alone(self, how: int) -> Iterator[None]:
        """The GPU for this process, or (``LOCK_SH``) for those that do not measure."""
        with (self._options.out / "lock").open("w") as lock:
            fcntl.flock(lock, how)
            yield


def _in_order(patterns: list[str]) -> list[cases.TimedCase]:
    """The jobs of the first pattern first."""
    timed_cases = [case for one in patterns or ["*"] for case in cases.chosen_timed([one])]
    return list({case.name: case for case in timed_cases}.values())


if __name__ == "__main__":
    sys.exit(main())
