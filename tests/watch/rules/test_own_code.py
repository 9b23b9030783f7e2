"""The script's own code between the phases, on runs that are made by hand."""

from __future__ import annotations

import pytest

from helpers_watch import finding, kinds, run, run_on_cpu
from trainfit.findings.own_code import habit_of
from trainfit.report.watch import answer
from trainfit.results.runs.watched import CodeLine, RunRecord, StackLooks
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


@pytest.mark.parametrize(
    ("called", "inner"),
    [
        ("F.cross_entropy", "torch._C._nn.cross_entropy_loss"),
        ("nn.functional.layer_norm", "torch.layer_norm"),
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
        (("augment", "data.augment"), "", True, "data set"),
        (("time.sleep", "time.sleep"), "sleep", True, "remove the sleep"),
    ],
)
def test_what_to_do_instead(names: tuple[str, ...], waits: str, loader: bool, words: str) -> None:
    assert words in habit_of(names, waits, has_loader=loader).action
