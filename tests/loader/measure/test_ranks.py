"""Several ranks with a loader each: one rank's share in the model, and the others running."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from helpers_loader import machine, probe, result
from helpers_report import on_one_line, whole
from trainfit.findings.facts import Failure
from trainfit.loader import local_tuning
from trainfit.loader.measure.events import Cores
from trainfit.loader.measure.fitting import Fitted, share_of
from trainfit.loader.measure.model import BatchCost, Transfer
from trainfit.loader.measure.records import Run
from trainfit.loader.measure.running import alone_note, others
from trainfit.loader.measure.workload import Workload
from trainfit.loader.preflight import run_watched
from trainfit.loader.probe import Measured
from trainfit.report.sections.loader import loader_subject
from trainfit.results.dataloader import Confirmed, LoaderMachine, LoaderSettings
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.spec import TuningSpec

TWO = LoaderSettings(2)


def model(cores: Cores) -> Fitted:
    costs = (BatchCost(0.0, 0.01),)
    return Fitted(costs, costs, Transfer(), Transfer(), cores, 0.03)


def share(cores: int, ranks: int, quota: float | None = None) -> LoaderMachine:
    """What ``loader_machine`` gives one rank of so many like cores."""
    usable = min(cores, quota or cores) / ranks
    speeds = (1.0,) * -(-cores // ranks)
    return machine(usable_cores=usable, core_speeds=speeds, quota_cores=quota)


# -- the model ---------------------------------------------------------------------------------


@given(
    each=st.integers(1, 8),
    ranks=st.integers(2, 8),
    contention=st.floats(0, 0.5),
    busy=st.integers(1, 8),
)
def test_ranks_that_work_alike_do_together_what_the_machine_does(
    each: int, ranks: int, contention: float, busy: int
) -> None:
    busy = min(each, busy)
    whole = Cores((1.0,) * (each * ranks), contention=contention)
    one = share_of(model(whole), share(each * ranks, ranks), ranks).cores
    assert one.rate(busy) == pytest.approx(whole.rate(busy * ranks))


def test_two_ranks_on_two_cores_have_one_each() -> None:
    """What was predicted of a rank with both cores was twice what it gets."""
    whole = model(Cores((1.0, 1.0)))
    rank = share_of(whole, share(2, 2), 2)
    alone = whole.predict(TWO, Consumer(0.0)).batches_per_s
    beside = rank.predict(TWO, Consumer(0.0)).batches_per_s
    assert alone == pytest.approx(200, rel=0.05) and beside == pytest.approx(100, rel=0.05)
    # One that the GPU holds up as before.
    slow = Consumer(0.05)
    assert rank.predict(TWO, slow).batches_per_s == pytest.approx(20, rel=0.02)


def test_a_quota_is_divided() -> None:
    rank = share_of(model(Cores((1.0,) * 4, quota=3.0)), share(4, 2, 3.0), 2)
    assert rank.cores.quota == 1.5 and len(rank.cores.speeds) == 2
    assert rank.predict(TWO, Consumer(0.0)).batches_per_s == pytest.approx(150, rel=0.05)


# -- the others running ------------------------------------------------------------------------


class Logged(Dataset[Any]):
    """Each sample writes which process group made it, of which index."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.path.open("a") as file:
            file.write(f"{os.getpgid(0)} {index}\n")
        return torch.zeros(4)

    def groups(self) -> list[str]:
        return [line.split()[0] for line in self.path.read_text().splitlines()]


def logged(path: Path, **loader: Any) -> tuple[Logged, Workload]:
    data = Logged(path)
    return data, Workload(DataLoader(data, 4, **loader))


