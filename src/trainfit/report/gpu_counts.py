"""A job on several numbers of GPUs: which strategy fits on how many of which, cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from trainfit.report.blocks import (
    WHOLE,
    Facts,
    Headline,
    Subject,
    Table,
    Text,
    facts,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.notes import comparison_notes
from trainfit.report.steps import step_lines
from trainfit.results.speed import GpuComparison, GpuEstimate
from trainfit.results.text import count, duration, percent, rate, size

#: Rows on a screen, of the best strategy of each number of GPUs where there are more.
_FEW: Final = 14
#: GPUs are as fast as the fastest within this share of its rate: no prediction tells them apart.
_ALIKE: Final = 0.01


def counts_subject(result: GpuComparison) -> Subject:
    """The cheapest of what fits, then the strategies on each number of each GPU."""
    fitting = [each for each in result.gpus if each.fits]
    text = f"batch {result.batch_size} on each GPU" if result.batch_size else "as it is"
    run = f"; {result.samples} samples in the whole run" if result.samples else ""
    return Subject(
        Headline(
            kind="GPU comparison",
            tone="good" if fitting else "warn" if result.fits else "bad",
            text=_answer(result, fitting),
            limit=_faster(result, fitting),
            subject=f"{result.job}, {text}{run}",
        ),
        (
            *section(
                "The job on several GPUs",
                *(Text(line, detail=20) for line in step_lines(result.step)),
                _table(result),
            ),
            *section("How it is told", _legend(result)),
        ),
        tuple(comparison_notes(result)),
    )


def _answer(result: GpuComparison, fitting: Sequence[GpuEstimate]) -> str:
    """What fits with the job's own batch size for the least money; without prices on the fewest
    GPUs."""
    names = list(dict.fromkeys(each.gpu for each in result.gpus))
    machines = _of(names)
    if not fitting:
        smaller = [each for each in result.gpus if each.runs]
        if not smaller:
            maximum = max(result.gpus, key=lambda each: each.count).count
            return (
                f"Does not fit: up to {maximum} of {machines}, with no strategy, at any batch size"
            )
        best = smaller[0]
        return f"Fits only with a smaller batch: {_called(best)} with at most {best.largest_batch}"
    priced = [estimate for estimate in fitting if estimate.samples_per_unit is not None]
    if priced:
        best = max(priced, key=lambda each: each.samples_per_unit or 0.0)
        return f"Cheapest: {_figures(best, result)}"
    least = min(estimate.count for estimate in fitting)
    best = max(
        (estimate for estimate in fitting if estimate.count == least),
        key=lambda each: (each.samples_per_s or 0.0, -each.device_bytes),
    )
    return f"Fits {_verdict(best)}from {least} GPU{'s' * (least > 1)} on: {_figures(best, result)}"


def _verdict(estimate: GpuEstimate) -> str:
    """The verdict; where the upper bound of the memory does not fit, that it may not."""
    return "" if _surely(estimate) else "(likely) "


def _of(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else count(len(names), "kind") + " of GPU"


def _faster(result: GpuComparison, fitting: Sequence[GpuEstimate]) -> str:
    timed = [estimate for estimate in fitting if estimate.samples_per_s]
    if not timed:
        return ""
    fastest = max(timed, key=lambda each: each.samples_per_s or 0.0)
    alike = as_fast(fastest.samples_per_s, (estimate.samples_per_s for estimate in timed))
    return f"Fastest{alike}: {_figures(fastest, result)}"


def as_fast(most: float | None, rates: Iterable[float | None]) -> str:
    """How many others are as fast as the fastest, in brackets; nothing where it is alone."""
    least, most = (most or 0.0) * (1 - _ALIKE), most or 0.0
    others = sum(0 < least <= (each or 0.0) <= most for each in rates) - 1
    return f" ({count(others, 'other')} within {percent(_ALIKE)})" if others > 0 else ""


def _figures(estimate: GpuEstimate, result: GpuComparison) -> str:
    parts = []
    if estimate.samples_per_s:
        parts.append(f"{rate(estimate.samples_per_s)} samples/s")
    if estimate.efficiency is not None and estimate.count > 1:
        parts.append(f"{percent(estimate.efficiency)} of one GPU's each")
    if estimate.run_s is not None:
        parts.append(f"the {result.length} in {duration(estimate.run_s)}")
    if estimate.cost is not None:
        parts.append(f"for {estimate.cost:.3g} {result.currency}".rstrip())
    return f"{_called(estimate)}: {', '.join(parts)}" if parts else _called(estimate)


def _called(estimate: GpuEstimate) -> str:
    if estimate.count == 1:
        return f"1x {estimate.gpu}"
    return f"{estimate.count}x {estimate.gpu} with {estimate.strategy}"


def _table(result: GpuComparison) -> Table | None:
    columns: list[tuple[str, Callable[[GpuEstimate], str]]] = [
        ("GPUs", lambda e: f"{e.count}x {e.gpu}"),
        ("Strategy", lambda e: e.strategy or "-"),
        ("Each uses", lambda e: size(e.device_bytes)),
        ("Fits", _fits),
        ("Largest", _largest),
        ("Step", _step),
        ("Samples/s", lambda e: rate(e.samples_per_s) if e.samples_per_s else "-"),
        ("Efficiency", lambda e: percent(e.efficiency) if e.efficiency is not None else "-"),
    ]
    if any(each.price_per_hour is not None for each in result.gpus):
        unit = result.currency or "unit"
        columns.append(
            (f"{unit}/h", lambda e: "-" if e.price_per_hour is None else f"{e.price_per_hour:.3g}")
        )
        if result.samples is not None:
            columns.append((f"Run ({unit})", lambda e: "-" if e.cost is None else f"{e.cost:.3g}"))
    shown = list(result.gpus)
    many = len(shown) > _FEW
    caption = "Cheapest first" if result.currency else "The fewest GPUs first"
    rows = _best_of_each(shown) if many else shown
    return table_of(
        [name for name, _ in columns],
        [[cell(row) for _, cell in columns] for row in rows],
        f"{caption} (predicted; *: at the largest batch that fits)"
        + ("; the best strategy of each number" if many else ""),
        [n for n, (name, _) in enumerate(columns) if name not in ("GPUs", "Strategy", "Fits")],
        spare=("Step", "Largest", "Each uses"),
        detail=5,
        noun="combination",
    )


def _best_of_each(estimates: Sequence[GpuEstimate]) -> list[GpuEstimate]:
    """The strategy that comes first for each number of each GPU."""
    first: dict[tuple[str, int], GpuEstimate] = {}
    for estimate in estimates:
        first.setdefault((estimate.gpu, estimate.count), estimate)
    return list(first.values())


def _surely(estimate: GpuEstimate) -> bool:
    """Does the upper bound of the interval fit, too?"""
    return estimate.high_bytes is None or estimate.high_bytes <= estimate.memory_bytes


def _fits(estimate: GpuEstimate) -> str:
    if estimate.fits:
        return "yes" if _surely(estimate) else "likely"
    if estimate.largest_batch:
        return f"batch {estimate.largest_batch}"
    return "no"


def _largest(estimate: GpuEstimate) -> str:
    if estimate.largest_batch is None:
        return "-"
    about = "" if estimate.largest_is_exact or not estimate.largest_batch else "~"
    return f"{about}{estimate.largest_batch}"


def _step(estimate: GpuEstimate) -> str:
    if estimate.now is not None:
        return duration(estimate.now.seconds)
    return "-" if estimate.at_largest is None else f"{duration(estimate.at_largest.seconds)}*"


def _legend(result: GpuComparison) -> Facts | None:
    several = any(each.count > 1 for each in result.gpus)
    effective = (
        f"{result.batch_size} samples on each GPU, so 8 have {8 * result.batch_size} a step: the "
        "learning rate is for that"
        if result.batch_size
        else "every GPU has the samples that one had"
    )
    return facts(
        ("strategies", "estimated from the run on one GPU, at PyTorch's defaults: DDP, ZeRO-1 "
                       "(ZeroRedundancyOptimizer), FSDP (fully_shard of each layer)", 6)
        if several else ("", ""),
        ("fits", "yes: with the upper bound of the 90% prediction interval; likely: without "
                 "(NCCL's memory is assumed)", 7),
        ("batch", effective, 8) if several else ("", ""),
        ("efficiency", "of each GPU against one alone; what the strategy costs the CPU is not in "
                       "it, nor a DataLoader that does not keep up", 9)
        if several else ("", ""),
        ("machine", "all GPUs in one, with the link that they are sold with; a price is that of "
                    "one GPU, times their number", 30),
        ("constants", result.constants, WHOLE),
    )  # fmt: skip
