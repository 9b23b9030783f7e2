"""A PyTorch without a name that is needed is refused, by a child process to its parent, too.

Without importing PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Final

from trainfit.results.files.errors import TrainfitError
from trainfit.torch_private.tested import NEWEST, OLDEST
from trainfit.version import __version__

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
