"""The folder of a run: where it is recorded by default, and into which the ranks of one job on one
machine record, where each of them calls ``trainfit.watch()``.

Ranks ask one another nothing. The one that comes first makes the folder; the others know it by a
file in it, ``ranks.jsonl``: a line says which job it is and when its times begin, the others which
processes record, and whether they have ended. A process that is gone has ended, so that a folder
of an earlier run is never taken for this one's, whatever port and shell both have in common.

Where a run is recorded by default, and how a run without a training is removed again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import json
import multiprocessing
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import psutil

from trainfit.results.files.decoding import DecodingError, as_json, decode
from trainfit.results.files.writing import state_folder
from trainfit.watch.recorder.rank_variables import set_for_a_rank, world

#: That a run's first files need at least.
_LEAST_BYTES: Final = 1 << 14
#: Runs that are kept in :func:`runs_folder`, the newest, and their bytes; older ones are removed.
_KEPT: Final = 50
_KEPT_BYTES: Final = 1 << 30
#: Names of folders of runs (:func:`new_folder`), and of what is within one.
_RUN: Final = re.compile(r".+-\d{8}-\d{6}-(?:[^/]+-)?\d+(?:-\d+)?")
_WITHIN: Final = re.compile(r"(?:also-|run)\d+")
_FILE: Final = re.compile(
    r"rank\d*\.(?:json|events\.jsonl|steps\.bin|(?:fetches|code|stack|died|locked|asked|worker-threads)\..+"
    r"|json\.\d+|\d+)|new\.rank.*|(?:noise-rank\d+\.json|memory-rank\d+\.pickle)"
    r"|(?:machine|gpus|processes|memory|folders|core_waits)\.bin|sampler\.(?:log|events\.jsonl)"
    r"|ranks\.jsonl|\.ranks\.lock"
)
#: What the names of a run's files begin with.
_OURS: Final = (
    *("rank", "new.rank", "machine.", "gpus.", "processes.", "memory.", "folders.", "sampler."),
)


def runs_folder() -> Path:
    """``trainfit/watch`` in $XDG_STATE_HOME or ~/.local/state; it is not created."""
    return state_folder() / "watch"


def new_folder(script: str, pid: int | None = None, host: str = "") -> Path:
    """``<script>-<date>-<pid>`` in :func:`runs_folder`, with ``host`` before the PID if it is
    given; it is not created. ``script`` is a path, or empty in a notebook."""
    words = (script_name(script), time.strftime("%Y%m%d-%H%M%S"), host)
    name = "-".join([*filter(None, words), str(os.getpid() if pid is None else pid)])
    # A process may begin a second training within the second.
    return next(path for path in numbered(runs_folder() / name) if not os.path.lexists(path))


def script_name(script: str) -> str:
    """What the folders of a script's runs begin with."""
    return Path(script).stem or "notebook"


def numbered(first: Path) -> Iterator[Path]:
    """``first``, and then its name with -2, -3 and so on."""
    yield first
    for number in itertools.count(2):
        yield first.with_name(f"{first.name}-{number}")


def unused_folder(first: Path) -> Path:
    """``first``, or where it has a run, the next of :func:`numbered` that has none."""
    return next(path for path in numbered(first) if not _has_run(path))


def _has_run(folder: Path) -> bool:
    """Is there a run in it, also one that has just begun?"""
    files = (path for pattern in ("rank*.json", "ranks.jsonl") for path in folder.glob(pattern))
    return any(path.stat().st_size for path in files)


def why_unwritable(folder: Path) -> str:
    """Why no run can be recorded in ``folder``, which is created; empty where one can."""
    probe = folder / f"rank.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A full disk takes names, but nothing in them.
        probe.write_bytes(b"0" * _LEAST_BYTES)
        probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()
        return f"{folder}: {error.strerror or error}"
    return ""


