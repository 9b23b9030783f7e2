"""The short answer of a plan: one screen, whatever the result holds."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers_report import plan_screen
from tests.plan.steps.test_speed import SPEED
from tests.report.plan.test_text import GIB, MEMORY, PLAN, with_now
from trainfit.report.layout import LINES
from trainfit.report.sections.memory import without_prefix
from trainfit.report.sections.plan_facts import facts
from trainfit.results.changes import Combination, LaunchPart, Remedies, Remedy
from trainfit.results.configuration import (
    AmpChoice,
    BatchLimits,
    BatchShapes,
    EpochEnd,
    amp_hazard,
)
from trainfit.results.files.contents import Note, complete
from trainfit.results.findings import ACCUMULATION_CHANGES, SAMPLING, Finding
from trainfit.results.memory import MemoryFigures
from trainfit.results.plan import Inference, PlanResult
from trainfit.results.real_runs import VersusCpu
from trainfit.results.runs.steps import Coverage, StepMakeup, StepPattern
from trainfit.results.speed import DataLoading, Speed, StepSpeed
from trainfit.results.text import size

KNOWN = MemoryFigures(
    *(6 * GIB, 7 * GIB, 8 * GIB, GIB, (GIB, GIB)),
    reserved_range_bytes=(6 * GIB, 8 * GIB),
    device_range_bytes=(7 * GIB, 9 * GIB + GIB // 2),
)
LARGER = dataclasses.replace(KNOWN, device_bytes=20 * GIB)


def step(batch: int | None, seconds: float, rate: float | None) -> StepSpeed:
    return StepSpeed(
        batch, seconds, (0.8 * seconds, 1.3 * seconds), seconds, 0.01, 0.0, "bandwidth", rate
    )


ACT_SPEED = Speed(
    now=step(8, 0.0791, 101.0),
    curve=(step(8, 0.0791, 101.0), step(24, 0.22, 109.0)),
    knee=8,
    mfu=0.2,
    by_kind_s={"matmul": 0.07},
    constants="fitted",
    epoch_s=12.0,
)
ACT = dataclasses.replace(
    with_now(
        PLAN,
        memory=KNOWN,
        largest_batch=42,
        recommended_batch=8,
        limits=BatchLimits(32, 8),
        step_s=0.0791,
    ),
    recommended=KNOWN,
    speed=ACT_SPEED,
    samples=1212,
    notes=(),
    assumptions={},
    headroom_is_set=False,
    coverage=Coverage(False, False, 0.25, 12),
)


def remedy(name: str, **changes: Any) -> Remedy:
    made = Remedy(
        *(name, f"a title of {name}", "simulated", "", "nothing", ""),
        memory=MEMORY,
        fits=True,
        saved_bytes=GIB,
        largest_batch=60,
        cost_percent=1.0,
        step_change=0.22,
    )
    return dataclasses.replace(made, **changes)


REMEDIES = Remedies(
    before=LARGER,
    batch_size=64,
    largest_batch=42,
    steps=2,
    items=tuple(remedy(name) for name in ("checkpoint", "amp-bf16", "sgd", "inplace")),
)
NO_FIT = dataclasses.replace(
    with_now(ACT, fits=False, batch_size=64, memory=LARGER, recommended_batch=24),
    remedies=REMEDIES,
    other_gpus=("A100-80GB", "H100"),
)


def lines(result: PlanResult) -> list[str]:
    found = plan_screen(result).split("\n")
    assert len(found) <= LINES, "\n".join(found)
    # A word that no line has room for, such as a path, is whole: behind a label, or before "…".
    text = [line for line in found if max(map(len, line.split()), default=0) <= 80 - 16]
    assert max(map(len, text)) <= 80, max(text, key=len)
    return found


def test_a_path_is_never_cut() -> None:
    path = "/" + "a" * 90 + "/memory.json"
    for text in (f"see {path}", f"{'word ' * 13}{path} and so on, for more than two lines"):
        plan = dataclasses.replace(ACT, notes=(text,))
        assert path in plan_screen(plan).split() or path[:9] not in plan_screen(plan)


def words(result: PlanResult) -> str:
    return " ".join(" ".join(lines(result)).split())


# -- what it says ----------------------------------------------------------------------------


def test_a_recommended_batch_other_than_the_present_one() -> None:
    plan = with_now(ACT, recommended_batch=24, limits=BatchLimits(24, 40))
    plan = dataclasses.replace(plan, recommended=LARGER)
    text = words(plan)
    first = "Fits: 8.00 GiB of 24.00 GiB at batch size 8. Largest batch 42, recommended 24 (220 ms"
    assert text.startswith(first)
    assert "batch size 8 batch size 24, recommended" in text
    assert "8.00 (7.00 to 9.50) GiB 20.00 (7.00 to 9.50) GiB" in text
    assert "24: largest batch with a 10% safety margin" in text
    assert "step batch size 8: 79.1 (63.3 to 103) ms" in text and "24: 220 (" in text


def test_another_precision_is_asked_for() -> None:
    half = dataclasses.replace(
        ACT.now, amp="float16", recommended_batch=24, limits=BatchLimits(40, 24)
    )
    choice = AmpChoice("fp16", "float16", "1.83 times the samples/s of no AMP", half)
    plan = dataclasses.replace(ACT, amp_choice=choice, recommended=LARGER)
    text = words(plan)
    first = "Fits: 8.00 GiB of 24.00 GiB at batch size 8 with AMP bfloat16. Largest batch 42, "
    assert text.startswith(f"{first}recommended 24 with AMP float16 (220 ms a step")
    assert "batch size 8 batch size 24, AMP float16" in text
    assert "AMP float16: 1.83 times the samples/s of no AMP" in text
    assert (
        "24: smallest with 95% of the best throughput; largest batch with a 10% safety margin: 40"
        in text
    )


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (BatchLimits(None, None, reason="no step time: keeping 8"), "8: no step time: keeping 8"),
        (BatchLimits(32, 8, data_set=20), "throughput; the data set has 20 samples"),
        (BatchLimits(8, 8, data_set=8), "8: the whole data set; the data set has 8 samples"),
        (
            BatchLimits(32, 8, at_least=True),
            "throughput; largest batch with a 10% safety margin: at least 32",
        ),
        (
            BatchLimits(8, 8, at_least=True),
            "8: largest batch that was simulated, and with a 10% safety margin",
        ),
        (
            BatchLimits(32, 8, at_least=True, failed_batches=(48, 64)),
            "Largest batch at least 42 (48 and 64 could not be simulated)",
        ),
        (BatchLimits(32, 8, 16.0, 8), "8: smallest that trains 95% as fast as any at this noise"),
        (BatchLimits(32, 8, data_set=40, epoch_steps=5), "margin: 32; an epoch is then 5 steps"),
    ],
)
def test_what_the_recommendation_follows_from(limits: BatchLimits, says: str) -> None:
    text = words(with_now(ACT, limits=limits))
    assert says in text
    assert ("Largest batch at least 42" in text) == limits.at_least


def test_a_recommendation_that_there_is_none() -> None:
    limits = BatchLimits(32, None, reason="memory grows with each step")
    text = words(with_now(ACT, recommended_batch=None, limits=limits))
    assert "Largest batch 42, none recommended. " in text
    assert "batch size none recommended: memory grows with each step" in text
    assert "none recommended: none leaves the" in words(with_now(ACT, recommended_batch=0))


def test_the_setting_that_is_faster_at_the_recommended_batch_size_is_told() -> None:
    """At the current batch size it may be slower: there, casts cost more than they save."""
    now = dataclasses.replace(ACT.now, amp="off", step_s=0.016, recommended_batch=24)
    half = dataclasses.replace(now, amp="bfloat16", step_s=0.02)
    choice = AmpChoice(None, "off", "", samples_per_s={"off": 400.0, "bfloat16": 800.0})
    plan = dataclasses.replace(ACT, now=now, other_amp=half, amp_choice=choice)
    assert (
        "bfloat16 2.00× as fast as off at the recommended batch; now (batch size 8) off:"
        in words(plan)
    )
    slower = dataclasses.replace(choice, samples_per_s={"off": 800.0, "bfloat16": 400.0})
    assert "at the recommended batch; now" not in words(
        dataclasses.replace(plan, amp_choice=slower)
    )


def test_autocast_that_needs_more_memory_than_float32_is_told() -> None:
    def of(half_bytes: float, weights: float = 0.4) -> str:
        kinds = {"parameters": int(weights * ACT.now.memory.device_bytes)}
        now = dataclasses.replace(ACT.now, amp="off", by_kind_bytes=kinds)
        memory = dataclasses.replace(
            now.memory, device_bytes=int(half_bytes * now.memory.device_bytes)
        )
        half = dataclasses.replace(now, amp="float16", memory=memory)
        return words(dataclasses.replace(ACT, now=half, other_amp=now, amp_choice=None))

    assert "more, for its copies of the weights" in of(1.2)
    assert "copies of the weights" not in of(1.0) + of(0.6)
    # Weights that are bfloat16 themselves are not copied: something else needs it.
    assert "float16 needs" in of(1.2, 0.1) and "copies of the weights" not in of(1.2, 0.1)


def test_no_batch_is_the_largest_where_memory_leaks() -> None:
    grows = StepPattern("growing", 3, (1, 2, 3), (1, 2, 3), steps_until_full=900)
    now = dataclasses.replace(ACT.now, recommended_batch=None)
    plan = dataclasses.replace(
        ACT, now=now, amp_choice=None, other_amp=now, pattern=grows, remedies=REMEDIES
    )
    told = words(plan)
    assert "full after about 900 optimizer steps, unless an epoch's end (" in told
    assert " steps) frees it. No batch size is recommended." in told
    unknown = words(dataclasses.replace(plan, coverage=None))
    assert "full after about 900 optimizer steps. No batch size is recommended." in unknown
    assert "largest batch" not in told.lower()
    settled = words(dataclasses.replace(plan, pattern=None))
    assert "largest batch" in settled


def test_a_script_that_fails_under_autocast_is_not_said_to_gain_nothing() -> None:
    """DCGAN's BCELoss: the reason that AMP stays off is that it raises."""
    hazard = amp_hazard("fails", "float16", "BCELoss raises an error under autocast", blocks=True)
    reason = "kept; float16 was tried: BCELoss raises an error under autocast"
    parts = tuple(
        LaunchPart(name, "not set", "script", "kept") for name in ("amp", "MKL_NUM_THREADS")
    )
    choice = AmpChoice(None, "off", reason, hazards=(hazard,))
    plan = dataclasses.replace(ACT, other_amp=None, amp_choice=choice, launch_parts=parts)
    told = {fact.label: fact.text for fact in facts(plan).rows}
    assert told["AMP"] == f"off: {reason}"
    assert told["not set"] == "MKL_NUM_THREADS: no gain"
    emulated = dataclasses.replace(choice, hazards=(dataclasses.replace(hazard, kind="emulated"),))
    again = {
        fact.label: fact.text for fact in facts(dataclasses.replace(plan, amp_choice=emulated)).rows
    }
    assert again["not set"] == "amp, MKL_NUM_THREADS: no gain"


