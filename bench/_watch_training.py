"""A training whose blocks of steps begin on command: the other end of watch_overhead.py.

    python bench/_watch_training.py WIDTH BATCH

It reads lines from stdin: "SECONDS on" is a block of steps for so long with the recorder's hooks in
PyTorch, "SECONDS off" one without them. Both are the same process with the same memory: where that
lies makes the steps of two processes differ by several percent, more than the recorder does.

It writes a line with its process ID, and one for each block: a JSON object with the seconds of each
of its steps, the CPU seconds of the process, and what the recorder says of its own cost, in percent
of the block.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import _bench  # noqa: F401  (the trainfit of this checkout)
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainfit.watch.recorder.current_step import FIRST
from trainfit.watch.recorder.process import FOLDER, begin, place


class SmallTraining:
    """A small network, its optimizer and its data."""

    def __init__(self, width: int, batch: int) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(12):
            layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()]
        self._model = nn.Sequential(*layers, nn.Linear(width, 10))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        data = TensorDataset(torch.randn(8192, width), torch.randint(0, 10, (8192,)))
        self._loader = DataLoader(data, batch_size=batch, shuffle=True)
        self.begin()

    def begin(self) -> None:
        """A new epoch: its iterator is made where the recorder sees it, or does not."""
        self._batches = self._epochs()

    def _epochs(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def step(self) -> None:
        samples, labels = next(self._batches)
        loss = nn.functional.cross_entropy(self._model(samples), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


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
    training = SmallTraining(int(sys.argv[1]), int(sys.argv[2]))
    recorder = begin(place(os.environ[FOLDER]))  # the one that the environment has begun
    for _ in range(2 * FIRST):  # all of the first are recorded in detail
        training.step()
    recorder.unhook()
    budget = recorder.steps.budget
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        seconds, hooks = line.split()
        if hooks == "on":
            recorder.start(late=False)
        training.begin()
        spent_s, began = budget.spent_s, time.perf_counter()
        found = block(training.step, float(seconds))
        spent_s, took = budget.spent_s - spent_s, time.perf_counter() - began
        recorder.unhook()
        print(json.dumps({**found, "recorder": 100 * spent_s / took}), flush=True)


if __name__ == "__main__":
    main()
