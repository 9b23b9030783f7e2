"""Small models of the kinds that large ones are, trained or generating as their users do it.

``large_model.py DATA KIND --batch-size N``: ``DATA`` is what ``large_model_data.py`` made.
"""

import sys

import torch
import transformers
from common import device, options

folder, kind = sys.argv.pop(1), sys.argv.pop(1)
args = options(4)
gpu = device()
on_gpu = torch.cuda.is_available()
LLAMA = {
    "vocab_size": 2000, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip


def trained(model, sample, count=512, of=transformers.Trainer, **more):
    """By Transformers' Trainer on ``count`` of such samples."""
    kinds = {
        transformers.Trainer: transformers.TrainingArguments,
        transformers.Seq2SeqTrainer: transformers.Seq2SeqTrainingArguments,
    }
    arguments = kinds[of](
        "out", per_device_train_batch_size=args.batch_size, report_to=[], save_strategy="no",
        bf16=on_gpu, use_cpu=not on_gpu, **more,
    )  # fmt: skip
    of(model, arguments, train_dataset=[sample() for _ in range(count)]).train()


def tokens(length=64):
    row = torch.randint(4, 2000, (length,))
    return {"input_ids": row, "labels": row}


if kind == "liger":
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    trained(model, tokens, use_liger_kernel=on_gpu)
elif kind == "mixtral":
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **{**LLAMA, "intermediate_size": 256, "num_hidden_layers": 2},
            num_local_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip
    trained(model, tokens)
elif kind == "mamba":
    trained(
        transformers.MambaForCausalLM(
            transformers.MambaConfig(
                vocab_size=2000, hidden_size=128, state_size=16, num_hidden_layers=2
            )
        ),
        tokens,
    )
elif kind == "whisper":
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=2000, d_model=128, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256,
            decoder_ffn_dim=256, max_source_positions=300, pad_token_id=0, bos_token_id=2,
            eos_token_id=3, decoder_start_token_id=2,
        )
    )  # fmt: skip
    trained(
        model,
        lambda: {"input_features": torch.randn(80, 600), "labels": torch.randint(4, 2000, (24,))},
        of=transformers.Seq2SeqTrainer,
    )
elif kind == "smolvlm":
    model = transformers.SmolVLMForConditionalGeneration(
        transformers.SmolVLMConfig(
            image_token_id=5, scale_factor=2, pad_token_id=0,
            vision_config={
                "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
                "num_attention_heads": 4, "image_size": 64, "patch_size": 16,
            },
            text_config={**LLAMA, "model_type": "llama"},
        )
    )  # fmt: skip

    def picture():
        row = tokens()
        row["input_ids"][4:8] = 5  # 16 patches, 4 of them a token
        return {**row, "pixel_values": torch.rand(1, 3, 64, 64)}

    trained(model, picture)
elif kind == "fsdp":
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).to(gpu)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = torch.utils.data.TensorDataset(torch.randint(4, 2000, (512, 64)))
    for (batch,) in torch.utils.data.DataLoader(rows, args.batch_size, shuffle=True):
        loss = model(input_ids=batch.to(gpu), labels=batch.to(gpu)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.destroy_process_group()
elif kind in ("grpo-lora", "dpo-qlora"):
    import peft
    import trl
    from datasets import load_dataset

    adapters = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    common = {
        "output_dir": "out", "per_device_train_batch_size": args.batch_size, "report_to": [],
        "bf16": on_gpu, "use_cpu": not on_gpu,
    }  # fmt: skip
    if kind == "grpo-lora":
        trl.GRPOTrainer(
            f"{folder}/model",
            reward_funcs=lambda completions, **_: [-float(len(each)) for each in completions],
            args=trl.GRPOConfig(num_generations=4, max_completion_length=64, **common),
            train_dataset=load_dataset(f"{folder}/prompts", split="train"),
            peft_config=adapters,
        ).train()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            f"{folder}/model",
            dtype=torch.float32,
            quantization_config=transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.bfloat16,
            ),
        )  # fmt: skip
        trl.DPOTrainer(
            model,
            args=trl.DPOConfig(optim="paged_adamw_8bit" if on_gpu else "adamw_torch", **common),
            train_dataset=load_dataset(f"{folder}/pairs", split="train"),
            processing_class=transformers.AutoTokenizer.from_pretrained(f"{folder}/model"),
            peft_config=adapters,
        ).train()
elif kind == "beams":
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=2000, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4,
            decoder_start_token_id=0,
        )
    )  # fmt: skip
    model.to(gpu).eval()
    source = torch.randint(4, 2000, (args.batch_size, 100), device=gpu)
    model.generate(source, num_beams=4, min_new_tokens=200, max_new_tokens=200)
elif kind == "assisted":
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).to(gpu).eval()
    draft = transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 1})
    draft = transformers.LlamaForCausalLM(draft).to(gpu).eval()
    for _ in range(2):
        prompt = torch.randint(4, 2000, (1, 32), device=gpu)
        model.generate(
            prompt, assistant_model=draft, do_sample=False, max_new_tokens=96, eos_token_id=None
        )
