"""A cache that grows by copies leaves blocks behind, which a batch size's margin counts."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from helpers_cli import SCRIPTS, json_of, trainfit
from trainfit.plan.notes import _FAR

pytestmark = pytest.mark.usefixtures("warm", "brief")

#: What generating.py generates: its replays are most of the work.
SHORT = ("--tokens=40",)
VARIABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@functools.cache
def planned(*before: str, script: str = "generating.py", words: tuple[str, ...] = SHORT) -> Any:
    options = ("plan", "--gpu", "custom:800MiB", "--no-remedies", "--json")
    return json_of(
        trainfit(*options, "--", *before, "python", SCRIPTS / script, *words, cwd=SCRIPTS)
    )


def cached(plan: Any) -> list[str]:
    return [note for note in plan["notes"] if "cached blocks" in note]


@pytest.mark.slow
def test_the_plan_says_why_far_larger_batch_sizes_fit() -> None:
    (note,), now = cached(planned()), planned()["now"]
    most = now["limits"]["memory"]
    assert f"plan with {VARIABLE} for a larger batch size: {most} reserves" in note
    assert f"up to {now['largest_batch']}, fit because" in note
    assert not cached(planned(script="train.py", words=()))


@pytest.mark.slow
def test_the_variable_does_what_the_note_says() -> None:
    other = planned("env", VARIABLE)
    # As many as the note promises at least: by what makes a batch size far larger.
    assert other["now"]["limits"]["memory"] > _FAR * planned()["now"]["limits"]["memory"]
    assert not cached(other)
