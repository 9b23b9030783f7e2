"""Batches from the page cache and from storage: the arithmetic, which files, and real passes."""

from __future__ import annotations

import functools
import io
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from helpers_cases import some_of
from trainfit.hardware.machine.storage import mount_of, read_mounts
from trainfit.hardware.machine.system import System
from trainfit.loader.measure import data_files, processes
from trainfit.loader.measure.data_files import FileWatch
from trainfit.loader.measure.storage_cost import (
    BatchPass,
    ObservedFile,
    StorageReadings,
    measure_storage,
    storage_cost,
    total_bytes,
)
from trainfit.loader.measure.workload import Workload
from trainfit.results.dataloader import StorageCost

MIB = 1 << 20


def files(*first_batches: int, nbytes: int = MIB) -> tuple[ObservedFile, ...]:
    return tuple(ObservedFile(f"/data/{i}", nbytes, b) for i, b in enumerate(first_batches))


def readings(**words: Any) -> StorageReadings:
    made: dict[str, Any] = {
        "files": files(0, 1),
        "warm": (BatchPass((0.1, 0.2), 2 * MIB, 0), BatchPass((0.3, 0.4), 2 * MIB, 0)),
        "cold": (BatchPass((1.0, 3.0), 2 * MIB, 2 * MIB),),
        "stayed": 0.0,
        "filesystems": ("ext4",),
    }
    return StorageReadings(**made | words)


def cost(
    read: StorageReadings, samples: int | None = 100, available: int | None = None
) -> StorageCost:
    made = storage_cost(read, samples, 10, available)
    assert made is not None
    return made


# --- What readings say --------------------------------------------------------------------------
def test_seconds_are_of_the_same_batches_warm_and_cold() -> None:
    made = cost(readings())
    assert made.warm_s == pytest.approx(0.25)  # medians 0.2 and 0.3
    assert made.cold_s == pytest.approx(2.0)
    assert made.read_bytes == MIB
    assert (made.files, made.file_bytes, made.reason) == (2, 2 * MIB, "")


def test_drift_of_the_machine_does_not_look_cold() -> None:
    # The machine gets slower from pass to pass; storage costs nothing.
    warm = tuple(BatchPass((each, each)) for each in (1.0, 3.0, 5.0))
    cold = tuple(BatchPass((each, each), 0, MIB) for each in (2.0, 4.0))
    made = cost(readings(warm=warm, cold=cold))
    assert made.warm_s == made.cold_s == 3.0


def test_a_pass_that_time_cut_off_counts_only_what_it_made() -> None:
    short = readings(cold=(BatchPass((1.0,), MIB, MIB),))
    assert cost(short).warm_s == pytest.approx(0.2)  # of the first batch only
    assert cost(short).cold_s == pytest.approx(1.0)
    cut = readings(warm=(*readings().warm, BatchPass((9.0,))))
    assert cost(cut).warm_s == pytest.approx(0.25)


def test_what_was_not_read_from_storage_is_not_cold() -> None:
    still = readings(cold=(BatchPass((1.0, 3.0), 2 * MIB, 0),), stayed=0.9)
    made = cost(still)
    assert made.cold_s is None
    assert made.read_bytes is None
    assert "90% of their pages remained" in made.reason
    unsure = cost(readings(cold=(BatchPass((1.0, 3.0), 2 * MIB, 0),), stayed=None))
    assert unsure.cold_s is None
    assert "could not be evicted" in unsure.reason


def test_a_network_that_does_not_count_can_be_cold_all_the_same() -> None:
    made = cost(
        readings(cold=(BatchPass((1.0, 3.0), 2 * MIB, 0),), stayed=0.0, filesystems=("nfs4",))
    )
    assert made.cold_s == pytest.approx(2.0)
    assert made.read_bytes is None


def test_partly_cold_is_said() -> None:
    made = cost(readings(stayed=0.4))
    assert made.cold_s == pytest.approx(2.0)
    assert "40% of its files' pages remained" in made.reason


def test_files_in_memory_are_never_cold() -> None:
    made = cost(readings(filesystems=("tmpfs",)))
    assert made.cold_s is None
    assert made.reason == "its files are in memory (tmpfs)"


