"""One optimizer as its first steps show it: which tensors get gradients, whether those are of
earlier steps, its learning rates."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch

from trainfit.hooks.losses import shape_of
from trainfit.hooks.owners import tensors_of
from trainfit.hooks.schedules import VANISHED
from trainfit.results.runs.learning import LEAST_HALF
from trainfit.torch_private.tensors import version

#: Steps that are looked at one by one; of later ones the 8th, the 16th and so on.
FIRST_LOOKS: Final = 4


class ObservedOptimizer:
    """What was seen of one optimizer."""

    def __init__(self, optimizer: Any) -> None:
        tensors = tensors_of(optimizer)
        self.steps = 0
        self.looks = 0
        self.was_due = False
        #: Had its last step a backward pass of its own? Later ones of a CUDA graph have none.
        self.had_passes = False
        self.kept = self.again = 0
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
        return number <= FIRST_LOOKS or not number & (number - 1)

    def will_be_due(self) -> bool:
        return self.steps < FIRST_LOOKS

    def keeps(self, added: int | None, passes: int, changes: int) -> bool:
        """Are the gradients of its last step in those that it is about to use? ``added`` is what
        :meth:`added` says of these; ``passes`` and ``changes`` are those of the whole run."""
        before_passes, before_changes = self._before
        since = passes - before_passes, changes - before_changes
        return not self.zeroed and since[0] > 0 and added == sum(since)

    def over(self, passes: int, changes: int) -> None:
        """Its step is over."""
        self.zeroed, self._before = False, (passes, changes)

    def look(self, optimizer: Any, *, kept: bool, again: bool) -> None:
        """At the gradients that the step is about to use."""
        self.looks += 1
        self.kept += kept
        self.again += again
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


def only_vector(looked: Sequence[ObservedOptimizer], names: Mapping[int, str]) -> str | None:
    """The only tensor that is trained next to frozen ones, where it has one dimension."""
    trained = [each for seen in looked for each in seen.trained()]
    if len(trained) != 1 or not any(seen.frozen for seen in looked):
        return None
    (key, shape), *_ = trained
    return names.get(key, shape) if "×" not in shape else None


def steps_at_zero(looked: Sequence[ObservedOptimizer]) -> int:
    """Steps of each optimizer, where every one of them had a learning rate of 0."""
    if any(seen.zero_rates < seen.looks for seen in looked):
        return 0
    return min((seen.zero_rates for seen in looked), default=0)


def vanished_rate(looked: Sequence[ObservedOptimizer]) -> float | None:
    """The last learning rate of each optimizer, where it has been next to nothing for looks."""
    if not looked or any(len(seen.vanished) < 2 for seen in looked):
        return None
    return max(seen.vanished[-1] for seen in looked)


def _is_zero(rate: Any) -> bool:
    if isinstance(rate, torch.Tensor):
        return rate.device.type == "cpu" and float(rate) == 0
    return bool(rate == 0)
