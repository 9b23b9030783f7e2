"""Why a run ended, on runs that are made by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from helpers_watch import HEADER, kinds, loader, run, watch_screen
from trainfit.report.watch import answer, live_view, progress_line
from trainfit.results.runs.watched import OOM_KILLED, Event, RunRecord
from trainfit.watch.judge import judge

FRAME = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in <module>\n'
FILES = f"{FRAME}RuntimeError: received 0 items of ancdata"
UNKNOWN = f"{FRAME}KeyError: 'x'"
FULL = f"{FRAME}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def failed(text: str, time_s: float = 20.0, **changes: Any) -> RunRecord:
    header = {"ending": "failed", "exit_code": 1} | changes
    event = Event(time_s, "exception", 200, text=text)
    # It waits for batches, too, which costs half of its time.
    return run(header=header, events=[event], input_s=0.1)


def test_why_it_failed_comes_before_what_it_lost_time_by() -> None:
    result = judge(failed(FILES))
    assert kinds(result)[0] == "open_files" and "input_bound" in kinds(result)
    assert result.findings[0].severity == "critical" and result.findings[0].last_step == 200
    assert answer(result) == "The run failed: Too many open files"
    assert progress_line(result) == "failed: Too many open files"
    lines = [line.text for line in watch_screen(result)]
    assert lines[0] == "The run failed: Too many open files." and len(lines) <= 25
    assert any("The DataLoader is the limit" in line for line in lines)
    assert "received 0 items of ancdata" in result.findings[0].cause
    assert result.next_command == f"trainfit watch -- {HEADER.command}"


def test_live_it_is_said_also_before_any_step() -> None:
    from rich.console import Console

    event = Event(1.0, "exception", 0, text=FILES)
    result = judge(run(0, header={"ending": "running"}, events=[event]))
    console = Console(width=100)
    with console.capture() as shown:
        console.print(live_view(result, 5.0))
    assert "The run failed: Too many open files" in shown.get()
    assert progress_line(result) == "failed: Too many open files"


def test_out_of_gpu_memory_is_planned_next() -> None:
    result = judge(failed(FULL))
    assert kinds(result)[0] == "gpu_out_of_memory"
    assert result.next_command == f"trainfit plan -- {HEADER.command}"


def test_an_error_of_the_scripts_own_is_named_with_its_line() -> None:
    result = judge(failed(UNKNOWN))
    assert kinds(result)[:2] == ["script_error", "input_bound"]
    assert answer(result) == "The run failed: KeyError: 'x', at /home/me/train.py:7"
    assert not any("ended by" in note for note in result.notes)


def test_an_error_in_a_worker_is_named_with_the_data_sets_line() -> None:
    text = (
        f"{FRAME}KeyError: Caught KeyError in DataLoader worker process 1.\nOriginal Traceback "
        "(most recent call last):\n"
        '  File "/v/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py", line 54, in '
        'fetch\n  File "/home/me/data.py", line 17, in __getitem__\nKeyError: 1234\n'
    )
    result = judge(failed(text))
    assert answer(result) == "The run failed: KeyError: 1234 (in a worker), at /home/me/data.py:17"
    assert "num_workers=0" in result.findings[0].fix.action


def test_a_folder_that_is_not_there_is_made_where_the_training_begins() -> None:
    result = judge(failed(f"{FRAME}RuntimeError: Parent directory runs/1 does not exist."))
    assert "runs/1" in answer(result) and "/home/me/train.py:7" in answer(result)
    assert "makedirs" in result.findings[0].fix.action


@pytest.mark.parametrize("text", ["KeyboardInterrupt", "SystemExit: 3"])
def test_ends_that_were_meant_need_no_word(text: str) -> None:
    result = judge(failed(f"{FRAME}{text}", ending="interrupted"))
    assert not any("ended by" in note for note in result.notes)
    assert kinds(result)[0] == "input_bound"


def test_the_rank_that_failed_first_is_named() -> None:
    first, other = failed(UNKNOWN, 21.0, world_size=2), failed(FILES, 20.0, rank=1, world_size=2)
    result = judge(dataclasses.replace(first, ranks=(*first.ranks, *other.ranks)))
    assert result.findings[0].kind == "open_files" and result.findings[0].rank == 1
    assert "rank 1" in answer(result)


def test_a_restart_that_finished_did_not_fail() -> None:
    assert kinds(judge(failed(FILES, ending="finished", exit_code=0)))[0] == "input_bound"


#: As faulthandler writes it of a script's thread.
CRASH = (
    "Fatal Python error: Segmentation fault\n\n"
    "Current thread 0x00007f52c13d46c0 (most recent call first):\n"
    '  File "/v/lib/python3.11/site-packages/codec/read.py", line 9 in decode\n'
    '  File "/home/me/train.py", line 7 in score\n'
    '  File "/home/me/train.py", line 20 in <module>\n'
)


@pytest.mark.parametrize(
    ("code", "ending", "text", "says"),
    [
        (-11, "failed", CRASH, "segmentation fault"),
        (139, "failed", CRASH, "segmentation fault"),
        (None, "failed", CRASH, "segmentation fault"),  # of a process that a launcher started
        (-6, "failed", CRASH.replace("Segmentation fault", "Aborted"), "aborted"),
    ],
)
def test_a_crash_is_named_with_the_line_that_it_is_in(
    code: int | None, ending: str, text: str, says: str
) -> None:
    events = [Event(20.0, "crash", text=text)]
    result = judge(run(header={"ending": ending, "exit_code": code}, events=events))
    assert kinds(result)[0] == "process_crashed"
    assert says in answer(result) and answer(result).endswith("at /home/me/train.py:7")
    assert "decode()" in result.findings[0].cause
    assert "faulthandler" not in result.findings[0].fix.action  # it is what told the line


@pytest.mark.parametrize(
    ("ending", "code", "text"),
    [
        ("finished", 0, CRASH),  # what another program made of the signal (a JVM) is no end
        ("failed", None, CRASH.replace("Segmentation fault", "Aborted")),  # by a library's timeout
        ("interrupted", -15, CRASH),
    ],
)
def test_a_stack_alone_is_no_crash(ending: str, code: int | None, text: str) -> None:
    events = [Event(20.0, "crash", text=text)]
    result = judge(run(header={"ending": ending, "exit_code": code}, events=events))
    assert "process_crashed" not in kinds(result)


def test_crashes_and_the_oom_killer() -> None:
    crashed = judge(run(header={"ending": "failed", "exit_code": -11}))
    assert kinds(crashed) == ["process_crashed"]
    assert "segmentation fault" in answer(crashed)
    note = f"{OOM_KILLED} ended 1 process of the machine during the run"
    for code in (-9, 137):
        header = {"ending": "interrupted", "exit_code": code, "notes": (note,)}
        result = judge(run(header=header))
        assert kinds(result) == ["process_killed"] and result.findings[0].cause == note
        assert "fewer workers (2 instead of 4)" in result.findings[0].fix.action


def test_a_worker_that_the_kernel_killed() -> None:
    text = f"{FRAME}RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "
    note = f"{OOM_KILLED} ended 1 process of this cgroup during the run"
    (result, other) = judge(failed(text, notes=(note,))), judge(failed(text))
    assert kinds(result)[0] == kinds(other)[0] == "worker_killed"
    assert "OOM killer" in answer(result) and result.findings[0].cause == note
    assert "by another process (SIGKILL)" in answer(other)
    # Its pipe may break before PyTorch notices.
    frame = '  File "/usr/lib/python3.11/multiprocessing/connection.py", line 9, in recv\n'
    text = f"{FRAME}{frame}ConnectionResetError: [Errno 104] Connection reset by peer"
    assert kinds(judge(failed(text, notes=(note,))))[0] == "worker_killed"
    assert kinds(judge(failed(text)))[0] == "script_error"


def test_the_line_that_a_worker_ended_at_is_named() -> None:
    text = f"{FRAME}RuntimeError: DataLoader worker (pid 7) exited unexpectedly with exit code 3."
    stack = (
        "Fatal Python error: Segmentation fault\n\n"
        "Current thread 0x00007f (most recent call first):\n"
        '  File "/v/lib/python3.11/ctypes/__init__.py", line 5 in string_at\n'
        '  File "/home/me/data.py", line 11 in decode\n'
        '  File "/home/me/data.py", line 20 in __getitem__\n'
    )
    without = failed(text)
    (rank,) = without.ranks
    events = (Event(20.0, "worker_stack", 200, text=stack), *rank.events)
    told = dataclasses.replace(without, ranks=(dataclasses.replace(rank, events=events),))
    assert answer(judge(without)) == "The run failed: A worker ended with exit code 3"
    assert str(judge(told).findings[0].place) == "/home/me/data.py:11"


def test_the_line_at_which_a_batch_does_not_come_is_named() -> None:
    without = failed(f"{FRAME}RuntimeError: DataLoader timed out after 5 seconds")
    stack = (
        "Thread 0x0000000000000000 (most recent call first):\n"
        '  File "/home/me/train.py", line 11 in __getitem__\n'
    )
    (rank,) = without.ranks
    events = (Event(20.0, "worker_hangs", 200, text=stack), *rank.events)
    told = dataclasses.replace(without, ranks=(dataclasses.replace(rank, events=events),))
    assert judge(without).findings[0].place is None
    assert str(judge(told).findings[0].place) == "/home/me/train.py:11"
    assert judge(told).findings[0].kind == "timeout"


@pytest.mark.parametrize("code", [-9, 137, -15, -2, 130, -6, 3, 1, None])
def test_what_somebody_sends_is_not_explained(code: int | None) -> None:
    assert not judge(run(header={"ending": "failed", "exit_code": code})).findings


@pytest.mark.parametrize(
    ("method", "python", "kind"),
    [
        ("spawn", "3.11", "not_importable"),
        ("", "3.14.1", "not_importable"),
        ("", "3.11", "worker_exited"),
        ("fork", "3.14.1", "worker_exited"),
    ],
)
def test_the_start_method_of_workers_is_that_of_the_runs_python(
    method: str, python: str, kind: str
) -> None:
    lost = "Can't get attribute 'Rows' on <module '__main__' (built-in)>"
    message = f"DataLoader worker (pid(s) 7) exited unexpectedly\n{lost}"
    header = {"loaders": loader(start_method=method), "python": python}
    result = judge(failed(f"{FRAME}RuntimeError: {message}", **header))
    assert kinds(result)[0] == kind


USED_UP = f"{FRAME}    x, y = next(batches)\nStopIteration"


@pytest.mark.parametrize(
    ("of_epoch", "passes", "step", "said"),
    [
        (100, 1, 100, "to its end, the DataLoader's after its 100 batches"),
        (100, 1, 101, "to its end, the DataLoader's after its 100 batches"),
        (100, 2, 201, "to its end, the DataLoader's after its 100 batches"),
        # Something else has come to its end, or a step is not a batch.
        (100, 0, 101, "to its end, as a DataLoader's does after one epoch"),
        (100, 1, 26, "to its end, as a DataLoader's does after one epoch"),
        (0, 1, 0, "next() is called of a DataLoader that gives no batch"),
    ],
)
def test_next_at_the_end_of_the_data_says_after_how_many_batches(
    of_epoch: int, passes: int, step: int, said: str
) -> None:
    loaders = loader(batches=of_epoch, passes=passes)
    event = Event(20.0, "exception", step, text=USED_UP)
    result = judge(
        run(header={"ending": "failed", "exit_code": 1, "loaders": loaders}, events=[event])
    )
    assert kinds(result)[0] == "iterator_at_end" and said in answer(result)
    assert ("batch_size" in result.findings[0].fix.action) is (of_epoch == 0)
