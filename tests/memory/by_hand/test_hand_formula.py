"""The arithmetic by hand next to the simulated peak: by shapes, and by what must add up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import trainfit
from helpers_cli import trainfit as run_trainfit
from helpers_report import on_one_line, screen, whole
from tests.results.test_results import PLAN
from trainfit.cli.main import main
from trainfit.memory.explanation import ExplainError, RecordingSource
from trainfit.memory.forward_pass import ATTENTION, PRODUCTS
from trainfit.memory.hand_formula import (
    GRADIENTS,
    INPUT,
    NOT_COUNTED,
    REST,
    STATES,
    WEIGHTS,
    by_hand,
)
from trainfit.report.sections.by_hand import by_hand_subject
from trainfit.results.memory import HandReport
from trainfit.results.runs.recording import Recording
from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators

ACT = Path(__file__).parents[3] / "examples" / "act"


def record(
    model: nn.Module,
    inputs: tuple[int, ...],
    *,
    half: bool = False,
    optimizer: Any = torch.optim.AdamW,
    steps: int = 2,
    passes: int = 1,
    call: Any = None,
    gpu: str = "custom:64GiB",
) -> Recording:
    """``model`` trained on ``inputs`` (a shape), under bfloat16 autocast with ``half``."""
    with trainfit.simulate(gpu, limited=False) as sim:
        model = model.cuda().train()
        chosen = optimizer([p for p in model.parameters() if p.requires_grad])
        for _ in range(steps):
            for _ in range(passes):
                batch = torch.randn(*inputs).cuda()
                with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
                    output = (call or model)(batch)
                output.float().square().mean().backward()
                del output, batch
            chosen.step()
            chosen.zero_grad()
    return sim.recording


def compared(recording: Recording) -> HandReport:
    """The report, whose sums hold."""
    report = by_hand(RecordingSource(recording, "a.trainfit", None))
    assert sum(row.simulated_bytes for row in report.rows) == report.allocated_bytes
    assert sum(row.by_hand_bytes or 0 for row in report.rows) == report.by_hand_bytes
    difference = sum(cause.nbytes for cause in report.causes) + report.unexplained_bytes
    assert difference == report.allocated_bytes - report.by_hand_bytes
    assert len(screen(by_hand_subject(report)).splitlines()) <= 25
    return report


def told(report: HandReport) -> str:
    return on_one_line(whole(by_hand_subject(report)))


def hand_of(report: HandReport, row: str) -> int | None:
    (found,) = [each.by_hand_bytes for each in report.rows if each.name == row]
    return found


def cause_of(report: HandReport, name: str) -> int:
    return sum(cause.nbytes for cause in report.causes if cause.name == name)


# -- by shapes ---------------------------------------------------------------------------------


def test_each_part_of_a_perceptron_is_what_its_shapes_say() -> None:
    batch, width = 4096, 256
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    report = compared(record(model, (batch, width)))
    numbers = 2 * (width * width + width)
    assert report.parameters == numbers
    assert (report.optimizer, report.state_bytes) == ("AdamW", 8)
    assert hand_of(report, WEIGHTS) == hand_of(report, GRADIENTS) == 4 * numbers
    assert hand_of(report, STATES) == 8 * numbers
    assert hand_of(report, INPUT) == batch * width * 4
    assert hand_of(report, PRODUCTS) == 2 * batch * width * 4
    assert hand_of(report, "activation functions") == batch * width * 4
    assert report.activation_bytes == 4
    assert report.doubled_bytes == report.by_hand_bytes + 3 * batch * width * 4
    # The first layer's result is only the ReLU's input, whose result is kept.
    assert cause_of(report, "not_kept") == -batch * width * 4
    assert not report.unexplained_rows


@pytest.mark.parametrize(
    ("gpu", "compute"),
    [("T4", "float32"), ("custom:16GiB:7.5", "float32"), ("RTX 4090", "tfloat32")],
)
def test_tf32_is_only_said_of_gpus_that_have_it(gpu: str, compute: str) -> None:
    """cuDNN's convolutions may round to TF32 unless told otherwise."""
    report = compared(record(nn.Conv2d(3, 8, 3), (2, 3, 32, 32), gpu=gpu))
    assert report.compute == compute
    assert f"(computed in {compute})" in told(report)


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4),
        (torch.optim.Adam, 8),
        (torch.optim.Adafactor, None),
    ],
)
def test_the_formula_goes_by_the_recorded_optimizer(
    optimizer: Any, state_bytes: int | None
) -> None:
    report = compared(record(nn.Linear(512, 512), (64, 512), optimizer=optimizer))
    assert report.state_bytes == state_bytes
    if state_bytes is None:
        assert cause_of(report, "unknown_optimizer") > 0
        assert "no figure for the states of Adafactor" in on_one_line(
            whole(by_hand_subject(report))
        )


