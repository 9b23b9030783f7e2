"""How long it takes to say how long a step takes: 20,000 operators, and all GPUs of the catalogue.

The step is that of a deep perceptron with layer norms and AdamW over its parameters one by one,
recorded on the simulated GPU; costing begins with its kernels.

    python bench/speed_cost.py [--quick] [--json]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _bench import Figure, finish, quick_options

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import nn

import trainfit
from trainfit.hardware import catalogue, find_gpu
from trainfit.plan.sizing.costing import machine_of
from trainfit.speed.step import step_time
from trainfit.speed.work import Work

OPERATORS = 20_000
TRIES = 5


def main() -> int:
    options = quick_options(__doc__)
    work = recorded()
    gpus = catalogue()
    one = best(lambda: step_time(work, machine_of(find_gpu("RTX 4090"))))
    every = best(lambda: [step_time(work, machine_of(gpu)) for gpu in gpus])
    figures = [
        Figure("step_operators", len(work.op_phase), OPERATORS, False),
        Figure("cost_of_a_step", one, 0.2, True, " s"),
        Figure("cost_on_all_gpus", every, 3.0, True, " s"),
        Figure("gpus", len(gpus), 40, False),
    ]
    return finish(figures, options.json, {"kernels": len(work.table)})


def recorded() -> Work:
    """The kernels of the second step."""
    layers: list[nn.Module] = []
    for width in range(64, 64 + 530):  # no two layers alike: nothing is costed once for many
        layers += [nn.Linear(width, width + 1), nn.LayerNorm(width + 1), nn.GELU()]
    with trainfit.simulate("RTX 4090", limited=False) as simulation:
        model = nn.Sequential(*layers).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(32, 64, device="cuda")).sum().backward()
            optimizer.step()
    return Work.of_step(simulation.recording, 1)


def best(act: Callable[[], Any]) -> float:
    """Seconds of the fastest of some tries."""
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
