"""Measurements on real hardware: a verification, CPU against GPU, a calibration."""

from __future__ import annotations

import statistics
from typing import Any, Final

from trainfit.report.blocks import (
    Chart,
    Facts,
    Headline,
    Subject,
    Table,
    Tile,
    facts,
    figures,
    section,
)
from trainfit.report.blocks import table as table_of
from trainfit.report.charts import COLORS, NAMES, TIP, chart, color, nominal, tip, values, x
from trainfit.report.notes import plain, protection_notes
from trainfit.results.gpus import ConvolutionWorkspace, GpuFigure, Profile
from trainfit.results.real_runs import REHEARSED, ComparedQuantity, Verification, VersusCpu
from trainfit.results.speed import Speed
from trainfit.results.text import (
    GIB,
    core_count,
    count,
    duration,
    percent,
    rate,
    size,
    times,
    with_prefix,
)

VERDICTS: Final = {True: "within", False: "OUTSIDE", None: "not known"}
_ACROSS: Final = "memory (GiB; the bar is the stated range)"


# ---
# A prediction compared with a real run: each quantity with its stated range.


def prediction_subject(result: Verification) -> Subject:
    """The verdict, the prediction compared with the measurement, the step time."""
    device = result.compared.get("device")
    tiles = [
        Tile(
            name.capitalize(), size(each.measured_bytes), f"predicted {size(each.predicted_bytes)}"
        )
        for name, each in result.compared.items()
        if each.measured_bytes is not None
    ]
    if result.step_seconds:
        middle = statistics.median(result.step_seconds)
        steps = count(len(result.step_seconds), "step")
        tiles.append(Tile("Step", duration(middle), f"measured, {steps}"))
    rehearsed = REHEARSED in result.notes
    text = verdict_text(result)
    share = ""
    if device is not None and device.measured_bytes is not None and device.predicted_bytes:
        change = device.measured_bytes / device.predicted_bytes - 1
        share = f"Device memory {percent(change, decimals=1, signed=True)} against the prediction."
    run = f"{result.gpu_measured}, {count(result.steps, 'optimizer step')} run"
    if torch := result.environment.get("torch", ""):
        run += f" (torch {torch})"
    return Subject(
        Headline(
            kind="Prediction and real run",
            tone="plain" if rehearsed else "good" if result.good else "bad",
            text=text if text.endswith(".") else f"{text}.",
            limit=REHEARSED.capitalize() + "." if rehearsed else share,
            subject=f"{result.command} on {result.gpu_measured}",
            tiles=tuple(tiles),
        ),
        tuple(
            section(
                "Predicted and measured memory",
                _chart(result),
                facts(
                    ("step time", _step_time(result)),
                    ("measured on", run),
                    ("predicted", f"for {result.gpu_predicted} in {result.file}"),
                    detail=5,
                ),
            )
        ),
        tuple(plain([*result.notes, *protection_notes(result.protection)])),
    )


def _step_time(result: Verification) -> str:
    seconds = result.step_seconds
    if not seconds:
        return ""
    low, middle, high = map(duration, (min(seconds), statistics.median(seconds), max(seconds)))
    steps = count(len(seconds), "step")
    measured = f"{middle}, from {low} to {high} in {steps} (on the device"
    if result.predicted_step_s is None or result.predicted_step_range_s is None:
        return f"{measured}; a recording predicts none)"
    least, most = map(duration, result.predicted_step_range_s)
    predicted = f"{duration(result.predicted_step_s)} ({least} to {most})"
    return f"{measured}, waiting for batches included); predicted without it: {predicted}"


def verdict_text(result: Verification) -> str:
    """Whether it came as predicted, in one line."""
    if result.fits_predicted and not result.fits_measured:
        return "WRONG: predicted to fit, but ran out of GPU memory"
    if result.fits_measured and not result.fits_predicted:
        return "WRONG: predicted not to fit, but it fits"
    if not result.fits_measured:
        return "As predicted: it does not fit"
    basis = result.range_basis
    return f"{'As predicted' if result.good else 'NOT as predicted'} (stated range: {basis})"


def _quantities_table(result: Verification) -> Table:
    return figures(
        ("Memory", "Predicted", "Measured", "Difference", "Stated range", "In it"),
        [
            (
                name,
                size(each.predicted_bytes),
                size(each.measured_bytes),
                difference_text(each) or "-",
                f"{size(each.low_bytes)} to {size(each.high_bytes)}",
                VERDICTS[each.within].lower(),
            )
            for name, each in result.compared.items()
        ],
        f"Of {count(result.steps, 'optimizer step')}; the range: {result.range_basis}",
        (1, 2, 3, 4),
    )


def difference_text(quantity: ComparedQuantity) -> str:
    """What was measured more, in bytes and as a share of the prediction."""
    if quantity.measured_bytes is None:
        return ""
    nbytes = quantity.measured_bytes - quantity.predicted_bytes
    share = (
        f" ({100 * nbytes / quantity.predicted_bytes:+.1f}%)" if quantity.predicted_bytes else ""
    )
    return f"{'+' if nbytes > 0 else ''}{size(nbytes)}{share}"


