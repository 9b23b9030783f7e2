"""Speed: what a step's time consists of, throughput; how busy a rehearsed loop keeps the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from trainfit.report.blocks import (
    Chart,
    Facts,
    Section,
    Text,
    facts,
    figures,
    section,
)
from trainfit.report.charts import (
    COLORS,
    TIP,
    Spec,
    batch_marks,
    chart,
    color,
    named_bars,
    parts_bar,
    thinned,
    tip,
    values,
    x,
    y,
)
from trainfit.report.sections.plan_facts import BOUNDS, epoch_text, limit_text, of_all_ranks
from trainfit.results.changes import LEAST_FASTER
from trainfit.results.plan import JobDetail, PlanResult, run_rate
from trainfit.results.speed import KNEE, Limit, OperatorTime, RunRate, Speed, StepWork
from trainfit.results.text import byte_rate, count, duration, percent, rate, size, with_prefix

#: Operators that are drawn, and rows of their table.
_BARS, _ROWS = 15, 30
#: Kinds of kernels that are named.
_KINDS: Final = 5
#: Rows of the table over batch sizes.
_CURVE: Final = 14
#: The share of the GPU's time from which an operator is a point of the roofline.
_LEAST: Final = 0.002
_GPU_MS: Final = "GPU time of a step (ms, predicted)"
_LIMITS: Final[dict[Limit, tuple[str, str]]] = {
    "arithmetic": ("arithmetic", COLORS[0]),
    "memory": ("memory bandwidth", COLORS[1]),
    "latency": ("kernel latency (too small)", COLORS[6]),
}
_PHASES: Final = {
    "setup": COLORS[6],
    "input": COLORS[5],
    "forward": COLORS[0],
    "backward": COLORS[1],
    "optimizer": COLORS[3],
}


def speed_sections(result: PlanResult, detail: JobDetail | None) -> list[Section]:
    """Sections on a plan's time."""
    speed, work = result.speed, detail.work if detail is not None else None
    if speed is None:
        return of_work(work)
    now = speed.now
    answer = f"A step needs {duration(now.seconds)} (predicted), limited by {BOUNDS[now.bound]}."
    run = run_rate(result)
    if run is not None and run.limit == "loader":
        answer = f"On the GPU a step needs {duration(now.seconds)} (predicted); with its "
        answer += f"DataLoader the run has one each {duration(run.step_s)}."
    on = ""
    if run is not None:
        run, on = of_all_ranks(run, result)
    return [
        *section(
            "Time of a step",
            *_charts(work),
            speed_facts(speed, run, epoch_text(result), on),
            Text(f"Constants: {speed.constants}."),
            answer=answer,
        ),
        *section("Roofline", _roofline(work) if work is not None else None),
        *section("Throughput by batch size", _throughput(result, speed)),
    ]


def speed_facts(speed: Speed, run: RunRate | None, epoch: str, on: str = "") -> Facts | None:
    """Time of a step, what bounds it; the launched ``run`` with its DataLoader, and what its
    samples are ``on``."""
    now = speed.now
    low, high = now.range_s
    return facts(
        ("step", f"{duration(now.seconds)} (90% prediction interval {duration(low)} to "
                 f"{duration(high)}){_at(now.batch_size)}"),
        ("interval", f"wide for {' and '.join(now.wide_for)}" if now.wide_for else ""),
        ("limited by", BOUNDS[now.bound]),
        ("GPU, kernels together", duration(now.gpu_s)),
        ("CPU, launching them", duration(now.host_s)),
        ("copies host ↔ GPU", duration(now.copies_s) if now.copies_s else ""),
        ("MFU", percent(speed.mfu, decimals=1) if speed.mfu is not None else ""),
        ("kernels", _kernels(speed)),
        ("CUDA graphs", _graphs(speed)),
        ("paced", _paced(speed)),
        ("the run", _run(run, on) if run is not None else ""),
        ("epoch", epoch),
        *(("note", note) for note in speed.notes),
        lines=5,
    )  # fmt: skip


def _kernels(speed: Speed) -> str:
    """The kinds of kernels that most of the time goes to."""
    total = sum(speed.by_kind_s.values())
    largest = sorted(speed.by_kind_s.items(), key=lambda each: -each[1])[:_KINDS]
    named = (f"{name.replace('_', ' ')} {percent(each / total)}" for name, each in largest if total)
    return ", ".join(named)


