"""The probe and the tuner on real loaders: what happens, not how fast."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
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
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    get_worker_info,
)

from trainfit.loader import local_tuning
from trainfit.loader.local_tuning import tune
from trainfit.loader.measure import processes
from trainfit.loader.measure.loop import OtherProcessLoad
from trainfit.loader.measure.records import CPU, collected
from trainfit.loader.measure.running import run_loader
from trainfit.loader.measure.workload import Workload
from trainfit.loader.probe import Measured, probe_workload
from trainfit.results.dataloader import LoaderMachine, LoaderSettings
from trainfit.results.loader import LoaderResult
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.spec import TuningSpec
from trainfit.scripts.library_threads import pools

MACHINE = LoaderMachine(2.0, (0, 1), 2, None, (1.0, 1.0), 8 << 30, 8 << 30, 4096)
SECONDS = 1.5


class Sleeping(Dataset[Any]):
    """Samples that take a given time and no core."""

    def __init__(self, seconds: float = 0.002, count: int = 400) -> None:
        self.seconds, self.count = seconds, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(64)


def probed(data: Any, batch_size: int | None = 4, **loader: Any) -> Measured:
    return probe_workload(Workload(DataLoader(data, batch_size, **loader)), MACHINE, SECONDS)


def tuned(data: Any, batch_size: int | None = 4, step_s: float = 0.0, **more: Any) -> LoaderResult:
    settings = {
        name: more.pop(name) for name in ("seconds", "max_workers", "confirm") if name in more
    }
    workload = Workload(DataLoader(data, batch_size, **more))
    return tune(
        workload,
        MACHINE,
        TuningSpec(Consumer(step_s), **({"seconds": SECONDS, "confirm": 2} | settings)),
    )


# --- The probe --------------------------------------------------------------------------------


def test_a_probe_says_what_a_loader_gives_and_changes_nothing_here() -> None:
    before = torch.random.get_rng_state(), random.getstate(), signal.getsignal(signal.SIGALRM)
    workload = Workload(DataLoader(Sleeping(0.0), 4, shuffle=True))
    probe = probe_workload(workload, MACHINE, SECONDS, kinds=("alone", "one")).probe
    assert probe.kind == "map" and probe.batch_size == 4 and probe.samples == 400
    assert probe.batch_bytes == 4 * 64 * 4 == probe.float_bytes
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == random.getstate()
    assert signal.getsignal(signal.SIGALRM) == before[2]
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_probe_reads_what_batches_cost() -> None:
    measured = probed(Sleeping(), shuffle=True)
    probe = measured.probe
    assert probe.faults == () and measured.fitted is not None
    # Four waits of 2 ms. Where other work keeps the cores busy, a part counts as its effect.
    assert probe.fetch_s is not None and probe.fetch_s >= 0.002
    assert probe.fetch_cpu_s is not None and probe.fetch_cpu_s < probe.fetch_s / 2
    assert probe.start_s["fork"] > 0 and probe.worker_private_bytes
    # More workers wait for more samples at once.
    rates = [measured.predict(LoaderSettings(n), Consumer(0.0)).batches_per_s for n in (1, 2, 4)]
    assert rates[0] < rates[1] < rates[2]


@pytest.mark.slow
def test_batches_that_take_long_are_no_fault() -> None:
    measured = probed(Sleeping(0.5), batch_size=1)
    assert measured.probe.faults == ()
    assert measured.fitted is not None


class Products(Dataset[Any]):
    """Matrix products, which OpenBLAS shares among threads of its own in each worker."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        matrix = np.full((300, 300), 1e-3 * index)
        return torch.from_numpy((matrix @ matrix)[:8, :8].copy())


