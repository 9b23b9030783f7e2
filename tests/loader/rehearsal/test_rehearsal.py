"""Rehearsals: the utilisation over time, why it dips, the loop itself, and the command."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from helpers_cli import SCRIPTS, environment, error_line, json_of, trainfit
from helpers_loader import result as loader_result
from helpers_report import screen, whole
from trainfit.cli.common import duration
from trainfit.loader import idle_time as utilisation
from trainfit.loader.idle_time import RehearsalRecord, busy_shares, explain, made_at
from trainfit.loader.measure.workload import LoaderError, Workload
from trainfit.loader.rehearsal import rehearse
from trainfit.plan.dataloader.measurement import with_prediction
from trainfit.report.sections.rehearsal import rehearsal_subject, verdict
from trainfit.results.dataloader import Candidate, LoaderSettings
from trainfit.results.files.errors import ResultFileError
from trainfit.results.findings import failure_finding
from trainfit.results.rehearsal import (
    Dip,
    Predicted,
    Rehearsal,
    RehearsedEpoch,
    RehearsedRates,
    UtilisationTimeline,
)
from trainfit.results.runs.measurement import Consumer
from trainfit.results.text import IN_ASCII, WIDTH, laid_out_for

SCRIPT = SCRIPTS / "loading.py"


# --- Utilisation over windows -------------------------------------------------------------------
LENGTHS = st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), max_size=30)


@given(LENGTHS, st.floats(0.001, 3), st.floats(0.05, 2))
def test_the_mean_of_the_windows_is_busy_time_over_all(
    lengths: list[tuple[float, float]], tail: float, window: float
) -> None:
    edges = np.cumsum([part for pair in lengths for part in pair])
    busy = edges.reshape(-1, 2)
    total = float(edges[-1] if len(edges) else 0.0) + tail
    shares = busy_shares(busy, total, window)
    assert np.all((shares >= 0) & (shares <= 1))
    widths = np.diff(np.append(np.arange(len(shares)) * window, total))
    assert np.all(widths > -1e-6) and np.all(widths <= window * (1 + 1e-6))
    expected = float(np.sum(busy[:, 1] - busy[:, 0])) / total
    assert float(shares @ widths) / total == pytest.approx(expected, abs=1e-6)


def test_shares_of_windows_that_a_step_lies_across() -> None:
    busy = np.array([[0.5, 1.25], [2.0, 2.5]])
    assert busy_shares(busy, 2.5, 1.0) == pytest.approx([0.5, 0.25, 1.0])
    assert busy_shares(np.empty((0, 2)), 2.0, 1.0) == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize(("total", "window"), [(3.0, 1 / 6), (600.0, 1.0), (18000.0, 10.0)])
def test_the_timeline_is_bounded(total: float, window: float) -> None:
    found = utilisation.timeline(observed([(0.0, 1.0)], total=total))
    assert found.window_s == pytest.approx(window)
    assert len(found.busy_shares) == round(total / window) <= 1800


# --- Why it is idle -----------------------------------------------------------------------------
def observed(
    batches: list[tuple[float, float]],
    *,
    settings: LoaderSettings | None = None,
    epochs: list[int] | None = None,
    tail: float = 0.0,
    total: float | None = None,
    next_cpu: float = 0.0,
    **more: Any,
) -> RehearsalRecord:
    """Of each batch how long it is waited for and how long its step takes, one after another."""
    waited, steps = (np.array([b[i] for b in batches]) for i in (0, 1))
    handed = 100 + np.cumsum(waited) + np.append(0.0, np.cumsum(steps)[:-1])
    end = float(handed[-1] + steps[-1] - 100) if batches else 0.0
    return RehearsalRecord(
        settings or LoaderSettings(2),
        began=100.0,
        ended=100 + (total if total is not None else end + tail),
        asked=handed - waited,
        handed=handed,
        next_cpu=np.full(len(batches), next_cpu),
        steps=steps,
        epochs=np.array(epochs if epochs is not None else [0] * len(batches), dtype=np.int64),
        ready=np.zeros(len(batches)),
        **more,
    )


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans()), max_size=60),
    st.integers(0, 5),
    st.integers(1, 3),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
    st.booleans(),
)
def test_causes_add_up_to_the_idle_time(
    rows: list[tuple[float, float, bool]],
    workers: int,
    prefetch: int,
    cpu: float,
    tail: float,
    failed: bool,
) -> None:
    epochs = list(np.cumsum([bool(at) and new for at, (_, _, new) in enumerate(rows)]))
    seen = observed(
        [row[:2] for row in rows],
        settings=LoaderSettings(workers, prefetch),
        epochs=epochs,
        tail=tail,
        next_cpu=cpu,
        failed=failed,
    )
    idle, dips = explain(seen)
    assert sum(idle.values()) == pytest.approx(sum(r[0] for r in rows) + tail, abs=1e-6)
    assert all(seconds >= 0 for seconds in idle.values())
    for dip in dips:
        assert 0 <= dip.start_s <= dip.end_s <= seen.total_s + 1e-6
        assert dip.idle_s <= dip.end_s - dip.start_s + 1e-6
    assert [dip.start_s for dip in dips] == sorted(dip.start_s for dip in dips)
    rates = utilisation.overall_rates(seen, 4)
    if rates is not None:
        assert 0 <= rates.busy_share <= 1 and 0 <= rates.waiting_share <= 1
        assert rates.busy_share + rates.waiting_share == pytest.approx(1.0, abs=1e-6)


READY, STEP = (0.0001, 0.1), 0.1


def test_a_loader_that_keeps_up_has_its_start_alone() -> None:
    seen = observed([(1.5, STEP)] + [READY] * 60)
    idle, dips = explain(seen)
    assert [dip.cause for dip in dips] == ["start_up"]
    assert idle["start_up"] == pytest.approx(1.5)
    assert set(idle) == {"start_up", "transfer"}
    rates = utilisation.steady_rates(seen, 8)
    assert rates is not None and rates.waiting_share < 0.002
    assert rates.samples_per_s == pytest.approx(8 * rates.batches_per_s)


def test_one_late_batch_is_a_dip_with_its_place() -> None:
    batches = [(1.0, STEP)] + [READY] * 60
    batches[31] = (0.8, STEP)
    seen = observed(batches)
    made = np.zeros((2, 5))
    handed = float(seen.handed[31])
    made[:, 0], made[:, 1] = [handed - 0.91, handed - 3.0], [0.9, 0.1]
    idle, dips = explain(dataclasses.replace(seen, made=made))
    (late,) = (dip for dip in dips if dip.cause == "slow_batch")
    assert late.first_batch <= 31 < late.first_batch + late.batches
    assert late.start_s - 1e-6 <= handed - 100.8 and handed - 100 <= late.end_s + 1e-6
    assert idle["slow_batch"] == pytest.approx(0.8, abs=0.001)
    assert late.what == (
        "batch 31 came 800 ms late: 900 ms in its worker, the median batch needs 500 ms"
    )


def test_workers_that_are_too_slow_starve_all_the_time() -> None:
    # Two workers in order: their batches come together, every other one is waited for.
    seen = observed([(0.5, STEP)] + [(0.1, STEP), READY] * 40)
    idle, dips = explain(seen)
    assert {dip.cause for dip in dips} == {"start_up", "starving"}
    assert idle["starving"] == pytest.approx(4.0, abs=0.05)
    (starving,) = (dip for dip in dips if dip.cause == "starving")
    assert starving.end_s - starving.start_s > 0.9 * seen.total_s


def records(seen: RehearsalRecord, ready_s: float) -> Any:
    """Workers in turn made each batch so long before it was handed over."""
    workers = seen.settings.num_workers
    rows = [
        (handed - ready_s - 0.01, 0.01, 0.0, 0.0, place % workers)
        for handed, place in zip(seen.handed, seen.place, strict=True)
    ]
    return np.array(rows)


@pytest.mark.parametrize("in_order", [False, True])
def test_waiting_for_a_batch_that_was_made_is_hand_over(in_order: bool) -> None:
    settings = LoaderSettings(2, in_order=in_order)
    epoch = [(0.5, STEP)] + [(0.03, STEP)] * 30
    seen = observed(epoch * 2, settings=settings, epochs=[0] * 31 + [1] * 31)
    ready = dataclasses.replace(seen, made=records(seen, 0.025))
    assert made_at(ready) == pytest.approx(seen.handed - 0.025)
    idle, _ = explain(ready)
    # 5 ms of each wait pass before the batch is made: too little to call it starving.
    assert "starving" not in idle and idle["transfer"] == pytest.approx(1.8, abs=0.02)
    made_late = dataclasses.replace(seen, made=records(seen, 0.001))
    idle, _ = explain(made_late)
    assert idle["starving"] > 1.6 and idle["transfer"] < 0.1


def test_epoch_boundaries_and_filling_queues_are_told_from_starving() -> None:
    epoch = [(0.6, STEP), (0.2, STEP)] + [READY] * 28
    seen = observed(epoch * 3, epochs=[0] * 30 + [1] * 30 + [2] * 30)
    idle, dips = explain(seen)
    assert [dip.cause for dip in dips] == ["start_up", "warm_up", "epoch", "epoch"]
    assert idle["start_up"] == pytest.approx(0.6)
    assert idle["epoch"] == pytest.approx(2 * 0.8, abs=0.01)


def test_without_workers_the_main_process_makes_every_batch() -> None:
    batches = [(0.05, STEP)] * 40
    batches[20] = (0.9, STEP)
    idle, _ = explain(observed(batches, settings=LoaderSettings(0)))
    assert idle["start_up"] == pytest.approx(0.05)
    assert idle["slow_batch"] == pytest.approx(0.8)
    assert idle["main_process"] == pytest.approx(38 * 0.05 + 2 * 0.05)


def test_a_batch_that_is_waited_for_at_the_end_is_late_or_never_comes() -> None:
    batches = [(0.5, STEP)] + [READY] * 20
    idle, dips = explain(observed(batches, tail=3.0))
    assert dips[-1].what == "still pending at the end"
    assert idle["slow_batch"] == pytest.approx(3.0)
    idle, _ = explain(observed(batches, tail=3.0, failed=True))
    assert idle["end"] == pytest.approx(3.0)
    failed = utilisation.steady_rates(observed(batches, tail=3.0, failed=True), None)
    assert failed is not None and failed.waiting_share < 0.01 and failed.samples_per_s is None


def test_nothing_came_at_all() -> None:
    seen = observed([], total=2.0)
    assert explain(seen)[0] == {"start_up": 2.0}
    assert utilisation.steady_rates(seen, None) is None
    assert utilisation.epochs(seen) == ()
    assert utilisation.timeline(seen).busy_shares == (0.0,) * 12


def test_the_time_of_an_epoch_is_measured_or_follows_from_the_rate() -> None:
    seen = observed([(0.4, STEP)] * 25, epochs=[0] * 10 + [1] * 10 + [2] * 5)
    found = utilisation.epochs(seen)
    assert [each.complete for each in found] == [True, True, False]
    assert [each.batches for each in found] == [10, 10, 5]
    assert utilisation.epoch_seconds(found, 10, None) == (pytest.approx(5.0), True)
    steady = RehearsedRates(0.0, 10.0, 20, 0.5, 0.5, 2.0, None)
    assert utilisation.epoch_seconds(found[2:], 100, steady) == (pytest.approx(50.4), False)
    assert utilisation.epoch_seconds(found[2:], None, steady) == (None, False)


# --- The loop -----------------------------------------------------------------------------------
class Numbers(Dataset[Any]):
    """``count`` samples; ``act`` is called with the index of each."""

    def __init__(self, count: int, act: Any = lambda index: None) -> None:
        self._count, self._act = count, act

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        self._act(index)
        return torch.full((4,), float(index))


def run(dataset: Any, settings: LoaderSettings, seconds: float, step_s: float = 0.01) -> Rehearsal:
    workload = Workload.of(DataLoader(dataset, batch_size=2))
    return rehearse(workload, settings, Consumer(step_s), seconds)


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_are_the_users_own(persistent: bool) -> None:
    for seconds in (0.6, 6.0, 60.0):  # where others keep the cores busy, a worker starts late
        result = run(Numbers(12), LoaderSettings(1, persistent_workers=persistent), seconds)
        assert result.ended == "duration" and result.fault is None
        if result.epochs_begun >= 3:
            break
    assert result.epoch_batches == 6 and result.epoch_measured
    assert {each.batches for each in result.epochs if each.complete} == {6}
    assert result.overall is not None
    assert result.overall.batches == sum(each.batches for each in result.epochs)
    starts = [dip for dip in result.dips if dip.cause == "epoch" and "worker" in dip.what]
    assert persistent is (not starts)


def test_without_workers_it_runs_here() -> None:
    pids: list[int] = []
    result = run(Numbers(6, lambda index: pids.append(os.getpid())), LoaderSettings(0), 0.2)
    assert set(pids) == {os.getpid()} and result.epochs_begun > 1
    assert result.idle_s["main_process"] > 0


def _bad(index: int) -> None:
    if index == 9:
        raise ValueError("sample 9 is bad")


def _deadly(index: int) -> None:
    if index == 9:
        time.sleep(0.3)  # until its other batches have been taken over
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("act", "workers", "says"),
    [(_bad, 0, "sample 9 is bad"), (_bad, 2, "sample 9 is bad"), (_deadly, 1, "SIGKILL")],
)
def test_what_was_seen_until_a_loader_fails_is_kept(act: Any, workers: int, says: str) -> None:
    result = run(Numbers(40, act), LoaderSettings(workers), 5.0)
    assert result.ended == "fault" and result.fault is not None
    assert says in result.fault.title + result.fault.cause
    assert result.overall is not None and 1 <= result.overall.batches <= 5
    # Not in the first window, where the first batch is late on a busy machine.
    assert max(result.timeline.busy_shares) > 0


class Once(IterableDataset[Any]):
    """Gives its samples one time only."""

    def __init__(self) -> None:
        self._samples = iter(range(6))

    def __iter__(self) -> Any:
        return self._samples


def test_a_loader_that_is_used_up_is_said_to_be() -> None:
    result = run(Once(), LoaderSettings(0), 5.0)
    assert result.ended == "empty" and result.overall is not None
    assert result.overall.batches == 3
    assert result.fault is not None and result.fault.kind == "not_restartable"
    assert run(Numbers(0), LoaderSettings(0), 5.0).ended == "empty"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupt_keeps_what_was_seen(workers: int, tmp_path: Path) -> None:
    under_way = tmp_path / "under way"

    def tell(index: int) -> None:
        if index == 20:  # more than a worker makes in advance: some batches have arrived
            under_way.touch()

    def interrupt() -> None:
        while not under_way.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    # A shell that puts the tests into the background has them ignore Ctrl-C.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        result = run(Numbers(10_000, tell), LoaderSettings(workers), 120.0)
    finally:
        signal.signal(signal.SIGINT, former)
    assert result.ended == "interrupted" and result.fault is None
    assert result.overall is not None and result.overall.batches > 0


def test_what_cannot_be_rehearsed() -> None:
    with pytest.raises(LoaderError, match=r"leaves the GPU idle.*--step-time"):
        run(Numbers(4), LoaderSettings(0), 1.0, step_s=0.0)
    with pytest.raises(LoaderError, match="--duration"):
        run(Numbers(4), LoaderSettings(0), 0.0)


# --- The text -----------------------------------------------------------------------------------
RESULT = Rehearsal(
    command="python train.py",
    loader="train.py:9: Images, batch size 32",
    batch_size=32,
    epoch_batches=40,
    settings=LoaderSettings(4, pin_memory=True),
    settings_source="the script's own",
    step_s=0.04,
    step_source="given",
    ended="duration",
    duration_s=3.0,
    overall=RehearsedRates(0.0, 3.0, 50, 0.667, 0.3, 16.7, 533.0),
    steady=RehearsedRates(0.5, 2.5, 48, 0.768, 0.2, 19.2, 614.0),
    timeline=UtilisationTimeline(0.5, (0.0, 1.0, 0.5, 1.0, 0.75, 0.75)),
    idle_s={"start_up": 0.5, "epoch": 0.4, "transfer": 0.1},
    dips=(
        Dip("start_up", 0.0, 0.5, 0.5, 0, 1, "the first batch came after 500 ms"),
        Dip("epoch", 1.1, 1.5, 0.4, 25, 1, "the first batch came after 400 ms"),
    ),
    epochs=(RehearsedEpoch(0.0, 1.5, 25, True, 0.5), RehearsedEpoch(1.5, 1.5, 25, False, 0.4)),
    epochs_begun=2,
    epoch_s=1.5,
    epoch_measured=True,
    torch="2.13.0",
)

TEXT = """\
The DataLoader costs 20% of the GPU's time.
  python train.py

  next: trainfit loader --step-time 40ms -- python train.py

