"""All checks of a machine, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from trainfit.doctor.cpu import threads
from trainfit.doctor.cpu.threads import check_threads
from trainfit.doctor.gpu_visibility.decision_table import check_visibility
from trainfit.doctor.registry import MACHINE_CHECKS
from trainfit.results.files.errors import TrainfitError
from trainfit.results.machine.doctor import Check, WorkerPools
from trainfit.results.machine.machine import Machine

#: In the order of the report: whether there is a GPU to train on comes first.
CHECKS: Final[tuple[tuple[str, Callable[[Machine], tuple[Check, ...]]], ...]] = (
    ("gpu", check_visibility),
    *MACHINE_CHECKS,
)
NAMES: Final = tuple(name for name, _ in CHECKS)


class CheckNameError(TrainfitError):
    """A name after --only or --skip that no check has."""


def diagnose(
    machine: Machine, names: Collection[str] = NAMES, pools: WorkerPools | None = None
) -> tuple[Check, ...]:
    """The checks of these names; one that does not apply to the machine gives none. ``pools`` is
    what the workers of a script run."""
    found: list[Check] = []
    for name, make in CHECKS:
        if name in names:
            found += check_threads(machine, pools) if name == threads.NAME else make(machine)
    return tuple(found)


def chosen(only: Sequence[str] | None, skip: Sequence[str]) -> tuple[str, ...]:
    """The names to check; raises :class:`CheckNameError` for one that is not known."""
    for name in (*(only or ()), *skip):
        if name not in NAMES:
            raise CheckNameError(f"unknown check {name!r}; available: {', '.join(NAMES)}")
    left = tuple(name for name in NAMES if (only is None or name in only) and name not in skip)
    if not left:
        raise CheckNameError("--only and --skip leave no check to run; list fewer in --skip")
    return left
