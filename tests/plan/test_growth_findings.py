"""Epochs whose steps need more than those of the epoch before."""

from __future__ import annotations

import pytest

from trainfit.plan.growth_findings import of_longer_epochs


def test_epochs_that_need_more_and_more() -> None:
    # Without the optimizer's state in the first step; the last rise is 500.
    (found,) = of_longer_epochs([900, 1000, 1300, 1300, 1800, 1800], 2, free_bytes=2500)
    assert found.kind == "memory_grows_by_epoch" and found.severity == "critical"
    assert found.subject == "about 8 epochs at the latest"  # 3 + 2500 / 500


@pytest.mark.parametrize(
    "peaks",
    [
        [900, 1000, 1000, 1000, 1000, 1000],
        [900, 1000, 1300, 1300, 1300, 1300],  # once, as with a part that is unfrozen
        [900, 1000, 1300, 1200, 1800, 1800],  # steps of an epoch differ: the data does
        [900, 1000, 1300, 1300, 1301, 1301],
        [900, 1000, 1300, 1300],
    ],
)
def test_what_is_no_growth_by_epoch(peaks: list[int]) -> None:
    assert not list(of_longer_epochs(peaks, 2, free_bytes=2500))