def _run(run: RunRate, on: str = "") -> str:
    """A step of the launched run, where that is not the GPU's alone."""
    if run.limit == "gpu":
        return ""
    least, most = ("at least ", "at most ") if run.is_bound else ("", "")
    samples = f", {most}{rate(run.samples_per_s)} samples/s" if run.samples_per_s else ""
    samples += on if samples else ""
    text = f" at batch size {run.batch_size}" if run.batch_size else ""
    return f"{least}{duration(run.step_s)} a step{samples}{text}{limit_text(run)}"


def _graphs(speed: Speed) -> str:
    """Gain of CUDA graphs, where launches cost something."""
    now, graphed = speed.now.seconds, speed.graphed_s
    if graphed is None or graphed > (1 - LEAST_FASTER) * now:
        return ""
    text = (
        f'with CUDA graphs (torch.compile, mode="reduce-overhead") at best {duration(graphed)}, '
        "if no kernel waits for its launch"
    )
    return text


def _paced(speed: Speed) -> str:
    """What lower clocks of the CPU do to a call, from the least to the most, where they do
    something."""
    paced, now = speed.paced, speed.now.seconds
    if paced is None or not paced.slowed:
        return ""
    highest, lowest = paced.slowed[0], paced.slowed[-1]
    head = f"{count(paced.launches, 'launch', 'launches')} a call"
    if lowest.seconds - now < LEAST_FASTER * now:
        text = f"{head}: the GPU is the limit, and a lower CPU clock between calls has no effect"
    else:
        clock = paced.core_hz / 1e9
        ends = f"{highest.core_share * clock:.2g} to {lowest.core_share * clock:.2g} GHz"
        more = f"{duration(max(0.0, highest.seconds - now))} to {duration(lowest.seconds - now)}"
        text = (
            f"{head}: where the CPU's clock falls between calls at a fixed rate, to {ends} instead "
            f"of {clock:.2g}, expect {duration(highest.seconds)} to {duration(lowest.seconds)}, "
            f"{more} more; `trainfit pace` measures it"
        )
    return text


def of_work(work: StepWork | None) -> list[Section]:
    """Sections on kernels, where nothing else is known of the time."""
    if work is None:
        return []
    return [
        *section("Time of a step", *_charts(work)),
        *section("Roofline", _roofline(work)),
    ]


def _at(batch: int | None) -> str:
    return f" at batch size {batch}" if batch else ""


def _charts(work: StepWork | None) -> list[Chart | None]:
    return [] if work is None else [_phases(work), _operators(work)]


def _phases(work: StepWork) -> Chart:
    rows = [
        {
            "phase": phase,
            "ms": seconds * 1e3,
            "step": "GPU",
            "tip": tip(phase, ("GPU", duration(seconds)), ("share", percent(seconds / work.gpu_s))),
        }
        for phase, seconds in work.by_phase_s.items()
    ]
    most = max(work.by_phase_s, key=lambda phase: work.by_phase_s[phase])
    says = f"GPU time by phase: {most} {percent(work.by_phase_s[most] / work.gpu_s)} of it."
    hue = color("phase", list(work.by_phase_s), [_PHASES[p] for p in work.by_phase_s])
    spec = parts_bar(rows, says, _GPU_MS, "step", hue)
    table = figures(
        ("Phase", "GPU time", "Share"),
        [(p, duration(s), percent(s / work.gpu_s)) for p, s in work.by_phase_s.items()],
        "GPU time of a step by phase",
        (1, 2),
    )
    return Chart("GPU time of a step, by phase", says, spec, table)


def _name(operator: OperatorTime) -> str:
    return f"{operator.name.removeprefix('aten.').removesuffix('.default')} ({operator.phase})"


def _operators(work: StepWork) -> Chart:
    """A chart of operators, one name and phase a bar; the color says what most of the time goes
    to."""
    shown = work.operators[:_BARS]
    rows: list[dict[str, Any]] = [
        {
            "name": f"{_name(operator)} {operator.dtype}",
            "ms": operator.gpu_s * 1e3,
            "limit": _LIMITS[operator.limit][0],
            "tip": tip(_name(operator), *_operator_rows(operator, work)),
        }
        for operator in shown
    ]
    left = sum(operator.gpu_s for operator in work.operators[_BARS:])
    limits = [_LIMITS[each] for each in _LIMITS if any(o.limit == each for o in shown)]
    first = work.operators[0]
    says = (
        f"The largest of {len(work.operators)} operators is {_name(first)} with "
        f"{percent(first.gpu_s / work.gpu_s)} of the GPU time."
    )
    hue = color("limit", [n for n, _ in limits], [c for _, c in limits])
    spec = named_bars(rows, says, x("ms", _GPU_MS), "name", hue, 22)
    table = figures(
        ("Operator", "Dtype", "GPU time", "Share", "Kernels", "FLOPs", "Moved", "Limit"),
        [
            (
                _name(operator),
                operator.dtype,
                duration(operator.gpu_s),
                percent(operator.gpu_s / work.gpu_s),
                str(operator.kernels),
                with_prefix(operator.flops, "FLOP") if operator.flops else "-",
                size(operator.moved_bytes),
                _LIMITS[operator.limit][0],
            )
            for operator in work.operators[:_ROWS]
        ],
        "Operators by GPU time",
        (2, 3, 4, 5, 6),
    )
    note = ""
    if left:
        more = count(len(work.operators) - len(shown), "other operator")
        note = f"{more} with {percent(left / work.gpu_s)} of the time are not drawn."
    return Chart("GPU time of a step, by operator", says, spec, table, note)


