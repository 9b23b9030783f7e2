"""What of a script makes its steps slow, or is no part of them, with the lines it is on.

Lines of a script that run once for each sample or time step: loops on the GPU, whose operators
are too small for it.

Kernels in float64 of a step that is otherwise in float32: where they begin, and their cost.

What a training computes before its first step and in no later one: a policy that plays, texts
that are drawn, which a step's time leaves out.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.hardware.gpu_figures import is_made_up
from trainfit.results.findings import SAMPLING, Evidence, Finding, Fix, Place
from trainfit.results.runs.recording import PHASES, Recording
from trainfit.results.runs.steps import DTYPES
from trainfit.results.text import duration, percent
from trainfit.speed.step import HostedGpu, step_time
from trainfit.speed.work import COLUMNS, Work, one_off, steady

#: How often a line runs in a step, and what share of the step's operators such lines have.
_OFTEN: Final = 128
_SHARE: Final = 0.5
#: Where data is prepared, outside of the model.
_BEFORE_BACKWARD: Final = tuple(map(PHASES.index, ("setup", "input", "forward")))
#: How often in a forward pass: where a batch has as many samples, and else. A layer that is used
#: several times in a row is no such loop.
_SAMPLES: Final = 16
_ROUNDS: Final = 64
#: Lines that are named.
_NAMED: Final = 3
#: Operators of an optimizer's step, and their share of the step's, that are too many.
_OF_OPTIMIZER: Final = 256
_OPTIMIZERS_SHARE: Final = 0.4
_OPTIMIZER: Final = PHASES.index("optimizer")
_FORWARD: Final = PHASES.index("forward")
_BACKWARD: Final = PHASES.index("backward")


def loops_on_gpu(recording: Recording) -> Iterator[Finding]:
    """Lines that make most of a step's operators, one sample after another, before the model; or
    most of its forward pass, within the model."""
    step = recording.steps - 1
    if step < 1:
        return
    yield from _in_model(recording, step)
    yield from _in_optimizer(recording, step)
    operators = recording.alloc_op
    made_by = np.maximum(operators, 0)
    modules = recording.op_module[made_by].tolist()
    known = (operators >= 0) & (recording.alloc_line >= 0)
    of_step = known & (recording.op_step[made_by] == step)
    outside = np.array([module < 0 or not recording.strings[module] for module in modules], bool)
    of_data = of_step & outside & np.isin(recording.op_phase[made_by], _BEFORE_BACKWARD)
    runs = Counter(
        zip(
            recording.alloc_line[of_data].tolist(),
            recording.op_name[operators[of_data]].tolist(),
            strict=True,
        )
    )
    lines: Counter[int] = Counter()
    for (line, _), times in runs.items():
        if times >= _OFTEN:
            lines[line] += times
    total = int(np.count_nonzero(recording.op_step == step))
    made = lines.total()
    if not total or made < _SHARE * total:
        return
    places = [Place.parse(recording.strings[line]) for line, _ in lines.most_common(_NAMED)]
    yield Finding(
        "loop_on_gpu",
        "info",
        f"{percent(made / total)} of a step's {total:,} operators are of lines that run hundreds "
        f"of times in it: {', '.join(map(str, places))}",
        (Evidence("operators", f"{made:,} of {total:,}"),),
        "a loop over samples on the GPU: each operator is a launch of a few microseconds for one "
        "sample, however small",
        (
            Fix(
                "work on the whole batch at once (a random number for each sample, torch.where for "
                "conditions, torch.vmap)"
            ),
            Fix("or in the data set, by the DataLoader's workers, before it is moved to the GPU"),
        ),
        place=places[0],
    )


def _in_model(recording: Recording, step: int) -> Iterator[Finding]:
    """Findings on layers without parts of which what has some calls each in turn. A policy that is
    asked again and again has fewer backward passes."""
    operators, strings = recording.alloc_op, recording.strings
    made_by = np.maximum(operators, 0)
    of_step = (operators >= 0) & (recording.op_step[made_by] == step)
    modules = recording.op_module[made_by]
    # An operator over a list (the norms of all gradients) runs once, with many results; outside of
    # every module is what clips them.
    is_first = np.diff(operators, prepend=-1) != 0
    is_within = np.array(
        [module >= 0 and strings[module] != "" for module in modules.tolist()], bool
    )
    in_model = of_step & is_first & is_within & (recording.op_phase[made_by] == _FORWARD)
    paths = {strings[module] for module in set(modules[in_model].tolist())}
    wholes = {path[:end] for path in paths for end in _dots(path)}
    is_layer = np.array([strings[module] not in wholes for module in modules.tolist()], bool)
    of_layers = in_model & is_layer & (recording.alloc_line >= 0)
    runs = Counter(
        zip(
            recording.alloc_line[of_layers].tolist(),
            recording.op_name[operators[of_layers]].tolist(),
            modules[of_layers].tolist(),
            strict=True,
        )
    )
    backward = int(np.count_nonzero(of_step & (recording.op_phase[made_by] == _BACKWARD)))
    makeup = recording.makeup
    passes = (makeup.accumulation if makeup is not None else None) or 1
    samples = makeup.micro_batch if makeup is not None else None
    all_of = Counter(recording.alloc_line[in_model].tolist())
    lines: Counter[int] = Counter()
    rounds: list[int] = []
    for (line, _, _), number in runs.items():
        times = number // passes
        if times >= (_SAMPLES if times == samples else _ROUNDS):
            lines[line] = all_of[line]
            rounds.append(times)
    total, made = int(np.count_nonzero(in_model)), lines.total()
    if not made or made < _SHARE * total or backward < _SHARE * made:
        return
    places = [Place.parse(strings[line]) for line, _ in lines.most_common(_NAMED)]
    of_samples = min(rounds) == samples
    yield Finding(
        "loop_in_model",
        "info",
        f"{percent(made / total)} of the forward pass are operators that run {min(rounds):,} times "
        + ("in it, as many as a batch has samples: " if of_samples else "in it: ")
        + ", ".join(map(str, places)),
        (Evidence("rounds", str(min(rounds))), Evidence("operators", f"{made:,} of {total:,}")),
        "a loop of Python on the GPU: each operator is a launch of a few microseconds, however "
        "small it is, forwards and backwards",
        (_OF_SAMPLES, _OF_TIME, _COMPILED) if of_samples else (_OF_TIME, _OF_SAMPLES, _COMPILED),
        place=places[0],
    )


def _in_optimizer(recording: Recording, step: int) -> Iterator[Finding]:
    """PyTorch's optimizers need some ten operators for all tensors of a group together."""
    of_step = recording.op_step == step
    own = int(np.count_nonzero(of_step & (recording.op_phase == _OPTIMIZER)))
    total = int(np.count_nonzero(of_step))
    if own < _OF_OPTIMIZER or own < _OPTIMIZERS_SHARE * total:
        return
    makeup, name = recording.makeup, recording.header.get("optimizer") or "the optimizer"
    yield Finding(
        "optimizer_in_pieces",
        "info",
        f"{percent(own / total)} of a step's {total:,} operators are those of {name}: it works on "
        "one tensor after another",
        (Evidence("operators of its step", f"{own:,} of {total:,}"),),
        "a group for each parameter, foreach=False, or an optimizer that is written as a loop over "
        "tensors: each operator is a launch of a few microseconds, however small it is",
        (
            Fix(
                "one parameter group for all parameters with the same settings (learning rate, "
                "weight decay), not one for each; fused=True or foreach=True of PyTorch",
                line="torch.optim.AdamW(model.parameters(), lr=lr, fused=True)",
            ),
            Fix("of an optimizer of your own: torch.compile(optimizer.step), which fuses them"),
        ),
        place=Place.parse(makeup.where) if makeup is not None else None,
    )


