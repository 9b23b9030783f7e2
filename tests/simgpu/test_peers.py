"""Programs that nobody here wrote, unmodified, on a simulated GPU.

Tools that search a batch size by trial must end where our own answer says, and models of
other libraries must train with no change. Nothing here needs a network or weights.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from helpers_cases import slow_but, some_of

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import trainfit  # noqa: E402
from helpers_warm import OUR_PATH  # noqa: E402
from trainfit.hardware import find_gpu  # noqa: E402
from trainfit.memory.affine import AffineStream  # noqa: E402
from trainfit.memory.capacity import largest_batch  # noqa: E402
from trainfit.results.runs.recording import KINDS, Recording  # noqa: E402
from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators  # noqa: E402

# timm, transformers and others import torchvision, whose own extension does not load beside
# a CPU build of PyTorch.
define_torchvision_operators()

SMALL_GPU = "RTX 3060 12GB"
GPU = "RTX 4090"


def operators(recording: Recording) -> Counter[str]:
    """How often each operator ran, by name without ``aten.`` and overload."""
    names = (recording.strings[index] for index in recording.op_name.tolist())
    return Counter(name.removeprefix("aten.").rpartition(".")[0] for name in names)


def bytes_of(recording: Recording, kind: str) -> int:
    """Bytes of all allocations of a kind."""
    return int(recording.alloc_bytes[recording.alloc_kind == KINDS.index(kind)].sum())


# Searches by trial -------------------------------------------------------------------------------


def resnet50() -> nn.Module:
    """The model of the searches: 12 GB hold between 100 and 200 images of it."""
    return pytest.importorskip("timm").create_model("resnet50")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def images(batch: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels."""
    return (
        torch.zeros(batch, 3, 224, 224, device=device),
        torch.zeros(batch, dtype=torch.long, device=device),
    )


def record_resnet50(batch: int) -> Recording:
    with trainfit.simulate(SMALL_GPU, limited=False) as simulation:
        model = resnet50().cuda()
        optimizer = sgd(model)
        for _ in range(2):
            inputs, labels = images(batch, "cuda")
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return simulation.recording


@pytest.fixture(scope="module")
def our_answer() -> int:
    """Largest batch of ResNet-50 on the small GPU, from two recordings and no search."""
    gpu = find_gpu(SMALL_GPU)
    stream = AffineStream.between(record_resnet50(4), 4, record_resnet50(8), 8)
    return largest_batch(stream, gpu.memory_bytes, gpu.context_bytes)


@pytest.mark.slow
def test_accelerate_finds_our_batch_size(our_answer: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils import find_executable_batch_size

    tried: list[int] = []
    with trainfit.simulate(SMALL_GPU):
        accelerator = accelerate.Accelerator()
        assert accelerator.device.type == "cuda"

        @find_executable_batch_size(starting_batch_size=2 * our_answer)
        def train(batch_size: int) -> int:
            tried.append(batch_size)
            accelerator.free_memory()
            plain = resnet50()
            model, optimizer = accelerator.prepare(plain, sgd(plain))
            for _ in range(2):
                inputs, labels = images(batch_size, "cuda")
                accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
                optimizer.step()
                optimizer.zero_grad()
            return batch_size

        found = train()
    assert len(tried) > 5, "the search was by out-of-memory errors"
    # It lowers by a tenth each time, and so cannot end far below.
    assert our_answer >= found > 0.85 * our_answer


class Images(torch.utils.data.Dataset[Any]):
    """As many black images as asked for."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.image = torch.zeros(3, size, size)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.image, 0


def classifier(model: nn.Module, samples: int = 2048, size: int = 224) -> Any:
    """A LightningModule around ``model`` whose loader follows ``batch_size``."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Classifier(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.batch_size = 16

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Images(samples, size), batch_size=self.batch_size)

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Images(32, size), batch_size=16)

    return Classifier()


