"""The versions of PyTorch that the tests run on; known without importing it."""

from __future__ import annotations

import re
from typing import Final

#: The oldest that pyproject.toml admits, and the newest that the whole suite has passed on.
OLDEST: Final = "2.8"
NEWEST: Final = "2.14"

_seen: set[str] = set()


def saw(version: str) -> None:
    """Note the version of PyTorch that something runs on; in trainfit's own processes only."""
    if version:
        _seen.add(version)


def newer_seen() -> str:
    """What to say of the versions that were noted, in one line; empty if the tests know them."""
    return newer_than_tested(max(_seen, key=_release, default=""))


def newer_than_tested(version: str) -> str:
    """What to say of a PyTorch of this version, in one line; empty if the tests know it."""
    if _release(version) <= _release(NEWEST):
        return ""
    return (
        f"PyTorch {version} is newer than {NEWEST}, the newest that this trainfit was tested with: "
        "results may be wrong where it differs"
    )


def _release(version: str) -> tuple[int, ...]:
    """Major and minor version: patch releases change no private name that is of interest."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
