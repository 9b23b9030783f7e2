"""The parts of the DataLoader benchmark that could be wrong without a figure showing it."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import math
import pickle
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers_cases import some_of
from trainfit.findings.facts import Failure
from trainfit.loader.measure.records import Run
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.measurement import Consumer

BENCH = Path(__file__).resolve().parents[2] / "bench"
MODULES = (
    "_bench",
    "_loader_figures",
    "_loader_images",
    "_loader_sweep",
    "_loader_workloads",
)

ONE, TWO, FOUR = LoaderSettings(1), LoaderSettings(2), LoaderSettings(4)


@pytest.fixture(autouse=True)
def _bench_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCH))
    former = {name: sys.modules.get(name) for name in ("dataset", "make_dataset")}
    yield
    for name in (*MODULES, "loader_accuracy", *former):
        sys.modules.pop(name, None)
    sys.modules.update({name: module for name, module in former.items() if module is not None})


def figures() -> Any:
    return importlib.import_module("_loader_figures")


def reading(
    settings: LoaderSettings, rate: float | None, seconds: float = 1.0, turn: int = 0
) -> Any:
    return figures().Reading(settings, turn, rate, 0.5, seconds, "" if rate else "died", rate)


def study(**parts: Any) -> Any:
    return figures().Study("a", 3, **parts)


# Arithmetic --------------------------------------------------------------------------------------


def test_the_median_of_a_settings_runs_counts_and_failed_runs_do_not() -> None:
    readings = [reading(ONE, rate) for rate in (10.0, None, 30.0, 11.0)] + [reading(TWO, None)]
    assert figures().rates(readings) == {ONE: 11.0}


def test_errors_are_signed_and_of_settings_that_were_both_predicted_and_measured() -> None:
    predicted = [figures().SettingPrediction(ONE, 11.0), figures().SettingPrediction(TWO, 15.0)]
    one = study(predictions=predicted, sweep=[reading(ONE, 10.0), reading(FOUR, 9.0)])
    assert figures().errors_percent(one) == {ONE: pytest.approx(10.0)}


def test_a_sweeps_cost_is_one_run_of_each_setting_whatever_the_rounds() -> None:
    rounds = [reading(ONE, 1.0, 2.0), reading(TWO, 1.0, 4.0), reading(FOUR, None, 9.0)]
    assert figures().sweep_seconds(study(sweep=rounds)) == pytest.approx(15.0)
    assert figures().sweep_seconds(study(sweep=3 * rounds)) == pytest.approx(15.0)
    # Of the full grid's three settings one was left out: it costs what the others do on average.
    assert figures().sweep_seconds(study(sweep=rounds[:2])) == pytest.approx(9.0)


def test_regret_is_against_the_best_of_the_finals_not_of_the_sweep() -> None:
    choices = [
        figures().ToolChoice(figures().OURS, TWO, 1.0),
        figures().ToolChoice("rule", ONE, 0.0),
        figures().ToolChoice("absent", None, 0.0, "not installed"),
        figures().ToolChoice("broken", FOUR, 0.0),
    ]
    finals = [reading(TWO, 18.0), reading(TWO, 20.0), reading(TWO, 19.0)]
    finals += [reading(ONE, 20.0), reading(FOUR, None)]
    one = study(sweep=[reading(ONE, 100.0)], choices=choices, finals=finals)
    regret = figures().regret_percent
    assert regret(one, figures().OURS) == pytest.approx(5.0)
    assert regret(one, "rule") == 0.0
    assert regret(one, "absent") is None
    assert regret(one, "broken") == 100.0


def test_a_failure_of_ours_costs_everything_and_the_workload() -> None:
    good = study(
        predictions=[figures().SettingPrediction(ONE, 10.0)],
        sweep=[reading(ONE, 10.0)],
        choices=[figures().ToolChoice(figures().OURS, ONE, 1.0)],
        finals=[reading(ONE, 10.0)],
    )
    bad = figures().Study("b", 3, sweep=[reading(ONE, 10.0)])
    bad.choices = [figures().ToolChoice(figures().OURS, None, 1.0, "failed")]
    bad.finals = [reading(ONE, 10.0)]
    values = {each.name: each for each in figures().figures([good, bad], wanted=2)}
    assert values["loader_median_regret"].value == pytest.approx(50.0)
    assert values["loader_workloads"].value == 1 and not values["loader_workloads"].holds


def test_figures_of_injected_tables() -> None:
    fast = study(
        predictions=[figures().SettingPrediction(each, 10.0) for each in (ONE, TWO, FOUR)],
        sweep=[reading(ONE, 10.0, 10.0), reading(TWO, 8.0, 10.0), reading(FOUR, 12.5, 10.0)],
        choices=[figures().ToolChoice(figures().OURS, ONE, 2.4)],
        finals=[reading(ONE, 9.9), reading(FOUR, 10.0)],
    )
    other = figures().Study("a", 3, sweep=fast.sweep, finals=fast.finals)
    other.choices = [figures().ToolChoice(figures().OURS, FOUR, 0.6)]
    values = {each.name: each.value for each in figures().figures([fast, other])}
    assert values["loader_median_error"] == pytest.approx(20.0)
    # 0, 20 and 25% (inclusive): 0.8 of the way from the second to the third.
    assert values["loader_p90_error"] == pytest.approx(24.0)
    assert values["loader_median_regret"] == pytest.approx(0.5)
    assert values["loader_time_share"] == pytest.approx(100 * 3.0 / 60.0)
    assert values["loader_workloads"] == 1


def test_nothing_read_holds_no_goal() -> None:
    found = figures().figures([])
    assert all(math.isnan(each.value) for each in found[:4])
    assert not any(each.holds for each in found)


def test_a_single_run_is_compared_with_the_others_of_its_setting() -> None:
    one = study(sweep=[reading(ONE, 10.0), reading(ONE, 12.0), reading(TWO, 7.0)])
    apart = [100 * (1 - 10 / 12), 100 * (12 / 10 - 1)]
    assert figures().spread_percent([one]) == pytest.approx(apart)


def test_the_cores_speed() -> None:
    one = study(
        predictions=[figures().SettingPrediction(ONE, 10.0)],
        sweep=[
            dataclasses.replace(reading(ONE, 10.0), as_run=8.0, core_speed=0.8),
            dataclasses.replace(reading(ONE, 10.0), as_run=8.0, core_speed=1.0),
        ],
    )
    assert figures().core_speed_percent(one) == pytest.approx(90.0)
    assert math.isnan(figures().core_speed_percent(study()))
    assert figures().errors_percent(one)[ONE] == pytest.approx(0.0)


def test_a_sweep_is_priced_by_runs_as_long_as_ours() -> None:
    one = study(sweep=[reading(ONE, 1.0, 1.4), reading(TWO, 1.0, 1.6)], run_s=1.0)
    ours = figures().RUN_S
    assert figures().sweep_seconds(one) == pytest.approx(3 * (0.5 + ours))


def test_readings_survive_a_file_and_nan_becomes_null(tmp_path: Path) -> None:
    one = study(
        predictions=[figures().SettingPrediction(ONE, 11.0)],
        sweep=[reading(ONE, 10.0), reading(TWO, None)],
        choices=[figures().ToolChoice("absent", None, 0.0, "not installed")],
        probe={"fetch_s": 0.1},
    )
    file = tmp_path / "readings.json"
    figures().save(file, [one], {"torch": "x", "odd": math.nan})
    assert figures().load(file) == [one]
    assert json.loads(file.read_text())["about"]["odd"] is None
    file.write_text('{"format": "another"}')
    with pytest.raises(ValueError, match=r"readings\.json holds no readings"):
        figures().load(file)


# Measuring ---------------------------------------------------------------------------------------


def test_the_grid_has_every_combination_and_nothing_twice() -> None:
    sweep = importlib.import_module("_loader_sweep")
    assert len(sweep.FULL_GRID) == len(set(sweep.FULL_GRID)) == 2 + 6 * 4 * 2 * 2
    assert set(sweep.grid(sweep.QUICK_WORKERS, sweep.QUICK_PREFETCH)) < set(sweep.FULL_GRID)
    assert sum(settings.num_workers == 0 for settings in sweep.FULL_GRID) == 2


class StandIn:
    """A tool that predicts what it is told to, and chooses the same setting each time."""

    def __init__(self, law: Callable[[LoaderSettings], float], chosen: LoaderSettings) -> None:
        self.law, self.chosen = law, chosen
        self.seconds, self.about = 0.25, {"fetch_s": 0.01}
        self.probes, self.steps = 0, []

    def probe(self, _workload: Any, _watch: Any) -> Any:
        self.probes += 1
        return self

    def batches_per_s(self, settings: LoaderSettings, _consumer: Consumer) -> float:
        return self.law(settings)

    def choose(self, _workload: Any, consumer: Consumer, _watch: Any) -> tuple[Any, Any]:
        self.steps.append(consumer.step_s)
        return figures().ToolChoice(figures().OURS, self.chosen, 1.0), {"verdict": "change"}


def fake_run(rate: Callable[[LoaderSettings], float], broken: LoaderSettings) -> Any:
    """In the place of run_loader: 11 batches at a rate, or a failure."""

    def run(_workload: Any, settings: LoaderSettings, *, consumer: Consumer, seconds: float) -> Run:
        if settings == broken:
            failure = Failure("RuntimeError", "no\nmore")  # after batches that were fast
            handed, waited = np.arange(200) / 1e3, np.zeros(200)
            return Run(settings, 0.0, handed=handed, waited=waited, failure=failure)
        handed = np.arange(200) / min(rate(settings), 1 / (consumer.step_s or 1e-9))
        return Run(settings, consumer.step_s, handed=handed, waited=np.zeros(200))

    return run


def test_a_study_measures_the_grid_then_choices_and_the_best_again(tmp_path: Path) -> None:
    sweep, workloads = (importlib.import_module(n) for n in ("_loader_sweep", "_loader_workloads"))
    grid = (LoaderSettings(0), ONE, TWO, FOUR)
    chosen = LoaderSettings(3)
    persistent = LoaderSettings(3, persistent_workers=True)  # which no steady state shows

    def rate(settings: LoaderSettings) -> float:
        return 10.0 * (1 + min(settings.num_workers, 3))

    tool = StandIn(lambda settings: 1.1 * rate(settings), persistent)
    plan = sweep.SweepPlan(grid, 0.1, rounds=3, final_rounds=2)
    run = fake_run(rate, broken=FOUR)
    case = workloads.BY_NAME["heavy_tail"]
    said: list[str] = []
    bench = sweep.LoaderStudy(case, tmp_path, plan, tool, said.append, run)
    kept: list[int] = []
    (found,) = sweep.studied([bench], lambda studies: kept.append(len(studies)))
    assert kept == [1] and said and tool.probes == 1

    assert len(found.sweep) == 12
    rounds = [[each.settings for each in found.sweep[4 * n : 4 * n + 4]] for n in range(3)]
    assert all(set(order) == set(grid) for order in rounds) and len(set(map(tuple, rounds))) > 1
    assert {each.failure for each in found.sweep if each.settings == FOUR} == {"RuntimeError: no"}
    # Without FOUR, TWO is the fastest of the grid.
    finalists = {each.settings for each in found.finals}
    assert finalists == {chosen, TWO, ONE, LoaderSettings(0)}
    assert len(found.finals) == 2 * len(finalists)
    errors = figures().errors_percent(found)
    assert errors == {each: pytest.approx(10.0) for each in grid[:3]}
    assert figures().regret_percent(found, figures().OURS) == pytest.approx(0.0)
    row = figures().study_row(found)
    assert row["settings_failed"] == 1 and row["bias_percent"] == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("speeds", "kept"), [((0.6, 0.95), 0.95), ((0.9,), 0.9), ((0.6, 0.5), 0.6)]
)
def test_a_probe_on_slowed_cores_is_made_again(
    tmp_path: Path, speeds: tuple[float, ...], kept: float
) -> None:
    """Once more where one repeat is allowed; the quietest counts."""
    sweep, workloads = (importlib.import_module(n) for n in ("_loader_sweep", "_loader_workloads"))

    class Watching(StandIn):
        def probe(self, workload: Any, watch: Any) -> Any:
            super().probe(workload, watch)
            speed = speeds[self.probes - 1]
            found = StandIn(self.law, ONE)
            found.about = {"core_speed": speed}
            return found

    tool = Watching(lambda settings: 10.0, ONE)
    plan = sweep.SweepPlan((LoaderSettings(0), ONE), 0.01, 1, 1, repeats=1)
    case = workloads.BY_NAME["lock_bound"]  # without files
    run = fake_run(lambda settings: 10.0, FOUR)
    bench = sweep.LoaderStudy(case, tmp_path, plan, tool, lambda line: None, run)
    study = bench.study()
    assert tool.probes == len(speeds) and study.probe == {"core_speed": kept}


def test_a_machine_that_drifts_is_no_error(tmp_path: Path) -> None:
    """A fifth slower around the probe than in the sweep's first round and second."""
    sweep, workloads = (importlib.import_module(n) for n in ("_loader_sweep", "_loader_workloads"))
    runs: list[LoaderSettings] = []
    grid = (LoaderSettings(0), ONE, LoaderSettings(1, 4), LoaderSettings(2, 4))

    def rate(settings: LoaderSettings) -> float:
        near_the_probe = len(grid) < len(runs) <= len(grid) + 6
        return (8.0 if near_the_probe else 10.0) * (1 + settings.num_workers)

    plain = fake_run(rate, FOUR)

    def run(workload: Any, settings: LoaderSettings, **options: Any) -> Run:
        runs.append(settings)
        return plain(workload, settings, **options)

    tool = StandIn(lambda settings: 8.0 * (1 + settings.num_workers), ONE)
    plan = sweep.SweepPlan(grid, 0.01, rounds=2, final_rounds=1)
    case = workloads.BY_NAME["lock_bound"]  # without files
    bench = sweep.LoaderStudy(case, tmp_path, plan, tool, lambda line: None, run)
    study = bench.study()
    assert len(study.anchors) == 6
    assert figures().drift(study) == pytest.approx(0.8)
    assert figures().errors_percent(study) == {each: pytest.approx(0.0) for each in grid}
    drifting = figures().errors_percent(study, drifting=True)
    assert drifting == {each: pytest.approx(-20.0) for each in grid}
    row = figures().study_row(study)
    assert row["drift_percent"] == pytest.approx(-20.0)
    assert figures().details([study])["drifting_median_percent"] == pytest.approx(20.0)


