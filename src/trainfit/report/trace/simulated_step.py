"""A simulated step as a trace: phases, modules and operators, the GPU's streams, memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final

from trainfit.report.trace.events import Trace
from trainfit.results.plan.speed import OperatorSpan, StepTimeline

_CPU: Final = "CPU (predicted)"


def step_trace(timeline: StepTimeline, script: str = "") -> str:
    """One JSON document."""
    trace, operators = Trace(), timeline.operators
    for name, start_s, end_s in _groups(operators, lambda each: each.phase):
        trace.slice(_CPU, "phases", name, start_s, end_s)
    _modules(trace, operators)
    for each in operators:
        trace.slice(_CPU, "operators", each.name, each.start_s, each.end_s, module=each.module)
    device = f"{timeline.gpu} (predicted)"
    for kernel in timeline.kernels:
        by = operators[kernel.operator]
        trace.slice(
            device, f"stream {kernel.stream}", kernel.kind, kernel.start_s, kernel.end_s,
            dtype=kernel.dtype, operator=by.name, module=by.module, phase=by.phase,
            flops=kernel.flops, moved_bytes=kernel.moved_bytes,
        )  # fmt: skip
    for point in timeline.memory:
        trace.counter(device, "allocated bytes", point.time_s, point.by_kind_bytes)
    return trace.to_json(
        {
            "script": script,
            "gpu": timeline.gpu,
            "what": f"optimizer step {timeline.step + 1} of a simulated run, all times predicted",
        }
    )


def _groups(
    operators: tuple[OperatorSpan, ...], key: Callable[[OperatorSpan], str]
) -> Iterator[tuple[str, float, float]]:
    """Operators in a row of one key: the key, begin and end."""
    for name, group in itertools.groupby(operators, key):
        first, *rest = group
        yield name, first.start_s, (rest[-1] if rest else first).end_s


def _modules(trace: Trace, operators: tuple[OperatorSpan, ...]) -> None:
    """Slices of modules, those of children within their parents'; of each phase on its own."""
    for _, group in itertools.groupby(operators, lambda each: each.phase):
        open_at: list[tuple[str, float]] = []
        end_s = 0.0
        for each in group:
            path = each.module.split(".") if each.module else []
            same = _common([name for name, _ in open_at], path)
            _close(trace, open_at, same, end_s)
            open_at += [(name, each.start_s) for name in path[same:]]
            end_s = each.end_s
        _close(trace, open_at, 0, end_s)


def _close(trace: Trace, open_at: list[tuple[str, float]], kept: int, end_s: float) -> None:
    while len(open_at) > kept:
        path = ".".join(name for name, _ in open_at)
        name, start_s = open_at.pop()
        trace.slice(_CPU, "modules", name, start_s, end_s, module=path)


def _common(left: list[str], right: list[str]) -> int:
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
