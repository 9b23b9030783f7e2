"""Parts of a report that a plan and a recording have in common."""

from __future__ import annotations

from collections.abc import Mapping

from trainfit.report.table import table
from trainfit.results.format import count, percent, share, size
from trainfit.results.memory.figures import RANGE_COVERAGE, RANGE_EXCEEDED, MemoryFigures
from trainfit.results.text import printable, wrapped

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
    """The three memory figures with their names in other tools."""
    low, high = map(size, memory.context_range_bytes)
    between = f"; {low} to {high}" if low != high else ""
    context = f"nvidia-smi: reserved + {size(memory.context_bytes)} {_context_name(memory)}"
    rows = [
        ("allocated", size(memory.allocated_bytes), "torch.cuda.max_memory_allocated()"),
        ("reserved", size(memory.reserved_bytes), "torch.cuda.max_memory_reserved()"),
        (
            "device",
            size(memory.device_bytes),
            f"{context} ({context_basis(memory)}{between})",
        ),
    ]
    return "\n".join([title, *table(rows, "lrw"), *_ranges(memory)])


def _ranges(memory: MemoryFigures) -> list[str]:
    """The prediction intervals; nothing in files of versions that did not say."""
    ranges = {
        "device": memory.device_range_bytes,
        "reserved": memory.reserved_range_bytes,
        "allocated": memory.allocated_range_bytes,
    }
    parts = [
        f"{name} {size(bounds[0])} to {size(bounds[1])}"
        for name, bounds in ranges.items()
        if bounds is not None and bounds[0] != bounds[1]
    ]
    if not parts:
        return []
    text = (
        f"{', '.join(parts)} ({percent(RANGE_COVERAGE)} prediction interval; "
        f"{percent(RANGE_EXCEEDED)} of measured jobs used more than its upper end)"
    )
    return [wrapped(text, "  between   ", " " * 12)]


#: How the parts of the process's other memory are called; what is PyTorch's own (its kernels,
#: those of attention) goes under the context.
_LIBRARY_TITLES = {"cublas": "cuBLAS", "cudnn_forward": "cuDNN", "cudnn_backward": "cuDNN"}


def _context_name(memory: MemoryFigures) -> str:
    """ "CUDA context", with the libraries that add to it."""
    counted = [part.name for part in memory.context_parts if part.value_bytes]
    names = dict.fromkeys(_LIBRARY_TITLES[name] for name in counted if name in _LIBRARY_TITLES)
    return ", ".join(["CUDA context", *names])


def context_basis(memory: MemoryFigures) -> str:
    """Source of the figure: "assumed", "measured", or which part is what."""
    bases = {part.name: part.basis for part in memory.context_parts if part.value_bytes}
    context = bases.pop("context", "assumed")
    others = sorted(set(bases.values()) - {context})
    return f"context {context}, rest {' and '.join(others)}" if others else context


def breakdown_section(
    by_kind_bytes: Mapping[str, int], by_module_bytes: Mapping[str, int], total_bytes: int
) -> str:
    """The peak of allocated memory by kind (activations first: the batch size drives them)
    and by module."""
    kinds = [
        _row(KIND_TITLES.get(kind, kind), nbytes, total_bytes)
        for kind, nbytes in sorted(by_kind_bytes.items(), key=_activations_first)
        if nbytes
    ]
    named = {path: nbytes for path, nbytes in by_module_bytes.items() if path and nbytes}
    largest = sorted(named, key=lambda path: -named[path])[:_MODULES]
    shown = [path for path in largest if named[path] >= _MODULE_SHARE * total_bytes]
    modules = [_row(path, named[path], total_bytes) for path in shown]
    rest = sum(named.values()) - sum(named[path] for path in shown)
    if others := len(named) - len(shown):
        modules.append(_row(count(others, "other module"), rest, total_bytes))
    if by_module_bytes.get(""):
        modules.append(_row("outside of modules", by_module_bytes[""], total_bytes))
    return "\n".join(
        [
            *("At the peak, by kind", *table(kinds, "wrr")),
            *("At the peak, by module", *table(modules, "wrr")),
        ]
    )


def _activations_first(item: tuple[str, int]) -> tuple[bool, int]:
    kind, nbytes = item
    return kind != "activation", -nbytes


def _row(title: str, nbytes: int, total: int) -> tuple[str, str, str]:
    return printable(title), size(nbytes), share(nbytes, total)
