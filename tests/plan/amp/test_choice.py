"""Which mixed precision is chosen, and what is said of it."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainfit.hardware import GpuSpec, catalogue, find_gpu
from trainfit.plan.changes.amp import LEAST_GAIN, AmpSetting, choose_amp
from trainfit.plan.changes.amp_hazards import is_native, line_for, of_failure, of_none, of_run
from trainfit.plan.changes.amp_hazards import unscaled as gradients_unscaled
from trainfit.plan.changes.amp_settings import is_beaten, of_users_lines
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.command.tunables import amp_precisions
from trainfit.plan.runs.tracing import Trace
from trainfit.plan.sizing.costing import machine_of
from trainfit.plan.sizing.curve import Curve
from trainfit.plan.sizing.memory_model import Batches
from trainfit.results.configuration import AmpCandidate, AmpChoice, Configuration, amp_hazard
from trainfit.results.findings import Finding
from trainfit.results.memory import MemoryFigures
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import AS_WRITTEN, RunSpec
from trainfit.results.runs.steps import Framework
from trainfit.results.runs.trace import AmpSeen, TraceOutcome
from trainfit.results.speed import StepSpeed
from trainfit.simgpu import simulate

T4, RTX = find_gpu("T4"), find_gpu("RTX 3090")
MACHINE = machine_of(RTX)
SCALER = (
    'scaler = torch.amp.GradScaler("cuda") before the loop, scaler.scale(loss).backward(), '
    "scaler.step(optimizer) and scaler.update()"
)


def setting(
    dtype: str,
    rate: float | None,
    value: str | None = None,
    *,
    fits: bool = True,
    curve: bool = True,
    scaled: bool = True,
    as_of: str = "",
    variable: str | None = None,
) -> AmpSetting:
    """With so many samples a second at its recommended batch size, 64, and at 8."""
    seconds = None if rate is None else 8 / rate
    steps = ()
    if rate is not None and curve:
        exact = 64 / rate, 64 / rate
        steps = (StepSpeed(64, 64 / rate, exact, 0.0, 0.0, 0.0, "launches", rate),)
    best = 64 if fits else 0
    configuration = Configuration(
        8, dtype, MemoryFigures(0, 0, 0, 0, (0, 0)), fits, {}, {}, (), best, best, step_s=seconds
    )
    is_on = dtype != "off"
    outcome = TraceOutcome(
        "finished",
        3,
        1.0,
        autocast=(as_of or dtype) if is_on else None,
        autocast_at="train.py:57" if is_on else None,
        amp=AmpSeen(scaled=is_on and scaled),
    )
    batches = Batches("two traces", recommended=best, curve=Curve(steps))
    trace = Trace(outcome, None, "")
    hazards = of_run(dtype, trace, MACHINE, is_own=not as_of, trains=True) if is_on else ()
    return AmpSetting(
        value,
        AS_WRITTEN if value is None else RunSpec(values={"amp": value}),
        trace,
        configuration,
        batches,
        variable=variable,
        hazards=tuple(hazards),
        as_of=as_of,
    )


def chosen(*settings: AmpSetting, gpu: str = "T4") -> AmpChoice:
    present = dataclasses.replace(settings[0], spec=AS_WRITTEN)
    found = choose_amp(present, settings[1:], find_gpu(gpu))
    assert found is not None
    return found


def test_an_emulated_bfloat16_loses_against_no_amp() -> None:
    """ACT on a T4: 732 ms in bfloat16, 591 without AMP, 323 in float16."""
    found = chosen(
        setting("bfloat16", 8 / 0.732, "true", scaled=False),
        setting("off", 8 / 0.591, "false"),
        setting("float16", 8 / 0.323, scaled=False),
    )
    assert (found.value, found.dtype) == ("false", "off")
    assert found.configuration is not None and found.configuration.amp == "off"
    assert found.reason == (
        "bfloat16 is emulated on T4; 1.24× the samples/s of bfloat16 (predicted)"
    )
    assert found.by_hand == (
        "float16 with a GradScaler would give 1.83× the samples/s (predicted): "
        f'train.py:57: torch.autocast("cuda", dtype=torch.float16); {SCALER}; and amp=true'
    )
    assert found.by_hand_dtype == "float16" and found.by_hand.endswith(found.line)


def test_never_towards_an_emulated_bfloat16() -> None:
    found = chosen(setting("off", 10.0, "no"), setting("bfloat16", 30.0, "bf16"))
    assert (found.value, found.configuration) == ("no", None)
    both = chosen(
        setting("off", 10.0, "no"),
        setting("bfloat16", 30.0, "bf16"),
        setting("float16", 20.0, "fp16"),
    )
    assert (both.value, both.dtype) == ("fp16", "float16")


@pytest.mark.parametrize(
    ("off", "value"), [(100.0, "true"), (104.0, "true"), (106.0, "false"), (50.0, "true")]
)
def test_a_gain_that_the_model_cannot_tell_changes_nothing(off: float, value: str) -> None:
    found = chosen(setting("bfloat16", 100.0, "true"), setting("off", off, "false"), gpu="RTX 3090")
    assert found.value == value
    assert ("about as many" in found.reason) == (off in (100.0, 104.0))


def test_amp_is_switched_on_where_it_pays() -> None:
    found = chosen(setting("off", 100.0, "no"), setting("bfloat16", 190.0, "bf16"), gpu="RTX 3090")
    assert (found.value, found.dtype) == ("bf16", "bfloat16")
    assert "1.90× the samples/s of no AMP" in found.reason


def test_a_command_that_cannot_say_it_keeps_what_it_has() -> None:
    found = chosen(setting("off", 100.0), setting("bfloat16", 190.0), gpu="RTX 3090")
    assert (found.value, found.configuration) == (None, None)
    assert "bfloat16 would give 1.90× the samples/s" in found.by_hand


def test_what_does_not_fit_is_left_for_what_does() -> None:
    off = setting("off", None, "false", fits=False)
    found = chosen(off, setting("bfloat16", None, "true"), gpu="RTX 3090")
    assert found.value == "true" and "does not fit" in found.reason


def test_without_step_times_it_stays_and_says_so() -> None:
    found = chosen(setting("off", None, "no"), setting("bfloat16", None, "bf16"), gpu="RTX 3090")
    assert found.value == "no" and "no throughput prediction" in found.reason
    assert choose_amp(setting("off", None), [], RTX) is None


def test_all_are_compared_at_the_present_batch_where_one_has_no_curve() -> None:
    bare = setting("bfloat16", 50.0, "bf16", curve=False)
    assert chosen(setting("off", 100.0, "no"), bare, gpu="RTX 3090").value == "no"
    hidden = dataclasses.replace(bare, value=None)  # 64 is recommended
    told = chosen(setting("off", 10.0, "no"), hidden, gpu="RTX 3090")
    assert "5.00× the samples/s at batch size 8 (predicted)" in told.by_hand
    unknown = dataclasses.replace(
        bare, configuration=dataclasses.replace(bare.configuration, step_s=None)
    )
    assert chosen(setting("off", 100.0, "no"), unknown).samples_per_s == {}


def test_a_setting_without_a_curve_is_compared_at_the_recommended_batch() -> None:
    """Without AMP a step of 8 is faster, one of 64 slower: launches against bandwidth."""
    small = setting("off", 150.0, curve=False)
    assert chosen(setting("bfloat16", 100.0), small, gpu="RTX 3090").by_hand
    simulated = dataclasses.replace(small, samples_per_s=60.0)
    found = chosen(setting("bfloat16", 100.0), simulated, gpu="RTX 3090")
    assert found.by_hand == "" and found.samples_per_s == {"bfloat16": 100.0, "off": 60.0}


@pytest.mark.parametrize(
    ("words", "value", "precisions"),
    [
        (["--amp={amp:true}"], "true", []),
        (["--mixed_precision={amp:no}"], "no", ["bf16", "fp16", "no"]),
        (["--amp={amp:no}"], "no", []),  # a switch: "yes" is the other
        (["--mixed_precision", "{amp:bf16}"], "bf16", ["bf16", "fp16", "no"]),
        (["--precision={amp:32-true}"], "32-true", ["bf16-mixed", "16-mixed", "32-true"]),
        (["--dtype={amp:float32}"], "float32", ["bfloat16", "float16", "float32"]),
    ],
)
def test_how_the_command_would_say_each_precision(
    words: list[str], value: str, precisions: list[str]
) -> None:
    found = parse_command(["python", __file__, *words]).amp_precisions
    assert list(found.values()) == precisions
    assert found.get("off", value) in (value, *precisions[2:])
    assert parse_command(["python", __file__]).amp_precisions == {}
    # An option of the script's that is a switch for float16 alone.
    assert amp_precisions("true", "false", "true") == {"float16": "true"}


# -- what the GPU can do -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "halves"),
    [
        ("T4", ["float16"]),
        ("V100 16GB PCIe", ["float16"]),
        ("RTX 4090", ["bfloat16", "float16"]),
        ("GTX 1080 Ti", []),
        ("P100 PCIe", []),
        ("GTX 960 4GB", []),
    ],
)
def test_what_a_gpu_computes_in(gpu: str, halves: list[str]) -> None:
    assert [each for each in ("bfloat16", "float16") if is_native(each, find_gpu(gpu))] == halves
    assert is_native("off", find_gpu(gpu))


def test_tensor_cores_that_have_both_are_equally_fast_in_both() -> None:
    """Why one run stands for both half precisions (AmpCandidate.as_of)."""
    both = [gpu for gpu in catalogue() if gpu.supports_bf16 and gpu.has_tensor_cores]
    assert len(both) > 10
    for gpu in both:
        assert gpu.tensor_flops["bfloat16"] == gpu.tensor_flops["float16"], gpu.key


# -- the decision table ------------------------------------------------------------------------

OFF, ON = ("off", 10.0, "no"), ("bfloat16", 18.0, "bf16")


@pytest.mark.parametrize(
    ("gpu", "settings", "dtype", "words"),
    [
        # emulated: also where the model has it faster
        ("T4", [("bfloat16", 12.0, "true"), ("off", 10.0, "false")], "off", "emulated on T4"),
        ("T4", [("off", 10.0, "false"), ("bfloat16", 12.0, "true")], "off", "emulated on T4"),
        # no Tensor cores
        ("GTX 1080 Ti", [("off", 10.0, "no"), ("float16", 15.0, "fp16")], "off", "no Tensor"),
        ("GTX 1080 Ti", [("float16", 15.0, "fp16"), ("off", 10.0, "no")], "float16", "no Tensor"),
        ("GTX 1080 Ti", [("float16", 10.0, "fp16"), ("off", 15.0, "no")], "off", "no Tensor"),
        ("P100 PCIe", [("off", 10.0, "no"), ("float16", 15.0, "fp16")], "off", "no Tensor"),
        ("P100 PCIe", [("float16", 15.0, "fp16"), ("off", 10.0, "no")], "float16", "no Tensor"),
        ("P100 PCIe", [("float16", 10.2, "fp16"), ("off", 10.0, "no")], "float16", "no Tensor"),
        # both halves alike: the one that needs no scaler
        ("RTX 4090", [OFF, ON, ("float16", 18.0, "fp16")], "bfloat16", "1.80×"),
        ("RTX 4090", [("float16", 18.0, "fp16"), OFF, ON], "float16", "kept"),
        ("V100 16GB PCIe", [OFF, ("float16", 18.0, "fp16")], "float16", "1.80×"),
    ],
)
def test_the_decision_by_capability(
    gpu: str, settings: list[tuple[str, float, str]], dtype: str, words: str
) -> None:
    found = chosen(*(setting(*each) for each in settings), gpu=gpu)
    assert found.dtype == dtype, found
    assert words in found.reason


def unscaled(rate: float, value: str | None = None) -> AmpSetting:
    return setting("float16", rate, value, scaled=False)


def test_float16_without_a_scaler_gives_way_to_bfloat16_at_equal_speed() -> None:
    found = chosen(unscaled(18.0, "fp16"), setting(*OFF), setting(*ON), gpu="RTX 4090")
    assert (found.dtype, found.value) == ("bfloat16", "bf16")
    assert "no GradScaler scales the loss" in found.reason


def test_float16_without_a_scaler_is_among_what_is_wrong() -> None:
    outcome = TraceOutcome("finished", 3, 1.0, autocast_at="train.py:9")
    (found,) = gradients_unscaled(unscaled(18.0, "fp16").hazards, outcome)
    assert (found.kind, found.severity) == ("gradients_unscaled", "warning")
    assert str(found.place) == "train.py:9" and "GradScaler" in found.fixes[0].action
    assert not list(gradients_unscaled(setting(*ON).hazards, outcome))


def test_float16_without_a_scaler_is_kept_where_all_else_is_slower_and_it_is_said() -> None:
    found = chosen(unscaled(18.0, "true"), setting("off", 10.0, "false"), gpu="T4")
    assert (found.dtype, found.configuration) == ("float16", None)
    assert "no GradScaler" in found.reason and found.line == SCALER
    assert [each.kind for each in found.own_hazards] == ["no scaler"]
    at_hand = dataclasses.replace(setting("bfloat16", 18.0), as_of="float16")
    native = chosen(unscaled(18.0, "true"), setting("off", 10.0, "false"), at_hand, gpu="RTX 4090")
    assert (native.dtype, native.by_hand_dtype) == ("float16", "bfloat16")
    assert (native.place, native.line) == (
        "train.py:57",
        'torch.autocast("cuda", dtype=torch.bfloat16)',
    )


def adapters(dtype: torch.dtype) -> Recording:
    """A training of an adapter in float32 on a frozen layer, without AMP."""
    with simulate("RTX 3090") as simulation:
        frozen = torch.nn.Linear(64, 64, device="cuda", dtype=dtype).requires_grad_(False)
        adapter = torch.nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.SGD(adapter.parameters())
        for _ in range(2):
            x = adapter(torch.ones(8, 64, device="cuda"))
            frozen(x.to(dtype)).float().mean().backward()
            optimizer.step()
        return simulation.recording


@pytest.mark.parametrize(
    ("dtype", "framework", "scaled", "warns"),
    [
        (torch.float16, "Accelerate", True, True),  # whose scaler goes with its precision
        (torch.float16, "", False, True),
        (torch.float16, "", True, False),  # the script's own scaler stays
        (torch.bfloat16, "Accelerate", True, False),
        (torch.float32, "Accelerate", True, False),
    ],
)
def test_amp_is_not_taken_from_a_model_in_float16(
    dtype: torch.dtype, framework: Framework, scaled: bool, warns: bool
) -> None:
    """A LoRA on Stable Diffusion in float16 was to be trained with mixed_precision="no"."""
    outcome = TraceOutcome("finished", 2, 1.0, amp=AmpSeen(scaled=scaled, framework=framework))
    trace = Trace(outcome, adapters(dtype), "")
    found = tuple(of_none(trace, trains=True))
    assert [each.kind for each in found] == ["float16 weights"] * warns
    assert not list(of_none(trace, trains=False))
    off = dataclasses.replace(setting("off", 125), trace=trace, hazards=found)
    choice = chosen(setting("float16", 100), off, gpu="RTX 3090")
    assert choice.dtype == "float16" and bool(choice.by_hand) is not warns
    assert ("the model computes in float16 itself" in choice.reason) is warns


def test_float16_without_a_scaler_is_not_switched_on() -> None:
    found = chosen(setting("off", 10.0, "false"), unscaled(18.0, "true"), gpu="T4")
    assert (found.dtype, found.value) == ("off", "false")
    assert "no GradScaler" in found.reason
    assert found.by_hand_dtype == "float16" and found.line == f"amp=true, and {SCALER}"
    even = chosen(unscaled(10.0, "true"), setting("off", 10.0, "false"), gpu="T4")
    assert even.dtype == "off"


def test_what_does_not_fit_may_need_a_slow_half_precision_but_never_an_emulated_one() -> None:
    off = setting("off", 10.0, "no", fits=False)
    assert chosen(off, setting("float16", 10.0, "fp16"), gpu="P100 PCIe").dtype == "float16"
    assert chosen(off, setting("float16", 10.0, "fp16"), gpu="GTX 1080 Ti").dtype == "off"
    assert chosen(off, setting("bfloat16", 10.0, "bf16"), gpu="T4").dtype == "off"


def test_by_accelerates_variable() -> None:
    off = setting("off", 10.0, variable="no")
    found = chosen(off, setting("bfloat16", 18.0, variable="bf16"), gpu="RTX 4090")
    assert (found.value, found.variable, found.dtype) == (None, "bf16", "bfloat16")
    assert [each.asked for each in found.candidates] == ["present", "variable"]


def test_a_precision_that_fails_is_said_with_its_remedy() -> None:
    message = "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast"
    outcome = TraceOutcome("failed", 0, 1.0, message=message, location="train.py:9")
    hazard = of_failure("bfloat16", outcome, "it fails")
    found = choose_amp(setting(*OFF), [], RTX, [hazard])
    assert found is not None and found.configuration is None
    assert "BCEWithLogitsLoss" in found.reason and found.told_hazards == (hazard,)
    number = "value cannot be converted to type c10::Half without overflow"
    overflow = of_failure("float16", dataclasses.replace(outcome, message=number), "it fails")
    assert (overflow.kind, str(overflow.at)) == ("overflow", "train.py:9")
    other = of_failure("float16", dataclasses.replace(outcome, message="boom"), "AMP true fails")
    assert (other.kind, other.title) == ("fails", "AMP true fails")
    # pytorch/examples' VAE: the loss is computed outside of the model, whose output is bfloat16.
    mixed = dataclasses.replace(outcome, message="RuntimeError: Found dtype Float but expected …")
    for function, said in (
        ("binary_cross_entropy", "BCELoss raises"),
        ("binary_cross_entropy_with_logits", "it fails"),
    ):
        frames = f'  File "main.py", line 81, in loss\n    return F.{function}(x, y)\n'
        raised = dataclasses.replace(mixed, traceback=frames)
        assert of_failure("bfloat16", raised, "it fails").title.startswith(said)


def test_a_hazard_that_only_warns_does_not_decide() -> None:
    warned = amp_hazard("outside autocast", "bfloat16", "sum of …")
    on = dataclasses.replace(setting(*ON), hazards=(warned,))
    found = chosen(setting(*OFF), on, gpu="RTX 3090")
    assert (found.dtype, found.told_hazards) == ("bfloat16", (warned,))


GPUS = st.sampled_from(["T4", "RTX 4090", "GTX 1080 Ti", "V100 16GB PCIe", "P100 PCIe"])
RATES = st.floats(1.0, 100.0)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[str, list[AmpSetting]]:
    """A GPU, and a job in every precision, of which the command may say any."""
    gpu, rate = draw(GPUS), draw(RATES)
    settings = [
        setting(
            dtype,
            rate if dtype == "bfloat16" and gpu == "RTX 4090" else draw(RATES),
            draw(st.sampled_from([dtype, None])),
            scaled=draw(st.booleans()),
        )
        for dtype in ("off", "bfloat16", "float16")
    ]
    return gpu, draw(st.permutations(settings))


@given(jobs())
def test_never_an_emulated_one_nor_float16_without_a_scaler_unless_said(
    job: tuple[str, list[AmpSetting]],
) -> None:
    gpu, settings = job
    found = chosen(*settings, gpu=gpu)
    is_kept = found.dtype == settings[0].dtype
    if found.dtype == "bfloat16" and not find_gpu(gpu).supports_bf16:
        # Nothing else can be asked for.
        others = [each for each in settings[1:] if each.value is not None]
        assert is_kept and all(any(h.is_critical for h in _all_of(each, found)) for each in others)
    if not is_native(found.dtype, find_gpu(gpu)) or any(h.is_critical for h in found.own_hazards):
        assert is_kept
        blocks = [each.title for each in found.own_hazards if each.is_critical]
        assert blocks and blocks[0] in found.reason
    assert (found.configuration is None) == is_kept


def _all_of(one: AmpSetting, found: AmpChoice) -> list[Finding]:
    return [each for each in found.hazards if each.subject == one.dtype]


@given(GPUS, RATES, RATES, RATES)
def test_the_present_setting_does_not_matter_but_for_a_small_gain(
    gpu: str, off: float, bfloat16: float, float16: float
) -> None:
    settings = [
        setting("off", off, "no"),
        setting("bfloat16", bfloat16, "bf16"),
        setting("float16", float16, "fp16"),
    ]
    found = [chosen(*settings[at:], *settings[:at], gpu=gpu) for at in range(3)]
    rates = found[0].samples_per_s
    native = [each.dtype for each in settings if is_native(each.dtype, find_gpu(gpu))]
    fastest = max(native, key=lambda dtype: rates[dtype])
    for each in found:
        if each.dtype in native:
            assert rates[each.dtype] * (1 + LEAST_GAIN) >= rates[fastest]
        else:  # kept on a card without Tensor cores, where its figures say so
            assert not find_gpu(gpu).has_tensor_cores and each.dtype == "float16"
    clear = all(
        rates[fastest] > (1 + LEAST_GAIN) * rates[each] for each in native if each != fastest
    )
    if clear and find_gpu(gpu).has_tensor_cores:
        assert {each.dtype for each in found} == {fastest}


# -- what to write -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "autocast", "dtype", "line"),
    [
        (
            AmpSeen(forward_at="train.py:31"),
            None,
            "bfloat16",
            'train.py:31: with torch.autocast("cuda", dtype=torch.bfloat16): around the forward '
            "pass and the loss",
        ),
        (
            AmpSeen(forward_at="train.py:31"),
            None,
            "float16",
            'train.py:31: with torch.autocast("cuda", dtype=torch.float16): around the forward '
            f"pass and the loss; {SCALER}",
        ),
        (
            AmpSeen(scaler_at="train.py:9"),
            "bfloat16",
            "float16",
            'train.py:57: torch.autocast("cuda", dtype=torch.float16); train.py:9: '
            'torch.amp.GradScaler("cuda") enabled',
        ),
        (AmpSeen(), "bfloat16", "off", 'train.py:57: torch.autocast("cuda", enabled=False)'),
        (
            AmpSeen(framework="Accelerate", framework_at="train.py:5"),
            None,
            "bfloat16",
            'train.py:5: Accelerator(mixed_precision="bf16", …)',
        ),
        (AmpSeen(framework="Transformers"), None, "float16", "TrainingArguments(fp16=True, …)"),
        (AmpSeen(framework="Lightning"), None, "float16", 'Trainer(precision="16-mixed", …)'),
    ],
)
def test_the_line_to_change(seen: AmpSeen, autocast: str | None, dtype: str, line: str) -> None:
    place = "train.py:57" if autocast else None
    outcome = TraceOutcome("finished", 3, 1.0, autocast=autocast, autocast_at=place, amp=seen)
    assert ": ".join(filter(None, line_for(dtype, outcome, has=autocast))) == line


@pytest.mark.parametrize(
    ("command", "place", "is_asked"),
    [
        ("python train.py", "train.py:57", True),
        ("python train.py", "", True),
        ("python train.py", "/env/lib/python3.11/site-packages/torchtune/_parse.py:99", False),
        ("tool --x 1", "", False),
    ],
)
def test_a_change_is_the_users_to_make_in_files_of_theirs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, place: str, is_asked: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "tool").write_text(f"#!{sys.executable}\n")
    (tmp_path / "tool").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    text = "bfloat16 would give 1.13× the samples/s (predicted)"
    line = "with torch.autocast(…)"
    asked = AmpChoice(None, "off", "kept", by_hand=": ".join(filter(None, (text, place, line))),
                      by_hand_dtype="bfloat16", line=line, place=place)  # fmt: skip
    found = of_users_lines(asked, parse_command(command.split()))
    assert (found == asked) == is_asked
    assert is_asked or (not found.by_hand and text in found.reason and line not in found.reason)


@pytest.mark.parametrize(
    ("name", "text", "change", "line"),
    [
        ("a.yaml", "lr: 1e-4\nbf16: true\n", "bfloat16 off", "a.yaml:2: bf16: false"),
        ("a.yaml", "bf16: auto\nfp16: false\n", "bfloat16 off", "a.yaml:1: bf16: false"),
        ("a.yaml", "bf16: false\nfp16: false\n", "off bfloat16", "a.yaml:1: bf16: true"),
        ("a.yaml", "bf16: false\n", "off float16", ""),
        ("a.yaml", "fp16: true\n", "bfloat16 off", ""),
        ("a.yaml", "train:\n  use_amp: False\n", "off bfloat16", "a.yaml:2: use_amp: True"),
        ("a.toml", 'mixed_precision = "no"\n', "off bfloat16", 'a.toml:1: mixed_precision="bf16"'),
        ("a.json", '{"precision": "32-true"}', "off float16", 'a.json:1: "precision": "16-mixed"'),
        ("a.yaml", "amp: true\nother:\n  amp: true\n", "float16 off", ""),
        ("a.yaml", "per_device_train_batch_size: 2\n", "off bfloat16", "a.yaml: bf16: true"),
        ("a.yaml", "batch: 2\n", "off bfloat16", ""),
        ("conf/a.yaml", "bf16: true\n", "bfloat16 off", "conf/a.yaml:1: bf16: false"),
    ],
)
def test_a_precision_in_a_settings_file_is_changed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, change: str, line: str
) -> None:
    """What the line in an installed package would be is none that a user can change."""
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text)
    Path("train.py").write_text('@hydra.main(config_path="conf", config_name="a")')
    present, dtype = change.split()
    gain, place = "1.4× the samples/s", "/env/lib/python3.11/site-packages/tool/train.py:9"
    now = (AmpCandidate(present, "present"),)
    asked = AmpChoice(None, present, "kept", by_hand=f"{gain}: {place}: x", by_hand_dtype=dtype,
                      line="x", place=place, candidates=now)  # fmt: skip
    words = "python train.py" + (f" {name}" if "/" not in name else "")
    found = of_users_lines(asked, parse_command(words.split()), "Transformers")
    assert (found.by_hand == f"{gain}: {line}") is bool(line)
    assert bool(found.by_hand) is bool(line) and found.by_hand_gain in (gain, "")


@pytest.mark.parametrize(
    ("value", "half", "gpu"),
    [
        (None, "bfloat16", "RTX 3090"),
        ("no", "bfloat16", "RTX 3090"),
        ("no", "float16", "GTX 1080 Ti"),
        ("no", "float16", "P100 PCIe"),
    ],
)
@pytest.mark.parametrize(
    ("error", "more", "why"),
    [
        (0.05, 0, ""),
        (0.25, 0, "less than the figures' own error"),
        (0.05, 22 << 20, "but allocates 22 MiB more"),
    ],
)
def test_the_scripts_own_amp_is_taken_out_only_for_a_clear_gain(
    error: float, more: int, why: str, value: str | None, half: str, gpu: str
) -> None:
    """1.4 times as fast, by steps that may each be wrong by a quarter, or for more memory; by the
    command or by hand. Line and reason agree. Without Tensor cores the figures decide as well."""

    def ranged(dtype: str, rate: float, asked: str | None = None) -> AmpSetting:
        found = setting(dtype, rate, asked)
        if dtype == "off":
            memory = dataclasses.replace(found.configuration.memory, allocated_bytes=more)
            now = dataclasses.replace(found.configuration, memory=memory)
            found = dataclasses.replace(found, configuration=now)
        (step,) = found.batches.curve.steps
        ends = ((1 - error) * step.seconds, (1 + error) * step.seconds)
        curve = Curve((dataclasses.replace(step, range_s=ends),))
        return dataclasses.replace(found, batches=dataclasses.replace(found.batches, curve=curve))

    asked = half if value else None
    found = chosen(ranged(half, 10.0, asked), ranged("off", 14.0, value), gpu=gpu)
    assert (found.dtype == "off") is (value is not None and not why)
    assert bool(found.by_hand) is (value is None and not why)
    assert found.reason.endswith(f"(predicted), {why}") or not why
    assert ("no Tensor cores" in found.reason) is (half == "float16")


@pytest.mark.parametrize(
    ("present", "without", "gpu", "beaten"),
    [
        (setting("bfloat16", 13.0), setting("off", 10.0), RTX, True),
        (setting("bfloat16", 10.2), setting("off", 10.0), RTX, False),  # as fast, to the model
        (setting("bfloat16", None), setting("off", None), RTX, False),
        (setting("bfloat16", 13.0), setting("off", 10.0), T4, False),  # which emulates it
        (setting("float16", 13.0, scaled=False), setting("off", 10.0), RTX, False),
        (setting("off", 13.0), setting("bfloat16", 10.0), RTX, False),
    ],
)
def test_no_other_batch_sizes_without_an_amp_that_wins(
    present: AmpSetting, without: AmpSetting, gpu: GpuSpec, beaten: bool
) -> None:
    assert is_beaten(without.configuration, present, gpu) is beaten
    larger = dataclasses.replace(present.configuration.memory, device_bytes=1)
    more = dataclasses.replace(present.configuration, memory=larger)
    assert not is_beaten(
        without.configuration, dataclasses.replace(present, configuration=more), gpu
    )
