"""Measurements on real hardware as text: a verification, CPU against GPU, a calibration."""

from __future__ import annotations

import statistics

from trainfit.report.layout import Line, blank, block, made, note_block, screen, table
from trainfit.report.notes import note_text, notes_section, plain, protection_notes
from trainfit.results.gpus import ConvolutionWorkspace, Figure, Profile
from trainfit.results.real_runs import Comparison, Verification, VersusCpu
from trainfit.results.speed import Speed
from trainfit.results.text import (
    core_count,
    count,
    duration,
    percent,
    printable,
    rate,
    size,
    times,
    with_prefix,
    wrapped,
)

VERDICTS = {True: "within", False: "OUTSIDE", None: "not known"}


def verification_screen(result: Verification) -> list[Line]:
    """The verdict, then the prediction compared with the measurement: at most 25 lines."""
    good = result.good
    compared, steps = _table(result).split("\n"), _steps(result).split("\n")
    notes = plain([*result.notes, *protection_notes(result.protection)])
    return screen(
        [
            block(verdict_text(result), style="good" if good else "bad"),
            *(block(line, 20, style="quiet") for line in _title(result).split("\n")),
            blank(),
            made(compared[1:], title=compared[0]),
            made(steps[1:], 5, title=steps[0]),
            blank(),
            *(note_block(printable(note_text(note)), 30 + at) for at, note in enumerate(notes)),
        ],
        "notes",
    )


def verification_text(result: Verification) -> str:
    """The verdict, the prediction compared with the measurement, step time, notes."""
    parts = [
        verdict_text(result),
        _title(result),
        _table(result),
        _steps(result),
        notes_section(plain([*result.notes, *protection_notes(result.protection)])),
    ]
    return "\n\n".join(part for part in parts if part)


def _title(result: Verification) -> str:
    return (
        f"{printable(result.gpu_measured)}, {count(result.steps, 'optimizer step')} run "
        f"(torch {printable(result.environment.get('torch', ''))})\n"
        f"  predicted for {printable(result.gpu_predicted)} in {printable(result.file)}"
    )


def _table(result: Verification) -> str:
    if not result.compared:
        return ""
    head = ("", "predicted", "measured", "difference", "stated range")
    rows = [_row(name, each) for name, each in result.compared.items()]
    return "\n".join(["Memory", *table(rows, "lrrrw", head)])


def _row(name: str, each: Comparison) -> tuple[str, ...]:
    measured = "?" if each.measured_bytes is None else size(each.measured_bytes)
    stated = f"{size(each.low_bytes)} to {size(each.high_bytes)}: {VERDICTS[each.within]}"
    return name, size(each.predicted_bytes), measured, difference_text(each), stated


def difference_text(each: Comparison) -> str:
    """What was measured more, in bytes and as a share of the prediction."""
    if each.measured_bytes is None:
        return ""
    nbytes = each.measured_bytes - each.predicted_bytes
    share = f" ({100 * nbytes / each.predicted_bytes:+.1f}%)" if each.predicted_bytes else ""
    return f"{'+' if nbytes > 0 else ''}{size(nbytes)}{share}"


def _steps(result: Verification) -> str:
    times = result.step_seconds
    if not times:
        return ""
    low, middle, high = (1e3 * x for x in (min(times), statistics.median(times), max(times)))
    return (
        f"Step time (measured on the device; nothing was predicted)\n"
        f"  {middle:.4g} ms, from {low:.4g} to {high:.4g} ms in {count(len(times), 'step')}"
    )


def verdict_text(result: Verification) -> str:
    """Whether it came as predicted, in one line."""
    if result.fits_predicted and not result.fits_measured:
        return "WRONG: predicted to fit, but ran out of GPU memory"
    if result.fits_measured and not result.fits_predicted:
        return "WRONG: predicted not to fit, but it fits"
    if not result.fits_measured:
        return "As predicted: it does not fit"
    basis = printable(result.range_basis)
    return f"{'As predicted' if result.good else 'NOT as predicted'} (stated range: {basis})"


