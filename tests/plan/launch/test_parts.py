"""The parts of a launch command: each with its reason, and what the script has to say itself."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest

from helpers_loader import result
from tests.report.plan.test_text import PLAN
from trainfit.plan.command.parsing import Command, parse_command
from trainfit.plan.launch import with_launch
from trainfit.report.changes import change_lines, left_out_text, part_reason, threads_text
from trainfit.report.sections.plan_facts import facts
from trainfit.results.changes import AllocatorTrial, LaunchPart, changes_by_hand
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.loader import CoreAdvice, LoaderResult, SettingReason, VariableAdvice
from trainfit.results.plan import HostCpu, PlanResult
from trainfit.results.runs.steps import StepMakeup
from trainfit.results.speed import DataLoading, Ranks

LINE = "python train.py --batch_size={batch_size:8} --j={num_workers:1}"
OMP = VariableAdvice(
    "OMP_NUM_THREADS", "1", "environment", "", "too many threads", "", None, "", 3.0
)
ENV = "environment"
WHY = SettingReason("OMP_NUM_THREADS", "1", None, "3 times as many", "measured", where=ENV)
MKL = SettingReason("MKL_NUM_THREADS", None, None, "no library uses MKL", "measured", where=ENV)
CORES = SettingReason("CPU affinity", None, None, "all cores are of one kind", "", where="wrapper")


pytestmark = pytest.mark.usefixtures("script")


def parse(line: str = LINE) -> Command:
    return parse_command(shlex.split(line))


def launched(
    found: LoaderResult | None = None, line: str = LINE, **changes: Any
) -> tuple[PlanResult, dict[str, LaunchPart]]:
    """The plan with its launch line, and the parts of that by name."""
    loading = DataLoading(found, 8) if found is not None else None
    plan = dataclasses.replace(PLAN, loading=loading, loader_at="train.py:12", **changes)
    plan = with_launch(plan, parse(line))
    return plan, {part.name: part for part in plan.launch_parts}


def test_every_part_has_a_reason_and_says_what_that_is_from() -> None:
    found = result(variables=(OMP,), reasons=(WHY, MKL, CORES))
    plan, parts = launched(found)
    assert plan.launch == "OMP_NUM_THREADS=1 python train.py --batch_size=24 --j=4"
    assert parts["OMP_NUM_THREADS"] == LaunchPart(
        "OMP_NUM_THREADS", "set", "environment", "3 times as many", "1", "", "measured",
        "this machine",
    )  # fmt: skip
    assert parts["MKL_NUM_THREADS"].status == parts["CPU affinity"].status == "not set"
    assert (parts["batch_size"].status, parts["batch_size"].value) == ("set", "24")
    assert parts["batch_size"].machine == PLAN.gpu
    assert (parts["num_workers"].status, parts["num_workers"].present) == ("set", "1")
    assert parts["persistent_workers"].status == "by hand"


def test_a_variable_of_the_command_that_loses_is_replaced() -> None:
    found = result(variables=(OMP,), reasons=(dataclasses.replace(WHY, present="8"),))
    plan, parts = launched(found, f"OMP_NUM_THREADS=8 {LINE}")
    assert plan.launch.startswith("OMP_NUM_THREADS=1 python")
    assert (parts["OMP_NUM_THREADS"].status, parts["OMP_NUM_THREADS"].present) == ("set", "8")
    assert "OMP_NUM_THREADS=1: " in threads_text(plan.launch_parts)


def test_one_that_was_not_measured_to_lose_is_kept_and_said() -> None:
    found = result(variables=(dataclasses.replace(OMP, gain=None),), reasons=(WHY,))
    plan, parts = launched(found, f"OMP_NUM_THREADS=8 {LINE}")
    assert plan.launch.startswith("OMP_NUM_THREADS=8 python")
    part = parts["OMP_NUM_THREADS"]
    assert (part.status, part.value) == ("kept", "8")
    assert part.recommended == "1" and "recommended is 1" in part_reason(part)
    assert "OMP_NUM_THREADS=8: the command's own; recommended is 1" in threads_text([part])


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_variable_that_no_library_can_read_goes(is_measured: bool) -> None:
    """With the DataLoader measured and without; the screen says it."""
    why = "is ignored (OpenMP expects a positive integer): the default thread count applies"
    odd = SettingReason(
        "OMP_NUM_THREADS", None, "abc", "no gain", "assumed", where=ENV, misread=why
    )
    found = result(reasons=(odd,)) if is_measured else None
    plan, parts = launched(found, f"OMP_NUM_THREADS=abc A=b {LINE}")
    assert plan.launch.startswith("A=b python")
    part = parts["OMP_NUM_THREADS"]
    assert (part.status, part.present, part.value) == ("not set", "abc", "")
    assert part.reason.startswith("removed: it is ignored (OpenMP expects a positive integer)")
    assert (part.more == "no gain") == is_measured
    assert part_reason(part).endswith("; no gain [assumed]") == is_measured
    said = next(fact.text for fact in facts(plan).rows if fact.label == "variables")
    assert said.startswith("OMP_NUM_THREADS=abc removed: it is ignored")
    assert "OMP_NUM_THREADS" not in left_out_text(plan.launch_parts)
    assert "was abc, removed: it is ignored" in part_reason(part)


def test_one_that_is_replaced_needs_no_measured_gain() -> None:
    advice = dataclasses.replace(OMP, gain=None, present="0", set_by="command")
    found = result(variables=(advice,), reasons=(dataclasses.replace(WHY, present="0"),))
    plan, parts = launched(found, f"OMP_NUM_THREADS=0 {LINE}")
    assert plan.launch.startswith("OMP_NUM_THREADS=1 python")
    assert (parts["OMP_NUM_THREADS"].status, parts["OMP_NUM_THREADS"].present) == ("set", "0")


def test_a_variable_of_the_shell_that_no_library_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    plan, parts = launched()
    assert plan.launch.startswith("python")
    assert parts["OMP_NUM_THREADS"].reason.startswith("unset it where it is set: it is ignored")


def test_a_change_of_the_script_has_to_win_something() -> None:
    plan, parts = launched(result(verdict="nothing_to_gain"), "python train.py --b={batch_size:8}")
    assert changes_by_hand(plan.launch_parts) == []
    part = parts["num_workers"]
    assert (part.status, part.value) == ("kept", "1")
    assert "too little to change the script" in part.reason


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("cfg.yaml", "# batch_size: 8\ndata:\n  batch_size: 8  # samples\n", "3: batch_size: 24"),
        ("cfg.json", '{"train": {\n "per_device_train_batch_size": 8,\n "eval_batch_size": 8}}',
         '2: "per_device_train_batch_size": 24'),
        ("cfg.json", '{"bs": 8, "lr": 0.1}', '1: "bs": 24'),
        ("cfg.toml", "[data]\nbatch_size = 8\n", "2: batch_size=24"),
        ("cfg.yaml", "train:\n  batch_size: 8\nother:\n  batch_size: 8\n", None),
        ("cfg.yaml", "batch_size: 80\nmicro_batch: ${batch}\nbatch: 8.5\n", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by", ["option", "word", "script"])
def test_a_value_in_a_configuration_file_is_changed_there(
    name: str, text: str, line: str | None, by: str
) -> None:
    Path(name).write_text(text)
    if by == "script":
        Path("train.py").write_text(f"settings = read('{name}')\n")
    command = {"option": f" --config={name}", "word": f" --c {name}", "script": ""}[by]
    plan, parts = launched(None, f"python train.py{command}")
    part = parts["batch_size"]
    assert (part.status, part.value) == ("by hand", "24")
    first = change_lines(plan.launch_parts)[0]
    if line is None:
        assert first == "change train.py:12: DataLoader(…, batch_size=24)"
        return
    assert first == f"change {name}:{line}"
    assert f"in {name}, was 8: " in part_reason(part)


def test_no_line_of_an_installed_package_is_to_be_changed() -> None:
    place = "/env/lib/python3.11/site-packages/torchtune/recipe.py:557"
    plan = dataclasses.replace(PLAN, loading=DataLoading(result(), 8), loader_at=place)
    parts = with_launch(plan, parse("python train.py")).launch_parts
    assert not change_lines(parts)
    kept = {part.name: part for part in parts if place in part.reason}
    assert {"batch_size", "num_workers"} <= set(kept)
    assert (kept["batch_size"].status, kept["batch_size"].value) == ("kept", "8")
    assert kept["batch_size"].reason.startswith("24: ")


def test_cores_that_the_command_chooses_are_kept() -> None:
    found = result(cores=CoreAdvice("taskset -c 0-3", (0, 1, 2, 3), "", ""), reasons=(CORES,))
    plan, parts = launched(found, f"taskset -c 1 {LINE}")
    assert plan.launch.startswith("taskset -c 1 python")
    assert parts["taskset"].status == "kept"
    assert "recommended is taskset -c 0-3" in parts["taskset"].reason


def test_what_the_script_has_to_say_itself_is_one_line_a_place() -> None:
    plan, parts = launched(result(), "python train.py")
    assert plan.launch == "python train.py"
    line = "DataLoader(…, batch_size=24, num_workers=4, pin_memory=True, persistent_workers=True)"
    assert changes_by_hand(plan.launch_parts) == [("train.py:12", line)]
    assert change_lines(plan.launch_parts) == [f"change train.py:12: {line}"]
    assert parts["prefetch_factor"].status == "kept"


def test_a_precision_to_be_written_says_that_the_figures_are_without_it() -> None:
    line = 'with torch.autocast("cuda", dtype=torch.bfloat16): around the forward pass'
    part = LaunchPart("amp", "by hand", "script", "1.9x", "bfloat16", line=line, place="train.py:9")
    batch = dataclasses.replace(part, name="batch_size", line="batch_size=24", place="train.py:5")
    assert change_lines([batch, part]) == [
        "change train.py:5: batch_size=24",
        f"change train.py:9 (not in these figures): {line}",
    ]


def test_transformers_have_names_of_their_own() -> None:
    makeup = StepMakeup(24, 8, 1, loop="Transformers")
    plan, _ = launched(result(), "python train.py", step=makeup)
    assert "TrainingArguments(…, per_device_train_batch_size=24, dataloader_num_workers=4" in str(
        changes_by_hand(plan.launch_parts)
    )


def test_a_loader_that_was_not_tuned() -> None:
    _, parts = launched(None)
    assert parts["num_workers"].status == "cannot tell"
    assert "--no-loader" in parts["num_workers"].reason
    failed = DataLoading(None, 8, failure="data/x.bin: no such file")
    plan = with_launch(dataclasses.replace(PLAN, loading=failed), parse())
    part = next(part for part in plan.launch_parts if part.name == "num_workers")
    assert part.reason.endswith("data/x.bin: no such file")


def test_workers_for_another_processor_are_told_apart_from_those_here() -> None:
    loading = DataLoading(result(), 8, launched=LoaderSettings(12, persistent_workers=True))
    cpu = HostCpu(16, 3e9, name="Azure NC")
    plan = with_launch(dataclasses.replace(PLAN, loading=loading, cpu=cpu), parse())
    assert plan.launch.endswith("--j=12")
    part = next(part for part in plan.launch_parts if part.name == "num_workers")
    assert (part.evidence, part.machine) == ("predicted", "Azure NC")
    assert "this machine needs 4" in part.reason


def allocator(present: str = "", saved: int = 0) -> AllocatorTrial:
    expandable = "expandable" in present
    return AllocatorTrial(
        "PYTORCH_CUDA_ALLOC_CONF", present, expandable, 24, 5 << 30, (5 << 30) - saved, True, True
    )


@pytest.mark.parametrize(
    ("trial", "status", "says"),
    [
        (allocator(), "not set", "with expandable segments as much is reserved"),
        (allocator(saved=1 << 30), "not set", "1.00 GiB less reserved (5.00 GiB at batch size 24)"),
        (allocator(saved=-(1 << 20)), "not set", "1 MiB more reserved"),
        (allocator("expandable_segments:True", -(1 << 30)), "kept", "without expandable segments"),
    ],
)
def test_the_allocators_variable(trial: AllocatorTrial, status: str, says: str) -> None:
    _, parts = launched(None, allocator=trial)
    part = parts["PYTORCH_CUDA_ALLOC_CONF"]
    assert part.status == status
    assert says in part.reason
    assert part.value == trial.present


def test_a_job_that_does_not_fit_has_no_parts() -> None:
    now = dataclasses.replace(PLAN.now, fits=False, recommended_batch=None)
    plan, parts = launched(result(), now=now, amp_choice=None)
    assert not parts and plan.launch


def test_planned_twice_it_is_the_same() -> None:
    """The line that comes out is a command whose plan has the same line."""
    found = result(variables=(OMP,), reasons=(WHY,))
    plan, _ = launched(found)
    again, parts = launched(found, f"OMP_NUM_THREADS=1 {LINE}")
    assert again.launch == plan.launch
    assert parts["OMP_NUM_THREADS"].value == "1"


def test_the_text() -> None:
    plan, _ = launched(result(variables=(OMP,), reasons=(WHY, MKL, CORES)), allocator=allocator())
    text = "\n".join(map(part_reason, plan.launch_parts))
    assert "  OMP_NUM_THREADS=1          set: 3 times as many" not in text
    assert "OMP_NUM_THREADS=1" in text and "[measured, this machine]" in text
    assert "not set: all cores are of one kind" in text
    assert left_out_text(plan.launch_parts) == (
        "MKL_NUM_THREADS, PYTORCH_CUDA_ALLOC_CONF, CPU affinity: no gain"
    )
    plan, _ = launched(result(reasons=(MKL, CORES)), allocator=allocator(saved=1 << 30))
    assert left_out_text(plan.launch_parts) == (
        "MKL_NUM_THREADS, CPU affinity: no gain; PYTORCH_CUDA_ALLOC_CONF: not needed: it fits"
    )


@pytest.mark.parametrize(
    ("line", "count", "reason"),
    [
        ("--a={grad_accum:2}", 1, "keeps the effective batch size of 16"),
        ("--a={grad_accum:8}", 1, "instead of the effective batch size of 16"),
        ("--a={grad_accum:2}", 4, "keeps the effective batch size of 64 (16 on each of 4 GPUs)"),
    ],
)
def test_the_effective_batch_is_that_of_the_job(line: str, count: int, reason: str) -> None:
    step = StepMakeup(8, 2, 16)
    now = dataclasses.replace(PLAN.now, recommended_batch=PLAN.now.batch_size)
    ranks = Ranks(count, "", (), "") if count > 1 else None
    _, parts = launched(line=f"{LINE} {line}", step=step, now=now, ranks=ranks)
    assert parts["grad_accum"].reason == reason
