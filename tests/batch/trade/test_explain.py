"""The whole explanation: what is said for which question, and what is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.batch.explain import Question, explain
from trainfit.report.layout import LINES, plain_text
from trainfit.report.sections.batch import trade_subject
from trainfit.report.writers.terminal import screen, whole
from trainfit.results.batch import BatchExplanation, Interval, StepTime
from trainfit.results.text import laid_out_for

NOISE = Interval(200.0, 150.0, 280.0)
TIMES = tuple(StepTime(8 * 2**n, 1, 1, 0.02 + 0.002 * 8 * 2**n) for n in range(4))


def topics(found: BatchExplanation) -> list[str]:
    return [claim.topic for claim in found.claims]


def test_a_smaller_batch_with_all_that_is_known() -> None:
    found = explain(
        Question(64, 16, NOISE, "given", "adam", 1e-3, 0.9, 0.999, 10_000, 1000, 1, True, TIMES)
    )
    assert found.trade is not None and found.trade.steps.value == pytest.approx(13.5 / 4.125)
    assert found.trade.samples.value == pytest.approx(216 / 264)
    assert found.trade.time is not None and found.trade.time.value == pytest.approx(
        13.5 / 4.125 * 0.052 / 0.148
    )
    assert found.trade.steps_same_samples == 4000 and found.trade.steps_then == 3273
    assert (found.micro_batch, found.accumulation) == (16, 4)
    assert [each.steps for each in found.epochs] == [156, 625]
    assert set(topics(found)) == {
        "noise scale", "steps", "learning rate", "accumulation", "batch norm", "last batch",
        "generalization", "contrastive loss", "token mean",
    }  # fmt: skip
    assert all(claim.sources for claim in found.claims)
    assert (
        found.goodput is not None
        and max(point.step.batch_size for point in found.goodput.points) == 256
    )


def test_all_factors_are_over_what_a_training_may_be_off() -> None:
    found = explain(Question(64, 16, NOISE, "given", "adam"))
    assert found.critical_batch == Interval(200.0, 50.0, 840.0) and found.trade is not None
    steps = found.trade.steps
    assert steps.low == pytest.approx((1 + 50 / 16) / (1 + 50 / 64))
    assert steps.high == pytest.approx((1 + 840 / 16) / (1 + 840 / 64))
    assert "50 to 840 over a training" in plain_text(whole(trade_subject(found)))
    below = explain(Question(64, 16, Interval(None, 150.0, None), "given"))
    assert "50 or more over a training" in plain_text(whole(trade_subject(below)))


def test_a_larger_batch_needs_neither_accumulation_nor_batch_norms_caveat() -> None:
    found = explain(Question(16, 64, NOISE, "given", "sgd", 0.1))
    assert set(topics(found)) == {
        "noise scale", "steps", "learning rate", "generalization", "accumulation",
    }  # fmt: skip
    assert found.trade is not None and found.trade.time is None and found.goodput is None
    assert found.accumulation is None and found.learning_rate.warm_up


def test_without_a_noise_scale_nothing_is_claimed_of_steps() -> None:
    found = explain(Question(16, 64, times=TIMES))
    assert found.trade is None and found.goodput is None
    assert "not known" in found.answer and "steps" not in topics(found)


@pytest.mark.parametrize(
    ("noise", "after", "wanted"),
    [(Interval(None, 3e4, None), 64, "far below"), (NOISE, 256, "near"),
     (Interval(4.0, 3.0, 5.0), 64, "far above")],
)  # fmt: skip
def test_where_a_batch_lies(noise: Interval, after: int, wanted: str) -> None:
    found = explain(Question(32, after, noise, "given"))
    assert wanted in found.claims[0].text


def test_layers_without_batch_norm_and_one_sample() -> None:
    assert "batch norm" not in topics(explain(Question(64, 16, NOISE, has_batch_norm=False)))
    one = explain(Question(64, 8, NOISE, samples=66, gpus=2, has_batch_norm=True))
    texts = {claim.topic: claim.text for claim in one.claims}
    assert "SyncBatchNorm" in texts["batch norm"] and "see 4 samples" in texts["batch norm"]
    assert "raises an error for a single sample" in texts["last batch"]
    assert (one.micro_batch, one.accumulation) == (4, 8)


def test_several_gpus_that_accumulate() -> None:
    """Of 64 samples = 8 × 4 × 2, BatchNorm sees 8; 32 are half the micro-batches, not smaller ones.

    A step is compared with those on as many GPUs."""
    times = tuple(
        StepTime(micro, accumulation, gpus, 0.01 * micro * accumulation)
        for micro, accumulation, gpus in ((8, 4, 2), (8, 2, 2), (16, 1, 2), (4, 1, 8))
    )
    asked = Question(64, 32, NOISE, gpus=2, accumulation=4, samples=1000, times=times)
    found = explain(asked)
    assert "accumulation" not in topics(found) and "batch norm" not in topics(found)
    assert found.trade is not None and found.trade.time is not None
    assert found.trade.time.value == pytest.approx(found.trade.steps.value / 2)  # type: ignore[operator]
    # 500 samples on each: 62 micro-batches and 4 samples; 31 steps of two.
    assert [(each.steps, each.dropped) for each in found.epochs] == [(15, 8), (31, 8)]
    # With one micro-batch now, fewer samples are a smaller one.
    alone = explain(dataclasses.replace(asked, accumulation=1))
    texts = {claim.topic: claim.text for claim in alone.claims}
    assert "2 micro-batches of 16 on each of 2 GPUs" in texts["accumulation"]
    assert "see 16 samples, not 32" in texts["batch norm"]


@given(
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.one_of(st.none(), st.floats(0.01, 1e6)),
    st.sampled_from(["sgd", "adam", "other"]),
    st.booleans(),
)
def test_any_question_is_answered_on_one_screen(
    before: int, after: int, value: float | None, optimizer: str, unbounded: bool
) -> None:
    noise = None
    if value is not None:
        noise = Interval(None if unbounded else value, value / 2, None if unbounded else 2 * value)
    found = explain(
        Question(
            before, after, noise, "given", optimizer, 0.1, 0.9, 0.999, 5000, 100, 1, None, TIMES
        )  # type: ignore[arg-type]
    )
    assert BatchExplanation.from_json(found.to_json(), Path("x.json")) == found
    with laid_out_for(80):
        text = plain_text(screen(trade_subject(found)))
    assert len(text.splitlines()) <= LINES
    assert max(map(len, text.splitlines())) <= 80