def test_a_reading_beside_other_processes_is_taken_again(tmp_path: Path) -> None:
    """Once, where one repeat is allowed; the one without them counts."""
    sweep, workloads = (importlib.import_module(n) for n in ("_loader_sweep", "_loader_workloads"))
    runs: list[LoaderSettings] = []
    plain = fake_run(lambda settings: 10.0 + runs.count(settings), FOUR)

    def run(workload: Any, settings: LoaderSettings, **options: Any) -> Run:
        runs.append(settings)
        others = 1.0 if settings == ONE and runs.count(ONE) == 1 else 0.1
        return dataclasses.replace(plain(workload, settings, **options), others_cores=others)

    tool = StandIn(lambda settings: 10.0, ONE)
    plan = sweep.SweepPlan((LoaderSettings(0), ONE), 0.01, 1, 1, repeats=1)
    case = workloads.BY_NAME["lock_bound"]  # without files
    bench = sweep.LoaderStudy(case, tmp_path, plan, tool, lambda line: None, run)
    study = bench.study()
    (kept,) = [each for each in study.sweep if each.settings == ONE]
    assert kept.others_cores == 0.1 and kept.batches_per_s == pytest.approx(12.0)
    assert runs[:3].count(ONE) == 2 and len(study.sweep) == 2


