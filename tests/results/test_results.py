"""Results that cross processes and files: nothing is lost, nothing foreign is accepted."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers_loader import result as loader_result
from trainfit.hardware import find_gpu
from trainfit.results.changes import Combination, ExtraCompute, Remedies, Remedy
from trainfit.results.configuration import Configuration
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.files.contents import Note
from trainfit.results.files.decoding import DecodingError, decode
from trainfit.results.files.errors import ResultFileError
from trainfit.results.gpus import Constant
from trainfit.results.memory import MemoryFigures
from trainfit.results.plan import Inference, PlanResult
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.recording import FREE, MALLOC, STEP_END, Recording
from trainfit.results.runs.spec import LoaderSpec, RunSpec, TuningSpec
from trainfit.results.runs.steps import Coverage
from trainfit.results.runs.trace import (
    LoaderInfo,
    LoaderOverride,
    Target,
    TraceOutcome,
)
from trainfit.results.speed import DataLoading, Speed, StepSpeed

_TEXT = st.text(max_size=20)
_BYTES = st.integers(0, 1 << 50)
_BY_NAME = st.dictionaries(_TEXT, _BYTES, max_size=4)
_CONSTANT = st.builds(
    lambda name, three, basis, source: Constant(name, three[1], three[0], three[2], basis, source),
    _TEXT,
    st.tuples(_BYTES, _BYTES, _BYTES).map(sorted),
    st.sampled_from(["measured", "published", "derived", "assumed", "simulated"]),
    _TEXT,
)
_MEMORY = st.builds(
    MemoryFigures,
    *(_BYTES, _BYTES, _BYTES, _BYTES),
    context_range_bytes=st.tuples(_BYTES, _BYTES),
    context_parts=st.lists(_CONSTANT, max_size=3).map(tuple),
)
_CONFIGURATION = st.builds(
    Configuration,
    batch_size=st.none() | st.integers(1, 1 << 20),
    amp=_TEXT,
    memory=_MEMORY,
    fits=st.booleans(),
    by_kind_bytes=_BY_NAME,
    by_module_bytes=_BY_NAME,
    step_peak_allocated_bytes=st.lists(_BYTES, max_size=4).map(tuple),
    largest_batch=st.none() | st.integers(0, 1 << 20),
    recommended_batch=st.none() | st.integers(0, 1 << 20),
)
_REMEDY = st.builds(
    Remedy,
    name=_TEXT,
    title=_TEXT,
    status=st.sampled_from(["simulated", "replayed", "estimated", "failed", "not applicable"]),
    reason=_TEXT,
    changes=st.sampled_from(["nothing", "precision", "training"]),
    changes_detail=_TEXT,
    memory=st.none() | _MEMORY,
    fits=st.none() | st.booleans(),
    saved_bytes=st.none() | st.integers(-(1 << 50), 1 << 50),
    largest_batch=st.none() | st.integers(0, 1 << 20),
    extra=st.none() | st.builds(ExtraCompute, *[st.floats(-1, 100)] * 3),
    cost_percent=st.none() | st.floats(1, 1e6),
    how=st.lists(_TEXT, max_size=3).map(tuple),
    launch=st.none() | _TEXT,
)
_COMBINATION = st.builds(
    Combination,
    names=st.lists(_TEXT, max_size=3).map(tuple),
    memory=st.none() | _MEMORY,
    fits=st.booleans(),
    batch_size=st.none() | st.integers(1, 1 << 20),
    extra=st.none(),
    launch=_TEXT,
)
_REMEDIES = st.builds(
    Remedies,
    before=st.none() | _MEMORY,
    batch_size=st.none() | st.integers(1, 1 << 20),
    largest_batch=st.none() | st.integers(0, 1 << 20),
    steps=st.integers(0, 100),
    items=st.lists(_REMEDY, max_size=3).map(tuple),
    combination=st.none() | _COMBINATION,
)
_PLAN = st.builds(
    PlanResult,
    command=_TEXT,
    gpu=_TEXT,
    gpu_memory_bytes=_BYTES,
    headroom_share=st.floats(0, 1, exclude_max=True),
    steps=st.integers(1, 100),
    now=_CONFIGURATION,
    recommended=st.none() | _MEMORY,
    other_amp=st.none() | _CONFIGURATION,
    basis=st.sampled_from(["two traces", "one trace a batch size", "one trace"]),
    basis_detail=_TEXT,
    launch=_TEXT,
    assumptions=_BY_NAME,
    notes=st.lists(_TEXT, max_size=3).map(tuple),
    other_gpus=st.lists(_TEXT, max_size=3).map(tuple),
    gpu_sources=st.dictionaries(_TEXT, _TEXT, max_size=3),
    environment=st.dictionaries(_TEXT, _TEXT, max_size=3),
    seconds=st.floats(0, 1e6),
    remedies=st.none() | _REMEDIES,
    inference=st.none()
    | st.builds(Inference, st.booleans(), st.none() | _MEMORY, st.none() | _MEMORY),
    structured_notes=st.lists(
        st.builds(
            Note,
            kind=st.sampled_from(["assumption", "action", "note"]),
            text=_TEXT,
            count=st.integers(1, 99),
            lines=st.lists(_TEXT, max_size=2).map(tuple),
            severity=st.sampled_from(
                ["changes the figures", "may change the figures", "information"]
            ),
        ),
        max_size=3,
    ).map(tuple),
    coverage=st.none()
    | st.builds(
        Coverage,
        st.booleans(),
        st.booleans(),
        st.none() | st.floats(0, 1e6),
        st.none() | st.integers(1, 1 << 30),
    ),
)

_FIGURES = MemoryFigures(1, 2, 3, 4, (3, 5))
#: Its low is above its value.
_FOREIGN_PART = dataclasses.asdict(_FIGURES) | {
    "context_parts": [
        {
            "name": "context",
            "value_bytes": 1,
            "low_bytes": 2,
            "high_bytes": 3,
            "basis": "measured",
            "source": "",
        }
    ]
}
_NOW = Configuration(8, "off", _FIGURES, True, {}, {}, (1,), 24, 16)
PLAN = PlanResult(
    command="python train.py",
    gpu="RTX 4090",
    gpu_memory_bytes=24 << 30,
    headroom_share=0.1,
    steps=3,
    now=_NOW,
    recommended=None,
    other_amp=None,
    basis="two traces",
    basis_detail="",
    launch="python train.py",
    assumptions={},
    notes=(),
    other_gpus=(),
    gpu_sources={},
    environment={},
    seconds=1.0,
)


# -- plans -----------------------------------------------------------------------------------


@given(_PLAN)
def test_a_plan_survives_json(plan: PlanResult) -> None:
    assert PlanResult.from_json(plan.to_json(), Path("plan.json")) == plan


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert PlanResult.load(tmp_path / "plan.json") == PLAN
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_speed_survives_json() -> None:
    now = StepSpeed(8, 0.1, (0.08, 0.12), 0.09, 0.05, 0.0, "bandwidth", 80.0)
    speed = Speed(now, (now,), 8, 0.3, {"matmul": 0.09}, "assumed", 12.5, ("a note",))
    plan = dataclasses.replace(PLAN, speed=speed)
    assert PlanResult.from_json(plan.to_json(), Path("plan.json")) == plan
    assert speed.at(8) == now and speed.at(16) is None


def test_data_loading_survives_json() -> None:
    loading = DataLoading(loader_result(), 8, False, "gpu", 1.5)
    for each in (loading, DataLoading(None, failure="no loader")):
        plan = dataclasses.replace(PLAN, loading=each, variables={"A": "b"})
        assert PlanResult.from_json(plan.to_json(), Path("plan.json")) == plan


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_nan_is_written(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dataclasses.replace(PLAN, seconds=value).to_json()


def test_keys_are_snake_case_and_memory_says_bytes() -> None:
    def keys(value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, each in value.items():
                yield key, each
                yield from keys(each)

    document = json.loads(PLAN.to_json())
    assert document["format"] == "trainfit-plan"
    assert document["version"] == PlanResult.FILE.version
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", key) for key, _ in keys(document))
    plain = {"version", "steps", "batch_size", "largest_batch", "recommended_batch", "rank"}
    plain |= {"retries", "rounds"}
    numbers = {key for key, value in keys(document) if type(value) is int} - plain
    assert all(key.endswith("_bytes") for key in numbers)


def change(**changes: Any) -> str:
    return json.dumps({**json.loads(PLAN.to_json()), **changes})


def without(key: str) -> str:
    document = json.loads(PLAN.to_json())
    del document[key]
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is empty"),
        ("{", "damaged, or not a result file"),
        (PLAN.to_json()[:-20], "damaged, or not a result file"),
        ("[" * 100_000, "damaged, or not a result file"),
        ("[]", "not a result of trainfit"),
        ("null", "not a result of trainfit"),
        ('{"a": 1}', "not a result of trainfit"),
        (change(format="trainfit-memory"), "its format is 'trainfit-memory'"),
        (change(format=None), "its format is None"),
        (change(version=2), "version 2 is newer than this trainfit reads"),
        (change(version="1"), "its format version is '1'"),
        (change(version=True), "its format version is True"),
        (change(version=0), "its format version is 0"),
        (without("version"), "its format version is None"),
        (without("now"), "PlanResult has no 'now'"),
        (change(now=[]), "PlanResult.now is [], not an object"),
        (change(recommended=_FOREIGN_PART), "context_parts[0]: context is not between its own"),
        (change(colour=1), "unknown key 'colour'"),
        (change(steps="3"), "PlanResult.steps is '3', not int"),
        (change(steps=True), "PlanResult.steps is True, not int"),
        (change(notes=[1]), "PlanResult.notes[0] is 1, not str"),
        (change(basis="a guess"), "PlanResult.basis is 'a guess'"),
        (change(assumptions={"x": None}), "PlanResult.assumptions.x is None"),
        (change(seconds=1).replace('"seconds": 1', '"seconds": NaN'), "NaN is not valid JSON"),
    ],
)
def test_damaged_newer_and_foreign_plans(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ResultFileError, match=r"^result file '.*plan\.json': ") as caught:
        PlanResult.load(path)
    assert says in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"PK\x03\x04 no zip"])
def test_files_that_are_no_text(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ResultFileError):
        PlanResult.load(path)


def test_whole_numbers_are_seconds_too() -> None:
    plan = PlanResult.from_json(change(seconds=2), Path("plan.json"))
    assert plan.seconds == 2.0
    assert type(plan.seconds) is float


def test_a_tuple_has_its_length() -> None:
    figures = {**dataclasses.asdict(_FIGURES), "context_range_bytes": [1, 2, 3]}
    with pytest.raises(DecodingError, match=r"context_range_bytes is \[1, 2, 3\], not a list of 2"):
        decode(MemoryFigures, figures)


@pytest.mark.parametrize(
    ("now_fits", "largest", "fits"),
    [(True, None, True), (False, None, False), (False, 4, True), (False, 0, False)],
)
def test_a_plan_fits_if_any_batch_size_does(
    now_fits: bool, largest: int | None, fits: bool
) -> None:
    now = dataclasses.replace(_NOW, fits=now_fits, largest_batch=largest)
    assert dataclasses.replace(PLAN, now=now).fits is fits


# -- traces ----------------------------------------------------------------------------------


def test_requests_and_outcomes_survive_json(tmp_path: Path) -> None:
    spec = RunSpec(
        target=Target("script", "train.py", ("--a", "ü\n")),
        gpu=find_gpu("RTX 4090"),
        steps=3,
        folder="r",
        loader=LoaderOverride(1, 16),
        force="on",
        loading=LoaderSpec(TuningSpec(Consumer(0.1))),
    )
    assert RunSpec.from_json(spec.to_json()) == spec
    loader = LoaderInfo(0, 8, None, 3, LoaderSettings(2), "Samples", "train.py:3")
    outcome = TraceOutcome("failed", 1, 0.5, "ValueError: \udc80", loader=loader)
    outcome.save(tmp_path / "outcome.json")
    assert TraceOutcome.load(tmp_path / "outcome.json") == outcome


# -- recordings ------------------------------------------------------------------------------


KERNEL_SIZES = (
    *("stream", "flops", "read", "written", "rows", "columns", "depth", "batches", "launches"),
)


def recording_of_three_steps() -> Recording:
    """Each step allocates twice, the second time a workspace, and frees it; 3 operators, one of
    which launches a kernel."""

    def column(*values: int) -> Any:
        return np.array(values, dtype=np.int64)

    events = []
    for step in range(3):
        first, second = 2 * step, 2 * step + 1
        events += [first * 4 + MALLOC, second * 4 + MALLOC, second * 4 + FREE, step * 4 + STEP_END]
    return Recording(
        header={
            "gpu": "x",
            "gpu_memory_bytes": 1,
            "context_bytes": 1,
            "context_range_bytes": [1, 1],
            "torch": "2",
            "assumptions": {},
            "limited": False,
        },
        strings=("op", "workspace"),
        op_name=column(*[0] * 9),
        op_phase=column(*[2] * 9),
        op_module=column(*[-1] * 9),
        op_step=column(0, 0, 0, 1, 1, 1, 2, 2, 2),
        alloc_bytes=column(10, 11, 20, 21, 30, 31),
        alloc_op=column(0, 1, 3, 4, 6, 7),
        alloc_kind=column(*[4, 7] * 3),
        alloc_module=column(*[-1] * 6),
        alloc_stream=column(*[0] * 6),
        alloc_line=column(*[-1] * 6),
        events=column(*events),
        workspace_alloc=column(1, 3, 5),
        workspace_model=column(1, 1, 1),
        workspace_start=column(0, 2, 4, 6),
        workspace_args=column(1, 2, 3, 4, 5, 6),
        **{f"kernel_{name}": column(1, 2, 3) for name in KERNEL_SIZES},
        kernel_op=column(0, 4, 7),
        kernel_kind=column(0, 1, 2),
        kernel_dtype=column(0, 0, 1),
    )


def test_the_first_steps_of_a_recording() -> None:
    whole = recording_of_three_steps()
    whole.check()
    assert whole.first_steps(3) is whole
    two = whole.first_steps(2)
    two.check()
    assert two.steps == 2
    assert two.op_step.tolist() == [0, 0, 0, 1, 1, 1]
    assert two.alloc_bytes.tolist() == [10, 11, 20, 21]
    assert two.events.tolist() == whole.events.tolist()[:8]
    assert two.workspace_start.tolist() == [0, 2, 4]
    assert two.workspace_args.tolist() == [1, 2, 3, 4]
    assert two.kernel_op.tolist() == [0, 4] and two.kernel_flops.tolist() == [1, 2]
    for count in (0, 4):
        with pytest.raises(ValueError, match="of 3 recorded steps"):
            whole.first_steps(count)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("op_name", [2] * 9),
        ("op_phase", [5] * 9),
        ("alloc_kind", [4] * 5),
        ("alloc_op", [9] * 6),
        ("workspace_start", [0, 2, 4, 7]),
        ("kernel_op", [0, 4, 9]),
        ("kernel_kind", [0, 1, 999]),
        ("kernel_flops", [1, 2]),
        ("kernel_read", [1, 2, -3]),
        ("events", [0, 4, 5]),
        ("events", [4, 0, 8, 12, 16, 20]),
        ("events", [1, 0, 4, 8, 12, 16, 20]),
        ("events", [0, 1, 1, 4, 8, 12, 16, 20]),
    ],
)
def test_columns_that_do_not_belong_together(name: str, values: list[int]) -> None:
    column = np.array(values, dtype=np.int64)
    with pytest.raises(ValueError, match=r"column|allocation"):
        dataclasses.replace(recording_of_three_steps(), **{name: column}).check()
