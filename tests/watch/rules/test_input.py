"""Rules about the input, on runs that are made by hand: what is found, what is set, what is not."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers_watch import (
    GIB,
    STEP,
    WORKERS,
    finding,
    kinds,
    loader,
    run,
    run_on_cpu,
    step_rows,
    unknown_kinds,
)
from helpers_watch_random import runs
from trainfit.results.runs.learning import LearningFacts
from trainfit.results.runs.tables import EPOCH_START
from trainfit.results.runs.watched import CodeLine, GrowingVariable, StackLooks
from trainfit.results.watch import WatchResult
from trainfit.watch.judge import judge
from trainfit.watch.rules.fetching import Fetching
from trainfit.watch.view import RunView

#: A healthy step without its wait for batches, seconds.
REST_S = 0.1
SLOW = {"input_s": 0.05, "queued": 0}
INPUT_KINDS = {
    *("input_bound", "slow_worker", "epoch_start", "no_workers", "too_many_workers"),
    "unpinned_copies",
}


#: A batch as quickly made as taken from a worker.
CHEAP: Final = {"fetch_s": 0.0006, "cpu_s": 0.0006}


def number(result: WatchResult, kind: str, what: str) -> float:
    (value,) = [each.value for each in finding(result, kind).evidence if each.what == what]
    return value


# --- Nothing is wrong -----------------------------------------------------------------------------
@settings(deadline=None, max_examples=settings.default.max_examples // 2)
@given(st.integers(0, 10**6), st.booleans(), st.integers(80, 400))
def test_nothing_is_found_in_a_healthy_run(seed: int, on_gpu: bool, steps: int) -> None:
    made = run(step_rows(steps, on_gpu=on_gpu, seed=seed)) if on_gpu else run_on_cpu(steps)
    result = judge(made)
    assert not result.findings and not result.unknown
    assert result.limit == ("gpu" if on_gpu else "cpu")


def test_a_few_disturbed_steps_are_no_cause() -> None:
    waited = np.full(200, STEP["input_s"])
    waited[[50, 51, 120]] = 1.0
    result = judge(run(input_s=waited))
    assert result.step_s == pytest.approx(REST_S, rel=0.05)
    assert not result.findings


def test_waiting_while_the_gpu_has_work_costs_nothing() -> None:
    assert not judge(run(**SLOW, gpu_gap_s=0.0005, gpu_s=0.149)).findings


@settings(deadline=None, max_examples=2 * settings.default.max_examples)
@given(runs())
def test_judge_takes_any_table(made: Any) -> None:
    result = judge(made)
    assert WatchResult.from_json(result.to_json(), None) == result  # type: ignore[arg-type]
    assert len(result.timeline) <= 400
    for each in result.findings:
        assert each.share is None or 0 <= each.share <= 1
        assert each.evidence and each.cause and each.fix.action


def test_columns_that_were_not_measured_are_unknown_and_not_zero() -> None:
    result = judge(run(input_s=np.nan, step_s=REST_S))
    assert "input" not in {each.name for each in result.phases}
    assert "input_bound" in unknown_kinds(result)
    assert result.ranks[0].input_share is None
    assert not result.findings


def test_a_short_run_is_not_judged() -> None:
    result = judge(run(25, **SLOW))
    assert not result.findings and result.limit == "unknown"
    assert {*unknown_kinds(result)} >= INPUT_KINDS
    assert result.next_command == "trainfit plan -- python train.py"


# --- Waiting for batches --------------------------------------------------------------------------
def test_workers_that_are_needed_are_the_fetch_over_the_step() -> None:
    result = judge(run(**SLOW, fetches={"fetch_s": 0.58, "cpu_s": 0.58}))
    found = finding(result, "input_bound")
    assert found.fix.settings == {"num_workers": "6"}  # 0.58 / 0.1
    assert found.share == pytest.approx(0.049 / 0.149, abs=0.01)
    assert found.severity == "critical"
    assert result.limit == "input"
    assert result.next_command == "trainfit loader -- python train.py"


@pytest.mark.parametrize(
    ("command", "verb"),
    [
        ("python train.py --num-workers 4", "watch --verify"),
        ("python train.py data.num_workers=4", "watch --verify"),
        ("python train.py --loaders={num_workers:4}", "watch --verify"),
        ("python train.py --val_num_workers=4", "loader"),
        ("python train.py --num-workers", "loader"),
    ],
)
def test_a_value_that_the_command_says_can_be_tried(command: str, verb: str) -> None:
    result = judge(run(**SLOW, fetches={"fetch_s": 0.58}, header={"command": command}))
    assert result.next_command == f"trainfit {verb} -- {command}"


def grown(**changes: Any) -> GrowingVariable:
    return dataclasses.replace(
        GrowingVariable("self.cache", "data.py:17", "dict", 2, 156, 9, "tensors", 12288), **changes
    )


@pytest.mark.parametrize(
    ("cache", "persistent", "told"),
    [
        (grown(), False, True),
        (grown(name="load", kind="cache", item_bytes=None, holds=""), False, True),
        (grown(), True, False),  # it is there in the next epoch
        (grown(item_bytes=None, holds=""), False, False),  # counts, names: no samples
        (grown(kind="list"), False, False),  # a history
    ],
)
def test_a_cache_that_ends_with_its_workers_is_told(
    cache: GrowingVariable, persistent: bool, told: bool
) -> None:
    same = () if cache.kind == "cache" else (grown(name="loader.dataset.cache", kind=cache.kind),)
    growing = (*(same if cache.item_bytes else ()), cache)
    header = {"loaders": loader(persistent_workers=persistent), "worker_growing": growing}
    result = judge(run(header=header, **SLOW, fetches={"fetch_s": 0.58, "cpu_s": 0.58}))
    found = finding(result, "input_bound")
    assert (f"`{cache.name}` is lost with the workers" in found.title) == told
    assert (found.fix.settings.get("persistent_workers") == "True") == told


def test_no_more_workers_than_idle_cores() -> None:
    result = judge(
        run(**SLOW, fetches={"fetch_s": 0.98, "cpu_s": 0.98}, machine={"cores_busy": 6.0})
    )
    found = finding(result, "input_bound")
    assert found.fix.settings == {"num_workers": "6"}  # 4 and 2 idle cores, of the 10 needed
    assert "more would need more idle cores" in found.fix.action


@pytest.mark.parametrize("busy", [7.4, 8.0])
def test_workers_are_never_raised_where_cores_are_saturated(busy: float) -> None:
    result = judge(
        run(
            **SLOW,
            fetches={"fetch_s": 0.9, "cpu_s": 0.9, "decode_s": 0.6},
            machine={"cores_busy": busy, "cores_ours": busy - 0.2},
        )
    )
    found = finding(result, "input_bound")
    assert not found.fix.settings
    assert "the batches need 8.9 cores, 8 are usable" in found.cause
    assert "decoding" in found.cause
    assert "more workers would not help" in found.fix.action
    # What is said next is no search for a number of workers: the script is to change.
    assert result.next_command == "trainfit watch -- python train.py"


@pytest.mark.parametrize(("threads", "told"), [(8, True), (1, False)])
def test_cores_that_a_batchs_threads_fill_say_nothing_of_workers(threads: int, told: bool) -> None:
    """README's script on two cores: 15 batches/s by two threads, 38 by two workers of one each."""
    none = loader(num_workers=0, prefetch_factor=None, persistent_workers=False)
    header = {"loaders": none, "threads": {"torch": threads}}
    machine = {"cores_busy": 8.0, "cores_ours": 7.9}
    result = judge(run(**SLOW, header=header, machine=machine))
    found = finding(result, "input_bound")
    assert ("would not help" not in found.fix.action) is told
    assert (result.next_command == "trainfit loader -- python train.py") is told


