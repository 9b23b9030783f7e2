"""Other programs on the cores: what they add to a run is no fault of it, and hides none."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from helpers_watch import finding, kinds, loader, run, run_on_cpu, table
from trainfit.results.runs import tables
from trainfit.results.runs.watched import Event, GrowingVariable, RunRecord
from trainfit.results.watch import WatchResult
from trainfit.watch.judge import judge
from trainfit.watch.rules.core_waits import CoreWaits
from trainfit.watch.rules.fetching import Fetching
from trainfit.watch.view import RunView, clean

#: Two cores: the run has 0.6 of them, two other programs the rest.
BUSY = {"cores_busy": 2.0, "cores_ours": 0.6, "runnable": 4.0}
UNTOLD = dict.fromkeys(("read_s", "decode_s", "transform_s", "collate_s"), np.nan)


def core_waits(main: float, workers: float, *, cores: float = 0.3, each: float = 0.15) -> Any:
    """Of the training process and two workers: seconds a second without a core."""
    times = np.arange(0.0, 60.0, 0.5)
    common = {"time_s": times, "rank": 0}
    first = {"role": 0, "pid": 100, "cpu_cores": cores, "main_thread": main, "threads": main}
    rows = [table(tables.CORE_WAITS, common | first, len(times))]
    for worker in range(2):
        own = {"role": 1, "pid": 101 + worker, "worker": worker, "cpu_cores": each}
        own |= {"main_thread": workers, "threads": workers}
        rows.append(table(tables.CORE_WAITS, common | own, len(times)))
    return np.concatenate(rows)


def disturbed(waits: Any, made_s: Any, made_cpu_s: Any, **columns: Any) -> RunRecord:
    """Steps of 0.1 s on a CPU, of which other programs had the cores most of the time."""
    header = {"usable_cores": 2.0, "threads": {"torch": 1}}
    header |= {"loaders": loader(num_workers=2)} | columns.pop("header", {})
    machine = BUSY | columns.pop("machine", {})
    fetches = UNTOLD | {"fetch_s": made_s, "cpu_s": made_cpu_s}
    made = columns.pop("make", run_on_cpu)
    found = made(machine=machine, header=header, fetches=fetches, **columns)
    return dataclasses.replace(found, core_waits=waits)


def judged(*words: Any, **columns: Any) -> WatchResult:
    return judge(disturbed(*words, **columns))


def test_a_batch_that_other_programs_delay_is_no_fault_of_the_input() -> None:
    """2 ms of work for a batch that is ready, and 30 ms until somebody has a core to give it."""
    result = judged(core_waits(0.6, 0.9, each=0.02), 0.004, 0.002, input_s=0.03, queued=2)
    assert "input_bound" not in [e.kind for e in result.findings if e.severity != "info"]
    found = finding(result, "cpu_contention")
    assert found.title.startswith("Other programs use the cores: 1.4 of 2") and "42%" in found.title
    assert result.findings[0] == found and found.confidence == "certain"
    added = next(e for e in found.evidence if e.what == "waits for batches that this adds")
    assert added.value == pytest.approx(0.2, abs=0.05)


def test_operators_whose_threads_share_cores_with_others_get_one_thread() -> None:
    """Of two threads each operator waits for the later: 13 ms a step became 250."""
    several = {"main": {"cpu_cores": 0.5, "hottest_thread": 0.3}}
    waits = core_waits(0.6, 0.9, each=0.02)
    for threads, processes, value in ((2, several, "1"), (1, several, None), (2, {}, None)):
        header = {"threads": {"torch": threads}}
        result = judged(waits, 0.004, 0.002, header=header, processes=processes)
        fix = finding(result, "cpu_contention").fix
        assert fix.settings.get("OMP_NUM_THREADS") == value
        assert ("until all 2 threads" in fix.action) == (value is not None)


def test_threads_that_wait_for_each_other_on_full_cores_make_no_growing_steps() -> None:
    """They compute meanwhile: 1.4 ms of CPU time became 90 as other programs came."""
    longer = np.linspace(0.01, 0.2, 200)
    several = {"main": {"cpu_cores": 0.5, "hottest_thread": 0.3}}
    for processes, is_told in ((several, False), ({}, True)):
        record = disturbed(
            core_waits(0.6, 0.9), 0.004, 0.002, forward_s=longer, processes=processes
        )
        rows = record.ranks[0].steps
        rows["cpu_s"] = 0.9 * rows["step_s"]
        assert ("growing_steps" in kinds(judge(record))) == is_told
    # Inputs that became a little larger are a part of it.
    sizes = tuple((step, 1000 if step < 120 else 1500) for step in range(0, 200, 5))
    header = {"input_sizes": sizes}
    record = disturbed(core_waits(0.6, 0.9), 0.004, 0.002, forward_s=longer, header=header)
    rows = record.ranks[0].steps
    rows["cpu_s"] = 0.9 * rows["step_s"]
    assert finding(judge(record), "growing_steps").severity == "info"


def test_programs_that_the_script_starts_are_no_others() -> None:
    """Each checkpoint is compressed by a program that runs next to the training."""
    events = [Event(1.0, "program", 0, None, "train.py:18", {"pid": 900.0 + n}) for n in range(2)]

    def judged_with(cores: float, threads: int = 1) -> WatchResult:
        hottest = 0.9 / threads
        record = disturbed(
            core_waits(0.4, 0.1, cores=0.9),
            0.004,
            0.002,
            machine={"cores_ours": 1.95},
            processes={"main": {"cpu_cores": 0.9, "hottest_thread": hottest}},
            events=events,
        )
        rows = record.processes[record.processes["role"] == 0].copy()
        rows["role"], rows["cpu_cores"], rows["pid"] = 2, cores, 900
        return judge(
            dataclasses.replace(record, processes=np.concatenate([record.processes, rows]))
        )

    found = finding(judged_with(1.0), "own_programs")
    assert found.title.startswith("Programs that the script starts use 1.0 of 2 cores")
    assert str(found.at) == "train.py:18" and found.share == pytest.approx(0.2, abs=0.02)
    assert "cpu_contention" not in kinds(judged_with(1.0))
    assert "own_programs" not in kinds(judged_with(0.05))
    # Of two threads the later one holds up each operator.
    assert (finding(judged_with(1.0, 2), "own_programs").share or 0) > 0.15


def test_a_batch_that_costs_much_to_give_is_found_whatever_else_runs() -> None:
    """Thousands of tensors: workers spend 40 ms of CPU time on giving a batch, and the steps 30."""
    waits = core_waits(0.5, 0.5, cores=0.3, each=0.15)
    result = judged(waits, 0.004, 0.002, input_s=0.15, queued=2)
    assert finding(result, "input_bound").share == pytest.approx(0.4, abs=0.15)


def test_too_few_workers_are_found_whatever_else_runs() -> None:
    """0.5 s of a batch in which its worker sleeps, for steps of 0.1 s."""
    result = judged(core_waits(0.6, 0.2), 0.52, 0.004, input_s=0.16, queued=0)
    assert finding(result, "input_bound").share == pytest.approx(0.62, abs=0.03)
    assert result.findings[0].kind == "input_bound"


def test_work_for_more_cores_than_there_are_is_found_whatever_else_runs() -> None:
    """0.15 s of work for a batch, and 0.03 s of the step: two cores need 0.09 s for both."""
    waits = core_waits(0.35, 0.5, cores=0.15, each=0.37)
    machine = {"cores_ours": 0.9}
    result = judged(waits, 0.4, 0.15, input_s=0.1, queued=0, machine=machine)
    assert finding(result, "input_bound").share == pytest.approx(0.5, abs=0.1)


def test_a_run_that_fills_the_cores_itself_has_no_others_to_blame() -> None:
    machine = {"cores_ours": 1.95}
    result = judged(core_waits(0.6, 0.9), 0.3, 0.1, input_s=0.1, queued=0, machine=machine)
    assert finding(result, "input_bound").share == pytest.approx(0.5, abs=0.05)
    assert "cpu_contention" not in kinds(result)


def test_time_without_a_core_makes_no_batch_a_slow_one() -> None:
    """One batch in ten takes 0.2 s: its worker had no core in one run, and slept in the other."""
    fetch_s = np.where(np.arange(200) % 10 == 0, 0.2, 0.004)
    held_up = disturbed(core_waits(0.6, 0.5), fetch_s, 0.003, input_s=0.02, queued=0)
    slept = disturbed(core_waits(0.6, 0.02), fetch_s, 0.003, input_s=0.02, queued=0)
    found = [Fetching(RunView(clean(each)).judged) for each in (held_up, slept)]
    assert [each.is_uneven for each in found] == [False, True]
    assert "input_bound" not in [e.kind for e in judge(held_up).findings if e.severity != "info"]
    assert "few of them take long" in finding(judge(slept), "input_bound").title


def test_a_worker_that_had_no_core_is_no_slow_one() -> None:
    rows = core_waits(0.3, 0.1)
    slow = np.arange(200) % 2 == 0
    fetch_s = np.where(slow, 0.25, 0.05)
    rows["main_thread"][rows["worker"] == 0] = 0.9
    fetches = Fetching(RunView(clean(disturbed(rows, fetch_s, 0.04, input_s=0.1))).judged)
    assert fetches.slow_worker is None
    rows["main_thread"][rows["worker"] == 0] = 0.01
    fetches = Fetching(RunView(clean(disturbed(rows, fetch_s, 0.04, input_s=0.1))).judged)
    assert fetches.slow_worker is not None and fetches.slow_worker.worker == 0


def test_a_gpu_waits_for_nobody_elses_cores() -> None:
    """Two workers, 0.32 s of sleep and 0.04 s without a core for a batch of a GPU's 0.1 s."""
    waits = core_waits(0.2, 0.1)
    result = judge(disturbed(waits, 0.36, 0.01, make=run, input_s=0.08, queued=0))
    assert finding(result, "input_bound").share == pytest.approx(0.06 / 0.16, abs=0.02)


