"""In place of NVIDIA's package in a child process: the simulated GPUs of a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trainfit.simgpu.cuda import nvml

_MODULE = nvml.load(Path(os.environ["SIMULATED_NVML"]))


def __getattr__(name: str) -> Any:
    return getattr(_MODULE, name)
