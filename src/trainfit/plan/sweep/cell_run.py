"""One cell of a sweep, run as the command ``trainfit plan`` or ``trainfit simulate``.

A process of its own: a cell that is killed takes no other with it. Nothing here needs PyTorch, and
a cell can be sent to another machine.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from trainfit.plan.runs.processes import end_group
from trainfit.plan.runs.tracing import ending
from trainfit.results.runs.sweep import SweepVerb
from trainfit.results.text import printable

#: Seconds between looks whether a cell is done.
_TICK_S: Final = 0.05
#: Exit codes of a verb that has a result: it fits, and it does not.
_ANSWERED: Final = (0, 1)
#: The line in which a verb says what was wrong; the traceback below it is left to `trainfit plan`.
_ERROR: Final = re.compile(
    r"^trainfit[ a-z]*: error: (.+?)(?:; its traceback is below)?$", re.MULTILINE
)


#: Variables that change what a run does, by their beginnings.
VARIABLES: Final = ("PYTORCH_", "CUDA_", "NCCL_", "TORCH", "OMP_", "HF_", "TRANSFORMERS_")
#: Those that say what runs it.
_FINDING: Final = ("PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "TRAINFIT_CONFIG")


def own_variables() -> dict[str, str]:
    """Those of this process that a cell is to have wherever it runs; others are no business of
    another machine's."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _FINDING or name.startswith(VARIABLES)
    }


class CellStopped(Exception):
    """The sweep ends, and the cell with it."""


@dataclasses.dataclass(frozen=True)
class CellJob:
    """What a cell's process is told: the verb's ``options`` and the user's ``words``, in
    ``folder``, with ``variables`` in the place of the machine's own (:func:`own_variables`)."""

    verb: SweepVerb
    options: tuple[str, ...]
    gpu: str
    words: tuple[str, ...]
    folder: str
    variables: Mapping[str, str]

    def environment(self) -> dict[str, str]:
        """Of its process; Ray's for its own workers do not count."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(VARIABLES)}
        return {**kept, **self.variables}

    def command(self, output: Path) -> list[str]:
        """The words of its process, which writes its result to ``output``."""
        own = ["--no-loader"] if self.verb == "plan" else []
        return [
            *(sys.executable, "-P", "-m", "trainfit", self.verb, *own, *self.options),
            *("--gpu", self.gpu, "--output", str(output), "--", *self.words),
        ]


@dataclasses.dataclass(frozen=True)
class CellEnd:
    """What came of it: the bytes of its result's file, or why there is none."""

    content: bytes | None
    failure: str = ""


def run_cell(
    job: CellJob,
    stopped: Callable[[], bool] = lambda: False,
    look: Callable[[], None] = lambda: None,
) -> CellEnd:
    """Run it to its end.

    Args:
        stopped: should it end early? It raises :class:`CellStopped` then.
        look: is called while it goes on; what that raises ends it, too.
    """
    if not os.path.isdir(job.folder):
        return CellEnd(None, f"folder {job.folder!r} is not on machine {os.uname().nodename}")
    with tempfile.TemporaryDirectory(prefix="trainfit-sweep-") as scratch:
        output, said = Path(scratch, "result"), Path(scratch, "said.txt")
        with said.open("wb") as stream:
            process = subprocess.Popen(
                job.command(output),
                cwd=job.folder,
                env=job.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                start_new_session=True,
            )
        try:
            while process.poll() is None:
                time.sleep(_TICK_S)
                if stopped():
                    raise CellStopped
                look()
        finally:
            if process.poll() is None:
                end_group(process)
        # Another exit code may come with what was known by then, which is no whole result.
        if process.returncode in _ANSWERED and output.is_file():
            return CellEnd(output.read_bytes())
        return CellEnd(None, _failure(process.returncode, said))


def _failure(code: int, said: Path) -> str:
    """In one line: what the verb said was wrong, or how its process ended."""
    text = said.read_text(encoding="utf-8", errors="replace")
    found = _ERROR.findall(text)
    return printable(found[-1]) if found else ending(code)