def outlive(groups: set[str]) -> set[str]:
    """Of these process groups, those that still have a process after five minutes: what is killed
    takes a moment to be gone."""
    deadline = time.monotonic() + 300
    while (left := living(groups)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def living(groups: set[str]) -> set[str]:
    """Of these process groups, those with a process that is not a zombie."""
    found = set()
    for process in psutil.process_iter():
        try:
            group = str(os.getpgid(process.pid))
            if group in groups and process.status() != psutil.STATUS_ZOMBIE:
                found.add(group)
        except (psutil.Error, ProcessLookupError):
            continue
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_the_others_are_at_work_until_the_end_and_then_gone(tmp_path: Path, workers: int) -> None:
    data, workload = logged(tmp_path / "log", shuffle=True)
    with others(workload, LoaderSettings(workers), Consumer(0.001), 2, 60.0) as at_work:
        assert at_work.working() == 2
        groups = set(data.groups())
        assert len(groups) == 2 and str(os.getpgid(0)) not in groups
        before = len(data.groups())
        deadline = time.monotonic() + 300
        while len(data.groups()) < before + 100 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert set(data.groups()[before:]) == groups  # they go on
    assert not outlive(groups)


def test_each_rank_draws_an_order_of_its_own(tmp_path: Path) -> None:
    _, workload = logged(tmp_path / "log", shuffle=True, generator=torch.Generator().manual_seed(1))
    state = workload.generators[0].get_state()
    with others(workload, LoaderSettings(0), Consumer(0.0), 2, 60.0):
        pass
    assert torch.equal(state, workload.generators[0].get_state())
    first: dict[str, list[str]] = {}
    for line in (tmp_path / "log").read_text().splitlines():
        group, index = line.split()
        first.setdefault(group, []).append(index)
    one, two = (orders[:4] for orders in first.values())
    assert one != two


def test_one_rank_starts_nobody(tmp_path: Path) -> None:
    data, workload = logged(tmp_path / "log")
    with others(workload, TWO, Consumer(0.0), 0, 60.0) as at_work:
        assert at_work.working() == 0
    assert not data.path.exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_real_run_has_a_copy_at_work_for_each_rank(tmp_path: Path, workers: int) -> None:
    data, workload = logged(tmp_path / "log")
    run, fault = run_watched(
        workload,
        LoaderSettings(workers),
        Consumer(0.0),
        0.2,
        patience_s=60.0,
        batch_s=0.01,
        ranks=3,
    )
    assert fault is None and run.ranks == 3 and run.batches_per_s
    assert len(set(data.groups())) == 3
    assert alone_note([run], 3) == ""


def test_tuning_for_ranks_confirms_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, workload = logged(tmp_path / "log")
    whole, probed_on = share(2, 1), []

    def probed(workload: Workload, machine: LoaderMachine, *_: Any) -> Measured:
        probed_on.append(machine)
        return Measured(probe(), model(Cores((1.0, 1.0))))

    monkeypatch.setattr(local_tuning, "probe_workload", probed)
    found = local_tuning.tune(
        workload,
        share(2, 2),
        TuningSpec(ranks=2, seconds=1.0, confirm=1),
        whole=whole,
    )
    assert probed_on == [whole]
    assert found.ranks == 2 and found.machine.usable_cores == 1
    assert found.candidate(TWO).batches_per_s == pytest.approx(100, rel=0.05)  # type: ignore[union-attr]
    assert len(found.confirmed) == 1 and found.confirmed[0].fault is None
    assert not any("copies of the loader" in note for note in found.notes)
    assert len(set(data.groups())) == 2


def test_threads_of_libraries_are_held_down_for_one_ranks_share_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, workload = logged(tmp_path / "log")
    whole, probed_on = share(2, 1), []

    def probed(workload: Workload, machine: LoaderMachine, *_: Any, **more: Any) -> Measured:
        probed_on.append(machine)
        seen = probe(thread_pools={"openblas": 2}, started_threads=1)
        return Measured(seen, model(Cores((1.0, 1.0))))

    monkeypatch.setattr(local_tuning, "probe_workload", probed)
    found = local_tuning.tune(
        *(workload, share(2, 2), TuningSpec(ranks=2, seconds=1.0, confirm=0)),
        whole=whole,
    )
    assert probed_on == [whole, whole]
    held = dataclasses.replace(TWO, library_threads=1)
    free_rate, held_rate = (found.candidate(each).batches_per_s for each in (TWO, held))  # type: ignore[union-attr]
    assert held_rate == pytest.approx(free_rate) == pytest.approx(100, rel=0.05)


class Dies(Logged):
    """All but the measured one, which is forked with a file there, end at once."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if os.getppid() == int(self.path.read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(4)


def test_ranks_that_break_off_are_told(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    path.write_text(str(os.getpid()))
    workload = Workload(DataLoader(Dies(path), 4))
    run, fault = run_watched(
        workload, LoaderSettings(0), Consumer(0.0), 0.2, patience_s=60.0, batch_s=0.01, ranks=2
    )
    assert fault is None and run.ranks == 1
    assert "of 2 copies of the loader, one for each rank, 1 ran to the end" in alone_note([run], 2)
    assert alone_note([dataclasses.replace(run, failure=Failure("OSError"))], 2) == ""
    assert alone_note([], 2) == ""


# -- what is said ------------------------------------------------------------------------------


def test_the_headline_and_its_reason_have_the_same_numbers() -> None:
    """Measured against predicted compares the model with the machine, not the settings."""
    found = result()
    assert found.compared() == (found.candidates[1].batches_per_s, 24.8, "predicted")
    present = Confirmed(found.present, 8.33, 9.0, 0.1, 48, 2.0)
    both = dataclasses.replace(found, confirmed=(*found.confirmed, present))
    assert both.compared() == (9.0, 24.1, "measured")
    assert "Change the settings: 9.00 → 24.1 batches/s, 2.68× (measured)\n" in whole(
        loader_subject(both)
    )
    failed = dataclasses.replace(present, measured_batches_per_s=None)
    neither = dataclasses.replace(found, confirmed=(*found.confirmed, failed))
    assert neither.compared() == found.compared()
    assert dataclasses.replace(found, candidates=()).compared() is None


def test_ranks_are_said() -> None:
    text = on_one_line(whole(loader_subject(result(ranks=2, machine=machine(usable_cores=8 / 3)))))
    assert "2.98× (predicted) for each rank" in text
    assert "the share of one of 2 ranks" in text
    assert "(of 8 logical allowed" in text
    said = "1 real run of these settings, each with 2 copies of the DataLoader running, differed"
    assert said in text and "by -3% from the prediction" in text
    assert "rank" not in whole(loader_subject(result()))


def test_a_run_of_one_rank_is_one_copy() -> None:
    assert Run(TWO, 0.0).ranks == 1
