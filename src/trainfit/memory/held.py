"""What a simulated GPU's memory consists of at its peak, as facts that its causes are told from."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np

from trainfit.findings.out_of_memory import KEPT_PASSES, FullMemory, HeldMemory, is_left_behind
from trainfit.memory.replay import Replay, live_at
from trainfit.results.findings import Place
from trainfit.results.runs.recording import (
    FREE,
    KINDS,
    MALLOC,
    PHASES,
    IntArray,
    Recording,
    step_around,
    step_ends,
)

_BACKWARD: Final = PHASES.index("backward")
_FORWARD: Final = PHASES.index("forward")
_TEMPORARY, _INPUT = KINDS.index("temporary"), KINDS.index("input")
#: Kinds of what is not computed; what stays for several steps is "data".
_GIVEN: Final = ("input", "data")
#: Types of weights of 32 bits and more, and of 16.
_WIDE: Final = ("float32", "float64")
_HALF: Final = ("float16", "bfloat16")
_PARAMETER: Final = KINDS.index("parameter")
#: Of a file's state, the share whose sizes are those of parameters.
_MOST_OF_MODEL: Final = 0.8
#: Operators that gradients are computed with, too: they do not tell that a forward pass runs again.
_BOTH_WAYS: Final = frozenset(
    ("mm", "bmm", "baddbmm", "mul", "add", "sub", "div", "neg", "sum", "clone", "cat", "_to_copy")
)
#: Operators that compute nothing, and those of other libraries that gather a model's shards: what
#: they make in a backward pass are parameters and buffers, not activations.
_COMPUTES_NOTHING: Final = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "as_strided", "view", "detach", "set_")
)
_GATHERS: Final = ("c10d.", "_c10d_functional.", "fsdp.")
#: Kinds of which something can be kept from step to step that should not be.
_KEEPABLE: Final = frozenset(KINDS.index(kind) for kind in ("activation", "temporary"))
#: How the models of the libraries' workspaces are called.
_LIBRARIES: Final = ("cublas", "cudnn", "cufft")
_LOSS: Final = "log_softmax"
#: Results of the same layer that are there at once, and layers with so many, that show a graph.
_CALLS: Final = 8
_LAYERS: Final = 3
#: … and so many times those of a step of the training.
_TIMES: Final = 4
_CASTS: Final = ("_to_copy", "mm", "addmm", "linear", "matmul")


def full_memory(recording: Recording, outcome: Replay) -> FullMemory:
    """The facts at the peak of ``outcome``."""
    live = live_at(outcome.stream, outcome.peak_event)
    groups: dict[tuple[int, int, int, bool, bool], list[int]] = defaultdict(list)
    sizes = _parameter_sizes(recording, live)
    again, own = _recomputed(recording, live), _own_scratch(recording)
    for alloc in live.tolist():
        operator = int(recording.alloc_op[alloc])
        kind, line = int(recording.alloc_kind[alloc]), int(recording.alloc_line[alloc])
        name = int(recording.op_name[operator]) if operator >= 0 else -1
        kind = _TEMPORARY if alloc in own else kind
        adapted = _is_for_adapter(recording, operator)
        groups[kind, name, line, alloc in again, adapted].append(alloc)
    kept = _kept(recording, outcome, live)
    before = _of_step_before(recording, outcome, live) - kept
    idle = _without_backward(recording, live) - kept
    of_loss = _loss_sizes(recording, live)
    held = [_held(recording, outcome, key, allocs, kept, of_loss) for key, allocs in groups.items()]
    read = frozenset(recording.header.get("read") or ())
    held = [
        dataclasses.replace(each, kind="loaded")
        if each.kind in _GIVEN
        and read.issuperset(allocs)
        and _is_copy_of_model(recording, allocs, sizes)
        else each
        for each, allocs in zip(held, groups.values(), strict=True)
    ]
    held = [
        dataclasses.replace(
            each,
            before=sum(int(outcome.granted[alloc]) for alloc in allocs if alloc in before),
            idle=sum(alloc in idle for alloc in allocs),
        )
        for each, allocs in zip(held, groups.values(), strict=True)
    ]
    held.sort(key=lambda each: -each.nbytes)
    return FullMemory(
        held, outcome.peak_allocated, outcome.peak_reserved, weights=_weights(recording)
    )


def _of_step_before(recording: Recording, outcome: Replay, live: IntArray) -> frozenset[int]:
    """Allocations among those alive that a line made in the step before, and once more in this one:
    a variable that keeps it until it gets the next."""
    events, peak = outcome.stream.events, outcome.peak_event
    begins, ends = step_around(events, peak)
    if not begins or ends == len(events):
        return frozenset()
    since, _ = step_around(events, begins - 1)
    before, now = _made(events, since, begins), _made(events, begins, peak + 1)
    freed = {int(event) >> 2 for event in events[peak + 1 : ends] if event & 3 == FREE}
    alive = set(live.tolist())
    again = {_maker(recording, alloc) for alloc in now if alloc in alive} - {None}
    return frozenset(
        alloc
        for alloc in before
        if alloc in alive and alloc in freed and _maker(recording, alloc) in again
    )


def _without_backward(recording: Recording, live: IntArray) -> frozenset[int]:
    """Allocations among those alive that are results of layers which calls of a model in a row left
    there: many times as many as a step of the training makes, and no backward pass among them. A
    graph of a sampling or an evaluation; what is kept of calls without one is the result of few
    layers."""
    calls: dict[tuple[int, int], list[int]] = defaultdict(list)
    for alloc in live.tolist():
        if (layer := _layer(recording, alloc)) is not None:
            calls[layer].append(alloc)
    calls = {layer: allocs for layer, allocs in calls.items() if len(allocs) >= _CALLS}
    if len(calls) < _LAYERS:
        return frozenset()
    ended = step_ends(recording.events)
    of_step = _made(recording.events, 0, int(ended[0])) if len(ended) else []
    usual = Counter(_layer(recording, alloc) for alloc in of_step)
    found = [
        each
        for layer, allocs in calls.items()
        for each in allocs
        if 0 < _TIMES * usual[layer] <= len(allocs)
    ]
    within = recording.alloc_op[found]
    layers = {_layer(recording, each) for each in found}
    if len(layers) < _LAYERS or _BACKWARD in recording.op_phase[within.min() : within.max()]:
        return frozenset()
    return frozenset(found)


def _layer(recording: Recording, alloc: int) -> tuple[int, int] | None:
    """The operator and the module of what a layer made in a forward pass."""
    operator = int(recording.alloc_op[alloc])
    if operator < 0 or int(recording.alloc_kind[alloc]) not in _KEEPABLE:
        return None
    module = int(recording.op_module[operator])
    if module < 0 or recording.op_phase[operator] != _FORWARD:
        return None
    return int(recording.op_name[operator]), module


def _made(events: IntArray, begins: int, ends: int) -> list[int]:
    """What is made between two places of the events."""
    part = events[begins:ends]
    made: list[int] = (part[part & 3 == MALLOC] >> 2).tolist()
    return made


def _maker(recording: Recording, alloc: int) -> tuple[int, int, int] | None:
    """The operator, the line and the bytes of what can be kept by mistake."""
    operator = int(recording.alloc_op[alloc])
    if operator < 0 or int(recording.alloc_kind[alloc]) not in _KEEPABLE:
        return None
    line, nbytes = int(recording.alloc_line[alloc]), int(recording.alloc_bytes[alloc])
    return int(recording.op_name[operator]), line, nbytes


def _held(
    recording: Recording,
    outcome: Replay,
    key: tuple[int, int, int, bool, bool],
    allocs: Sequence[int],
    kept: frozenset[int],
    loss_sizes: frozenset[int],
) -> HeldMemory:
    kind, name, line, recomputed, adapted = key
    operator = _short(recording.strings[name]) if name >= 0 else ""
    sizes = {int(recording.alloc_bytes[alloc]) for alloc in allocs}
    return HeldMemory(
        kind=KINDS[kind],
        operator=operator,
        place=Place.parse(recording.strings[line]) if line >= 0 else None,
        nbytes=int(outcome.granted[list(allocs)].sum()),
        kept=sum(alloc in kept for alloc in allocs),
        loss=_LOSS in operator or (operator in _CASTS and max(sizes) in loss_sizes),
        recomputed=recomputed,
        adapted=adapted,
    )


def _is_for_adapter(recording: Recording, operator: int) -> bool:
    """Does a layer cast its input there for an adapter of its own, as PEFT's LoRA layers do?

    Under autocast the adapter casts it back at once, after its weights, and that copy is kept.
    """
    if not 0 <= operator < len(recording.op_name) - 1 or not _is_cast(recording, operator):
        return False
    if _enters_adapter(recording, operator, operator + 1):
        return True
    if _is_cast(recording, operator + 1):
        return False
    before, adapter = operator - 1, int(recording.op_module[operator])
    while before > 0 and int(recording.op_module[before]) == adapter:
        if not _is_cast(recording, before):
            return False
        before -= 1
    return (
        before >= 0 and _is_cast(recording, before) and _enters_adapter(recording, before, operator)
    )


def _is_cast(recording: Recording, operator: int) -> bool:
    return _short(recording.strings[int(recording.op_name[operator])]) == "_to_copy"


def _enters_adapter(recording: Recording, operator: int, following: int) -> bool:
    """Is an operator of a layer followed by one of its adapter?"""
    layer, adapter = (int(recording.op_module[place]) for place in (operator, following))
    if layer < 0 or adapter < 0:
        return False
    return recording.strings[adapter].startswith(f"{recording.strings[layer]}.lora_")


def _own_scratch(recording: Recording) -> frozenset[int]:
    """Scratch memory that PyTorch's kernels take, no library: tensors of the operator's own, such
    as a softmax's backward pass makes of the gradient."""
    of_library = [text.startswith(_LIBRARIES) for text in recording.strings]
    pairs = zip(recording.workspace_alloc.tolist(), recording.workspace_model.tolist(), strict=True)
    return frozenset(alloc for alloc, model in pairs if not of_library[model])


