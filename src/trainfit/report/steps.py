"""What was simulated, step by step, as text: the make-up of a step, its course, what was seen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from trainfit.results.configuration import BatchShapes, Configuration
from trainfit.results.runs.steps import (
    LONG_TRAINING,
    Coverage,
    GrowthSource,
    StepMakeup,
    StepPattern,
)
from trainfit.results.text import count, duration, percent, printable, size

# ---
# The course of memory from step to step, in words.


#: A share of a peak that nobody would choose another batch size for.
_SAME: Final = 0.01
#: How much more than the copies of its weights autocast may need for them: blocks are rounded.
_OF_COPIES: Final = 1.25

_KINDS = {"activation": "activations", "input": "inputs", "temporary": "temporaries"}


def pattern_lines(pattern: StepPattern) -> list[str]:
    """What was seen of the steps, whatever it is."""
    lines = [_settled(pattern)] if pattern.course == "settled" else pattern_notes(pattern)
    if _is_even(pattern):
        lines = [
            f"memory differs by less than {percent(_SAME)} from step to step "
            f"({pattern.steps} simulated)"
        ]
    if pattern.course == "growing" and pattern.text_calls is not None:
        lines = [_growing(pattern)]
    elif _is_slow(pattern):
        lines = [_growing_slowly(pattern)]
    return [*lines, *(f"in addition {_source(source)}" for source in pattern.sources[1:])]


def pattern_notes(pattern: StepPattern | None) -> list[str]:
    """Warnings about the figures; nothing if memory has settled."""
    if pattern is None or _is_reliable(pattern):
        return []
    if pattern.course == "growing":
        return [_growing(pattern)]
    if pattern.course == "irregular":
        return [_irregular(pattern)]
    if pattern.steps < 3:
        seen = count(pattern.steps, pattern.unit)
        return [
            f"{seen} cannot show whether memory settles: the figures are for the simulated steps; "
            "simulate at least 3"
        ]
    return [
        f"{count(pattern.steps, pattern.unit)} that differ cannot show whether memory "
        "settles, grows or varies: the figures are for these; more can, where the script makes "
        "more (--steps)"
    ]


def only_seen(pattern: StepPattern | None) -> str:
    """What limits figures: to go on in a title with."""
    if pattern is None or _is_reliable(pattern):
        return ""
    if pattern.freed_every:
        return f"; {size(pattern.grows_by_bytes or 0)} more at the end of an epoch"
    if pattern.grows_by_bytes is not None and pattern.steps_until_full is None:
        return f"; {size(pattern.grows_by_bytes)} more when the buffer that it fills is full"
    if pattern.course == "growing" and pattern.growth_bytes_per_step:
        return f"; {size(pattern.growth_bytes_per_step)} more with each further {pattern.unit}"
    return f"; for the {count(pattern.steps, 'simulated step')} only"


def _is_reliable(pattern: StepPattern) -> bool:
    """Are the figures those of any further step, too?"""
    if pattern.course == "settled" or pattern.text_calls is not None or _is_even(pattern):
        return True
    return _is_slow(pattern)


def _is_slow(pattern: StepPattern) -> bool:
    """Is what steps leave behind too little to matter? A cache's calls have an end, but need all of
    it until then."""
    is_cache = pattern.unit == "model call" and _is_cache(pattern)
    return (pattern.grows_slowly or _ends_soon(pattern)) and not is_cache


def _ends_soon(pattern: StepPattern) -> bool:
    """Is what it grows by in all next to nothing of what a step needs?"""
    more, peaks = pattern.grows_by_bytes, pattern.peak_bytes
    return more is not None and bool(peaks) and more < _SAME * max(peaks)


def _is_even(pattern: StepPattern) -> bool:
    """Is the memory that steps differ in next to nothing of what they need? The first step has the
    optimizer's state to make: it counts if it is the largest."""
    peaks = pattern.peak_bytes
    is_known = pattern.course == "irregular" and len(peaks) > 1
    return is_known and max(peaks) - min(peaks[1:]) < _SAME * max(peaks)


