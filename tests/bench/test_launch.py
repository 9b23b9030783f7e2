"""What of the benchmark of launch lines could be wrong without a figure showing it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.findings.facts import Failure
from trainfit.hardware.machine.core_speed import CoreSpeeds
from trainfit.loader.measure.records import Run, warm_up
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.measurement import Consumer

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
MODULES = (
    *("_bench", "_launch_cases", "_launch_figures", "_launch_lines", "_launch_place"),
    *("_launch_rig", "_launch_study", "_loader_figures", "_loader_images", "_loader_sweep"),
    *("launch", "loader_workloads"),
)


@pytest.fixture(autouse=True, scope="module")
def _bench_path() -> Iterator[None]:
    others = {name: sys.modules.get(name) for name in ("dataset", "make_dataset")}
    sys.path.insert(0, str(BENCH))
    yield
    sys.path.remove(str(BENCH))
    for name in (*MODULES, *others):
        sys.modules.pop(name, None)
    sys.modules.update({name: module for name, module in others.items() if module is not None})


def figures() -> Any:
    return importlib.import_module("_launch_figures")


def lines() -> Any:
    return importlib.import_module("_launch_lines")


def rig() -> Any:
    return importlib.import_module("_launch_rig")


def key(workers: int, place: str = "own") -> Any:
    return figures().Key(place, LoaderSettings(workers))


def taken(which: Any, rate: float | None, number: int = 0, stage: str = "finals") -> Any:
    reading = importlib.import_module("_loader_figures").Reading
    found = reading(which.settings, number, rate, 0.0, 1.0, "" if rate else "died", rate)
    return figures().Taken(which, stage, found)


def study(**parts: Any) -> Any:
    return figures().Study("a", "python a.py", **parts)


# Regret ------------------------------------------------------------------------------------------


def test_regret_is_what_the_launch_lacks_to_the_best() -> None:
    finals = [taken(key(1), 8.0, n) for n in range(4)] + [taken(key(2), 10.0, n) for n in range(4)]
    found = study(taken=tuple(finals), launch=key(1), own=key(1))
    assert figures().regret_percent(found) == pytest.approx(20.0)
    assert figures().regret_percent(dataclasses.replace(found, launch=key(2))) == 0.0


def test_the_best_of_noisy_readings_is_judged_by_other_rounds_than_it_is_measured_by() -> None:
    """Equal settings of which each was lucky once: none is better than the launch."""
    lucky = [[12.0, 10.0, 10.0, 10.0], [10.0, 12.0, 10.0, 10.0], [10.0] * 4]
    finals = [
        taken(key(at), rate, number)
        for at, rates in enumerate(lucky)
        for number, rate in enumerate(rates)
    ]
    found = study(taken=tuple(finals), launch=key(2), own=key(2))
    assert figures().regret_percent(found) == pytest.approx(0.0)


def test_regret_is_not_below_nothing() -> None:
    """What was best in half of the rounds may be slower than the launch in the others."""
    finals = [taken(key(1), 10.0, n) for n in range(4)]
    finals += [taken(key(2), 11.0 if n % 2 else 8.0, n) for n in range(4)]
    found = study(taken=tuple(finals), launch=key(1), own=key(1))
    assert figures().regret_percent(found) == 0.0


def test_the_sweep_does_not_count() -> None:
    readings = [taken(key(1), 10.0, n) for n in range(2)]
    readings += [taken(key(2), 99.0, n, "sweep") for n in range(2)]
    assert figures().regret_percent(study(taken=tuple(readings), launch=key(1))) == 0.0


@pytest.mark.parametrize("rate", [None, 0.0])
def test_a_launch_that_does_not_run_is_all_regret(rate: float | None) -> None:
    readings = [taken(key(1), rate, n) for n in range(2)]
    readings += [taken(key(2), 10.0, n) for n in range(2)]
    assert figures().regret_percent(study(taken=tuple(readings), launch=key(1))) == 100.0
    assert figures().regret_percent(study(failure="it failed")) == 100.0


# Against the user's own line ---------------------------------------------------------------------


def against_own(mine: list[float], own: list[float]) -> Any:
    readings = [taken(key(1), rate, n) for n, rate in enumerate(mine)]
    readings += [taken(key(2), rate, n) for n, rate in enumerate(own)]
    return figures().versus_own(study(taken=tuple(readings), launch=key(1), own=key(2)))


def test_rounds_are_compared_one_by_one() -> None:
    """The machine's speed drifts from round to round; what both met is no noise."""
    found = against_own([8.0, 16.0, 4.0], [10.0, 20.0, 5.0])
    assert found.gain == pytest.approx(-0.2)
    assert found.noise == pytest.approx(0.0, abs=1e-9)
    assert found.slower


