"""A model that is called again and again without gradients, as images are sampled by denoising or
losses averaged over batches that a function draws: once memory repeats, its calls are counted and
not made, and the script goes on to what comes after."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch

from trainfit.scripts.caches import signature_of
from trainfit.scripts.phases.stand_in_calls import StandInCall, TensorOutline, state_as_it_was
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation
from trainfit.torch_private.operators import map_leaves

#: Calls in a row that are alike in what they are given and leave, before the others are left out;
#: and models that take turns (two networks, a model and what guides it) at the most.
_ALIKE: Final = 6
_TURNS: Final = 3
#: Bytes that may come from the host with each call: the number of its step.
_TOLD: Final = 4096


#: Shapes of the tensors that a call is given, and what it is told in words.
_Given = tuple[Any, ...]


class _ModelCall:
    """A call that was made: of which model, given and leaving what."""

    def __init__(
        self, module: torch.nn.Module, given: _Given, new: bool, requested: int, allocated: int
    ) -> None:
        self.module, self.given, self.is_new = weakref.ref(module), given, new
        self._requested, self._allocated = requested, allocated

    def is_like(self, other: _ModelCall) -> bool:
        """Was as much in use at the end of both? A few bytes more of what the loop keeps, as the
        token that it adds to its text, use no more memory until they fill a block."""
        return (
            self.module() is other.module()
            and (self.given, self.is_new) == (other.given, other.is_new)
            and (self._requested == other._requested or self._allocated == other._allocated)
        )


class SampledLoop:
    """Tells a loop of calls that are alike, and makes no more of them than show its memory.

    The calls are without gradients, none is fed by a DataLoader, each is given new tensors, and as
    much is in use after each. A call that is none of these (another model's, one given other
    shapes, one of training) is made.

    Args:
        simulation: where the calls are made.
        is_text: is a text generated now, of which something else counts the calls?
        is_inference: are calls what the run counts? What the host feeds is then a step of its own.
    """

    def __init__(
        self, simulation: Simulation, is_text: Callable[[], bool], is_inference: bool
    ) -> None:
        self._simulation, self._is_text, self._is_inference = simulation, is_text, is_inference
        self._depth = 0
        self._calls: list[_ModelCall] = []
        self._numbers: set[int] = set()
        self._left: list[_LeftOut] = []
        self._has_left = False
        self._patches = PatchSet()
        self.was_left_out = False
        """Was the last call of a model not made?"""
        self.is_over: Callable[[], None] = lambda: None
        """Called before the first call of a loop that comes once more, after calls of others."""

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored: then models are as they were."""
        patches.see_calls(self._enter, self._leave, with_kwargs=True)
        patches.on_restore(self._restore)

    @property
    def goes_on(self) -> bool:
        """Are the last calls of a loop that may be one, or are its calls left out?"""
        return bool(self._left) or len(self._calls) > 1

    @property
    def leaves_out(self) -> bool:
        """Are calls left out?"""
        return bool(self._left)

    def forget(self) -> None:
        """A DataLoader has given a batch: the next call has nothing to do with those before."""
        self._calls.clear()
        self._numbers.clear()
        self._restore()

    def _enter(self, *_: Any) -> None:
        if not self._depth:
            self.was_left_out = False
        self._depth += 1

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, found: Any = None) -> None:
        """PyTorch gives a hook of all modules no ``kwargs`` where the call failed: ``None`` is in
        its place."""
        self._depth = max(0, self._depth - 1)
        if self._depth or kwargs is None:
            return
        with contextlib.suppress(Exception):
            if not self.was_left_out:
                self._made(module, args, kwargs, found)

    def _made(self, module: torch.nn.Module, args: Any, kwargs: Any, found: Any) -> None:
        """A call was made."""
        if torch.is_grad_enabled() or self._is_text():
            self.forget()
            return
        if self._left:
            self._has_left = True  # what comes after the loop
            return
        is_fed, is_new = self._sources((*args, *kwargs.values()))
        if is_fed and self._is_inference:
            self._calls.clear()
            return
        in_use = self._simulation.allocator
        self._calls.append(
            _ModelCall(
                module,
                _given(args, kwargs),
                is_new,
                in_use.requested_bytes,
                in_use.allocated_bytes,
            )
        )
        del self._calls[: -_ALIKE * _TURNS]
        for turns in range(1, _TURNS + 1):
            last = self._calls[-_ALIKE * turns :]
            pairs = zip(last[turns:], last[:-turns], strict=True)
            is_whole = len(last) == _ALIKE * turns and any(call.is_new for call in last)
            if is_whole and all(a.is_like(b) for a, b in pairs):
                self._leave_out(last[-turns:], found if turns == 1 else None)
                return

    def _sources(self, given: tuple[Any, ...]) -> tuple[bool, bool]:
        """Is a call given more of the host's than a number, and something that no call before was
        given: in an inference, of what the device made?"""
        tensors = [tensor for tensor in given if isinstance(tensor, torch.Tensor)]
        numbers = {self._simulation.allocation_of(tensor): tensor for tensor in tensors}
        new = numbers.keys() - self._numbers
        self._numbers |= {number for number in new if number is not None}
        fed = [n for n in new if n is None or self._simulation.is_copied(n)]
        return any(numbers[n].nbytes > _TOLD for n in fed), len(fed) < len(new) or (
            bool(new) and not self._is_inference
        )

    def _leave_out(self, turn: list[_ModelCall], found: Any) -> None:
        self._has_left = False
        self._patches.set(torch.nn.Module, "__getstate__", state_as_it_was)
        for call in turn:
            module = call.module()
            if module is not None:
                self._left.append(_LeftOut(module, call.given, self._asked, found))
        self._simulation.engine.assume(
            f"the calls of {', '.join(out.name for out in self._left)} that "
            f"follow {_ALIKE} like them, in a loop without batches, need the same memory"
        )

    def _asked(self) -> bool:
        """May a call be left out that is like those before? One of training may not."""
        if torch.is_grad_enabled():
            self.forget()
            return False
        if self._has_left:
            self._has_left = False
            self.is_over()
        self.was_left_out = True
        return True

    def _restore(self) -> None:
        for out in self._left:
            out.remove()
        self._left.clear()
        self._patches.restore()


def _given(args: Any, kwargs: Any) -> _Given:
    named = [*enumerate(args), *sorted(kwargs.items())]
    told = tuple((name, each) for name, each in named if isinstance(each, bool | str))
    return signature_of(args, kwargs), tuple(sorted(kwargs)), told


class _LeftOut(StandInCall):
    """Gives tensors of the shapes that a call gave."""

    def __init__(
        self,
        module: torch.nn.Module,
        given: _Given,
        may_be: Callable[[], bool],
        found: Any,
    ) -> None:
        self._given, self._may_be = given, may_be
        self._outline = None if found is None else _outline(found)
        super().__init__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _given(args, kwargs) != self._given or not self._may_be():
            return self.forward(*args, **kwargs)
        if self._outline is None:
            found = self.forward(*args, **kwargs)
            self._outline = _outline(found)
            return found
        return map_leaves(TensorOutline, TensorOutline.made, self._outline)


def _outline(found: Any) -> Any:
    return map_leaves(torch.Tensor, TensorOutline, found)
