"""What ``trainfit memory`` works out of recordings: by hand, and next to direct simulation."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trainfit
from helpers_report import whole
from trainfit.memory.explanation import ExplainError, RecordingSource, explain, summarize
from trainfit.memory.fragmentation import best_setting, compare_settings
from trainfit.memory.growth import step_pattern
from trainfit.memory.optimizers import optimizer_table
from trainfit.memory.replay import Stream, replay
from trainfit.report.sections.memory import memory_subject, recording_subject
from trainfit.results.memory import (
    MemoryReport,
    OptimizerUse,
    RecordingSummary,
    SettingOutcome,
)
from trainfit.results.runs.recording import FREE, MALLOC, Parameter, Recording
from trainfit.results.text import MIB
from trainfit.simgpu.allocator.settings import LARGE_SEGMENT, SIZE_CLASSES, AllocatorSettings

WIDTH = 512
#: One weight of 512 x 512 in float32: a block of the small pool, so nothing is rounded.
WEIGHT = WIDTH * WIDTH * 4
LAYERS = 3


def record(
    batch: int = 4,
    steps: int = 3,
    *,
    frozen: bool = False,
    keep: list[Any] | None = None,
    gpu: str = "custom:4GiB",
    dtype: torch.dtype = torch.float32,
) -> Recording:
    """Adam on three layers without bias; the header says what ``trainfit simulate`` adds."""
    with trainfit.simulate(gpu, limited=False) as sim:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        model = model.cuda().to(dtype)
        model[0].weight.requires_grad_(not frozen)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained)
        for _ in range(steps):
            output = model(torch.randn(batch, WIDTH, dtype=dtype).cuda())
            if keep is not None:
                keep.append(output)
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    command = "python train.py '--batch_size={batch_size:4}'"
    known = {"batch_size": batch, "script": "train.py", "template": command}
    recording = sim.recording
    return dataclasses.replace(recording, header={**recording.header, **known})


def source(recording: Recording, name: str = "a.trainfit", **header: Any) -> RecordingSource:
    recording = dataclasses.replace(recording, header={**recording.header, **header})
    return RecordingSource(recording, name, recording.header.get("batch_size"))


@pytest.fixture(scope="module")
def small() -> Recording:
    return record(4)


@pytest.fixture(scope="module")
def large() -> Recording:
    return record(64)


@pytest.fixture(scope="module")
def report(small: Recording, large: Recording) -> MemoryReport:
    return explain(source(small), source(large, "b.trainfit"))


# -- the peak, and what stays ----------------------------------------------------------------


def test_the_peak_is_in_the_optimizer_where_the_batch_is_small(report: MemoryReport) -> None:
    """Parameters, gradients, two states, and one temporary of foreach Adam as large."""
    peak = report.peak
    assert peak.moment.phase == "optimizer"
    assert "foreach" in peak.moment.operator
    assert peak.by_kind_bytes["parameter"] == LAYERS * WEIGHT
    assert peak.by_kind_bytes["gradient"] == LAYERS * WEIGHT
    assert peak.by_kind_bytes["optimizer_state"] == 2 * LAYERS * WEIGHT
    assert peak.by_kind_bytes["temporary"] == LAYERS * WEIGHT
    assert sum(peak.by_kind_bytes.values()) == peak.allocated_bytes
    assert sum(peak.by_module_bytes.values()) == peak.allocated_bytes
    workspaces = [each.nbytes for each in peak.largest[:2]]
    assert workspaces == [8_519_680] * 2, "cuBLAS's, of the forward and the backward thread"
    assert {each.nbytes for each in peak.largest[2:15]} == {WEIGHT}
    assert all(__file__ in (each.line or "") for each in peak.largest[2:])
    assert 0.5 < peak.moment.through_step < 1
    assert whole(memory_subject(report)).count("in the optimizer's step") == 1


def test_the_peak_is_in_a_module_where_the_batch_is_large() -> None:
    explained = explain(source(record(8192)))
    moment = explained.peak.moment
    assert (moment.phase, moment.step) == ("backward", 2)
    assert moment.module == "", "of the loss, which no module has"
    assert "in the backward, outside of modules" in " ".join(
        whole(memory_subject(explained)).split()
    )


def test_what_stays_between_steps(report: MemoryReport) -> None:
    stays = report.remaining
    assert stays is not None and stays.kept_bytes is not None
    three = LAYERS * WEIGHT
    assert stays.after_step_bytes["parameter"] == stays.kept_bytes["parameter"] == three
    assert stays.after_step_bytes["optimizer_state"] == stays.kept_bytes["optimizer_state"]
    assert stays.after_step_bytes["gradient"] == three
    assert stays.kept_bytes["gradient"] == 0, "zero_grad sets them to None"
    assert stays.after_step_bytes["workspace"] == stays.kept_bytes["workspace"] == 2 * 8_519_680
    assert stays.context_bytes == report.memory.context_bytes


# -- optimizers ------------------------------------------------------------------------------


def uses(recording: Recording) -> dict[str, OptimizerUse]:
    table = optimizer_table(recording)
    assert table is not None
    return {row.name: row for row in table.rows}


def test_calls_of_what_does_not_train_are_no_optimizer_steps(report: MemoryReport) -> None:
    pattern = dataclasses.replace(report.pattern, unit="model call")
    text = whole(memory_subject(dataclasses.replace(report, pattern=pattern)))
    assert "3 model calls, torch" in text and "allocated after model call 3" in text
    assert "3 optimizer steps, torch" in whole(memory_subject(report))


def test_optimizers_by_hand(small: Recording) -> None:
    """Multiples of the parameters: what is kept, and the most during a step."""
    rows, whole = uses(small), LAYERS * WEIGHT
    for name, kept, peak in (
        ("SGD", 2, 2),
        ("SGD(momentum=0.9)", 3, 3),
        ("RMSprop", 3, 4),
        ("Adam", 4, 5),
        ("AdamW", 4, 5),
        ("AdamW(amsgrad=True)", 5, 6),
    ):
        assert rows[name].between_steps_bytes == kept * whole, name
        assert rows[name].peak_bytes == peak * whole, name
    one_by_one = rows["AdamW(foreach=False)"]
    assert one_by_one.between_steps_bytes == 4 * whole
    # The denominator of the parameter before, the root, and the quotient.
    assert one_by_one.peak_bytes == 4 * whole + 3 * WEIGHT
    steps = LAYERS * 4  # fused keeps each parameter's step count on the GPU
    fused = rows["AdamW(fused=True)"]
    assert (fused.between_steps_bytes, fused.peak_bytes) == (4 * whole + steps,) * 2


def test_eight_bit_states_by_hand(small: Recording) -> None:
    """Two bytes an element, a float32 scale for 256 of them, and two tables of 1 KiB."""
    elements = WIDTH * WIDTH
    state = 2 * (elements + elements // 256 * 4)
    expected = LAYERS * (2 * WEIGHT + state) + 2 * 1024
    assert uses(small)["bitsandbytes AdamW8bit"].between_steps_bytes == expected


def test_small_parameters_keep_full_states_with_eight_bit(small: Recording) -> None:
    entries = [[0, [63, 65], "float32", True]]  # 4,095 elements
    recording = dataclasses.replace(small, header={**small.header, "parameters": entries})
    assert uses(recording)["bitsandbytes AdamW8bit"].between_steps_bytes == 4 * 4_095 * 4


def test_adafactor_keeps_rows_and_columns(small: Recording) -> None:
    row = uses(small)["Adafactor"]
    assert row.between_steps_bytes == LAYERS * (2 * WEIGHT + 2 * WIDTH * 4)
    # One parameter at a time: its estimate of the variance and the update, and vectors.
    assert row.peak_bytes is not None and row.between_steps_bytes is not None
    assert 0 <= row.peak_bytes - row.between_steps_bytes - 2 * WEIGHT < 16 * 512


def test_half_precision_parameters() -> None:
    """States have the parameters' type, eight-bit ones do not."""
    recording = record(dtype=torch.bfloat16)
    rows, whole = uses(recording), LAYERS * WEIGHT // 2
    assert rows["Adam"].between_steps_bytes == 4 * whole
    kept = rows["bitsandbytes AdamW8bit"].between_steps_bytes
    assert kept is not None and 2.9 * whole < kept < 3.1 * whole


