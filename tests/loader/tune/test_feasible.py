"""What settings of a DataLoader take, and whether that can be."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from helpers_probe import GIB, MIB, machine, probe
from trainfit.hardware.machine.limits import OWN_FILES
from trainfit.loader.measure.records import COLUMNS, CPU, WALL, Run
from trainfit.loader.probe import _core_wait_s
from trainfit.loader.search import growth, infeasible, needs, oversubscribed
from trainfit.loader.tuner import workers_tried
from trainfit.results.dataloader import LoaderSettings


def test_batches_in_flight() -> None:
    taken = needs(LoaderSettings(8, 2), probe())
    assert taken.shm_bytes == (2 * 8 + 1) * 18 * MIB
    assert taken.ram_bytes == 8 * 200 * MIB + taken.shm_bytes
    # Out of turn, all 17 may wait as two open files each; 4 a worker, 2 for results.
    assert taken.main_files == 128 + 2 + 4 * 8 + 17 * 2
    assert taken.worker_files == 128 + 3 * 2


def test_pinned_batches_wait_as_copies() -> None:
    taken = needs(LoaderSettings(8, 2, pin_memory=True), probe())
    assert taken.ram_bytes == 8 * 200 * MIB + 2 * 17 * 18 * MIB
    assert taken.main_files == 128 + 2 + 4 * 8 + 2 * 2


def test_without_workers_nothing_is_handed_over() -> None:
    taken = needs(LoaderSettings(0), probe())
    assert (taken.ram_bytes, taken.shm_bytes) == (0, 0)
    tight = machine(shm_free_bytes=0, available_bytes=0, open_files=1, usable_cores=0.1)
    assert infeasible(LoaderSettings(0), probe(), tight) == ""


def test_a_workers_memory_that_was_not_measured() -> None:
    unmeasured = probe(worker_private_bytes=None)
    assert needs(LoaderSettings(4), unmeasured).ram_bytes is None
    assert infeasible(LoaderSettings(4), unmeasured, machine()) == ""
    # The batches in flight are known all the same.
    assert "of RAM" in infeasible(LoaderSettings(4), unmeasured, machine(available_bytes=100 * MIB))


@pytest.mark.parametrize(
    ("settings", "bound", "words"),
    [
        # Docker's 64 MiB: 5 batches of 18 MiB.
        ({"num_workers": 2}, {"shm_free_bytes": 63 * MIB}, ("90 MiB", "63 MiB", "--shm-size=1g")),
        (
            {"num_workers": 8},
            {"available_bytes": 1 * GIB},
            ("8 workers", "1.00 GiB", "fewer workers"),
        ),
        ({"num_workers": 8}, {"open_files": 180}, ("196 open files", "180", "ulimit -n 4096")),
    ],
)
def test_each_bound_has_its_words_and_fix(
    settings: dict[str, Any], bound: dict[str, Any], words: tuple[str, ...]
) -> None:
    said = infeasible(LoaderSettings(**settings), probe(), machine(**bound))
    assert all(word in said for word in words), said
    assert infeasible(LoaderSettings(**settings), probe(), machine()) == ""


def test_a_worker_with_many_tensors_is_the_one_that_runs_out() -> None:
    said = infeasible(
        LoaderSettings(1, 16, pin_memory=True), probe(batch_tensors=114), machine(open_files=1024)
    )
    assert said.startswith("needs 2066 open files in a worker")


def test_many_small_tensors_run_out_of_files() -> None:
    """rf-detr#1399: 114 tensors a batch crashed with 16 workers at the usual 1024, 9 did not."""
    usual = machine(open_files=1024)
    assert "open files" in infeasible(LoaderSettings(16), probe(batch_tensors=114), usual)
    assert infeasible(LoaderSettings(16), probe(batch_tensors=9), usual) == ""


def test_what_is_not_known_forbids_nothing() -> None:
    dark = machine(available_bytes=None, shm_free_bytes=None, open_files=None)
    assert infeasible(LoaderSettings(16, 64), probe(), dark) == ""


@pytest.mark.parametrize(
    ("workers", "usable", "cpu_s", "busy", "fine"),
    [
        (1, 0.5, 0.08, 0.5, True),  # one can always be
        (2, 1.5, 0.08, 1.5, True),  # 0.75 of a core each
        (3, 1.5, 0.08, 1.5, True),  # one more than cores
        (4, 1.5, 0.08, 1.5, False),
        (4, 1.5, 0.08, 0.4, True),  # the GPU is the limit: the workers idle
        (16, 4.0, 0.08, 1.0, True),
        (4, 4.0, 0.08, 4.0, True),
        (8, 4.0, 0.02, 3.9, True),  # they wait three quarters of their time
        (21, 4.0, 0.02, 4.0, False),
        (4, 4.0, 0.16, 4.0, False),  # two threads each
        (6, 4.0, None, 4.0, False),  # not measured: a core each
    ],
)
def test_workers_take_turns_where_all_of_them_work(
    workers: int, usable: float, cpu_s: float | None, busy: float, fine: bool
) -> None:
    seen, here = probe(fetch_cpu_s=cpu_s), machine(usable_cores=usable)
    said = oversubscribed(LoaderSettings(workers), seen, here, busy)
    assert (said == "") == fine, said
    # It runs all the same.
    assert infeasible(LoaderSettings(workers), seen, here) == ""


