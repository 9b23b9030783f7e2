"""Shows a run while it goes on: redrawn on a terminal, a line now and then elsewhere.

On a terminal the command writes to a pseudo-terminal, so that it still sees one: its whole lines
are printed above the view, and a line that it has not ended (a progress bar) in it.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import pty
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from trainfit.report.watch.live import live_view
from trainfit.report.watch.screen import progress_line
from trainfit.results.watch.result import WatchResult

#: Seconds between two drawings at least, and between two lines.
DRAWN_S: Final = 1.0
#: Share of the machine's cores that reading and drawing may take: the training may need all of
#: them.
_MOST_CPU: Final = 0.003
LINE_S: Final = 30.0
#: Control sequences other than colours: a progress bar moves its cursor with them.
_MOVES: Final = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlnsu]")

Look = Callable[[], WatchResult | None]


class Running(Protocol):
    """A command that runs."""

    def poll(self) -> int | None: ...


def follow_lines(running: Running, look: Look, *, quiet: bool = False) -> int:
    """A line on stderr every half minute until it ends; returns its exit code."""
    began = told = time.monotonic()
    while (code := running.poll()) is None:
        time.sleep(0.1 if time.monotonic() - began < 2 else 0.5)
        if not quiet and time.monotonic() - told >= LINE_S:
            told = time.monotonic()
            result = look()
            if result is not None:
                print(f"trainfit: {progress_line(result)}", file=sys.stderr, flush=True)
    return code


class Terminal:
    """A pseudo-terminal for what the command prints; ``output`` is the end that it writes to."""

    def __init__(self) -> None:
        self._ours, self.output = pty.openpty()
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetwinsize(self.output, termios.tcgetwinsize(sys.stderr.fileno()))
            tty.setraw(self.output, termios.TCSANOW)  # lines as they were written
        os.set_blocking(self._ours, False)
        # Bytes of a character may come in two pieces.
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = ""

    def follow(self, running: Running, look: Look, console: Console) -> int:
        """Draw until the command ends; returns its exit code."""
        began = drawn = time.monotonic()
        pause = DRAWN_S
        with Live(console=console, auto_refresh=False, transient=True) as live:
            result = None
            while (code := running.poll()) is None:
                self._pass_on(console, 0.1)
                if time.monotonic() - drawn >= pause:
                    drawn, cpu_s = time.monotonic(), time.process_time()
                    result = look()
                    view = live_view(result, drawn - began, self._unfinished)
                    live.update(view, refresh=True)
                    spent = time.process_time() - cpu_s
                    pause = max(DRAWN_S, spent / _MOST_CPU / (os.cpu_count() or 1))
            while self._pass_on(console, 0.0):
                pass
            if self._unfinished:
                console.print(Text.from_ansi(self._unfinished))
        return code

    def copy(self, running: Running) -> int:
        """Print what the command prints as it is, until it ends; returns its exit code."""
        sys.stdout.write(self._unfinished)
        sys.stdout.flush()
        while (code := running.poll()) is None:
            self._copied(0.1)
        while self._copied(0.0):
            pass
        return code

    def _copied(self, seconds: float) -> bool:
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        with contextlib.suppress(OSError):  # nobody has the other end, or ours is gone
            return bool(os.write(sys.stdout.fileno(), os.read(self._ours, 65536)))
        return False

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.output)

    def _pass_on(self, console: Console, seconds: float) -> bool:
        """Print the lines that have come; was there anything?"""
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # nobody has the other end any more
            return False
        text = self._unfinished + _MOVES.sub("", self._text.decode(data))
        *whole, last = text.split("\n")
        for line in whole:
            console.print(Text.from_ansi(_shown(line)), soft_wrap=True)
        self._unfinished = _shown(last)
        return bool(data)


def _shown(line: str) -> str:
    """What a terminal shows of a line that begins again with each carriage return."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def attached(folder: Path) -> Running:
    """A run of which only the folder is known: it has ended when its header says so."""
    from trainfit.results.watch.run import RunHeader

    class _Attached:
        def poll(self) -> int | None:
            header = RunHeader.load(min(folder.glob("rank*.json"), default=folder / "rank0.json"))
            return None if header.ending == "running" and _lives(header.pid) else 0

    return _Attached()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