def lightning_trainer(folder: Path, accelerator: str, **options: Any) -> Any:
    lightning = pytest.importorskip("lightning.pytorch")
    return lightning.Trainer(
        accelerator=accelerator,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mode", "accelerator"), [("power", "gpu"), ("binsearch", "auto")])
@pytest.mark.slow
def test_lightning_finds_our_batch_size(
    our_answer: int, mode: str, accelerator: str, tmp_path: Path
) -> None:
    pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.tuner import Tuner

    with trainfit.simulate(SMALL_GPU):
        trainer = lightning_trainer(tmp_path, accelerator)
        assert trainer.strategy.root_device == torch.device("cuda", 0)
        found = Tuner(trainer).scale_batch_size(
            classifier(resnet50()), mode=mode, init_val=16, steps_per_trial=2
        )
    if mode == "power":
        assert found == 2 ** math.floor(math.log2(our_answer))
    else:
        # Its own margin of 5% is taken off in the end, and a trial that failed leaves less room
        # for the next one than a fresh process has (which is what our answer is for).
        assert our_answer >= found > 0.85 * our_answer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_lightning_trains_and_validates(precision: str, tmp_path: Path) -> None:
    """Validation runs in inference mode, where composite operators arrive whole."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    model(torch.zeros(1, 3, 32, 32))
    with trainfit.simulate(GPU) as simulation:
        trainer = lightning_trainer(tmp_path, "gpu", max_steps=3, precision=precision)
        trainer.fit(classifier(model, 48, 32))
        assert trainer.global_step == 3
        assert trainer.callback_metrics["val_loss"].device.type in {"cuda", "cpu"}
    ran = operators(simulation.recording)
    assert simulation.steps == 3
    assert ran["convolution"] > 3
    assert not ran["conv2d"] and not ran["linear"]


# Hugging Face ------------------------------------------------------------------------------------


BERT_SIZES = {
    "small": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    },
    "base": {},
}


def train_bert(size: str, attention: str, bf16: bool, padded: bool = False) -> Any:
    """Three steps of BERT; returns the simulation and the peak of allocated bytes."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(attn_implementation=attention, **BERT_SIZES[size])
    with trainfit.simulate(GPU) as simulation:
        model = transformers.BertForSequenceClassification(config).to("cuda").train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(3):
            mask = torch.ones(8, 128, dtype=torch.long)
            if padded:
                mask[0, 100:] = 0
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
                loss = model(
                    input_ids=torch.randint(0, 1000, (8, 128)).cuda(),
                    attention_mask=mask.cuda(),
                    labels=torch.zeros(8, dtype=torch.long).cuda(),
                ).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert math.isfinite(loss.item())
        peak = torch.cuda.max_memory_allocated()
    assert simulation.steps == 3
    return simulation, peak


@pytest.mark.parametrize("size", BERT_SIZES)
@pytest.mark.slow
def test_bert_trains(size: str) -> None:
    peaks, kept = {}, {}
    for attention in ("sdpa", "eager"):
        for bf16 in (False, True):
            simulation, peaks[attention, bf16] = train_bert(size, attention, bf16)
            assert simulation.recording.header["assumptions"] == {}
            fused = [name for name in operators(simulation.recording) if "attention" in name]
            assert bool(fused) == (attention == "sdpa")
            kept[attention, bf16] = bytes_of(simulation.recording, "activation")
    if size == "base":  # The peak of the small one is its embedding's gradient.
        # At the peaks the optimizer runs: they differ by how blocks were split before.
        assert max(peaks.values()) < 1.02 * min(peaks.values())
    for bf16 in (False, True):
        # Eager attention keeps the scores.
        assert kept["sdpa", bf16] < kept["eager", bf16]
    for attention in ("sdpa", "eager"):
        assert kept[attention, True] < kept[attention, False]


@pytest.mark.parametrize(
    ("bf16", "padded", "backend"),
    [(False, False, "efficient"), (True, False, "flash"), (True, True, "efficient")],
)
def test_bert_takes_the_branch_of_its_mask(bf16: bool, padded: bool, backend: str) -> None:
    """A mask of ones is left out, which the model reads from its values; flash takes no mask."""
    simulation, _ = train_bert("small", "sdpa", bf16, padded)
    layers, steps = 2, 3
    ran = operators(simulation.recording)
    assert ran[f"_scaled_dot_product_{backend}_attention"] == layers * steps
    assert ran[f"_scaled_dot_product_{backend}_attention_backward"] == layers * steps


class Sentences(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.arange(32),
            "attention_mask": torch.ones(32, dtype=torch.long),
            "labels": torch.tensor(index % 2),
        }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"bf16": True}, marks=pytest.mark.slow),
        {"fp16": True},
        {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1},
    ],
    ids=["fp32", "bf16", "fp16", "accumulation"],
)
def test_transformers_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.BertConfig(**BERT_SIZES["small"], vocab_size=500)
    with trainfit.simulate(GPU) as simulation:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=8,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        assert arguments.device == torch.device("cuda", 0)
        trainer = transformers.Trainer(
            model=transformers.BertForSequenceClassification(config),
            args=arguments,
            train_dataset=Sentences(),
            eval_dataset=Sentences(),
        )
        assert trainer.train().global_step == 3
        assert next(trainer.model.parameters()).is_cuda
    assert simulation.steps == 3