def _chart(result: Verification) -> Chart | None:
    """The stated range as a bar, and the measured value as a point on it."""
    if not result.compared:
        return None
    rows: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    for name, each in result.compared.items():
        said = tip(
            name,
            ("predicted", size(each.predicted_bytes)),
            ("stated range", f"{size(each.low_bytes)} to {size(each.high_bytes)}"),
            ("measured", size(each.measured_bytes)),
            ("difference", difference_text(each)),
        )
        rows.append({"what": name, "low": each.low_bytes / GIB, "high": each.high_bytes / GIB,
                     "tip": said})  # fmt: skip
        points.append({"what": name, "value": each.predicted_bytes / GIB, "of": "predicted",
                       "tip": said})  # fmt: skip
        if each.measured_bytes is not None:
            points.append({"what": name, "value": each.measured_bytes / GIB, "of": "measured",
                           "tip": said})  # fmt: skip
    says = verdict_text(result)
    up = nominal("what", axis=NAMES)
    layer = [
        {
            "data": values(rows),
            "mark": {"type": "bar", "height": 12, "color": "var(--grid)", **TIP},
            "encoding": {"x": x("low", _ACROSS), "x2": {"field": "high"}, "y": up},
        },
        {
            "data": values(points),
            "mark": {"type": "point", "filled": True, "opacity": 1, "size": 110, **TIP},
            "encoding": {
                "x": x("value", _ACROSS),
                "y": up,
                "color": color("of", ["predicted", "measured"], [COLORS[0], COLORS[1]]),
            },
        },
    ]
    spec = chart(40 * len(rows) + 10, says, layer=layer)
    table = _quantities_table(result)
    return Chart("Predicted and measured memory", says, spec, table, detail=0)


# ---
# Is a GPU worth it?


#: A share of waiting from which it is worth a word.
_WAITS = 0.1
#: Times as many samples a second from which a larger batch is worth a word.
_MORE = 2.0


def versus_cpu_facts(versus: VersusCpu, speed: Speed | None) -> Facts | None:
    """The step measured on the CPU, the one predicted on the GPU, and what that says."""
    on_gpu = ""
    if versus.step_s is not None and speed is not None:
        low, high = map(duration, speed.now.range_s)
        on_gpu = f"{duration(speed.now.seconds)} (predicted, {low} to {high})"
    return facts(
        ("on CPU", _cpu(versus)),
        ("command", versus.command),
        ("on GPU", on_gpu),
        ("verdict", verdict(versus, speed)),
    )


def _cpu(versus: VersusCpu) -> str:
    if versus.step_s is None:
        return f"not measured: {versus.why}"
    times = versus.step_seconds
    one = versus.counts.removesuffix("s")
    text = f"{duration(versus.step_s)} a {one}"
    if versus.batch_size:
        text += f", {rate(versus.batch_size / versus.step_s)} samples/s"
    steps = count(len(times), one)
    text += f" (median of {steps}, {duration(min(times))} to {duration(max(times))}"
    if versus.threads is not None:
        text += f", {count(versus.threads, 'thread')}"
    if versus.cores is not None:
        text += f" on {core_count(versus.cores)}"
    text += ")"
    share = versus.waiting_share or 0.0
    if share >= _WAITS:
        text += f"; {percent(share)} of it waits for the DataLoader"
    if versus.stand_in:
        text += "; the script asks for a GPU by name: it ran on the CPU instead, without autocast"
    return text


def verdict(versus: VersusCpu, speed: Speed | None) -> str:
    """How many times as fast the GPU is, or why that is not known."""
    ratio = versus.ratio_range
    if ratio is None:
        one = versus.counts.removesuffix("s")
        missing = f"a {one} on the CPU" if versus.step_s is None else f"the {one} on the GPU"
        return f"cannot tell: {missing} is not known"
    between = f"{times(ratio[0])} to {times(ratio[1])}"
    shares = " to ".join(map(percent, ratio))
    epoch = _epoch(versus, speed)
    if versus.faster == "gpu":
        return f"the GPU is {between} as fast{epoch}"
    if versus.faster == "cpu":
        text = f"no: the CPU is faster, the GPU reaches {shares} of its rate{epoch}"
    else:
        text = f"cannot tell: the GPU is {between} as fast{epoch}"
    return text + _larger(speed)


def _epoch(versus: VersusCpu, speed: Speed | None) -> str:
    if speed is None or speed.epoch_s is None or versus.step_s is None or speed.now.seconds <= 0:
        return ""
    on_cpu = speed.epoch_s * versus.step_s / speed.now.seconds
    both = f"{duration(speed.epoch_s)} on it, {duration(on_cpu)} on the CPU"
    return f"; an epoch needs {both}, if the DataLoader keeps up"


def _larger(speed: Speed | None) -> str:
    """Note on a larger batch, which a GPU that waits for launches computes in the same time."""
    best = speed.at(speed.knee) if speed is not None else None
    if speed is None or best is None or not best.samples_per_s or not speed.now.samples_per_s:
        return ""
    more = best.samples_per_s / speed.now.samples_per_s
    if more < _MORE:
        return ""
    return (
        f". It reaches {percent(1 / more)} of its throughput at this batch size: {times(more)} the "
        f"samples/s with {best.batch_size}"
    )


