"""A watched run that is ended once enough steps are recorded."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from trainfit.results.files.errors import TrainfitError
from trainfit.results.watch import tables
from trainfit.results.watch.run import RunRecord, exit_words, load_run
from trainfit.watch.launch import WatchedCommand
from trainfit.watch.sampler.parsers import process_stat
from trainfit.watch.sampler.start import start_sampler

#: Seconds after which a run that was asked to end is asked more firmly.
PATIENCE_S: Final = 10.0
_LOOK_S: Final = 0.1


class ShortRunError(TrainfitError):
    """A run that failed before its steps were recorded; ``exit_code`` is the command's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code or 2


def short_run(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, steps: int
) -> RunRecord:
    """Run ``command`` with ``variables`` added to its environment, recorded in ``folder``, until
    ``steps`` steps are recorded or it ends; then SIGINT as a terminal sends it, SIGTERM and SIGKILL
    to what is still there.

    Raises :class:`ShortRunError` where it fails by itself, ``KeyboardInterrupt`` where the user
    ended it.
    """
    words = [*command]
    if variables:
        words = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
    enough = False
    with WatchedCommand(words, folder) as watched, _interrupts() as seen:
        if not watched.recorded:
            raise ShortRunError("TRAINFIT_WATCH switches the recorder off; unset it", 2)
        sampler = None
        with contextlib.suppress(OSError):  # the run goes on without samples
            sampler = start_sampler(folder, watched.pid)
        try:
            while (code := watched.poll()) is None and not enough and not seen:
                time.sleep(_LOOK_S)
                enough = _recorded(folder) >= steps
            if code is None:
                code = _end(watched, not seen)
        finally:
            if watched.poll() is None:
                _end(watched, True)
            if sampler is not None:
                sampler.stop()
    if seen:
        raise KeyboardInterrupt
    if code and not enough:
        raise ShortRunError(
            f"the command failed {exit_words(code)} before {steps} steps; run it by itself, and "
            "fix it first",
            code,
        )
    return load_run(folder)


def _recorded(folder: Path) -> int:
    """Steps that the first rank has written."""
    try:
        return (folder / "rank0.steps.bin").stat().st_size // tables.STEPS.itemsize
    except OSError:
        return 0


def _end(watched: WatchedCommand, interrupt: bool) -> int:
    """End it with all that it started, gently first; returns its exit code. Without ``interrupt``
    it has been asked to end, and gets time for that."""
    family = _family(watched.pid)
    first = signal.SIGINT if interrupt else 0
    for number in (first, signal.SIGTERM, signal.SIGKILL):
        _send(family, number)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            code = watched.poll()
            family = _living(family)
            if code is not None and not family:
                return code
            time.sleep(_LOOK_S)
    return watched.wait()


#: Processes with the tick of the clock at which each began: a number may be given away again.
_Family = dict[int, int]


def _family(root: int) -> _Family:
    """A process and all below it."""
    known = {}
    for entry in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(entry.name))
        if stat is not None:
            known[int(entry.name)] = stat
    found, wanted = {}, [root]
    while wanted:
        pid = wanted.pop()
        if pid in known and pid not in found:
            found[pid] = known[pid][1]
            wanted += [child for child, (parent, _) in known.items() if parent == pid]
    return found


def _stat(pid: int) -> tuple[int, int] | None:
    """Parent and start of a process that lives; ``None``: it has ended."""
    try:
        stat = process_stat(Path(f"/proc/{pid}/stat").read_bytes())
    except OSError:
        return None
    return None if stat is None or stat.state in (b"Z", b"X") else (stat.parent, stat.started_ticks)


def _living(family: _Family) -> _Family:
    found = {}
    for pid, started in family.items():
        stat = _stat(pid)
        if stat is not None and stat[1] == started:
            found[pid] = started
    return found


def _send(family: _Family, number: int) -> None:
    for pid in _living(family):
        with contextlib.suppress(OSError):
            os.kill(pid, number)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Signals by which the user ends all of it; the command is passed them as before."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    former: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        print("trainfit: ending the run …", file=sys.stderr)
        if callable(former[number]):
            former[number](number, frame)

    for each in (signal.SIGINT, signal.SIGTERM):
        former[each] = signal.signal(each, note)
    try:
        yield seen
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
