"""Switches the simulation off in forked children: a loader's workers simulate nothing."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator

_hooks: list[weakref.WeakMethod[Callable[[], None]]] = []
_registered = False
_inherits = False


@contextlib.contextmanager
def inherited() -> Iterator[None]:
    """Children that are forked inside go on with the simulation."""
    global _inherits
    before, _inherits = _inherits, True
    try:
        yield
    finally:
        _inherits = before


def in_child(method: Callable[[], None]) -> None:
    """Call ``method`` in every child that is forked from now on, as long as its object lives."""
    global _registered
    _hooks[:] = [hook for hook in _hooks if hook() is not None]
    _hooks.append(weakref.WeakMethod(method))
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    if _inherits:
        return
    for hook in _hooks:
        method = hook()
        if method is not None:
            method()
