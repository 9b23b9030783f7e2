"""Time of a batch when its files are in the page cache, and when they come from storage.

The same batches are made again and again in one process, in turn with their files in the cache
and after these were dropped from it (only these, and they are only read), so that drift of the
machine does not look like storage. Below a hypervisor, or in the disk itself, there may be
caches that nobody here can empty: "cold" means past the page cache of this system.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch.utils.data import DataLoader

from trainfit.hardware.machine.storage import mount_of, read_mounts
from trainfit.hardware.machine.system import System
from trainfit.loader.measure import data_files, processes
from trainfit.loader.measure.data_files import FileWatch
from trainfit.loader.measure.workload import Workload
from trainfit.results.dataloader import LoaderSettings, StorageCost
from trainfit.results.text import percent, size
from trainfit.torch_private.data_loading import fetcher_of, indices_of

#: Batches that are made again and again: for so much of the time that there is, and at most.
_FIRST_SHARE: Final = 0.15
_MOST_BATCHES: Final = 64
#: Pairs of passes, cold and warm: more make it no better.
_MOST_ROUNDS: Final = 5
#: Seconds beyond its own time until a run that hangs is ended.
_PATIENCE_S: Final = 5.0
#: More than this share of the files still in the cache: the passes were not cold.
_STAYED: Final = 0.1
#: Bytes per batch that a process may read in addition to data.
_NOISE_BYTES: Final = 64 << 10
#: Files of a folder that are counted to tell how large the whole data set is.
_MOST_LISTED: Final = 50_000
#: More than this is not dropped from the page cache: others on the machine may be reading it,
#: and it takes long until it is back.
MOST_DROPPED_BYTES: Final = 4 << 30
#: Seconds that listing may take.
_LISTING_S: Final = 0.5


@dataclass(frozen=True)
class ObservedFile:
    """A file of the data set, and the batch that it was first read for."""

    path: str
    nbytes: int
    first_batch: int


@dataclass(frozen=True)
class BatchPass:
    """A repeated pass over the same batches: seconds of each, and bytes read meanwhile.

    It ends early where time was up.
    """

    seconds: tuple[float, ...]
    passed_bytes: int | None = None
    stored_bytes: int | None = None


@dataclass(frozen=True)
class StorageReadings:
    """What was measured.

    ``stayed`` is the share of the files that was still in the cache after they were dropped
    from it (``None``: unknown), ``filesystems`` the kinds of file system they are on.
    ``listed_bytes`` are all files of the same kind in the same folders.
    """

    files: tuple[ObservedFile, ...] = ()
    warm: tuple[BatchPass, ...] = ()
    cold: tuple[BatchPass, ...] = ()
    stayed: float | None = None
    filesystems: tuple[str, ...] = ()
    listed_bytes: int | None = None
    failure: str = ""


def measure_storage(
    workload: Workload, seconds: float = 3.0, available_bytes: int | None = None
) -> StorageCost | None:
    """What batches take warm and cold, measured in a forked process for about ``seconds``.

    Where files cannot be made cold, ``cold_s`` is ``None`` and ``reason`` says why. ``None``
    where no batch could be made: another part of the probe says why. It never raises for what
    the data set does.

    Args:
        available_bytes: RAM that the page cache can take (``MemAvailable``, or what is left of
            the cgroup's limit).
    """
    ended = processes.call(
        functools.partial(_measured, workload, seconds), 2 * seconds + _PATIENCE_S
    )
    if ended.value is None:
        return None
    samples = workload.samples
    batch = workload.batch_size or 1
    return storage_cost(ended.value, samples, batch, available_bytes)


# --- What the readings say --------------------------------------------------------------------
def storage_cost(
    readings: StorageReadings, samples: int | None, batch_size: int, available_bytes: int | None
) -> StorageCost | None:
    """The cost that readings tell; ``None`` if there is no warm pass.

    Seconds of a batch are its median over the passes, and of these the mean over the batches
    that were made both warm and (if there are cold passes) cold.
    """
    warm, cold = _of_each(readings.warm), _of_each(readings.cold)
    samples_seen = batch_size * _longest(readings.warm)
    if not warm:
        return None
    reason, is_cold = _coldness(readings)
    count = min(len(warm), len(cold)) if is_cold else len(warm)
    stored = _mean_stored(readings.cold) if is_cold else None
    nbytes = sum(file.nbytes for file in readings.files)
    total = total_bytes(readings, samples, samples_seen)
    fits = None
    if available_bytes is not None and readings.files and total is not None:
        fits = min(1.0, available_bytes / total) if total else 1.0
    return StorageCost(
        warm_s=statistics.fmean(warm[:count]),
        cold_s=statistics.fmean(cold[:count]) if is_cold else None,
        read_bytes=stored,
        files=len(readings.files),
        file_bytes=nbytes if readings.files else None,
        cached_share=fits,
        reason=reason,
    )


def total_bytes(readings: StorageReadings, samples: int | None, samples_seen: int) -> int | None:
    """The size of all files of the data set, as far as those that were seen tell.

    If later batches still opened new files, every further sample brings as many bytes of them
    as those of the later half of the batches did, at most what lies in the same folders.
    ``None`` where the number of samples is unknown.
    """
    batches = _longest(readings.warm)
    total = sum(file.nbytes for file in readings.files)
    half = (batches + 1) // 2
    new = sum(file.nbytes for file in readings.files if file.first_batch >= half)
    if samples is not None and samples <= samples_seen:
        return total
    if batches < 2 or new:
        # With one batch nobody knows whether the next has files of its own.
        guess = readings.listed_bytes
        if samples is not None and batches >= 2:
            later = samples_seen * (batches - half) / batches
            grown = total + int(new * (samples - samples_seen) / later)
            guess = grown if guess is None else min(guess, grown)
        return guess if guess is None else max(total, guess)
    return total


def _longest(passes: Sequence[BatchPass]) -> int:
    return max((len(one.seconds) for one in passes), default=0)


def _of_each(passes: Sequence[BatchPass]) -> list[float]:
    """The median seconds of each batch, over the passes that went furthest."""
    whole = [one.seconds for one in passes if len(one.seconds) == _longest(passes)]
    return [statistics.median(each) for each in zip(*whole, strict=True)]


def _mean_stored(passes: Sequence[BatchPass]) -> int | None:
    """Bytes from storage that a batch read; ``None`` where the system did not count them."""
    counted = [one for one in passes if one.stored_bytes]
    batches = sum(len(one.seconds) for one in counted)
    if not batches:
        return None
    return round(sum(one.stored_bytes or 0 for one in counted) / batches)


def _coldness(readings: StorageReadings) -> tuple[str, bool]:
    """Why the cold passes are not cold, or what is to be said of them; and whether they count."""
    unseen = _unseen(readings)
    if not readings.files:
        return unseen or "the data set reads no files while producing batches", False
    if readings.filesystems and set(readings.filesystems) <= {"tmpfs", "ramfs", "hugetlbfs"}:
        return f"its files are in memory ({', '.join(readings.filesystems)})", False
    if sum(file.nbytes for file in readings.files) > MOST_DROPPED_BYTES:
        return f"its files are over {MOST_DROPPED_BYTES >> 30} GiB: too large to be evicted", False
    if not any(one.seconds for one in readings.cold):
        return (
            readings.failure or "no time left to measure the same batches with a cold cache",
            False,
        )
    stored, stayed = _mean_stored(readings.cold), readings.stayed
    if not stored and (stayed is None or stayed > _STAYED):
        share = "" if stayed is None else f" ({percent(stayed)} of their pages remained)"
        return (
            f"its files could not be evicted from the page cache{share}: "
            "a process has them mapped, they are still being written, "
            "or the file system keeps them",
            False,
        )
    notes = [unseen] if unseen else []
    if stayed is not None and stayed > _STAYED:
        notes.append(
            f"{percent(stayed)} of its files' pages remained in the page cache (mapped by "
            "another process, or still being written): a fully cold read would be slower"
        )
    again = _mean_stored(readings.warm)
    if again and stored and again > stored / 2:
        notes.append("its files do not stay in the page cache: warm batches came from storage, too")
    return "; ".join(notes), True


def _unseen(readings: StorageReadings) -> str:
    """What is to be said where much more was read than the files that were seen hold."""
    counted = [one for one in readings.warm if one.passed_bytes is not None and one.seconds]
    if not counted:
        return ""
    passed = statistics.median((one.passed_bytes or 0) / len(one.seconds) for one in counted)
    batches = _longest(readings.warm)
    if passed <= 2 * sum(file.nbytes for file in readings.files) / batches + _NOISE_BYTES:
        return ""
    text = f"a batch reads {size(passed)}"
    if not readings.files:
        return f"{text}, but from no observed file: C code opens and closes it, or it is not a file"
    stored = _mean_stored(readings.cold) or 0
    if stored >= passed / 2:
        return ""
    return (
        f"{text}, of which {size(stored)} came from storage: the same files are read "
        "several times, or some are opened in C code and were not observed"
    )


# --- Making the same batches ------------------------------------------------------------------
@dataclass
class _Session:
    """Makes the same batches over and over, until time is up."""

    workload: Workload
    until: float = 0.0
    indices: list[Any] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    warm: list[BatchPass] = field(default_factory=list)
    cold: list[BatchPass] = field(default_factory=list)
    stayed: list[float] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        self.first(seconds * _FIRST_SHARE)
        self.until = time.monotonic() + seconds * (1 - _FIRST_SHARE)
        self.warm.append(self.again())
        if not self.files or _bytes_of(self.files) > MOST_DROPPED_BYTES:
            return
        for _ in range(_MOST_ROUNDS):
            if self.cold and time.monotonic() >= self.until:
                return
            data_files.evict(self.files)
            if not self.stayed and (share := data_files.resident_share(self.files)) is not None:
                self.stayed.append(share)
            self.cold.append(self.again())
            if time.monotonic() >= self.until:
                return
            if len(self.cold[-1].seconds) == len(self.indices):
                self.warm.append(self.again())

    def first(self, seconds: float) -> None:
        """Make the batches for the first time, and see which files they read."""
        fetch, sampler = self._fetcher()
        watch = FileWatch(self.workload.dataset)
        # The same sample twice in a pass would be warm the second time.
        limit = min(_MOST_BATCHES, self.workload.epoch_batches or _MOST_BATCHES)
        began = time.monotonic()
        try:
            for indices in itertools.islice(sampler, limit):
                fetch(indices)
                self.indices.append(indices)
                watch.batch_made()
                if time.monotonic() - began >= seconds:
                    break
        except StopIteration:  # an iterable data set's end
            return
        finally:
            watch.end()
            self.files = watch.first_batch

    def again(self) -> BatchPass:
        """A repeated pass over the same batches, at least one of them."""
        fetch, _ = self._fetcher()
        before = data_files.read_counts()
        seconds: list[float] = []
        for indices in self.indices:
            began = time.perf_counter()
            try:
                fetch(indices)
            except StopIteration:
                break
            seconds.append(time.perf_counter() - began)
            if time.monotonic() >= self.until:
                break
        after = data_files.read_counts()
        if before is None or after is None:
            return BatchPass(tuple(seconds))
        return BatchPass(tuple(seconds), after.passed - before.passed, after.stored - before.stored)

    def _fetcher(self) -> tuple[Callable[[Any], Any], Any]:
        """What makes a batch of its indices, as in a worker; of iterables from the beginning."""
        loader = self.workload.loader(LoaderSettings(num_workers=0))
        if self.workload.kind == "iterable":  # the workload's own goes round without an end
            loader = DataLoader(
                self.workload.dataset,
                loader.batch_size,
                drop_last=loader.drop_last,
                collate_fn=loader.collate_fn,
            )
        batches: Any = iter(loader)
        return fetcher_of(batches).fetch, indices_of(batches)


def _measured(workload: Workload, seconds: float) -> StorageReadings:
    """Measure in the forked process."""
    session = _Session(workload)
    ended = processes.call_here(lambda: session.run(seconds), 2 * seconds)
    failure = ""
    if ended.hung:
        failure = "a batch needs longer than the time left to measure it with a cold cache"
    elif ended.failed:
        failure = f"repeating the same batches failed ({ended.error_type}: {ended.message})"
    files = tuple(_seen(session.files))
    return StorageReadings(
        files,
        tuple(session.warm),
        tuple(session.cold),
        session.stayed[0] if session.stayed else None,
        _filesystems(files),
        _listed(files),
        failure,
    )


def _seen(files: dict[str, int]) -> Sequence[ObservedFile]:
    seen = []
    for path, batch in files.items():
        try:
            seen.append(ObservedFile(path, os.stat(path).st_size, batch))
        except OSError:  # it was a temporary one
            continue
    return seen


def _bytes_of(paths: Iterable[str]) -> int:
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            total += os.stat(path).st_size
    return total


def _filesystems(files: Sequence[ObservedFile]) -> tuple[str, ...]:
    mounts = read_mounts(System()).value or ()
    folders = {os.path.dirname(file.path) for file in files}
    filesystems = {
        mount.filesystem for folder in folders if (mount := mount_of(folder, mounts)) is not None
    }
    return tuple(sorted(filesystems))


def _listed(files: Sequence[ObservedFile]) -> int | None:
    """Bytes of the files with the same endings in the same folders; ``None``: too many, or on
    storage that is slow to list.

    Where a data set has a folder for each class, only those folders count that were seen.
    """
    kinds = {(os.path.dirname(file.path), Path(file.path).suffix) for file in files}
    total = count = 0
    deadline = time.monotonic() + _LISTING_S
    for folder in {folder for folder, _ in kinds}:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    count += 1
                    if count > _MOST_LISTED or time.monotonic() > deadline:
                        return None
                    if (folder, Path(entry.name).suffix) in kinds and entry.is_file():
                        total += entry.stat().st_size
        except OSError:
            return None
    return total
