"""Memory by kind and folders that fill, read of files that lie in a folder of the test."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainfit.results.runs.tables import SHARED_MEMORY, TEMPORARY
from trainfit.watch.sampler import machine
from trainfit.watch.sampler.machine import Folders, temporary_folder
from trainfit.watch.sampler.proc_files import is_mapped_by_others
from trainfit.watch.sampler.processes import MemoryByKind
from trainfit.watch.sampler.roles import MAIN, WORKER, Role

STATUS = "Name:\tpython\nVmRSS:\t{0} kB\nRssAnon:\t{0} kB\nRssFile:\t{1} kB\nRssShmem:\t{2} kB\n"
ROLLUP = (
    "5581-7ffc ---p 00000000 00:00 0 [rollup]\nRss: 9 kB\nPss: 9 kB\nShared_Clean: 1 kB\n"
    "Private_Clean: {0} kB\nPrivate_Dirty: {1} kB\nPrivate_Hugetlb: 2048 kB\nSwap: 0 kB\n"
)


def process(root: Path, pid: int, kinds: tuple[int, int, int], private: tuple[int, int]) -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status").write_text(STATUS.format(*kinds))
    (folder / "smaps_rollup").write_text(ROLLUP.format(*private))


def test_each_process_by_kind_and_what_is_a_worker_s_own(tmp_path: Path) -> None:
    process(tmp_path, 7, (900, 80, 4), (1, 2))
    for worker in range(4):
        process(tmp_path, 10 + worker, (500 + worker, 80, 4), (10, 20))
    members = {7: Role(MAIN, 0), **{10 + n: Role(WORKER, 0, n) for n in range(4)}}
    memory = MemoryByKind(tmp_path)
    rows = memory.sample(1.0, members)
    assert list(rows["anonymous_bytes"] // 1024) == [900, 500, 501, 502, 503]
    assert set(rows["file_bytes"]) == {80 * 1024} and set(rows["shared_bytes"]) == {4 * 1024}
    assert list(rows["worker"]) == [-1, 0, 1, 2, 3]
    # Of the training process nobody asks; two workers tell it for all.
    assert list(rows["private_bytes"]) == [-1, (30 + 2048) * 1024, (30 + 2048) * 1024, -1, -1]


def test_a_process_that_is_gone_and_a_kernel_that_does_not_tell(tmp_path: Path) -> None:
    process(tmp_path, 10, (500, 80, 4), (10, 20))
    (tmp_path / "proc" / "10" / "smaps_rollup").unlink()
    (tmp_path / "proc" / "11").mkdir()
    (tmp_path / "proc" / "11" / "status").write_text("Name:\told\nVmRSS:\t5 kB\n")
    members = {pid: Role(WORKER, 0, pid) for pid in (10, 11, 12)}
    rows = MemoryByKind(tmp_path).sample(1.0, members)
    assert list(rows["pid"]) == [10] and list(rows["private_bytes"]) == [-1]


def test_counting_private_pages_keeps_to_its_share_of_the_time(tmp_path: Path) -> None:
    process(tmp_path, 10, (500, 80, 4), (10, 20))
    spent = [0.0]

    def clock() -> float:  # a second look at it is 40 ms later
        spent[0] += 0.02
        return spent[0]

    memory, counted = MemoryByKind(tmp_path, clock), 0
    for second in range(600):
        (row,) = memory.sample(float(second), {10: Role(WORKER, 0, 0)})
        counted += row["private_bytes"] >= 0
    # 0.15 s at once, and then 1 ms a second, in pieces of 20 ms.
    assert counted == pytest.approx(0.15 / 0.02 + 600 * 0.001 / 0.02, abs=2)


Told = list[tuple[str, str, Mapping[str, float]]]


def filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], owner: int | None = None
) -> tuple[Any, Told]:
    """/dev/shm is looked at, gets files with these names, 1 MiB each, and is looked at again."""
    shared = tmp_path / "shm"
    shared.mkdir()
    used = [0]
    real = os.statvfs(tmp_path)

    class Space:
        f_blocks, f_frsize, f_bavail = 1 << 20, 4096, real.f_bavail

        def __init__(self) -> None:
            self.f_bfree = self.f_blocks - used[0] // 4096

    monkeypatch.setattr(machine.os, "statvfs", lambda _: Space())
    told: Told = []
    looks = Folders(str(tmp_path / "none"), lambda *each: told.append(each), str(shared), owner)
    looks.sample(1.0)
    for name in names:
        (shared / name).parent.mkdir(exist_ok=True, parents=True)
        (shared / name).write_bytes(b"x" * (1 << 20))
        for path in (shared / name, (shared / name).parent):  # the kernel's clock is coarse
            os.utime(path, (time.time() + 1, time.time() + 1))
        used[0] += 1 << 20
    return looks.sample(2.0), told


def test_new_files_are_counted_by_what_their_names_have_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"cache-41-{number}.bin" for number in range(40)] + ["other", "tmpab_1c2d3/part"]
    rows, told = filled(tmp_path, monkeypatch, names)
    row = rows[rows["folder"] == SHARED_MEMORY][0]
    assert row["new_files"] == 42 and row["new_bytes"] >= 42 << 20
    assert row["used_bytes"] == 42 << 20
    ((kind, text, values),) = told
    assert kind == "new_files" and text == f"{tmp_path}/shm/cache-*-*.bin"
    assert values["files"] == 40 and values["folder"] == SHARED_MEMORY


def test_names_that_tempfile_made_up_have_prefix_and_suffix_in_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [next(tempfile._get_candidate_names()) for _ in range(40)]  # type: ignore[attr-defined]
    names = [f"frames_{each}.bin" for each in made] + ["checkpoint.bin", "parameters.bin"]
    _, told = filled(tmp_path, monkeypatch, names)
    ((_, text, values),) = told
    assert text == f"{tmp_path}/shm/frames_*.bin" and values["files"] == 40


def test_folders_that_are_too_many_count_as_those_that_were_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tempfile.mkdtemp() in each step: all folders are counted, and some are looked into."""
    monkeypatch.setattr(machine, "_MOST_ENTRIES", 10)
    names = [f"feat_{number}/mel.npy" for number in range(40)]
    rows, told = filled(tmp_path, monkeypatch, names)
    row = rows[rows["folder"] == SHARED_MEMORY][0]
    assert row["new_files"] == 40 and row["new_bytes"] >= 40 << 20
    assert told[0][1] == f"{tmp_path}/shm/feat_*/mel.npy" and told[0][2]["files"] == 40


