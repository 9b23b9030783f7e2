"""Where a run is recorded by default."""

from __future__ import annotations

import os
import time
from pathlib import Path


def new_folder(script: str, pid: int | None = None) -> Path:
    """``trainfit/watch/<script>-<date>-<pid>`` in $XDG_STATE_HOME or ~/.local/state; it is not
    created. ``script`` is a path, or empty in a notebook."""
    home = os.environ.get("XDG_STATE_HOME", "")
    state = Path(home) if os.path.isabs(home) else Path.home() / ".local" / "state"
    name = Path(script).stem or "notebook"
    moment = time.strftime("%Y%m%d-%H%M%S")
    return state / "trainfit" / "watch" / f"{name}-{moment}-{os.getpid() if pid is None else pid}"
