"""Runs DataLoaders in the real environments of launch lines, and measures them against one another.

Each environment is a process of its own (_launch_place.py), which has run the script up to its
first step and waits; one of them at a time runs the loader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from _launch_figures import FINALS, SWEEP, Key, Taken, left_in, rates, top
from _launch_lines import Line
from _launch_place import Asked, Failed, Job, Ready
from _loader_figures import Reading
from _loader_sweep import QUIET, at_full_speed, quietness, reading_of, slowing

from trainfit.hardware import GpuSpec, find_gpu
from trainfit.hardware.machine.core_speed import CoreSpeeds
from trainfit.loader.measure.noise_correction import with_speeds
from trainfit.loader.measure.records import Failure, Run, warm_up
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.measurement import Consumer

PLACE = Path(__file__).with_name("_launch_place.py")
#: Seconds that a script has until its first step, a run has beyond its own, and an ending process.
START_S, PATIENCE_S, END_S = 240.0, 60.0, 10.0
#: After a round, what is no slower than this share of the best goes on, at most so many of them.
GOES_ON = ((0.75, 12), (0.88, 8))
#: Of the sweep's best, so many are measured again with the launch and the user's own.
FINALISTS = 3
#: Batches that a run counts where it is known how fast it is, and how much longer than others it
#: may be for that.
COUNTED, LONGEST = 20, 4.0

Say = Callable[[str], None]


class PlaceError(Exception):
    """A place that came to no loader; one line and what the process said."""


class Place:
    """A process with a line's environment, and the script's loader in it; a context."""

    def __init__(self, line: Line, gpu: GpuSpec, folder: Path, number: int) -> None:
        self._line, self._gpu = line, gpu
        self._log = folder / f"place-{number}.txt"
        self._connection, other = multiprocessing.Pipe()
        environment = {**os.environ, **dict(line.variables)}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*line.wrapper, *line.python, str(PLACE), str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(other.fileno(),),
            )
        other.close()
        self.ready = self._started()

    def _started(self) -> Ready:
        try:
            self._connection.send(Asked(self._line.target, self._gpu, START_S))
            answer = self._answer(START_S + PATIENCE_S)
        except PlaceError:
            self.close()
            raise
        if isinstance(answer, Failed):
            self.close()
            raise PlaceError(f"{answer.why}\n{answer.details}".strip())
        assert isinstance(answer, Ready)
        return answer

    def run(self, job: Job) -> Run:
        """Run its loader; a process that died has a failed run."""
        try:
            self._connection.send(job)
            run = self._answer(job.seconds + PATIENCE_S)
        except (PlaceError, OSError) as error:
            failure = Failure("PlaceError", " ".join(str(error).split()))
            return Run(job.settings, job.consumer.step_s, failure=failure)
        assert isinstance(run, Run)
        return run

    def _answer(self, limit_s: float) -> Any:
        try:
            if self._connection.poll(limit_s):
                return self._connection.recv()
            why = f"no answer in {limit_s:.0f} s"
        except EOFError:
            why = "its process ended"
        said = self._log.read_text(errors="replace").strip().splitlines()
        raise PlaceError("\n".join([why, *said[-12:]]))

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._connection.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Places:
    """Places by name; two of one line are one place. A context that ends all of them."""

    def __init__(self, gpu: str) -> None:
        self._gpu = find_gpu(gpu)
        self._folder = tempfile.TemporaryDirectory(prefix="launch-bench-")
        self._names: dict[Line, str] = {}
        self._places: dict[str, Place] = {}

    def __enter__(self) -> Places:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for place in self._places.values():
            place.close()
        self._folder.cleanup()

    def name(self, line: Line, wanted: str) -> str:
        """The place of a line: started as ``wanted`` unless there is one. Raises PlaceError."""
        if line not in self._names:
            folder = Path(self._folder.name)
            self._places[wanted] = Place(line, self._gpu, folder, len(self._places))
            self._names[line] = wanted
        return self._names[line]

    def __getitem__(self, name: str) -> Place:
        return self._places[name]

    @property
    def in_words(self) -> dict[str, str]:
        """What each place is started with."""
        return {name: in_words(line) for line, name in self._names.items()}


def in_words(line: Line) -> str:
    """Variables, wrapper, and arguments of the script."""
    pairs = (f"{name}={value}" for name, value in line.variables)
    words = [*pairs, *line.wrapper, line.target.name, *line.target.args]
    return shlex.join(words)


@dataclass(frozen=True)
class Effort:
    """How much is measured: rounds of the sweep and of the finals, seconds of counted batches a
    run, and how often a reading that was disturbed from outside is taken again."""

    rounds: int = 2
    final_rounds: int = 5
    seconds: float = 0.8
    repeats: int = 1


class Contest:
    """Measures keys of several places against one another, one run at a time."""

    def __init__(
        self,
        run: Callable[[Key, Job], Run],
        consumer: Consumer,
        effort: Effort,
        watch: CoreSpeeds,
        say: Say,
    ) -> None:
        self._run, self._consumer, self._effort = run, consumer, effort
        self._watch, self._say = watch, say
        self._seen: dict[tuple[Key, str, int], list[tuple[Reading, Run]]] = {}

    def held(self, grid: Sequence[Key], always: Sequence[Key]) -> tuple[Taken, ...]:
        """All readings: the whole grid once, the better of it again, then the finals of the best
        and of those that are ``always`` in them."""
        going = list(dict.fromkeys(grid))
        for number in range(self._effort.rounds):
            order = list(dict.fromkeys([*going, *always]))
            random.Random(number).shuffle(order)
            self._round(SWEEP, number, order)
            share, most = GOES_ON[min(number, len(GOES_ON) - 1)]
            swept = [each for each in self.taken() if each.key in going]
            self._say(f"round {number + 1} of the sweep: {len(going)} settings")
            going = left_in(swept, share, most)
        swept = [each for each in self.taken() if each.key in going]
        finalists = list(dict.fromkeys([*always, *top(swept, FINALISTS)]))
        for number in range(self._effort.final_rounds):
            at = number % len(finalists)
            self._round(FINALS, number, finalists[at:] + finalists[:at])
        self._say(f"finals of {len(finalists)} settings")
        return self.taken()

    def _round(self, stage: str, number: int, order: Iterable[Key]) -> None:
        """Read each; those that were disturbed from outside again, after the others."""
        left, known = list(order), rates(self.taken())
        for _ in range(1 + self._effort.repeats):
            for key in left:
                began = time.monotonic()
                seconds = seconds_for(key.settings, known.get(key), self._effort.seconds)
                run = self._run(key, Job(key.settings, self._consumer, seconds, number))
                reading = unsettled(reading_of(run, number, time.monotonic() - began), run)
                self._seen.setdefault((key, stage, number), []).append((reading, run))
            disturbed = {
                each.key
                for each in self.taken()
                if each.stage == stage
                and each.reading.round == number
                and quietness(each.reading) < (True, QUIET)
            }
            left = [key for key in left if key in disturbed]

    def taken(self) -> tuple[Taken, ...]:
        """Of each key's readings in a round the one at the highest speed of the cores, with the
        rate that it would have had at full speed; what that is, is known the better the more was
        seen."""
        runs = with_speeds([run for pairs in self._seen.values() for _, run in pairs], self._watch)
        groups: dict[Key, list[Run]] = {}
        with_speed = iter(runs)
        seen = {
            at: [(reading, next(with_speed)) for reading, _ in pairs]
            for at, pairs in self._seen.items()
        }
        for (key, _, _), pairs in seen.items():
            groups.setdefault(key, []).extend(run for _, run in pairs)
        slowed = slowing(list(groups.values()), self._watch)
        found = []
        for (key, stage, _), pairs in seen.items():
            readings = [
                at_full_speed(reading, run, slowed) if is_settled(run) else reading
                for reading, run in pairs
            ]
            found.append(Taken(key, stage, max(readings, key=quietness)))
        return tuple(found)


def seconds_for(settings: LoaderSettings, known: float | None, seconds: float) -> float:
    """How long a run has to be that is known to give so many batches a second: until the queues
    are as full as they will be, for which it gets twice its time, and then some batches."""
    if not known:
        return seconds
    wanted = max(COUNTED / known, 0.6 * warm_up(settings) / known)
    return min(LONGEST * seconds, max(seconds, wanted))


def is_settled(run: Run) -> bool:
    """Did it come to its steady state? Its first batches come in bursts."""
    return len(run.handed) > warm_up(run.settings) + 1


def unsettled(reading: Reading, run: Run) -> Reading:
    """The reading as it is, or of a run that was too slow to settle what it had made in all."""
    if reading.batches_per_s is None or is_settled(run):
        return reading
    rate = len(run.handed) / float(run.handed[-1] - run.began)
    return dataclasses.replace(reading, batches_per_s=rate, as_run=rate)


def contest(
    places: Places,
    keys: Sequence[Key],
    always: Sequence[Key],
    consumer: Consumer,
    effort: Effort,
    say: Say,
) -> tuple[Taken, ...]:
    """:meth:`Contest.held` in places, while the cores' speed is watched."""
    with CoreSpeeds() as watch:
        return Contest(
            lambda key, job: places[key.place].run(job), consumer, effort, watch, say
        ).held(keys, always)


def keys_of(grids: Mapping[str, Sequence[LoaderSettings]]) -> list[Key]:
    """The settings of each place."""
    return [Key(name, settings) for name, grid in grids.items() for settings in grid]


def with_pages(consumer: Consumer, pageable_s: float) -> Consumer:
    """The consumer with what copying a batch that is not pinned takes, unless it has that."""
    if not consumer.step_s or consumer.pageable_s:
        return consumer
    return dataclasses.replace(consumer, pageable_s=pageable_s)
