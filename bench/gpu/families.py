"""Jobs of other people's models and trainers: transformers, peft, bitsandbytes, diffusers...

Each is written as its users write it, with random weights and made-up data, for :class:`FamilyJob`,
which stands where ``training.Job`` stands for the models of ``models.py``. A job is a function of
its case that prepares what needs no GPU and returns what to do on it; that one calls ``mark``.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu.cases import Case
from gpu.family_cases import LANGUAGE
from gpu.languages import Mark, Work, language


class FamilyJob:
    """One case, prepared on the CPU; :meth:`run` does it on the GPU, as ``training.Job``."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        self.step_seconds: list[float] = []
        self._folder = tempfile.TemporaryDirectory(prefix="truth-")
        self._work = FAMILIES[case.model](case, Path(self._folder.name))

    def run(
        self,
        mark: Mark = lambda name: None,
        around_last: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        self.kept = self._work(mark, self._timed)

    @contextlib.contextmanager
    def _timed(self) -> Any:
        started = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self.step_seconds.append(time.perf_counter() - started)


# -- other models of transformers ------------------------------------------------------------------


def trained(
    build: Callable[[], Any],
    batch: Callable[[int], Any],
    loss: Callable[[Any, Any], torch.Tensor],
    after: Callable[[Any], Callable[[], None]] | None = None,
) -> Callable[[Case, Path], Work]:
    """A training loop of ``build()`` under the case's precision; ``after`` makes what follows a
    step."""

    def prepare(case: Case, folder: Path) -> Work:
        from gpu.training import autocast, make_optimizer, to_device

        model = build()
        given = batch(case.batch)

        def work(mark: Mark, step: Callable[[], Any]) -> Any:
            model.to("cuda")
            if case.channels_last:
                model.to(memory_format=torch.channels_last)
            model.train()
            follow = after(model) if after is not None else None
            mark("moved")
            optimizer = make_optimizer(case, model)
            scaler = torch.amp.GradScaler("cuda", enabled=case.precision == "fp16")
            for _ in range(case.steps):
                with step():
                    moved = to_device(given, case.channels_last)
                    with autocast(case.precision):
                        tensor = loss(model, moved)
                    mark("forward")
                    scaler.scale(tensor).backward()
                    mark("backward")
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    if follow is not None:
                        follow()
                    mark("step")
            return model, optimizer, follow

        return work

    return prepare


def hugging(name: str, config: Callable[[Any], Any]) -> Callable[[], Any]:
    """``transformers.NAME`` of the configuration that ``config(transformers)`` gives."""

    def build() -> Any:
        import transformers

        return getattr(transformers, name)(config(transformers))

    return build


def own_loss(model: Any, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def t5_batch(size: int) -> Any:
    return {
        "input_ids": torch.randint(1, 32000, (size, 512)),
        "attention_mask": torch.ones(size, 512, dtype=torch.long),
        "labels": torch.randint(1, 32000, (size, 128)),
    }


def whisper_batch(size: int) -> Any:
    return {
        "input_features": torch.randn(size, 80, 3000),
        "labels": torch.randint(0, 50000, (size, 128)),
    }


def clip_batch(size: int) -> Any:
    return {
        "input_ids": torch.randint(0, 49000, (size, 77)),
        "attention_mask": torch.ones(size, 77, dtype=torch.long),
        "pixel_values": torch.randn(size, 3, 224, 224),
        "return_loss": torch.tensor(True),
    }


def clip_loss(model: Any, batch: Any) -> torch.Tensor:
    return model(**{**batch, "return_loss": True}).loss


def segmented(size: int) -> Any:
    return {
        "pixel_values": torch.randn(size, 3, 512, 512),
        "labels": torch.randint(0, 150, (size, 512, 512)),
    }


def detected(size: int) -> Any:
    labels = [
        {"class_labels": torch.randint(0, 90, (6,)), "boxes": torch.rand(6, 4) * 0.4 + 0.1}
        for _ in range(size)
    ]
    return {"pixel_values": torch.randn(size, 3, 640, 640), "labels": labels}


def detr() -> Any:
    import transformers

    backbone = transformers.ResNetConfig(out_features=["stage4"])
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=backbone, num_labels=91,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config)


def t5_generates(case: Case, folder: Path) -> Work:
    """Summaries by beams, as run_summarization's predict_with_generate makes them."""
    model = hugging("T5ForConditionalGeneration", t5_base)()
    batch = t5_batch(case.batch)

    def work(mark: Mark, step: Callable[[], Any]) -> Any:
        model.to("cuda", torch.bfloat16).eval()
        mark("moved")
        with step(), torch.no_grad():
            found = model.generate(
                batch["input_ids"].to("cuda"), num_beams=4, max_new_tokens=64, min_new_tokens=64
            )
        mark("step")
        return found

    return work


def t5_base(transformers: Any) -> Any:
    return transformers.T5Config(
        vocab_size=32128, d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12,
        decoder_start_token_id=0,
    )  # fmt: skip


def whisper_small(transformers: Any) -> Any:
    return transformers.WhisperConfig(
        vocab_size=51865, d_model=768, encoder_layers=12, decoder_layers=12,
        encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
    )  # fmt: skip


# -- timm, torchvision, diffusers, Lightning, PyTorch Geometric -----------------------------------


def timm_model(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: importlib.import_module("timm").create_model(name, **options)


def timm_average(model: Any) -> Callable[[], None]:
    """timm's moving average of the weights, on the GPU."""
    from timm.utils import ModelEmaV3

    average = ModelEmaV3(model, decay=0.999)
    return lambda: average.update(model)


def classified(side: int) -> Callable[[int], Any]:
    return lambda size: (torch.randn(size, 3, side, side), torch.randint(0, 1000, (size,)))


def classes_loss(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def vision(name: str, **options: Any) -> Callable[[], Any]:
    """``torchvision.models.detection`` or ``.segmentation``, without weights."""

    def build() -> Any:
        family, _, kind = name.partition(".")
        module = importlib.import_module(f"torchvision.models.{family}")
        return getattr(module, kind)(weights=None, weights_backbone=None, **options)

    return build


def instances(size: int) -> Any:
    """Images of one size with five boxes and masks each."""
    found = []
    for _ in range(size):
        corner = torch.rand(5, 2) * 200
        boxes = torch.cat((corner, corner + 50 + torch.rand(5, 2) * 150), 1)
        masks = torch.zeros(5, 480, 640, dtype=torch.uint8)
        masks[:, 100:300, 100:300] = 1
        found.append({"boxes": boxes, "labels": torch.randint(1, 90, (5,)), "masks": masks})
    return [torch.rand(3, 480, 640) for _ in range(size)], found


def instances_loss(model: Any, batch: Any) -> torch.Tensor:
    return sum(model(batch[0], batch[1]).values())  # type: ignore[return-value]


def pixels(size: int) -> Any:
    return torch.randn(size, 3, 512, 512), torch.randint(0, 21, (size, 512, 512))


def pixels_loss(model: Any, batch: Any) -> torch.Tensor:
    found = model(batch[0])
    main = torch.nn.functional.cross_entropy(found["out"], batch[1])
    aux = torch.nn.functional.cross_entropy(found["aux"], batch[1])
    return main + 0.5 * aux


def sd_unet() -> Any:
    """Stable Diffusion 1.5's U-Net (860M parameters)."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=64, cross_attention_dim=768, attention_head_dim=8,
    )  # fmt: skip


def latents(size: int) -> Any:
    return torch.randn(size, 4, 64, 64), torch.randint(0, 1000, (size,)), torch.randn(size, 77, 768)


def noise_loss(model: Any, batch: Any) -> torch.Tensor:
    sample = model(batch[0], batch[1], batch[2]).sample
    return torch.nn.functional.mse_loss(sample.float(), torch.randn_like(batch[0]))


def dit() -> Any:
    """DiT-L/2 on 32x32 latents."""
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=16, attention_head_dim=64, in_channels=4, out_channels=8,
        num_layers=24, sample_size=32, patch_size=2, num_embeds_ada_norm=1000,
    )  # fmt: skip


def dit_batch(size: int) -> Any:
    return torch.randn(size, 4, 32, 32), torch.randint(0, 1000, (size,)), torch.zeros(size).long()


def dit_loss(model: Any, batch: Any) -> torch.Tensor:
    sample = model(batch[0], timestep=batch[1], class_labels=batch[2]).sample
    return sample.float().square().mean()


def sampling(case: Case, folder: Path) -> Work:
    """DDIM with guidance, in half precision, as StableDiffusionPipeline denoises."""
    from diffusers import DDIMScheduler

    model = sd_unet()
    scheduler = DDIMScheduler()

    def work(mark: Mark, step: Callable[[], Any]) -> Any:
        model.to("cuda", torch.float16).eval()
        mark("moved")
        scheduler.set_timesteps(10)
        with torch.no_grad():
            image = torch.randn(case.batch, 4, 64, 64, device="cuda", dtype=torch.float16)
            words = torch.randn(2 * case.batch, 77, 768, device="cuda", dtype=torch.float16)
            for timestep in scheduler.timesteps[: case.steps]:
                with step():
                    found = model(torch.cat((image, image)), timestep, words).sample
                    without, guided = found.chunk(2)
                    found = without + 7.5 * (guided - without)
                    image = scheduler.step(found, timestep, image).prev_sample
                    mark("step")
        return model, image

    return work


def lightning_job(case: Case, folder: Path) -> Work:
    """A LightningModule with validation, bf16-mixed, clipping and accumulation."""
    import lightning
    import torchvision

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torchvision.models.efficientnet_v2_s()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("seen", self.model(batch[0]).argmax(1).float().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    module = Module()
    images, classes = classified(224)(4 * case.batch)
    rows = torch.utils.data.TensorDataset(images, classes)
    loader = torch.utils.data.DataLoader(rows, case.batch)

    def work(mark: Mark, step: Callable[[], Any]) -> Any:
        trainer = lightning.Trainer(
            max_epochs=1, precision="bf16-mixed", gradient_clip_val=1.0, logger=False,
            accumulate_grad_batches=2, enable_checkpointing=False, devices=1, accelerator="gpu",
            default_root_dir=folder, enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(module, loader, loader)
        mark("step")
        return trainer

    return work


def graph_job(case: Case, folder: Path) -> Work:
    """Three GATv2 layers and an ogbn-arxiv-sized graph in one piece."""
    from torch_geometric.nn import GATv2Conv

    nodes, edges = 100_000, 700_000

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = ((128, 32), (128, 32), (128, 10))
            self.layers = torch.nn.ModuleList(GATv2Conv(a, b, heads=4) for a, b in widths)

        def forward(self, x: torch.Tensor, links: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[:-1]:
                x = layer(x, links).relu()
            return self.layers[-1](x, links)

    model = Net()
    given = (
        torch.randn(nodes, 128), torch.randint(0, nodes, (2, edges)), torch.randint(0, 40, (nodes,))
    )  # fmt: skip

    def loss(net: Any, batch: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(net(batch[0], batch[1]), batch[2])

    return trained(lambda: model, lambda size: given, loss)(case, folder)


# -- all of them -----------------------------------------------------------------------------------

FAMILIES: dict[str, Callable[[Case, Path], Work]] = {
    **{name: language(job) for name, (_, job) in LANGUAGE.items()},
    "t5-base": trained(hugging("T5ForConditionalGeneration", t5_base), t5_batch, own_loss),
    "t5-base-beams": t5_generates,
    "whisper-small": trained(
        hugging("WhisperForConditionalGeneration", whisper_small), whisper_batch, own_loss
    ),
    "clip-b32": trained(
        hugging("CLIPModel", lambda transformers: transformers.CLIPConfig()), clip_batch, clip_loss
    ),
    "segformer-b0": trained(
        hugging(
            "SegformerForSemanticSegmentation",
            lambda transformers: transformers.SegformerConfig(num_labels=150),
        ),
        segmented, own_loss,
    ),
    "detr-r50": trained(detr, detected, own_loss),
    "timm-efficientnet-ema": trained(
        timm_model("efficientnet_b3"), classified(288), classes_loss, timm_average
    ),
    "timm-vit-ema": trained(
        timm_model("vit_base_patch16_224", drop_path_rate=0.1), classified(224), classes_loss,
        timm_average,
    ),
    "timm-regnet": trained(timm_model("regnety_032"), classified(224), classes_loss),
    "tv-mask-rcnn": trained(vision("detection.maskrcnn_resnet50_fpn"), instances, instances_loss),
    "tv-retinanet": trained(vision("detection.retinanet_resnet50_fpn"), instances, instances_loss),
    "tv-deeplab": trained(
        vision("segmentation.deeplabv3_resnet50", aux_loss=True), pixels, pixels_loss
    ),
    "sd-unet": trained(sd_unet, latents, noise_loss),
    "sd-sampling": sampling,
    "dit-l2": trained(dit, dit_batch, dit_loss),
    "lightning-efficientnet": lightning_job,
    "pyg-gat": graph_job,
}  # fmt: skip
