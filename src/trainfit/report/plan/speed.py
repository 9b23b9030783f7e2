"""How fast a job is, as text; the answer of a plan in one or two sentences."""

from __future__ import annotations

from trainfit.report.layout import table
from trainfit.results.changes import LEAST_FASTER
from trainfit.results.loader import BUSY
from trainfit.results.plan import PlanResult, run_rate
from trainfit.results.speed import KNEE, RunRate, Speed, StepSpeed
from trainfit.results.text import count, duration, percent, printable, rate, size, wrapped


def answer(result: PlanResult) -> str:
    """Fits or not, the largest batch size, the recommended one, and how fast that is."""
    return " ".join(part for part in (_fits(result), _batches(result)) if part)


def _fits(result: PlanResult) -> str:
    now, chosen = result.now, result.chosen
    need, there = size(now.memory.device_bytes), size(result.gpu_memory_bytes)
    at = ""
    if now.batch_size and (now.batch_size != chosen.recommended_batch or chosen is not now):
        at = f" at batch size {now.batch_size}"
    if chosen is not now:
        at += f" with AMP {now.amp}"
    if now.fits and (until := full_after(result)) is not None:
        return f"Fits at first: {need} of {there}{at}, but memory grows: full after about {until}."
    if now.fits:
        return f"Fits: {need} of {there}{at}."
    only = " (no simulated size fits)" if now.largest_batch == 0 else ""
    return f"Does not fit: needs {need} of {there}{at}{only}."


def _batches(result: PlanResult) -> str:
    chosen = result.chosen
    best, limits = chosen.recommended_batch, chosen.limits
    if result.now.fits and full_after(result) is not None:
        return "No batch size is recommended."
    amp = f" with AMP {chosen.amp}" if chosen is not result.now else ""
    if chosen.largest_batch is None:
        if best:
            return f"Recommended batch {best}{amp}{_speed(result)}."
        return f"Other batch sizes are not known{_speed(result)}."
    if chosen.largest_batch == 0:
        return f"Not even one sample fits{amp}."
    more = "at least " if limits is not None and limits.at_least else ""
    largest = f"Largest batch {more}{chosen.largest_batch}"
    if more and limits is not None and not limits.is_data_set(chosen.largest_batch):
        largest += " (larger ones not simulated)"
    if result.samples is not None and chosen.largest_batch >= result.samples:
        largest = f"Any batch size fits (the data set has {result.samples} samples)"
    if best:
        return f"{largest}, recommended {best}{amp}{_speed(result)}."
    why = ": none leaves the safety margin" if best == 0 else ""
    return f"{largest}, none recommended{why}."


def full_after(result: PlanResult) -> str | None:
    """When the GPU is full, where memory grows by too much for a batch size to be recommended."""
    pattern = result.pattern
    if pattern is None or pattern.course != "growing" or pattern.unit != "optimizer step":
        return None
    if result.chosen.recommended_batch or pattern.steps_until_full is None:
        return None
    return count(pattern.steps_until_full, "optimizer step")


def _speed(result: PlanResult) -> str:
    """How fast the run will be at the recommended batch size, else at the current one."""
    run = run_rate(result)
    if run is None:
        return ""
    what = "call" if result.inference is not None else "step"
    least, most = ("at least ", "at most ") if run.is_bound else ("", "")
    samples = f", {most}{rate(run.samples_per_s)} samples/s" if run.samples_per_s else ""
    return f" ({least}{duration(run.step_s)} a {what}{samples}{limit_text(run)})"


def limit_text(run: RunRate) -> str:
    """What is to be said of the DataLoader next to a run's rate; empty where it keeps up."""
    if run.limit == "loader":
        alone = f"need {duration(run.gpu_step_s)}"
        if run.gpu_samples_per_s:
            alone = f"do {rate(run.gpu_samples_per_s)}"
        marked = f", {BUSY}" if run.loader == "busy" else ""
        return f": the DataLoader is the limit{marked}; the GPU alone would {alone}"
    if run.limit == "gpu only":
        return "; GPU step only: the DataLoader was not measured"
    return "; GPU step only: the DataLoader's rate is not known" if run.limit == "unknown" else ""


def step_at(result: PlanResult, batch: int | None) -> StepSpeed | None:
    """The step at this batch size, where it is known."""
    return result.speed.at(batch) if result.speed is not None else None


# ---
# How fast a job is, as text.


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
    if now.wide_for:
        first += f", wide for {' and '.join(now.wide_for)}"
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