def _weights(recording: Recording) -> dict[str, int]:
    """Bytes of the parameters by how wide their type is, as :class:`FullMemory` has it."""
    weights: dict[str, int] = defaultdict(int)
    for parameter in recording.parameters() or ():
        width = (
            "wide" if parameter.dtype in _WIDE else "half" if parameter.dtype in _HALF else "small"
        )
        weights[width] += int(recording.alloc_bytes[parameter.alloc])
    return weights


def _parameter_sizes(recording: Recording, live: IntArray) -> list[int]:
    """In bytes, of the parameters that are alive."""
    found = live[recording.alloc_kind[live] == _PARAMETER]
    return [int(nbytes) for nbytes in recording.alloc_bytes[found].tolist()]


def _is_copy_of_model(
    recording: Recording, allocs: Sequence[int], parameters: Sequence[int]
) -> bool:
    """Has what one line of the script reads, before the first step, a model's sizes? A file's state
    may have the optimizer's, too."""
    steps = step_ends(recording.events)
    made = np.flatnonzero(recording.events == (allocs[-1] << 2 | MALLOC))
    if not len(steps) or not len(made) or made[0] > steps[0]:
        return False
    of_model = set(parameters)
    sizes = [int(recording.alloc_bytes[alloc]) for alloc in allocs]
    alike = sum(nbytes for nbytes in sizes if nbytes in of_model)
    return len(sizes) >= max(2, len(parameters) / 2) and alike >= _MOST_OF_MODEL * sum(sizes)