def test_less_than_the_noise_is_not_slower_but_much_is_whatever_the_noise() -> None:
    assert not against_own([9.8, 10.3, 9.7, 10.0], [10.0] * 4).slower
    noisy = against_own([6.0, 12.0, 7.0, 9.0], [10.0] * 4)
    assert noisy.noise > 0.2
    assert noisy.slower


def test_half_a_percent_is_not_slower() -> None:
    assert not against_own([9.95] * 4, [10.0] * 4).slower


def test_lines_that_amount_to_the_same_are_equal() -> None:
    found = figures().versus_own(study(launch=key(1), own=key(1)))
    assert (found.gain, found.noise, found.slower) == (0.0, 0.0, False)


# Figures -----------------------------------------------------------------------------------------


def by_name(studies: list[Any], wanted: int) -> dict[str, Any]:
    return {each.name: each for each in figures().figures(studies, wanted)}


def test_a_script_that_failed_reaches_no_goal() -> None:
    found = by_name([study(failure="the plan failed")], 1)
    assert found["launch_worst_regret"].value == 100.0
    assert found["launch_slower_than_own"].value == 1
    assert not any(found[name].holds for name in ("launch_scripts", "launch_planned_twice"))


def test_one_that_was_left_out_is_missing_in_the_count() -> None:
    readings = tuple(taken(key(1), 10.0, n) for n in range(2))
    good = study(taken=readings, launch=key(1), own=key(1), lines=("x", "x"), said=("y", "y"))
    assert all(each.holds for each in figures().figures([good], 1))
    assert not by_name([good], 2)["launch_scripts"].holds


def test_another_line_of_the_second_plan_counts() -> None:
    said = {"said": ("2 workers", "2 workers")}
    assert by_name([study(lines=("a", "b"), **said)], 1)["launch_other_line"].value == 1
    assert by_name([study(lines=("a", "a"), **said)], 1)["launch_other_line"].value == 0
    by_hand = study(lines=("a", "a"), said=("2 workers", "0 workers"))
    assert by_name([by_hand], 1)["launch_other_line"].value == 1
    once = by_name([study(lines=("a",), said=("2 workers",))], 1)
    assert once["launch_other_line"].value == 0
    assert not once["launch_planned_twice"].holds


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    whole = study(
        taken=(taken(key(1), 10.0), taken(key(2), None, 1, "sweep")),
        launch=key(1, "launch"),
        own=key(2),
        lines=("a", "b"),
        said=("c", "d"),
        places={"own": "a.py"},
        by_hand=("num_workers=2",),
    )
    figures().save(tmp_path / "r.json", [whole], {"wanted": 1})
    assert figures().load(tmp_path / "r.json") == ([whole], {"wanted": 1})


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "trainfit-launch-0"}', "\x00"])
def test_another_file_is_no_record(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"no record of launch\.py"):
        figures().load(file)


# Lines and the grid ------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train it.py"
    path.write_text("")
    return path


