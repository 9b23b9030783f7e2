"""How fast is a simulated training step? Beside FakeTensorMode and MemTracker, in one run.

The same step (forward, cross entropy, backward, AdamW) of timm's ResNet-50 and ViT-B/16 on
224x224 images runs three ways:

    trainfit        on the simulated GPU, with allocator, workspaces and recording
    FakeTensorMode  PyTorch's shapes without data, on the CPU, which record nothing
    MemTracker      torch.distributed._tools.mem_tracker over FakeTensorMode

Only ratios within this run have goals: they carry over from machine to machine, seconds do
not. A warm step is the median of three after a first one; the first ("cold") is shown too.

    python bench/trace.py [--quick] [--json]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from _bench import BenchFigure, finish, needs, parser, table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import trainfit
from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators

MODELS = {"resnet50": "resnet50", "vit_b16": "vit_base_patch16_224"}
GPU = "RTX 4090"
BATCH = 32
REPEATS = 3
AT_MOST_FAKE = 1.5
AT_LEAST_TRACKER = 5.0

Step = Callable[[], None]


@dataclass(frozen=True)
class Timing:
    """Seconds of the first step, and the median of the steps after it."""

    cold_s: float
    warm_s: float


def main() -> int:
    options = parser(__doc__, quick="one warm step instead of three").parse_args()
    # timm imports torchvision, whose own extension does not load next to a CPU build.
    define_torchvision_operators()
    needs("timm")
    import timm

    repeats = 1 if options.quick else REPEATS
    figures: list[BenchFigure] = []
    details: dict[str, dict[str, Any]] = {}
    rows: list[tuple[object, ...]] = []
    for name, architecture in MODELS.items():
        timings = measure(lambda a=architecture: timm.create_model(a), repeats)
        figures += figures_of(name, timings)
        details[name] = {way: asdict(timing) for way, timing in timings.items()}
        rows += [
            (f"{name}, {way}", timing.warm_s, timing.cold_s) for way, timing in timings.items()
        ]
    tables = [table((f"batch {BATCH}, seconds of", "a step", "the first"), rows)]
    return finish(figures, options.json, details, tables)


def figures_of(name: str, timings: dict[str, Timing]) -> list[BenchFigure]:
    ours = timings["trainfit"].warm_s
    fake = ours / timings["FakeTensorMode"].warm_s
    tracker = timings["MemTracker"].warm_s / ours
    return [
        BenchFigure(f"{name}_step_by_fake_tensor_mode", fake, AT_MOST_FAKE, True, "x"),
        BenchFigure(f"{name}_mem_tracker_by_step", tracker, AT_LEAST_TRACKER, False, "x"),
    ]


# The three ways ---------------------------------------------------------------------------------


def measure(make: Callable[[], nn.Module], repeats: int) -> dict[str, Timing]:
    """The same step three ways, one after the other."""
    return {
        "trainfit": simulated(make, repeats),
        "FakeTensorMode": fake(make, repeats),
        "MemTracker": tracked(make, repeats),
    }


def simulated(make: Callable[[], nn.Module], repeats: int) -> Timing:
    with trainfit.simulate(GPU, limited=False):
        return timed(step_of(make().cuda(), "cuda")[0], repeats)


def fake(make: Callable[[], nn.Module], repeats: int) -> Timing:
    mode = FakeTensorMode()
    model = without_data(make(), mode)
    with mode:
        return timed(step_of(model, "cpu")[0], repeats)


def tracked(make: Callable[[], nn.Module], repeats: int) -> Timing:
    mode = FakeTensorMode()
    model = without_data(make(), mode)
    with mode:
        step, optimizer = step_of(model, "cpu")
        tracker = MemTracker()
        tracker.track_external(model, optimizer)

        def tracked_step() -> None:
            with tracker:
                step()
            tracker.reset_mod_stats()

        return timed(tracked_step, repeats)


def without_data(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """``model`` with fake tensors; timm reads values of CPU tensors while it builds one."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(mode.from_tensor(parameter.detach()))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = mode.from_tensor(buffer)
    return model


def step_of(model: nn.Module, device: str) -> tuple[Step, torch.optim.Optimizer]:
    """A training step of ``model``, and its optimizer."""
    # foreach is the default on a GPU but not on the CPU, where it would be many more operators.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        images = torch.empty(BATCH, 3, 224, 224, device=device)
        labels = torch.zeros(BATCH, dtype=torch.long, device=device)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def timed(step: Step, repeats: int) -> Timing:
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return Timing(seconds[0], statistics.median(seconds[1:]))


if __name__ == "__main__":
    sys.exit(main())