@pytest.mark.parametrize(
    ("samples", "says"), [(42, "Any batch size fits (the data set has 42 samples), rec"),
                          (43, "Largest batch 42, rec"), (None, "Largest batch 42, rec")],
)  # fmt: skip
def test_no_batch_is_larger_than_the_data_set(samples: int | None, says: str) -> None:
    assert says in words(dataclasses.replace(ACT, samples=samples))


def test_micro_batches_and_shapes() -> None:
    makeup = StepMakeup(8, 4, 32)
    shapes = BatchShapes(100, 100, 60, 5120, KNOWN, False, 0.01, 0.02)
    text = words(dataclasses.replace(ACT, step=makeup, shapes=shapes))
    assert "micro-batch 8 × accumulation 4 = effective batch 32" in text
    assert "shapes samples of 60 (median) to 5,120 elements; the largest batch: 8.00" in text
    assert "DOES NOT FIT, 20 ms" in text
    # Packed samples of 1,024 tokens each, with the lengths of their texts.
    packed = dataclasses.replace(shapes, median_elements=2052, longest_elements=2024)
    text = words(dataclasses.replace(ACT, shapes=packed))
    assert "shapes batches differ; the largest batch: 8.00" in text
    unknown = dataclasses.replace(shapes, longest=None, reason="its samples are made on the fly")
    text = words(dataclasses.replace(ACT, shapes=unknown))
    assert "larger ones not known: its samples are made on the fly" in text


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (BatchShapes(100, 100, 60, 5120, KNOWN, True), "GiB with the data set's largest batch."),
        (
            BatchShapes(250, 118_287, 60, 5120, KNOWN, True),
            "GiB with the largest batch of 250 of 118,287 samples.",
        ),
        (
            BatchShapes(250, 118_287, 60, 5120),  # whose sampler bounds what batches need
            "GiB with the largest batch of 250 of 118,287 samples.",
        ),
        (
            BatchShapes(250, 118_287, 60, 60),
            "GiB with samples like 250 of 118,287 samples looked at.",
        ),
        (
            BatchShapes(None, None, reason="a stream"),
            "GiB with the batches seen; cannot tell for larger ones: a stream.",
        ),
    ],
)
def test_the_headline_says_for_which_batches(shapes: BatchShapes, text: str) -> None:
    assert text in words(dataclasses.replace(ACT, shapes=shapes))


