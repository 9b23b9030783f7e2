"""Steps of several batches or several passes: the gradients that each of them uses, and what stays
in memory until it does. And averages of the weights of many steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from trainfit.results.findings import (
    ACCUMULATION_CHANGES,
    Evidence,
    Finding,
    Fix,
    Kinds,
    Place,
)
from trainfit.results.text import count

ACCUMULATION: Final = Kinds()
#: Steps in a row that are alike: one may have what an epoch left over.
_ALIKE: Final = 2


@ACCUMULATION.of("first_step_early")
def _first(kind: str, others: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"The first step uses the gradient of one micro-batch, the others those of {others}",
        (Evidence("micro-batches of the others", others),),
        "the condition of the step is true of batch 0, too (0 % accumulate == 0): the first step "
        f"of each epoch comes after one batch, with 1/{others} of the gradient if the loss is "
        "divided, and the batches after the last step are left for the next epoch",
        (
            Fix(
                "count from 1: if (i + 1) % accumulate == 0 or i + 1 == len(loader)",
                line="if (i + 1) % accumulate == 0:",
            ),
        ),
        confidence="likely",
    )


def changed_later(
    first: int, per_step: Sequence[int], samples: int | None, place: str | None
) -> Iterator[Finding]:
    """Steps of a later epoch, which begin at ``place``, that have another number of micro-batches
    than the ``first`` ones, of so many ``samples``; ``per_step`` are those of each step until then.
    """
    if place is None or len(per_step) < 2 * _ALIKE or len(set(per_step[-_ALIKE:])) > 1:
        return
    later = per_step[-1]
    if later < 1 or later == first or any(number != first for number in per_step[:_ALIKE]):
        return
    effective = (
        ""
        if samples is None
        else (f": effective batch {later * samples} instead of {first * samples}")
    )
    times = f"{later / first:.3g}"
    yield Finding(
        ACCUMULATION_CHANGES,
        "info",
        f"Steps of a later epoch have {count(later, 'micro-batch', 'micro-batches')}, the first "
        f"ones {first}{effective}",
        (Evidence("micro-batches of a later step", str(later)),),
        f"the number of micro-batches goes by the epoch: a later step needs about {times}× the "
        "time; steps an epoch and the learning rate's schedule change with it",
        (
            Fix(
                "compare samples/s, not steps; a schedule that counts steps needs those of all "
                "epochs"
            ),
        ),
        place=Place.parse(place),
        subject=f"later ones have {later} micro-batches instead of {first}"
        if later != 1
        else f"later ones have 1 micro-batch instead of {first}",
    )


@ACCUMULATION.of("closure_adds")
def _closure(kind: str, passes: str) -> Finding:
    return Finding(
        kind,
        "critical",
        "The closure adds its gradients up: the optimizer calls it several times in a step, and "
        "nothing sets them to zero in between",
        (Evidence("calls in a simulated or watched step", passes),),
        "the optimizer (LBFGS) computes loss and gradient at several points of one step; each but "
        "the first is the sum of all before",
        (
            Fix(
                "optimizer.zero_grad() as the first line of the closure, not before step()",
                line="optimizer.zero_grad()",
            ),
        ),
    )


@ACCUMULATION.of("clipped_in_parts")
def _clipped(kind: str, number: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"Gradients are clipped after each of the {number} micro-batches of a step",
        (Evidence("micro-batches of a step", number),),
        "what has been added up so far is scaled down each time: the first micro-batches count "
        "less than the last, and the limit is not that of the step's gradient",
        (
            Fix(
                "clip once, where the step is: if (i + 1) % accumulate == 0: clip_grad_norm_(…); "
                "optimizer.step()"
            ),
        ),
    )


@ACCUMULATION.of("gradients_mixed")
def _mixed(kind: str) -> Finding:
    return Finding(
        kind,
        "warning",
        "An optimizer steps with gradients of two losses: its own, and the one that another "
        "optimizer has just made a step of",
        (),
        "the backward pass of the other loss goes through these parameters, too (a generator's "
        "through the discriminator, an actor's through the critic), and what it leaves in .grad "
        "is added to their own",
        (
            Fix(
                "optimizer.zero_grad() of this one right before the backward pass of its own loss",
                line="optimizer.zero_grad()",
            ),
        ),
        confidence="likely",
    )


@ACCUMULATION.of("clipped_by_hand")
def _by_hand(kind: str, operator: str) -> Finding:
    return Finding(
        kind,
        "critical",
        "Gradients are clipped by hand while they are scaled: the limit applies to the scaled "
        "ones, so nearly every step is clipped to next to nothing",
        (Evidence("by", operator),),
        "a GradScaler has multiplied them by up to 65,536, and unscales them in scaler.step(), "
        "after this line",
        (
            Fix(
                "scaler.unscale_(optimizer) before the line, once a step",
                line="scaler.unscale_(optimizer)",
            ),
        ),
    )


@ACCUMULATION.of("backward_of_many")
def _summed(kind: str, batches: str) -> Finding:
    return Finding(
        kind,
        "warning",
        f"The losses of {batches} batches are added before one backward(): the activations of all "
        f"{batches} are in memory at once",
        (Evidence("batches of a backward pass", batches),),
        "each loss keeps the graph of its forward pass until backward(): memory grows with each "
        "batch, and is freed at the end",
        (
            Fix(
                f"(loss / {batches}).backward() for each batch, and one optimizer.step() after "
                "them: the gradients add up to the same, with the memory of one batch (without "
                "the division, if the losses are not averaged now)",
                line="loss.backward()",
            ),
            Fix("zero_grad(), backward() and step() for each batch, if a step an epoch is not "
                "what is meant"),
        ),
    )  # fmt: skip


@ACCUMULATION.of("scale_updated_between")
def _between(kind: str) -> Finding:
    return Finding(
        kind,
        "warning",
        "scaler.update() runs between two steps of the same pass: the second one divides its "
        "gradients by another scale than they were multiplied by",
        (),
        "update() halves the scale after an overflow and doubles it after 2000 steps without one; "
        "gradients that were scaled before it are then twice or half of what they should be, and "
        "with two updates a step the scale grows twice as fast",
        (
            Fix(
                "scaler.step(…) of each optimizer, then scaler.update() once, at the end",
                line="scaler.update()",
            ),
        ),
    )


@ACCUMULATION.of("norm_of_average", later=True)
def _average(kind: str, norms: str, name: str) -> Finding:
    more = f" and {count(int(norms) - 1, 'more layer')}" if int(norms) > 1 else ""
    return Finding(
        kind,
        "critical",
        f"The averaged model is evaluated with BatchNorm statistics ({name}{more}) that are not "
        "those of its weights",
        (Evidence("layers", norms),),
        "AveragedModel averages the parameters, and copies running_mean and running_var of the "
        "last model: no batch was seen with the averaged weights",
        (
            Fix(
                "torch.optim.swa_utils.update_bn(loader, swa_model, device=…) after the last "
                "update_parameters(), before the evaluation and the checkpoint",
                line="torch.optim.swa_utils.update_bn(train_loader, swa_model, device=device)",
            ),
        ),
    )
