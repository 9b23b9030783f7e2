"""Which line a look from another thread finds: one that runs, whether or not it keeps the lock."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainfit.results.runs.watched import StackLooks
from trainfit.scripts.call_sites import calls_of, locals_in, undisturbed
from trainfit.watch.recorder import worker_hooks
from trainfit.watch.recorder.first_batches import WorkerCode, threads_set_at
from trainfit.watch.recorder.looks import stacks
from trainfit.watch.recorder.looks.stacks import (
    at_any_line,
    holds_lock,
    line_at,
    users_stack,
)

_LOOKS = 40
_DATA = b"x" * 8192


class _Training(threading.Thread):
    """A millisecond of Python, then some microseconds without the interpreter's lock."""

    ends = False

    def run(self) -> None:
        while not self.ends:
            self._python()
            hashlib.sha256(_DATA)

    @staticmethod
    def _python() -> None:
        total = 0.0
        for number in range(12_000):
            total += number * 0.5


def test_python_between_two_operators_is_seen() -> None:
    usual = sys.getswitchinterval()
    training = _Training(daemon=True)
    training.start()
    seen = 0
    for _ in range(_LOOKS):
        time.sleep(0.002)
        with at_any_line(random.random()):
            frame = sys._current_frames()[training.ident or 0]
            seen += frame.f_code.co_name == "_python"
    training.ends = True
    training.join()
    # Nine in ten on a quiet machine, and none without it; on one whose cores others use, where a
    # thread is on no core in the middle of anything, three in four, and up to one in five without.
    assert seen > _LOOKS / 4
    assert sys.getswitchinterval() == usual


def test_workers_are_looked_at_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else Python between two operators of a data set would be laid to these."""
    inside, looked, found = [], threading.Event(), []

    @contextlib.contextmanager
    def moment(share: float) -> Iterator[None]:
        inside.append(share)
        yield
        inside.pop()

    def look(sink: worker_hooks.WorkerSink) -> None:
        found.append(len(inside))
        looked.set()

    monkeypatch.setattr(worker_hooks, "at_any_line", moment)
    monkeypatch.setattr(worker_hooks.WorkerSink, "_look", look)
    sink = worker_hooks.WorkerSink(tmp_path / "rank0", frozenset())
    sink.fetching = True
    assert looked.wait(60)
    sink.close()
    assert set(found) == {1}


def test_every_instruction_of_a_loop_has_a_line_of_it() -> None:
    """Also the jump back to its head, at which a thread gives the interpreter's lock away."""

    def noise(rows: list[float]) -> None:
        for each in rows:
            if random.random() < each:
                rows[0] = each

    code = noise.__code__
    lines = [line_at(code, 2 * n) for n, _ in enumerate(code.co_positions())]
    assert {each - code.co_firstlineno for each in lines[1:]} == {1, 2, 3}


def test_what_a_script_sets_meanwhile_stays() -> None:
    usual = sys.getswitchinterval()
    try:
        with at_any_line(0.0):
            sys.setswitchinterval(0.002)
        assert abs(sys.getswitchinterval() - 0.002) < 1e-6
    finally:
        sys.setswitchinterval(usual)


@pytest.mark.slow  # it goes by the machine's speed
def test_nobody_takes_the_lock_from_a_look() -> None:
    """A frame that is held while its function returns is freed by who holds it: not by us, while
    the training is in an operator."""
    training = _Training(daemon=True)
    training.start()
    went_on = 0
    for _ in range(20):
        with at_any_line(0.0):
            frame = sys._current_frames()[training.ident or 0]
            before, code, began = frame.f_lasti, frame.f_code, time.perf_counter()
            while time.perf_counter() - began < 0.02:  # four times what a thread waits for the lock
                pass
            here = sys._current_frames()[training.ident or 0]
            went_on += (here.f_lasti, here.f_code) != (before, code)
            del frame, here
    training.ends = True
    training.join()
    assert went_on <= 2  # a wait that began before the look did


class _Held:
    """What a function's variable holds."""


def test_a_look_at_a_stack_keeps_no_frame() -> None:
    """… nor what its variables held: a batch would live for longer than the script lets it."""
    known: list[weakref.ref[_Held]] = []
    ready, go_on, looked = threading.Event(), threading.Event(), threading.Event()

    def step() -> None:
        held = _Held()
        known.append(weakref.ref(held))
        ready.set()
        go_on.wait()

    def run() -> None:
        step()
        looked.set()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    calls, stack = calls_of(thread.ident or 0), users_stack(thread.ident or 0)
    with undisturbed():
        assert isinstance(locals_in(thread.ident or 0, step.__code__)["held"], _Held)
    go_on.set()
    looked.wait()
    assert any(code is step.__code__ for code, _, _ in calls) and len(stack) == len(calls)
    assert known[0]() is None
    thread.join()