def _settled(pattern: StepPattern) -> str:
    steps, first = pattern.steps, pattern.settled_from
    if pattern.period == 1:
        return f"memory has settled: from step {first} on all use the same ({steps} simulated)"
    return (
        f"memory has settled: from step {first} on it repeats every {pattern.period} steps "
        f"({steps} simulated)"
    )


def _growing(pattern: StepPattern) -> str:
    growth = pattern.growth_bytes_per_step or 0
    if pattern.unit == "model call" and _is_cache(pattern):
        return _growing_cache(pattern, growth)
    if pattern.freed_every:
        return (
            f"memory grows by {size(growth)} with each {pattern.unit}, and an epoch's end (after "
            f"{count(pattern.freed_every, 'step')}) frees it: the figures are for the first "
            f"{pattern.steps}, the last of an epoch needs {size(pattern.grows_by_bytes or 0)} more"
        )
    text = (
        f"memory does not settle: it grows by {size(growth)} with each {pattern.unit}, and the "
        f"figures are for the first {pattern.steps} only"
    )
    if pattern.steps_until_full is not None:
        calls = "calls" if pattern.unit == "model call" else "steps"
        text += f"; the GPU would be full after about {pattern.steps_until_full:,} {calls}"
    elif pattern.grows_by_bytes is not None:
        text += f"; it ends with {size(pattern.grows_by_bytes)} more, when what keeps it is full"
    if pattern.sources:
        text += f"; the script keeps {_source(pattern.sources[0])}"
    if pattern.unit == "model call" and pattern.sources and pattern.sources[0].module:
        text += (
            "; what a forward pass computes for a backward pass stays with its results: put the "
            "calls under torch.no_grad()"
        )
    return text + "; keep numbers or CPU copies instead (loss.item(), output.detach().cpu())"


def _growing_slowly(pattern: StepPattern) -> str:
    growth = pattern.growth_bytes_per_step or 0
    text = f"memory grows by {size(growth)} with each {pattern.unit} ({pattern.steps} simulated), "
    if _ends_soon(pattern):
        text += f"{size(pattern.grows_by_bytes or 0)} in all"
    else:
        text += f"{size(growth * LONG_TRAINING)} in {LONG_TRAINING:,}"
    return text + "".join(f"; the script keeps {_source(it)}" for it in pattern.sources[:1])


def _is_cache(pattern: StepPattern) -> bool:
    """Is what calls leave behind made within the model, as a cache is? What is made outside of it
    is what an evaluation keeps of its results."""
    if pattern.text_calls is not None or not pattern.sources:
        return True
    source = pattern.sources[0]
    if source.kind == "kv_cache":
        return True
    return bool(source.module) and not source.is_of_graph


def _growing_cache(pattern: StepPattern, growth: int) -> str:
    if pattern.text_calls is not None:
        return (
            f"memory grows by {size(growth)} with each model call, as the KV cache of generated "
            f"text does: the figures are for its end, after {count(pattern.text_calls, 'call')}"
        )
    text = (
        f"memory grows by {size(growth)} with each model call, as the KV cache of generated text "
        f"does: the figures are for the end of the {count(pattern.steps, 'call')} simulated, and "
        f"each further call (a longer prompt, more new tokens) needs {size(growth)} more"
    )
    if pattern.steps_until_full is not None:
        text += f"; the GPU would be full after about {pattern.steps_until_full:,} calls"
    return text


def _irregular(pattern: StepPattern) -> str:
    peaks = pattern.peak_bytes
    largest = peaks.index(max(peaks)) + 1
    return (
        "memory differs from step to step without a pattern: the peaks of "
        f"{pattern.steps} steps lie between {size(min(peaks[1:]))} and {size(max(peaks))} (step "
        f"{largest}); the figures are the largest of these, and larger batches (longer sequences, "
        "larger images) need more; use the largest first, or simulate more with --steps"
    )


