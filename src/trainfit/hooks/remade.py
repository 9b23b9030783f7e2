"""Optimizers that are made over parameters which another one had before: for each step, or with
the first one's schedule left behind. And those that get more parameters as they train."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from types import CellType, FrameType, MethodType
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainfit.hooks.owners import tensors_of
from trainfit.hooks.schedules import Schedule, rate_as_factor, stepped_first
from trainfit.hooks.structure import memory_of, place_in_memory
from trainfit.results.runs.learning import Misuse
from trainfit.simgpu.device.user_location import called_by_user, locals_of
from trainfit.torch_private.modules import parts_of_schedule

#: Optimizers in a row that made one step each.
_IN_A_ROW: Final = 3
#: Hooks of one line that are remembered.
_HOOKS: Final = 16
#: Times that an optimizer gets new parameters, after which more are expected.
_TIMES: Final = 5
#: Steps of an optimizer that show how often a schedule is stepped.
_LEAST_STEPS: Final = 3
#: Whose objects have an optimizer without stepping it.
_NO_OWNERS: Final = ("torch.optim.", "trainfit.")


class Remade:
    """Counts optimizers of one line, over the same parameters, that make a single step each."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], weakref.ref[Any]] = {}
        self._firsts: dict[tuple[str, int], weakref.ref[Any]] = {}
        self._steps: dict[tuple[str, int], int] = {}
        self._times: dict[tuple[str, int], int] = {}
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def steps(self, optimizer: Any, place: str | None) -> bool:
        """An optimizer that a line made is about to step: is it one of several in a row that make
        one step each, and would keep something for the next?"""
        tensors = tensors_of(optimizer)
        if not tensors or place is None or not keeps_state(optimizer):
            return False
        key = place, id(tensors[0])
        last, first = self._last.get(key), self._firsts.get(key)
        if last is None or first is None or first() is not tensors[0]:
            self._firsts[key], self._times[key] = weakref.ref(tensors[0]), 1
        elif last() is optimizer:
            self._steps[key] += 1
            return False
        elif optimizer in self._seen:  # one within another one steps in turn with it
            self._times[key] = 1
        else:
            self._times[key] = self._times[key] + 1 if self._steps[key] == 1 else 1
        self._seen.add(optimizer)
        self._last[key], self._steps[key] = weakref.ref(optimizer), 1
        return self._times[key] >= _IN_A_ROW


