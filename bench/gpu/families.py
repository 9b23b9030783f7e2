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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu.cases import Case

Mark = Callable[[str], None]
#: What is done on the GPU; the second argument is entered around each step.
Work = Callable[[Mark, Callable[[], Any]], None]


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


# -- causal language models ------------------------------------------------------------------------

#: transformers' configurations, as published with the weights (or, tiny-mixtral, of that form).
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-1b": ("llama", {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "tie_word_embeddings": True}),
    "llama-8b": ("llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072}),
    "mistral-7b": ("mistral", {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 32768, "sliding_window": None}),
    "qwen-0.5b": ("qwen2", {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "max_position_embeddings": 32768, "tie_word_embeddings": True}),
    "qwen3-0.6b": ("qwen3", {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "max_position_embeddings": 40960, "tie_word_embeddings": True}),
    "gemma2-2b": ("gemma2", {
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 8192}),
    "mixtral-small": ("mixtral", {
        "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3584,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
        "num_local_experts": 8, "max_position_embeddings": 8192}),
    "smollm-135m": ("llama", {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "max_position_embeddings": 8192, "tie_word_embeddings": True}),
}  # fmt: skip


@dataclass(frozen=True)
class Language:
    """A job on a causal language model of ``shape``, samples of ``tokens``.

    ``weights`` is their precision, or nf4 (double quantization) or int8; ``rank`` above 0 trains
    adapters of that rank; ``loss``: of the model, in chunks, or by liger's kernels.
    """

    shape: str
    tokens: int
    weights: str = "bf16"
    amp: bool = False
    rank: int = 0
    checkpointing: str = ""
    attention: str = "sdpa"
    optimizer: str = "default"
    loss: str = "model"
    trainer: tuple[tuple[str, Any], ...] | None = None
    new_tokens: int = 0
    generation: tuple[tuple[str, Any], ...] = ()


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def language(job: Language) -> Callable[[Case, Path], Work]:
    def prepare(case: Case, folder: Path) -> Work:
        import transformers  # noqa: F401  as long as the GPU is not asked for

        if job.rank:
            importlib.import_module("peft")
        if job.loss == "liger":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama()
        if job.weights in ("nf4", "int8"):
            saved(job, folder)

        def work(mark: Mark, step: Callable[[], Any]) -> Any:
            model = adapted(job, language_model(job, folder))
            mark("moved")
            if job.new_tokens:
                return generate(job, case, model, mark, step)
            if job.trainer is not None:
                return by_trainer(job, case, model, mark, folder)
            return by_loop(job, case, model, mark, step)

        return work

    return prepare


def configuration(job: Language) -> Any:
    from transformers import AutoConfig

    kind, shape = SHAPES[job.shape]
    return AutoConfig.for_model(kind, **shape)