@pytest.mark.parametrize("workers", [0, 4])
def test_nothing_is_said_of_workers_where_other_programs_have_the_cores(workers: int) -> None:
    """Two busy loops on two cores: a worker would have its turns, and on a quiet machine a core."""
    header = {"loaders": loader(num_workers=workers), "worker_threads": {"torch": 8}}
    machine = {"cores_busy": 8.0, "cores_ours": 4.0, "runnable": 16.0}
    fetches = {"fetch_s": 0.9, "cpu_s": 0.5, "decode_s": 0.6}
    busy = {"cpu_cores": 0.5, "hottest_thread": 0.1}
    result = judge(run(**SLOW, header=header, fetches=fetches, machine=machine, processes=busy))
    found = finding(result, "input_bound")
    assert "other programs keep 4.0 of them busy" in found.cause and not found.fix.settings
    assert "would not help" not in found.fix.action and found.confidence == "possible"
    # Its threads are enough to fill the cores by themselves.
    assert ("first limit the 8 threads in each worker" in found.fix.action) == (workers > 0)
    assert "trainfit loader" in found.fix.action
    assert result.next_command == "trainfit loader -- python train.py"


def test_workers_that_mostly_wait_are_raised_on_full_cores_too() -> None:
    """Other programs fill the cores, and a batch waits for its storage."""
    machine = {"cores_busy": 8.0, "runnable": 16.0, "cores_ours": 0.5}
    slow = {"fetch_s": 0.58, "cpu_s": 0.01}
    found = finding(judge(run(**SLOW, fetches=slow, machine=machine)), "input_bound")
    assert found.fix.settings == {"num_workers": "6"}
    # Of the cores that other programs fill, threads that come back get their share.
    half = {"fetch_s": 1.2, "cpu_s": 0.5}
    found = finding(
        judge(run(**SLOW, fetches=half, machine=machine | {"runnable": 8.0})), "input_bound"
    )
    assert found.fix.settings == {"num_workers": "12"}
    # What its CPU time takes on crowded cores is no waiting for storage.
    crowded = machine | {"runnable": 160.0}
    slow |= {"cpu_s": 0.05, "decode_s": 0.4}
    found = finding(judge(run(**SLOW, fetches=slow, machine=crowded)), "input_bound")
    assert not found.fix.settings and "All cores are busy" in found.cause


