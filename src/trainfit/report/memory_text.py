"""Parts of a report that a plan and a recording have in common."""

from __future__ import annotations

from collections.abc import Mapping

from trainfit.report.sizes import printable, share, size, wrapped
from trainfit.results.plan import MemoryFigures
from trainfit.results.words import count

#: Modules that are listed by name, and the share of the peak from which they are.
_MODULES = 12
_MODULE_SHARE = 0.005

#: Kinds of allocation as they are shown.
KIND_TITLES = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer_state": "optimizer state",
    "activation": "activations kept for backward",
    "input": "inputs",
    "temporary": "temporaries",
    "workspace": "library workspaces",
}


def memory_section(title: str, memory: MemoryFigures) -> str:
    """The three figures, each with what it is called elsewhere."""
    low, high = memory.context_range_bytes
    context = (
        f"nvidia-smi: reserved + {size(memory.context_bytes)} CUDA context "
        f"(assumed; {size(low)} to {size(high)})"
    )
    rows = [
        ("allocated", memory.allocated_bytes, "torch.cuda.max_memory_allocated()"),
        ("reserved", memory.reserved_bytes, "torch.cuda.max_memory_reserved()"),
        ("device", memory.device_bytes, context),
    ]
    return "\n".join([title, *(f"  {n:<10}{size(b):>11}   {what}" for n, b, what in rows)])


def breakdown_section(
    by_kind_bytes: Mapping[str, int], by_module_bytes: Mapping[str, int], total_bytes: int
) -> str:
    """The peak of allocated memory by kind (activations first: the batch size drives them)
    and by module."""
    lines = ["At the peak, by kind"]
    for kind, nbytes in sorted(by_kind_bytes.items(), key=_activations_first):
        if nbytes:
            lines.append(_row(KIND_TITLES.get(kind, kind), nbytes, total_bytes))
    lines.append("At the peak, by module")
    named = {path: nbytes for path, nbytes in by_module_bytes.items() if path and nbytes}
    largest = sorted(named, key=lambda path: -named[path])[:_MODULES]
    shown = [path for path in largest if named[path] >= _MODULE_SHARE * total_bytes]
    lines += [_row(path, named[path], total_bytes) for path in shown]
    rest = sum(named.values()) - sum(named[path] for path in shown)
    if others := len(named) - len(shown):
        lines.append(_row(count(others, "other module"), rest, total_bytes))
    if by_module_bytes.get(""):
        lines.append(_row("outside of modules", by_module_bytes[""], total_bytes))
    return "\n".join(lines)


def notes_section(notes: list[str], assumptions: Mapping[str, int]) -> str:
    """Notes, and assumptions with how often each was made; empty where there is none."""
    lines = list(notes)
    for text, times in assumptions.items():
        lines.append(f"assumed: {text}" + (f" ({times} times)" if times > 1 else ""))
    return "\n".join(
        ["Notes", *(wrapped(printable(t), "  - ", "    ") for t in lines)] if lines else []
    )


def _activations_first(item: tuple[str, int]) -> tuple[bool, int]:
    kind, nbytes = item
    return kind != "activation", -nbytes


def _row(title: str, nbytes: int, total: int) -> str:
    return f"  {printable(title):<44} {size(nbytes):>10}  {share(nbytes, total):>4}"