# ---
# Is a GPU worth it? As text.


_INDENT = " " * 12
#: A share of waiting from which it is worth a word.
_WAITS = 0.1
#: Times as many samples a second from which a larger batch is worth a word.
_MORE = 2.0


def versus_cpu_section(found: VersusCpu, speed: Speed | None) -> str:
    """The step measured on the CPU, the one predicted on the GPU, and what that says."""
    lines = ["Is a GPU worth it? The same command on this machine's CPU", *_cpu(found)]
    lines.append(wrapped(printable(found.command), "  command   ", _INDENT))
    if found.step_s is not None and speed is not None:
        low, high = speed.now.range_s
        text = f"{duration(speed.now.seconds)} (predicted, {duration(low)} to {duration(high)})"
        lines.append(wrapped(text, "  on GPU    ", _INDENT))
    lines.append(wrapped(verdict(found, speed), "  verdict   ", _INDENT))
    return "\n".join(lines)


def _cpu(found: VersusCpu) -> list[str]:
    if found.step_s is None:
        return [wrapped(f"not measured: {printable(found.why)}", "  on CPU    ", _INDENT)]
    times = found.step_seconds
    one = found.counts.removesuffix("s")
    text = f"{duration(found.step_s)} a {one}"
    if found.batch_size:
        text += f", {rate(found.batch_size / found.step_s)} samples/s"
    steps = count(len(times), one)
    text += f" (median of {steps}, {duration(min(times))} to {duration(max(times))}"
    if found.threads is not None:
        text += f", {count(found.threads, 'thread')}"
    if found.cores is not None:
        text += f" on {core_count(found.cores)}"
    text += ")"
    share = found.waiting_share or 0.0
    if share >= _WAITS:
        text += f"; {percent(share)} of it waits for the DataLoader"
    if found.stand_in:
        text += "; the script asks for a GPU by name: it ran on the CPU instead, without autocast"
    return [wrapped(text, "  on CPU    ", _INDENT)]


def verdict(found: VersusCpu, speed: Speed | None) -> str:
    """How many times as fast the GPU is, or why that is not known."""
    ratio = found.ratio_range
    if ratio is None:
        one = found.counts.removesuffix("s")
        missing = f"a {one} on the CPU" if found.step_s is None else f"the {one} on the GPU"
        return f"cannot tell: {missing} is not known"
    between = f"{times(ratio[0])} to {times(ratio[1])}"
    shares = " to ".join(map(percent, ratio))
    epoch = _epoch(found, speed)
    if found.faster == "gpu":
        return f"the GPU is {between} as fast{epoch}"
    if found.faster == "cpu":
        text = f"no: the CPU is faster, the GPU reaches {shares} of its rate{epoch}"
    else:
        text = f"cannot tell: the GPU is {between} as fast{epoch}"
    return text + _larger(speed)


def _epoch(found: VersusCpu, speed: Speed | None) -> str:
    if speed is None or speed.epoch_s is None or found.step_s is None or speed.now.seconds <= 0:
        return ""
    on_cpu = speed.epoch_s * found.step_s / speed.now.seconds
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
# A calibration profile as text for the terminal.


_LIBRARY_TITLES = {
    "cublas": "+ cuBLAS",
    "cudnn_forward": "+ cuDNN, forward",
    "cudnn_backward": "+ cuDNN, backward",
    "sdpa": "+ fused attention",
    "kernels": "+ kernels of many operators",
}


def profile_screen(profile: Profile) -> list[Line]:
    """The figures that `plan` uses most, in at most 25 lines."""
    title, *where = _calibrated(profile).split("\n")
    memory, rates = _memory(profile).split("\n"), _rates(profile).split("\n")
    notes = plain(profile.notes)
    return screen(
        [
            block(title, style="title"),
            *(block(line, 20, first="", rest="  ") for line in where),
            blank(),
            made(memory[1:], 5, title=memory[0]),
            blank(),
            made(rates[1:], 4, title=rates[0]),
            *(note_block(printable(note_text(note)), 30 + at) for at, note in enumerate(notes)),
        ],
        "convolution workspaces, notes",
    )


