"""Where a schedule of learning rates leads: it is stepped ahead, without the training.

A schedule is arithmetic over the settings of an optimizer's groups. A copy of it with settings of
its own is stepped as often as the run will, and nothing of the script's changes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
import warnings
import weakref
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, Final

from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from trainfit.results.runs.learning import ScheduleEnd, ScheduleFades, ScheduleUnused
from trainfit.torch_private.modules import parts_of_schedule

#: Seconds of CPU time that one schedule may be stepped ahead for.
_LONGEST_S: Final = 1.0
#: Steps after which it is known how often the schedule is stepped for each of the optimizer's.
_LEAST_STEPS: Final = 2
#: Steps in which a schedule that goes by them would have been stepped, and steps of a run in which
#: its length says that it does.
_LEAST_IDLE: Final = 3
_SHORTEST: Final = 20
#: Waves of a schedule that is made for half of one: fewer may be meant.
_LEAST_WAVES: Final = 2
#: Restarts of one run above which they were meant to be fewer: in the runs of Loshchilov and Hutter
#: (2017) it was started at most 20 times.
_MOST_RESTARTS: Final = 50
#: A schedule of which no more than this share is gone through was made for more steps.
_MOSTLY_UNUSED: Final = 0.5
#: Calls that a schedule is made for, from which they are steps and no epochs. OneCycleLR is one of
#: steps ("should be called after each batch", says its page); pretraining by a cosine has up to
#: 1600 epochs (masked autoencoders: He et al., 2022).
_LENGTHS_IN_STEPS: Final = {OneCycleLR: 1000, CosineAnnealingLR: 5000}
#: Of its rate, what a warm-up that is over has got to, at least.
_WARM: Final = 0.5
#: Below this share of its largest, a learning rate changes no float32 weight any more (2^-24 of it
#: and less); schedules end above it, or at 0, but for the last of their steps only.
VANISHED: Final = 1e-8
#: A function that is never above the one gives rates, if what it multiplies is no larger than the
#: other (1 where the function is all of the rate, as in "Attention is all you need").
_LARGEST_FACTOR: Final = 0.02
_LARGEST_RATE: Final = 0.1
#: Calls at which such a function is asked: warm-ups and decays of any length.
_CALLS: Final = (0, *(1 << power for power in range(21)))
#: A share of a run that is its end: a schedule may be over then.
_END: Final = 0.05


@dataclasses.dataclass
class Schedule:
    """A scheduler of PyTorch's, the user's line that made it, and how often it had been stepped
    when its optimizer made its first step: a run that goes on has brought it to where it was."""

    made: weakref.ref[Any]
    place: str | None
    before: int = 0
    #: Had its optimizer averages then, which an earlier run left?
    goes_on: bool = False

    @property
    def alive(self) -> Any | None:
        return self.made()

    @property
    def calls(self) -> int:
        """How often it has been stepped since."""
        return int(getattr(self.alive, "last_epoch", 0)) - self.before

    def is_of(self, optimizer: Any) -> bool:
        return getattr(self.alive, "optimizer", None) is optimizer

    def begins(self, optimizer: Any) -> None:
        """An optimizer is about to make its first step."""
        if self.is_of(optimizer):
            self.before += self.calls
            self.goes_on = bool(optimizer.state)


def made_for(schedules: Sequence[Schedule], optimizer: Any) -> str | None:
    """The line that made an optimizer's schedule; ``None``: it has none."""
    of_it = (schedule.place for schedule in schedules if schedule.is_of(optimizer))
    return next(of_it, None)


def schedule_end(
    schedules: Sequence[Schedule], steps: int, ahead: int, optimizers: Sequence[Any]
) -> ScheduleEnd | None:
    """The first of them to end before a run of so many optimizer steps ``ahead`` does, of which
    ``steps`` are over; ``None``: none does, or it cannot be told.

    A schedule that is not stepped with the optimizer's steps is left out: how often it will be is
    not known.
    """
    within = _parts(schedules)
    ends = [
        _end(schedule, steps, ahead)
        for schedule in schedules
        if id(schedule.alive) not in within
        and getattr(schedule.alive, "optimizer", None) in optimizers
    ]
    return min(filter(None, ends), key=lambda end: end.step, default=None)


