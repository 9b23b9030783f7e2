"""Rules about the host, on runs that are made by hand, and what judge says in sum."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from helpers_watch import (
    HEADER,
    LOADER,
    finding,
    kinds,
    loader,
    run,
    run_on_cpu,
    step_rows,
    unknown_kinds,
    watch_screen,
)
from trainfit.report.watch import answer, limit_of
from trainfit.results.findings import Finding, Fix
from trainfit.results.runs.tables import CHECKPOINT, COMPILED, EVALUATION
from trainfit.results.runs.watched import CodeLine, Event, StackLooks
from trainfit.results.watch import Phase, WatchResult
from trainfit.watch import judge as limits
from trainfit.watch import thresholds
from trainfit.watch.judge import RULES, judge
from trainfit.watch.view import RunView

CROWD = {"cores_busy": 8.0, "cores_ours": 7.8, "runnable": 30.0}
PRESSED = {"involuntary_switches": 300.0, "cpu_cores": 1.6, "hottest_thread": 0.3}
#: The GPU is not always busy, so that delays of the host cost time.
HUNGRY = {"gpu_gap_s": 0.02, "cpu_s": 0.06}


# --- Launches and synchronisations ----------------------------------------------------------------
def launches(**more: Any) -> WatchResult:
    values: dict[str, Any] = {"sync_s": 0.0, "gpu_gap_s": 0.04, "gpu_s": 0.06}
    return judge(run(**(values | more), gpus={"utilization": 0.4}))


def test_a_gpu_that_waits_for_launches() -> None:
    result = launches()
    assert kinds(result) == ["host_bound_launches"]
    found = finding(result, "host_bound_launches")
    assert found.confidence == "certain" and "torch.compile" in found.fix.line
    assert result.limit == "host"


def test_gaps_between_kernels_are_seen_by_nvml_only() -> None:
    result = judge(run(sync_s=0.0, gpus={"utilization": 0.4}))
    assert kinds(result) == ["host_bound_launches"]
    assert finding(result, "host_bound_launches").share == pytest.approx(0.6, abs=0.02)
    assert finding(result, "host_bound_launches").confidence == "likely"


def test_a_little_less_utilization_is_nothing() -> None:
    assert not judge(run(sync_s=0.0, gpus={"utilization": 0.85})).findings


def test_a_host_that_sleeps_is_not_bound_by_launches() -> None:
    assert "host_bound_launches" not in kinds(launches(cpu_s=0.02))


def test_the_threads_of_both_passes_launch() -> None:
    """ACT on an H200: autograd's thread launches the backward pass, for which the main one waits;
    by CUDA events the stream is busy all the while, by NVML the GPU is not."""
    columns = {"gpu_gap_s": 0.005, "gpu_s": 0.095, "sync_s": 0.0, "cpu_s": 0.047}
    columns |= {"forward_s": 0.038, "backward_s": 0.042, "optimizer_s": 0.007}
    result = judge(run(**columns, gpus={"utilization": 0.4}))
    assert kinds(result) == ["host_bound_launches"]
    assert "the GPU is busy 40% of the time" in limit_of(result)


def test_a_copy_that_waits_for_the_gpu_is_no_copy() -> None:
    """From pageable memory, GPT-2 on an H200: 27 ms of the host's time, 0.1 of the GPU's."""
    columns = {"copy_s": 0.027, "gpu_copy_s": 0.0001, "sync_s": 0.001, "gpu_gap_s": 0.0}
    columns |= {"forward_s": 0.012, "backward_s": 0.015, "gpu_s": 0.1, "input_s": 0.0}
    phases = {each.name: each for each in judge(run(**columns)).phases}
    assert phases["copy"].host_s == pytest.approx(0.0001, rel=0.01)
    assert phases["sync"].host_s == pytest.approx(0.0279, rel=0.01)


def test_synchronisations_leave_the_gpu_idle() -> None:
    waits = StackLooks(20, (CodeLine("train.py:20", 18, (), "loss.item", "item"),))
    result = launches(sync_s=0.03, syncs=5, header={"sync_code": waits})
    assert kinds(result) == ["hidden_syncs"]
    found = finding(result, "hidden_syncs")
    assert str(found.place) == "train.py:20"
    assert {each.what: each.value for each in found.evidence}["synchronizations"] == 5
    assert result.limit == "sync"


@pytest.mark.parametrize(
    ("calls", "inner", "words"),
    [
        ("bar.set_postfix", "item", "progress bar"),
        ("wandb.log", "item", "every 50 steps"),
        ("p.grad.norm().item", "item", "clip_grad_norm_"),
        ("step", "torch._tensor.__bool__", "torch.where"),
        ("F.layer_norm", "item", "read the loss"),
        ("loss.item", "item", "read the loss"),
    ],
)
def test_what_waits_for_the_gpu_tells_what_to_do_instead(
    calls: str, inner: str, words: str
) -> None:
    waits = StackLooks(20, (CodeLine("train.py:20", 18, (), calls, inner),))
    result = launches(sync_s=0.03, syncs=5, header={"sync_code": waits})
    assert words in finding(result, "hidden_syncs").fix.action


def test_waiting_for_a_gpu_that_is_busy_is_no_loss() -> None:
    assert not judge(run(sync_s=0.06, forward_s=0.01, syncs=1)).findings


def test_without_events_launches_and_synchronisations_are_unknown() -> None:
    result = judge(run(gpu_s=np.nan, gpu_gap_s=np.nan))
    assert {"host_bound_launches", "hidden_syncs"} <= {*unknown_kinds(result)}
    assert result.gpu_busy is None and result.limit == "unknown"


def test_large_copies_from_pinned_memory() -> None:
    result = judge(run(copy_s=0.03, gpu_copy_s=0.03))
    assert kinds(result) == ["copies"]
    assert finding(result, "copies").severity == "warning"


def test_a_tenth_of_idle_time_is_worth_telling_and_less_is_not() -> None:
    assert not judge(run(sync_s=0.0, gpu_gap_s=0.007)).findings
    assert kinds(judge(run(sync_s=0.0, gpu_gap_s=0.013))) == ["host_bound_launches"]


def test_a_run_of_a_second_has_too_few_samples() -> None:
    few = {"time_s": 5.1}
    result = judge(run_on_cpu(machine={"time_s": -1.0}, processes=few))
    assert {"swapping", "cpu_contention", "one_hot_thread"} <= {*unknown_kinds(result)}


# --- Stalls ---------------------------------------------------------------------------------------
def stalls(column: str, flag: int, every: int, seconds: float) -> WatchResult:
    hit = np.arange(400) % every == every - 1
    made = {column: np.where(hit, seconds, 0.0), "flags": np.where(hit, flag, 0)}
    return judge(run(400, **made, gpu_gap_s=np.where(hit, np.nan, 0.0005)))


def test_checkpoints_and_how_often_they_should_be() -> None:
    result = stalls("checkpoint_s", CHECKPOINT, 50, 2.0)
    assert kinds(result) == ["checkpoint_stalls"]
    found = finding(result, "checkpoint_stalls")
    assert found.share == pytest.approx(2 / 7, abs=0.03)
    # 2 s are 2% of 100 s: 980 steps of 0.1 s and the checkpoint.
    assert int(found.fix.settings["checkpoint_every_steps"]) == pytest.approx(980, rel=0.1)
    assert result.limit == "checkpoint"


def test_rare_checkpoints_are_fine() -> None:
    assert not stalls("checkpoint_s", CHECKPOINT, 100, 0.3).findings


def test_one_checkpoint_tells_nothing_of_its_share() -> None:
    assert unknown_kinds(stalls("checkpoint_s", CHECKPOINT, 300, 10.0)) == ["checkpoint_stalls"]


def test_evaluation_is_told_and_no_fault() -> None:
    result = stalls("evaluation_s", EVALUATION, 50, 2.0)
    assert kinds(result) == ["evaluation_share"]
    assert finding(result, "evaluation_share").severity == "warning"
    assert "faster" not in answer(result) and "as fast" not in answer(result)
    assert result.limit == "gpu" or result.limit == "unknown"


def test_passes_without_gradients_after_nearly_each_step_are_not_called_an_evaluation() -> None:
    """Such are a rollout's or a teacher's."""
    found = finding(stalls("evaluation_s", EVALUATION, 1, 0.1), "evaluation_share")
    assert found.title.startswith("Forward passes without gradients use ")
    assert found.confidence == "likely" and "evaluate less" not in found.fix.action


@pytest.mark.parametrize(
    ("workers", "persistent", "seconds", "is_told"),
    [(2, False, 0.5, True), (0, False, 0.5, False), (2, True, 0.5, False), (2, False, 5.0, False)],
)
def test_workers_that_are_started_for_each_evaluation(
    workers: int, persistent: bool, seconds: float, is_told: bool
) -> None:
    second = dataclasses.replace(
        LOADER, role="evaluation", place="train.py:50", num_workers=workers,
        persistent_workers=persistent,
    )  # fmt: skip
    hit = np.arange(400) % 20 == 19
    spent = {"evaluation_s": np.where(hit, seconds, 0.0), "flags": np.where(hit, EVALUATION, 0)}
    result = judge(run(400, header={"loaders": (LOADER, second)}, **spent))
    action = finding(result, "evaluation_share").fix.action
    assert ("persistent_workers=True for the DataLoader at train.py:50" in action) == is_told


@pytest.mark.parametrize(("passes", "severity"), [(400, "warning"), (3, "info")])
def test_a_whole_data_set_after_each_step_is_an_evaluation(passes: int, severity: str) -> None:
    """A teacher is called in each step, too, and the data set gone over now and then."""
    second = dataclasses.replace(LOADER, role="evaluation", place="train.py:50", passes=passes)
    spent = {"evaluation_s": 0.1, "flags": EVALUATION, "gpu_gap_s": np.nan}
    result = judge(run(400, header={"loaders": (LOADER, second)}, **spent))
    found = finding(result, "evaluation_share")
    assert found.severity == severity
    assert ("after nearly each step" in found.title) == (severity == "warning")


# --- Cores ----------------------------------------------------------------------------------------
def test_threads_in_workers() -> None:
    header = {"worker_threads": {"torch": 1, "opencv": 8, "openblas": 8}}
    result = judge(run(**HUNGRY, header=header, machine=CROWD, processes=PRESSED))
    found = finding(result, "thread_oversubscription")
    assert found.fix.settings == {"OPENBLAS_NUM_THREADS": "1"}
    assert found.fix.line == "cv2.setNumThreads(0)"
    assert found.confidence == "certain"


def test_pools_that_nothing_uses_take_no_turns() -> None:
    """OpenBLAS has 8 threads in each worker, of which one is busy: there are too many workers."""
    header = {"worker_threads": {"openblas": 8}, "loaders": loader(num_workers=24)}
    one = PRESSED | {"cpu_cores": 0.3}
    found = kinds(judge(run(**HUNGRY, header=header, machine=CROWD, processes=one)))
    assert "too_many_workers" in found and "thread_oversubscription" not in found


def test_threads_of_workers_that_hardly_run_take_no_turns() -> None:
    """The pools are there, and two of a worker's threads ran, but they are not what waits."""
    header = {"worker_threads": {"openblas": 8}, "threads": {"torch": 1}}
    busy = thresholds.AT_ALL_BUSY
    idle = PRESSED | {"cpu_cores": 1.6 * busy, "hottest_thread": busy, "main": {"cpu_cores": 1.0}}
    found = kinds(judge(run(**HUNGRY, header=header, machine=CROWD, processes=idle)))
    assert "thread_oversubscription" not in found


