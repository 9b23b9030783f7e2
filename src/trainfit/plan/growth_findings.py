"""Memory that a training leaves behind by step or by epoch, with the line that makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from trainfit.findings.out_of_memory import TENSORS_KEPT
from trainfit.memory.growth import left_by_epochs
from trainfit.plan.sizing.memory_model import Growth
from trainfit.results.configuration import EpochEnd
from trainfit.results.findings import EPOCH_GROWTH, Evidence, Finding, Fix, Place
from trainfit.results.memory import RecordingSummary
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.steps import GrowthSource, StepPattern
from trainfit.results.text import count, size

_KEEP_LESS = Fix(
    "keep numbers, or copies on the CPU: `.detach().cpu()` before it is kept, `.item()` of a "
    "loss; empty the list, or reset the metric, once it is used"
)
_CLEAR = Fix(
    "empty the list (or reset the metric) once an epoch's evaluation has used it: outputs.clear(); "
    "keep numbers, or .detach().cpu()"
)
_COPY_LESS = Fix(
    "of a model's copies keep one instead of each epoch's, on the CPU: "
    "{name: it.cpu() for name, it in model.state_dict().items()}, or write it to a file"
)


#: torch/autograd/__init__.py warns of it.
_IN_A_CIRCLE = (
    "backward(create_graph=True): each parameter has a gradient whose graph has the parameter, and "
    "neither is freed"
)
_NO_CIRCLE = Fix(
    "torch.autograd.grad(loss, inputs, create_graph=True) instead of backward(); or set gradients "
    "to None after the step (zero_grad(set_to_none=True))"
)


_ON_CPU = Fix(
    "keep the buffer on the CPU (images as uint8) and move the batch that is drawn from it; or a "
    "smaller buffer"
)


#: What keeps tensors from step to step, and is told with its own line.
_KEEPERS: Final = frozenset(
    ("graph_grows", "graphs_kept", "result_on_context", "hooks_added", "parameters_added")
)
#: Of a script's text: a model that each epoch makes, and a list that keeps one of each pass.
_REMADE: Final = "model-each-epoch"
_FROZEN: Final = "mostly_frozen"
_MODELS_KEPT: Final = "models-kept"
_WITHOUT_GRAPH = Fix(
    "with torch.no_grad(): around the calls (or torch.inference_mode())",
    line="with torch.no_grad():",
)
_DETACHED = Fix("`.detach()` of what one call gives to the next, where gradients are wanted")


def told_once(findings: Iterable[Finding], end: EpochEnd | None = None) -> Iterator[Finding]:
    """The findings without growth by epochs where the model is made in each of them, without the
    line that keeps a model of each where its growth was simulated, and without parameters that are
    frozen until ``end``, where it is a later epoch from which on the training needs more."""
    found = tuple(findings)
    is_remade = any(each.kind == _REMADE for each in found)
    grows_at = {str(each.at) for each in found if each.kind == EPOCH_GROWTH}
    for finding in found:
        is_effect = finding.kind == EPOCH_GROWTH and is_remade
        is_effect |= finding.kind == _FROZEN and end is not None and end.later is not None
        if not is_effect and not (finding.kind == _MODELS_KEPT and str(finding.at) in grows_at):
            yield finding


def of_calls(pattern: StepPattern) -> Iterator[Finding]:
    """What calls of a model without a backward pass leave behind, where that is a graph."""
    growth, source = pattern.growth_bytes_per_step, next(iter(pattern.sources), None)
    if pattern.unit != "model call" or not growth or source is None or not source.is_of_graph:
        return
    yield Finding(
        "calls_keep_graphs",
        "critical",
        f"Memory grows by {size(growth)} with each model call: graphs of past calls are kept",
        (Evidence("most of it", f"what {source.operator} makes in {source.module}"),),
        "gradients are on, and what is kept of a call (its result in a list, a hidden state that "
        "the next one gets) keeps all that a backward pass would need",
        (_WITHOUT_GRAPH, _DETACHED),
        place=Place.parse(source.line),
    )


def of_steps(
    pattern: StepPattern,
    growth: Growth,
    graphs_at: str | None = None,
    epoch: int | None = None,
    known: Iterable[Finding] = (),
) -> Iterator[Finding]:
    """What each optimizer step leaves behind, where ``growth`` is too much for a long training.

    ``graphs_at`` is the line of a backward pass that makes graphs of the gradients, if one does;
    ``epoch`` are the steps of an epoch whose end was not simulated and may free it (``None``: it
    was, or is not known). Nothing where one of those ``known`` says what keeps it.
    """
    if (
        not growth.is_large
        or not pattern.sources
        or any(finding.kind in _KEEPERS for finding in known)
    ):
        return
    text = f"Memory grows by {size(growth.bytes_per_step)} with each {pattern.unit}"
    if pattern.grows_by_bytes is not None:
        yield _buffer(text, pattern, pattern.grows_by_bytes)
        return
    found = _finding(TENSORS_KEPT, text, pattern.sources, _KEEP_LESS)
    if epoch:
        title = f"{text}, unless an epoch's end ({count(epoch, 'step')}) frees it"
        found = dataclasses.replace(found, title=title, severity="warning")
    if graphs_at is not None and found.place == Place.parse(graphs_at):
        found = dataclasses.replace(found, cause=_IN_A_CIRCLE, fixes=(_NO_CIRCLE,))
    yield found


def with_growth(summary: RecordingSummary) -> RecordingSummary:
    """The figures of a recording, with what each of its steps leaves behind."""
    if summary.pattern is None:
        return summary
    used = summary.memory.device_bytes + summary.other_processes_bytes
    growth = Growth.on(summary.pattern, summary.gpu_memory_bytes - used)
    epoch = summary.coverage.steps_per_epoch if summary.coverage is not None else None
    findings = of_steps(summary.pattern, growth, epoch=epoch, known=summary.findings)
    calls = of_calls(summary.pattern)
    return dataclasses.replace(summary, findings=(*calls, *summary.findings, *findings))


def _buffer(text: str, pattern: StepPattern, more: int) -> Finding:
    """The finding on what keeps tensors up to a number of them."""
    fits = pattern.steps_until_full is None
    finding = _finding(
        TENSORS_KEPT,
        f"{text}, until the list or deque that keeps it is full: by {size(more)}"
        + ("" if fits else ", which the GPU does not have"),
        pattern.sources,
        _ON_CPU,
    )
    return dataclasses.replace(finding, severity="info" if fits else "critical")


def of_epochs(recording: Recording, steps: int, free_bytes: int) -> Iterator[Finding]:
    """What each epoch leaves behind, in a recording of epochs of so many optimizer ``steps``."""
    left = left_by_epochs(recording, steps)
    if not left:
        return
    nbytes = sum(source.bytes_per_step for source in left)
    until = f"about {count(1 + max(0, free_bytes) // nbytes, 'epoch')}"
    text = f"Memory grows by {size(nbytes)} with each epoch: full after {until}"
    yield _finding(EPOCH_GROWTH, text, left, _CLEAR, _COPY_LESS, subject=until)


#: Peaks that differ by less are alike; an epoch that needs more by less is none that grows.
_ALIKE = 0.01


def of_longer_epochs(peaks: Sequence[int], steps: int, free_bytes: int) -> Iterator[Finding]:
    """What each epoch's steps need more than those of the epoch before: a size that depends on the
    epoch. ``peaks`` are those of the steps of three epochs of so many ``steps`` each; where steps
    of one epoch differ among themselves, it is the data that does."""
    first, second, third = (peaks[index * steps : (index + 1) * steps] for index in range(3))
    if len(third) < steps or steps < 2:
        return
    if any(max(each) > (1 + _ALIKE) * min(each) for each in (second, third)):
        return
    # The optimizer's state comes with the very first step.
    rises = second[0] - first[-1], third[0] - second[0]
    if rises[0] <= _ALIKE * first[-1] or rises[1] <= _ALIKE * second[0]:
        return
    until = f"about {count(3 + max(0, free_bytes) // rises[1], 'epoch')} at the latest"
    yield Finding(
        EPOCH_GROWTH,
        "critical",
        f"Each epoch's steps need {size(rises[1])} more than those of the epoch before: full "
        f"after {until}",
        (Evidence("peaks", ", ".join(size(each[-1]) for each in (first, second, third))),),
        "a size, a length or a number of layers that are trained follows the number of the epoch",
        (
            Fix(
                "plan with the values of the last epoch: `trainfit plan` sizes for what it is given"
            ),
        ),
        subject=until,
    )


def _finding(
    kind: str, text: str, sources: Sequence[GrowthSource], *fixes: Fix, subject: str = ""
) -> Finding:
    """``sources``: the largest first."""
    first = sources[0]
    made = f"{first.operator} in {first.module}" if first.module else first.operator
    place = Place.parse(first.line)
    phrase = f" at {place}" if place is not None else ""
    return Finding(
        kind,
        "critical",
        text,
        (Evidence("most of it", f"what {made} makes{phrase}"),),
        f"what is made{phrase} is kept in a list, an attribute, a metric or a sum",
        fixes,
        place=place,
        subject=subject,
    )
