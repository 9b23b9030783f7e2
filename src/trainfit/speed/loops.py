"""Lines of a script that run once for each sample or time step: loops on the GPU, whose operators
are too small for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from trainfit.results.findings import Evidence, Finding, Fix, Place
from trainfit.results.runs.recording import PHASES, Recording
from trainfit.results.text import percent

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
    is_within = np.array([each >= 0 and strings[each] != "" for each in modules.tolist()], bool)
    in_model = of_step & is_first & is_within & (recording.op_phase[made_by] == _FORWARD)
    paths = {strings[module] for module in set(modules[in_model].tolist())}
    wholes = {path[:end] for path in paths for end in _dots(path)}
    is_layer = np.array([strings[each] not in wholes for each in modules.tolist()], bool)
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