def test_a_worker_that_makes_and_sends_batches_has_no_threads_too_many() -> None:
    """Its second thread sends what the first has made; OpenBLAS' pool is there and sleeps."""
    header = {"worker_threads": {"openblas": 8}, "threads": {"torch": 8}}
    for of_two, is_told in ((1.3, False), (6.0, True)):
        workers = PRESSED | {"cpu_cores": 0.9 * of_two, "hottest_thread": 0.9}
        found = kinds(judge(run(**HUNGRY, header=header, machine=CROWD, processes=workers)))
        assert ("thread_oversubscription" in found) == is_told


def test_threads_of_several_ranks() -> None:
    one = run(
        **HUNGRY,
        header={"world_size": 4},
        machine=CROWD,
        processes=PRESSED | {"main": {"cpu_cores": 1.6}},
    )
    ranks = tuple(
        dataclasses.replace(one.ranks[0], header=dataclasses.replace(one.header, rank=rank))
        for rank in range(4)
    )
    found = finding(judge(dataclasses.replace(one, ranks=ranks)), "thread_oversubscription")
    assert found.fix.settings == {"OMP_NUM_THREADS": "1"}  # 8 cores / 4 ranks, less their workers
    assert "torch" in found.cause


@pytest.mark.parametrize(
    "changes",
    [
        {"machine": CROWD | {"runnable": 8.0}},  # nothing waits
        {"machine": CROWD | {"cores_ours": 0.3}},  # others do, and the run next to nothing
        {"processes": {"involuntary_switches": 1.0}},
        {"gpu_gap_s": 0.0},  # the GPU has work all the time
    ],
)
def test_threads_that_do_no_harm(changes: dict[str, Any]) -> None:
    values: dict[str, Any] = HUNGRY | {"machine": CROWD, "processes": PRESSED}
    values |= {"header": {"worker_threads": {"openblas": 8}}}
    assert "thread_oversubscription" not in kinds(judge(run(**(values | changes))))