def _operator_rows(operator: OperatorTime, work: StepWork) -> list[tuple[str, str]]:
    return [
        ("GPU time", f"{duration(operator.gpu_s)} ({percent(operator.gpu_s / work.gpu_s)})"),
        ("kernels", f"{operator.kernels} in {operator.dtype}"),
        ("moved", size(operator.moved_bytes)),
        ("FLOPs", with_prefix(operator.flops, "FLOP") if operator.flops else ""),
        (
            "reached",
            with_prefix(operator.flops / operator.gpu_s, "FLOP/s") if operator.flops else "",
        ),
        ("limited by", _LIMITS[operator.limit][0]),
    ]


def _roofline(work: StepWork) -> Chart | None:
    """Operators with FLOPs: what they reach, against what the GPU could do at their intensity."""
    shown = [
        operator
        for operator in work.operators
        if operator.flops and operator.moved_bytes and operator.gpu_s >= _LEAST * work.gpu_s
    ]
    if not shown or not work.peak_flops_per_s:
        return None
    points: list[dict[str, Any]] = [
        {
            "intensity": operator.flops / operator.moved_bytes,
            "rate": operator.flops / operator.gpu_s / 1e12,
            "share": operator.gpu_s / work.gpu_s,
            "dtype": operator.dtype,
            "tip": tip(
                _name(operator),
                ("intensity", f"{rate(operator.flops / operator.moved_bytes)} FLOP/B"),
                *_operator_rows(operator, work),
            ),
        }
        for operator in shown
    ]
    found = [operator.flops / operator.moved_bytes for operator in shown]
    ends = min(1.0, *found) / 2, max(1000.0, *found) * 2
    dtypes = [name for name in work.peak_flops_per_s if any(o.dtype == name for o in shown)]
    bandwidth = work.bandwidth_bytes_per_s
    roofs: list[dict[str, Any]] = [
        {"intensity": at, "rate": min(peak, bandwidth * at) / 1e12, "dtype": name,
         "tip": tip(f"roof of {name}", ("peak", with_prefix(peak, "FLOP/s")),
                    ("bandwidth", byte_rate(bandwidth)))}
        for name, peak in work.peak_flops_per_s.items() if name in dtypes
        for at in (ends[0], peak / bandwidth, ends[1])
    ]  # fmt: skip
    share = sum(operator.gpu_s for operator in shown) / work.gpu_s
    best = max(shown, key=lambda each: each.flops / each.gpu_s)
    says = (
        f"{len(shown)} operators with FLOPs use {percent(share)} of the GPU time; the fastest "
        f"reaches {with_prefix(best.flops / best.gpu_s, 'FLOP/s')} ({_name(best)})."
    )
    lows = [float(point["rate"]) for point in (*points, *roofs)]
    spec = chart(300, says, layer=_roofline_layers(points, roofs, dtypes, ends, min(lows)))
    table = figures(
        ("Operator", "Dtype", "FLOP/B", "Reached", "Of the peak", "Share of time"),
        [
            (
                _name(operator),
                operator.dtype,
                rate(operator.flops / operator.moved_bytes),
                with_prefix(operator.flops / operator.gpu_s, "FLOP/s"),
                percent(operator.flops / operator.gpu_s / work.peak_flops_per_s[operator.dtype]),
                percent(operator.gpu_s / work.gpu_s),
            )
            for operator in shown
        ],
        "Arithmetic intensity and predicted rate of operators",
        (2, 3, 4, 5),
    )
    note = (
        "Lines: the GPU's peak as sold and its memory bandwidth. Points: predicted, all calls of "
        "an operator together; their area is the share of the GPU time. Operators without FLOPs of "
        "matmuls, convolutions or attention have no point."
    )
    return Chart("What operators reach of the GPU (roofline)", says, spec, table, note)


