"""What was read of launch lines, and the figures that follow from it.

Nothing is measured here: figures are functions of readings, which are kept as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _bench import Figure
from _loader_figures import Reading

from trainfit.loader.measure.loop import is_disturbed
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.files.decoding import decode, write_whole

FORMAT = "trainfit-launch-1"
#: Stages of a study.
SWEEP, FINALS = "sweep", "finals"
GOALS = {"median": 5.0, "worst": 15.0}
#: A line is slower than another where it is by more than the noise; that is taken to be no less
#: than the first, and to excuse no more than the second.
LEAST_NOISE, MOST_NOISE = 0.01, 0.05
#: Student's t, 97.5%, by degrees of freedom.
_STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_STUDENT_MORE = 2.2


@dataclass(frozen=True)
class Key:
    """What was measured: the loader with ``settings`` in the process ``place``."""

    place: str
    settings: LoaderSettings


@dataclass(frozen=True)
class Taken:
    """One reading of a stage."""

    key: Key
    stage: str
    reading: Reading


@dataclass(frozen=True)
class Study:
    """One script.

    ``lines`` are the launch lines of the plans that were made, and ``said`` the settings that they
    recommend, whether the line can say them or not; ``launch`` and ``own`` are what the first of
    them and the user's line amount to. ``by_hand`` is what the launch needs in addition to the
    line. ``places`` are the variables (and programs) of each place, in words. ``step_s`` is the
    consumer's, ``tuned_step_s`` the one that the plan tuned the loader for. ``failure``: it came to
    no figure, and why.
    """

    script: str
    command: str
    lines: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    plan_seconds: tuple[float, ...] = ()
    step_s: float = 0.0
    tuned_step_s: float = 0.0
    batch_size: int | None = None
    launch: Key | None = None
    own: Key | None = None
    by_hand: tuple[str, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)
    taken: tuple[Taken, ...] = ()
    seconds: float = 0.0
    failure: str = ""

    def of(self, stage: str) -> list[Taken]:
        return [each for each in self.taken if each.stage == stage]

    @property
    def same_line(self) -> bool | None:
        """Did all plans print one line and recommend the same? ``None``: it was planned once."""
        return len({*zip(self.lines, self.said, strict=True)}) == 1 if self.lines[1:] else None


# What follows from readings ----------------------------------------------------------------------


def rates(taken: Iterable[Taken]) -> dict[Key, float]:
    """The median rate of each that ran at least once."""
    found: dict[Key, list[float]] = {}
    for each in taken:
        if each.reading.batches_per_s is not None:
            found.setdefault(each.key, []).append(each.reading.batches_per_s)
    return {key: statistics.median(values) for key, values in found.items()}


def top(taken: Iterable[Taken], count: int) -> list[Key]:
    """The best, the best first."""
    measured = rates(taken)
    return sorted(measured, key=lambda key: -measured[key])[:count]


def left_in(taken: Sequence[Taken], share: float, most: int) -> list[Key]:
    """Those that are worth another round: no slower than ``share`` of the best, and the fastest of
    them where they are many."""
    measured = rates(taken)
    best = max(measured.values(), default=0.0)
    return [key for key in top(taken, most) if measured[key] >= share * best]


def regret_percent(study: Study) -> float | None:
    """How much slower the launch is than the best of all that were in the finals, in percent; 100
    where there is none that runs.

    Which is best is told by every other round, how fast it is by the rounds between, and the other
    way round; the mean counts. The best of several noisy medians would be too high by their noise,
    and so would what the sweep itself said of its best.
    """
    if study.failure or study.launch is None:
        return 100.0
    finals = study.of(FINALS)
    halves = [[each for each in finals if each.reading.round % 2 == half] for half in (0, 1)]
    if not all(halves):
        return _regret(study.launch, finals, finals)
    pairs = ((halves[0], halves[1]), (halves[1], halves[0]))
    regrets = [_regret(study.launch, judges, runs) for judges, runs in pairs]
    told = [regret for regret in regrets if regret is not None]
    # Below 0 it is chance: the launch was among those that the best was chosen from.
    return max(0.0, statistics.fmean(told)) if told else None


def _regret(launch: Key, judges: Sequence[Taken], runs: Sequence[Taken]) -> float | None:
    judged, measured = rates(judges), rates(runs)
    best = max(judged.keys() & measured.keys(), key=lambda each: judged[each], default=None)
    if best is None:
        return None
    return 100 * (1 - measured.get(launch, 0.0) / measured[best])


@dataclass(frozen=True)
class Versus:
    """The launch's rate over that of the user's own line, less 1, and what of it may be chance."""

    gain: float
    noise: float

    @property
    def slower(self) -> bool:
        """By more than the noise?"""
        return self.gain < -max(LEAST_NOISE, min(self.noise, MOST_NOISE))


def versus_own(study: Study) -> Versus | None:
    """From rounds in which both were read, one after the other; ``None`` where none was.

    The gain is the mean of the rounds' (of their logarithms), the noise half of its 95% interval.
    Lines that amount to the same are equal.
    """
    if study.launch is None or study.own is None or study.failure:
        return None
    if study.launch == study.own:
        return Versus(0.0, 0.0)
    mine, own = (_by_round(study, key) for key in (study.launch, study.own))
    logs = [math.log(mine[number] / own[number]) for number in sorted(mine.keys() & own.keys())]
    if not logs:
        return None
    gain = math.expm1(statistics.fmean(logs))
    if len(logs) < 2:
        return Versus(gain, math.inf)
    freedom = len(logs) - 2
    student = _STUDENT[freedom] if freedom < len(_STUDENT) else _STUDENT_MORE
    return Versus(gain, student * statistics.stdev(logs) / math.sqrt(len(logs)))


def _by_round(study: Study, key: Key) -> dict[int, float]:
    found = (each.reading for each in study.of(FINALS) if each.key == key)
    return {each.round: each.batches_per_s for each in found if each.batches_per_s}


def disturbed(study: Study) -> tuple[int, int]:
    """Readings of the finals that were taken while other processes took cores, and all of them."""
    finals = [each.reading.others_cores for each in study.of(FINALS)]
    return sum(map(is_disturbed, finals)), len(finals)


def median(values: Sequence[float]) -> float:
    """NaN of none: a figure without readings holds no goal."""
    return statistics.median(values) if values else math.nan


# Figures -----------------------------------------------------------------------------------------


def figures(studies: Sequence[Study], wanted: int) -> list[Figure]:
    """Those of issue 21; ``wanted`` scripts were to be measured."""
    regrets = [found for each in studies if (found := regret_percent(each)) is not None]
    compared = [found for each in studies if (found := versus_own(each)) is not None]
    planned_twice = [each for each in studies if each.same_line is not None]
    whole = [each for each in studies if not each.failure and each.of(FINALS)]
    missing = len(studies) - len(compared)
    return [
        Figure("launch_median_regret", median(regrets), GOALS["median"], True, "%"),
        Figure("launch_worst_regret", max(regrets, default=math.nan), GOALS["worst"], True, "%"),
        # One that does not run is slower than any line that does.
        Figure("launch_slower_than_own", sum(c.slower for c in compared) + missing, 0, True),
        Figure("launch_other_line", sum(not each.same_line for each in planned_twice), 0, True),
        Figure("launch_planned_twice", len(planned_twice), wanted, False),
        Figure("launch_scripts", len(whole), wanted, False),
    ]


# The record --------------------------------------------------------------------------------------


def save(path: Path, studies: Sequence[Study], about: Mapping[str, Any]) -> None:
    """Keep all readings; the file appears whole or not at all."""
    document = {
        "format": FORMAT,
        "about": dict(about),
        "studies": [dataclasses.asdict(study) for study in studies],
    }
    write_whole(path, json.dumps(document, indent=1))


def load(path: Path) -> tuple[list[Study], dict[str, Any]]:
    """The studies that :func:`save` kept; raises ``ValueError`` for another file."""
    try:
        document = json.loads(path.read_text())
        if document["format"] != FORMAT:
            raise ValueError(f"it has format {document['format']!r}")
        return [decode(Study, each) for each in document["studies"]], document["about"]
    except (KeyError, TypeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is no record of launch.py --record: {error}") from None
