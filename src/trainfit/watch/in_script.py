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

from trainfit.watch.recorder import process
from trainfit.watch.run_folder import new_folder, why_unwritable
from trainfit.watch.sampler.start import SamplerHandle, start_sampler

if TYPE_CHECKING:
    from trainfit.results.watch.result import WatchResult

#: What stands in the place of a script's name, of no use on a command line: kernels of notebooks,
#: and code that is given as a word or on standard input.
_NO_SCRIPT: Final = ("ipykernel_launcher", "colab_kernel_launcher", "-c", "-")

#: Imported where trainfit itself runs the script, on the simulated GPU or to measure it: that is
#: no training to be recorded.
_OWN_RUNS: Final = "trainfit.scripts.execute"


class Watching:
    """A run that is recorded until :meth:`stop`, or the end of the ``with`` block or the process.

    ``folder`` is where it is recorded; ``None``: nothing is, for ``TRAINFIT_WATCH`` switches the
    recorder off, or the folder cannot be written to.
    """

    def __init__(self, folder: Path | None, stop: Callable[[], None]) -> None:
        self.folder = folder
        self._stop = stop

    def stop(self) -> None:
        """Record no more; safe to call twice. Raises nothing."""
        stop, self._stop = self._stop, _nothing
        try:
            stop()
        except Exception as error:
            _say(f"{type(error).__name__}: {error}")

    def result(self) -> WatchResult | None:
        """What limits the run so far and what to change; ``None``: nothing is recorded.

        A notebook shows it as its report. The last second may be missing while the run goes on.
        Raises :class:`trainfit.results.files.errors.ResultFileError` where the folder cannot be
        read.
        """
        if self.folder is None:
            return None
        # Late: a training that never asks does not pay for the rules' import.
        from trainfit.results.watch.run import load_run
        from trainfit.watch.judge import judge

        return judge(load_run(self.folder))

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


def watch(folder: str | os.PathLike[str] | None = None) -> Watching:
    """Record this process's training from now on, into ``folder`` (``None``: a new one below
    ~/.local/state/trainfit/watch), and say where.

    To be called before the DataLoader is iterated. Within `trainfit watch`, or where it is
    called a second time, the run that is recorded goes on. Raises nothing where the folder cannot
    be written to: the training goes on, and a line on stderr says so.
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
    path = Path(folder) if folder is not None else new_folder(script)
    if reason := why_unwritable(path):
        _say(f"not recorded: {reason}; name another folder: trainfit.watch(FOLDER)")
        return Watching(None, _nothing)
    restore = _environment(path, command, started)
    process.from_environment()
    sampler = _sampler(path)
    read = f"trainfit watch --read {shlex.quote(str(path))}"
    _say(f"recorded in {path}; read it with `{read}`")

    def stop() -> None:
        process.end()
        if sampler is not None:
            atexit.unregister(sampler.stop)
            sampler.stop()
        restore()

    return Watching(path, stop)


def _sampler(path: Path) -> SamplerHandle | None:
    """Next to this process, until it ends; ``None``: not here (the run goes on without)."""
    try:
        sampler = start_sampler(path, os.getpid())
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
