"""Numbers that a line makes of others without an error: roots and angles whose derivative is
infinite, bytes that wrap, outputs that are compared with classes."""

from __future__ import annotations

import math
from typing import Final

from trainfit.results.findings import Evidence, Finding, Fix, Kinds
from trainfit.results.text import percent

NUMBERS: Final = Kinds()

#: The share of targets that the last activation does not give from which nothing right is learned.
_MOST_OUTSIDE: Final = 0.25


@NUMBERS.of("root_of_output")
def _of_output(kind: str, name: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"The root ({name}) of a layer's output, which may be below 0: NaN, and then all weights "
        "are",
        (),
        "a root of a number below 0 is NaN, and so is its gradient (at 0 it is infinite): "
        "torch.where or a mask after it does not keep that out, as 0 times NaN is NaN",
        (
            Fix("torch.sqrt(x.clamp(min=1e-8)): limit what goes in, also within torch.where"),
            Fix("F.softplus(x) + 1e-8, where the output is to be above 0"),
        ),
    )


@NUMBERS.of("root_at_zero")
def _at_zero(kind: str, name: str, how: str) -> Finding:
    is_itself = how == "itself"
    return Finding(
        kind,
        "critical" if is_itself else "warning",
        f"The gradient of {name} is NaN: "
        + (
            "each row's distance to itself is 0"
            if is_itself
            else "what it is of is 0 where it was below 0 (relu, clamp(min=0))"
        ),
        (),
        "the derivative of a root is infinite at 0, and infinite times 0 is NaN: the first step "
        "with it makes all weights NaN, and no mask after it keeps that out",
        (
            Fix("torch.cdist(x, x), whose gradient is 0 there"),
            Fix("torch.sqrt(squares.sum(-1) + 1e-8)", line="+ 1e-8"),
        )
        if is_itself
        else (Fix("x.clamp(min=1e-8) in place of relu or clamp(min=0)", line="clamp(min=1e-8)"),),
        confidence="certain" if is_itself else "likely",
    )


@NUMBERS.of("loss_of_nothing")
def _nothing(kind: str, name: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"{name} averages over no number at all: the loss is NaN, and then all weights are",
        (),
        "the mask that chooses what is compared (positive anchors, labelled pixels) is False "
        "everywhere in this batch, and the mean of nothing is 0 / 0",
        (
            Fix("x[mask].sum() / mask.sum().clamp(min=1)", line=".clamp(min=1)")
            if name == "mean"
            else Fix(
                f"F.{name}(…, reduction='sum') / mask.sum().clamp(min=1)",
                line="reduction='sum'",
            ),
            Fix("leave the term out of batches without a positive sample: if mask.any():"),
        ),
    )


@NUMBERS.of("zeros_inverted", later=True)
def _inverted(kind: str, zeros: str, of: str, how: str) -> Finding:
    is_count = of == "1"
    return Finding(
        kind,
        "critical",
        f"A division by a number that is 0 in this batch ({how}): the loss is NaN, and then all "
        "weights are"
        if is_count
        else f"{int(zeros):,} of {int(of):,} numbers are 0 where {how} is infinite: what is "
        "multiplied by it is NaN, and so are all weights then",
        (Evidence("numbers that are 0", f"{int(zeros):,} of {int(of):,}"),),
        "a count of what a mask chooses may be 0 (no positive sample, no valid pixel), and so may "
        "the degree of a node without an edge; infinite times 0 is NaN, also in the backward pass "
        "behind a torch.where",
        (
            Fix("count.clamp(min=1) before it divides", line=".clamp(min=1)"),
            Fix("leave the term out where there is nothing: if mask.any():"),
        )
        if is_count
        else (
            Fix("count.clamp(min=1), degree.clamp(min=1) or self-loops", line=".clamp(min=1)"),
            Fix("inverse[degree == 0] = 0 before it is multiplied"),
        ),
    )


@NUMBERS.of("nan_copied", later=True)
def _nan_copied(kind: str, shape: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"A tensor that is copied to the GPU ({shape}) has NaN in it and is multiplied: the loss "
        "is NaN, and then all weights are",
        (),
        "0 ** -0.5 of a degree (infinite, and infinite times 0 is NaN), a standard deviation of 0, "
        "a gap in a table",
        (
            Fix("where it is made: degree.clamp(min=1), (x - mean) / (std + 1e-8)"),
            Fix("fill or leave out what is missing before training: torch.nan_to_num(x)"),
        ),
    )


@NUMBERS.of("zero_times_log")
def _logarithm(kind: str) -> Finding:
    return Finding(
        kind,
        "critical",
        "Probabilities of 0 are multiplied by their logarithm, which is -inf: the loss is NaN",
        (),
        "a mask fills scores with -inf, softmax makes 0 of them, and 0 · log 0 is NaN, in an "
        "entropy for one; so is the gradient",
        (
            Fix("-(p * torch.log(p.clamp(min=1e-8))).sum(-1)", line="p.clamp(min=1e-8)"),
            Fix("fill with -1e9 (float16: -1e4), not -inf, and use log_softmax of the scores"),
        ),
    )