def test_a_cache_that_is_too_small_is_said() -> None:
    warm = (BatchPass((0.1, 0.2), 2 * MIB, 2 * MIB),)
    assert "do not stay in the page cache" in cost(readings(warm=warm)).reason


def test_without_files_there_is_nothing_cold() -> None:
    quiet = (BatchPass((0.1, 0.2), 100, 0),)
    made = cost(StorageReadings(warm=quiet), available=10)
    assert (made.cold_s, made.files, made.file_bytes, made.cached_share) == (None, 0, None, None)
    assert "reads no file" in made.reason
    loud = cost(StorageReadings(warm=(BatchPass((0.1, 0.2), 20 * MIB, 0),)))
    assert "10 MiB, but from no observed file" in loud.reason


def test_files_read_more_than_once_or_unseen_are_said() -> None:
    warm = (BatchPass((0.1, 0.2), 40 * MIB, 0),)
    assert "20 MiB, of which 1 MiB came from storage" in cost(readings(warm=warm)).reason


def test_why_there_was_no_cold_pass() -> None:
    assert "no time left" in cost(readings(cold=())).reason
    assert cost(readings(cold=(), failure="it broke")).reason == "it broke"
    assert storage_cost(StorageReadings(failure="x"), None, 1, None) is None


# --- How much of the data stays in RAM ----------------------------------------------------------
def test_a_file_for_each_sample_grows_with_the_samples() -> None:
    # 2 batches of 10 samples, each with a new file of 1 MiB: 100 samples are 10 files.
    assert total_bytes(readings(), 100, 20) == 10 * MIB
    assert cost(readings(), 100, available=5 * MIB).cached_share == pytest.approx(0.5)
    assert cost(readings(), 100, available=50 * MIB).cached_share == 1.0
    assert cost(readings(), 100).cached_share is None


def test_one_file_for_all_does_not_grow() -> None:
    assert total_bytes(readings(files=files(0)), 10**9, 20) == MIB


def test_the_folder_bounds_what_the_samples_let_expect() -> None:
    assert total_bytes(readings(listed_bytes=4 * MIB), 100, 20) == 4 * MIB
    # What was seen in other folders is there too.
    assert total_bytes(readings(listed_bytes=1), 100, 20) == 2 * MIB


def test_after_an_epoch_all_was_seen() -> None:
    assert total_bytes(readings(listed_bytes=9 * MIB), 20, 20) == 2 * MIB


def test_without_a_number_of_samples_the_folder_says_it_or_nobody() -> None:
    assert total_bytes(readings(listed_bytes=7 * MIB), None, 20) == 7 * MIB
    assert total_bytes(readings(), None, 20) is None
    assert cost(readings(), None, available=5).cached_share is None


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.integers(1, 10**6),
    st.integers(0, 10**12),
)
def test_the_share_is_one_and_the_total_is_at_least_what_was_seen(
    first: list[int], samples: int, available: int
) -> None:
    ten = (BatchPass((0.1,) * 10),)
    read = readings(files=files(*first), warm=ten)
    total = total_bytes(read, samples, 100)
    assert total is not None
    assert total >= len(first) * MIB
    made = cost(read, samples, available)
    assert made.cached_share is not None
    assert 0 <= made.cached_share <= 1


# --- Which files --------------------------------------------------------------------------------
def seen_by(dataset: Any, read: Any) -> dict[str, int]:
    """Files that are noted while ``read(0)`` and ``read(1)`` run, in a forked process."""

    def watched() -> dict[str, int]:
        watch = FileWatch(dataset)
        for batch in range(2):
            read(batch)
            watch.batch_made()
        watch.end()
        return watch.first_batch

    ended = processes.call(watched, 20.0)
    assert ended.value is not None, ended
    return ended.value


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{index}.bin" for index in range(3)]
    for path in paths:
        path.write_bytes(os.urandom(1 << 16))
    return [os.path.realpath(path) for path in paths]


def test_files_that_python_opens_are_noted_by_batch(three: list[str]) -> None:
    def read(batch: int) -> None:
        Path(three[0]).read_bytes()
        os.close(os.open(three[batch], os.O_RDONLY))

    assert seen_by(None, read) == {three[0]: 0, three[1]: 1}


