"""What each operator allocated and gave back at once: its workspaces and temporaries.

Read off PyTorch's profiler, which nests the allocator's reports within operators. Also the
allocator's own figures after every event, as it reported them.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

#: Operators that only make a tensor: who called them owns the memory.
_MAKERS = ("aten::empty", "aten::resize_", "aten::new_empty")


def profiler() -> Any:
    """A profiler of operators and memory on the host's side; it takes no GPU memory."""
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
        record_shapes=True,
    )


def read(profile: Any, device: str = "cuda") -> dict[str, Any]:
    """``{"operators": [...], "reports": {...}}`` of a finished profile."""
    roots = profile.profiler.kineto_results.experimental_event_tree()
    events = _Walk(device).run(roots)
    return {"operators": _by_operator(events), "reports": _reports(events)}


class _AllocatorReport:
    """One report of the allocator: bytes signed, figures after it, and the operator."""

    __slots__ = ("address", "allocated", "end", "nbytes", "operator", "reserved", "time")

    def __init__(self, node: Any, fields: Any, owner: Any) -> None:
        self.time = int(node.start_time_ns)
        self.address = int(fields.ptr or 0)
        self.nbytes = int(fields.alloc_size)
        self.allocated = int(fields.total_allocated)
        self.reserved = int(fields.total_reserved)
        self.operator = None if owner is None else _name(owner)
        self.end = 0 if owner is None else int(owner.end_time_ns)


class _Walk:
    """Depth-first walk over the profiler's tree of operators."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._found: list[_AllocatorReport] = []

    def run(self, roots: list[Any]) -> list[_AllocatorReport]:
        stack: list[tuple[Any, Any]] = [(root, None) for root in roots]
        while stack:
            node, owner = stack.pop()
            kind, fields = node.typed
            kind = str(kind).rpartition(".")[2]
            if kind == "Allocation" and fields.device.type == self._device:
                self._found.append(_AllocatorReport(node, fields, owner))
            elif kind == "TorchOp" and not node.name.startswith(_MAKERS):
                owner = node
            stack.extend((child, owner) for child in node.children)
        return sorted(self._found, key=lambda event: event.time)


def _name(node: Any) -> tuple[Any, ...]:
    """Operator, and shapes and dtypes of its tensor arguments."""
    shapes = []
    _, fields = node.typed
    for value in getattr(fields, "inputs", ()):
        sizes = getattr(value, "sizes", None)
        if sizes is not None:
            dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
            shapes.append((dtype, *map(int, sizes)))
    return node.name, tuple(shapes)


def _by_operator(events: list[_AllocatorReport]) -> list[dict[str, Any]]:
    """For each operator and shape: the blocks that it took and freed before its end."""
    freed: dict[int, list[int]] = {}
    for event in events:
        if event.nbytes < 0:
            freed.setdefault(event.address, []).append(event.time)
    calls: dict[tuple[Any, int], list[int]] = {}
    for event in events:
        if event.nbytes <= 0 or event.operator is None:
            continue
        ends = [time for time in freed.get(event.address, ()) if time > event.time]
        if ends and ends[0] <= event.end:
            calls.setdefault((event.operator, event.end), []).append(event.nbytes)
    rows: dict[Any, dict[str, Any]] = {}
    for (operator, _), sizes in calls.items():
        key = (operator, tuple(sizes))
        row = rows.setdefault(
            key,
            {
                "operator": operator[0],
                "inputs": [list(shape) for shape in operator[1]],
                "transient_bytes": sizes,
                "calls": 0,
            },
        )
        row["calls"] += 1
    return list(rows.values())


def _reports(events: list[_AllocatorReport]) -> dict[str, Any]:
    """The signed bytes of every report, and whether the allocator's sums agree with them."""
    sums_agree = all(
        after.allocated - before.allocated == after.nbytes
        for before, after in itertools.pairwise(events)
    )
    first = events[0].allocated - events[0].nbytes if events else 0
    return {
        "allocated_before_bytes": first,
        "block_bytes": [event.nbytes for event in events],
        "sums_agree": sums_agree,
    }
