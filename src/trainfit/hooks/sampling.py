"""Samples of a distribution through which a loss is meant to reach what computed it: ``sample()``
gives them without a graph, ``rsample()`` with one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

#: Distributions that are known at once.
_MOST: Final = 64
#: Steps that show it.
_STEPS: Final = 2


class _Sampled(NamedTuple):
    distribution: weakref.ref[Any]
    name: str
    place: str | None


class Samples:
    """Follows distributions within a step: one that is sampled without a graph, whose divergence
    is part of the loss, and whose log-probabilities nobody asks for (as policies do)."""

    def __init__(self) -> None:
        self._sampled: dict[int, _Sampled] = {}
        self._diverging: dict[int, _Sampled] = {}
        self._steps = 0

    def sampled(self, distribution: Any, place: Callable[[], str | None]) -> None:
        """``distribution.sample()`` is called."""
        mean = getattr(distribution, "loc", None)
        if not isinstance(mean, torch.Tensor) or mean.grad_fn is None:
            return
        if torch.is_grad_enabled() and len(self._sampled) < _MOST:
            known = weakref.ref(distribution), type(distribution).__name__, place()
            self._sampled[id(distribution)] = _Sampled(*known)

    def asked(self, distribution: Any) -> None:
        """``distribution.log_prob(…)`` is called, or ``rsample()``."""
        for known in (self._sampled, self._diverging):
            known.pop(id(distribution), None)

    def compared(self, *distributions: Any) -> None:
        """Their divergence is computed."""
        for each in distributions:
            known = self._sampled.get(id(each))
            if known is not None and known.distribution() is each and torch.is_grad_enabled():
                self._diverging[id(each)] = known

    def step(self) -> tuple[str, str | None] | None:
        """A step begins to use its gradients: the name of such a distribution, and where it is
        sampled."""
        found = list(self._diverging.values())
        self._sampled.clear()
        self._diverging.clear()
        if not found:
            return None
        self._steps += 1
        return (found[0].name, found[0].place) if self._steps >= _STEPS else None