def test_ready_batches_are_late_where_the_cores_are_full() -> None:
    values: dict[str, Any] = {"input_s": 0.05, "queued": 8, "fetches": {"fetch_s": 2, "cpu_s": 1}}
    found = finding(judge(run(**values, machine={"cores_busy": 8.0})), "input_bound")
    assert "All cores are busy" in found.cause and "transfer" not in found.title
    few = values | {"fetches": {"fetch_s": 0.05, "cpu_s": 0.05}}
    found = finding(judge(run(**few, machine={"cores_busy": 8.0})), "input_bound")
    assert "hand-off" in found.cause and "the transfer of those that are ready" in found.title


def test_a_quota_counts_as_the_cores() -> None:
    header = {"quota_cores": 4.0}
    machine = {"cores_busy": 5.0, "cores_ours": 3.9}
    result = judge(
        run(**SLOW, header=header, fetches={"fetch_s": 0.9, "cpu_s": 0.9}, machine=machine)
    )
    assert not finding(result, "input_bound").fix.settings


@pytest.mark.parametrize(
    ("column", "part"),
    [("read_s", "disk"), ("decode_s", "decode"), ("transform_s", "transform"),
     ("collate_s", "collate")],
)  # fmt: skip
def test_the_part_that_dominates_is_named(column: str, part: str) -> None:
    fetches = {"read_s": 0.01, "decode_s": 0.01, "transform_s": 0.01, "collate_s": 0.01}
    fetches |= {"fetch_s": 0.5, "cpu_s": 0.5, column: 0.4}
    result = judge(run(**SLOW, fetches=fetches))
    assert number(result, "input_bound", f"{part}, share of a batch's time") == pytest.approx(0.8)


def test_waiting_without_cpu_time_is_the_disk_where_parts_are_not_told() -> None:
    parts = dict.fromkeys(("read_s", "decode_s", "transform_s", "collate_s"), np.nan)
    result = judge(run(**SLOW, fetches=parts | {"fetch_s": 0.6, "cpu_s": 0.06}))
    assert number(result, "input_bound", "disk, share of a batch's time") == pytest.approx(0.9)


@pytest.mark.parametrize("queued", [4, 0])
def test_batches_that_are_ready_but_late_are_a_matter_of_the_transfer(queued: int) -> None:
    result = judge(run(input_s=0.05, queued=queued, fetches={"fetch_s": 0.05}))
    found = finding(result, "input_bound")
    assert "hand-off" in found.cause and not found.fix.settings
    assert "pin_memory=True" in found.fix.action and "pickled" in found.fix.action


def test_nothing_is_pinned_without_a_gpu() -> None:
    late = {"fetch_s": 0.05, "bytes": 1 << 26}
    found = finding(judge(run_on_cpu(input_s=0.03, queued=4, fetches=late)), "input_bound")
    assert "hand-off" in found.cause and "pickled" in found.fix.action
    assert "pin" not in f"{found.cause} {found.fix.action}"