def test_a_kernel_that_does_not_count_it_leaves_the_run_queue() -> None:
    rank = RunView(clean(disturbed(core_waits(0.6, 0.9)[:0], 0.004, 0.002, input_s=0.03))).judged
    waits = CoreWaits(rank)
    assert waits.main_thread is waits.fetch_s is waits.training_stretch is None
    assert Fetching(rank).share_alone is None and Fetching(rank).turns == 2.0


def test_a_run_that_sleeps_on_a_busy_machine_is_not_in_anybodys_way() -> None:
    result = judged(core_waits(0.01, 0.01, cores=0.05), 0.01, 0.002)
    assert "cpu_contention" not in kinds(result)


def test_steps_that_other_programs_make_longer_do_not_grow() -> None:
    """Steps of 130 and at last of 230 ms, of which the main thread had no core for a fifth, and at
    last for two thirds."""
    length = np.linspace(0.08, 0.18, 200)
    waits = core_waits(0.0, 0.1)
    grows = {"forward_s": length, "cpu_s": np.linspace(0.04, 0.06, 200)}
    found = disturbed(waits, 0.004, 0.002, **grows)
    assert "growing_steps" in kinds(judge(found))
    main = waits["role"] == 0
    waits["main_thread"][main] = np.interp(waits["time_s"][main], [5, 55], [0.3, 0.95])
    assert "growing_steps" not in kinds(judge(disturbed(waits, 0.004, 0.002, **grows)))


