"""Parts of text on memory: figures, tables side by side, growth with the batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainfit.report.layout import table
from trainfit.results.memory import (
    RANGE_COVERAGE,
    RANGE_EXCEEDED,
    BatchLaw,
    MemoryFigures,
    MemoryReport,
)
from trainfit.results.text import GIB, MIB, count, percent, printable, share, size, wrapped

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


# ---
# The memory of one or two configurations, side by side.


#: Kinds, and modules, that are named; and the share of the peak from which they are.
_PARTS, _LEAST = 3, 0.01

_ROWS = (("allocated", "allocated"), ("reserved", "reserved"), ("device", "device (nvidia-smi)"))


def memory_rows(configurations: Sequence[MemoryFigures], titles: Sequence[str] = ()) -> list[str]:
    """A line for each of the three quantities, each with its interval, below the titles."""
    rows = [(title, *(_cell(each, key) for each in configurations)) for key, title in _ROWS]
    return table(rows, "l" * (1 + len(configurations)), ("", *titles) if titles else ())


def _cell(memory: MemoryFigures, key: str) -> str:
    bounds = getattr(memory, f"{key}_range_bytes")
    value = getattr(memory, f"{key}_bytes")
    if bounds is None or bounds[0] == bounds[1]:
        return size(value)
    low, middle, high, unit = _alike(bounds[0], value, bounds[1])
    return f"{middle} ({low} to {high}) {unit}"


def _alike(*sizes: int) -> tuple[str, ...]:
    """Sizes in the unit of the largest, and that unit."""
    unit = size(max(sizes)).partition(" ")[2]
    each = {"GiB": GIB, "MiB": MIB, "KiB": 1024, "B": 1}[unit]
    return (*(f"{nbytes / each:.{2 if each == GIB else 0}f}" for nbytes in sizes), unit)


def kinds_text(by_kind: Mapping[str, int], total: int) -> str:
    """The kinds that most of the peak is of, with their shares."""
    names = {
        kind: KIND_TITLES.get(kind, kind).removesuffix(" kept for backward") for kind in by_kind
    }
    return _largest({names[kind]: nbytes for kind, nbytes in by_kind.items()}, total)


def modules_text(by_module: Mapping[str, int], total: int) -> str:
    """The modules that most of the peak is of; what all their names begin with is left out."""
    named = sorted(((n, path) for path, n in by_module.items() if path and n), reverse=True)
    return _largest(without_prefix({path: nbytes for nbytes, path in named[:_PARTS]}), total)


def without_prefix(named: Mapping[str, int]) -> dict[str, int]:
    """The same under names without the parts that all of them begin with; the number of a layer
    keeps the name before it."""
    paths = [path.split(".") for path in named]
    common = 0
    while paths and all(
        len(path) > common + 1 and path[common] == paths[0][common] for path in paths
    ):
        common += 1
    while common and any(path[common].isdigit() for path in paths):
        common -= 1
    return {".".join(path[common:]): named[".".join(path)] for path in paths}


def _largest(parts: Mapping[str, int], total: int) -> str:
    largest = sorted(parts.items(), key=lambda item: -item[1])[:_PARTS]
    return ", ".join(
        f"{printable(name)} {share(nbytes, total)}"
        for name, nbytes in largest
        if nbytes >= _LEAST * total
    )


# ---
# Growth of memory with the batch size, as text.


#: Modules that are listed, and the share of the growth from which they are.
_GROWING_MODULES = 6
_LEAST_SHARE = 0.01


def batches_section(report: MemoryReport) -> str:
    """The linear model, what grows, figures for batch sizes, and where the model ends."""
    law = report.batches
    title = "With the batch size"
    if law is None:
        words, *commands = missing(report)
        said = [wrapped(words, "  ", "  "), *(f"    {command}" for command in commands)]
        return "\n".join([title, *said])
    low, high = law.batches
    if law.law == "none":
        text = f"no linear model from batch sizes {low} and {high}: {printable(law.reason)}"
        return "\n".join([title, wrapped(text, "  ", "  ")])
    lines = [
        f"{title} (from the recordings at {low} and {high})",
        f"  allocated = {size(law.allocated_base_bytes)} + batch x "
        f"{size(round(law.allocated_per_sample_bytes))}   (what is at the peak of {high})",
        f"  device    = {size(law.device_base_bytes)} + batch x "
        f"{size(round(law.device_per_sample_bytes))}   (least squares of the figures below)",
        "  each additional sample adds",
        *_grown(law.per_sample_by_kind_bytes, law.allocated_per_sample_bytes, KIND_TITLES),
        "  of which",
        *_grown(law.per_sample_by_module_bytes, law.allocated_per_sample_bytes, {}),
        *_points(law),
        "  where the linear model ends",
        *_limits(law),
    ]
    return "\n".join(lines)


def missing(report: MemoryReport) -> list[str]:
    """What figures for other batch sizes need, and the commands that give it, where known."""
    if report.second_run:
        return [
            "needs a second recording: record another batch size and give both:",
            printable(report.second_run),
            f"trainfit memory {printable(report.file)} {_file_of(report.second_run)}",
        ]
    return [
        "needs a second recording: record the script at a second batch size with "
        "`trainfit simulate --batch-size N` and give both recordings (with --batch-size A,B "
        "if they do not contain theirs)"
    ]


def _file_of(command: str) -> str:
    """The file that ``trainfit simulate … --output FILE -- …`` writes, as it stands there."""
    return printable(command.partition(" --output ")[2].partition(" -- ")[0])


def _grown(parts: Mapping[str, float], total: float, titles: Mapping[str, str]) -> list[str]:
    rows: list[tuple[str, str, str]] = []
    rest = 0.0
    for name, nbytes in sorted(parts.items(), key=lambda item: -item[1]):
        if len(rows) >= _GROWING_MODULES or nbytes < _LEAST_SHARE * total:
            rest += nbytes
            continue
        title = titles.get(name, printable(name) or "outside of modules")
        rows.append((title, size(round(nbytes)), share(nbytes, total)))
    if round(rest):
        rows.append(("others", size(round(rest)), ""))
    return table(rows, "wrr", indent="    ")


def _points(law: BatchLaw) -> list[str]:
    rows = []
    for point in law.points:
        off = (point.device_bytes - point.line_bytes) / max(point.line_bytes, 1)
        verdict = "" if point.fits else " (does not fit)"
        rows.append(
            (
                str(point.batch_size),
                size(point.allocated_bytes),
                size(point.reserved_bytes),
                size(point.device_bytes),
                f"{100 * off:+.1f}%",
                printable(point.where) + verdict,
            )
        )
    head = ("batch", "allocated", "reserved", "device", "- line", "peak in")
    return table(rows, "rrrrrw", head)


def _limits(law: BatchLaw) -> list[str]:
    lines = []
    for move in law.moves:
        lines.append(
            f"from batch size {move.batch_size} on the peak is in the {printable(move.after)}, "
            f"below it in the {printable(move.before)}"
        )
    if law.largest_jump_at is not None:
        lines.append(
            f"reserved memory goes up in steps: the allocator requests whole segments and reuses "
            f"what it has; the largest step near {law.batches[1]} is "
            f"{size(law.largest_jump_bytes)}, from batch size {law.largest_jump_at - 1} to "
            f"{law.largest_jump_at}"
        )
    if law.largest_batch is not None and law.largest_batch > 0:
        lines.append(f"the largest batch on this GPU is {law.largest_batch}")
    elif law.largest_batch == 0:
        lines.append("not even one sample fits this GPU")
    return [wrapped(f"- {printable(line)}", "    ", "      ") for line in lines]
