"""The script's own code between the phases, on runs that are made by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helpers_watch import finding, kinds, run, run_on_cpu, table
from trainfit.findings.own_code import habit_of
from trainfit.report.watch import answer
from trainfit.results.runs import tables
from trainfit.results.runs.watched import CodeLine, RunRecord, StackLooks, ThreadLooks
from trainfit.watch.judge import judge
from trainfit.watch.rules.code_lines import costliest

SAVES = CodeLine("save.py:9", 30, ("train.py:20",), "np.savez", "zipfile.write", "disk")
LOGS = CodeLine("train.py:22", 4, (), "print", "print")


def other(*lines: CodeLine, looks: int = 80, **changes: object) -> RunRecord:
    header = {"other_code": StackLooks(looks, lines)}
    return run_on_cpu(header=header, **{"other_s": 0.1, **changes})  # type: ignore[arg-type]


def test_the_costliest_line_is_named_with_what_it_does() -> None:
    result = judge(other(SAVES, LOGS))
    found = finding(result, "other_code")
    assert str(found.place) == "save.py:9" and "np.savez" in found.title
    assert found.share == pytest.approx(0.5 * 30 / 34, abs=0.02)
    assert result.limit == "script" and answer(result).startswith("save.py:9 writes a file")


def test_a_function_whose_time_is_in_many_lines_is_named_by_its_call() -> None:
    parts = [CodeLine(f"batch.py:{n}", 5, ("train.py:7",), "", "") for n in range(8)]
    line = costliest(StackLooks(100, tuple(parts)))
    assert line is not None and str(line.place) == "train.py:7" and line.count == 40
    assert str(finding(judge(other(*parts)), "other_code").place) == "train.py:7"


def test_few_lines_of_a_function_are_named_together() -> None:
    """A log that is written and synchronized in a function that the training loop calls."""
    write = CodeLine("train.py:12", 24, ("common.py:42",), "log.write", "log.write", "disk")
    sync = CodeLine("train.py:14", 32, ("common.py:42",), "os.fsync", "os.fsync", "disk")
    found = finding(judge(other(write, sync)), "other_code")
    assert str(found.place) == "train.py:14"
    assert found.title.startswith("train.py:12-14 waits until a disk has written (`os.fsync`)")
    assert found.share == pytest.approx(0.5, abs=0.02)


def test_few_steps_are_enough_where_they_are_long() -> None:
    result = judge(other(SAVES, LOGS, steps=14, other_s=3.0))
    assert result.steps < 20 and kinds(result) == ["other_code"] and result.limit == "script"
    assert "Too few" not in answer(result)
    short = judge(other(SAVES, LOGS, steps=14))
    assert not short.findings and answer(short).startswith("Too few steps")


@pytest.mark.parametrize(
    ("called", "inner"),
    [
        ("F.cross_entropy", "torch._C._nn.cross_entropy_loss"),
        ("nn.functional.layer_norm", "torch.layer_norm"),
        ("torch.softmax", "torch.softmax"),
    ],
)
def test_a_loss_that_no_module_computes_is_no_other_code(called: str, inner: str) -> None:
    loss = CodeLine("train.py:24", 70, (), called, inner)
    assert "other_code" not in kinds(judge(other(loss)))
    found = finding(judge(other(loss, SAVES)), "other_code")
    assert str(found.place) == "save.py:9" and found.share == pytest.approx(0.5 * 0.3, abs=0.02)


def test_it_replaces_the_advice_to_look_for_the_line() -> None:
    sleeps = CodeLine("train.py:8", 70, (), "time.sleep", "time.sleep", "sleep")
    found = kinds(judge(other(sleeps, other_s=1.0, cpu_s=0.09)))
    assert "other_code" in found and "script_waits" not in found
    few = CodeLine("train.py:8", 3, (), "time.sleep", "time.sleep", "sleep")
    assert "script_waits" in kinds(judge(other(few, looks=4, other_s=1.0, cpu_s=0.09)))


def test_a_busy_gpu_loses_nothing_by_it() -> None:
    header = {"other_code": StackLooks(80, (SAVES,))}
    assert "other_code" not in kinds(judge(run(header=header)))
    idle = judge(run(header=header, other_s=0.1, gpu_gap_s=0.1))
    assert "other_code" in kinds(idle)


def test_little_of_it_is_nothing() -> None:
    assert "other_code" not in kinds(judge(other(SAVES, other_s=0.005)))


@pytest.mark.parametrize(
    ("names", "waits", "loader", "words"),
    [
        (("copy.deepcopy", "copy.deepcopy"), "", True, "AveragedModel"),
        (("f.flush", "os.fsync"), "disk", True, "fsync"),
        (("requests.post", "socket.recv"), "network", True, "queue"),
        (("torch.stack", "torch.stack"), "", False, "DataLoader"),
        (("subprocess.run", "selectors.select"), "", True, "psutil"),
        (("__main__.boundary_loss", "pow"), "", True, "whole tensors"),
        (("augment", "data.augment"), "", True, "data set"),
        (("time.sleep", "time.sleep"), "sleep", True, "remove the sleep"),
    ],
)
def test_what_to_do_instead(names: tuple[str, ...], waits: str, loader: bool, words: str) -> None:
    assert words in habit_of(names, waits, has_loader=loader).action


PLOTS = ThreadLooks(StackLooks(60, (CodeLine("plot.py:8", 40, ("train.py:5",), "sum"),)), 0.4)


def thread(cpu_share: float, ready: float, threads: ThreadLooks = PLOTS) -> RunRecord:
    """A step of 0.1 s whose main thread is on a core for so much of it, and lacks one so often."""
    times = np.arange(0.0, 60.0, 0.5)
    row = {"time_s": times, "rank": 0, "role": 0, "pid": 100, "cpu_cores": cpu_share}
    waits = table(tables.CORE_WAITS, row | {"main_thread": ready, "threads": ready}, len(times))
    parts = {"forward_s": 0.03, "backward_s": 0.05, "optimizer_s": 0.015, "other_s": 0.005}
    header = {"other_threads": threads}
    found = run_on_cpu(header=header, cpu_s=0.1 * cpu_share, **parts)
    return dataclasses.replace(found, core_waits=waits)


def test_a_python_thread_next_to_the_training_takes_the_interpreters_lock() -> None:
    result = judge(thread(0.2, 0.1))
    found = finding(result, "python_thread")
    assert result.findings[0] == found and result.limit == "script"
    assert found.place is not None and str(found.place) in answer(result)
    assert found.share == pytest.approx(0.95 - 0.2 - 0.1, abs=0.03)


@pytest.mark.parametrize(
    "healthy",
    [
        thread(0.9, 0.05),  # the training computes all the time
        thread(0.2, 0.75),  # … or other programs have its core
        thread(0.2, 0.1, ThreadLooks(PLOTS.code, 0.02)),  # the thread mostly waits
        thread(0.2, 0.1, ThreadLooks()),
    ],
)
def test_a_thread_that_takes_nothing_is_not_blamed(healthy: RunRecord) -> None:
    assert "python_thread" not in kinds(judge(healthy))