def seconds_without_step(folder: Path) -> float:
    """Seconds since rows of steps were last written; 0 where there are none yet."""
    last = 0.0
    with contextlib.suppress(OSError):
        last = max((path.stat().st_mtime for path in folder.glob("rank*.steps.bin")), default=0.0)
    return max(0.0, time.time() - last) if last else 0.0


def remove_empty(folder: Path) -> bool:
    """Remove a run's folder in which no step and no batch was recorded; ``False``: it has some, or
    something that is not ours."""
    paths = list(folder.iterdir()) if folder.is_dir() else []
    rows = [path for path in paths if ".steps." in path.name or ".fetches." in path.name]
    if not all(path.name.startswith(_OURS) for path in paths):
        return False
    if any(path.stat().st_size for path in rows):
        return False
    with contextlib.suppress(OSError):
        for path in paths:
            path.unlink()
        folder.rmdir()
    return not folder.exists()


# ---
# Old runs are removed, so that the folder of runs does not fill the disk.


def prune(folder: Path, most: int = _KEPT, most_bytes: int = _KEPT_BYTES) -> int:
    """Remove the oldest runs in ``folder``; the newest ``most`` of at most ``most_bytes`` stay.

    Only folders that are named as runs are and hold nothing but a run's files, none that is being
    recorded, no link, and none of another user. Returns how many; raises nothing.
    """
    removed = kept = held = 0
    for run in _runs(folder):
        size = _bytes(run)
        kept, held = kept + 1, held + size
        if (kept > most or held > most_bytes) and kept > 1 and not _is_alive(run) and _remove(run):
            removed, kept, held = removed + 1, kept - 1, held - size
    return removed


def _runs(folder: Path) -> list[Path]:
    """Folders of runs, the newest first."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                is_run = _RUN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
                if is_run and entry.stat().st_uid == os.getuid() and _is_a_run(Path(entry.path)):
                    found.append((entry.stat().st_mtime, Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)]


def _is_a_run(folder: Path, depth: int = 2) -> bool:
    """Is there nothing but a run's files in it, and in the folders within? A run that did not train
    may have left none."""
    for entry in os.scandir(folder):
        if entry.is_symlink():
            return False
        if entry.is_dir():
            if not depth or not _WITHIN.fullmatch(entry.name):
                return False
            if not _is_a_run(Path(entry.path), depth - 1):
                return False
        elif not _FILE.fullmatch(entry.name):
            return False
    return True


def _files(folder: Path) -> list[Path]:
    return [Path(top) / name for top, _, names in os.walk(folder) for name in names]


def _bytes(folder: Path) -> int:
    found = 0
    for path in _files(folder):
        with contextlib.suppress(OSError):
            found += path.lstat().st_blocks * 512
    return found


def _is_alive(folder: Path) -> bool:
    """Does a sampler write into it, or does a process live that a header names? One on another
    machine (the folder lies in a shared home) may, and one whose number another process has got
    counts, too: its run is kept for longer than it must be."""
    for path in _files(folder):
        try:
            if path.name == "machine.bin":
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            elif re.fullmatch(r"rank\d+\.json", path.name):
                header = json.loads(path.read_text(encoding="utf-8"))
                is_elsewhere = header.get("host") != socket.gethostname()
                if header.get("ending") == "running" and (
                    is_elsewhere or Path(f"/proc/{header.get('pid')}").exists()
                ):
                    return True
        except (OSError, ValueError, AttributeError):
            return True  # it is locked, or it cannot be told
    return False


def _remove(folder: Path) -> bool:
    """Remove files one by one: what came meanwhile, and is not a run's, stays with its folder."""
    try:
        for top, names, files in os.walk(folder, topdown=False):
            for name in files:
                if _FILE.fullmatch(name):
                    os.unlink(os.path.join(top, name))
            for name in names:
                os.rmdir(os.path.join(top, name))
        folder.rmdir()
    except OSError:
        return False
    return True


