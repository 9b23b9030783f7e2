"""The history of a watched run's GPU memory, as PyTorch records it; saved where memory runs out.

PyTorch keeps a stack of Python's frames with each allocation: some 2 µs each, by the docstring of
``torch.cuda.memory._record_memory_history``. Frames of C++ would tell more of the backward pass,
and are left out: to name them takes seconds to minutes when the history is saved.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from trainfit.torch_private import cuda

#: Allocations and frees that are kept, the latest: those of some steps, in some 100 MB of RAM.
_ENTRIES: Final = 200_000


class MemoryHistory:
    """Records from the moment on at which CUDA is initialized."""

    def __init__(self) -> None:
        self._records = False
        #: Why there is none; empty: there is one, or CUDA was not used.
        self.why_not = ""
        cuda.when_initialized(self._begin)

    def _begin(self) -> None:
        try:
            cuda.record_memory_history(max_entries=_ENTRIES, stacks="python")
            self._records = True
        except Exception as error:
            self.why_not = f"{type(error).__name__}: {error}"

    def save(self, path: Path) -> None:
        """Write the history; nothing where there is none, or the disk is full."""
        if self._records:
            try:
                cuda.dump_snapshot(str(path))
            except Exception as error:
                self.why_not = f"{type(error).__name__}: {error}"

    def end(self) -> None:
        """Record no more."""
        if self._records:
            self._records = False
            with contextlib.suppress(Exception):
                cuda.record_memory_history(None)
