"""How others choose DataLoader settings; each by its own rule, or its own code.

    python bench/_loader_rivals.py WORKLOAD --data DIR [--step-s S]      what loadtune says

loadtune runs in a process of its own: it changes PyTorch's threads as it goes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from _loader_figures import Choice
from loader_workloads import BY_NAME, Case

from trainfit.results.dataloader import LoaderSettings

LOADTUNE = "loadtune"
#: loadtune's own defaults (its ``tune``).
STEPS, WARM_UP, TRIALS = 100, 10, 6
LIMIT_S = 900.0


def rules() -> list[Choice]:
    """Who asks no measurement: the same for every loader on this machine."""
    half = max(1, (psutil.cpu_count(logical=False) or 1) // 2)
    return [
        Choice("PyTorch's default", LoaderSettings(0), 0.0),
        Choice("physical cores / 2", LoaderSettings(half), 0.0),
        lightning(),
        all_cpus(),
    ]


def lightning() -> Choice:
    """Lightning since 2.1: usable CPUs less one for the main process, of one device.

    The number of its warning "The 'train_dataloader' does not have many workers which may be
    a bottleneck. Consider increasing the value of the `num_workers` argument` to
    `num_workers=N` in the `DataLoader` to improve performance.", which it gives to loaders of
    0 or 1 workers, if N is above 1 (`_worker_check` in pytorch/trainer/connectors/
    data_connector.py; N is `suggested_max_num_workers(1)` of fabric/utilities/data.py, which
    is written out here: Lightning need not be installed, and imports a lot).
    """
    count = max(1, len(os.sched_getaffinity(0)) - 1)
    note = "" if count > 1 else "gives no warning here: its number is 1"
    return Choice("Lightning", LoaderSettings(count), 0.0, note)


def all_cpus() -> Choice:
    """As many workers as there are CPUs: Lightning's warning before 2.1 ("try N which is the
    number of cpus on this machine"), and what much example code does."""
    return Choice("all CPUs", LoaderSettings(psutil.cpu_count() or 1), 0.0)


# loadtune ----------------------------------------------------------------------------------------


def loadtune(case: Case, data: Path, step_s: float, steps: int = STEPS) -> Choice:
    """The choice of the package loadtune, with its Python API's defaults."""
    if importlib.util.find_spec(LOADTUNE) is None:
        return Choice(LOADTUNE, None, 0.0, "not installed: pip install loadtune")
    words = [case.name, "--data", str(data), "--step-s", repr(step_s), "--steps", str(steps)]
    try:
        done = subprocess.run(
            [sys.executable, __file__, *words],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=_environment(),
        )
    except subprocess.TimeoutExpired:
        return Choice(LOADTUNE, None, LIMIT_S, f"no answer within {LIMIT_S:g} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return Choice(LOADTUNE, None, 0.0, f"failed: {lines[-1][:160]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return Choice(LOADTUNE, settings_of(answer["knobs"]), answer["seconds"], answer["note"])


def settings_of(knobs: dict[str, Any]) -> LoaderSettings:
    """Of loadtune's knobs; it knows no order, and leaves the prefetch factor to PyTorch."""
    return LoaderSettings(
        knobs["num_workers"],
        knobs.get("prefetch_factor") or 2,
        pin_memory=bool(knobs.get("pin_memory")),
        persistent_workers=bool(knobs.get("persistent_workers")) and knobs["num_workers"] > 0,
    )


def _environment() -> dict[str, str]:
    """This one's, with the paths that this process imports from."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _ask(case: Case, data: Path, step_s: float, steps: int) -> dict[str, Any]:
    """In the process of its own: tune, and what its answer means.

    Its "best" is the best of its trials, which may be worse than the baseline that it began
    with (PyTorch's default): it says then that it found nothing better.
    """
    import torch
    from loadtune import Knobs, Workload, tune

    dataset = case.dataset(data)

    def step(_model: Any, _optimizer: Any, _batch: Any, _device: Any) -> torch.Tensor:
        if step_s:
            time.sleep(step_s)
        return torch.zeros(())

    workload = Workload(
        name=case.name,
        make_dataset=lambda: dataset,
        make_model=lambda: torch.nn.Linear(1, 1),
        train_step=step,
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        default_batch_size=case.batch_size,
        collate_fn=case.collate,
    )
    began = time.monotonic()
    found = tune(workload, steps=steps, warmup=WARM_UP, max_trials=TRIALS, verbose=False)
    seconds = time.monotonic() - began
    better = found.best is not None and found.speedup > 1
    knobs = found.best.knobs if better else Knobs()
    return {"knobs": knobs.to_dict(), "seconds": seconds, "note": found.diagnosis}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=sorted(BY_NAME))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    case = BY_NAME[options.workload]
    print(json.dumps(_ask(case, options.data, options.step_s, options.steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