def test_ready_batches_that_cost_less_than_the_hand_off_need_no_workers() -> None:
    found = finding(judge(run(input_s=0.05, queued=4, fetches=CHEAP)), "input_bound")
    assert found.fix.settings == {"num_workers": "0"}
    assert "hand-off" in found.cause


def test_batches_that_cost_less_than_the_hand_off_are_not_given_workers() -> None:
    header = {"loaders": loader(num_workers=0, prefetch_factor=None, persistent_workers=False)}
    # Of steps of 3 ms; 30 ms of other work would hide the millisecond.
    step = dict.fromkeys(("copy_s", "forward_s", "backward_s", "optimizer_s"), 0.0005)
    step |= {"sync_s": 0.0, "other_s": 0.0, "input_s": 0.0009, "gpu_gap_s": 0.0009}
    result = judge(run(**step, queued=-1, header=header, fetches=CHEAP))
    assert "no_workers" not in kinds(result)
    found = finding(result, "input_bound")
    assert not found.fix.settings and "workers would not help" in found.fix.action


@pytest.mark.parametrize(("batch_s", "settings"), [(0.03, {"num_workers": "0"}), (0.08, {})])
def test_ready_batches_that_cost_more_to_take_than_to_make(
    batch_s: float, settings: dict[str, str]
) -> None:
    result = judge(run(input_s=0.05, queued=4, fetches={"fetch_s": batch_s, "cpu_s": batch_s}))
    assert finding(result, "input_bound").fix.settings == settings


def test_cheap_batches_are_no_fault_of_the_data_set() -> None:
    """A TensorDataset without workers: what little its batches cost they cost with any settings."""
    fetches, header = {"fetch_s": 4e-4, "cpu_s": 4e-4}, {"loaders": loader(num_workers=0)}
    step = {"forward_s": 1e-3, "backward_s": 1e-3, "optimizer_s": 1e-3, "other_s": 0.0}
    for waits_s, severity in ((5e-4, "info"), (2e-3, "critical")):
        made = run_on_cpu(4000, header=header, fetches=fetches, input_s=waits_s, **step)
        found = finding(judge(made), "input_bound")
        assert found.severity == severity and "would not help" in found.fix.action


def test_a_hand_off_that_waits_for_a_core_is_no_reason_against_workers() -> None:
    machine = {"cores_busy": 8.0, "cores_ours": 2.0, "runnable": 24.0}
    made = run(input_s=0.05, queued=4, machine=machine, fetches={"fetch_s": 0.03, "cpu_s": 0.03})
    assert not finding(judge(made), "input_bound").fix.settings


def test_augmentations_go_to_the_gpu_only_where_there_is_one() -> None:
    cheap: dict[str, Any] = {"fetches": {"fetch_s": 0.9, "cpu_s": 0.9, "transform_s": 0.6}}
    cheap["machine"] = {"cores_busy": 8.0, "cores_ours": 7.8}
    assert "to the GPU" in finding(judge(run(**SLOW, **cheap)), "input_bound").fix.action
    assert "GPU" not in finding(judge(run_on_cpu(**SLOW, **cheap)), "input_bound").fix.action


def test_uneven_batches_want_more_of_them_ahead() -> None:
    times = np.where(np.arange(200) % 5 == 0, 0.5, 0.1)
    result = judge(run(**SLOW, fetches={"fetch_s": times}))
    assert finding(result, "input_bound").fix.settings == {"prefetch_factor": "4"}


def test_every_eighth_step_waits_for_all() -> None:
    waited = np.where(np.arange(240) % 8 == 0, 0.4, 0.001)
    result = judge(run(240, input_s=waited, queued=0, fetches={"fetch_s": 0.58, "cpu_s": 0.58}))
    assert finding(result, "input_bound").share == pytest.approx(0.05 / 0.15, abs=0.03)


def test_without_fetches_the_wait_is_told_and_its_cause_is_not() -> None:
    fetches = {"fetch_s": np.nan, "cpu_s": np.nan}
    found = finding(judge(run(**SLOW, fetches=fetches)), "input_bound")
    assert found.confidence == "possible" and not found.fix.settings


