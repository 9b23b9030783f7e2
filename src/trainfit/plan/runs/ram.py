"""Simulated runs share the machine's RAM: two at a time where both have room, else in turn.

Tensors of the simulated GPU have no data, but a model that is built on the CPU has. What a run
needs is known once one is over; until then the youngest gives way where RAM runs short.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from trainfit.hardware.host.system import System
from trainfit.hardware.machine.memory import read_memory
from trainfit.results.format import size

#: Below this share of what was available at first, two runs are one too many.
_LEAST_SHARE: Final = 0.1
#: What a run may take, as a multiple of what an earlier one took: batches differ.
_SPREAD: Final = 1.1
#: Seconds between looks at the RAM.
_LOOK_S: Final = 0.5


class GaveWay(Exception):
    """A run was ended for want of RAM; it is to be made when no other goes on."""


def available_ram() -> int | None:
    """Bytes that processes can still take, by the machine and by the cgroup's limit."""
    memory = read_memory(System())
    limit, used = memory.limit_bytes.value, memory.limit_used_bytes.value
    left = limit - used if limit is not None and used is not None else None
    found = [each for each in (memory.available_bytes.value, left) if each is not None]
    return max(0, min(found)) if found else None


class RamGate:
    """Lets runs begin side by side as long as there is RAM for them.

    Args:
        warn: is told once, in words, where they are made in turn.
        available: bytes of RAM that can be taken now (``None``: not known, nothing is limited).
    """

    def __init__(
        self,
        warn: Callable[[str], None],
        available: Callable[[], int | None] = available_ram,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._warn, self._available, self._clock = warn, available, clock
        self._change = threading.Condition()
        self._active: list[int] = []
        self._idle = available()
        self._peak = 0
        self._in_turn = False
        self._next_look = 0.0

    @contextlib.contextmanager
    def turn(self, run: int, stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Until the run may begin, and as long as it goes on; ``stopped``: it need not wait."""
        with self._change:
            while not self._has_room() and not stopped():
                self._change.wait(_LOOK_S)
            self._active.append(run)
        try:
            yield
        finally:
            with self._change:
                self._active.remove(run)
                self._change.notify_all()

    def look(self, run: int) -> None:
        """To be called while a run goes on; raises :class:`GaveWay` where it has to end."""
        with self._change:
            now = self._clock()
            if len(self._active) < 2 or self._active[-1] != run or now < self._next_look:
                return
            self._next_look = now + _LOOK_S
            left = self._available()
            if left is None or self._idle is None or left >= _LEAST_SHARE * self._idle:
                return
            self._take_turns(f"{size(left)} of RAM are left")
        raise GaveWay

    def learn(self, peak_bytes: int) -> None:
        """A run took so much at its peak."""
        with self._change:
            self._peak = max(self._peak, peak_bytes)

    def _has_room(self) -> bool:
        if not self._active:
            return True
        if self._in_turn:
            return False
        need = int(_SPREAD * self._peak)
        if self._idle is None or (len(self._active) + 1) * need <= self._idle:
            return True
        self._take_turns(
            f"a run needs {size(self._peak)} of RAM, {size(self._idle)} were available"
        )
        return False

    def _take_turns(self, why: str) -> None:
        if not self._in_turn:
            self._in_turn = True
            self._warn(f"simulated runs are made one at a time: {why}")
