"""What a fault leaves possible where the settings that it was met under are not known."""

from __future__ import annotations

import torch.multiprocessing

from trainfit.loader.measure.probe_runs import bounds_of
from trainfit.results.findings import failure_finding


def test_another_way_to_start_workers_than_the_default() -> None:
    left = bounds_of(
        failure_finding("deadlock", "it hangs", "a lock", "another start")
    ).start_methods
    default = (
        torch.multiprocessing.get_start_method(allow_none=True)
        or (torch.multiprocessing.get_all_start_methods()[0])
    )
    if default == "fork":
        assert left and "fork" not in left
    else:
        assert left == ()
