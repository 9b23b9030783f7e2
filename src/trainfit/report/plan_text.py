"""A plan as text for the terminal."""

from __future__ import annotations

from trainfit.report.launch_text import launch_lines
from trainfit.report.loading_text import loading_section
from trainfit.report.memory_text import (
    breakdown_section,
    memory_section,
    notes_section,
    profile_note,
)
from trainfit.report.remedies_text import inference_section, remedies_section
from trainfit.report.sizes import printable, size, time_text, wrapped
from trainfit.report.speed_text import speed_section
from trainfit.report.steps_text import only_seen, pattern_notes
from trainfit.report.versus_cpu_text import versus_cpu_section
from trainfit.results.plan import Configuration, PlanResult
from trainfit.results.speed import KNEE
from trainfit.results.words import count

#: Where the text beside a batch size begins.
_COLUMN = 31
#: Larger GPUs that are named.
_GPUS = 4

_BASIS = {
    "two traces": "from two simulated batch sizes",
    "one trace a batch size": "each one simulated",
    "one trace": "only the present one was simulated",
}


def plan_text(result: PlanResult) -> str:
    """The whole plan: figures now, what they consist of, batch sizes, launch command."""
    now = result.now
    fits = "" if now.fits else ": DOES NOT FIT"
    detail = [result.basis_detail] if result.basis_detail and now.largest_batch is not None else []
    parts = [
        _title(result),
        memory_section(f"Memory {_at(now)}{fits}", now.memory),
        breakdown_section(now.by_kind_bytes, now.by_module_bytes, now.memory.allocated_bytes),
        _batch_section(result),
        _amp_section(result),
        speed_section(result.speed) if result.speed is not None else "",
        versus_cpu_section(result.versus_cpu, result.speed) if result.versus_cpu else "",
        inference_section(result.inference) if result.inference is not None else "",
        remedies_section(result.remedies) if result.remedies is not None else "",
        loading_section(result.loading, result) if result.loading is not None else "",
        notes_section(
            [
                *pattern_notes(result.pattern),
                *profile_note(result.profile),
                *result.notes,
                *detail,
            ],
            result.assumptions,
        ),
        _launch_section(result),
    ]
    return "\n\n".join(part for part in parts if part)


def _title(result: PlanResult) -> str:
    torch = printable(result.environment.get("torch", ""))
    what = "optimizer step" if result.inference is None else "model call"
    steps = count(result.steps, what)
    others = result.other_processes_bytes
    held = f", of which other processes hold {size(others)}" if others else ""
    return wrapped(
        f"{printable(result.gpu)}, {size(result.gpu_memory_bytes)}{held} "
        f"({steps} simulated, torch {torch}, {result.seconds:.0f} s)",
        "",
        "  ",
    )


def _at(configuration: Configuration) -> str:
    batch = configuration.batch_size
    where = f"batch size {batch}" if batch else "the present batch size"
    return f"at {where}, AMP {printable(configuration.amp)}"


def _batch_section(result: PlanResult) -> str:
    now = result.now
    title = f"Batch size ({_BASIS[result.basis]}{only_seen(result.pattern)})"
    if now.largest_batch is None:
        return "\n".join([title, *_unknown(result)])
    if now.largest_batch == 0:
        return "\n".join([title, "  not even one sample fits. What would:", *_remedies(result)])
    lines = [title, _batch_row("largest that fits", now.largest_batch), *_recommended(result)]
    if not now.fits:
        lines.append(f"  the present batch size, {now.batch_size}, does not fit. What would:")
        lines += _remedies(result)
    return "\n".join(lines)


def _unknown(result: PlanResult) -> list[str]:
    """Nothing but the present batch size could be judged."""
    detail = wrapped(f"others are not known: {printable(result.basis_detail)}", "  ", "  ")
    if result.now.fits:
        return ["  the present one fits", detail]
    return ["  the present one does not fit. What would:", *_remedies(result), detail]