def test_a_tool_that_raises_loses_its_study_only(tmp_path: Path) -> None:
    sweep, workloads = (importlib.import_module(n) for n in ("_loader_sweep", "_loader_workloads"))

    class Raises:
        def probe(self, _workload: Any, _watch: Any) -> Any:
            raise RuntimeError("nothing came\nthrough")

        def choose(self, _workload: Any, _consumer: Consumer, _watch: Any) -> Any:
            raise ValueError("no")

    run = fake_run(lambda _: 10.0, broken=FOUR)
    plan = sweep.SweepPlan((ONE, TWO), 0.1, rounds=1, final_rounds=1)
    case = workloads.BY_NAME["heavy_tail"]
    bench = sweep.LoaderStudy(case, tmp_path, plan, Raises(), lambda _: None, run)
    only = bench.study()
    assert only.choices[0].settings is None and only.choices[0].note == "failed: ValueError: no"
    assert "nothing came" in only.probe and not only.predictions
    assert figures().regret_percent(only, figures().OURS) == 100.0


@pytest.mark.slow
def test_one_real_run_of_the_shared_decoder_by_two_workers(tmp_path: Path) -> None:
    sweep, workloads = (importlib.import_module(n) for n in ("_loader_sweep", "_loader_workloads"))
    tool = StandIn(lambda _: 1.0, ONE)
    plan = sweep.SweepPlan((TWO,), 0.05, rounds=1, final_rounds=1)
    case = workloads.BY_NAME["lock_bound"]
    only = sweep.LoaderStudy(case, tmp_path, plan, tool, lambda _: None).study()
    runs = [*only.sweep, *only.finals]
    assert [each.failure for each in runs] == [""] * 4
    assert all(each.batches_per_s and each.seconds > 0.05 for each in runs)