def _short(operator: str) -> str:
    """``mm`` of ``aten.mm.default``."""
    parts = operator.split(".")
    return parts[1] if len(parts) > 1 else operator


def _recomputed(recording: Recording, live: IntArray) -> frozenset[int]:
    """What operators of the forward pass made within the backward pass: checkpointing's."""
    forward = recording.op_phase == _FORWARD
    pairs = zip(
        recording.op_name[forward].tolist(), recording.op_module[forward].tolist(), strict=True
    )
    there = set(pairs)
    found = set()
    for alloc in live.tolist():
        operator = int(recording.alloc_op[alloc])
        if operator < 0 or recording.alloc_kind[alloc] != _TEMPORARY:
            continue
        name, module = int(recording.op_name[operator]), int(recording.op_module[operator])
        is_backward = recording.op_phase[operator] == _BACKWARD
        if is_backward and (name, module) in there:
            found.add((alloc, recording.strings[name]))
    others = _BOTH_WAYS | _COMPUTES_NOTHING
    return frozenset(
        alloc
        for alloc, name in found
        if not name.startswith(_GATHERS) and _short(name) not in others
    )


def _loss_sizes(recording: Recording, live: IntArray) -> frozenset[int]:
    """Bytes of what a log-softmax made, and of the same numbers at half their width."""
    names = [_LOSS in text for text in recording.strings]
    sizes = {
        int(recording.alloc_bytes[alloc])
        for alloc in live.tolist()
        if (op := int(recording.alloc_op[alloc])) >= 0 and names[int(recording.op_name[op])]
    }
    return frozenset(sizes | {size // 2 for size in sizes} | _largest_cast(recording, live))


def _largest_cast(recording: Recording, live: IntArray) -> set[int]:
    """Bytes of the two largest allocations, where one is a matmul's result in 16 bits and the other
    its copy in 32, as a loss over a vocabulary has them: the loss itself may find no memory."""
    largest = live[np.argsort(recording.alloc_bytes[live])[-2:]].tolist()
    if len(largest) < 2 or min(recording.alloc_op[each] for each in largest) < 0:
        return set()
    result, copy = largest
    operators = [int(recording.op_name[recording.alloc_op[each]]) for each in largest]
    names = [_short(recording.strings[operator]) for operator in operators]
    sizes = [int(recording.alloc_bytes[each]) for each in largest]
    is_cast = names[0] in _CASTS[1:] and names[1] == _CASTS[0] and result < copy
    return set(sizes) if is_cast and sizes[1] == 2 * sizes[0] else set()


def _kept(recording: Recording, outcome: Replay, live: IntArray) -> frozenset[int]:
    """Allocations that pass after pass of the script's loop leaves behind.

    A pass begins with a copy of inputs to the GPU, or a backward pass; that of an evaluation whose
    data is on the GPU, with what the evaluation makes first.
    """
    events = outcome.stream.events[: outcome.peak_event + 1]
    made = (events[events % 4 == MALLOC] >> 2).tolist()
    passes, backward = [], False
    evaluates, first = recording.in_evaluation(), None
    for alloc in made:
        operator = int(recording.alloc_op[alloc])
        before = backward
        backward = operator >= 0 and bool(recording.op_phase[operator] == _BACKWARD)
        begins = recording.alloc_kind[alloc] == _INPUT or (backward and not before)
        if operator >= 0 and evaluates[operator]:
            place = int(recording.op_name[operator]), int(recording.alloc_line[alloc])
            first = first or place
            begins = begins or place == first
        if begins:
            passes.append(alloc)
    if len(passes) < KEPT_PASSES:
        return frozenset()
    alive = np.zeros(len(recording.alloc_bytes), dtype=bool)
    alive[live] = True
    places: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for alloc in made:
        operator = int(recording.alloc_op[alloc])
        if operator < 0 or int(recording.alloc_kind[alloc]) not in _KEEPABLE:
            continue
        key = int(recording.op_name[operator]), int(recording.alloc_line[alloc])
        places[(*key, int(recording.op_module[operator]))].append(alloc)
    kept: set[int] = set()
    for allocs in places.values():
        left = [alloc for alloc in allocs if alive[alloc]]
        if is_left_behind(passes, allocs, left):
            kept.update(left)
    return frozenset(kept)