# ---
# A calibration profile.


_LIBRARY_TITLES = {
    "kernels": "+ kernels of many operators",
    "cublas": "+ cuBLAS",
    "cublas_backward": "+ cuBLAS, backward",
    "cudnn_forward": "+ cuDNN, forward",
    "cudnn_backward": "+ cuDNN, backward",
    "sdpa": "+ fused attention",
}


def profile_subject(profile: Profile) -> Subject:
    """Device memory and rates, which `plan` uses; workspaces of convolutions."""
    versions = (
        ("driver", profile.driver),
        ("CUDA", profile.cuda),
        ("cuDNN", profile.cudnn),
        ("torch", profile.torch),
    )
    known = ", ".join(f"{name} {text}" for name, text in versions if text)
    gpus = " / ".join(profile.gpus)
    return Subject(
        Headline(
            kind="Calibration profile",
            tone="plain",
            text=f"{gpus}{f' ({known})' if known else ''}, {profile.module_loading} module loading",
            limit=profile.provenance,
        ),
        (
            *section("Device memory", _memory(profile)),
            *section(f"Rates{_SIMULATED if profile.is_rehearsal else ''}", _rates(profile)),
            *section("Times of each class of kernels", _programs(profile)),
            *section("Convolution workspaces", _workspaces(profile.memory.convolutions)),
        ),
        tuple(plain(profile.notes)),
    )


_SIMULATED: Final = " (from the simulated clock, no prediction)"
_HEAD: Final = ("Figure", "Value", "Basis", "Range")


def _memory(profile: Profile) -> Table | None:
    memory = profile.memory
    rows = [("usable", memory.usable), ("held by other processes", memory.others)]
    rows += [("CUDA context", memory.context)]
    rows += [
        (title, memory.libraries[name])
        for name, title in _LIBRARY_TITLES.items()
        if name in memory.libraries
    ]
    rows += [("cuBLAS workspace (allocated)", memory.cublas_workspace)]
    cells = [_figure(title, figure) for title, figure in rows if figure is not None]
    cells += [(_LIBRARY_TITLES[name], "in the context", "", "") for name in memory.included]
    return table_of(_HEAD, cells, numeric=(1,), detail=5)


def _rates(profile: Profile) -> Table | None:
    rates = profile.rates
    rows = [(f"matmul, {name}", figure) for name, figure in rates.matmul.items()]
    named = (
        ("memory bandwidth (read + write)", rates.memory_bandwidth),
        ("kernel launch (eager)", rates.launch),
        ("host to device, pinned", rates.host_to_device_pinned),
        ("host to device, pageable", rates.host_to_device_pageable),
    )
    rows += [(title, figure) for title, figure in named if figure is not None]
    return table_of(_HEAD, [_figure(*row) for row in rows], numeric=(1,), detail=4)


def _programs(profile: Profile) -> Table | None:
    """A table of what was measured for each class, as multiples of the model's times: `plan` takes
    the median."""
    factors: dict[str, list[float]] = {}
    for program in profile.rates.programs:
        if program.modelled_s and not profile.is_rehearsal:
            factors.setdefault(program.group, []).append(program.seconds.value / program.modelled_s)
    rows = [
        (
            name,
            str(len(found)),
            *(f"{value:.2f}" for value in (statistics.median(found), min(found), max(found))),
        )
        for name, found in sorted(factors.items())
    ]
    head = ("Class of kernels", "Programs", "Measured / model", "Least", "Most")
    return table_of(head, rows, numeric=(1, 2, 3, 4))


def _figure(title: str, figure: GpuFigure) -> tuple[str, ...]:
    value, low, high = (_amount(x, figure.unit) for x in (figure.value, figure.low, figure.high))
    number, _, unit = low.partition(" ")
    low = number if high.endswith(f" {unit}") else low
    between = f"{low} to {high}" if figure.low != figure.high else ""
    return title, value, figure.basis, between


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return size(value)
    return duration(value) if unit == "s" else with_prefix(value, unit)


def _workspaces(convolutions: tuple[ConvolutionWorkspace, ...]) -> Table | None:
    """Measured and modelled bytes, where either is not 0."""
    rows = []
    for convolution in convolutions:
        if not convolution.measured_bytes and not convolution.modelled_bytes:
            continue
        samples, inputs, outputs, height, width, kernel = convolution.shape
        layout = "channels_last" if convolution.channels_last else "contiguous"
        where = f"{samples}x{inputs}x{height}x{width} to {outputs}, {kernel}x{kernel}"
        model = "?" if convolution.modelled_bytes is None else size(convolution.modelled_bytes)
        rows.append(
            (
                where,
                convolution.dtype,
                layout,
                convolution.direction,
                size(convolution.measured_bytes),
                model,
            )
        )
    head = ("Shape", "Type", "Layout", "Pass", "Measured", "Modelled")
    return table_of(head, rows, numeric=(4, 5))
