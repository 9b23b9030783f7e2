"""The state of folders, to see afterwards what was changed in them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

State = Mapping[str, str]


def state_of(*folders: Path) -> State:
    """For every entry below ``folders``: its kind, mode and content, by path."""
    found = {}
    for folder in folders:
        for root, names, files in os.walk(folder):
            for name in (*names, *files):
                path = Path(root, name)
                found[str(path)] = _state(path)
    return found


def changed(before: State, after: State) -> tuple[str, ...]:
    """What was made, removed or altered: ``+path``, ``-path``, ``~path``."""
    made = [f"+{path}" for path in after if path not in before]
    gone = [f"-{path}" for path in before if path not in after]
    other = [f"~{path}" for path in after if path in before and before[path] != after[path]]
    return (*made, *gone, *other)


def _state(path: Path) -> str:
    if path.is_symlink():
        return f"link {os.readlink(path)}"
    mode = oct(path.lstat().st_mode)
    if not path.is_file():
        return mode
    with path.open("rb") as file:
        return f"{mode} {hashlib.file_digest(file, 'sha256').hexdigest()}"
