"""Two watched runs compared: intervals that hold, verdicts that are right, refusals."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_cases import some_of
from helpers_cli import error_line, json_of, trainfit
from trainfit.report.sections.comparison import comparison_subject
from trainfit.report.writers.terminal import screen
from trainfit.results.files.errors import ResultFileError
from trainfit.results.runs import tables
from trainfit.results.runs.watched import (
    RankRecord,
    RunHeader,
    RunRecord,
    WatchedGpu,
    WatchedLoader,
)
from trainfit.results.watch import Comparison
from trainfit.watch.compare import ComparisonError, compare, compare_groups
from trainfit.watch.intervals import Groups, block_length, groups, resample, t_quantile

PAIRS = 200


def noise(random: np.random.Generator, count: int, phi: float = 0.5, spread: float = 0.05) -> Any:
    """AR(1) around 1, with a pause of half a step or more in two of 100 steps."""
    found = np.empty(count)
    before = random.normal() * spread
    for at, shock in enumerate(random.normal(size=count) * spread * math.sqrt(1 - phi**2)):
        before = phi * before + shock
        found[at] = before
    return 1 + found + (random.random(count) < 0.02) * (0.5 + random.exponential(0.2, count))


def loader(**what: Any) -> WatchedLoader:
    known: dict[str, Any] = {"num_workers": 4, "prefetch_factor": 2, "pin_memory": True}
    known |= {"persistent_workers": False, "batch_size": 8, "batches": None}
    return WatchedLoader("training", "train.py:1", **(known | what))


def header(**what: Any) -> RunHeader:
    known: dict[str, Any] = {"command": "python train.py --workers 4", "rank": 0, "world_size": 1}
    known |= {"pid": 1, "host": "here", "started_unix": 0.0, "started_monotonic": 0.0}
    known |= {"trainfit": "1", "python": "3.12", "usable_cores": 8.0, "loaders": (loader(),)}
    return RunHeader(**(known | what), ending="finished")


def run(step_s: Any, samples: int = 8, **what: Any) -> RunRecord:
    """A run with these steady steps, half of each a wait for its batch; ten of 9 s come first."""
    step_s = np.concatenate([np.full(10, 9.0), step_s])
    steps = tables.empty_rows(tables.STEPS, len(step_s))
    steps["step"] = np.arange(len(step_s))
    steps["step_s"], steps["end_s"] = step_s, np.cumsum(step_s)
    steps["input_s"], steps["forward_s"] = 0.5 * step_s, 0.2 * step_s
    steps["samples"], steps["flags"] = samples, 0
    rank = RankRecord(header(**what), steps, np.zeros(0, tables.FETCHES))
    samples_of = (np.zeros(0, kind) for kind in (tables.MACHINE, tables.GPUS, tables.PROCESSES))
    return RunRecord((rank,), *samples_of, folder="runs/x")  # type: ignore[misc]


def save(folder: Path, record: RunRecord) -> Path:
    folder.mkdir()
    stem = f"rank{record.header.rank}"
    (folder / f"{stem}.json").write_text(record.header.to_json())
    (folder / f"{stem}.steps.bin").write_bytes(record.ranks[0].steps.tobytes())
    return folder


def time_ratio(before: Any, after: Any) -> Any:
    return np.log(after[..., 0] / after[..., 1]) - np.log(before[..., 0] / before[..., 1])


def resampled(random: np.random.Generator, count: int, phi: float) -> Any:
    rows = np.stack([noise(random, count, phi), np.ones(count)], axis=1)
    return resample(rows, random, replicates=600)


# -- intervals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("phi", "count"), some_of([(0.0, 60), (0.5, 100), (0.8, 200)], 1))
def test_the_interval_holds_the_truth_as_often_as_it_says(phi: float, count: int) -> None:
    random = np.random.default_rng(7)
    held = 0
    for _ in range(PAIRS):
        made = Groups(*((resampled(random, count, phi),) for _ in range(2)))
        held += not made.estimate(time_ratio).is_significant
    # 95% less three standard deviations of 200 pairs is 90%.
    assert held >= 0.90 * PAIRS


@pytest.mark.slow
def test_equal_runs_are_seldom_told_apart_and_those_of_5_percent_mostly() -> None:
    random = np.random.default_rng(11)
    wrong = found = 0
    for _ in range(PAIRS):
        first, second = resampled(random, 300, 0.5), resampled(random, 300, 0.5)
        faster = dataclasses.replace(
            second, totals=second.totals * [0.95, 1], draws=second.draws * [0.95, 1]
        )
        same = Groups((first,), (second,)).estimate(time_ratio)
        wrong += same.is_significant and abs(same.effect) > 0.01
        found += Groups((first,), (faster,)).estimate(time_ratio).high < 0
    assert wrong <= 0.06 * PAIRS
    assert found >= 0.9 * PAIRS


@pytest.mark.slow
def test_runs_that_differ_among_themselves_are_not_told_apart() -> None:
    """Each run is as fast as it happens to be; single steps alone would find a difference."""
    random = np.random.default_rng(3)
    wrong = by_steps = 0
    for _ in range(PAIRS):
        made = [
            [
                np.stack([random.normal(1, 0.03) * noise(random, 100), np.ones(100)], axis=1)
                for _ in range(2)
            ]
            for _ in range(2)
        ]
        wrong += groups(made[0], made[1], replicates=400).estimate(time_ratio).is_significant
        pooled = groups(*([np.concatenate(each)] for each in made), replicates=400)
        by_steps += pooled.estimate(time_ratio).is_significant
    assert wrong <= 0.06 * PAIRS
    assert by_steps > 3 * wrong


def test_blocks_are_as_long_as_steps_depend_on_one_another() -> None:
    random = np.random.default_rng(0)
    lengths = [
        np.mean([block_length(noise(random, 500, phi)) for _ in range(20)]) for phi in (0, 0.5, 0.9)
    ]
    assert lengths[0] < 6
    assert lengths[0] < lengths[1] < lengths[2]
    assert lengths[2] > 10


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=80))
def test_any_series_has_a_block_length(values: list[float]) -> None:
    assert 1 <= block_length(np.array(values)) <= max(1, len(values) // 3)


def test_draws_are_as_long_as_the_run_and_keep_constants() -> None:
    rows = np.stack([noise(np.random.default_rng(1), 5003), np.full(5003, 2.0)], axis=1)
    made = resample(rows, np.random.default_rng(2), replicates=50)
    assert made.totals[1] == pytest.approx(10006)
    assert made.draws[:, 1] == pytest.approx(10006, rel=1e-3)
    assert made.draws[:, 0].std() > 0


def test_students_quantiles() -> None:
    known = {2: 4.303, 3: 3.182, 5: 2.571, 10: 2.228, 30: 2.042, 1e6: 1.960}
    for free, value in known.items():
        assert t_quantile(free) == pytest.approx(value, rel=0.01)


# -- comparisons -------------------------------------------------------------------------------


def test_what_differs_is_named_and_the_effect_is_told_with_its_interval() -> None:
    random = np.random.default_rng(5)
    slow, fast = 0.1 * noise(random, 200), 0.08 * noise(random, 200)
    result = compare(
        run(slow, variables={"OMP_NUM_THREADS": "8"}),
        run(
            fast,
            command="python train.py --workers 8",
            loaders=(loader(num_workers=8),),
            precision="bfloat16",
            torch="2.9",
        ),
    )
    told = {(each.group, each.what): (each.before, each.after) for each in result.differences}
    assert told == {
        ("command", "--workers"): ("4", "8"),
        ("loader", "num_workers"): ("4", "8"),
        ("precision", "precision"): ("unknown", "bfloat16"),
        ("version", "torch"): ("", "2.9"),
        ("variable", "OMP_NUM_THREADS"): ("8", ""),
    }
    assert result.verdict == "faster"
    main = result.main
    assert main is not None and main.interval is not None and main.effect is not None
    assert main.interval[0] < -0.2 < main.interval[1] < -0.15
    by_name = {each.what: each for each in result.changes}
    assert by_name["samples/s"].verdict == "more"
    assert by_name["input"].verdict == "less"
    assert by_name["input"].effect == pytest.approx(main.effect / 2, rel=1e-3)
    text = "\n".join(line.text for line in screen(comparison_subject(result)))
    assert text.startswith("B is faster: step time -")
    assert re.search(r"num_workers +4 +8", text)


def test_of_other_batch_sizes_the_time_of_a_sample_is_compared() -> None:
    random = np.random.default_rng(5)
    result = compare(run(noise(random, 200), 8), run(1.5 * noise(random, 200), 16))
    assert result.verdict == "faster"
    assert result.changes[0].unit == "s/sample"
    assert result.changes[0].effect == pytest.approx(-0.25, abs=0.05)


def test_evaluations_and_checkpoints_are_no_part_of_the_step_time() -> None:
    random = np.random.default_rng(8)
    first, second = run(noise(random, 200)), run(noise(random, 200))
    steps = second.ranks[0].steps
    steps["evaluation_s"] = 0.0
    steps["evaluation_s"][100], steps["step_s"][100] = 500.0, steps["step_s"][100] + 500.0
    assert compare(first, second).verdict == "no difference"


def test_a_difference_below_one_percent_is_none_however_certain() -> None:
    steps = 1 + 1e-4 * np.random.default_rng(0).normal(size=1000)
    result = compare(run(steps), run(1.008 * steps))
    assert result.verdict == "no difference"
    assert result.main is not None and result.main.detectable == 0.01
    assert "detectable from 1% on" in screen(comparison_subject(result))[0].text


def test_with_few_steps_it_cannot_be_told_but_what_differs_can() -> None:
    result = compare(run(np.ones(29)), run(0.5 * np.ones(100), torch="2.9"))
    assert result.verdict == "cannot tell"
    assert result.changes == ()
    assert "30 steady steps of each run (40 with the warm-up); one has 29" in result.needs
    assert [each.what for each in result.differences] == ["torch"]


def test_peaks_are_told_without_a_verdict() -> None:
    runs = [run(np.ones(50)), run(np.ones(50))]
    for record, peak in zip(runs, (1 << 30, 2 << 30), strict=True):
        record.ranks[0].steps["peak_allocated_bytes"] = peak
    change = compare(*runs).changes[-1]
    assert (change.what, change.effect, change.interval, change.verdict) == (
        "peak GPU memory",
        1.0,
        None,
        "",
    )


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"gpus": (WatchedGpu("NVIDIA T4"),)}, "GPUs: none and 1 x NVIDIA T4"),
        ({"usable_cores": 16.0}, "usable cores: 8 and 16"),
        ({"quota_cores": 2.0}, "usable cores: 8 and 2"),
        ({"cpu": "EPYC"}, "processor: Xeon and EPYC"),
    ],
)
def test_other_hardware_is_refused_unless_asked(what: dict[str, Any], reason: str) -> None:
    first, second = run(np.ones(50), cpu="Xeon"), run(np.ones(50), **({"cpu": "Xeon"} | what))
    with pytest.raises(ComparisonError, match=reason):
        compare(first, second)
    asked = compare(first, second, allow_other_hardware=True)
    assert any(reason in note for note in asked.notes)


def test_a_comparison_is_the_same_from_its_file(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    result = compare(run(noise(random, 60)), run(noise(random, 60), torch="2.9"))
    result.save(tmp_path / "c.json")
    text = (tmp_path / "c.json").read_text()
    assert Comparison.from_json(text, tmp_path / "c.json") == result
    with pytest.raises(ResultFileError, match="newer"):
        Comparison.from_json(text.replace('"version": 1', '"version": 2'), tmp_path / "c.json")


def test_the_same_runs_give_the_same_intervals_and_groups_hold_several() -> None:
    random = np.random.default_rng(5)
    runs = [run(noise(random, 60)) for _ in range(4)]
    assert compare(runs[0], runs[1]) == compare(runs[0], runs[1])
    result = compare_groups(runs[:2], runs[2:])
    assert result.before.steps == 120
    assert not any("one run each" in note for note in result.notes)


# -- the command line --------------------------------------------------------------------------


def test_compare_on_the_command_line(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    a = save(tmp_path / "a", run(noise(random, 100)))
    b = save(tmp_path / "b", run(1.3 * noise(random, 100), loaders=(loader(num_workers=0),)))
    done = trainfit("compare", a, b, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("B is slower: step time +")
    document = json_of(trainfit("compare", "--json", b, a, cwd=tmp_path))
    assert (document["format"], document["verdict"]) == ("trainfit-watch-comparison", "faster")


def test_refusals_on_the_command_line(tmp_path: Path) -> None:
    a = save(tmp_path / "a", run(np.ones(50)))
    other = run(np.ones(50))
    rank = dataclasses.replace(other.ranks[0], header=header(usable_cores=2.0))
    b = save(tmp_path / "b", dataclasses.replace(other, ranks=(rank,)))
    refused = trainfit("compare", a, b, cwd=tmp_path)
    assert refused.returncode == 2
    assert "different hardware (usable cores: 8 and 2)" in error_line(refused)
    assert trainfit("compare", "--other-hardware", a, b, cwd=tmp_path).returncode == 0
    missing = trainfit("compare", a, tmp_path / "none", cwd=tmp_path)
    assert missing.returncode == 2
    assert "there is no such folder" in error_line(missing)
    short = trainfit("compare", a, save(tmp_path / "c", run(np.ones(5))), cwd=tmp_path)
    assert short.returncode == 2
    assert short.stdout.startswith("Cannot tell: it needs 30 steady steps")


# --- Other programs -------------------------------------------------------------------------------


def pressed(record: RunRecord, share: float) -> RunRecord:
    """The same next to programs that keep its main thread from a core for this share of the time:
    then each step lasts longer by it."""
    end = float(record.ranks[0].steps["end_s"][-1])
    times = np.linspace(0.0, end, 200)
    machine = tables.empty_rows(tables.MACHINE, len(times))
    machine["time_s"], machine["interval_s"] = times, end / 200
    machine["cores_busy"], machine["cores_ours"] = 8.0, 0.001
    waits = tables.empty_rows(tables.CORE_WAITS, len(times))
    waits["time_s"], waits["pid"], waits["role"], waits["rank"] = times, 1, 0, 0
    waits["main_thread"] = waits["threads"] = share
    waits["cpu_cores"] = 0.5
    return dataclasses.replace(record, machine=machine, core_waits=waits)


def test_a_difference_that_other_programs_make_is_none_of_the_runs() -> None:
    random = np.random.default_rng(1)
    before = pressed(run(0.1 * noise(random, 200)), 0.0)
    after = pressed(run(0.2 * noise(random, 200)), 0.5)
    result = compare(before, after)
    assert result.verdict == "cannot tell"
    assert "0% of the time in A and 50% in B" in result.needs
    # More than theirs, and as much on both sides.
    assert compare(before, pressed(run(0.4 * noise(random, 200)), 0.5)).verdict == "slower"
    same = compare(pressed(run(0.1 * noise(random, 200)), 0.5), after)
    assert same.verdict == "slower" and not any("other programs" in note for note in same.notes)
