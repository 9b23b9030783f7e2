"""A plan as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from trainfit.report.sizes import printable, share, size
from trainfit.results.plan import Configuration, MemoryFigures, PlanResult

#: Modules that are listed by name; the rest is summed up.
_MODULES = 12

_KIND_TITLES = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "activation": "activations kept for backward",
    "input": "inputs",
    "temporary": "temporaries",
    "workspace": "library workspaces",
}


def plan_text(result: PlanResult) -> str:
    """The whole plan: figures now, what they consist of, batch sizes, launch command."""
    now = result.now
    parts = [
        _title(result),
        memory_section(f"Memory {_at(now)}", now.memory),
        breakdown_section(now.by_kind, now.by_module, now.memory.allocated_bytes),
        _batch_section(result),
        _amp_section(result),
        _notes_section(result),
        f"Launch\n  {printable(result.launch)}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _title(result: PlanResult) -> str:
    torch = result.environment.get("torch", "")
    return (
        f"{printable(result.gpu)}, {size(result.gpu_memory_bytes)} "
        f"({result.steps} optimizer steps simulated, torch {torch}, {result.seconds:.0f} s)"
    )


def _at(configuration: Configuration) -> str:
    batch = configuration.batch_size
    amp = "AMP off" if configuration.amp == "off" else f"AMP {configuration.amp}"
    return f"at batch size {batch}, {amp}" if batch else f"at the present batch size, {amp}"


def memory_section(title: str, memory: MemoryFigures) -> str:
    """The three figures, each with what it is called elsewhere."""
    low, high = memory.context_range_bytes
    rows = [
        ("allocated", memory.allocated_bytes, "torch.cuda.max_memory_allocated()"),
        ("reserved", memory.reserved_bytes, "torch.cuda.max_memory_reserved()"),
        (
            "device",
            memory.device_bytes,
            f"nvidia-smi: reserved + {size(memory.context_bytes)} CUDA context "
            f"(assumed; {size(low)} to {size(high)})",
        ),
    ]
    return "\n".join([title, *(f"  {n:<10}{size(b):>11}   {what}" for n, b, what in rows)])


def breakdown_section(
    by_kind: Mapping[str, int], by_module: Mapping[str, int], total: int
) -> str:
    """The peak of allocated memory by kind and by module."""
    lines = ["At the peak, by kind"]
    for kind, nbytes in sorted(by_kind.items(), key=lambda item: -item[1]):
        if nbytes:
            lines.append(_row(_KIND_TITLES.get(kind, kind), nbytes, total))
    lines.append("At the peak, by module")
    named = [(path, nbytes) for path, nbytes in by_module.items() if path]
    for path, nbytes in named[:_MODULES]:
        lines.append(_row(printable(path), nbytes, total))
    rest = sum(nbytes for _, nbytes in named[_MODULES:])
    if rest:
        lines.append(_row(f"{len(named) - _MODULES} other modules", rest, total))
    if by_module.get(""):
        lines.append(_row("outside of modules", by_module[""], total))
    return "\n".join(lines)


def _row(title: str, nbytes: int, total: int) -> str:
    return f"  {title:<34}{size(nbytes):>11}  {share(nbytes, total):>4}"


def _batch_section(result: PlanResult) -> str:
    now = result.now
    if now.largest_batch is None:
        return f"Batch size\n  cannot tell: {printable(result.basis_detail)}"
    if now.largest_batch == 0:
        return _does_not_fit(result)
    lines = ["Batch size", f"  largest that fits   {now.largest_batch:>6}"]
    free = f"{100 * result.headroom:.0f}%"
    if not now.recommended_batch:
        lines.append(f"  recommended           none: no batch leaves {free} of the GPU free")
        return "\n".join(lines)
    why = f"the largest that leaves {free} of the GPU free"
    if now.recommended_batch >= 8:
        why += ", a multiple of 8 for the tensor cores"
    lines.append(f"  recommended         {now.recommended_batch:>6}   {why}")
    if result.recommended is not None:
        memory = result.recommended
        lines.append(
            f"{'':>30}allocated {size(memory.allocated_bytes)}, reserved "
            f"{size(memory.reserved_bytes)}, device {size(memory.device_bytes)}"
        )
    if not now.fits:
        lines.append(f"  the present batch size, {now.batch_size}, does not fit")
    return "\n".join(lines)


def _does_not_fit(result: PlanResult) -> str:
    lines = ["Batch size", "  not even one sample fits. What would:"]
    other = result.other_amp
    if other is not None and other.largest_batch:
        state = "off" if other.amp == "off" else other.amp
        lines.append(f"  - AMP {state}: up to batch size {other.largest_batch}")
    if result.other_gpus:
        lines.append(f"  - a larger GPU: {', '.join(result.other_gpus[:4])}")
    if len(lines) == 2:
        lines.append("  - no single GPU of the catalogue; make the model or its input smaller")
    return "\n".join(lines)


def _amp_section(result: PlanResult) -> str:
    other = result.other_amp
    if other is None:
        return ""
    lines = ["Mixed precision (AMP)"]
    for configuration in (result.now, other):
        state = "off" if configuration.amp == "off" else configuration.amp
        largest = configuration.largest_batch
        at_most = "" if largest is None else f", largest batch {largest}"
        memory = configuration.memory
        lines.append(
            f"  {state:<10} allocated {size(memory.allocated_bytes)}, "
            f"reserved {size(memory.reserved_bytes)}{at_most}"
        )
    return "\n".join(lines)


def _notes_section(result: PlanResult) -> str:
    lines = [f"  - {printable(note)}" for note in result.notes]
    for text, count in result.assumptions.items():
        times = f" ({count} times)" if count > 1 else ""
        lines.append(f"  - assumed: {printable(text)}{times}")
    if result.now.largest_batch is not None and result.basis_detail:
        lines.append(f"  - {printable(result.basis_detail)}")
    return "\n".join(["Notes", *lines]) if lines else ""
