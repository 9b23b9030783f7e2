"""The first line of a watched run: the costliest cause, its line, and what a fix may gain."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from helpers_watch import kinds, loader, run, run_on_cpu, watch_screen
from trainfit.findings.ranking import gain
from trainfit.report.watch import answer, nothing_found
from trainfit.results.findings import Finding
from trainfit.results.runs.learning import LearningFacts, Misuse, ScheduleFades
from trainfit.results.runs.tables import CHECKPOINT, EVALUATION, LOSS_NOT_FINITE
from trainfit.results.runs.watched import CodeLine, Event, StackLooks
from trainfit.results.watch import WatchResult
from trainfit.watch.judge import judge


def test_the_costliest_cause_has_its_line_and_gain() -> None:
    result = judge(run(input_s=0.1))
    assert answer(result).startswith("Waiting for batches costs 49% of the time")
    assert "at train.py:41" in answer(result)
    assert answer(result).endswith(": up to 2× as fast without it")
    lines = [line.text for line in watch_screen(result)]
    assert any("The DataLoader is the limit: median step" in line for line in lines)
    assert len(lines) <= 25


def test_a_large_evaluation_comes_before_a_small_wait() -> None:
    often = np.arange(200) % 50 == 0
    columns = {"evaluation_s": np.where(often, 4.0, 0.0), "flags": np.where(often, EVALUATION, 0)}
    events = [Event(6.0, "evaluation", 0, 4.0, "train.py:70")]
    result = judge(run_on_cpu(**columns, input_s=0.02, events=events))
    assert kinds(result)[:2] == ["evaluation_share", "input_bound"]
    assert "train.py:70" in answer(result) and "as fast" not in answer(result)


def test_a_checkpoint_has_the_line_that_writes_it() -> None:
    often = np.arange(200) % 20 == 0
    columns = {"checkpoint_s": np.where(often, 2.0, 0.0), "flags": np.where(often, CHECKPOINT, 0)}
    events = [Event(6.0, "checkpoint", 0, 2.0, "train.py:80")]
    result = judge(run_on_cpu(**columns, events=events))
    assert answer(result).startswith("Writing checkpoints costs 49% of the time, at train.py:80")


@pytest.mark.parametrize("from_step", [30, 190])
def test_a_loss_that_is_nan_comes_before_all_that_costs_time(from_step: int) -> None:
    flags = np.where(np.arange(200) >= from_step, LOSS_NOT_FINITE, 0)
    result = judge(run(input_s=0.5, flags=flags))
    assert answer(result) == f"The loss is NaN or infinite from step {from_step} on"
    assert "input_bound" in kinds(result)


def test_a_learning_rate_of_zero_comes_before_all_that_costs_time() -> None:
    facts = LearningFacts(steps=50, optimized=4, zero_rates=50)
    result = judge(run(input_s=0.5, header={"learning": facts}))
    assert kinds(result)[:2] == ["rate_zero", "input_bound"]


@pytest.mark.parametrize(
    ("factor", "step", "severity"),
    [(0.1, 240, "critical"), (0.1, 4000, "warning"), (0.1, 8000, ""), (0.95, 4000, "")],
)
def test_a_schedule_in_epochs_that_each_batch_steps(
    factor: float, step: int, severity: str
) -> None:
    """Of epochs of 1000 steps."""
    fades = ScheduleFades("StepLR", 30, factor, step, "train.py:12")
    result = judge(run(header={"learning": LearningFacts(steps=8, schedule_fades=fades)}))
    found = [each for each in result.findings if each.kind == "rate_vanishes"]
    assert [each.severity for each in found] == [severity] * bool(severity)
    told = LearningFacts(steps=8, schedule_fades=dataclasses.replace(fades, step=150))
    assert kinds(judge(run(input_s=0.5, header={"learning": told})))[0] == "rate_vanishes"
    if severity:
        assert answer(result).startswith("StepLR is stepped with each optimizer step")
        assert f"after {step} steps" in answer(result) and "train.py:12" in answer(result)


def test_what_a_checkpoint_s_function_does_next_to_it_is_of_the_checkpoint() -> None:
    """A hash and a copy; and not what the loop does near the line that saves."""
    often = np.arange(200) % 10 == 0
    columns = {"checkpoint_s": np.where(often, 0.15, 0.0), "flags": np.where(often, CHECKPOINT, 0)}
    events = [Event(6.0, "checkpoint", 0, 0.15, "train.py:10")]

    def judged(line: int, *callers: str) -> str:
        hashes = CodeLine(
            f"train.py:{line}", 60, callers, "hashlib.sha256", "hashlib.sha256", "", "", "save"
        )
        header = {"other_code": StackLooks(300, (hashes,))}
        return answer(judge(run_on_cpu(events=events, other_s=0.03, header=header, **columns)))

    assert judged(11, "train.py:30").startswith("Writing checkpoints costs 3")
    assert "for what the script does next to it: train.py:11 `hashlib.sha256`" in judged(
        11, "train.py:30"
    )
    assert "Writing checkpoints" not in judged(11)
    assert "Writing checkpoints" not in judged(40, "train.py:30")


def test_an_evaluation_in_small_batches_is_told_their_size() -> None:
    hit = np.arange(400) % 50 == 49
    made = {"evaluation_s": np.where(hit, 2.0, 0.0), "flags": np.where(hit, EVALUATION, 0)}

    def judged(size: int, made: dict[str, Any] = made) -> Finding | None:
        (training,) = loader()
        valid = dataclasses.replace(
            training, role="evaluation", place="train.py:50", batch_size=size
        )
        result = judge(run_on_cpu(400, header={"loaders": (training, valid)}, **made))
        return next((each for each in result.findings if each.kind == "evaluation_share"), None)

    (training,) = loader()
    assert training.batch_size is not None
    alone = np.arange(400) == 200
    once = {"evaluation_s": np.where(alone, 16.0, 0.0), "flags": np.where(alone, EVALUATION, 0)}
    for found in (judged(1), judged(1, once)):
        assert found is not None and found.title.endswith("in batches of 1")
        assert "train.py:50" in found.fix.action
    usual = judged(training.batch_size)
    assert usual is not None and "in batches" not in usual.title
    assert judged(training.batch_size, once) is None  # its share depends on the watch's end


def test_rows_that_no_batch_needs_are_told_by_what_the_optimizer_costs() -> None:
    def judged(optimizer_s: float, share: str) -> WatchResult:
        told = ("512", "1500000", "24000000", "96000000", share)
        rows = Misuse("rows_untouched", told, "model.py:11")
        learning = LearningFacts(steps=8, misuses=(rows,))
        return judge(run_on_cpu(optimizer_s=optimizer_s, header={"learning": learning}))

    found = judged(0.3, "0.990").findings[0]
    assert found.kind == "rows_untouched" and found.is_critical and (found.share or 0.0) > 0.5
    assert "512 of the 1,500,000 rows" in answer(judged(0.3, "0.990"))
    for result in (judged(0.001, "0.990"), judged(0.3, "0.010")):
        assert all(each.severity == "info" for each in result.findings)


def test_what_follows_all_python_code_comes_before_the_line_that_it_slows_down() -> None:
    def judged(other_s: float) -> WatchResult:
        learning = LearningFacts(
            steps=8, misuses=(Misuse("tracing_on", ("tracemalloc", "25"), "train.py:6"),)
        )
        looks = StackLooks(80, (CodeLine("env.py:9", 78, (), "env.step", "env.step"),))
        header = {"learning": learning, "other_code": looks}
        return judge(run_on_cpu(other_s=other_s, header=header))

    result = judged(0.2)
    assert kinds(result)[:2] == ["tracing_on", "other_code"]
    assert "tracemalloc is on" in answer(result) and "train.py:6" in answer(result)
    assert judged(0.0).findings[-1].severity == "info"


def test_other_programs_are_no_headline_where_the_run_itself_has_a_cause() -> None:
    machine = {"cores_busy": 8.0, "cores_ours": 2.0, "runnable": 20.0}
    result = judge(run_on_cpu(machine=machine, input_s=0.1, header={"loaders": loader()}))
    assert "cpu_contention" in kinds(result) and kinds(result)[0] == "input_bound"


def test_nothing_was_found_is_said_only_where_enough_was_seen() -> None:
    assert nothing_found(judge(run())) == "Nothing to fix was found."
    few = judge(run(steps=12))
    assert answer(few).startswith("Too few steps to judge (8 steady steps, 20 needed; let the")
    assert nothing_found(few) == ""
    unseen = judge(run(input_s=np.nan, gpu_gap_s=0.0005))
    assert "had none" in nothing_found(unseen) and unseen.unknown
    assert nothing_found(judge(run(input_s=0.1))) == ""


def test_threads_that_take_turns_gain_at_most_what_they_cost() -> None:
    """How much of it is work that stays was not measured."""
    finding = Finding("thread_oversubscription", "critical", "8 threads", share=0.75)
    assert gain(finding) == "up to 4× as fast with its fix"
    assert (
        gain(dataclasses.replace(finding, share=0.99)) == "up to 20× as fast or more with its fix"
    )
    assert gain(dataclasses.replace(finding, share=0.02)) == ""


def test_a_model_that_was_converted_for_the_data_s_float64() -> None:
    header = {"precision": "float64", "default_dtype": "float32"}
    result = judge(run_on_cpu(header=header))
    assert kinds(result) == ["double_precision"] and "float64" in answer(result)
    meant = judge(run_on_cpu(header=header | {"default_dtype": "float64"}))
    assert not kinds(meant) and not kinds(
        judge(run_on_cpu(header=header | {"precision": "float32"}))
    )
    assert "double_precision" not in kinds(judge(run_on_cpu(header=header | {"default_dtype": ""})))


def test_a_loader_without_a_batch_is_why_nothing_trains() -> None:
    """100 samples, a batch of 128, drop_last."""
    empty = loader(batches=0, batch_size=128, num_workers=0)
    result = judge(run_on_cpu(0, header={"loaders": empty}))
    assert answer(result).startswith("The DataLoader gives no batch") and "train.py:41" in answer(
        result
    )
    assert not kinds(judge(run_on_cpu(0))) and not kinds(
        judge(run_on_cpu(header={"loaders": empty}))
    )


@pytest.mark.parametrize(("late_s", "is_told"), [(43.0, True), (8.0, False), (15.0, False)])
def test_what_comes_before_the_first_step_is_told_where_it_is_most_of_a_run(
    late_s: float, is_told: bool
) -> None:
    ends = late_s + 0.1 * np.arange(1, 200)
    result = judge(run(199, end_s=ends))
    told = [each for each in result.notes if each.startswith("the first training step was over")]
    assert len(told) == is_told and all("43.1 s of 62.9 s" in each for each in told)
