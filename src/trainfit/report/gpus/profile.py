"""A calibration profile as text for the terminal."""

from __future__ import annotations

from trainfit.report.notes_text import note_text, notes_section, plain
from trainfit.report.screen import Line, blank, block, made, note_block, screen
from trainfit.report.table import table
from trainfit.results.format import duration, size, with_prefix
from trainfit.results.machine.profile import ConvolutionWorkspace, Figure, Profile
from trainfit.results.text import printable

_LIBRARY_TITLES = {
    "cublas": "+ cuBLAS",
    "cudnn_forward": "+ cuDNN, forward",
    "cudnn_backward": "+ cuDNN, backward",
    "sdpa": "+ fused attention",
    "kernels": "+ kernels of many operators",
}


def profile_screen(profile: Profile) -> list[Line]:
    """The figures that `plan` uses most, in at most 25 lines."""
    title, *where = _title(profile).split("\n")
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
        _title(profile),
        _memory(profile),
        _rates(profile),
        _workspaces(profile.memory.convolutions),
        notes_section(plain(profile.notes)),
    ]
    return "\n\n".join(part for part in parts if part)


def _title(profile: Profile) -> str:
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
    cells = [_row(title, figure) for title, figure in rows if figure is not None]
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
    lines = table([_row(title, figure) for title, figure in rows], "lrlw")
    return "\n".join([f"Rates{simulated}", *lines]) if rows else ""


def _row(title: str, figure: Figure) -> tuple[str, ...]:
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
