"""When a training step is over: the one definition, of simulated, real and watched runs.

A step is one period of the training loop: it is over when every optimizer that is used has stepped
at least once since the last one was. So it is

- the optimizer's step where there is one, with all passes that it accumulates; all evaluations of
  its closure (L-BFGS) are within it, and a step that ``GradScaler`` leaves out is one;
- the step of the last of several optimizers that step together or in turns;
- five steps of a critic and the step of its generator (WGAN);
- the first of an optimizer's steps for parts of its parameters (ZeRO), without a pass in between.

Without an optimizer, a step ends where the next iteration begins after a pass that made gradients
(a backward pass, or ``torch.autograd.grad`` by the parameters): where the next batch is fetched;
where none is, where the next model is called; where none is called, with the next pass. So it is,
too, where zero_grad() has dropped the gradients of many passes and no optimizer has stepped: the
call of ``step`` was forgotten.

Which optimizers are used shows in the first period only when it is over. Until then, one that was
made and has not stepped is awaited if the loop has called what it trains, or given that a gradient.
One that appears later ends the step that it appears in, and from then on the periods. One that is
not used any more is awaited no longer; one that comes when the others have long stepped without it
begins another training.

Free of PyTorch: optimizers and models are what the hooks give, and are never kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any, Final

#: Steps of one optimizer within a period, without one of another that is awaited: then that is not
#: used. Twice the longest period that was seen, if that is more.
_PATIENCE: Final = 32
#: … up to periods of so many steps: a loop that trains its models an epoch each in turns has steps
#: within these epochs.
_LONGEST_PERIOD: Final = 256
#: Periods after which looking for optimizers that have not stepped yet ends.
_LOOKS: Final = 32
#: Periods without an optimizer after which it is of another training.
_LATE: Final = 20
#: Passes without an optimizer's step after which iterations count as steps: where the script has no
#: optimizer that PyTorch knows, and where it has one that it may accumulate for.
_WITHOUT_OPTIMIZER: Final = 8
_ACCUMULATED: Final = 1024
#: Steps before all passes that are none: more are of a script that makes no gradients.
_RESUMED: Final = 10_000
#: Calls of zero_grad() that each drop the gradients of a pass, before any optimizer has stepped,
#: after which none is awaited: nothing is accumulated so.
NEVER_STEPS: Final = 64


class _Used:
    """An optimizer that is used: its steps in this period, and when (in steps of all) its last."""

    __slots__ = ("elements", "last", "name", "optimizer", "parts", "passes", "times")

    def __init__(self, optimizer: Any, now: int) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        self.elements = _elements(optimizer)
        self.times, self.last = 0, now
        self.passes, self.parts = -1, set[int]()

    def is_rest(self, passes: int) -> bool:
        """Is its step the rest of its last one, of other parameters and without a pass in between?
        DeepSpeed's ZeRO steps once for each of its groups of parameters."""
        part = 0
        for group in getattr(self.optimizer(), "param_groups", ()):
            for each in group["params"]:
                part = id(each)
                break
            if part:
                break
        if self.passes != passes or part in self.parts:
            self.passes, self.parts = passes, {part}
            return False
        self.parts.add(part)
        return True


