"""The pacer's rehearsal call: when it comes, when it is left out, what it raises."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch

from trainfit.pace import ticks
from trainfit.pace.callee import Function, why_no_rehearsal
from trainfit.pace.ticks import Pacer, RehearsalCall


class Clock:
    """Time passes in sleep, in calls, and a little in each look; a timer is ``late_s`` late."""

    def __init__(self, late_s: float = 6e-5) -> None:
        self.now, self.late_s, self.slept = 100.0, late_s, 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late_s
        self.slept += seconds


class Policy:
    """Calls that need ``seconds``; when each began and ended."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.times: list[tuple[float, float]] = []

    def __call__(self) -> None:
        began = self.clock.now
        self.clock.now += self.seconds
        self.times.append((began, self.clock.now))


def paced(hz: float, seconds: float, late_s: float = 6e-5) -> tuple[Clock, Policy, Pacer]:
    clock = Clock(late_s)
    policy = Policy(clock, seconds)
    pacer = Pacer(hz, rehearse=policy, clock=clock, sleep=clock.sleep)
    return clock, policy, pacer


def test_a_rehearsal_ends_right_before_each_tick_and_delays_none() -> None:
    clock, policy, pacer = paced(30, 2e-3)
    assert len(policy.times) == 3  # before the first tick
    ticks = []
    for number in range(20):
        assert pacer.wait() == 0.0
        ticks.append(clock.now)
        _, ended = policy.times[-1]
        assert len(policy.times) == 4 + number
        assert 0 <= clock.now - ended < 1e-3
        clock.now += 5e-3  # the call itself
    steps = [after - before for before, after in itertools.pairwise(ticks)]
    assert steps == pytest.approx([1 / 30] * 19, abs=1e-5)
    assert (pacer.rehearsed, pacer.skipped) == (20, 0)
    # It sleeps but for the call, the rehearsal, and the busy-wait before that.
    assert clock.slept == pytest.approx(20 / 30 - 20 * (2e-3 + 2.4e-3) - 19 * 5e-3, rel=0.02)


def test_it_is_left_out_where_the_thread_wakes_too_late_for_it() -> None:
    _, policy, pacer = paced(30, 2e-3, late_s=3.5e-3)
    for _ in range(10):
        pacer.wait()
    assert (pacer.rehearsed, pacer.skipped) == (0, 10) and len(policy.times) == 3


def test_a_call_that_fills_the_pause_is_said_before_the_first_tick() -> None:
    with pytest.warns(RuntimeWarning, match="a rehearsal call needs 20 ms: with the call itself"):
        clock, _, pacer = paced(30, 20e-3)
    for _ in range(5):
        clock.now += 20e-3  # the call itself
        assert pacer.wait() == 0.0
    assert pacer.rehearsed == 0 and pacer.skipped == 5


def test_calls_that_become_faster_are_rehearsed_again() -> None:
    clock, policy, pacer = paced(30, 2e-3)
    policy.seconds = 25e-3  # something else has the core for a while
    for _ in range(10):
        pacer.wait()
        clock.now += 10e-3
    policy.seconds = 2e-3
    before = pacer.rehearsed
    for _ in range(40):
        pacer.wait()
        clock.now += 10e-3
    assert pacer.rehearsed >= before + 20


def test_one_slow_call_does_not_move_those_after_it() -> None:
    clock = Clock()
    policy = Policy(clock, 1e-3)
    call = RehearsalCall(policy, clock)
    for number in range(20):
        policy.seconds = 9e-3 if number == 12 else 1e-3
        call.before(clock.now + 1.0)
    assert call.needed_s == pytest.approx(1e-3, rel=0.01)


def test_what_it_raises_comes_before_the_robot_moves() -> None:
    def fails() -> None:
        raise RuntimeError("no weights")

    with pytest.raises(RuntimeError, match="no weights"):
        Pacer(30, rehearse=fails)


def test_without_one_nothing_is_called_or_counted() -> None:
    clock = Clock()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pacer = Pacer(30, clock=clock, sleep=clock.sleep)
        pacer.wait()
    assert (pacer.rehearsed, pacer.skipped) == (0, 0)


# --- What is called right before a call ----------------------------------------------------------
def test_the_parameters_that_lie_in_the_cpus_memory_are_read() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    function = Function(lambda: model(torch.zeros(2, 64)))
    assert function.why_no_touch() == "" and not function.has_rehearsal
    function.touch()
    read = {each.ctypes.data for each in function._parameters or ()}
    tensors = [*model.parameters(), *model.buffers()]
    assert {each.untyped_storage().data_ptr() for each in tensors} <= read


def test_parameters_that_no_cache_holds_are_not_read() -> None:
    model = torch.nn.Linear(5000, 5000)
    assert "more than a cache holds" in Function(model.eval).why_no_touch()


def test_a_rehearsal_of_its_own_is_called_in_its_place() -> None:
    called: list[str] = []
    alone = Function(lambda: called.append("call"))
    alone.rehearse()
    own = Function(lambda: called.append("call"), lambda: called.append("rehearsal"))
    own.rehearse()
    assert called == ["call", "rehearsal"]
    assert why_no_rehearsal(alone, 1) == why_no_rehearsal(own, 30) == ""
    assert "every 30th call does the work" in why_no_rehearsal(alone, 30)


# --- A user's own loop ---------------------------------------------------------------------------
@pytest.fixture
def turned() -> Iterator[ticks.TickLoop]:
    """A loop, while Python collects no garbage by itself."""
    loop = ticks.TickLoop(100.0, "arm")
    gc.disable()
    yield loop
    gc.enable()
    loop.patches.restore()


def told(loop: ticks.TickLoop) -> str:
    result = loop.result()
    assert result is not None
    return ticks._line("arm", result.rates[0])


def test_garbage_collections_within_turns_are_told_with_their_share(turned: ticks.TickLoop) -> None:
    kept = [[each] for each in range(100_000)]
    for _ in range(12):
        with turned.turn():
            gc.collect()
    assert kept and min(turned._collected) > 0
    assert "garbage collections of Python make" in told(turned) and "freeze()" in told(turned)


def test_collections_between_turns_are_none_of_the_turns(turned: ticks.TickLoop) -> None:
    for _ in range(12):
        gc.collect()
        with turned.turn():
            pass
    assert not any(turned._collected) and "garbage" not in told(turned)
