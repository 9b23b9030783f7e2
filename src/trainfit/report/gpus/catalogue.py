"""Figures of GPUs as text: the catalogue as a table, and the explanation of one GPU."""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.report.columns import columns_text
from trainfit.report.gpus.explained import DTYPES, is_assumed
from trainfit.results.format import GIB, three_digits
from trainfit.results.machine.gpus import GpuFigures, GpusResult, MeaningLine
from trainfit.results.text import printable, wrapped

_NAME = 18
_DTYPE_COLUMNS = ("tfloat32", "bfloat16", "float16", "float8")


def gpus_text(result: GpusResult) -> str:
    """A table, or each GPU explained where that was asked for."""
    if any(gpu.meaning for gpu in result.gpus):
        return "\n\n".join(_explained(gpu) for gpu in result.gpus)
    return "\n".join([*_table(result.gpus), "", *_legend(result.gpus)])


def _table(gpus: Sequence[GpuFigures]) -> list[str]:
    rates = "".join(f"{DTYPES[name]:>6}" for name in _DTYPE_COLUMNS)
    head = f"{'GPU':<{_NAME}}{'architecture':<15}{'GiB':>5}{'GB/s':>6}{'fp32':>6}{rates}{'W':>6}"
    return [head, *(_row(gpu) for gpu in gpus)]


def _row(gpu: GpuFigures) -> str:
    name = printable(gpu.key) + _mark(gpu)
    # A name that is too long for its column has a line of its own.
    start = f"{name:<{_NAME}}" if len(name) < _NAME else f"{name}\n{'':<{_NAME}}"
    generation = f"{gpu.architecture} {gpu.capability[0]}.{gpu.capability[1]}"
    cells = [
        _cell(gpu, gpu.memory_bytes, "memory_bytes", GIB, 5),
        _cell(gpu, gpu.bandwidth_bytes_per_s, "bandwidth_bytes_per_s", 1e9),
        _cell(gpu, gpu.fp32_flop_per_s, "fp32_flop_per_s", 1e12),
        *(_tensor_cell(gpu, dtype) for dtype in _DTYPE_COLUMNS),
        f"{gpu.power_w:>6g}" if gpu.power_w else f"{'?':>6}",
    ]
    return f"{start}{generation:<15}{''.join(cells)}"


def _cell(gpu: GpuFigures, value: float | None, field: str, unit: float, columns: int = 6) -> str:
    if value is None:
        return f"{'?':>{columns}}"
    return f"{('~' if is_assumed(gpu, field) else '') + three_digits(value / unit):>{columns}}"


def _tensor_cell(gpu: GpuFigures, dtype: str) -> str:
    if dtype not in gpu.tensor_dtypes:
        return f"{'-':>6}"
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
    return [wrapped(line, "", "") for line in lines]


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
    lines += [_meaning(line, sources) for line in gpu.meaning]
    if gpu.bandwidth_bytes_per_s is None:
        text = (
            "The speed of a custom GPU specification is not known: name a card for its rates, "
            "bandwidth and power."
        )
        lines.append(wrapped(text, "  ", "  "))
    return "\n".join([*lines, *sources.lines()])


def _meaning(line: MeaningLine, sources: _Sources) -> str:
    """Figure and value in two columns, and next to them their meaning."""
    value = ("~" if line.assumed else "") + printable(line.value or "not known")
    return columns_text(line.figure, value, f"{printable(line.says)} {sources.mark(line)}")


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