def test_a_run_queue_that_was_not_sampled_is_unknown() -> None:
    result = judge(run(machine={"runnable": np.nan}))
    assert unknown_kinds(result) == ["thread_oversubscription"] and not result.findings


def test_other_processes_on_the_cores() -> None:
    machine = {"cores_busy": 8.0, "cores_ours": 3.0, "runnable": 14.0}
    result = judge(run(**HUNGRY, machine=machine))
    assert "cpu_contention" in kinds(result)
    assert "thread_oversubscription" not in kinds(result)
    assert "cpu_contention" not in kinds(judge(run(**HUNGRY)))


def test_a_quota_that_runs_out() -> None:
    samples = len(run(**HUNGRY).machine)
    quota: dict[str, Any] = {"cgroup_periods": 1, "cgroup_throttled_s": 0.03}
    quota["cgroup_throttled"] = np.arange(samples) % 2
    result = judge(run(**HUNGRY, header={"quota_cores": 4.0}, machine=quota))
    found = finding(result, "cgroup_throttling")
    assert found.share == pytest.approx(0.3, abs=0.01)  # 0.03 s of 0.1 s
    assert found.evidence[0].value == pytest.approx(0.5, abs=0.02)


def test_a_quota_without_counters_is_unknown_and_one_that_suffices_is_fine() -> None:
    assert "cgroup_throttling" in unknown_kinds(judge(run(header={"quota_cores": 4.0})))
    fine = {"cgroup_periods": 1, "cgroup_throttled": 0, "cgroup_throttled_s": 0.0}
    assert "cgroup_throttling" not in kinds(judge(run(**HUNGRY, machine=fine)))