def test_frozen_parameters_are_told_apart() -> None:
    recording = record(frozen=True)
    table = explain(source(recording)).optimizers
    assert table is not None
    assert table.frozen_bytes == WEIGHT
    assert table.trained_bytes == (LAYERS - 1) * WEIGHT
    assert (table.present, table.present_bytes) == ("Adam", 4 * (LAYERS - 1) * WEIGHT)
    parameters = recording.parameters()
    assert parameters is not None
    assert sorted(each.trained for each in parameters) == [False, True, True]
    assert {each.shape for each in parameters} == {(WIDTH, WIDTH)}


def test_a_type_that_torch_lacks_is_a_reason(small: Recording) -> None:
    entries = [[0, [4], "float3", True]]
    recording = dataclasses.replace(small, header={**small.header, "parameters": entries})
    row = uses(recording)["SGD"]
    assert row.between_steps_bytes is None
    assert "'float3'" in row.reason


# -- growth with the batch size --------------------------------------------------------------


def test_the_law_by_hand(report: MemoryReport) -> None:
    """At the peak of 64 (the optimizer's step) remain of each sample: the model's output."""
    law = report.batches
    assert law is not None and law.law == "proportional"
    assert law.batches == (4, 64)
    assert law.allocated_per_sample_bytes == WIDTH * 4
    assert law.per_sample_by_kind_bytes == {"activation": WIDTH * 4}


