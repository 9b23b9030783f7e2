"""GPT-2 with transformers' Trainer, gradients accumulated over four micro-batches."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
args = parser.parse_args()

torch.manual_seed(0)
tokens = torch.randint(0, 5000, (4096, 128))
rows = [{"input_ids": row, "labels": row} for row in tokens]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=5000, n_positions=128, n_embd=256, n_layer=4, n_head=4)
)
Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        report_to=[],
        bf16=torch.cuda.is_available(),
    ),
    train_dataset=rows,
).train()
