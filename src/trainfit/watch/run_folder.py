"""Where a run is recorded by default, and how a run without a training is removed again."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trainfit.results.files.writing import state_folder

#: That a run's first files need at least.
_LEAST_BYTES: Final = 1 << 14
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
    """Also one that has just begun."""
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
    """Since rows of steps were last written; 0 where there are none yet."""
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
