"""Runs that stand still, and ranks and workers that are gone, made by hand."""

from __future__ import annotations

import dataclasses
import multiprocessing
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import dataloader

from helpers_watch import (
    HEADER,
    finding,
    kinds,
    loader,
    process_rows,
    run,
    run_on_cpu,
    watch_screen,
)
from trainfit.report.watch import answer, progress_line
from trainfit.results.runs.learning import LearningFacts, Misuse
from trainfit.results.runs.locked_stacks import locked_path
from trainfit.results.runs.watched import (
    CodeLine,
    Event,
    RankCommunication,
    RunRecord,
    StackLooks,
    locked_of,
)
from trainfit.torch_private.needed import WORKER_FILE, WORKER_LOOP
from trainfit.watch.judge import judge
from trainfit.watch.recorder import process

HEAD = "Thread 0x0000000000000000 (most recent call first):"
MAIN = f"""pid 7

{HEAD}
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "/lib/site-packages/torch/utils/data/dataloader.py", line 725 in __next__
  File "/home/me/train.py", line 11 in <module>"""
WORKER = f"""{HEAD}
  File "/home/me/data.py", line 8 in __getitem__
  File "/lib/site-packages/torch/utils/data/_utils/fetch.py", line 54 in fetch
  File "/lib/site-packages/{WORKER_FILE}", line 349 in {WORKER_LOOP}"""
SLEEPS = f"""pid 8

{HEAD}
  File "/home/me/train.py", line 14 in <module>"""
BACKWARD = f"""pid 9

{HEAD}
  File "/lib/site-packages/torch/autograd/graph.py", line 825 in _engine_run_backward
  File "/home/me/train.py", line 15 in <module>"""
GONE = "Traceback (most recent call last):\nRuntimeError: [gloo/x.cc:1] Connection closed by peer"
OWN = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 3, in f\nKeyError: 5'


def still(text: str, **header: Any) -> RunRecord:
    """A run of 200 steps, some 20 s, and 30 s of silence."""
    told = {"ending": "running"} | header
    return run(header=told, events=[Event(60.0, "standstill", 200, 30.0, text)])


def ranks(*each: RunRecord) -> RunRecord:
    first = each[0]
    made = []
    for number, one in enumerate(each):
        header = dataclasses.replace(one.ranks[0].header, rank=number, world_size=len(each))
        made.append(dataclasses.replace(one.ranks[0], header=header))
    return dataclasses.replace(first, ranks=tuple(made))


def test_a_worker_that_never_returns_is_named_live() -> None:
    result = judge(still(f"{MAIN}\n\n{WORKER}"))
    found = result.findings[0]
    assert found.kind == "standstill" and str(found.place) == "data.py:8"
    assert "a DataLoader worker is at data.py:8 in __getitem__" in answer(result)
    assert "a DataLoader worker" in progress_line(result)
    assert "1 of 4 workers" in found.cause and "timeout=60" in found.fix.action
    assert len(watch_screen(result)) <= 25
    assert result.next_command == "trainfit watch -- python train.py"


OVER = f"""pid 10

{HEAD}
  File "/usr/lib/python3.11/threading.py", line 1590 in _shutdown

{HEAD}
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/home/me/log.py", line 9 in run"""


@pytest.mark.parametrize(
    ("ending", "seconds", "severity"),
    [
        ("running", 30.0, "critical"),
        ("interrupted", 30.0, "critical"),
        ("finished", 30.0, "warning"),  # also where Ctrl-C ended the wait
        ("finished", 0.9, None),  # what is written at the end of each run
    ],
)
def test_a_thread_that_keeps_a_script_from_its_end_is_named(
    ending: str, seconds: float, severity: str | None
) -> None:
    event = Event(21.0 + seconds, "standstill", 200, seconds, OVER)
    result = judge(run(header={"ending": ending}, events=[event]))
    if severity is None:
        assert "standstill" not in kinds(result)
        return
    found = result.findings[0]
    assert (found.kind, found.severity, str(found.place)) == ("standstill", severity, "log.py:9")
    assert answer(result).startswith("The script is over") and "log.py:9 in run" in answer(result)
    assert "join()" in found.fix.action


