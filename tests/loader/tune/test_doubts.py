"""Runs alongside other processes: made again, or not used, and no cause is concluded from them."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_cli import json_of, trainfit
from helpers_loader import probe, result
from helpers_report import on_one_line, whole
from tests.loader.calibration.test_constants import TWO_CORES, readings, truth
from tests.loader.tune.test_search import fitted, goal, real
from trainfit.findings.facts import Failure
from trainfit.hardware.machine.core_speed import CoreSpeed
from trainfit.loader.bottleneck import limit
from trainfit.loader.confirmation import TRIES, Confirmation, ConfirmingRun, decide, doubts
from trainfit.loader.measure.constants import fit
from trainfit.loader.measure.loop import waits_for_cores
from trainfit.loader.measure.noise_correction import without_core_waits
from trainfit.loader.measure.probe_runs import Readings
from trainfit.loader.measure.records import BEGAN, CPU, WALL, Run
from trainfit.loader.search import search
from trainfit.loader.tuner import Tuner
from trainfit.report.sections.loader import loader_subject
from trainfit.report.sections.loader_figures import verdict_words
from trainfit.results.dataloader import DISTURBED_CORES, Confirmed, LoaderSettings
from trainfit.results.findings import Finding
from trainfit.results.runs.measurement import Consumer
from trainfit.results.speed import DataLoading

FOUR = LoaderSettings(4)
WITHIN_ONE = "within an epoch, no other settings give 10% more (predicted: the machine was busy)"


# --- What is fitted ---------------------------------------------------------------------------


def with_others(found: Readings, cores: float, *names: str) -> Readings:
    """The same runs, these kinds next to others that kept so many cores busy."""
    runs = {
        name: [
            dataclasses.replace(each, others_cores=cores) if name in (names or (name,)) else each
            for each in made
        ]
        for name, made in found.runs.items()
    }
    return Readings(found.machine, runs, found.faults)


def locked_readings() -> Readings:
    """As of two workers that wait for one another."""
    locked = dataclasses.replace(truth(), locked_share=0.7)
    return readings(locked, two=0.009, over=0.03, tight=0.009)


@pytest.mark.slow
def test_a_neighbour_is_no_lock() -> None:
    """Workers that wait for a core look like workers that wait for a lock."""
    found = locked_readings()
    seen = fit(found, TWO_CORES)
    assert seen is not None and seen.locked_share > 0.5
    for names in ((), ("two",), ("one",)):
        fitted = fit(with_others(found, 1.0, *names), TWO_CORES)
        assert fitted is not None and fitted.locked_share == fitted.cores.contention == 0.0
        assert limit(fitted.load(Consumer(0.0)), LoaderSettings(8), probe()) != "lock"
    quiet = fit(with_others(found, 0.2), TWO_CORES)
    assert quiet is not None and quiet.locked_share == seen.locked_share


def test_waiting_for_a_core_is_no_lock_whoever_has_it() -> None:
    """The kernel tells of the wait, though no process of this system has the core."""
    found = locked_readings()
    found.runs["two"] = [
        dataclasses.replace(
            each,
            core_waits_s=tuple(float((r[:, WALL] - r[:, CPU]).sum()) for r in each.fetches),
        )
        for each in found.runs["two"]
    ]
    fitted = fit(found, TWO_CORES)
    assert fitted is not None and fitted.locked_share == 0.0


def test_rates_disturbed_are_fitted_to_by_nothing() -> None:
    slow = dataclasses.replace(truth().with_contention(0.3), locked_share=0.0)
    found = readings(slow)
    free = fit(with_others(found, 1.0), TWO_CORES)
    assert free is not None
    assert (free.cores.sharing, free.transfer.crowded_wait_s, free.transfer.latency_s) == (0, 0, 0)
    assert free.cores.contention == pytest.approx(0.3, abs=0.02)  # by CPU time, not by the rate


def test_which_kinds_were_made_disturbed_only() -> None:
    found = with_others(readings(truth()), 1.5, "two")
    assert found.disturbed() == {"two": 1.5}
    found.runs["two"][0] = dataclasses.replace(found.runs["two"][0], others_cores=0.0)
    assert found.disturbed() == {}
    assert readings(truth()).disturbed() == {}


@given(
    walls=st.lists(st.floats(0.001, 1.0), min_size=2, max_size=20),
    share=st.floats(0.0, 1.0),
    waited=st.floats(0.0, 3.0),
)
def test_only_waiting_for_cores_is_taken_out(
    walls: list[float], share: float, waited: float
) -> None:
    wall = np.array(walls)
    began = np.concatenate([[0.0], np.cumsum(wall + 0.01)[:-1]])
    records = np.stack([began, wall, wall * share, np.zeros(len(wall))], axis=1)
    made = Run(LoaderSettings(1), 0.0, fetches=(records,), core_waits_s=(waited,))
    found = without_core_waits(made).fetches[0]
    off = float((wall - wall * share).sum())
    assert found[:, WALL].sum() == pytest.approx(wall.sum() - min(off, waited))
    assert (found[:, WALL] >= found[:, CPU] - 1e-9).all()
    gaps = found[1:, BEGAN] - found[:-1, BEGAN] - found[:-1, WALL]
    assert gaps == pytest.approx(np.full(len(wall) - 1, 0.01))
    assert without_core_waits(dataclasses.replace(made, core_waits_s=())).fetches[0] is records


def test_what_the_kernel_counts(tmp_path: Path) -> None:
    def stat(pid: int, text: str) -> Any:
        (tmp_path / f"proc/{pid}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"proc/{pid}/schedstat").write_text(text)
        return SimpleNamespace(pid=pid)

    one, two = stat(7, "2000000000 500000000 90\n"), stat(8, "1 1500000000 3\n")
    assert waits_for_cores([one, two], tmp_path) == (0.5, 1.5)
    for text in ("0 0 0\n", "garbage", "1 2"):
        assert waits_for_cores([one, stat(8, text)], tmp_path) == ()
    assert waits_for_cores([one, SimpleNamespace(pid=9)], tmp_path) == ()  # type: ignore[list-item]


# --- What is chosen ---------------------------------------------------------------------------


def beside(settings: LoaderSettings, rate: float, cores: float = 1.0) -> Run:
    return dataclasses.replace(real(settings, rate), others_cores=cores)


@pytest.mark.slow
def test_a_real_run_disturbed_is_made_again() -> None:
    model = fitted(2)
    cores = iter([1.0, 0.0, 1.0, 0.9, 0.0, 0.0, 0.0])
    ran: list[LoaderSettings] = []

    def runner(settings: LoaderSettings, consumer: Consumer) -> Run:
        ran.append(settings)
        return beside(settings, model.predict(settings, consumer).batches_per_s, next(cores))

    confirmation = Confirmation(search(model, goal()), runner, 2)
    confirmation.run()
    first, second = confirmation.trials
    assert ran == [first.settings] * 2 + [second.settings] * 2
    assert first.tries == second.tries == TRIES == 2
    assert first.reliable == first.measured and not first.is_disturbed
    assert second.run.others_cores == 0.9 and second.reliable is None
    cores, ran = iter([1.0] * 4), []
    hurried = Confirmation(search(model, goal()), runner, 2, in_time=lambda: False)
    hurried.run()
    assert [trial.tries for trial in hurried.trials] == [1, 1]


def test_a_try_that_fails_keeps_the_one_before() -> None:
    model = fitted(2)
    made = iter([beside(FOUR, 20.0), real(FOUR, 1.0, Failure(exit_code=-9))])
    confirmation = Confirmation(search(model, goal()), lambda *_: next(made), 4)
    trial = confirmation._try(FOUR, "present")
    assert trial.measured is not None and trial.tries == 2


@pytest.mark.parametrize("present", [LoaderSettings(0), FOUR])
def test_rates_disturbed_choose_nothing(present: LoaderSettings) -> None:
    """More workers take more from a neighbour: they look faster then."""
    model = fitted(2)

    def runner(settings: LoaderSettings, consumer: Consumer) -> Run:
        return beside(settings, 5.0 * (1 + settings.num_workers))

    alone = search(model, goal(present=present)).best()
    confirmation = Confirmation(search(model, goal(present=present)), runner, 4)
    assert confirmation.run() == alone
    assert not confirmation.refitted


# --- What it amounts to -----------------------------------------------------------------------


def trial(settings: LoaderSettings, rate: float, cores: float = 0.0) -> ConfirmingRun:
    return ConfirmingRun(settings, rate, beside(settings, rate, cores), "")


@pytest.mark.parametrize(
    ("cores", "reason"),
    [
        (1.0, "as many batches (predicted: the machine was busy)"),  # no run counts
        (
            0.0,
            "2.00× as many batches",
        ),  # both were measured alone: that holds, whatever the model is
    ],
)
def test_beside_others_what_is_predicted_decides(cores: float, reason: str) -> None:
    choice = search(fitted(2), goal(present=LoaderSettings(0)))
    chosen = LoaderSettings(2)
    choice.see(chosen)
    trials = [trial(LoaderSettings(0), 20.0, cores), trial(chosen, 40.0, cores)]
    found = decide(choice, trials, chosen, "unknown", disturbed=True)
    assert (found.verdict, found.keeps) == ("change", False)
    assert found.is_predicted is (cores > 0) and found.reason.endswith(reason)
    # A probe that nobody disturbed predicts, whatever became of the real runs.
    assert decide(choice, trials, chosen, "cores").verdict == "change"


def test_beside_others_a_small_gain_changes_nothing() -> None:
    choice = search(fitted(2), goal(present=LoaderSettings(2)))
    chosen = LoaderSettings(2, 4)
    choice.see(chosen)
    found = decide(choice, [], chosen, "unknown", disturbed=True)
    assert (found.verdict, found.keeps, found.is_predicted) == ("keep", True, True)
    assert found.reason == "no other settings give 10% more (predicted: the machine was busy)"


def test_workers_that_are_kept_leave_a_verdict_predicted() -> None:
    """By the start of workers the settings change, too: as little of that was measured alone."""
    choice = search(fitted(2), goal(present=LoaderSettings(2)))
    choice.see(LoaderSettings(2, 4))
    found = decide(choice, [], LoaderSettings(2, 4), "unknown", disturbed=True)
    tuner = mock.Mock(_workload=mock.Mock(present=LoaderSettings(2)), _faults=())
    kept = Tuner._final(tuner, found, LoaderSettings(2, persistent_workers=True))
    assert (kept.verdict, kept.keeps, kept.is_predicted) == ("change", False, True)
    assert kept.reason == f"restarting 2 workers needs more than 1% of each epoch; {WITHIN_ONE}"
    assert Tuner._final(tuner, found, LoaderSettings(2)) == found


def test_three_disturbed_runs_in_a_row_are_the_last() -> None:
    model = fitted(2)
    ran: list[LoaderSettings] = []

    def runner(settings: LoaderSettings, consumer: Consumer) -> Run:
        ran.append(settings)
        return beside(settings, 5.0)

    confirmation = Confirmation(search(model, goal(present=LoaderSettings(0))), runner, 4)
    chosen = confirmation.run()
    assert len(ran) == 3 and [trial.tries for trial in confirmation.trials] == [2, 1]
    assert chosen == search(model, goal(present=LoaderSettings(0))).best()


def test_without_a_run_that_counts_small_gains_get_no_workers() -> None:
    """What the model predicts from disturbed runs does not tell settings within 10% apart."""
    choice = search(fitted(2), goal(present=LoaderSettings(0)))
    rates = {LoaderSettings(0): 2.0, LoaderSettings(2): 9.3, LoaderSettings(3): 10.0}
    for settings, rate in rates.items():
        choice.candidates[settings] = dataclasses.replace(choice.look(settings), batches_per_s=rate)
    choice.candidates = {each: choice.candidates[each] for each in rates}
    unsure = Confirmation(choice, lambda *_: beside(FOUR, 1.0), 0, within=1 / 1.1)
    assert unsure.run() == LoaderSettings(2)
    assert Confirmation(choice, lambda *_: beside(FOUR, 1.0), 0).run() == LoaderSettings(3)


def test_a_gpu_that_never_waits_disturbed_does_not_without_them() -> None:
    choice = search(fitted(2), goal(step_s=0.1, present=FOUR))
    run = dataclasses.replace(beside(FOUR, 10.0), waited=np.zeros(500))
    run = dataclasses.replace(run, waited=np.zeros(len(run.handed)))
    found = decide(
        choice, [ConfirmingRun(FOUR, 10.0, run, "")], LoaderSettings(1), "gpu", disturbed=True
    )
    assert (found.verdict, found.keeps, found.is_predicted) == ("nothing_to_gain", True, False)
    assert "would do" not in found.reason


def test_doubts_are_data() -> None:
    assert doubts(probe(), None, [trial(FOUR, 9.0, 0.2)], is_predicted=False) == ()
    kinds = {"1 worker": 1.0, "2 workers": 0.6, "no workers": 0.8}
    seen = probe(disturbed=kinds)
    (found,) = doubts(seen, None, [trial(FOUR, 9.0, 0.8)], is_predicted=True)
    assert found.kind == "busy_machine" and found.is_critical
    assert [each.what for each in found.evidence] == [*kinds, "real run: 4 workers, prefetch 2"]
    assert {name: found.value_of(name) for name in kinds} == kinds
    assert found.title == "other processes competed for 0.8 cores in 4 runs"
    (some,) = doubts(seen, None, [trial(FOUR, 9.0, 0.8)], is_predicted=False)
    assert some.title.endswith("in 4 runs (1 worker; 2 workers; no workers; and 1 more)")
    assert "predicted from the CPU time of batches; re-run" in found.cause
    (found,) = doubts(probe(), seen, [], is_predicted=False)
    assert found.evidence[0].what == "1 worker, one thread per library" and not found.is_critical
    (found,) = doubts(probe(), None, [trial(FOUR, 9.0, 0.8)], is_predicted=False)
    assert "were not used" in found.cause


def test_slowed_cores_are_told_of() -> None:
    def note(of_probe: float | None, *of_runs: float) -> str:
        trials = [
            ConfirmingRun(
                FOUR, 9.0, dataclasses.replace(real(FOUR, 9.0), core_speed=CoreSpeed(s, 1.0)), ""
            )
            for s in of_runs
        ]
        found = doubts(probe(core_speed=of_probe), None, trials, is_predicted=False)
        return " ".join(each.title for each in found)

    assert note(None) == note(0.97, 0.99) == ""
    assert "at 80% of their full speed" in note(0.80, 0.81)
    assert "at 70% to 99% of their full speed" in note(0.99, 0.7)


def busy_result(**changes: Any) -> Any:
    doubt = Finding("busy_machine", "critical", "others kept 1 core busy", cause="it stays")
    run = Confirmed(LoaderSettings(1), 8.0, 3.0, 0.4, 9, 2.0, others_cores=1.0)
    values = {
        "recommended": LoaderSettings(4), "verdict": "change", "limit": "unknown",
        "reason": "4× as many batches (predicted: the machine was busy)",
        "doubts": (doubt,), "confirmed": (run,), "without_others": LoaderSettings(4),
    }  # fmt: skip
    return result(**values | changes)


def test_what_is_predicted_is_marked() -> None:
    found = busy_result()
    assert found.was_busy and found.measured(LoaderSettings(1)) is None
    text = on_one_line(whole(loader_subject(found)))
    assert (
        "Change the settings: 8.33 → 25.0 batches/s, 3.00× (predicted: the machine was busy)"
        in text
    )
    assert "without others" not in text  # it is the recommended row
    assert "predicted only; other processes disturbed 1 real run: not used" in text
    assert "measured while other processes were busy: not used" in text
    kept = busy_result(recommended=LoaderSettings(1), verdict="keep", without_others=None)
    assert "Keep the settings (8.33 batches/s, predicted)" in whole(loader_subject(kept))


def test_a_result_of_before_is_shown_as_it_was() -> None:
    """Where other processes left the verdict open."""
    found = busy_result(recommended=LoaderSettings(1), verdict="cannot_tell", reason="because")
    text = on_one_line(whole(loader_subject(found)))
    assert "Cannot tell which settings are best because" in text and "write: " not in text
    assert "from the CPU time of batches, not confirmed by a run): 4 workers" in text


def test_a_plan_says_it_too() -> None:
    loading = DataLoading(busy_result(), 8, True, "loader", 2.0)
    assert loading.evidence == "busy"
    assert loading.result is not None
    text = verdict_words(loading, loading.result)
    assert "the DataLoader is the limit by up to 2.00×" in text
    loading = DataLoading(busy_result(), 8, True, "gpu", 2.0)
    assert "the GPU is the limit" in verdict_words(loading, busy_result())


# --- For real ---------------------------------------------------------------------------------

SCRIPT = """
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

