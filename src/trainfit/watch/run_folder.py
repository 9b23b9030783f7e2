"""Where a run is recorded by default, and how a run without a training is removed again."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path
from typing import Final

from trainfit.results.files.state import state_folder

#: That a run's first files need at least.
_LEAST_BYTES: Final = 1 << 14
#: What the names of a run's files begin with.
_OURS: Final = ("rank", "machine.", "gpus.", "processes.", "sampler.")


def new_folder(script: str, pid: int | None = None) -> Path:
    """``trainfit/watch/<script>-<date>-<pid>`` in $XDG_STATE_HOME or ~/.local/state; it is not
    created. ``script`` is a path, or empty in a notebook."""
    name = Path(script).stem or "notebook"
    moment = time.strftime("%Y%m%d-%H%M%S")
    first = state_folder() / "watch" / f"{name}-{moment}-{os.getpid() if pid is None else pid}"
    # A process may begin a second training within the second.
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(each for each in itertools.chain([first], others) if not os.path.lexists(each))


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
