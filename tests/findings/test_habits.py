"""Habits that simulated steps show."""

from __future__ import annotations

import dataclasses

from trainfit.findings.habits import of_evaluation, of_steps
from trainfit.results.runs.steps import Coverage, HostCopy, StepMakeup, WaitKind


def test_waits_are_told_with_their_lines() -> None:
    lines = tuple(f"/home/me/train.py:{number}" for number in range(1, 7))
    (found,) = of_steps(StepMakeup(8, 1, 8, waits=lines))
    assert (found.kind, found.severity) == ("hidden_syncs", "info")
    assert "train.py:1, " in found.title and found.title.endswith("train.py:4, …")
    assert found.place is not None and found.place.line == 1


def test_a_loop_over_samples_that_waits_for_each() -> None:
    lines = ("/home/me/train.py:7", "/home/me/train.py:3")
    (found,) = of_steps(StepMakeup(64, 1, 64, waits=lines, looped_waits=64))
    assert found.severity == "warning" and "64 times in each step at " in found.title
    assert found.place is not None and found.place.line == 7 and "where" in found.fix.action


def test_trials_of_cudnn_in_step_after_step() -> None:
    assert not list(of_steps(StepMakeup(8, 1, 8, trials=1)))  # a last batch that is shorter
    (found,) = of_steps(StepMakeup(8, 1, 8, trials=2))
    assert found.kind == "cudnn_trials" and "benchmark = False" in found.fix.action
    assert not list(of_steps(None))


def test_an_evaluation_with_gradients_on() -> None:
    (found,) = of_evaluation(Coverage(True, False, graph_at="/home/me/train.py:9"))
    assert found.place is not None and found.place.line == 9 and "no_grad" in found.fix.line
    assert not list(of_evaluation(Coverage(True, False)))


def test_an_evaluation_in_training_mode_has_data_of_its_own() -> None:
    seen = Coverage(True, False, training_at="train.py:9", dropping_at="model.py:3")
    assert not list(of_evaluation(seen))  # samples of a generator
    found = of_evaluation(dataclasses.replace(seen, evaluation_batches=10))
    assert [(each.kind, str(each.place)) for each in found] == [
        ("evaluation_in_training_mode", "train.py:9"),
        ("dropout_in_evaluation", "model.py:3"),
    ]


def test_the_fix_of_a_wait_is_by_what_is_waited_for() -> None:
    def fixes(*kinds: WaitKind, looped: int = 0) -> list[str]:
        lines = tuple(f"train.py:{number}" for number in range(1, 1 + len(kinds)))
        made = StepMakeup(8, 1, 8, waits=lines, wait_kinds=kinds, looped_waits=looped)
        (found,) = of_steps(made)
        return [fix.action for fix in found.fixes]

    (masked,) = fixes("size")
    assert "mask.sum()" in masked
    read, synchronized = fixes("value", "all")
    assert "every 50 steps" in read and "empty_cache" not in synchronized.partition(":")[0]
    (in_loop,) = fixes("copy", "value", looped=12)
    assert "every 100 steps" in in_loop


def test_copies_that_each_step_repeats() -> None:
    mask = HostCopy("model.py:7", 4096, 3, is_made=False)
    made = HostCopy("model.py:9", 64, 1, is_made=True)
    (found,) = of_steps(StepMakeup(8, 1, 8, uploads=(mask,)))
    assert found.kind == "host_copies" and "the same numbers" in found.title
    assert "register_buffer" in found.fix.action and found.at.line == 7
    (found,) = of_steps(StepMakeup(8, 1, 8, uploads=(made, mask)))
    assert "device=x.device" in found.fix.action and len(found.fixes) == 2
