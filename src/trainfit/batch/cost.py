"""What a measurement costs of a training's time, and how often it may run for that."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import torch

#: Share of the run's time that measuring may cost; the goal of the whole estimator is 2%, of which
#: the hooks that count backward passes need a part.
_ALLOWED: Final = 0.01
#: Measured steps before the rate is set, and between two changes of it.
_FIRST, _AGAIN = 4, 32
_MOST_EVERY: Final = 200
_KEPT: Final = 33


class Cost:
    """Seconds of measurements and of steps, on the host and, with CUDA events, on the device."""

    def __init__(self) -> None:
        self.every = 1
        self.uses_events = False
        self._events: deque[list[tuple[Any, Any]]] = deque(maxlen=_KEPT)
        self._open_events: list[tuple[Any, Any]] = []
        self._open_s = 0.0
        self._measured_s: deque[float] = deque(maxlen=_KEPT)
        self._device_s: deque[float] = deque(maxlen=_KEPT)
        self._step_s: deque[float] = deque(maxlen=_KEPT)
        self._last_step: float | None = None
        self._until_change = _FIRST
        self._total_s = self._elapsed_s = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Around a part of a measurement."""
        first = self._event()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._open_s += time.perf_counter() - began
            if first is not None:
                self._open_events.append((first, self._event()))

    def _event(self) -> Any:
        if not self.uses_events:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step(self) -> None:
        """At the end of each optimizer step."""
        now = time.perf_counter()
        was_measured, measured_s = self._open_s > 0, self._open_s
        self._open_s = 0.0
        if self._last_step is not None:
            self._elapsed_s += now - self._last_step
            self._total_s += measured_s
            self._step_s.append(now - self._last_step - measured_s)
        self._last_step = now
        if was_measured:
            self._measured_s.append(measured_s)
            if self._open_events:
                self._events.append(self._open_events)
                self._open_events = []
            self._until_change -= 1
            if self._until_change <= 0:
                self._until_change = _AGAIN
                self._change()

    def _change(self) -> None:
        self._read_events()
        step = statistics.median(self._step_s) if self._step_s else 0.0
        if step > 0:
            cost = statistics.median(self._measured_s)
            if self._device_s:
                cost = max(cost, statistics.median(self._device_s))
            self.every = min(_MOST_EVERY, max(1, math.ceil(cost / (_ALLOWED * step))))

    def _read_events(self) -> None:
        """Of steps that are done on the device; nothing waits."""
        while self._events and self._events[0][-1][1].query():
            parts = self._events.popleft()
            self._device_s.append(sum(first.elapsed_time(last) for first, last in parts) / 1e3)

    @property
    def share(self) -> float | None:
        """Measurements' share of the time so far, on the host; ``None`` before the second step."""
        return self._total_s / self._elapsed_s if self._elapsed_s > 0 else None
