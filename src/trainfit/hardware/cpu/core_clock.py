"""The clock at which one core of this machine runs, measured in a fraction of a second.

What the system says is often another one: a virtual machine sees its processor's base clock
whatever the core runs at, and some sandboxes see none. The piece of work is MD5 of 16 KiB. Each
of its operations needs the one before, so that a core cannot do more of them per clock cycle,
however wide it is; and it runs in the library's machine code, not in Python, whose builds differ
(a loop of Python that sums squares took 28 us in one build of Python 3.11 and 39 us in another,
on the same core).
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from typing import Final

#: Cycles that a byte takes. 4.88 to 4.90 on a Zen 5 core, in two builds of Python with OpenSSL
#: 3.0, next to a chain of dependent multiplications of 3 cycles each.
CYCLES_PER_BYTE: Final = 4.9
#: By what share it may differ on other cores and in other libraries (an assumption).
SPREAD: Final = 0.08
_PIECE: Final = bytes(range(256)) * 64
#: Seconds of measuring, pieces that there are at least, and the share of them that ran at least as
#: fast as the reported rate: others were disturbed.
_SECONDS, _LEAST, _FAST = 0.15, 40, 0.1


def core_clock_hz(
    seconds: float = _SECONDS,
    clock: Callable[[], float] = time.thread_time,
    deadline_clock: Callable[[], float] = time.monotonic,
) -> float | None:
    """Clock cycles per second of one busy core; ``None`` where there is no MD5 (FIPS).

    ``clock`` is the thread's CPU time in seconds, which a busy machine does not change much.
    """
    try:
        hashlib.md5(b"", usedforsecurity=False)
    except ValueError:
        return None
    took: list[float] = []
    deadline = deadline_clock() + seconds
    while len(took) < _LEAST or deadline_clock() < deadline:
        began = clock()
        hashlib.md5(_PIECE, usedforsecurity=False)
        took.append(clock() - began)
    quick = statistics.quantiles(took, n=round(1 / _FAST))[0]
    return CYCLES_PER_BYTE * len(_PIECE) / quick if quick > 0 else None
