"""Learning rates and schedules with which nothing is learned, and numbers that decay until the CPU
computes slowly with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from trainfit.findings import fixes
from trainfit.results.findings import SCHEDULE_ENDS, Evidence, Finding, Fix, Place, Severity
from trainfit.results.runs.learning import LearningFacts
from trainfit.results.text import count, percent

#: A learning rate may be 0 in the first step of a warm-up.
_LEAST_STEPS: Final = 3


def rate(facts: LearningFacts) -> Iterator[Finding]:
    if facts.zero_rates < _LEAST_STEPS:
        return
    yield Finding(
        "rate_zero",
        "critical",
        f"The learning rate is 0 in all {facts.zero_rates} steps that were looked at: nothing is "
        "learned in them",
        (Evidence("learning rate", 0.0),),
        "it was given as 0, or a schedule does not raise it (step // warm_up, which is 0 until the "
        "warm-up is over; warm-up steps counted in epochs; scheduler.step() not called)",
        (
            Fix("give a learning rate, and check what the scheduler makes of it"),
            Fix("of a warm-up min(1.0, (step + 1) / warm_up)"),
        ),
        place=Place.parse(facts.rate_zero_at),
    )


def vanishing(facts: LearningFacts) -> Iterator[Finding]:
    rate = facts.vanished_rate
    if rate is None:
        return
    yield Finding(
        "rate_vanishes",
        "critical",
        f"The learning rate has fallen to {rate:.0g}: nothing is learned any more",
        (Evidence("learning rate", f"{rate:.0g}"),),
        "a schedule whose lengths are epochs is stepped with each batch",
        (Fix("scheduler.step() once an epoch, or give the schedule its lengths in steps"),),
        confidence="likely",
        place=Place.parse(facts.vanished_at),
    )


#: Of a large tensor, the share of denormal numbers from which they cost time.
_DENORMAL: Final = 0.05
_MOSTLY_DENORMAL: Final = 0.5
_DENORMAL_IN: Final = {
    "weights": "the weights",
    "gradients": "the gradients",
    "averages": "what the optimizer keeps of past gradients",
}


def _denormal_severity(facts: LearningFacts) -> Severity:
    """What an optimizer keeps is used once a step, weights by far more often by layers."""
    if facts.denormal_in == "averages":
        return "info"
    return "critical" if facts.denormal >= _MOSTLY_DENORMAL else "warning"


def denormals(facts: LearningFacts) -> Iterator[Finding]:
    # Weight decay that has made them so says why.
    is_told = any(misuse.kind == "weights_decayed" for misuse in facts.misuses)
    if facts.denormal < _DENORMAL or is_told:
        return
    where = _DENORMAL_IN.get(facts.denormal_in, "the numbers")
    yield Finding(
        "denormals",
        _denormal_severity(facts),
        f"{percent(facts.denormal)} of {where} are denormal (below 1.2e-38): the CPU computes with "
        "them up to 100 times slower",
        (Evidence("denormal numbers of a large tensor", facts.denormal),),
        "weights or averages that only decay (no gradient, weight decay), an initialization or a "
        "loss that is next to nothing",
        (
            Fix(
                "torch.set_flush_denormal(True) at the start of the script, which makes them 0",
                line="torch.set_flush_denormal(True)",
            ),
        ),
        confidence="likely",
    )


def schedule(facts: LearningFacts) -> Iterator[Finding]:
    end = facts.schedule
    if end is None or facts.vanished_rate is not None:
        return
    when = f"after {count(end.step, 'step')} of {end.of_steps}"
    if end.error:
        title = f"The learning-rate schedule ends {when}: {end.error}"
        kind, cause = SCHEDULE_ENDS, "it was made for fewer steps than the training has"
    elif end.rises:
        title = f"The learning rate is down {when}, then goes up again, and so on"
        kind = "rate_rises"
        cause = (
            "a cosine that goes up again after T_max (T_0) steps is made for fewer than the "
            "training has"
        )
    elif end.rate < 0:
        title = f"The learning rate is below 0 {when}: steps increase the loss from then on"
        kind, cause = SCHEDULE_ENDS, "its function goes on below 0 where the schedule is over"
    else:
        title = f"The learning rate falls to {end.rate:.0g} {when}: nothing is learned from then on"
        kind, cause = "rate_vanishes", "the schedule is for fewer steps than the training has"
    yield Finding(
        kind,
        "warning" if end.rises else "critical",
        title,
        (Evidence("schedule", f"{end.step} of {count(end.of_steps, 'step')}"),),
        f"{cause}, or for epochs and is stepped with each batch",
        (Fix(fixes.SCHEDULE),),
        confidence="likely",
        place=Place.parse(end.place),
        subject=f"after {count(end.step, 'step')}" if end.error else "",
    )


#: Steps until a schedule is over, of those that it is made for, from which it is stepped with
#: something else than the optimizer.
_FAR_MORE: Final = 2


def unused_schedule(facts: LearningFacts) -> Iterator[Finding]:
    unused = facts.schedule_unused
    if unused is None:
        return
    if unused.reached < 1:
        yield Finding(
            "schedule_unused",
            "warning",
            f"The warm-up is longer than the training: after its {count(unused.of_steps, 'step')} "
            f"the learning rate is {percent(unused.reached, decimals=1)} of what was given, and "
            "rising",
            (Evidence("warm-up", f"about {count(unused.made_for_steps, 'step')}"),),
            "its length is that of another training (10,000 steps are usual in pretraining)",
            (
                Fix(
                    "a part of this one, as 5%: warmup = max(1, int(0.05 * epochs * len(loader)))",
                    line="warmup = max(1, int(0.05 * epochs * len(loader)))",
                ),
            ),
            confidence="likely",
            place=Place.parse(unused.place),
        )
        return
    if unused.is_stepped:
        yield Finding(
            "schedule_unused",
            "warning",
            f"{unused.name} is made for {count(unused.made_for_steps, 'step')}, and the training "
            f"makes {unused.of_steps}: the learning rate does not come down",
            (Evidence("schedule", count(unused.made_for_steps, "step")),),
            "its length counts batches, and scheduler.step() comes once for several of them "
            "(accumulation), or the training has fewer epochs",
            (
                Fix(
                    "optimizer steps as its length: epochs * (len(loader) // accumulation)",
                    line="total_steps=epochs * (len(loader) // accumulation)",
                ),
            ),
            confidence="likely",
            place=Place.parse(unused.place),
        )
        return
    title = (
        f"{unused.name} is made for {count(unused.made_for_steps, 'step')}, all of the training's "
        f"{unused.of_steps}, and is not stepped with them: the learning rate stays near its first"
    )
    if unused.of_steps > _FAR_MORE * unused.made_for_steps:
        every = unused.of_steps // unused.made_for_steps
        title = (
            f"{unused.name} is made for {count(unused.made_for_steps, 'step')}, and is stepped "
            f"once in {every} of the optimizer's: the learning rate stays near its first"
        )
    yield Finding(
        "schedule_unused",
        "critical",
        title,
        (Evidence("schedule", count(unused.made_for_steps, "step")),),
        "scheduler.step() is called once an epoch, or never",
        (
            Fix(
                "scheduler.step() after each optimizer.step(); of Lightning: "
                '{"scheduler": scheduler, "interval": "step"}'
            ),
            Fix("give the schedule its length in epochs"),
        ),
        confidence="likely",
        place=Place.parse(unused.place),
    )
