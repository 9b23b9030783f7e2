"""One optimizer as its first steps show it: which tensors get gradients, whether those are of
earlier steps, its learning rates; and the micro-batches whose gradients a step adds up."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from trainfit.hooks.losses import shape_of
from trainfit.hooks.owners import tensors_of
from trainfit.hooks.schedules import VANISHED
from trainfit.results.runs.learning import LEAST_HALF, Misuse
from trainfit.torch_private.operators import version

#: Steps that are looked at one by one; of later ones the 8th, the 16th and so on.
FIRST_LOOKS: Final = 4
#: Steps that show how many micro-batches each has, and those that clip the gradients of each.
_LEAST_ALIKE: Final = 3
_LEAST_CLIPPED: Final = 2
#: Passes within one step that show what a closure does.
_LEAST_WITHIN: Final = 2
#: Those after another part of the model is trained than before.
LATER_LOOKS: Final = 3


class ObservedOptimizer:
    """What was seen of one optimizer."""

    def __init__(self, optimizer: Any) -> None:
        tensors = tensors_of(optimizer)
        self.steps = 0
        self._look_until = FIRST_LOOKS
        self.looks = 0
        self.was_due = False
        #: Had its last step a backward pass of its own? Later ones of a CUDA graph have none.
        self.had_passes = False
        self.kept = self.again = 0
        #: The first line that stepped with the gradients of the step before.
        self.again_at: str | None = None
        self.zero_rates = 0
        self.rate_at: str | None = None
        self.largest_rate = 0.0
        self.vanished: list[float] = []
        self.had: dict[int, bool] = {}
        #: The share of denormal numbers in what its last look read, by name.
        self.denormal: dict[str, float] = {}
        self.numbers = sum(tensor.numel() for tensor in tensors)
        self.frozen = sum(not tensor.requires_grad for tensor in tensors)
        self.is_half = any(tensor.dtype == torch.float16 for tensor in tensors)
        self.small_eps = self._small_eps(optimizer) if self.is_half else None
        #: Were its gradients set to zero since its last step, and what happened to any until then:
        #: backward passes and other changes of the whole run.
        self.zeroed = False
        self._before = (0, 0)
        self._shapes: dict[int, tuple[str, int, bool]] = {}
        self._old: tuple[weakref.ref[Any], int] | None = None

    def is_due(self) -> bool:
        """Whether this step is looked at."""
        self.was_due = self.is_next_due
        self.steps += 1
        return self.was_due

    @property
    def is_next_due(self) -> bool:
        """Whether the next step is looked at."""
        number = self.steps + 1
        return number <= self._look_until or not number & (number - 1)

    def pass_over(self) -> bool:
        """A step is over that is not looked at; is the next one?"""
        number = self.steps = self.steps + 1
        number += 1
        return number <= self._look_until or not number & (number - 1)

    def look_again(self) -> None:
        """Look at the next steps one by one: something has changed."""
        self._look_until = self.steps + LATER_LOOKS

    def will_be_due(self) -> bool:
        return self.steps < FIRST_LOOKS

    def keeps(self, added: int | None, passes: int, changes: int) -> bool:
        """Are the gradients of its last step in those that it is about to use? ``added`` is what
        :meth:`added` says of these; ``passes`` and ``changes`` are those of the whole run."""
        before_passes, before_changes = self._before
        since = passes - before_passes, changes - before_changes
        return not self.zeroed and since[0] > 0 and added == sum(since)

    def over(self, passes: int, changes: int) -> None:
        """The optimizer's step is over."""
        self.zeroed, self._before = False, (passes, changes)

    def look(self, optimizer: Any, *, kept: bool, again: str | None) -> None:
        """Look at the gradients that the step is about to use; ``again``: the line, if the step
        before has used them."""
        self.looks += 1
        self.kept += kept
        self.again += again is not None
        self.again_at = self.again_at or again
        for tensor in tensors_of(optimizer):
            key = id(tensor)
            self.had[key] = self.had.get(key, False) or tensor.grad is not None
            if key not in self._shapes:
                self._shapes[key] = shape_of(tensor), tensor.numel(), tensor.requires_grad
        rates = [group.get("lr") for group in optimizer.param_groups]
        self.zero_rates += bool(rates) and all(_is_zero(rate) for rate in rates)
        known = [float(rate) for rate in rates if isinstance(rate, int | float)]
        if known and len(known) == len(rates):
            self.largest_rate = max(self.largest_rate, *known)
            if max(known) < VANISHED * self.largest_rate:
                self.vanished.append(max(known))
            else:
                self.vanished.clear()  # of a schedule that begins again

    def gets(self, optimizer: Any) -> None:
        """Gradients came within the step, of a closure."""
        for tensor in tensors_of(optimizer):
            self.had[id(tensor)] = self.had.get(id(tensor), False) or tensor.grad is not None

    def remember(self, optimizer: Any) -> None:
        """One gradient after the step, with its version: is it used again in the next?"""
        self._old = None
        for tensor in tensors_of(optimizer):
            if tensor.grad is not None:
                self._old = weakref.ref(tensor.grad), version(tensor.grad)
                return

    def added(self, optimizer: Any) -> int | None:
        """How often the remembered gradient was changed since: each backward pass does once, and so
        does whatever unscales or clips; setting it to zero would once more. ``None``: it is gone.
        """
        if self._old is None:
            return None
        gradient, before = self._old[0](), self._old[1]
        if gradient is None or not any(t.grad is gradient for t in tensors_of(optimizer)):
            return None
        return version(gradient) - before

    def is_within(self, tensors: Collection[int]) -> bool:
        """Are all of its tensors among these, by identity?"""
        return all(key in tensors for key in self.had)

    def without(self) -> list[tuple[int, str]]:
        """Tensors that need a gradient and never had one; those without a number are of parameters
        that other ranks hold (FSDP)."""
        return [
            (key, self._shapes[key][0])
            for key, had in self.had.items()
            if not had and self._shapes[key][2] and self._shapes[key][1]
        ]

    def trained(self) -> list[tuple[int, str]]:
        """Tensors that had a gradient, with their shapes."""
        return [(key, self._shapes[key][0]) for key, had in self.had.items() if had]

    def trained_numbers(self) -> int:
        return sum(self._shapes[key][1] for key, had in self.had.items() if had)

    @staticmethod
    def _small_eps(optimizer: Any) -> float | None:
        """An eps that is 0 in float16, in which Adam's step divides where parameters are so."""
        found = [group.get("eps") for group in optimizer.param_groups]
        small = [eps for eps in found if isinstance(eps, float) and 0 < eps <= LEAST_HALF / 2]
        return small[0] if small else None


