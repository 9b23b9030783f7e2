"""Rows on their way to the disk: whole ones only, in order, and counted where they are lost."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_watch import HEADER
from trainfit.results.runs import tables
from trainfit.results.runs.watched import Event, missing_rows
from trainfit.watch.recorder import rank_files
from trainfit.watch.recorder.rank_files import RankFiles, Ring

KIND = np.dtype([("number", "i8"), ("value", "f4"), ("flags", "u2")])


def numbers(path: Path) -> list[int]:
    return [int(each) for each in tables.read_table(path, KIND)["number"]]


@given(st.lists(st.integers(0, 9), max_size=30))
def test_what_is_appended_is_written_in_order(
    tmp_path_factory: pytest.TempPathFactory, bursts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("ring") / "rows.bin"
    ring = Ring(path, KIND, rows=8)
    expected, number = [], 0
    for burst in bursts:
        for place in range(burst):
            ring.append((number, 0.5, 1))
            if place < 8:
                expected.append(number)
            number += 1
        ring.write()
    ring.close()
    assert numbers(path) == expected
    assert ring.lost == number - len(expected) and ring.refused == 0


def test_the_writer_is_hurried_when_the_ring_is_half_full(tmp_path: Path) -> None:
    calls: list[int] = []
    ring = Ring(tmp_path / "rows.bin", KIND, rows=8, hurry=lambda: calls.append(ring.waiting))
    for number in range(6):
        ring.append((number, 0.0, 0))
    assert calls == [4]


def test_a_full_disk_loses_rows_and_keeps_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "rows.bin", os.write
    room = [2 * KIND.itemsize + 5]  # two rows and a part of the third

    def limited(descriptor: int, data: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(descriptor, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", limited)
    ring = Ring(path, KIND)
    for number in range(4):
        ring.append((number, 0.0, 0))
    ring.write()
    assert numbers(path) == [0, 1] and ring.lost == ring.refused == 2
    assert path.stat().st_size == 2 * KIND.itemsize
    room[0] = 10_000
    ring.append((4, 0.0, 0))
    ring.write()
    assert numbers(path) == [0, 1, 4] and ring.lost == 2


def test_a_row_that_cannot_be_packed_is_lost_and_told_and_the_others_are_written(
    tmp_path: Path,
) -> None:
    ring = Ring(tmp_path / "rows.bin", KIND)
    for number, flags in enumerate((0, 70_000, 1)):
        ring.append((number, 0.0, flags))
    with pytest.raises(struct.error):
        ring.write()
    assert numbers(tmp_path / "rows.bin") == [0, 2]
    assert (ring.lost, ring.refused, ring.first_lost) == (1, 0, 1)


def test_every_table_has_a_packer() -> None:
    for kind in tables.BY_NAME.values():
        assert rank_files.packer(kind).size == kind.itemsize


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (3, "the disk was full"),
        (0, "they came faster than they could be written"),
        (
            1,
            "the disk was full (1 rows), and rows came faster than they could be written (2 rows)",
        ),
        (None, "the disk was full or slow"),
    ],
)
def test_why_rows_are_missing(refused: int | None, why: str) -> None:
    expected = f"3 rows of the recording are missing, from step 7 on: {why}"
    assert missing_rows(3, refused, 7) == expected


def test_what_ended_the_run_is_written_where_no_file_can_be_opened(tmp_path: Path) -> None:
    """ "Too many open files": what the tables hold open is enough for it."""
    files = RankFiles(tmp_path, 0, lambda _: HEADER, lambda *_: None)
    files.steps.append((0,) * len(tables.STEPS.names or ()))
    files.write()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        with contextlib.suppress(OSError):
            while True:
                kept.append(os.open(os.devnull, os.O_RDONLY))
        files.events.append(Event(1.0, "exception", 5, None, "OSError: Too many open files"))
        files.write()  # it cannot yet
        files.close()
    finally:
        for each in kept:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    told = (tmp_path / "rank0.events.jsonl").read_text(encoding="utf-8")
    assert "Too many open files" in told and not files.is_stale