def test_without_events_of_the_gpu_the_host_is_believed_a_little() -> None:
    made = run(**SLOW, gpu_s=np.nan, gpu_gap_s=np.nan, fetches={"fetch_s": 0.58})
    assert finding(judge(made), "input_bound").confidence == "possible"


def test_later_batches_of_an_accumulation_count_where_the_stream_was_empty() -> None:
    made = run(
        **SLOW, batches=4, gpu_gap_s=0.0, gpu_s=0.149, fetches={"fetch_s": 0.2, "cpu_s": 0.2}
    )
    result = judge(made)
    assert finding(result, "input_bound").fix.settings == {"num_workers": "8"}  # 4 × 0.2 / 0.1
    assert result.gpu_busy == pytest.approx(0.67, abs=0.02)


def test_on_a_cpu_all_of_the_wait_counts() -> None:
    result = judge(run_on_cpu(**SLOW, fetches={"fetch_s": 0.58, "cpu_s": 0.58}))
    assert finding(result, "input_bound").share == pytest.approx(0.34, abs=0.01)
    assert result.gpu_busy is None


# --- One slow worker ------------------------------------------------------------------------------
def test_one_slow_worker_is_named_and_is_all_there_is_to_say() -> None:
    turns = np.arange(200) % WORKERS
    result = judge(run(**SLOW, fetches={"fetch_s": np.where(turns == 2, 0.6, 0.2)}))
    assert kinds(result) == ["slow_worker"]
    found = finding(result, "slow_worker")
    assert "Worker 2 needs 3.0 times" in found.title
    assert result.limit == "input"


def test_a_worker_whose_threads_take_turns_with_those_of_others_is_no_slow_one() -> None:
    turns = np.arange(200) % WORKERS
    fetches = {"fetch_s": np.where(turns == 2, 0.6, 0.2)}
    at_work = {"hottest_thread": 0.3, "cpu_cores": 1.6}

    def found(threads: int, runnable: float, processes: dict[str, float] = at_work) -> bool:
        header, crowd = {"worker_threads": {"torch": threads}}, {"runnable": runnable}
        made = run(**SLOW, fetches=fetches, header=header, machine=crowd, processes=processes)
        return "slow_worker" in kinds(judge(made))

    assert not found(8, 40.0)
    assert found(1, 40.0) and found(8, 4.0)
    assert found(8, 40.0, {"hottest_thread": 0.3, "cpu_cores": 0.3})  # a pool that nothing uses


def test_where_the_others_are_too_slow_as_well_the_loss_is_divided() -> None:
    turns = np.arange(200) % WORKERS
    result = judge(run(input_s=0.1, queued=0, fetches={"fetch_s": np.where(turns == 2, 0.8, 0.5)}))
    assert {*kinds(result)} == {"slow_worker", "input_bound"}
    both = sum(finding(result, kind).share or 0.0 for kind in kinds(result))
    assert both == pytest.approx(0.5, abs=0.02)


def test_a_worker_of_the_evaluations_loader_is_no_slow_one() -> None:
    """The training has one worker, the evaluation two: number 1 is the evaluation's."""
    turns = np.arange(200) % 2
    made = {"fetch_s": np.where(turns == 1, 0.35, 0.1), "worker": turns, "pid": 101 + turns}
    header = {"loaders": loader(num_workers=1)}
    assert "slow_worker" not in kinds(judge(run(**SLOW, header=header, fetches=made)))
    header = {"loaders": loader(num_workers=2)}
    assert "slow_worker" in kinds(judge(run(**SLOW, header=header, fetches=made)))
    # What an evaluation without workers makes in the training process is none of theirs, either.
    made = {"worker": np.where(turns == 1, -1, 0), "fetch_s": np.where(turns == 1, 0.35, 0.1)}
    one = RunView(run(**SLOW, header={"loaders": loader(num_workers=1)}, fetches=made)).judged
    assert Fetching(one).fetch_s == pytest.approx(0.1)


def test_a_slow_worker_that_nobody_waits_for_is_no_fault() -> None:
    turns = np.arange(200) % WORKERS
    assert not judge(run(fetches={"fetch_s": np.where(turns == 2, 0.35, 0.2)})).findings