_RANKS: Final = "ranks.jsonl"
_LOCK: Final = ".ranks.lock"
#: Variables that all ranks of a job have in common, and no other job at the same time has.
_OF_A_JOB: Final = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    *("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID"),
)
#: Of them, those that tell a job also where its launcher is not known: one that the kernel hides
#: (hidepid of /proc), or the first rank, which has started the others.
_ENOUGH: Final = frozenset(("MASTER_PORT", "PMIX_NAMESPACE", "SLURM_STEP_ID"))
#: Seconds to wait for the lock at most: each rank has it for some milliseconds.
_LOCK_S: Final = 5.0
#: Folders that are looked at, the newest first: ranks come within seconds of one another.
_MOST_FOLDERS: Final = 20
#: psutil reckons a process's beginning from the boot's, which may be corrected meanwhile.
_SLACK_S: Final = 1.0


@dataclasses.dataclass(frozen=True)
class LocalProcess:
    """A process of this machine; ``created``: seconds since the epoch, as a PID may be given to
    another."""

    pid: int
    created: float

    @classmethod
    def of(cls, process: psutil.Process) -> LocalProcess:
        return cls(process.pid, process.create_time())

    def is_same(self, other: LocalProcess) -> bool:
        return self.pid == other.pid and abs(self.created - other.created) < _SLACK_S

    @property
    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            dead = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return not dead and self.is_same(self.of(process))
        except psutil.Error:
            return False


@dataclasses.dataclass(frozen=True)
class RankJob:
    """What the ranks of one job on one machine have in common.

    ``launcher`` is what started them; ``None``: that is not known, and the variables decide.
    """

    machine: str
    world_size: int
    variables: Mapping[str, str]
    launcher: LocalProcess | None

    @classmethod
    def of_this_process(cls) -> RankJob:
        variables = {name: os.environ[name] for name in _OF_A_JOB if name in os.environ}
        return cls(_machine(), world()[1], variables, _launcher())

    def is_same(self, other: RankJob) -> bool:
        if dataclasses.replace(self, launcher=None) != dataclasses.replace(other, launcher=None):
            return False
        if self.launcher is None or other.launcher is None:
            return not _ENOUGH.isdisjoint(self.variables)
        return self.launcher.is_same(other.launcher)


@dataclasses.dataclass(frozen=True)
class RankProcess:
    """A rank that records into the folder, or did."""

    rank: int
    process: LocalProcess
    has_ended: bool = False

    @property
    def is_recording(self) -> bool:
        return not self.has_ended and self.process.is_alive


@dataclasses.dataclass(frozen=True)
class _Beginning:
    """The first line of the file."""

    job: RankJob
    started_unix: float
    started_monotonic: float


class RankFolder:
    """A folder that this rank records into, with the others of its job on this machine."""

    def __init__(self, path: Path, beginning: _Beginning, mine: RankProcess, first: bool) -> None:
        self.path = path
        self.started = beginning.started_unix, beginning.started_monotonic
        """What the times of all its ranks count from, by ``time.time()`` and
        ``time.monotonic()``."""
        self.launcher = beginning.job.launcher
        self.is_first = first
        """Has this rank made it?"""
        self._mine = mine

    def end(self) -> None:
        """Tell the others that this rank has written all; on a full disk they wait in vain."""
        with contextlib.suppress(OSError):
            _append(self.path, dataclasses.replace(self._mine, has_ended=True))

    def wait(self, seconds: float) -> list[int]:
        """Wait for the other ranks to end, so long at most; returns those that still record."""
        until = time.monotonic() + seconds
        while (others := self._recording()) and time.monotonic() < until:
            time.sleep(0.02)
        return others

    def _recording(self) -> list[int]:
        ranks = _read(self.path)[1].values()
        return [rank.rank for rank in ranks if rank.rank != self._mine.rank and rank.is_recording]