Rates
  measured    19.2 of at most 25.0 batches/s, 614 samples/s
  waiting     20% of the time for batches
  an epoch    needs 1.5 s (40 batches)

GPU utilization
  over 3 s, as nvidia-smi reads it (busy share of each 500 ms)
  100% │    ████    ████
   75% │    ████    ████████████
   50% │    ████████████████████
   25% │    ████████████████████
    0% └┬───────┬───────┬───────
        0 s     1 s     2 s
        SSSS    EEEE
  S start-up; E epoch boundary
  mean        67%; 77% after the start (from 500 ms on)

The GPU was idle for 1 s of 3 s
  Idle because      Time  Share  What it means
  start-up        500 ms    17%  the first batch came after 500 ms
  epoch boundary  400 ms    13%  at 1.1 s: the first batch came after 400 ms;
                                 persistent_workers=True keeps the workers
  transfer        100 ms     3%  transfer of ready batches to the main process

Rehearsed
  DataLoader  train.py:9: Images, batch size 32
  settings    num_workers=4, prefetch_factor=2, persistent_workers=False, pin_memory=True (the
              script's own)
  GPU step    40 ms (given)"""


def rehearsal_text(result: Rehearsal) -> str:
    with laid_out_for(WIDTH):
        return whole(rehearsal_subject(result))


def test_text() -> None:
    assert rehearsal_text(RESULT) == TEXT


def test_text_where_there_are_no_block_characters() -> None:
    text = rehearsal_text(RESULT).encode("ascii", errors=IN_ASCII).decode()
    assert "   50% |    ####################" in text
    assert "    0% ++-------+-------+-------\n" in text


def first(**changes: Any) -> str:
    return rehearsal_text(dataclasses.replace(RESULT, **changes)).splitlines()[0]


def test_verdicts() -> None:
    keeps_up = dataclasses.replace(RESULT.steady, waiting_share=0.01)
    assert first(steady=keeps_up).startswith("Nothing to gain")
    late = dataclasses.replace(keeps_up, batches_per_s=10.0, busy_share=0.98)
    assert "keeps up, but its GPU steps are late: each took 98 ms" in first(steady=late)
    bound = dataclasses.replace(RESULT, steady=keeps_up, step_is_bound=True)
    assert verdict(bound)[0].endswith("even at the lower bound of the step time")
    assert verdict(dataclasses.replace(RESULT, step_is_bound=True))[0].endswith("--step-time")
    named = dataclasses.replace(RESULT, command="--loader data:make")
    assert verdict(named)[1] == "trainfit loader --step-time 40ms --loader data:make"
    assert "longer --duration" in first(steady=None)
    assert first(ended="interrupted").startswith("Interrupted")
    busy = {"others_cores": 1.3, "others": {"python": 0.9, "pip": 0.4}}
    assert first(**busy).startswith("Cannot tell what the DataLoader costs: alongside other")
    text = " ".join(rehearsal_text(dataclasses.replace(RESULT, **busy)).split())
    assert "other processes competed for 1.3 cores (python 0.9, pip 0.4): rates reflect" in text
    assert "other processes" not in rehearsal_text(dataclasses.replace(RESULT, others_cores=0.2))


def test_what_failed_is_said_first_with_its_fix() -> None:
    fault = failure_finding("exception", "it\x1b[31m raised", "at line 3", "mend it")
    failed = rehearsal_subject(dataclasses.replace(RESULT, ended="fault", fault=fault))
    for text in (whole(failed), screen(failed)):
        assert text.startswith("The DataLoader failed; these are the results so far")
        assert (
            "it\\x1b[31m raised" in text and "at line 3" in text and "fix         mend it" in text
        )


def test_what_hand_over_can_be_tried_with() -> None:
    unpinned = dataclasses.replace(RESULT, settings=LoaderSettings(4))
    assert "--pin-memory tests" in " ".join(rehearsal_text(unpinned).split())
    little = dataclasses.replace(unpinned, idle_s={"start_up": 0.5, "transfer": 0.01})
    assert "--pin-memory" not in rehearsal_text(little)


def test_what_the_loaders_model_said_stands_beside() -> None:
    said = Candidate(dataclasses.replace(RESULT.settings, persistent_workers=True), 18.5, 0.25, 2.0)
    tuned = loader_result(step_s=0.04, candidates=(said,))
    assert with_prediction(RESULT, tuned).predicted == Predicted(18.5, 0.25)
    for other, says in (
        (dataclasses.replace(tuned, step_s=0.05), "a step of 50ms: rehearse with --step-time 50ms"),
        (loader_result(step_s=0.04, candidates=()), "do not include these settings"),
        (
            dataclasses.replace(
                tuned, candidates=(dataclasses.replace(said, infeasible="1 GiB of RAM"),)
            ),
            "infeasible: 1 GiB of RAM",
        ),
    ):
        found = with_prediction(RESULT, other)
        assert found.predicted is None and says in found.notes[-1]


def test_predicted_stands_beside_measured() -> None:
    text = rehearsal_text(dataclasses.replace(RESULT, predicted=Predicted(18.5, 0.25)))
    assert "predicted   18.5 batches/s, 25% waiting" in text


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=400),
    st.floats(0.1, 1.0),
)
def test_any_curve_fits_the_page(shares: list[float], end: float) -> None:
    window = 1 / 6
    total = (len(shares) - 1 + end) * window
    result = dataclasses.replace(
        RESULT,
        overall=dataclasses.replace(RESULT.overall, seconds=total),
        timeline=UtilisationTimeline(window, tuple(shares)),
        dips=(Dip("slow_batch", 0.0, total, total, 1, 1),),
    )
    text = rehearsal_text(result).partition("\n\nThe GPU was idle")[0]
    assert all(len(line) <= WIDTH for line in text.splitlines())


@given(st.floats(0, 1), st.integers(2, 300))
def test_a_column_is_the_mean_of_its_windows(share: float, count: int) -> None:
    """What is drawn as full is full: an even curve has even columns of the right height."""
    result = dataclasses.replace(
        RESULT,
        overall=dataclasses.replace(RESULT.overall, seconds=count / 6),
        timeline=UtilisationTimeline(1 / 6, (share,) * count),
        dips=(),
    )
    lines = [line for line in rehearsal_text(result).splitlines() if "│" in line]
    rows = [line.partition("│")[2] for line in lines]
    assert len(rows) == 4
    for row in rows:  # even: one character throughout, or nothing
        assert len(set(row)) <= 1
    height = sum(" ▁▂▃▄▅▆▇█".index(row[0]) for row in rows if row)
    assert 32 * share - 1 - 1e-6 <= height <= max(int(share > 0), 32 * share + 1e-6)


def test_results_are_read_again_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "rehearsal.json"
    RESULT.save(path)
    assert Rehearsal.load(path) == RESULT
    path.write_text(path.read_text().replace('"epoch_s": 1.5', '"epoch_s": "long"'))
    with pytest.raises(ResultFileError, match=r"epoch_s.*trainfit rehearse --output"):
        Rehearsal.load(path)


# --- The command --------------------------------------------------------------------------------
def test_durations() -> None:
    assert duration("40ms") == pytest.approx(0.04)
    assert duration("1.5s") == duration("1.5") == 1.5
    assert duration("800us") == pytest.approx(8e-4)
    assert duration("2min") == 120.0 and duration("1h") == 3600.0
    for bad in ("0", "0ms", "-1s", "soon", "", "nan", "2h", "1e400", "3601"):
        with pytest.raises(Exception, match="expected a time above 0"):
            duration(bad)


@pytest.mark.slow
def test_a_script_is_rehearsed_and_shown_again(tmp_path: Path) -> None:
    done = trainfit(
        *("rehearse", "--step-time", "5ms", "--duration", "1s", "--num-workers", "1"),
        *("--output", "r.json", "--json", "--", "python", SCRIPT),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    found = json_of(done)
    assert found == json.loads((tmp_path / "r.json").read_text())
    assert found["settings"]["num_workers"] == 1 and found["epoch_batches"] == 8
    assert found["settings_source"] == "the script's own but num_workers"
    assert found["epochs_begun"] > 1 and found["ended"] == "duration"
    assert "Numbers, batch size 4" in found["loader"]
    shown = trainfit("show", "r.json", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert shown.returncode == 0 and shown.stdout.isascii()
    assert "GPU utilization\n  over 1" in shown.stdout and "E epoch boundary" in shown.stdout


@pytest.mark.slow
def test_interrupted_on_a_gpu_by_name(tmp_path: Path) -> None:
    words = ("rehearse", "--gpu", "RTX 4090", "--duration", "60s", "--output", "r.json")
    with subprocess.Popen(
        [sys.executable, "-m", "trainfit", *words, "--", "python", str(SCRIPT)],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "rehearsing" in line:
                break
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        text, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert text.startswith("Interrupted: results so far.\n")
    result = Rehearsal.load(tmp_path / "r.json")
    assert result.ended == "interrupted" and result.step_is_bound and result.step_s > 0
    assert result.overall is not None and result.overall.batches > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--", "python", str(SCRIPT)), "--step-time 40ms, or name a GPU"),
        (("--step-time", "1ms", "--", "python", "no.py"), "no.py"),
        (("--step-time", "1ms"), "trainfit rehearse -- python"),
        (("--gpu", "RTX 4090", "--loader", "data:make"), "--step-time 40ms"),
        (("--step-time", "1ms", "--output", "no/r.json", "--", "python", str(SCRIPT)), "no/r.json"),
        (("--step-time", "1ms", "--compare", "no.json", "--", "python", str(SCRIPT)), "no.json"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = trainfit("rehearse", *words, cwd=tmp_path)
    assert done.returncode == 2 and says in error_line(done)
    assert not done.stdout


@pytest.mark.slow
def test_a_script_that_fails_is_told(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise RuntimeError('no data here')\n")
    done = trainfit("rehearse", "--step-time", "1ms", "--", "python", "fails.py", cwd=tmp_path)
    assert done.returncode == 2 and "fails.py" in error_line(done)
    assert "no data here" in done.stderr
