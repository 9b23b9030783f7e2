"""Results of ``trainfit loader`` for tests: one that is whole, to be changed in places."""

from __future__ import annotations

from typing import Any

from trainfit.results.dataloader import (
    Candidate,
    Confirmed,
    CostPart,
    LoaderMachine,
    LoaderSettings,
    Probe,
    StorageCost,
)
from trainfit.results.loader import LoaderResult

MIB = 1 << 20


def machine(**changes: Any) -> LoaderMachine:
    """Eight cores of one speed without a quota."""
    values: dict[str, Any] = {
        "usable_cores": 8.0,
        "affinity": tuple(range(8)),
        "physical_cores": 4,
        "quota_cores": None,
        "core_speeds": (1.0,) * 8,
        "available_bytes": 16 << 30,
        "shm_free_bytes": 8 << 30,
        "open_files": 1024,
    }
    return LoaderMachine(**values | changes)


def probe(**changes: Any) -> Probe:
    """Batches of 8 pictures that one worker makes in 120 ms."""
    values: dict[str, Any] = {
        "dataset": "Pictures",
        "kind": "map",
        "batch_size": 8,
        "samples": 1000,
        "batch_bytes": 4 * MIB,
        "batch_tensors": 2,
        "batches": 150,
        "fetch_s": 0.120,
        "fetch_cpu_s": 0.114,
        "variation": 0.31,
        "alone_s": 0.125,
        "threads": 1.0,
        "receive_s": 0.0009,
        "receive_busy_s": 0.0012,
        "pin_s": 0.0007,
        "next_s": 0.0001,
        "latency_s": 0.0002,
        "sampler_s": 0.00002,
        "start_s": {"fork": 0.012, "spawn": 2.9},
        "worker_private_bytes": 180 * MIB,
        "scaling": 1.94,
        "contention": 0.02,
        "parts": (
            CostPart("decode", 0.71, ("Pictures._decode", "PIL.Image.open")),
            CostPart("transform", 0.2, ("Resize.forward",)),
            CostPart("collate", 0.05),
            CostPart("unknown", 0.04),
        ),
        "storage": StorageCost(0.120, 0.19, 2 * MIB, 1000, 1 << 30, 1.0),
        "thread_pools": {},
        "faults": (),
        "seconds": 20.0,
    }
    return Probe(**values | changes)


def candidates(step_s: float = 0.04) -> tuple[Candidate, ...]:
    """From 0 to 8 workers; the rate grows until the step bounds it."""
    found = []
    for workers in (0, 1, 2, 3, 4, 6, 8):
        rate = min(1 / step_s if step_s else 1e9, max(workers, 0.9) / 0.12)
        waiting = 1 - rate * step_s
        settings = LoaderSettings(workers)
        found.append(Candidate(settings, rate, waiting, min(8.0, workers + 0.5), 2**30, 2**26))
    found.append(Candidate(LoaderSettings(16), 25.0, 0.0, 8.0, 2**34, 2**28, "16.0 GiB of RAM"))
    return tuple(found)


def result(**changes: Any) -> LoaderResult:
    """A loader that needs three workers more."""
    best = LoaderSettings(4, pin_memory=True, persistent_workers=True)
    values: dict[str, Any] = {
        "command": "python train.py",
        "loader": "train.py:12: Pictures, batch size 8",
        "machine": machine(),
        "step_s": 0.04,
        "step_source": "given",
        "probe": probe(),
        "present": LoaderSettings(1),
        "recommended": best,
        "verdict": "change",
        "limit": "gpu",
        "reason": "with 4 workers the GPU never waits",
        "candidates": (*candidates(), Candidate(best, 24.8, 0.01, 4.5, 2**30, 2**26)),
        "confirmed": (Confirmed(best, 24.8, 24.1, 0.02, 48, 2.0, 120.0, 720 * MIB),),
        "seconds": 31.0,
        "torch": "2.13.0",
    }
    return LoaderResult(**values | changes)