@NUMBERS.of("angle_beyond")
def _beyond(kind: str, name: str, how: str) -> Finding:
    is_at = how == "at 1"
    return Finding(
        kind,
        "warning",
        f"torch.{name} gets a cosine that is limited to 1, where its derivative is infinite: NaN"
        if is_at
        else f"torch.{name} gets a cosine that rounding may bring above 1: NaN, and then all "
        "weights are",
        (),
        "the cosine of vectors that are alike is 1, give or take 1e-7: beyond 1 there is no angle, "
        "and at 1 the gradient is infinite, or NaN behind a clamp",
        (
            Fix("cosine.clamp(-1 + 1e-6, 1 - 1e-6)", line=".clamp(-1 + 1e-6, 1 - 1e-6)"),
            Fix("2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)) of unit vectors"),
        ),
        confidence="likely",
    )


@NUMBERS.of("bytes_wrap")
def _wraps(kind: str, share: str, shape: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"A difference of bytes (uint8) wraps: {percent(float(share))} of the numbers of {shape} "
        "would be below 0, and are 256 more",
        (Evidence("numbers that wrap", float(share)),),
        "uint8 has numbers from 0 to 255 alone: 3 - 5 is 254, without an error",
        (Fix("a.float() - b.float() (or .to(torch.int16)): another type first, then subtract"),),
        confidence="likely",
    )


@NUMBERS.of("values_as_classes", later=True)
def _values(kind: str) -> Finding:
    return Finding(
        kind,
        "warning",
        "The largest outputs themselves are compared with the classes, not where they are: the "
        "accuracy is about 0",
        (),
        "max(dim) gives two tensors, the largest numbers and their positions: the classes are the "
        "second",
        (
            Fix("output.argmax(dim=1)", line=".argmax(dim=1)"),
            Fix("_, predicted = torch.max(output, 1)"),
        ),
    )


@NUMBERS.of("classes_over_samples", later=True)
def _columns(kind: str, shape: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"Predictions are the largest over the samples (dimension 0 of {shape}), not over the "
        "classes: the accuracy is by chance",
        (Evidence("outputs", shape),),
        "dimension 0 is the batch, and the error stays unseen as there are as many samples as "
        "classes",
        (Fix("output.argmax(dim=1)", line=".argmax(dim=1)"),),
    )


@NUMBERS.of("threshold_on_logits", later=True)
def _threshold(kind: str, limit: str) -> Finding:
    chance = 1 / (1 + math.exp(-float(limit)))
    return Finding(
        kind,
        "warning",
        f"A layer's output is compared with {limit}, as if it was a probability: the loss has the "
        "sigmoid in it",
        (),
        f"binary_cross_entropy_with_logits gets logits, of which {limit} is a probability of "
        f"{percent(chance)}: samples between are counted as wrong",
        (
            Fix("output > 0, which is a probability above 50%", line="output > 0"),
            Fix("torch.sigmoid(output) > 0.5"),
        ),
        confidence="likely",
    )


@NUMBERS.of("one_output_chosen", later=True)
def _one(kind: str, shape: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"argmax goes over a single output ({shape}): the prediction is 0 for all samples",
        (Evidence("outputs", shape),),
        "of one output for yes or no there is no largest",
        (
            Fix("output > 0 of logits", line="output > 0"),
            Fix("torch.sigmoid(output) > 0.5; or two outputs and cross_entropy"),
        ),
    )


@NUMBERS.of("overlap_minimized")
def _minimized(kind: str) -> Finding:
    return Finding(
        kind,
        "critical",
        "The overlap itself (Dice, IoU) is the loss: the training makes it smaller",
        (),
        "an overlap is 1 where the output is as its target, and a loss is to be smallest there",
        (Fix("return 1 - dice", line="1 - dice"),),
        confidence="likely",
    )


@NUMBERS.of("targets_unreachable")
def _unreachable(
    kind: str, name: str, activation: str, least: str, largest: str, share: str
) -> Finding:
    gives = {
        "relu": "0 and more",
        "softplus": "numbers above 0",
        "tanh": "-1 to 1",
    }.get(activation, "0 to 1")
    return Finding(
        kind,
        "critical" if float(share) >= _MOST_OUTSIDE else "warning",
        f"{percent(float(share))} of the targets of {name} are outside of what the model can give: "
        f"its last activation, {activation}, gives {gives}, and targets are {least} to {largest}",
        (Evidence("least target", least), Evidence("largest target", largest)),
        "the loss stays at the distance to them, and the gradient of an activation at its limit "
        "is 0 or nearly so",
        (
            Fix("leave the last activation out: a layer's output may be any number"),
            Fix(
                "scale the targets into its range, (y - least) / (largest - least), and scale "
                "predictions back"
            ),
        ),
    )


@NUMBERS.of("scores_drawn")
def _scores(kind: str, shape: str) -> Finding:
    return Finding(
        kind,
        "critical",
        f"Classes are drawn with a layer's output ({shape}) as their probabilities, as it is",
        (),
        "probabilities are 0 or more; a negative one raises (on a GPU as a device-side assert), "
        "and others are no softmax of the scores, which a log_softmax next to it goes by",
        (
            Fix(
                "torch.multinomial(scores.softmax(-1), 1)",
                line="torch.multinomial(scores.softmax(-1), 1)",
            ),
            Fix("torch.distributions.Categorical(logits=scores)"),
        ),
    )
