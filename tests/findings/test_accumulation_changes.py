"""Steps of a later epoch that have another number of micro-batches than the first ones."""

from __future__ import annotations

import pytest

from trainfit.findings.training.accumulation import changed_later


def test_later_steps_are_compared_with_the_first() -> None:
    (found,) = changed_later(8, (8, 8, 8, 1, 1, 1), 64, "train.py:9")
    assert found.title == (
        "Steps of a later epoch have 1 micro-batch, the first ones 8: effective batch 64 instead "
        "of 512"
    )
    assert found.subject == "later ones have 1 micro-batch instead of 8"
    assert str(found.place) == "train.py:9"


@pytest.mark.parametrize(
    ("per_step", "place"),
    [
        ((4, 4, 4, 4), "train.py:9"),
        ((4, 4, 4, 1), "train.py:9"),  # what an epoch left over
        ((4, 1, 1, 1), "train.py:9"),
        ((4, 4, 1, 1), None),  # no later epoch
        ((4, 4), "train.py:9"),
        ((4, 4, 0, 0), "train.py:9"),
    ],
)
def test_others_are_not(per_step: tuple[int, ...], place: str | None) -> None:
    assert not [*changed_later(4, per_step, 64, place)]