def test_copies_of_what_a_fork_shares_are_bounded() -> None:
    settings = LoaderSettings(16)
    taken = needs(settings, probe(), shared_bytes=4 * GIB)
    assert taken.ram_bytes is not None
    assert taken.ram_bound_bytes == taken.ram_bytes + 16 * 4 * GIB
    warned = growth(settings, probe(), machine(), 4 * GIB)
    assert "16 workers" in warned and "NumPy" in warned
    # It is a warning: how soon it happens is not known.
    assert infeasible(settings, probe(), machine(), shared_bytes=4 * GIB) == ""
    assert growth(settings, probe(), machine(), GIB) == ""
    assert growth(settings, probe(), machine(), None) == ""
    spawned = LoaderSettings(16, start_method="spawn")
    assert growth(spawned, probe(), machine(), 4 * GIB) == ""


class Late(Dataset[list[torch.Tensor]]):
    """The first batch is late, until the process that asked for it holds three others."""

    def __init__(self) -> None:
        self.others = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        if index == 0:
            assert self.others.wait(30)
        return [torch.zeros(10) for _ in range(5)]


def test_a_real_loader_holds_no_more_files() -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    late = Late()
    before = held()
    loader = DataLoader(
        late, batch_size=1, num_workers=2, prefetch_factor=6, multiprocessing_context="fork"
    )
    batches = iter(loader)
    started = held() - before

    def release() -> None:
        # A worker cannot tell when its batch was received; the files opened for it can.
        give_up = time.monotonic() + 300
        while held() - before < started + 3 * 5 and time.monotonic() < give_up:
            time.sleep(0.001)
        late.others.set()

    watching = threading.Thread(target=release)
    watching.start()
    batch = next(batches)
    watching.join()
    waiting = held() - before
    batches._shutdown_workers()  # type: ignore[attr-defined]
    assert len(batch) == 5
    assert started <= 2 + 2 * 4
    # The first batch and those that came before it, one file for each tensor.
    most = needs(LoaderSettings(2, 6), probe(batch_tensors=5)).main_files - OWN_FILES
    assert started + 2 * 5 < waiting <= most


@given(st.integers(1, 64), st.integers(1, 16), st.booleans(), st.integers(0, 1 << 30))
def test_more_of_anything_takes_no_less(
    workers: int, prefetch: int, pin: bool, batch_bytes: int
) -> None:
    seen = probe(batch_bytes=batch_bytes)
    one = needs(LoaderSettings(workers, prefetch, pin), seen)
    for more in (
        needs(LoaderSettings(workers + 1, prefetch, pin), seen),
        needs(LoaderSettings(workers, prefetch + 1, pin), seen),
    ):
        assert one.ram_bytes is not None and more.ram_bytes is not None
        assert more.ram_bytes >= one.ram_bytes
        assert more.shm_bytes >= one.shm_bytes
        assert more.main_files >= one.main_files
        assert more.worker_files >= one.worker_files


@pytest.mark.parametrize(
    ("computes_s", "core_wait_s", "is_busy", "most"),
    [
        (0.114, None, False, 4),  # two a core
        (0.012, None, False, 16),  # a network, or a disk: eight a core
        (0.012, None, True, 2),  # it may wait for a core
        (0.012, 0.0, True, 16),  # it does not
        (0.030, 0.060, True, 3),  # for half of the time that it has no core
        (0.040, 0.080, True, 2),  # always
    ],
)
def test_more_workers_are_tried_where_they_wait_for_anything_but_a_core(
    computes_s: float, core_wait_s: float | None, is_busy: bool, most: int
) -> None:
    found = probe(fetch_s=0.120, fetch_cpu_s=computes_s, core_wait_s=core_wait_s)
    assert workers_tried(found, 2.0, is_busy=is_busy) == most


def test_the_probe_tells_what_its_workers_waited_for_a_core() -> None:
    records = np.zeros((10, COLUMNS))
    records[:, WALL], records[:, CPU] = 0.1, 0.02
    run = Run(LoaderSettings(1), 0.0, fetches=(records,), core_waits_s=(0.5,))
    assert _core_wait_s([run], 0.1) == pytest.approx(0.05)
    assert _core_wait_s([dataclasses.replace(run, core_waits_s=())], 0.1) is None
