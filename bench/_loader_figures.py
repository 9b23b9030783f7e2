"""What was read in a study of DataLoaders, and the figures that follow from it.

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

from _bench import BenchFigure

from trainfit.loader.tuner import RUN_S
from trainfit.results.dataloader import LoaderSettings, steady

FORMAT = "trainfit-loader-accuracy-3"
OURS = "trainfit"
GOALS = {"median": 5.0, "p90": 12.0, "regret": 3.0, "share": 10.0, "workloads": 8}


@dataclass(frozen=True)
class Reading:
    """One real run: its rate (``None``: it failed, and ``failure`` says how).

    ``batches_per_s`` is at the cores' full speed (trainfit.loader.measure.noise_correction),
    ``as_run`` what the clock said, ``core_speed`` the share of their full speed at which the cores
    ran.
    ``seconds`` is the wall time of all of it, workers' start and warm-up too. ``others_cores`` are
    those that other processes took (trainfit.loader.measure.loop).
    """

    settings: LoaderSettings
    round: int
    batches_per_s: float | None
    waiting_share: float | None
    seconds: float
    failure: str = ""
    as_run: float | None = None
    core_speed: float | None = None
    others_cores: float | None = None


@dataclass(frozen=True)
class SettingPrediction:
    settings: LoaderSettings
    batches_per_s: float


@dataclass(frozen=True)
class ToolChoice:
    """What a tool or a rule chose, and the time that it took; ``None``: it chose nothing.

    ``note`` is what there is to say about it: why there is nothing, or the tool's own words.
    """

    who: str
    settings: LoaderSettings | None
    seconds: float
    note: str = ""


@dataclass
class Study:
    """One workload, with a consumer that takes batches as fast as it can.

    ``sweep`` has every setting of the grid, in rounds; ``finals`` the choices and the sweep's
    best few again. ``full_grid`` is how many settings an exhaustive sweep has, of which
    ``sweep`` may hold a part. ``probe_s`` is what the probe for ``predictions`` took;
    ``probe`` what it said, for who studies errors. ``ours`` is the tool's whole result.
    Runs of the sweep counted batches for ``run_s`` seconds. ``anchors`` are some settings right
    before and after the probe.
    """

    workload: str
    full_grid: int
    predictions: list[SettingPrediction] = field(default_factory=list)
    sweep: list[Reading] = field(default_factory=list)
    choices: list[ToolChoice] = field(default_factory=list)
    finals: list[Reading] = field(default_factory=list)
    probe_s: float = 0.0
    probe: Any = None
    ours: Any = None
    run_s: float = RUN_S
    anchors: list[Reading] = field(default_factory=list)

    def choice(self, who: str) -> ToolChoice | None:
        return next((tool_choice for tool_choice in self.choices if tool_choice.who == who), None)


# What follows from readings ----------------------------------------------------------------------


def rates(readings: Iterable[Reading]) -> dict[LoaderSettings, float]:
    """The median rate of each setting that ran at least once."""
    found: dict[LoaderSettings, list[float]] = {}
    for reading in readings:
        if reading.batches_per_s is not None:
            found.setdefault(reading.settings, []).append(reading.batches_per_s)
    return {settings: statistics.median(values) for settings, values in found.items()}


def drift(study: Study) -> float:
    """How fast the machine was around the probe, over how fast it was in the sweep, by the
    settings that were measured in both; 1 where none was."""
    near, swept = rates(study.anchors), rates(study.sweep)
    ratios = [math.log(near[rate] / swept[rate]) for rate in near if rate in swept]
    return math.exp(statistics.fmean(ratios)) if ratios else 1.0


def errors_percent(study: Study, drifting: bool = False) -> dict[LoaderSettings, float]:
    """Predicted over measured less one, of each setting that was both.

    Measured rates are those of the machine as it was around the probe; ``drifting``: as it was
    minutes later.
    """
    measured, times = rates(study.sweep), 1.0 if drifting else drift(study)
    return {
        prediction.settings: 100
        * (prediction.batches_per_s / (times * measured[prediction.settings]) - 1)
        for prediction in study.predictions
        if prediction.settings in measured
    }


def sweep_seconds(study: Study) -> float:
    """What one measurement of each setting takes by runs as long as ours; of those of the full
    grid that were not measured, as much on average as of those that were."""
    spent: dict[LoaderSettings, list[float]] = {}
    for reading in study.sweep:
        spent.setdefault(reading.settings, []).append(reading.seconds)
    if not spent:
        return 0.0
    each = statistics.fmean(map(statistics.fmean, spent.values()))
    return study.full_grid * max(0.0, each - study.run_s + RUN_S)


def top(study: Study, count: int) -> list[LoaderSettings]:
    """The sweep's best settings, the best first."""
    measured = rates(study.sweep)
    return sorted(measured, key=lambda settings: -measured[settings])[:count]