def test_swapping() -> None:
    result = judge(run(machine={"swap_in_bytes": 2_000_000, "memory_pressure": 0.3}))
    found = finding(result, "swapping")
    assert found.severity == "critical" and found.share == pytest.approx(0.3)
    assert found.evidence[0].value == pytest.approx(2e7, rel=0.01)


def test_own_code_in_one_thread() -> None:
    made = run(other_s=0.2, gpu_gap_s=0.2)
    found = finding(judge(made), "one_hot_thread")
    assert found.share == pytest.approx(0.67, abs=0.03)


def _waiting(**changes: Any) -> WatchResult:
    """Steps of 0.1 s without a GPU, and 1 s of which the main thread spends on no core."""
    return judge(run_on_cpu(**({"other_s": 1.0, "cpu_s": 0.09} | changes)))


def test_a_script_that_sleeps_is_not_limited_by_the_cpu() -> None:
    result = _waiting()
    found = finding(result, "script_waits")
    assert found.share == pytest.approx(0.91, abs=0.01)
    assert "92% of the time" in found.title and "faulthandler" in found.fix.action
    assert result.limit == "script" and "CPU" not in answer(result)
    assert limit_of(result).endswith("(it waits 92% of the time)")


def test_a_backward_pass_that_waits_for_its_turn_on_a_core_computes() -> None:
    """Also where the thread gets far less than its fair share."""
    slow = {"other_s": 0.01, "backward_s": 1.0, "cpu_s": 0.02}
    crowd = {"runnable": 80.0, "cores_busy": 8.0, "cores_ours": 0.2}
    assert "script_waits" not in kinds(_waiting(**slow, machine=crowd))
    assert "script_waits" in kinds(_waiting(**slow))  # the cores are free