# --- Epochs ---------------------------------------------------------------------------------------
def epochs(
    persistent: bool, made: int = 1, every: int = 20, restarted: str | None = None
) -> WatchResult:
    starts = np.arange(200) % every == 0
    waited = np.where(starts, 1.5, 0.001)
    flags = np.where(starts, EPOCH_START, 0)
    loaders = loader(persistent_workers=persistent, made=made)
    learning = LearningFacts(steps=8, restarted=restarted)
    header = {"loaders": loaders, "learning": learning}
    return judge(run(input_s=waited, flags=flags, header=header))


def test_the_start_of_epochs_is_told_apart() -> None:
    result = epochs(persistent=False)
    assert kinds(result) == ["epoch_start"]
    found = finding(result, "epoch_start")
    assert found.fix.settings == {"persistent_workers": "True"} and found.confidence == "certain"
    assert found.share == pytest.approx(1.5 / 3.5, abs=0.04)


def test_persistent_workers_are_not_recommended_again() -> None:
    found = finding(epochs(persistent=True), "epoch_start")
    assert not found.fix.settings and "longer" in found.fix.action


def test_a_loader_that_is_made_for_each_epoch_cannot_keep_its_workers() -> None:
    found = finding(epochs(persistent=False, made=10), "epoch_start")
    assert not found.fix.settings and "make the DataLoader once" in found.fix.action
    assert finding(epochs(persistent=False, made=3), "epoch_start").fix.settings


@pytest.mark.parametrize("restarted", [True, False])
def test_what_a_worker_begins_with_is_no_unevenness(restarted: bool) -> None:
    """A buffer that is filled in each epoch: to keep more batches ready would not help."""
    starts = np.arange(200) % 20 == 0
    waited = {"input_s": np.where(starts, 1.5, 0.001), "flags": np.where(starts, EPOCH_START, 0)}
    first = {"fetch_s": np.where(starts, 1.2, 0.02), "worker": 0}
    first["pid"] = 101 + np.cumsum(starts) if restarted else 101
    header = {"loaders": loader(num_workers=1, persistent_workers=not restarted)}
    result = judge(run(**waited, header=header, fetches=first))
    found = finding(result, "epoch_start")
    assert ("the first batch of a worker needs 1.2 s" in found.title) == restarted
    assert ("shuffle buffer" in found.fix.action) == restarted
    assert Fetching(RunView(run(**waited, header=header, fetches=first)).judged).is_uneven != (
        restarted
    )


def test_a_pass_over_the_data_for_each_step_is_no_epoch() -> None:
    """next(iter(loader)): to keep the workers would leave their batches unused all the same."""
    result = epochs(persistent=False, every=1, restarted="train.py:19")
    assert kinds(result) == ["epoch_start"] and str(result.findings[0].place) == "train.py:19"
    found = result.findings[0]
    assert found.title.startswith("Each step starts a new pass") and not found.fix.settings
    assert "batches = iter(loader)" in found.fix.action
    some = epochs(persistent=False, restarted="train.py:19")  # a line that is not of most steps
    assert finding(some, "epoch_start").fix.settings
    assert "iterator_restarted" in kinds(some)


def test_one_start_alone_is_not_enough() -> None:
    waited, flags = np.full(100, 0.001), np.zeros(100, int)
    waited[50], flags[50] = 3.0, EPOCH_START
    result = judge(run(100, input_s=waited, flags=flags))
    assert not result.findings and unknown_kinds(result) == ["epoch_start"]


# --- Number of workers ----------------------------------------------------------------------------
def without_workers(**more: Any) -> WatchResult:
    header = {"loaders": loader(num_workers=0, prefetch_factor=None, persistent_workers=False)}
    fetches = {"fetch_s": 0.15, "cpu_s": 0.15}
    return judge(run(input_s=0.15, queued=-1, header=header, fetches=fetches, **more))


def test_without_workers_the_number_is_given() -> None:
    result = without_workers()
    assert kinds(result) == ["no_workers"]
    assert finding(result, "no_workers").fix.settings["num_workers"] == "2"  # 0.15 / 0.1
    assert finding(result, "no_workers").share == pytest.approx(0.6, abs=0.02)


def test_what_workers_gain_is_limited_by_their_number_and_the_cores() -> None:
    """Batches that cost 30 times the step: two workers on two cores make steps twice as fast."""
    values: dict[str, Any] = {"input_s": 3.0, "queued": -1, "cpu_s": 3.0}
    values |= {"header": {"loaders": loader(num_workers=0), "usable_cores": 2.0}}
    values |= {"machine": {"cores_busy": np.nan}}
    fix = finding(judge(run(**values, fetches={"fetch_s": 3.0, "cpu_s": 3.0})), "no_workers").fix
    assert fix.settings["num_workers"] == "2" and fix.gain == pytest.approx(2.0, abs=0.1)
    assert finding(without_workers(), "no_workers").fix.gain is None  # the training is the limit


