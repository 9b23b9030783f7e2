"""One fine-tuning job on the simulated GPU, in a process of its own: what it allocates at most.

    python _llm_job.py JOB      a JSON object, the fields of Job; prints one JSON object

Models are made from their published shapes, without weights and in the GPU's memory, so that a job
of billions of parameters needs little of this machine's. The loop is that of the Trainer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass
from typing import Any, Final

import _bench  # noqa: F401  (the trainfit of this checkout)

#: transformers' configuration of each model, as published with its weights.
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "mistralai/Mistral-7B-v0.1": (
        "mistral",
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "max_position_embeddings": 32768, "sliding_window": 4096},
    ),
    "ibm/PowerLM-3b": (
        "granite",
        {"vocab_size": 49152, "hidden_size": 2304, "intermediate_size": 9216,
         "num_hidden_layers": 40, "num_attention_heads": 36, "num_key_value_heads": 36,
         "max_position_embeddings": 4096, "tie_word_embeddings": True},
    ),
    "meta-llama/Llama-3.2-3B": (
        "llama",
        {"vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192,
         "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
         "max_position_embeddings": 131072, "tie_word_embeddings": True},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class FineTuningJob:
    """A job: ``gpus`` above 1 shards by FSDP; ``rank`` above 0 trains adapters of that rank.

    ``loop``: "trainer" (Transformers' Trainer with gradient checkpointing) or "peft" (PEFT's method
    comparison, no checkpointing). Weights are bfloat16 in both, adapters float32.
    """

    model: str
    gpu: str
    gpus: int
    batch: int
    tokens: int
    rank: int
    loop: str = "trainer"
    steps: int = 3


def main(text: str) -> int:
    warnings.filterwarnings("ignore")
    job = FineTuningJob(**json.loads(text))
    if job.gpus > 1:
        variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(job.gpus)}
        os.environ |= variables | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    import trainfit
    from trainfit.hardware.gpu_topology import find_gpus
    from trainfit.memory.replay import Stream, replay

    gpu = find_gpus(f"{job.gpus}x {job.gpu}" if job.gpus > 1 else job.gpu)
    with trainfit.simulate(gpu, limited=False) as simulation, tempfile.TemporaryDirectory() as out:
        model = _model(job)
        others = _estimates(model, job.gpus)
        (_trainer if job.loop == "trainer" else _loop)(job, model, out)
    outcome = replay(Stream.of(simulation.recording))
    found = {"allocated": outcome.peak_allocated, "reserved": outcome.peak_reserved, **others}
    print("\n" + json.dumps(found))
    return 0


def _estimates(model: Any, gpus: int) -> dict[str, int]:
    """Bytes by the rules of others: Accelerate's estimate-memory for Adam (four times the
    weights), and DeepSpeed's for ZeRO-3 (18 bytes a parameter over the GPUs, and 4 of its largest
    layer)."""
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    layers = [
        sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()
    ]
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return {"accelerate": 4 * sum(sizes), "deepspeed": 4 * max(layers) + 18 * numbers // gpus}


def _model(job: FineTuningJob) -> Any:
    """In bfloat16 on the GPU, with adapters where the job has them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, shape = MODELS[job.model]
    config = AutoConfig.for_model(kind, **shape, use_cache=False)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, torch_dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    if job.rank:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if job.loop == "trainer" else None
        lora = LoraConfig(r=job.rank, lora_alpha=job.rank, target_modules=targets,
                          lora_dropout=0.1 if targets else 0.0, task_type="CAUSAL_LM")  # fmt: skip
        model = get_peft_model(model, lora)  # whose own weights are float32
    return model


def _trainer(job: FineTuningJob, model: Any, out: str) -> None:
    """fms-hf-tuning's defaults: packed samples, gradient checkpointing, AdamW, full shards."""
    import torch
    from transformers import Trainer, TrainingArguments

    sharded: dict[str, Any] = {}
    if job.gpus > 1:
        layer = type(_layers(model)[0]).__name__
        sharded = {"fsdp": "full_shard auto_wrap", "fsdp_config": {
            "transformer_layer_cls_to_wrap": [layer], "backward_prefetch": "backward_pre",
            "version": 1, "use_orig_params": False, "sync_module_states": False}}  # fmt: skip
    if job.rank:
        model.enable_input_require_grads()
    arguments = TrainingArguments(
        output_dir=out, per_device_train_batch_size=job.batch, max_steps=job.steps,
        gradient_checkpointing=True, report_to=[], save_strategy="no", logging_steps=10,
        weight_decay=0.01, dataloader_pin_memory=False, optim="adamw_torch", **sharded)  # fmt: skip
    tokens = torch.zeros(job.tokens, dtype=torch.long)
    rows = [{"input_ids": tokens, "labels": tokens}] * (job.batch * job.gpus * job.steps)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    if sharded and job.rank:  # as fms-hf-tuning does: adapters are units of their own
        from peft.utils.other import fsdp_auto_wrap_policy

        trainer.accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    trainer.train()


def _layers(model: Any) -> Any:
    while not hasattr(model, "layers"):
        model = model.model
    return model.layers


def _loop(job: FineTuningJob, model: Any, _: str) -> None:
    """PEFT's method comparison, on batches of its longest samples."""
    import torch

    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    model.train()
    tokens = torch.zeros((job.batch, job.tokens), dtype=torch.long, device="cuda")
    mask = torch.ones_like(tokens)
    for _ in range(job.steps):
        optimizer.zero_grad()
        model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