def test_files_of_others_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"cache-{number}" for number in range(40)]
    rows, told = filled(tmp_path, monkeypatch, names, owner=os.getuid() + 1)
    row = rows[rows["folder"] == SHARED_MEMORY][0]
    assert row["new_bytes"] == 0 and told == []


@pytest.mark.parametrize(("written", "is_told"), [(1 << 20, False), (40 << 20, True)])
def test_what_the_run_did_not_write_is_not_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int, is_told: bool
) -> None:
    told: Told = []
    space = type("Space", (), {"f_blocks": 1 << 20, "f_frsize": 4096, "f_bavail": 1, "f_bfree": 0})
    space.f_bfree = space.f_blocks
    monkeypatch.setattr(machine.os, "statvfs", lambda _: space)
    looks = Folders(
        str(tmp_path),
        lambda *each: told.append(each),
        str(tmp_path / "none"),
        written=lambda: written,
    )
    looks.sample(1.0)
    (tmp_path / "part").write_bytes(b"x" * (40 << 20))
    os.utime(tmp_path / "part", (time.time() + 1, time.time() + 1))
    space.f_bfree -= (40 << 20) // 4096
    looks.sample(2.0)
    assert bool(told) == is_told


@pytest.mark.parametrize(
    ("written", "elsewhere", "is_told"),
    [(0, True, False), (0, False, True), (40 << 20, True, True)],
)
def test_memory_that_another_program_shares_is_not_the_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: int,
    elsewhere: bool,
    is_told: bool,
) -> None:
    """Of blocks of multiprocessing.shared_memory, which nobody writes to by a call."""
    told: Told = []
    space = type("Space", (), {"f_blocks": 1 << 20, "f_frsize": 4096, "f_bavail": 1, "f_bfree": 0})
    space.f_bfree = space.f_blocks
    monkeypatch.setattr(machine.os, "statvfs", lambda _: space)
    looks = Folders(
        str(tmp_path / "none"),
        lambda *each: told.append(each),
        str(tmp_path),
        written=lambda: written,
        is_mapped_elsewhere=lambda file: elsewhere and file == f"{tmp_path}/psm_1",
    )
    looks.sample(1.0)
    (tmp_path / "psm_1").write_bytes(b"x" * (40 << 20))
    os.utime(tmp_path / "psm_1", (time.time() + 1, time.time() + 1))
    space.f_bfree -= (40 << 20) // 4096
    looks.sample(2.0)
    assert bool(told) == is_told


def test_who_has_mapped_a_file_is_read_from_the_kernel(tmp_path: Path) -> None:
    for pid, text in ((7, "7f00-7f01 rw-s 00:1 9 /dev/shm/psm_a\n"), (8, ""), (9, "/lib/x.so\n")):
        (tmp_path / "proc" / str(pid)).mkdir(parents=True)
        (tmp_path / "proc" / str(pid) / "maps").write_text(text)
    (tmp_path / "proc" / "10").mkdir()  # has ended
    assert is_mapped_by_others("/dev/shm/psm_a", {8}, tmp_path)
    assert not is_mapped_by_others("/dev/shm/psm_a", {7}, tmp_path)
    assert not is_mapped_by_others("/dev/shm/psm_b", (), tmp_path)


def test_little_growth_is_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, told = filled(tmp_path, monkeypatch, ["a", "b"])
    assert set(rows["new_bytes"]) == {-1} and told == []


def test_a_folder_that_is_gone_has_no_row(tmp_path: Path) -> None:
    rows = Folders(str(tmp_path), lambda *_: None, str(tmp_path / "none")).sample(1.0)
    assert list(rows["folder"]) == [TEMPORARY]


def test_where_a_program_makes_temporary_files(tmp_path: Path) -> None:
    assert temporary_folder({"TMPDIR": str(tmp_path), "TMP": "/"}) == str(tmp_path)
    assert temporary_folder({"TMPDIR": "relative", "TMP": str(tmp_path)}) == str(tmp_path)
    assert temporary_folder({"TMPDIR": str(tmp_path / "none")}) == "/tmp"