@pytest.mark.parametrize(("cpu_s", "workers"), [(1.0, "2"), (0.01, "10")])
def test_without_samples_of_the_cores_who_computes_gets_one_each(
    cpu_s: float, workers: str
) -> None:
    values: dict[str, Any] = {"input_s": 1.0, "queued": -1, "cpu_s": cpu_s}
    values |= {"header": {"loaders": loader(num_workers=0), "usable_cores": 2.0}}
    values |= {"machine": {"cores_busy": np.nan}}
    result = judge(run(**values, fetches={"fetch_s": 1.0, "cpu_s": cpu_s}))
    assert finding(result, "no_workers").fix.settings["num_workers"] == workers


def test_without_workers_and_without_an_idle_core_they_are_not_recommended() -> None:
    result = without_workers(machine={"cores_busy": 8.0})
    assert kinds(result) == ["input_bound"]
    assert not finding(result, "input_bound").fix.settings


def test_without_workers_a_batch_that_waits_gets_them_on_full_cores_too() -> None:
    """What its CPU time is, only the step's tells: the training process makes it."""
    values: dict[str, Any] = {"input_s": 0.15, "queued": -1, "cpu_s": 0.01}
    values |= {"header": {"loaders": loader(num_workers=0)}, "machine": {"cores_busy": 8.0}}
    result = judge(run(**values, fetches={"fetch_s": 0.15, "cpu_s": np.nan}))
    assert finding(result, "no_workers").fix.settings["num_workers"] == "2"


def many_workers(number: int, **machine: Any) -> WatchResult:
    return judge(
        run(
            header={"loaders": loader(num_workers=number)},
            gpu_gap_s=0.01,
            cpu_s=0.06,
            machine=machine,
            processes={"involuntary_switches": 200.0, "cpu_cores": 0.3},
        )
    )


def test_more_workers_than_cores_that_press_each_other() -> None:
    result = many_workers(24, cores_busy=8.0, cores_ours=7.8, runnable=20.0)
    assert kinds(result) == ["too_many_workers"]
    assert finding(result, "too_many_workers").severity == "warning"
    assert int(finding(result, "too_many_workers").fix.settings["num_workers"]) < 8


@pytest.mark.parametrize(("of_worker", "found"), [(0.3, True), (0.02, False)])
def test_workers_that_hardly_run_are_not_the_crowd(of_worker: float, found: bool) -> None:
    """24 workers and 40 threads that take turns: the workers' are 36 or 2 of these."""
    made = run(
        header={"loaders": loader(num_workers=24), "threads": {"torch": 1}},
        gpu_gap_s=0.01,
        cpu_s=0.06,
        fetches={"fetch_s": 1.5, "cpu_s": 0.05},
        machine={"cores_busy": 8.0, "cores_ours": 7.8, "runnable": 40.0},
        processes={"involuntary_switches": 200.0, "cpu_cores": of_worker},
    )
    assert ("too_many_workers" in kinds(judge(made))) is found


def test_idle_workers_that_do_no_harm_are_no_fault() -> None:
    assert not many_workers(8).findings


def test_workers_that_are_not_needed_and_fill_the_ram() -> None:
    header = {"loaders": loader(num_workers=8)}
    made = run(
        header=header,
        machine={"ram_available_bytes": 2 * GIB},
        processes={"rss_bytes": 5 * GIB},
        fetches={"fetch_s": 0.15},
    )
    found = finding(judge(made), "too_many_workers")
    assert found.fix.settings == {"num_workers": "3"}
    assert "bytes" in {each.unit for each in found.evidence}


# --- Copies ---------------------------------------------------------------------------------------
def test_copies_from_pageable_memory() -> None:
    made = run(
        copy_s=0.03,
        gpu_copy_s=0.03,
        unpinned_bytes=20_000_000,
        header={"loaders": loader(pin_memory=False)},
    )
    result = judge(made)
    assert kinds(result) == ["unpinned_copies"]
    found = finding(result, "unpinned_copies")
    assert found.fix.settings == {"pin_memory": "True"}
    assert found.share == pytest.approx(0.03 / 0.129, abs=0.01)
    assert result.limit == "copy"


