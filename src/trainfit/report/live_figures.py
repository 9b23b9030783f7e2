"""What the live figures of a GPU say and do not say: space, time, clocks and power."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from trainfit.report.blocks import Item, Section, Text, items, rows, section
from trainfit.results.gpus import MeaningLine
from trainfit.results.machine import Fact, Gpu
from trainfit.results.text import GIB, percent, printable

_T = TypeVar("_T")

# Shares from which on `situation` speaks of idle, busy, full and so on. They are our judgement:
# each only picks the words, and the figures stand next to them.
_IDLE = 0.05
_HALF = 0.5
_BUSY = 0.9
_FULL = 0.8
_HELD = 0.1
_LOW_POWER = 0.5
_MUCH_TRAFFIC = 0.6

#: NVML's reasons for the current clock (nvml.h, nvmlClocksEventReasons) in words.
_REASONS: Mapping[str, str] = {
    "gpu_idle": "idle",
    "applications_clocks_setting": "set by the user",
    "sw_power_cap": "power limit",
    "hw_slowdown": "slowed by hardware",
    "sync_boost": "sync boost group",
    "sw_thermal_slowdown": "too hot",
    "hw_thermal_slowdown": "too hot",
    "hw_power_brake_slowdown": "power brake",
    "display_clock_setting": "display",
}
_HELD_DOWN = frozenset(
    {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)
#: With any of these the clock is low for another reason than the kernels.
_LOWERED = _HELD_DOWN | {"applications_clocks_setting", "sync_boost", "display_clock_setting"}


def meaning(gpu: Gpu) -> tuple[MeaningLine, ...]:
    """Each live figure with what it says and what it does not; one without a value has the
    reason."""
    return (
        _line(
            "GPU-Util",
            gpu.utilisation,
            percent,
            "time: the share of the last 1/6 to 1 s in which a kernel ran",
            "how much of the GPU the kernels used: a single small one counts as 100%",
        ),
        _line(
            "memory used",
            gpu.used_bytes,
            lambda used: _of(used / GIB, gpu.memory_bytes, GIB, "GiB", digits=1),
            "space: memory of all processes, including PyTorch's cache of freed tensors",
            "what a job needs, or how busy the GPU is",
        ),
        _line(
            "memory traffic",
            gpu.memory_utilisation,
            percent,
            "time: the share in which memory was read or written (utilization.memory)",
            "how much memory is used, or how close the bandwidth is to its peak",
        ),
        _line(
            "SM clock",
            gpu.sm_hz,
            lambda hz: _of(hz / 1e6, gpu.sm_max_hz, 1e6, "MHz", share=False) + _why(gpu),
            "speed: arithmetic is slower in proportion to it; low is normal for an idle GPU",
            "whether anything runs",
        ),
        _line(
            "power",
            gpu.power_w,
            lambda watts: _of(watts, gpu.power_limit_w, 1.0, "W") + _lowered(gpu),
            "load: the best indicator of how busy the GPU is, as small kernels leave it low",
            "whether the work is useful or fast",
        ),
        _line(
            "temperature",
            gpu.temperature_c,
            lambda degrees: _degrees(degrees, gpu.slowdown_c),
            "above the second figure the GPU lowers its clock"
            if gpu.slowdown_c.is_known
            else "a hot GPU lowers its clock",
            "the temperature of its memory, which lowers the clock on some cards",
        ),
    )


def situation(gpu: Gpu) -> str:
    """Summary of the figures in a sentence or two."""
    busy = gpu.utilisation.value
    power = _share(gpu.power_w, gpu.power_limit_w)
    if busy is None:
        text = "Its utilization is not known"
        text += f": {printable(gpu.utilisation.reason)}." if gpu.utilisation.reason else "."
        if power is not None:
            text += f" It draws {percent(power)} of its power limit."
    elif busy < _IDLE:
        text = _idle(gpu)
    elif busy < _BUSY:
        text = _waiting(gpu, busy)
    else:
        text = _running(gpu, power)
    held_down = [reason for reason in gpu.clock_reasons.value or () if reason in _HELD_DOWN]
    if held_down:
        text += f" Its clock is lowered ({_words(held_down)}): check cooling and power supply."
    return text


def gpus_now_sections(gpus: tuple[Gpu, ...]) -> list[Section]:
    """An item a GPU; what a figure means stands next to it at the first GPU that has it."""
    explained: set[str] = set()
    longer = Text("For a longer time: nvidia-smi dmon -s pucm")
    found = items([_gpu(gpu, explained) for gpu in gpus])
    return section("GPUs at this moment", found, longer) if gpus else []


def _gpu(gpu: Gpu, explained: set[str]) -> Item:
    name = gpu.name.value if gpu.name.value is not None else "name not known"
    lines = meaning(gpu)
    missing = _missing([line for line in lines if line.value is None])
    figures = []
    for line in lines:
        if line.value is not None:
            says = f"; {line.says}; not {line.does_not_say}"
            figures.append((line.figure, line.value + (says * (line.figure not in explained))))
            explained.add(line.figure)
    return Item(
        f"GPU {gpu.index}, {name}: {situation(gpu)}", rows=rows(*figures, ("not known", missing))
    )


def _missing(lines: Iterable[MeaningLine]) -> str:
    """Figures without a value, those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for line in lines:
        by_reason.setdefault(line.says, []).append(line.figure)
    return "; ".join(
        ", ".join(figures) + (f" ({reason})" if reason else "")
        for reason, figures in by_reason.items()
    )