def test_the_line_that_raises_the_threads_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own call in each worker comes before the worker is one."""
    hooks, before = worker_hooks.FetchHooks(None), torch.get_num_threads()  # type: ignore[arg-type]
    set_number = hooks._set_threads(torch.set_num_threads)
    set_number(before)
    assert not hooks._threads_at
    monkeypatch.setattr(worker_hooks, "worker_info", object)
    set_number(before)  # that line
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(n for n, each in enumerate(lines, 1) if each.endswith("  # that line"))
    assert hooks._threads_at.endswith(f"{Path(__file__).name}:{line}")
    told = WorkerCode(StackLooks(), {}, threads_at=hooks._threads_at)
    assert threads_set_at([told]) == hooks._threads_at


def test_looks_at_a_worker_become_rarer_where_they_cost_much() -> None:
    first, cheap, dear, hung = (
        worker_hooks.pause_s(*each) for each in ((50, 0.04), (500, 0.1), (500, 0.45), (500, 9.0))
    )
    assert first == cheap == 0.05  # 0.2 ms each
    assert 0.0009 / dear < 0.005 and 0.1 < dear < hung == 0.5


class _Writer(threading.Thread):
    """Holds a lock while it waits, or waits without it."""

    def __init__(self, holds: str) -> None:
        super().__init__(daemon=True)
        self.holds, self.lock = holds, threading.Lock()
        self.there, self.ends = threading.Event(), threading.Event()

    def run(self) -> None:
        if self.holds == "block":
            with self.lock:
                self.write()
        elif self.holds == "line":
            with self.lock: self.write()  # fmt: skip  # noqa: E701
        elif self.holds == "after":
            with self.lock:
                pass
            self.write()
        else:
            self.there.set()
            with self.lock:
                pass

    def write(self) -> None:
        self.there.set()
        self.ends.wait()


@pytest.mark.parametrize(
    ("holds", "is_held"), [("block", True), ("line", True), ("after", False), ("waits", False)]
)
def test_a_thread_within_a_lock_is_told_from_one_that_waits_for_it(
    holds: str, is_held: bool
) -> None:
    writer = _Writer(holds)
    if holds == "waits":
        writer.lock.acquire()
    writer.start()
    writer.there.wait()
    time.sleep(0.02)
    assert holds_lock(users_stack(writer.ident or 0)) == is_held
    writer.ends.set()
    if holds == "waits":
        writer.lock.release()
    writer.join()


def test_a_function_of_the_script_that_is_called_dump_waits_for_no_file(tmp_path: Path) -> None:
    """It may compute statistics; what it calls of a library tells what it waits for."""
    script = tmp_path / "logs.py"
    script.write_text("def dump(values):\n    return values.quantile(0.5)\n")
    code = next(each for each in compile(script.read_text(), str(script), "exec").co_consts if each)
    own = (code, 0, {"__name__": "__main__"})
    assert stacks.key_of([own])[4] == ""
    library = (json.dump.__code__, 0, {"__name__": "json"})
    assert stacks.key_of([library, own])[4] == "disk"


def test_a_loop_over_an_open_file_goes_over_what_was_opened(tmp_path: Path) -> None:
    script = tmp_path / "lines.py"
    script.write_text(
        "def f(path, rows):\n"
        "    with open(path) as lines:\n"
        "        for n, line in enumerate(lines):\n"
        "            n += 1\n"
        "    for row in rows:\n"
        "        n += 1\n"
        "        whole = list(csv.DictReader(open(path)))\n"
        "        part = list(row)\n"
    )
    code = next(each for each in compile(script.read_text(), str(script), "exec").co_consts if each)
    assert stacks._over(code, 4) == "open(path)"
    assert stacks._over(code, 6) == "rows"
    assert stacks._over(code, 7) == "csv.DictReader(open(path))"  # read to its end at once
    assert stacks._over(code, 8) == "rows"


@pytest.mark.parametrize(("name", "is_phase"), [("save", True), ("_save", True), ("load", False)])
def test_only_what_saves_is_a_checkpoint(name: str, is_phase: bool) -> None:
    """torch.load() in the loop is the script's own affair: its line is looked for."""
    module = compile(f"def {name}(): pass", "/lib/torch/serialization.py", "exec")
    code = next(each for each in module.co_consts if hasattr(each, "co_name"))
    assert stacks.is_in_phase([(code, 0, {})]) is is_phase
