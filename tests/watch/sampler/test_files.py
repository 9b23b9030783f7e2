"""What a sampler writes, what it reads of the run's folder, and what a disk does to it."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.results.runs import tables
from trainfit.results.runs.watched import Event, RunHeader, WatchedGpu, load_run
from trainfit.watch.sampler import sampling
from trainfit.watch.sampler.proc_files import KeptFiles
from trainfit.watch.sampler.roles import RunFolder, Worker
from trainfit.watch.sampler.sampling import TableFile


def rows(*times: float) -> tables.Table:
    made = tables.empty_rows(tables.MACHINE, len(times))
    made["time_s"] = times
    return made


def times(path: Path) -> list[float]:
    return list(tables.read_table(path, tables.MACHINE)["time_s"])


def header(rank: int = 0, started: float | None = None, **others: object) -> RunHeader:
    began = time.monotonic() if started is None else started
    return RunHeader("x", rank, 1, 4000 + rank, "h", 0.0, began, "0", "3", **others)  # type: ignore[arg-type]


# --- Tables ---------------------------------------------------------------------------------------


def test_rows_wait_until_the_beginning_is_known(tmp_path: Path) -> None:
    table = TableFile(tmp_path / "machine.bin", tables.MACHINE)
    table.add(rows(100.5))
    table.add(rows(100.6, 100.7))
    assert times(tmp_path / "machine.bin") == []
    table.flush(100.0)
    assert times(tmp_path / "machine.bin") == pytest.approx([0.5, 0.6, 0.7])
    assert table.lost == 0


def test_rows_that_wait_for_too_long_are_lost_the_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_MOST_WAITING", 3 * tables.MACHINE.itemsize)
    table = TableFile(tmp_path / "machine.bin", tables.MACHINE)
    for number in range(5):
        table.add(rows(float(number)))
    table.flush(0.0)
    assert times(tmp_path / "machine.bin") == [2.0, 3.0, 4.0]
    assert table.lost == 2


@given(room=st.lists(st.integers(0, 400), min_size=1, max_size=12))
def test_a_full_disk_costs_whole_rows_and_they_are_counted(
    tmp_path_factory: pytest.TempPathFactory, room: list[int]
) -> None:
    """Each flush finds a disk that takes so many bytes; then there is room again."""
    path = tmp_path_factory.mktemp("disk") / "machine.bin"
    left = 0

    def write(descriptor: int, content: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = os.write(descriptor, content[:left])
        left -= done
        return done

    table = TableFile(path, tables.MACHINE, write)
    for number, bytes_ in enumerate(room):
        left = bytes_
        table.add(rows(number, number + 0.5))
        table.flush(0.0)
    left = 1 << 20
    table.add(rows(1000.0))
    table.flush(0.0)
    found = times(path)
    assert found[-1] == 1000.0
    assert found == sorted(found)
    assert set(found[:-1]) <= {n + part for n in range(len(room)) for part in (0.0, 0.5)}
    assert table.lost == 2 * len(room) + 1 - len(found)
    assert path.stat().st_size % tables.MACHINE.itemsize == 0


def test_half_a_row_that_a_killed_sampler_left_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "machine.bin"
    path.write_bytes(rows(1.0).tobytes() + b"half")
    table = TableFile(path, tables.MACHINE)
    table.add(rows(2.0))
    table.flush(0.0)
    assert times(path) == [1.0, 2.0]


def test_a_second_sampler_of_a_run_is_kept_out(tmp_path: Path) -> None:
    first = TableFile(tmp_path / "machine.bin", tables.MACHINE)
    second = TableFile(tmp_path / "machine.bin", tables.MACHINE)
    assert first.lock()
    assert not second.lock()
    first.close()
    assert second.lock()


# --- The run's folder -----------------------------------------------------------------------------


def test_any_rank_tells_the_beginning_which_all_share(tmp_path: Path) -> None:
    """Rank 0 may be on another machine."""
    folder = RunFolder(tmp_path)
    assert folder.began is None
    (tmp_path / "rank1.json").write_text(header(1, 60.0).to_json())
    folder.look()
    assert folder.began == 60.0
    (tmp_path / "rank0.json").write_text(header(0, 60.0).to_json())
    folder.look()
    assert folder.began == 60.0
    assert folder.ranks == {0: 4000, 1: 4001}


def test_a_header_that_is_being_written_is_read_later(tmp_path: Path) -> None:
    folder, path = RunFolder(tmp_path), tmp_path / "rank0.json"
    text = header(0, 59.0).to_json()
    path.write_text(text[:100])
    folder.look()
    assert folder.began is None
    path.write_text(text)
    folder.look()
    assert folder.began == 59.0
    changed = header(0, 59.0, gpus=(WatchedGpu("H100", "GPU-1"),))
    path.write_text(changed.to_json())
    folder.look()
    assert folder.headers[0].gpus[0].uuid == "GPU-1"


def test_a_header_of_a_run_before_is_none_of_this_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, not_before=100.0)
    (tmp_path / "rank0.json").write_text(header(0, 20.0).to_json())
    folder.look()
    assert folder.began is None
    (tmp_path / "rank0.json").write_text(header(0, 100.5).to_json())
    folder.look()
    assert folder.began == 100.5


def test_workers_tell_their_number_in_their_tables(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "rank2.fetches.77.bin").touch()
    folder.look()
    assert folder.workers == {77: Worker(2, -1)}
    made = tables.empty_rows(tables.FETCHES)
    made["worker"] = 5
    (tmp_path / "rank2.fetches.77.bin").write_bytes(made.tobytes())
    folder.look()
    assert folder.workers == {77: Worker(2, 5)}


def test_a_folder_that_is_gone_or_another(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    folder = RunFolder(path)
    assert not folder.is_gone
    path.rename(tmp_path / "moved")
    assert folder.is_gone
    folder.look()
    assert not folder.write_event(Event(0.0, "gpu"))


def test_events_of_the_sampler_belong_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text(header().to_json())
    event = Event(1.5, "nvml_lost", text="NVML does not answer", values={"nvml": 0.0})
    assert RunFolder(tmp_path).write_event(event)
    assert load_run(tmp_path).sampler_events == (event,)
    (line,) = (tmp_path / "sampler.events.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "nvml_lost"


# --- Files of /proc -------------------------------------------------------------------------------


def test_a_kept_file_is_read_from_its_beginning_each_time(tmp_path: Path) -> None:
    files = KeptFiles(tmp_path, most=1)
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(bytes(200_000))
    first, second = files.file("/a"), files.file("/b")
    assert first.read() == b"1"
    (tmp_path / "a").write_bytes(b"22")
    assert first.read() == b"22"
    assert files.left == 0
    # There is no descriptor left to keep this one.
    assert second.read() == bytes(200_000)
    first.close()
    assert files.left == 1
    assert files.file("/c").read() is None
    assert files.names("/c") == []


def test_all_of_a_table_of_the_kernel_is_read() -> None:
    kept = KeptFiles().file("/proc/self/maps")
    kept.read()
    content = kept.read()
    assert content is not None
    assert content.endswith(b"\n")
    assert np.char.count(content, b"\n") > 50