def test_pageable_copies_that_cost_nothing_are_no_fault() -> None:
    assert not judge(run(unpinned_bytes=20_000_000)).findings


def test_a_copy_that_waits_for_the_work_before_costs_nothing() -> None:
    """A copy from pageable memory blocks the host until the stream comes to it."""
    assert not judge(run(copy_s=0.04, forward_s=0.001, unpinned_bytes=20_000_000)).findings


def test_without_a_gap_the_rest_of_the_step_is_taken() -> None:
    made = run(**SLOW, gpu_gap_s=np.nan, gpu_s=0.099, fetches={"fetch_s": 0.58, "cpu_s": 0.58})
    result = judge(made)
    assert finding(result, "input_bound").share == pytest.approx(0.33, abs=0.02)
    assert result.gpu_busy == pytest.approx(0.66, abs=0.02)


def test_epochs_without_workers_begin_slowly_as_well() -> None:
    starts = np.arange(200) % 20 == 0
    made = run(
        input_s=np.where(starts, 1.5, 0.001),
        flags=np.where(starts, EPOCH_START, 0),
        header={"loaders": loader(num_workers=0)},
    )
    assert kinds(judge(made)) == ["epoch_start"]


def test_no_more_is_lost_by_batches_than_they_cost_where_others_keep_the_cores() -> None:
    """A batch of 2 ms, and 24 ms of a step in which the training had no core."""
    machine = {"cores_busy": 8.0, "cores_ours": 4.0}
    waits: dict[str, Any] = {"input_s": 0.03, "queued": 0, "gpu_gap_s": 0.03}
    cheap, dear = ({"fetch_s": each, "cpu_s": each} for each in (0.002, 0.2))
    assert "input_bound" not in kinds(judge(run(**waits, fetches=cheap, machine=machine)))
    found = finding(judge(run(**waits, fetches=dear, machine=machine)), "input_bound")
    assert found.share is not None and found.share > 0.15


def test_the_line_of_what_a_worker_begins_with_is_named() -> None:
    starts = np.arange(200) % 20 == 0
    waited = {"input_s": np.where(starts, 1.5, 0.001), "flags": np.where(starts, EPOCH_START, 0)}
    first = {"fetch_s": np.where(starts, 1.2, 0.02), "pid": 101 + np.cumsum(starts), "worker": 0}
    loads = StackLooks(50, (CodeLine("data.py:12", 40, (), "pickle.load"),))
    header = {"loaders": loader(num_workers=1), "fetch_code": loads}
    found = finding(judge(run(**waited, header=header, fetches=first)), "epoch_start")
    assert (
        "needs 1.2 s, most of it at data.py:12" in found.title and str(found.place) == "data.py:12"
    )


# --- workers that have come to the end of their shards --------------------------------------------


def _of_shards(ends_at: float, **settings: Any) -> WatchResult:
    """Two workers of an iterable data set: the second has no more samples after this part of the
    run, and from then on the training waits."""
    steps = 400
    late = np.arange(steps) >= ends_at * steps
    loaders = loader(num_workers=2, **({"batches": None} | settings))
    record = run(
        steps,
        header={"loaders": loaders},
        input_s=np.where(late, 0.2, 0.001),
        queued=np.where(late, 0, 4),
        fetches={"worker": np.where(late, 0, np.arange(steps) % 2)},
    )
    return judge(record)


def test_shards_of_unequal_size_leave_one_worker_to_make_the_batches() -> None:
    found = finding(_of_shards(0.3), "input_bound")
    assert "1 of 2 workers makes them for" in found.title and "shards" in found.title
    assert "differ in size" in found.cause and "equal size" in found.fix.action
    assert not found.fix.settings  # more workers would have no shards, either


@pytest.mark.parametrize(
    ("ends_at", "settings"), [(0.97, {}), (0.3, {"batches": 5000})], ids=["its end", "by index"]
)
def test_workers_whose_shards_last_are_not_to_blame(
    ends_at: float, settings: dict[str, Any]
) -> None:
    """The last batches of an epoch come from fewer workers, and indices are dealt out to all."""
    result = _of_shards(ends_at, **settings)
    assert all("shards" not in each.title for each in result.findings)