def test_a_line_is_its_variables_its_programs_and_its_arguments(script: Path) -> None:
    found = lines().read_line(
        f"OMP_NUM_THREADS=1 nice -n 5 taskset -c 0,1 python -u '{script}' --name='a b' -j 2"
    )
    assert found.variables == (("OMP_NUM_THREADS", "1"),)
    assert found.wrapper == ("nice", "-n", "5", "taskset", "-c", "0,1")
    assert found.python == (sys.executable, "-u")
    assert (found.target.name, found.target.args) == (str(script), ("--name=a b", "-j", "2"))


def test_variables_of_env_are_no_program(script: Path) -> None:
    found = lines().read_line(f"env OMP_NUM_THREADS=1 python '{script}'")
    assert found.variables == (("OMP_NUM_THREADS", "1"),)
    assert found.wrapper == ("env",)


def test_the_users_line_is_judged_with_the_arguments_of_the_launch(script: Path) -> None:
    own = lines().read_line(f"MKL_NUM_THREADS=2 python '{script}' --batch-size=8")
    launch = lines().read_line(f"taskset -c 0 python '{script}' --batch-size=64")
    found = lines().in_place_of(own, launch)
    assert found.variables == own.variables
    assert found.wrapper == ()
    assert found.target.args == ("--batch-size=64",)


def test_threads_are_set_for_every_library_and_by_the_scripts_option(script: Path) -> None:
    own = lines().read_line(f"OMP_NUM_THREADS=4 HOME=/x python '{script}' --threads=0")
    found = dict(own.with_threads(1, "--threads").variables)
    assert found.pop("HOME") == "/x"
    assert set(found) == set(lines().THREAD_VARIABLES)
    assert set(found.values()) == {"1"}
    assert own.with_threads(1, "--threads").target.args == ("--threads=0", "--threads=1")


@given(st.lists(st.integers(0, 8), min_size=1), st.lists(st.integers(1, 8), min_size=1))
def test_the_grid_has_every_setting_once(workers: list[int], prefetch: list[int]) -> None:
    found = lines().grid(workers, prefetch, LoaderSettings(1, pin_memory=True))
    pairs = {(each.num_workers, each.prefetch_factor) for each in found if each.num_workers}
    assert pairs == {(w, p) for w in workers if w for p in prefetch}
    assert sum(not each.num_workers for each in found) == (0 in workers)
    assert len(found) == len(set(found))
    assert all(each.pin_memory for each in found)


@pytest.mark.parametrize(
    ("pools", "number", "same"),
    [
        ({"openblas": 2, "torch": 2}, 2, True),
        ({"openblas": 2, "torch": 2}, 1, False),
        ({"openblas": 2, "torch": 4}, 2, False),
        ({}, 1, True),
        ({}, 2, False),
    ],
)
def test_threads_that_a_line_has_anyway_are_not_measured_twice(
    pools: dict[str, int], number: int, same: bool
) -> None:
    assert lines().same_threads(pools, number) is same


def test_what_a_line_does_not_say_is_to_be_set_by_hand() -> None:
    said, wanted = LoaderSettings(0), LoaderSettings(2, 4, persistent_workers=True)
    assert lines().not_said(said, wanted) == ["num_workers=2", "prefetch_factor=4"]
    assert lines().not_said(LoaderSettings(2, 4), wanted) == []
    # Without workers there is nothing to fetch ahead.
    assert lines().not_said(LoaderSettings(0, 4), LoaderSettings(0)) == []


# Measuring ---------------------------------------------------------------------------------------


def a_run(settings: LoaderSettings, rate: float, batches: int = 100) -> Run:
    handed = 10.0 + np.arange(1, batches + 1) / rate
    return Run(settings, 0.0, began=10.0, handed=handed, waited=np.zeros(batches))


def held(rates: dict[Any, float], grid: list[Any], always: list[Any], **effort: Any) -> Any:
    """A contest in which each key has a rate; what was run, in order, and what was read."""
    asked: list[Any] = []

    def run(which: Any, job: Any) -> Run:
        asked.append(which)
        if not rates[which]:
            return Run(job.settings, 0.0, failure=Failure("Died", "it died"))
        return a_run(job.settings, rates[which])

    contest = rig().Contest(
        run, Consumer(0.0), rig().Effort(repeats=0, **effort), CoreSpeeds(), lambda text: None
    )
    return asked, contest.held(grid, always)