def test_files_that_are_written_are_not_data(three: list[str], tmp_path: Path) -> None:
    def write(batch: int) -> None:
        (tmp_path / "cache").write_bytes(b"x")
        with open(three[0], "r+b") as file:
            file.read(1)

    assert seen_by(None, write) == {}


def test_programs_and_the_system_are_not_data(three: list[str]) -> None:
    assert not data_files.is_data(os.__file__)
    assert not data_files.is_data("/proc/self/status")
    assert not data_files.is_data(os.path.dirname(three[0]))
    assert data_files.is_data(three[0])


@pytest.mark.slow
def test_a_file_that_is_open_already_counts_if_the_data_set_holds_it(three: list[str]) -> None:
    with open(three[0], "rb", buffering=0) as own, open(three[1], "rb", buffering=0) as other:
        numbers = own.fileno(), other.fileno()
        # Positions do not move: only who holds the file tells.
        seen = seen_by([{"file": own}], lambda _: [os.pread(each, 10, 0) for each in numbers])
        assert seen == {three[0]: 0}
        named = seen_by({"path": three[1]}, lambda _: os.pread(numbers[1], 10, 0))
        assert named == {three[1]: 0}
        moved = seen_by(None, lambda _: other.read(10))
        assert moved == {three[1]: 0}


def test_mapped_files_count_if_their_pages_are_used(three: list[str]) -> None:
    used, unused = (np.memmap(each, np.uint8, "r") for each in three[:2])
    assert seen_by(None, lambda _: used.sum()) == {three[0]: 0}
    del unused


