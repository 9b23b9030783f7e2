"""Identifies the optimizer whose steps are the training's."""

from __future__ import annotations

import weakref
from typing import Any


class MainOptimizer:
    """The optimizer whose steps count: the first one alive (a search by trial makes one for
    each batch size)."""

    def __init__(self) -> None:
        self._first: weakref.ref[Any] | None = None

    def before_step(self, optimizer: Any) -> bool:
        """``optimizer`` is about to make a step; is it the first to, and the one from now on?"""
        if self._first is not None and self._first() is not None:
            return False
        self.choose(optimizer)
        return True

    def choose(self, optimizer: Any) -> None:
        """Let the steps of ``optimizer`` count."""
        self._first = weakref.ref(optimizer)

    def made(self, optimizer: Any) -> bool:
        """Is a step of ``optimizer`` one that counts?"""
        return self._first is not None and self._first() is optimizer