def test_the_peak_moves_where_a_simulation_says_it_does(report: MemoryReport) -> None:
    law = report.batches
    assert law is not None and law.moves
    move = law.moves[0]
    assert move.before == "optimizer step"
    assert move.after == "backward outside of modules", "of the loss"
    for batch, phase in ((move.batch_size - 1, "optimizer"), (move.batch_size, "backward")):
        assert explain(source(record(batch))).peak.moment.phase == phase


def test_points_agree_with_direct_simulation(report: MemoryReport) -> None:
    law = report.batches
    assert law is not None
    (point,) = [each for each in law.points if each.batch_size == 128]
    direct = replay(Stream.of(record(128)))
    assert point.allocated_bytes == direct.peak_allocated
    assert point.reserved_bytes == direct.peak_reserved
    assert law.points[-1].batch_size == (law.largest_batch or 0) + 1
    assert [each.fits for each in law.points] == [True] * (len(law.points) - 1) + [False]
    assert law.largest_jump_bytes > 0


def test_the_text_has_the_law_or_the_command_for_it(report: MemoryReport, small: Recording) -> None:
    text = whole(memory_subject(report))
    assert re.search(r"\n  allocated .* \+ batch x", text) and re.search(
        r"\n  device .* \+ batch x", text
    )
    alone = whole(memory_subject(explain(source(small))))
    assert (
        "trainfit simulate --gpu 'custom 4GiB sm_80' --batch-size 8 --output batch-8.trainfit -- "
        "python train.py '--batch_size={batch_size:4}'"
    ) in alone
    assert "trainfit memory a.trainfit batch-8.trainfit" in alone


def test_what_grows_with_the_square_has_no_law(small: Recording) -> None:
    def contrastive(batch: int) -> Recording:
        with trainfit.simulate("custom:4GiB", limited=False) as sim:
            model = nn.Linear(64, 64).cuda()
            features = model(torch.randn(batch, 64).cuda())
            (features @ features.T).exp().sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        header = {**sim.recording.header, "batch_size": batch, "script": "x.py"}
        return dataclasses.replace(sim.recording, header=header)

    law = explain(source(contrastive(64)), source(contrastive(128), "b")).batches
    assert law is not None and law.law == "none"
    assert "does not grow linearly" in law.reason


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"gpu": "H200"}, "differ in their GPUs"),
        ({"script": "other.py"}, "differ in their scripts, 'train.py' and 'other.py'"),
        ({"torch": "2.8.0"}, "differ in their versions of PyTorch"),
        ({"batch_size": 4}, "have the same batch size, 4; record one of them at another: train"),
        ({"batch_size": None}, "has no batch size; give both, as in --batch-size 8,16"),
    ],
)
def test_recordings_that_do_not_belong_together(
    small: Recording, large: Recording, header: dict[str, Any], words: str
) -> None:
    with pytest.raises(ExplainError) as raised:
        explain(source(small), source(large, "b.trainfit", **header))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_same_script_elsewhere_is_the_same_script(small: Recording, large: Recording) -> None:
    second = source(large, "b.trainfit", script="/somewhere/train.py")
    assert explain(source(small), second).batches is not None


def test_two_courses_of_unnamed_scripts_are_an_error(small: Recording) -> None:
    first = source(small, script=None)
    second = source(record(8, steps=2), "b.trainfit", script=None)
    assert explain(first, second).batches is not None, "as many steps as both have"
    with trainfit.simulate(str(small.header["gpu"]), limited=False) as sim:
        model = nn.Linear(8, 8).cuda()
        model(torch.randn(2, 8).cuda()).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(ExplainError, match="record one script twice"):
        explain(first, RecordingSource(sim.recording, "c.trainfit", 2))


# -- from step to step -----------------------------------------------------------------------