def schedule_unused(
    schedules: Sequence[Schedule], steps: int, ahead: int, optimizers: Sequence[Any]
) -> ScheduleUnused | None:
    """The first of them that is as long as a run of so many optimizer steps ``ahead``, and was not
    stepped once in ``steps`` of them: with each epoch it will hardly begin. Of a run whose length
    is not known (0), one that is made for steps by its length, and is called once for many."""
    if not ahead:
        return _called_by_epochs(schedules, steps, optimizers)
    if steps < _LEAST_IDLE or ahead < _SHORTEST:
        return None
    within = _parts(schedules)
    for known in schedules:
        each, place, calls = known.alive, known.place, known.calls
        if each is None or id(each) in within:
            continue
        if (more := _made_for_more(each, calls, steps, ahead)) is not None:
            return ScheduleUnused(type(each).__name__, more, ahead, place, is_stepped=True)
        if (share := _still_rising(each, calls, steps, ahead)) is not None:
            warm_up = round(ahead / share)
            return ScheduleUnused(type(each).__name__, warm_up, ahead, place, True, share)
        is_idle = getattr(each, "last_epoch", None) == 0
        if not is_idle or getattr(each, "optimizer", None) not in optimizers or _is_led(each):
            continue
        length = _length(each, ahead)
        if length is not None and abs(length / ahead - 1) <= _END:
            return ScheduleUnused(type(each).__name__, length, ahead, place)
    return None