def test_a_job_that_does_not_fit() -> None:
    text = words(NO_FIT)
    assert text.startswith("Does not fit: needs 20.00 GiB of 24.00 GiB at batch size 64. Largest")
    fits = text.partition("What would make it fit - ")[2]
    assert fits.startswith("batch size 24, as in the command above - a title of checkpoint")
    assert "- a larger GPU: A100-80GB, H100" in fits
    one = "a title of checkpoint [checkpoint]: 7.39 GiB, largest batch 60, a step +22%"
    assert f"- {one}" in fits


def test_what_fits_only_together_and_what_does_not() -> None:
    alone = tuple(
        dataclasses.replace(each, fits=False, how=(f"write {each.name}",))
        for each in REMEDIES.items
    )
    together = Combination(("checkpoint", "sgd"), MEMORY, True, None, None, "python train.py")
    remedies = dataclasses.replace(REMEDIES, items=alone, combination=together)
    plan = dataclasses.replace(NO_FIT, remedies=remedies, other_gpus=())
    fits = words(plan).partition("- checkpoint + sgd: 7.39 GiB ")[2]
    changes = [f"{n} write {n}" for n in (each.name for each in alone) if n in together.names]
    assert fits.startswith(" ".join(changes)) and changes
    nothing = with_now(plan, largest_batch=0, recommended_batch=0)
    nothing = dataclasses.replace(nothing, remedies=None, other_amp=None, recommended=None)
    text = words(nothing)
    assert "(no simulated size fits). Not even one sample fits." in text
    assert "- no single GPU of the catalogue" in text
    assert "python train.py" not in text.partition("Memory on")[0].replace(nothing.command, "")


