"""The next smaller model of a family, one camera less, and why a remedy does nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from helpers_cli import json_of
from helpers_cli import trainfit as run_trainfit
from helpers_interventions import run
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.launch_line import renamed
from trainfit.results.runs.trace import InterventionRequest
from trainfit.simgpu.interventions.layers import next_smaller
from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators

NAMES = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet50d", "resnet34d"),
    *("vgg11", "vgg13", "vgg16", "vgg19", "vgg16_bn", "vgg19_bn", "densenet121", "densenet161"),
    *("densenet169", "densenet201", "efficientnet_b0", "efficientnet_b3", "efficientnet_b4"),
    *("efficientnet_v2_s", "efficientnet_v2_m", "vit_b_16", "vit_b_32", "vit_l_16", "vit_h_14"),
    *("vit_small_patch16_224", "vit_base_patch16_224", "vit_base_patch16_384", "swin_t", "swin_s"),
    *("vit_base_patch8_224", "regnet_y_8gf", "regnet_y_16gf", "regnety_040", "regnety_160"),
    *("convnext_tiny", "convnext_large", "mobilenet_v2", "mobilenet_v3_small"),
    *("mobilenet_v3_large", "wide_resnet50_2", "wide_resnet101_2", "shufflenet_v2_x1_0"),
)


@pytest.mark.parametrize(
    ("name", "smaller"),
    [
        ("resnet152", "resnet101"),
        ("resnet50d", "resnet34d"),
        ("resnet18", None),
        ("vgg19_bn", "vgg16_bn"),
        ("densenet201", "densenet169"),
        ("densenet169", "densenet121"),  # densenet161 is larger than both
        ("efficientnet_b4", "efficientnet_b3"),
        ("efficientnet_v2_m", "efficientnet_v2_s"),
        ("vit_l_16", "vit_b_16"),
        ("vit_b_32", None),  # smaller patches are more work
        ("vit_base_patch16_384", None),  # another resolution is no smaller model
        ("vit_base_patch16_224", "vit_small_patch16_224"),
        ("regnet_y_16gf", "regnet_y_8gf"),
        ("regnety_160", "regnety_040"),
        ("convnext_large", "convnext_tiny"),
        ("mobilenet_v3_large", "mobilenet_v3_small"),
        ("wide_resnet101_2", "wide_resnet50_2"),
        ("my_own_model", None),
    ],
)
def test_the_next_smaller_name(name: str, smaller: str | None) -> None:
    assert next_smaller(name, NAMES) == smaller


@given(name=st.sampled_from(NAMES), names=st.sets(st.sampled_from(NAMES)))
def test_smaller_and_smaller_comes_to_an_end(name: str, names: set[str]) -> None:
    seen = [name]
    while (found := next_smaller(seen[-1], names)) is not None:
        assert found in names and found not in seen
        seen.append(found)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python a.py --model=resnet50", "python a.py --model=resnet34"),
        ("python a.py resnet50 --out runs/resnet50", "python a.py resnet34 --out runs/resnet50"),
        ("python resnet50.py --model resnet50d", "python resnet50.py --model resnet50d"),
    ],
)
def test_a_name_in_the_command_is_replaced_as_a_whole(
    line: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = line.split()
    (tmp_path / words[1]).write_text("")
    monkeypatch.chdir(tmp_path)
    assert renamed(parse_command(words), "resnet50", "resnet34").line() == expected


# -- torchvision and timm ----------------------------------------------------------------------


def needed(*packages: str) -> None:
    """Skip without them; torchvision's compiled part may be missing, as in CPU builds."""
    define_torchvision_operators()
    for package in packages:
        pytest.importorskip(package)


def train_torchvision() -> None:
    from torchvision.models import resnet34

    train(resnet34(weights=None, num_classes=10))


def train_registered() -> None:
    from torchvision.models import get_model

    train(get_model("resnet34", num_classes=10))


def train_timm() -> None:
    import timm

    train(timm.create_model("resnet34", num_classes=10))


def train_two() -> None:
    from torchvision.models import resnet18, resnet34

    resnet18(num_classes=10)
    train(resnet34(num_classes=10))


def train(model: nn.Module) -> None:
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(2, 3, 64, 64).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "script",
    # The first is trained below, too.
    [pytest.param(train_torchvision, marks=pytest.mark.slow), train_registered, train_timm],
)
def test_a_smaller_model_is_found_and_made(script: Any) -> None:
    needed("torchvision", *["timm"] * (script is train_timm))
    survey = run(script, survey=True)
    finding = survey.findings["smaller-model"]
    assert finding.applies, finding.reason
    smaller = "resnet26" if script is train_timm else "resnet18"
    assert finding.targets == ("resnet34", smaller)
    assert finding.detail == f"{smaller} instead of resnet34"
    assert [Path(place.rpartition(":")[0]).name for place in finding.places] == [
        Path(__file__).name
    ]
    trial = run(script, InterventionRequest("smaller-model", finding.targets))
    assert trial.changed == {"smaller-model": 1}
    assert trial.live("parameter") < 0.8 * survey.live("parameter")


def test_the_builders_are_put_back() -> None:
    needed("torchvision")
    from torchvision import models

    before, registered = models.resnet34, models.get_model_builder("resnet34")
    run(train_torchvision, InterventionRequest("smaller-model", ("resnet34", "resnet18")))
    assert models.resnet34 is before and models.get_model_builder("resnet34") is registered


def test_models_without_a_name_or_with_several_are_refused() -> None:
    needed("torchvision")
    plain = run(lambda: train(nn.Conv2d(3, 4, 3)), survey=True).findings["smaller-model"]
    assert not plain.applies and "no model by a torchvision" in plain.reason
    several = run(train_two, survey=True).findings["smaller-model"]
    assert not several.applies and "resnet18, resnet34" in several.reason


