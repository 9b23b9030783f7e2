"""In place of NVIDIA's package in a child process: the simulated GPUs of a file.

With ``SIMULATED_TIME`` they have the time that is written in that file, else the machine's.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from helpers_nvml import load

_TIME = os.environ.get("SIMULATED_TIME")


def _now() -> float:
    return float(Path(_TIME).read_text()) if _TIME else time.monotonic()


_MODULE = load(Path(os.environ["SIMULATED_NVML"]), _now)


def __getattr__(name: str) -> Any:
    return getattr(_MODULE, name)
