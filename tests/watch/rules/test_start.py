"""What comes before the first step: its line, and a failure there."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from helpers_watch import finding, kinds, run, run_on_cpu, step_rows
from trainfit.report.watch import answer
from trainfit.results.runs.watched import COLLECTIONS, CodeLine, Event, RunRecord, StackLooks
from trainfit.watch.judge import judge


def started(first_s: float, *lines: CodeLine, **columns: Any) -> RunRecord:
    """A run of 200 steps of 0.1 s, whose first one was over after so many seconds."""
    looks = StackLooks(sum(each.count for each in lines), lines)
    record = run_on_cpu(header={"start_code": looks}, **columns)
    record.ranks[0].steps["end_s"] += first_s
    return record


def at(count: int, place: str = "data.py:9", **told: Any) -> CodeLine:
    return CodeLine(place, count, ("train.py:30",), **told)


def test_what_the_script_does_before_it_trains_is_named_with_its_line() -> None:
    result = judge(started(60.0, at(500, calls="tokenize", inner="re.match"), at(60, "model.py:3")))
    found = finding(result, "late_start")
    assert (found.severity, str(found.place)) == ("warning", "data.py:9")
    assert "data.py:9 (`tokenize`) is busy for 50 s" in answer(result)
    assert "np.save" in found.fix.action and "as fast" not in answer(result)
    # It says more than the note does.
    assert not any("first training step was over" in each for each in result.notes)


@pytest.mark.parametrize(
    ("line", "said", "severity"),
    [
        (at(500, inner="import"), "imports", "info"),
        (at(500, inner="first batch"), "waits for the first batch", "info"),
        (at(500, inner="torch.compile"), "compiles the model", "info"),
        (at(500, calls="torch.cat", inner="torch.cat"), "joins tensors or tables", "warning"),
        (at(500, calls="requests.get", waits_for="network"), "waits for the network", "warning"),
    ],
)
def test_what_is_done_there_is_told(line: CodeLine, said: str, severity: str) -> None:
    found = finding(judge(started(60.0, line)), "late_start")
    assert said in found.title and found.severity == severity


def test_objects_that_the_garbage_collector_goes_through_while_they_are_made() -> None:
    """A data set of dicts: most of the time to make it is the collector's."""
    record = started(60.0, at(500, calls="Sample", inner="data.__init__"))

    def judged(seconds: float) -> str:
        told = Event(59.0, COLLECTIONS, 0, seconds, values={"pauses": 20.0, "longest_s": 3.0})
        first = dataclasses.replace(record.ranks[0], events=(told,))
        result = judge(dataclasses.replace(record, ranks=(first,)))
        assert "collector_pauses" not in kinds(result)
        return finding(result, "late_start").fix.action

    assert "gc.disable() before it" in judged(30.0) and "30 s in all" in judged(30.0)
    assert "gc.disable" not in judged(2.0)


def test_a_run_that_was_interrupted_before_its_first_step_is_judged() -> None:
    """Nobody knows which line it was at."""
    told = Event(40.0, "exception", text="Traceback (most recent call last):\nKeyboardInterrupt")
    made = run(step_rows(1)[:0], header={"ending": "interrupted"}, events=[told])
    assert any(each.startswith("no training step in 40 s") for each in judge(made).notes)


def test_a_start_that_is_no_fault_is_none() -> None:
    # Short, of a long run, or of many lines: then a note says how long.
    assert "late_start" not in kinds(judge(started(3.0, at(75))))
    assert "late_start" not in kinds(judge(started(12.0, at(140))))
    many = judge(started(60.0, *[CodeLine(f"f{n}.py:{n}", 100) for n in range(6)]))
    assert "late_start" not in kinds(many)
    assert any("first training step was over" in each for each in many.notes)


TRACE = """Traceback (most recent call last):
  File "/home/me/train.py", line 11, in <module>
{frames}  File "/home/me/net.py", line 7, in forward
KeyError: 'labels'"""


@pytest.mark.parametrize(
    ("frames", "part"),
    [
        ("", "in the script's own code"),
        ("torch/nn/modules/module.py", "in the forward pass"),
        ("torch/autograd/graph.py", "in the backward pass"),
        ("torch/utils/data/dataloader.py", "in the making of a batch"),
    ],
)
def test_a_failure_says_in_which_part_of_the_first_step(frames: str, part: str) -> None:
    inner = f'  File "/lib/site-packages/{frames}", line 9, in f\n' if frames else ""
    event = Event(5.0, "exception", 0, text=TRACE.format(frames=inner))
    record = run_on_cpu(steps=0, header={"ending": "failed", "exit_code": 1}, events=[event])
    result = judge(record)
    assert answer(result).startswith("The run failed: KeyError: 'labels'")
    assert result.findings[0].evidence[0].value == f"before the first step was over, {part}"