def test_every_setting_is_measured_once_and_the_clearly_bad_ones_only_once() -> None:
    rates = {key(0): 1.0, key(1): 10.0, key(2): 9.9, key(3): 0.0, key(4, "launch"): 2.0}
    grid = [each for each in rates if each.place == "own"]
    asked, found = held(rates, grid, [key(4, "launch"), key(0)], rounds=3, final_rounds=2)
    swept = [each.key for each in found if each.stage == "sweep"]
    assert set(swept) == set(rates)
    assert swept.count(key(3)) == 1
    assert swept.count(key(1)) == swept.count(key(2)) == 3
    finals = {each.key for each in found if each.stage == "finals"}
    assert finals == {key(1), key(2), key(4, "launch"), key(0)}
    assert len(asked) == len(found)


def test_each_round_of_the_finals_begins_with_another() -> None:
    rates = {key(1): 10.0, key(2): 10.0}
    asked, _ = held(rates, list(rates), [key(1)], rounds=1, final_rounds=2)
    assert asked[-4] != asked[-2]


def test_a_run_too_slow_to_settle_is_not_taken_by_its_bursts() -> None:
    """Two workers hand over four batches at once, after four seconds."""
    settings = LoaderSettings(2)
    handed = np.array([14.0, 14.001, 14.002, 14.003])
    slow = Run(settings, 0.0, began=10.0, handed=handed, waited=np.zeros(4))
    assert slow.batches_per_s == pytest.approx(1000.0)
    sweep = importlib.import_module("_loader_sweep")
    found = rig().unsettled(sweep.reading_of(slow, 0, 5.0), slow)
    assert found.batches_per_s == pytest.approx(1.0, rel=0.01)
    fast = a_run(settings, 50.0)
    assert rig().unsettled(sweep.reading_of(fast, 0, 5.0), fast).batches_per_s == pytest.approx(50)


def test_a_slow_setting_gets_the_time_to_settle() -> None:
    settings = LoaderSettings(4, 4)
    assert rig().seconds_for(settings, None, 1.0) == 1.0
    assert rig().seconds_for(settings, 1000.0, 1.0) == 1.0
    assert 2 * rig().seconds_for(settings, 12.0, 1.0) > warm_up(settings) / 12.0
    assert rig().seconds_for(settings, 0.1, 1.0) == rig().LONGEST


@pytest.mark.slow
def test_a_place_runs_the_scripts_loader_in_the_lines_environment(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch\n"
        "from torch.utils.data import DataLoader\n"
        "class Data:\n"
        "    def __len__(self): return 64\n"
        "    def __getitem__(self, i): return torch.ones(int(os.environ['OMP_NUM_THREADS']))\n"
        "if __name__ == '__main__':\n"
        "    model = torch.nn.Linear(1, 1).cuda()\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for x in DataLoader(Data(), 4, num_workers=1, prefetch_factor=3):\n"
        "        model(x.cuda()).sum().backward()\n"
        "        optimizer.step()\n"
    )
    line = lines().read_line(f"OMP_NUM_THREADS=1 nice -n 1 python '{script}'")
    place = importlib.import_module("_launch_place")
    with rig().Places("RTX 4090") as places:
        name = places.name(line, "launch")
        assert places.name(line, "the same") == name == "launch"
        assert places[name].ready.present == LoaderSettings(1, 3)
        assert "torch" not in places[name].ready.pools
        run = places[name].run(place.Job(LoaderSettings(2, 1), Consumer(0.001), 0.2, 0))
        assert run.failure is None
        assert run.settings.num_workers == 2
        assert run.batches_per_s is not None
        script.write_text("raise SystemExit('no data')\n")
        with pytest.raises(rig().PlaceError, match="no data"):
            places.name(line.with_threads(2), "2 threads")


