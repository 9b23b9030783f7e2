"""Jobs on transformers' causal language models: trained whole or by adapters, and generating."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu.cases import Case
from gpu.family_cases import SHAPES, Language

Mark = Callable[[str], None]
#: What is done on the GPU; the second argument is entered around each step.
Work = Callable[[Mark, Callable[[], Any]], None]

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
    for parameter in model.parameters():
        parameter.data.zero_()
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
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if job.optimizer in ("8bit", "paged8"):
        import bitsandbytes

        kinds = {"8bit": "AdamW8bit", "paged8": "PagedAdamW8bit"}
        return [getattr(bitsandbytes.optim, kinds[job.optimizer])(trained, lr=1e-5)]
    if job.optimizer == "backward":
        owners = {
            parameter: torch.optim.AdamW([parameter], lr=1e-5, foreach=False)
            for parameter in trained
        }

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
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
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
            for optimizer in all_of:
                optimizer.step()
                optimizer.zero_grad()
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
    rows = [{"input_ids": token, "labels": token} for token in tokens]
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
