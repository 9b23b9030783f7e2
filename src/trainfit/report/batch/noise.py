"""A measured noise scale as text."""

from __future__ import annotations

from trainfit.report.screen import Line, made, screen
from trainfit.report.table import table
from trainfit.results.batch.noise import ModuleNoise, NoiseResult
from trainfit.results.format import count, percent
from trainfit.results.text import printable, wrapped

#: Modules with the largest parts of tr Σ that are on the screen.
_SHOWN = 6
METHODS = {
    "accumulation": "micro-batches of a step",
    "ranks": "ranks of a data-parallel run",
    "parts": "halves of a batch, in a measuring pass",
    "examples": "single samples, of Linear and normalization modules alone",
    "none": "nothing",
}


def noise_screen(result: NoiseResult) -> list[Line]:
    """At most 25 lines: the first ones say the most."""
    blocks = [made(line, at) for at, line in enumerate(_parts(result, _SHOWN))]
    return screen(blocks, "all modules, steps left out, notes")


def noise_text(result: NoiseResult) -> str:
    """The whole result."""
    return "\n".join(_parts(result))


def _parts(result: NoiseResult, most: int | None = None) -> list[str]:
    """Each of a line or several; ``most`` modules."""
    first = printable(result.line)
    lines = [wrapped(first[0].upper() + first[1:], "", "  ")]
    ranks = count(result.ranks, "rank")
    batch = f"{result.micro_batch} × {result.accumulation} micro-batches × {ranks}"
    lines.append(
        wrapped(
            f"measured on {METHODS[result.method]}; a step is {batch}; "
            f"{count(result.steps_used, 'measured step')} of {result.steps_seen}",
            "  ",
            "    ",
        )
    )
    if result.cost_share is not None:
        lines.append(f"  cost {percent(result.cost_share, decimals=1)} of the time (on the host)")
    lines += _history(result)
    lines += _modules(result.modules, most)
    for reason, number in result.steps_left_out.items():
        lines.append(
            wrapped(f"{count(number, 'step')} left out: {printable(reason)}", "  ", "    ")
        )
    for each in (*result.left_out, *result.notes):
        lines.append(wrapped(printable(each), "  Note: ", "    "))
    if result.noise is not None:
        lines.insert(1, "  90% intervals; next: trainfit batch explain FILE --to BATCH")
    return lines


def _history(result: NoiseResult) -> list[str]:
    if len(result.history) < 2:
        return []
    first, last = result.history[0], result.history[-1]
    return [
        wrapped(
            f"over time: {first.noise.text} around step {first.step}, "
            f"{last.noise.text} around step {last.step}",
            "  ",
            "    ",
        )
    ]


def _modules(modules: tuple[ModuleNoise, ...], most: int | None) -> list[str]:
    ordered = sorted(modules, key=lambda each: -(each.trace_share or 0.0))
    if len(ordered) < 2:
        return []
    rows = [
        (
            printable(each.name) or "(itself)",
            each.noise.text if each.noise is not None else "",
            percent(each.trace_share) if each.trace_share is not None else "",
        )
        for each in ordered[:most]
    ]
    lines = ["\n".join(table(rows, "wrr", ("module", "noise scale, samples", "of the noise")))]
    if left := len(ordered) - len(rows):
        lines.append(f"  {count(left, 'more module')}")
    return lines