def test_a_remedy_that_was_asked_for_is_shown_though_it_does_not_suffice() -> None:
    items = (
        remedy("checkpoint", fits=False, memory=LARGER),
        remedy(
            "sgd",
            status="failed",
            reason="it needs a scheduler",
            memory=None,
            fits=None,
            saved_bytes=None,
        ),
    )
    asked = dataclasses.replace(REMEDIES, items=items, is_asked=True)
    shown = words(dataclasses.replace(NO_FIT, remedies=asked))
    device = size(LARGER.device_bytes)
    figures = f"{device}, largest batch 60, a step +22%, does not fit"
    assert f"a title of checkpoint [checkpoint]: {figures}" in shown
    assert "a title of sgd [sgd]: it needs a scheduler" in shown
    unasked = words(
        dataclasses.replace(NO_FIT, remedies=dataclasses.replace(asked, is_asked=False))
    )
    assert "[checkpoint]" not in unasked and "[sgd]" not in unasked
    idle = dataclasses.replace(asked, items=(remedy("inplace", saved_bytes=0),))
    assert "a step +22%, saves nothing" in words(dataclasses.replace(ACT, remedies=idle))


def test_other_batch_sizes_that_cannot_be_told() -> None:
    unknown = with_now(ACT, largest_batch=None, recommended_batch=None, limits=None)
    plan = dataclasses.replace(
        unknown, recommended=None, basis="one trace", basis_detail="no DataLoader was seen"
    )
    text = words(plan)
    assert "Other batch sizes are not known (79.1 ms a step, 101 samples/s)." in text
    assert "batch size other batch sizes are not known: no DataLoader was seen" in text
    off = AmpChoice("off", "off", "", dataclasses.replace(plan.now, amp="off"))
    text = words(dataclasses.replace(plan, amp_choice=off))
    assert f"with AMP {plan.now.amp}. Recommended: with AMP off (" in text
    assert "). Other batch sizes are not known." in text


