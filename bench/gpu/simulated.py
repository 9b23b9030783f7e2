"""The simulated GPU in a real one's place, and predictions made on it; these need trainfit."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def import_trainfit() -> None:
    """Make trainfit importable, and what simulating torchvision's models needs."""
    _add_source()
    from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators

    define_torchvision_operators()


def _add_source() -> None:
    """The trainfit of this checkout, whatever is installed."""
    source = str(ROOT / "src")
    if source not in sys.path:
        sys.path.insert(0, source)


#: From this PyTorch on cuBLASLt shares cuBLAS's workspace (trainfit.simgpu.operators.matmul).
_SHARED_SINCE = (2, 12)


def as_in(torch: str) -> None:
    """Simulate in this process what PyTorch of that version does, where the installed one differs.

    ``torch`` is a truth file's version ("2.11.0+cu130").
    """
    release = tuple(int(part) for part in torch.partition("+")[0].split(".")[:2])
    shares = "1" if release >= _SHARED_SINCE else "0"
    os.environ.setdefault("TORCH_CUBLASLT_UNIFIED_WORKSPACE", shares)


def simulated(gpu: Any, limited: bool = True, conf: str | None = None) -> Any:
    """A simulation of ``gpu``: a name, or a specification.

    ``conf`` is the value of PYTORCH_CUDA_ALLOC_CONF; ``None``: as in the environment.
    """
    import_trainfit()
    import trainfit
    from trainfit.simgpu.allocator.settings import AllocatorSettings

    settings = None if conf is None else AllocatorSettings.from_conf(conf)
    return trainfit.simulate(gpu, limited=limited, allocator=settings)


def unknown_name(name: str) -> str | None:
    """Why the catalogue has no GPU of this name; ``None`` where it has."""
    _add_source()  # without PyTorch: the campaign's own process has none
    from trainfit.hardware import GpuNameError, find_gpu

    try:
        find_gpu(name)
    except GpuNameError as error:
        return str(error)
    return None


def spec_of(machine: dict[str, Any]) -> Any:
    """The GPU that a truth file's ``machine`` was: the catalogue's, with measured memory.

    A GPU that the catalogue does not know (or a machine without the catalogue's data) gives
    one with what was measured; its rates are unknown, which memory does not depend on.
    """
    import_trainfit()
    from trainfit.hardware import GpuNameError, GpuSpec, find_gpu

    measured = {
        "name": machine["gpu"],
        "capability": tuple(machine["capability"]),
        "memory_bytes": machine["memory_bytes"],
        "sm_count": machine["sm_count"],
        "memory_is_assumed": False,
    }
    try:
        return dataclasses.replace(find_gpu(machine["gpu"]), **measured)
    except (GpuNameError, ImportError):
        pass
    mib = 1 << 20
    return GpuSpec(
        key=machine["gpu"],
        bandwidth_bytes_per_s=1e12,
        l2_bytes=None,
        boost_clock_hz=None,
        fp32_flops=1e13,
        tensor_flops={},
        power_watts=300.0,
        shared_memory_device=False,
        context_bytes=500 * mib,
        context_range_bytes=(300 * mib, 700 * mib),
        sources={},
        **measured,
    )


def record(case: Any, gpu: Any) -> Any:
    """A recording of the case on a GPU without end."""
    from gpu.training import prepared

    with simulated(gpu, limited=False, conf="") as simulation:
        job = prepared(dataclasses.replace(case, cap_bytes=None))
        if case.mode == "training":
            job.run()
        else:  # no optimizer tells where a step ends
            job.begin()
            for _ in range(case.steps):
                job.step()
                simulation.end_step()
        recording = simulation.recording
    return recording


def predict_largest(case: Any, gpu: Any) -> int:
    """The largest batch of a capped case, from two simulated ones; 0 if none fits.

    Raises ``trainfit.results.runs.recording.NotAffineError`` where two batch sizes give no law.
    """
    import_trainfit()
    from trainfit.memory.affine import AffineStream
    from trainfit.memory.capacity import largest_batch
    from trainfit.simgpu.allocator.settings import AllocatorSettings

    first, second = case.batch, 2 * case.batch
    law = AffineStream.between(
        record(case.at(first), gpu), first, record(case.at(second), gpu), second
    )
    settings = dataclasses.replace(
        AllocatorSettings.from_conf(case.alloc_conf),
        per_process_memory_fraction=case.cap_bytes / gpu.memory_bytes,
    )
    return largest_batch(law, gpu.memory_bytes, gpu.context_bytes, settings)