def test_a_frozen_parameter_has_no_gradient_and_no_state() -> None:
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
    model[0].weight.requires_grad_(False)
    report = compared(record(model, (8, 512)))
    assert report.moment.phase == "optimizer"
    assert cause_of(report, "frozen") == -(4 + 8) * 512 * 512
    assert "no activations at the peak, which is in the optimizer's step" in on_one_line(
        whole(by_hand_subject(report))
    )


def test_autocast_keeps_a_half_precision_copy_of_the_weights() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024))
    report = compared(record(model, (16384, 1024), half=True))
    assert (report.compute, report.activation_bytes) == ("bfloat16", 2)
    assert cause_of(report, "weight_copies") > 0
    assert cause_of(report, "weight_copies") % (1024 * 1024 * 2) == 0
    assert "autocast keeps a half-precision copy of the weights" in on_one_line(
        whole(by_hand_subject(report))
    )


def test_a_relu_in_place_has_no_result_of_its_own() -> None:
    def bytes_of(inplace: bool) -> HandReport:
        layers = nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(inplace), nn.Conv2d(32, 8, 3)
        return compared(record(nn.Sequential(*layers), (16, 3, 64, 64)))

    numbers = 16 * 32 * 64 * 64
    assert cause_of(bytes_of(True), "in_place") == -numbers * 4
    assert cause_of(bytes_of(False), "in_place") == 0
    assert hand_of(bytes_of(True), "activation functions") == numbers * 4


@pytest.mark.parametrize("fused", [True, False])
def test_attention_counts_scores_and_probabilities(fused: bool) -> None:
    batch, tokens, width, heads = 4, 128, 64, 4
    layer = nn.MultiheadAttention(width, heads, batch_first=True)
    recording = record(
        layer, (batch, tokens, width), call=lambda x: layer(x, x, x, need_weights=not fused)[0]
    )
    report = compared(recording)
    by_formula = 2 * batch * heads * tokens**2 * 4
    assert hand_of(report, ATTENTION) == by_formula
    assert cause_of(report, "fused") == (-by_formula if fused else 0)


def test_one_micro_batch_is_counted_where_gradients_are_accumulated() -> None:
    once = compared(record(nn.Linear(256, 256), (4096, 256)))
    split = compared(record(nn.Linear(256, 256), (4096, 256), passes=3))
    assert hand_of(once, PRODUCTS) == hand_of(split, PRODUCTS) == 4096 * 256 * 4
    assert hand_of(once, INPUT) == hand_of(split, INPUT)


def test_what_leaks_is_kept_since_an_earlier_step() -> None:
    kept = []

    def leaking(batch: torch.Tensor) -> torch.Tensor:
        kept.append(model(batch))
        return kept[-1].tanh()

    model = nn.Sequential(nn.Linear(256, 256), nn.GELU())
    report = compared(record(model, (4096, 256), call=leaking, steps=3))
    assert cause_of(report, "earlier") >= 4096 * 256 * 4
    assert "kept since an earlier step or micro-batch" in on_one_line(
        whole(by_hand_subject(report))
    )


# -- the notes' own figures --------------------------------------------------------------------


def test_the_rule_gives_the_note_on_acts_figure_for_an_encoder_layer() -> None:
    """``8 S D + 2 H S^2 + 2 S FFN`` numbers a sample; the note writes 8 where there are 11."""
    sys.path.insert(0, str(ACT))
    try:
        from model import ACTConfig, EncoderLayer
    finally:
        sys.path.remove(str(ACT))
    batch, tokens, width, heads, ffn = 8, 842, 512, 8, 3200
    layer = EncoderLayer(ACTConfig())
    recording = record(
        layer,
        (tokens, batch, width),
        half=True,
        call=lambda x: layer(x, torch.zeros(tokens, 1, width).cuda()),
    )
    report = compared(recording)
    layers = [r for r in report.rows if r.by_hand_bytes and r.name not in (WEIGHTS, GRADIENTS)]
    results = sum(r.by_hand_bytes or 0 for r in layers if r.name not in (STATES, INPUT))
    note = 8 * tokens * width + 2 * heads * tokens**2 + 2 * tokens * ffn
    assert note == 20_181_056, "as the note has it"
    assert 4 * batch * 2 * note == 1_291_587_584
    more = 3 * tokens * width
    # Some thousand numbers more: sums outside of the layer.
    assert results / (2 * batch) == pytest.approx(note + more, rel=0.001)


