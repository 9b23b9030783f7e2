"""What an optimizer step consists of, told from what it was given; what a launch makes of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfit.plan.command.parsing import parse_command
from trainfit.plan.command.tunables import CommandError
from trainfit.plan.sizing.recommendation import EffectiveBatch, accumulation_for
from trainfit.plan.sizing.speed import fast_end
from trainfit.report.steps import step_lines
from trainfit.results.runs.steps import StepMakeup
from trainfit.results.runs.trace import StepFeed
from trainfit.results.speed import StepSpeed
from trainfit.scripts.samples.batch_sizes import samples_in
from trainfit.scripts.step_makeup import makeup_of, most_frequent

#: A command that is there, and needs no script.


def fed(batches: int, calls: int = 1, backwards: int | None = None, size: int = 8) -> StepFeed:
    return StepFeed((size,) * batches, calls, size, calls if backwards is None else backwards)


def figures(*feeds: StepFeed, batch_size: int | None = None) -> tuple[int | None, ...]:
    found = makeup_of(feeds, batch_size)
    assert found is not None
    return found.micro_batch, found.accumulation, found.effective_batch, found.loader_batches


# --- By the DataLoader ----------------------------------------------------------------------------


def test_a_step_without_accumulation() -> None:
    assert figures(fed(1), fed(1)) == (8, 1, 8, 1)


def test_batches_that_are_kept_and_trained_on_in_parts() -> None:
    """TRL's loader gives the prompts of several micro-batches with each of them, once more."""
    kept = StepFeed((16, 16), 2, 8, 2, is_given_again=True)
    assert figures(kept, kept, kept) == (8, 2, 16, 2)
    assert figures(dataclasses.replace(kept, is_given_again=False)) == (16, 2, 32, 2)
    assert figures(dataclasses.replace(kept, call_samples=16)) == (16, 2, 32, 2)
    # Several rows of each sample (a question's answers): samples are the loader's.
    assert figures(dataclasses.replace(kept, call_samples=64)) == (16, 2, 32, 2)
    first, later = StepFeed((32,), 1, 8, 1), StepFeed((32,), 1, 8, 1, is_given_again=True)
    assert figures(first, later, later) == (8, 1, 8, 1)


def test_the_last_shorter_step_of_an_epoch_is_not_the_typical_one() -> None:
    found = makeup_of([fed(4, 4), fed(4, 4), fed(2, 2)])
    assert found is not None
    assert (found.accumulation, found.effective_batch, found.varied) == (4, 32, True)
    assert found.per_step == (4, 4, 2)


def test_two_steps_of_which_the_last_is_short() -> None:
    assert figures(fed(4, 4), fed(2, 2)) == (8, 4, 32, 4)


def test_a_batch_that_is_fetched_ahead_is_of_the_next_step() -> None:
    assert figures(fed(5, 4), fed(4, 4), fed(3, 4)) == (8, 4, 32, 4)
    assert figures(fed(5, 4), fed(4, 4)) == (8, 4, 32, 4)


def test_where_no_call_is_known_the_passes_tell_what_was_fetched_ahead() -> None:
    """ZeRO-3: the parameters of the module that is called are parts that have no numbers."""
    found = makeup_of([fed(3, 0, 2), fed(2, 0, 2), fed(2, 0, 2)])
    assert found is not None and (found.per_step, found.varied) == ((2, 2, 2), False)


@pytest.mark.parametrize("steps", [2, 5, 6])
def test_in_epochs_of_two_steps_a_batch_is_fetched_ahead_too(steps: int) -> None:
    """Preferences: a model is given two answers for each sample, and one batch at a time."""
    both, none = StepFeed((128, 128), 1, 256, 1), StepFeed((), 1, 256, 1)
    assert figures(*[both, none, both, none, both, none][:steps]) == (128, 1, 128, 1)
    # Two batches that are joined for one call are what the step had.
    assert figures(both, both) == (256, 1, 256, 2)


@given(
    per_step=st.integers(1, 4),
    ahead=st.integers(1, 3),
    epochs=st.integers(1, 3),
    steps=st.integers(2, 6),
)
def test_batches_fetched_ahead_never_change_a_step(
    per_step: int, ahead: int, epochs: int, steps: int
) -> None:
    total = per_step * steps
    feeds = []
    for _ in range(epochs):
        given_so_far = 0
        for step in range(1, steps + 1):
            now = min(total, step * per_step + ahead)
            feeds.append(StepFeed((8,) * (now - given_so_far), per_step, 8, per_step))
            given_so_far = now
    assert figures(*feeds) == (8, per_step, 8 * per_step, per_step)