# The scripts -------------------------------------------------------------------------------------


def ran(name: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    path = BENCH / "launch_scripts" / name
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.filterwarnings("ignore")
def test_scripts_without_files_make_two_steps_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran("whiten.py", monkeypatch, "--steps=2", "--samples=8", "--channels=96")
    ran("tokenise.py", monkeypatch, "--limit=2", "--epochs=1", "--texts=64", "-j0", "--cpu")
    ran("language_model.py", monkeypatch, "--iterations=2", "--dim=24", "--layers=1")
    ran("tiny_mlp.py", monkeypatch, "--steps=2", "--no-cuda")
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_the_script_with_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "r.npy", np.ones((300, 4), np.float16))
    words = ("--length=64", "--batch-size=2", "--steps=2", "--device=cpu")
    ran("recording_windows.py", monkeypatch, str(tmp_path / "r.npy"), *words)
    assert "step 0" in capsys.readouterr().out


def test_the_script_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cv2")
    images = importlib.import_module("_loader_images")
    folder = Path(images.image_paths(tmp_path, 4, "jpg", 60, 80)[0]).parent
    words = (f"--data={folder}", "-b2", "-j0", "--max-steps=2", "--device=cpu", "--size=32")
    ran("opencv_augment.py", monkeypatch, *words)


def test_the_script_with_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("av")
    workloads = importlib.import_module("loader_workloads")
    root = workloads.BY_NAME["act_video"].dataset(tmp_path, 8).root
    words = ("--num_workers=0", "--samples=8", "--steps=2", "--size=32", "--device=cpu")
    ran("video_frames.py", monkeypatch, str(root), *words)
    assert "done 2" in capsys.readouterr().out


def test_all_eight_kinds_of_scripts_are_there_and_their_files_too() -> None:
    cases = importlib.import_module("_launch_cases")
    assert len(cases.CASES) == len(cases.BY_CASE) == 8
    assert all(each.script.is_file() for each in cases.CASES)
    assert set(cases.QUICK) <= set(cases.BY_CASE)


def test_a_script_whose_package_is_absent_is_left_out_with_the_reason(tmp_path: Path) -> None:
    cases = importlib.import_module("_launch_cases")
    case = dataclasses.replace(cases.BY_CASE["opencv"], needs="no_such_package")
    missing = importlib.import_module("loader_workloads").NotInstalledError
    with pytest.raises(missing, match="pip install opencv-python-headless"):
        case.command(tmp_path)


# The command -------------------------------------------------------------------------------------


def test_kept_readings_are_summed_without_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readings = tuple(taken(key(1), 10.0, n) for n in range(2))
    good = study(taken=readings, launch=key(1), own=key(1), lines=("x", "x"), said=("y", "y"))
    good = dataclasses.replace(good, step_s=0.01, tuned_step_s=0.02)
    about = {"wanted": 2, "left_out": {"opencv": "not installed: pip install it"}}
    figures().save(tmp_path / "r.json", [good], about)
    launch = importlib.import_module("launch")
    assert launch.main(["--read", str(tmp_path / "r.json")]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "opencv: left out, not installed: pip install it" in out
    assert "    the plan tuned the loader for a step of 20.00 ms" in out
    assert "launch_median_regret: 0% (goal at most 5%) holds" in out
    assert out[-1] == "launch_scripts: 1 (goal at least 2) short"
    assert launch.main(["--read", str(tmp_path / "r.json"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["details"]["scripts"][0]["regret_percent"] == 0.0


@pytest.mark.parametrize(
    "words",
    [
        *(["--rounds=0"], ["--seconds=0"], ["--workers", "-1"], ["--threads", "0"]),
        *(["--read", "nowhere.json"], ["--record", "no/where.json"], ["--only", "nothing"]),
    ],
)
def test_options_that_cannot_work_end_in_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        importlib.import_module("launch").main(words)
    assert raised.value.code == 2
    assert ": error: " in capsys.readouterr().err.splitlines()[-1]
