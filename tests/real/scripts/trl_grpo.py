"""trl's GRPOTrainer with a reward for short answers."""

import sys

import torch
from common import options
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

folder = sys.argv.pop(1)
args = options(8)
trainer = GRPOTrainer(
    model=f"{folder}/model",
    reward_funcs=lambda completions, **_: [-float(len(text)) for text in completions],
    args=GRPOConfig(
        output_dir="grpo",
        per_device_train_batch_size=args.batch_size,
        num_generations=4,
        max_completion_length=24,
        report_to=[],
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=load_dataset(f"{folder}/prompts", split="train"),
)
trainer.train()