@pytest.mark.parametrize(
    ("times", "kind", "is_told"), [(1.5, "list", False), (4, "list", True), (1.5, "sum", True)]
)
def test_cpu_time_that_the_caches_of_others_make_dearer(
    times: float, kind: str, is_told: bool
) -> None:
    """Next to other programs the same work costs up to twice the CPU time."""
    length = 0.2 * np.linspace(1, times, 200)
    grows = {"other_s": length, "cpu_s": 0.5 * length}
    kept = GrowingVariable("memory", "train.py:9", kind, 10, 400, 190, "tensors")
    found = disturbed(core_waits(0.6, 0.1), 0.004, 0.002, header={"growing": (kept,)}, **grows)
    assert ("growing_steps" in kinds(judge(found))) == is_told


@pytest.mark.parametrize("is_work", [False, True])
def test_batches_that_the_training_makes_cost_more_by_their_cpu_time(is_work: bool) -> None:
    """Without workers, next to other programs that have more and more of the cores."""
    made = np.linspace(0.1, 0.6, 200)
    cpu = 0.5 * made if is_work else np.full(200, 0.1)
    header = {"loaders": loader(num_workers=0)}
    waits = core_waits(0.6, 0.1)
    found = disturbed(waits, made, cpu, input_s=made, cpu_s=cpu + 0.02, header=header)
    assert ("growing_steps" in kinds(judge(found))) == is_work


