"""Takes a script past its last epoch, within the few steps that are simulated.

A final test, an export, a schedule that goes by the number of the epoch come late in a run, and may
need memory that no epoch before does. Once some steps were made, the loops around them go on with
their last round, with the last value of what they go over, and are left after that: where their
line is reached again, the script goes on behind them. No file is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from trainfit.scripts.phases.leaving import gives_nothing, set_variables
from trainfit.scripts.phases.loops import Loop, frames_of_user, loops_around, values_of
from trainfit.simgpu.device.user_location import locals_of, untrace

_Trace = Callable[[FrameType, str, Any], Any]


class LastEpoch:
    """A watch that ends the loops around the training's steps, from :meth:`begin` on.

    Nothing that goes wrong in it reaches the script.
    """

    def __init__(self) -> None:
        self.place: str | None = None
        """Where a loop was first taken to its last round ("file:line")."""
        self._by_number = False
        #: Of each frame, the loops that are to end, those that had their last round, and the
        #: values that their variables are yet to get.
        self._loops: dict[FrameType, list[tuple[Loop, bool]]] = {}
        self._last: set[tuple[str, int]] = set()
        self._taken: dict[FrameType, tuple[Loop, Any]] = {}
        self._is_on = False

    def begin(self, *, by_number: bool) -> None:
        """Begin within the script's call that ends a step; nothing where its calls are traced by
        others already. With ``by_number``, the loops around the one over the data have their last
        round before they end."""
        self._by_number = by_number
        if not self._is_on and sys.gettrace() is not None:
            return
        frames = frames_of_user(sys._getframe(1))
        around = [(each, loop) for each in frames for loop in loops_around(each)]
        self._loops = {}
        for place, (frame, loop) in enumerate(around):
            is_of_data = place == len(around) - 1 and place > 0
            self._loops.setdefault(frame, []).append((loop, is_of_data))
            frame.f_trace = self._line
        _tell_trainers(sys._getframe(1))
        if not self._is_on:
            self._is_on = True
            sys.settrace(_no_more)

    def end(self) -> None:
        """The script runs as it is again."""
        if self._is_on:
            self._is_on = False
            self._loops, self._taken = {}, {}
            sys.settrace(None)
            untrace(sys._getframe(1), self._line)

    def _line(self, frame: FrameType, event: str, given: Any) -> _Trace | None:
        if not self._is_on:
            return None
        if event == "return":
            self._loops.pop(frame, None)
        elif event == "line":
            try:
                self._at_line(frame)
            except Exception:  # the user's names, and lines that cannot be gone to
                self._loops.pop(frame, None)
        return self._line

    def _at_line(self, frame: FrameType) -> None:
        line = frame.f_lineno
        taken = self._taken.get(frame)
        if taken is not None and taken[0].first <= line <= taken[0].last:
            set_variables(frame, *self._taken.pop(frame))
            return
        for loop, is_of_data in self._loops.get(frame, ()):
            if loop.head[0] <= line <= loop.head[1]:
                self._at_head(frame, loop, is_of_data)
                return

    def _at_head(self, frame: FrameType, loop: Loop, is_of_data: bool) -> None:
        """A round is over: one more, with the last value, or none."""
        key = frame.f_code.co_filename, loop.head[0]
        values = values_of(loop, frame)
        is_new = self._by_number and not is_of_data and key not in self._last
        if is_new and values and len(values) > 1 and loop.take is not None:
            self._last.add(key)
            self.place = self.place or f"{key[0]}:{key[1]}"
            self._loops[frame] = []
            if loop.iterates is None:
                set_variables(frame, loop, values[-1])
            else:  # its next value comes after this line
                self._taken[frame] = loop, values[-1]
        elif loop.iterates is None and isinstance(values, range) and loop.take is not None:
            set_variables(frame, loop, values.stop)
        elif loop.after:
            for line in loop.after:
                frame.f_lineno = line  # type: ignore[misc]  # of the frame that is traced
        elif loop.calls in frame.f_code.co_names:
            gives_nothing(frame.f_globals, loop.calls)
            frame.f_lineno = loop.head[0]  # type: ignore[misc]  # it is made again, of nothing


def _no_more(frame: FrameType, event: str, given: Any) -> None:
    """No calls are traced but those that were begun before."""


def _tell_trainers(frame: FrameType | None) -> None:
    """Transformers' Trainer and Lightning's around ``frame`` are told to stop, as callbacks do."""
    while frame is not None:
        own = locals_of(frame).get("self") if frame.f_code.co_name in _FITTING else None
        if own is not None:
            control: Any = getattr(own, "control", None)
            if hasattr(control, "should_training_stop"):
                control.should_training_stop = True
            elif hasattr(own, "should_stop") and hasattr(own, "fit_loop"):
                own.fit_loop.min_epochs, own.fit_loop.epoch_loop.min_steps = 0, None
                own.should_stop = True
        frame = frame.f_back


#: Methods of trainers that go over the epochs.
_FITTING = frozenset(("_inner_training_loop", "_fit_impl", "_run_epoch", "_run_stage"))