def test_a_script_that_waits_while_the_gpu_is_idle() -> None:
    result = judge(run(other_s=0.2, gpu_gap_s=0.2, cpu_s=0.06))
    assert kinds(result) == ["script_waits"] and result.limit == "script"
    # Waiting for a GPU that works, by a call that is not hooked, is no loss.
    assert "script_waits" not in kinds(judge(run(other_s=0.2, gpu_gap_s=0.0005, cpu_s=0.06)))


def test_helpers_of_a_model_that_sleeps_do_not_compute() -> None:
    """Two threads in turn, on free cores: one would have a core of its own if it computed."""
    for cores, waits in ((0.06, True), (1.6, False)):
        main = {"cpu_cores": cores, "hottest_thread": cores / 1.5}
        made = run_on_cpu(forward_s=1.0, cpu_s=0.09, processes={"main": main})
        result = judge(made)
        assert ("script_waits" in kinds(result)) is waits


def test_a_model_that_waits_is_not_limited_by_the_cpu() -> None:
    result = judge(run_on_cpu(forward_s=1.0, cpu_s=0.09))
    assert finding(result, "script_waits").share == pytest.approx(0.91, abs=0.02)
    assert result.limit == "script"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cpu_s": np.nan}, "its CPU time is not known"),
        ({"cpu_s": 0.6, "machine": {"runnable": 16.0}}, "it waits for a core"),
        ({"machine": {"swap_in_bytes": 10**7}}, "memory is read from swap"),
        ({"machine": {"cgroup_periods": 1, "cgroup_throttled": 1}}, "a quota stops it"),
        ({"other_s": 0.001, "input_s": 1.0}, "it waits for batches"),
        ({"other_s": 0.001, "evaluation_s": 1.0}, "it evaluates"),
        ({"other_s": np.where(np.arange(200) == 50, 200.0, 0.001)}, "it waited once"),
    ],
)
def test_what_is_no_waiting_of_the_script(changes: dict[str, Any], why: str) -> None:
    assert "script_waits" not in kinds(_waiting(**changes)), why


def test_of_a_moment_that_it_waited_is_not_told_from_that_it_had_no_core() -> None:
    """60 steps of a millisecond: nobody looked at the machine meanwhile."""
    record = run_on_cpu(other_s=1.0, cpu_s=0.09)
    result = judge(dataclasses.replace(record, machine=record.machine[:0]))
    assert "script_waits" not in kinds(result)
    assert any(each.kind == "script_waits" for each in result.unknown)


def test_a_thread_that_sleeps_on_a_crowded_machine_still_sleeps() -> None:
    assert "script_waits" in kinds(_waiting(machine={"runnable": 16.0}))


def test_batches_that_the_main_thread_makes_are_no_waiting() -> None:
    """Half of the time it computes a batch, the other half it sleeps."""
    alone = {"loaders": loader(num_workers=0, prefetch_factor=None)}
    fetches = {"fetch_s": 0.9, "cpu_s": 0.9}
    made = {"header": alone, "fetches": fetches, "input_s": 0.9, "other_s": 0.9, "cpu_s": 0.95}
    found = finding(judge(run_on_cpu(**made)), "script_waits")
    assert found.share == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("columns", "limit"),
    [
        ({"other_s": 0.5, "cpu_s": 0.6}, "script"),
        ({"input_s": 0.5}, "input"),
        ({"checkpoint_s": 0.5}, "checkpoint"),
        ({"evaluation_s": 0.5}, "cpu"),
        ({}, "cpu"),
    ],
)
def test_without_a_costly_finding_the_longest_part_is_the_limit(
    columns: dict[str, Any], limit: str
) -> None:
    view = RunView(run_on_cpu(**columns))
    assert limits.limit(view.judged, ()) == limit