@pytest.mark.slow
def test_the_note_on_vgg16_does_not_add_up() -> None:
    """``(0.138 * 4 + 0.096 * 2 * 32) * 4 ~= 6.4 GB``: it is 26.8, and 6.7 without the last 4,
    which counts bytes a second time: 96 million are bytes, not numbers, of an image."""
    define_torchvision_operators()  # which a CPU build of torchvision lacks
    torchvision = pytest.importorskip("torchvision")
    without = 0.138 * 4 + 0.096 * 2 * 32
    assert without == pytest.approx(6.7, abs=0.05)
    assert without * 4 == pytest.approx(26.8, abs=0.05)
    batch = 4
    model = torchvision.models.vgg16()
    report = compared(record(model, (batch, 3, 224, 224), optimizer=torch.optim.Adam))
    assert report.parameters == pytest.approx(0.138e9, rel=0.01)
    results = (report.doubled_bytes - report.by_hand_bytes) / batch
    assert results / 4 == pytest.approx(28.7e6, rel=0.01), "numbers an image"
    assert 0.096e9 < results < 0.12e9, "bytes an image"


# -- whatever is recorded ----------------------------------------------------------------------


class Model(nn.Module):
    """Layers of several kinds, as drawn."""

    def __init__(self, layers: list[str], width: int, *, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_layer(name, width) for name in layers))
        self.head = nn.Linear(width, width)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return self.head(checkpoint(self.layers, x, use_reentrant=False))
        return self.head(self.layers(x))


def _layer(name: str, width: int) -> nn.Module:
    made: dict[str, Any] = {
        "linear": lambda: nn.Linear(width, width),
        "relu": lambda: nn.ReLU(),
        "gelu": lambda: nn.GELU(),
        "norm": lambda: nn.LayerNorm(width),
        "dropout": lambda: nn.Dropout(0.5),
        "transformer": lambda: nn.TransformerEncoderLayer(width, 4, width, batch_first=True),
    }
    layer: nn.Module = made[name]()
    return layer


@settings(max_examples=15)
@given(
    layers=st.lists(
        st.sampled_from(["linear", "gelu", "relu", "norm", "dropout", "transformer"]), max_size=5
    ),
    batch=st.sampled_from([1, 7, 256]),
    width=st.sampled_from([16, 64]),
    half=st.booleans(),
    checkpointed=st.booleans(),
    optimizer=st.sampled_from([torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adamax]),
    passes=st.integers(1, 2),
)
def test_rows_and_causes_always_add_up(
    layers: list[str],
    batch: int,
    width: int,
    half: bool,
    checkpointed: bool,
    optimizer: Any,
    passes: int,
) -> None:
    model = Model(layers, width, checkpointed=checkpointed)
    report = compared(
        record(model, (batch, 3, width), half=half, optimizer=optimizer, passes=passes)
    )
    assert not report.unexplained_rows
    assert all(not cause.rows.get(NOT_COUNTED, 0) < 0 for cause in report.causes)
    assert {REST} >= {row for c in report.causes if c.name == "workspaces" for row in c.rows}


def test_a_difference_without_a_cause_is_said_with_its_bytes() -> None:
    """Two states for each parameter, where the optimizer's name promises one."""
    recording = record(nn.Linear(512, 512, bias=False), (64, 512), optimizer=torch.optim.Adam)
    named = {**recording.header, "optimizer": "RMSprop"}
    report = compared(Recording(**{**vars(recording), "header": named}))
    assert report.unexplained_rows == {STATES: 512 * 512 * 4}
    assert "not explained: optimizer's states +1 MiB" in told(report)


def test_a_recording_without_a_step_has_no_formula() -> None:
    recording = record(nn.Linear(8, 8), (4, 8), steps=0)
    with pytest.raises(ExplainError, match="no complete optimizer step"):
        compared(recording)


# -- the command -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("by-hand") / "a.trainfit"
    record(nn.Sequential(nn.Linear(256, 256), nn.GELU()), (64, 256)).save(path)
    return path


def test_the_command_shows_it(file: Path) -> None:
    done = run_trainfit("memory", "--by-hand", "--batch-size", "64", file, cwd=file.parent)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 25 and max(map(len, lines[1:])) <= 100
    assert lines[0].startswith("By hand ") and " simulated " in lines[0]
    for words in ("weights", "gradients", "10 to 30% for the rest", "From the hand formula"):
        assert words in done.stdout


def test_the_command_writes_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--by-hand", "--json", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["format"], report["version"]) == ("trainfit-memory-by-hand", 1)
    assert sum(r["simulated_bytes"] for r in report["rows"]) == report["allocated_bytes"]
    causes = sum(cause["nbytes"] for cause in report["causes"])
    difference = report["allocated_bytes"] - report["by_hand_bytes"]
    assert causes + report["unexplained_bytes"] == difference


def test_two_recordings_and_a_plan_are_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", "--by-hand", str(file), str(file)]) == 2
    assert "expects one recording" in capsys.readouterr().err
    plan = tmp_path / "plan.json"
    plan.write_text(PLAN.to_json())
    assert main(["memory", "--by-hand", str(plan)]) == 2
    assert "record the run: trainfit simulate" in capsys.readouterr().err