@pytest.mark.parametrize(
    ("ending", "seconds", "severity"),
    [("finished", 30.0, "warning"), ("interrupted", 30.0, "critical"), ("finished", 0.4, None)],
)
def test_a_process_that_keeps_a_script_from_its_end_is_named(
    ending: str, seconds: float, severity: str | None
) -> None:
    pid = {"pid": 77.0}
    events = [Event(1.0, "child", 0, None, "train.py:9", pid)]
    events += [Event(21.0, "awaits", 200, None, "Process-1", pid)]
    # The sampler goes on as long as the process does.
    events += [Event(21.0 + seconds, "note", 200)]
    result = judge(run(header={"ending": ending}, events=events))
    if severity is None:
        assert "standstill" not in kinds(result)
        return
    found = result.findings[0]
    assert (found.kind, found.severity, str(found.place)) == ("standstill", severity, "train.py:9")
    assert "waits for the process Process-1, which train.py:9 started" in answer(result)
    assert "daemon=True" in found.fix.action


def test_a_finished_run_did_not_stand_still() -> None:
    assert "standstill" not in kinds(judge(still(SLEEPS, ending="finished")))


def test_a_batch_that_no_worker_tells_of_is_waited_for_at_the_scripts_line(tmp_path: Path) -> None:
    """A worker that was stopped by a signal, say: none of Python's own lines is named."""
    script = tmp_path / "train.py"
    script.write_text("import torch\nfor x, y in loader:\n    pass\n")
    stack = (
        "pid 1\n\nThread 0x0 (most recent call first):\n"
        f'  File "{connection.__file__}", line 395 in _recv\n'
        f'  File "{dataloader.__file__}", line 725 in __next__\n'
        f'  File "{script}", line 2 in <module>\n'
    )
    found = finding(judge(still(stack)), "standstill")
    assert "the main thread waits for a batch and is at" in found.title
    assert "train.py:2 in <module> `for x, y in loader:`" in found.title


def test_a_process_that_no_thread_could_look_into_tells_by_a_file(tmp_path: Path) -> None:
    """Code in C keeps the interpreter's lock, and the run was killed meanwhile."""
    record = run(header={"ending": "interrupted", "pid": 100})
    stem = tmp_path / "rank0"
    locked_path(stem, 100).write_text(
        "Timeout (0:00:10)!\nThread 0x01 (most recent call first):\n"
        f'  File "{tmp_path}/model.py", line 8 in forward\n'
        f'  File "{tmp_path}/train.py", line 3 in <module>\n'
    )
    first = record.ranks[0]
    told = locked_of(stem, first.header, first.steps)
    at = float(first.steps["end_s"][-1]) + 12
    told = tuple(dataclasses.replace(each, time_s=at) for each in told)
    stands = dataclasses.replace(record, ranks=(dataclasses.replace(first, events=told),))
    found = finding(judge(stands), "standstill")
    assert str(found.place).endswith("model.py:8") and found.last_step == len(first.steps)
    assert locked_of(stem, dataclasses.replace(first.header, pid=7), first.steps) == ()


def test_a_worker_that_waits_for_a_lock_has_inherited_it() -> None:
    locked = WORKER.replace(
        HEAD, f'{HEAD}\n  File "/usr/lib/python3.11/threading.py", line 169 in acquire'
    )
    found = judge(still(f"{MAIN}\n\n{locked}")).findings[0]
    assert "do not inherit locks" in found.fix.action and str(found.place) == "data.py:8"