def _dots(path: str) -> list[int]:
    return [place for place, letter in enumerate(path) if letter == "."]


_OF_SAMPLES: Final = Fix(
    "over samples: give the layers the whole batch at once (x.flatten(0, 1) and back, padding with "
    "a mask for samples of different lengths, torch.vmap)"
)
_OF_TIME: Final = Fix(
    "over time: nn.LSTM or nn.GRU of the whole sequence in place of a cell for each step; what "
    "does not need the step before (projections of the inputs) in one call before the loop"
)
_COMPILED: Final = Fix(
    "torch.compile, or CUDA graphs (torch.cuda.make_graphed_callables) of a round: one launch for "
    "many"
)


#: The part of a step that float64 must cost (no outside source).
_FLOAT64_SHARE: Final = 0.05
_FLOAT64, _FLOAT32 = DTYPES.index("float64"), DTYPES.index("float32")
_DTYPE: Final = COLUMNS.index("dtype")
_BYTES: Final = [COLUMNS.index(name) for name in ("read", "written")]


def float64_on_gpu(recording: Recording, machine: HostedGpu) -> Iterator[Finding]:
    """What a step would save if its kernels in float64 were in float32, and the line at which they
    begin: a loss of ``logits.double()``, targets that came from NumPy, constants in float64."""
    if not recording.steps or is_made_up(machine.gpu, "fp32_flops"):
        return
    work = Work.of_steady_step(recording)
    wide = work.table[:, _DTYPE] == _FLOAT64 if len(work.table) else np.zeros(0, bool)
    if not wide.any():
        return
    table = work.table.copy()
    table[wide, _DTYPE] = _FLOAT32
    table[np.ix_(wide, np.array(_BYTES))] //= 2
    now_s = step_time(work, machine).seconds
    then_s = step_time(dataclasses.replace(work, table=table), machine).seconds
    if now_s - then_s < _FLOAT64_SHARE * now_s:
        return
    yield Finding(
        "float64_on_gpu",
        "warning",
        f"{np.count_nonzero(wide):,} of a step's {len(wide):,} kernels compute in float64: the "
        f"step needs {duration(now_s)}, in float32 {duration(then_s)} (predicted)",
        (Evidence("in float32", then_s / now_s, "of the step"),),
        "float64 has twice the bytes, and GPUs but those of data centers compute it 32 to 64 times "
        "slower; a tensor of NumPy's default type, or a .double(), brings all that is computed "
        "with it to float64, and its gradients too",
        (
            Fix("x.float() before it is used; a sum that needs more digits: x.sum(dtype=…) alone"),
            Fix("array.astype(np.float32) in the data set, torch.tensor(…, dtype=torch.float32)"),
        ),
        confidence="likely",
        place=_first_line(recording),
    )


def _first_line(recording: Recording) -> Place | None:
    """The line of the step's first operator in float64 that made something."""
    step = steady(recording)
    work = Work.of_step(recording, step)
    begins = np.flatnonzero(recording.op_step == step)
    wide = work.op[work.table[:, _DTYPE] == _FLOAT64]
    known = np.isin(recording.alloc_op, wide + int(begins[0])) & (recording.alloc_line >= 0)
    lines = recording.alloc_line[known]
    return Place.parse(recording.strings[int(lines[0])]) if len(lines) else None


#: Times that the same layer computes in a row, of those that a step has, that are a sampling; and
#: its time in steps (no outside source).
_CALLS: Final = 32
_TIMES: Final = 8
#: Operators that draw what a policy or a model of texts gives.
_RANDOM: Final = re.compile(r"aten\.(?:multinomial|normal|bernoulli|exponential|rand|poisson)")


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
