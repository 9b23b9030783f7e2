"""The time that a script is shown while a simulation runs."""

from __future__ import annotations

import gc
import os
import pickle
import time
import timeit
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from time import thread_time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import benchmark

import trainfit
from trainfit.plan.sizing.speed import speed
from trainfit.simgpu import cuda_clocks
from trainfit.simgpu.cuda_clocks import OWN_WORK_S, ScriptTime
from trainfit.simgpu.patching import PatchSet
from trainfit.speed.efficiency import FITTED
from trainfit.speed.step import HostedGpu, StepClock

MACHINE = HostedGpu(trainfit.simulate("RTX 3090").gpu, FITTED)


class Modelled:
    """A clock whose CPU submits at once and waits for nothing but what it is told."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self, stream: int | None = None) -> float:
        return self.seconds

    host = now

    def pause(self, seconds: float) -> None:
        self.seconds += seconds


class Waits:
    """Waiting for a core, said by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def mark(self) -> float:
        return self.seconds

    def since(self, mark: float, passed: float) -> float:
        return min(passed, self.seconds - mark)

    def install(self, patches: PatchSet) -> None:
        pass


class Passing:
    """A simulation with a machine's clock that is moved by hand."""

    def __init__(self, *, in_framework: bool = False) -> None:
        self.real = 100.0
        self.clock = Modelled()
        self.waits = Waits()
        self.time = ScriptTime(self.clock, lambda: in_framework, lambda: self.real, self.waits)
        self.time.runs = True

    def wait_for_core(self, seconds: float) -> None:
        self.real += seconds
        self.waits.seconds += seconds

    def operator(self, costs: float = 1e-5, took: float = 5.0) -> None:
        """``took`` is what simulating it takes."""
        entered = self.time.enter()
        self.clock.seconds += costs
        self.real += took
        if entered:
            self.time.leave()


# --- What counts ----------------------------------------------------------------------------------


def test_operators_take_what_the_clock_says() -> None:
    passing = Passing()
    for _ in range(10):
        passing.operator(costs=1e-5)
    assert passing.time.elapsed() == pytest.approx(1e-4)


def test_what_the_script_does_itself_takes_as_long_as_here() -> None:
    passing = Passing()
    passing.operator()
    passing.real += 0.25
    passing.operator()
    assert passing.time.elapsed() == pytest.approx(0.25 + 2e-5)


def test_python_between_two_operators_is_part_of_launching() -> None:
    passing = Passing()
    for _ in range(10):
        passing.operator()
        passing.real += OWN_WORK_S / 2
    passing.operator()
    assert passing.time.elapsed() == pytest.approx(11e-5)


def test_what_the_script_times_counts_however_short() -> None:
    passing = Passing()
    passing.operator()
    began = passing.time.elapsed()
    passing.real += OWN_WORK_S / 4
    assert passing.time.elapsed() - began == pytest.approx(OWN_WORK_S / 4)
    passing.real += OWN_WORK_S / 4
    passing.operator()
    assert passing.time.elapsed() - began == pytest.approx(OWN_WORK_S / 2 + 1e-5)