@pytest.mark.parametrize(("input_s", "limit"), [(0.02, "cpu"), (0.9, "input")])
def test_waiting_for_batches_is_no_limit_where_computing_takes_longer(
    input_s: float, limit: str
) -> None:
    rank = RunView(run_on_cpu(input_s=input_s)).judged
    share = max(0.12, rank.share("input") or 0.0)
    cost = Finding(
        "input_bound",
        "warning",
        "",
        (),
        "",
        (Fix(""),),
        "likely",
        share,
    )
    assert limits.limit(rank, (cost,)) == limit


def test_the_headline_names_other_programs_that_use_the_cores() -> None:
    machine = {"cores_busy": 8.0, "cores_ours": 2.0, "runnable": 20.0}
    result = judge(run_on_cpu(machine=machine))
    assert "cpu_contention" in kinds(result) and result.limit == "cpu"
    assert limit_of(result).endswith("(other programs use 6.0 of 8 cores)")


def test_pytorch_with_one_thread_on_many_cores() -> None:
    made = run_on_cpu(header={"threads": {"torch": 1}}, machine={"cores_busy": 1.5})
    result = judge(made)
    assert finding(result, "one_hot_thread").fix.settings == {"OMP_NUM_THREADS": "7"}
    assert result.next_command == "OMP_NUM_THREADS=7 trainfit watch -- python train.py"


def test_one_thread_where_the_second_of_two_cores_is_idle() -> None:
    """What else runs on a machine keeps a few percent of it busy."""
    header = {"threads": {"torch": 1}, "usable_cores": 2.0, "loaders": ()}
    machine = {"cores_busy": 1.06, "cores_ours": 1.02}
    told = [Event(0.5, "threads", 0, None, "train.py:3")]
    result = judge(run_on_cpu(header=header, machine=machine, events=told))
    found = finding(result, "one_hot_thread")
    # The environment does not change the call.
    assert str(found.at) == "train.py:3" and not found.fix.settings
    assert found.fix.line == "torch.set_num_threads(2)" and "there" in found.fix.action
    assert result.next_command == "trainfit watch -- python train.py"
    own_code = judge(run_on_cpu(header=header, machine=machine, other_s=0.1))
    assert "one_hot_thread" not in kinds(own_code)
    machine = {"cores_busy": 1.3, "cores_ours": 1.02}
    assert "one_hot_thread" not in kinds(judge(run_on_cpu(header=header, machine=machine)))


# --- What judge says in sum -----------------------------------------------------------------------
def test_phases_add_up_and_other_is_the_rest() -> None:
    result = judge(run(other_s=0.02))
    assert sum(each.share for each in result.phases) == pytest.approx(1)
    assert sum(each.host_s for each in result.phases) * result.steps == pytest.approx(
        result.seconds
    )
    assert result.phases[-1].name == "other"
    assert result.phases[-1].host_s == pytest.approx(0.02, rel=0.01)


def test_rates_and_model_flops() -> None:
    result = judge(run(header={"flops_per_sample": 1e11}))
    assert result.samples_per_s == pytest.approx(320, rel=0.01)
    assert result.mfu == pytest.approx(320 * 1e11 / 165e12, rel=0.01)
    assert judge(run(header={"flops_per_sample": None})).mfu is None
    assert judge(run(header={"flops_per_sample": 1e11, "gpu": 3})).mfu is None
    assert judge(run(samples=-1)).samples_per_s is None


def compiling(steps: Any, count: int = 60) -> WatchResult:
    """A run that compiles for 2 s in each of these steps."""
    at = np.isin(np.arange(count), steps)
    events = [Event(0.0, "compiled", int(step), None, "train.py:33") for step in steps]
    record = run_on_cpu(
        count,
        forward_s=np.where(at, 2.0, 0.03),
        flags=np.where(at, COMPILED, 0),
        events=events,
    )
    return judge(record)


def test_shapes_that_change_compile_in_step_after_step() -> None:
    found = finding(compiling(range(0, 60, 2)), "recompiles")
    assert found.severity == "critical" and str(found.place) == "train.py:33"
    assert "in 25 of 50 steps" in found.title and "dynamic=True" in found.fix.action
    assert found.share == pytest.approx(25 * 1.97 / (25 * 1.97 + 50 * 0.1), abs=0.02)
    # Nothing but such steps.
    every = compiling(range(60))
    assert kinds(every) == ["recompiles"] and not every.steps
    assert answer(every).startswith("torch.compile compiles in 50 of 50 steps")