class Work(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        values = np.random.RandomState(index).rand(20, 1000)
        for _ in range(4):
            values = np.sort(values, axis=0)[::-1] * 0.5 + np.sin(values)
        return torch.from_numpy(values[:4].copy()).float()

def make():
    return DataLoader(Work(), batch_size=8, num_workers=4)

if __name__ == "__main__":
    net = torch.nn.Linear(4000, 8).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for batch in make():
        net(batch.cuda().flatten(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def neighbours() -> Iterator[None]:
    """One on each core that this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if not count or count > 16:
        pytest.skip("too many cores to keep all of them busy, or none that can be counted")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    yield
    for process in busy:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_beside_neighbours_the_loader_predicts(neighbours: None, tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(SCRIPT)
    words = ("--probe-time", "3", "--confirm", "2", "--loader", "data.py:make")
    done = trainfit("loader", "--json", *words, cwd=tmp_path)
    found = json_of(done)
    assert done.returncode == 0
    assert found["verdict"] in ("change", "keep") and found["limit"] == "unknown"
    assert found["reason"].endswith("(predicted: the machine was busy)")
    # Whether workers are kept between epochs is by what starting them costs, here next to others.
    kept = {"persistent_workers": found["recommended"]["persistent_workers"]}
    assert found["recommended"] == (found["without_others"] or found["present"]) | kept
    assert not found["confirmed"]  # the probe was disturbed to its end
    (doubt,) = (each for each in found["doubts"] if each["kind"] == "busy_machine")
    assert doubt["severity"] == "critical"
    assert min(each["value"] for each in doubt["evidence"]) > DISTURBED_CORES
    assert found["probe"]["disturbed"]
    assert "lock" not in found["reason"]


@pytest.mark.slow
def test_beside_neighbours_a_plan_says_it_too(neighbours: None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--no-remedies", "--loader", "--probe-time", "4", "--gpu", "T4", "--json")
    done = trainfit("plan", *words, "--", "python", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json_of(done)
    found = plan["loading"]["result"]
    assert "(predicted: the machine was busy)" in found["reason"]
    severities = {doubt["kind"]: doubt["severity"] for doubt in found["doubts"]}
    assert severities["busy_machine"] == "critical"
    assert plan["run"]["loader"] == "busy"
    assert "lock" not in found["reason"] + found["limit"]