# Reports -----------------------------------------------------------------------------------------


def test_kept_readings_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = importlib.import_module("loader_accuracy")
    one = study(
        predictions=[figures().SettingPrediction(ONE, 10.2)],
        sweep=[reading(ONE, 10.0, 20.0)],
        choices=[
            figures().ToolChoice(figures().OURS, LoaderSettings(4, 8, True, False), 1.0),
        ],
        finals=[reading(ONE, 10.0), reading(LoaderSettings(4, 8, True, False), 9.8)],
    )
    file = tmp_path / "readings.json"
    figures().save(file, [one], {})
    assert accuracy.main(["--read", str(file)]) == 1  # one workload, not eight
    text = capsys.readouterr().out
    assert "loader_median_error: 2% (goal at most 5%) holds" in text
    assert "loader_median_regret: 2% (goal at most 3%) holds" in text
    assert "loader_time_share: 1.667% (goal at most 10%) holds" in text
    assert "loader_workloads: 1 (goal at least 8) short" in text
    assert "4 × 8, pinned, any order" in text
    assert accuracy.main(["--read", str(file), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (row,) = document["details"]["studies"]
    assert row["choices"][0]["regret_percent"] == pytest.approx(2.0)
    assert row["best"] == {**vars(ONE)}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--only", "nothing"], "invalid choice"),
        (["--read", "absent.json"], "no such file"),
        (["--rounds", "0"], "above 0"),
    ],
)
def test_wrong_options_are_named(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracy = importlib.import_module("loader_accuracy")
    with pytest.raises(SystemExit) as stopped:
        accuracy.main(words)
    assert stopped.value.code == 2 and reason in capsys.readouterr().err


# Workloads ---------------------------------------------------------------------------------------

SHAPES = {
    "act_video": {"head": (2, 3, 180, 320), "state": (2, 26), "action": (2, 100, 26)},
    "jpeg_augment": ((8, 3, 192, 192), (8,)),
    "png": ((6, 3, 288, 384), (6,)),
    "memmap": ((48, 1024, 32), (48,)),
    "hdf5": ((16, 16, 64, 64), (16,)),
    "tiny_in_memory": ((2048, 32), (2048,)),
    "heavy_tail": (1, 64, 64),
    "lock_bound": (8, 64, 64),
}


@pytest.mark.parametrize("name", some_of(SHAPES, 4))
def test_batches_have_their_shape_and_are_finite(name: str, tmp_path: Path) -> None:
    case = importlib.import_module("_loader_workloads").BY_NAME[name]
    if case.needs and importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed")
    batch = next(iter(case.loader(tmp_path, samples=2 * case.batch_size)))
    shapes = SHAPES[name]
    if isinstance(shapes, dict):
        assert {key: tuple(batch[key].shape) for key in shapes} == shapes
        tensors = list(batch.values())
    elif isinstance(shapes[0], tuple):
        assert [tuple(each.shape) for each in batch] == list(shapes)
        tensors = list(batch)
    else:
        assert tuple(batch.shape) == shapes
        tensors = [batch]
    assert all(torch.isfinite(each.float()).all() for each in tensors)
    # Not all alike: a decoder that gives nothing would be quick.
    assert tensors[0].float().std() > 0.01


def test_files_are_made_once_and_the_same_each_time(tmp_path: Path) -> None:
    workloads = importlib.import_module("_loader_workloads")
    jpegs = workloads.BY_NAME["jpeg_augment"]
    one, other = (jpegs.dataset(tmp_path / name, 3) for name in "ab")
    data = [Path(path).read_bytes() for path in one.paths]
    assert data == [Path(path).read_bytes() for path in other.paths] and len(set(data)) == 3
    stamps = [Path(path).stat().st_mtime_ns for path in one.paths]
    again = jpegs.dataset(tmp_path / "a", 3)
    assert [Path(path).stat().st_mtime_ns for path in again.paths] == stamps


def test_files_that_were_not_finished_are_made_anew(tmp_path: Path) -> None:
    kept = importlib.import_module("_loader_workloads").kept

    def stops(scratch: Path) -> None:
        (scratch / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept(tmp_path, "some", stops)
    assert list(tmp_path.iterdir()) == []
    path = kept(tmp_path, "some", lambda scratch: (scratch / "whole").touch())
    assert [each.name for each in path.iterdir()] == ["whole"]


def test_heavy_tail_is_one_and_an_epoch_holds_all_of_it() -> None:
    case = importlib.import_module("_loader_workloads").BY_NAME["heavy_tail"]
    amounts = case.dataset(Path()).amounts
    assert statistics.pstdev(amounts) / statistics.fmean(amounts) >= 1
    assert statistics.fmean(amounts) == pytest.approx(200, rel=0.01)
    assert (case.dataset(Path()).amounts == amounts).all()


@pytest.mark.parametrize("name", ["jpeg_augment", "memmap", "heavy_tail"])
def test_data_sets_can_be_pickled(name: str, tmp_path: Path) -> None:
    case = importlib.import_module("_loader_workloads").BY_NAME[name]
    dataset = case.dataset(tmp_path, 4)
    dataset[1]
    assert len(pickle.loads(pickle.dumps(dataset))) == len(dataset) == 4


def test_a_workload_whose_package_is_absent_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workloads = importlib.import_module("_loader_workloads")
    monkeypatch.setattr(workloads.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(workloads.NotInstalledError, match="pip install h5py"):
        workloads.BY_NAME["hdf5"].loader(tmp_path)
