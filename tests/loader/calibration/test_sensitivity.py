"""What slowed cores do to a data set's code, told from batches and pieces of the watch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.hardware.machine.core_speed import WorkPieces
from trainfit.loader.measure.fitting import costs_of
from trainfit.loader.measure.noise_correction import SENSITIVITY, Slowing, sensitivity, with_speeds
from trainfit.loader.measure.records import CORE, Run, local
from trainfit.results.dataloader import LoaderSettings

SECONDS = 12.0
#: How often each core may change its speed.
STATES = 14


def machine(
    power: float,
    *,
    slow: float = 0.6,
    noise: float = 0.05,
    spread: float = 0.1,
    batch_s: float = 0.02,
    seed: int = 0,
) -> tuple[Run, WorkPieces]:
    """Two workers, each on a core that a neighbour slows for half the time, a second or so each.

    Half the time, whatever the seed: a machine that was hardly ever slowed tells little.
    """
    chance = np.random.default_rng(seed)
    states = chance.permuted(np.tile([slow, 1.0], (2, STATES // 2)), axis=1)

    def speed(core: int, at: np.ndarray) -> np.ndarray:
        return np.asarray(states[core][(at / SECONDS * STATES).astype(int)])

    at = np.arange(0, SECONDS, 0.02)
    rows = []
    for core in (0, 1):
        took = 5e4 / speed(core, at) * np.exp(noise * chance.standard_normal(len(at)))
        rows.append(np.stack([at, np.full(len(at), core), took, np.zeros(len(at))], 1))
    pieces = np.concatenate(rows)
    pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    fetches = []
    for core in (0, 1):
        began = np.arange(0.2, SECONDS - 0.5, batch_s)
        work = batch_s * np.exp(spread * chance.standard_normal(len(began)))
        cpu = work / 2 / speed(core, began) ** power
        fetches.append(np.stack([began, cpu, cpu, 0 * began, np.full(len(began), core)], 1))
    run = Run(LoaderSettings(2, 2), 0.0, began=0.0, fetches=tuple(fetches))
    return run, WorkPieces(*pieces.T)


@settings(max_examples=25)
@given(power=st.floats(0.4, 1.5), seed=st.integers(0, 99), noise=st.floats(0.0, 0.15))
def test_the_power_is_found_also_by_noisy_pieces(power: float, seed: int, noise: float) -> None:
    run, pieces = machine(power, seed=seed, noise=noise)
    assert sensitivity([[run]], pieces) == pytest.approx(power, abs=0.12)


def test_cores_at_one_speed_tell_nothing() -> None:
    run, pieces = machine(1.4, slow=1.0)
    assert sensitivity([[run]], pieces) == pytest.approx(SENSITIVITY, abs=0.1)


def test_wild_batches_tell_little() -> None:
    run, pieces = machine(1.5, spread=3.0)
    assert abs(sensitivity([[run]], pieces) - SENSITIVITY) < 0.35


@pytest.mark.parametrize("batch_s", [0.001, 0.3])
def test_short_and_long_batches_tell_as_well(batch_s: float) -> None:
    run, pieces = machine(0.5, batch_s=batch_s)
    assert sensitivity([[run]], pieces) == pytest.approx(0.5, abs=0.15)


def test_runs_of_several_settings_differ_in_more_than_speed() -> None:
    """Those of the second kind take thrice as long, and met the slower cores."""
    first, pieces = machine(1.0)
    second = dataclasses.replace(
        first, fetches=tuple(each * [1, 3, 3, 1, 1] for each in first.fetches)
    )
    assert sensitivity([[first], [second]], pieces) == pytest.approx(1.0, abs=0.12)


def test_what_nobody_saw_has_the_usual_power() -> None:
    run, pieces = machine(1.4)
    nowhere = tuple(np.where(np.arange(5) == CORE, -1, each) for each in run.fetches)
    assert sensitivity([[dataclasses.replace(run, fetches=nowhere)]], pieces) == SENSITIVITY
    unplaced = dataclasses.replace(run, fetches=tuple(each[:, :CORE] for each in run.fetches))
    assert sensitivity([[unplaced]], pieces) == SENSITIVITY
    empty = WorkPieces(*np.zeros((4, 0)))
    for found in (sensitivity([[run]], empty), sensitivity([], pieces), sensitivity([[]], pieces)):
        assert found == SENSITIVITY


def test_each_batch_is_told_its_cores_own_speed() -> None:
    """A worker's batches are as long as one another once their seconds' slowness is taken away."""
    run, pieces = machine(1.0, noise=0.02, spread=0.0)
    count = len(run.fetches[0])
    seen = dataclasses.replace(run, handed=np.linspace(0.2, SECONDS - 0.5, 2 * count))
    (seen,) = with_speeds([seen], pieces)
    slowing = Slowing(1.0, 2.0, 1.0)
    for known, most in ((None, 0.3), (pieces, 0.12)):
        costs = costs_of(slowing.undisturbed(seen, known))
        assert costs is not None
        cpu = costs.cpu_s[costs.seen]
        assert cpu.mean() == pytest.approx(0.01, rel=0.06)
        assert cpu.std() / cpu.mean() < most
        assert bool(cpu.std() / cpu.mean() > 0.2) is (known is None)
    unplaced = dataclasses.replace(
        seen, fetches=tuple(np.where(np.arange(5) == CORE, -1, each) for each in seen.fetches)
    )
    assert np.all(local(slowing.undisturbed(unplaced, pieces).fetches[0]) == 1.0)