def _source(source: GrowthSource) -> str:
    """One source of growth: bytes a step, what, by whom, where."""
    kind = _KINDS.get(source.kind, source.kind.replace("_", " "))
    text = f"{size(source.bytes_per_step)} a step of {kind} made by {printable(source.operator)}"
    if source.module:
        text += f" in {printable(source.module)}"
    if source.line is not None:
        text += f" ({printable(source.line)})"
    return text


# ---
# The composition of an optimizer step as text.


def step_lines(makeup: StepMakeup | None) -> list[str]:
    """One line each, not wrapped: micro-batch × accumulation, and how far the steps differed.

    None where a step is one batch, or where no operation was counted.
    """
    if makeup is None:
        return []
    if makeup.effective_batch is None:
        return [f"samples of an optimizer step: not known; {printable(makeup.why)}"]
    if makeup.accumulation == 1:
        several = (makeup.loader_batches or 1) > 1
        samples = f"= {makeup.effective_batch} samples"
        return [f"{makeup.loader_batches} batches of the DataLoader {samples}"] if several else []
    samples = f"effective batch {makeup.effective_batch}"
    if makeup.processes > 1:  # each with samples of its own
        samples = f"{makeup.effective_batch} samples of each of {makeup.processes} processes"
    product = f"micro-batch {makeup.micro_batch} × accumulation {makeup.accumulation}"
    lines = [f"{product} = {samples}"]
    if len(set(makeup.per_step)) > 1:
        lines.append(f"micro-batches of the simulated steps: {_runs(makeup.per_step)}")
    return lines


def _runs(values: tuple[int, ...]) -> str:
    """4, 4, 4, 2 as "3 × 4, 2"."""
    lengths = [(value, len(list(same))) for value, same in groupby(values)]
    return ", ".join(f"{times} × {value}" if times > 1 else str(value) for value, times in lengths)


# ---
# What was among the simulated steps, as one line.


#: Steps of an epoch up to which simulating one of them whole is worth a word.
_REACHABLE = 2000

#: By whether an evaluation, and a checkpoint, were seen.
_SEEN = {
    (True, True): "evaluation and checkpoint",
    (True, False): "evaluation but no checkpoint",
    (False, True): "checkpoint but no evaluation",
    (False, False): "no evaluation or checkpoint",
}


def coverage_text(coverage: Coverage | None, steps: int, what: str = "step") -> str:
    """What was simulated, and how to reach what was not; empty where nobody looked, and of calls
    of what does not train, which have no evaluation."""
    if coverage is None or what == "call":
        return ""
    text = f"{_SEEN[coverage.evaluated, coverage.saved]} in {count(steps, what)}"
    epoch = coverage.steps_per_epoch
    if (coverage.evaluated and coverage.saved) or epoch is None:
        return text
    if steps > epoch:
        return f"{text} (an epoch has {count(epoch, what)})"
    if coverage.most_steps is not None and coverage.most_steps <= epoch:
        return f"{text}; the training has {count(coverage.most_steps, what)}"
    if epoch <= _REACHABLE:
        return f"{text}; --steps {epoch + 1} ends an epoch"
    return f"{text} (an epoch has {epoch:,}; see --steps)"


def unseen_text(coverage: Coverage | None, pattern: StepPattern | None, steps: int) -> str:
    """What a memory figure of these steps is not for, in the words that end a headline; empty where
    an evaluation and a checkpoint were among them, or the whole script, or nobody looked."""
    if coverage is None or coverage.is_whole or (coverage.evaluated and coverage.saved):
        return ""
    if pattern is not None and pattern.unit == "model call":
        return ""
    if steps > (coverage.steps_per_epoch or steps):
        return ""
    return f"; {_SEEN[coverage.evaluated, coverage.saved]} in {count(steps, 'step')}"


def eager_text(coverage: Coverage | None) -> str:
    """A clause that says that a figure is without ``torch.compile``, in the words that follow it;
    else empty."""
    eager = coverage is not None and coverage.is_eager
    return " in eager mode (torch.compile is left out)" if eager else ""


# ---
# Batches that differ in shape, as one line.


