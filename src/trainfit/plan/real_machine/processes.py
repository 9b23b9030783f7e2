"""Processes that measure this machine's GPU, or a simulated one."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from trainfit.hardware.gpu.local_gpu import local_usage
from trainfit.plan.command.interpreter import Interpreter, own_interpreter
from trainfit.results.machine.constants import CONTEXT
from trainfit.results.runs.measurement import MeasuringOutcome, MeasuringRequest, StandIn, Subject

_MODULES: Final[Mapping[Subject, str]] = {
    "memory": "trainfit.memory.calibration",
    "workspaces": "trainfit.memory.calibration",
    "rates": "trainfit.speed.calibration",
}
_START: Final = "from {module} import main; main()"


class Processes:
    """Measures in child processes, on this machine's GPU or on a simulated one."""

    def __init__(self, stand_in: StandIn | None = None) -> None:
        self.stand_in = stand_in

    def measure(
        self, subject: Subject, limit_s: float, stand_in: StandIn | None
    ) -> MeasuringOutcome:
        """One fresh process; raises ``TimeoutError`` past ``limit_s``."""
        with _process(subject, stand_in) as (process, result):
            return _outcome(process, result, limit_s)

    def others(self, limit_s: float) -> tuple[int, str]:
        """Bytes that other processes hold of the GPU now, and how that is known.

        NVML says so. Without it two processes with a context each tell: the second sees one
        context more than the first.
        """
        if self.stand_in is not None:
            return self.stand_in.constants.other_processes_bytes, "as set for the simulated GPU"
        usage = local_usage()
        if usage is not None and usage.used_bytes is not None:
            return usage.used_bytes, "NVML, before the process was started"
        one = two = MeasuringOutcome(error="the time limit was reached")
        with contextlib.suppress(TimeoutError), _process("memory", None, hold=True) as first:
            one = _outcome(*first, limit_s, keep=True)
            if one.memory is not None:
                with _process("memory", None, hold=True) as second:
                    two = _outcome(*second, limit_s, keep=True)
        if one.memory is None or two.memory is None:
            return 0, "not known: no NVML (pip install nvidia-ml-py)"
        alone = one.memory.outside_bytes[CONTEXT]
        both = two.memory.outside_bytes[CONTEXT]
        return max(0, 2 * alone - both), "from two processes with a context each, without NVML"

    def context(self, limit_s: float, python: Interpreter | None = None) -> MeasuringOutcome:
        """A fresh process that makes nothing but its context, in ``python`` (default: our own).

        Raises ``TimeoutError`` past ``limit_s``.
        """
        with _process("memory", self.stand_in, hold=True, python=python) as (process, result):
            return _outcome(process, result, limit_s, keep=True)

    def driver(self) -> str | None:
        """The version of the GPU's driver."""
        if self.stand_in is not None:
            return None
        usage = local_usage()
        return usage.driver if usage is not None and usage.driver else driver_of_proc()


def driver_of_proc(root: Path = Path("/")) -> str | None:
    """The driver's version by the kernel's file, where there is one."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return found[1] if found else None


@contextlib.contextmanager
def _process(
    subject: Subject,
    stand_in: StandIn | None,
    *,
    hold: bool = False,
    python: Interpreter | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A measuring process and the file that it will write; it does not outlive the block."""
    with tempfile.TemporaryDirectory(prefix="trainfit-") as folder:
        request, result = Path(folder) / "request.json", Path(folder) / "result.json"
        request.write_text(MeasuringRequest(subject, str(result), stand_in, hold).to_json())
        code = _START.format(module=_MODULES[subject])
        with (Path(folder) / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                [*(python or own_interpreter()).start(code), str(request)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(os.environ),
                start_new_session=True,
            )
            try:
                yield process, result
            finally:
                process.kill()
                process.communicate()


def _outcome(
    process: subprocess.Popen[bytes], result: Path, limit_s: float, *, keep: bool = False
) -> MeasuringOutcome:
    """What the process wrote; with ``keep`` it need not have ended."""
    deadline = time.monotonic() + limit_s
    while process.poll() is None and not (keep and result.is_file()):
        if time.monotonic() >= deadline:
            raise TimeoutError
        time.sleep(0.05)
    if result.is_file():
        return MeasuringOutcome.load(result)
    output = (result.parent / "output.txt").read_text(errors="replace").strip()
    last = output.splitlines()[-1] if output else "no output"
    return MeasuringOutcome(error=f"the process ended with code {process.returncode} ({last})")