def profile_text(profile: Profile) -> str:
    """Whose profile, device memory, rates, workspaces, notes."""
    parts = [
        _calibrated(profile),
        _memory(profile),
        _rates(profile),
        _workspaces(profile.memory.convolutions),
        notes_section(plain(profile.notes)),
    ]
    return "\n\n".join(part for part in parts if part)


def _calibrated(profile: Profile) -> str:
    versions = (
        ("driver", profile.driver),
        ("CUDA", profile.cuda),
        ("cuDNN", profile.cudnn),
        ("torch", profile.torch),
    )
    known = ", ".join(f"{name} {printable(text)}" for name, text in versions if text)
    gpus = " / ".join(map(printable, profile.gpus))
    return (
        f"{gpus}{f' ({known})' if known else ''}, {profile.module_loading} module loading\n"
        f"  {printable(profile.provenance)}"
    )


def _memory(profile: Profile) -> str:
    memory = profile.memory
    rows = [("usable", memory.usable), ("held by other processes", memory.others)]
    rows += [("CUDA context", memory.context)]
    rows += [
        (title, memory.libraries[name])
        for name, title in _LIBRARY_TITLES.items()
        if name in memory.libraries
    ]
    rows += [("cuBLAS workspace (allocated)", memory.cublas_workspace)]
    cells = [_rate_row(title, figure) for title, figure in rows if figure is not None]
    cells += [(_LIBRARY_TITLES[name], "in the context", "", "") for name in memory.included]
    return "\n".join(["Device memory", *table(cells, "lrlw")])


def _rates(profile: Profile) -> str:
    rates = profile.rates
    rows = [(f"matmul, {name}", figure) for name, figure in rates.matmul.items()]
    named = (
        ("memory bandwidth (read + write)", rates.memory_bandwidth),
        ("kernel launch (eager)", rates.launch),
        ("host to device, pinned", rates.host_to_device_pinned),
        ("host to device, pageable", rates.host_to_device_pageable),
    )
    rows += [(title, figure) for title, figure in named if figure is not None]
    simulated = " (from the simulated clock, no prediction)" if profile.is_rehearsal else ""
    lines = table([_rate_row(title, figure) for title, figure in rows], "lrlw")
    return "\n".join([f"Rates{simulated}", *lines]) if rows else ""


def _rate_row(title: str, figure: Figure) -> tuple[str, ...]:
    value, low, high = (_amount(x, figure.unit) for x in (figure.value, figure.low, figure.high))
    number, _, unit = low.partition(" ")
    low = number if high.endswith(f" {unit}") else low
    between = f"{low} to {high}" if figure.low != figure.high else ""
    return printable(title), value, figure.basis, between


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return size(value)
    return duration(value) if unit == "s" else with_prefix(value, unit)


def _workspaces(convolutions: tuple[ConvolutionWorkspace, ...]) -> str:
    """Measured and modelled bytes, where either is not 0."""
    rows = []
    for each in convolutions:
        if not each.measured_bytes and not each.modelled_bytes:
            continue
        samples, inputs, outputs, height, width, kernel = each.shape
        layout = "channels_last" if each.channels_last else "contiguous"
        where = f"{samples}x{inputs}x{height}x{width} to {outputs}, {kernel}x{kernel}"
        model = "?" if each.modelled_bytes is None else size(each.modelled_bytes)
        measured = size(each.measured_bytes)
        rows.append((where, printable(each.dtype), layout, each.direction, measured, model))
    if not rows:
        return ""
    head = ("shape", "type", "layout", "pass", "measured", "modelled")
    return "\n".join(["Convolution workspaces", *table(rows, "wlllrr", head)])
