"""The memory of one or two configurations, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainfit.report.memory.sections import KIND_TITLES
from trainfit.report.table import table
from trainfit.results.format import GIB, MIB, share, size
from trainfit.results.memory.figures import MemoryFigures
from trainfit.results.text import printable

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
