"""trainfit: fits a PyTorch training or inference job to the hardware it runs on."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.results.files import display
from trainfit.version import __version__

if TYPE_CHECKING:
    from trainfit import batch, pace, watch
    from trainfit.results.files.documents import ResultFile
    from trainfit.results.runs.recording import Recording
    from trainfit.simgpu import simulate

__all__ = ["__version__", "batch", "load", "pace", "simulate", "watch", "why_no_gpu"]


def why_no_gpu() -> str:
    """Why PyTorch sees no GPU in this process, with evidence and fix; or that it sees one.

    Asks in fresh processes, as PyTorch keeps its first answer; takes up to 20 seconds on a
    machine whose driver hangs, a few otherwise. Changes nothing and raises nothing.
    """
    from trainfit.doctor.checks import diagnose
    from trainfit.hardware.machine.survey import survey
    from trainfit.hardware.machine.system import System
    from trainfit.report.layout import plain_text
    from trainfit.report.sections.doctor import checks_subject
    from trainfit.report.writers.terminal import whole

    return plain_text(whole(checks_subject(diagnose(survey(System()), ("gpu",)))))


def load(path: str | os.PathLike[str]) -> ResultFile | Recording:
    """The result in a file that any command wrote; a notebook shows it as its report.

    Raises :class:`trainfit.results.files.errors.ResultFileError`: missing, damaged, no result.
    """
    from trainfit.results.kinds import read

    return read(Path(path))


def _page(result: object) -> str | None:
    """A result's report, in a frame of its own; ``None`` where the report's packages are missing,
    so that a notebook shows the text."""
    from trainfit.plan.job_detail import explained
    from trainfit.report.blocks import Entry
    from trainfit.report.page import page_of
    from trainfit.report.writers.html import ReportError, framed

    try:
        return framed(page_of([Entry("this notebook", *explained(result, "this notebook"))]))
    except ReportError:
        return None


display.use(_page)


def __getattr__(name: str) -> Any:
    # torch is imported only by those who simulate.
    if name == "simulate":
        from trainfit.simgpu import cuda_clocks, simulate
        from trainfit.speed.step import StepClock

        cuda_clocks.use(StepClock)
        return simulate
    if name in ("batch", "pace", "watch"):
        return importlib.import_module(f"trainfit.{name}")
    raise AttributeError(f"module 'trainfit' has no attribute {name!r}")
