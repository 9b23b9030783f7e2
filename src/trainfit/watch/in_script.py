"""``trainfit.watch()`` in a script or a notebook: records without the command `trainfit watch`."""

from __future__ import annotations

import atexit
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainfit.watch.recorder import process
from trainfit.watch.run_folder import new_folder
from trainfit.watch.sampler.start import SamplerHandle, start_sampler

if TYPE_CHECKING:
    from trainfit.results.watch.result import WatchResult

#: Started as a script, of no use on a command line.
_KERNELS: Final = ("ipykernel_launcher", "colab_kernel_launcher")

#: Imported where trainfit itself runs the script, on the simulated GPU or to measure it: that is
#: no training to be recorded.
_OWN_RUNS: Final = "trainfit.scripts.execute"


class Watching:
    """A run that is recorded until :meth:`stop`, or the end of the ``with`` block or the process.

    ``folder`` is where it is recorded; ``None``: ``TRAINFIT_WATCH`` switches the recorder off.
    """

    def __init__(self, folder: Path | None, stop: Callable[[], None]) -> None:
        self.folder = folder
        self._stop = stop

    def stop(self) -> None:
        """Record no more; safe to call twice."""
        stop, self._stop = self._stop, _nothing
        stop()

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
    if process.switched_off() or _OWN_RUNS in sys.modules:
        return Watching(None, _nothing)
    if process.is_on():
        return Watching(Path(os.environ[process.FOLDER]), _nothing)
    started = time.time(), time.monotonic()
    script = "" if Path(sys.argv[0]).stem in _KERNELS else sys.argv[0]
    # As it was started: it can be run like this once more.
    command = shlex.join(["python", *sys.orig_argv[1:]]) if script else ""
    path = Path(folder) if folder is not None else new_folder(script)
    restore = _environment(path, command, started)
    process.from_environment()
    sampler = _sampler(path)
    read = f"trainfit watch --read {shlex.quote(str(path))}"
    print(f"trainfit watch: recorded in {path}; read it with `{read}`", file=sys.stderr)

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
        path.mkdir(parents=True, exist_ok=True)
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


def _nothing() -> None:
    return None