def regret_percent(study: Study, who: str) -> float | None:
    """How much slower its choice is than the best in the finals; 100 if it does not run.

    Choices and the sweep's best few are measured there again, at the same times. Which is best
    is told by every other round, how fast it is by the rounds between, and the other way round;
    the mean counts. The best of several noisy medians would be too high by their noise.
    """
    halves = [[e for e in study.finals if e.round % 2 == half] for half in (0, 1)]
    pairs = [(halves[0], halves[1]), (halves[1], halves[0])] if all(halves) else []
    regrets = [_regret(study, who, judges, runs) for judges, runs in pairs]
    if not regrets or None in regrets:
        return _regret(study, who, study.finals, study.finals)
    return statistics.fmean(regret for regret in regrets if regret is not None)


def _regret(
    study: Study, who: str, judges: Sequence[Reading], runs: Sequence[Reading]
) -> float | None:
    choice = study.choice(who)
    judged, measured = rates(judges), rates(runs)
    best = max(judged.keys() & measured.keys(), key=lambda each: judged[each], default=None)
    if choice is None or best is None:
        return None
    if choice.settings is None:  # of ours that is a failure; a rival may not be installed
        return 100.0 if who == OURS else None
    return 100 * (1 - measured.get(steady(choice.settings), 0.0) / measured[best])


def spread_percent(studies: Iterable[Study]) -> list[float]:
    """How far single runs are from the median of the other runs of the same setting.

    No prediction can be expected to be nearer than that to what is measured.
    """
    distances = []
    for study in studies:
        runs: dict[LoaderSettings, list[float]] = {}
        for reading in study.sweep:
            if reading.batches_per_s is not None:
                runs.setdefault(reading.settings, []).append(reading.batches_per_s)
        for values in runs.values():
            for index, value in enumerate(values):
                if others := values[:index] + values[index + 1 :]:
                    distances.append(100 * abs(value / statistics.median(others) - 1))
    return distances


def core_speed_percent(study: Study) -> float:
    """The cores' mean speed in all readings, of their full speed."""
    speeds = [each.core_speed for each in (*study.sweep, *study.finals) if each.core_speed]
    return 100 * statistics.fmean(speeds) if speeds else math.nan


def percentile_90(values: Sequence[float]) -> float:
    """The 90th percentile (by linear interpolation between the values); NaN of none."""
    if len(values) < 2:
        return values[0] if values else math.nan
    return statistics.quantiles(values, n=10, method="inclusive")[-1]


def median(values: Sequence[float]) -> float:
    """NaN of none: a figure without readings holds no goal."""
    return statistics.median(values) if values else math.nan


# Figures -----------------------------------------------------------------------------------------