@pytest.mark.parametrize("steps", [(0, 1), range(14), (0, 1, 30, 31, 59), (20, 40)])
def test_compilations_of_a_start_and_of_few_shapes_are_usual(steps: Any) -> None:
    assert "recompiles" not in kinds(compiling(steps))


def test_compiled_and_first_steps_are_left_out() -> None:
    flags = np.where(np.arange(200) == 100, COMPILED, 0)
    result = judge(run(flags=flags))
    assert result.steps == 189
    low, high = result.step_interval_s or (0, 0)
    assert low < (result.step_s or 0) < high


def test_a_timeline_has_at_most_400_points_and_all_the_time() -> None:
    made = run(5003)
    timeline = judge(made).timeline
    assert 300 < len(timeline) <= 400
    assert timeline[-1].step == 5002
    assert timeline[100].gpu_utilization == pytest.approx(0.97)
    assert timeline[100].cores_busy == pytest.approx(3.0)
    assert all(sum(each.phases.values()) == pytest.approx(1) for each in timeline)


def test_findings_are_sorted_by_severity_and_share() -> None:
    result = judge(
        run(400, input_s=0.05, queued=0, copy_s=0.02, gpu_copy_s=0.02, fetches={"fetch_s": 0.6})
    )
    assert kinds(result) == ["input_bound", "copies"]


def test_rows_that_no_training_can_have_had_are_left_out() -> None:
    rows = step_rows(200)
    rows["step_s"][50] = -1e30
    rows["end_s"][60] = np.inf
    rows["input_s"][70] = np.inf
    rows["step_s"][80] = np.nan
    result = judge(run(rows))
    assert not result.findings
    assert result.step_s == pytest.approx(0.1, rel=0.02)


def test_ranks_are_told_one_by_one_and_missing_ones_are_named() -> None:
    result = judge(run(header={"world_size": 2}))
    assert [each.rank for each in result.ranks] == [HEADER.rank]
    assert result.notes == ("1 of 2 ranks were recorded",)


def test_a_kind_belongs_to_one_rule() -> None:
    every = [kind for rule in RULES for kind in rule.kinds]
    assert len(every) == len(set(every))


def test_rules_give_no_other_kinds_than_they_say() -> None:
    for made in (run(5), run(input_s=0.05, header={"loaders": loader(num_workers=0)})):
        said = judge(made)
        assert {*kinds(said), *unknown_kinds(said)} <= {k for rule in RULES for k in rule.kinds}


def test_a_damaged_table_is_shown_whatever_its_shares_are() -> None:
    result = judge(run_on_cpu())
    phases = (Phase("input", 1e30, 1e30), *result.phases)
    lines = watch_screen(dataclasses.replace(result, phases=phases))
    assert 0 < max(line.text.count("█") for line in lines) <= 24


# --- Several trainings in one script --------------------------------------------------------------
def _two_trainings(other_s: float) -> WatchResult:
    """200 steps of 0.1 s, then 100 with ``other_s`` more, which a second optimizer makes."""
    late = np.arange(300) >= 200
    again = Event(20.0, "restart", 200, text="SGD")
    return judge(run_on_cpu(300, other_s=np.where(late, other_s, 0.001), events=[again]))


def test_of_two_trainings_the_longer_is_judged_and_the_other_told() -> None:
    result = _two_trainings(1.0)
    assert result.steps == 90 and result.step_s == pytest.approx(1.1, rel=0.05)
    (note,) = [each for each in result.notes if "trains 2 times" in each]
    assert "figures are of steps 200 to 299" in note and "of the others: 97." in note
    assert result.timeline[0].step < 200  # pictures show all


def test_trainings_of_alike_steps_are_judged_together() -> None:
    result = _two_trainings(0.001)
    assert result.steps == 290 and not any("trains" in each for each in result.notes)


# --- Threads, whatever else runs on the machine ---------------------------------------------------
LOADED = {"cores_busy": 2.0, "cores_ours": 0.8, "runnable": 22.0}