def test_c_code_that_opens_files_is_listened_to(three: list[str], tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    path = tmp_path / "x.mp4"
    with av.open(path, "w") as out:
        stream = out.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        for frame in (av.VideoFrame(32, 32, "yuv420p"), None):
            for packet in stream.encode(frame):
                out.mux(packet)

    def read(batch: int) -> None:
        with av.open(str(path)) as container:
            next(container.decode(video=0))

    assert seen_by(None, read) == {os.path.realpath(path): 0}


# --- The page cache -----------------------------------------------------------------------------
def on_disk(folder: Path) -> bool:
    """Can files here leave the page cache? (Not on tmpfs; network systems may not count.)"""
    mount = mount_of(str(folder), read_mounts(System()).value or ())
    return mount is not None and mount.filesystem in {"ext4", "xfs", "btrfs"}


def settled(path: Path, nbytes: int) -> Path:
    """A file of random bytes that is written out, as data sets are."""
    with open(path, "wb") as file:
        file.write(os.urandom(nbytes))
        file.flush()
        os.fsync(file.fileno())
    return path


def test_a_file_leaves_the_cache_and_stays_as_it_was(tmp_path: Path) -> None:
    path = settled(tmp_path / "x", MIB)
    before, status = path.read_bytes(), os.stat(path)
    if not on_disk(tmp_path):
        pytest.skip("the temporary folder is not on a disk")
    assert data_files.resident_share([str(path)]) == 1.0
    assert data_files.evict([str(path)]) == 1
    assert data_files.resident_share([str(path)]) == 0.0
    counts = data_files.read_counts()
    assert path.read_bytes() == before
    after = data_files.read_counts()
    assert counts is not None
    assert after is not None
    assert after.stored - counts.stored >= MIB
    assert after.passed - counts.passed >= MIB
    now = os.stat(path)
    assert (now.st_mtime_ns, now.st_size) == (status.st_mtime_ns, status.st_size)


def test_mapped_pages_of_our_own_are_let_go_and_private_changes_are_kept(tmp_path: Path) -> None:
    path = settled(tmp_path / "x", MIB)
    content = path.read_bytes()
    read = np.memmap(path, np.uint8, "r")
    changed = np.memmap(path, np.uint8, "c")
    changed[:100] = 7
    total = int(read.sum())
    data_files.evict([str(path)])
    assert int(read.sum()) == total
    assert (changed[:100] == 7).all()
    assert path.read_bytes() == content


def test_what_another_process_has_mapped_is_seen_to_stay(tmp_path: Path) -> None:
    path = settled(tmp_path / "x", MIB)
    if not on_disk(tmp_path):
        pytest.skip("the temporary folder is not on a disk")
    program = (
        "import mmap, sys; f = open(sys.argv[1], 'rb');"
        "m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); sum(m[::4096]); print(1, flush=1);"
        "sys.stdin.read()"
    )
    words = [sys.executable, "-c", program, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        other.stdout.readline()
        data_files.evict([str(path)])
        assert data_files.resident_share([str(path)]) == 1.0
        other.communicate(b"")


def test_only_regular_files_are_touched(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert data_files.evict([str(tmp_path), str(tmp_path / "pipe"), str(tmp_path / "gone")]) == 0
    assert data_files.resident_share([str(tmp_path / "pipe")]) is None


def test_mappings_have_their_paths_and_libraries_are_none(tmp_path: Path) -> None:
    path = settled(tmp_path / "with a blank", 2 * mmap.PAGESIZE)
    mapped = np.memmap(path, np.uint8, "r")
    mapped.sum()
    (found,) = [each for each in data_files.mappings() if each.path == str(path)]
    assert found.permissions == "r--s"
    assert found.resident_bytes >= 2 * mmap.PAGESIZE
    assert not any("libtorch_cpu" in each.path for each in data_files.mappings())


# --- Real data sets -----------------------------------------------------------------------------
class _Files(Dataset[Any]):
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.fromfile(self.paths[index], np.uint8))


class _Streamed(IterableDataset[Any]):
    def __init__(self, paths: list[Path]) -> None:
        self.inner = _Files(paths)

    def __iter__(self) -> Any:
        return (self.inner[index] for index in range(len(self.inner)))


class _Mapped(_Files):
    def __init__(self, path: Path) -> None:
        self.rows = np.memmap(path, np.uint8, "r").reshape(64, -1)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.array(self.rows[index]))


def measured(dataset: Any, **words: Any) -> StorageCost:
    # On a busy machine the first batch alone may need longer than the shortest time.
    workload = Workload(DataLoader(dataset, 4))
    for seconds in (0.3, 3.0, 30.0):
        made = measure_storage(workload, seconds, **words)
        if made is not None and "time left" not in made.reason:
            break
    assert made is not None
    assert made.warm_s > 0
    return made


@pytest.mark.parametrize("kind", some_of([_Files, _Streamed], 1))
def test_a_file_for_each_sample(tmp_path: Path, kind: Any) -> None:
    paths = [settled(tmp_path / f"{index}.raw", 1 << 16) for index in range(16)]
    content = [path.read_bytes() for path in paths]
    before, opened = open, functools.partial(io.open, paths[0])
    made = measured(kind(paths), available_bytes=8 << 16)
    assert open is before, "the hook stays in the fork"
    opened().close()
    if on_disk(tmp_path):
        assert made.cold_s is not None, made.reason
        assert made.read_bytes == pytest.approx(4 << 16, rel=0.5)
    else:
        assert made.cold_s is None
        assert made.reason
    assert (made.files, made.file_bytes) == (16, 16 << 16)
    assert made.cached_share == pytest.approx(0.5)
    assert [path.read_bytes() for path in paths] == content


def test_a_mapped_file(tmp_path: Path) -> None:
    path = settled(tmp_path / "rows", 4 * MIB)
    made = measured(_Mapped(path), available_bytes=1 << 40)
    assert (made.files, made.file_bytes, made.cached_share) == (1, 4 * MIB, 1.0)
    if on_disk(tmp_path):
        assert made.cold_s is not None, made.reason


@pytest.mark.slow
def test_a_mapped_file_that_this_process_uses_is_not_called_cold(tmp_path: Path) -> None:
    dataset = _Mapped(settled(tmp_path / "rows", 4 * MIB))
    dataset.rows.sum()  # in the page table of this process, which the fork cannot empty
    made = measured(dataset)
    assert made.cold_s is None
    assert "remained" in made.reason or "in memory" in made.reason


def test_data_in_memory_has_no_files() -> None:
    made = measured(TensorDataset(torch.zeros(64, 3)))
    assert (made.files, made.cold_s, made.file_bytes) == (0, None, None)
    assert "reads no file" in made.reason


class _Raises(_Files):
    def __getitem__(self, index: int) -> Any:
        raise OSError("no such sample")


def test_a_data_set_that_fails_is_no_cost(tmp_path: Path) -> None:
    dataset = _Raises([tmp_path / "x"] * 8)
    assert measure_storage(Workload(DataLoader(dataset, 2)), 0.2) is None
