"""A failure of trainfit's own code: three lines, and the whole traceback kept for a report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Final

from trainfit.results.files.writing import state_folder
from trainfit.results.runs.trace import OwnFault
from trainfit.results.text import exception_text, one_line, printable
from trainfit.version import ISSUES, __version__

#: Of a failure of trainfit itself (EX_SOFTWARE of sysexits.h).
EXIT_CODE: Final = 70
_PACKAGE: Final = Path(__file__).resolve().parents[1]


def fault_of(error: BaseException) -> OwnFault:
    """An exception that should have been none, raised in this process."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if _PACKAGE in Path(frame.filename).parents] or frames
    place = "an unknown line"
    if ours:
        path = Path(ours[-1].filename)
        inside = path.relative_to(_PACKAGE.parent) if _PACKAGE in path.parents else path
        place = f"{inside}:{ours[-1].lineno}"
    said = exception_text(type(error).__name__, error)
    return OwnFault(said, place, "".join(traceback.format_exception(error)))


def report_fault(fault: OwnFault) -> int:
    """Tell what failed, with which versions and where to report it; returns the exit code.

    The traceback goes to a file in the state folder, and to standard error with
    ``TRAINFIT_LOG=debug``, or where no file can be written.
    """
    what = printable(one_line(fault.error))
    lines = [
        f"trainfit: internal error: {what} at {fault.place}; the fault is trainfit's, not your "
        "script's",
        f"trainfit: {versions()}",
    ]
    file = _kept(fault)
    where = f"with {printable(str(file))}" if file is not None else "with the traceback below"
    lines.append(f"trainfit: please report it at {ISSUES}, {where}")
    print("\n".join(lines), file=sys.stderr)
    if file is None or os.environ.get("TRAINFIT_LOG") == "debug":
        print(printable(fault.traceback.rstrip(), lines=True), file=sys.stderr)
    return EXIT_CODE


def report_aside(fault: OwnFault) -> None:
    """Tell it in one line, where the command that `watch` runs goes on or has its exit code."""
    file = _kept(fault)
    where = f", with {printable(str(file))}" if file is not None else ""
    print(
        f"trainfit watch: internal error: {printable(one_line(fault.error))} at {fault.place}; "
        "the fault is trainfit's, and the exit code your command's; please report it at "
        f"{ISSUES}{where}",
        file=sys.stderr,
    )


def versions() -> str:
    """The versions of trainfit, Python, PyTorch and the system, without importing PyTorch."""
    try:
        torch = f"PyTorch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        torch = "no PyTorch"
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return f"trainfit {__version__}, Python {platform.python_version()}, {torch}, {system}"


def _kept(fault: OwnFault) -> Path | None:
    """The file that the traceback was written to; ``None`` where that cannot be."""
    folder = state_folder() / "errors"
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    words = " ".join(["trainfit", *sys.argv[1:]])
    text = f"{words}\n{versions()}\n\n{fault.traceback.rstrip()}\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError:
        return None
    return path