def loaded(**changes: Any) -> WatchResult:
    """On two cores, next to two programs that always want to run."""
    header = {"usable_cores": 2.0} | changes.pop("header", {})
    return judge(run_on_cpu(machine=LOADED, header=header, **changes))


def test_threads_of_the_main_process_are_found_next_to_other_programs() -> None:
    main = {"cpu_cores": 0.75, "hottest_thread": 0.07, "involuntary_switches": 500.0}
    header = {"threads": {"torch": 16}, "loaders": loader(num_workers=1)}
    result = loaded(header=header, backward_s=0.3, cpu_s=0.02, processes={"main": main})
    found = result.findings[0]
    assert found.kind == "thread_oversubscription" and found.is_critical
    assert "16 threads in the main process" in answer(result)
    # Its main thread waits for the others, which compute.
    assert "script_waits" not in kinds(result) and result.limit == "cpu"


def test_threads_of_workers_are_found_next_to_other_programs() -> None:
    processes = {"cpu_cores": 0.5, "hottest_thread": 0.07, "involuntary_switches": 1500.0}
    header = {"worker_threads": {"torch": 8, "openblas": 2}, "threads": {"torch": 1}}
    header |= {"loaders": loader(num_workers=2)}
    result = loaded(header=header, input_s=0.5, processes=processes)
    assert kinds(result)[:2] == ["thread_oversubscription", "input_bound"]
    assert "8 threads in each worker" in answer(result) and "train.py:41" in answer(result)
    # PyTorch sets 1 in each worker: no variable has led to more, and none would lead to less.
    fix = result.findings[0].fix
    assert not fix.settings and "leave out torch.set_num_threads(8)" in fix.action
    assert fix.line == "torch.set_num_threads(1)"
    header |= {"worker_threads_at": "train.py:12"}
    result = loaded(header=header, input_s=0.5, processes=processes)
    assert "at train.py:12" in answer(result) and "(line 12)" in result.findings[0].fix.action


def test_threads_that_no_call_of_the_script_has_raised_are_told_where_they_compute() -> None:
    processes = {"cpu_cores": 0.5, "hottest_thread": 0.07, "involuntary_switches": 1500.0}
    header = {"worker_threads": {"openblas": 8}, "threads": {"torch": 1}}
    header |= {"loaders": loader(num_workers=2)}
    header |= {"fetch_code": StackLooks(60, (CodeLine("data.py:6", 50, (), "np.dot"),))}
    result = loaded(header=header, input_s=0.5, processes=processes)
    assert kinds(result)[0] == "thread_oversubscription" and "at data.py:6" in answer(result)


def test_the_line_that_sets_the_threads_of_the_training() -> None:
    main = {"cpu_cores": 0.5, "hottest_thread": 0.05, "involuntary_switches": 3000.0}
    header = {"threads": {"torch": 16}, "loaders": loader(num_workers=1)}
    words = {"backward_s": 0.3, "cpu_s": 0.02, "processes": {"main": main}}
    told = loaded(header=header, **words, events=[Event(1.0, "threads", text="train.py:6")])
    assert "threads in the main process" in answer(told) and "at train.py:6" in answer(told)
    # What the environment says is not what that call says.
    fix = told.findings[0].fix
    assert fix.action.startswith("torch.set_num_threads(1) there") and not fix.settings
    assert fix.line == "torch.set_num_threads(1)" and told.next_command.startswith("trainfit watch")
    # The machine's own number of another library is not what fills the cores.
    pools = header | {"threads": {"torch": 16, "openmp": 16, "openblas": 2}}
    fix = (
        loaded(header=pools, **words, events=[Event(1.0, "threads", text="a.py:6")]).findings[0].fix
    )
    assert not fix.settings and fix.line == "torch.set_num_threads(1)"
    pools["threads"]["openblas"] = 64
    fix = (
        loaded(header=pools, **words, events=[Event(1.0, "threads", text="a.py:6")]).findings[0].fix
    )
    assert set(fix.settings) == {"OPENBLAS_NUM_THREADS"} and "there" in fix.action
    several = [Event(1.0, "threads", text=each) for each in ("train.py:6", "train.py:90")]
    assert "at train.py:90" in answer(loaded(header=header, **words, events=several))
    assert ", at " not in answer(loaded(header=header, **words))  # the machine's own number
