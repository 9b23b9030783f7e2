"""Growth of memory with the batch size, as text."""

from __future__ import annotations

from collections.abc import Mapping

from trainfit.report.memory.sections import KIND_TITLES
from trainfit.report.table import table
from trainfit.results.format import share, size
from trainfit.results.memory.explanation import BatchLaw, MemoryReport
from trainfit.results.text import printable, wrapped

#: Modules that are listed, and the share of the growth from which they are.
_MODULES = 6
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
        if len(rows) >= _MODULES or nbytes < _LEAST_SHARE * total:
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