def test_a_batch_that_the_training_makes_itself_waits_for_a_core_as_all_of_its_work() -> None:
    """2 ms of work for a batch, 20 ms until it is there; the thread has no core for 0.6 of the
    time and sleeps for none of the rest."""
    waits = core_waits(0.6, 0.0, cores=0.4)
    one = {"header": {"loaders": loader(num_workers=0)}, "input_s": 0.02, "cpu_s": 0.05}
    own = disturbed(waits, 0.02, 0.002, **one)
    fetching = Fetching(RunView(clean(own)).judged)
    assert fetching.share_alone == pytest.approx(0.045, abs=0.02)
    # Where it sleeps, what it waits for in a batch is its own.
    asleep = disturbed(core_waits(0.05, 0.0, cores=0.05), 0.02, 0.002, **one | {"cpu_s": 0.006})
    assert Fetching(RunView(clean(asleep)).judged).share_alone > 0.12


@pytest.mark.parametrize("every", [40, 1])
def test_few_samples_that_cover_seconds_tell_of_the_cores(every: int) -> None:
    """On a full machine the sampler reads every few seconds."""
    record = disturbed(core_waits(0.6, 0.9)[:1], 0.004, 0.002, input_s=0.03)
    machine = record.machine[: 2 if every > 1 else 5].copy()
    machine["interval_s"] *= every
    machine["time_s"] = np.linspace(12, 14, len(machine))
    waits = record.core_waits.copy()
    waits["time_s"] = 13.0
    record = dataclasses.replace(record, machine=machine, core_waits=waits)
    found = CoreWaits(RunView(clean(record)).judged)
    assert (found.by_others, found.main_thread) == (
        (pytest.approx(0.7), pytest.approx(0.6)) if every > 1 else (None, None)
    )


@pytest.mark.parametrize(("ready", "waits"), [(0.95, False), (0.3, True)])
def test_a_thread_that_has_no_core_does_not_wait_by_itself(ready: float, waits: bool) -> None:
    """The run queue does not tell: threads of other groups get less than their share."""
    record = run_on_cpu(
        other_s=1.0,
        cpu_s=0.09,
        machine={"cores_busy": 2.0, "cores_ours": 0.1, "runnable": 3.0},
        header={"usable_cores": 2.0},
    )
    result = judge(dataclasses.replace(record, core_waits=core_waits(ready, 0.0, cores=0.08)))
    found = [each.share or 0.0 for each in result.findings if each.kind == "script_waits"]
    assert bool(found) is waits and all(each < 1 - ready for each in found)
