"""The collectives of a simulated rank against those of two real ones, by gloo on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

import trainfit
from tests.simgpu.operators.test_several_ranks import launched

RANKS: Final = 2
#: Against ranks that hang; a busy machine takes minutes.
LIMIT_S: Final = 600.0

#: A training that is the same on any device; DEVICE is the real one's or the simulated one's.
DDP: Final = """
import torch
from torch import distributed, nn

def train(device, options):
    torch.manual_seed(0)
    layers = [nn.Linear(700, 700), nn.ReLU(), nn.BatchNorm1d(700), nn.Linear(700, 700)]
    model = nn.Sequential(*layers, nn.Linear(700, 10)).to(device)
    ddp = nn.parallel.DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    for step in range(3):
        if step == 1:
            with ddp.no_sync():
                ddp(torch.randn(4, 700, device=device)).square().mean().backward()
        loss = ddp(torch.randn(4, 700, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        distributed.all_reduce(total)
    found = [torch.zeros(3, device=device) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, torch.ones(3, device=device))
"""

#: What a real rank runs: prints the operators that it sent, with their bytes.
RANK: Final = """
import json, sys
from torch.utils._python_dispatch import TorchDispatchMode

def flat(value):
    return [value] if isinstance(value, torch.Tensor) else [t for each in value for t in flat(each)]

class Log(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(each, "from_local") for each in types):
            return NotImplemented  # a DTensor sends its local tensors
        name = func.overloadpacket.__name__
        sends = func.namespace in ("c10d", "_c10d_functional")
        if sends and not name.startswith(("wait_tensor", "_wrap_tensor")):
            moved = flat(args[1] if name.startswith(INPUTS) else args[0])
            times = args[1] if name.startswith("all_gather_into_tensor") else 1
            sent.append((name, times * sum(t.numel() * t.element_size() for t in moved)))
        return func(*args, **(kwargs or {}))

INPUTS = ("_reduce_scatter_base_", "alltoall")  # of scatter_ only the root has all
distributed.init_process_group("gloo")
jobs = []
for job in json.loads(sys.argv[1]):
    sent = []
    with Log():
        train("cpu", job)
    jobs.append(sent)
print(json.dumps(jobs))
"""

KINDS_OF: Final = {
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "broadcast_": "broadcast",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "scatter_": "send_receive",
    "send": "send",
    "recv_": "receive",
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"bucket_cap_mb": 1},
    {"gradient_as_bucket_view": True, "find_unused_parameters": True},
)


def real_ranks(
    folder: Path, train: str, jobs: Sequence[Any], count: int
) -> list[list[list[tuple[str, int]]]]:
    """Kind and bytes of every collective, in order, of each rank and each of the jobs of ``train``,
    as real processes send them."""
    script = folder / "rank.py"
    script.write_text(train + RANK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": count,
        "OMP_NUM_THREADS": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    words = [sys.executable, str(script), json.dumps(jobs)]
    ranks = [
        subprocess.Popen(
            words,
            env={**os.environ, **{k: str(v) for k, v in (shared | {"RANK": rank}).items()}},
            stdout=subprocess.PIPE,
            stderr=None if not rank else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    sent = [json.loads(text.strip().rpartition("\n")[2]) for text in said]
    return [[[(KINDS_OF[name], size) for name, size in job] for job in each] for each in sent]


def test_ddp_sends_what_real_ranks_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = real_ranks(tmp_path, DDP, OPTIONS, RANKS)
    assert first == second and min(map(len, first)) > 8
    values = {"RANK": 0, "WORLD_SIZE": RANKS, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    script: dict[str, Any] = {}
    exec(DDP, script)
    for options, expected in zip(OPTIONS, first, strict=True):
        with trainfit.simulate(f"{RANKS}x RTX 4090") as simulation:
            script["distributed"].init_process_group("nccl")
            script["train"]("cuda", options)
        assert [row[:2] for row in launched(simulation.recording)] == expected