def has_no_gradients(optimizer: Any) -> bool:
    return all(tensor.grad is None for tensor in tensors_of(optimizer))


def of_trained(looked: Sequence[ObservedOptimizer], names: Mapping[int, str]) -> dict[str, Any]:
    """Facts (:class:`~trainfit.results.runs.learning.LearningFacts`) of what is trained at all."""
    return {
        "trained_vector": _only_vector(looked, names),
        "has_adapters": _has_adapters(looked, names),
        "trained_numbers": sum(optimizer.trained_numbers() for optimizer in looked),
        "all_numbers": sum(optimizer.numbers for optimizer in looked),
    }


def _only_vector(looked: Sequence[ObservedOptimizer], names: Mapping[int, str]) -> str | None:
    """The only tensor that is trained next to frozen ones, where it has one dimension."""
    trained = [each for optimizer in looked for each in optimizer.trained()]
    if len(trained) != 1 or not any(optimizer.frozen for optimizer in looked):
        return None
    (key, shape), *_ = trained
    return names.get(key, shape) if "×" not in shape else None


#: Parts of the names that PEFT and others give to what is trained next to frozen weights.
_ADAPTERS: Final = re.compile(
    r"lora|adapter|prompt|prefix|ia3|vera_|\b(?:hada|lokr|b?oft|hra|bone)_"
)


def _has_adapters(looked: Sequence[ObservedOptimizer], names: Mapping[int, str]) -> bool:
    """Are adapters or prompts trained, next to which the weights are meant to be frozen?"""
    trained = (names.get(key, "") for optimizer in looked for key, _ in optimizer.trained())
    return any(_ADAPTERS.search(name.lower()) for name in trained)


def steps_at_zero(looked: Sequence[ObservedOptimizer]) -> int:
    """Steps of each optimizer, where every one of them had a learning rate of 0."""
    if any(optimizer.zero_rates < optimizer.looks for optimizer in looked):
        return 0
    return min((optimizer.zero_rates for optimizer in looked), default=0)


