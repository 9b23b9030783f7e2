"""In place of NVIDIA's package in a child process: the simulated GPUs of a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from helpers_nvml import load

_MODULE = load(Path(os.environ["SIMULATED_NVML"]))


def __getattr__(name: str) -> Any:
    return getattr(_MODULE, name)
