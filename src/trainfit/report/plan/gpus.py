"""A job on several GPUs, as text: a table, the best of them, and what figures do for the job."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from trainfit.report.layout import (
    Line,
    Style,
    blank,
    block,
    made,
    note_block,
    screen,
    shortened,
    table,
)
from trainfit.report.steps import step_lines
from trainfit.results.speed import KNEE, Effect, GpuComparison, GpuEstimate
from trainfit.results.text import count, duration, percent, printable, rate, size, times, wrapped

#: Rows of the screen.
_ROWS: Final = 10
#: From here on numbers are written with a letter, below that with an exponent.
_LONG: Final = 100_000
_SHORT: Final = 0.001
#: Columns that the screen leaves out, in this order, where it is too narrow.
_LESS_NEEDED: Final = ("per W", "saturation", "largest")
#: A change of the step's time that is smaller is none.
_NOTHING: Final = 0.001

_Column = tuple[str, Callable[[GpuEstimate], str]]


def comparison_screen(result: GpuComparison) -> list[Line]:
    """What is cheapest, fastest and best for the money, and the ten best GPUs."""
    best, head = _best(result), _head(result)
    style: Style = "good" if result.fits else "bad"
    fitting = sum(estimate.runs for estimate in result.gpus)
    none = f"The job fits {fitting or 'none'} of {count(len(result.gpus), 'GPU')}"
    shown = result.gpus[:_ROWS]
    blocks = [
        *(block(text, style=style) for text in (best or [none])),
        blank(),
        made(shortened(head[0], 2), 30),
        *(block(line, 20) for line in head[1:]),
        made(_table(result, shown, _LESS_NEEDED)),
    ]
    if left := len(result.gpus) - len(shown):
        fit = sum(estimate.runs for estimate in result.gpus[_ROWS:])
        text = f"{count(left, 'more GPU')}, of which it fits {fit}: --explain"
        blocks.append(block(text, 30, style="quiet"))
    blocks += [
        blank(),
        *(note_block(text, 10 + at) for at, text in enumerate(map(printable, result.notes))),
        *(note_block(text, 40 + at) for at, text in enumerate(_marks(shown))),
        block(_short_legend(result, shown), 35, style="quiet"),
    ]
    return screen(blocks, "what the columns are, constants, every GPU")


def _short_legend(result: GpuComparison, shown: Sequence[GpuEstimate]) -> str:
    about = any(_largest(estimate).startswith("~") for estimate in shown)
    return f"predicted, if the DataLoader keeps up{_spread(result)}" + (
        "; ~: at least" if about else ""
    )


def comparison_text(result: GpuComparison) -> str:
    """What is best, the whole table, and what is to be said of it."""
    best = [wrapped(line, "", "  ") for line in _best(result)]
    head = [wrapped(line, "", "  ") for line in _head(result)]
    whole = _table(result, result.gpus)
    lines = [*best, *([""] if best else []), *head, "", *whole, "", *_legend(result)]
    for estimate in result.gpus:
        if estimate.effects:
            lines += ["", *_effects(estimate)]
    return "\n".join(lines)


def _head(result: GpuComparison) -> list[str]:
    at = f"at batch size {result.batch_size}" if result.batch_size else "as it is"
    run = f"; {result.samples} samples in the whole run" if result.samples else ""
    lines = [f"{printable(result.job)}, {at}{run}", *step_lines(result.step)]
    if result.anchor is not None:
        anchor = result.anchor
        lines.append(
            f"scaled by the {duration(anchor.seconds)} measured on {anchor.gpu}: "
            f"{times(anchor.factor)} the prediction for it"
        )
    return lines


def _table(
    result: GpuComparison, shown: Sequence[GpuEstimate], spare: Sequence[str] = ()
) -> list[str]:
    found = _columns(result)
    if spare:  # nor are columns shown that nothing is known of
        found = [each for each in found if any(each[1](estimate) != "-" for estimate in shown)]
    rows = [(printable(estimate.gpu), *(cell(estimate) for _, cell in found)) for estimate in shown]
    head = ("GPU", *(title for title, _ in found))
    return table(rows, "l" + "r" * len(found), head, indent="", spare=spare)


def _columns(result: GpuComparison) -> list[_Column]:
    found: list[_Column] = [
        ("memory", lambda estimate: size(estimate.device_bytes)),
        ("largest", _largest),
        ("saturation", _saturation),
        ("a step", _step),
        ("samples/s", lambda estimate: _rate(estimate.samples_per_s)),
        ("per W", lambda estimate: _rate(estimate.samples_per_joule)),
    ]
    if result.samples is not None:
        found.append(("the run", lambda o: duration(o.run_s) if o.run_s else "-"))
    if _is_priced(result):
        unit = printable(result.currency) or "unit"
        found.append((f"per {unit}", lambda o: _rate(o.samples_per_unit)))
        if result.samples is not None:
            found.append((unit, lambda o: _rate(o.cost)))
    return found


def _is_priced(result: GpuComparison) -> bool:
    return any(estimate.price_per_hour is not None for estimate in result.gpus)


def _largest(estimate: GpuEstimate) -> str:
    about = "" if estimate.largest_is_exact or not estimate.largest_batch else "~"
    return about + _number(estimate.largest_batch)


def _saturation(estimate: GpuEstimate) -> str:
    return _number(
        estimate.at_saturation.batch_size if estimate.at_saturation is not None else None
    )


def _step(estimate: GpuEstimate) -> str:
    if not estimate.runs:
        return "too large"
    if estimate.now is not None:
        return duration(estimate.now.seconds)
    return (
        f"{duration(estimate.at_saturation.seconds)}*"
        if estimate.at_saturation is not None
        else "-"
    )


def _best(result: GpuComparison) -> list[str]:
    """The cheapest, the fastest and the best for the money, of those that the job fits."""
    budget = f"{result.budget:g} {printable(result.currency)}" if result.budget is not None else ""
    bounded = f" for at most {budget}".rstrip() if budget else ""
    unit = printable(result.currency) or "unit"
    most = result.budget if result.budget is not None else math.inf
    per_unit = [
        o
        for o in result.gpus
        if o.runs and o.samples_per_unit is not None and (o.cost or 0.0) <= most
    ]
    best = max(per_unit, key=lambda o: o.samples_per_unit or 0.0).gpu if per_unit else None
    said: dict[str, list[str]] = {}
    for what, name in (
        ("cheapest", result.cheapest),
        (f"best per {unit}", best),
        ("fastest", result.fastest),
    ):
        if name is not None:
            said.setdefault(name, []).append(what)
    by_name = {estimate.gpu: estimate for estimate in result.gpus}
    lines = [f"{' and '.join(words)}{bounded}: {_verdict(by_name[name], result)}" for name, words in
             said.items()]  # fmt: skip
    return [line[0].upper() + line[1:] for line in lines]


def _verdict(estimate: GpuEstimate, result: GpuComparison) -> str:
    parts = [f"{_rate(estimate.samples_per_s)} samples/s"]
    if estimate.run_s is not None:
        parts.append(f"the run in {duration(estimate.run_s)}")
    if estimate.cost is not None:
        parts.append(f"for {_rate(estimate.cost)} {printable(result.currency)}".rstrip())
    if estimate.run_batch != result.batch_size:
        parts.append(f"at batch size {estimate.run_batch}")
    if estimate.now is not None:
        parts.append(f"limited by {_BOUNDS[estimate.now.bound]}")
    return f"{printable(estimate.gpu)}: {', '.join(parts)}"


_BOUNDS: Final = {
    "tensor cores": "the Tensor cores",
    "shader cores": "the CUDA cores",
    "bandwidth": "its memory's bandwidth",
    "launches": "the CPU, which launches the kernels",
    "host copies": "host-to-device copies",
}


def _legend(result: GpuComparison) -> list[str]:
    texts = [
        "memory: device memory of the unchanged job; largest: largest batch "
        "(~: approximate, at least; name the GPU for the exact one), both on an idle GPU and "
        "without a safety margin. saturation: the saturation batch size, the smallest with "
        f"{percent(KNEE)} of the best throughput among those that fit (another batch size changes "
        "the training). a step: step time if the DataLoader keeps up"
        f"{_spread(result)}. per W: samples per joule at the power as sold.",
        *_marks(result.gpus),
        f"constants: {printable(result.constants)}",
        *map(printable, result.notes),
    ]
    return [wrapped(text, "", "  ") for text in texts]


def _spread(result: GpuComparison) -> str:
    """The 90% prediction interval as a share of the time: the same of every step."""
    for estimate in result.gpus:
        step = estimate.now or estimate.at_saturation
        if step is not None and step.seconds > 0:
            low, high = (each / step.seconds for each in step.range_s)
            return f"; 90% prediction interval {low:.2g} to {high:.3g} times that"
    return ""


def _marks(gpus: Sequence[GpuEstimate]) -> Iterable[str]:
    """Remarks on some of the GPUs, each once."""
    said: dict[str, list[str]] = {}
    for estimate in gpus:
        other = estimate.runs and not estimate.fits and estimate.at_saturation is not None
        words = ["*: too large as it is; at the saturation batch size"] * other
        words += ["laptops and modules, whose power is set by their maker"] * estimate.laptop
        words += ["memory shared with the CPU"] * estimate.shared_memory
        for word in (*words, *estimate.notes):
            said.setdefault(word, []).append(printable(estimate.gpu))
    return [f"{printable(word)}: {', '.join(names)}" for word, names in said.items()]


def _effects(estimate: GpuEstimate) -> Iterable[str]:
    batch = f" at batch size {estimate.run_batch}" if estimate.run_batch else ""
    yield wrapped(
        f"{printable(estimate.gpu)}, for this job{batch}: effect of 10% more of each figure",
        "",
        "  ",
    )
    rows = [
        (effect.figure, printable(effect.value), _effect(effect, estimate))
        for effect in estimate.effects
    ]
    yield from table(rows, "lvw")


def _effect(effect: Effect, estimate: GpuEstimate) -> str:
    if effect.step_change is None:
        if effect.largest_batch is None or estimate.largest_batch is None:
            return "only the current batch size is known"
        more = effect.largest_batch - estimate.largest_batch
        if not more:
            return "no larger batch fits"
        return f"{count(more, 'sample')} more in a batch: at most {effect.largest_batch}"
    change = effect.step_change
    if abs(change) < _NOTHING:
        return "none: it does not limit the step"
    word = "shorter" if change < 0 else "longer"
    return f"the step is {percent(abs(change), decimals=1)} {word}"


def _number(value: int | None) -> str:
    if value is None:
        return "-"
    return str(value) if value < _LONG else _rate(value)


def _rate(value: float | None) -> str:
    """Three digits; thousands, millions and more by their letters."""
    if value is None:
        return "-"
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= max(unit, _LONG):
            return f"{value / unit:.3g}{letter}"
    if value < _SHORT:
        return f"{value:.0e}"
    return rate(value)
