"""Shared code of measuring processes: the device, its name, and how they end."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from trainfit.results.gpus import DeviceConstants, GpuSpec
from trainfit.results.runs.measurement import GpuEnvironment, MeasuringOutcome, MeasuringRequest


def device(
    gpu: GpuSpec | None, constants: DeviceConstants | None = None
) -> AbstractContextManager[Any]:
    """The device to measure on: this machine's, or a simulated one in its place."""
    if gpu is None:
        return contextlib.nullcontext()
    from trainfit.simgpu.session import Simulation

    return Simulation(gpu, constants=constants)


def describe() -> GpuEnvironment:
    """The GPU and the software, as PyTorch names them."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return GpuEnvironment(
        gpu=torch.cuda.get_device_name(0),
        capability=torch.cuda.get_device_capability(0),
        memory_bytes=torch.cuda.mem_get_info(0)[1],
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        cudnn=_dotted(cudnn) if cudnn is not None else None,
        eager_loading=os.environ.get("CUDA_MODULE_LOADING", "").upper() == "EAGER",
    )


def _dotted(cudnn: int) -> str:
    """cuDNN's number with dots: 91501 is 9.15.1, 8902 is 8.9.2."""
    major = 10000 if cudnn >= 90000 else 1000
    return f"{cudnn // major}.{cudnn % major // 100}.{cudnn % 100}"


def half_precision() -> torch.dtype:
    """The half precision that this GPU trains in."""
    return torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16


def attempt(failed: dict[str, str], name: str, function: Callable[[], Any]) -> Any:
    """``function()``, or ``None`` and the reason in ``failed``: the rest is still measured."""
    try:
        return function()
    except (RuntimeError, NotImplementedError) as error:  # all that PyTorch raises of CUDA
        failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return None


def serve(measure: Callable[[MeasuringRequest], MeasuringOutcome]) -> None:
    """A measuring process: reads the request named by its argument, writes the outcome."""
    request = MeasuringRequest.from_json(Path(sys.argv[1]).read_text())
    stand_in = request.stand_in
    simulated = (stand_in.gpu, stand_in.constants) if stand_in is not None else (None,)
    try:
        with device(*simulated):
            if torch.cuda.is_available():
                outcome = measure(request)
                outcome.save(Path(request.result))
                if request.hold:
                    sys.stdin.read()
                return
        build = "built without CUDA" if torch.version.cuda is None else "no driver or no device"
        outcome = MeasuringOutcome(error=f"torch {torch.__version__}, {build}", without_gpu=True)
    except Exception as error:
        outcome = MeasuringOutcome(error=f"{type(error).__name__}: {' '.join(str(error).split())}")
    outcome.save(Path(request.result))