def _called_by_epochs(
    schedules: Sequence[Schedule], steps: int, optimizers: Sequence[Any]
) -> ScheduleUnused | None:
    for known in schedules:
        each, place, calls = known.alive, known.place, known.calls
        least = _LENGTHS_IN_STEPS.get(type(each))
        if least is None or getattr(each, "optimizer", None) not in optimizers or _is_led(each):
            continue
        length = _length(each, 0)
        if length is not None and length >= least and 1 < calls <= steps // _SHORTEST:
            return ScheduleUnused(type(each).__name__, length, length * steps // calls, place)
    return None


def schedule_fades(
    schedules: Sequence[Schedule], steps: int, optimizers: Sequence[Any]
) -> ScheduleFades | None:
    """The first of PyTorch's own that multiply a rate every so many calls, where it is called with
    each of so many optimizer ``steps``; nothing is stepped for it."""
    if steps < _SHORTEST:
        return None
    within = _parts(schedules)
    for known in schedules:
        each, place, calls = known.alive, known.place, known.calls
        if id(each) in within or getattr(each, "optimizer", None) not in optimizers:
            continue
        every = {StepLR: getattr(each, "step_size", None), ExponentialLR: 1}.get(type(each))
        factor = getattr(each, "gamma", None)
        if not isinstance(every, int) or not isinstance(factor, float) or not 0 < factor < 1:
            continue
        if every > 0 and abs(calls - steps) <= 1:
            times = math.ceil(math.log(VANISHED) / math.log(factor) - 1e-6)
            return ScheduleFades(type(each).__name__, every, factor, every * times, place)
    return None


def rate_as_factor(
    schedules: Sequence[Schedule], optimizers: Collection[Any]
) -> tuple[float, float, str | None] | None:
    """The largest factor of the first LambdaLR whose function gives a rate and no factor, the rate
    that it multiplies, and its line."""
    for schedule in schedules:
        scheduler = schedule.alive
        if type(scheduler) is not LambdaLR or scheduler.optimizer not in optimizers:
            continue
        with contextlib.suppress(Exception):  # the script's own functions
            factor = max(float(f(call)) for f in scheduler.lr_lambdas for call in _CALLS)
            rate = max(float(rate) for rate in scheduler.base_lrs)
            if 0 < factor <= _LARGEST_FACTOR and 0 < rate <= _LARGEST_RATE:
                return factor, rate, schedule.place
    return None


def stepped_first(schedules: Sequence[Schedule], optimizers: Collection[Any]) -> Schedule | None:
    """A schedule that was stepped once before the first step of its optimizer, of those that made
    steps. One that goes on where an earlier run was is stepped more often, or has its state."""
    within = _parts(schedules)
    for schedule in schedules:
        alive = schedule.alive
        is_left_out = isinstance(alive, ReduceLROnPlateau) or id(alive) in within
        if schedule.before != 1 or schedule.goes_on or is_left_out:
            continue
        if any(schedule.is_of(optimizer) for optimizer in optimizers):
            return schedule
    return None


def _parts(schedules: Sequence[Schedule]) -> set[int]:
    """Schedules that others are made of, by identity."""
    return {id(part) for schedule in schedules for part in parts_of_schedule(schedule.alive)}


def _made_for_more(scheduler: Any, calls: int, steps: int, ahead: int) -> int | None:
    """Steps that a schedule is made for which is stepped once with each of the optimizer's, if it
    is hardly gone through until the end of the run."""
    if type(scheduler) not in (OneCycleLR, CosineAnnealingLR):
        return None
    length = _length(scheduler, ahead)
    is_stepped = abs(calls - steps) <= 1
    if length is None or not is_stepped or _is_led(scheduler):
        return None
    return length if ahead <= _MOSTLY_UNUSED * length else None


def _still_rising(scheduler: Any, calls: int, steps: int, ahead: int) -> float | None:
    """The share of its rate that a warm-up has got to which is stepped with each of the optimizer's
    steps and is not over when the run is; ``None``: there is none."""
    groups = scheduler.optimizer.param_groups
    full = max((float(group.get("initial_lr", 0)) for group in groups), default=0.0)
    is_low = 0 <= _rate(groups) <= _WARM * full
    if not is_low or abs(calls - steps) > 1 or _is_led(scheduler):
        return None
    with contextlib.suppress(Exception):  # the script's own functions
        own, until = _own_copy(scheduler), time.thread_time() + _LONGEST_S
        rate = first = _rate(own.optimizer.param_groups)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(ahead - calls):
                own.step()
                before, rate = rate, _rate(own.optimizer.param_groups)
                if rate < before or time.thread_time() > until:
                    return None
        return rate / full if first < rate <= _WARM * full and before < rate else None
    return None


def _own_copy(scheduler: Any) -> Any:
    """A schedule with settings of its own, to be stepped ahead."""
    return copy.deepcopy(scheduler, {id(scheduler.optimizer): _stand_in(scheduler.optimizer)})


def _length(scheduler: Any, ahead: int) -> int | None:
    """Steps that a schedule is made for: as it was told, or until it is over."""
    for name in ("total_steps", "T_max", "total_iters"):
        told = getattr(scheduler, name, None)
        if isinstance(told, int | float) and told > 0:
            return int(told)
    with contextlib.suppress(Exception):
        found = _stepped(scheduler, round(ahead * (1 + 2 * _END)))
        # Those that only get smaller (by a factor each time) are made for no number of steps.
        return found[0] if found is not None and (found[1].error or found[1].rate <= 0) else None
    return None


def _is_led(scheduler: Any) -> bool:
    """Does something else set the rates for now (a warm-up by hand)?"""
    groups = scheduler.optimizer.param_groups
    return [float(group["lr"]) for group in groups] != [float(r) for r in scheduler.get_last_lr()]


def _end(schedule: Schedule, steps: int, ahead: int) -> ScheduleEnd | None:
    if steps < _LEAST_STEPS:
        return None
    scheduler, place, calls = schedule.alive, schedule.place, schedule.calls
    each, left = divmod(calls + 1, steps)
    if not each or left > 1:
        return None
    half = _half_wave(scheduler)
    maximum = _LEAST_WAVES * 2
    if type(scheduler) is CosineAnnealingWarmRestarts and scheduler.T_mult == 1:
        half, maximum = int(scheduler.T_0), _MOST_RESTARTS
    if half is not None and maximum * half <= each * ahead:
        return ScheduleEnd(max(1, (half - schedule.before) // each), ahead, rises=True, place=place)
    with contextlib.suppress(Exception):
        # The last step's calls come after it: no step is made with the rate that they leave.
        found = _stepped(scheduler, each * ahead - calls, unused=each)
        if found is not None:
            call, end = found
            at = (calls + call) // each
            return dataclasses.replace(end, step=at, of_steps=ahead, place=place)
    return None


def _half_wave(scheduler: Any) -> int | None:
    """Calls after which a cosine schedule, which has no restarts, has come down, and goes up again;
    ``None``: it is none."""
    length = scheduler.T_max if type(scheduler) is CosineAnnealingLR else None
    return length if isinstance(length, int) and length > 0 else None


def _stepped(scheduler: Any, calls: int, unused: int = 0) -> tuple[int, ScheduleEnd] | None:
    """The call from now at which it raises, goes below 0 (the last ``unused`` ones left out), or at
    which the rates vanish for good."""
    own = _own_copy(scheduler)
    groups = own.optimizer.param_groups
    largest, until = _rate(groups), time.thread_time() + _LONGEST_S
    low: tuple[int, ScheduleEnd] | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(1, calls + 1):
            try:
                own.step()
            except Exception as error:  # the script's own functions, and the schedule's end
                return call, ScheduleEnd(error=f"{type(error).__name__}: {error}")
            rate = _rate(groups)
            if call <= calls - unused and min(group["lr"] for group in groups) < 0:
                return call, ScheduleEnd(rate=rate)
            largest = max(largest, rate)
            low = None if rate >= VANISHED * largest else low or (call, ScheduleEnd(rate=rate))
            if time.thread_time() > until:
                return None
    return low if low is not None and low[0] <= (1 - _END) * calls else None


def _rate(groups: Sequence[dict[str, Any]]) -> float:
    return max((float(group["lr"]) for group in groups), default=0.0)


def _stand_in(optimizer: Any) -> Any:
    """The settings of its groups, without a tensor."""

    def step() -> None: ...

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    groups = [
        {name: copy.copy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return SimpleNamespace(
        param_groups=groups, defaults=optimizer.defaults, step=step, _opt_called=True
    )
