"""What the terminal shows of a result."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers_report import plan_text, screen, whole
from trainfit.hardware import find_gpu
from trainfit.plan.sizing.curve import Curve, Grain, saturation_batch
from trainfit.report.layout import command_lines
from trainfit.report.sections.memory import recording_subject
from trainfit.report.sections.plan_facts import answer, ends_early
from trainfit.report.sections.plan_ranks import ranks_facts
from trainfit.report.steps import pattern_lines
from trainfit.results.configuration import BatchCheck, Configuration
from trainfit.results.findings import (
    EPOCH_GROWTH,
    FAILS_LATER,
    LAST_BATCH,
    SCHEDULE_ENDS,
    Finding,
)
from trainfit.results.gpus import NO_TENSOR_CORES
from trainfit.results.memory import MemoryFigures, RecordingSummary
from trainfit.results.plan import PlanResult
from trainfit.results.runs.steps import Coverage, GrowthSource, StepMakeup, StepPattern
from trainfit.results.speed import CollectiveTime, Ranks, Speed, StepSpeed
from trainfit.results.text import WIDTH, printable, quote, share, size

GIB, MIB = 1 << 30, 1 << 20
MEMORY = MemoryFigures(6 * GIB, 7 * GIB, 7 * GIB + 400 * MIB, 400 * MIB, (300 * MIB, 500 * MIB))
NOW = Configuration(
    batch_size=8,
    amp="bfloat16",
    memory=MEMORY,
    fits=True,
    by_kind_bytes={"parameter": 4 * GIB, "activation": 2 * GIB, "gradient": 0},
    by_module_bytes={
        "Net.encoder": 3 * GIB,
        "Net.decoder": 2 * GIB,
        "": GIB,
        **{f"Net.head{i}": 20 * MIB for i in range(5)},
    },
    step_peak_allocated_bytes=(5 * GIB, 6 * GIB),
    largest_batch=30,
    recommended_batch=24,
)
PLAN = PlanResult(
    command="python train.py --batch_size=8",
    gpu="RTX 4090",
    gpu_memory_bytes=24 * GIB,
    headroom_share=0.1,
    steps=3,
    now=NOW,
    recommended=MEMORY,
    other_amp=dataclasses.replace(NOW, amp="off", largest_batch=15),
    basis="two traces",
    basis_detail="",
    launch="python train.py --batch_size=24",
    assumptions={"something unknown was taken as False at train.py:3": 2},
    notes=("a note",),
    other_gpus=(),
    gpu_sources={},
    environment={"torch": "2.13.0"},
    seconds=35.2,
)


def with_now(plan: PlanResult = PLAN, /, **changes: Any) -> PlanResult:
    return dataclasses.replace(plan, now=dataclasses.replace(plan.now, **changes))


def section(text: str, title: str) -> str:
    found = [part for part in text.split("\n\n") if part.startswith(title)]
    assert len(found) == 1, text
    return found[0]


@pytest.mark.parametrize(
    ("kind", "subject", "ends"),
    [
        (FAILS_LATER, "after 12 steps", True),
        (SCHEDULE_ENDS, "after 12 steps", True),
        (SCHEDULE_ENDS, "", False),  # its rate only falls below 0
        (EPOCH_GROWTH, "3 epochs", True),
        (LAST_BATCH, "24", True),
        (LAST_BATCH, "8", False),  # the present size, which the launch line does not have
    ],
)
def test_a_run_that_ends_early(kind: str, subject: str, *, ends: bool) -> None:
    finding = Finding(kind, "critical", "", subject=subject)
    assert not ends_early(PLAN)
    assert ends_early(dataclasses.replace(PLAN, findings=(finding,))) == ends


# -- a plan ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (BatchCheck(24, "", 0.001, -0.012), "the rule from others: reserved +0.1%, step -1.2%"),
        (BatchCheck(24, "", 0.0, None), "itself; against the rule from others: reserved +0.0%"),
        (BatchCheck(24, "it\x1b takes 90 s"), r"not simulated itself: it\x1b takes 90 s"),
        (BatchCheck(24), ""),
        (None, ""),
    ],
)  # fmt: skip
def test_whether_the_recommended_batch_was_simulated(check: BatchCheck | None, words: str) -> None:
    text = section(plan_text(dataclasses.replace(PLAN, batch_check=check)), "Batch size (")
    assert words in " ".join(text.split())
    assert ("itself" in text) == bool(words)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (
            StepPattern(
                "growing",
                6,
                (9, 9),
                (8, 9),
                growth_bytes_per_step=2 << 20,
                steps_until_full=1234,
                sources=(
                    GrowthSource(1 << 20, "aten.mm", "Net.\x1b", "input", "forward", "a.py:3"),
                ),
            ),
            "grows by 2 MiB with each optimizer step, and the figures are for the first 6 only; "
            "the GPU would be full after about 1,234 steps; the script keeps 1 MiB a step of "
            "inputs made by aten.mm in Net.\\x1b (a.py:3);",
        ),
        (
            StepPattern("irregular", 4, (9 << 30, 2 << 30, 3 << 30, 1 << 30), (1,) * 4),
            "the peaks of 4 steps lie between 1.00 GiB and 9.00 GiB (step 1)",
        ),
        (StepPattern("unknown", 1, (1,), (1,)), "1 optimizer step cannot show whether memory"),
        (StepPattern("unknown", 3, (1,), (1,)), "3 optimizer steps that differ cannot show"),
        (
            StepPattern("unknown", 4, (1,), (1,), unit="model call"),
            "4 model calls that differ cannot show",
        ),
    ],
    ids=lambda value: getattr(value, "course", ""),
)
def test_memory_that_does_not_settle_is_said(pattern: StepPattern, words: str) -> None:
    plan = dataclasses.replace(PLAN, pattern=pattern)
    text = plan_text(plan)
    assert words in " ".join(section(text, "Notes").split())
    grows = "2 MiB more with each further optimizer step"
    limits = grows if pattern.growth_bytes_per_step else f"for the {pattern.steps} simulated step"
    assert limits in " ".join(section(text, "Batch size (").split())
    assert PlanResult.from_json(plan.to_json(), Path("x")) == plan


def test_what_a_long_training_leaves_room_for_is_no_note() -> None:
    """A loss that is kept of each step was told as memory that does not settle."""
    kept = GrowthSource(512, "aten.mean", "", "temporary", "forward", "a.py:3")
    losses = StepPattern(
        "growing", 6, (3 << 30, 3 << 30), (8, 9), growth_bytes_per_step=512,
        steps_until_full=20 * (1 << 30) // 512, sources=(kept,),
    )  # fmt: skip
    assert plan_text(dataclasses.replace(PLAN, pattern=losses)) == plan_text(PLAN)
    assert pattern_lines(losses) == [
        "memory grows by 512 B with each optimizer step (6 simulated), 488 MiB in 1,000,000; the "
        "script keeps 512 B a step of temporaries made by aten.mean (a.py:3)"
    ]
    predictions = dataclasses.replace(losses, unit="model call")
    assert plan_text(dataclasses.replace(PLAN, pattern=predictions)) == plan_text(PLAN)
    cached = dataclasses.replace(predictions, sources=(dataclasses.replace(kept, module="Net"),))
    small = dataclasses.replace(losses, steps_until_full=1 << 20)  # half a GiB is left
    large = dataclasses.replace(
        losses, growth_bytes_per_step=4096, steps_until_full=20 * (1 << 30) // 4096
    )
    for pattern in (cached, small, large):
        text = " ".join(plan_text(dataclasses.replace(PLAN, pattern=pattern)).split())
        assert "memory does not settle" in text or "as the KV cache" in text


def test_memory_that_differs_by_next_to_nothing_is_no_note() -> None:
    """As of embedding bags of varying lengths, next to their tables."""
    peaks = (600 << 20, 602 << 20, (602 << 20) + 512, 602 << 20)
    even = StepPattern("irregular", 4, peaks, (1, 2, 3, 2))
    assert plan_text(dataclasses.replace(PLAN, pattern=even)) == plan_text(PLAN)
    assert pattern_lines(even) == ["memory differs by less than 1% from step to step (4 simulated)"]
    uneven = dataclasses.replace(even, peak_bytes=(600 << 20, 590 << 20, 602 << 20, 602 << 20))
    assert "memory differs from step to step" in plan_text(
        dataclasses.replace(PLAN, pattern=uneven)
    )


def test_memory_that_has_settled_is_no_note() -> None:
    settled = StepPattern("settled", 3, (1, 2, 2), (1, 1, 1), settled_from=2, period=1)
    assert plan_text(dataclasses.replace(PLAN, pattern=settled)) == plan_text(PLAN)


def test_the_present_batch_size_may_be_the_recommended() -> None:
    text = plan_text(with_now(batch_size=24))
    assert "recommended    24: the current one; largest batch with 10% of the GPU free" in text


def test_what_does_not_learn_is_in_the_first_line() -> None:
    fault = Finding("loss_broadcast", "critical", "mse_loss compares each with every", (), "", ())
    said = answer(dataclasses.replace(PLAN, findings=(fault,)))
    assert said.startswith("Fits: ") and "does not learn as it is meant to" in said
    for other in (
        dataclasses.replace(fault, severity="warning"),
        dataclasses.replace(fault, kind="hidden_syncs"),
    ):
        assert "learn" not in answer(dataclasses.replace(PLAN, findings=(other,)))
    run = dataclasses.replace(SUMMARY, findings=(fault,))
    assert "does not learn as it is meant to" in recording_subject(run).headline.text
    assert "learn" not in recording_subject(SUMMARY).headline.text


def test_a_present_batch_size_that_does_not_fit() -> None:
    plan = dataclasses.replace(
        with_now(batch_size=64, fits=False), other_gpus=("L40S", "A40", "H100", "H200", "B200")
    )
    text = plan_text(plan)
    assert text.startswith("Does not fit: needs 7.39 GiB of 24.00 GiB at batch size 64")
    assert section(text, "What would make it fit").splitlines()[1:] == [
        "  - batch size 24, as in the command above",
        "  - AMP off: 7.39 GiB",
        "  - a larger GPU: L40S, A40, H100",
    ]


def test_that_kept_blocks_are_released_stands_in_the_first_line() -> None:
    full = "PyTorch releases the blocks it keeps when that is full"
    here = dataclasses.replace(PLAN.now.memory, retries=3)
    assert f" of 24.00 GiB at batch size 8, {full}. Largest" in answer(with_now(memory=here))
    assert PLAN.recommended is not None and full not in answer(PLAN)
    there = dataclasses.replace(PLAN.recommended, retries=3)
    said = answer(dataclasses.replace(PLAN, recommended=there))
    assert said.endswith(f", {full}.") and said.count(full) == 1


def test_a_figure_without_the_compiler_says_so_in_the_first_line() -> None:
    eager = Coverage(False, False, is_eager=True)
    words = " in eager mode (torch.compile is left out)"
    for fits in (True, False):
        plan = with_now(fits=fits)
        assert words in answer(dataclasses.replace(plan, coverage=eager))
        assert words not in answer(plan)
    assert words in recording_subject(dataclasses.replace(SUMMARY, coverage=eager)).headline.text


def test_not_even_one_sample_fits() -> None:
    plan = dataclasses.replace(
        with_now(fits=False, largest_batch=0, recommended_batch=0), recommended=None
    )
    text = plan_text(plan)
    assert section(text, "Batch size (").endswith("largest batch  not even one sample fits")
    assert "  - AMP off: 7.39 GiB" in section(text, "What would make it fit")
    assert f"\n  {plan.launch}\n" not in text
    alone = dataclasses.replace(plan, other_amp=None)
    assert "no single GPU of the catalogue" in plan_text(alone)


def test_no_batch_size_leaves_the_headroom() -> None:
    text = plan_text(dataclasses.replace(with_now(recommended_batch=0), recommended=None))
    assert "recommended    none: no batch size leaves 10% of the GPU free" in text


def test_other_batch_sizes_may_be_unknown() -> None:
    plan = dataclasses.replace(
        with_now(largest_batch=None, recommended_batch=None, batch_size=None),
        basis="one trace",
        basis_detail="no DataLoader was seen",
        recommended=None,
    )
    text = plan_text(plan)
    assert section(text, "Batch size (only the current one was simulated)").endswith(
        "  recommended  the current one fits\n  others       not known: no DataLoader was seen"
    )
    assert "the current batch size" in section(text, "Memory on")


def test_a_search_by_trial_says_so() -> None:
    plan = dataclasses.replace(PLAN, basis="one trace a batch size", basis_detail="lengths vary")
    text = plan_text(plan)
    assert "Batch size (each one simulated)" in text
    assert "  - lengths vary" in section(text, "Notes")
    assert "multiple of 8" not in text


def test_lines_are_no_wider_than_the_page() -> None:
    long = " ".join(["word"] * 60)
    plan = dataclasses.replace(
        PLAN,
        notes=(long,),
        assumptions={long: 3},
        basis_detail=long,
        launch=" ".join(["python train.py", *(f"--option_{i} value_{i}" for i in range(20))]),
    )
    assert max(map(len, plan_text(plan).splitlines())) <= WIDTH


def test_long_module_paths_are_whole() -> None:
    path = "PeftModelForCausalLM.base_model.model.model.layers"
    text = plan_text(with_now(by_module_bytes={path: GIB}))
    assert re.search(rf"  {re.escape(path)} +1.00 GiB +17%", text)


# -- the launch command ----------------------------------------------------------------------


def test_long_launch_commands_break_between_options() -> None:
    launch = "python train.py " + " ".join(f"--option_{i} value_{i}" for i in range(8))
    assert command_lines(launch) == (
        "  python train.py --option_0 value_0 --option_1 value_1 --option_2 value_2 "
        "--option_3 value_3 \\\n"
        "    --option_4 value_4 --option_5 value_5 --option_6 value_6 --option_7 value_7"
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(min_codepoint=1, exclude_categories=["Cs"])), max_size=8))
@example(["a" * 90, "--x", "it's", "b c", "new\nline\\", '"', "\x1b'\\"])
def test_bash_reads_the_printed_launch_command_as_meant(words: list[str]) -> None:
    words = ["printf", "%s\\0", "-", *words]
    lines = command_lines(" ".join(map(quote, words)))
    done = subprocess.run(
        ["bash", "-c", lines], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    assert done.stdout.decode().split("\0")[:-1] == words[2:]


# -- a recording -----------------------------------------------------------------------------

SUMMARY = RecordingSummary(
    file="r.trainfit",
    gpu="T4",
    gpu_memory_bytes=15 * GIB,
    torch="2.13.0",
    steps=3,
    operators=1000,
    memory=MEMORY,
    by_kind_bytes=NOW.by_kind_bytes,
    by_module_bytes=NOW.by_module_bytes,
    step_peak_allocated_bytes=(1, 2, 3),
    timeline_bytes=tuple(range(0, 100 * MIB, MIB)),
    assumptions={"x": 1},
)


def test_a_recording_as_text() -> None:
    text = whole(recording_subject(SUMMARY))
    assert text.startswith("Fits: 7.39 GiB of 15.00 GiB.\n")
    assert "3 optimizer steps, 1000 operators, torch 2.13.0" in text
    assert "Allocated over the last step\n  0 B to 99 MiB\n  ▁▁" in text
    assert "does not fit" not in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_recording_that_ran_out_of_memory() -> None:
    message = "a.py:3: CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but"
    full = dataclasses.replace(SUMMARY, out_of_memory=message, timeline_bytes=())
    text = screen(recording_subject(full))
    assert "\n  a.py:3: CUDA out of memory. Tried to allocate 2.00 GiB.\n" in text
    assert "over the last step" not in text
    message = (
        "a.py:3: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
        "total capacity of 15.00 GiB of which 1.10 GiB is free. If reserved but"
    )
    full = dataclasses.replace(full, out_of_memory=message)
    text = screen(recording_subject(full))
    assert text.startswith("Does not fit: a.py:3 asks for 2.00 GiB, and 1.10 GiB are free.\n")


def test_a_recording_as_json() -> None:
    document = json.loads(SUMMARY.to_json())
    assert (document["format"], document["version"]) == ("trainfit-memory", 1)
    assert document["memory"]["allocated_bytes"] == 6 * GIB


# -- figures and text ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (512, "512 B"), (2048, "2 KiB"), (MIB, "1 MiB"), (1023 * MIB, "1023 MiB"),
     (GIB, "1.00 GiB"), (24 * GIB, "24.00 GiB")],
)  # fmt: skip
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_shares() -> None:
    assert share(1, 3) == "33%"
    assert share(1, 0) == ""


@given(st.text())
def test_printable_text_holds_no_control_characters(text: str) -> None:
    assert printable(text).isprintable()
    for line in printable(text, lines=True).split("\n"):
        assert line.isprintable()
    assert not re.search("\x1b|\x9b", printable(text))


def test_printable_keeps_lines_on_demand() -> None:
    assert printable("a\tb\nc\x1b") == "a\\x09b\\x0ac\\x1b"
    assert printable("a\tb\nc\x1b", lines=True) == "a       b\nc\\x1b"
    assert printable("größe → 界 \u202e\ud800") == "größe → 界 \\u202e\\ud800"


def test_multiples_of_8_are_for_tensor_cores_alone() -> None:
    """A GTX 1650 has none: neither the reason is given, nor a smaller batch for it."""
    plan = dataclasses.replace(PLAN, gpu_sources={"tensor_flops": NO_TENSOR_CORES})
    assert "as a multiple of 8" in " ".join(plan_text(PLAN).split())
    assert "multiple of 8" not in " ".join(plan_text(plan).split())
    card, other = find_gpu("GTX 1650"), find_gpu("T4")
    assert card.sources["tensor_flops"] == NO_TENSOR_CORES
    assert (Grain.of(card).samples, Grain.of(other, 6).samples) == (1, 48)
    assert [Grain.of(gpu).rounded(43) for gpu in (card, other)] == [43, 40]
    steps = tuple(
        StepSpeed(size, 1.0, (0.5, 2.0), 1.0, 0.0, 0.0, "bandwidth", float(min(size, 11)))
        for size in range(1, 17)
    )
    assert saturation_batch(Curve(steps, grain=Grain.of(card))) == 11
    assert saturation_batch(Curve(steps)) == 16


def test_the_samples_of_all_ranks_are_those_of_the_step_that_is_shown() -> None:
    """Which accumulates less than the present one at the recommended batch size."""
    step = StepSpeed(24, 0.5, (0.4, 0.6), 0.5, 0.1, 0.0, "compute", samples_per_s=48.0)
    plan = dataclasses.replace(
        PLAN,
        step=StepMakeup(8, 4, 32),
        ranks=Ranks(4, "", (CollectiveTime("all_reduce", 1, MIB, 0.1),), ""),
        speed=Speed(step, (step,), None, None, {}, ""),
    )
    facts = ranks_facts(plan)
    assert facts is not None
    assert "effective batch 4 x 24 = 96 samples a step" in str(facts)


@pytest.mark.parametrize(
    ("count", "said"), [(4, "effective batch 24 samples"), (8, "effective batch 2 x 24 = 48")]
)
def test_gpus_that_share_a_batch_are_not_counted_as_several_batches(count: int, said: str) -> None:
    """Tensor parallelism: four have the same samples."""
    step = StepSpeed(24, 0.5, (0.4, 0.6), 0.5, 0.1, 0.0, "compute", samples_per_s=48.0)
    collectives = (CollectiveTime("all_reduce", 1, MIB, 0.1),)
    ranks = Ranks(count, "", collectives, "", sharing=4)
    speed = Speed(step, (step,), None, None, {}, "")
    plan = dataclasses.replace(PLAN, ranks=ranks, speed=speed)
    assert ranks.replicas == count // 4
    facts = str(ranks_facts(plan))
    assert said in facts
    assert "4 GPUs share the work of each batch" in facts and "throughput" not in facts
    assert plan.quantities()["efficiency_share"] is None