def vanished_rate(looked: Sequence[ObservedOptimizer]) -> float | None:
    """The last learning rate of each optimizer, where it has been next to nothing for looks."""
    if not looked or any(len(optimizer.vanished) < 2 for optimizer in looked):
        return None
    return max(optimizer.vanished[-1] for optimizer in looked)


def _is_zero(rate: Any) -> bool:
    if isinstance(rate, torch.Tensor):
        return rate.device.type == "cpu" and float(rate) == 0
    return bool(rate == 0)


def kept_of(looked: Sequence[ObservedOptimizer], names: Mapping[int, str]) -> str:
    """A tensor whose gradients are kept while those of other optimizers are not."""
    keeps = [optimizer for optimizer in looked if optimizer.kept > 1]
    if len(keeps) == len(looked):
        return ""
    return next(
        (names.get(key, shape) for optimizer in keeps for key, shape in optimizer.trained()), ""
    )


def where_most(looked: Sequence[ObservedOptimizer]) -> str:
    """The name of what the largest share of denormal numbers was found in."""
    every = [(share, name) for optimizer in looked for name, share in optimizer.denormal.items()]
    return max(every, default=(0.0, ""))[1]


def _first_version(optimizer: Any) -> tuple[int, int] | None:
    """The identity and the version of the first gradient that there is."""
    grads = (tensor.grad for tensor in tensors_of(optimizer) if tensor.grad is not None)
    first = next(grads, None)
    return None if first is None else (id(first), version(first))


def _versions(tensors: Sequence[Any]) -> dict[int, int]:
    """The version of each tensor's gradient, by the tensor's identity."""
    return {id(tensor): version(tensor.grad) for tensor in tensors if tensor.grad is not None}


def _carries_gradients(parameter: Any) -> bool:
    """Has it an attribute that is a tensor of its shape and device, as ``summed_grad`` of Opacus or
    ``main_grad`` of Megatron: gradients that the next step will use?"""
    return any(
        isinstance(tensor, torch.Tensor)
        and (tensor.shape, tensor.device) == (parameter.shape, parameter.device)
        for tensor in getattr(parameter, "__dict__", {}).values()
    )


