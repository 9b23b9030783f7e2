"""The trade between two batch sizes, put together from a user's own numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from trainfit.batch.advice import (
    Split,
    accumulated,
    accumulating_claim,
    accumulation_caveats,
    accumulation_claim,
    batch_norm_claim,
    critical_batch,
    curve,
    doubt_claim,
    epoch,
    epoch_claim,
    factor_text,
    generalization_claim,
    learning_rate,
    noise_claim,
    over,
    rate_claim,
    same_samples,
    samples_factor,
    split,
    steps_claim,
    steps_factor,
)
from trainfit.batch.advice import after as step_after
from trainfit.results.batch import (
    NEARLY,
    BatchExplanation,
    Claim,
    Epoch,
    GoodputCurve,
    Interval,
    Optimizer,
    StepTime,
    Trade,
)
from trainfit.results.text import percent

#: Of a reference batch, how far a curve with accumulation goes.
_BEYOND = 4


@dataclasses.dataclass(frozen=True)
class Question:
    """A change from ``before`` to ``after`` samples a step, and what is known of the training.

    ``samples`` are those of the data set, ``steps`` the steps that the training has at ``before``,
    ``accumulation`` and ``gpus`` those of a step at ``before``, which they divide.
    """

    before: int
    after: int
    noise: Interval | None = None
    noise_source: str = ""
    optimizer: Optimizer = "other"
    rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    samples: int | None = None
    steps: int | None = None
    gpus: int = 1
    has_batch_norm: bool | None = None
    times: tuple[StepTime, ...] = ()
    accumulation: int = 1

    @property
    def present(self) -> Split:
        """The step of ``before`` samples."""
        micro = max(1, self.before // (self.accumulation * self.gpus))
        return Split(micro, self.accumulation, self.gpus)


def explain(question: Question) -> BatchExplanation:
    """The answer, with each claim's source."""
    before, after = question.before, question.after
    critical = critical_batch(question.noise) if question.noise is not None else None
    times = accumulated(question.times, _BEYOND * max(before, after)) if question.times else ()
    trade = _trade(question, critical, times) if critical is not None else None
    rate = learning_rate(
        question.optimizer,
        before,
        after,
        critical,
        value=question.rate,
        first=question.beta1,
        second=question.beta2,
    )
    goodput = curve(times, critical, before) if times and critical is not None else None
    present = question.present
    then = step_after(present, after)
    kept = None
    if then.micro < present.micro and before > after:
        kept = split(before, then.micro, question.gpus)
    claims: list[Claim | None] = [
        noise_claim(after, critical),
        steps_claim(trade),
        rate_claim(rate, before, after),
        accumulation_claim(before, kept),
        accumulating_claim(before, then, trade),
        batch_norm_claim(present, then, question.has_batch_norm),
        epoch_claim(question.samples, present, then) if question.samples is not None else None,
        generalization_claim(before, after),
        doubt_claim() if critical is not None else None,
        *accumulation_caveats(present, kept),
    ]
    return BatchExplanation(
        before=before,
        after=after,
        noise=question.noise,
        critical_batch=critical,
        noise_source=question.noise_source,
        trade=trade,
        learning_rate=rate,
        answer=_answer(question, trade, goodput),
        claims=tuple(claim for claim in claims if claim is not None),
        goodput=goodput,
        epochs=_epochs(question, then),
        micro_batch=kept.micro if kept is not None else None,
        accumulation=kept.accumulation if kept is not None else None,
    )


def _trade(question: Question, critical: Interval, times: Sequence[StepTime]) -> Trade:
    before, after = question.before, question.after
    steps = over(critical, lambda value: steps_factor(before, after, value))
    now, then = (_fastest(times, batch, question) for batch in (before, after))
    time = None
    if now is not None and then is not None:
        slower = then.seconds / now.seconds
        value = steps.value * slower if steps.value is not None else None
        assert steps.high is not None
        time = Interval(value, steps.low * slower, steps.high * slower)
    known = question.steps
    return Trade(
        steps,
        over(critical, lambda value: samples_factor(before, after, value)),
        time,
        known,
        round(known * steps.value) if known is not None and steps.value is not None else None,
        same_samples(known, before, after) if known is not None else None,
    )


def _fastest(times: Sequence[StepTime], batch: int, question: Question) -> StepTime | None:
    """The fastest step on as many GPUs as now; at the current batch size with the present
    micro-batch, if that is among them."""
    step_times = [time for time in times if (time.batch_size, time.gpus) == (batch, question.gpus)]
    micro = question.present.micro
    is_present = batch == question.before
    as_now = [time for time in step_times if is_present and time.micro_batch == micro]
    return min(as_now or step_times, key=lambda each: each.seconds, default=None)


def _epochs(question: Question, then: Split) -> tuple[Epoch, ...]:
    if question.samples is None:
        return ()
    return tuple(epoch(question.samples, each) for each in (question.present, then))


def _answer(question: Question, trade: Trade | None, goodput: GoodputCurve | None) -> str:
    """One line that a person would say aloud."""
    before, after = question.before, question.after
    if trade is None:
        return (
            f"Whether {after} learns faster than {before} is not known without the noise scale; "
            "the learning rate and the rest below"
        )
    text = (
        f"{before} → {after} samples a step: {factor_text(trade.steps)} the steps to the same loss"
    )
    if trade.time is not None:
        text += f", {factor_text(trade.time)} the time"
        text += _verdict(trade.time)
    elif goodput is None:
        text += f", {factor_text(trade.samples)} the samples"
    if goodput is not None:
        best = goodput.best_point.step
        split_up = Split(best.micro_batch, best.accumulation, best.gpus)
        text += f"; fastest {best.batch_size}"
        if split_up.micro != best.batch_size:
            text += f", as {split_up.text}"
        if goodput.best_from != goodput.best_to:
            text += f" (in these ranges {goodput.best_from} to {goodput.best_to})"
        if goodput.flat_from != goodput.flat_to:
            flat = f"{goodput.flat_from} to {goodput.flat_to}"
            text += f"; {flat} are within {percent(1 - NEARLY)} of it"
    return text


def _verdict(time: Interval) -> str:
    assert time.high is not None
    if time.high < 1:
        return " (faster)"
    return " (slower)" if time.low > 1 else " (cannot be told)"
