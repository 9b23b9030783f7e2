"""A probe and a machine of a loader whose figures a test changes."""

from __future__ import annotations

from typing import Any

from trainfit.results.dataloader import LoaderMachine, Probe

MIB = 1 << 20
GIB = 1 << 30


def probe(**changes: Any) -> Probe:
    """Batches of 32 images that one thread decodes in 80 ms: two tensors, 18 MiB."""
    values: dict[str, Any] = {
        "dataset": "Images",
        "kind": "map",
        "batch_size": 32,
        "samples": 320_000,
        "batch_bytes": 18 * MIB,
        "batch_tensors": 2,
        "batches": 40,
        "fetch_s": 0.08,
        "fetch_cpu_s": 0.08,
        "variation": 0.1,
        "alone_s": 0.08,
        "threads": 1.0,
        "receive_s": 0.001,
        "receive_busy_s": 0.002,
        "pin_s": 0.004,
        "next_s": 0.0002,
        "latency_s": 0.0005,
        "sampler_s": 0.0001,
        "start_s": {"fork": 0.02, "spawn": 2.0},
        "worker_private_bytes": 200 * MIB,
        "scaling": 1.95,
        "contention": 0.02,
    }
    return Probe(**values | changes)


def machine(**changes: Any) -> LoaderMachine:
    """16 cores of one kind, 56 GiB of RAM to be had."""
    values: dict[str, Any] = {
        "usable_cores": 16.0,
        "affinity": tuple(range(16)),
        "physical_cores": 16,
        "quota_cores": None,
        "core_speeds": (1.0,) * 16,
        "available_bytes": 56 * GIB,
        "shm_free_bytes": 28 * GIB,
        "open_files": 1 << 20,
    }
    return LoaderMachine(**values | changes)