def test_short_last_batches_of_short_epochs_are_not_the_typical_ones() -> None:
    # A data set of 512: two batches of 192, one of 128; each is fetched one step ahead.
    ahead = [StepFeed((192, 192), 1, 192, 1), StepFeed((128,), 1, 192, 1), StepFeed((), 1, 128, 1)]
    assert figures(*ahead, *ahead) == (192, 1, 192, 1)
    # Of 448 and 64: as many whole ones as short ones.
    assert figures(*(StepFeed((size,), 1, size, 1) for size in (448, 64, 448, 64)))[2] == 448


def test_batches_that_no_trained_call_took_do_not_count() -> None:
    assert figures(fed(6, 4), fed(6, 4), fed(6, 4)) == (8, 4, 32, 4)


def test_a_batch_that_is_used_by_several_calls_counts_once() -> None:
    assert figures(fed(1, 3), fed(1, 3)) == (8, 1, 8, 1)


def test_a_batch_that_is_cut_into_pieces() -> None:
    pieces = StepFeed((8,), 4, 2, 4)
    assert figures(pieces, pieces) == (2, 4, 8, 1)


def test_batches_that_are_joined_for_one_call() -> None:
    joined = StepFeed((8, 8), 1, 16, 1)
    assert figures(joined, joined) == (16, 1, 16, 2)


def test_losses_of_several_batches_with_one_backward_pass() -> None:
    assert figures(fed(4, 4, 1), fed(4, 4, 1)) == (8, 4, 32, 4)


def test_a_model_whose_forward_is_called_by_another_name() -> None:
    unseen = StepFeed((8, 8), 0, None, 2)
    assert figures(unseen, unseen) == (8, 2, 16, 2)


def test_batches_of_nothing_that_has_a_length() -> None:
    blind = StepFeed((None, None), 2, 8, 2)
    found = makeup_of([blind, blind])
    assert found is not None and found.effective_batch is None
    assert "collate_fn" in found.why


# --- By calls of the model ------------------------------------------------------------------------


def test_batches_that_a_script_makes_itself() -> None:
    assert figures(fed(0, 40), fed(0, 40)) == (8, 40, 320, None)


def test_a_batch_size_in_the_command_counts_in_the_users_unit() -> None:
    sequence_first = StepFeed((), 4, 1024, 4)
    assert figures(sequence_first, batch_size=12) == (12, 4, 48, None)
    whole = StepFeed((), 4, 8, 4)
    assert figures(whole, batch_size=32) == (8, 4, 32, None)
    in_chunks = StepFeed((), 3, 65536, 1)
    assert figures(in_chunks, batch_size=2048) == (2048, 1, 2048, None)


@pytest.mark.parametrize(
    ("feed", "reason"),
    [
        (StepFeed(), "no model was called"),
        (StepFeed((), 3, 8, 3, others=True), "several optimizers"),
        (StepFeed((), 2, 8, 1), "2 times for 1 backward"),
        (StepFeed((), 2, None, 2), "no tensor"),
    ],
)
def test_what_cannot_be_told_is_said(feed: StepFeed, reason: str) -> None:
    found = makeup_of([feed, feed])
    assert found is not None
    assert (found.micro_batch, found.accumulation, found.effective_batch) == (None, None, None)
    assert reason in found.why
    assert "not known" in step_lines(found)[0]


def test_no_step_has_no_makeup() -> None:
    assert makeup_of([]) is None
    assert step_lines(None) == []


# --- Properties -----------------------------------------------------------------------------------


@given(
    st.integers(1, 64),
    st.integers(1, 50),
    st.integers(2, 12),
    st.integers(0, 3),
    st.booleans(),
)
def test_any_regular_loop_is_counted(
    size: int, accumulation: int, steps: int, ahead: int, loader: bool
) -> None:
    """However many batches are fetched ahead once, and with any last step."""
    batches = [accumulation + ahead * (step == 0) for step in range(steps)]
    feeds = [
        StepFeed((size,) * (n if loader else 0), accumulation, size, accumulation) for n in batches
    ]
    found = makeup_of(feeds)
    assert found is not None
    assert found.effective_batch == size * accumulation
    assert found.micro_batch == size
    assert found.accumulation == accumulation


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(0, 9))
def test_the_most_frequent_is_one_of_them(values: list[int], near: int) -> None:
    found = most_frequent(values, near)
    assert values.count(found) == max(map(values.count, values))