def test_a_job_without_batches_has_no_batch_size() -> None:
    whole = with_now(ACT, batch_size=None, largest_batch=None, recommended_batch=None, limits=None)
    none = "the job has no batch size: each step is of the same tensors"
    makeup = StepMakeup(2708, 1, 2708, "model calls", is_whole=True)
    plan = dataclasses.replace(
        whole, recommended=None, basis="one trace", basis_detail=none, step=makeup
    )
    text = words(plan)
    assert "It has no batch size. " in text and f"batch size {none}" in text
    assert "not known" not in text and "At the peak all samples" in text


def test_what_the_user_has_to_do_stands_below_the_command() -> None:
    action = Note("action", "set batch_size=24 for the DataLoader at /home/me/x/train.py:7")
    plan = dataclasses.replace(ACT, structured_notes=(action,), notes=(action.text,))
    found = lines(plan)
    at = found.index("  python train.py --batch_size=24")
    assert found[at + 1] == "  - set batch_size=24 for the DataLoader at x/train.py:7"
    assert "more note" not in found[-1]


def test_notes_that_change_the_figures_come_first_and_the_rest_is_counted() -> None:
    plan = dataclasses.replace(
        ACT,
        notes=tuple(f"note {name}" for name in "abcdef"),
        structured_notes=(Note("note", "the script broke off", severity="changes the figures"),),
        assumptions={"unique() of unknown data was assumed to keep all 3 values (at a.py:3)": 2},
    )
    text = words(plan)
    assert "Notes - the script broke off - assumed: unique() of unknown data" in text
    assert re.search(r"\d more notes, .*: --explain$", text)


def test_inference_and_the_cpu() -> None:
    plan = dataclasses.replace(
        ACT,
        inference=Inference(True, MEMORY, KNOWN),
        versus_cpu=VersusCpu("python train.py", 8, (1.0, 1.1), (0.0, 0.0)),
    )
    text = words(plan)
    assert "(79.1 ms a call, 101 samples/s)" in text
    assert "records gradients: 7.39 GiB instead of 8.00 GiB under torch.no_grad()" in text
    assert "CPU " in text


