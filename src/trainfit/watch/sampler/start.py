"""Starts a sampler next to a run, and ends it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from trainfit.watch.sampler.proc_files import process_stat

#: What a sampler prints, which is nothing but what Python says where it cannot even start.
LOG: Final = "sampler.log"
_SOURCE: Final = Path(__file__).resolve().parents[3]
#: Not `-m`: the folder that has trainfit comes last in the path, whatever else lies in it.
_PROGRAM: Final = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from trainfit.watch.sampler.__main__ import main; sys.exit(main())"
)
#: The recorder stays out of it, and no library makes threads.
_VARIABLES: Final = {
    "TRAINFIT_WATCH": "0",
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")},
}


class SamplerHandle:
    """A sampler that runs. In a fork of the process that started it, it does nothing."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._starter = os.getpid()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return os.getpid() == self._starter and self._process.poll() is None

    def stop(self, seconds: float = 3.0) -> None:
        """Ask it to write its last rows and to end; after so many seconds it is killed (a driver
        that hangs). Raises nothing."""
        if not self.is_running:
            return
        with contextlib.suppress(OSError):
            self._process.terminate()
        self.wait(seconds)
        if self.is_running:
            with contextlib.suppress(OSError):
                self._process.kill()
            self.wait(1.0)

    def wait(self, seconds: float) -> int | None:
        """The sampler's exit code, or ``None`` if it has not ended within so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None


def start_sampler(folder: Path, pid: int) -> SamplerHandle:
    """Sample process ``pid``, all below it and the machine into the run's folder.

    The sampler ends when the process has ended with all ranks, when this process has, when the
    folder is gone, or by :meth:`SamplerHandle.stop`. If the folder has one already (of another
    rank), it ends at once. It has a session of its own: what a terminal sends reaches the training
    alone.

    Raises ``OSError`` where it cannot be started.
    """
    # No file of the script's folder is taken for a module (-P).
    words = [sys.executable, "-P", "-c", _PROGRAM, str(_SOURCE)]
    words += [str(folder.absolute()), str(pid), "--parent", str(os.getpid())]
    with contextlib.suppress(OSError):
        stat = process_stat(Path(f"/proc/{pid}/stat").read_bytes())
        words += ["--started", str(stat.started_ticks)] if stat is not None else []
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            words,
            env={**os.environ, **_VARIABLES},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return SamplerHandle(process)
