"""How fast a job is, as text."""

from __future__ import annotations

from trainfit.report.plan.answer import limit_text
from trainfit.report.table import table
from trainfit.results.format import count, duration, percent, rate
from trainfit.results.plan.loading import RunRate
from trainfit.results.plan.remedies import LEAST_FASTER
from trainfit.results.plan.speed import KNEE, Speed, StepSpeed
from trainfit.results.text import printable, wrapped

BOUNDS = {
    "tensor cores": "the Tensor cores' arithmetic",
    "shader cores": "the CUDA cores' arithmetic",
    "bandwidth": "the GPU's memory bandwidth",
    "launches": "the CPU, which launches the kernels",
    "host copies": "copies between host and GPU",
}
#: Kinds of kernels that have another name in the results.
_NAMES = {"matmul": "matmul"}
#: Rows of the curve that are shown, and kinds of kernels.
_ROWS, _KINDS = 8, 5


def speed_section(speed: Speed, run: RunRate | None = None) -> str:
    """Step time, what bounds it, other batch sizes; the launched ``run``, with its DataLoader."""
    now = speed.now
    at = f"at batch size {now.batch_size}" if now.batch_size else "at the current batch size"
    lines = [f"Speed {at}, if the DataLoader keeps up (predicted)", *_now(speed), *_run(run)]
    lines += _curve(speed)
    lines += [wrapped(printable(note), "  ", "  ") for note in speed.notes]
    return "\n".join(lines)


def _run(run: RunRate | None) -> list[str]:
    """Of the launched run: what an epoch lasts; also a step, where that is not the GPU's."""
    if run is None:
        return []
    least, most = ("at least ", "at most ") if run.is_bound else ("", "")
    lines = []
    if run.limit != "gpu":
        samples = f", {most}{rate(run.samples_per_s)} samples/s" if run.samples_per_s else ""
        at = f" at batch size {run.batch_size}" if run.batch_size else ""
        text = f"{least}{duration(run.step_s)} a step{samples}{at}{limit_text(run)}"
        lines.append(wrapped(text, "  the run   ", " " * 12))
    if run.epoch_s is not None:
        lines.append(f"  an epoch  {least}{duration(run.epoch_s)}")
    return lines


def _now(speed: Speed) -> list[str]:
    now = speed.now
    low, high = now.range_s
    samples = f", {rate(now.samples_per_s)} samples/s" if now.samples_per_s else ""
    first = (
        f"{duration(now.seconds)}{samples}; 90% prediction interval {duration(low)} to "
        f"{duration(high)}"
    )
    parts = [f"kernels {duration(now.gpu_s)}", f"launches {duration(now.host_s)}"]
    if now.copies_s > 0.01 * now.seconds:
        parts.append(f"copies {duration(now.copies_s)}")
    bound = f"limited by {BOUNDS[now.bound]}: {', '.join(parts)}"
    if speed.mfu is not None:
        bound += f"; {percent(speed.mfu, decimals=1)} of the peak FLOP/s (MFU)"
    total = sum(speed.by_kind_s.values())
    largest = sorted(speed.by_kind_s.items(), key=lambda each: -each[1])[:_KINDS]
    kinds = ", ".join(
        f"{_NAMES.get(name, name.replace('_', ' '))} {percent(each / total)}"
        for name, each in largest
    )
    return [
        wrapped(first, "  a step    ", " " * 12),
        wrapped(bound, "            ", " " * 12),
        *([wrapped(kinds, "  kernels   ", " " * 12)] if total else []),
        *_graphs(speed),
        *_paced(speed),
        wrapped(printable(speed.constants), "  constants ", " " * 12),
    ]


def _graphs(speed: Speed) -> list[str]:
    """Gain of CUDA graphs, where launches cost something."""
    now, graphed = speed.now.seconds, speed.graphed_s
    if graphed is None or graphed > (1 - LEAST_FASTER) * now:
        return []
    text = (
        f'with CUDA graphs (torch.compile, mode="reduce-overhead") at best {duration(graphed)}, '
        "if no kernel waits for its launch"
    )
    return [wrapped(text, "  launches  ", " " * 12)]


def _paced(speed: Speed) -> list[str]:
    """What lower clocks of the CPU do to a call, from the least to the most, where they do
    something."""
    paced, now = speed.paced, speed.now.seconds
    if paced is None or not paced.slowed:
        return []
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
    return [wrapped(text, "  paced     ", " " * 12)]


def _curve(speed: Speed) -> list[str]:
    if not speed.curve:
        return []
    rows = []
    for step in _chosen(speed):
        mark = ""
        if step.batch_size == speed.knee:
            mark = f"; {percent(KNEE)} of the best: saturation"
        seconds, samples = duration(step.seconds), rate(step.samples_per_s or 0)
        rows.append((str(step.batch_size), seconds, samples, f"{step.bound}{mark}"))
    return table(rows, "rrrw", ("batch size", "a step", "samples/s", "limited by"))


def _chosen(speed: Speed) -> list[StepSpeed]:
    """Powers of two, the saturation batch size, and the largest; a selection where they are
    many."""
    curve = speed.curve
    powers = [
        each for each in curve if each.batch_size and not each.batch_size & (each.batch_size - 1)
    ]
    every = max(1, -(-len(powers) // _ROWS))
    wanted = {each.batch_size for each in powers[::-every]}
    wanted |= {speed.knee, curve[-1].batch_size, speed.now.batch_size}
    return [each for each in curve if each.batch_size in wanted]