@pytest.mark.parametrize(
    ("line", "threads", "method", "words"),
    [
        ("return (x.sin() @ x.cos()).mean(0)", 4, "fork", "does not survive a fork"),
        ("return torch.matmul(x, x.T)", 4, "fork", "does not survive a fork"),
        ("with counters_lock:", 4, "fork", "do not inherit locks"),
        # A read from a network that stands still, and work that has all threads it asks for.
        ("head = self.socket.recv(40)", 4, "fork", "the connection sends nothing"),
        ("return torch.load(self.paths[i])", 1, "fork", "fix what this line waits for"),
        ("return np.load(self.paths[i])", 1, "fork", "fix what this line waits for"),
        ("return np.linalg.svd(x)[1]", 1, "fork", "OPENBLAS_NUM_THREADS=1"),
        ("return (x.sin() @ x.cos()).mean(0)", 1, "fork", "fix what this line waits for"),
        ("return (x.sin() @ x.cos()).mean(0)", 4, "spawn", "fix what this line waits for"),
    ],
)
def test_workers_without_cpu_time_in_the_first_batch_wait_for_what_their_line_asks(
    line: str, threads: int, method: str, words: str, tmp_path: Path
) -> None:
    script = tmp_path / "data.py"
    script.write_text(f"import torch, numpy as np\n{line}\n", encoding="utf-8")
    worker = WORKER.replace("/home/me/data.py", str(script)).replace("line 8", "line 2")
    event = Event(40.0, "standstill", 0, 20.0, f"{MAIN}\n\n{worker}", {"workers_idle": 1.0})
    told = {"ending": "interrupted", "worker_threads": {"torch": threads, "openblas": 2}}
    record = run(0, header=told | {"loaders": loader(start_method=method)}, events=[event])
    result = judge(record)
    found = finding(result, "standstill")
    assert found.severity == "critical" and found is result.findings[0]
    assert str(found.place) == "data.py:2" and words in found.fix.action
    assert ("OpenMP" in found.fix.action) is ("survive" in words)
    deadlocks = "survive" in words or "OPENBLAS" in words
    assert (", which does not survive a fork" in found.title) is deadlocks


def test_a_thread_that_ended_before_is_why_the_main_thread_waits() -> None:
    """A producer of batches: no one else puts anything into the queue."""
    died = Event(20.0, "thread_died", 190, text=OWN)

    def judged(text: str, **header: Any) -> Any:
        record = still(text, **header)
        first = record.ranks[0]
        first = dataclasses.replace(first, events=(died, *first.events))
        return judge(dataclasses.replace(record, ranks=(first,)))

    result = judged(SLEEPS, loaders=loader(num_workers=0))
    assert "at train.py:14" in answer(result)
    assert "and a thread ended by KeyError: 5 at train.py:3" in answer(result)
    assert "fix that error" in finding(result, "standstill").fix.action
    # What a worker hangs in is told of it; and a training that goes on waits for nobody.
    assert "thread ended" not in answer(judged(f"{MAIN}\n\n{WORKER}"))
    goes_on = dataclasses.replace(run(), ranks=run(events=[died]).ranks)
    assert not judge(goes_on).findings


def test_a_main_thread_that_waits_is_named_with_its_line() -> None:
    result = judge(still(SLEEPS, loaders=loader(num_workers=0)))
    found = finding(result, "standstill")
    assert str(found.place) == "train.py:14" and "the main thread is at train.py:14" in found.title


def test_two_threads_that_wait_for_each_others_lock_are_both_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not a thread that waits for something else."""
    monkeypatch.chdir(tmp_path)
    lines = ["with model_lock:", "with metrics_lock:", "time.sleep(60)"]
    Path("train.py").write_text("\n".join(lines), encoding="utf-8")

    def stack(line: int, function: str) -> str:
        return f'{HEAD}\n  File "{tmp_path}/train.py", line {line} in {function}'

    def judged(other: int) -> Any:
        text = f"pid 8\n\n{stack(1, '<module>')}\n\n{stack(other, 'report')}"
        return judge(still(text, loaders=loader(num_workers=0))).findings[0]

    found = judged(2)
    assert "train.py:1" in found.title and "another thread waits at train.py:2" in found.title
    assert "same order" in found.fix.action
    assert "another thread" not in judged(3).title and "who holds the lock" in judged(3).fix.action


def test_a_profiler_that_puts_together_what_it_recorded_is_named() -> None:
    """It keeps the interpreter's lock meanwhile: no stack is seen."""
    on = LearningFacts(steps=10, misuses=(Misuse("profiler_on", ("4096",), "train.py:7"),))
    found = judge(still("pid 7", learning=on)).findings[0]
    assert found.kind == "standstill" and str(found.place) == "train.py:7"
    assert "a profiler has recorded all steps" in found.title and "schedule" in found.fix.action
    assert "profiler" not in judge(still(SLEEPS, learning=on)).findings[0].title
    ends = '  File "/lib/site-packages/torch/profiler/profiler.py", line 1 in stop\n'
    seen = judge(still(SLEEPS.replace("  File", f"{ends}  File"), learning=on)).findings[0]
    assert "a profiler has recorded all steps" in seen.title