# LeRobot -----------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("lerobot") is None, reason="LeRobot is not installed")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.slow
def test_lerobot_act_needs_what_the_example_needs(precision: str) -> None:
    for name in ("einops", "draccus", "torchvision"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"LeRobot's ACT needs {name}")
    script = Path(__file__).parents[1] / "helpers_lerobot.py"
    done = subprocess.run(
        [sys.executable, str(script), precision],
        capture_output=True,
        text=True,
        timeout=300,
        env=subprocess_environment(),
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    for policy in figures.values():
        assert policy["parameters"] == 51_602_330
        assert policy["steps"] == 3
        assert policy["peak_allocated_bytes"] == policy["peak_allocated_seen_bytes"]
    # The example normalises the images inside the model, LeRobot before it: in float32 both
    # are kept for backward, 77 MiB more.
    peaks = {name: policy["peak_allocated_bytes"] for name, policy in figures.items()}
    assert peaks["lerobot"] == pytest.approx(peaks["example"], rel=0.02)


def subprocess_environment() -> dict[str, str]:
    """This environment, with the package under test importable."""
    return {**os.environ, "PYTHONPATH": OUR_PATH, "HF_HUB_OFFLINE": "1"}


# Image models ------------------------------------------------------------------------------------


def train_image_model(model: nn.Module, size: int, bf16: bool) -> None:
    """Two steps; every parameter has a gradient, and is counted to the byte."""
    with trainfit.simulate(GPU) as simulation:
        model = model.cuda().train()
        optimizer = sgd(model)
        for step in range(2):
            inputs = torch.zeros(4, 3, size, size, device="cuda")
            labels = torch.zeros(4, dtype=torch.long, device="cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16):
                output = model(inputs)
                loss = nn.functional.cross_entropy(output, labels)
            loss.backward()
            missing = [name for name, p in model.named_parameters() if p.grad is None]
            assert not missing, step
            optimizer.step()
            optimizer.zero_grad()
        nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    recording = simulation.recording
    assert simulation.steps == 2
    assert bytes_of(recording, "parameter") == nbytes
    assert bytes_of(recording, "optimizer_state") == nbytes
    assert bytes_of(recording, "gradient") == 2 * nbytes


@pytest.mark.parametrize(
    "bf16", [pytest.param(False, marks=pytest.mark.slow), True], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize(
    "architecture",
    slow_but(
        [
            "resnet50",
            "vit_small_patch16_224",
            "swin_tiny_patch4_window7_224",
            "convnext_tiny",
            "efficientnet_b0",
            "levit_128s",
            "mobilenetv3_large_100",
        ],
        *("resnet50", "vit_small_patch16_224", "levit_128s"),
    ),
)
def test_timm(architecture: str, bf16: bool) -> None:
    timm = pytest.importorskip("timm")
    train_image_model(timm.create_model(architecture), 224, bf16)


@pytest.mark.parametrize("bf16", some_of([False, True], 1))
def test_torchvision_resnet18(bf16: bool) -> None:
    models = pytest.importorskip("torchvision.models")
    train_image_model(models.resnet18(), 224, bf16)


@pytest.mark.slow
def test_torchvision_detection() -> None:
    """Needs torchvision's own operators, which its extension defines where it loads."""
    detection = pytest.importorskip("torchvision.models.detection")
    if not hasattr(torch.ops.torchvision, "roi_align"):
        pytest.skip("torchvision's extension does not load beside this PyTorch")
    with trainfit.simulate(GPU) as simulation:
        model = detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None).cuda()
        optimizer = sgd(model)
        boxes = torch.tensor([[10.0, 10.0, 100.0, 100.0]])
        targets = [{"boxes": boxes.cuda(), "labels": torch.ones(1, dtype=torch.long).cuda()}]
        losses = model([torch.zeros(3, 256, 256).cuda()], targets)
        sum(losses.values()).backward()
        optimizer.step()
    assert simulation.steps == 1