class StepCycle:
    """Told by the hooks of a run what its training does; says where a step is over.

    Some microseconds in each step of a loop with one optimizer.
    """

    def __init__(self) -> None:
        self.optimizer_steps = 0
        """Steps of optimizers so far, those that were left out included."""
        self.has_optimizer = False
        """Was an optimizer made, or did one step?"""
        self.restarted = False
        """Did the latest step of an optimizer begin another training?"""
        self.makes_others = False
        """Are optimizers that are made now none of the script's?"""
        self.counts_every_pass = False
        """Is it known that the script has no optimizer?"""
        self.partial_steps = 0
        """Steps until all optimizers had stepped that take turns: parts of the first period."""
        self._used: dict[int, _Used] = {}
        self._waiting: dict[int, _Used] = {}
        self._left: dict[int, _Used] = {}
        self._unseen: dict[int, weakref.ref[Any]] = {}
        self._owners: dict[int, int] | None = None
        self._called: set[int] = set()
        self._from_before: set[int] = set()
        self._ignored: dict[int, weakref.ref[Any]] = {}
        self._running: list[tuple[int, int]] = []  # ids of optimizers, and of frames
        self._patience = _PATIENCE
        self._looks = self._alike = self._ended = 0
        self._passes = self._passes_alone = self._passes_of_all = 0
        self._by_batches = self._by_calls = False
        self._resumed = 0
        self._dropped = self._passes_at_drop = 0

    # -- optimizers ----------------------------------------------------------------------------

    def made(self, optimizer: Any, *, before: bool = False) -> None:
        """An optimizer is made, or was ``before`` the run: then gradients may be there that an
        earlier training left."""
        self.has_optimizer = True
        if before:
            self._from_before.add(id(optimizer))
        else:
            self._from_before.discard(id(optimizer))
        self._unseen[id(optimizer)] = weakref.ref(optimizer)
        self._owners, self._looks = None, 0

    def constructed(self, optimizer: Any) -> None:
        """It has its parameters now: what was made of the same ones before, and has not stepped, is
        awaited no longer. A library may put an optimizer of its own in the user's place, and give
        that other parameters later (Accelerate with DeepSpeed's offload)."""
        if self.makes_others:
            return
        own = set(map(id, _parameters(optimizer)))
        for key, known in list(self._unseen.items()):
            earlier = known()
            if earlier is not optimizer and not own.isdisjoint(map(id, _parameters(earlier))):
                del self._unseen[key]

    def ignore(self, optimizer: Any) -> None:
        """The steps of ``optimizer`` are none of the script's."""
        key, ignored = id(optimizer), self._ignored
        ignored[key] = weakref.ref(optimizer, lambda _: ignored.pop(key, None))
        self._unseen.pop(key, None)

    @property
    def awaits(self) -> bool:
        """Are there optimizers that have not stepped yet? Then :meth:`called` is to be told."""
        return bool(self._unseen)

    def called(self, parameters: Iterable[Any]) -> None:
        """A module with these ``parameters`` is called."""
        if self._owners is None:
            self._owners = {
                id(parameter): key
                for key, known in self._unseen.items()
                for parameter in _parameters(known())
            }
        owners = self._owners
        self._called.update(
            owners[id(parameter)] for parameter in parameters if id(parameter) in owners
        )

    def enter(self, optimizer: Any, frame: FrameType) -> None:
        """A ``step`` begins, in ``frame``."""
        while self._running and not _is_within(frame.f_back, self._running[-1][1]):
            self._running.pop()  # it was left by an exception
        self._running.append((id(optimizer), id(frame)))

    def leave(self, optimizer: Any) -> bool:
        """An optimizer's ``step`` is over; was it one that no other optimizer's ``step`` calls?"""
        if not self._running or self._running[-1][0] != id(optimizer):
            return False
        self._running.pop()
        return not (self._running or (self._ignored and id(optimizer) in self._ignored))

    def zeroed(self) -> int:
        """zero_grad() is called before any optimizer has stepped; how often it has dropped the
        gradients of a pass so far."""
        if self._passes_of_all > self._passes_at_drop:
            self._passes_at_drop = self._passes_of_all
            self._dropped += 1
        return self._dropped

    @property
    def depth(self) -> int:
        """Steps of optimizers that go on now, one within the other."""
        return len(self._running)

    def stepped(self, optimizer: Any) -> bool:
        """An outermost step of ``optimizer`` was made or left out; is a training step over?"""
        self.optimizer_steps += 1
        self._passes_alone = 0
        self.has_optimizer, self.restarted = True, False
        key = id(optimizer)
        used = self._used.get(key)
        if used is None or used.optimizer() is not optimizer:
            used = self._meet(optimizer)
        used.last = self.optimizer_steps
        if used.is_rest(self._passes_of_all):
            return False
        used.times += 1
        if self._waiting:
            self._waiting.pop(key, None)
        if self._waiting:
            self._give_up(used.times)
        if self._waiting or (self._unseen and self._expects()):
            return False
        self._begin()
        return True

    def only_resumes(self, optimizer: Any) -> bool:
        """Does an outermost step change nothing, before all passes and calls of the model? A script
        that resumes may step an optimizer and its schedule as often as the run before did."""
        if self._passes_of_all or self._used or self._resumed >= _RESUMED:
            return False
        if id(optimizer) in self._called or id(optimizer) in self._from_before:
            return False
        if any(parameter.grad is not None for parameter in _parameters(optimizer)):
            return False
        self._resumed += 1
        return True

    @property
    def optimizer(self) -> str:
        """The class of the one that trains the most elements; empty: none has stepped."""
        largest = max(self._used.values(), key=lambda used: used.elements, default=None)
        return "" if largest is None else largest.name

    # -- without an optimizer ------------------------------------------------------------------

    def next_batch(self) -> bool:
        """The training's next batch is fetched; is a step over with that?"""
        self._by_batches = True
        return self._next_iteration()

    def next_call(self) -> bool:
        """A model that trains is called by the loop; is a step over before that?"""
        self._by_calls = True
        return not self._by_batches and self._next_iteration()

    def next_pass(self) -> bool:
        """A pass that makes gradients of parameters begins; is a step over before that?"""
        over = not (self._by_batches or self._by_calls) and self._next_iteration()
        self._passes_of_all += 1
        if not self._running:
            self._passes += 1
            self._passes_alone += 1
        return over

    def passed(self) -> None:
        """A pass that makes gradients of parameters begins; optimizers tell the steps."""
        self._passes_of_all += 1

    def is_pass(self, inputs: Any, create_graph: Any) -> bool:
        """Does ``torch.autograd.grad`` by ``inputs`` make the gradients that the training uses?

        With an optimizer those of backward passes are. A gradient that is differentiated again (a
        gradient penalty, the inner steps of MAML) is part of the loss, and one by what was computed
        (activations) is none of parameters.
        """
        if self.has_optimizer or create_graph:
            return False
        given = inputs if isinstance(inputs, tuple | list) else (inputs,)
        return any(getattr(each, "is_leaf", False) for each in given)

    def is_engine_pass(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Is it a call of autograd's engine, for a backward pass or ``torch.autograd.grad``?"""
        if kwargs.get("accumulate_grad"):
            return True
        # Outputs, their gradients, retain_graph, create_graph, inputs.
        return len(args) > 4 and self.is_pass(args[4], args[3])

    def _next_iteration(self) -> bool:
        if not self._passes or self._running:
            return False
        known = self.has_optimizer or not self.counts_every_pass
        accumulates = self.has_optimizer and self._dropped < NEVER_STEPS
        most = _ACCUMULATED if accumulates else _WITHOUT_OPTIMIZER
        if known and self._passes_alone < most:
            return False
        self._begin()
        return True

    # -- the end -------------------------------------------------------------------------------

    @property
    def is_unfinished(self) -> bool:
        """Has a step begun that is not over? The script's end ends it where it was the only one."""
        return any(used.times for used in self._used.values()) or (
            bool(self._passes) and not self.has_optimizer and self.counts_every_pass
        )

    # -- which optimizers are used ---------------------------------------------------------------

    def _begin(self) -> None:
        """A step is over, the next one begins."""
        used = self._used
        if len(used) > 1:
            maximum = max(each.times for each in used.values())
            self._patience = max(self._patience, 2 * min(maximum, _LONGEST_PERIOD))
            self._waiting = dict(used)
        for each in used.values():
            each.times = 0
        self._alike += 1
        self._ended += 1
        self._passes = 0
        if self._called:
            self._called.clear()

    def _meet(self, optimizer: Any) -> _Used:
        """An optimizer steps that was not used so far, or not any more."""
        key = id(optimizer)
        if self._unseen.pop(key, None) is not None:
            self._owners = None
        known = self._left.pop(key, None)
        alive = [each for each in self._used.values() if each.optimizer() is not None]
        if known is not None and known.optimizer() is optimizer:
            gap = self.optimizer_steps - known.last
            if gap <= _LONGEST_PERIOD:
                self._patience = max(self._patience, 2 * gap)
        elif self._used and (not alive or self._alike >= _LATE):
            self.restarted = True
            for each in list(self._used):
                self._leave_out(each)
        if len(alive) == len(self._used):
            self._waiting.clear()  # the last to appear ends the periods
            if self._used and self._ended:
                self.partial_steps = self._ended + 1
        else:  # in the place of one that is gone: of the inner steps of MAML, say
            for each in [each for each, used in self._used.items() if used.optimizer() is None]:
                self._leave_out(each)
        return self._use(optimizer)

    def _use(self, optimizer: Any) -> _Used:
        used = self._used[id(optimizer)] = _Used(optimizer, self.optimizer_steps)
        self._alike = 0
        return used

    def _leave_out(self, key: int) -> None:
        used = self._used.pop(key)
        self._waiting.pop(key, None)
        if used.optimizer() is not None:
            self._left[key] = used

    def _give_up(self, times: int) -> None:
        """Await no longer what is gone, or not used any more: another stepped so many ``times``."""
        while self._waiting:
            key, first = next(iter(self._waiting.items()))
            if first.optimizer() is not None and times <= self._patience:
                return
            self._leave_out(key)

    def _expects(self) -> bool:
        """Is one of the optimizers to step yet, in this period?"""
        self._looks += 1
        own = {id(p) for used in self._used.values() for p in _parameters(used.optimizer())}
        for key, known in list(self._unseen.items()):
            optimizer = known()
            parameters = _parameters(optimizer)
            if optimizer is None:
                del self._unseen[key]
            elif own.isdisjoint(map(id, parameters)) and (
                key in self._called
                or (
                    key not in self._from_before
                    and any(parameter.grad is not None for parameter in parameters)
                )
            ):
                del self._unseen[key]
                self._waiting[key] = self._use(optimizer)
        if self._looks >= _LOOKS:
            self._unseen.clear()
        self._owners = None
        return bool(self._waiting)


def _parameters(optimizer: Any) -> list[Any]:
    groups = getattr(optimizer, "param_groups", ())
    return [each for group in groups for each in group["params"] if each.requires_grad]


def _elements(optimizer: Any) -> int:
    try:
        return sum(int(parameter.numel()) for parameter in _parameters(optimizer))
    except (TypeError, ValueError, RuntimeError):  # of a parameter that has no shape yet
        return 0


def _is_within(frame: FrameType | None, outer: int) -> bool:
    """Is the frame with the id ``outer`` one of those that lead to ``frame``?"""
    while frame is not None:
        if id(frame) == outer:
            return True
        frame = frame.f_back
    return False