def figures(studies: Sequence[Study], wanted: int = GOALS["workloads"]) -> list[BenchFigure]:
    """Of all studies together."""
    errors = _errors(studies)
    regrets = [r for study in studies if (r := regret_percent(study, OURS)) is not None]
    whole = {
        study.workload
        for study in studies
        if study.predictions and (choice := study.choice(OURS)) and choice.settings
    }
    return [
        BenchFigure("loader_median_error", median(errors), GOALS["median"], True, "%"),
        BenchFigure("loader_p90_error", percentile_90(errors), GOALS["p90"], True, "%"),
        BenchFigure("loader_median_regret", median(regrets), GOALS["regret"], True, "%"),
        BenchFigure(
            "loader_time_share", time_share_percent(studies, OURS), GOALS["share"], True, "%"
        ),
        BenchFigure("loader_workloads", len(whole), wanted, False),
    ]


def _errors(studies: Iterable[Study], drifting: bool = False) -> list[float]:
    """Of all settings, in percent."""
    return [
        abs(error)
        for study in studies
        for error in errors_percent(study, drifting=drifting).values()
    ]


def time_share_percent(studies: Iterable[Study], who: str) -> float:
    """Its time in all studies over the sweeps' in the same."""
    spent = swept = 0.0
    for study in studies:
        choice = study.choice(who)
        if choice is not None and choice.settings is not None:
            spent += choice.seconds
            swept += sweep_seconds(study)
    return 100 * spent / swept if swept else math.nan


def details(studies: Sequence[Study]) -> dict[str, Any]:
    """What is behind the figures."""
    spread = spread_percent(studies)
    drifting = _errors(studies, drifting=True)
    return {
        "studies": [study_row(study) for study in studies],
        "drifting_median_percent": median(drifting),
        "drifting_p90_percent": percentile_90(drifting),
        "single_run_median_percent": median(spread),
        "single_run_p90_percent": percentile_90(spread),
    }


def study_row(study: Study) -> dict[str, Any]:
    signed = errors_percent(study)
    errors = [abs(error) for error in signed.values()]
    finals = rates(study.finals)
    # A setting of which no run at all succeeded: the tool should have known.
    failed = {reading.settings for reading in study.sweep} - set(rates(study.sweep))
    return {
        "workload": study.workload,
        "settings": len({reading.settings for reading in study.sweep}),
        "settings_failed": len(failed),
        "median_error_percent": median(errors),
        "p90_error_percent": percentile_90(errors),
        "bias_percent": median(list(signed.values())),
        "best": max(finals, key=lambda s: finals[s], default=None),
        "best_batches_per_s": max(finals.values(), default=None),
        "sweep_seconds": sweep_seconds(study),
        "probe_seconds": study.probe_s,
        "core_speed_percent": core_speed_percent(study),
        "drift_percent": 100 * (drift(study) - 1),
        "choices": [
            {
                "who": choice.who,
                "settings": choice.settings,
                "seconds": choice.seconds,
                "note": choice.note,
                "regret_percent": regret_percent(study, choice.who),
            }
            for choice in study.choices
        ],
    }


def plain(value: Any) -> Any:
    """``value`` as JSON has it: settings by their names; NaN, which JSON has not, as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# Files -------------------------------------------------------------------------------------------


def save(path: Path, studies: Sequence[Study], about: Mapping[str, Any]) -> None:
    """Readings as JSON; the file appears whole."""
    document = {"format": FORMAT, "about": plain(about), "studies": plain(list(studies))}
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(document, indent=1) + "\n")
    scratch.replace(path)


def load(path: Path) -> list[Study]:
    """What :func:`save` wrote; raises ``ValueError`` for anything else."""
    try:
        document = json.loads(path.read_text())
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}")
        return [_study(row) for row in document["studies"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no readings of loader_accuracy.py: {error}") from None


def _study(row: dict[str, Any]) -> Study:
    lists = {
        "predictions": SettingPrediction,
        "sweep": Reading,
        "choices": ToolChoice,
        "finals": Reading,
    }
    lists |= {"anchors": Reading}
    read = {
        name: [kind(**{**each, "settings": _settings(each["settings"])}) for each in row[name]]
        for name, kind in lists.items()
        if name in row
    }
    return Study(**{**row, **read})


def _settings(row: dict[str, Any] | None) -> LoaderSettings | None:
    return LoaderSettings(**row) if row is not None else None
