"""Progress on standard error: a live display on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable

import rich.progress
from rich.console import Console

from trainfit.cli.common import progress
from trainfit.cli.output import make_console
from trainfit.plan.dataloader.process import Listener, Stage
from trainfit.plan.runs.progress import FirstAnswer, Progress
from trainfit.plan.runs.runs import PARALLEL
from trainfit.results.runs.trace import RunStatus
from trainfit.results.text import duration, percent, printable, size

#: Share done before which the whole time is not estimated.
_LEAST_SHARE = 0.03
#: Share of a run's time in its DataLoader from which on it is said.
_LEAST_LOADING = 0.05
_BAR = 20


class TerminalProgress(Progress, Listener):
    """A bar for the whole and a line for each simulated run, redrawn in place.

    A context manager; nothing of it stays on the screen but first answers.
    """

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._bars = rich.progress.Progress(
            rich.progress.SpinnerColumn(),
            rich.progress.BarColumn(_BAR),
            rich.progress.TextColumn("{task.description}", markup=False),
            console=console or make_console(stderr=True),
            transient=True,
        )
        # With a total the bar shows a share, without one it pulses.
        self._all = self._bars.add_task("", total=None, visible=False)
        self._lock = threading.Lock()
        self._began = clock()
        self._expected = 0
        self._tasks: dict[int, rich.progress.TaskID] = {}
        self._starts: dict[int, float] = {}
        self._took: list[float] = []
        self._titles: dict[int, str] = {}
        self._measuring_since: float | None = None

    def __enter__(self) -> TerminalProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    # -- simulated runs --------------------------------------------------------------------

    def __call__(self, text: str) -> None:
        self._bars.update(self._all, description=printable(text), total=None, visible=True)

    def expect(self, runs: int) -> None:
        self._expected = runs

    def begin(self, run: int, title: str) -> None:
        with self._lock:
            self._starts[run] = self._clock()
            self._titles[run] = printable(title)
            self._tasks[run] = self._bars.add_task(self._titles[run], total=None)
        self._draw()

    def status(self, run: int, status: RunStatus) -> None:
        text = f"{self._titles[run]}: {status_text(status)}"
        done = min(status.steps / status.least, 1.0)
        self._bars.update(self._tasks[run], description=text, total=1.0, completed=done)
        self._draw()

    def end(self, run: int) -> None:
        with self._lock:
            self._took.append(self._clock() - self._starts.pop(run))
            self._bars.remove_task(self._tasks.pop(run))
        self._draw()

    def warn(self, text: str) -> None:
        line = f"trainfit: {printable(text)}"
        self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def first_answer(self, answer: FirstAnswer) -> None:
        self.warn(answer_text(answer))

    def _draw(self) -> None:
        now = self._clock()
        with self._lock:
            running = [now - start for start in self._starts.values()]
            took = list(self._took)
        left = seconds_left(took, running, self._expected)
        done, all_runs = len(took), max(self._expected, len(took) + len(running))
        text = f"{min(done + 1, all_runs)} of {all_runs} runs, {duration(round(now - self._began))}"
        if left is not None:
            text += f", about {duration(round(left))} left"
        self._bars.update(self._all, description=text, total=all_runs, completed=done, visible=True)

    # -- measurements ----------------------------------------------------------------------

    def stage(self, stage: Stage) -> None:
        """Begin another measurement."""
        if stage.share is not None and self._measuring_since is None:
            self._measuring_since = stage.elapsed_s
        self.tick(stage)

    def tick(self, stage: Stage) -> None:
        """Update the progress; the share that is done gives the total time."""
        text = f"{duration(round(stage.elapsed_s))}: {printable(stage.text)}"
        about = self._about(stage)
        if about is not None:
            took, all_of_it = duration(round(stage.elapsed_s)), duration(round(about))
            text = f"{took} of about {all_of_it}: {printable(stage.text)}"
        done = None if about is None else min(stage.elapsed_s, about)
        self._bars.update(self._all, description=text, total=about, completed=done, visible=True)

    def _about(self, stage: Stage) -> float | None:
        """Estimated seconds of everything."""
        if stage.share is None or self._measuring_since is None:
            return None
        measured = stage.elapsed_s - self._measuring_since
        if stage.share < _LEAST_SHARE or measured <= 0:
            return None
        return max(self._measuring_since + measured / min(stage.share, 1.0), stage.elapsed_s)


class ProgressLines(Progress, Listener):
    """Plain progress lines, one for each thing begun; a context manager."""

    def __init__(self) -> None:
        self._last = ""

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, text: str) -> None:
        progress(text)

    def begin(self, run: int, title: str) -> None:
        progress(title)

    def first_answer(self, answer: FirstAnswer) -> None:
        self.warn(answer_text(answer))

    def warn(self, text: str) -> None:
        sys.stderr.write(f"trainfit: {printable(text)}\n")
        sys.stderr.flush()

    def stage(self, stage: Stage) -> None:
        if stage.text != self._last:
            progress(stage.text)
        self._last = stage.text


Shown = TerminalProgress | ProgressLines


def shown_progress() -> Shown:
    """The progress display that suits standard error."""
    is_dumb = os.environ.get("TERM", "") in ("dumb", "unknown")
    return TerminalProgress() if sys.stderr.isatty() and not is_dumb else ProgressLines()


def status_text(status: RunStatus) -> str:
    """Progress of a run: "step 2 of 3 to 12, 40% of the time in its DataLoader"."""
    most = f"{status.least}" if status.least == status.most else f"{status.least} to {status.most}"
    text = f"step {status.steps} of {most}"
    if status.loading_share >= _LEAST_LOADING:
        text += f", {percent(status.loading_share)} of the time in its DataLoader"
    return text


def answer_text(answer: FirstAnswer) -> str:
    """The first answer in one line."""
    fits = "the first steps fit" if answer.fits else "does not fit"
    text = "" if answer.batch_size is None else f" at batch size {answer.batch_size}"
    step = "" if answer.step_s is None else f", {duration(answer.step_s)} a step"
    need = f"{size(answer.device_bytes)} of {size(answer.capacity_bytes)}"
    return f"first answer: {fits}, {need}{text}{step}"


def seconds_left(took: Iterable[float], running: Iterable[float], expected: int) -> float | None:
    """Seconds until ``expected`` runs are over; ``None`` before one is.

    ``took`` are the seconds of those that are, ``running`` how long others have run.
    """
    took, running = list(took), list(running)
    if not took:
        return None
    mean = sum(took) / len(took)
    open_runs = max(0, expected - len(took) - len(running))
    rest = sum(max(0.0, mean - value) for value in running) + mean * open_runs
    return rest / max(1, min(PARALLEL, len(running) + open_runs))