def test_growth_has_its_source_line_and_end() -> None:
    recording = record(8, steps=8, keep=[])
    pattern = step_pattern(recording, reserved_bytes=1 << 30)
    assert pattern.course == "growing"
    growth = 8 * WIDTH * 4
    assert pattern.growth_bytes_per_step == growth
    (source_,) = pattern.sources
    assert (source_.bytes_per_step, source_.module) == (growth, "Sequential.2")
    assert (source_.operator, source_.kind) == ("aten.mm.default", "activation")
    assert source_.line is not None and source_.line.startswith(__file__)
    header = recording.header
    free = header["gpu_memory_bytes"] - header["context_bytes"] - (1 << 30)
    assert pattern.steps_until_full == 8 + free // growth


def test_the_present_script_has_settled(report: MemoryReport) -> None:
    assert (report.pattern.course, report.pattern.settled_from) == ("settled", 2)
    assert report.pattern.sources == ()


# -- fragmentation ---------------------------------------------------------------------------


def stream(*events: int | str) -> Stream:
    """``5`` allocates 5 MiB, ``"0"`` frees the first allocation."""
    sizes, column = [], []
    for event in events:
        if isinstance(event, int):
            column.append(len(sizes) * 4 + MALLOC)
            sizes.append(event * MIB)
        else:
            column.append(int(event) * 4 + FREE)
    array = np.array
    zeros = np.zeros(len(sizes), dtype=np.int64)
    return Stream(array(column), array(sizes), zeros, zeros.astype(bool))


def by_name(outcomes: tuple[SettingOutcome, ...]) -> dict[str, SettingOutcome]:
    return {each.setting: each for each in outcomes}


#: 100 MiB go, 30 of their segment stay in use, and 100 are wanted again: the 70 are no use.
PINNED = stream(100, "0", 30, 100)


def test_settings_compared_by_hand() -> None:
    outcomes = compare_settings(PINNED, 1 << 40, 0, AllocatorSettings())
    named = by_name(outcomes)
    assert outcomes[0].setting == outcomes[0].environment == ""
    assert outcomes[0].reserved_bytes == 200 * MIB
    # Pages of 20 MiB: 100 are mapped, 70 of them free; two more pages make the next 100.
    expandable = named["expandable_segments:True"]
    assert expandable.reserved_bytes == 140 * MIB
    assert expandable.environment == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    # Blocks from 64 MiB on are not split: the 30 get a segment of their own, and the 100 wait.
    assert named["max_split_size_mb:64"].reserved_bytes == 130 * MIB
    assert named["max_split_size_mb:128"].reserved_bytes == 200 * MIB
    # 100 are rounded up to 112 (quarters of 64), and 30 to 32 (quarters of 16: 4 each).
    assert named["roundup_power2_divisions:4"].reserved_bytes == 224 * MIB
    best = best_setting(outcomes)
    assert best is not None and best.setting == "expandable_segments:True"


def test_a_setting_that_makes_it_fit_comes_first() -> None:
    outcomes = compare_settings(PINNED, 190 * MIB, 10 * MIB, AllocatorSettings())
    assert not outcomes[0].fits
    assert outcomes[0].reserved_bytes == 200 * MIB, "what it would need"
    assert by_name(outcomes)["expandable_segments:True"].fits
    best = best_setting(outcomes)
    assert best is not None and best.setting == "max_split_size_mb:64", "130 MiB is the least"


def test_settings_that_the_recordings_pytorch_lacks_are_not_tried() -> None:
    for version, has in (("2.8.0+cu128", False), ("2.9.1", False), ("2.10.0", True)):
        outcomes = compare_settings(PINNED, 1 << 40, 0, AllocatorSettings(), torch=version)
        assert ("garbage_collection_threshold:0.8" in by_name(outcomes)) == has
        for each in outcomes:  # what is to be set is what it takes
            AllocatorSettings.from_conf(each.environment.partition("=")[2], version)


def test_nothing_is_recommended_that_saves_nothing() -> None:
    outcomes = compare_settings(stream(20, 40, 60), 1 << 40, 0, AllocatorSettings())
    assert best_setting(outcomes) is None


def test_present_settings_stay_and_are_not_tried_twice() -> None:
    present = AllocatorSettings.from_conf("max_split_size_mb:128,garbage_collection_threshold:0.7")
    outcomes = compare_settings(PINNED, 1 << 40, 0, present)
    assert outcomes[0].environment == (
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128,garbage_collection_threshold:0.7"
    )
    names = [each.setting for each in outcomes]
    assert "max_split_size_mb:128" not in names
    assert by_name(outcomes)["expandable_segments:True"].environment.endswith(
        "expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.7"
    )