def _line(
    figure: str, fact: Fact[_T], show: Callable[[_T], str], says: str, does_not: str
) -> MeaningLine:
    if fact.value is None:
        return MeaningLine(figure, None, printable(fact.reason), source=fact.source)
    return MeaningLine(figure, show(fact.value), says, does_not, source=fact.source)


def _idle(gpu: Gpu) -> str:
    held = _share(gpu.used_bytes, gpu.memory_bytes)
    # A display alone keeps a kernel running now and then.
    runs = "It is idle" if not gpu.utilisation.value else "It is almost idle"
    if held is None:
        return f"{runs}."
    if held < _HELD:
        return f"{runs}, and hardly any memory is used."
    return (
        f"{runs}, though {percent(held)} of its memory is used: its job waits for data or the "
        "CPU, has stopped, or keeps memory that it no longer needs."
    )


def _waiting(gpu: Gpu, busy: float) -> str:
    held = _share(gpu.used_bytes, gpu.memory_bytes)
    text = f"A kernel ran for {percent(busy)} of the time"
    text += ": if this lasts, it waits for data, the CPU or launches"
    if held is not None and held >= _FULL:
        return (
            f"{text}. Memory is full but the GPU is not busy: a larger batch hardly fits, a "
            "faster DataLoader or fewer waits help."
        )
    if busy < _HALF and held is not None and held < _HALF:
        return f"{text}; there is also memory for a larger batch."
    return f"{text}."


def _running(gpu: Gpu, power: float | None) -> str:
    traffic = gpu.memory_utilisation.value
    if traffic is not None and traffic >= _MUCH_TRAFFIC:
        return (
            f"A kernel nearly always runs, and memory is in use for {percent(traffic)} of the "
            "time: bandwidth is likely the limit. Fewer bytes help: 16-bit types, fused operations."
        )
    if power is None:
        return (
            "A kernel nearly always runs; how much of the GPU it uses is not known without power "
            "and power limit."
        )
    if power < _LOW_POWER:
        if _LOWERED & set(gpu.clock_reasons.value or ()):
            return (
                f"A kernel nearly always runs, at {percent(power)} of its power limit: its clock "
                "is lowered or kernels are small, which cannot be distinguished."
            )
        return (
            f"A kernel nearly always runs, yet it draws {percent(power)} of its power limit: "
            "likely small kernels one after another, which leave most of it idle. "
            f"{_fuller(gpu)} help."
        )
    return f"Busy: a kernel nearly always runs, at {percent(power)} of its power limit."


def _fuller(gpu: Gpu) -> str:
    """What makes kernels larger or launches cheaper; torch.compile's Triton needs 7.0."""
    capability = gpu.capability.value
    if capability is not None and capability < (7, 0):
        return "A larger batch or CUDA graphs"
    return "A larger batch, torch.compile or CUDA graphs"


def _why(gpu: Gpu) -> str:
    reasons = gpu.clock_reasons.value
    return f" ({_words(reasons)})" if reasons else ""


def _words(reasons: Sequence[str]) -> str:
    words = [_REASONS.get(reason, printable(reason.replace("_", " "))) for reason in reasons]
    return ", ".join(dict.fromkeys(words))


def _lowered(gpu: Gpu) -> str:
    limit, default = gpu.power_limit_w.value, gpu.power_limit_default_w.value
    if limit is None or default is None or round(limit) == round(default):
        return ""
    return f"; as sold {default:.0f} W"


def _degrees(value: float, slowdown: Fact[float]) -> str:
    return (
        f"{value:.0f} °C" if slowdown.value is None else f"{value:.0f} of {slowdown.value:.0f} °C"
    )


def _of(
    part: float,
    whole: Fact[int] | Fact[float],
    unit: float,
    name: str,
    *,
    digits: int = 0,
    share: bool = True,
) -> str:
    """ "5.2 of 23.6 GiB (22%)", or "5.2 GiB" where the whole is not known."""
    if whole.value is None or whole.value <= 0:
        return f"{part:.{digits}f} {name}"
    total = whole.value / unit
    text = f"{part:.{digits}f} of {total:.{digits}f} {name}"
    return f"{text} ({percent(part / total)})" if share else text


def _share(part: Fact[int] | Fact[float], whole: Fact[int] | Fact[float]) -> float | None:
    if part.value is None or whole.value is None or whole.value <= 0:
        return None
    return part.value / whole.value
