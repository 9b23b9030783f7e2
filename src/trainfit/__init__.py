"""trainfit: fits a PyTorch training or inference job to the hardware it runs on."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainfit.results.version import __version__

if TYPE_CHECKING:
    from trainfit import pace, watch
    from trainfit.simgpu import simulate

__all__ = ["__version__", "pace", "simulate", "watch", "why_no_gpu"]


def why_no_gpu() -> str:
    """Why PyTorch sees no GPU in this process, with evidence and cure; or that it sees one.

    Asks in fresh processes, as PyTorch keeps its first answer; takes up to 20 seconds on a
    machine whose driver hangs, a few otherwise. Changes nothing and raises nothing.
    """
    from trainfit.doctor.diagnose import diagnose
    from trainfit.hardware.host.survey import survey
    from trainfit.hardware.host.system import System
    from trainfit.report.machine.doctor import check_text

    return "\n\n".join(check_text(check) for check in diagnose(survey(System()), ("gpu",)))


def __getattr__(name: str) -> Any:
    # torch is imported only by those who simulate.
    if name == "simulate":
        from trainfit.simgpu import simulate
        from trainfit.simgpu.cuda import clock
        from trainfit.speed.model.device_clock import StepClock

        clock.use(StepClock)
        return simulate
    if name in ("pace", "watch"):
        return importlib.import_module(f"trainfit.{name}")
    raise AttributeError(f"module 'trainfit' has no attribute {name!r}")