@pytest.mark.parametrize(
    ("coverage", "says"),
    [
        (Coverage(True, True, 1.0, 3), "evaluation and checkpoint in 3 steps"),
        (
            Coverage(True, False, 0.1, 30),
            "evaluation but no checkpoint in 3 steps; --steps 31 ends an epoch",
        ),
        (
            Coverage(False, False, 0.1, 99999),
            "no evaluation or checkpoint in 3 steps (an epoch has 99,999",
        ),
        (Coverage(False, False), "no evaluation or checkpoint in 3 steps"),
        (
            Coverage(False, True, 1.5, 2),
            "checkpoint but no evaluation in 3 steps (an epoch has",
        ),
    ],
)
def test_what_was_among_the_steps(coverage: Coverage, says: str) -> None:
    assert says in words(dataclasses.replace(ACT, coverage=coverage))


@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        (["Net.encoder", "Net.decoder"], ["encoder", "decoder"]),
        (["A.module.0.q", "A.module.1", "A.module.2"], ["module.0.q", "module.1", "module.2"]),
        (["G.main", "D.main"], ["G.main", "D.main"]),
        (["Net", "Net.a"], ["Net", "Net.a"]),
        (["0", "1"], ["0", "1"]),
        (["Net.a"], ["a"]),
    ],
)
def test_modules_are_named_without_what_they_share(paths: list[str], shown: list[str]) -> None:
    assert list(without_prefix(dict.fromkeys(paths, 1))) == shown


def test_a_loader_that_could_not_be_tuned() -> None:
    plan = dataclasses.replace(ACT, loading=DataLoading(None, failure="no DataLoader was made"))
    text = words(plan)
    assert "DataLoader not tuned: no DataLoader was made" in text
    assert "the DataLoader could not be measured" in text


# -- its size --------------------------------------------------------------------------------

_LONG = " ".join(["words"] * 60)
_NOTES = tuple(
    Note(kind, f"{kind} {n} {_LONG}", n, (f"/home/user/project/deep/train{n}.py:3",), severity)
    for n in range(1, 5)
    for kind in ("note", "assumption", "action")
    for severity in ("changes the figures", "information")
)  # fmt: skip
EVERYTHING = dataclasses.replace(
    NO_FIT,
    gpu="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
    basis_detail=_LONG,
    pattern=StepPattern("growing", 3, (1, 2, 3), (1, 2, 3), growth_bytes_per_step=1 << 20),
    inference=Inference(True, MEMORY, KNOWN),
    versus_cpu=VersusCpu("python train.py", 8, (1.0, 1.1), (0.0, 0.0), why=_LONG),
    loading=DataLoading(None, failure=_LONG),
    step=StepMakeup(None, None, None, why=_LONG),
    shapes=BatchShapes(None, None, reason=_LONG),
    structured_notes=_NOTES,
    launch="python train.py " + " ".join(f"--option_{n} value_{n}" for n in range(14)),
    speed=SPEED,
)


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        ACT,
        NO_FIT,
        EVERYTHING,
        dataclasses.replace(EVERYTHING, remedies=None),
        with_now(EVERYTHING, fits=True),
        with_now(EVERYTHING, largest_batch=None, recommended_batch=None, batch_size=None),
        with_now(EVERYTHING, by_module_bytes={f"Net.{_LONG}": GIB}, by_kind_bytes={}),
        dataclasses.replace(EVERYTHING, gpu="custom:24GiB", speed=None),
    ],
    ids=lambda plan: "",
)
def test_one_screen(plan: PlanResult) -> None:
    found = lines(plan)
    assert found[0].startswith(("Fits: ", "Does not fit: "))
    assert "--explain" in found[-1]
    text = " ".join(found)
    assert "device (nvidia-smi)" in text


