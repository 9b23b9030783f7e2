"""Measures PyTorch's CPU time per operator on this machine: eager mode, no GPU needed.

Runs in a process of its own (``main``), with the user's interpreter and PyTorch. What it times
is what launching a model's kernels is made of as well: Python, autograd's bookkeeping and the
dispatcher, on tensors so small that their arithmetic is nothing.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch

from trainfit.results.files.decoding import write_whole

#: Operators forward in one chain (as many go backward), seconds of all chains, and the share of
#: them that were at least as fast as the reported rate: others were disturbed.
_OPERATORS, _SECONDS, _FAST = 64, 0.8, 0.1


def operator_seconds(seconds: float = _SECONDS) -> float:
    """Seconds for one operator, of forward and backward on average."""
    weights = [torch.ones(1, requires_grad=True) for _ in range(4)]
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(times) < 3 / _FAST:
        began = time.perf_counter()
        value = weights[0]
        for number in range(_OPERATORS):
            value = value * weights[number % 4] if number % 2 else value + weights[number % 4]
        value.backward()
        times.append(time.perf_counter() - began)
    return statistics.quantiles(times, n=round(1 / _FAST))[0] / (2 * _OPERATORS)


def main() -> None:
    """The child process's entry point."""
    request = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    found = {"operator_s": operator_seconds(), "torch": torch.__version__}
    write_whole(Path(request["outcome"]), json.dumps(found))
