"""The folder in which trainfit keeps what is none of the user's files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def state_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """``trainfit`` in $XDG_STATE_HOME or ~/.local/state (XDG Base Directory Specification); it is
    not created."""
    home = environment.get("XDG_STATE_HOME", "")
    return (Path(home) if os.path.isabs(home) else _home() / ".local" / "state") / "trainfit"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and a user that the system does not know
        return Path(tempfile.gettempdir())
