"""Read rate of a file, bypassing the page cache and from it."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

from trainfit.results.files.facts import Fact, cannot_tell, known

#: One read; a multiple of every device's block, as O_DIRECT demands, and of a RAID's stripe.
_BLOCK = 4 << 20
#: Less than this says more about the first seek than about the rate.
_LEAST_BYTES = 8 << 20


def read_rate(
    path: str, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Fact[tuple[float, float]]:
    """Bytes/s of reading ``path`` in sequence from the storage, then again from the cache.

    The first reading asks the kernel for no caching (O_DIRECT), so that it neither profits
    from the page cache nor empties it. Each reading ends with the file or after half of
    ``seconds``.
    """
    if not hasattr(os, "O_DIRECT"):
        return cannot_tell(path, "this system cannot bypass the page cache (no O_DIRECT)")
    try:
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        why = error.strerror or str(error)
        return cannot_tell(path, f"reading cannot bypass the page cache ({why})")
    try:
        nbytes, took = _read(direct, seconds / 2, clock)
    except OSError as error:
        return cannot_tell(path, error.strerror or str(error))
    finally:
        os.close(direct)
    if nbytes < _LEAST_BYTES:
        return cannot_tell(path, f"only {nbytes} bytes could be read, too few for a rate")
    try:
        with open(path, "rb", buffering=0) as file:
            _read(file.fileno(), seconds / 4, clock, nbytes)
            file.seek(0)
            again, cached = _read(file.fileno(), seconds / 4, clock, nbytes)
    except OSError as error:
        return cannot_tell(path, error.strerror or str(error))
    return known((nbytes / max(took, 1e-9), again / max(cached, 1e-9)), path)


def _read(
    file: int, seconds: float, clock: Callable[[], float], most: int | None = None
) -> tuple[int, float]:
    """Bytes read from the beginning, and the time that it took."""
    nbytes, start = 0, clock()
    # O_DIRECT wants memory that is aligned to pages.
    with mmap.mmap(-1, _BLOCK) as buffer:
        while clock() - start < seconds and (most is None or nbytes < most):
            count = os.readv(file, [buffer])
            nbytes += count
            if count < _BLOCK:  # the end; past it O_DIRECT may refuse the unaligned place
                break
    return nbytes, clock() - start