@pytest.mark.slow
@pytest.mark.skipif(pools().get("openblas", 1) < 2, reason="OpenBLAS has one thread here")
def test_threads_of_libraries_are_probed_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a machine where nobody else is busy: on one that stays busy nothing is probed twice."""
    monkeypatch.setattr(OtherProcessLoad, "cores", lambda _: 0.0)
    result = tuned(Products(), num_workers=2, seconds=6.0, confirm=0)
    assert result.probe.thread_pools["openblas"] > 1 and result.probe.started_threads
    assert result.held is not None and result.held.batches > 0
    assert result.held.parts == result.probe.parts
    held = {each.settings.library_threads for each in result.candidates}
    assert held == {None, 1}
    told = any("with one thread per library" in note for note in result.notes)
    assert told is not result.was_busy
    named = {each.name for each in result.variables}
    chosen = result.recommended
    if chosen.num_workers:
        assert ("OPENBLAS_NUM_THREADS" in named) is (chosen.library_threads == 1)
    assert LoaderResult.from_json(result.to_json(), Path("x")) == result


class WorkersOnly(IterableDataset[Any]):
    def __iter__(self) -> Any:
        info: Any = get_worker_info()
        return iter(torch.ones(1) * (info.id + 2 * n) for n in range(500))


@pytest.mark.slow
def test_a_data_set_for_workers_only_keeps_its_workers() -> None:
    measured = probed(WorkersOnly())
    assert measured.fitted is not None
    assert measured.bounds.least_workers == 1
    assert not measured.bounds.allows(LoaderSettings(0))
    assert measured.bounds.allows(LoaderSettings(2))


class OddLength(Sleeping):
    def __len__(self) -> int:
        raise OverflowError("no idea")


def test_a_length_that_raises_is_unknown() -> None:
    workload = Workload(DataLoader(OddLength(), 4, sampler=list(range(40))))
    assert workload.epoch_batches == 10
    broken = Workload(DataLoader(OddLength(), None, sampler=list(range(40))))
    assert broken.samples == 40


@pytest.mark.slow
def test_the_start_method_stays_open() -> None:
    """In a fresh process: asking for it must not fix it."""
    code = (
        "import multiprocessing\n"
        "from torch.utils.data import DataLoader\n"
        "from trainfit.loader.measure.workload import Workload\n"
        "assert Workload(DataLoader([1, 2])).present.num_workers == 0\n"
        "multiprocessing.set_start_method('forkserver')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class OpensLate(Sleeping):
    """Opens its file with the first sample, as many do for the sake of workers."""

    def __init__(self) -> None:
        super().__init__()
        self.file: Any = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file = object()
        return torch.zeros(1)


@pytest.mark.parametrize("wrapped", [False, True])
def test_workers_never_inherit_what_this_process_opened(wrapped: bool) -> None:
    data = OpensLate()
    source: Any = Subset(ConcatDataset([data]), range(50)) if wrapped else data
    for batch in itertools.islice(Workload(DataLoader(source, 2)).loader(LoaderSettings(0)), 3):
        assert batch.shape == (2, 1)
    assert data.file is None
    assert len(source) in (50, 400)


# --- Tuning -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_waiting_batches_get_workers_until_the_gpu_is_the_limit() -> None:
    result = tuned(Sleeping(), step_s=0.004)
    if result.was_busy:
        pytest.skip("other processes keep the cores busy: no verdict can be given")
    assert result.verdict == "change" and result.present.num_workers == 0
    assert 2 <= result.recommended.num_workers <= 8
    trial = result.measured(result.recommended)
    assert trial is not None and trial.measured_batches_per_s
    best = result.candidate(result.recommended)
    assert best is not None and best.ram_bytes and best.alone_batches_per_s
    assert len(result.confirmed) <= 2
    assert LoaderResult.from_json(result.to_json(), Path("x")) == result


@pytest.mark.slow
def test_a_slow_gpu_has_nothing_to_gain() -> None:
    result = tuned(Sleeping(0.0005), step_s=0.08, num_workers=1, persistent_workers=True)
    assert result.verdict == "nothing_to_gain", result.reason
    assert result.limit == "gpu"


@pytest.mark.slow
def test_no_more_workers_than_asked_for() -> None:
    result = tuned(Sleeping(), num_workers=6, max_workers=2, confirm=0)
    assert result.recommended.num_workers <= 2
    assert "as requested" in result.reason


class Broken(Sleeping):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise KeyError("no such sample")


def test_a_data_set_that_never_gives_a_batch_is_told_with_its_fault() -> None:
    result = tuned(Broken())
    assert result.verdict == "cannot_tell"
    assert any("KeyError" in fault.title for fault in result.faults)
    assert result.recommended == result.present


class NotInWorkers(Sleeping):
    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None:
            raise RuntimeError("not here")
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_data_set_for_the_main_process_is_called_one() -> None:
    result = tuned(NotInWorkers(), num_workers=2)
    assert "main_process_only" in {fault.kind for fault in result.faults}
    assert result.recommended.num_workers == 0
    assert result.limit == "main_process" and result.verdict == "change"


class Kept:
    """A progress that holds the results that it is to keep."""

    def __init__(self) -> None:
        self.kept: list[LoaderResult] = []

    def __call__(self, text: str, share: float | None = None) -> None:
        assert share is None or 0 <= share <= 1

    def keep(self, result: LoaderResult) -> None:
        self.kept.append(result)


@pytest.mark.slow
def test_what_was_measured_is_kept_before_each_risk() -> None:
    progress = Kept()
    workload = Workload(DataLoader(Sleeping(), 4))
    result = tune(workload, MACHINE, TuningSpec(seconds=SECONDS, confirm=2), progress=progress)
    assert [len(each.confirmed) for each in progress.kept] == [0, 1, 2][: len(progress.kept)]
    assert len(progress.kept) == 1 + len(result.confirmed)


@pytest.mark.slow
def test_a_first_probe_is_kept_before_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(OtherProcessLoad, "cores", lambda _: 0.0)
    monkeypatch.setattr(local_tuning.threads, "may_be_held", lambda _: True)
    monkeypatch.setattr(local_tuning, "_held", ended)
    progress = Kept()
    with pytest.raises(KeyboardInterrupt):
        tune(
            Workload(DataLoader(Sleeping(), 4)),
            MACHINE,
            TuningSpec(seconds=SECONDS),
            progress=progress,
        )
    (result,) = progress.kept
    assert result.recommended.num_workers and result.candidates and not result.confirmed


# --- Processes of their own -------------------------------------------------------------------


def _left(number: int) -> bytes:
    return bytes(number)


def test_a_call_that_ends_in_every_way() -> None:
    assert processes.call(lambda: _left(50 << 20), 20).value == bytes(50 << 20)
    assert processes.call(lambda: os._exit(3), 20).exit_code == 3  # type: ignore[arg-type, return-value]
    killed = processes.call(lambda: os.kill(os.getpid(), signal.SIGKILL), 20)
    assert killed.exit_code == -signal.SIGKILL
    assert processes.call(lambda: time.sleep(60), 0.3).hung
    failed = processes.call(lambda: {}["x"], 20)  # type: ignore[var-annotated]
    assert failed.error_type == "KeyError" and failed.failed


def test_a_call_here_leaves_timers_and_interrupts_to_others() -> None:
    fired = threading.Event()
    signal.signal(signal.SIGALRM, lambda *_: fired.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.4)
        assert processes.call_here(lambda: 5, 10).value == 5
        assert processes.call_here(lambda: time.sleep(5), 0.1).hung
        assert fired.wait(5) or fired.is_set()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.call_here(interrupted, 10)


def test_pinning_without_a_gpu_copies_each_tensor() -> None:
    run = run_loader(
        Workload(DataLoader(Sleeping(0.0), 4)), LoaderSettings(1, pin_memory=True), seconds=0.2
    )
    assert run.failure is None
    assert len(run.pinned) >= len(run.handed)
    assert np.all(run.pinned[:, 0] > 0)
    assert not torch.accelerator.is_available()


class Littering(Dataset[int]):
    """Full collections, and hardly anything else."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


def test_a_workers_garbage_collections_are_timed() -> None:
    run = run_loader(Workload.of(Littering(), 1), LoaderSettings(2), seconds=0.1)
    for records in run.fetches:
        spent = collected(records)
        assert np.all(spent > 0)
        assert 0.5 * records[:, CPU].sum() < spent.sum() < records[:, CPU].sum()