class Grown:
    """Follows optimizers that get parameters while they train, which no model had before: a part
    that was frozen, and is trained from some epoch on, is none of these."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._first = self._now = self._times = 0
        self._place: str | None = None
        self._added: tuple[weakref.ref[Any], int, str | None] | None = None

    def began(self, optimizer: Any, models: Iterable[Any]) -> None:
        """An optimizer makes its first step; ``models`` were called before it."""
        self._known |= {id(parameter) for model in models for parameter in model.parameters()}
        self._known |= {id(tensor) for tensor in tensors_of(optimizer)}

    def adds(self, optimizer: Any, place: str | None) -> None:
        """A line is about to give an optimizer that has made steps one more group, which may be an
        iterator: what it had is looked at later."""
        self._look()
        self._added = weakref.ref(optimizer), len(optimizer.param_groups), place

    def _look(self) -> None:
        """Look at the group that was added last."""
        optimizer = self._added[0]() if self._added is not None else None
        if optimizer is None or self._added is None:
            return
        _, before, place = self._added
        given = [each for group in optimizer.param_groups[before:] for each in group["params"]]
        if 2 * sum(id(each) not in self._known for each in given) > len(given):
            self._now = len(tensors_of(optimizer))
            self._first = self._first or self._now - len(given)
            self._times, self._place = self._times + 1, place
        self._added = None

    def found(self) -> Iterator[Misuse]:
        """How often, tensors at first and now, and the line; a few times may be meant."""
        self._look()
        if self._times >= _TIMES:
            told = self._times, self._first, self._now
            yield Misuse.of("parameters_added", *told, place=self._place)


class Moved:
    """Follows modules that lines move to the GPU while the training goes on, or cast to float16.

    Attributes:
        half_at: the line that cast one to float16 first; ``None``: none did.
    """

    def __init__(self, place: Callable[[], str | None], steps: Callable[[], int]) -> None:
        self._place, self._steps = place, steps
        self.half_at: str | None = None
        #: What may be cast now.
        self._casting: Any = None
        #: What is moved now, and where it was.
        self._moving: tuple[Any, bool] | None = None
        #: By line, what it moved last, and the steps in which it moved that.
        self._times: dict[str, tuple[weakref.ref[Any], set[int]]] = {}
        self._found: Misuse | None = None

    def found(self) -> Iterator[Misuse]:
        """A module that each step moves, its bytes, and the line."""
        if self._found is not None:
            yield self._found

    def moving(self, module: Any) -> None:
        """A module is about to be moved, maybe to another device."""
        self._moving = None
        self._casting = module if self.half_at is None and not _is_half(module) else None
        if self._found is None and self._steps() and called_by_user():
            self._moving = module, _is_on_gpu(module)

    def moved(self) -> None:
        """The module was moved."""
        casting, self._casting = self._casting, None
        if casting is not None and _is_half(casting):
            self.half_at = self._place()
        moving, self._moving = self._moving, None
        if moving is None or moving[1] or not _is_on_gpu(moving[0]):
            return
        module = moving[0]
        place = self._place() or ""
        known = self._times.get(place)
        if known is None or known[0]() is not module:  # one that each step makes is none of these
            known = self._times[place] = weakref.ref(module), set()
        times = known[1]
        times.add(self._steps())
        if len(times) >= _IN_A_ROW:
            nbytes = sum(parameter.nbytes for parameter in module.parameters())
            told = type(module).__name__, nbytes
            self._found = Misuse.of("moved_each_step", *told, place=place)


def _is_half(module: Any) -> bool:
    first = next(module.parameters(), None)
    return first is not None and first.dtype == torch.float16


def _is_on_gpu(module: Any) -> bool:
    return any(parameter.is_cuda for parameter in module.parameters())


class Hooked:
    """Follows hooks that a line adds to modules: one more in each step, and none is removed."""

    def __init__(self) -> None:
        #: By the line and the hooks of a module, in which step each was added.
        self._added: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._found: Misuse | None = None

    def found(self) -> Iterator[Misuse]:
        """Hooks of one line that a module has, and the line."""
        if self._found is not None:
            yield self._found

    def added(self, handle: Any, step: int, place: Callable[[], str | None]) -> None:
        """A line added a hook, in this step.

        One that a library adds by itself in its own loop is nothing that the script's line can
        leave out: Transformers' checkpointing, which KTO turns off and on in each step, is one.
        """
        hooks = handle.hooks_dict_ref()
        if hooks is None or self._found is not None or not called_by_user():
            return
        at = place() or ""
        mine = self._added.setdefault((at, id(hooks)), [])
        mine.append((step, handle.id))
        mine[:] = [each for each in mine if each[1] in hooks][-_HOOKS:]
        if len({each for each, _ in mine}) >= _IN_A_ROW:
            self._found = Misuse.of("hooks_added", len(mine), place=at)


class Overwritten:
    """Follows weights that a state was loaded into, and that are initialized after that; ``place``
    gives the line that is running."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        self._where = place
        #: Matrices that were loaded, by their memory; of them, those that were initialized since.
        self._loaded: dict[Hashable, weakref.ref[Any]] = {}
        self._initialized: set[Hashable] = set()
        self._place: str | None = None

    def loaded(self, module: Any) -> None:
        """A state was loaded into a module."""
        self._initialized.clear()
        self._loaded.clear()
        for parameter in module.parameters():
            if (key := memory_of(parameter)) is not None:
                self._loaded[key] = weakref.ref(parameter)

    def initialized(self, tensor: Any) -> None:
        """A function of torch.nn.init is about to fill a tensor."""
        if not self._loaded or not isinstance(tensor, torch.Tensor):
            return
        known = place_in_memory(tensor)
        weight = self._loaded[known]() if known in self._loaded else None
        if weight is not None and memory_of(weight) == known:
            self._initialized.add(known)
            self._place = self._place or self._where()

    def found(self) -> Iterator[Misuse]:
        """If most of them were: how many, and of how many."""
        number, of = len(self._initialized), len(self._loaded)
        if number > 1 and 2 * number > of:
            yield Misuse("weights_initialized_again", (str(number), str(of)), self._place)