def test_a_launch_command_of_many_lines_is_one_long_line() -> None:
    launch = "python train.py " + " ".join(f"--option_{n} value_{n}" for n in range(60))
    found = plan_screen(dataclasses.replace(ACT, launch=launch)).split("\n")
    assert f"  {launch}" in found
    assert len(found) <= LINES


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=120)
_BATCH = st.none() | st.integers(0, 1 << 16)


@settings(
    max_examples=settings.default.max_examples,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.data())
def test_any_result_fits_on_the_screen(data: st.DataObject) -> None:
    notes = data.draw(
        st.lists(st.builds(Note, st.sampled_from(["note", "action"]), _TEXT), max_size=9)
    )
    plan = dataclasses.replace(
        with_now(
            data.draw(st.sampled_from([ACT, NO_FIT, EVERYTHING])),
            fits=data.draw(st.booleans()),
            batch_size=data.draw(st.none() | st.integers(1, 1 << 16)),
            largest_batch=data.draw(_BATCH),
            recommended_batch=data.draw(_BATCH),
            by_module_bytes=data.draw(st.dictionaries(_TEXT, st.integers(0, 1 << 40), max_size=5)),
        ),
        structured_notes=tuple(notes),
        basis_detail=data.draw(_TEXT),
        coverage=data.draw(st.none() | st.just(Coverage(True, False, 2.0, 5))),
    )
    lines(plan)
    assert facts(plan) is not None


# -- notes -----------------------------------------------------------------------------------


def test_assumptions_that_differ_in_numbers_are_one() -> None:
    assumptions = {
        f"unique() of unknown data was assumed to keep all {n} values "
        f"(at /x/train.py:{line})": times
        for n, line, times in ((9, 3, 1), (12, 3, 10), (10, 7, 4))
    }
    (note,) = complete((), (), assumptions)
    assert note == Note(
        "assumption",
        "unique() of unknown data was assumed to keep all 9 to 12 values",
        15,
        ("/x/train.py:3", "/x/train.py:7"),
        "may change the figures",
    )


def test_notes_of_the_same_text_are_one_but_names_keep_their_numbers() -> None:
    found = complete((), ("slow on an RTX 3090", "slow on an RTX 4090", "slow on an RTX 4090"), {})
    assert [(note.text, note.count) for note in found] == [
        ("slow on an RTX 3090", 1),
        ("slow on an RTX 4090", 2),
    ]


def test_texts_that_are_structured_are_not_said_twice() -> None:
    known = Note("action", "set it", severity="information")
    serious = Note("note", "it broke off", severity="changes the figures")
    assert complete((known, serious), ("set it", "it broke off"), {}) == [serious, known]