def test_fragmentation_at_the_peak(report: MemoryReport) -> None:
    state = report.fragmentation
    assert state.allocated_bytes == report.memory.allocated_bytes
    assert state.reserved_bytes <= state.peak_reserved_bytes == report.memory.reserved_bytes
    assert state.inactive_split_bytes <= state.reserved_bytes - state.allocated_bytes
    assert state.largest_free_block_bytes <= state.reserved_bytes - state.allocated_bytes
    assert state.segments > 0


CONFS = st.builds(
    AllocatorSettings,
    max_split_bytes=st.none() | st.integers(64, 4096).map(lambda mib: mib * MIB),
    roundup_power2_divisions=st.lists(
        st.sampled_from([0, 1, 2, 4, 8, 16]), min_size=SIZE_CLASSES, max_size=SIZE_CLASSES
    ).map(tuple)
    | st.sampled_from([(0,) * SIZE_CLASSES, (4,) * SIZE_CLASSES]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.25, 0.8]),
    expandable_segments=st.booleans(),
    max_non_split_rounding_bytes=st.sampled_from([LARGE_SEGMENT, 64 * MIB]),
    large_segment_bytes=st.sampled_from([LARGE_SEGMENT, 32 * MIB, 64 * MIB]),
    per_process_memory_fraction=st.sampled_from([1.0, 0.5, 0.99]),
)


@given(settings=CONFS)
def test_settings_survive_their_text(settings: AllocatorSettings) -> None:
    conf = settings.to_conf()
    if not settings.rounds_to_divisions:
        settings = dataclasses.replace(settings, roundup_power2_divisions=(0,) * SIZE_CLASSES)
    if settings.max_non_split_rounding_bytes >= settings.large_segment_bytes:
        assert AllocatorSettings.from_conf(conf) == settings


def test_defaults_need_no_text() -> None:
    assert AllocatorSettings().to_conf() == ""


# -- the file --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters",
    [[1], [[0, [1], "float32"]], [[0, [-1], "float32", True]], [[10**9, [1], "float32", True]]],
)
def test_parameters_that_are_none_are_damage(small: Recording, parameters: list[Any]) -> None:
    header = {**small.header, "parameters": parameters}
    with pytest.raises(ValueError, match="parameter"):
        dataclasses.replace(small, header=header).check()


def test_parameters_of_the_recording(small: Recording) -> None:
    parameters = small.parameters()
    assert parameters is not None
    assert [dataclasses.replace(each, alloc=0) for each in parameters] == [
        Parameter(0, (WIDTH, WIDTH), "float32", True)
    ] * LAYERS
    assert {small.strings[line].rpartition(":")[0] for line in small.alloc_line[:LAYERS]} == {
        __file__
    }


def test_the_document_is_json(report: MemoryReport) -> None:
    document = json.loads(report.to_json())
    assert (document["format"], document["version"]) == ("trainfit-memory-report", 1)
    assert document["pattern"]["course"] == "settled"


# --- Out of memory --------------------------------------------------------------------------------


def _filled(*, batch: int = 8, layers: int = 3) -> RecordingSummary:
    """Adam on layers of 64 MiB each, on a GPU of 1 GiB, until it is full."""
    with trainfit.simulate("custom:1GiB") as sim:
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(layers))).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.randn(batch, 4096).cuda()).square().mean().backward()
            optimizer.step()
        recording = sim.recording
    full = "train.py:9: CUDA out of memory. Tried to allocate 64.00 MiB."
    return summarize(recording, "x.trainfit", out_of_memory=full)


def test_what_fills_a_gpu_in_the_optimizers_first_step() -> None:
    found = _filled()
    assert [each.kind for each in found.findings] == ["optimizer_state_first"]
    (finding,) = found.findings
    assert "384" in finding.cause and "8-bit" in finding.fix.action  # two for each of 192 MiB
    assert found.by_kind_bytes["optimizer_state"] and not found.by_kind_bytes.get("temporary")
    text = whole(recording_subject(found))
    assert "optimizer's first step" in text and "cannot show whether memory settles" not in text


def test_what_fills_a_gpu_before() -> None:
    (finding,) = _filled(batch=1 << 14, layers=1).findings
    assert finding.kind == "memory_mostly" and finding.fixes


def test_the_largest_allocation_is_named(small: Recording) -> None:
    found = summarize(small, "x.trainfit")
    assert found.largest is not None and found.largest.nbytes >= WEIGHT
    large = dataclasses.replace(found, largest=dataclasses.replace(found.largest, nbytes=1 << 40))
    assert "in one piece" in whole(recording_subject(large))
    small_one = dataclasses.replace(found.largest, nbytes=1)
    assert "in one piece" not in whole(
        recording_subject(dataclasses.replace(found, largest=small_one))
    )