def twice(optimizer: Any) -> tuple[int, int]:
    """Tensors that an optimizer has more than once, and all of its tensors."""
    counts = Counter(map(id, tensors_of(optimizer)))
    return sum(count > 1 for count in counts.values()), len(counts)


def keeps_state(optimizer: Any) -> bool:
    """Has it averages of its own? Plain SGD has none, and a step of LBFGS is many."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return False
    return bool(getattr(optimizer, "defaults", {}).get("momentum", 1))


def schedule_left_behind(
    schedules: Sequence[Schedule], optimizers: Collection[Any]
) -> tuple[str, str, str | None] | None:
    """The class of a schedule whose optimizer nobody can step any more, while another one (of
    ``optimizers``, which made steps) has its parameters; the other's class, and the schedule's
    line."""
    for schedule in schedules:
        optimizer = _optimizer_of(schedule)
        if not isinstance(optimizer, torch.optim.Optimizer):
            continue
        own = {id(tensor) for tensor in tensors_of(optimizer)}
        for other in optimizers:
            if other is optimizer or any(other is _optimizer_of(each) for each in schedules):
                continue
            if own & {id(tensor) for tensor in tensors_of(other)} and not _is_held(optimizer):
                return type(schedule.alive).__name__, type(other).__name__, schedule.place
    return None


class Plateaus:
    """Follows schedules that wait for a loss to fall no more; ``place`` gives the line that is
    running."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        self._place = place
        self._made: list[tuple[weakref.ref[Any], str | None]] = []

    def made(self, schedule: Any) -> None:
        """A schedule is made."""
        self._made.append((weakref.ref(schedule), self._place()))

    def found(self, steps: int, batches: int) -> Iterator[Misuse]:
        """One that is stepped with each of so many optimizer steps, of epochs of so many batches,
        longer than it waits. What comes after the last step is not over."""
        for known, place in self._made:
            schedule = known()
            if schedule is None or steps < _LEAST_STEPS or schedule.patience >= batches:
                continue
            if schedule.last_epoch in (steps - 1, steps):
                yield Misuse("plateau_by_batch", (str(schedule.patience), str(batches)), place)
                return


