"""``trainfit.watch()`` in a script or a notebook: records without the command `trainfit watch`."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainfit.watch.rank_folder import (
    RankFolder,
    join,
    lowest_rank,
    new_folder,
    prune,
    runs_folder,
    unused_folder,
    why_unwritable,
)
from trainfit.watch.recorder import process
from trainfit.watch.recorder.rank_variables import local_rank, world
from trainfit.watch.sampler.start import SamplerHandle, start_sampler

if TYPE_CHECKING:
    from trainfit.results.watch import WatchResult

#: What stands in the place of a script's name, of no use on a command line: kernels of notebooks,
#: and code that is given as a word or on standard input.
_NO_SCRIPT: Final = ("ipykernel_launcher", "colab_kernel_launcher", "-c", "-")

#: Imported where trainfit itself runs the script, on the simulated GPU or to measure it: that is
#: no training to be recorded.
_OWN_RUNS: Final = "trainfit.scripts.execute"
#: Seconds that a result waits at most for the job's other ranks to write their last steps.
_OTHERS_S: Final = 1.0


class Watching:
    """A run that is recorded until :meth:`stop`, or the end of the ``with`` block or the process.

    ``folder`` is where it is recorded; ``None``: nothing is, for ``TRAINFIT_WATCH`` switches the
    recorder off, or the folder cannot be written to. The ranks of a job on one machine have it in
    common.
    """

    def __init__(
        self, folder: Path | None, stop: Callable[[], None], ranks: RankFolder | None = None
    ) -> None:
        self.folder = folder
        self._stop, self._ranks = stop, ranks
        self._rank = 0 if folder is None else world()[0]

    @property
    def is_lowest_rank(self) -> bool:
        """Is this the rank that speaks for all that record into the folder?"""
        return self.folder is None or self._rank <= lowest_rank(self.folder)

    def stop(self) -> None:
        """Record no more; safe to call twice. Raises nothing."""
        stop, self._stop = self._stop, _nothing
        try:
            stop()
        except Exception as error:
            _say(f"{type(error).__name__}: {error}")

    def result(self) -> WatchResult | None:
        """What limits the run so far and what to change; ``None``: nothing is recorded.

        A notebook shows it as its report. The last second may be missing while the run goes on;
        after :meth:`stop` the job's other ranks have a second to end, too.
        Raises :class:`trainfit.results.files.errors.ResultFileError` where the folder cannot be
        read.
        """
        if self.folder is None:
            return None
        # Late: a training that never asks does not pay for the rules' import.
        from trainfit.results.runs.watched import load_run
        from trainfit.watch.judge import judge

        if self._stop is _nothing and self._ranks is not None:
            for rank in self._ranks.wait(_OTHERS_S):
                _say(f"rank {rank} still records: its last steps are not in the result")
        return judge(load_run(self.folder))

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


def watch(folder: str | os.PathLike[str] | None = None) -> Watching:
    """Record this process's training from now on, into ``folder`` (``None``: a new one below
    ~/.local/state/trainfit/watch; with -2, -3 … behind its name where it has a run), and say where.

    The ranks of a job on one machine record into one folder. To be called before the DataLoader is
    iterated. Within `trainfit watch`, or where it is called a second time, the run that is recorded
    goes on. Raises nothing where the folder cannot be written to: the training goes on, and a line
    on stderr says so.
    """
    try:
        return _watch(folder)
    except Exception as error:  # whatever it is, the training goes on
        _say(f"not recorded: {type(error).__name__}: {error}")
        return Watching(None, _nothing)


def _watch(folder: str | os.PathLike[str] | None) -> Watching:
    if process.switched_off() or _OWN_RUNS in sys.modules:
        return Watching(None, _nothing)
    if process.is_on():
        return Watching(Path(os.environ[process.FOLDER]), _nothing)
    started = time.time(), time.monotonic()
    script = "" if Path(sys.argv[0]).stem in _NO_SCRIPT else sys.argv[0]
    # As it was started: it can be run like this once more.
    command = shlex.join(["python", *sys.orig_argv[1:]]) if script else ""
    local = local_rank()
    ranks, why_apart = _ranks(folder, script, started)
    if ranks is not None:
        path, started = ranks.path, ranks.started
    else:
        path = unused_folder(Path(folder)) if folder is not None else new_folder(script)
    # One rank of the machine speaks for all.
    speaks = ranks is None or (ranks.is_first if local is None else local == 0)
    if reason := why_unwritable(path):
        if ranks is not None:
            ranks.end()
        if not local:
            _say(f"not recorded: {reason}; name another folder: trainfit.watch(FOLDER)")
        return Watching(None, _nothing)
    restore = _environment(path, command, started)
    process.from_environment()
    sampler = _sampler(path, ranks)
    recorded = f"recorded in {path}; read it with `trainfit watch --read {shlex.quote(str(path))}`"
    if why_apart:
        _say(f"each rank records into a folder of its own: {why_apart}")
    if speaks:
        _say(recorded)
        if folder is None:
            with contextlib.suppress(Exception):
                prune(runs_folder())

    def stop() -> None:
        process.end()
        if not speaks and local and watching.is_lowest_rank:  # the first one does not record
            _say(recorded)
        if sampler is not None:
            atexit.unregister(sampler.stop)
            sampler.stop()
        if ranks is not None:
            ranks.end()
        restore()

    watching = Watching(path, stop, ranks)
    return watching


def _ranks(
    folder: str | os.PathLike[str] | None, script: str, started: tuple[float, float]
) -> tuple[RankFolder | None, str]:
    """The folder that this job's ranks have in common; ``None``: one of this process's own, and why
    where there are other ranks."""
    try:
        return join(None if folder is None else Path(folder), script, started), ""
    except Exception as error:
        return None, getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"


def _sampler(path: Path, ranks: RankFolder | None) -> SamplerHandle | None:
    """Start the sampler next to this process, until it ends; ``None``: not here (the run goes on
    without). Of several ranks the first has it, for all that their launcher has started."""
    if ranks is not None and not ranks.is_first:
        return None
    launcher = ranks.launcher if ranks is not None else None
    try:
        sampler = start_sampler(path, os.getpid() if launcher is None else launcher.pid)
    except OSError:
        return None
    atexit.register(sampler.stop)
    return sampler


def _environment(path: Path, command: str, started: tuple[float, float]) -> Callable[[], None]:
    """Have workers and ranks that this process starts recorded; returns what undoes that."""
    from trainfit.watch.launch import injected

    before = dict(os.environ)
    after = injected(path, command, {**before, process.FOLDER: str(path)}, started)
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    os.environ.update(changed)

    def restore() -> None:
        for name in changed:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)

    return restore


def _say(text: str) -> None:
    with contextlib.suppress(Exception):  # a script may have closed it
        print(f"trainfit watch: {text}", file=sys.stderr)


def _nothing() -> None:
    return None
