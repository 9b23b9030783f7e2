"""What the tensors of the call that failed say of the cause: their shapes, the layer, the line that
made one of them what it is."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Final

from trainfit.findings.source_code import from_here
from trainfit.results.findings import Finding, Fix, Place
from trainfit.results.runs.operands import INDEXING, RENORMED, STEPPED, FailedCall, Operand, Origin

_VIEWS: Final = {"view", "reshape", "unflatten", "flatten"}
#: torch/nn/functional.py (multi_head_attention_forward)
_MASK: Final = re.compile(
    r"2D attn_mask is torch\.Size\(\[(\d+), \d+\]\), but should be \((\d+), \d+\)"
)
_RECURRENT: Final = {"RNN", "LSTM", "GRU"}
#: Operators without a derivative that name a class or a truth value.
_CHOOSE: Final = {"argmax", "argmin", "eq", "gt", "lt", "ge", "le", "round", "long", "int", "max"}
#: Kinds whose title is followed by the shapes of the operands.
_OF_SHAPES: Final = {
    *("batches_differ", "sizes_differ", "target_shape", "features_differ", "normalized_size"),
    *("mask_shape", "index_shape", "sizes_to_join", "dimensions_differ", "expand_size"),
    *("matmul_sizes", "matmul_dimensions", "recurrent_input", "classes_dimension", "reshape_size"),
    *("sizes_of_data", "sizes_of_weights", "attention_shapes", "attention_mask"),
}


def explained(finding: Finding, call: FailedCall) -> Finding:
    """The cause of a failure with what its operands say: the line that is why, where one is."""
    rule = _RULES.get(finding.kind)
    kernels = None if rule is None else rule(finding, call)
    if kernels is not None:
        return kernels
    if finding.kind in _OF_SHAPES and len(call.operands) > 1:
        return dataclasses.replace(finding, title=_joined(finding, _shapes(call)))
    return finding


def _told(finding: Finding, why: str, fix: str = "", place: str = "") -> Finding:
    fixes = (Fix(fix), *finding.fixes) if fix else finding.fixes
    at = Place.parse(place) or finding.place
    return dataclasses.replace(finding, title=_joined(finding, why), fixes=fixes, place=at)


def _joined(finding: Finding, why: str) -> str:
    return f"{finding.title}{'; ' if ':' in finding.title else ': '}{why}"


def _samples(finding: Finding, call: FailedCall) -> Finding | None:
    """Outputs and targets of different numbers of samples."""
    known = [(each, made) for each in call.operands if (made := each.origin("samples"))]
    if not known:
        return None
    if len(known) > 1 and all(_is_by_mask(made) for _, made in known[:2]):
        sources = ", ".join(
            f"{each.name} {_size(each.shape)} is of {_size(made.given)}" for each, made in known[:2]
        )
        return _told(
            finding,
            f"{sources}, indexed by different masks at {_at(known[0][1].place)}",
            "index both by one mask: keep = labels != padding, then output[keep] and labels[keep]",
            known[0][1].place,
        )
    others = {each.shape[0] for each in call.operands if each.shape}
    for operand, made in known:
        if made.given[0] not in others - {operand.shape[0]}:
            continue
        text = f"{made.operator} at {_at(made.place)} makes {_size(made.gave)} of"
        if made.operator in _VIEWS and math.prod(made.given) == math.prod(made.gave):
            numbers = math.prod(made.given[1:])
            return _told(
                finding,
                f"{text} {_size(made.given)}, numbers of one sample become several samples",
                f"x.flatten(1) there, which keeps the {made.given[0]} samples of {numbers:,} "
                f"numbers each; the layer after it has in_features={numbers}",
                made.place,
            )
        if made.operator == INDEXING and made.gave == made.given[1:] and not made.with_tensor:
            return _told(
                finding,
                f"x[…] at {_at(made.place)} gives {_size(made.gave)} of {_size(made.given)}: one "
                "sample with all its steps",
                "x[:, -1] there, the last step of each sample, as the batch is dimension 0 "
                "(batch_first=True)",
                made.place,
            )
        return _told(finding, f"{text} {_size(made.given)}", place=made.place)
    return None


def _is_by_mask(made: Origin) -> bool:
    return made.operator == INDEXING and made.with_tensor


def _sizes(finding: Finding, call: FailedCall) -> Finding | None:
    """Two tensors of different sizes, of which one was enlarged by a transposed convolution, or
    has one number for each sample or position of the other."""
    pair = call.operands[:2]
    if finding.kind == "sizes_differ" and (told := _fewer(finding, call)) is not None:
        return told
    if len(pair) < 2 or len(pair[0].shape) != len(pair[1].shape):
        return None
    for one, other in (pair, pair[::-1]):
        made = one.origin("shape")
        if made is None and one.name.startswith("conv_transpose") and finding.place is not None:
            text = f"{finding.place.file}:{finding.place.line}"
            made = Origin("shape", one.name.removesuffix("(…)"), (), one.shape, text)
        if made is None or not made.operator.startswith("conv_transpose"):
            continue
        return _told(
            finding,
            f"{one.name} {_size(one.shape)} of {made.operator} at {_at(made.place)}, {other.name} "
            f"{_size(other.shape)}",
            "output_padding=1 of the nn.ConvTranspose layers whose stride is 2 (a convolution with "
            "a stride rounds odd sizes down), or sizes that each halving divides, or "
            f"F.interpolate(x, size={list(other.shape[2:])}) at the end",
            made.place,
        )
    ranked = tuple(operand for operand in call.operands if len(operand.shape) == 3)
    return (_positions(finding, ranked) if finding.kind == "sizes_differ" else None) or _shortcut(
        finding, call
    )


def _fewer(finding: Finding, call: FailedCall) -> Finding | None:
    """A weight or mask of each sample (or position), next to a tensor with further dimensions."""
    for one in call.operands[:2]:
        for other in call.operands[:2]:
            more = len(other.shape) - len(one.shape)
            if not one.shape or more < 1 or one.shape != other.shape[: len(one.shape)]:
                continue
            ones = ", ".join("1" * more)
            fix = f"x.view(-1, {ones})" if len(one.shape) == 1 else "x" + ".unsqueeze(-1)" * more
            return _told(
                finding,
                f"{one.name} {_size(one.shape)} has a number for each of the first dimensions of "
                f"{other.name} {_size(other.shape)}, and is broadcast over its last",
                f"{fix} of {one.name}, so that it is of the same samples",
            )
    return None


def _positions(finding: Finding, pair: tuple[Operand, ...]) -> Finding | None:
    """A table of positions (1, positions, width) of a model that is made for another size."""
    table = next(
        (operand for operand in pair if operand.shape[0] == 1 and "." in operand.name), None
    )
    other = next(
        (operand for operand in pair if operand is not table and operand.shape[0] > 1), None
    )
    if table is None or other is None or len(table.shape) != 3:
        return None
    (_, made_for, width), (_, given, same) = table.shape, other.shape
    if width != same or made_for == given or 1 in (made_for, given):
        return None
    return _told(
        finding,
        f"{table.name} is made for {made_for} positions, and {other.name} has {given}",
        "make the model for this input (img_size, max_len), or bring the input to what the model "
        "is made for (resize the images, truncate the texts); of a trained model interpolate "
        f"{table.name} to {given} positions",
    )


def _shortcut(finding: Finding, call: FailedCall) -> Finding | None:
    """A block's input that is added to its output, of other channels or of another size."""
    pair = [operand for operand in call.operands if len(operand.shape) == 4][:2]
    if len(pair) != 2 or finding.kind != "sizes_differ" or pair[0].shape[0] != pair[1].shape[0]:
        return None
    output, given = pair
    wide, narrow = output.shape[1], given.shape[1]
    sizes = [(a, b) for a, b in zip(output.shape[2:], given.shape[2:], strict=True) if a != b]
    stride = next((b // a for a, b in sizes if b % a == 0), 1)
    if 1 in (wide, narrow) or (sizes and stride == 1) or (wide == narrow and not sizes):
        return None
    return _told(
        finding,
        _shapes(call),
        f"bring {given.name} to the shape of {output.name} first: self.shortcut = nn.Conv2d("
        f"{narrow}, {wide}, 1{f', stride={stride}' if stride > 1 else ''}), and self.shortcut("
        f"{given.name})",
    )


def _mask(finding: Finding, call: FailedCall) -> Finding | None:
    """A mask of attention for another length."""
    query = next((operand for operand in call.operands if operand.name == "query"), None)
    match = _MASK.search(finding.cause)
    if query is None or match is None or len(query.shape) != 3:
        return None
    given, target = int(match[1]), int(match[2])
    first, second = query.shape[:2]
    if (given, target) != (second, first):
        return None
    return _told(
        finding,
        f"the input {_size(query.shape)} has its samples first, and the layer goes over dimension "
        f"0 ({first}) as positions",
        "batch_first=True of nn.TransformerEncoderLayer, nn.MultiheadAttention and nn.Transformer, "
        "or x.transpose(0, 1) before and after it",
    )


def _target_shape(finding: Finding, call: FailedCall) -> Finding | None:
    """A target with as many numbers as the output, in another shape: an image and its pixels."""
    known = {operand.name: operand for operand in call.operands}
    output, target = known.get("input"), known.get("target")
    if output is None or target is None or math.prod(output.shape) != math.prod(target.shape):
        return None
    if output.shape[0] != target.shape[0] or len(target.shape) <= len(output.shape) + 1:
        return None
    fix = f"y.flatten(1) of {_size(target.shape)}, or output.view_as(y)"
    return _told(finding, _shapes(call), fix)


def _targets(finding: Finding, call: FailedCall) -> Finding | None:
    """Targets of another type or shape than the loss wants."""
    known = {operand.name: operand for operand in call.operands}
    output, target = known.get("input"), known.get("target")
    if output is None or target is None:
        return None
    shape, whole = target.shape, target.dtype.startswith(("int", "uint", "bool"))
    fix = ""
    if len(shape) == 2 and shape[1] == 1 and len(output.shape) == 2 and output.shape[1] > 1:
        fix = "y.squeeze(1): one class for each sample, of shape (N)"
    elif shape == output.shape and whole and len(shape) > 1 and shape[1] > 1:
        fix = "y.argmax(1), the class of each one-hot row; y.float() where these are probabilities"
    elif shape == output.shape and whole:
        fix = "y.float(), as this loss compares numbers"
    elif len(shape) == len(output.shape) - 1 and target.dtype != "int64":
        fix = "y.long(): classes are whole numbers of 64 bits"
    return _told(finding, f"output {_typed(output)}, target {_typed(target)}", fix)


def _typed(operand: Operand) -> str:
    return f"{_size(operand.shape)} {operand.dtype}"


def _cut(finding: Finding, call: FailedCall) -> Finding | None:
    """A loss without a graph."""
    made = next((it for operand in call.operands if (it := operand.origin("cut"))), None)
    if made is None:
        return None
    if made.operator in _CHOOSE:
        fix = (
            "give the loss the output itself, which has a derivative: F.cross_entropy(output, y) "
            f"of the logits; {made.operator} is for metrics"
        )
    else:
        fix = f"leave {made.operator} at {_at(made.place)} out of what the loss is computed of"
    return _told(finding, f"{made.operator} at {_at(made.place)} ends it", fix, made.place)


#: torch/csrc/autograd/saved_variable.cpp: the shape, and the operator that had computed it.
_CHANGED: Final = re.compile(
    r"\[\w+(?:\.\w+)* \[([\d, ]*)\]\](?:, which is output \d+ of (\w+?)(?:Backward\d*)?,)?"
)


#: ``x += y`` and the like, and ``x[…] = y``.
_IN_PLACE: Final = {"iadd", "isub", "imul", "itruediv", "idiv", "ipow"}
_OF_PARTS: Final = {"x[…] = …"}
#: What the message calls a weight: of linear and recurrent layers. That of a convolution is told
#: without an operator.
_OF_WEIGHTS: Final = {"t", "asstrided", "as", "permute", "unsqueeze", ""}


def _in_place(finding: Finding, call: FailedCall) -> Finding | None:
    """A tensor that a backward pass needs was changed in place."""
    match = _CHANGED.search(finding.cause)
    if match is None:
        return None
    shape = tuple(int(part) for part in match[1].split(",") if part.strip())
    by = (match[2] or "").lower()
    renormed = (each for each in call.changed if each.operator == RENORMED)
    made = next((each for each in renormed if shape in (each.gave, each.gave[::-1])), None)
    if made is not None:
        return dataclasses.replace(
            finding,
            title=f"nn.Embedding(max_norm=…) changes its weight in place at {_at(made.place)}, and "
            "the weight was used before that",
            fixes=(
                Fix(
                    "call the embedding before its weight is used elsewhere, or use "
                    "embedding.weight.clone() there"
                ),
            ),
            place=Place.parse(made.place),
        )
    alike = [each for each in call.changed if each.gave == shape]
    # The tensor is told by what made it before the change, or by the change itself (AddBackward).
    known = [each for each in alike if each.used_at.replace("_", "") in (by, "")]
    known = known or [each for each in alike if _written(each.operator) == by]
    if not by or len({each.place for each in known}) != 1:
        return _stepped(finding, call, shape, by)
    made = known[0]
    needs = call.needed_by or by
    line = f" at {_at(call.needed_at)}" if call.needed_at else ""
    return _told(
        finding,
        f"{_at(made.place)} changes what {made.used_at or by} gave ({made.operator}, "
        f"{_size(shape)}), and the derivative of {needs}{line} is computed of that",
        "x = x + y in place of x += y there, without inplace=True, or x.clone() before it",
        made.place,
    )


def _stepped(finding: Finding, call: FailedCall, shape: tuple[int, ...], by: str) -> Finding | None:
    """A finding on what an optimizer changed; it changes weights: their node is that of a
    transposed view."""
    made = next((each for each in call.changed if each.operator == STEPPED), None)
    alike = any(each.gave == shape for each in call.changed)
    if made is None or alike or by not in _OF_WEIGHTS:
        return None
    return _told(
        finding,
        f"{STEPPED} at {_at(made.place)} changed one of {_size(shape)}, which the loss was "
        "computed of before it",
        place=made.place,
    )


def _written(operator: str) -> str:
    """An operator that changes a tensor in place, as its node in a graph is called."""
    if operator in _OF_PARTS:
        return "copyslices"
    return operator.strip("_").removeprefix("i") if operator in _IN_PLACE else operator.strip("_")


def _earlier(finding: Finding, call: FailedCall) -> Finding | None:
    """A graph that a backward pass has used up."""
    made = next((it for operand in call.operands if (it := operand.origin("earlier"))), None)
    if made is None:
        return None
    used = f"{_at(made.used_at)} uses" if made.used_at != made.place else "the same line uses"
    return _told(
        finding,
        f"what {_at(made.place)} computed in an earlier step ({made.operator}), {used} in this one",
        f"compute it in each step; or, where it only carries a state over (a hidden state, an "
        f"average), x = x.detach() before {_at(made.used_at)}",
        made.place,
    )


def _layer(finding: Finding, call: FailedCall) -> Finding | None:
    """A layer that is made for another size."""
    given = next(iter(call.operands), None)
    if not call.layer or given is None or not given.shape:
        return None
    name, size, shape = call.layer, call.weight, given.shape
    made = given.origin("shape")
    of = f" of {made.operator} at {_at(made.place)}" if made is not None else ""
    what = f"{name} ({call.kind}) gets {_size(shape)}{of}"
    if call.kind == "Linear" and len(size) == 2:
        flat = math.prod(shape[1:])
        if len(shape) > 2 and flat == size[1]:
            fix = f"x.flatten(1) before {name}: {flat:,} numbers of each sample"
        else:
            fix = f"{name} = nn.Linear({shape[-1]}, {size[0]}), as wide as what it gets"
        return _told(finding, f"{what} and is made for {size[1]} features", fix)
    if call.kind.startswith("Conv") and "Transpose" not in call.kind and len(shape) == len(size):
        return _told(finding, f"{what}, (samples, channels, …)", _channels(call, shape))
    if call.kind.startswith("BatchNorm") and len(shape) > 1:
        fix = f"{name} = nn.{call.kind}({shape[1]}), the channels of its input"
        return _told(finding, f"{what} and is made for {', '.join(map(str, size))}", fix)
    if call.kind in _RECURRENT and finding.kind == "recurrent_input":
        if "equal to input_size" not in finding.cause:
            return None
        fix = f"{name} = nn.{call.kind}({shape[-1]}, …), the last dimension of its input"
        return _told(finding, what, fix)
    if call.kind == "LayerNorm":
        fix = f"{name} = nn.LayerNorm({shape[-1]}), the last dimension of its input"
        return _told(finding, f"{what} and is made for {', '.join(map(str, size))}", fix)
    return None


def _index(finding: Finding, call: FailedCall) -> Finding | None:
    """An index that a table has no row for."""
    if call.wrong_index is None:
        return None
    wrong, rows = call.wrong_index
    name = call.layer or "the table"
    if wrong < 0:
        fix = (
            "number categories from 0: what is unknown or missing (-1) needs a row of its own, "
            f"codes + 1 and nn.Embedding({rows + 1}, …)"
        )
    else:
        fix = f"nn.Embedding({wrong + 1}, …) or more rows, or indices that begin at 0"
    return _told(finding, f"{wrong}, and {name} has {rows} rows (0 to {rows - 1})", fix)


def _channels(call: FailedCall, shape: tuple[int, ...]) -> str:
    made_for = call.weight[1]
    made = call.operands[0].origin("shape")
    is_folded = made is not None and made.operator in _VIEWS and shape[0] == 1
    if is_folded and made is not None and made.given[1:] == (made_for, *shape[2:]):
        return (
            f"leave out {made.operator} at {_at(made.place)}, which puts the {made.given[0]} "
            "samples next to each other as channels; of images with a dimension of steps "
            "x.flatten(0, 1)"
        )
    if made_for in shape[2:] and made_for != shape[1]:
        at = len(shape) - 1 - shape[::-1].index(made_for)
        others = (index for index in range(1, len(shape)) if index != at)
        order = ", ".join(map(str, (0, at, *others)))
        return f"x.permute({order}) before the model: channels are dimension 1 in PyTorch"
    if (shape[1], made_for) == (1, 3):
        return (
            'image.convert("RGB"), or x.expand(-1, 3, -1, -1), for grey images; or '
            f"{call.layer} with in_channels=1"
        )
    return f"{call.layer} with in_channels={shape[1]}, the channels of what comes before it"


def _devices(finding: Finding, call: FailedCall) -> Finding | None:
    """An operator with tensors of two devices."""
    if call.listed:
        return _told(
            finding,
            f"{call.layer} ({call.kind}) is in {call.listed}, a plain list or dict: model.to() "
            "moves nothing that is in it, and no optimizer trains it",
            f"{call.listed} = nn.ModuleList(…), or nn.ModuleDict(…)",
        )
    hosts = [operand for operand in call.operands if operand.device == "cpu" and operand.shape]
    if len(hosts) == 1 and len(call.operands) > 1:
        name = hosts[0].name
        if name.startswith("self."):
            attribute = name.split(".")[-1]
            fix = (
                f'self.register_buffer("{attribute}", …) in __init__, which model.to() moves (of '
                "what is trained nn.Parameter)"
            )
        else:
            fix = f"{name} = {name}.to(device) before it, or make it there (device=x.device)"
        return _told(finding, f"{name} {_size(hosts[0].shape)} is on the CPU", fix)
    return None


def _shapes(call: FailedCall) -> str:
    return ", ".join(map(_described, call.operands))


def _described(operand: Operand) -> str:
    made = operand.origin("shape")
    of = f" of {made.operator} at {_at(made.place)}" if made is not None and made.place else ""
    return f"{operand.name} {_size(operand.shape)}{of}"


def _size(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def _at(place: str) -> str:
    file, _, line = place.rpartition(":")
    return f"{from_here(file) or file}:{line}"


_RULES: Final[Mapping[str, Callable[[Finding, FailedCall], Finding | None]]] = {
    "batches_differ": _samples,
    "sizes_differ": _sizes,
    "sizes_to_join": _sizes,
    "attention_mask": _mask,
    "target_type": _targets,
    "no_graph": _cut,
    "graph_used_twice": _earlier,
    "changed_in_place": _in_place,
    "features_differ": _layer,
    "normalized_size": _layer,
    "recurrent_input": _layer,
    "target_shape": _target_shape,
    "two_devices": _devices,
    "index_out_of_range": _index,
}