class Restored:
    """Follows learning rates that a state brings back, in place of those that an optimizer was made
    with; ``place`` gives the line that is running."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        self._place = place
        self._rates: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
        self._loading: weakref.ref[Any] | None = None
        #: By optimizer: the rate it was made with, the one that was loaded, the line.
        self._loaded: weakref.WeakKeyDictionary[Any, tuple[Any, Any, str | None]] = (
            weakref.WeakKeyDictionary()
        )
        self._found: Misuse | None = None
        #: Rates that a schedule had brought an optimizer to, whose state was loaded, and those that
        #: it had begun from.
        self._scheduled: weakref.WeakKeyDictionary[Any, tuple[float, float]] = (
            weakref.WeakKeyDictionary()
        )
        #: Optimizers that made steps.
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()

        #: All schedules, by the observer that is told of them.
        self.schedules: Sequence[Schedule] = ()

    def found(self) -> tuple[Misuse, ...]:
        """The optimizer's class, the rate that it was made with, that of its state; a schedule that
        begins from its start, the rate that the state's had come to, the one it began from."""
        misuses = [] if self._found is None else [self._found]
        within = {id(part) for each in self.schedules for part in parts_of_schedule(each.alive)}
        for schedule in self.schedules:
            rates = (
                self._scheduled.get(optimizer := _optimizer_of(schedule))
                if schedule.alive
                else None
            )
            if rates is None or id(schedule.alive) in within or optimizer not in self._begun:
                continue
            if not schedule.before and not isinstance(schedule.alive, ReduceLROnPlateau):
                told = type(schedule.alive).__name__, f"{rates[0]:.3g}", f"{rates[1]:.3g}"
                return (*misuses, Misuse("schedule_restarted", told, schedule.place))
        return tuple(misuses)

    def loading(self, optimizer: Any) -> None:
        """``optimizer.load_state_dict(…)`` is called."""
        self._rates[optimizer] = [group.get("lr") for group in optimizer.param_groups]
        self._loading = weakref.ref(optimizer)

    def loaded(self) -> None:
        """The optimizer's state is loaded."""
        optimizer = self._loading() if self._loading is not None else None
        if optimizer is None:
            return
        before = self._rates.pop(optimizer, [])
        for group in optimizer.param_groups:
            rate, first = group.get("lr"), group.get("initial_lr")
            if isinstance(rate, float) and isinstance(first, float) and rate != first:
                self._scheduled[optimizer] = rate, first
        for rate, group in zip(before, optimizer.param_groups, strict=False):
            own = group.get("lr")
            if isinstance(rate, float) and isinstance(own, float) and rate != own:
                self._loaded[optimizer] = rate, own, self._place()
                return

    def begins(self, optimizer: Any) -> None:
        """An optimizer is about to make its first step. What a schedule made of a rate, in this run
        or the one before, is to go on; and a script may set the rate itself: another number."""
        self._begun.add(optimizer)
        for schedule in self.schedules:
            schedule.begins(optimizer)
        rate, own, place = self._loaded.get(optimizer, (None, None, None))
        groups = optimizer.param_groups if rate is not None else ()
        is_as_loaded = any(group.get("lr") is own for group in groups)
        if is_as_loaded and not any("initial_lr" in group for group in groups):
            told = type(optimizer).__name__, f"{rate:g}", f"{own:g}"
            self._found = Misuse("rate_restored", told, place)


def of_schedules(
    schedules: Sequence[Schedule], optimizers: Iterable[Any], *, asks: bool
) -> tuple[Misuse, ...]:
    """Schedules without the effect that they are meant to have, of optimizers that made steps;
    whether their functions may be asked (of a real run nothing is called)."""
    misuses, stepped = [], weakref.WeakSet(optimizers)  # a list would hold one that nobody has
    if (left := schedule_left_behind(schedules, stepped)) is not None:
        misuses.append(Misuse("schedule_left_behind", left[:2], left[2]))
    if (factor := rate_as_factor(schedules if asks else (), stepped)) is not None:
        told = f"{factor[0]:.2g}", f"{factor[1]:.2g}", f"{factor[0] * factor[1]:.2g}"
        misuses.append(Misuse("rate_times_rate", told, factor[2]))
    if (early := stepped_first(schedules, stepped)) is not None:
        misuses.append(Misuse("schedule_first", (type(early.alive).__name__,), early.place))
    return tuple(misuses)


def _optimizer_of(schedule: Schedule) -> Any | None:
    return getattr(schedule.alive, "optimizer", None)


def _is_held(optimizer: Any) -> bool:
    """Has anything of the script the optimizer, but schedules? Variables of its functions, objects,
    containers do."""
    if threading.current_thread() is not threading.main_thread():
        return True  # the variables of another thread's functions are not read
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_own = frame.f_globals.get("__name__", "").startswith(_NO_OWNERS)
        if not is_own and any(local is optimizer for local in locals_of(frame).values()):
            return True
        frame = frame.f_back
    for holder in gc.get_referrers(optimizer):
        if isinstance(holder, FrameType | CellType | MethodType) or holder is sys._getframe():
            continue
        owners = gc.get_referrers(holder) if type(holder) is dict else [holder]
        of_object = [
            referrer for referrer in owners if getattr(referrer, "__dict__", None) is holder
        ]
        for owner in of_object or [holder]:
            if not f"{type(owner).__module__}.".startswith(_NO_OWNERS):
                return True
    return False
