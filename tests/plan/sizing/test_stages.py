"""What is said of a pipeline's bubbles."""

from __future__ import annotations

from trainfit.plan.sizing.stages import Pipeline
from trainfit.results.speed import CollectiveTime, PipelineStage


def test_what_fills_the_rest_of_a_bubble_is_named() -> None:
    stages = tuple(PipelineStage(rank, 0, 0, 0.05, 1) for rank in range(2))
    reduced = CollectiveTime("all_reduce", 7, 1 << 20, 0.02)
    (found,) = Pipeline(stages, 0.1, 8, (reduced,)).findings()
    assert found.title == "the GPUs of the stages compute nothing in 50% of a step"
    assert "11% of it" in found.cause and "all-reduces with the other pipelines" in found.cause
    assert any("all-reduces" in each.what and each.value == "20 ms" for each in found.evidence)
    (alone,) = Pipeline(stages, 0.1, 8).findings()
    assert "all-reduce" not in alone.cause
