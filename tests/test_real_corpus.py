"""The corpus of third-party scripts judges rightly: what is wrong is found, notes count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

REAL = Path(__file__).parent / "real"
sys.path.insert(0, str(REAL))

from corpus import figures  # noqa: E402
from corpus.families import all_families  # noqa: E402
from corpus.family import EXAMPLES, Family, HandSum  # noqa: E402
from corpus.files import changed, state_of  # noqa: E402
from corpus.judge import judged  # noqa: E402
from corpus.measure import Bare, Planned  # noqa: E402
from corpus.processes import run  # noqa: E402

FAMILY = Family(
    name="made-up",
    packages=("numpy",),
    command="python train.py {batch}",
    hand=HandSum(parameters=1000, accumulation=2, samples=640),
)
BARE = Bare(2.0, 2.0, {"parameters": 1000, "trained": 1000, "state_bytes": 8000})
RIGHT = {
    "batch_size": 8,
    "effective_batch": 16,
    "samples_of_a_step_s": 16.0,
    "samples": 640,
    "parameters": 1000,
    "trained": 1000,
    "weight_bytes": 4000,
    "gradient_bytes": 4000,
    "state_bytes": 8000,
    "recommended_batch": 96,
    "recommended_bytes": 10,
    "largest_batch": 640,
    "gpu_memory_bytes": 100,
    "limits": {"epoch_steps": 5},
}


def _plan(start: int, notes: tuple[str, ...] = (), **more: object) -> Planned:
    found = {**RIGHT, "batch_size": start, "effective_batch": 2 * start, **more}
    found["samples_of_a_step_s"] = more.get("samples_of_a_step_s", 2.0 * start)
    return Planned(start, 0, "", 4.0, 6.0, 3.0, 4.0, (), found, notes, 4)


def test_all_right() -> None:
    got = judged(FAMILY, BARE, [_plan(8), _plan(16)])
    assert (got.verdict, got.right, got.wrong, got.independent) == ("works", True, (), True)


@pytest.mark.parametrize(
    ("figure", "value", "check"),
    [
        ("effective_batch", 8.0, "effective batch @8"),
        ("samples_of_a_step_s", 8.0, "samples/s × step @8"),
        ("samples", None, "samples @8"),
        ("parameters", 1001, "parameters @8"),
        ("gradient_bytes", 0, "gradient bytes @8"),
        ("state_bytes", 4000, "state bytes @8"),
        ("recommended_batch", 1432, "recommended within the data set @8"),
        ("limits", None, "few steps an epoch are told @8"),
        ("recommended_bytes", 101, "its memory @8"),
        ("largest_batch", 32, "recommended within memory @8"),
    ],
)
def test_a_wrong_figure_is_found(figure: str, value: object, check: str) -> None:
    got = judged(FAMILY, BARE, [_plan(8, **{figure: value}), _plan(16)])
    assert check in got.wrong
    assert got.verdict == "wrong"
    assert not got.right


def test_a_note_that_says_so_counts() -> None:
    noted = replace(FAMILY, noted={"samples": "size of the data set is not known"}, expected="note")
    told = ("the size of the data set is not known: it has no length",)
    got = judged(noted, BARE, [_plan(8, told, samples=None), _plan(16, told, samples=None)])
    assert (got.verdict, got.wrong, got.right) == ("note", (), True)
    silent = judged(noted, BARE, [_plan(8, samples=None), _plan(16, samples=None)])
    assert silent.wrong == ("samples @8", "samples @16")


@pytest.mark.parametrize(
    ("batches", "independent"),
    [((64, 64), True), ((64, 72), True), ((64, 80), False), ((64, None), False)],
)
def test_recommendations_are_compared(batches: tuple[int, int], independent: bool) -> None:
    plans = [_plan(start, recommended_batch=b) for start, b in zip((8, 16), batches, strict=True)]
    got = judged(FAMILY, BARE, plans)
    assert got.independent is independent
    assert got.right is independent


def test_a_batch_that_is_kept_is_no_recommendation_where_every_plan_says_why() -> None:
    told = ("the step's time is not known at other batch sizes: keeping 8",)
    both = [_plan(8, told, recommended_batch=8), _plan(16, told, recommended_batch=16)]
    one = [_plan(8, told, recommended_batch=8), _plan(16, recommended_batch=16)]
    got = judged(FAMILY, BARE, both)
    assert (got.independent, got.right) == (None, True)
    assert judged(FAMILY, BARE, one).independent is False
    steps = {"reason": "leaves an epoch of 3840 samples 50 steps (224 would be faster)"}
    few = [_plan(8, recommended_batch=72, limits=steps), both[1]]
    assert judged(FAMILY, BARE, few).independent is None


def test_a_hand_sum_that_the_bare_run_denies_is_wrong() -> None:
    got = judged(FAMILY, replace(BARE, found={**BARE.found, "trained": 999}), [_plan(8), _plan(16)])
    assert got.wrong == ("bare: trained",)


def test_a_refusal_is_right_only_where_it_is_expected() -> None:
    refused = Planned(8, 2, "it needs two GPUs: …", 1.0, 1.0, None, None, ())
    assert judged(FAMILY, BARE, [refused]).verdict == "failed"
    expected = replace(FAMILY, expected="refused", refusal="two GPUs")
    assert judged(expected, BARE, [refused]).right


def test_changed_files_are_found(tmp_path: Path) -> None:
    for name in ("kept", "gone", "written"):
        (tmp_path / name).write_text(name)
    before = state_of(tmp_path)
    (tmp_path / "gone").unlink()
    (tmp_path / "written").write_text("WRITTEN")
    (tmp_path / "made").mkdir()
    found = {line.replace(str(tmp_path), "") for line in changed(before, state_of(tmp_path))}
    assert found == {"-/gone", "~/written", "+/made"}
    got = judged(FAMILY, BARE, [replace(_plan(8), files_changed=("+/made",)), _plan(16)])
    assert (got.wrong, got.right) == ((), False)


def test_every_family_declares_what_it_needs() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for name in ("real", "real-llm", "dev", "dev-nodeps", "plan")
        for line in (REAL.parents[1] / "requirements" / f"{name}.txt").read_text().splitlines()
        if "==" in line
    }
    families = all_families()
    assert len(families) >= 30
    for family in families:
        assert {name.lower().replace("_", "-") for name in family.packages} <= pinned, family.name
        assert (family.expected == "refused") == bool(family.refusal), family.name
        if not family.refusal:
            assert family.hand is not None and family.hand.parameters > 1000, family.name
        for word in family.words(Path("data"), 4, bare=True):
            if "{examples}" in family.command and not EXAMPLES:
                break
            assert not word.endswith(".py") or Path(word).exists(), word


def test_what_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FAMILY.lacking() == ""
    lacks = replace(FAMILY, packages=("numpy", "no-such-package"))
    assert lacks.lacking() == "no-such-package"
    monkeypatch.setattr("corpus.family.EXAMPLES", "")
    script = replace(FAMILY, command="python {examples}/run.py")
    assert script.lacking().startswith("TRAINFIT_EXAMPLES, ")


@pytest.mark.parametrize(
    ("kind", "said", "effective", "wrong"),
    [
        ("kv_cache", "a text of 64", 16, ()),
        ("gradient", "a text of 64", 16, ("has gradient @8",)),
        ("kv_cache", "a text of 128", 16, ("says a text of 128 @8",)),
        ("kv_cache", "a text of 64", 32, ("effective batch @8",)),
    ],
)
def test_a_simulated_family_has_its_kinds_of_memory_and_what_is_to_be_said(
    kind: str, said: str, effective: int, wrong: tuple[str, ...]
) -> None:
    """Of other batch sizes nothing is asked."""
    hand = HandSum(parameters=1000, effective=effective)
    family = replace(FAMILY, simulates=True, kinds=(kind,), said=(said,), hand=hand)
    plan = _plan(8, ("of a text of 64 tokens, 3 calls are simulated",))
    figures = {**plan.figures, "kinds": ["kv_cache", "parameter"], "recommended_batch": 10**6}
    assert judged(family, BARE, [replace(plan, figures=figures)]).wrong == wrong


def test_ratios_leave_out_what_did_not_run() -> None:
    run_well = {"bare": {"found": {"steps": 2}, "wall_s": 2.0, "cpu_s": 4.0}}
    plan = {"figures": {"batch_size": 1}, "wall_s": 6.0, "cpu_s": 4.0, "first_wall_s": 3.0}
    failed = {"bare": {"found": {}, "wall_s": 1.0, "cpu_s": 1.0}, "plans": [plan]}
    assert figures.ratios([{**run_well, "plans": [plan]}, failed], "first", "wall") == [1.5]
    assert figures.ratios([{**run_well, "plans": [plan]}], "", "cpu") == [1.0]


@pytest.mark.slow
def test_the_instrument_counts_a_bare_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))\n"
        "model[0].requires_grad_(False)\n"
        "optimizer = torch.optim.AdamW(model[1].parameters())\n"
        "for step in range(1, 1000):\n"
        "    model(torch.randn(6, 4)).sum().backward()\n"
        "    if step % 2 == 0:\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "print('the end')\n"
    )
    report = tmp_path / "report.json"
    env = {**os.environ, "PYTHONPATH": str(REAL / "instrument"), "BARE_RUN": str(report)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert done.stdout == "", done.stderr
    found = json.loads(report.read_text())
    assert (found["parameters"], found["trained"]) == (4 * 8 + 8 + 8 + 1, 9)
    assert (found["gradient_bytes"], found["state_bytes"]) == (36, 72)
    assert (found["calls"], found["steps"]) == ([6, 6], 2)


def test_a_run_over_its_limit_is_ended_with_its_children(tmp_path: Path) -> None:
    code = "import subprocess, sys; print('here', flush=True); subprocess.run(['sleep', '600'])"
    done = run([sys.executable, "-c", code], tmp_path, dict(os.environ), 3.0)
    assert done.returncode is None
    assert done.stdout == "here\n"
    assert done.first_wall_s is not None
