"""Loss functions that get something else than they are for: which, why it matters, what to
write."""

from __future__ import annotations

from typing import Final

from trainfit.results.findings import Evidence, Finding, Fix, Place
from trainfit.results.runs.learning import LEAST_HALF, LossMisfit, Misuse
from trainfit.results.text import short


def of_misfit(found: LossMisfit) -> Finding:
    """The finding of a loss function and what it gets."""
    if found.missing is not None:
        return _not_activated(found)
    if found.activation == "log":
        return _log_of_softmax(found)
    if found.activation == "log_softmax":
        return Finding(
            "activation_elsewhere",
            "critical",
            f"The log_softmax before {found.name} does not go over the classes (outputs are "
            f"{found.shapes[0]}, classes in dimension 1)",
            (Evidence("outputs", found.shapes[0]),),
            "it makes probabilities of samples, not of classes: they do not sum to 1 for a sample",
            (
                Fix("log_softmax(x, dim=1)", line="F.log_softmax(x, dim=1)")
                if found.name == "nll_loss"
                else Fix("the last layer's output as it is (logits)"),
            ),
            place=Place.parse(found.place),
        )
    if found.activation is not None:
        return _activated_twice(found, found.activation)
    if len(found.shapes) == 1:
        return Finding(
            "one_class",
            "critical",
            f"{found.name} gets a single class (outputs are {found.shapes[0]}): nothing is learned",
            (Evidence("outputs", found.shapes[0]),),
            "the softmax over a single class is 1, whatever the model gives",
            (
                Fix(
                    "two outputs for two classes; or one output and "
                    "BCEWithLogitsLoss()(output.squeeze(1), y.float())"
                ),
            ),
            place=Place.parse(found.place),
        )
    output, target = found.shapes
    return Finding(
        "loss_broadcast",
        "critical",
        f"{found.name or 'The loss'} compares each output with every target: outputs are "
        f"{output}, targets {target}",
        (Evidence("outputs", output), Evidence("targets", target)),
        "tensors of different shapes are broadcast against each other: the network learns the "
        "targets' mean",
        (Fix("give both one shape: output.squeeze(1), or target.unsqueeze(1)"),),
        place=Place.parse(found.place),
    )


def of_lost_eps(eps: float, place: str) -> Finding:
    """The finding of a small number that float16 does not have."""
    return Finding(
        "eps_lost",
        "warning",
        f"{eps:g} is 0 in float16, to which it is added: a logarithm or a division after it gives "
        "inf or NaN where the rest is 0",
        (Evidence("added", eps), Evidence("smallest float16", LEAST_HALF)),
        "autocast leaves that operator in the type of its input, float16",
        (
            Fix("x.float() before it (the loss in float32), or bfloat16"),
            Fix("1e-4 instead"),
        ),
        place=Place.parse(place),
    )


def _not_activated(misfit: LossMisfit) -> Finding:
    """A layer's output where probabilities or their logarithms are wanted."""
    instead, does = _BY_ITSELF[misfit.name]
    return Finding(
        "activation_missing",
        "critical",
        f"{misfit.name} gets a layer's output as it is, and wants that of a {misfit.missing}",
        (),
        does,
        (Fix(f"{instead}; or {misfit.missing} before it"),),
        confidence="likely",
        place=Place.parse(misfit.place),
    )


#: What to take instead of a function that needs an activation before it; what comes of it without.
_BY_ITSELF: Final = {
    "nll_loss": (
        "cross_entropy (CrossEntropyLoss), which applies log_softmax itself",
        "it gives the output of the right class with the sign turned: the loss falls below 0 "
        "without end, and no other class is lowered",
    ),
    "ctc_loss": (
        "ctc_loss(log_softmax(output, dim=2), …)",
        "numbers that are no logarithms of probabilities give no likelihood: the loss falls below "
        "0 without end",
    ),
    "kl_div": (
        "kl_div(log_softmax(output, dim=1), target)",
        "numbers that are no logarithms of probabilities give no divergence: the loss has no least "
        "value",
    ),
    "binary_cross_entropy": (
        "binary_cross_entropy_with_logits (BCEWithLogitsLoss), which applies sigmoid itself",
        "numbers outside of 0 … 1 have no logarithm: on a GPU that is a device-side assert",
    ),
}


def _log_of_softmax(misfit: LossMisfit) -> Finding:
    return Finding(
        "log_of_softmax",
        "warning",
        f"{misfit.name} gets log(softmax(x)): where a probability is 0 its logarithm is -inf, and "
        "the gradient NaN",
        (),
        "softmax gives 0 for classes that are 104 below the largest (in float16 17), and a "
        "logarithm of its own cannot know what they were",
        (
            Fix(
                "log_softmax(x, dim=1); or cross_entropy of the last layer's output",
                line="F.log_softmax(x, dim=1)",
            ),
        ),
        place=Place.parse(misfit.place),
    )