def test_the_line_that_it_stands_at_is_no_cost_of_the_steps_before() -> None:
    looks = StackLooks(300, (CodeLine("train.py:14", 250, (), "input", "input"),))
    stands = still(SLEEPS, loaders=loader(num_workers=0), other_code=looks)
    changed = run_on_cpu(
        header={"other_code": looks, "loaders": loader(num_workers=0)}, other_s=0.1
    )
    assert "other_code" in kinds(judge(changed))
    (rank,) = changed.ranks
    event = stands.ranks[0].events
    running = dataclasses.replace(rank.header, ending="running")
    both = dataclasses.replace(rank, events=event, header=running)
    assert kinds(judge(dataclasses.replace(changed, ranks=(both,)))) == ["standstill"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("x, y = batches.get()", "other end of the queue"),
        ("plots.put(out)", "the queue is full"),
        ('answer = input("overwrite? ")', "somebody to type"),
        ("with self.lock:", "who holds the lock"),
        ("worker.join()", "a timeout"),
        ("for x, y in pool.imap(make, seeds):", "BrokenProcessPool"),
        ("compute(x)", "fix what it waits for"),
    ],
)
def test_what_the_line_waits_for_tells_the_fix(line: str, words: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{line}\n", encoding="utf-8")
    text = f'{HEAD}\n  File "{script}", line 1 in main'
    result = judge(still(text, loaders=loader(num_workers=0)))
    assert words in finding(result, "standstill").fix.action


def test_a_step_after_it_or_an_end_that_was_meant_is_no_standstill() -> None:
    assert "standstill" not in kinds(judge(still(SLEEPS, ending="finished")))
    early = run(header={"ending": "running"}, events=[Event(9.0, "standstill", 40, 6.0, SLEEPS)])
    assert "standstill" not in kinds(judge(early))


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    found = finding(judge(ranks(still(BACKWARD), still(SLEEPS))), "standstill")
    assert found.rank == 1 and str(found.place) == "train.py:14"
    assert any(each.value == "0" for each in found.evidence)
    assert "other ranks wait for this one" in found.cause


@pytest.mark.parametrize(
    ("pid", "who"),
    [(HEADER.pid, "rank 0"), (5001, "DataLoader worker 1"), (77, "a process of the run")],
)
def test_a_process_that_is_stopped_is_named(pid: int, who: str) -> None:
    made = still(MAIN)
    event = dataclasses.replace(made.ranks[0].events[0], values={"stopped": float(pid)})
    rank = dataclasses.replace(made.ranks[0], events=(event,))
    workers = process_rows([30.0, 31.0], pid=5001, role=1, worker=1)
    processes = np.concatenate([made.processes, workers])
    found = judge(dataclasses.replace(made, ranks=(rank,), processes=processes)).findings[0]
    assert found.kind == "standstill" and f"{who} (PID {pid}) is stopped" in found.title
    assert f"kill -CONT {pid}" in found.fix.action
    assert "is stopped" not in judge(made).findings[0].title


def test_times_in_collectives_are_not_told_of_ranks_that_stand_still() -> None:
    called = RankCommunication(0.05, 400)
    waits = StackLooks(100, (CodeLine("train.py:9", 90, calls="torch.distributed.barrier"),))
    words = {"communication": called, "collective_code": waits}
    goes_on = run_on_cpu(header=words)
    assert "exposed_communication" in kinds(judge(ranks(goes_on, goes_on)))
    stops = (
        run_on_cpu(
            header=words | {"ending": "running"},
            events=[Event(60.0, "standstill", 200, 30.0, stack)],
        )
        for stack in (SLEEPS, BACKWARD)
    )
    stands = judge(ranks(*stops))
    assert kinds(stands)[0] == "standstill" and "exposed_communication" not in kinds(stands)


BARRIER = f"""pid 11

{HEAD}
  File "/lib/site-packages/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/home/me/train.py", line 12 in <module>"""


def test_ranks_that_wait_for_each_other_in_different_calls_are_all_told() -> None:
    for made in (ranks(still(BACKWARD), still(BARRIER)), ranks(still(BARRIER), still(BACKWARD))):
        found = judge(made).findings[0]
        assert (found.kind, str(found.place)) == ("standstill", "train.py:12")
        assert "different calls" in found.title and "train.py:15" in found.title
        assert "all_reduce the condition" in found.fix.action
    # The one that few ranks are at is the odd one, whatever it is.
    found = judge(ranks(still(BARRIER), still(BACKWARD), still(BARRIER))).findings[0]
    assert str(found.place) == "train.py:15" and found.rank == 1
    # At one line they wait for what is not seen; a rank that does not wait is the cause.
    for made in (ranks(still(BACKWARD), still(BACKWARD)), ranks(still(BACKWARD), still(SLEEPS))):
        assert "different calls" not in judge(made).findings[0].title


def test_a_rank_that_left_without_a_word_ended_first() -> None:
    failed = {"ending": "failed", "exit_code": None}
    raised = run(
        header=failed | {"exit_code": 1}, events=[Event(30.0, "exception", 200, text=GONE)]
    )
    result = judge(ranks(raised, run(header=failed)))
    assert result.findings[0].kind == "rank_died" and result.findings[0].rank == 1
    assert "Rank 1 ended first, without an exception" in answer(result)


def test_an_exception_of_its_own_comes_before_those_that_follow_from_it() -> None:
    failed = {"ending": "failed", "exit_code": 1}
    follows = run(header=failed, events=[Event(30.0, "exception", 200, text=GONE)])
    first = run(header=failed, events=[Event(31.0, "exception", 200, text=OWN)])
    result = judge(ranks(follows, first))
    assert "Rank 1 failed first: KeyError: 5" in answer(result)
    assert str(result.findings[0].place) == "train.py:3"


def test_a_run_that_was_interrupted_has_no_dead_rank() -> None:
    ended = run(header={"ending": "interrupted", "exit_code": None})
    assert not set(kinds(judge(ranks(ended, ended)))) & {"rank_died", "rank_missing"}


def test_a_rank_that_never_came_is_missed_where_the_others_wait() -> None:
    alone = dataclasses.replace(still(BACKWARD))
    header = dataclasses.replace(HEADER, ending="running", world_size=2)
    waits = dataclasses.replace(alone.ranks[0], header=header)
    result = judge(dataclasses.replace(alone, ranks=(waits,)))
    assert "1 of" not in answer(result) or result.findings[0].kind != "rank_missing"
    assert finding(result, "rank_missing").title == "1 rank of 2 never began to train: 1"
    going = dataclasses.replace(alone.ranks[0], header=header, events=())
    assert "rank_missing" not in kinds(judge(dataclasses.replace(alone, ranks=(going,))))


@pytest.mark.parametrize(
    ("calls", "told"), [("time.sleep", True), ("torch.distributed.init_process_group", False)]
)
def test_where_a_rank_is_that_the_others_wait_for_before_the_first_step(
    calls: str, told: bool
) -> None:
    meets = BARRIER.replace("barrier", "init_process_group")
    waits = run(0, header={"ending": "running"}, events=[Event(90.0, "standstill", 0, 60.0, meets)])
    looks = StackLooks(800, (CodeLine("prepare.py:3", 800, (), calls),))
    late = run(0, header={"ending": "running", "start_code": looks})
    found = finding(judge(ranks(waits, late)), "standstill")
    assert ("rank 1 was at prepare.py:3" in found.title) is told


def test_a_worker_that_died_while_the_script_went_on() -> None:
    event = Event(10.0, "worker_died", 50, text="DataLoader worker (pid 7) is killed by signal: 9")
    result = judge(run(events=[event]))
    assert finding(result, "worker_died").severity == "warning"
    assert "is killed by signal" in finding(result, "worker_died").cause


# --- A queue that nobody reads --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "seconds", "severity"),
    [("finished", 30.0, "warning"), ("interrupted", 30.0, "critical"), ("finished", 0.4, None)],
)
def test_a_queue_that_keeps_a_script_from_its_end_is_named(
    ending: str, seconds: float, severity: str | None
) -> None:
    events = [Event(21.0, "awaits_queue", 200), Event(21.0 + seconds, "note", 200)]
    result = judge(run(header={"ending": ending}, events=events))
    if severity is None:
        assert "standstill" not in kinds(result)
        return
    found = result.findings[0]
    assert (found.kind, found.severity) == ("standstill", severity)
    assert "multiprocessing.Queue is not read" in answer(result)
    assert "cancel_join_thread()" in found.fix.action


