"""What saving a checkpoint takes while workers go on."""

from __future__ import annotations

import errno
import tempfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.loader.measure.loop import predicted_save_s, save_seconds
from trainfit.loader.measure.running import run_loader
from trainfit.loader.measure.workload import Workload
from trainfit.results.dataloader import LoaderSettings


def test_workers_that_go_on_share_the_cores() -> None:
    """Four workers of four batches each, 0.1 s of work: 0.8 s on two cores. The main process
    gets 2 of 5 threads' time: 0.1 s of work take 0.25 s, and 0.5 s take 0.48 s more."""
    four = LoaderSettings(4, 4)
    assert predicted_save_s(0.1, four, 0.5, 0.1, 2.0) == pytest.approx(0.25)
    assert predicted_save_s(0.5, four, 0.5, 0.1, 2.0) == pytest.approx(0.5 + 0.8 * 0.6)


def test_nobody_is_in_the_way() -> None:
    assert predicted_save_s(0.1, LoaderSettings(0), 1.0, 0.1, 2.0) == 0.1
    # Batches are ready ahead of the consumer: the workers idle.
    assert predicted_save_s(0.1, LoaderSettings(4), 0.0, 0.1, 2.0) == 0.1
    assert predicted_save_s(0.1, LoaderSettings(4), 0.5, 0.1, 8.0) == pytest.approx(0.1)


@given(
    alone_s=st.floats(0.001, 10),
    workers=st.integers(1, 64),
    prefetch=st.integers(1, 8),
    batch_s=st.floats(0, 1),
    cores=st.floats(1, 64),
)
def test_more_workers_never_save_sooner(
    alone_s: float, workers: int, prefetch: int, batch_s: float, cores: float
) -> None:
    times = [
        predicted_save_s(alone_s, LoaderSettings(count, prefetch), 0.5, batch_s, cores)
        for count in (workers, 2 * workers)
    ]
    assert alone_s * (1 - 1e-9) <= times[0] <= times[1] * (1 + 1e-9)
    assert times[1] <= alone_s * max(1.0, (2 * workers + 1) / cores) * (1 + 1e-9)


def test_a_run_saves_where_it_is_asked_to() -> None:
    workload = Workload.of(list(range(8)), 2)
    assert run_loader(workload, LoaderSettings(0), seconds=0.01).save_s is None
    saved = run_loader(workload, LoaderSettings(1), seconds=0.01, saves=True).save_s
    assert saved is not None and saved > 0


def test_a_full_disk_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert save_seconds(4) is None
