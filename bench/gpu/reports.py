"""The allocator's own figures after every event, as it reported them to PyTorch's profiler."""

from __future__ import annotations

import itertools
from typing import Any

import torch


def profiler() -> Any:
    """A profiler of operators and memory on the host's side; it takes no GPU memory."""
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
    )


def read(profile: Any, device: str = "cuda") -> dict[str, Any]:
    """The signed bytes of every report of a finished profile, and whether the allocator's sums
    agree with them."""
    stack = list(profile.profiler.kineto_results.experimental_event_tree())
    reports: list[tuple[int, int, int]] = []  # when, bytes signed, allocated after it
    while stack:
        node = stack.pop()
        kind, fields = node.typed
        if str(kind).rpartition(".")[2] == "Allocation" and fields.device.type == device:
            nbytes, allocated = int(fields.alloc_size), int(fields.total_allocated)
            reports.append((int(node.start_time_ns), nbytes, allocated))
        stack.extend(node.children)
    reports.sort(key=lambda report: report[0])
    return {
        "allocated_before_bytes": reports[0][2] - reports[0][1] if reports else 0,
        "block_bytes": [nbytes for _, nbytes, _ in reports],
        "sums_agree": all(
            after - before == nbytes
            for (_, _, before), (_, nbytes, after) in itertools.pairwise(reports)
        ),
    }
