"""Runs of several ranks: each is judged, and each has its own GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers_watch import GPU, HEADER, finding, gpu_rows, kinds, run, table, unknown_kinds
from trainfit.results.runs import tables
from trainfit.results.runs.watched import RunRecord
from trainfit.watch.checks import local_ranks
from trainfit.watch.judge import judge
from trainfit.watch.view import RunView

SLOW = {"input_s": 0.06}


def ranks(steps: Sequence[Mapping[str, Any]], **headers: Sequence[Any]) -> RunRecord:
    """A run with a rank for each of these changes of a healthy one's steps."""
    made = []
    for number, columns in enumerate(steps):
        (rank,) = run(**columns).ranks
        told = {name: values[number] for name, values in headers.items()}
        header = dataclasses.replace(HEADER, rank=number, world_size=len(steps), **told)
        made.append(dataclasses.replace(rank, header=header))
    whole = run(**max(steps, key=len))
    return dataclasses.replace(whole, ranks=tuple(made))


def test_what_another_rank_has_is_found_and_names_it() -> None:
    result = judge(ranks([{}, {}, SLOW]))
    found = finding(result, "input_bound")
    assert found.rank == 2
    assert finding(result, "straggler").rank == 2
    # This rank's own figures do not show it.
    assert result.limit == "communication"


def test_what_some_ranks_have_is_said_once_for_the_worst() -> None:
    found = finding(judge(ranks([{}, SLOW, {"input_s": 0.2}])), "input_bound")
    assert found.rank == 2
    assert found.evidence[-1].what == "ranks with it" and found.evidence[-1].value == 2


def test_what_all_ranks_have_is_no_single_ranks() -> None:
    result = judge(ranks([SLOW, SLOW]))
    assert finding(result, "input_bound").rank is None
    assert result.limit == "input"


def test_too_few_steps_are_said_once() -> None:
    result = judge(ranks([{"steps": 9}] * 3))
    assert kinds(result) == []
    assert unknown_kinds(result).count("input_bound") == 1


def test_ranks_that_each_see_one_gpu_have_their_own_samples() -> None:
    """Under CUDA_VISIBLE_DEVICES of its own each rank calls its GPU 0; samples count all."""
    mine = [(dataclasses.replace(GPU, uuid=f"GPU-{place}"),) for place in range(2)]
    record = ranks([{}, {}], gpus=mine)
    times = np.arange(0.0, 25.0, 0.1)
    hot = {"clock_reasons": 0x20, "sm_hz": 1.5e9, "temperature_c": 90.0, "used_bytes": 5}
    gpus = np.concatenate([gpu_rows(times), gpu_rows(times, gpu=1, **hot)])
    record = dataclasses.replace(record, gpus=gpus)
    first, second = RunView(record).ranks
    assert set(first.gpu["clock_reasons"]) == {0} and set(second.gpu["clock_reasons"]) == {0x20}
    assert finding(judge(record), "thermal_throttling").rank == 1
    # Without UUIDs the numbers are all there is.
    nameless = [(dataclasses.replace(GPU, uuid=""),)] * 2
    _, second = RunView(dataclasses.replace(ranks([{}, {}], gpus=nameless), gpus=gpus)).ranks
    assert set(second.gpu["clock_reasons"]) == {0}


def machine_of(record: RunRecord, rank: int, **samples: Any) -> RunRecord:
    """What the machine of this rank alone would have recorded."""
    (its,) = (each for each in record.ranks if each.header.rank == rank)
    its = dataclasses.replace(its, header=dataclasses.replace(its.header, host=f"host{rank}"))
    return dataclasses.replace(record, ranks=(its,), **samples)


def test_ranks_of_several_machines_have_their_own_samples() -> None:
    record = ranks([{}, SLOW])
    times = np.arange(0.0, 25.0, 0.1)
    hot = {"clock_reasons": 0x20, "sm_hz": 1.5e9, "temperature_c": 90.0}
    first = machine_of(record, 0)
    alone = judge(first)
    assert "1 of 2 ranks were recorded" in alone.notes
    assert "straggler" in unknown_kinds(alone)
    both = dataclasses.replace(
        first, elsewhere=(machine_of(record, 1, gpus=gpu_rows(times, **hot)),)
    )
    result = judge(both)
    assert finding(result, "straggler").rank == 1 == finding(result, "input_bound").rank
    assert finding(result, "thermal_throttling").rank == 1
    assert [each.rank for each in result.ranks] == [0, 1]
    assert not any("recorded are" in note for note in result.notes)
    # Each machine of its own has a core for each of its ranks.
    assert [local_ranks(each) for each in RunView(both).ranks] == [1, 1]


def held_up(seed: int, steps: int = 200) -> NDArray[np.float64]:
    """Seconds that other programs take from a rank's steps, for some of them in a row."""
    random = np.random.default_rng(seed)
    lost = np.full(steps, 0.001)
    for first in np.flatnonzero(random.random(steps) < 0.03):
        lost[first : first + 1 + random.geometric(0.1)] += random.exponential(0.1)
    return lost


def stragglers(slower_s: float, seeds: range) -> list[int | None]:
    """The ranks that are named, each of a run of two that a loaded machine holds up in turns."""
    named: list[int | None] = []
    for seed in seeds:
        columns = [{"other_s": held_up(2 * seed), "seed": 2 * seed}]
        columns.append({"other_s": held_up(2 * seed + 1) + slower_s, "seed": 2 * seed + 1})
        found = [each for each in judge(ranks(columns)).findings if each.kind == "straggler"]
        named += [each.rank for each in found]
    return named


def test_equal_ranks_on_a_loaded_machine_have_no_straggler() -> None:
    assert len(stragglers(0.0, range(20))) <= 1
    burst = np.full(200, 0.001)
    burst[30:40] = 0.5
    assert "straggler" not in kinds(judge(ranks([{}, {"other_s": burst}])))


def test_a_straggler_on_a_loaded_machine_is_found() -> None:
    named = stragglers(0.1, range(20))
    assert len(named) >= 16 and set(named) == {1}


def test_a_rank_whose_every_eighth_step_is_slow_is_a_straggler() -> None:
    slow = np.where(np.arange(200) % 8 == 3, 0.4, 0.001)
    assert finding(judge(ranks([{}, {"other_s": slow}])), "straggler").rank == 1


def test_ranks_that_have_no_steps_in_common_are_not_compared() -> None:
    late = {"step": np.arange(1000, 1200), "other_s": 0.5}
    result = judge(ranks([{}, late]))
    assert "straggler" not in kinds(result) and "straggler" in unknown_kinds(result)


@pytest.mark.parametrize(("without_core", "found"), [(0.5, False), (0.1, True)])
def test_a_rank_that_had_no_core_is_no_straggler(without_core: float, found: bool) -> None:
    """Rank 1 needs 40 ms more for its steps, of which other programs had its core."""
    record = ranks([{}, {"other_s": 0.041}])
    times = np.arange(5.0, 25.0, 0.5)
    waits = [
        table(tables.CORE_WAITS, {"time_s": times, "rank": n, "role": 0, "pid": 100 + n,
              "cpu_cores": 0.5, "main_thread": share, "threads": share}, len(times))
        for n, share in enumerate((0.0, without_core))
    ]  # fmt: skip
    machine = record.machine.copy()
    machine["cores_busy"], machine["cores_ours"] = 8.0, 1.0
    busy = dataclasses.replace(record, machine=machine, core_waits=np.concatenate(waits))
    assert "straggler" in kinds(judge(record))
    assert ("straggler" in kinds(judge(busy))) is found