class Accumulated:
    """The backward passes of the steps that were looked at: those that a step used, and those whose
    gradients were dropped before.

    Attributes:
        used: backward passes since the last step whose gradients are there.
        is_new_pass: whether a pass over the data began since the last step.
        dropped_at: where gradients were dropped since the last step; ``None``: nowhere.
        dropping: where they were in a step that lost some.
    """

    def __init__(self, place: Callable[[], str | None]) -> None:
        self._place = place
        #: Of the first steps, in their order: how many micro-batches each had, by which optimizer,
        #: and the line that made it.
        self._first: list[tuple[int, int, str | None]] = []
        #: Backward passes of this step after which gradients were clipped, and the line; steps with
        #: as many of these as micro-batches.
        self._clips: set[int] = set()
        self._clipped_at: str | None = None
        self._clipped_steps = 0
        self.used = 0
        self.is_new_pass = False
        self.dropped_at: str | None = None
        self.dropping: str | None = None
        #: Of steps, by how many micro-batches they had, and by how many were dropped.
        self._micro_batches: Counter[int] = Counter()
        self._dropped: Counter[int] = Counter()
        #: Versions of gradients that were set to zero last, by identity of their tensors.
        self._zeroed: dict[int, int] = {}
        #: Backward passes in all; those whose gradients were dropped before the first step of a
        #: pass over the data, by step; other steps that lost some, or none.
        self._passes = 0
        self._remainders: list[int] = []
        self._lost = self._losses_else = self._whole_steps = 0
        #: Of the step that goes on: its optimizer, by identity, backward passes before it, and the
        #: version of a gradient then.
        self._entered: tuple[int, int, tuple[int, int] | None] | None = None
        self.zeroed_within = False
        """Were gradients set to zero since the step that goes on began?"""
        #: Passes of a closure that added up their gradients in one step, and the step's line.
        self._added_up: tuple[int, str | None] | None = None

    def enter(self, optimizer: Any, passes: int) -> None:
        """A step begins, after so many backward passes of the run."""
        self.zeroed_within = False
        self._entered = id(optimizer), passes, _first_version(optimizer)

    def leave(self, optimizer: Any, passes: int) -> bool:
        """A step is over: did it make gradients itself, by a closure? Those of several passes that
        nothing has set to zero are a sum."""
        entered, self._entered = self._entered, None
        if entered is None or entered[0] != id(optimizer) or passes <= entered[1]:
            return False
        within, now = passes - entered[1], _first_version(optimizer)
        if (
            within < _LEAST_WITHIN
            or self.zeroed_within
            or now is None
            or self._added_up is not None
        ):
            return True
        # A pass writes into a gradient that is there, or makes it.
        before = entered[2][1] if entered[2] is not None and entered[2][0] == now[0] else -1
        if now[1] - before == within:
            self._added_up = within, self._place()
        return True

    def drop(self, place: str, owner: Any) -> None:
        """Gradients that no step has used are about to be set to zero, by a method of an optimizer
        or a model: not lost where a parameter carries a sum of them itself."""
        is_optimizer = isinstance(owner, torch.optim.Optimizer)
        tensors = tensors_of(owner) if is_optimizer else list(owner.parameters())
        if any(map(_carries_gradients, tensors)):
            return
        self._lost += self.used
        self.used, self.dropped_at = 0, place
        # Zeros are written into each.
        self._zeroed = {key: before + 1 for key, before in _versions(tensors).items()}

    def look(self, passes: int) -> None:
        """A step of so many backward passes begins: did zero_grad() drop gradients that an epoch's
        last batches left?"""
        self._passes += passes
        if not self._lost:
            self._whole_steps += passes > 0
        elif self.is_new_pass and passes > self._lost:
            self._remainders.append(self._lost)
            self.dropping = self.dropped_at
        else:
            self._losses_else += 1
        self._lost, self.is_new_pass = 0, False

    def step(self, micro_batches: int, optimizer: Any) -> None:
        """A step is made that had so many batches of its own."""
        self._micro_batches[micro_batches] += 1
        if len(self._first) < FIRST_LOOKS:
            self._first.append((micro_batches, id(optimizer), self._place()))
        self._clipped_steps += 1 < micro_batches == self.used == len(self._clips)
        self._clips.clear()
        dropped = micro_batches - self.used if self.dropped_at is not None else 0
        others = dropped == micro_batches  # several losses' gradients put together in their place
        if others and any(
            self._zeroed.get(key) != now for key, now in _versions(tensors_of(optimizer)).items()
        ):
            dropped = 0
        self._dropped[max(0, dropped)] += 1
        if dropped > 0:
            self.dropping = self.dropped_at

    def clipped(self) -> None:
        """Gradients are clipped, to a limit that is meant to be one."""
        if self.used:
            self._clips.add(self.used)
            self._clipped_at = self._place()

    def found(self) -> Iterator[Misuse]:
        """A closure that adds gradients up; a first step of one micro-batch where the others have
        several, as of a condition that is true of 0, too; gradients that are clipped after each
        micro-batch of a step."""
        if self._added_up is not None:
            yield Misuse("closure_adds", (str(self._added_up[0]),), self._added_up[1])
        counts = [each for each, *_ in self._first]
        is_one_loop = len({each[1:] for each in self._first}) == 1
        are_alike = len(counts) >= _LEAST_ALIKE and is_one_loop and len({*counts[1:]}) == 1
        if are_alike and counts[0] == 1 < counts[1]:
            yield Misuse("first_step_early", (str(counts[1]),), self._first[0][2])
        if self._clipped_steps >= _LEAST_CLIPPED:
            yield Misuse("clipped_in_parts", (str(self.micro_batches()),), self._clipped_at)

    def micro_batches(self) -> int:
        """The micro-batches of most steps; of as many that differ the fewest: a GradScaler's first
        steps, whose gradients overflow, are left out, and their batches count in the next one."""
        found = max(self._micro_batches.items(), key=lambda each: (each[1], -each[0]), default=None)
        return found[0] if found is not None else 1

    def dropped(self) -> int:
        """The micro-batches of most steps whose gradients are dropped; 0: of a single step none."""
        most = self._dropped.most_common(1)
        return most[0][0] if most and most[0][1] > 1 else 0

    def remainder(self) -> int:
        """The most batches of an epoch's end whose gradients are dropped."""
        is_seldom = len(self._remainders) < self._whole_steps and not self._losses_else
        return max(self._remainders, default=0) if is_seldom else 0

    def remainder_share(self) -> float:
        """The remainders' share of all backward passes."""
        return sum(self._remainders) / max(1, self._passes)
