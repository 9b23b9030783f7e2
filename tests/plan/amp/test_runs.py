"""What simulated runs show of mixed precision, and what a plan makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers_cli import SCRIPTS, json_of, trainfit
from trainfit.hardware import find_gpu
from trainfit.hardware.gpu_topology import find_gpus
from trainfit.memory.replay import Stream, replay
from trainfit.plan.changes.amp_hazards import (
    OVERFLOWING,
    float32_operators,
    of_failure,
    of_run,
    outside_autocast,
    peak_parts,
    plain_name,
    step_parts,
)
from trainfit.plan.changes.amp_settings import memory_reason, time_reason
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.launch import amp_part
from trainfit.plan.runs.tracing import Trace, Tracer, recording_of
from trainfit.plan.sizing.costing import machine_of
from trainfit.results.changes import LaunchPart
from trainfit.results.plan import PlanResult
from trainfit.results.runs.trace import TraceOutcome
from trainfit.scripts import precision
from trainfit.scripts.precision import AccelerateWatch
from trainfit.simgpu import simulate

pytestmark = pytest.mark.usefixtures("warm")

MACHINE = machine_of(find_gpu("RTX 4090"))
SCRIPT = SCRIPTS / "mixed.py"


def trace(what: str = "plain", *words: str, gpu: str = "RTX 4090") -> Trace:
    line = ["python", str(SCRIPT), "--width=256", "--what", what, *words]
    with Tracer(parse_command(line), find_gpu(gpu), steps=2) as tracer:
        return tracer.trace()


def line_with(text: str) -> str:
    """The place of the script's line that has it."""
    lines = SCRIPT.read_text().splitlines()
    return f"{SCRIPT}:{next(n for n, line in enumerate(lines, 1) if text in line)}"


# -- numbers that a dtype cannot hold ----------------------------------------------------------


@pytest.mark.parametrize(
    "fill",
    [
        lambda half, mask: half.masked_fill(mask, -1e9),
        lambda half, mask: half.masked_fill_(mask, -1e9),
        lambda half, mask: half.fill_(-1e9),
        lambda half, mask: torch.full((2,), -1e9, dtype=torch.float16, device="cuda"),
        lambda half, mask: torch.full_like(half, 65520.0),
        lambda half, mask: half.new_full((2,), -1e9),
        lambda half, mask: torch.full((2,), 300, dtype=torch.uint8, device="cuda"),
    ],
)
def test_a_number_that_the_dtype_cannot_hold_is_refused(fill: Any) -> None:
    with simulate("T4"):
        half = torch.ones(4, dtype=torch.float16, device="cuda")
        mask = torch.ones(4, dtype=torch.bool, device="cuda")
        with pytest.raises(RuntimeError, match=r"cannot be converted to type .* without overflow"):
            fill(half, mask)


def test_numbers_that_fit_are_not_refused() -> None:
    with simulate("T4"):
        half = torch.ones(4, dtype=torch.float16, device="cuda")
        mask = torch.ones(4, dtype=torch.bool, device="cuda")
        half.masked_fill(mask, float("-inf")).masked_fill_(mask, torch.finfo(half.dtype).min)
        half.to(torch.bfloat16).masked_fill(mask, -1e9)
        # What computes in float32 and rounds is inf, as on a GPU.
        assert (half * -1e9).dtype is torch.float16


# -- what is seen ------------------------------------------------------------------------------


def test_names_of_operators_as_autocasts_lists_have_them() -> None:
    assert plain_name("aten.native_layer_norm_backward.default") == "layer_norm"
    assert plain_name("aten._softmax_backward_data.default") == "softmax"
    assert plain_name("aten.nll_loss_forward.default") == "nll_loss"
    assert plain_name("aten._to_copy.default") == "to_copy"
    assert {"layer_norm", "softmax", "nll_loss", "sum", "norm"} <= float32_operators()
    assert float32_operators() >= OVERFLOWING
    assert not float32_operators() & {"addmm", "gelu", "to_copy", "linear"}


