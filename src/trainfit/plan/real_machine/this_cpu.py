"""Measures this machine's CPU: cores available to a job, and the dispatch rate of a core."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Final

from trainfit.hardware.cpu.processor import read_cpu
from trainfit.hardware.host.system import System
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import CommandError
from trainfit.plan.runs.tracing import run_child
from trainfit.results.plan.result import HostCpu
from trainfit.speed.model.host import REFERENCE_OPERATOR_S

#: Seconds that importing PyTorch and measuring may take.
_LIMIT_S: Final = 60.0


def measured_cpu(command: Command) -> HostCpu:
    """The cores that a job has here, and a core's speed in the command's interpreter.

    Raises :class:`CommandError` where PyTorch does not run there.
    """
    with tempfile.TemporaryDirectory(prefix="trainfit-") as name:
        folder = Path(name)
        outcome = folder / "outcome.json"
        (folder / "request.json").write_text(json.dumps({"outcome": str(outcome)}))
        environment = {**os.environ, **command.environment()}
        module = "trainfit.speed.dispatch_probe"
        child = run_child(command, module, folder, environment, _LIMIT_S, runs_script=False)
        seconds = None
        with contextlib.suppress(OSError, ValueError, KeyError):
            seconds = float(json.loads(outcome.read_text())["operator_s"])
    if not seconds:
        last = (child.output.strip().splitlines() or [child.ending])[-1]
        raise CommandError(
            f"--cpu here: PyTorch does not run in {command.python} ({last}); describe the "
            "processor, as in --cpu cores=8,ghz=3.5"
        )
    cores = read_cpu(System()).usable_cores.value
    return HostCpu(cores, None, REFERENCE_OPERATOR_S / seconds)
