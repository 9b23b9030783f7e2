"""Inference at a fixed rate: is it slower than back to back, why, and does a fix help?

``trainfit.pace(function, hz=[15, 30, 60])`` measures; ``trainfit.pace.tick(30)`` looks at a turn of
the user's own loop; ``trainfit.pace.Pacer(30)`` keeps a loop's pace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from trainfit.pace.ticks import Pacer, seen, tick
from trainfit.results.pace import FixName, PaceResult

__all__ = ["Pacer", "pace", "seen", "tick"]


def pace(
    function: Callable[[], Any],
    hz: Sequence[float] = (15.0, 30.0, 60.0),
    *,
    seconds: float = 10.0,
    fix: FixName | None = None,
    rehearse: Callable[[], Any] | None = None,
) -> PaceResult:
    """Call ``function`` back to back and at each rate (calls a second), ``seconds`` each, and say
    why paced calls are slower, if they are.

    ``rehearse`` does the work of ``function`` and changes no state: a rehearsal call of a policy
    that keeps one (a queue of actions, a hidden state). Without it ``function`` itself is called.

    What the function raises ends the measurement: the result's ``failure`` has it, and what there
    was by then is kept. Raises ``ValueError`` for a rate or a time that is not above 0, and
    :class:`trainfit.results.files.errors.TrainfitError` for a ``fix`` that is not possible here.
    """
    from trainfit.hardware.machine.survey import survey
    from trainfit.hardware.machine.system import System
    from trainfit.pace.callee import Function
    from trainfit.pace.host import RealHost
    from trainfit.pace.measuring import PaceOptions, measure
    from trainfit.pace.settings import power_facts

    rates = tuple(float(value) for value in hz)
    if not rates or min(rates) <= 0 or seconds <= 0:
        raise ValueError("rates and seconds must be above 0")
    options = PaceOptions(rates, float(seconds), fix=fix)
    name = getattr(function, "__qualname__", type(function).__name__)
    facts = power_facts(survey(System(), imports_torch=False))
    return measure(Function(function, rehearse), RealHost(), options, target=name, machine=facts)


class _PaceModule(ModuleType):
    """``trainfit.pace`` is both a package and what its main function does."""

    def __call__(self, *arguments: Any, **options: Any) -> PaceResult:
        return pace(*arguments, **options)


sys.modules[__name__].__class__ = _PaceModule
