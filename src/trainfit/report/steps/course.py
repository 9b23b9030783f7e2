"""The course of memory from step to step, in words."""

from __future__ import annotations

from trainfit.results.format import count, size
from trainfit.results.runs.steps import GrowthSource, StepPattern
from trainfit.results.text import printable, wrapped

_KINDS = {"activation": "activations", "input": "inputs", "temporary": "temporaries"}


def steps_section(pattern: StepPattern) -> str:
    """What was seen of the steps, whatever it is."""
    lines = [_settled(pattern)] if pattern.course == "settled" else pattern_notes(pattern)
    lines += [f"- in addition {_source(source)}" for source in pattern.sources[1:]]
    return "\n".join(["Over the steps", *(wrapped(line, "  ", "    ") for line in lines)])


def pattern_notes(pattern: StepPattern | None) -> list[str]:
    """Warnings about the figures; nothing if memory has settled."""
    if pattern is None or pattern.course == "settled":
        return []
    if pattern.course == "growing":
        return [_growing(pattern)]
    if pattern.course == "irregular":
        return [_irregular(pattern)]
    if pattern.steps < 3:
        seen = count(pattern.steps, "optimizer step")
        return [
            f"{seen} cannot show whether memory settles: the figures are for the simulated steps; "
            "simulate at least 3"
        ]
    return [
        f"{count(pattern.steps, 'optimizer step')} that differ cannot show whether memory "
        "settles, grows or varies: leave out --steps, or raise it"
    ]


def only_seen(pattern: StepPattern | None) -> str:
    """What limits figures for other batch sizes: to go on in a title with."""
    if pattern is None or pattern.course == "settled":
        return ""
    return f"; for the {count(pattern.steps, 'simulated step')} only"


def _settled(pattern: StepPattern) -> str:
    seen, first = pattern.steps, pattern.settled_from
    if pattern.period == 1:
        return f"memory has settled: from step {first} on all use the same ({seen} simulated)"
    return (
        f"memory has settled: from step {first} on it repeats every {pattern.period} steps "
        f"({seen} simulated)"
    )


def _growing(pattern: StepPattern) -> str:
    growth = pattern.growth_bytes_per_step or 0
    if pattern.unit == "model call":
        return _growing_cache(pattern, growth)
    text = (
        f"memory does not settle: it grows by {size(growth)} with each optimizer step, and the "
        f"figures are for the first {pattern.steps} only"
    )
    if pattern.steps_until_full is not None:
        text += f"; the GPU would be full after about {pattern.steps_until_full:,} steps"
    if pattern.sources:
        text += f"; the script keeps {_source(pattern.sources[0])}"
    return text + "; keep numbers or CPU copies instead (loss.item(), output.detach().cpu())"


def _growing_cache(pattern: StepPattern, growth: int) -> str:
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
