"""In place of NVIDIA's package in a child process: the simulated GPUs of a file.

With ``SIMULATED_TIME`` they have the time that is written in that file, else the machine's.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from trainfit.simgpu.cuda import nvml

_TIME = os.environ.get("SIMULATED_TIME")


def _now() -> float:
    return float(Path(_TIME).read_text()) if _TIME else time.monotonic()


_MODULE = nvml.load(Path(os.environ["SIMULATED_NVML"]), _now)


def __getattr__(name: str) -> Any:
    return getattr(_MODULE, name)