def join(folder: Path | None, script: str, started: tuple[float, float]) -> RankFolder | None:
    """The folder of this rank's job, made where no rank has: ``folder``, or one with the name of
    ``script``. ``None``: this process is no rank of several.

    Each training gets one of its own. Raises ``OSError`` or ``psutil.Error`` where ranks cannot
    agree on one.
    """
    rank, size = world()
    if size < 2:
        return None
    job = RankJob.of_this_process()
    mine = RankProcess(rank, LocalProcess.of(psutil.Process()))
    with _locked(runs_folder() / _LOCK if folder is None else folder / _RANKS):
        for path in _newest(script) if folder is None else _used(folder):
            beginning, ranks = _read(path)
            if beginning is None or rank in ranks or not beginning.job.is_same(job):
                continue
            if any(each.is_recording for each in ranks.values()):
                _append(path, mine)
                return RankFolder(path, beginning, mine, first=False)
        beginning = _Beginning(job, *started)
        if folder is None:
            # With the host: machines of a job may share the home, and have the same PIDs.
            pid = None if job.launcher is None else job.launcher.pid
            path = new_folder(script, pid, socket.gethostname())
        else:
            path = unused_folder(folder)
        path.mkdir(parents=True, exist_ok=folder is not None)
        _append(path, beginning)
        _append(path, mine)
    return RankFolder(path, beginning, mine, first=True)


def lowest_rank(folder: Path) -> int:
    """The lowest rank that records into ``folder``, or did; 0 where none has told."""
    found = [int(path.stem[4:]) for path in folder.glob("rank*.json") if path.stem[4:].isdigit()]
    return min([*found, *_read(folder)[1]], default=0)


def _machine() -> str:
    """The host, its boot, and the PID namespace in it (containers)."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        found.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(found)


def _launcher() -> LocalProcess | None:
    """The nearest process above that is not this rank itself: a rank may be a shell that has
    started Python. ``None``: it cannot be told, for the rank was not given by the launcher (the
    first rank of Lightning starts the others)."""
    try:
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            return LocalProcess.of(psutil.Process(parent.pid))
        process, mine = psutil.Process(), set_for_a_rank(os.environ)
        if not mine or set_for_a_rank(process.environ()) != mine:
            return None
        for above in process.parents():
            if not _is_rank(above, mine):
                return LocalProcess.of(above)
    except psutil.Error:
        pass
    return None


def _is_rank(process: psutil.Process, variables: Mapping[str, str]) -> bool:
    try:
        return set_for_a_rank(process.environ()) == variables
    except psutil.Error:  # another user's: Slurm's daemon
        return False


def _newest(script: str) -> list[Path]:
    """Folders of runs of ``script`` on this machine."""
    host = re.escape(socket.gethostname())
    name = re.compile(rf"{re.escape(script_name(script))}-(\d+-\d+)-{host}-\d+(?:-\d+)?")
    found = ((name.fullmatch(each), each) for each in os.listdir(runs_folder()))
    dated = sorted(((match[1], each) for match, each in found if match), reverse=True)
    return [runs_folder() / each for _, each in dated[:_MOST_FOLDERS]]


def _used(folder: Path) -> Iterable[Path]:
    """``folder`` and those that were made in its place because it had a run."""
    for path in numbered(folder):
        if not path.exists():
            return
        yield path


def _read(folder: Path) -> tuple[_Beginning | None, dict[int, RankProcess]]:
    """The beginning and the ranks of a folder's file; nothing where there is none. A line that is
    damaged is left out."""
    beginning, ranks = None, {}
    with contextlib.suppress(OSError):
        for line in (folder / _RANKS).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, DecodingError):
                if beginning is None:
                    beginning = decode(_Beginning, json.loads(line))
                else:
                    rank = decode(RankProcess, json.loads(line))
                    ranks[rank.rank] = rank
    return beginning, ranks


def _append(folder: Path, line: _Beginning | RankProcess) -> None:
    with (folder / _RANKS).open("ab", buffering=0) as file:
        file.write(f"{as_json(line)}\n".encode())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """While one rank looks for the folder, no other makes one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + _LOCK_S
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.005)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