_FEEDS = st.lists(
    st.builds(
        StepFeed,
        batches=st.lists(st.none() | st.integers(1, 64), max_size=5).map(tuple),
        calls=st.integers(0, 5),
        call_samples=st.none() | st.integers(1, 64),
        backwards=st.integers(0, 5),
        others=st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@given(_FEEDS, st.none() | st.integers(1, 64))
def test_whatever_was_seen_the_figures_agree_or_the_reason_is_said(
    feeds: list[StepFeed], batch_size: int | None
) -> None:
    found = makeup_of(feeds, batch_size)
    assert found is not None
    if found.effective_batch is None:
        assert found.why
    else:
        assert found.micro_batch is not None and found.accumulation
        product = found.micro_batch * found.accumulation
        assert abs(product - found.effective_batch) <= found.accumulation / 2
    assert len(found.per_step) in (0, len(feeds))


# --- Samples of a batch ---------------------------------------------------------------------------


class Graphs:
    num_graphs = 5


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(4, 3), 4),
        (np.zeros((4, 3)), 4),
        ([torch.zeros(4, 3), torch.zeros(4)], 4),
        ((torch.zeros(4, 3), None, 0.5), 4),
        ({"ids": torch.zeros(4, 7), "labels": torch.zeros(4), "names": ["a"] * 4}, 4),
        ([torch.zeros(5), torch.zeros(7), torch.zeros(3), torch.zeros(9)], 4),
        ([torch.zeros(3, 8, 8)] * 4, 4),
        (tuple([{"image": torch.zeros(3, 8, 8)}] * 4), 4),
        ((tuple([torch.zeros(3, 8, 8)] * 4), tuple([{"boxes": torch.zeros(2, 4)}] * 4)), 4),
        (["a", "b", "c", "d"], 4),
        (Graphs(), 5),
        (torch.zeros(()), None),
        (None, None),
    ],
)
def test_samples_by_the_look_of_a_batch(batch: object, samples: int | None) -> None:
    assert samples_in(batch) == samples


def test_the_size_asked_for_decides_where_a_batch_has_several() -> None:
    assert samples_in([torch.zeros(3, 8, 8), torch.zeros(3, 8, 8)], likely=2) == 2
    assert samples_in({"time": torch.zeros(100, 8), "batch": torch.zeros(8)}, likely=8) == 8


# --- Launch ---------------------------------------------------------------------------------------


def seen(accumulation: int = 4, micro: int = 8, **more: object) -> StepMakeup:
    return StepMakeup(micro, accumulation, micro * accumulation, "DataLoader", **more)  # type: ignore[arg-type]


def test_the_placeholder_keeps_the_effective_batch() -> None:
    command = parse_command(
        ["python", "-m", "json.tool", "--b={batch_size:8}", "--a={grad_accum:4}"]
    )
    assert accumulation_for(command, seen(), 8, 16).values == {"grad_accum": "2"}
    assert "step times" in accumulation_for(command, seen(), 8, 16).note
    assert accumulation_for(command, seen(), 8, 16).action == ""
    found = accumulation_for(command, seen(), 8, 256)
    assert found.values == {"grad_accum": "1"}
    assert "from 32 to 256" in found.action
    smaller = accumulation_for(command, seen(), 8, 2)
    assert command.line(**smaller.values, batch_size="2") == "python -m json.tool --b=2 --a=16"


@pytest.mark.parametrize(
    "name", ["gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps"]
)
def test_the_placeholder_may_be_called_as_the_librarys_option(name: str) -> None:
    command = parse_command(["python", "-m", "json.tool", f"--{name}={{{name}:4}}"])
    assert command.present == {"grad_accum": "4"}
    assert command.line(grad_accum="2") == f"python -m json.tool --{name}=2"
    assert command.line() == f"python -m json.tool --{name}=4"