def _roofline_layers(
    points: Sequence[dict[str, Any]],
    roofs: Sequence[dict[str, Any]],
    dtypes: Sequence[str],
    ends: tuple[float, float],
    low: float,
) -> list[Spec]:
    log = {"type": "log", "nice": False}
    domain = {**log, "domain": list(ends)}
    across = x("intensity", "FLOPs for each byte that is moved", scale=domain,
               axis={"format": "~g", "tickCount": 6})  # fmt: skip
    bottom = 10 ** math.floor(math.log10(max(low, 1e-6)))
    powers = [10**n for n in range(-6, 5)]
    up = y("rate", "TFLOP/s", scale={**log, "domainMin": bottom},
           axis={"format": "~g", "values": powers})  # fmt: skip
    hue = color("dtype", dtypes, COLORS[: len(dtypes)])
    return [
        {
            "data": values(roofs),
            "mark": {"type": "line", "strokeWidth": 2, **TIP},
            "encoding": {"x": across, "y": up, "color": hue},
        },
        {
            "data": values(points),
            "mark": {"type": "circle", "opacity": 0.75, **TIP},
            "encoding": {
                "x": across,
                "y": up,
                "color": hue,
                "size": {
                    "field": "share",
                    "type": "quantitative",
                    "scale": {"range": [30, 500], "domain": [0, 0.3], "clamp": True},
                    "legend": None,
                },
            },
        },
    ]


# -- by batch size -----------------------------------------------------------------------------


def _throughput(result: PlanResult, speed: Speed) -> Chart | None:
    """Samples a second over the batch size, with the prediction interval."""
    curve = [each for each in speed.curve if each.batch_size and each.samples_per_s]
    if len(curve) < 2:
        return None
    rows = []
    for each in curve:
        per_s, low, high = each.samples_per_s or 0.0, *each.range_s
        rows.append(
            {
                "batch": each.batch_size,
                "rate": per_s,
                "low": per_s * each.seconds / high,
                "high": per_s * each.seconds / low,
                "tip": tip(
                    f"batch size {each.batch_size}",
                    ("samples/s", rate(per_s)),
                    ("step", f"{duration(each.seconds)} ({duration(low)} to {duration(high)})"),
                    ("limited by", BOUNDS[each.bound]),
                ),
            }
        )
    best, last = result.chosen.recommended_batch, curve[-1]
    says = (
        f"Predicted throughput rises from {rate(curve[0].samples_per_s)} samples/s at batch size "
        f"{curve[0].batch_size} to {rate(last.samples_per_s)} at {last.batch_size}."
    )
    if speed.knee:
        says += f" From batch size {speed.knee} on it is within {percent(1 - KNEE)} of the best."
    marks = [
        {"batch": batch, "label": f"{word} {batch}"}
        for word, batch in (("recommended", best), ("saturation", speed.knee))
        if batch and (word != "saturation" or batch != best)
    ]
    wide = (last.batch_size or 1) > 64
    scale: Spec = {"type": "log", "base": 2, "nice": False} if wide else {"nice": False}
    label = "batch size" + (" (logarithmic)" if wide else "")
    across = x("batch", label, scale=scale)
    up = y("rate", "samples/s", scale={"domainMin": 0})
    wanted = [n for n, each in enumerate(curve) if each.batch_size in (best, speed.knee)]
    shown = thinned(curve, _CURVE, wanted)
    spec = chart(
        260,
        says,
        layer=[
            {
                "data": values(rows),
                "mark": {"type": "area", "opacity": 0.18, "color": COLORS[0]},
                "encoding": {"x": across, "y": y("low", "samples/s"), "y2": {"field": "high"}},
            },
            {
                "data": values(rows),
                "mark": {"type": "line", "point": True, "color": COLORS[0], **TIP},
                "encoding": {"x": across, "y": up},
            },
            *batch_marks(marks, last.batch_size or 1, label, scale=scale),
        ],
    )
    table = figures(
        ("Batch size", "Step", "Samples/s", "Limited by"),
        [
            (str(e.batch_size), duration(e.seconds), rate(e.samples_per_s), BOUNDS[e.bound])
            for e in shown
        ],
        "Predicted steps by batch size",
        (0, 1, 2),
        [n for n, each in enumerate(shown) if each.batch_size == best],
    )
    note = "The band is the 90% prediction interval."
    return Chart("Throughput against batch size (predicted)", says, spec, table, note)