UNFIT = EpochEnd("simulated", "", False, 30 * GIB, 31 * GIB, False, 313, GIB // 10, 8)


def test_an_evaluation_that_fits_at_a_smaller_batch_size() -> None:
    smaller = dataclasses.replace(UNFIT, device_bytes=20 * GIB, fits=True, batch_size=4)
    limits = BatchLimits(5, 8, reason="the evaluation fits up to 5", evaluation=5)
    plan = with_now(ACT, largest_batch=5, recommended_batch=4, limits=limits)
    plan = dataclasses.replace(plan, epoch_end=UNFIT, recommended_epoch_end=smaller)
    text = words(plan)
    assert "Does not fit: the evaluation needs 31.00 GiB of 24.00 GiB at batch size 8." in text
    assert "Largest batch 5, recommended 4" in text
    assert "evaluation batch size 8: allocated 30.00 GiB, device 31.00 GiB (102 MiB more" in text
    assert "What would make it fit - batch size 4, as in the command above" in text
    assert plan.fits and plan.can_start and not plan.fits_now


def test_an_evaluation_that_fits_without_its_graph() -> None:
    """Of all that makes it fit, the line that costs nothing comes first."""
    end = dataclasses.replace(UNFIT, without_graph_bytes=6 * GIB)
    limits = BatchLimits(5, 8, reason="the evaluation fits up to 5", evaluation=5)
    plan = with_now(ACT, largest_batch=5, recommended_batch=4, limits=limits)
    text = words(dataclasses.replace(plan, epoch_end=end))
    assert "24.00 GiB at batch size 8 (6.00 GiB under torch.no_grad())." in text
    assert "fit - the evaluation under torch.no_grad(): 6.00 GiB at batch size 8 - " in text
    assert "evaluation in a run of its own" in text and "ends an epoch" not in text


def test_an_evaluation_that_no_batch_size_makes_fit() -> None:
    limits = BatchLimits(0, 8, reason="the evaluation does not fit", evaluation=0)
    plan = with_now(ACT, largest_batch=0, recommended_batch=None, limits=limits)
    plan = dataclasses.replace(plan, epoch_end=UNFIT, recommended=None, other_gpus=("H100",))
    text = words(plan)
    assert "at batch size 8. No smaller batch size makes it fit." in text
    assert "Not even one sample" not in text and "Run" not in text
    assert "less kept of each batch - a larger GPU: H100" in text
    kept = dataclasses.replace(plan, step=StepMakeup(None, None, None, loop="Transformers"))
    assert "eval_accumulation_steps=1" in words(kept)
    assert not (plan.fits or plan.can_start or plan.fits_now)


def test_an_evaluation_that_could_not_be_simulated_at_the_recommended_batch_size() -> None:
    end = EpochEnd("not simulated", "RuntimeError: no", batch_size=8)
    plan = dataclasses.replace(with_now(ACT, batch_size=4), recommended_epoch_end=end)
    assert "; evaluation not simulated at batch size 8: RuntimeError: no." in words(plan)


@pytest.mark.parametrize(
    ("end", "words_of_it"),
    [
        (dataclasses.replace(UNFIT, saved=True), "evaluation and checkpoint need"),
        (dataclasses.replace(UNFIT, evaluation="none", saved=True), "checkpoint needs"),
        (dataclasses.replace(UNFIT, evaluation="none"), "later steps need"),
        (dataclasses.replace(UNFIT, later="train.py:9"), "training from a later epoch on needs"),
        (dataclasses.replace(UNFIT, final="train.py:9"), "final evaluation needs"),
    ],
)
def test_what_does_not_fit_has_its_verb(end: EpochEnd, words_of_it: str) -> None:
    plan = dataclasses.replace(with_now(ACT), epoch_end=end)
    assert f"Does not fit: the {words_of_it} 31.00 GiB" in words(plan)


def test_the_largest_batch_holds_until_a_later_epoch_that_needs_more() -> None:
    later = dataclasses.replace(UNFIT, fits=True, later="train.py:9")
    until = "until train.py:9 (not known for the epochs after it)"
    assert until in words(dataclasses.replace(with_now(ACT), epoch_end=later))
    final = dataclasses.replace(later, later=None, final="train.py:9")
    assert until not in words(dataclasses.replace(with_now(ACT), epoch_end=final))


def test_sampling_before_the_steps_stands_next_to_their_time() -> None:
    drawn = Finding(SAMPLING, "info", "128 calls", (), "", (), subject="62 ms of 128 calls")
    said = "; without the sampling before the steps, 62 ms of 128 calls)"
    assert said in words(dataclasses.replace(ACT, findings=(drawn,)))
    assert said not in words(ACT)


def test_later_steps_of_other_micro_batches_stand_next_to_the_time() -> None:
    changed = Finding(
        ACCUMULATION_CHANGES, "info", "", (), "", (),
        subject="later ones have 1 micro-batch instead of 8",
    )  # fmt: skip
    said = "; later ones have 1 micro-batch instead of 8)"
    assert said in words(dataclasses.replace(ACT, findings=(changed,)))
    assert said not in words(ACT)