def test_another_thread_sees_no_operator_that_is_half_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that pins memory polls its queue by the time."""
    passing = Passing()
    passing.operator(costs=1e-5)
    before = passing.time.elapsed()
    assert passing.time.enter()
    monkeypatch.setattr(passing.clock, "host", lambda: 1 / 0)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(passing.time.elapsed).result(10) == before
    monkeypatch.undo()
    passing.clock.seconds += 1e-5
    passing.time.leave()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(passing.time.elapsed).result(10) == pytest.approx(2e-5)


def test_waiting_for_a_core_is_no_work_of_the_script() -> None:
    passing = Passing()
    passing.operator()
    passing.wait_for_core(0.25)
    passing.operator()
    assert passing.time.elapsed() == pytest.approx(2e-5)
    passing.real += 0.125
    passing.wait_for_core(0.25)
    assert passing.time.elapsed() == pytest.approx(0.125 + 2e-5)
    passing.operator()
    assert passing.time.elapsed() == pytest.approx(0.125 + 3e-5)


def test_a_step_takes_time_however_long_a_wait_was_taken_for_work() -> None:
    """open_clip divides by what a step took; the wait is known only when it is over."""
    passing = Passing()
    passing.operator()
    passing.real += 2.0
    before = passing.time.elapsed()
    passing.waits.seconds += 2.0  # it was no work of the script's
    for _ in range(3):
        passing.operator(costs=0.1)
        found = passing.time.elapsed()
        assert before < found < before + 0.1
        before = found
    assert passing.time.elapsed() == before  # nothing was launched


def test_python_that_is_held_up_on_its_way_to_an_operator_stays_part_of_launching() -> None:
    passing = Passing()
    passing.operator()
    passing.real += OWN_WORK_S / 2
    passing.wait_for_core(10 * OWN_WORK_S)
    passing.operator()
    assert passing.time.elapsed() == pytest.approx(2e-5)


def test_pytorchs_own_python_between_operators_is_no_work_of_the_script() -> None:
    passing = Passing(in_framework=True)
    passing.operator()
    passing.real += 0.25
    passing.operator()
    assert passing.time.elapsed() == pytest.approx(2e-5)


def test_operators_inside_of_operators_do_not_end_them() -> None:
    passing = Passing()
    assert passing.time.enter()
    passing.real += 1.0
    passing.operator()
    passing.real += 1.0
    passing.time.leave()
    assert passing.time.elapsed() == pytest.approx(1e-5)


def test_a_loop_that_waits_for_a_time_ends_even_in_the_simulator() -> None:
    passing = Passing()
    passing.operator()
    with passing.time.simulating():
        until = passing.time.elapsed() + 0.5
        turns = 0
        while passing.time.elapsed() < until and turns < 100:
            passing.real += 0.01
            turns += 1
        assert passing.time.elapsed() >= until


_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("operator", "script", "look", "storage dies", "event", "core")),
        st.floats(0, 0.1),
    ),
    max_size=40,
)


@given(_ACTIONS)
def test_time_goes_on_and_only_by_what_was_modelled_or_the_scripts(
    actions: list[tuple[str, float]],
) -> None:
    passing = Passing()
    modelled = of_script = 0.0
    latest = passing.time.elapsed()
    for action, seconds in actions:
        if action == "operator":
            passing.operator(costs=seconds)
            modelled += seconds
        elif action == "script":
            passing.real += seconds
            of_script += seconds
        elif action == "core":
            passing.wait_for_core(seconds)
        elif action == "storage dies":
            passing.real += seconds
            passing.time.leave_out(seconds)
        elif action == "event":
            assert passing.time.now(0) <= modelled + of_script + 1e-9
        else:
            found = passing.time.elapsed()
            assert found >= latest
            assert found <= modelled + of_script + 1e-9
            latest = found


def test_without_a_model_the_script_waits_for_each_operator() -> None:
    with trainfit.simulate("RTX 3090") as simulation:
        recorder = simulation._recorder
        clock = cuda_clocks.TrafficClock(recorder, simulation.gpu)
        torch.ones(1 << 20, device="cuda")
        assert clock.host() == clock.now() >= cuda_clocks.LAUNCH_SECONDS
        clock.pause(1.0)
        assert clock.host() == clock.now() >= 1.0


def test_pauses_count_the_same_whenever_the_time_is_looked_at() -> None:
    """Each comes between what was launched before and after it."""
    with trainfit.simulate("RTX 3090") as simulation:
        recorder = simulation._recorder
        looked, unseen = (StepClock(recorder, simulation.gpu) for _ in range(2))
        for pause in (0.25, 0.0, 1e-4, 0.5):
            torch.ones(1 << 24, device="cuda").exp_().sum()
            for clock in (looked, unseen):
                clock.pause(pause)
                clock.pause(pause)
            looked.host()
        torch.ones(1 << 26, device="cuda")
        assert unseen.host() == looked.host() > 2 * 0.7501
        assert unseen.now() == looked.now() > looked.host()


# --- In a simulation ------------------------------------------------------------------------------


@pytest.fixture
def simulated() -> Iterator[None]:
    with trainfit.simulate("RTX 3090"):
        yield


def test_a_timed_step_takes_what_the_model_says() -> None:
    with trainfit.simulate("RTX 3090", limited=False) as simulation:
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seconds, launched = [], []
        for _ in range(4):
            began = time.perf_counter()
            optimizer.zero_grad()
            model(torch.randn(4096, 4096, device="cuda")).sum().backward()
            optimizer.step()
            launched.append(time.perf_counter() - began)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    found = speed(simulation.recording, 4096, MACHINE)
    assert found is not None
    # The least: this machine's Python may have been held up in one of them.
    assert min(seconds) == pytest.approx(found.now.seconds, rel=0.05)
    assert min(launched) < 0.1 * min(seconds)


@pytest.mark.slow
def test_garbage_collections_are_the_simulations(simulated: None) -> None:
    matrix = torch.ones(8, 8, device="cuda")
    cycles = [[] for _ in range(50_000)]  # type: ignore[var-annotated]
    for one, other in pairwise(cycles):
        one.append(other)
    matrix @ matrix
    took = []
    gc.collect()
    for _ in range(3):
        before = thread_time()
        shown = time.perf_counter()
        gc.collect()
        took.append((time.perf_counter() - shown, thread_time() - before))
    # Its own share is what Python does around the collection.
    assert min(shown / real for shown, real in took) < 0.5


def test_all_clocks_show_one_time(simulated: None) -> None:
    matrix = torch.ones(8192, 8192, device="cuda")
    readings = []
    for _ in range(2):
        readings.append(
            (
                *(time.time(), time.monotonic(), time.perf_counter()),
                *(time.time_ns() / 1e9, time.monotonic_ns() / 1e9, time.perf_counter_ns() / 1e9),
            )
        )
        for _ in range(100):
            matrix @ matrix
        torch.cuda.synchronize()
    passed = [after - before for before, after in zip(*readings, strict=True)]
    # 100 products of 1.1 TFLOP, at no more than 40 TFLOP/s; nothing of it is computed here.
    assert min(passed) > 2.5
    assert max(passed) - min(passed) < 0.1 * min(passed)


def test_sleeping_counts_for_events_too(simulated: None) -> None:
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.ones(8, device="cuda")
    began = time.time()
    first.record()
    time.sleep(0.05)
    second.record()
    second.synchronize()
    assert time.time() - began >= 0.05
    assert first.elapsed_time(second) >= 50


def test_waiting_for_an_event_waits_no_longer_than_for_it(simulated: None) -> None:
    matrix = torch.ones(8192, 8192, device="cuda")
    event = torch.cuda.Event()
    torch.cuda.synchronize()
    began = time.perf_counter()
    matrix @ matrix
    event.record()
    for _ in range(50):
        matrix @ matrix
    event.synchronize()
    after_one = time.perf_counter() - began
    torch.cuda.synchronize()
    after_all = time.perf_counter() - began
    assert 0.025 < after_one < after_all / 10


@pytest.mark.skipif(
    benchmark.timer is timeit.default_timer,
    reason="this PyTorch (2.8) chooses its timer when it is imported, here before the simulation",
)
def test_pytorchs_own_timer_measures_the_simulated_gpu(simulated: None) -> None:
    matrix = torch.ones(8192, 8192, device="cuda")
    names = {"matrix": matrix, "torch": torch}
    own = benchmark.Timer("matrix @ matrix", globals=names).timeit(20).mean
    standard = timeit.timeit("matrix @ matrix; torch.cuda.synchronize()", globals=names, number=20)
    assert 0.025 < own < 0.1
    assert standard / 20 == pytest.approx(own, rel=0.3)


def test_the_functions_are_like_those_that_they_stand_for(simulated: None) -> None:
    class Stopwatch:
        clock = time.perf_counter
        began = time.time()

        def read(self) -> float:
            return self.clock()

    assert Stopwatch().read() > 0
    assert pickle.loads(pickle.dumps(time.monotonic)) is time.monotonic
    assert isinstance(time.time_ns(), int)
    assert isinstance(time.time(), float)
    assert time.perf_counter.__name__ == "perf_counter"


def test_code_of_ours_has_the_machines_time(simulated: None) -> None:
    matrix = torch.ones(8192, 8192, device="cuda")
    ours = {"__name__": "trainfit.anything", "time": time}
    exec("def look(): return time.perf_counter()", ours)
    theirs = {"__name__": "trainfitting", "time": time}
    exec("def look(): return time.perf_counter()", theirs)
    passed = {}
    for name, space in (("ours", ours), ("theirs", theirs)):
        began = space["look"]()  # type: ignore[operator]
        for _ in range(1000):
            matrix @ matrix
        torch.cuda.synchronize()
        passed[name] = space["look"]() - began  # type: ignore[operator]
    assert passed["theirs"] > 25 > passed["ours"]


def test_the_machines_clocks_are_back_afterwards() -> None:
    names = ("time", "perf_counter", "monotonic", "time_ns", "perf_counter_ns", "monotonic_ns")
    before = [getattr(time, name) for name in names], timeit.default_timer, timeit.timeit
    with trainfit.simulate("RTX 3090"):
        kept = time.time
        assert kept is not before[0][0]
    assert ([getattr(time, name) for name in names], timeit.default_timer, timeit.timeit) == before
    assert kept() == pytest.approx(time.time(), abs=60)


def test_a_forked_worker_has_the_machines_time() -> None:
    reader, writer = os.pipe()
    with trainfit.simulate("RTX 3090"):
        matrix = torch.ones(8192, 8192, device="cuda")
        for _ in range(10_000):
            matrix @ matrix
        torch.cuda.synchronize()
        shown = time.time()
        pid = os.fork()
        if pid == 0:
            os.write(writer, repr(time.time()).encode())
            os._exit(0)
        os.waitpid(pid, 0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        in_worker = float(stream.read())
    assert shown > time.time() + 200  # 10,000 products of 27 ms at least
    assert in_worker <= time.time()