def _activated_twice(misfit: LossMisfit, activation: str) -> Finding:
    if activation == "relu":
        return Finding(
            "activation_clips",
            "warning",
            f"{misfit.name} gets the output of a relu, and wants logits, which may be below 0",
            (),
            "what the last layer gives below 0 is cut off and gets no gradient: no class can be "
            "made less likely than that",
            (Fix("no relu after the last layer"),),
            place=Place.parse(misfit.place),
        )
    if activation == "dropout":
        return Finding(
            "activation_clips",
            "warning",
            f"{misfit.name} gets the output of a dropout: in training, outputs of the last layer "
            "are set to 0 at random",
            (),
            "dropout is for what the next layer gets; after the last layer it changes the answer "
            "itself, and the loss has a floor",
            (Fix("no dropout after the last layer"),),
            place=Place.parse(misfit.place),
        )
    wants_log = misfit.name in _OF_LOGARITHMS
    instead = "log_softmax" if wants_log else "the last layer's output as it is (logits)"
    return Finding(
        "activation_twice",
        "critical" if wants_log else "warning",
        f"{misfit.name} gets the output of a {activation}, and wants "
        f"{'log-probabilities' if wants_log else 'logits'}",
        (),
        "probabilities are read as logarithms: the loss is wrong"
        if wants_log
        else f"it applies {_APPLIES.get(misfit.name, activation)} itself: twice, gradients "
        "are small and the loss cannot get near 0",
        (Fix(f"give it {instead}; {activation} for predictions only"),),
        place=Place.parse(misfit.place),
    )


#: Loss functions that want logarithms of probabilities; what the others apply.
_OF_LOGARITHMS: Final = ("nll_loss", "kl_div", "ctc_loss")
_APPLIES: Final = {
    "cross_entropy": "softmax",
    "binary_cross_entropy_with_logits": "sigmoid",
}


#: What a line may have been given, and what to write there.
_AT_BORDER: Final = {
    "logarithm": (
        "a logarithm of 0 is -inf, of a negative number NaN",
        "keep its input above 0 (x.clamp(min=1e-6).log()), or clean the data: assert "
        "torch.isfinite(result).all() after that line finds the batch",
    ),
    "root": (
        "a square root, acos or asin beyond its border is NaN, and at it has an infinite slope",
        "keep its input within (x.clamp(min=1e-12).sqrt()): assert torch.isfinite(result).all() "
        "after that line finds the batch",
    ),
    "division": (
        "a sum, a norm or a deviation of 0 as divisor gives NaN",
        "keep the divisor from 0 (.clamp(min=1e-6), or + 1e-6): assert "
        "torch.isfinite(result).all() after that line finds the batch",
    ),
    "mask": (
        "a row that is all -inf is NaN after a softmax (a sample of padding alone)",
        "leave such samples out, let one position of each row unmasked, or fill with "
        "torch.finfo(x.dtype).min instead of -inf",
    ),
}


def not_finite(found: Misuse | None) -> tuple[str, str, Fix] | None:
    """What to say of a loss that is not finite: what to add to its title, the cause, the fix."""
    if found is None:
        return None
    if found.kind == "data_not_finite":
        name, row, many = found.told
        return (
            f": the data has {many} such (dataset.{name}, row {row})",
            "a sample that is not finite makes the loss so, then the gradients, then all weights",
            Fix(
                "clean the data before the training (fill or drop what is missing: "
                "torch.nan_to_num, dropna()), and begin from sound weights"
            ),
        )
    if found.kind == "sample_not_finite":
        return (
            f": the data has a number that is not ({found.told[0]})",
            "a sample that is not finite makes the loss so, then the gradients, then all weights",
            Fix(
                "look at what makes this sample so (a missing value, a logarithm or a division of "
                "0), clean the data before the training (torch.nan_to_num, or leave it out), and "
                "begin from sound weights"
            ),
        )
    if found.kind == "batch_not_finite":
        return (
            f": the batch has a number that is not (`{found.told[0]}`)",
            "a sample that is not finite makes the loss so, then the gradients, then all weights",
            Fix(
                "find the sample (assert torch.isfinite(x).all() at the end of __getitem__) and "
                "clean the data before the training (torch.nan_to_num, or leave it out)"
            ),
        )
    if found.kind == "made_not_finite" and len(found.told) > 1:
        name, kind, source, place = found.told
        what, action = _AT_BORDER[kind]
        return (
            f": `{name}` is the first that is not, and what it is made of is finite; "
            f"`{short(source, 60)}` at {place} may have made it so",
            f"in what this line calls: {what}",
            Fix(action),
        )
    if found.kind == "made_not_finite":
        return (
            f": `{found.told[0]}` is the first that is not, and what it is made of is finite",
            "the function there is not defined for what it was given (a logarithm or a square root "
            "of a negative number, a division by 0), or its result is too large",
            Fix(
                "look at the smallest and the largest number that this line is given, and keep "
                "them where it is defined (x.clamp(min=1e-6) before log, sqrt or a division), or "
                "clean the data"
            ),
        )
    if found.kind == "may_be_made":
        kind, source, *others = found.told
        what, action = _AT_BORDER[kind]
        more = f" or {others[0]}" if others else ""
        return (
            f": weights are not finite since then, which `{short(source, 60)}`{more} may have made "
            "so",
            f"the losses before were finite and did not grow, so that one batch did it: {what}",
            Fix(action),
        )
    names = " or ".join(found.told)
    return (
        f": the slope of {names} is infinite there",
        "the first loss was finite, and its gradients were not: at the border of what it is "
        f"defined for, {names} has an infinite slope, and infinity × 0 is NaN (the distance of a "
        "point to itself)",
        Fix(
            "keep its input away from there: torch.sqrt(x + 1e-12), x.clamp(min=1e-12), or leave "
            "such pairs out before it (torch.where after it does not help); F.pairwise_distance "
            "and torch.cdist do"
        ),
    )
