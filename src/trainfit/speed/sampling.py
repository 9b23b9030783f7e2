"""What a training computes before its first step and in no later one: a policy that plays, texts
that are drawn, which a step's time leaves out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.hardware.gpu.figures import is_made_up
from trainfit.results.findings import SAMPLING, Evidence, Finding, Fix, Place
from trainfit.results.runs.recording import PHASES, Recording
from trainfit.results.text import duration
from trainfit.speed.step import HostedGpu, step_time
from trainfit.speed.work import Work, one_off

#: Times that the same layer computes in a row, of those that a step has, that are a sampling; and
#: its time in steps (no outside source).
_CALLS: Final = 32
_TIMES: Final = 8
#: Operators that draw what a policy or a model of texts gives.
_RANDOM: Final = re.compile(r"aten\.(?:multinomial|normal|bernoulli|exponential|rand|poisson)")
_FORWARD: Final = PHASES.index("forward")


def sampling_before_step(recording: Recording, machine: HostedGpu) -> Iterator[Finding]:
    """Calls of a model one after another before the first step, without a backward pass of their
    own, and the line that has most of them. An evaluation is none."""
    last = recording.steps - 1
    if last < 1 or is_made_up(machine.gpu, "fp32_flops"):
        return
    makeup = recording.makeup
    if (makeup is not None and makeup.loader_batches) or _draws(recording) < _CALLS:
        return  # what goes over data before the training is an evaluation
    calls, place = _calls(recording, last)
    if calls < _CALLS:
        return
    first = Work.of_step(recording, 0).without(one_off(recording)[recording.op_step == 0])
    steady = Work.of_step(recording, last)
    if not len(steady.table) or not len(first.table):
        return
    step_s = step_time(steady, machine).seconds
    sampled_s = step_time(first, machine).seconds - step_s
    if sampled_s < _TIMES * step_s:
        return
    yield Finding(
        SAMPLING,
        "info",
        f"{calls:,} calls of models in a row come before a step and need {duration(sampled_s)}, "
        f"the step itself {duration(step_s)} (predicted): times and rates of steps leave the "
        "sampling out, and what an environment needs, too",
        (Evidence("calls", str(calls)), Evidence("sampling", sampled_s, "s")),
        "each call has a few samples and is a handful of launches, and reading its result waits "
        "for the GPU",
        (
            Fix("many environments at once, one call of the model for all (gymnasium.vector)"),
            Fix("a small policy samples faster on the CPU: a copy of it there, renewed each round"),
        ),
        confidence="likely",
        place=place,
        subject=f"{duration(sampled_s)} of {calls:,} calls",
    )


def _draws(recording: Recording) -> int:
    """How often something is drawn before the first step and in it, parameters aside."""
    names = recording.op_name[(recording.op_step == 0) & (recording.op_phase == _FORWARD)]
    drawn = [bool(_RANDOM.match(text)) for text in recording.strings]
    return sum(drawn[name] for name in names.tolist())


def _calls(recording: Recording, last: int) -> tuple[int, Place | None]:
    """How often one layer computes before the first step, of what the ``last`` step has few of."""
    trains = (recording.op_phase == _FORWARD) & (recording.op_module >= 0)
    trains &= ~recording.in_evaluation()
    first, later = (
        Counter(
            zip(
                recording.op_name[mine].tolist(),
                recording.op_module[mine].tolist(),
                strict=True,
            )
        )
        for mine in (trains & (recording.op_step == step) for step in (0, last))
    )
    # Of an operator that a layer calls several times, as many calls as of its rarest.
    by_module: dict[int, int] = {}
    for (name, module), times in first.items():
        more = times - later[name, module]
        if recording.strings[module] and more >= _TIMES * max(1, later[name, module]):
            by_module[module] = min(more, by_module.get(module, more))
    if not by_module:
        return 0, None
    made = recording.alloc_op
    of_calls = (made >= 0) & (recording.alloc_line >= 0)
    of_calls &= (trains & (recording.op_step == 0))[np.maximum(made, 0)]
    lines = Counter(recording.alloc_line[of_calls].tolist())
    place = Place.parse(recording.strings[lines.most_common(1)[0][0]]) if lines else None
    return max(by_module.values()), place
