"""The largest of what a script trains: the model that tells the samples of a step, and the
optimizer that ends it."""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch

from trainfit.scripts.watch.batch_sizes import samples_in

#: Steps of other optimizers after which the main one is taken to be done with.
_STALE: Final = 20


class CalledModels:
    """Outermost modules that were called with gradients since :meth:`begin`."""

    def __init__(self) -> None:
        self._elements: weakref.WeakKeyDictionary[torch.nn.Module, int]
        self._elements = weakref.WeakKeyDictionary()
        #: In which a recurrent network or an attention wants the time before the batch: whether
        #: the model itself does is not told.
        self._timed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.samples = 0
        """First dimensions of what the largest model was given, their sum; 0: not known."""
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
            if any(getattr(each, "batch_first", True) is False for each in module.modules()):
                self._timed.add(module)
        return found

    def note(self, module: torch.nn.Module, given: tuple[Any, ...], sized: bool) -> bool:
        """A call; ``sized`` where nobody else tells the samples. Is it the largest so far?"""
        elements = self.elements(module)
        is_largest = elements > self._largest
        if is_largest:
            self._largest, self.samples = elements, 0
        if sized and given and elements == self._largest and module not in self._timed:
            self.samples += samples_in(given[0]) or 0
        return is_largest


class MainOptimizer:
    """The optimizer with the most parameters, of those that are used."""

    def __init__(self) -> None:
        self._elements: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._main: weakref.ref[Any] | None = None
        self._others = self._steps = 0

    def is_main(self, optimizer: Any) -> tuple[bool, bool]:
        """Does this step of ``optimizer`` end a training step? And does a training begin with
        it, another than before: its main optimizer is gone, or not used any more?"""
        main = None if self._main is None else self._main()
        if main is optimizer:
            self._others = 0
            self._steps += 1
            return True, False
        self._others += 1
        # A larger one that comes late is of another model; a GAN's two begin together.
        is_late = self._steps >= _STALE and optimizer not in self._elements
        elements = self._count(optimizer)
        gone = self._main is not None and (main is None or self._others >= _STALE or is_late)
        replaces = main is None or self._others >= _STALE or elements > self._count(main)
        if replaces:
            self._main = weakref.ref(optimizer)
            self._others = self._steps = 0
            return True, gone
        return False, False

    @property
    def name(self) -> str:
        """The class of the main one; empty: none has stepped."""
        main = None if self._main is None else self._main()
        return "" if main is None else type(main).__name__

    def _count(self, optimizer: Any) -> int:
        found = self._elements.get(optimizer)
        if found is None:
            groups = optimizer.param_groups
            found = sum(each.numel() for group in groups for each in group["params"])
            self._elements[optimizer] = found
        return found
