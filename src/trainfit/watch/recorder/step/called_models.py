"""The models that a step calls to train: the largest of them tells how many samples there are."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from trainfit.scripts.watch.batch_sizes import samples_in


class CalledModels:
    """Outermost modules that were called with gradients since :meth:`begin`."""

    def __init__(self) -> None:
        self._elements: weakref.WeakKeyDictionary[torch.nn.Module, int]
        self._elements = weakref.WeakKeyDictionary()
        self.samples = 0
        """First dimensions of what the largest model was given, their sum."""
        self._largest = 0

    def begin(self) -> None:
        """A step begins."""
        self.samples = self._largest = 0

    def elements(self, module: torch.nn.Module) -> int:
        """Elements of its parameters that are trained, as when it was first seen."""
        found = self._elements.get(module)
        if found is None:
            found = sum(each.numel() for each in module.parameters() if each.requires_grad)
            self._elements[module] = found
        return found

    def note(self, module: torch.nn.Module, given: tuple[Any, ...], sized: bool) -> bool:
        """A call; ``sized`` where nobody else tells the samples. Is it the largest so far?"""
        elements = self.elements(module)
        is_largest = elements > self._largest
        if is_largest:
            self._largest, self.samples = elements, 0
        if sized and given and elements == self._largest:
            self.samples += samples_in(given[0]) or 0
        return is_largest
