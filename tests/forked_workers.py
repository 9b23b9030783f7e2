"""Workers that are forked from the process that has collected, with all that it imported.

Each of pytest-xdist's workers imports PyTorch and collects ten thousand tests by itself, 13 s of
CPU time. Here that is done once (``--workers N``; none: in this process). A worker asks for the
next file when it is at its last test; what it reports is sent to this process, which prints it.
"""

from __future__ import annotations

import atexit
import importlib
import itertools
import os
import pickle
import selectors
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest

#: Bytes of a file's number, and of a message's length.
_NUMBER: Final = 4


def _like_pytest(function: Any) -> Any:
    """What runs tests is on their stacks, where loops of the user's files are looked for: those of
    pytest's own files are none, and these are to be none."""
    function.__code__ = function.__code__.replace(co_filename=f"<{__name__}>")
    return function


class ForkedWorkers:
    """A plugin that has ``count`` workers run the tests that this process has collected."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._queue = -1
        self._selector = selectors.DefaultSelector()
        #: By the end of its pipe: a worker's process, and the test that it is at.
        self._workers: dict[int, int] = {}
        self._at: dict[int, str] = {}
        self._finished = 0

    def pytest_collection(self) -> None:
        """No threads of an operator that computes while tests are collected: none is forked."""
        importlib.import_module("torch").set_num_threads(1)

    @pytest.hookimpl(tryfirst=True)
    @_like_pytest
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly or not session.items:
            return None  # as without workers
        files = [list(group) for _, group in itertools.groupby(session.items, lambda i: i.path)]
        self._queue, numbers = os.pipe()
        os.write(numbers, b"".join(n.to_bytes(_NUMBER, "little") for n in range(len(files))))
        os.close(numbers)
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        try:
            for _ in range(min(self._count, len(files))):
                self._fork(session, files)
            while self._workers:
                for key, _ in self._selector.select():
                    self._hear(session, key.fd)
                for reason in filter(None, (session.shouldfail, session.shouldstop)):
                    raise session.Interrupted(reason)
        finally:
            for pid in self._workers.values():
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)
        if left := len(session.items) - self._finished:
            raise session.Interrupted(f"{left} tests came to no end: their worker is gone")
        return True

    @_like_pytest
    def _fork(self, session: pytest.Session, files: Sequence[Sequence[pytest.Item]]) -> None:
        heard, tells = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(heard)
                _work(session, files, self._queue, tells)
                code = 0
            finally:
                os._exit(code)
        os.close(tells)
        self._workers[heard] = pid
        self._selector.register(heard, selectors.EVENT_READ)

    def _hear(self, session: pytest.Session, worker: int) -> None:
        config = session.config
        length = int.from_bytes(_read(worker, _NUMBER), "little")
        message = _read(worker, length) if length else b""
        if not message or len(message) < length:
            self._end(session, worker)
            return
        hook, told = pickle.loads(message)
        if hook == "pytest_warning_recorded":
            config.hook.pytest_warning_recorded.call_historic(kwargs=told)
            return
        if hook == "pytest_runtest_logstart":
            self._at[worker] = told["nodeid"]
        elif hook == "pytest_runtest_logfinish":
            del self._at[worker]
            self._finished += 1
        elif hook == "pytest_runtest_logreport":
            report = config.hook.pytest_report_from_serializable(config=config, data=told["report"])
            told["report"] = report
        getattr(config.hook, hook)(**told)

    def _end(self, session: pytest.Session, worker: int) -> None:
        """A worker that has ended by itself is at no test."""
        self._selector.unregister(worker)
        os.close(worker)
        code = os.waitstatus_to_exitcode(os.waitpid(self._workers.pop(worker), 0)[1])
        name = self._at.pop(worker, "")
        if not code and not name:
            return
        name = name or "a worker, between two tests"
        report = pytest.TestReport(
            name, (name.partition("::")[0], None, name), {}, "failed",
            f"its worker ended with exit code {code}",
            "call",
        )  # fmt: skip
        session.config.hook.pytest_runtest_logreport(report=report)


def _read(descriptor: int, size: int) -> bytes:
    """That many bytes; fewer at the end."""
    data = b""
    while len(data) < size and (more := os.read(descriptor, size - len(data))):
        data += more
    return data


class _Teller:
    """Sends what pytest is told in this worker."""

    def __init__(self, config: pytest.Config, pipe: int) -> None:
        self._config = config
        self._pipe = pipe
        # A test's threads may warn.
        self._lock = threading.Lock()

    def _tell(self, hook: str, **told: Any) -> None:
        message = pickle.dumps((hook, told))
        data = len(message).to_bytes(_NUMBER, "little") + message
        with self._lock:
            while data:
                data = data[os.write(self._pipe, data) :]

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._tell("pytest_runtest_logstart", nodeid=nodeid, location=location)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._tell("pytest_runtest_logfinish", nodeid=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call" and self._config.option.durations is None:
            return  # nothing is printed of it
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._tell("pytest_runtest_logreport", report=data)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        # The class may be one that the other process does not have.
        said = warnings.WarningMessage(
            UserWarning(f"{warning_message.category.__name__}: {warning_message.message}"),
            UserWarning, warning_message.filename, warning_message.lineno,
        )  # fmt: skip
        self._tell(
            "pytest_warning_recorded",
            warning_message=said, when=when, nodeid=nodeid, location=location,
        )  # fmt: skip


@_like_pytest
def _work(
    session: pytest.Session, files: Sequence[Sequence[pytest.Item]], queue: int, pipe: int
) -> None:
    """Run tests until none is left; what has to be done at the exit is what they registered."""
    atexit._clear()
    manager = session.config.pluginmanager
    manager.unregister(manager.getplugin("terminalreporter"))
    # The files to which output goes are those of the other process.
    capture = manager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    manager.register(_Teller(session.config, pipe))
    items = itertools.chain.from_iterable(files[number] for number in _numbers(queue))
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail or session.shouldstop:
            break
        item = following
    capture.stop_global_capturing()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _numbers(queue: int) -> Iterator[int]:
    while number := os.read(queue, _NUMBER):
        yield int.from_bytes(number, "little")
