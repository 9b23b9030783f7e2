"""Memory over the step of the peak, by kind, and the owners at the peak."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helpers_page import RESULTS, entry, large_recording
from trainfit.memory.explanation import replayed
from trainfit.memory.peak import by_kind, step_memory
from trainfit.memory.replay import Stream
from trainfit.results.kinds import read
from trainfit.results.memory import StepMemory
from trainfit.results.runs.recording import Recording


@pytest.fixture(scope="module")
def recording() -> Recording:
    found = read(RESULTS / "recording-v1.trainfit")
    assert isinstance(found, Recording)
    return found


def of(recording: Recording) -> StepMemory:
    found = step_memory(recording, replayed(recording), 8)
    assert found is not None
    return found


def test_the_peak_is_that_of_the_replay_and_its_owners_add_up_to_it(recording: Recording) -> None:
    outcome = replayed(recording)
    found = of(recording)
    assert found.peak_bytes == outcome.peak_allocated
    assert max(moment.allocated_bytes for moment in found.moments) == found.peak_bytes
    assert sum(owner.nbytes for owner in found.owners) == found.peak_bytes
    kinds = by_kind(recording, Stream.of(recording), outcome)
    assert found.moments[found.peak].by_kind_bytes == {k: n for k, n in kinds.items() if n}
    for kind, nbytes in kinds.items():
        assert sum(owner.nbytes for owner in found.owners if owner.kind == kind) == nbytes
    assert found.owners == tuple(sorted(found.owners, key=lambda owner: -owner.nbytes))


def test_every_moment_is_what_the_allocator_had_then(recording: Recording) -> None:
    outcome = replayed(recording)
    found = of(recording)
    ends = np.flatnonzero(recording.events % 4 == 2)
    first = int(ends[found.step - 2]) + 1 if found.step > 1 else 0
    for moment in found.moments:
        assert moment.allocated_bytes == outcome.allocated_after[first + moment.event]


def test_phases_follow_one_another(recording: Recording) -> None:
    phases = [moment.phase for moment in of(recording).moments]
    assert {"forward", "backward", "optimizer"} <= set(phases)
    assert phases.index("forward") < phases.index("backward") < phases.index("optimizer")


def test_many_events_are_few_moments_that_keep_each_parts_maximum() -> None:
    recording = large_recording(4000, modules=10)
    outcome = replayed(recording)
    found = of(recording)
    assert found.events == 4000 and len(found.moments) <= 403
    first = (found.step - 1) * (found.events + 1)
    after = outcome.allocated_after[first : first + found.events]
    drawn = np.array([moment.event for moment in found.moments])
    for part in np.array_split(np.arange(found.events), 400):
        inside = drawn[(drawn >= part[0]) & (drawn <= part[-1])]
        assert after[inside].max() == after[part].max()
    assert found.moments[0].event == 0 and found.moments[-1].event == found.events - 1


def test_an_owner_says_who_made_its_largest_allocation() -> None:
    detail = entry("plan-v1.json").detail
    assert detail is not None and detail.memory is not None
    owner = next(each for each in detail.memory.owners if each.kind == "parameter")
    assert owner.operator == "aten._to_copy.default"
    assert owner.line is not None and owner.line.rpartition(":")[2].isdigit()


def test_a_run_without_allocations_has_no_step(recording: Recording) -> None:
    empty = dataclasses.replace(recording, alloc_bytes=np.zeros_like(recording.alloc_bytes))
    assert step_memory(empty, replayed(empty), None) is None