@pytest.mark.parametrize(
    ("calls", "line"),
    [
        (["frozen", "loop", "loop"], "loop"),
        (["dry", "frozen", "loop", "loop"], "loop"),  # to see the shapes, before the loop
        (["loop", "second", "loop", "second"], "loop"),
        (["frozen", "frozen"], "frozen"),  # nothing is trained by calls of modules
        ([], None),
    ],
)
def test_the_line_of_the_forward_pass(
    calls: list[str], line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = precision.AmpWatch(AccelerateWatch())
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    for each in calls:
        monkeypatch.setattr(precision, "user_frame", lambda each=each: each)
        watch.called(frozen if each == "frozen" else torch.nn.Linear(1, 1))
    assert watch.seen().forward_at == line


@pytest.mark.parametrize("scaler", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_scaler_is_seen_at_work(scaler: bool) -> None:
    found = trace("plain", "--amp=true", *(["--scaler"] if scaler else []))
    seen = found.outcome.amp
    assert seen.scaled is scaler and seen.scaler_at == line_with("GradScaler(")
    assert seen.forward_at == line_with("model(batch.cuda())")
    hazards = list(of_run("float16", found, MACHINE, is_own=True, trains=True))
    assert [each.kind for each in hazards if each.is_critical] == [] if scaler else ["no scaler"]
    assert not any(
        h.is_critical for h in of_run("bfloat16", found, MACHINE, is_own=True, trains=True)
    )
    assert not any(
        h.is_critical for h in of_run("float16", found, MACHINE, is_own=True, trains=False)
    )


@pytest.mark.parametrize(
    ("what", "kind", "line"),
    [
        pytest.param("function", "custom function", "return Double.apply", marks=pytest.mark.slow),
        ("operator", "custom operator", "return triple(x)"),
        ("outside", "outside autocast", "loss = x.square().sum()"),
        pytest.param("norms", "float32 operators", "", marks=pytest.mark.slow),
    ],
)
def test_each_hazard_is_seen_in_the_run(what: str, kind: str, line: str) -> None:
    found = trace(what, "--amp=true", "--scaler")
    hazards = list(of_run("float16", found, MACHINE, is_own=True, trains=True))
    (hazard,) = (each for each in hazards if each.kind != "float32 operators" or what == "norms")
    assert (hazard.kind, hazard.is_critical) == (kind, False)
    assert str(hazard.at) == (line_with(line) if line else "")
    if what == "norms":
        assert "layer_norm" in hazard.title and 0.1 < (hazard.share or 0) < 1
    if what == "function":
        assert hazard.title.startswith("Double has no custom_fwd")  # AmpDouble has one


@pytest.mark.slow
@pytest.mark.parametrize(("what", "kind"), [("bce", "fails"), ("mask", "overflow")])
def test_what_raises_under_autocast(what: str, kind: str) -> None:
    outcome = trace(what, "--amp=true", "--scaler").outcome
    assert outcome.status == "failed" and outcome.autocast == "float16"
    hazard = of_failure("float16", outcome, "it fails")
    assert (hazard.kind, hazard.is_critical) == (kind, True) and hazard.fix.action
    text = "binary_cross_entropy(" if what == "bce" else "masked_fill(mask"
    assert str(hazard.at) == line_with(text)


@pytest.mark.slow
def test_nothing_is_outside_where_the_loss_is_inside() -> None:
    assert outside_autocast(recording_of(trace("plain", "--amp=true")), "float16") == {}


# -- why it saves what it saves ----------------------------------------------------------------


def test_the_parts_of_a_peak_and_of_a_step() -> None:
    half = recording_of(trace("norms", "--amp=true", "--scaler"))
    off = recording_of(trace("norms"))
    streams = {one: Stream.of(recording) for one, recording in (("half", half), ("off", off))}
    peaks = {one: replay(stream) for one, stream in streams.items()}
    parts = peak_parts(half, streams["half"], peaks["half"])
    assert parts.total == peaks["half"].peak_allocated
    assert min(parts.state, parts.casts, parts.float32, parts.fixed, parts.rest) > 0
    without = peak_parts(off, streams["off"], peaks["off"])
    assert without.casts == 0 and without.state == parts.state
    step, plain = step_parts(half, MACHINE), step_parts(off, MACHINE)
    assert step is not None and plain is not None
    assert step.casts > plain.casts == 0
    assert 0 < step.optimizer_s + step.casts_s + sum(step.float32_s.values()) < step.gpu_s
    assert {"layer_norm", "softmax"} <= set(step.float32_s)
    said = memory_reason((off, peaks["off"]), (half, peaks["half"]), "float16")
    assert "copies that autocast casts" in said and "which keep their type" not in said  # < 10%
    # 256 wide: the CPU cannot launch as fast as the GPU computes.
    why = time_reason(off, half, "float16", MACHINE)
    assert f"{step.casts} launches of casts are added, and it is bound by launches" in why
    assert step_parts(half, machine_of(find_gpu("custom:24GiB"))) is None


# -- the plan ----------------------------------------------------------------------------------


def planned(gpu: str, *words: str, cwd: Path) -> tuple[dict[str, Any], LaunchPart]:
    """A plan's choice, and its part of the launch command."""
    line = ("python", str(SCRIPT), "--batch_size={batch_size:16}", *words)
    output = cwd / "plan.json"
    done = trainfit(
        *("plan", "--gpu", gpu, "--no-loader", "--no-remedies", "--output", str(output)),
        *("--json", "--", *line),
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    part = amp_part(PlanResult.load(output), parse_command(line))
    return json_of(done), part


@pytest.mark.slow
@pytest.mark.parametrize("present", ["false", "true"])
@pytest.mark.parametrize(
    ("gpu", "words", "value"),
    [
        ("T4", ["--scaler"], "true"),
        ("T4", ["--dtype=bfloat16"], "false"),
        ("RTX 4090", ["--dtype=bfloat16"], "true"),
        ("RTX 4090", ["--dtype=bfloat16", "--width=16"], "false"),  # casts cost more
        ("GTX 1080 Ti", ["--scaler"], "false"),
        ("P100 PCIe", ["--scaler"], "false"),
        ("V100 16GB PCIe", ["--scaler"], "true"),
    ],
)
def test_amp_is_decided_alike_from_both_sides(
    gpu: str, words: list[str], value: str, present: str, tmp_path: Path
) -> None:
    result, part = planned(gpu, f"--amp={{amp:{present}}}", *words, cwd=tmp_path)
    choice = result["amp_choice"]
    assert choice["value"] == value and f"--amp={value}" in result["launch"]
    assert choice["memory_reason"] and choice["time_reason"]
    assert (part.name, part.evidence, part.machine) == ("amp", "predicted", result["gpu"])
    assert part.present == present
    if gpu == "T4" and value == "false":
        assert choice["by_hand_dtype"] == "float16" and "mixed.py" in choice["place"]
        assert part.status == ("by hand" if present == "false" else "set")
    else:
        assert part.status == ("kept" if present == value else "set") and part.value == value
        assert not choice["by_hand"]


@pytest.mark.slow
def test_float16_without_a_scaler_is_not_asked_for_silently(tmp_path: Path) -> None:
    result, part = planned("RTX 4090", "--amp={amp:false}", cwd=tmp_path)
    assert result["amp_choice"]["value"] == "false"
    assert (part.status, part.value) == ("by hand", "bfloat16")
    assert part.line == 'torch.autocast("cuda", dtype=torch.bfloat16); and amp=true'
    assert part.place == line_with("with torch.autocast")
    result, part = planned("T4", "--amp={amp:true}", cwd=tmp_path)
    assert result["amp_choice"]["value"] == "true"
    assert "GradScaler" in result["amp_choice"]["reason"] and part.status == "by hand"
    assert 'torch.amp.GradScaler("cuda") enabled' in part.line and "become 0" in part.reason


@pytest.mark.slow
def test_what_raises_in_float16_is_tried_in_bfloat16(tmp_path: Path) -> None:
    result, part = planned("RTX 4090", "--amp={amp:false}", "--what=mask", cwd=tmp_path)
    assert [each["kind"] for each in result["amp_choice"]["hazards"]] == ["overflow"]
    assert (part.status, part.value) == ("by hand", "bfloat16")
    result, part = planned("RTX 4090", "--amp={amp:false}", "--what=bce", cwd=tmp_path)
    assert part.status == "kept" and "BCEWithLogitsLoss" in part.reason


def test_without_another_setting_nothing_can_be_told() -> None:
    result = PlanResult.__new__(PlanResult)
    now = type("Now", (), {"amp": "off", "by_fsdp": False})
    for name, value in {"amp_choice": None, "now": now, "variables": {}}.items():
        object.__setattr__(result, name, value)
    part = amp_part(result, parse_command(["python", str(SCRIPT)]))
    assert (part.status, part.where, part.value) == ("cannot tell", "script", "")


def test_an_outcome_of_an_earlier_version_has_no_watch(tmp_path: Path) -> None:
    TraceOutcome("finished", 1, 1.0).save(tmp_path / "outcome.json")
    assert not TraceOutcome.load(tmp_path / "outcome.json").amp.scaled


# -- FSDP's mixed precision --------------------------------------------------------------------

FSDP = {
    "fully_shard": """
fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))""",
    "FullyShardedDataParallel": """
model = FullyShardedDataParallel(model, mixed_precision=MixedPrecision(torch.bfloat16))""",
}
SHARDED = """
import torch
from torch.distributed.fsdp import *
torch.distributed.init_process_group("nccl")
model = torch.nn.Linear(64, 64).cuda(){}
optimizer = torch.optim.SGD(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(64, 64))
for (batch,) in torch.utils.data.DataLoader(data, 8):
    model(batch.cuda()).sum().backward()
    optimizer.step()
"""


def sharded(folder: Path, kind: str) -> list[str]:
    """The command of a script whose model computes in bfloat16 by this kind of FSDP."""
    (folder / "sharded.py").write_text(SHARDED.format(FSDP[kind]))
    return ["torchrun", "--nproc-per-node=2", str(folder / "sharded.py")]


@pytest.mark.parametrize("kind", FSDP)
def test_the_precision_that_fsdp_computes_in_is_seen(tmp_path: Path, kind: str) -> None:
    command = parse_command(sharded(tmp_path, kind), several=True)
    with Tracer(command, find_gpus("2x RTX 4090"), steps=2) as tracer:
        outcome = tracer.trace().outcome
    assert (outcome.autocast, outcome.half) == (None, "bfloat16")


@pytest.mark.slow
@pytest.mark.usefixtures("unconfirmed")
def test_what_fsdp_computes_in_already_is_not_recommended(tmp_path: Path) -> None:
    words = ("plan", "--no-loader", "--gpu=2x RTX 4090", "--explain", "--")
    shown = trainfit(*words, *sharded(tmp_path, "fully_shard"), cwd=tmp_path).stdout
    assert "bfloat16 by FSDP's mixed precision" in shown
    assert "amp" in shown and "kept" in shown
    assert "AMP off" not in shown and "torch.autocast" not in shown
