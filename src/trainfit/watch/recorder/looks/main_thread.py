"""A thread that looks at the training thread: the script's own code, and a standstill.

It asks the recorder where the step is, which costs the training nothing. Only outside of all
phases, while the training process makes batches itself, in waits for the GPU and copies to it, and
in the forward pass, it looks at the stack: some 20 µs in which the interpreter's lock is not the
training's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, Final, Protocol

from trainfit.results.runs.locked_stacks import locked_path, stacks_of_locked
from trainfit.results.runs.watched import NO_VALUES
from trainfit.watch.recorder import phases as ph
from trainfit.watch.recorder.job import LoaderRecord
from trainfit.watch.recorder.looks.element_loops import ElementLoops
from trainfit.watch.recorder.looks.locked import LockedStack, stopped_process
from trainfit.watch.recorder.looks.other_threads import OtherThreadLooks, stacks_of_script
from trainfit.watch.recorder.looks.stacks import (
    StackCounts,
    at_any_line,
    holds_lock,
    in_fetch,
    in_hook,
    in_sampler,
    is_busy_elsewhere,
    is_in_pass,
    is_in_phase,
    stack_text,
    users_stack,
    waits_in_pass,
)
from trainfit.watch.recorder.looks.variables import VariableLooks
from trainfit.watch.recorder.rank_files import UnlistedThread

#: Seconds between two looks: at first and, for some hundreds of them, where they find something,
#: so that a short run shows its lines; and then.
_OFTEN_S: Final = 0.04
_SELDOM_S: Final = 1.0
_AT_FIRST: Final = 50
_WHILE_USEFUL: Final = 400
#: Of the looks, those that found the script's own code, from which more of them are useful.
_USEFUL: Final = 0.05
#: Looks that may fail.
_MOST_ERRORS: Final = 20
#: Steps that show how long one takes, before a standstill can be told.
_LEAST_STEPS: Final = 5
#: Seconds after the first, from which steps are long and looks are not of the start any more.
_LEAST_S: Final = 2.0
#: Seconds without a step, and times the longest pause so far, from which it is one.
_STANDSTILL_S: Final = 5.0
_TIMES_LONGEST: Final = 8.0
#: Seconds of a checkpoint or of a compilation that are usual.
_PATIENT_S: Final = 60.0
_PATIENT: Final = (ph.CHECKPOINT, ph.EVALUATION)
#: Threads that are looked at for who holds a lock.
_MOST_THREADS: Final = 32
#: A standstill that lasts is told again after so many times its length.
_AGAIN: Final = 3.0
_LONGEST_TEXT: Final = 16_000
#: Steps and seconds until the next look at variables: times those so far, and at least.
_NEXT_STEPS: Final = 1.25
_MORE_STEPS: Final = 5
_VARIABLES_S: Final = 0.25
#: Share of the time that looks at variables may take.
_MOST_TIME: Final = 0.001


class StepInProgress(Protocol):
    """What is asked of the step that goes on."""

    count: int
    light: bool
    phases: ph.PhaseClock

    @property
    def thread(self) -> int | None:
        """The thread that trains."""


class MainThreadLooks:
    """Looks from :meth:`start` to :meth:`stop`.

    Args:
        training: the steps.
        stem: of the rank's files, next to which workers leave the stacks that they hang in.
        tell: is given an event: kind, seconds, text, values.
        changed: is called when there are new lines to be written.
        loaders: those of the script so far.
    """

    def __init__(
        self,
        training: StepInProgress,
        stem: Path,
        tell: Callable[..., None],
        changed: Callable[[], None],
        loaders: Sequence[LoaderRecord] = (),
    ) -> None:
        self._loaders = loaders
        self._training, self._stem, self._tell, self._changed = training, stem, tell, changed
        self.other, self.fetch, self.sampler = StackCounts(), StackCounts(), StackCounts()
        self.threads = OtherThreadLooks()
        self.loops = ElementLoops()
        self.hooks, self.passes, self.holders = StackCounts(), StackCounts(), StackCounts()
        self.waits = {each: StackCounts() for each in (ph.SYNC, ph.COPY, ph.COLLECTIVE)}
        self._counts = (
            *(self.other, self.fetch, self.sampler, self.hooks, self.passes, self.holders),
            *self.waits.values(),
        )
        self.loop: frozenset[CodeType] = frozenset()
        """Functions of the script that were on the stack when an optimizer's step was called."""
        self.variables = VariableLooks()
        self._variables_due = _MORE_STEPS, 0.0
        self._told_growth = 0
        self._errors = 0
        self._stop = threading.Event()
        self._draw = 1
        self._looks = self._found = 0
        self._stepped_at = 0.0
        self._told_looks = 10
        self._progress: Any = None
        self._since = time.monotonic()
        self._longest = self._silent = 0.0
        self._told_s = 0.0
        self._locked = LockedStack(locked_path(stem, os.getpid()), self._tell_of_locked)
        self._thread = UnlistedThread(self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Wait for its end."""
        self._stop.set()
        self._thread.join(timeout=1.0)
        self._locked.close()
        self._settle()

    def _settle(self) -> None:
        """Looks of steps that are over count."""
        for count in self._counts:
            count.settle(self._training.count)
        self.threads.settle(self._training.count)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._pause()) and self._errors < _MOST_ERRORS:
                # A look that fails only misses what it would have seen.
                with contextlib.suppress(Exception):
                    self._errors += 1
                    self._locked.put_off()
                    with at_any_line(self._draw / 0x7FFFFFFF):
                        self.look(time.monotonic())
                    self.look_around(time.monotonic())
                    self._errors -= 1
        finally:
            self._locked.put_away()  # nobody puts it off any more

    def _pause(self) -> float:
        """Seconds from half to one and a half times the usual pause, so that nothing regular is
        missed."""
        self._draw = self._draw * 1103515245 + 12345 & 0x7FFFFFFF
        useful = self._looks < _WHILE_USEFUL and self._found >= _USEFUL * self._looks
        usual = _OFTEN_S if useful or self._looks < _AT_FIRST else _SELDOM_S
        return usual * (0.5 + self._draw / 0x7FFFFFFF)

    def look(self, now: float) -> None:
        """One look, at ``now`` (seconds of ``time.monotonic()``)."""
        self._look_for_code(now)
        self._look_for_growth(now)

    def look_around(self, now: float) -> None:
        """Look at what reads files, and needs no moment of its own."""
        training = self._training
        if self._looks and training.thread is not None:
            self.threads.look(training.thread, now, training.count)
        self._look_for_standstill(now)

    # -- code ----------------------------------------------------------------------------------

    def _look_for_code(self, now: float) -> None:
        training = self._training
        if not training.count or training.thread is None:
            return
        self._stepped_at = self._stepped_at or now
        if training.count < _LEAST_STEPS and now - self._stepped_at < _LEAST_S:
            return
        self._looks += 1
        self._settle()
        self.other.look(training.count)
        self.sampler.look(training.count)
        current = training.phases.current
        # Of a light step the phase is not known: its stack tells.
        if training.light or current in (ph.OTHER, ph.INPUT):
            self._look_at_stack(training.thread)
        elif current in (ph.FORWARD, ph.BACKWARD):
            self._look_at_pass(training.thread)
        elif (waits := self.waits.get(current)) is not None and (
            stack := users_stack(training.thread)
        ):
            self._found += 1
            waits.look(self._training.count)
            waits.count(stack, self.loop)
        if self._looks >= self._told_looks:
            self._told_looks = int(1.5 * self._looks)
            self._changed()

    def _look_at_stack(self, thread: int) -> None:
        if is_busy_elsewhere(thread):
            if self._training.light:
                self._look_at_pass(thread)
            return
        stack = users_stack(thread)
        made = in_fetch(stack)
        if made is not None:
            self._found += 1
            self.fetch.look(self._training.count)
            self.fetch.count(made)
        elif (chosen := in_sampler(stack)) is not None:
            self._found += 1
            self.sampler.count(chosen)
        elif stack and not is_in_phase(stack):
            self._found += 1
            if self.other.count(stack, self.loop) == "lock":
                self._look_at_holders(thread)

    def _look_at_holders(self, thread: int) -> None:
        """Look at the places of other threads of the script that hold a lock, while the training
        waits for one."""
        self.holders.look(self._training.count)
        for frame in itertools.islice(sys._current_frames(), _MOST_THREADS):
            if frame != thread and holds_lock(stack := users_stack(frame)):
                self.holders.count(stack)

    def _look_at_pass(self, thread: int) -> None:
        stack = users_stack(thread)
        if not is_in_pass(stack):
            return
        self.hooks.look(self._training.count)
        self.passes.look(self._training.count)
        if waits_in_pass(stack):
            self._found += 1
            self.passes.count(stack, self.loop)
        elif (hook := in_hook(stack)) is not None:
            self._found += 1
            self.hooks.count(hook, self.loop)
        else:
            self._found += self.loops.look(thread, stack)

    # -- variables that grow -------------------------------------------------------------------

    def _look_for_growth(self, now: float) -> None:
        count, thread = self._training.count, self._training.thread
        if count < self._variables_due[0] or now < self._variables_due[1] or thread is None:
            return
        began = time.thread_time()
        with contextlib.suppress(Exception):  # objects of the script may be of any kind
            datasets = [
                dataset for loader in self._loaders if (dataset := loader.own_dataset) is not None
            ]
            self.variables.look(count, sys._current_frames().get(thread), self.loop, datasets)
        # The first look reads what later ones know: which modules are the script's.
        cost = time.thread_time() - began if self._variables_due[1] else 0.0
        pause = max(_VARIABLES_S, cost / _MOST_TIME)
        self._variables_due = int(_NEXT_STEPS * count) + _MORE_STEPS, now + pause
        if self.variables.grows != self._told_growth:
            self._told_growth = self.variables.grows
            self._changed()

    # -- a standstill --------------------------------------------------------------------------

    def _look_for_standstill(self, now: float) -> None:
        training = self._training
        progress = training.count, training.phases.since, training.phases.current
        if progress != self._progress:
            if training.count >= _LEAST_STEPS:
                self._longest = max(self._longest, self._silent)
            self._progress, self._since, self._told_s, self._silent = progress, now, 0.0, 0.0
            return
        # Between two looks nothing is known: a pause is as long as they show.
        self._silent = silent = now - self._since
        least = _PATIENT_S if training.phases.current in _PATIENT else _STANDSTILL_S
        if training.count < _LEAST_STEPS or silent < max(least, _TIMES_LONGEST * self._longest):
            return
        if self._told_s and silent < _AGAIN * self._told_s:
            return
        self._told_s = silent
        text = "\n\n".join([f"pid {os.getpid()}", *self._stacks()])
        stopped = stopped_process()
        values = NO_VALUES if stopped is None else {"stopped": float(stopped)}
        self._tell("standstill", seconds=silent, text=text[:_LONGEST_TEXT], values=values)

    def _tell_of_locked(self, stacks: str, seconds: float, ago: float) -> None:
        if time.monotonic() - self._training.phases.since < ago:
            return  # it was this thread that had no core: the training went on since then
        text = f"pid {os.getpid()}\n\n{stacks}"
        self._tell("standstill", seconds=seconds, text=text[:_LONGEST_TEXT])

    def _stacks(self) -> list[str]:
        thread = self._training.thread
        found = [stack_text(users_stack(thread))] if thread is not None else []
        for path in sorted(self._stem.parent.glob(f"{self._stem.name}.stack.*")):
            with contextlib.suppress(OSError):
                found.append(path.read_text(encoding="utf-8"))
        for path in sorted(self._stem.parent.glob(f"{locked_path(self._stem, 0).stem}.*")):
            with contextlib.suppress(OSError):
                found.append(stacks_of_locked(path.read_text(encoding="utf-8")))
        return found if thread is None else found + stacks_of_script(thread)
