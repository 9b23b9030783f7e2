"""The versions of PyTorch that the tests run on, and what is said of another.

Without importing PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Final

from trainfit.results.files.errors import TrainfitError
from trainfit.version import __version__

#: The oldest that pyproject.toml admits, and the newest that `make test-newest` passes on.
OLDEST: Final = "2.8"
NEWEST: Final = "2.14"

_seen: set[str] = set()


def saw(version: str) -> None:
    """Note the version of PyTorch that something runs on; in trainfit's own processes only."""
    if version:
        _seen.add(version)


def newer_seen() -> str:
    """What to say of the versions that were noted, in one line; empty if the tests know them."""
    return newer_than_tested(max(_seen, key=release, default=""))


def newer_than_tested(version: str) -> str:
    """What to say of a PyTorch of this version, in one line; empty if the tests know it."""
    if release(version) <= release(NEWEST):
        return ""
    return (
        f"PyTorch {version} is newer than {NEWEST}, the newest that this trainfit was tested with: "
        "results may be wrong where it differs"
    )


def release(version: str) -> tuple[int, ...]:
    """Major and minor version: patch releases change no private name that is of interest."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


# -- a name that is not there ---------------------------------------------------------------------

#: The exit code of a child that could do nothing with its PyTorch, and what its last line begins
#: with.
_CODE: Final = os.EX_CONFIG
_MARK: Final = "trainfit: refused: "


class MissingNameError(TrainfitError):
    """PyTorch has no such name, of which trainfit makes use."""

    def __init__(self, name: str) -> None:
        version = getattr(sys.modules.get("torch"), "__version__", "")
        super().__init__(
            f"PyTorch {version} has no {name}, which trainfit {__version__} needs (it is tested "
            f"with PyTorch {OLDEST} to {NEWEST}): install PyTorch {NEWEST}, or a newer trainfit"
        )
        self.name = name


class RefusedError(TrainfitError):
    """A child process could do nothing with its PyTorch; the message is the child's."""


@contextlib.contextmanager
def tells_parent() -> Iterator[None]:
    """End this process with what :func:`check` understands where a name is missing."""
    try:
        yield
    except MissingNameError as error:
        print(f"{_MARK}{error}", file=sys.stderr, flush=True)
        sys.exit(_CODE)


def check(code: int | None, output: str) -> None:
    """Look at how a child ended, and at what it printed.

    Raises:
        RefusedError: A name of PyTorch was missing to it.
    """
    last = output.rstrip().rpartition("\n")[2]
    if code == _CODE and last.startswith(_MARK):
        raise RefusedError(last.removeprefix(_MARK))