def largest_text(shapes: BatchShapes | None) -> str:
    """For which batches a memory figure is, in the words that end a headline; empty where all have
    one shape."""
    if shapes is None:
        return ""
    if shapes.reason:
        return f" with the batches seen; cannot tell for larger ones: {shapes.reason}"
    part = _looked_at(shapes)
    if shapes.longest is None and not _differ(shapes):
        return f" with samples like {part} looked at"
    return f" with the largest batch of {part}" if part else " with the data set's largest batch"


def shapes_text(shapes: BatchShapes | None) -> str:
    """Typical and longest sample, and what the largest batch needs; empty where none differ."""
    if shapes is None:
        return ""
    if shapes.reason:
        return f"sized by the batches seen; larger ones not known: {shapes.reason}"
    part = _looked_at(shapes)
    if shapes.longest is None:
        more = "--thorough looks at more"
        if _differ(shapes):
            return f"the largest batch of {part} looked at needs no more than those seen ({more})"
        return f"one size in the {part} looked at ({more})"
    text = "batches differ"
    median, longest = shapes.median_elements, shapes.longest_elements
    # A packed sample has an element more for each text in it: the largest batch may have fewer.
    if median is not None and longest is not None and median <= longest:
        of = f", of {part} looked at" if part else ""
        text = f"samples of {median:,} (median) to {longest:,} elements{of}"
    fits = "" if shapes.longest_fits else ", DOES NOT FIT"
    text += f"; the largest batch: {size(shapes.longest.device_bytes)}{fits}"
    if shapes.longest_step_s is not None:
        text += f", {duration(shapes.longest_step_s)}"
    return text


def _differ(shapes: BatchShapes) -> bool:
    """Do its samples, whether that matters to memory or not?"""
    return shapes.median_elements != shapes.longest_elements


def _looked_at(shapes: BatchShapes) -> str:
    """How many samples were looked at, where that is not all."""
    if shapes.looked_at is None or shapes.looked_at == shapes.samples:
        return ""
    whole = "" if shapes.samples is None else f" of {shapes.samples:,}"
    return f"{shapes.looked_at:,}{whole} samples"


# ---
# Allocated memory over one step, as a line of blocks.


_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 72


def timeline_section(timeline: Sequence[int], phases: Sequence[str] = ()) -> str:
    """One line of blocks, the highest of each part; below it the phases, if they are known."""
    if not timeline:
        return ""
    columns = min(_COLUMNS, len(timeline))
    edges = [round(i * len(timeline) / columns) for i in range(columns + 1)]
    parts = [(a, b) for a, b in itertools.pairwise(edges) if b > a]
    heights = [max(timeline[a:b]) for a, b in parts]
    low, high = min(heights), max(heights)
    span = max(high - low, 1)
    bars = "".join(_BARS[(h - low) * (len(_BARS) - 1) // span] for h in heights)
    lines = [f"{size(low)} to {size(high)}", bars]
    if len(phases) == len(timeline):
        lines.append(_phase_line([phases[(a + b) // 2] for a, b in parts]))
    return "\n".join(lines)


def _phase_line(phases: Sequence[str]) -> str:
    """Each phase's name under its part of the line, cut to what fits."""
    text = ""
    for phase, group in itertools.groupby(phases):
        width = len(list(group))
        text += ("|" + phase)[:width].ljust(width)
    return text.rstrip()


def half_text(*both: Configuration) -> str:
    """A sentence for a job of which autocast needs more memory than float32 at one batch size: its
    copies of the weights are half as large as these, where they are in float32."""
    half, whole = sorted(both, key=lambda each: each.amp == "off")
    bytes_of_half, bytes_of_whole = half.memory.device_bytes, whole.memory.device_bytes
    if half.batch_size != whole.batch_size or bytes_of_half <= (1 + _SAME) * bytes_of_whole:
        return ""
    more = bytes_of_half - bytes_of_whole
    copies = max(each.by_kind_bytes.get("parameters", 0) for each in both) / 2
    reason = ", for its copies of the weights" if more <= _OF_COPIES * copies else ""
    return f"; {half.amp} needs {size(more)} more{reason}"
