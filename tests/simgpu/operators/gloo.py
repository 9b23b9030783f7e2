"""What real ranks send each other, by gloo on the CPU: run here, or as it was recorded.

Real ranks take half a minute of CPU time. ``python -m tests.simgpu.operators.gloo`` runs them and
writes what they sent with this PyTorch into ``gloo.json``; ``make test-slow`` compares.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

#: Of each rank and each job: kind and bytes of every collective, in order.
Sent = list[list[list[tuple[str, int]]]]

#: Against ranks that hang; a busy machine takes minutes.
_LIMIT_S: Final = 600.0
#: By version of PyTorch and digest of what was run.
_RECORDED: Final = Path(__file__).with_name("gloo.json")
#: Modules that say what is run, as ``TRAIN``, ``JOBS`` and ``RANKS``.
_RUN: Final = ("test_against_gloo", "test_tensor_parallel", "test_pipelines")

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

_KINDS_OF: Final = {
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


def real_ranks(folder: Path, train: str, jobs: Sequence[Any], count: int) -> Sent:
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
        said = [rank.communicate(timeout=_LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    sent = [json.loads(text.strip().rpartition("\n")[2]) for text in said]
    return [[[(_KINDS_OF[name], size) for name, size in job] for job in each] for each in sent]


def recorded_ranks(train: str, jobs: Sequence[Any], count: int) -> Sent:
    """What :func:`real_ranks` gave when it was recorded; with a PyTorch of which nothing is
    recorded they are run.

    Raises:
        KeyError: What is to be run is not what was recorded.
    """
    of_this_version = json.loads(_RECORDED.read_text()).get(_version())
    if of_this_version is None:
        with tempfile.TemporaryDirectory() as folder:
            return real_ranks(Path(folder), train, jobs, count)
    ranks = of_this_version[_digest(train, jobs, count)]
    return [[[(kind, nbytes) for kind, nbytes in job] for job in each] for each in ranks]


def _version() -> str:
    return torch.__version__.partition("+")[0]


def _digest(train: str, jobs: Sequence[Any], count: int) -> str:
    return hashlib.sha256(json.dumps([RANK, train, jobs, count]).encode()).hexdigest()[:16]


def _record() -> None:
    found = {}
    for name in _RUN:
        module = importlib.import_module(f"tests.simgpu.operators.{name}")
        asked = module.TRAIN, module.JOBS, module.RANKS
        with tempfile.TemporaryDirectory() as folder:
            found[_digest(*asked)] = real_ranks(Path(folder), *asked)
    recorded = json.loads(_RECORDED.read_text()) if _RECORDED.exists() else {}
    lines = json.dumps({**recorded, _version(): found}, separators=(",", ":"))
    _RECORDED.write_text(lines.replace("]]],[[[", "]]],\n[[[").replace('],["', '],\n["') + "\n")


if __name__ == "__main__":
    _record()