def _recommended(result: PlanResult) -> list[str]:
    best, memory = result.now.recommended_batch, result.recommended
    free = f"{100 * result.headroom_share:.2g}% of the GPU free"
    if not best:
        none = "none was seen to leave" if best is None else "no batch size leaves"
        return [f"  {'recommended':<20}  none: {none} {free}"]
    limits = result.now.limits
    room = f"leaves {free}"
    if not result.headroom_is_set:
        room += " (as much as the figures may be too low)"
    why = "the present one; " if best == result.now.batch_size else ""
    if limits is not None and limits.memory is not None and best < limits.memory:
        if limits.trains is not None:
            why += f"the smallest that trains {KNEE:.0%} as fast as any at this noise scale"
        else:
            why += f"the smallest with {KNEE:.0%} of the most samples/s"
        why += " (predicted)"
        why += ", as a multiple of 8" if best % 8 == 0 else ""
        more = f"the largest that {room}"
        lines = [
            _batch_row("memory allows", limits.memory, more),
            _batch_row("recommended", best, why),
        ]
    else:
        why += f"the largest that {room}"
        if best >= 8 and best % 8 == 0 and result.basis == "two traces":
            why += ", as a multiple of 8 (tensor cores)"
        lines = [_batch_row("recommended", best, why)]
    if memory is not None:
        lines.append(
            f"{'':{_COLUMN}}allocated {size(memory.allocated_bytes)}, reserved "
            f"{size(memory.reserved_bytes)}, device {size(memory.device_bytes)}"
        )
    if limits is not None:
        scale = limits.noise_scale
        text = (
            "not measured: above it larger batches train no better"
            if scale is None
            else "as you said: with a batch of so many samples a loss takes twice the samples"
        )
        lines.append(_batch_row("noise scale", "?" if scale is None else round(scale), text))
    return lines


def _batch_row(title: str, batch: int | str, text: str = "") -> str:
    start = f"  {title:<18} {batch:>7}".ljust(_COLUMN)
    return wrapped(text, start, " " * _COLUMN) if text else start.rstrip()


def _remedies(result: PlanResult) -> list[str]:
    """What would make the job run; for a larger GPU, at the present batch size."""
    lines = []
    now, other = result.now, result.other_amp
    if now.recommended_batch:
        lines.append(f"  - batch size {now.recommended_batch}, as in the command below")
    elif now.largest_batch:
        lines.append(f"  - batch size {now.largest_batch}, with less headroom")
    if other is not None and other.largest_batch:
        lines.append(f"  - AMP {printable(other.amp)}: up to batch size {other.largest_batch}")
    elif other is not None and other.fits:
        lines.append(f"  - AMP {printable(other.amp)}, at the present batch size")
    if result.other_gpus:
        named = ", ".join(map(printable, result.other_gpus[:_GPUS]))
        batch = f"batch size {now.batch_size}" if now.batch_size else "the present batch size"
        lines.append(f"  - a larger GPU, at {batch}: {named}")
    if not lines:
        lines.append("  - no single GPU of the catalogue; make the model or its input smaller")
    return lines


def _amp_section(result: PlanResult) -> str:
    other = result.other_amp
    if other is None:
        return ""
    lines = ["Mixed precision (AMP)"]
    for configuration in (result.now, other):
        memory, largest = configuration.memory, configuration.largest_batch
        at_most = "" if largest is None else f", largest batch size {largest}"
        step = configuration.step_s
        takes = "" if step is None else f", a step {time_text(step)} (predicted)"
        lines.append(
            f"  {printable(configuration.amp):<10} allocated {size(memory.allocated_bytes)}, "
            f"reserved {size(memory.reserved_bytes)}{at_most}{takes}"
        )
    return "\n".join(lines)


def _launch_section(result: PlanResult) -> str:
    if not result.can_start:
        return ""
    return "Launch\n" + launch_lines(result.launch)
