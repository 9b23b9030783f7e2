"""The price and the order of remedies, and how they are written."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_report import of_blocks, of_sections, on_one_line
from trainfit.plan.changes.catalogue import (
    BY_NAME,
    KINDS,
    NAMES,
    cost_percent,
    extra_compute,
    instructions,
    ordered,
    source_line,
)
from trainfit.plan.changes.trials import Before, combinations, expected_bytes, gentler, most_saved
from trainfit.report.changes import remedies_sections, remedy_lines
from trainfit.report.sections.plan import gradients_facts
from trainfit.results.changes import Combination, ExtraCompute, Remedies, Remedy
from trainfit.results.memory import MemoryFigures
from trainfit.results.plan import Inference
from trainfit.results.runs.trace import Applicability, Compute
from trainfit.simgpu.interventions import NAMES as INTERVENTIONS

GIB, MIB = 1 << 30, 1 << 20


def figures(gib: float) -> MemoryFigures:
    taken = int(gib * GIB)
    return MemoryFigures(taken, taken, taken + 400 * MIB, 400 * MIB, (300 * MIB, 500 * MIB))


BEFORE = figures(8)


def remedy(name: str, gib: float = 8, percent: float = 1.0) -> Remedy:
    kind, after = BY_NAME[name], figures(gib)
    return Remedy(
        name=name,
        title=kind.title,
        status="simulated",
        reason="",
        changes=kind.changes,
        changes_detail=kind.changes_detail,
        memory=after,
        fits=True,
        saved_bytes=BEFORE.device_bytes - after.device_bytes,
        extra=ExtraCompute(0.0, 0.0, 0.0),
        cost_percent=percent,
        how=("there, do this",),
    )


def failed(name: str, reason: str = "because") -> Remedy:
    kind = BY_NAME[name]
    return Remedy(name, kind.title, "failed", reason, kind.changes, kind.changes_detail)


# -- price and order ---------------------------------------------------------------------------


def test_extra_compute_is_a_share_of_what_was() -> None:
    before, after = Compute(100, 200, 10), Compute(133, 100, 10)
    assert extra_compute(before, after) == ExtraCompute(pytest.approx(0.33), -0.5, 0.0)
    assert extra_compute(None, after) is None
    assert extra_compute(Compute(0, 0, 0), after) == ExtraCompute(0.0, 0.0, 0.0)


def test_the_price_by_hand() -> None:
    extra = ExtraCompute(0.25, 0.30, 0.5)
    assert cost_percent(extra, "nothing") == pytest.approx(31.0)
    assert cost_percent(extra, "precision") == pytest.approx(31.0)
    assert cost_percent(extra, "training") == pytest.approx(131.0)
    # What saves compute is not paid for it.
    assert cost_percent(ExtraCompute(-0.5, -0.5, 0.0), "nothing") == 1.0
    assert cost_percent(None, "nothing") == 1.0


def test_order_by_memory_won_for_each_percent() -> None:
    items = [remedy("checkpoint", 2, 31.0), remedy("sgd", 4, 101.0), remedy("inplace", 7.9, 1.0)]
    # 6 / 31 = 0.19, 4 / 101 = 0.04, 0.1 / 1 = 0.1
    assert [each.name for each in ordered(items, NAMES)] == ["checkpoint", "inplace", "sgd"]


def test_where_equal_the_order_of_the_seed_articles() -> None:
    names = ["channels-last", "lower-resolution", "checkpoint", "freeze-backbone", "accumulate"]
    done = ordered([remedy(name, 4, 10.0) for name in names], NAMES)
    # "First a smaller batch, then a frozen backbone, checkpointing or a lower resolution."
    assert [each.name for each in done] == names[::-1]


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 16), st.floats(1, 500))))
def test_what_wins_comes_before_what_does_not(rows: list[tuple[str, float, float]]) -> None:
    done = ordered([remedy(*row) for row in rows] + [failed("sgd")], NAMES)
    wins = [(each.saved_bytes or 0) > 0 for each in done]
    assert wins == sorted(wins, reverse=True)
    assert done[-1].status == "failed"
    values = [(e.saved_bytes or 0) / (e.cost_percent or 1) for e in done[:-1]]
    assert all(a >= 0.9 * b for a, b in itertools.pairwise(values) if b > 0)


# -- what there is -----------------------------------------------------------------------------


def test_the_cheapest_together_that_should_fit_come_first() -> None:
    lora, checkpoint, qlora = remedy("lora", 6), remedy("checkpoint", 6.5), remedy("qlora", 4)
    wins = [lora, checkpoint, qlora]

    def expected(names: Sequence[str]) -> int:
        """If savings add up."""
        return BEFORE.device_bytes - sum(r.saved_bytes or 0 for r in wins if r.name in names)

    now = BEFORE.device_bytes
    assert combinations(wins, expected, now - 3 * GIB) == [
        ("checkpoint", "qlora"),
    ]
    cheap = [remedy("lora", 6, 0.5), checkpoint, qlora]
    assert combinations(cheap, expected, now - 3 * GIB) == [
        *(("lora", "checkpoint"), ("checkpoint", "qlora")),
    ]
    assert combinations(wins, expected, now - 5 * GIB) == [("checkpoint", "qlora")]
    # What needs least is tried where nothing is expected to fit.
    assert combinations(wins, expected, 0) == [("checkpoint", "qlora")]
    assert combinations([lora, qlora], expected, now) == []


@pytest.mark.parametrize(
    ("able", "fitting", "tried"),
    [
        (
            ("lora", "qlora", "checkpoint", "accumulate", "sgd"),
            ("qlora",),
            [("lora", "checkpoint"), ("lora", "checkpoint", "accumulate")],
        ),
        (("lora", "qlora", "chunked-loss"), ("freeze-backbone",), [("lora", "chunked-loss")]),
        (("lora", "qlora", "checkpoint"), ("lora", "qlora"), []),  # adapters alone suffice
        (("qlora", "checkpoint"), ("qlora",), []),
        (("lora", "qlora"), ("qlora",), []),
    ],
)
def test_adapters_on_whole_weights_are_tried_where_only_rounded_ones_fit(
    able: tuple[str, ...], fitting: tuple[str, ...], tried: list[tuple[str, ...]]
) -> None:
    assert gentler(able, fitting) == tried


def test_what_changes_the_training_less_comes_before_what_suffices_alone() -> None:
    together = Combination(("lora", "checkpoint"), figures(2), True, 8, None, "python t.py")
    alone = [dataclasses.replace(remedy("sgd", 1), changes="training")]
    tried = dataclasses.replace(REMEDIES, items=tuple(alone), combination=together)
    lines = remedy_lines(tried, False, grows=False)
    assert lines[0].partition(":")[0] == "lora + checkpoint"
    assert len(lines) == 2
    larger = dataclasses.replace(together, fits=False)
    tried = dataclasses.replace(tried, combination=larger)
    assert len(remedy_lines(tried, False, grows=False)) == 1


def test_together_each_leaves_its_share_of_each_kind() -> None:
    now = MemoryFigures(8 * GIB, 10 * GIB, 11 * GIB, GIB, (GIB, GIB))
    before = Before({"activation": 6 * GIB, "parameter": 2 * GIB}, now)
    kinds = {
        "checkpoint": {"activation": 3 * GIB, "parameter": 2 * GIB},
        "accumulate": {"activation": 2 * GIB, "parameter": 2 * GIB},
        "qlora": {"activation": 6 * GIB, "parameter": GIB, "workspace": GIB},
    }
    items = {name: remedy(name, 4) for name in kinds}
    # Activations 6 / 2 / 3 GiB; of 1.25 bytes reserved for each, and 1 GiB of context.
    assert expected_bytes(before, items, kinds, ("checkpoint", "accumulate")) == 4.75 * GIB
    assert expected_bytes(before, items, kinds, ("checkpoint", "qlora")) == 7.25 * GIB


@pytest.mark.parametrize(
    ("name", "phase", "most"),
    [
        ("checkpoint", "backward", 5),
        ("fused-optimizer", "backward", 0),
        ("fused-optimizer", "optimizer", 1),
        ("optimizer-in-backward", "optimizer", 3),
        ("adafactor", "backward", 3),
        ("lora", "backward", 11),
    ],
)
def test_a_remedy_saves_no_more_than_what_it_lowers(name: str, phase: str, most: int) -> None:
    kinds = {"activation": 4, "temporary": 1, "gradient": 2, "optimizer_state": 3, "parameter": 1}
    assert most_saved(name, kinds, phase) == most


def test_every_remedy_has_an_intervention_or_needs_none() -> None:
    without = {"amp-bf16", "amp-fp16", "expandable-segments", "allocator-settings"}
    assert set(NAMES) - without == set(INTERVENTIONS) - {"forward-grad"}
    assert all(kind.changes_detail for kind in KINDS if kind.changes != "nothing")


def test_the_users_line_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("import torch\noptimizer = torch.optim.Adam(model.parameters())\n")
    finding = Applicability("sgd", True, places=(f"{script}:2",))
    shown = "train.py:2: optimizer = torch.optim.Adam(model.parameters())"
    assert instructions(BY_NAME["sgd"], finding)[0] == shown
    assert source_line("gone.py:7") == "gone.py:7"
    many = Applicability("sgd", True, places=tuple(f"gone.py:{n}" for n in range(5)))
    assert "… and 2 more such lines" in instructions(BY_NAME["sgd"], many)


# -- text --------------------------------------------------------------------------------------

REMEDIES = Remedies(
    before=BEFORE,
    batch_size=8,
    largest_batch=20,
    steps=2,
    items=(
        dataclasses.replace(
            remedy("checkpoint", 2, 31.0),
            largest_batch=60,
            extra=ExtraCompute(0.3, 0.2, 0.5),
            found="4 blocks of Layer in encoder",
        ),
        remedy("sgd", 4, 101.0),
        dataclasses.replace(remedy("accumulate", 5), fits=False, launch="python train.py --b=4"),
        remedy("inplace", 8),
        remedy("channels-last", 8.5),
        failed("global-pooling", "the script failed at a.py:3 (RuntimeError: shapes)"),
        dataclasses.replace(failed("adam"), status="not applicable", reason="nothing to win"),
    ),
)


def test_the_section() -> None:
    text = on_one_line(of_sections(remedies_sections(REMEDIES)))
    assert "allocated 8.00 -> 2.00 GiB, reserved 8.00 -> 2.00 GiB" in text
    assert "largest batch 20 -> 60 training the same" in text.replace("training: ", "")
    assert "extra FLOPs +30%, bytes moved +20%" in text
    assert "found 4 blocks of Layer in encoder" in text
    assert "CHANGES TRAINING: another optimizer" in text
    assert "[accumulate]: does not fit" in text
    assert "python train.py --b=4" in text
    assert "no memory saved inplace (±0), channels-last (+512 MiB)" in text
    assert "failed global-pooling: the script failed at a.py:3" in text
    assert "nothing to win" not in text


def test_what_could_not_be_tried() -> None:
    none = Remedies(None, 8, None, 0, (), failure="no step")
    assert "none tried  no step" in of_sections(remedies_sections(none))
    nothing = dataclasses.replace(REMEDIES, items=(failed("sgd"),))
    text = of_sections(remedies_sections(nothing))
    assert "none of the applicable ones lowers the memory" in text
    assert "sgd: because" in text


@pytest.mark.parametrize(
    ("combination", "says"),
    [
        (
            Combination(("sgd", "checkpoint"), figures(1), True, 8, None, "python t.py"),
            "together: sgd + checkpoint: fits memory allocated 1.00 GiB",
        ),
        (
            Combination(("sgd", "checkpoint"), figures(9), False, 8, None, "python t.py"),
            "together: sgd + checkpoint: does not fit either",
        ),
        (
            Combination(("sgd", "checkpoint"), None, False, 8, None, "python t.py", "it broke"),
            "together: sgd + checkpoint: could not be simulated because it broke",
        ),
    ],
)
def test_a_combination(combination: Combination, says: str) -> None:
    tried = dataclasses.replace(REMEDIES, combination=combination)
    assert says in on_one_line(of_sections(remedies_sections(tried)))


def test_inference_with_and_without_gradients() -> None:
    text = on_one_line(of_blocks(*gradients_facts(Inference(True, figures(1), figures(3)))))
    assert "under torch.no_grad() allocated 1.00 GiB" in text
    assert "with gradients allocated 3.00 GiB" in text
    assert "wrap the model calls in `with torch.no_grad():`" in text
    other = on_one_line(
        of_blocks(*gradients_facts(Inference(False, figures(1), None, "the script failed\x1b")))
    )
    assert "with gradients not simulated: the script failed\\x1b" in other
    assert "wrap" not in other
