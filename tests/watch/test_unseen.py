"""A watched or simulated process looks at all that is replaced in it, as a script could; and starts
others, which are given some of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers_cli import SCRIPTS, environment, trainfit

#: What each kind of run replaces at least; the script looks at all of it.
SOME = {
    "watch": {
        *("sys.exit", "sys.excepthook", "torch.save", "torch.autograd.backward"),
        "autocast.__enter__",
        *("Module.__call__", "Optimizer.__init__", "DataLoader.__init__", "DataLoader.__iter__"),
        *("GradScaler.step", "_MapDatasetFetcher.fetch", "_BaseDataLoaderIter.__next__"),
    },
    "simulate": {
        *("torch.save", "torch.compile", "torch.cuda.is_available"),
        *("DataLoader.__init__", "Optimizer.__init__", "Tensor.pin_memory", "time.time"),
        "ArgumentParser._parse_known_args",
    },
}  # fmt: skip


@pytest.mark.parametrize("verb", ["watch", "simulate"])
def test_a_script_cannot_tell_what_is_replaced(tmp_path: Path, verb: str) -> None:
    command = ["--", sys.executable, SCRIPTS / "replaced.py"]
    if verb == "watch":
        options = ["--folder", "run", "--quiet"]
        done = trainfit(verb, *options, *command, cwd=tmp_path, PYTHONUNBUFFERED="1")
    else:
        done = trainfit(verb, "--gpu", "T4", "--steps", "50", *command, cwd=tmp_path)
    lines = f"{done.stdout}\n{done.stderr}".splitlines()
    seen = json.loads(next(line for line in lines if line.startswith('{"places"')))
    assert seen["found"] == []
    assert SOME[verb] - {*seen["places"]} == set()


#: Checkpoints are written by other processes, which have no word of trainfit in what they are sent.
POOLS = """
import concurrent.futures as cf, functools, io, multiprocessing as mp, pickle, sys
from torch import save as own_name
import torch
torch.manual_seed(0)

class Job:  # as a user's class does: it holds the function
    def __init__(self): self.write = torch.save
    def __call__(self, path): self.write({"x": torch.ones(2)}, path); return path

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.write = torch.nn.Linear(2, 2), own_name
    def forward(self, x): return self.layer(x)

def main(method):
    net = Net(); optimizer = torch.optim.SGD(net.parameters(), .1)
    context, kept = mp.get_context(method), functools.partial(torch.save, [1])
    with cf.ProcessPoolExecutor(1, mp_context=context) as pool:
        jobs = []
        for n in range(6):
            net(torch.ones(2, 2)).sum().backward(); optimizer.step(); optimizer.zero_grad()
            jobs.append(pool.submit(torch.save, {"n": n}, f"{method}-{n}.pt"))
        jobs += [pool.submit(kept, f"{method}-kept.pt"), pool.submit(Job(), f"{method}-job.pt")]
        jobs += [pool.submit(own_name, 1, f"{method}-own.pt")]
        for job in jobs: job.result()
    process = torch.multiprocessing.get_context(method).Process(target=sys.exit, args=(3,))
    process.start(); process.join()
    torch.save(net, f"{method}-net.pt")
    again = torch.load(f"{method}-net.pt", weights_only=False)
    print(method, process.exitcode, again.write is torch.save is torch.serialization.save)

if __name__ == "__main__":
    for method in sys.argv[1:]: main(method)
    sys.exit(5)
"""


@pytest.mark.parametrize(
    "methods",
    # What is sent is the same by the last two, and less is sent by the first.
    [
        ("spawn",),
        *(pytest.param((each,), marks=pytest.mark.slow) for each in ("fork", "forkserver")),
    ],
)
def test_other_processes_can_be_sent_what_is_hooked(
    methods: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "pools.py").write_text(POOLS)
    done = trainfit(
        *("watch", "--folder", "run", "--quiet", "--", sys.executable, "pools.py", *methods),
        cwd=tmp_path,
        PYTHONUNBUFFERED="1",
    )
    assert done.returncode == 5, done.stderr
    assert done.stdout.splitlines()[: len(methods)] == [f"{each} 3 True" for each in methods]
    assert len([*tmp_path.glob("*.pt")]) == 10 * len(methods)


#: Says what torch.compile makes of a training, and what else a script can see of its process.
COMPILED = """
import sys, threading
import torch
from torch._dynamo.utils import counters

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        self.last = torch.nn.Linear(4, 4)
    def forward(self, x): return self.last(self.first(x))

torch.manual_seed(0)
net = Net(); optimizer = torch.optim.SGD(net.parameters(), .1)
whole = torch.compile(net, backend="eager", fullgraph=True)
for _ in range(6):
    whole(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()

def step(x):
    net(x).sum().backward()
    return torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)

step = torch.compile(step, backend="eager")
for _ in range(3): step(torch.ones(2, 4)); optimizer.step(); optimizer.zero_grad()

@torch.compile(backend="eager", fullgraph=True)
def half(x):
    with torch.autocast("cpu", dtype=torch.bfloat16): return net.first(x)

print(half(torch.ones(2, 4)).sum().item(), dict(counters["stats"]), len(counters["graph_break"]))
# PyTorch 2.8 makes a folder when it is imported, another in each process.
from torch.distributed.nn.jit import instantiator
FOLDER = getattr(instantiator, "INSTANTIATED_TEMPLATE_DIR_PATH", None)
print(sys.argv, [each for each in sys.path if each != FOLDER])
print(sys.flags, sys.gettrace(), threading.active_count())
"""


@pytest.mark.slow
def test_a_compiled_training_is_compiled_as_without_us(tmp_path: Path) -> None:
    (tmp_path / "compiled.py").write_text(COMPILED)
    words = [sys.executable, "compiled.py", "--epochs=1"]
    alone = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    watched = trainfit(
        *("watch", "--folder", "run", "--quiet", "--", *words), cwd=tmp_path, PYTHONUNBUFFERED="1"
    )
    assert watched.returncode == 0 and watched.stdout == alone.stdout
    assert "unique_graphs" in alone.stdout
