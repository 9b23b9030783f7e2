"""``python -m trainfit.watch.sampler FOLDER PID``: samples a process into a run's folder."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainfit.watch.sampler.sampling import Sampler
from trainfit.watch.sampler.start import LOG

_NICENESS: Final = 19


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for bad input, with a line on stderr."""
    options = _parser().parse_args(words)
    folder: Path = options.folder
    if not folder.is_dir():
        return _refuse(f"{folder} is not a folder; give the run's folder")
    if options.pid < 1:
        return _refuse(f"{options.pid} is not a process; give a PID")
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    try:
        sampler = Sampler(folder, options.pid, options.started, options.parent)
    except OSError as error:
        return _refuse(f"{folder} cannot be written to ({error.strerror}); give another folder")
    sampler.run()
    _remove_empty(folder / LOG)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainfit.watch.sampler", description=__doc__)
    parser.add_argument("folder", type=Path, help="the run's folder")
    parser.add_argument("pid", type=int, help="the process to sample, with all below it")
    parser.add_argument("--started", type=int, help="when it was started (/proc/PID/stat)")
    parser.add_argument("--parent", type=int, help="the process whose end also ends this one")
    return parser


def _refuse(line: str) -> int:
    print(f"error: {line}", file=sys.stderr)
    return 2


def _remove_empty(log: Path) -> None:
    with contextlib.suppress(OSError):
        if log.stat().st_size == 0:
            log.unlink()


if __name__ == "__main__":
    sys.exit(main())