def saved(job: Language, folder: Path) -> None:
    """A checkpoint of zeros, to be quantized as it is loaded."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(job), dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for each in model.parameters():
        each.data.zero_()
    model.tie_weights()
    model.save_pretrained(folder)


def language_model(job: Language, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if job.weights in ("nf4", "int8"):
        four = job.weights == "nf4"
        quantized = (
            BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            )
            if four
            else BitsAndBytesConfig(load_in_8bit=True)
        )  # fmt: skip
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantized, device_map={"": 0}, dtype=torch.bfloat16,
            attn_implementation=job.attention,
        )  # fmt: skip
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(
            configuration(job), dtype=_DTYPES[job.weights], attn_implementation=job.attention
        )


def adapted(job: Language, model: Any) -> Any:
    """Checkpointing and adapters, as the job has them."""
    options = {"use_reentrant": job.checkpointing == "reentrant"}
    if job.weights in ("nf4", "int8") and job.rank:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=bool(job.checkpointing),
            gradient_checkpointing_kwargs=options,
        )  # fmt: skip
    elif job.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if job.rank:
            model.enable_input_require_grads()
    if job.rank:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=job.rank, lora_alpha=2 * job.rank, lora_dropout=0.05, target_modules="all-linear",
            task_type="CAUSAL_LM",
        )  # fmt: skip
        model = get_peft_model(model, lora)
    return model


def tokens_of(job: Language, batch: int) -> torch.Tensor:
    return torch.randint(0, 32000, (batch, job.tokens))


def optimizers(job: Language, model: Any) -> list[torch.optim.Optimizer]:
    """One, or with ``backward`` one of each parameter, stepping as its gradient is there."""
    trained = [each for each in model.parameters() if each.requires_grad]
    if job.optimizer in ("8bit", "paged8"):
        import bitsandbytes

        kinds = {"8bit": "AdamW8bit", "paged8": "PagedAdamW8bit"}
        return [getattr(bitsandbytes.optim, kinds[job.optimizer])(trained, lr=1e-5)]
    if job.optimizer == "backward":
        owners = {each: torch.optim.AdamW([each], lr=1e-5, foreach=False) for each in trained}

        def hook(parameter: torch.Tensor) -> None:
            owners[parameter].step()
            owners[parameter].zero_grad()

        for each in trained:
            each.register_post_accumulate_grad_hook(hook)
        return []
    kind = {"default": {}, "fused": {"fused": True}, "loop": {"foreach": False}}[job.optimizer]
    return [torch.optim.AdamW(trained, lr=1e-5, **kind)]


def by_loop(job: Language, case: Case, model: Any, mark: Mark, step: Callable[[], Any]) -> Any:
    model.train()
    all_of = optimizers(job, model)
    trained = [each for each in model.parameters() if each.requires_grad]
    for _ in range(case.steps):
        with step():
            tokens = tokens_of(job, case.batch).to("cuda")
            with torch.autocast("cuda", torch.bfloat16, enabled=job.amp):
                if job.loss == "chunked":
                    loss = chunked_loss(model, tokens)
                else:
                    loss = model(input_ids=tokens, labels=tokens).loss
            mark("forward")
            loss.backward()
            mark("backward")
            if all_of:
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
            for each in all_of:
                each.step()
                each.zero_grad()
            mark("step")
    return model, all_of


def chunked_loss(model: Any, tokens: torch.Tensor, chunk: int = 512) -> torch.Tensor:
    """Cross-entropy of ``chunk`` positions at a time, whose logits are recomputed."""
    from torch.nn.functional import cross_entropy
    from torch.utils.checkpoint import checkpoint

    hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1].flatten(0, 1)
    labels = tokens[:, 1:].flatten()

    def part(states: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model.lm_head(states).float(), of, reduction="sum")

    parts = [
        checkpoint(part, a, b, use_reentrant=False)
        for a, b in zip(hidden.split(chunk), labels.split(chunk), strict=True)
    ]
    return torch.stack(parts).sum() / len(labels)


def by_trainer(job: Language, case: Case, model: Any, mark: Mark, folder: Path) -> Any:
    """transformers' Trainer with its defaults and what the job says."""
    from transformers import Trainer, TrainingArguments

    options = dict(job.trainer or ())
    evaluates = options.pop("evaluates", False)
    arguments = TrainingArguments(
        output_dir=str(folder / "out"), per_device_train_batch_size=case.batch,
        per_device_eval_batch_size=case.batch, max_steps=case.steps, report_to=[],
        save_strategy="no", **options,
    )  # fmt: skip
    tokens = tokens_of(job, case.batch * case.steps)
    rows = [{"input_ids": each, "labels": each} for each in tokens]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    if evaluates:
        trainer.evaluate()  # keeps no predictions unless there are metrics
        mark("step")
        trainer.compute_metrics = lambda found: {"n": len(found.predictions)}
        trainer.evaluate()
    else:
        trainer.train()
    mark("step")
    return trainer


def generate(job: Language, case: Case, model: Any, mark: Mark, step: Callable[[], Any]) -> Any:
    model.eval()
    for _ in range(2):
        with step(), torch.no_grad():
            tokens = tokens_of(job, case.batch).to("cuda")
            found = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
                max_new_tokens=job.new_tokens, min_new_tokens=job.new_tokens,
                pad_token_id=0, **dict(job.generation),
            )  # fmt: skip
            mark("step")
    return model, found


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
                        found = loss(model, moved)
                    mark("forward")
                    scaler.scale(found).backward()
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
    found = model(batch[0], batch[1], batch[2]).sample
    return torch.nn.functional.mse_loss(found.float(), torch.randn_like(batch[0]))


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
    found = model(batch[0], timestep=batch[1], class_labels=batch[2]).sample
    return found.float().square().mean()


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
            for at in scheduler.timesteps[: case.steps]:
                with step():
                    found = model(torch.cat((image, image)), at, words).sample
                    without, guided = found.chunk(2)
                    found = without + 7.5 * (guided - without)
                    image = scheduler.step(found, at, image).prev_sample
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

_TRAINER_DEFAULTS: tuple[tuple[str, Any], ...] = ()
_TRAINER_USUAL = (("bf16", True), ("gradient_checkpointing", True))

