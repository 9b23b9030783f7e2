"""Plans with fewer simulated runs, for tests of what the others do not change.

A plan of a small script makes eight runs or more, and most of what it costs is these.
``tests/cli/test_plan.py`` and ``tests/plan`` have plans as a user gets them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from trainfit.plan import planner
from trainfit.plan.changes.amp import AmpSetting
from trainfit.plan.epoch_end import EpochEnds
from trainfit.plan.sizing.planned_job import PlannedJob
from trainfit.results.runs.spec import AS_WRITTEN


@contextlib.contextmanager
def brief_plans(*, both_precisions: bool = False, ends: bool = False) -> Iterator[None]:
    """Meanwhile plans make the runs that batch sizes follow from.

    None confirms the recommended batch size, and none is with mixed precision the other way round
    (but for ``both_precisions``) or to the end of an epoch (but for ``ends``).
    """

    def unconfirmed(_: PlannedJob, setting: AmpSetting) -> AmpSetting:
        return setting

    def no_end(_: PlannedJob, setting: AmpSetting) -> EpochEnds:
        return EpochEnds(setting)

    with contextlib.ExitStack() as stack:
        replaced: dict[str, Callable[..., Any]] = {"confirmed": unconfirmed}
        if not ends:
            replaced |= {"start_epoch_end": lambda *_: None, "epoch_ends": no_end}
        if not both_precisions:
            replaced["opposite_amp"] = lambda _: AS_WRITTEN
        for name, stand_in in replaced.items():
            stack.enter_context(mock.patch.object(planner, name, stand_in))
        yield
