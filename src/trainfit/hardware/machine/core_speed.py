"""How fast this machine's cores are from moment to moment, while something else is measured.

A virtual machine shares physical cores with others: while a neighbour computes on the other
thread of a core, ours runs at some 0.6 of its speed, and nothing in the guest says so (stolen
time stays 0). A process of its own therefore does a small fixed piece of work on each core in
turn and notes the CPU time that it took; what else runs here on the core does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

_SAMPLER: Final = Path(__file__).parents[1] / "probes" / "core_speed.py"
#: Doubles that the sampler writes for each piece.
_COLUMNS: Final = 4
#: Of a core's pieces, the share that is at least as fast as its full speed is taken to be.
_FAST: Final = 0.02
#: Pieces that tell a core's full speed, and its speed in a span.
_LEAST_PIECES, _LEAST_INSIDE = 20, 3
#: So many times what a piece takes at the full speed of fewer busy cores is more than a lower
#: clock; the share of pieces that shows that such slowness comes from outside.
_SLOW, _OFTEN = 1.15, 0.1

Span = tuple[float, float]
"""From when to when, on the monotonic clock in seconds."""


@dataclass(frozen=True)
class CoreSpeed:
    """How fast cores were in a span: the mean speed of those that worked, as a share of their full
    speed, and how many cores were busy on average."""

    speed: float
    busy_cores: float


@dataclass(frozen=True)
class WorkPieces:
    """Pieces of work, in the order of time.

    ``at`` is when each ended on the monotonic clock (s), on which ``core``, the CPU time that it
    ``took`` (ns), and for how long the core had been ``idle`` until then (s).
    """

    at: NDArray[np.float64]
    core: NDArray[np.float64]
    took: NDArray[np.float64]
    idle: NDArray[np.float64]

    def of(self, core: float) -> WorkPieces:
        """Pieces of one core."""
        return self._rows(self.core == core)

    def within(self, span: Span) -> WorkPieces:
        """Pieces of one span."""
        first, last = np.searchsorted(self.at, span)
        return self._rows(slice(int(first), int(last)))

    def _rows(self, rows: Any) -> WorkPieces:
        return WorkPieces(self.at[rows], self.core[rows], self.took[rows], self.idle[rows])

    def pace(self, span: Span) -> float | None:
        """Pieces a nanosecond in a span, the mean over the cores' work as that of
        :class:`CoreSpeed` is; ``None`` where too little was seen."""
        looks = [_Look.at(self.of(core).within(span)) for core in np.unique(self.core)]
        took = _joined([look.took for look in looks])
        weights = _joined([look.worked for look in looks]) + 1e-6
        return float((weights / took).sum() / weights.sum()) if len(took) else None

    def speeds(self, spans: Sequence[Span]) -> list[CoreSpeed | None]:
        """The cores' speed in each span; ``None`` where too little was seen.

        A core's full speed is derived from spans with about as many busy cores: that a processor
        clocks lower with all of its cores busy, or that two of them are threads of one, is its
        own way, nothing from outside.
        """
        by_core = [self.of(core) for core in np.unique(self.core)]
        looks = [[_Look.at(each.within(span)) for each in by_core] for span in spans]
        busy = [sum(look.busy for look in row) for row in looks]
        groups = [round(math.log2(max(1.0, number))) for number in busy]
        full: dict[tuple[int, int], float | None] = {}
        for place in range(len(by_core)):
            column = [row[place] for row in looks]
            for group in sorted(set(groups)):
                mine = [look.took for look, its in zip(column, groups, strict=True) if its == group]
                fewer = [
                    look.at_work for look, its in zip(column, groups, strict=True) if its < group
                ]
                full[group, place] = _full_speed(_joined(mine), _joined(fewer))
        found: list[CoreSpeed | None] = []
        for row, group, number in zip(looks, groups, busy, strict=True):
            pairs = [(look, full[group, place]) for place, look in enumerate(row)]
            found.append(_speed([(look, fastest) for look, fastest in pairs if fastest], number))
        return found


@dataclass(frozen=True)
class _Look:
    """One core in one span: what pieces took (ns) and how long the core was busy before each
    (s), both without the first; ``at_work`` are the pieces before which it mostly was."""

    took: NDArray[np.float64]
    worked: NDArray[np.float64]
    at_work: NDArray[np.float64]
    busy: float

    @classmethod
    def at(cls, pieces: WorkPieces) -> _Look:
        if len(pieces.at) < _LEAST_INSIDE:
            return cls(np.zeros(0), np.zeros(0), np.zeros(0), 0.0)
        spans = np.diff(pieces.at)
        worked = np.maximum(0.0, spans - np.diff(pieces.idle))
        took = pieces.took[1:]
        return cls(took, worked, took[worked > spans / 2], float(worked.sum() / spans.sum()))


def _joined(parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate([np.zeros(0), *parts])


def _full_speed(took: NDArray[np.float64], fewer: NDArray[np.float64]) -> float | None:
    """What a piece takes at full speed, by those with as many busy cores.

    Where these are all slow, it may be that something from outside was at it all the time: if
    pieces with fewer busy cores were now as slow, now fast, the fast ones tell.
    """
    if len(took) < _LEAST_PIECES:
        return None
    mine = float(np.quantile(took, _FAST))
    if len(fewer) < _LEAST_PIECES:
        return mine
    fastest = float(np.quantile(fewer, _FAST))
    if mine < _SLOW * fastest:
        return mine
    as_slow = float((fewer > (mine + fastest) / 2).mean())
    return fastest if as_slow > _OFTEN else mine


def _speed(looks: Sequence[tuple[_Look, float]], busy_cores: float) -> CoreSpeed | None:
    """The speed of the cores by their work: one that idles may be as slow as it likes."""
    total = weights = 0.0
    for look, fastest in looks:
        weight = look.worked + 1e-6  # a span without any work has a speed, too
        total += float((weight * np.minimum(1.0, fastest / look.took)).sum())
        weights += float(weight.sum())
    return CoreSpeed(total / weights, busy_cores) if weights else None


class CoreSpeeds:
    """Watches the cores that this process may use, as a context; it never raises.

    Where affinities cannot be set, there is no /proc or no room for a file, nothing is seen.
    """

    def __init__(self) -> None:
        self._asked: dict[Span, None] = {}
        self._file: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> CoreSpeeds:
        if hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):
                self._file = tempfile.TemporaryFile(prefix="trainfit-speed-")
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_SAMPLER), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=self._file,
                    stderr=subprocess.DEVNULL,
                )
        return self

    def speeds(self, spans: Sequence[Span]) -> list[CoreSpeed | None]:
        """The cores' speed in each span, their full speed told from these and all that were asked
        for before: in some of them they were slowed by less."""
        self._asked.update(dict.fromkeys(spans))
        known = dict(zip(self._asked, self.pieces().speeds(list(self._asked)), strict=True))
        return [known[span] for span in spans]

    def pieces(self) -> WorkPieces:
        """All that was seen so far."""
        data = b""
        if self._file is not None:
            number = self._file.fileno()
            row = _COLUMNS * np.dtype(np.float64).itemsize
            size = os.fstat(number).st_size
            data = os.pread(number, size - size % row, 0)
        rows = np.frombuffer(data).reshape(-1, _COLUMNS)
        rows = rows[rows[:, 2] > 0]  # a virtual machine's clock may stand still
        ticks = os.sysconf("SC_CLK_TCK")
        return WorkPieces(rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] / ticks)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._file is not None:
            self._file.close()


def pieces_of(watch: CoreSpeeds | WorkPieces) -> WorkPieces:
    """All that was seen so far."""
    return watch if isinstance(watch, WorkPieces) else watch.pieces()


# ---
# The clock at which one core of this machine runs, measured in a fraction of a second.
#
# What the system says is often another one: a virtual machine sees its processor's base clock
# whatever the core runs at, and some sandboxes see none. The piece of work is MD5 of 16 KiB. Each
# of its operations needs the one before, so that a core cannot do more of them per clock cycle,
# however wide it is; and it runs in the library's machine code, not in Python, whose builds differ
# (a loop of Python that sums squares took 28 us in one build of Python 3.11 and 39 us in another,
# on the same core).


#: Cycles that a byte takes. 4.88 to 4.90 on a Zen 5 core, in two builds of Python with OpenSSL
#: 3.0, next to a chain of dependent multiplications of 3 cycles each.
CYCLES_PER_BYTE: Final = 4.9
#: By what share it may differ on other cores and in other libraries (an assumption).
SPREAD: Final = 0.08
_PIECE: Final = bytes(range(256)) * 64
#: Seconds of measuring, pieces that there are at least, and the share of them that ran at least as
#: fast as the reported rate: others were disturbed.
_SECONDS, _LEAST, _FAST_CLOCK = 0.15, 40, 0.1


def core_clock_hz(
    seconds: float = _SECONDS,
    clock: Callable[[], float] = time.thread_time,
) -> float | None:
    """Clock cycles per second of one busy core; ``None`` where there is no MD5 (FIPS).

    ``clock`` is the thread's CPU time in seconds, which a busy machine does not change much.
    """
    try:
        hashlib.md5(b"", usedforsecurity=False)
    except ValueError:
        return None
    took: list[float] = []
    deadline = time.monotonic() + seconds
    while len(took) < _LEAST or time.monotonic() < deadline:
        began = clock()
        hashlib.md5(_PIECE, usedforsecurity=False)
        took.append(clock() - began)
    quick = statistics.quantiles(took, n=round(1 / _FAST_CLOCK))[0]
    return CYCLES_PER_BYTE * len(_PIECE) / quick if quick > 0 else None
