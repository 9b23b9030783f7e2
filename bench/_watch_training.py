"""A training whose blocks of steps begin on command: the other end of watch_overhead.py.

    python bench/_watch_training.py WIDTH BATCH

A line with a number of seconds on stdin: a block of steps for so long. A line on stdout: a JSON
object with the seconds of each of its steps, and the CPU seconds of this process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def training(width: int, batch: int) -> Callable[[], None]:
    """A function that makes one step, for as long as one likes."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(8192, width), torch.randint(0, 10, (8192,)))

    def batches() -> Any:
        while True:
            yield from DataLoader(data, batch_size=batch, shuffle=True)

    source = batches()

    def step() -> None:
        samples, labels = next(source)
        loss = nn.functional.cross_entropy(model(samples), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def block(step: Callable[[], None], seconds: float) -> dict[str, Any]:
    """Steps for so long; the first ones, whose code and data are not in the caches, do not
    count."""
    until = time.perf_counter() + 0.15 * seconds
    while time.perf_counter() < until:
        step()
    found, began_cpu = [], time.process_time()
    began = last = time.perf_counter()
    while last - began < seconds:
        step()
        now = time.perf_counter()
        found.append(now - last)
        last = now
    return {"steps_s": found, "cpu_s": time.process_time() - began_cpu}


def main() -> None:
    torch.set_num_threads(1)
    step = training(int(sys.argv[1]), int(sys.argv[2]))
    for line in sys.stdin:
        print(json.dumps(block(step, float(line))), flush=True)


if __name__ == "__main__":
    main()
