"""Base class of interventions: one change of a running script, made from outside."""

from __future__ import annotations

from typing import ClassVar

from trainfit.results.runs.trace import Applicability
from trainfit.simgpu.interventions.script_state import Scene


class Intervention:
    """One change; subclasses say how it is found and how it is made.

    A survey calls :meth:`watch` before the script runs and :meth:`finding` at its end; it
    changes nothing. A trial calls :meth:`apply` before the script runs, with the survey's
    ``targets``. ``changed`` counts what was changed: 0 at the end means that nothing was.
    """

    name: ClassVar[str]

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        self.targets = targets
        self.changed = 0

    def watch(self, scene: Scene) -> None:
        """Note from now on what this would change."""
        self.scene = scene

    def finding(self) -> Applicability:
        """Does it apply to what was seen?"""
        raise NotImplementedError

    def apply(self, scene: Scene) -> None:
        """Change the script from now on."""
        raise NotImplementedError

    def no(self, reason: str) -> Applicability:
        """It does not apply."""
        return Applicability(self.name, False, reason)


def places(found: dict[str, None]) -> tuple[str, ...]:
    """Lines in the order they were met, each once."""
    return tuple(found)