@pytest.mark.slow
def test_a_model_of_transformers_is_refused_with_what_to_do() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )

    def script() -> None:
        model = transformers.ViTForImageClassification(config).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(1, 3, 224, 224).cuda()).logits.sum().backward()
        optimizer.step()

    finding = run(script, survey=True).findings["smaller-model"]
    assert not finding.applies and "is from Transformers" in finding.reason


# -- cameras and frames ------------------------------------------------------------------------


def cameras(shapes: dict[str, tuple[int, ...]]) -> Any:
    """A script that trains on a dictionary of such tensors, each pooled by itself."""

    def script() -> None:
        model = nn.Conv2d(3, 16, 3, padding=1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        samples = [{key: torch.zeros(shape) for key, shape in shapes.items()}] * 8
        for batch in DataLoader(samples, 4):
            parts = [model(each.cuda().flatten(0, -4)).mean() for each in batch.values()]
            sum(parts).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    return script


def test_the_last_of_several_cameras_becomes_small() -> None:
    script = cameras({"left": (3, 96, 128), "right": (3, 64, 128)})
    survey = run(script, survey=True)
    finding = survey.findings["fewer-cameras"]
    assert finding.targets == ("camera:right",)
    assert finding.detail == "'right' (128×64), one of 2 images per sample"
    trial = run(script, InterventionRequest("fewer-cameras", finding.targets))
    assert trial.changed["fewer-cameras"] == 2
    assert {4 * 3 * 32 * 32 * 4, 4 * 3 * 96 * 128 * 4} <= trial.sizes()
    assert 4 * 3 * 64 * 128 * 4 not in trial.sizes()


def test_the_last_of_several_frames_is_left_out() -> None:
    script = cameras({"video": (4, 3, 64, 64)})
    finding = run(script, survey=True).findings["fewer-cameras"]
    assert finding.targets == ("frame:video",)
    assert finding.detail == "one of the 4 frames of 'video'"
    trial = run(script, InterventionRequest("fewer-cameras", finding.targets))
    assert 4 * 3 * 3 * 64 * 64 * 4 in trial.sizes()
    assert 4 * 4 * 3 * 64 * 64 * 4 not in trial.sizes()


@pytest.mark.parametrize(
    "shapes",
    [
        {"image": (3, 64, 64)},
        {"image": (3, 64, 64), "mask": (1, 64, 64)},  # channels differ
        {"image": (3, 64, 64), "icon": (3, 32, 32)},  # too small
        {"video": (1, 3, 64, 64)},
    ],
)
def test_one_image_a_sample_is_left_alone(shapes: dict[str, tuple[int, ...]]) -> None:
    def script() -> None:
        samples = [{key: torch.zeros(shape) for key, shape in shapes.items()}] * 2
        list(DataLoader(samples, 2))

    assert not run(script, survey=True).findings["fewer-cameras"].applies


# -- as a plan ---------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
from torchvision.models import get_model
net = get_model(sys.argv[2], num_classes=10).cuda()
optimizer = torch.optim.AdamW(net.parameters())
samples = [{"a": torch.zeros(3, 64, 64), "b": torch.zeros(3, 64, 64)}] * 64
for batch in torch.utils.data.DataLoader(samples, int(sys.argv[1])):
    images = torch.stack([batch["a"], batch["b"]]).flatten(0, 1).cuda()
    net(images).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_plan_prices_them_and_refuses_what_the_model_does_not_take(tmp_path: Path) -> None:
    needed("torchvision")
    (tmp_path / "net.py").write_text(SCRIPT)
    command = ("python", "net.py", "{batch_size:4}", "resnet34")
    found = remedies(tmp_path, "smaller-model,fewer-cameras", *command)
    smaller = found["smaller-model"]
    assert smaller["saved_bytes"] > 0 and smaller["step_change"] < 0
    assert smaller["changes"] == "training" and "accuracy" in smaller["changes_detail"]
    assert smaller["launch"] == "python net.py 4 resnet18"
    # It stacks the two images, which have to be of one size.
    less = found["fewer-cameras"]
    assert less["status"] == "not applicable"
    assert "the model does not run without 'b'" in less["reason"]


NARROW = """
import sys, torch
from torch import nn
batch, width = int(sys.argv[1]), int(sys.argv[2])
net = nn.Sequential(nn.Linear(width, width), nn.Flatten(), nn.ReLU(), nn.Linear(width, 8)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(50):
    net(torch.randn(batch, width).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "width", "why"),
    [
        (8, 1024, "the peak is in the optimizer's step, where no activations are left"),
        (65536, 64, "only the result is kept for the backward pass, in place or not"),
    ],
)
def test_a_remedy_that_does_nothing_says_why(
    tmp_path: Path, batch: int, width: int, why: str
) -> None:
    (tmp_path / "net.py").write_text(NARROW)
    inplace = remedies(tmp_path, "inplace", "python", "net.py", str(batch), str(width))["inplace"]
    assert inplace["saved_bytes"] <= 0
    assert why in inplace["reason"]
    shown = run_trainfit("show", "--explain", "plan.json", cwd=tmp_path)
    assert why in " ".join(shown.stdout.split())


def remedies(folder: Path, names: str, *command: str) -> dict[str, dict[str, Any]]:
    """Those of a plan, by name; the plan's file is plan.json."""
    words = ("plan", "--gpu", "RTX 4090", "--no-loader", "--json", "--output", "plan.json")
    done = run_trainfit(*words, f"--remedies={names}", "--", *command, cwd=folder)
    assert done.returncode == 0, done.stderr
    return {each["name"]: each for each in json_of(done)["remedies"]["items"]}
