"""Where a run is recorded by default, and how a run without a training is removed again."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trainfit.results.files.writing import state_folder

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
    return next(each for each in numbered(runs_folder() / name) if not os.path.lexists(each))


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
    return next(each for each in numbered(first) if not _has_run(each))


def _has_run(folder: Path) -> bool:
    """Is there a run in it, also one that has just begun?"""
    found = (path for pattern in ("rank*.json", "ranks.jsonl") for path in folder.glob(pattern))
    return any(path.stat().st_size for path in found)


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
