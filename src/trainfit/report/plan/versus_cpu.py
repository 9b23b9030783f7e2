"""Is a GPU worth it? As text."""

from __future__ import annotations

from trainfit.results.format import core_count, count, duration, percent, rate, times
from trainfit.results.plan.speed import Speed
from trainfit.results.plan.versus_cpu import VersusCpu
from trainfit.results.text import printable, wrapped

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