LANGUAGE: dict[str, tuple[int, Language]] = {
    "llama1b-full-fused": (2, Language("llama-1b", 2048, optimizer="fused")),
    "llama1b-full-checkpointing": (
        1, Language("llama-1b", 4096, checkpointing="nonreentrant")),
    "llama1b-full-amp": (1, Language("llama-1b", 1024, weights="fp32", amp=True)),
    "llama1b-full-8bit": (
        2, Language("llama-1b", 1024, optimizer="8bit", checkpointing="reentrant")),
    "llama1b-full-backward": (
        1, Language("llama-1b", 2048, optimizer="backward", checkpointing="nonreentrant")),
    "llama1b-full-chunked": (
        2, Language("llama-1b", 2048, loss="chunked", checkpointing="nonreentrant")),
    "llama1b-full-liger": (2, Language("llama-1b", 2048, loss="liger", optimizer="loop")),
    "llama1b-lora-eager": (1, Language("llama-1b", 2048, rank=16, attention="eager")),
    "qwen05b-trainer-defaults": (
        2, Language("qwen-0.5b", 512, weights="fp32", trainer=_TRAINER_DEFAULTS)),
    "qwen05b-trainer-bf16": (4, Language("qwen-0.5b", 1024, "fp32", trainer=_TRAINER_USUAL)),
    "qwen05b-trainer-evaluates": (
        4, Language("qwen-0.5b", 512, trainer=(("evaluates", True),))),
    "qwen3-06b-full": (4, Language("qwen3-0.6b", 1024, optimizer="loop")),
    "mistral7b-lora": (
        1, Language("mistral-7b", 4096, rank=16, checkpointing="nonreentrant")),
    "llama8b-lora": (1, Language("llama-8b", 8192, rank=8, checkpointing="reentrant")),
    "gemma2-lora": (1, Language("gemma2-2b", 2048, rank=8, checkpointing="nonreentrant")),
    "gemma2-lora-eager": (
        1, Language("gemma2-2b", 2048, rank=8, checkpointing="reentrant", attention="eager")),
    "mixtral-full": (2, Language("mixtral-small", 1024)),
    "smollm-full": (16, Language("smollm-135m", 512, optimizer="fused")),
    "llama1b-qlora": (
        2, Language("llama-1b", 2048, weights="nf4", rank=16, checkpointing="nonreentrant",
                    optimizer="paged8")),
    "llama1b-qlora-plain": (2, Language("llama-1b", 512, weights="nf4", rank=16)),
    "llama1b-int8-lora": (
        2, Language("llama-1b", 1024, weights="int8", rank=16, checkpointing="nonreentrant")),
    "llama8b-generate": (4, Language("llama-8b", 512, new_tokens=128)),
    "llama8b-generate-long": (1, Language("llama-8b", 8192, new_tokens=16)),
    "llama1b-generate-static": (
        8, Language("llama-1b", 512, new_tokens=128,
                    generation=(("cache_implementation", "static"), ("disable_compile", True)))),
    "llama1b-generate-beams": (
        2, Language("llama-1b", 512, new_tokens=64, generation=(("num_beams", 4),))),
    "llama1b-nf4-generate": (4, Language("llama-1b", 512, weights="nf4", new_tokens=64)),
}  # fmt: skip

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

_ADAMW: dict[str, Any] = {"optimizer": "adamw"}

CASES: tuple[Case, ...] = (
    *(Case(f"{name}-b{batch}", name, batch) for name, (batch, _) in LANGUAGE.items()),
    *(
        Case(f"{name}-b{batch}", name, batch, **options)
        for name, batch, options in (
            ("t5-base", 8, {"precision": "bf16", **_ADAMW}),
            ("t5-base-beams", 4, {}),
            ("whisper-small", 4, {"precision": "fp16", **_ADAMW}),
            ("clip-b32", 32, {"precision": "bf16", "kind": "fused", **_ADAMW}),
            ("segformer-b0", 4, _ADAMW),
            ("detr-r50", 2, _ADAMW),
            ("timm-efficientnet-ema", 32,
             {"precision": "bf16", "channels_last": True, "optimizer": "momentum"}),
            ("timm-vit-ema", 32, {"precision": "bf16", **_ADAMW}),
            ("timm-regnet", 32, {"precision": "fp16", "channels_last": True}),
            ("tv-mask-rcnn", 2, {}),
            ("tv-retinanet", 2, {"precision": "bf16"}),
            ("tv-deeplab", 4, {"precision": "bf16"}),
            ("sd-unet", 2, {"precision": "bf16", **_ADAMW}),
            ("sd-sampling", 2, {}),
            ("dit-l2", 16, {"precision": "bf16", "kind": "fused", **_ADAMW}),
            ("lightning-efficientnet", 16, {}),
            ("pyg-gat", 1, _ADAMW),
        )
    ),
)  # fmt: skip
