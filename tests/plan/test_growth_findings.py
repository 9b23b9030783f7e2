"""Memory that grows: by steps, by calls, by epochs."""

from __future__ import annotations

import pytest

from trainfit.plan.growth_findings import of_calls, of_longer_epochs, of_steps, told_once
from trainfit.plan.sizing.memory_model import Growth
from trainfit.results.configuration import EpochEnd
from trainfit.results.findings import EPOCH_GROWTH, Finding, Place
from trainfit.results.runs.steps import GrowthSource, StepPattern, StepUnit


def test_epochs_that_need_more_and_more() -> None:
    # Without the optimizer's state in the first step; the last rise is 500.
    (found,) = of_longer_epochs([900, 1000, 1300, 1300, 1800, 1800], 2, free_bytes=2500)
    assert found.kind == "memory_grows_by_epoch" and found.severity == "critical"
    assert found.subject == "about 8 epochs at the latest"  # 3 + 2500 / 500


@pytest.mark.parametrize(
    "peaks",
    [
        [900, 1000, 1000, 1000, 1000, 1000],
        [900, 1000, 1300, 1300, 1300, 1300],  # once, as with a part that is unfrozen
        [900, 1000, 1300, 1200, 1800, 1800],  # steps of an epoch differ: the data does
        [900, 1000, 1300, 1300, 1301, 1301],
        [900, 1000, 1300, 1300],
    ],
)
def test_what_is_no_growth_by_epoch(peaks: list[int]) -> None:
    assert not list(of_longer_epochs(peaks, 2, free_bytes=2500))


def _pattern(unit: StepUnit, operator: str, module: str = "Net.gru") -> StepPattern:
    source = GrowthSource(200 << 10, operator, module, "activation", "forward", "train.py:4")
    return StepPattern(
        "growing", 9, (1,), (1,), growth_bytes_per_step=1 << 20, sources=(source,), unit=unit
    )  # fmt: skip


def test_calls_that_keep_their_graphs() -> None:
    (found,) = of_calls(_pattern("model call", "aten._cudnn_rnn.default"))
    assert found.at.line == 4 and "no_grad" in found.fix.action
    assert not list(of_calls(_pattern("model call", "aten.cat.default")))  # a cache
    assert not list(of_calls(_pattern("optimizer step", "aten._cudnn_rnn.default")))


def test_what_keeps_tensors_is_told_once() -> None:
    pattern, growth = _pattern("optimizer step", "aten.mm.default"), Growth(1 << 20, 1 << 30)
    assert [each.kind for each in of_steps(pattern, growth)] == ["tensors_kept"]
    cause = Finding("graph_grows", "warning", "a graph that goes back through all steps")
    assert not list(of_steps(pattern, growth, known=(cause,)))


def test_growth_by_epochs_and_its_cause_are_told_once() -> None:
    grows = Finding(EPOCH_GROWTH, "critical", "grows", place=Place("train.py", 9))
    remade = Finding(
        "model-each-epoch", "critical", "new in each epoch", place=Place("train.py", 3)
    )
    kept = Finding("models-kept", "warning", "a list of models", place=Place("train.py", 9))
    other = Finding("models-kept", "warning", "another list", place=Place("train.py", 12))
    assert [*told_once((remade, grows))] == [remade]
    assert [*told_once((kept, other, grows))] == [other, grows]
    assert [*told_once((kept, other))] == [kept, other]


def test_what_a_later_epoch_trains_is_not_called_frozen() -> None:
    frozen = Finding("mostly_frozen", "warning", "", (), "", ())
    later = EpochEnd("simulated", fits=True, later="train.py:16")
    assert [*told_once((frozen,), later)] == []
    assert [*told_once((frozen,), EpochEnd("simulated", fits=True))] == [frozen]