def test_only_a_queue_that_python_waits_for_keeps_a_script() -> None:
    queue: Any = multiprocessing.Queue()
    assert not process._awaits_queue()
    queue.put(b"x" * (1 << 20))  # more than its pipe holds: the thread that sends it waits
    try:
        assert process._awaits_queue()
        queue.cancel_join_thread()  # as a DataLoader does
        assert not process._awaits_queue()
    finally:
        queue.get()
        queue.close()


def test_a_rank_that_crashed_with_fewer_batches_is_told_so() -> None:
    """gloo ends a process by SIGABRT where it gets what another call has sent."""
    crash = Event(21.0, "crash", text="Fatal Python error: Aborted\n\n")

    def judged(*batches: int) -> Any:
        gone = run(
            header={"ending": "failed", "loaders": loader(batches=batches[1])}, events=[crash]
        )
        other = run(
            header={"ending": "failed", "loaders": loader(batches=batches[0])},
            events=[Event(22.0, "exception", 200, text=GONE)],
        )
        return judge(ranks(other, gone)).findings[0]

    found = judged(258, 255)
    assert (found.kind, found.rank) == ("rank_died", 1)
    assert "Aborted), and ranks have different numbers of batches" in found.title
    assert [each.value for each in found.evidence[-2:]] == [258.0, 255.0]
    assert "drop_last=True" in found.fix.action
    same = judged(258, 258)
    assert "Aborted" in same.title and "batches" not in same.title
    # Of data that are iterated nobody knows how many there are; gloo's own thread had no Python.
    assert "gloo ends a rank" in same.title and "drop_last=True" in same.fix.action


def test_a_crash_in_the_scripts_own_call_is_not_gloos() -> None:
    text = 'Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "a.py"'
    gone = run(header={"ending": "failed"}, events=[Event(21.0, "crash", text=text)])
    other = run(header={"ending": "failed"}, events=[Event(22.0, "exception", 200, text=GONE)])
    found = judge(ranks(other, gone)).findings[0]
    assert (found.kind, found.rank) == ("rank_died", 1) and "gloo ends" not in found.title


def test_the_thread_that_should_fill_a_queue_is_named_where_it_waits_itself(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text("batch = q.get()\ncond.wait()\nitem = jobs.get()\n")

    def judged(line: int) -> Any:
        text = f'pid 8\n\n{HEAD}\n  File "{script}", line 1 in <module>'
        other = f'{HEAD}\n  File "{script}", line {line} in fill'
        return judge(still(f"{text}\n\n{other}")).findings[0]

    found = judged(2)
    assert "and another thread waits at" in found.title and "`cond.wait()`" in found.title
    assert "nobody sets" in found.fix.action
    assert "another thread" not in judged(3).title  # that one takes from a queue itself
