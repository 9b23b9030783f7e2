"""What processes write to stderr, the only place where some faults are reported.

A worker that cannot be started, or whose queue thread cannot send a batch, prints a traceback
and says nothing to the process that waits for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Final

#: Of what is written, the end that is kept.
_MOST_BYTES: Final = 1 << 16
_STDERR: Final = 2


class Output:
    """What was written, once the block has ended."""

    text: str = ""


@contextlib.contextmanager
def captured_stderr() -> Iterator[Output]:
    """Keep what this process and those that it starts write to stderr meanwhile.

    Nothing of it is shown; for a block that writes nothing itself (no progress bar).
    """
    output = Output()
    with tempfile.TemporaryFile() as file:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.flush()
        former = os.dup(_STDERR)
        os.dup2(file.fileno(), _STDERR)
        try:
            yield output
        finally:
            with contextlib.suppress(AttributeError, OSError, ValueError):
                sys.stderr.flush()
            os.dup2(former, _STDERR)
            os.close(former)
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES))
            output.text = file.read().decode(errors="replace")