@pytest.mark.parametrize(
    "word", ["{grad_accum:0}", "{grad_accum:x}", "{grad_acum:4}", "{grad_accum}"]
)
def test_a_placeholder_that_makes_no_sense_is_refused(word: str) -> None:
    with pytest.raises(CommandError, match="grad_ac"):
        parse_command(["python", "-m", "json.tool", word])


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 512))
def test_the_effective_batch_stays_as_near_as_it_can(micro: int, steps: int, chosen: int) -> None:
    command = parse_command(
        ["python", "-m", "json.tool", f"{{batch_size:{micro}}}", f"{{grad_accum:{steps}}}"]
    )
    found = accumulation_for(command, seen(steps, micro), micro, chosen)
    wanted, most = micro * steps, int(found.values.get("grad_accum", steps))
    becomes = chosen * most
    assert most == 1 or abs(becomes - wanted) <= chosen / 2
    assert bool(found.action) == (becomes != wanted)


def test_a_critic_that_steps_five_times_has_the_samples_of_one_batch() -> None:
    """StarGAN and WGANs: a step is the generator's, with five of the critic's."""
    turns = dataclasses.replace(fed(5, calls=20, backwards=6, size=16), rounds=5)
    found = makeup_of([turns] * 3)
    assert found is not None
    assert (found.effective_batch, found.accumulation, found.rounds) == (80, 1, 5)
    command = parse_command(["python", "-m", "json.tool", "--b={batch_size:16}"])
    effective = EffectiveBatch(command, found, 16)
    assert effective.words(16) == "the effective batch size of 16"
    assert "from 16 to 8" in accumulation_for(command, found, 16, 8).action


def test_without_a_placeholder_it_is_said_what_changes_and_what_keeps_it() -> None:
    command = parse_command(["python", "-m", "json.tool", "--b={batch_size:8}"])
    note = accumulation_for(command, seen(where="x.py:12"), 8, 24).action
    assert "from 32 to 96" in note and "x.py:12" in note and "{grad_accum:4}" in note
    assert "to come nearest to it (24)" in note
    note = accumulation_for(command, seen(), 8, 64).action
    assert "from 32 to 256" in note and "only a batch size of at most 32 keeps it" in note
    note = accumulation_for(command, seen(loop="Lightning"), 8, 16).action
    assert "accumulate_grad_batches" in note and "to 2 instead of 4" in note
    assert accumulation_for(command, seen(1), 8, 64).action == ""
    assert accumulation_for(command, seen(), 8, 8).action == ""


def test_a_batch_size_of_the_whole_step_is_left_alone() -> None:
    command = parse_command(["python", "-m", "json.tool", "--b={batch_size:32}"])
    assert accumulation_for(command, seen(4, 8), 32, 64) == accumulation_for(command, None, 32, 64)


def test_a_placeholder_without_effect_is_left_as_it_is() -> None:
    command = parse_command(
        ["python", "-m", "json.tool", "--b={batch_size:8}", "--a={grad_accum:2}"]
    )
    found = accumulation_for(command, seen(4), 8, 16)
    assert found.values == {} and "accumulates 4" in found.action


def test_the_step_in_words() -> None:
    assert step_lines(seen()) == ["micro-batch 8 × accumulation 4 = effective batch 32"]
    assert step_lines(seen(1)) == []
    of_four = dataclasses.replace(seen(), processes=4)  # it said that 32 was the effective batch
    assert "= 32 samples of each of 4 processes" in step_lines(of_four)[0]
    of_all = "micro-batch 32 × accumulation 4 = effective batch 128"
    assert step_lines(of_four.of_all(4)) == [of_all]
    lines = step_lines(seen(per_step=(4, 4, 4, 2, 4), varied=True))
    assert lines[1] == "micro-batches of the simulated steps: 3 × 4, 2, 4"


def test_a_loader_has_to_keep_up_with_each_batch_of_a_step() -> None:
    step = StepSpeed(8, 0.4, (0.32, 0.54), 0.4, 0.1, 0.0, "bandwidth", 80.0, 0.2)
    given = fast_end(step, "T4", seen(loader_batches=4))
    assert given.step_s == pytest.approx(0.08)
    assert given.work_s == pytest.approx(0.04)
    assert "for 4 batches" in given.source
    for one in (None, seen(1, loader_batches=1), seen(4)):  # unknown, one, and none from a loader
        assert fast_end(step, "T4", one).step_s == pytest.approx(0.32)
