"""Failure-tolerant accounting: counting a run's work never stops the run.

FLOPs, kernels, bytes, libraries, workspaces and known values are worked out alongside an operator
whose result is there already. A formula that does not know the operator's current signature must
not raise in the user's script: the operator is listed once among the notes instead, with how
often its cost is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from trainfit.simgpu.allocator.out_of_memory import OutOfDeviceMemory

_T = TypeVar("_T")


class Accounting:
    """Attempts what counts; ``notes`` (text → how often) receives what failed.

    Attributes: ``errors``, by operator, is the first exception of each, for who looks into it.
    """

    def __init__(self, notes: dict[str, int]) -> None:
        self._notes = notes
        self.errors: dict[str, Exception] = {}

    def attempt(self, operator: Any, function: Callable[..., _T], *args: Any) -> _T | None:
        """``function(*args)``, or ``None`` where it failed and was noted down.

        Running out of the device's memory is no failure to count: it is raised.
        """
        try:
            return function(*args)
        except OutOfDeviceMemory:
            raise
        except Exception as error:
            name = str(operator).removesuffix(".default")
            self.errors.setdefault(name, error)
            text = f"unknown cost: {name}"
            self._notes[text] = self._notes.get(text, 0) + 1
            return None
