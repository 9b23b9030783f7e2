"""Trainings whose blocks of steps begin on command: the other end of watch_overhead.py.

    python bench/_watch_training.py WIDTH BATCH ENVIRONMENT IN,OUT …

One process makes the model and the data, and is forked for each pair of file descriptors: the
trainings then differ in nothing but the recorder, not even in where their memory lies, which alone
makes steps of two processes differ by several percent. The first is watched, with the variables of
the JSON object ENVIRONMENT.

Each writes a line with its process ID. A line with a number of seconds on IN: a block of steps for
so long. A line on OUT: a JSON object with the seconds of each of its steps, and the CPU seconds of
the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src")]

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from trainfit.watch.recorder import process  # noqa: E402


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


def serve(step: Callable[[], None], asked: int, told: int) -> None:
    """Blocks, until the other end closes."""
    with os.fdopen(asked) as lines, os.fdopen(told, "w", buffering=1) as answers:
        print(os.getpid(), file=answers)
        for line in lines:
            print(json.dumps(block(step, float(line))), file=answers)


def main() -> None:
    torch.set_num_threads(1)
    step = training(int(sys.argv[1]), int(sys.argv[2]))
    pairs = [tuple(map(int, each.split(","))) for each in sys.argv[4:]]
    children = []
    for number, pair in enumerate(pairs):
        child = os.fork()
        if not child:
            for asked, told in pairs[:number] + pairs[number + 1 :]:
                os.close(asked)
                os.close(told)
            if not number:
                os.environ.update(json.loads(sys.argv[3]))
                process.from_environment()
            serve(step, *pair)
            sys.exit()
        children.append(child)
    for asked, told in pairs:
        os.close(asked)
        os.close(told)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
